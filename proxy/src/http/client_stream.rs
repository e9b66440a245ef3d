//! The client's stream in the form Pingora takes: plain or TLS, with the head that we already read in front, and
//! a write buffer that is allocated only while it holds bytes.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use async_trait::async_trait;
use bytes::{Buf, BytesMut};
use pingora_core::protocols::raw_connect::ProxyDigest;
use pingora_core::protocols::{
    GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, TimingDigest,
    UniqueID, UniqueIDType,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio_rustls::server::TlsStream;

use super::RequestMonitor;
use crate::egress::stream::{PrefixedStream, drain_ahead};
use crate::http::chunks::ChunkValidator;

/// Size of the write buffer, which lets the head and body of a small response leave in one write.
const WRITE_BUFFER_BYTES: usize = 4096;

/// A client connection that speaks HTTP.
pub(crate) enum ClientStream {
    Plain(PrefixedStream),
    Tls(Box<TlsStream<PrefixedStream>>),
}

/// A [`ClientStream`] that implements Pingora's stream traits.
pub(super) struct PingoraStream {
    stream: ClientStream,
    /// Bytes we have read and checked, which Pingora reads first.
    buffered: BytesMut,
    write_buffer: BytesMut,
    digest: Arc<ProxyDigest>,
    guard: Option<ChunkGuard>,
}

/// Checks the framing of a chunked body as Pingora reads it. [`ChunkValidator`] says why.
struct ChunkGuard {
    /// Bytes of the head that Pingora has not read yet; the body follows them.
    head: usize,
    chunks: ChunkValidator,
    monitor: Arc<RequestMonitor>,
}

impl PingoraStream {
    pub(super) fn new(stream: ClientStream, buffered: BytesMut, digest: Arc<ProxyDigest>) -> Self {
        PingoraStream { stream, buffered, write_buffer: BytesMut::new(), digest, guard: None }
    }

    /// Checks the chunks that follow a head of `head` bytes. If they are malformed, reads fail and `monitor` has the
    /// fault.
    pub(super) fn with_chunk_guard(self, head: usize, monitor: &Arc<RequestMonitor>) -> Self {
        let guard = ChunkGuard { head, chunks: ChunkValidator::default(), monitor: monitor.clone() };
        PingoraStream { guard: Some(guard), ..self }
    }

    /// The client's stream, and the buffered bytes that Pingora has not read.
    pub(super) fn into_parts(self) -> (ClientStream, BytesMut) {
        (self.stream, self.buffered)
    }

    fn poll_flush_buffer(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.write_buffer.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.write_buffer))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.write_buffer.advance(written);
        }
        self.write_buffer = BytesMut::new();
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for PingoraStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let head = self.guard.as_ref().map_or(0, |guard| guard.head);
        if head > 0 && head < self.buffered.len() {
            // Return the head alone first. If body bytes came with it, a fault in them would fail the read of the
            // head, and the request would never reach our filters.
            let body = self.buffered.split_off(head);
            drain_ahead(&mut self.buffered, buffer);
            self.buffered.unsplit(body);
        } else if !self.buffered.is_empty() {
            drain_ahead(&mut self.buffered, buffer);
        } else if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(context, buffer) {
            read?;
        } else {
            // Pingora flushes a body of known length only at its end. While a response is written, Pingora also
            // reads from the client, so a pending read is the moment to flush: otherwise the client would see
            // nothing of a slow response until 4 KiB of it are there.
            if let Poll::Ready(Err(error)) = self.as_mut().poll_flush(context) {
                return Poll::Ready(Err(error));
            }
            return Poll::Pending;
        }
        let read = buffer.filled().get(before..).unwrap_or_default();
        self.guard.as_mut().map_or(Ok(()), |guard| guard.check(read))?;
        Poll::Ready(Ok(()))
    }
}

impl ChunkGuard {
    fn check(&mut self, bytes: &[u8]) -> io::Result<()> {
        let head = self.head.min(bytes.len());
        self.head -= head;
        self.chunks.validate(bytes.get(head..).unwrap_or_default()).map_err(|fault| {
            self.monitor.set_body_fault(fault);
            io::Error::new(io::ErrorKind::InvalidData, fault)
        })
    }
}

impl AsyncWrite for PingoraStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.write_buffer.len() + bytes.len() > WRITE_BUFFER_BYTES {
            ready!(self.poll_flush_buffer(context))?;
        }
        if bytes.len() >= WRITE_BUFFER_BYTES {
            return Pin::new(&mut self.stream).poll_write(context, bytes);
        }
        if self.write_buffer.capacity() == 0 {
            self.write_buffer.reserve(WRITE_BUFFER_BYTES);
        }
        self.write_buffer.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_flush_buffer(context))?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_flush_buffer(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut *self {
            ClientStream::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            ClientStream::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            ClientStream::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            ClientStream::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            ClientStream::Plain(stream) => Pin::new(stream).poll_flush(context),
            ClientStream::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            ClientStream::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            ClientStream::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[async_trait]
impl Shutdown for PingoraStream {
    async fn shutdown(&mut self) {
        drop(AsyncWriteExt::shutdown(self).await); // fails only if the client has already gone
    }
}

impl UniqueID for PingoraStream {
    fn id(&self) -> UniqueIDType {
        0 // used only for pooled upstream connections
    }
}

impl Ssl for PingoraStream {}

#[async_trait]
impl Peek for PingoraStream {}

impl GetTimingDigest for PingoraStream {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        Vec::new()
    }
}

impl GetProxyDigest for PingoraStream {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        Some(self.digest.clone())
    }
}

impl GetSocketDigest for PingoraStream {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        None
    }
}

impl fmt::Debug for PingoraStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PingoraStream").finish_non_exhaustive()
    }
}
