//! The answer to `sandbar explain`: a decision, the rule behind it, near misses, and the edit that would change it.

use std::collections::BTreeMap;

use anyhow::bail;
use rules::budget::Budgets;
use rules::credential::PinAccount;
use rules::decision::{Denial, Permit, PolicyLayer, RuleRef, Treatment};
use rules::explain::{Explanation, MissCause, NearMiss, PolicyEdit};
use rules::facts::{BankOperation, HttpMethod, QueryType, UrlScheme};
use rules::ids::BankId;
use rules::probe::{PolicyProbe, ProbeError, ProbeKind};
use rules::signals::settings::{BodyInspection, SignalKind};
use rules::{Decision, Host, Reason, RuleSet, SandboxRef};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::report::UsageError;
use crate::report::terminal::{BAD, FAINT, GOOD, HEAD, paint};

/// An attempt to explain, from the command line or from the admin socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExplainRequest {
    /// The sandbox; optional if there is only one.
    pub sandbox: Option<String>,
    pub method: Option<String>,
    /// Explain a DNS query of this type instead of a connection.
    pub dns: Option<String>,
    /// Raw TCP instead of TLS or HTTP.
    pub tcp: bool,
    /// A memory request for this bank.
    pub bank: Option<String>,
    /// The operation of the memory request.
    pub operation: MemoryVerb,
    /// A URL, or a host with an optional port (default 443).
    pub target: String,
}

/// The reasons which mean that no rule names the host.
const UNLISTED: [Reason; 3] = [Reason::AddressNotListed, Reason::NameMissing, Reason::NotListed];

/// A memory operation, as policies name it.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryVerb {
    Forget,
    #[default]
    Recall,
    Retain,
}

/// An explanation, as text and as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub struct ExplainReply {
    pub allowed: bool,
    pub text: String,
    pub json: Value,
}

impl ExplainRequest {
    /// Explains the attempt under `rules`.
    ///
    /// # Errors
    ///
    /// Returns [`UsageError`] for a request that does not apply to them, such as an unknown sandbox.
    pub fn answer(&self, rules: &RuleSet) -> anyhow::Result<ExplainReply> {
        let sandbox = choose_sandbox(rules, self.sandbox.as_deref())?;
        let probe = match build_probe(self)? {
            Ok(probe) => probe,
            Err(error) => return Ok(deny_bad_name(self, &error)),
        };
        let explanation = rules.explain(&sandbox, &probe);
        let context = ExplainContext { rules, sandbox: &sandbox, probe: &probe };
        let allowed = match explanation.decision {
            Decision::Allow(_) => true,
            Decision::Deny(_) => false,
        };
        let (text, json) =
            (explanation_text(&explanation, &context), explanation_json(&explanation, &context));
        Ok(ExplainReply { allowed, text, json })
    }
}

pub(super) fn choose_sandbox(rules: &RuleSet, wanted: Option<&str>) -> anyhow::Result<SandboxRef> {
    let known = || rules.sandboxes().iter().map(|sandbox| sandbox.id.as_str()).collect::<Vec<_>>().join(", ");
    let mut all = rules.sandboxes().iter();
    match (wanted, all.next(), all.next()) {
        (Some(id), ..) => {
            let found = rules.sandboxes().iter().find(|sandbox| sandbox.id.as_str() == id);
            let unknown = || format!("unknown sandbox `{id}`; known sandboxes: {}", known());
            Ok(found.cloned().ok_or_else(|| UsageError(unknown()))?)
        }
        (None, Some(only), None) => Ok(only.clone()),
        (None, None, _) => {
            bail!("the configuration declares no sandbox: every attempt is refused")
        }
        (None, Some(_), Some(_)) => {
            let text = format!("choose a sandbox with --sandbox: {}", known());
            bail!(UsageError(text))
        }
    }
}

/// Builds the attempt. An invalid host is an answer (a denial), any other mistake an error.
fn build_probe(args: &ExplainRequest) -> anyhow::Result<Result<PolicyProbe, ProbeError>> {
    let mut probe = match PolicyProbe::parse(&args.target) {
        Ok(probe) => probe,
        Err(error @ ProbeError::Host { .. }) => return Ok(Err(error)),
        Err(error @ ProbeError::Scheme(_)) => bail!(UsageError(error.to_string())),
    };
    if let Some(method) = &args.method {
        let parsed = HttpMethod::parse(method);
        let bad = |error| UsageError(format!("invalid method `{method}`: {error}"));
        probe.method = Some(parsed.map_err(bad)?);
    }
    probe.special = build_special(args)?;
    if let (ProbeKind::Lookup(_), Host::Address(address)) = (&probe.special, &probe.host) {
        bail!(UsageError(format!("{address} is an address; a DNS query needs a name")));
    }
    Ok(Ok(probe))
}

fn build_special(args: &ExplainRequest) -> anyhow::Result<ProbeKind> {
    if let Some(name) = &args.dns {
        let query = QueryType::by_name(name).or_else(|| name.parse().ok().map(QueryType));
        let bad =
            || UsageError(format!("unknown query type `{name}`: use a name such as A or TXT, or a number"));
        return Ok(ProbeKind::Lookup(query.ok_or_else(bad)?));
    }
    if let Some(bank) = &args.bank {
        let operation = match args.operation {
            MemoryVerb::Forget => BankOperation::Delete,
            MemoryVerb::Recall => BankOperation::Read,
            MemoryVerb::Retain => BankOperation::Write,
        };
        let bad = |error| UsageError(format!("invalid bank `{bank}`: {error}"));
        let bank = BankId::parse(bank).map_err(bad)?;
        return Ok(ProbeKind::Memory { operation, bank });
    }
    Ok(if args.tcp { ProbeKind::Raw } else { ProbeKind::Connection })
}

/// The attempt that is explained, and the rules.
struct ExplainContext<'a> {
    rules: &'a RuleSet,
    sandbox: &'a SandboxRef,
    probe: &'a PolicyProbe,
}

fn explanation_text(explanation: &Explanation, context: &ExplainContext<'_>) -> String {
    let mut text = ExplainText::default();
    match &explanation.decision {
        Decision::Allow(permit) => text.push_permit(permit, context),
        Decision::Deny(denial) => text.push_denial(denial, explanation.never, context),
    }
    for near in &explanation.near {
        let (rule, why, place) = (&near.rule.rule, near_miss_reason(near), rule_location(&near.rule));
        let of = match near.rule.layer {
            PolicyLayer::Base => " of the base",
            PolicyLayer::Sandbox => "",
        };
        text.push_field("near", &format!("`{rule}`{of} {}: {why}  {place}", near.pattern));
    }
    if let Some(change) = &explanation.change {
        text.push_change(change);
    }
    text.0
}

/// The text for people, with colours that `anstream` strips where they are not wanted.
#[derive(Default)]
struct ExplainText(String);

impl ExplainText {
    fn push_line(&mut self, line: &str) {
        self.0.push_str(line);
        self.0.push('\n');
    }

    fn push_field(&mut self, name: &str, text: &str) {
        self.push_line(&format!("  {} {text}", paint(FAINT, format!("{name:<10}"))));
    }

    fn push_change(&mut self, change: &PolicyEdit) {
        match change {
            PolicyEdit::Add(lines) => {
                self.push_field("to allow", "add to a policy of this sandbox:");
                for line in lines.lines() {
                    self.push_line(&format!("             {}", paint(GOOD, line)));
                }
            }
            PolicyEdit::Extend { rule, key, entry } => {
                let text = format!("add \"{entry}\" to `{key}` of rule `{}`", rule.rule);
                self.push_field("to allow", &format!("{text}  {}", rule_location(rule)));
            }
            PolicyEdit::Set { rule, key, entries, instead_of } => {
                let entries: Vec<String> = entries.iter().map(|entry| format!("\"{entry}\"")).collect();
                let written = format!("{key} = [{}]", entries.join(", "));
                let instead = instead_of.map(|key| format!(", without `{key}`")).unwrap_or_default();
                let text = format!("set `{written}` in rule `{}`{instead}", rule.rule);
                self.push_field("to allow", &format!("{text}  {}", rule_location(rule)));
            }
        }
    }

    fn push_permit(&mut self, permit: &Permit, ExplainContext { probe, sandbox, .. }: &ExplainContext<'_>) {
        let (word, id) = (paint(GOOD, "allowed"), paint(HEAD, &sandbox.id));
        self.push_line(&format!("{word} {probe} from sandbox {id}"));
        let rule = permit.rule();
        self.push_field("how", permit.treatment().as_str());
        if *permit.treatment() == Treatment::Raw && probe.scheme == UrlScheme::Http {
            self.push_field(
                "but",
                "a plain request to the proxy itself is wrong_protocol: open a tunnel (CONNECT)",
            );
        }
        self.push_field("rule", &format!("`{}`, layer {}  {}", rule.rule, rule.layer, rule_location(rule)));
        for name in permit.credentials() {
            self.push_field("credential", &format!("{name} is injected; the sandbox never sees it"));
        }
        match permit.pin_account() {
            PinAccount::Off => {}
            PinAccount::Refuse => self.push_field("accounts", "credentials of other accounts are refused"),
            PinAccount::Remove => self.push_field("accounts", "credentials of other accounts are removed"),
        }
        match permit.treatment() {
            Treatment::Raw | Treatment::Tunnel => self.push_field("signals", "not inspected"),
            Treatment::Forward | Treatment::Hold { .. } | Treatment::Intercept | Treatment::Resolve => {
                self.push_field("signals", &permit.signals().to_string());
            }
        }
        for (key, limit) in permit.rule_budgets().min(permit.sandbox_budgets()).limits() {
            self.push_field("budget", &format!("{key} = {limit}"));
        }
        let (generation, digest) = (permit.generation(), rule.digest.short());
        let policy = &rule.policy;
        self.push_field("policy", &format!("{policy}, generation {generation}, digest {digest}"));
    }

    fn push_denial(&mut self, denial: &Denial, never: Option<&str>, context: &ExplainContext<'_>) {
        let (word, id) = (paint(BAD, "denied"), paint(HEAD, &context.sandbox.id));
        self.push_line(&format!("{word} {} from sandbox {id}", context.probe));
        let meaning = never.unwrap_or(denial.reason.meaning());
        self.push_field("reason", &format!("{}: {meaning}", paint(BAD, denial.reason)));
        self.push_field("rule", &deciding_rule(denial, context));
        self.push_field("next step", next_step(denial, never));
        let (generation, digest) = (denial.generation, denial.digest.short());
        self.push_field("policy", &format!("generation {generation}, digest {digest}"));
    }
}

fn next_step(denial: &Denial, never: Option<&str>) -> &'static str {
    never.map_or(denial.reason.next_step(), |_| "Use another method.")
}

/// Describes the rule behind a denial and its layer: only the base's owner can change what the base denies.
fn deciding_rule(denial: &Denial, context: &ExplainContext<'_>) -> String {
    let base = context.rules.base_of(context.sandbox).unwrap_or("none");
    match (&denial.rule, denial.layer) {
        (Some(rule), PolicyLayer::Sandbox) => {
            format!("`{}`, layer sandbox  {}", rule.rule, rule_location(rule))
        }
        (Some(rule), PolicyLayer::Base) if rule.policy.as_str() == base => {
            format!("`{}`, layer base `{base}`  {}", rule.rule, rule_location(rule))
        }
        (Some(rule), PolicyLayer::Base) => {
            format!("`{}` would allow it; base `{base}` denies it  {}", rule.rule, rule_location(rule))
        }
        (None, PolicyLayer::Base) => format!("no rule of base `{base}` allows it"),
        (None, PolicyLayer::Sandbox) if UNLISTED.contains(&denial.reason) => {
            "no rule matched this host".to_owned()
        }
        (None, PolicyLayer::Sandbox) => "none: always denied, whatever the rules say".to_owned(),
    }
}

fn deny_bad_name(question: &ExplainRequest, error: &ProbeError) -> ExplainReply {
    let (reason, meaning) = (Reason::BadName, error.to_string());
    let mut text = ExplainText::default();
    let target = rules::load::problem::printable(&question.target);
    text.push_line(&format!("{} {target}", paint(BAD, "denied")));
    text.push_field("reason", &format!("{}: {meaning}", paint(BAD, reason)));
    text.push_field("next step", reason.next_step());
    let json = json!({ "decision": "deny", "reason": reason.code(), "meaning": meaning, "next_step": reason.next_step() });
    ExplainReply { allowed: false, text: text.0, json }
}

fn rule_location(rule: &RuleRef) -> String {
    paint(FAINT, format!("{}:{}", rule.file, rule.line))
}

fn near_miss_reason(near: &NearMiss) -> String {
    match near.why {
        MissCause::BaseRefuses => "would allow it; the base denies it".to_owned(),
        MissCause::DenyWins => "would allow it; deny always wins".to_owned(),
        MissCause::LessSpecific => "would allow it too, but is less specific".to_owned(),
        MissCause::Misses(reason) => reason.code().to_owned(),
        MissCause::OtherName => "another name".to_owned(),
    }
}

fn explanation_json(explanation: &Explanation, context: &ExplainContext<'_>) -> Value {
    let mut value = match &explanation.decision {
        Decision::Allow(permit) => permit_json(permit),
        Decision::Deny(denial) => denial_json(denial, explanation.never, context),
    };
    value["attempt"] = json!(context.probe.to_string());
    value["sandbox"] = json!(context.sandbox.id.as_str());
    let near = |near: &NearMiss| json!({ "rule": rule_json(&near.rule), "pattern": near.pattern, "why": near_miss_reason(near) });
    value["near"] = explanation.near.iter().map(near).collect();
    value["change"] = explanation.change.as_ref().map_or(Value::Null, change_json);
    value
}

fn permit_json(permit: &Permit) -> Value {
    json!({
        "decision": "allow",
        "how": permit.treatment().as_str(),
        "rule": rule_json(permit.rule()),
        "credentials": permit.credentials().iter().map(|name| name.as_str()).collect::<Vec<_>>(),
        "pin_account": permit.pin_account().as_str(),
        "signals": signals_json(permit),
        "budget": budget_json(permit.rule_budgets().min(permit.sandbox_budgets())),
        "generation": permit.generation(),
        "digest": permit.rule().digest.to_string(),
    })
}

/// What is done about the content of the attempt; null where it is not inspected.
fn signals_json(permit: &Permit) -> Value {
    match permit.treatment() {
        Treatment::Raw | Treatment::Tunnel => Value::Null,
        Treatment::Forward | Treatment::Hold { .. } | Treatment::Intercept | Treatment::Resolve => {
            let modes = SignalKind::ALL.map(|kind| (kind.key(), permit.signals().mode(kind).to_string()));
            let bodies = permit.signals().bodies() == BodyInspection::Searched;
            let thresholds: BTreeMap<_, _> = permit.signals().thresholds().values().into_iter().collect();
            let headers = permit.signals().listed_fields();
            json!({ "modes": BTreeMap::from(modes), "thresholds": thresholds, "bodies": bodies, "headers": headers })
        }
    }
}

fn denial_json(denial: &Denial, never: Option<&str>, context: &ExplainContext<'_>) -> Value {
    let base = context.rules.base_of(context.sandbox).filter(|_| denial.layer == PolicyLayer::Base);
    json!({
        "decision": "deny",
        "reason": denial.reason.code(),
        "meaning": never.unwrap_or(denial.reason.meaning()),
        "next_step": next_step(denial, never),
        "rule": denial.rule.as_ref().map(rule_json),
        "layer": denial.layer.to_string(),
        "base": base,
        "generation": denial.generation,
        "digest": denial.digest.to_string(),
    })
}

fn change_json(change: &PolicyEdit) -> Value {
    match change {
        PolicyEdit::Add(lines) => json!({ "add": lines }),
        PolicyEdit::Extend { rule, key, entry } => {
            json!({ "rule": rule_json(rule), "key": key, "entry": entry })
        }
        PolicyEdit::Set { rule, key, entries, instead_of } => {
            json!({ "rule": rule_json(rule), "key": key, "entries": entries, "instead_of": instead_of })
        }
    }
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

/// Returns the limits by their keys, for every command that shows them.
pub fn budget_json(budgets: Budgets) -> Value {
    json!(budgets.limits().map(|(budget, limit)| (budget.key(), limit)).collect::<BTreeMap<_, _>>())
}
