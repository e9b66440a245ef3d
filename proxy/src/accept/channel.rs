//! What the kernel reports about a connection: the channel that identifies its sandbox (P2), and its original destination.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use rules::Channel;
use rules::configuration::{Attribution, ListenerMode};
use sys::socket as kernel;

use crate::egress::stream::StreamSocket;

/// Returns the channels a connection arrived on. A connection whose channel the kernel does not report is refused.
pub(crate) fn channels(
    socket: &StreamSocket,
    attribution: &Attribution,
    source: Option<SocketAddr>,
) -> io::Result<Vec<Channel>> {
    let channel = match (attribution, socket) {
        (Attribution::Dedicated(id), _) => Channel::Dedicated(id.clone()),
        (Attribution::Interface, StreamSocket::Tcp(stream)) => {
            let index = kernel::arrival_interface(stream.as_fd(), stream.local_addr()?)?;
            Channel::Interface(kernel::interface_name(index)?)
        }
        (Attribution::Mark, StreamSocket::Tcp(stream)) => Channel::Mark(kernel::socket_mark(stream.as_fd())?),
        (Attribution::SourceAddress, StreamSocket::Tcp(_)) => {
            Channel::SourceAddress(source.ok_or(io::ErrorKind::AddrNotAvailable)?.ip())
        }
        (Attribution::Unix, StreamSocket::Unix(stream)) => Channel::UnixUser(stream.peer_cred()?.uid()),
        (Attribution::Interface | Attribution::Mark | Attribution::SourceAddress | Attribution::Unix, _) => {
            return Err(io::ErrorKind::Unsupported.into());
        }
    };
    Ok(vec![channel])
}

/// Returns where a transparent connection was going. Its port is used and recorded; its address is never dialled (P4).
pub(crate) fn original_dst(socket: &StreamSocket, mode: ListenerMode) -> io::Result<Option<SocketAddr>> {
    let StreamSocket::Tcp(stream) = socket else { return Ok(None) };
    match mode {
        ListenerMode::Dns | ListenerMode::Explicit => Ok(None),
        ListenerMode::Redirect => so_original_dst(stream).map(Some),
        ListenerMode::Tproxy => stream.local_addr().map(Some),
    }
}

/// Returns the destination before the firewall rewrote it (`SO_ORIGINAL_DST`).
fn so_original_dst(stream: &tokio::net::TcpStream) -> io::Result<SocketAddr> {
    let socket = socket2::SockRef::from(stream);
    let address = match stream.local_addr()? {
        SocketAddr::V4(_) => socket.original_dst_v4(),
        SocketAddr::V6(local) if local.ip().to_ipv4_mapped().is_some() => socket.original_dst_v4(),
        SocketAddr::V6(_) => socket.original_dst_v6(),
    }?;
    address.as_socket().ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}
