//! `sandbar dns`: asks the running filter for a name as a sandbox would, and explains the answer.

use std::process::ExitCode;

use anyhow::Context;
use dns_filter::Explanation;
use rules::facts::QueryType;

use super::running::Running;
use super::{NEGATIVE, Output};
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
    running: Running,
}

/// Asks. Exit status: 0 allowed and answered, 1 denied or without answer, 2 nobody to ask.
pub(crate) fn dns(args: &DnsArgs, output: Output) -> anyhow::Result<ExitCode> {
    let (sandbox, name) = (args.sandbox.clone(), args.name.clone());
    let request = DnsRequest { sandbox, name, kind: kind(&args.kind)? };
    let request = serde_json::to_value(&request)?;
    let told: Explanation = serde_json::from_value(args.running.ask("POST", "/dns", &request)?)
        .context("the running program gave no answer that is one")?;
    if output.json {
        print_json(&serde_json::to_value(&told)?);
    } else {
        show(&told);
    }
    let good = told.decision == "allow" && told.rcode == "NOERROR";
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::from(NEGATIVE) })
}

fn kind(text: &str) -> anyhow::Result<u16> {
    let upper = text.to_ascii_uppercase();
    let number = upper.strip_prefix("TYPE").unwrap_or(&upper).parse().ok();
    QueryType::by_name(&upper)
        .map(|kind| kind.0)
        .or(number)
        .with_context(|| format!("`{text}` is no query type: say A, AAAA, HTTPS or a number"))
}

fn show(told: &Explanation) {
    let (style, word) = match told.decision.as_str() {
        "allow" => (GOOD, "allowed"),
        _ => (BAD, "denied"),
    };
    let Explanation { name, kind, sandbox, generation, .. } = told;
    anstream::println!("{} {name} {kind} for {sandbox}", paint(style, word));
    let rule = match (&told.policy, &told.rule, &told.place) {
        (Some(policy), Some(rule), Some(place)) => format!("{rule} in {policy} ({place})"),
        _ => "none names it".to_owned(),
    };
    line("rule", &format!("{rule}, generation {generation}"));
    if let Some(reason) = &told.reason {
        line("reason", &format!("{reason}: {}", told.meaning.as_deref().unwrap_or_default()));
    }
    if let Some(next) = &told.next_step {
        line("next", next);
    }
    let resolver = told.resolver.as_ref().map(|at| format!(" ({at})")).unwrap_or_default();
    line("answer", &format!("{} from {}{resolver}", told.rcode, told.source));
    told.answers.iter().for_each(|answer| line("", answer));
    if let (Some(rule), Some(all), Some(forwards)) =
        (told.rule_bits_left, told.sandbox_bits_left, told.forwards_left)
    {
        line("left", &format!("{rule} bits by this rule, {all} in all, {forwards} queries"));
    }
}

fn line(head: &str, text: &str) {
    anstream::println!("  {} {text}", paint(FAINT, format!("{head:<7}")));
}
