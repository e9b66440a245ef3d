//! `sandbar explain`: one decision, the rule that made it, what came near, and what would change it.

use std::process::ExitCode;

use anyhow::{Context, bail};
use rules::decision::{Denial, Permit, RuleRef};
use rules::explain::{Change, Explanation, Near, Why};
use rules::facts::{Method, Operation, QueryType};
use rules::probe::{Probe, ProbeError, Special};
use rules::word::BankId;
use rules::{Decision, Reason, RuleSet, SandboxRef, compile};
use serde_json::{Value, json};

use super::{BAD_INPUT, NEGATIVE, Output, check};
use crate::policies::PolicyArgs;
use crate::terminal::{BAD, FAINT, GOOD, HEAD, paint, print_json};

/// Say what would become of an attempt, why, and what would change it
#[derive(clap::Args)]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    policy: PolicyArgs,
    /// The sandbox that tries; not needed where there is only one
    #[arg(long, short, value_name = "ID")]
    sandbox: Option<String>,
    /// The request method
    #[arg(long, short, value_name = "METHOD")]
    method: Option<String>,
    /// Try a DNS look-up of this type instead of a connection
    #[arg(long, value_name = "TYPE", conflicts_with_all = ["method", "tcp", "bank"])]
    dns: Option<String>,
    /// Try raw TCP instead of TLS or HTTP
    #[arg(long, conflicts_with_all = ["method", "bank"])]
    tcp: bool,
    /// Try a memory request for this bank
    #[arg(long, value_name = "BANK", conflicts_with = "method")]
    bank: Option<String>,
    /// What the memory request does
    #[arg(long, value_enum, default_value_t, requires = "bank", value_name = "OPERATION")]
    operation: OperationArg,
    /// A URL, or a host with its port if not 443
    #[arg(value_name = "URL|HOST[:PORT]")]
    target: String,
}

#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum OperationArg {
    Forget,
    #[default]
    Recall,
    Retain,
}

/// Explains one attempt. Exit status: 0 allowed, 1 denied, 2 not a good policy or question.
pub(crate) fn explain(args: &ExplainArgs, output: Output) -> anyhow::Result<ExitCode> {
    let rules = match compile(&args.policy.read()?, &[]) {
        Ok(rules) => rules,
        Err(problems) => {
            check::refuse(&problems, output);
            return Ok(ExitCode::from(BAD_INPUT));
        }
    };
    let sandbox = choose(&rules, args.sandbox.as_deref())?;
    let probe = match probe(args)? {
        Ok(probe) => probe,
        Err(error) => {
            print_bad_name(args, &error, output);
            return Ok(ExitCode::from(NEGATIVE));
        }
    };
    let explanation = rules.explain(&sandbox, &probe);
    if output.json {
        print_json(&to_json(&explanation, &probe, &sandbox));
    } else {
        print(&explanation, &probe, &sandbox);
    }
    Ok(match explanation.decision {
        Decision::Allow(_) => ExitCode::SUCCESS,
        Decision::Deny(_) => ExitCode::from(NEGATIVE),
    })
}

fn choose(rules: &RuleSet, wanted: Option<&str>) -> anyhow::Result<SandboxRef> {
    let known = || {
        rules.sandboxes().iter().map(|sandbox| sandbox.id.as_str()).collect::<Vec<_>>().join(", ")
    };
    let mut all = rules.sandboxes().iter();
    match (wanted, all.next(), all.next()) {
        (Some(id), ..) => {
            let found = rules.sandboxes().iter().find(|sandbox| sandbox.id.as_str() == id);
            found
                .cloned()
                .with_context(|| format!("there is no sandbox `{id}`; there are: {}", known()))
        }
        (None, Some(only), None) => Ok(only.clone()),
        (None, None, _) => {
            bail!("there is no sandbox in the operator's file: every attempt is refused")
        }
        (None, Some(_), Some(_)) => {
            bail!("say which sandbox with --sandbox; there are: {}", known())
        }
    }
}

/// The attempt; an unusable host is an answer, every other slip an error.
fn probe(args: &ExplainArgs) -> anyhow::Result<Result<Probe, ProbeError>> {
    let mut probe = match Probe::parse(&args.target) {
        Ok(probe) => probe,
        Err(error @ ProbeError::Host { .. }) => return Ok(Err(error)),
        Err(error @ ProbeError::Scheme(_)) => return Err(error.into()),
    };
    if let Some(method) = &args.method {
        probe.method =
            Some(Method::parse(method).with_context(|| format!("`{method}` is not a method"))?);
    }
    probe.special = special(args)?;
    Ok(Ok(probe))
}

fn special(args: &ExplainArgs) -> anyhow::Result<Special> {
    if let Some(name) = &args.dns {
        let query = QueryType::by_name(name).or_else(|| name.parse().ok().map(QueryType));
        return query
            .map(Special::Lookup)
            .with_context(|| format!("`{name}` is not a DNS query type, such as A or TXT"));
    }
    if let Some(bank) = &args.bank {
        let operation = match args.operation {
            OperationArg::Forget => Operation::Delete,
            OperationArg::Recall => Operation::Read,
            OperationArg::Retain => Operation::Write,
        };
        let bank = BankId::parse(bank).with_context(|| format!("`{bank}` is not a bank"))?;
        return Ok(Special::Memory { operation, bank });
    }
    Ok(if args.tcp { Special::Raw } else { Special::Connection })
}

fn print(explanation: &Explanation, probe: &Probe, sandbox: &SandboxRef) {
    match &explanation.decision {
        Decision::Allow(permit) => print_permit(permit, probe, sandbox),
        Decision::Deny(denial) => print_denial(denial, probe, sandbox),
    }
    for near in &explanation.near {
        field(
            "near",
            format!("`{}` {}: {}  {}", near.rule.rule, near.pattern, why(near), place(&near.rule)),
        );
    }
    match &explanation.change {
        None => {}
        Some(Change::Extend { rule, key, entry }) => {
            field(
                "to allow",
                format!("add \"{entry}\" to `{key}` of rule `{}`  {}", rule.rule, place(rule)),
            );
        }
        Some(Change::Add(lines)) => {
            field("to allow", "add to a policy of this sandbox:".to_owned());
            lines.lines().for_each(|line| anstream::println!("             {}", paint(GOOD, line)));
        }
    }
}

fn print_permit(permit: &Permit, probe: &Probe, sandbox: &SandboxRef) {
    anstream::println!(
        "{} {probe} from sandbox {}",
        paint(GOOD, "allowed"),
        paint(HEAD, &sandbox.id)
    );
    field("how", permit.how().word().to_owned());
    field(
        "rule",
        format!(
            "`{}`, layer {}  {}",
            permit.rule().rule,
            permit.rule().layer,
            place(permit.rule())
        ),
    );
    if let Some(name) = permit.credential() {
        field("credential", format!("{name} is injected; the sandbox never sees it"));
    }
    let budgets = permit.rule_budgets().min(permit.sandbox_budgets());
    for (key, limit) in budgets.set() {
        field("budget", format!("{key} = {limit}"));
    }
    let rule = permit.rule();
    field(
        "policy",
        format!(
            "{}, generation {}, digest {}",
            rule.policy,
            permit.generation(),
            rule.digest.short()
        ),
    );
}

fn print_denial(denial: &Denial, probe: &Probe, sandbox: &SandboxRef) {
    anstream::println!(
        "{} {probe} from sandbox {}",
        paint(BAD, "denied"),
        paint(HEAD, &sandbox.id)
    );
    field("reason", format!("{}: {}", paint(BAD, denial.reason), denial.reason.meaning()));
    match &denial.rule {
        Some(rule) => {
            field("rule", format!("`{}`, layer {}  {}", rule.rule, denial.layer, place(rule)))
        }
        None => field("rule", "none names this host".to_owned()),
    }
    field("next step", denial.reason.next_step().to_owned());
    field("policy", format!("generation {}, digest {}", denial.generation, denial.digest.short()));
}

fn print_bad_name(args: &ExplainArgs, error: &ProbeError, output: Output) {
    let reason = Reason::BadName;
    if output.json {
        let text = error.to_string();
        print_json(
            &json!({ "decision": "deny", "reason": reason.code(), "meaning": text, "next_step": reason.next_step() }),
        );
        return;
    }
    let target = rules::load::problem::printable(&args.target);
    anstream::println!("{} {target}", paint(BAD, "denied"));
    field("reason", format!("{}: {error}", paint(BAD, reason)));
    field("next step", reason.next_step().to_owned());
}

fn field(name: &str, text: String) {
    anstream::println!("  {} {text}", paint(FAINT, format!("{name:<10}")));
}

fn place(rule: &RuleRef) -> String {
    paint(FAINT, format!("{}:{}", rule.file, rule.line))
}

fn why(near: &Near) -> String {
    match near.why {
        Why::LessSpecific => "would allow it too, but is less specific".to_owned(),
        Why::Misses(reason) => reason.code().to_owned(),
        Why::OtherName => "another name".to_owned(),
    }
}

fn to_json(explanation: &Explanation, probe: &Probe, sandbox: &SandboxRef) -> Value {
    let mut value = match &explanation.decision {
        Decision::Allow(permit) => json!({
            "decision": "allow",
            "how": permit.how().word(),
            "rule": rule_json(permit.rule()),
            "credential": permit.credential().map(|name| name.as_str()),
            "generation": permit.generation(),
        }),
        Decision::Deny(denial) => json!({
            "decision": "deny",
            "reason": denial.reason.code(),
            "meaning": denial.reason.meaning(),
            "next_step": denial.reason.next_step(),
            "rule": denial.rule.as_ref().map(rule_json),
            "layer": denial.layer.to_string(),
            "generation": denial.generation,
            "digest": denial.digest.to_string(),
        }),
    };
    value["attempt"] = json!(probe.to_string());
    value["sandbox"] = json!(sandbox.id.as_str());
    let near = |near: &Near| json!({ "rule": rule_json(&near.rule), "pattern": near.pattern, "why": why(near) });
    value["near"] = explanation.near.iter().map(near).collect();
    value["change"] = match &explanation.change {
        None => Value::Null,
        Some(Change::Add(lines)) => json!({ "add": lines }),
        Some(Change::Extend { rule, key, entry }) => {
            json!({ "rule": rule_json(rule), "key": key, "entry": entry })
        }
    };
    value
}

fn rule_json(rule: &RuleRef) -> Value {
    json!({
        "policy": rule.policy.as_str(),
        "rule": *rule.rule,
        "layer": rule.layer.to_string(),
        "digest": rule.digest.to_string(),
        "file": *rule.file,
        "line": rule.line,
    })
}
