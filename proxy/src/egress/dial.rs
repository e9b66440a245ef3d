//! Dialling: only with a permit for these very addresses, and only with the receipt of its record.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use audit::Receipt;
use rules::{DialPermit, Reason};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::report::metrics;
use crate::report::refusal::Refusal;

/// Addresses of a host that are tried before it counts as unreachable.
pub(crate) const MAX_DIAL_ADDRESSES: usize = 4;

/// How long an address that does not answer holds up the next: one family may be dead.
const NEXT_ADDRESS_TIMEOUT: Duration = Duration::from_secs(2);

/// Connects to the first address of the permit that answers, each within `patience`.
pub(crate) async fn dial(
    permit: &DialPermit,
    _receipt: &Receipt,
    mark: Option<u32>,
    patience: Duration,
) -> Result<(TcpStream, SocketAddr), Refusal> {
    let port = permit.permit().port().ok_or(Reason::PortNotListed)?;
    let mut refusal = Refusal::from(Reason::UpstreamUnreachable);
    for (at, address) in permit.addresses().iter().take(MAX_DIAL_ADDRESSES).enumerate() {
        let address = SocketAddr::new(*address, port);
        let patience = connect_timeout(permit, at, patience);
        let started = Instant::now();
        match timeout(patience, connect(address, mark)).await {
            Ok(Ok(stream)) => {
                metrics::observe_connect(started.elapsed());
                return Ok((stream, address));
            }
            Ok(Err(error)) => refusal = refusal.with_detail(format!("{address}: {error}")),
            Err(_) => {
                refusal = Refusal::from(Reason::UpstreamTimeout)
                    .with_detail(format!("{address} does not answer"));
            }
        }
    }
    Err(refusal)
}

/// How long one address is waited for: not long, while there are others.
pub(crate) fn connect_timeout(permit: &DialPermit, at: usize, patience: Duration) -> Duration {
    let last = at + 1 >= permit.addresses().len().min(MAX_DIAL_ADDRESSES);
    if last { patience } else { patience.min(NEXT_ADDRESS_TIMEOUT) }
}

async fn connect(address: SocketAddr, mark: Option<u32>) -> io::Result<TcpStream> {
    let socket = match address.ip() {
        IpAddr::V4(_) => TcpSocket::new_v4(),
        IpAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    set_socket_options(&socket, mark)?;
    socket.connect(address).await
}

/// What all of our own sockets have: the mark by which the firewall knows them, and no waiting for more.
pub(crate) fn set_socket_options(socket: &TcpSocket, mark: Option<u32>) -> io::Result<()> {
    socket.set_nodelay(true)?;
    mark.map_or(Ok(()), |mark| socket2::SockRef::from(socket).set_mark(mark))
}
