//! What the proxy and the first process of the jail tell each other, over a socket that only they have. The
//! sockets made inside are handed over with it.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde::{Deserialize, Serialize};

/// Largest message: the trust files, which are a few hundred KiB.
const MAX_MESSAGE: usize = 16 << 20;

/// From the jail to the proxy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum JailReport {
    /// The command has ended.
    Ended(CommandExit),
    /// There is no jail, and why.
    Failed(String),
    /// The jail stands; so many of the sockets that come along are for DNS, the rest for TCP.
    Ready { dns: usize },
    /// The command could not be run, and why.
    Refused { status: u8, why: String },
    /// The command runs.
    Started,
    /// A signal of the terminal has stopped the command.
    Stopped,
}

/// How the command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommandExit {
    Exited(i32),
    Killed(i32),
}

/// From the proxy to the jail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum JailRequest {
    /// Cover these unix sockets, where they are seen inside.
    Cover(Vec<PathBuf>),
    /// Run the command; these files make its tools trust the proxy, their content in base64.
    Go { trust: Vec<(String, String)> },
    /// Go on, in the foreground of the terminal or behind it.
    Resume { foreground: bool },
    /// Pass a signal on to the command.
    Signal(i32),
}

/// Sends one message: its length, then itself.
pub(super) fn send(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_ne_bytes())?;
    stream.write_all(&bytes)
}

/// Receives one message; none when the other side is gone.
pub(super) fn receive<T: for<'a> Deserialize<'a>>(
    mut stream: &UnixStream,
) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match stream.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let length = u32::from_ne_bytes(length) as usize;
    if length > MAX_MESSAGE {
        return Err(io::Error::other("a message that is too long"));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok(Some(serde_json::from_slice(&bytes)?))
}

/// Hands sockets over, behind a message that announced them.
pub(super) fn send_sockets(stream: &UnixStream, sockets: &[OwnedFd]) -> io::Result<()> {
    let numbers: Vec<RawFd> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
    let (data, rights) = ([IoSlice::new(&[0])], [ControlMessage::ScmRights(&numbers)]);
    sendmsg::<()>(stream.as_raw_fd(), &data, &rights, MsgFlags::empty(), None)?;
    Ok(())
}

/// Takes the sockets that were handed over.
pub(super) fn receive_sockets(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    sys::fd::receive_rights(stream.as_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_sockets_arrive_as_they_were_sent() {
        let (one, other) = UnixStream::pair().unwrap();
        let (kept, passed) = UnixStream::pair().unwrap();
        send(&one, &JailReport::Ready { dns: 1 }).unwrap();
        send_sockets(&one, &[passed.into()]).unwrap();
        send(&one, &JailReport::Started).unwrap();
        assert_eq!(receive(&other).unwrap(), Some(JailReport::Ready { dns: 1 }));
        let mut taken = receive_sockets(&other).unwrap();
        assert_eq!(taken.len(), 1);
        (&kept).write_all(b"x").unwrap();
        let mut byte = [0];
        UnixStream::from(taken.remove(0)).read_exact(&mut byte).unwrap();
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
