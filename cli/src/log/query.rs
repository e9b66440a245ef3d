//! `sandbar log query`: totals by host and by reason over the selected records.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use audit::view::{RecordStage, RecordView, for_each_line};

use super::filter::FilterArgs;
use super::render::{escape_json, escape_terminal, format_record};
use crate::OutputOptions;
use crate::terminal::{HEAD, paint};

/// Maximum number of hosts counted separately. Sandboxes choose the names, so memory must be bounded.
const HOSTS_MAX: usize = 100_000;
/// Key for everything beyond `HOSTS_MAX`.
const OTHERS: &str = "(others)";

/// Summarise the log by host and by reason
#[derive(clap::Args)]
pub(crate) struct QueryArgs {
    /// Segments, or directories of segments
    #[arg(default_value = "log", value_name = "FILES")]
    files: Vec<PathBuf>,
    /// List the selected records instead of totals
    #[arg(long)]
    list: bool,
    /// Number of hosts and reasons to show
    #[arg(long, default_value_t = 20, value_name = "COUNT")]
    top: usize,
    #[command(flatten)]
    filter: FilterArgs,
}

/// Summarises a log. Exit status: 0, or 2 if it cannot be read.
pub(crate) fn query(args: &QueryArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let filter = args.filter.to_filter();
    let mut totals = LogTotals::default();
    for path in super::find_segments(&args.files)? {
        let read = for_each_line(&path, |line| {
            let Some(view) = RecordView::parse(line) else { return totals.unread += 1 };
            if !args.list {
                totals.revert_decision(&view);
            }
            if !filter.matches(&view) {
                return;
            }
            match (args.list, output.json) {
                (false, _) => totals.count(&view),
                (true, false) => anstream::println!("{}", format_record(&view)),
                (true, true) => anstream::println!("{}", escape_json(line)),
            }
        });
        read.with_context(|| format!("cannot read {}", path.display()))?;
    }
    match (args.list, output.json) {
        (true, _) => {}
        (false, true) => anstream::println!("{}", totals.to_json(args.top)),
        (false, false) => totals.print(args.top),
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Default)]
struct LogTotals {
    hosts: HashMap<String, HostTotals>,
    reasons: HashMap<String, u64>,
    /// Host and reason of counted decisions that have no outcome yet, by attempt.
    open: HashMap<String, (String, String)>,
    total: HostTotals,
    findings: u64,
    /// Attempts recorded only as a count.
    folded: u64,
    /// Lines that are not records.
    unread: u64,
}

/// Totals of one host, or of all.
#[derive(Clone, Copy, Default)]
struct HostTotals {
    allowed: u64,
    denied: u64,
    sent: u64,
    received: u64,
}

impl HostTotals {
    /// Adds a record that stands for `count` attempts.
    fn add(&mut self, view: &RecordView<'_>, count: u64) {
        let (sent, received) = view.bytes();
        let allowed = matches!(view.stage(), RecordStage::Answered | RecordStage::Decision);
        let denied = view.stage() == RecordStage::Denied || is_overruled(view);
        self.allowed += if allowed { count } else { 0 };
        self.denied += if denied { count } else { 0 };
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
            RecordStage::Answered | RecordStage::Decision | RecordStage::Denied | RecordStage::Outcome => {
                let count = view.folded().saturating_add(1);
                self.total.add(view, count);
                // A summary names the host of the first attempt only.
                let known = if view.is_summary() { 1 } else { count };
                self.host_totals(view.host().unwrap_or("-")).add(view, known);
                if let Some(reason) = view.status_detail.as_deref().filter(|_| counts_reason(view)) {
                    *bounded_entry(&mut self.reasons, reason) += count;
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

    /// Subtracts an allowed decision that its outcome overruled: an attempt refused after its decision does
    /// not count as allowed, whether or not the filter selects the outcome.
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
        for (host, totals) in rank_top(&self.hosts, top, |totals| totals.allowed + totals.denied) {
            anstream::println!("{}  {}", format_row(totals), escape_terminal(host));
        }
        anstream::println!("{}  total", format_row(&self.total));
        anstream::println!("\n{}", paint(HEAD, format!("{:>12}  reason", "attempts")));
        for (reason, count) in rank_top(&self.reasons, top, |count| *count) {
            anstream::println!("{count:>12}  {}", escape_terminal(reason));
        }
        for (count, what) in [
            (self.findings, "findings"),
            (self.folded, "of these attempts sent nothing and have no record of their own"),
            (self.unread, "lines that are not records: run `sandbar log verify`"),
        ] {
            if count > 0 {
                anstream::println!("\n{count:>12}  {what}");
            }
        }
    }

    fn to_json(&self, top: usize) -> serde_json::Value {
        let hosts = rank_top(&self.hosts, top, |totals| totals.allowed + totals.denied);
        let hosts: Vec<_> = hosts.into_iter().map(|(host, totals)| row_json(host, totals)).collect();
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

/// Whether the outcome says that an allowed attempt was refused or cut after its decision.
fn is_overruled(view: &RecordView<'_>) -> bool {
    view.stage() == RecordStage::Outcome && matches!(view.ending(), Some("refused" | "revoked"))
}

/// Whether the record's reason counts for the attempt: a decision or refusal, or an outcome that
/// overrules the decision.
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

fn format_row(totals: &HostTotals) -> String {
    let cells = [totals.allowed, totals.denied, totals.sent, totals.received].map(|n| format!("{n:>12}"));
    cells.join(" ")
}

fn row_json(host: &str, totals: &HostTotals) -> serde_json::Value {
    serde_json::json!({
        "host": host,
        "allowed": totals.allowed,
        "denied": totals.denied,
        "bytes_out": totals.sent,
        "bytes_in": totals.received,
    })
}
