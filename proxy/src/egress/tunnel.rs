//! Relays bytes between two sockets: spliced, counted and charged, with half-close, and cut when idle, too old or revoked.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use audit::ByteCount;
use bytes::BytesMut;
use rules::Reason;
use rules::budget::UsageKind;
use rules::ids::SandboxId;
use rules::limits::TrafficLimits;
use rules::quota::Resource;
use tokio::io::Interest;
use tokio::task::coop::consume_budget;
use tokio::time::timeout;

use crate::budget::ledger::Charges;
use crate::budget::live::CutSignal;
use crate::egress::stream::StreamSocket;
use crate::quota::Quotas;
use crate::quota::cost::STALLED_BYTES;
use sys::splice::{Pipe, PipePool};

/// Bytes copied at a time when no pipe is available.
const COPY_BYTES: usize = 64 << 10;

/// How long a side may take no bytes before what waits for it counts as stalled.
const STALL_GRACE: Duration = Duration::from_millis(200);

static PIPE_POOL: PipePool = PipePool::new();

/// How a tunnel ended.
#[derive(Debug)]
pub(crate) enum TunnelEnd {
    /// Both sides closed.
    Both,
    /// One side broke.
    Broken,
    Cut(Reason),
}

/// The direction of bytes.
#[derive(Clone, Copy, Debug)]
enum Direction {
    Down,
    Up,
}

/// Counts, charges and cuts a tunnel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TunnelContext<'a> {
    pub(crate) byte_count: &'a ByteCount,
    pub(crate) cut: &'a CutSignal,
    pub(crate) charges: &'a Charges,
    pub(crate) quotas: &'a Arc<Quotas>,
    pub(crate) sandbox: &'a SandboxId,
}

/// Relays bytes until both sides close or the tunnel is cut. `ahead` was read from the client already.
pub(crate) async fn relay(
    client: &StreamSocket,
    upstream: &StreamSocket,
    ahead: BytesMut,
    limits: &TrafficLimits,
    context: TunnelContext<'_>,
) -> TunnelEnd {
    let both = async {
        let up = async {
            context.byte_count.add_sent(ahead.len() as u64);
            context.write_all(client, upstream, &ahead).await?;
            drop(ahead);
            relay_direction(client, upstream, context, Direction::Up).await
        };
        let down = relay_direction(upstream, client, context, Direction::Down);
        tokio::try_join!(up, down)
    };
    let end = tokio::select! {
        flowed = both => match (flowed, context.cut.reason()) {
            (Ok(_), _) => TunnelEnd::Both,
            (Err(_), Some(reason)) => TunnelEnd::Cut(reason),
            (Err(_), None) => TunnelEnd::Broken,
        },
        reason = context.cut.wait() => TunnelEnd::Cut(reason),
        () = wait_idle(limits.tunnel_idle() / 2, || context.byte_count.total()) => TunnelEnd::Cut(Reason::IdleTooLong),
        () = tokio::time::sleep(limits.connection()) => TunnelEnd::Cut(Reason::LifetimeSpent),
    };
    if matches!(end, TunnelEnd::Cut(Reason::IdleTooLong | Reason::LifetimeSpent | Reason::QuotaExhausted)) {
        // A side that does not read would keep what is unsent in kernel memory for minutes after the close.
        client.reset_on_close();
        upstream.reset_on_close();
    }
    end
}

/// Returns once `total` has not changed for two intervals in a row.
pub(crate) async fn wait_idle<T: PartialEq>(interval: Duration, total: impl Fn() -> T) {
    let mut before = total();
    let mut unchanged = 0;
    while unchanged < 2 {
        tokio::time::sleep(interval).await;
        let now = total();
        unchanged = if now == before { unchanged + 1 } else { 0 };
        before = now;
    }
}

/// Relays one direction until it ends, then closes the other side's write half.
async fn relay_direction(
    from: &StreamSocket,
    to: &StreamSocket,
    context: TunnelContext<'_>,
    direction: Direction,
) -> io::Result<()> {
    loop {
        from.readable().await?;
        let over = match PIPE_POOL.acquire() {
            Ok(mut pipe) => {
                let over = splice_burst(&mut pipe, from, to, context, direction).await?;
                PIPE_POOL.release(pipe);
                over
            }
            Err(_) => copy_burst(from, to, context, direction).await?,
        };
        if over {
            to.shutdown_write();
            return Ok(());
        }
    }
}

/// Relays what is readable now. Returns true at the end of the stream.
async fn splice_burst(
    pipe: &mut Pipe,
    from: &StreamSocket,
    to: &StreamSocket,
    context: TunnelContext<'_>,
    direction: Direction,
) -> io::Result<bool> {
    loop {
        consume_budget().await; // two fast sides must not starve other tasks, nor delay a cut
        match context.read(from, direction, |most| pipe.fill(from.as_fd(), most)).await {
            Ok(0) => return Ok(true),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
        while pipe.buffered() > 0 {
            match to.try_io(Interest::WRITABLE, || pipe.drain(to.as_fd())) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    context.wait_writable(from, to).await?
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// The same through a buffer, when no pipe is available.
async fn copy_burst(
    from: &StreamSocket,
    to: &StreamSocket,
    context: TunnelContext<'_>,
    direction: Direction,
) -> io::Result<bool> {
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        consume_budget().await;
        let receive = |most: usize| {
            let room = buffer.get_mut(..most.min(COPY_BYTES)).unwrap_or_default();
            (&*socket2::SockRef::from(from)).read(room)
        };
        let read = match context.read(from, direction, receive).await {
            Ok(0) => return Ok(true),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        };
        context.write_all(from, to, buffer.get(..read).unwrap_or_default()).await?;
    }
}

impl TunnelContext<'_> {
    /// Reads what is there, up to the bytes leased beforehand; refunds the rest.
    async fn read(
        &self,
        from: &StreamSocket,
        direction: Direction,
        receive: impl FnOnce(usize) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let what = match direction {
            Direction::Down => UsageKind::Download,
            Direction::Up => UsageKind::Upload,
        };
        if self.cut.reason().is_some() {
            return Err(io::ErrorKind::ConnectionAborted.into()); // the task that waits for the cut has not run yet
        }
        let lease = match self.charges.lease(what).await {
            Ok(lease) => lease,
            Err(spent) => return self.cut_over_budget(from, spent.reason()),
        };
        let most = usize::try_from(lease.bytes).unwrap_or(usize::MAX);
        let read = from.try_io(Interest::READABLE, || receive(most));
        let moved = *read.as_ref().unwrap_or(&0) as u64;
        self.charges.refund(&lease, moved);
        match direction {
            Direction::Down => self.byte_count.add_received(moved),
            Direction::Up => self.byte_count.add_sent(moved),
        }
        read
    }

    /// Writes bytes that were read from `from`.
    async fn write_all(&self, from: &StreamSocket, to: &StreamSocket, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match to.try_write(bytes) {
                Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_writable(from, to).await?
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits until `to` takes more bytes. While it does not for long, what waits for it is reserved from the sandbox's
    /// quota of stalled bytes; without quota the tunnel is cut.
    async fn wait_writable(&self, from: &StreamSocket, to: &StreamSocket) -> io::Result<()> {
        if let Ok(writable) = timeout(STALL_GRACE, to.writable()).await {
            return writable;
        }
        // The receive buffer grew while bytes flowed; it may fill up now.
        let received = socket2::SockRef::from(from).recv_buffer_size()? as u64;
        match self.quotas.reserve(Resource::Stalled, self.sandbox, STALLED_BYTES + received) {
            Ok(_stalled) => to.writable().await,
            Err(refusal) => {
                tracing::debug!(detail = refusal.detail, "cutting a stalled tunnel");
                self.cut.trigger(refusal.reason);
                Err(io::ErrorKind::QuotaExceeded.into())
            }
        }
    }

    /// The budget is spent: cuts the tunnel if more bytes wait, and lets it end if it is at its end.
    fn cut_over_budget(&self, from: &StreamSocket, reason: Reason) -> io::Result<usize> {
        let mut next = [std::mem::MaybeUninit::uninit()];
        let socket = socket2::SockRef::from(from);
        match from.try_io(Interest::READABLE, || socket.peek(&mut next))? {
            0 => Ok(0),
            _ => {
                self.cut.trigger(reason);
                Err(io::ErrorKind::QuotaExceeded.into())
            }
        }
    }
}
