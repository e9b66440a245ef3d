//! What the kernel says of a connection: whose it is (P2), and where the sandbox aimed it.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use rules::Channel;
use rules::operator::{Mode, Whose};
use sys::socket as kernel;

use crate::egress::stream::Socket;

/// The channels by which a connection came; an error where the kernel does not tell, which refuses it.
pub(crate) fn channels(
    socket: &Socket,
    whose: &Whose,
    source: Option<SocketAddr>,
) -> io::Result<Vec<Channel>> {
    let channel = match (whose, socket) {
        (Whose::Dedicated(id), _) => Channel::Dedicated(id.clone()),
        (Whose::Interface, Socket::Tcp(stream)) => {
            let index = kernel::interface_of(stream.as_fd(), stream.local_addr()?)?;
            Channel::Interface(kernel::interface_name(index)?)
        }
        (Whose::Mark, Socket::Tcp(stream)) => Channel::Mark(kernel::mark_of(stream.as_fd())?),
        (Whose::SourceAddress, Socket::Tcp(_)) => {
            Channel::SourceAddress(source.ok_or(io::ErrorKind::AddrNotAvailable)?.ip())
        }
        (Whose::Unix, Socket::Unix(stream)) => Channel::UnixUser(stream.peer_cred()?.uid()),
        (Whose::Interface | Whose::Mark | Whose::SourceAddress | Whose::Unix, _) => {
            return Err(io::ErrorKind::Unsupported.into());
        }
    };
    Ok(vec![channel])
}

/// Where the sandbox sent a transparent connection. Recorded, and its port used; never dialled (P4).
pub(crate) fn aimed(socket: &Socket, mode: Mode) -> io::Result<Option<SocketAddr>> {
    let Socket::Tcp(stream) = socket else { return Ok(None) };
    match mode {
        Mode::Dns | Mode::Explicit => Ok(None),
        Mode::Redirect => original(stream).map(Some),
        Mode::Tproxy => stream.local_addr().map(Some),
    }
}

/// What the address was before the firewall rewrote it.
fn original(stream: &tokio::net::TcpStream) -> io::Result<SocketAddr> {
    let socket = socket2::SockRef::from(stream);
    let address = match stream.local_addr()? {
        SocketAddr::V4(_) => socket.original_dst_v4(),
        SocketAddr::V6(local) if local.ip().to_ipv4_mapped().is_some() => socket.original_dst_v4(),
        SocketAddr::V6(_) => socket.original_dst_v6(),
    }?;
    address.as_socket().ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}
