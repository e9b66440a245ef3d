//! Dialling: only with a permit for these addresses, and only with the receipt of its record.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use audit::Receipt;
use rules::{DialPermit, Reason};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::egress::connect::{CountedDialler, DialledConnection};
use crate::report::metrics;
use crate::report::refusal::Refusal;

/// Addresses of a host that are tried.
pub(crate) const MAX_DIAL_ADDRESSES: usize = 4;

/// Connect timeout while other addresses remain; one address family may be unreachable.
const NEXT_ADDRESS_TIMEOUT: Duration = Duration::from_secs(2);

/// Connects to the first address of the permit that answers. `most` is the connect timeout of the last one.
pub(crate) async fn dial(
    permit: &DialPermit,
    _receipt: &Receipt,
    dialler: &CountedDialler,
    most: Duration,
) -> Result<(TcpStream, DialledConnection, SocketAddr), Refusal> {
    let port = permit.permit().port().ok_or(Reason::PortNotListed)?;
    let mut refusal = Refusal::from(Reason::UpstreamUnreachable);
    for (at, address) in permit.addresses().iter().take(MAX_DIAL_ADDRESSES).enumerate() {
        let address = SocketAddr::new(*address, port);
        let limit = connect_timeout(permit, at, most);
        let started = Instant::now();
        match timeout(limit, dialler.dial(address)).await {
            Ok(Ok((stream, dialled))) => {
                metrics::observe_connect(started.elapsed());
                return Ok((stream, dialled, address));
            }
            Ok(Err(failed)) => refusal = failed,
            Err(_) => {
                refusal =
                    Refusal::from(Reason::UpstreamTimeout).with_detail(format!("{address} does not answer"));
            }
        }
    }
    Err(refusal)
}

/// The connect timeout of address number `index`: short while others remain.
pub(crate) fn connect_timeout(permit: &DialPermit, index: usize, most: Duration) -> Duration {
    let last = index + 1 >= permit.addresses().len().min(MAX_DIAL_ADDRESSES);
    if last { most } else { most.min(NEXT_ADDRESS_TIMEOUT) }
}
