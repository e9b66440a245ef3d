//! `sandbar log query`: sums by host and by reason of whatever records are wanted.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use audit::view::{RecordStage, RecordView, for_each_line};

use super::filter::FilterArgs;
use super::render::{escape_json, escape_terminal, format_record};
use crate::OutputOptions;
use crate::terminal::{HEAD, paint};

/// Most hosts that are counted one by one; sandboxes choose names, so there is a bound.
const HOSTS_MAX: usize = 100_000;
/// What is counted beyond.
const OTHERS: &str = "(others)";

/// Sum up the log by host and by reason
#[derive(clap::Args)]
pub(crate) struct QueryArgs {
    /// Segments, or directories of segments
    #[arg(default_value = "log", value_name = "FILES")]
    files: Vec<PathBuf>,
    /// Show the records that are wanted instead of sums
    #[arg(long)]
    list: bool,
    /// Show this many hosts and reasons
    #[arg(long, default_value_t = 20, value_name = "COUNT")]
    top: usize,
    #[command(flatten)]
    filter: FilterArgs,
}

/// Sums up a log. Exit status: 0, or 2 when it cannot be read.
pub(crate) fn query(args: &QueryArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let filter = args.filter.to_filter();
    let mut sums = LogTotals::default();
    for path in super::find_segments(&args.files)? {
        let read = for_each_line(&path, |line| {
            let Some(view) = RecordView::parse(line) else { return sums.unread += 1 };
            if !args.list {
                sums.revert_decision(&view);
            }
            if !filter.matches(&view) {
                return;
            }
            match (args.list, output.json) {
                (false, _) => sums.count(&view),
                (true, false) => anstream::println!("{}", format_record(&view)),
                (true, true) => anstream::println!("{}", escape_json(line)),
            }
        });
        read.with_context(|| format!("cannot read {}", path.display()))?;
    }
    match (args.list, output.json) {
        (true, _) => {}
        (false, true) => anstream::println!("{}", sums.to_json(args.top)),
        (false, false) => sums.print(args.top),
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Default)]
struct LogTotals {
    hosts: HashMap<String, HostTotals>,
    reasons: HashMap<String, u64>,
    /// The host and the reason of decisions that were counted and have no outcome yet, by attempt.
    open: HashMap<String, (String, String)>,
    total: HostTotals,
    findings: u64,
    /// Attempts that are told only as a count.
    folded: u64,
    /// Lines that are no record.
    unread: u64,
}

/// What happened with one host, or in all.
#[derive(Clone, Copy, Default)]
struct HostTotals {
    allowed: u64,
    denied: u64,
    sent: u64,
    received: u64,
}

impl HostTotals {
    fn add(&mut self, view: &RecordView<'_>) {
        let (sent, received) = view.bytes();
        self.allowed +=
            u64::from(matches!(view.stage(), RecordStage::Answered | RecordStage::Decision));
        self.denied += u64::from(view.stage() == RecordStage::Denied || is_overruled(view));
        self.sent += sent;
        self.received += received;
    }
}

impl LogTotals {
    fn count(&mut self, view: &RecordView<'_>) {
        self.folded += view.folded();
        match view.stage() {
            RecordStage::Lifecycle => {}
            RecordStage::Finding => self.findings += 1,
            RecordStage::Answered
            | RecordStage::Decision
            | RecordStage::Denied
            | RecordStage::Outcome => {
                self.total.add(view);
                self.host_totals(view.host().unwrap_or("-")).add(view);
                if let Some(reason) = view.status_detail.as_deref() {
                    *bounded_entry(&mut self.reasons, reason) += u64::from(counts_reason(view));
                }
                self.remember_decision(view);
            }
        }
    }

    fn remember_decision(&mut self, view: &RecordView<'_>) {
        if view.stage() == RecordStage::Decision && self.open.len() < HOSTS_MAX {
            let host = view.host().unwrap_or("-").to_owned();
            let reason = view.status_detail.as_deref().unwrap_or_default().to_owned();
            self.open.insert(view.metadata.correlation_uid.clone().into_owned(), (host, reason));
        }
    }

    /// An attempt that was refused after its decision was not allowed: what was counted for the
    /// decision is taken back, whether or not the outcome itself is wanted.
    fn revert_decision(&mut self, view: &RecordView<'_>) {
        if view.stage() != RecordStage::Outcome {
            return;
        }
        let decided = self.open.remove(&*view.metadata.correlation_uid);
        let Some((host, reason)) = decided.filter(|_| is_overruled(view)) else { return };
        let reason = bounded_entry(&mut self.reasons, &reason);
        *reason = reason.saturating_sub(1);
        self.total.allowed = self.total.allowed.saturating_sub(1);
        let host = self.host_totals(&host);
        host.allowed = host.allowed.saturating_sub(1);
    }

    fn host_totals(&mut self, host: &str) -> &mut HostTotals {
        bounded_entry(&mut self.hosts, host)
    }

    fn print(&self, top: usize) {
        let columns = ["allowed", "denied", "bytes out", "bytes in"].map(|c| format!("{c:>12}"));
        anstream::println!("{}", paint(HEAD, format!("{}  host", columns.join(" "))));
        for (host, sum) in rank_top(&self.hosts, top, |sum| sum.allowed + sum.denied) {
            anstream::println!("{}  {}", format_row(sum), escape_terminal(host));
        }
        anstream::println!("{}  in all", format_row(&self.total));
        anstream::println!("\n{}", paint(HEAD, format!("{:>12}  reason", "attempts")));
        for (reason, count) in rank_top(&self.reasons, top, |count| *count) {
            anstream::println!("{count:>12}  {}", escape_terminal(reason));
        }
        for (count, what) in [
            (self.findings, "findings"),
            (self.folded, "attempts that sent nothing and are only counted"),
            (self.unread, "lines that are no record: run `sandbar log verify`"),
        ] {
            if count > 0 {
                anstream::println!("\n{count:>12}  {what}");
            }
        }
    }

    fn to_json(&self, top: usize) -> serde_json::Value {
        let hosts = rank_top(&self.hosts, top, |sum| sum.allowed + sum.denied);
        let hosts: Vec<_> = hosts.into_iter().map(|(host, sum)| row_json(host, sum)).collect();
        let reasons = rank_top(&self.reasons, top, |count| *count);
        let reasons = reasons
            .into_iter()
            .map(|(reason, count)| serde_json::json!({ "reason": reason, "attempts": count }));
        serde_json::json!({
            "hosts": hosts,
            "reasons": reasons.collect::<Vec<_>>(),
            "total": row_json("", &self.total),
            "findings": self.findings,
            "folded": self.folded,
            "unread": self.unread,
        })
    }
}

/// Whether the record says that what was allowed was refused or cut after all.
fn is_overruled(view: &RecordView<'_>) -> bool {
    view.stage() == RecordStage::Outcome && matches!(view.ending(), Some("refused" | "revoked"))
}

/// Whether the record is the one that says why: the decision or the refusal, or an outcome that
/// overrules it.
fn counts_reason(view: &RecordView<'_>) -> bool {
    match view.stage() {
        RecordStage::Answered | RecordStage::Decision | RecordStage::Denied => true,
        RecordStage::Outcome => is_overruled(view),
        RecordStage::Finding | RecordStage::Lifecycle => false,
    }
}

fn bounded_entry<'a, V: Default>(map: &'a mut HashMap<String, V>, key: &str) -> &'a mut V {
    let key = if map.len() >= HOSTS_MAX && !map.contains_key(key) { OTHERS } else { key };
    map.entry(key.to_owned()).or_default()
}

fn rank_top<V>(map: &HashMap<String, V>, top: usize, rank: impl Fn(&V) -> u64) -> Vec<(&str, &V)> {
    let mut rows: Vec<(&str, &V)> = map.iter().map(|(key, value)| (key.as_str(), value)).collect();
    rows.sort_by(|one, other| rank(other.1).cmp(&rank(one.1)).then(one.0.cmp(other.0)));
    rows.truncate(top);
    rows.retain(|(_, value)| rank(value) > 0);
    rows
}

fn format_row(sum: &HostTotals) -> String {
    let cells = [sum.allowed, sum.denied, sum.sent, sum.received].map(|n| format!("{n:>12}"));
    cells.join(" ")
}

fn row_json(host: &str, sum: &HostTotals) -> serde_json::Value {
    serde_json::json!({
        "host": host,
        "allowed": sum.allowed,
        "denied": sum.denied,
        "bytes_out": sum.sent,
        "bytes_in": sum.received,
    })
}
