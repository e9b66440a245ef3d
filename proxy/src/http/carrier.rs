//! The stream that is handed to Pingora: plain or TLS, with the head that was checked in front, and a write
//! buffer that exists only while there is something in it.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use async_trait::async_trait;
use bytes::{Buf, BytesMut};
use pingora_core::protocols::raw_connect::ProxyDigest;
use pingora_core::protocols::{
    GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl,
    TimingDigest, UniqueID, UniqueIDType,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio_rustls::server::TlsStream;

use super::RequestMonitor;
use crate::egress::stream::{PrefixedStream, drain_ahead};
use crate::http::chunks::ChunkValidator;

/// Bytes held back so that head and body of a small answer leave in one write.
const WRITE_BUFFER_BYTES: usize = 4096;

/// What carries HTTP.
pub(crate) enum ClientStream {
    Plain(PrefixedStream),
    Tls(Box<TlsStream<PrefixedStream>>),
}

/// A carrier in the form Pingora takes.
pub(super) struct PingoraStream {
    carrier: ClientStream,
    /// What was read to be checked, and is read again.
    ahead: BytesMut,
    write_buffer: BytesMut,
    digest: Arc<ProxyDigest>,
    guard: Option<ChunkGuard>,
}

/// Holds a chunked body to one reading.
struct ChunkGuard {
    /// Bytes of head that come before it.
    head: usize,
    chunks: ChunkValidator,
    monitor: Arc<RequestMonitor>,
}

impl PingoraStream {
    pub(super) fn new(carrier: ClientStream, ahead: BytesMut, digest: Arc<ProxyDigest>) -> Self {
        PingoraStream { carrier, ahead, write_buffer: BytesMut::new(), digest, guard: None }
    }

    /// Looks at the chunks that follow a head of `head` bytes, and tells `exchange` if they are malformed.
    pub(super) fn with_chunk_guard(self, head: usize, exchange: &Arc<RequestMonitor>) -> Self {
        let guard =
            ChunkGuard { head, chunks: ChunkValidator::default(), monitor: exchange.clone() };
        PingoraStream { guard: Some(guard), ..self }
    }

    /// The carrier again, and what was read ahead and not taken.
    pub(super) fn into_parts(self) -> (ClientStream, BytesMut) {
        (self.carrier, self.ahead)
    }

    fn poll_flush_buffer(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.write_buffer.is_empty() {
            let written =
                ready!(Pin::new(&mut self.carrier).poll_write(context, &self.write_buffer))?;
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
        if head > 0 && head < self.ahead.len() {
            // The head alone first, so that a fault in the body is the body's.
            let body = self.ahead.split_off(head);
            drain_ahead(&mut self.ahead, buffer);
            self.ahead.unsplit(body);
        } else if !self.ahead.is_empty() {
            drain_ahead(&mut self.ahead, buffer);
        } else if let Poll::Ready(read) = Pin::new(&mut self.carrier).poll_read(context, buffer) {
            read?;
        } else {
            // Whoever waits for the client has said all there is to say for now: Pingora flushes a body of
            // known length only at its end, and a slow answer must be seen as far as it has come.
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
            return Pin::new(&mut self.carrier).poll_write(context, bytes);
        }
        if self.write_buffer.capacity() == 0 {
            self.write_buffer.reserve(WRITE_BUFFER_BYTES);
        }
        self.write_buffer.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_flush_buffer(context))?;
        Pin::new(&mut self.carrier).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_flush_buffer(context))?;
        Pin::new(&mut self.carrier).poll_shutdown(context)
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
        drop(AsyncWriteExt::shutdown(self).await); // a peer that has gone needs no goodbye
    }
}

impl UniqueID for PingoraStream {
    fn id(&self) -> UniqueIDType {
        0 // names pooled upstream connections only; this is none
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
