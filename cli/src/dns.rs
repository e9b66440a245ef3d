//! `sandbar dns`: queries the running instance on behalf of a sandbox and explains the answer.

use std::process::ExitCode;

use anyhow::Context;
use dns_filter::DnsExplanation;
use rules::facts::QueryType;

use super::instance::RunningInstance;
use super::{EXIT_NEGATIVE, OutputOptions};
use crate::terminal::{BAD, FAINT, GOOD, paint, print_json};
use proxy::admin::server::DnsRequest;

/// Query the running DNS filter as a sandbox would, and explain the answer
#[derive(clap::Args, Debug)]
pub(crate) struct DnsArgs {
    /// Name to look up
    name: String,
    /// Query type, by name or number
    #[arg(default_value = "A", value_name = "TYPE")]
    kind: String,
    /// Sandbox to query as; the query is charged to its budget and recorded
    #[arg(long, value_name = "ID")]
    sandbox: String,
    #[command(flatten)]
    running: RunningInstance,
}

/// Sends the query. Exit status: 0 allowed and answered, 1 denied or not answered, 2 no running instance.
pub(crate) fn dns(args: &DnsArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let (sandbox, name) = (args.sandbox.clone(), args.name.clone());
    let request = DnsRequest { sandbox, name, kind: parse_query_type(&args.kind)? };
    let request = serde_json::to_value(&request)?;
    let explanation: DnsExplanation = serde_json::from_value(args.running.request("POST", "/dns", &request)?)
        .context("the running instance sent an invalid response")?;
    if output.json {
        print_json(&serde_json::to_value(&explanation)?);
    } else {
        print_explanation(&explanation);
    }
    let is_answered = explanation.decision == "allow" && explanation.rcode == "NOERROR";
    Ok(if is_answered { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NEGATIVE) })
}

fn parse_query_type(text: &str) -> anyhow::Result<u16> {
    let upper = text.to_ascii_uppercase();
    let number = upper.strip_prefix("TYPE").unwrap_or(&upper).parse().ok();
    QueryType::by_name(&upper)
        .map(|kind| kind.0)
        .or(number)
        .with_context(|| format!("unknown query type `{text}`: use A, AAAA, HTTPS or a number"))
}

fn print_explanation(explanation: &DnsExplanation) {
    let (style, word) = match explanation.decision.as_str() {
        "allow" => (GOOD, "allowed"),
        _ => (BAD, "denied"),
    };
    let DnsExplanation { name, kind, sandbox, generation, .. } = explanation;
    anstream::println!("{} {name} {kind} for {sandbox}", paint(style, word));
    let rule = match (&explanation.policy, &explanation.rule, &explanation.place) {
        (Some(policy), Some(rule), Some(place)) => format!("{rule} in {policy} ({place})"),
        _ => "no rule matched".to_owned(),
    };
    print_field("rule", &format!("{rule}, generation {generation}"));
    if let Some(reason) = &explanation.reason {
        print_field("reason", &format!("{reason}: {}", explanation.meaning.as_deref().unwrap_or_default()));
    }
    if let Some(next) = &explanation.next_step {
        print_field("next", next);
    }
    let resolver = explanation.resolver.as_ref().map(|at| format!(" ({at})")).unwrap_or_default();
    print_field("answer", &format!("{} from {}{resolver}", explanation.rcode, explanation.source));
    explanation.answers.iter().for_each(|answer| print_field("", answer));
    if let (Some(rule), Some(all), Some(forwards)) =
        (explanation.rule_bits_left, explanation.sandbox_bits_left, explanation.forwards_left)
    {
        print_field(
            "left",
            &format!("{rule} bits for this rule, {all} bits for the sandbox, {forwards} queries"),
        );
    }
}

fn print_field(head: &str, text: &str) {
    anstream::println!("  {} {text}", paint(FAINT, format!("{head:<7}")));
}
