//! `splice(2)`: bytes from socket to socket by way of a pipe, without a copy into this process.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// Bytes of a pipe: as fast as twice as many, and half of what counts against the user's limit.
const PIPE_BYTES: usize = 512 << 10;
/// Empty pipes kept for the next burst.
const MAX_IDLE_PIPES: usize = 64;

/// Pipes that wait for bytes. A pipe is taken only while bytes flow, so that an idle tunnel holds none.
#[derive(Debug, Default)]
pub struct PipePool {
    empty: Mutex<Vec<Pipe>>,
}

/// A pipe and how many bytes lie in it.
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

    /// A pipe, empty.
    ///
    /// # Errors
    ///
    /// The kernel's, when there are no descriptors or pages left: then bytes are copied.
    pub fn acquire(&self) -> io::Result<Pipe> {
        let kept = self.empty.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.map_or_else(Pipe::open, Ok)
    }

    /// Keeps a pipe for the next; one that still holds bytes is closed, for they are somebody's.
    pub fn release(&self, pipe: Pipe) {
        let mut empty = self.empty.lock().unwrap_or_else(PoisonError::into_inner);
        if pipe.buffered == 0 && empty.len() < MAX_IDLE_PIPES {
            empty.push(pipe);
        }
    }
}

impl Pipe {
    fn open() -> io::Result<Self> {
        let mut ends = [0; 2];
        // SAFETY: `ends` has room for the two descriptors that the call writes.
        let made = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_NONBLOCK | libc::O_CLOEXEC) };
        if made != 0 {
            return Err(io::Error::last_os_error());
        }
        let [read, write] = ends;
        // SAFETY: both are descriptors of ours that nobody else has.
        let (read, write) = unsafe { (OwnedFd::from_raw_fd(read), OwnedFd::from_raw_fd(write)) };
        // SAFETY: a call without pointers. Where the limit is reached the pipe stays smaller.
        unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETPIPE_SZ, PIPE_BYTES as libc::c_int) };
        Ok(Pipe { read, write, buffered: 0 })
    }

    pub fn buffered(&self) -> usize {
        self.buffered
    }

    /// Moves at most so many bytes from a socket into the pipe; 0 is the socket's end.
    pub fn fill(&mut self, from: BorrowedFd<'_>, most: usize) -> io::Result<usize> {
        let moved = splice(from.as_raw_fd(), self.write.as_raw_fd(), most.min(PIPE_BYTES))?;
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

fn splice(from: i32, to: i32, most: usize) -> io::Result<usize> {
    let flags = libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MOVE;
    let none = std::ptr::null_mut();
    // SAFETY: no offsets are given, and both descriptors are borrowed for the call.
    let moved = unsafe { libc::splice(from, none, to, none, most, flags) };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}
