//! The control channel between the proxy and init, the jail's pid 1: a unix socket pair that no other process holds.
//! Requests go in, reports come out, and the jail's listening sockets come out as `SCM_RIGHTS`.
//!
//! A message is a length of four bytes and JSON. [`JailReport`] is written by init (and by the keeper, if there is
//! no init yet) and read by the proxy; [`JailRequest`] is written by the proxy and read by init. The command never
//! has the socket: it is marked close-on-exec.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde::{Deserialize, Serialize};

/// Largest message. The largest in use carries the trust files, a few hundred KiB.
const MAX_MESSAGE: usize = 16 << 20;

/// A message from the jail to the proxy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum JailReport {
    /// The command has exited.
    Ended(CommandExit),
    /// The jail could not be created, or broke.
    Failed(String),
    /// The jail is set up; of the sockets that follow, the first `dns` are for DNS, the rest for TCP.
    Ready { dns: usize },
    /// The command could not be executed.
    Refused { status: u8, why: String },
    /// The command is running.
    Started,
    /// A stop signal has stopped the command.
    Stopped,
}

/// How the command exited: with a status, or by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommandExit {
    Exited(i32),
    Killed(i32),
}

/// A message from the proxy to the jail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum JailRequest {
    /// Cover these unix sockets where they are visible inside.
    Cover(Vec<PathBuf>),
    /// Run the command. `trust` has the files that make its tools trust the proxy: name, and content in base64.
    Go { trust: Vec<(String, String)> },
    /// Cover these credentials, which are not covered any more.
    Hide(Vec<PathBuf>),
    /// Continue a stopped command, in the foreground or background of the terminal.
    Resume { foreground: bool },
    /// Send the command a signal.
    Signal(i32),
}

/// Sends one message. Runs in the proxy, the keeper and init.
pub(super) fn send(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_ne_bytes())?;
    stream.write_all(&bytes)
}

/// Receives one message; `None` when the peer has closed the channel. Runs in the proxy and init.
pub(super) fn receive<T: for<'a> Deserialize<'a>>(mut stream: &UnixStream) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match stream.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let length = u32::from_ne_bytes(length) as usize;
    if length > MAX_MESSAGE {
        return Err(io::Error::other("message too long"));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok(Some(serde_json::from_slice(&bytes)?))
}

/// Passes sockets to the proxy, after the [`JailReport::Ready`] that announces them. Runs in init.
pub(super) fn send_sockets(stream: &UnixStream, sockets: &[OwnedFd]) -> io::Result<()> {
    let fds: Vec<RawFd> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
    let (data, rights) = ([IoSlice::new(&[0])], [ControlMessage::ScmRights(&fds)]);
    sendmsg::<()>(stream.as_raw_fd(), &data, &rights, MsgFlags::empty(), None)?;
    Ok(())
}

/// Receives the sockets that init passed. Runs in the proxy.
pub(super) fn receive_sockets(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    sys::fd::receive_rights(stream.as_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_sockets_arrive_as_they_were_sent() {
        let (one, other) = UnixStream::pair().unwrap();
        let (local, passed) = UnixStream::pair().unwrap();
        send(&one, &JailReport::Ready { dns: 1 }).unwrap();
        send_sockets(&one, &[passed.into()]).unwrap();
        send(&one, &JailReport::Started).unwrap();
        assert_eq!(receive(&other).unwrap(), Some(JailReport::Ready { dns: 1 }));
        let mut received = receive_sockets(&other).unwrap();
        assert_eq!(received.len(), 1);
        (&local).write_all(b"x").unwrap();
        let mut byte = [0];
        UnixStream::from(received.remove(0)).read_exact(&mut byte).unwrap();
        assert_eq!(receive(&other).unwrap(), Some(JailReport::Started));
        drop(one);
        assert_eq!(receive::<JailReport>(&other).unwrap(), None);
    }

    #[test]
    fn p17_a_message_that_is_too_long_is_refused() {
        let (one, other) = UnixStream::pair().unwrap();
        (&one).write_all(&u32::MAX.to_ne_bytes()).unwrap();
        assert!(receive::<JailReport>(&other).is_err());
    }
}
