//! Dialling: only with a permit for these addresses, and only with the receipt of its record.
//!
//! The addresses of a host race as RFC 8305 describes: families alternate, the next address starts while the one before
//! is still silent, and the first to connect wins. So a family that is announced but not routed costs a quarter of a
//! second instead of a timeout. Each attempt reserves its own descriptor, port and memory, and losers give theirs back
//! when the race ends.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

use audit::Receipt;
use rules::{DialPermit, Reason};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::egress::connect::DialledConnection;
use crate::egress::shared::Shared;
use crate::report::metrics;
use crate::report::refusal::Refusal;

/// Addresses of a host that are tried.
pub(crate) const MAX_DIAL_ADDRESSES: usize = 4;

/// How long an attempt is alone before the next address is tried as well (RFC 8305, section 8).
const CONNECTION_ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// The admitted addresses of a host that are left to try.
#[derive(Clone, Debug)]
pub(crate) struct DialRace {
    /// In the order in which they are tried.
    addresses: Vec<SocketAddr>,
    /// The address that accepted the last connection.
    winner: Arc<Mutex<Option<SocketAddr>>>,
}

impl DialRace {
    /// # Errors
    ///
    /// Returns a reason if the permit is not for a port.
    pub(crate) fn new(permit: &DialPermit) -> Result<Self, Reason> {
        let port = permit.permit().port().ok_or(Reason::PortNotListed)?;
        let addresses = permit.addresses().iter().map(|address| SocketAddr::new(*address, port));
        Ok(DialRace { addresses: alternate_families(addresses), winner: Arc::default() })
    }

    /// The address that is tried first.
    pub(crate) fn first(&self) -> Option<SocketAddr> {
        self.addresses.first().copied()
    }

    pub(crate) fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    pub(crate) fn set_winner(&self, address: Option<SocketAddr>) {
        *sys::lock(&self.winner) = address;
    }

    /// After a failure to connect, whether another try may help: not if all addresses failed, but if one accepted the
    /// connection and then failed in TLS. That one is not tried again.
    pub(crate) fn next_try(&mut self) -> bool {
        let Some(failed) = sys::lock(&self.winner).take() else { return false };
        self.addresses.retain(|address| *address != failed);
        !self.addresses.is_empty()
    }
}

/// Connects to the address of the permit that answers first, for at most `most`.
pub(crate) async fn dial(
    permit: &DialPermit,
    _receipt: &Receipt,
    shared: &Shared,
    most: Duration,
) -> Result<(TcpStream, DialledConnection), Refusal> {
    let race = DialRace::new(permit)?;
    let dialler = shared.dialler(permit.permit().sandbox(), race, 0);
    let started = Instant::now();
    match timeout(most, dialler.dial()).await {
        Ok(dialled) => dialled.inspect(|_| metrics::observe_connect(started.elapsed())),
        Err(_) => Err(Refusal::from(Reason::UpstreamTimeout).with_detail("no address answers in time")),
    }
}

/// Runs `attempt` on one address after the other, without waiting for a slow one, and returns the first success; or the
/// last refusal once all have failed. Unfinished attempts are dropped.
pub(crate) async fn race<T, F: Future<Output = Result<T, Refusal>>>(
    addresses: &[SocketAddr],
    attempt: impl Fn(SocketAddr) -> F,
) -> Result<T, Refusal> {
    let mut refusal = Refusal::from(Reason::UpstreamUnreachable);
    let mut waiting = addresses.iter();
    let mut running: Vec<Pin<Box<F>>> = Vec::with_capacity(addresses.len());
    loop {
        running.extend(waiting.next().map(|address| Box::pin(attempt(*address))));
        if running.is_empty() {
            return Err(refusal);
        }
        let finished = poll_fn(|context| {
            let mut polled = running.iter_mut().enumerate();
            let ready = polled.find_map(|(index, attempt)| match attempt.as_mut().poll(context) {
                Poll::Ready(done) => Some((index, done)),
                Poll::Pending => None,
            });
            ready.map_or(Poll::Pending, Poll::Ready)
        });
        tokio::select! {
            (index, done) = finished => {
                drop(running.swap_remove(index));
                match done {
                    Ok(won) => return Ok(won),
                    Err(failed) => refusal = failed, // the next one starts at once
                }
            }
            () = sleep(CONNECTION_ATTEMPT_DELAY), if waiting.len() > 0 => {}
        }
    }
}

/// Orders addresses as they are tried: the families alternate (RFC 8305, section 4), and each keeps its order.
fn alternate_families(addresses: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let all: Vec<SocketAddr> = addresses.collect();
    let Some(first) = all.first() else { return all };
    let (mut one, mut other): (Vec<_>, Vec<_>) =
        all.iter().partition(|address| address.is_ipv4() == first.is_ipv4());
    let longest = one.len().max(other.len());
    let (mut one, mut other) = (one.drain(..), other.drain(..));
    let pairs = (0..longest).flat_map(|_| [one.next(), other.next()]);
    pairs.flatten().take(MAX_DIAL_ADDRESSES).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn families_alternate() {
        for (given, tried) in [
            (&[][..], &[][..]),
            (&["192.0.2.1:1"], &["192.0.2.1:1"]),
            (
                &["[2001:db8::1]:1", "[2001:db8::2]:1", "[2001:db8::3]:1", "192.0.2.1:1"],
                &["[2001:db8::1]:1", "192.0.2.1:1", "[2001:db8::2]:1", "[2001:db8::3]:1"],
            ),
            (
                &[
                    "192.0.2.1:1",
                    "192.0.2.2:1",
                    "192.0.2.3:1",
                    "192.0.2.4:1",
                    "192.0.2.5:1",
                    "[2001:db8::1]:1",
                ],
                &["192.0.2.1:1", "[2001:db8::1]:1", "192.0.2.2:1", "192.0.2.3:1"],
            ),
        ] {
            assert_eq!(alternate_families(addresses(given).into_iter()), addresses(tried), "{given:?}");
        }
    }

    /// What an address does, and when: its port says how many milliseconds it takes, its last octet whether it answers.
    async fn attempt(address: SocketAddr) -> Result<SocketAddr, Refusal> {
        sleep(Duration::from_millis(address.port().into())).await;
        let answers = address.to_string().contains(".1:");
        if answers { Ok(address) } else { Err(Reason::UpstreamUnreachable.into()) }
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_to_answer_wins() {
        for (given, winner, milliseconds) in [
            (&["192.0.2.1:10", "198.51.100.1:1"][..], Some("192.0.2.1:10"), 10),
            (&["192.0.2.1:9000", "198.51.100.1:10"], Some("198.51.100.1:10"), 260),
            (&["192.0.2.1:300", "198.51.100.1:9000"], Some("192.0.2.1:300"), 300),
            (&["192.0.2.9:5", "198.51.100.1:10"], Some("198.51.100.1:10"), 15),
            (&["192.0.2.9:9000", "198.51.100.9:0", "203.0.113.1:7"], Some("203.0.113.1:7"), 257),
            (&["192.0.2.9:5", "198.51.100.9:10"], None, 15),
            (&[], None, 0),
        ] {
            let started = tokio::time::Instant::now();
            let won = race(&addresses(given), attempt).await;
            assert_eq!(won.ok().map(|address| address.to_string()).as_deref(), winner, "{given:?}");
            assert_eq!(started.elapsed().as_millis(), milliseconds, "{given:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_that_lost_holds_nothing() {
        let held = Arc::new(());
        let attempt = |address: SocketAddr| {
            let held = held.clone();
            async move {
                sleep(Duration::from_millis(address.port().into())).await;
                Ok(held)
            }
        };
        let won =
            race(&addresses(&["192.0.2.1:9000", "192.0.2.2:9000", "192.0.2.3:1"]), attempt).await.unwrap();
        assert_eq!(Arc::strong_count(&won), 2, "the winner's, and the test's own");
    }
}
