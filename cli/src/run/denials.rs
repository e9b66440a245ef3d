//! Denials as they happen, one line for each destination and reason, and the counts for the summary.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use audit::{AttemptEvent, AttemptStatus, RecordedFacts};
use rules::Reason;
use tokio::sync::Notify;

use super::terminal::TerminalState;
use crate::terminal::{WARN, paint};

/// Most destinations that are told apart; the rest is counted as one.
const MAX_DESTINATIONS: usize = 1024;
/// Most lines that wait until the screen is free.
const MAX_LINES: usize = 1024;
/// How often it is looked whether the screen is free again.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// What those that are not told apart are called.
const OTHERS: &str = "(others)";

/// What was seen so far.
pub(super) struct DenialReporter {
    quiet: bool,
    terminal: TerminalState,
    advice: AllowAdvice,
    /// Set once the command is about to run: before, the proxy tries itself.
    armed: AtomicBool,
    inner: Mutex<DenialState>,
    news: Notify,
}

/// Where to write what would allow a host.
#[derive(Clone, Debug)]
pub(super) enum AllowAdvice {
    /// On the command line.
    Argument,
    /// In this file.
    Policy(String),
}

#[derive(Default)]
struct DenialState {
    tally: RunTally,
    lines: Vec<String>,
}

/// Counts for the summary.
#[derive(Clone, Debug, Default)]
pub(super) struct RunTally {
    /// Attempts that ended by themselves, by host.
    pub(super) reached: BTreeMap<String, u64>,
    /// Refusals, by destination and reason.
    pub(super) refused: BTreeMap<(String, &'static str), u64>,
    pub(super) sent: u64,
    pub(super) received: u64,
}

impl DenialReporter {
    pub(super) fn new(quiet: bool, terminal: TerminalState, advice: AllowAdvice) -> Self {
        let (armed, inner, news) = (AtomicBool::new(false), Mutex::default(), Notify::new());
        DenialReporter { quiet, terminal, advice, armed, inner, news }
    }

    pub(super) fn start_counting(&self) {
        self.armed.store(true, Ordering::Release);
    }

    pub(super) fn observe(&self, seen: &AttemptEvent<'_>) {
        if !self.armed.load(Ordering::Acquire) {
            return;
        }
        match seen.status {
            AttemptStatus::Allowed => {}
            AttemptStatus::Ended { .. } if matches!(seen.facts, RecordedFacts::Query(_)) => {}
            AttemptStatus::Ended { sent, received } => {
                let tally = &mut self.lock().tally;
                tally.sent += sent;
                tally.received += received;
                let (host, _) = destination(seen);
                count_bounded(&mut tally.reached, host, |others| others.to_owned());
            }
            AttemptStatus::Refused(code) => self.count_refusal(seen, code.0),
        }
    }

    fn count_refusal(&self, seen: &AttemptEvent<'_>, code: &'static str) {
        let (host, port) = destination(seen);
        let shown = format_endpoint(&host, port);
        let mut inner = self.lock();
        let fresh = count_bounded(&mut inner.tally.refused, (shown.clone(), code), |others| {
            (others.to_owned(), code)
        });
        if fresh && !self.quiet && inner.lines.len() < MAX_LINES {
            let advice = self.advice.advise(&host, port, code, seen);
            inner.lines.push(format!("denied {shown} ({code}) - {advice}"));
            drop(inner);
            self.news.notify_one();
        }
    }

    /// Prints what there is to print, as soon as the screen is free. To be called again and again.
    pub(super) async fn print_when_free(&self) {
        if self.lock().lines.is_empty() {
            self.news.notified().await;
        }
        if self.terminal.is_raw_mode() {
            return tokio::time::sleep(POLL_INTERVAL).await;
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

    pub(super) fn tally(&self) -> RunTally {
        self.lock().tally.clone()
    }

    fn lock(&self) -> MutexGuard<'_, DenialState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A host and its port, as they are written.
fn format_endpoint(host: &str, port: Option<u16>) -> String {
    match (port, host.contains(':')) {
        (None, _) => host.to_owned(),
        (Some(port), false) => format!("{host}:{port}"),
        (Some(port), true) => format!("[{host}]:{port}"),
    }
}

/// Counts one more; true if it is the first.
fn count_bounded<K: Ord>(
    counts: &mut BTreeMap<K, u64>,
    key: K,
    others: impl Fn(&str) -> K,
) -> bool {
    if let Some(count) = counts.get_mut(&key) {
        *count += 1;
        return false;
    }
    let room = counts.len() < MAX_DESTINATIONS;
    *counts.entry(if room { key } else { others(OTHERS) }).or_default() += 1;
    room
}

/// What an attempt is called: by its name, or where it was aimed.
fn destination(seen: &AttemptEvent<'_>) -> (String, Option<u16>) {
    let (host, port) = seen.facts.destination();
    let aimed = seen.original_dst.map(|aimed: SocketAddr| aimed.ip().to_string());
    let host =
        host.map(audit::Text::to_display).or(aimed).unwrap_or_else(|| "(unnamed)".to_owned());
    let port = match seen.facts {
        RecordedFacts::Query(_) => None,
        RecordedFacts::Connection(_) | RecordedFacts::Memory(_) | RecordedFacts::Request(_) => {
            port.or(seen.original_dst.map(|aimed| aimed.port()))
        }
    };
    (host, port)
}

impl AllowAdvice {
    fn advise(&self, host: &str, port: Option<u16>, code: &str, seen: &AttemptEvent<'_>) -> String {
        if code != Reason::NotListed.code() {
            return seen.advice.map(audit::Text::to_display).unwrap_or_default();
        }
        let entry = format_endpoint(host, port.filter(|port| *port != 443));
        match self {
            AllowAdvice::Argument => format!("to allow it: --allow {entry}"),
            AllowAdvice::Policy(file) => {
                format!("to allow it: hosts = [\"{entry}\"] in an [[allow]] of {file}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p17_no_more_destinations_are_told_apart_than_there_is_room_for() {
        let mut counts = BTreeMap::new();
        for at in 0..2 * MAX_DESTINATIONS {
            count_bounded(&mut counts, format!("h{at}"), str::to_owned);
        }
        assert_eq!(counts.len(), MAX_DESTINATIONS + 1);
        assert_eq!(counts.get(OTHERS), Some(&(MAX_DESTINATIONS as u64)));
        assert!(!count_bounded(&mut counts, "h0".to_owned(), str::to_owned), "it is known");
    }
}
