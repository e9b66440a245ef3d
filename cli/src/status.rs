//! `sandbar status`: shows the state of the running instance and its open connections.

use std::process::ExitCode;

use serde_json::Value;

use super::instance::RunningInstance;
use super::secret::describe_state;
use super::{EXIT_NEGATIVE, OutputOptions};
use crate::terminal::{BAD, FAINT, GOOD, paint, print_json};

/// Show the state of the running instance
#[derive(clap::Args, Debug)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    running: RunningInstance,
    /// Show what one sandbox uses of its quotas, and its signals since the start
    #[arg(long, value_name = "ID", conflicts_with_all = ["connections", "cut"])]
    sandbox: Option<String>,
    /// List open connections
    #[arg(long, conflicts_with = "cut")]
    connections: bool,
    /// Cut one connection or stream, by its number in --connections
    #[arg(long, value_name = "NUMBER")]
    cut: Option<u64>,
}

/// Shows the status. Exit status: 0 ready, 1 not ready, 2 no running instance.
pub(crate) fn status(args: &StatusArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let (method, path) = match (args.cut, &args.sandbox, args.connections) {
        (Some(id), ..) => ("DELETE", format!("/connections/{id}")),
        (None, Some(sandbox), _) => ("GET", format!("/sandboxes/{sandbox}")),
        (None, None, true) => ("GET", "/connections".to_owned()),
        (None, None, false) => ("GET", "/status".to_owned()),
    };
    let reply = args.running.request(method, &path, &Value::Null)?;
    match (output.json, args.cut, &args.sandbox, args.connections) {
        (true, ..) => print_json(&reply),
        (false, Some(id), ..) => anstream::println!("cut {id}"),
        (false, None, Some(_), _) => print_sandbox(&reply),
        (false, None, None, true) => print_connections(&reply),
        (false, None, None, false) => print_status(&reply),
    }
    let ready = reply.get("ready").and_then(Value::as_bool).unwrap_or(true);
    Ok(if ready { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NEGATIVE) })
}

fn print_status(reply: &Value) {
    let at = |pointer: &str| reply.pointer(pointer).map(value_text).unwrap_or_default();
    let (style, word) = match reply.get("ready").and_then(Value::as_bool) {
        Some(true) => (GOOD, "ready"),
        _ => (BAD, "not ready"),
    };
    anstream::println!("{} sandbar {}, up {} s", paint(style, word), at("/version"), at("/uptime_seconds"));
    for listener in reply.get("listeners").and_then(Value::as_array).into_iter().flatten() {
        print_field("listens", &value_text(listener));
    }
    print_field(
        "policy",
        &format!(
            "generation {}, {} sandboxes, {}",
            at("/policy/generation"),
            at("/policy/sandboxes"),
            at("/policy/digest")
        ),
    );
    if let Some(trouble) = reply.pointer("/policy/trouble").and_then(Value::as_str) {
        let closed = reply.pointer("/policy/closed").and_then(Value::as_bool).unwrap_or_default();
        let effect = if closed { ", so everything is denied" } else { "" };
        print_field("stale", &format!("the policies on disk are invalid{effect}:\n{trouble}"));
    }
    for part in reply.get("unapplied").and_then(Value::as_array).into_iter().flatten() {
        print_field(
            "restart",
            &format!("{} has changed and is not applied until a restart", value_text(part)),
        );
    }
    print_field("open", &format!("{} connections, {} tunnels and requests", at("/connections"), at("/open")));
    print_field(
        "log",
        &format!(
            "{} records written, {} lost, {} attempts refused because the log was unavailable",
            at("/log/written"),
            at("/log/lost"),
            at("/log/refused")
        ),
    );
    print_field(
        "disk",
        &format!(
            "{} of {} bytes of log ({} %), {} kept for each sandbox",
            at("/log/usage/bytes"),
            at("/log/usage/max_bytes"),
            at("/log/usage/percent"),
            at("/log/usage/share")
        ),
    );
    for (sandbox, used) in largest_logs(reply) {
        print_field("", &format!("{} bytes of `{sandbox}`", value_text(used)));
    }
    for one in reply.get("credentials").and_then(Value::as_array).into_iter().flatten() {
        let at = |name: &str| one.get(name).map(value_text).unwrap_or_default();
        print_field("key", &format!("{} ({}): {}", at("name"), at("source"), describe_state(one)));
    }
    for hanging in reply.get("hanging_files").and_then(Value::as_array).into_iter().flatten() {
        let at = |name: &str| hanging.get(name).map(value_text).unwrap_or_default();
        print_field("hangs", &format!("{} has not answered for {} s", at("path"), at("seconds")));
    }
    if let Some(trouble) = reply.pointer("/log/trouble").and_then(Value::as_str) {
        print_field("trouble", trouble);
    }
}

fn print_sandbox(reply: &Value) {
    let at = |name: &str| reply.get(name).map(value_text).unwrap_or_default();
    anstream::println!("{} (tenant {}, environment {})", at("sandbox"), at("tenant"), at("environment"));
    for quota in reply.get("quotas").and_then(Value::as_array).into_iter().flatten() {
        let at = |name: &str| quota.get(name).map(value_text).unwrap_or_default();
        let towards = quota.get("towards").and_then(Value::as_str).map(|to| format!(" (most: {to})"));
        anstream::println!(
            "  {:<12} {} used; {} kept for it, {} at most; all sandboxes use {} of {}{}",
            at("resource"),
            at("used"),
            at("share"),
            at("per_sandbox"),
            at("used_by_all"),
            at("total"),
            towards.unwrap_or_default()
        );
    }
    let signals = reply.get("signals").and_then(Value::as_object);
    for (code, counts) in signals.into_iter().flatten() {
        let at = |name: &str| counts.get(name).map(value_text).unwrap_or_default();
        anstream::println!("  {code:<18} {} flagged, {} denied since the start", at("flagged"), at("denied"));
    }
    if signals.is_some_and(|signals| signals.is_empty()) {
        anstream::println!("  no signals since the start");
    }
}

/// Returns the sandboxes with the most bytes in the log; `--json` has all.
fn largest_logs(reply: &Value) -> Vec<(&String, &Value)> {
    const SHOWN: usize = 5;
    let sandboxes = reply.pointer("/log/usage/sandboxes").and_then(Value::as_object);
    let mut all: Vec<_> =
        sandboxes.into_iter().flatten().filter_map(|(id, used)| Some((id, used.get("bytes")?))).collect();
    all.sort_by_key(|(_, used)| std::cmp::Reverse(used.as_u64()));
    all.truncate(SHOWN);
    all
}

fn print_connections(reply: &Value) {
    for open in reply.get("connections").and_then(Value::as_array).into_iter().flatten() {
        let at = |name: &str| open.get(name).map(value_text).unwrap_or_default();
        anstream::println!(
            "{:>6} {} {} {}:{} {} {} s, {} B up, {} B down",
            at("id"),
            at("sandbox"),
            at("how"),
            at("host"),
            at("port"),
            at("request"),
            at("seconds"),
            at("sent"),
            at("received")
        );
    }
    anstream::println!("{} open", reply.get("open").map(value_text).unwrap_or_default());
}

fn value_text(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_null() => "-".to_owned(),
        None => value.to_string(),
    }
}

fn print_field(head: &str, text: &str) {
    anstream::println!("  {} {text}", paint(FAINT, format!("{head:<7}")));
}
