//! `sandbar status`: asks the running program how it is doing, and what is open.

use std::process::ExitCode;

use serde_json::Value;

use super::instance::RunningInstance;
use super::{EXIT_NEGATIVE, OutputOptions};
use crate::terminal::{BAD, FAINT, GOOD, paint, print_json};

/// Ask the running program how it is doing
#[derive(clap::Args, Debug)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    running: RunningInstance,
    /// List what is open
    #[arg(long, conflicts_with = "cut")]
    connections: bool,
    /// Cut one connection or stream, by the number that --connections shows
    #[arg(long, value_name = "NUMBER")]
    cut: Option<u64>,
}

/// Asks. Exit status: 0 ready, 1 not ready, 2 nobody to ask.
pub(crate) fn status(args: &StatusArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let (method, path) = match (args.cut, args.connections) {
        (Some(id), _) => ("DELETE", format!("/connections/{id}")),
        (None, true) => ("GET", "/connections".to_owned()),
        (None, false) => ("GET", "/status".to_owned()),
    };
    let told = args.running.request(method, &path, &Value::Null)?;
    match (output.json, args.cut, args.connections) {
        (true, ..) => print_json(&told),
        (false, Some(id), _) => anstream::println!("cut {id}"),
        (false, None, true) => print_connections(&told),
        (false, None, false) => print_status(&told),
    }
    let ready = told.get("ready").and_then(Value::as_bool).unwrap_or(true);
    Ok(if ready { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NEGATIVE) })
}

fn print_status(told: &Value) {
    let at = |pointer: &str| told.pointer(pointer).map(value_text).unwrap_or_default();
    let (style, word) = match told.get("ready").and_then(Value::as_bool) {
        Some(true) => (GOOD, "ready"),
        _ => (BAD, "not ready"),
    };
    anstream::println!(
        "{} sandbar {}, up {} s",
        paint(style, word),
        at("/version"),
        at("/uptime_seconds")
    );
    for listener in told.get("listeners").and_then(Value::as_array).into_iter().flatten() {
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
    if let Some(trouble) = told.pointer("/policy/trouble").and_then(Value::as_str) {
        let closed = told.pointer("/policy/closed").and_then(Value::as_bool).unwrap_or_default();
        let what = if closed { ", so nothing passes" } else { "" };
        print_field("stale", &format!("the policies on disk are not good{what}:\n{trouble}"));
    }
    print_field(
        "open",
        &format!("{} connections, {} tunnels and requests", at("/connections"), at("/open")),
    );
    print_field(
        "log",
        &format!(
            "{} records written, {} lost, {} attempts refused for want of it",
            at("/log/written"),
            at("/log/lost"),
            at("/log/refused")
        ),
    );
    if let Some(trouble) = told.pointer("/log/trouble").and_then(Value::as_str) {
        print_field("trouble", trouble);
    }
}

fn print_connections(told: &Value) {
    for open in told.get("connections").and_then(Value::as_array).into_iter().flatten() {
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
    anstream::println!("{} open", told.get("open").map(value_text).unwrap_or_default());
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
