//! A client's connection, TCP or unix, with the bytes that protocol detection has read ahead.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

/// Bytes read at a time during protocol detection.
const READ_AHEAD_BYTES: usize = 4096;

/// The socket of a connection.
#[derive(Debug)]
pub(crate) enum StreamSocket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A socket, and the bytes read from it that nobody has consumed yet.
#[derive(Debug)]
pub(crate) struct PrefixedStream {
    pub(crate) ahead: BytesMut,
    pub(crate) socket: StreamSocket,
}

impl PrefixedStream {
    pub(crate) fn new(socket: StreamSocket) -> Self {
        PrefixedStream { ahead: BytesMut::new(), socket }
    }

    /// Reads more bytes ahead. Returns how many, 0 at the end of the stream.
    pub(crate) async fn read_ahead(&mut self) -> io::Result<usize> {
        self.ahead.reserve(READ_AHEAD_BYTES);
        self.socket.read_buf(&mut self.ahead).await
    }
}

impl StreamSocket {
    pub(crate) async fn readable(&self) -> io::Result<()> {
        match self {
            StreamSocket::Tcp(stream) => stream.readable().await,
            StreamSocket::Unix(stream) => stream.readable().await,
        }
    }

    pub(crate) async fn writable(&self) -> io::Result<()> {
        match self {
            StreamSocket::Tcp(stream) => stream.writable().await,
            StreamSocket::Unix(stream) => stream.writable().await,
        }
    }

    /// Runs `act` on the socket; `WouldBlock` clears its readiness.
    pub(crate) fn try_io<R>(&self, interest: Interest, act: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        match self {
            StreamSocket::Tcp(stream) => stream.try_io(interest, act),
            StreamSocket::Unix(stream) => stream.try_io(interest, act),
        }
    }

    pub(crate) fn try_write(&self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            StreamSocket::Tcp(stream) => stream.try_write(buffer),
            StreamSocket::Unix(stream) => stream.try_write(buffer),
        }
    }

    /// Drops unsent bytes at the close, and tells the peer by a reset.
    pub(crate) fn reset_on_close(&self) {
        drop(socket2::SockRef::from(self).set_linger(Some(Duration::ZERO))); // the peer may be gone
    }

    /// Closes the write half.
    pub(crate) fn shutdown_write(&self) {
        let socket = socket2::SockRef::from(self);
        drop(socket.shutdown(std::net::Shutdown::Write)); // the peer may be gone
    }
}

impl AsFd for StreamSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            StreamSocket::Tcp(stream) => stream.as_fd(),
            StreamSocket::Unix(stream) => stream.as_fd(),
        }
    }
}

impl From<TcpStream> for StreamSocket {
    fn from(stream: TcpStream) -> Self {
        StreamSocket::Tcp(stream)
    }
}

impl AsyncRead for StreamSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut *self {
            StreamSocket::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            StreamSocket::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for StreamSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            StreamSocket::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            StreamSocket::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            StreamSocket::Tcp(stream) => Pin::new(stream).poll_write_vectored(context, parts),
            StreamSocket::Unix(stream) => Pin::new(stream).poll_write_vectored(context, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(())) // unbuffered
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            StreamSocket::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            StreamSocket::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

impl AsyncRead for PrefixedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.ahead.is_empty() {
            return Pin::new(&mut self.socket).poll_read(context, buffer);
        }
        drain_ahead(&mut self.ahead, buffer);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PrefixedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.socket).poll_shutdown(context))?;
        Poll::Ready(Ok(()))
    }
}

/// Moves what fits from `ahead`, and frees its memory once it is empty.
pub(crate) fn drain_ahead(ahead: &mut BytesMut, buffer: &mut ReadBuf<'_>) {
    let count = ahead.len().min(buffer.remaining());
    if let Some(bytes) = ahead.get(..count) {
        buffer.put_slice(bytes);
    }
    ahead.advance(count);
    if ahead.is_empty() {
        *ahead = BytesMut::new();
    }
}
