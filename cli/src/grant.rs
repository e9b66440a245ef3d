//! `sandbar grant`, `grants`, `revoke` and `pending`: let a sandbox reach a host temporarily, with a recorded
//! reason.

use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};

use super::OutputOptions;
use super::instance::RunningInstance;
use crate::terminal::{BAD, FAINT, GOOD, paint, print_json};
use proxy::policy::grants::GrantRequest;

/// Let a sandbox reach a host temporarily; the grant is recorded and expires on its own
#[derive(clap::Args, Debug)]
pub(crate) struct GrantArgs {
    #[command(flatten)]
    running: RunningInstance,
    /// Sandbox to grant access to
    #[arg(long, value_name = "ID")]
    sandbox: String,
    /// Host pattern, as in a rule: `api.example.com`, `*.example.com`, with `:port` if not 443
    #[arg(long, value_name = "PATTERN")]
    host: String,
    /// Allow only this method; repeatable
    #[arg(long, value_name = "METHOD")]
    method: Vec<String>,
    /// Allow only this path, as in a rule: `/v1/**`; repeatable
    #[arg(long, value_name = "PATTERN")]
    path: Vec<String>,
    /// Maximum number of bytes, both directions together
    #[arg(long, value_name = "BYTES")]
    bytes: Option<u64>,
    #[command(flatten)]
    terms: GrantTerms,
}

/// Duration, reason and grantor.
#[derive(clap::Args, Debug)]
struct GrantTerms {
    /// Duration, such as 30m or 2h
    #[arg(long = "for", value_name = "TIME", value_parser = humantime::parse_duration)]
    time: Duration,
    /// Reason, which is recorded
    #[arg(long, value_name = "TEXT")]
    why: String,
    /// Name of the grantor, if not you; your uid, as the kernel reports it, is recorded too
    #[arg(long, value_name = "WHO")]
    by: Option<String>,
}

/// List the grants in force
#[derive(clap::Args, Debug)]
pub(crate) struct GrantsArgs {
    #[command(flatten)]
    running: RunningInstance,
}

/// End a grant early, and cut the connections it allowed
#[derive(clap::Args, Debug)]
pub(crate) struct RevokeArgs {
    #[command(flatten)]
    running: RunningInstance,
    /// Number of the grant, as shown by `sandbar grants`
    #[arg(value_name = "NUMBER")]
    id: u64,
}

/// List refused attempts that a grant would allow, newest first; or approve one
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
    /// Grant a refused attempt temporarily
    Approve {
        #[command(flatten)]
        running: RunningInstance,
        /// Number shown by `sandbar pending`
        #[arg(value_name = "NUMBER")]
        number: u64,
        #[command(flatten)]
        terms: GrantTerms,
    },
}

impl GrantTerms {
    fn grantor(&self) -> String {
        let user = || std::env::var("SUDO_USER").or_else(|_| std::env::var("USER")).ok();
        self.by.clone().or_else(user).unwrap_or_else(|| "unknown".to_owned())
    }
}

/// Makes a grant. Exit status: 0 granted, 2 refused or no running instance.
pub(crate) fn grant(args: &GrantArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let some = |all: &[String]| (!all.is_empty()).then(|| all.to_vec());
    let request = GrantRequest {
        sandbox: args.sandbox.clone(),
        host: args.host.clone(),
        methods: some(&args.method),
        paths: some(&args.path),
        bytes: args.bytes,
        seconds: args.terms.time.as_secs(),
        why: args.terms.why.clone(),
        by: args.terms.grantor(),
    };
    let reply = args.running.request("POST", "/grants", &json!(request))?;
    print_granted(&reply, output);
    Ok(ExitCode::SUCCESS)
}

/// Lists grants. Exit status: 0, or 2 if there is no running instance.
pub(crate) fn grants(args: &GrantsArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let reply = args.running.request("GET", "/grants", &Value::Null)?;
    if output.json {
        print_json(&reply);
        return Ok(ExitCode::SUCCESS);
    }
    let all = reply.get("grants").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    all.iter().for_each(print_grant);
    if all.is_empty() {
        anstream::println!("no grants in force");
    }
    Ok(ExitCode::SUCCESS)
}

/// Revokes a grant. Exit status: 0 revoked, 2 no such grant or no running instance.
pub(crate) fn revoke(args: &RevokeArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let reply = args.running.request("DELETE", &format!("/grants/{}", args.id), &Value::Null)?;
    if output.json {
        print_json(&reply);
    } else {
        let (generation, cut) = (field_text(&reply, "generation"), field_text(&reply, "cut"));
        let word = paint(GOOD, "revoked:");
        anstream::println!("{word} grant {}; generation {generation}, {cut} connections cut", args.id);
    }
    Ok(ExitCode::SUCCESS)
}

/// Lists refused attempts, or approves one. Exit status: 0, or 2 if refused or no running instance.
pub(crate) fn pending(args: &PendingArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    match &args.approve {
        Some(PendingCommand::Approve { running, number, terms }) => {
            let body = json!({ "seconds": terms.time.as_secs(), "why": terms.why, "by": terms.grantor() });
            let reply = running.request("POST", &format!("/pending/{number}"), &body)?;
            print_granted(&reply, output);
        }
        None => print_pending(&args.running.request("GET", "/pending", &Value::Null)?, output),
    }
    Ok(ExitCode::SUCCESS)
}

fn print_granted(reply: &Value, output: OutputOptions) {
    if output.json {
        return print_json(reply);
    }
    anstream::print!("{} ", paint(GOOD, "granted:"));
    print_grant(reply);
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

fn print_pending(reply: &Value, output: OutputOptions) {
    if output.json {
        return print_json(reply);
    }
    let all = reply.get("pending").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    for refused in all {
        let port = refused.get("port").and_then(Value::as_u64);
        let port = port.map(|port| format!(":{port}")).unwrap_or_default();
        let ago = refused.get("seconds_ago").and_then(Value::as_u64).unwrap_or_default();
        let http_request = refused.get("request").and_then(Value::as_str).unwrap_or_default();
        anstream::println!(
            "{:>4} {} {}{port} {} {http_request} {}",
            field_text(refused, "number"),
            field_text(refused, "sandbox"),
            field_text(refused, "host"),
            paint(BAD, field_text(refused, "reason")),
            paint(FAINT, format!("{} times, last {ago} s ago", field_text(refused, "count"))),
        );
    }
    match all.is_empty() {
        true => anstream::println!("no pending attempts"),
        false => anstream::println!(
            "approve one: sandbar pending approve NUMBER --for 30m --why \"...\"\n\
             this allows the host and port with every method and path; to allow less, use `sandbar grant`"
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
