//! `sandbar grant`, `grants`, `revoke` and `pending`: a person lets a sandbox reach a host for a while, and says why.

use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};

use super::OutputOptions;
use super::instance::RunningInstance;
use crate::terminal::{BAD, FAINT, GOOD, paint, print_json};
use proxy::policy::grants::GrantRequest;

/// Let a sandbox reach a host for a while; it is recorded, and ends by itself
#[derive(clap::Args, Debug)]
pub(crate) struct GrantArgs {
    #[command(flatten)]
    running: RunningInstance,
    /// The sandbox
    #[arg(long, value_name = "ID")]
    sandbox: String,
    /// The host, as in a rule: `api.example.com`, `*.example.com`, with `:port` if not 443
    #[arg(long, value_name = "PATTERN")]
    host: String,
    /// Only this method; may be repeated
    #[arg(long, value_name = "METHOD")]
    method: Vec<String>,
    /// Only this path, as in a rule: `/v1/**`; may be repeated
    #[arg(long, value_name = "PATTERN")]
    path: Vec<String>,
    /// At most so many bytes in all, both ways
    #[arg(long, value_name = "BYTES")]
    bytes: Option<u64>,
    #[command(flatten)]
    terms: GrantTerms,
}

/// For how long, why, and by whom.
#[derive(clap::Args, Debug)]
struct GrantTerms {
    /// For how long, such as 30m or 2h
    #[arg(long = "for", value_name = "TIME", value_parser = humantime::parse_duration)]
    time: Duration,
    /// Why: it is recorded
    #[arg(long, value_name = "TEXT")]
    why: String,
    /// Who grants it, if not you; the kernel's word on who you are is recorded beside
    #[arg(long, value_name = "WHO")]
    by: Option<String>,
}

/// List the grants in force
#[derive(clap::Args, Debug)]
pub(crate) struct GrantsArgs {
    #[command(flatten)]
    running: RunningInstance,
}

/// End a grant before its time, and what is open by it
#[derive(clap::Args, Debug)]
pub(crate) struct RevokeArgs {
    #[command(flatten)]
    running: RunningInstance,
    /// The grant's number, as `sandbar grants` shows it
    #[arg(value_name = "NUMBER")]
    id: u64,
}

/// List what was refused and a grant could lift, the newest first; or approve one of them
#[derive(clap::Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct PendingArgs {
    #[command(flatten)]
    running: RunningInstance,
    #[command(subcommand)]
    approve: Option<PendingCommand>,
}

#[derive(clap::Subcommand, Debug)]
enum PendingCommand {
    /// Grant what was refused, for a while
    Approve {
        #[command(flatten)]
        running: RunningInstance,
        /// The number that `sandbar pending` shows
        #[arg(value_name = "NUMBER")]
        number: u64,
        #[command(flatten)]
        terms: GrantTerms,
    },
}

impl GrantTerms {
    fn grantor(&self) -> String {
        let user = || std::env::var("SUDO_USER").or_else(|_| std::env::var("USER")).ok();
        self.by.clone().or_else(user).unwrap_or_else(|| "somebody".to_owned())
    }
}

/// Grants. Exit status: 0 granted, 2 refused or nobody to ask.
pub(crate) fn grant(args: &GrantArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let some = |all: &[String]| (!all.is_empty()).then(|| all.to_vec());
    let wish = GrantRequest {
        sandbox: args.sandbox.clone(),
        host: args.host.clone(),
        methods: some(&args.method),
        paths: some(&args.path),
        bytes: args.bytes,
        seconds: args.terms.time.as_secs(),
        why: args.terms.why.clone(),
        by: args.terms.grantor(),
    };
    let told = args.running.request("POST", "/grants", &json!(wish))?;
    print_granted(&told, output);
    Ok(ExitCode::SUCCESS)
}

/// Lists. Exit status: 0, 2 nobody to ask.
pub(crate) fn grants(args: &GrantsArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let told = args.running.request("GET", "/grants", &Value::Null)?;
    if output.json {
        print_json(&told);
        return Ok(ExitCode::SUCCESS);
    }
    let all = told.get("grants").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    all.iter().for_each(print_grant);
    if all.is_empty() {
        anstream::println!("no grant is in force");
    }
    Ok(ExitCode::SUCCESS)
}

/// Revokes. Exit status: 0 revoked, 2 no such grant or nobody to ask.
pub(crate) fn revoke(args: &RevokeArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let told = args.running.request("DELETE", &format!("/grants/{}", args.id), &Value::Null)?;
    if output.json {
        print_json(&told);
    } else {
        let (generation, cut) = (field_text(&told, "generation"), field_text(&told, "cut"));
        let word = paint(GOOD, "revoked:");
        anstream::println!(
            "{word} grant {}; generation {generation}, {cut} connections cut",
            args.id
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Lists or approves. Exit status: 0, 2 refused or nobody to ask.
pub(crate) fn pending(args: &PendingArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    match &args.approve {
        Some(PendingCommand::Approve { running, number, terms }) => {
            let body =
                json!({ "seconds": terms.time.as_secs(), "why": terms.why, "by": terms.grantor() });
            let told = running.request("POST", &format!("/pending/{number}"), &body)?;
            print_granted(&told, output);
        }
        None => print_pending(&args.running.request("GET", "/pending", &Value::Null)?, output),
    }
    Ok(ExitCode::SUCCESS)
}

fn print_granted(told: &Value, output: OutputOptions) {
    if output.json {
        return print_json(told);
    }
    anstream::print!("{} ", paint(GOOD, "granted:"));
    print_grant(told);
}

fn print_grant(grant: &Value) {
    let list = |name: &str| {
        let all = grant.get(name).and_then(Value::as_array).into_iter().flatten();
        all.filter_map(Value::as_str).fold(String::new(), |text, one| format!("{text} {one}"))
    };
    let bytes = grant.get("bytes").and_then(Value::as_u64);
    let bytes = bytes.map(|bytes| format!(", at most {bytes} bytes")).unwrap_or_default();
    let left = grant.get("left_seconds").and_then(Value::as_u64).unwrap_or_default();
    let left = humantime::format_duration(Duration::from_secs(left));
    let unused = grant.get("used").and_then(Value::as_bool) == Some(false);
    anstream::println!(
        "{} {} may reach {}{}{}, {left} left{bytes}{} {}",
        field_text(grant, "id"),
        field_text(grant, "sandbox"),
        field_text(grant, "host"),
        list("methods"),
        list("paths"),
        if unused { ", not used yet" } else { "" },
        paint(FAINT, format!("by {}: {}", field_text(grant, "by"), field_text(grant, "why"))),
    );
}

fn print_pending(told: &Value, output: OutputOptions) {
    if output.json {
        return print_json(told);
    }
    let all = told.get("pending").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    for refused in all {
        let port = refused.get("port").and_then(Value::as_u64);
        let port = port.map(|port| format!(":{port}")).unwrap_or_default();
        let ago = refused.get("seconds_ago").and_then(Value::as_u64).unwrap_or_default();
        let request = refused.get("request").and_then(Value::as_str).unwrap_or_default();
        anstream::println!(
            "{:>4} {} {}{port} {} {request} {}",
            field_text(refused, "number"),
            field_text(refused, "sandbox"),
            field_text(refused, "host"),
            paint(BAD, field_text(refused, "reason")),
            paint(FAINT, format!("{} times, last {ago} s ago", field_text(refused, "count"))),
        );
    }
    match all.is_empty() {
        true => anstream::println!("nothing is pending"),
        false => anstream::println!(
            "approve one: sandbar pending approve NUMBER --for 30m --why \"...\"\n\
             that opens the host and port, with every method and path; for less see `sandbar grant`"
        ),
    }
}

fn field_text(value: &Value, name: &str) -> String {
    match value.get(name) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => String::new(),
    }
}
