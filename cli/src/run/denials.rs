//! Prints denials as they happen, one line per destination and reason, and counts them for the summary.

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

/// Maximum number of destinations counted separately; the rest is counted as one.
const MAX_DESTINATIONS: usize = 1024;
/// Maximum number of lines queued while the terminal is in raw mode.
const MAX_LINES: usize = 1024;
/// How often to check whether the terminal has left raw mode.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Key for the destinations beyond `MAX_DESTINATIONS`.
const OTHERS: &str = "(others)";

/// Observes attempts, prints denials and counts.
pub(super) struct DenialReporter {
    quiet: bool,
    terminal: TerminalState,
    advice: AllowAdvice,
    /// Set just before the command starts. Earlier attempts are the proxy's self-test.
    armed: AtomicBool,
    inner: Mutex<DenialState>,
    pending: Notify,
}

/// Where the user can allow a host.
#[derive(Clone, Debug)]
pub(super) enum AllowAdvice {
    /// With `--allow` on the command line.
    Argument,
    /// In this policy file.
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
    /// Completed attempts, by host.
    pub(super) reached: BTreeMap<String, u64>,
    /// Refusals, by destination and reason.
    pub(super) refused: BTreeMap<(String, &'static str), u64>,
    pub(super) sent: u64,
    pub(super) received: u64,
}

impl DenialReporter {
    pub(super) fn new(quiet: bool, terminal: TerminalState, advice: AllowAdvice) -> Self {
        let (armed, inner, pending) = (AtomicBool::new(false), Mutex::default(), Notify::new());
        DenialReporter { quiet, terminal, advice, armed, inner, pending }
    }

    pub(super) fn start_counting(&self) {
        self.armed.store(true, Ordering::Release);
    }

    pub(super) fn observe(&self, event: &AttemptEvent<'_>) {
        if !self.armed.load(Ordering::Acquire) {
            return;
        }
        match event.status {
            AttemptStatus::Allowed => {}
            AttemptStatus::Ended { .. } if matches!(event.facts, RecordedFacts::Query(_)) => {}
            AttemptStatus::Ended { sent, received } => {
                let tally = &mut self.lock().tally;
                tally.sent += sent;
                tally.received += received;
                let (host, _) = destination(event);
                count_bounded(&mut tally.reached, host, |others| others.to_owned());
            }
            AttemptStatus::Refused(code) => self.count_refusal(event, code.0),
        }
    }

    fn count_refusal(&self, event: &AttemptEvent<'_>, code: &'static str) {
        let (host, port) = destination(event);
        let shown = format_endpoint(&host, port);
        let mut inner = self.lock();
        let is_new = count_bounded(&mut inner.tally.refused, (shown.clone(), code), |others| {
            (others.to_owned(), code)
        });
        if is_new && !self.quiet && inner.lines.len() < MAX_LINES {
            let advice = self.advice.advise(&host, port, code, event);
            inner.lines.push(format!("denied {shown} ({code}) - {advice}"));
            drop(inner);
            self.pending.notify_one();
        }
    }

    /// Prints queued lines as soon as the terminal is not in raw mode. Call it in a loop: it also returns after a
    /// poll without printing.
    pub(super) async fn print_when_free(&self) {
        if self.lock().lines.is_empty() {
            self.pending.notified().await;
        }
        if self.terminal.is_raw_mode() {
            return tokio::time::sleep(POLL_INTERVAL).await;
        }
        self.flush_all();
    }

    /// Prints every queued line.
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

/// Formats host and port, with brackets around an IPv6 address.
fn format_endpoint(host: &str, port: Option<u16>) -> String {
    match (port, host.contains(':')) {
        (None, _) => host.to_owned(),
        (Some(port), false) => format!("{host}:{port}"),
        (Some(port), true) => format!("[{host}]:{port}"),
    }
}

/// Increments a count; returns whether the key is new.
fn count_bounded<K: Ord>(counts: &mut BTreeMap<K, u64>, key: K, others: impl Fn(&str) -> K) -> bool {
    if let Some(count) = counts.get_mut(&key) {
        *count += 1;
        return false;
    }
    let has_room = counts.len() < MAX_DESTINATIONS;
    *counts.entry(if has_room { key } else { others(OTHERS) }).or_default() += 1;
    has_room
}

/// Returns the host an attempt names, or else its original destination, and the port.
fn destination(event: &AttemptEvent<'_>) -> (String, Option<u16>) {
    let (host, port) = event.facts.destination();
    let original_dst = event.original_dst.map(|address: SocketAddr| address.ip().to_string());
    let host = host.map(audit::Text::to_display).or(original_dst).unwrap_or_else(|| "(unnamed)".to_owned());
    let port = match event.facts {
        RecordedFacts::Query(_) => None,
        RecordedFacts::Connection(_) | RecordedFacts::Memory(_) | RecordedFacts::Request(_) => {
            port.or(event.original_dst.map(|address| address.port()))
        }
    };
    (host, port)
}

impl AllowAdvice {
    fn advise(&self, host: &str, port: Option<u16>, code: &str, event: &AttemptEvent<'_>) -> String {
        if code != Reason::NotListed.code() {
            return event.advice.map(audit::Text::to_display).unwrap_or_default();
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
    fn p17_the_number_of_destinations_counted_separately_is_bounded() {
        let mut counts = BTreeMap::new();
        for at in 0..2 * MAX_DESTINATIONS {
            count_bounded(&mut counts, format!("h{at}"), str::to_owned);
        }
        assert_eq!(counts.len(), MAX_DESTINATIONS + 1);
        assert_eq!(counts.get(OTHERS), Some(&(MAX_DESTINATIONS as u64)));
        assert!(!count_bounded(&mut counts, "h0".to_owned(), str::to_owned), "the key is known");
    }
}
