//! `splice(2)`: moves bytes from socket to socket through a pipe, without copying them into this
//! process.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Mutex;

/// Size of a pipe. 1 MiB was no faster and uses twice as much of the per-user limit on pipe pages.
const PIPE_BYTES: usize = 512 << 10;
/// Maximum number of empty pipes to keep for reuse.
const MAX_IDLE_PIPES: usize = 64;

/// A pool of empty pipes. A tunnel acquires a pipe only while bytes flow, so an idle one holds none.
#[derive(Debug, Default)]
pub struct PipePool {
    empty: Mutex<Vec<Pipe>>,
}

/// A pipe and the number of bytes in it.
#[derive(Debug)]
pub struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    buffered: usize,
}

impl PipePool {
    pub const fn new() -> Self {
        PipePool { empty: Mutex::new(Vec::new()) }
    }

    /// Returns an empty pipe.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error when it is out of descriptors or pipe pages. The caller then copies.
    pub fn acquire(&self) -> io::Result<Pipe> {
        let pooled = crate::lock(&self.empty).pop();
        pooled.map_or_else(Pipe::open, Ok)
    }

    /// Takes a pipe back. A pipe that still holds bytes of its last tunnel is closed, not reused.
    pub fn release(&self, pipe: Pipe) {
        let mut empty = crate::lock(&self.empty);
        if pipe.buffered == 0 && empty.len() < MAX_IDLE_PIPES {
            empty.push(pipe);
        }
    }
}

impl Pipe {
    fn open() -> io::Result<Self> {
        let mut ends = [0; 2];
        // SAFETY: `ends` has room for the two descriptors that the call writes.
        let result = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_NONBLOCK | libc::O_CLOEXEC) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let [read, write] = ends;
        // SAFETY: the call succeeded, so both descriptors are new and nothing else owns them.
        let (read, write) = unsafe { (OwnedFd::from_raw_fd(read), OwnedFd::from_raw_fd(write)) };
        // SAFETY: the call takes no pointers. It may fail at the user's limit: the pipe stays smaller.
        unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETPIPE_SZ, PIPE_BYTES as libc::c_int) };
        Ok(Pipe { read, write, buffered: 0 })
    }

    pub fn buffered(&self) -> usize {
        self.buffered
    }

    /// Moves at most `limit` bytes from a socket into the pipe. Returns 0 at the end of the stream.
    pub fn fill(&mut self, from: BorrowedFd<'_>, limit: usize) -> io::Result<usize> {
        let moved = splice(from.as_raw_fd(), self.write.as_raw_fd(), limit.min(PIPE_BYTES))?;
        self.buffered += moved;
        Ok(moved)
    }

    /// Moves bytes from the pipe into a socket.
    pub fn drain(&mut self, to: BorrowedFd<'_>) -> io::Result<usize> {
        let moved = splice(self.read.as_raw_fd(), to.as_raw_fd(), self.buffered)?;
        self.buffered -= moved;
        Ok(moved)
    }
}

fn splice(from: i32, to: i32, limit: usize) -> io::Result<usize> {
    let flags = libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MOVE;
    let none = std::ptr::null_mut();
    // SAFETY: both offsets are null, which is valid for sockets and pipes, and both descriptors are
    // borrowed for the call.
    let moved = unsafe { libc::splice(from, none, to, none, limit, flags) };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}
