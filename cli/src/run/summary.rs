//! The summary of a run: as text, as JSON, and as a sentence for the log.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use super::denials::RunTally;
use crate::OutputOptions;
use crate::terminal::{FAINT, HEAD, paint};
use jail::ResourceUsage;

/// Maximum number of hosts listed in the text summary.
const MAX_LISTED: usize = 12;

/// A finished run.
pub(super) struct RunSummary {
    pub(super) wall: Duration,
    pub(super) usage: ResourceUsage,
    /// `None` if the jail failed.
    pub(super) status: Option<u8>,
    pub(super) log: PathBuf,
    pub(super) tally: RunTally,
}

impl RunSummary {
    /// One sentence for the log.
    pub(super) fn sentence(&self) -> String {
        let RunTally { reached, refused, sent, received } = &self.tally;
        let denied: u64 = refused.values().sum();
        let status = self.status.map_or("none".to_owned(), |status| status.to_string());
        let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
        format!(
            "exit status {status}; {} hosts reached, {} destinations refused {denied} times; {sent} bytes sent, {received} received; {} wall, {} CPU, {} bytes peak memory in one process",
            reached.len(),
            refused.len(),
            seconds(self.wall),
            seconds(self.usage.cpu),
            self.usage.peak
        )
    }

    /// Prints to stderr, because stdout belongs to the command.
    pub(super) fn print(&self, output: OutputOptions) {
        if output.json {
            return anstream::eprintln!("{}", self.to_json());
        }
        let RunTally { reached, refused, sent, received } = &self.tally;
        let line = |name: &str, value: String| {
            anstream::eprintln!("  {} {value}", paint(FAINT, format!("{name:<8}")));
        };
        let status = self.status.map_or("none".to_owned(), |status| status.to_string());
        anstream::eprintln!("{} exit status {status}", paint(HEAD, "sandbar:"));
        let hosts = reached.iter().map(|(host, count)| with_count(host, *count));
        line("reached", join_listed(hosts.collect()));
        let hosts =
            refused.iter().map(|((host, code), count)| with_count(&format!("{host} ({code})"), *count));
        line("refused", join_listed(hosts.collect()));
        line("bytes", format!("{} sent, {} received", format_bytes(*sent), format_bytes(*received)));
        line(
            "used",
            format!(
                "{:.2} s wall, {:.2} s CPU, {} in the largest process",
                self.wall.as_secs_f64(),
                self.usage.cpu.as_secs_f64(),
                format_bytes(self.usage.peak)
            ),
        );
        line("log", self.log.display().to_string());
    }

    fn to_json(&self) -> Value {
        let RunTally { reached, refused, sent, received } = &self.tally;
        let refused = refused.iter().map(|((destination, reason), count)| {
            json!({ "destination": destination, "reason": reason, "count": count })
        });
        json!({
            "exit_status": self.status,
            "reached": reached,
            "refused": refused.collect::<Vec<_>>(),
            "bytes_sent": sent,
            "bytes_received": received,
            "wall_seconds": self.wall.as_secs_f64(),
            "cpu_seconds": self.usage.cpu.as_secs_f64(),
            "peak_bytes": self.usage.peak,
            "log": self.log,
        })
    }
}

fn with_count(what: &str, count: u64) -> String {
    if count == 1 { what.to_owned() } else { format!("{what} x{count}") }
}

fn join_listed(mut all: Vec<String>) -> String {
    let more = all.len().saturating_sub(MAX_LISTED);
    all.truncate(MAX_LISTED);
    match (all.is_empty(), more) {
        (true, _) => "nothing".to_owned(),
        (false, 0) => all.join(", "),
        (false, more) => format!("{} and {more} more", all.join(", ")),
    }
}

fn format_bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KB", "MB", "GB", "TB"];
    let mut value = count as f64;
    let mut unit = "bytes";
    for larger in UNITS {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = larger;
    }
    if unit == "bytes" { format!("{count} bytes") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_readable() {
        for (count, text) in [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 KB"), (12_345_678, "12.3 MB")] {
            assert_eq!(format_bytes(count), text);
        }
        assert_eq!(join_listed(vec![]), "nothing");
        assert_eq!(join_listed((0..14).map(|at| at.to_string()).collect()).matches(',').count(), 11);
    }
}
