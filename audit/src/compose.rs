//! From what is said of an attempt to the members of its records: numbers, names and classes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ulid::Ulid;

use crate::attempt::{
    Attempt, Attention, Effect, Ending, Facts, Finding, Lifecycle, LifecycleEvent, MemoryCall,
    Outcome, Request, Scheme, Severity,
};
use crate::config::QueryStrings;
use crate::draft::{Draft, DraftError, Owed, Role};
use crate::record::{
    Actor, Api, Destination, DnsQuestion, Evidence, FindingInfo, HttpRequest, HttpResponse,
    LIST_MAX, Members, Metadata, OCSF_VERSION, PolicyInForce, Product, RelatedEvent, Resource,
    RuleName, Sandbar, Service, Source, Stamp, Traffic, Url, parts,
};
use crate::record::{Digits, SandboxId, TenantId};
use crate::text::Text;

const PROFILES: &[&str] = &["security_control", "datetime"];
/// Where the class itself has no `actor`.
const PROFILES_HOST: &[&str] = &["security_control", "datetime", "host"];

/// A class of OCSF, with the number and the names it has there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Dns,
    Finding,
    Http,
    Lifecycle,
    Memory,
    Network,
}

impl Class {
    pub(crate) fn uid(self) -> u16 {
        match self {
            Class::Dns => 4003,
            Class::Finding => 2004,
            Class::Http => 4002,
            Class::Lifecycle => 6002,
            Class::Memory => 6003,
            Class::Network => 4001,
        }
    }

    pub(crate) fn of(uid: u16) -> Self {
        match uid {
            4002 => Class::Http,
            4003 => Class::Dns,
            6003 => Class::Memory,
            _ => Class::Network,
        }
    }

    fn profiles(self) -> &'static [&'static str] {
        match self {
            Class::Dns | Class::Finding | Class::Http | Class::Network => PROFILES_HOST,
            Class::Lifecycle | Class::Memory => PROFILES,
        }
    }

    fn names(self) -> (&'static str, &'static str) {
        match self {
            Class::Dns => ("DNS Activity", "Network Activity"),
            Class::Finding => ("Detection Finding", "Findings"),
            Class::Http => ("HTTP Activity", "Network Activity"),
            Class::Lifecycle => ("Application Lifecycle", "Application Activity"),
            Class::Memory => ("API Activity", "Application Activity"),
            Class::Network => ("Network Activity", "Network Activity"),
        }
    }
}

/// Which of an attempt's records it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stage<'a> {
    /// Answered here: nothing was sent, and no decision stands before it.
    Answered(&'a Outcome, Duration),
    Decision,
    Denied,
    Outcome(&'a Outcome, Duration),
    /// Ended before anything was decided: nothing was sent, and nobody refused it.
    Undecided(&'a Outcome, Duration),
}

type Named = (u8, &'static str);

const SUCCESS: Named = (1, "Success");
const FAILURE: Named = (2, "Failure");
const UNKNOWN: Named = (0, "Unknown");
const ALLOWED: Named = (1, "Allowed");
const DENIED: Named = (2, "Denied");
const BLOCKED: Named = (2, "Blocked");
const DETECTED: Named = (15, "Detected");
const NO_ACTION: Named = (16, "No Action");
const REVOKED: Named = (24, "Access Revoked");
const ERROR: Named = (27, "Error");

impl<'a> Stage<'a> {
    fn name(self) -> &'static str {
        match self {
            Stage::Answered(..) => "answered",
            Stage::Decision => "decision",
            Stage::Denied => "denied",
            Stage::Outcome(..) | Stage::Undecided(..) => "outcome",
        }
    }

    /// The outcome, for as long as the stage lives.
    fn outcome(self) -> Option<(&'a Outcome, Duration)> {
        match self {
            Stage::Decision | Stage::Denied => None,
            Stage::Answered(outcome, took)
            | Stage::Outcome(outcome, took)
            | Stage::Undecided(outcome, took) => Some((outcome, took)),
        }
    }

    /// Status, action and disposition.
    fn result(self) -> (Named, Named, Named) {
        match self {
            Stage::Answered(..) | Stage::Decision => (SUCCESS, ALLOWED, ALLOWED),
            Stage::Denied => (FAILURE, DENIED, BLOCKED),
            Stage::Undecided(..) => (UNKNOWN, UNKNOWN, NO_ACTION),
            Stage::Outcome(outcome, _) => match outcome.ending {
                Ending::Abandoned => (UNKNOWN, ALLOWED, ALLOWED),
                Ending::Completed => (SUCCESS, ALLOWED, ALLOWED),
                Ending::Failed(_) => (FAILURE, ALLOWED, ERROR),
                Ending::Refused(_) => (FAILURE, DENIED, BLOCKED),
                Ending::Revoked(_) => (FAILURE, DENIED, REVOKED),
                Ending::Unknown => (UNKNOWN, ALLOWED, UNKNOWN),
            },
        }
    }
}

fn ending(ending: Ending) -> (&'static str, Option<crate::record::Code>) {
    match ending {
        Ending::Abandoned => ("abandoned", None),
        Ending::Completed => ("completed", None),
        Ending::Failed(code) => ("failed", Some(code)),
        Ending::Refused(code) => ("refused", Some(code)),
        Ending::Revoked(code) => ("revoked", Some(code)),
        Ending::Unknown => ("unknown", None),
    }
}

impl Attempt {
    pub(crate) fn class(&self) -> Class {
        match self.facts {
            Facts::Connection(_) => Class::Network,
            Facts::Memory(_) => Class::Memory,
            Facts::Query(_) => Class::Dns,
            Facts::Request(_) => Class::Http,
        }
    }

    /// Writes the attempt down as it stands at `stage`.
    pub(crate) fn draft(
        &self,
        stage: Stage<'_>,
        queries: QueryStrings,
    ) -> Result<Draft, DraftError> {
        let mut members = header(self.class(), self.activity(stage));
        self.judge(stage, &mut members);
        self.locate(&mut members);
        self.tell(queries, &mut members);
        conclude(self, stage, &mut members);
        let sandbar = self.sandbar(stage);
        let suffix = if matches!(stage, Stage::Outcome(..)) { "-2" } else { "-1" };
        let attempt = Ulid::from(self.id).to_string();
        let uid = [attempt.as_str(), suffix].concat();
        let tenant = self.subject.as_ref().map(|subject| &subject.tenant);
        let metadata = metadata(self.class(), &uid, &attempt, tenant);
        Draft::new(&members, metadata, &sandbar, self.role(stage))
    }

    fn role(&self, stage: Stage<'_>) -> Role {
        match stage {
            Stage::Decision => Role::Decision(self.owed()),
            Stage::Answered(..) | Stage::Denied | Stage::Undecided(..) => Role::Event,
            Stage::Outcome(..) => Role::Outcome(self.id),
        }
    }

    fn owed(&self) -> Owed {
        let none = || Text::<0>::default().shared();
        let subject = self.subject.as_ref();
        Owed {
            attempt: self.id,
            class_uid: self.class().uid(),
            sandbox: subject.map_or_else(none, |subject| subject.sandbox.0.shared()),
            tenant: subject.map_or_else(none, |subject| subject.tenant.0.shared()),
            host: self.host().map_or_else(none, Text::shared),
        }
    }

    fn host(&self) -> Option<&Text<512>> {
        match &self.facts {
            Facts::Connection(connection) => connection.host.as_ref(),
            Facts::Memory(call) => Some(&call.request.host),
            Facts::Query(query) => Some(&query.name),
            Facts::Request(request) => Some(&request.host),
        }
    }

    fn port(&self) -> Option<u16> {
        match &self.facts {
            Facts::Connection(connection) => connection.port,
            Facts::Memory(call) => Some(call.request.port),
            Facts::Query(_) => None,
            Facts::Request(request) => Some(request.port),
        }
    }

    fn activity(&self, stage: Stage<'_>) -> Named {
        match &self.facts {
            Facts::Connection(_) => connection_activity(stage),
            Facts::Memory(call) => memory_activity(call.effect),
            Facts::Query(_) => match stage {
                Stage::Decision | Stage::Denied => (1, "Query"),
                Stage::Answered(..) | Stage::Outcome(..) | Stage::Undecided(..) => (2, "Response"),
            },
            Facts::Request(request) => method_activity(&request.method.shared()),
        }
    }

    fn judge<'a>(&'a self, stage: Stage<'_>, members: &mut Members<'a>) {
        let verdict = self.verdict.as_ref();
        let (status, action, disposition) = stage.result();
        (members.status_id, members.status) = status;
        (members.action_id, members.action) = (Some(action.0), Some(action.1));
        (members.disposition_id, members.disposition) = (Some(disposition.0), Some(disposition.1));
        let ended = stage.outcome().and_then(|(outcome, _)| ending(outcome.ending).1);
        members.status_detail = ended.or(verdict.map(|verdict| verdict.reason));
        members.message = verdict.and_then(|verdict| verdict.message.as_ref());
        let alert = verdict.is_some_and(|verdict| verdict.attention == Attention::Alert);
        members.is_alert = alert.then_some(true);
        (members.severity_id, members.severity) = match (alert, action == DENIED) {
            (true, _) => (3, "Medium"),
            (false, true) => (2, "Low"),
            (false, false) => (1, "Informational"),
        };
        let rule = verdict.and_then(|verdict| verdict.rule.as_ref());
        members.firewall_rule = rule.map(|name| RuleName { name });
        let policy = verdict.and_then(|verdict| verdict.policy.as_ref());
        members.policy = policy.map(in_force);
    }

    fn locate<'a>(&'a self, members: &mut Members<'a>) {
        let sandbox = self.subject.as_ref().map(|subject| &subject.sandbox);
        let (ip, port) = parts(self.arrival.source);
        let name = (sandbox.is_none() && ip.is_none()).then_some(self.arrival.channel.kind.0);
        members.src_endpoint = Some(Source { uid: sandbox, name, ip, port });
        let identity = match &self.facts {
            Facts::Memory(call) => call.identity.as_ref(),
            Facts::Connection(_) | Facts::Query(_) | Facts::Request(_) => None,
        };
        let user = identity.map(|uid| crate::record::User { uid });
        members.actor = sandbox.map(|app_uid| Actor { app_uid, user });
        members.dst_endpoint = self.destination();
        members.connection_info = Some(self.arrival.transport);
    }

    fn tell<'a>(&'a self, queries: QueryStrings, members: &mut Members<'a>) {
        match &self.facts {
            Facts::Connection(connection) => members.tls = connection.tls.as_ref(),
            Facts::Memory(call) => {
                members.connection_info = None; // 6003 has none
                members.http_request = Some(http_request(&call.request, queries));
                members.api = Some(api(call));
                members.resources = call.banks.iter().take(LIST_MAX).map(bank).collect();
                members.actor.get_or_insert(Actor { app_uid: nobody(), user: None });
            }
            Facts::Query(query) => {
                let (hostname, kind) = (&query.name, Some(&query.kind));
                members.query = Some(DnsQuestion { hostname, kind });
            }
            Facts::Request(request) => members.http_request = Some(http_request(request, queries)),
        }
    }

    fn sandbar<'a>(&'a self, stage: Stage<'a>) -> Sandbar<'a> {
        let verdict = self.verdict.as_ref();
        let features = verdict.map_or(&[][..], |verdict| verdict.features.as_slice());
        Sandbar {
            stage: stage.name(),
            environment: self.subject.as_ref().map(|subject| &subject.environment),
            channel: Some(&self.arrival.channel),
            carried: verdict.and_then(|verdict| verdict.carried),
            credential: verdict.and_then(|verdict| verdict.credential.as_ref()),
            identity: match &self.facts {
                Facts::Memory(call) => Some(call.checked),
                Facts::Connection(_) | Facts::Query(_) | Facts::Request(_) => None,
            },
            score: verdict.and_then(|verdict| verdict.score),
            features: features.get(..LIST_MAX).unwrap_or(features),
            unlisted: self.unlisted(&stage, features.len()),
            ending: stage.outcome().map(|(outcome, _)| ending(outcome.ending).0),
            traffic: match self.facts {
                Facts::Memory(_) => stage.outcome().map(|_| self.traffic()),
                Facts::Connection(_) | Facts::Query(_) | Facts::Request(_) => None,
            },
            folded: verdict.map(|verdict| verdict.folded).filter(|folded| *folded > 0),
            ..Sandbar::default()
        }
    }

    fn traffic(&self) -> Traffic {
        let (bytes_out, bytes_in) = self.meter.read();
        Traffic { bytes_in, bytes_out }
    }

    fn destination(&self) -> Option<Destination<'_>> {
        let (ip, port) = parts(self.dialled.or(self.arrival.aimed));
        let (hostname, port) = (self.host(), self.port().or(port));
        let known = hostname.is_some() || ip.is_some();
        known.then_some(Destination { hostname, ip, port })
    }

    fn unlisted(&self, stage: &Stage<'_>, features: usize) -> Option<u64> {
        let answers = stage.outcome().map_or(0, |(outcome, _)| outcome.answers.len());
        let banks = match &self.facts {
            Facts::Memory(call) => call.banks.len(),
            Facts::Connection(_) | Facts::Query(_) | Facts::Request(_) => 0,
        };
        let over: usize =
            [answers, banks, features].map(|n| n.saturating_sub(LIST_MAX)).iter().sum();
        (over > 0).then_some(over as u64)
    }
}

fn conclude<'a>(attempt: &Attempt, stage: Stage<'a>, members: &mut Members<'a>) {
    let Some((outcome, took)) = stage.outcome() else { return };
    members.duration = Some(took.as_millis() as u64);
    let traffic = Some(attempt.traffic());
    let response = outcome.status.map(|code| HttpResponse { code });
    match &attempt.facts {
        Facts::Connection(_) => members.traffic = traffic,
        Facts::Memory(_) => members.http_response = response, // 6003 has no traffic, see `sandbar`
        Facts::Query(_) => {
            (members.traffic, members.rcode_id) = (traffic, outcome.rcode);
            members.answers = outcome.answers.get(..LIST_MAX).unwrap_or(&outcome.answers);
        }
        Facts::Request(_) => (members.traffic, members.http_response) = (traffic, response),
    }
}

fn connection_activity(stage: Stage<'_>) -> Named {
    match stage {
        Stage::Decision => (1, "Open"),
        Stage::Denied => (5, "Refuse"),
        Stage::Answered(outcome, _) | Stage::Outcome(outcome, _) | Stage::Undecided(outcome, _) => {
            match outcome.ending {
                Ending::Completed => (2, "Close"),
                Ending::Abandoned | Ending::Revoked(_) => (3, "Reset"),
                Ending::Failed(_) => (4, "Fail"),
                Ending::Refused(_) => (5, "Refuse"),
                Ending::Unknown => UNKNOWN,
            }
        }
    }
}

fn memory_activity(effect: Effect) -> Named {
    match effect {
        Effect::Admin => (99, "Other"),
        Effect::Delete => (4, "Delete"),
        Effect::Read => (2, "Read"),
        Effect::Write => (3, "Update"),
    }
}

fn method_activity(method: &str) -> Named {
    match method {
        "CONNECT" => (1, "Connect"),
        "DELETE" => (2, "Delete"),
        "GET" => (3, "Get"),
        "HEAD" => (4, "Head"),
        "OPTIONS" => (5, "Options"),
        "PATCH" => (9, "Patch"),
        "POST" => (6, "Post"),
        "PUT" => (7, "Put"),
        "TRACE" => (8, "Trace"),
        _ => (99, "Other"),
    }
}

fn http_request(request: &Request, queries: QueryStrings) -> HttpRequest<'_> {
    let query_string = match queries {
        QueryStrings::Drop => None,
        QueryStrings::Keep => request.query(),
    };
    let scheme = match request.scheme {
        Scheme::Http => "http",
        Scheme::Https => "https",
    };
    let (hostname, port, path) = (&request.host, request.port, request.path());
    HttpRequest {
        http_method: &request.method,
        version: request.version.as_ref(),
        url: Some(Url { scheme, hostname, port, path, query_string }),
        user_agent: request.user_agent.as_ref(),
        length: request.length,
    }
}

fn api(call: &MemoryCall) -> Api<'_> {
    Api { operation: &call.operation, service: Service { name: &call.service } }
}

fn bank(uid: &Text<256>) -> Resource<'_> {
    Resource { uid, kind: "memory bank" }
}

/// 6003 demands an actor even of a call that arrived on nobody's channel.
fn nobody() -> &'static crate::record::SandboxId {
    static NOBODY: std::sync::LazyLock<crate::record::SandboxId> =
        std::sync::LazyLock::new(|| crate::record::SandboxId("unknown".into()));
    &NOBODY
}

fn in_force(policy: &crate::attempt::Policy) -> PolicyInForce<'_> {
    PolicyInForce { uid: &policy.digest, version: Digits(policy.generation) }
}

/// Writes down that nobody knows how an attempt ended, for the process that decided it died. What
/// its decision does not tell is left out, not guessed.
pub(crate) fn unknown(owed: &Owed) -> Result<Draft, DraftError> {
    let class = Class::of(owed.class_uid);
    let outcome = Outcome::new(Ending::Unknown);
    let stage = Stage::Outcome(&outcome, Duration::ZERO);
    let (status, action, disposition) = stage.result();
    let mut members = header(class, UNKNOWN);
    (members.status_id, members.status) = status;
    (members.action_id, members.action) = (Some(action.0), Some(action.1));
    (members.disposition_id, members.disposition) = (Some(disposition.0), Some(disposition.1));
    let host: Text<512> = Text::from(&*owed.host);
    let sandbox = Some(SandboxId(Text::from(&*owed.sandbox))).filter(|id| !id.0.is_empty());
    let name = sandbox.is_none().then_some("unknown");
    let (ip, port) = (None, None);
    members.src_endpoint = Some(Source { uid: sandbox.as_ref(), name, ip, port });
    members.actor = sandbox.as_ref().map(|app_uid| Actor { app_uid, user: None });
    let hostname = Some(&host).filter(|host| !host.is_empty());
    members.dst_endpoint = hostname.map(|host| Destination { hostname: Some(host), ip, port });
    let (method, word) = (Text::from("UNKNOWN"), Text::from("unknown"));
    let (version, url, user_agent, length) = (None, None, None, None);
    let asked = HttpRequest { http_method: &method, version, url, user_agent, length };
    match class {
        Class::Dns => members.query = hostname.map(|hostname| DnsQuestion { hostname, kind: None }),
        Class::Http => members.http_request = Some(asked), // 4002 demands one
        Class::Memory => {
            members.api = Some(Api { operation: &word, service: Service { name: &word } });
            members.actor.get_or_insert(Actor { app_uid: nobody(), user: None });
        }
        Class::Finding | Class::Lifecycle | Class::Network => {}
    }
    let ending = Some(ending(outcome.ending).0);
    let sandbar = Sandbar { stage: stage.name(), ending, ..Sandbar::default() };
    let attempt = Ulid::from(owed.attempt).to_string();
    let uid = [attempt.as_str(), "-2"].concat();
    let tenant = Some(TenantId(Text::from(&*owed.tenant))).filter(|id| !id.0.is_empty());
    let metadata = metadata(class, &uid, &attempt, tenant.as_ref());
    Draft::new(&members, metadata, &sandbar, Role::Outcome(owed.attempt))
}

/// Writes a finding down, as of `attempt` when there is one.
pub(crate) fn finding(
    finding: &Finding,
    uid: u128,
    attempt: Option<&Attempt>,
) -> Result<Draft, DraftError> {
    let uid = Ulid::from(uid).to_string();
    let about = attempt.map(|attempt| Ulid::from(attempt.id).to_string());
    let mut members = header(Class::Finding, (1, "Create"));
    (members.severity_id, members.severity) = match finding.severity {
        Severity::Critical => (5, "Critical"),
        Severity::High => (4, "High"),
        Severity::Low => (2, "Low"),
        Severity::Medium => (3, "Medium"),
    };
    (members.status_id, members.status) = (1, "New");
    members.status_detail = Some(finding.code);
    (members.disposition_id, members.disposition) = (Some(DETECTED.0), Some(DETECTED.1));
    members.is_alert = Some(true);
    members.message = finding.message.as_ref();
    let related_events = about.as_deref().map(|uid| [RelatedEvent { uid }]);
    let types = [finding.code];
    members.finding_info =
        Some(FindingInfo { uid: &uid, title: &finding.title, types, related_events });
    let subject = attempt.and_then(|attempt| attempt.subject.as_ref());
    members.actor = subject.map(|subject| Actor { app_uid: &subject.sandbox, user: None });
    let destination = attempt.and_then(Attempt::destination);
    members.evidences = destination.map(|dst_endpoint| [Evidence { dst_endpoint }]);
    let verdict = attempt.and_then(|attempt| attempt.verdict.as_ref());
    members.policy = verdict.and_then(|verdict| verdict.policy.as_ref()).map(in_force);
    let sandbar = Sandbar {
        stage: "finding",
        channel: attempt.map(|attempt| &attempt.arrival.channel),
        environment: subject.map(|subject| &subject.environment),
        score: finding.score,
        features: finding.features.get(..LIST_MAX).unwrap_or(&finding.features),
        ..Sandbar::default()
    };
    let correlation = about.as_deref().unwrap_or(&uid);
    let tenant = subject.map(|subject| &subject.tenant);
    let metadata = metadata(Class::Finding, &uid, correlation, tenant);
    Draft::new(&members, metadata, &sandbar, Role::Event)
}

/// Writes an event of Sandbar's own life down.
pub(crate) fn lifecycle(event: &Lifecycle, uid: u128) -> Result<Draft, DraftError> {
    let (activity, name) = match event.event {
        LifecycleEvent::GrantEnded => ((99, "Other"), "grant_ended"),
        LifecycleEvent::GrantMade => ((99, "Other"), "grant_made"),
        LifecycleEvent::GrantRefused => ((99, "Other"), "grant_refused"),
        LifecycleEvent::GrantUsed => ((99, "Other"), "grant_used"),
        LifecycleEvent::PolicyLoaded => ((99, "Other"), "policy_loaded"),
        LifecycleEvent::PolicyRejected => ((99, "Other"), "policy_rejected"),
        LifecycleEvent::RunEnded => ((99, "Other"), "run_ended"),
        LifecycleEvent::Started => ((3, "Start"), "started"),
        LifecycleEvent::Stopped => ((4, "Stop"), "stopped"),
    };
    let bad = matches!(event.event, LifecycleEvent::GrantRefused | LifecycleEvent::PolicyRejected);
    let mut members = header(Class::Lifecycle, activity);
    (members.status_id, members.status) = if bad { FAILURE } else { SUCCESS };
    members.message = event.message.as_ref();
    members.policy = event.policy.as_ref().map(in_force);
    let sandbar = Sandbar { event: Some(name), ..Sandbar::default() };
    log_event(members, uid, sandbar)
}

/// Writes an event of the log itself down: a segment, a recovery, a checkpoint.
pub(crate) fn own(
    event: &'static str,
    uid: u128,
    message: Option<&Text<512>>,
    sandbar: Sandbar<'_>,
) -> Result<Draft, DraftError> {
    let activity = match event {
        "log_stopped" => (4, "Stop"),
        "log_started" => (3, "Start"),
        _ => (99, "Other"),
    };
    let mut members = header(Class::Lifecycle, activity);
    let bad = event == "log_behind_checkpoint";
    (members.status_id, members.status) = if bad { FAILURE } else { SUCCESS };
    members.is_alert = bad.then_some(true);
    members.message = message;
    log_event(members, uid, Sandbar { event: Some(event), ..sandbar })
}

fn log_event(
    mut members: Members<'_>,
    uid: u128,
    sandbar: Sandbar<'_>,
) -> Result<Draft, DraftError> {
    members.app = Some(Product::SELF);
    let uid = Ulid::from(uid).to_string();
    let sandbar = Sandbar { stage: "lifecycle", ..sandbar };
    Draft::new(&members, metadata(Class::Lifecycle, &uid, &uid, None), &sandbar, Role::Event)
}

fn header(class: Class, activity: Named) -> Members<'static> {
    let (class_name, category_name) = class.names();
    let time = now();
    Members {
        time,
        time_dt: Stamp(time),
        class_uid: class.uid(),
        class_name,
        category_uid: class.uid() / 1000,
        category_name,
        activity_id: activity.0,
        activity_name: activity.1,
        type_uid: u32::from(class.uid()) * 100 + u32::from(activity.0),
        severity_id: 1,
        severity: "Informational",
        ..Members::default()
    }
}

fn metadata<'a>(
    class: Class,
    uid: &'a str,
    correlation_uid: &'a str,
    tenant_uid: Option<&'a TenantId>,
) -> Metadata<'a> {
    Metadata {
        version: OCSF_VERSION,
        product: Product::SELF,
        profiles: class.profiles(),
        log_name: "access",
        uid,
        correlation_uid,
        tenant_uid,
        is_truncated: None,
        untruncated_size: None,
    }
}

/// Milliseconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
