//! Bytes both ways between two sockets: spliced, half-closes kept, counted, cut when idle, old or revoked.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::Duration;

use audit::ByteCount;
use rules::Reason;
use rules::budget::UsageKind;
use rules::limits::TrafficLimits;
use tokio::io::Interest;
use tokio::task::coop::consume_budget;

use crate::budget::ledger::Charges;
use crate::budget::live::CutSignal;
use crate::egress::stream::StreamSocket;
use sys::splice::{Pipe, PipePool};

/// Bytes copied at a time where there is no pipe.
const COPY_BYTES: usize = 64 << 10;

static PIPE_POOL: PipePool = PipePool::new();

/// How a tunnel ended.
#[derive(Debug)]
pub(crate) enum TunnelEnd {
    /// Both sides said all they had to say.
    Both,
    /// One of them broke.
    Broken,
    Cut(Reason),
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug)]
enum Direction {
    Down,
    Up,
}

/// What counts, bounds and ends a tunnel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TunnelContext<'a> {
    pub(crate) byte_count: &'a ByteCount,
    pub(crate) cut: &'a CutSignal,
    pub(crate) charges: &'a Charges,
}

/// Carries bytes until both sides are done, or the tunnel has to end.
pub(crate) async fn relay(
    client: &StreamSocket,
    upstream: &StreamSocket,
    limits: &TrafficLimits,
    passage: TunnelContext<'_>,
) -> TunnelEnd {
    let both = async {
        let up = relay_direction(client, upstream, passage, Direction::Up);
        let down = relay_direction(upstream, client, passage, Direction::Down);
        tokio::try_join!(up, down)
    };
    tokio::select! {
        flowed = both => match (flowed, passage.cut.reason()) {
            (Ok(_), _) => TunnelEnd::Both,
            (Err(_), Some(reason)) => TunnelEnd::Cut(reason),
            (Err(_), None) => TunnelEnd::Broken,
        },
        reason = passage.cut.wait() => TunnelEnd::Cut(reason),
        () = wait_idle(limits.tunnel_idle() / 2, || passage.byte_count.total()) => TunnelEnd::Cut(Reason::IdleTooLong),
        () = tokio::time::sleep(limits.connection()) => TunnelEnd::Cut(Reason::LifetimeSpent),
    }
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

/// Carries one direction to its end, then says so to the other side.
async fn relay_direction(
    from: &StreamSocket,
    to: &StreamSocket,
    passage: TunnelContext<'_>,
    way: Direction,
) -> io::Result<()> {
    loop {
        from.readable().await?;
        let over = match PIPE_POOL.acquire() {
            Ok(mut pipe) => {
                let over = splice_burst(&mut pipe, from, to, passage, way).await?;
                PIPE_POOL.release(pipe);
                over
            }
            Err(_) => copy_burst(from, to, passage, way).await?,
        };
        if over {
            to.shutdown_write();
            return Ok(());
        }
    }
}

/// Carries what is there; true at the end of the stream.
async fn splice_burst(
    pipe: &mut Pipe,
    from: &StreamSocket,
    to: &StreamSocket,
    passage: TunnelContext<'_>,
    way: Direction,
) -> io::Result<bool> {
    loop {
        consume_budget().await; // two fast sides must not keep a thread, nor a cut waiting
        match passage.read(from, way, |most| pipe.fill(from.as_fd(), most)) {
            Ok(0) => return Ok(true),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
        while pipe.buffered() > 0 {
            match to.try_io(Interest::WRITABLE, || pipe.drain(to.as_fd())) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => to.writable().await?,
                Err(error) => return Err(error),
            }
        }
    }
}

/// The same by a buffer of our own.
async fn copy_burst(
    from: &StreamSocket,
    to: &StreamSocket,
    passage: TunnelContext<'_>,
    way: Direction,
) -> io::Result<bool> {
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        consume_budget().await;
        let receive = |most: usize| {
            let room = buffer.get_mut(..most.min(COPY_BYTES)).unwrap_or_default();
            (&*socket2::SockRef::from(from)).read(room)
        };
        let read = match passage.read(from, way, receive) {
            Ok(0) => return Ok(true),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        };
        write_all(to, buffer.get(..read).unwrap_or_default()).await?;
    }
}

impl TunnelContext<'_> {
    /// Reads what there is, up to what is leased for it before it moves; the rest is given back.
    fn read(
        &self,
        from: &StreamSocket,
        way: Direction,
        receive: impl FnOnce(usize) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let what = match way {
            Direction::Down => UsageKind::Download,
            Direction::Up => UsageKind::Upload,
        };
        if self.cut.reason().is_some() {
            return Err(io::ErrorKind::ConnectionAborted.into()); // whoever waits for it has not run yet
        }
        let lease = match self.charges.lease(what) {
            Ok(lease) => lease,
            Err(spent) => return self.cut_over_budget(from, spent.reason()),
        };
        let most = usize::try_from(lease.bytes).unwrap_or(usize::MAX);
        let read = from.try_io(Interest::READABLE, || receive(most));
        let moved = *read.as_ref().unwrap_or(&0) as u64;
        self.charges.refund(&lease, moved);
        match way {
            Direction::Down => self.byte_count.add_received(moved),
            Direction::Up => self.byte_count.add_sent(moved),
        }
        read
    }

    /// Nothing more may pass: the tunnel is cut if there is more, and not if this was the end of it.
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

/// Writes all of `bytes`.
pub(crate) async fn write_all(to: &StreamSocket, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.try_write(bytes) {
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => to.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
