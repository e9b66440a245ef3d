//! Bytes both ways between two sockets: spliced, half-closes kept, counted, cut when idle, old or revoked.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::Duration;

use audit::Meter;
use rules::Reason;
use rules::budget::Counted;
use rules::limits::Limits;
use tokio::io::Interest;
use tokio::task::coop::consume_budget;

use crate::budget::ledger::Tab;
use crate::budget::live::Cut;
use crate::egress::stream::Socket;
use sys::splice::{Pipe, Pipes};

/// Bytes copied at a time where there is no pipe.
const COPY_BYTES: usize = 64 << 10;

static PIPES: Pipes = Pipes::new();

/// How a tunnel ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// Both sides said all they had to say.
    Both,
    /// One of them broke.
    Broken,
    Cut(Reason),
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug)]
enum Way {
    Down,
    Up,
}

/// What counts, bounds and ends a tunnel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passage<'a> {
    pub(crate) meter: &'a Meter,
    pub(crate) cut: &'a Cut,
    pub(crate) tab: &'a Tab,
}

/// Carries bytes until both sides are done, or the tunnel has to end.
pub(crate) async fn relay(
    client: &Socket,
    upstream: &Socket,
    limits: &Limits,
    passage: Passage<'_>,
) -> Ended {
    let both = async {
        let up = flow(client, upstream, passage, Way::Up);
        let down = flow(upstream, client, passage, Way::Down);
        tokio::try_join!(up, down)
    };
    tokio::select! {
        flowed = both => match (flowed, passage.cut.why()) {
            (Ok(_), _) => Ended::Both,
            (Err(_), Some(reason)) => Ended::Cut(reason),
            (Err(_), None) => Ended::Broken,
        },
        reason = passage.cut.cut() => Ended::Cut(reason),
        () = idle(passage.meter, limits.tunnel_idle()) => Ended::Cut(Reason::IdleTooLong),
        () = tokio::time::sleep(limits.connection()) => Ended::Cut(Reason::LifetimeSpent),
    }
}

/// Returns once no byte has passed for `patience`, give or take half of it.
async fn idle(meter: &Meter, patience: Duration) {
    let mut before = meter.total();
    let mut still = 0;
    while still < 2 {
        tokio::time::sleep(patience / 2).await;
        let now = meter.total();
        still = if now == before { still + 1 } else { 0 };
        before = now;
    }
}

/// Carries one direction to its end, then says so to the other side.
async fn flow(from: &Socket, to: &Socket, passage: Passage<'_>, way: Way) -> io::Result<()> {
    loop {
        from.readable().await?;
        let over = match PIPES.take() {
            Ok(mut pipe) => {
                let over = splice_burst(&mut pipe, from, to, passage, way).await?;
                PIPES.give_back(pipe);
                over
            }
            Err(_) => copy_burst(from, to, passage, way).await?,
        };
        if over {
            to.end();
            return Ok(());
        }
    }
}

/// Carries what is there; true at the end of the stream.
async fn splice_burst(
    pipe: &mut Pipe,
    from: &Socket,
    to: &Socket,
    passage: Passage<'_>,
    way: Way,
) -> io::Result<bool> {
    loop {
        consume_budget().await; // two fast sides must not keep a thread, nor a cut waiting
        match passage.read(from, way, |most| pipe.fill(from.as_fd(), most)) {
            Ok(0) => return Ok(true),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
        while pipe.held() > 0 {
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
    from: &Socket,
    to: &Socket,
    passage: Passage<'_>,
    way: Way,
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

impl Passage<'_> {
    /// Reads what there is, up to what is leased for it before it moves; the rest is given back.
    fn read(
        &self,
        from: &Socket,
        way: Way,
        receive: impl FnOnce(usize) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let what = match way {
            Way::Down => Counted::Download,
            Way::Up => Counted::Upload,
        };
        if self.cut.why().is_some() {
            return Err(io::ErrorKind::ConnectionAborted.into()); // whoever waits for it has not run yet
        }
        let lease = match self.tab.lease(what) {
            Ok(lease) => lease,
            Err(spent) => return self.spent(from, spent.reason()),
        };
        let most = usize::try_from(lease.bytes).unwrap_or(usize::MAX);
        let read = from.try_io(Interest::READABLE, || receive(most));
        let moved = *read.as_ref().unwrap_or(&0) as u64;
        self.tab.give_back(&lease, moved);
        match way {
            Way::Down => self.meter.received(moved),
            Way::Up => self.meter.sent(moved),
        }
        read
    }

    /// Nothing more may pass: the tunnel is cut if there is more, and not if this was the end of it.
    fn spent(&self, from: &Socket, reason: Reason) -> io::Result<usize> {
        let mut next = [std::mem::MaybeUninit::uninit()];
        let socket = socket2::SockRef::from(from);
        match from.try_io(Interest::READABLE, || socket.peek(&mut next))? {
            0 => Ok(0),
            _ => {
                self.cut.now(reason);
                Err(io::ErrorKind::QuotaExceeded.into())
            }
        }
    }
}

/// Writes all of `bytes`.
pub(crate) async fn write_all(to: &Socket, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.try_write(bytes) {
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => to.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
