//! Denials as they happen, one line for each destination and reason, and the counts for the summary.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use audit::{Facts, Seen, Turn};
use rules::Reason;
use tokio::sync::Notify;

use super::terminal::Terminal;
use crate::terminal::{WARN, paint};

/// Most destinations that are told apart; the rest is counted as one.
const DESTINATIONS: usize = 1024;
/// Most lines that wait until the screen is free.
const LINES: usize = 1024;
/// How often it is looked whether the screen is free again.
const LOOK: Duration = Duration::from_millis(250);
/// What those that are not told apart are called.
const OTHERS: &str = "(others)";

/// What was seen so far.
pub(super) struct Denials {
    quiet: bool,
    terminal: Terminal,
    advice: Advice,
    /// Set once the command is about to run: before, the proxy tries itself.
    armed: AtomicBool,
    inner: Mutex<Inner>,
    news: Notify,
}

/// Where to write what would allow a host.
#[derive(Clone, Debug)]
pub(super) enum Advice {
    /// On the command line.
    Argument,
    /// In this file.
    Policy(String),
}

#[derive(Default)]
struct Inner {
    tally: Tally,
    lines: Vec<String>,
}

/// Counts for the summary.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    /// Attempts that ended by themselves, by host.
    pub(super) reached: BTreeMap<String, u64>,
    /// Refusals, by destination and reason.
    pub(super) refused: BTreeMap<(String, &'static str), u64>,
    pub(super) sent: u64,
    pub(super) received: u64,
}

impl Denials {
    pub(super) fn new(quiet: bool, terminal: Terminal, advice: Advice) -> Self {
        let (armed, inner, news) = (AtomicBool::new(false), Mutex::default(), Notify::new());
        Denials { quiet, terminal, advice, armed, inner, news }
    }

    pub(super) fn arm(&self) {
        self.armed.store(true, Ordering::Release);
    }

    pub(super) fn see(&self, seen: &Seen<'_>) {
        if !self.armed.load(Ordering::Acquire) {
            return;
        }
        match seen.turn {
            Turn::Allowed => {}
            Turn::Ended { .. } if matches!(seen.facts, Facts::Query(_)) => {}
            Turn::Ended { sent, received } => {
                let tally = &mut self.lock().tally;
                tally.sent += sent;
                tally.received += received;
                let (host, _) = destination(seen);
                count(&mut tally.reached, host, |others| others.to_owned());
            }
            Turn::Refused(code) => self.refused(seen, code.0),
        }
    }

    fn refused(&self, seen: &Seen<'_>, code: &'static str) {
        let (host, port) = destination(seen);
        let shown = joined(&host, port);
        let mut inner = self.lock();
        let fresh = count(&mut inner.tally.refused, (shown.clone(), code), |others| {
            (others.to_owned(), code)
        });
        if fresh && !self.quiet && inner.lines.len() < LINES {
            let advice = self.advice.line(&host, port, code, seen);
            inner.lines.push(format!("denied {shown} ({code}) - {advice}"));
            drop(inner);
            self.news.notify_one();
        }
    }

    /// Prints what there is to print, as soon as the screen is free. To be called again and again.
    pub(super) async fn tell(&self) {
        if self.lock().lines.is_empty() {
            self.news.notified().await;
        }
        if self.terminal.is_drawn_on() {
            return tokio::time::sleep(LOOK).await;
        }
        self.flush_all();
    }

    /// Prints everything that waits.
    pub(super) fn flush_all(&self) {
        let lines = std::mem::take(&mut self.lock().lines);
        for line in lines {
            anstream::eprintln!("{} {line}", paint(WARN, "sandbar:"));
        }
    }

    pub(super) fn tally(&self) -> Tally {
        self.lock().tally.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A host and its port, as they are written.
fn joined(host: &str, port: Option<u16>) -> String {
    match (port, host.contains(':')) {
        (None, _) => host.to_owned(),
        (Some(port), false) => format!("{host}:{port}"),
        (Some(port), true) => format!("[{host}]:{port}"),
    }
}

/// Counts one more; true if it is the first.
fn count<K: Ord>(counts: &mut BTreeMap<K, u64>, key: K, others: impl Fn(&str) -> K) -> bool {
    if let Some(count) = counts.get_mut(&key) {
        *count += 1;
        return false;
    }
    let room = counts.len() < DESTINATIONS;
    *counts.entry(if room { key } else { others(OTHERS) }).or_default() += 1;
    room
}

/// What an attempt is called: by its name, or where it was aimed.
fn destination(seen: &Seen<'_>) -> (String, Option<u16>) {
    let (host, port) = seen.facts.destination();
    let aimed = seen.aimed.map(|aimed: SocketAddr| aimed.ip().to_string());
    let host = host.map(audit::Text::shown).or(aimed).unwrap_or_else(|| "(unnamed)".to_owned());
    let port = match seen.facts {
        Facts::Query(_) => None,
        Facts::Connection(_) | Facts::Memory(_) | Facts::Request(_) => {
            port.or(seen.aimed.map(|aimed| aimed.port()))
        }
    };
    (host, port)
}

impl Advice {
    fn line(&self, host: &str, port: Option<u16>, code: &str, seen: &Seen<'_>) -> String {
        if code != Reason::NotListed.code() {
            return seen.advice.map(audit::Text::shown).unwrap_or_default();
        }
        let entry = joined(host, port.filter(|port| *port != 443));
        match self {
            Advice::Argument => format!("to allow it: --allow {entry}"),
            Advice::Policy(file) => {
                format!("to allow it: hosts = [\"{entry}\"] in an [[allow]] of {file}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_destinations_are_told_apart_than_there_is_room_for() {
        let mut counts = BTreeMap::new();
        for at in 0..2 * DESTINATIONS {
            count(&mut counts, format!("h{at}"), str::to_owned);
        }
        assert_eq!(counts.len(), DESTINATIONS + 1);
        assert_eq!(counts.get(OTHERS), Some(&(DESTINATIONS as u64)));
        assert!(!count(&mut counts, "h0".to_owned(), str::to_owned), "it is known");
    }
}
