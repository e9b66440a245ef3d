//! The client's stream in the form Pingora takes: plain or TLS, with the head that we already read in front, and
//! a write buffer that is allocated only while it holds bytes.
//!
//! Of an HTTP/1 connection, Pingora reads one request and no byte of what follows: the rest stays here until that
//! request is answered, and is then read as the next request by our own reader (RFC 9112, section 9.3.2).

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use async_trait::async_trait;
use bytes::{Buf, BytesMut};
use pingora_core::protocols::raw_connect::ProxyDigest;
use pingora_core::protocols::{
    GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream,
    TimingDigest, UniqueID, UniqueIDType,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio_rustls::server::TlsStream;

use super::RequestMonitor;
use super::frames::HeadClock;
use crate::egress::stream::{PrefixedStream, drain_ahead};
use crate::http::chunks::ChunkValidator;
use crate::http::head::BodyFraming;
use crate::quota::cost::BLOCK_BYTES;

/// Size of the write buffer, which lets the head and body of a small response leave in one write.
const WRITE_BUFFER_BYTES: usize = 4096;

/// Bytes that a client may send before its request to upgrade is answered; the rest waits in its socket.
const EARLY_BYTES: usize = 16 << 10;

/// A client connection that speaks HTTP.
pub(crate) enum ClientStream {
    Plain(PrefixedStream),
    Tls(Box<TlsStream<PrefixedStream>>),
}

/// A [`ClientStream`] that implements Pingora's stream traits.
pub(super) struct PingoraStream {
    /// None once an upgrade has taken it.
    client: Mutex<Option<BufferedStream>>,
    digest: Arc<ProxyDigest>,
    reading: Reading,
}

/// A client's stream with the bytes read ahead, and a write buffer.
pub(super) struct BufferedStream {
    stream: ClientStream,
    /// Bytes we have read, which are read first.
    buffered: BytesMut,
    write_buffer: BytesMut,
}

/// What Pingora reads from the stream.
enum Reading {
    /// All of it; the clock watches how long heads take.
    Http2(HeadClock),
    /// One HTTP/1 request.
    Request(RequestBytes),
}

/// Finds the end of a request as Pingora reads it, and checks the framing of a chunked body; [`ChunkValidator`] says
/// why. Of a chunked body it reads a little ahead, to know whether more of it is there: see [`super::outgoing`].
struct RequestBytes {
    /// Bytes of the head that Pingora has not read yet; the body follows them.
    head: usize,
    body: RequestBody,
    monitor: Arc<RequestMonitor>,
}

enum RequestBody {
    /// With the number of bytes that were validated and that Pingora has not read.
    Chunked(ChunkValidator, usize),
    /// Bytes that are still to come.
    Measured(u64),
}

impl PingoraStream {
    /// A stream from which Pingora reads one request, with a head of `head` bytes at the start of `buffered`. If its
    /// chunks are malformed, reads fail and `monitor` has the fault.
    pub(super) fn http1(
        stream: ClientStream,
        buffered: BytesMut,
        (head, body): (usize, BodyFraming),
        monitor: &Arc<RequestMonitor>,
    ) -> Self {
        let body = match body {
            BodyFraming::Chunked => RequestBody::Chunked(ChunkValidator::default(), 0),
            BodyFraming::Measured(length) => {
                if length.saturating_add(head as u64) < buffered.len() as u64 {
                    monitor.set_followed();
                }
                RequestBody::Measured(length)
            }
        };
        let request = RequestBytes { head, body, monitor: monitor.clone() };
        PingoraStream::new(stream, buffered, monitor.digest(), Reading::Request(request))
    }

    pub(super) fn http2(stream: ClientStream, digest: Arc<ProxyDigest>, clock: HeadClock) -> Self {
        PingoraStream::new(stream, BytesMut::new(), digest, Reading::Http2(clock))
    }

    fn new(stream: ClientStream, buffered: BytesMut, digest: Arc<ProxyDigest>, reading: Reading) -> Self {
        let client = BufferedStream { stream, buffered, write_buffer: BytesMut::new() };
        PingoraStream { client: Mutex::new(Some(client)), digest, reading }
    }

    /// The client's stream, and the buffered bytes that Pingora has not read.
    pub(super) fn into_parts(self) -> Option<(ClientStream, BytesMut)> {
        let client = self.client.into_inner().unwrap_or_else(PoisonError::into_inner);
        client.map(|client| (client.stream, client.buffered))
    }

    /// Takes the client's stream out of Pingora's hands. Pingora finds the connection closed.
    pub(super) fn take(stream: &Stream) -> Option<BufferedStream> {
        let stream = (**stream).as_any().downcast_ref::<PingoraStream>()?;
        sys::lock(&stream.client).take()
    }

    /// Returns once the client has closed or broken its connection. What it sends meanwhile is kept, and the client is no
    /// longer watched after [`EARLY_BYTES`] of it.
    pub(super) async fn wait_closed(stream: &Stream) {
        let stream = (**stream).as_any().downcast_ref::<PingoraStream>();
        std::future::poll_fn(|context| {
            let Some(stream) = stream else { return Poll::Pending };
            let mut client = sys::lock(&stream.client);
            let Some(client) = client.as_mut() else { return Poll::Ready(()) };
            while client.buffered.len() < EARLY_BYTES {
                let mut bytes = [0; 1024];
                let mut read = ReadBuf::new(&mut bytes);
                match Pin::new(&mut client.stream).poll_read(context, &mut read) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(())) if !read.filled().is_empty() => {
                        client.buffered.extend_from_slice(read.filled());
                    }
                    Poll::Ready(Ok(()) | Err(_)) => return Poll::Ready(()),
                }
            }
            Poll::Pending
        })
        .await;
    }

    fn client(&mut self) -> io::Result<Pin<&mut BufferedStream>> {
        open_client(&mut self.client).map(Pin::new)
    }
}

/// The client's stream, unless an upgrade has taken it.
fn open_client(client: &mut Mutex<Option<BufferedStream>>) -> io::Result<&mut BufferedStream> {
    let client = client.get_mut().unwrap_or_else(PoisonError::into_inner);
    client.as_mut().ok_or_else(|| io::ErrorKind::NotConnected.into())
}

impl BufferedStream {
    /// Ends a read that has nothing to return.
    ///
    /// Pingora flushes a body of known length only at its end. While a response is written, Pingora also reads from the
    /// client, so a pending read is the moment to flush: otherwise the client would see nothing of a slow response
    /// until 4 KiB of it are there.
    fn poll_pending(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match Pin::new(self).poll_flush(context) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Pending,
        }
    }

    /// Reads at most a block, so that no more has to leave at once.
    fn poll_read_block(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.buffered.is_empty() && ready!(self.poll_fill(context))? == 0 {
            return Poll::Ready(Ok(()));
        }
        let taken = self.buffered.len().min(BLOCK_BYTES).min(buffer.remaining());
        buffer.put_slice(&self.buffered.split_to(taken));
        Poll::Ready(Ok(()))
    }

    /// Returns the next bytes of a chunked body, at most a block of them. Reads ahead until it has more than that, the
    /// end, or nothing more is there, and notes how much of the body has arrived. `ahead` is the number of validated
    /// bytes at the front of the buffer.
    fn poll_chunks(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
        (chunks, ahead): (&mut ChunkValidator, &mut usize),
        monitor: &RequestMonitor,
    ) -> Poll<io::Result<()>> {
        loop {
            let fresh = self.buffered.get(*ahead..).unwrap_or_default();
            let valid = chunks.validate(fresh).map_err(|fault| {
                monitor.set_body_fault(fault);
                io::Error::new(io::ErrorKind::InvalidData, fault)
            })?;
            if valid < fresh.len() {
                monitor.set_followed();
            }
            *ahead += valid;
            // The end counts as a byte: Pingora passes it on, too.
            monitor.set_arrived_body(chunks.data_bytes() + u64::from(chunks.is_done()));
            if *ahead > BLOCK_BYTES || chunks.is_done() {
                break;
            }
            match self.poll_fill(context) {
                Poll::Ready(Ok(0)) => break,
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) if *ahead == 0 => return Poll::Ready(Err(error)),
                Poll::Pending if *ahead == 0 => return Poll::Pending,
                Poll::Ready(Err(_)) | Poll::Pending => break,
            }
        }
        let taken = BLOCK_BYTES.min(*ahead).min(buffer.remaining());
        buffer.put_slice(&self.buffered.split_to(taken));
        *ahead -= taken;
        Poll::Ready(Ok(()))
    }

    /// Reads more into the buffer, at most a block. Returns how much; 0 at the end.
    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut bytes = [const { MaybeUninit::uninit() }; BLOCK_BYTES];
        let mut read = ReadBuf::uninit(&mut bytes);
        match Pin::new(&mut self.stream).poll_read(context, &mut read) {
            Poll::Ready(Ok(())) => {
                self.buffered.extend_from_slice(read.filled());
                Poll::Ready(Ok(read.filled().len()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => match self.poll_pending(context) {
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                Poll::Ready(Ok(())) | Poll::Pending => Poll::Pending,
            },
        }
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
        let PingoraStream { client, reading, .. } = &mut *self;
        let client = open_client(client)?;
        if let Reading::Request(request) = reading
            && request.head == 0
            && !request.is_over()
            && let RequestBody::Chunked(chunks, ahead) = &mut request.body
        {
            return client.poll_chunks(context, buffer, (chunks, ahead), &request.monitor);
        }
        let (head, over) = match reading {
            Reading::Http2(_) => (0, false),
            Reading::Request(request) => (request.head, request.is_over()),
        };
        if over && !client.buffered.is_empty() {
            return client.poll_pending(context); // the next request waits for its turn
        }
        if head > 0 && head < client.buffered.len() {
            // Return the head alone first. If body bytes came with it, a fault in them would fail the read of the
            // head, and the request would never reach our filters. What follows a request to upgrade is not for
            // Pingora at all.
            let rest = client.buffered.split_off(head);
            drain_ahead(&mut client.buffered, buffer);
            client.buffered.unsplit(rest);
        } else if reading.is_cut() {
            ready!(client.poll_read_block(context, buffer))?;
        } else {
            ready!(Pin::new(&mut *client).poll_read(context, buffer))?;
        }
        let read = buffer.filled().get(before..).unwrap_or_default();
        let taken = match reading {
            Reading::Http2(clock) => {
                clock.scan(read);
                read.len()
            }
            Reading::Request(request) => request.take(read),
        };
        if taken == read.len() {
            return Poll::Ready(Ok(()));
        }
        let mut rest = BytesMut::from(read.get(taken..).unwrap_or_default());
        rest.unsplit(std::mem::take(&mut client.buffered));
        client.buffered = rest;
        buffer.set_filled(before + taken);
        if taken == 0 { client.poll_pending(context) } else { Poll::Ready(Ok(())) }
    }
}

impl AsyncRead for BufferedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.buffered.is_empty() {
            drain_ahead(&mut self.buffered, buffer);
        } else if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(context, buffer) {
            read?;
        } else {
            return self.poll_pending(context);
        }
        Poll::Ready(Ok(()))
    }
}

impl Reading {
    /// Whether the body is to be read in blocks.
    fn is_cut(&self) -> bool {
        match self {
            Reading::Http2(_) => false, // frames are no longer than a block
            Reading::Request(request) => request.monitor.is_cut_body() && !request.is_over(),
        }
    }
}

impl RequestBytes {
    /// Whether Pingora has read the whole request.
    fn is_over(&self) -> bool {
        let body_over = match &self.body {
            RequestBody::Chunked(chunks, ahead) => chunks.is_done() && *ahead == 0,
            RequestBody::Measured(left) => *left == 0,
        };
        self.head == 0 && body_over
    }

    /// Returns how many of the next bytes belong to the request.
    fn take(&mut self, bytes: &[u8]) -> usize {
        let head = self.head.min(bytes.len());
        self.head -= head;
        let rest = bytes.get(head..).unwrap_or_default();
        let body = match &mut self.body {
            // Its bytes come from `poll_chunks`: these follow its end, if they do not belong to the head.
            RequestBody::Chunked(..) => 0,
            RequestBody::Measured(left) => {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(rest.len());
                *left -= taken as u64;
                taken
            }
        };
        if head + body < bytes.len() {
            self.monitor.set_followed();
        }
        head + body
    }
}

impl AsyncWrite for PingoraStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.client()?.poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.client()?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.client()?.poll_shutdown(context)
    }
}

impl AsyncWrite for BufferedStream {
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
