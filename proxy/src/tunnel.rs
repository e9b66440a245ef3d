//! Bytes both ways between two sockets: spliced, half-closes kept, counted, cut when idle, old or revoked.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use audit::Meter;
use rules::Reason;
use rules::limits::Limits;
use tokio::io::Interest;

use crate::live::Cut;
use crate::splice::{Pipe, Pipes};
use crate::stream::Socket;

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

/// Carries bytes until both sides are done, or the tunnel has to end.
pub(crate) async fn relay(
    client: &Socket,
    upstream: &Socket,
    meter: &Meter,
    limits: &Limits,
    cut: &Cut,
) -> Ended {
    let both = async {
        let up = flow(client, upstream, meter, Way::Up);
        let down = flow(upstream, client, meter, Way::Down);
        tokio::try_join!(up, down)
    };
    tokio::select! {
        flowed = both => flowed.map_or(Ended::Broken, |_| Ended::Both),
        reason = cut.cut() => Ended::Cut(reason),
        () = idle(meter, limits.tunnel_idle()) => Ended::Cut(Reason::IdleTooLong),
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
async fn flow(from: &Socket, to: &Socket, meter: &Meter, way: Way) -> io::Result<()> {
    loop {
        from.readable().await?;
        let over = match PIPES.take() {
            Ok(mut pipe) => {
                let over = splice_burst(&mut pipe, from, to, meter, way).await?;
                PIPES.give_back(pipe);
                over
            }
            Err(_) => copy_burst(from, to, meter, way).await?,
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
    meter: &Meter,
    way: Way,
) -> io::Result<bool> {
    loop {
        match from.try_io(Interest::READABLE, || pipe.fill(from.as_fd())) {
            Ok(0) => return Ok(true),
            Ok(moved) => count(meter, way, moved),
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
async fn copy_burst(from: &Socket, to: &Socket, meter: &Meter, way: Way) -> io::Result<bool> {
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        let read = match from.try_read(&mut buffer) {
            Ok(0) => return Ok(true),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        };
        count(meter, way, read);
        write_all(to, buffer.get(..read).unwrap_or_default()).await?;
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

fn count(meter: &Meter, way: Way, bytes: usize) {
    match way {
        Way::Down => meter.received(bytes as u64),
        Way::Up => meter.sent(bytes as u64),
    }
}
