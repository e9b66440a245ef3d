//! `sandbar dns`: asks the running filter for a name as a sandbox would, and explains the answer.

use std::process::ExitCode;

use anyhow::Context;
use dns_filter::DnsExplanation;
use rules::facts::QueryType;

use super::instance::RunningInstance;
use super::{EXIT_NEGATIVE, OutputOptions};
use crate::terminal::{BAD, FAINT, GOOD, paint, print_json};
use proxy::admin::server::DnsRequest;

/// Ask the running filter for a name as a sandbox would, and explain the answer
#[derive(clap::Args, Debug)]
pub(crate) struct DnsArgs {
    /// The name
    name: String,
    /// The query type, by name or number
    #[arg(default_value = "A", value_name = "TYPE")]
    kind: String,
    /// The sandbox that asks; the query is charged and recorded as its own
    #[arg(long, value_name = "ID")]
    sandbox: String,
    #[command(flatten)]
    running: RunningInstance,
}

/// Asks. Exit status: 0 allowed and answered, 1 denied or without answer, 2 nobody to ask.
pub(crate) fn dns(args: &DnsArgs, output: OutputOptions) -> anyhow::Result<ExitCode> {
    let (sandbox, name) = (args.sandbox.clone(), args.name.clone());
    let request = DnsRequest { sandbox, name, kind: parse_query_type(&args.kind)? };
    let request = serde_json::to_value(&request)?;
    let told: DnsExplanation =
        serde_json::from_value(args.running.request("POST", "/dns", &request)?)
            .context("the running program gave no answer that is one")?;
    if output.json {
        print_json(&serde_json::to_value(&told)?);
    } else {
        print_answer(&told);
    }
    let good = told.decision == "allow" && told.rcode == "NOERROR";
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NEGATIVE) })
}

fn parse_query_type(text: &str) -> anyhow::Result<u16> {
    let upper = text.to_ascii_uppercase();
    let number = upper.strip_prefix("TYPE").unwrap_or(&upper).parse().ok();
    QueryType::by_name(&upper)
        .map(|kind| kind.0)
        .or(number)
        .with_context(|| format!("`{text}` is no query type: say A, AAAA, HTTPS or a number"))
}

fn print_answer(told: &DnsExplanation) {
    let (style, word) = match told.decision.as_str() {
        "allow" => (GOOD, "allowed"),
        _ => (BAD, "denied"),
    };
    let DnsExplanation { name, kind, sandbox, generation, .. } = told;
    anstream::println!("{} {name} {kind} for {sandbox}", paint(style, word));
    let rule = match (&told.policy, &told.rule, &told.place) {
        (Some(policy), Some(rule), Some(place)) => format!("{rule} in {policy} ({place})"),
        _ => "none names it".to_owned(),
    };
    print_field("rule", &format!("{rule}, generation {generation}"));
    if let Some(reason) = &told.reason {
        print_field(
            "reason",
            &format!("{reason}: {}", told.meaning.as_deref().unwrap_or_default()),
        );
    }
    if let Some(next) = &told.next_step {
        print_field("next", next);
    }
    let resolver = told.resolver.as_ref().map(|at| format!(" ({at})")).unwrap_or_default();
    print_field("answer", &format!("{} from {}{resolver}", told.rcode, told.source));
    told.answers.iter().for_each(|answer| print_field("", answer));
    if let (Some(rule), Some(all), Some(forwards)) =
        (told.rule_bits_left, told.sandbox_bits_left, told.forwards_left)
    {
        print_field("left", &format!("{rule} bits by this rule, {all} in all, {forwards} queries"));
    }
}

fn print_field(head: &str, text: &str) {
    anstream::println!("  {} {text}", paint(FAINT, format!("{head:<7}")));
}
