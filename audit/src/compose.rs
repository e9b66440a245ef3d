//! Composes records from the facts about an attempt: OCSF numbers, names and classes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ulid::Ulid;

use crate::attempt::{
    AlertFlag, AttemptOutcome, AttemptState, DetectionFinding, Ending, FindingSeverity, HttpScheme,
    Lifecycle, LifecycleEvent, MemoryCall, MemoryEffect, RecordedConnection, RecordedFacts, RecordedRequest,
};
use crate::config::QueryStrings;
use crate::draft::{Draft, DraftError, DraftRole, OpenDecision};
use crate::record::{
    Actor, ApiCall, ApiService, AttemptedText, DestinationEndpoint, DnsQuestion, FindingEvidence,
    FindingInfo, HttpRequest, HttpResponse, LIST_MAX, LastFolded, Metadata, OCSF_VERSION, PolicyInForce,
    Product, RecordMembers, RelatedEvent, Resource, Rfc3339Time, RuleName, SandbarExtension, SourceEndpoint,
    StableCode, Traffic, Url, split_address,
};
use crate::record::{DecimalText, SandboxId, TenantId};
use crate::text::Text;

const PROFILES: &[&str] = &["security_control", "datetime"];
/// For classes that do not define `actor` themselves.
const PROFILES_HOST: &[&str] = &["security_control", "datetime", "host"];

/// An OCSF class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventClass {
    Dns,
    Finding,
    Http,
    Lifecycle,
    Memory,
    Network,
}

impl EventClass {
    pub(crate) fn uid(self) -> u16 {
        match self {
            EventClass::Dns => 4003,
            EventClass::Finding => 2004,
            EventClass::Http => 4002,
            EventClass::Lifecycle => 6002,
            EventClass::Memory => 6003,
            EventClass::Network => 4001,
        }
    }

    pub(crate) fn from_uid(uid: u16) -> Self {
        match uid {
            4002 => EventClass::Http,
            4003 => EventClass::Dns,
            6003 => EventClass::Memory,
            _ => EventClass::Network,
        }
    }

    fn profiles(self) -> &'static [&'static str] {
        match self {
            EventClass::Dns | EventClass::Finding | EventClass::Http | EventClass::Network => PROFILES_HOST,
            EventClass::Lifecycle | EventClass::Memory => PROFILES,
        }
    }

    fn names(self) -> (&'static str, &'static str) {
        match self {
            EventClass::Dns => ("DNS Activity", "Network Activity"),
            EventClass::Finding => ("Detection Finding", "Findings"),
            EventClass::Http => ("HTTP Activity", "Network Activity"),
            EventClass::Lifecycle => ("Application Lifecycle", "Application Activity"),
            EventClass::Memory => ("API Activity", "Application Activity"),
            EventClass::Network => ("Network Activity", "Network Activity"),
        }
    }
}

/// Which of the records of an attempt to draft.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DraftStage<'a> {
    /// Answered here: nothing was sent, and there is no decision record.
    Answered(&'a AttemptOutcome, Duration),
    Decision,
    Denied,
    Outcome(&'a AttemptOutcome, Duration),
    /// Ended before a decision: nothing was sent or refused.
    Undecided(&'a AttemptOutcome, Duration),
}

type NamedId = (u8, &'static str);

const SUCCESS: NamedId = (1, "Success");
const FAILURE: NamedId = (2, "Failure");
const UNKNOWN: NamedId = (0, "Unknown");
const ALLOWED: NamedId = (1, "Allowed");
const DENIED: NamedId = (2, "Denied");
const BLOCKED: NamedId = (2, "Blocked");
const DETECTED: NamedId = (15, "Detected");
const NO_ACTION: NamedId = (16, "No Action");
const REVOKED: NamedId = (24, "Access Revoked");
const ERROR: NamedId = (27, "Error");

impl<'a> DraftStage<'a> {
    pub(crate) fn name(self) -> &'static str {
        match self {
            DraftStage::Answered(..) => "answered",
            DraftStage::Decision => "decision",
            DraftStage::Denied => "denied",
            DraftStage::Outcome(..) | DraftStage::Undecided(..) => "outcome",
        }
    }

    /// Returns the outcome and the duration, if the stage has one.
    fn outcome(self) -> Option<(&'a AttemptOutcome, Duration)> {
        match self {
            DraftStage::Decision | DraftStage::Denied => None,
            DraftStage::Answered(outcome, took)
            | DraftStage::Outcome(outcome, took)
            | DraftStage::Undecided(outcome, took) => Some((outcome, took)),
        }
    }

    /// Returns status, action and disposition.
    fn result(self) -> (NamedId, NamedId, NamedId) {
        match self {
            DraftStage::Answered(..) | DraftStage::Decision => (SUCCESS, ALLOWED, ALLOWED),
            DraftStage::Denied => (FAILURE, DENIED, BLOCKED),
            DraftStage::Undecided(..) => (UNKNOWN, UNKNOWN, NO_ACTION),
            DraftStage::Outcome(outcome, _) => match outcome.ending {
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

fn describe_ending(ending: Ending) -> (&'static str, Option<StableCode>) {
    match ending {
        Ending::Abandoned => ("abandoned", None),
        Ending::Completed => ("completed", None),
        Ending::Failed(code) => ("failed", Some(code.code())),
        Ending::Refused(code) => ("refused", Some(code)),
        Ending::Revoked(reason) => ("revoked", Some(reason.into())),
        Ending::Unknown => ("unknown", None),
    }
}

impl AttemptState {
    pub(crate) fn class(&self) -> EventClass {
        match self.facts {
            RecordedFacts::Connection(_) => EventClass::Network,
            RecordedFacts::Memory(_) => EventClass::Memory,
            RecordedFacts::Query(_) => EventClass::Dns,
            RecordedFacts::Request(_) => EventClass::Http,
        }
    }

    /// Drafts the record of this attempt for `stage`.
    pub(crate) fn draft(&self, stage: DraftStage<'_>, queries: QueryStrings) -> Result<Draft, DraftError> {
        let mut members = header(self.class(), self.activity(stage));
        self.add_decision(stage, &mut members);
        self.add_endpoints(&mut members);
        self.add_facts(queries, &mut members);
        add_outcome(self, stage, &mut members);
        let sandbar = self.extension(stage);
        let suffix = if matches!(stage, DraftStage::Outcome(..)) { "-2" } else { "-1" };
        let attempt = Ulid::from(self.id).to_string();
        let uid = [attempt.as_str(), suffix].concat();
        let tenant = self.subject.as_ref().map(|subject| &subject.tenant);
        let metadata = metadata(self.class(), &uid, &attempt, tenant);
        let draft = Draft::new(&members, metadata, &sandbar, self.role(stage))?;
        Ok(draft.charged_to(self.sandbox.clone()))
    }

    /// Returns how many further attempts its record stands for.
    pub(crate) fn folded(&self) -> u64 {
        let counted = self.verdict.as_ref().map_or(0, |verdict| verdict.folded);
        self.summary.as_ref().map_or(counted, |summary| summary.count - 1)
    }

    fn last_folded(&self) -> Option<LastFolded<'_>> {
        let last = &self.summary.as_ref()?.last;
        let (hostname, attempted) = (last.host.as_ref(), last.attempted.as_ref());
        Some(LastFolded { time_dt: Rfc3339Time(last.time), hostname, attempted })
    }

    fn role(&self, stage: DraftStage<'_>) -> DraftRole {
        match stage {
            DraftStage::Decision => DraftRole::Decision(self.open_decision()),
            DraftStage::Answered(..) | DraftStage::Denied | DraftStage::Undecided(..) => DraftRole::Event,
            DraftStage::Outcome(..) => DraftRole::Outcome(self.id),
        }
    }

    fn open_decision(&self) -> OpenDecision {
        let none = || Text::<0>::default().to_arc();
        let subject = self.subject.as_ref();
        OpenDecision {
            attempt: self.id,
            class_uid: self.class().uid(),
            sandbox: subject.map_or_else(none, |subject| subject.sandbox.0.to_arc()),
            tenant: subject.map_or_else(none, |subject| subject.tenant.0.to_arc()),
            host: self.host().map_or_else(none, Text::to_arc),
            outcome_bytes: 0, // known once it is encoded
        }
    }

    pub(crate) fn host(&self) -> Option<&Text<512>> {
        match &self.facts {
            RecordedFacts::Connection(connection) => connection.host.as_ref(),
            RecordedFacts::Memory(call) => Some(&call.request.host),
            RecordedFacts::Query(query) => Some(&query.name),
            RecordedFacts::Request(request) => Some(&request.host),
        }
    }

    fn port(&self) -> Option<u16> {
        match &self.facts {
            RecordedFacts::Connection(connection) => connection.port,
            RecordedFacts::Memory(call) => Some(call.request.port),
            RecordedFacts::Query(_) => None,
            RecordedFacts::Request(request) => Some(request.port),
        }
    }

    /// Returns whether the verdict is a refusal.
    pub(crate) fn is_refused(&self) -> bool {
        self.verdict.as_ref().is_some_and(|verdict| !verdict.allows())
    }

    /// Returns what the sandbox asked for: the text that the refusal gives, or else the facts.
    pub(crate) fn attempted(&self) -> Option<AttemptedText> {
        let given = self.verdict.as_ref().and_then(|verdict| verdict.attempted.clone());
        given.or_else(|| match &self.facts {
            RecordedFacts::Connection(RecordedConnection { host: Some(host), port, .. }) => {
                Some(host_and_port(host, *port).into())
            }
            RecordedFacts::Connection(_) => self.arrival.original_dst.map(|to| to.to_string().into()),
            RecordedFacts::Memory(MemoryCall { request, .. }) | RecordedFacts::Request(request) => {
                let host = host_and_port(&request.host, Some(request.port));
                Some(format!("{} {host} {}", request.method.to_display(), request.display_path()).into())
            }
            RecordedFacts::Query(query) => {
                Some(format!("{} {}", query.name.to_display(), query.kind.to_display()).into())
            }
        })
    }

    fn activity(&self, stage: DraftStage<'_>) -> NamedId {
        match &self.facts {
            RecordedFacts::Connection(_) => connection_activity(stage),
            RecordedFacts::Memory(call) => memory_activity(call.effect),
            RecordedFacts::Query(_) => match stage {
                DraftStage::Decision | DraftStage::Denied => (1, "Query"),
                DraftStage::Answered(..) | DraftStage::Outcome(..) | DraftStage::Undecided(..) => {
                    (2, "Response")
                }
            },
            RecordedFacts::Request(request) => method_activity(&request.method.to_arc()),
        }
    }

    fn add_decision<'a>(&'a self, stage: DraftStage<'_>, members: &mut RecordMembers<'a>) {
        let verdict = self.verdict.as_ref();
        let (status, action, disposition) = stage.result();
        (members.status_id, members.status) = status;
        (members.action_id, members.action) = (Some(action.0), Some(action.1));
        (members.disposition_id, members.disposition) = (Some(disposition.0), Some(disposition.1));
        let ended = stage.outcome().and_then(|(outcome, _)| describe_ending(outcome.ending).1);
        members.status_detail = ended.or(verdict.map(|verdict| verdict.reason));
        let summary = self.summary.as_ref().map(|summary| &summary.message);
        members.message = summary.or(verdict.and_then(|verdict| verdict.message.as_ref()));
        let alert = verdict.is_some_and(|verdict| verdict.attention == AlertFlag::Alert);
        members.is_alert = alert.then_some(true);
        (members.severity_id, members.severity) = match (alert, action == DENIED) {
            (true, _) => (3, "Medium"),
            (false, true) => (2, "Low"),
            (false, false) => (1, "Informational"),
        };
        let rule = verdict.and_then(|verdict| verdict.rule.as_ref());
        members.firewall_rule = rule.map(|name| RuleName { name });
        let policy = verdict.and_then(|verdict| verdict.policy.as_ref());
        members.policy = policy.map(policy_in_force);
    }

    fn add_endpoints<'a>(&'a self, members: &mut RecordMembers<'a>) {
        let sandbox = self.subject.as_ref().map(|subject| &subject.sandbox);
        let (ip, port) = split_address(self.arrival.source);
        let name = (sandbox.is_none() && ip.is_none()).then_some(self.arrival.channel.kind.0);
        members.src_endpoint = Some(SourceEndpoint { uid: sandbox, name, ip, port });
        let identity = match &self.facts {
            RecordedFacts::Memory(call) => call.identity.as_ref(),
            RecordedFacts::Connection(_) | RecordedFacts::Query(_) | RecordedFacts::Request(_) => None,
        };
        let user = identity.map(|uid| crate::record::User { uid });
        members.actor = sandbox.map(|app_uid| Actor { app_uid, user });
        members.dst_endpoint = self.destination();
        members.connection_info = Some(self.arrival.transport);
    }

    fn add_facts<'a>(&'a self, queries: QueryStrings, members: &mut RecordMembers<'a>) {
        match &self.facts {
            RecordedFacts::Connection(connection) => members.tls = connection.tls.as_ref(),
            RecordedFacts::Memory(call) => {
                members.connection_info = None; // 6003 does not define it
                members.http_request = Some(http_request(&call.request, queries));
                members.api = Some(api(call));
                members.resources = call.banks.iter().take(LIST_MAX).map(bank).collect();
                members.actor.get_or_insert(Actor { app_uid: unknown_sandbox(), user: None });
            }
            RecordedFacts::Query(query) => {
                let (hostname, kind) = (&query.name, Some(&query.kind));
                members.query = Some(DnsQuestion { hostname, kind });
            }
            RecordedFacts::Request(request) => members.http_request = Some(http_request(request, queries)),
        }
    }

    fn extension<'a>(&'a self, stage: DraftStage<'a>) -> SandbarExtension<'a> {
        let verdict = self.verdict.as_ref();
        let features = verdict.map_or(&[][..], |verdict| verdict.features.as_slice());
        SandbarExtension {
            stage: stage.name(),
            environment: self.subject.as_ref().map(|subject| &subject.environment),
            channel: Some(&self.arrival.channel),
            attempted: (stage.result().1 == DENIED || self.is_refused()).then(|| self.attempted()).flatten(),
            carried: verdict.and_then(|verdict| verdict.treatment),
            inspected: verdict.and_then(|verdict| verdict.inspected),
            credential: verdict.and_then(|verdict| verdict.credential.as_ref()),
            identity: match &self.facts {
                RecordedFacts::Memory(call) => Some(call.checked),
                RecordedFacts::Connection(_) | RecordedFacts::Query(_) | RecordedFacts::Request(_) => None,
            },
            score: verdict.and_then(|verdict| verdict.score),
            features: features.get(..LIST_MAX).unwrap_or(features),
            unlisted: self.count_unlisted(&stage, features.len()),
            ending: stage.outcome().map(|(outcome, _)| describe_ending(outcome.ending).0),
            sends: stage.outcome().map(|_| self.byte_count.sends()).filter(|sends| *sends > 1),
            traffic: match self.facts {
                RecordedFacts::Memory(_) => stage.outcome().map(|_| self.traffic()),
                RecordedFacts::Connection(_) | RecordedFacts::Query(_) | RecordedFacts::Request(_) => None,
            },
            folded: Some(self.folded()).filter(|folded| *folded > 0),
            last: self.last_folded(),
            ..SandbarExtension::default()
        }
    }

    fn traffic(&self) -> Traffic {
        let (bytes_out, bytes_in) = self.byte_count.sent_and_received();
        Traffic { bytes_in, bytes_out }
    }

    fn destination(&self) -> Option<DestinationEndpoint<'_>> {
        let (ip, port) = split_address(self.dialled.or(self.arrival.original_dst));
        let (hostname, port) = (self.host(), self.port().or(port));
        let known = hostname.is_some() || ip.is_some();
        known.then_some(DestinationEndpoint { hostname, ip, port })
    }

    fn count_unlisted(&self, stage: &DraftStage<'_>, features: usize) -> Option<u64> {
        let answers = stage.outcome().map_or(0, |(outcome, _)| outcome.answers.len());
        let banks = match &self.facts {
            RecordedFacts::Memory(call) => call.banks.len(),
            RecordedFacts::Connection(_) | RecordedFacts::Query(_) | RecordedFacts::Request(_) => 0,
        };
        let over: usize = [answers, banks, features].map(|n| n.saturating_sub(LIST_MAX)).iter().sum();
        (over > 0).then_some(over as u64)
    }
}

fn add_outcome<'a>(attempt: &AttemptState, stage: DraftStage<'a>, members: &mut RecordMembers<'a>) {
    let Some((outcome, took)) = stage.outcome() else { return };
    members.duration = Some(took.as_millis() as u64);
    let traffic = Some(attempt.traffic());
    let response = outcome.status.map(|code| HttpResponse { code });
    match &attempt.facts {
        RecordedFacts::Connection(_) => members.traffic = traffic,
        RecordedFacts::Memory(_) => members.http_response = response, // 6003 has no `traffic`: see `extension`
        RecordedFacts::Query(_) => {
            (members.traffic, members.rcode_id) = (traffic, outcome.rcode);
            members.answers = outcome.answers.get(..LIST_MAX).unwrap_or(&outcome.answers);
        }
        RecordedFacts::Request(_) => (members.traffic, members.http_response) = (traffic, response),
    }
}

fn connection_activity(stage: DraftStage<'_>) -> NamedId {
    match stage {
        DraftStage::Decision => (1, "Open"),
        DraftStage::Denied => (5, "Refuse"),
        DraftStage::Answered(outcome, _)
        | DraftStage::Outcome(outcome, _)
        | DraftStage::Undecided(outcome, _) => match outcome.ending {
            Ending::Completed => (2, "Close"),
            Ending::Abandoned | Ending::Revoked(_) => (3, "Reset"),
            Ending::Failed(_) => (4, "Fail"),
            Ending::Refused(_) => (5, "Refuse"),
            Ending::Unknown => UNKNOWN,
        },
    }
}

fn memory_activity(effect: MemoryEffect) -> NamedId {
    match effect {
        MemoryEffect::Admin => (99, "Other"),
        MemoryEffect::Delete => (4, "Delete"),
        MemoryEffect::Read => (2, "Read"),
        MemoryEffect::Write => (3, "Update"),
    }
}

fn method_activity(method: &str) -> NamedId {
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

fn http_request(request: &RecordedRequest, queries: QueryStrings) -> HttpRequest<'_> {
    let query_string = match queries {
        QueryStrings::Drop => None,
        QueryStrings::Keep => request.query(),
    };
    let scheme = match request.scheme {
        HttpScheme::Http => "http",
        HttpScheme::Https => "https",
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

fn host_and_port(host: &Text<512>, port: Option<u16>) -> String {
    let host = host.to_display();
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    port.map_or(host.clone(), |port| format!("{host}:{port}"))
}

fn api(call: &MemoryCall) -> ApiCall<'_> {
    ApiCall { operation: &call.operation, service: ApiService { name: &call.service } }
}

fn bank(uid: &Text<256>) -> Resource<'_> {
    Resource { uid, kind: "memory bank" }
}

/// Stands in for a sandbox: 6003 requires an actor even if the channel belongs to no sandbox.
fn unknown_sandbox() -> &'static crate::record::SandboxId {
    static UNKNOWN_SANDBOX: std::sync::LazyLock<crate::record::SandboxId> =
        std::sync::LazyLock::new(|| crate::record::SandboxId("unknown".into()));
    &UNKNOWN_SANDBOX
}

fn policy_in_force(policy: &crate::attempt::RecordedPolicy) -> PolicyInForce<'_> {
    PolicyInForce { uid: &policy.digest, version: DecimalText(policy.generation) }
}

/// Drafts the outcome of an attempt whose process died before it ended. Members that the decision
/// does not tell are left out, not guessed.
pub(crate) fn draft_unknown_outcome(owed: &OpenDecision) -> Result<Draft, DraftError> {
    let class = EventClass::from_uid(owed.class_uid);
    let outcome = AttemptOutcome::new(Ending::Unknown);
    let stage = DraftStage::Outcome(&outcome, Duration::ZERO);
    let (status, action, disposition) = stage.result();
    let mut members = header(class, UNKNOWN);
    (members.status_id, members.status) = status;
    (members.action_id, members.action) = (Some(action.0), Some(action.1));
    (members.disposition_id, members.disposition) = (Some(disposition.0), Some(disposition.1));
    let host: Text<512> = Text::from(&*owed.host);
    let sandbox = Some(SandboxId(Text::from(&*owed.sandbox))).filter(|id| !id.0.is_empty());
    let name = sandbox.is_none().then_some("unknown");
    let (ip, port) = (None, None);
    members.src_endpoint = Some(SourceEndpoint { uid: sandbox.as_ref(), name, ip, port });
    members.actor = sandbox.as_ref().map(|app_uid| Actor { app_uid, user: None });
    let hostname = Some(&host).filter(|host| !host.is_empty());
    members.dst_endpoint = hostname.map(|host| DestinationEndpoint { hostname: Some(host), ip, port });
    let (method, word) = (Text::from("UNKNOWN"), Text::from("unknown"));
    let (version, url, user_agent, length) = (None, None, None, None);
    let asked = HttpRequest { http_method: &method, version, url, user_agent, length };
    match class {
        EventClass::Dns => members.query = hostname.map(|hostname| DnsQuestion { hostname, kind: None }),
        EventClass::Http => members.http_request = Some(asked), // 4002 requires one
        EventClass::Memory => {
            members.api = Some(ApiCall { operation: &word, service: ApiService { name: &word } });
            members.actor.get_or_insert(Actor { app_uid: unknown_sandbox(), user: None });
        }
        EventClass::Finding | EventClass::Lifecycle | EventClass::Network => {}
    }
    let ending = Some(describe_ending(outcome.ending).0);
    let sandbar = SandbarExtension { stage: stage.name(), ending, ..SandbarExtension::default() };
    let attempt = Ulid::from(owed.attempt).to_string();
    let uid = [attempt.as_str(), "-2"].concat();
    let tenant = Some(TenantId(Text::from(&*owed.tenant))).filter(|id| !id.0.is_empty());
    let metadata = metadata(class, &uid, &attempt, tenant.as_ref());
    let draft = Draft::new(&members, metadata, &sandbar, DraftRole::Outcome(owed.attempt))?;
    Ok(draft.charged_to(rules::ids::SandboxId::parse(&owed.sandbox).ok()))
}

/// Drafts a finding, of `attempt` if there is one.
pub(crate) fn draft_finding(
    finding: &DetectionFinding,
    uid: u128,
    attempt: Option<&AttemptState>,
) -> Result<Draft, DraftError> {
    let uid = Ulid::from(uid).to_string();
    let about = attempt.map(|attempt| Ulid::from(attempt.id).to_string());
    let mut members = header(EventClass::Finding, (1, "Create"));
    (members.severity_id, members.severity) = match finding.severity {
        FindingSeverity::Critical => (5, "Critical"),
        FindingSeverity::High => (4, "High"),
        FindingSeverity::Low => (2, "Low"),
        FindingSeverity::Medium => (3, "Medium"),
    };
    (members.status_id, members.status) = (1, "New");
    members.status_detail = Some(finding.code.into());
    (members.disposition_id, members.disposition) = (Some(DETECTED.0), Some(DETECTED.1));
    members.is_alert = Some(true);
    members.message = finding.message.as_ref();
    let related_events = about.as_deref().map(|uid| [RelatedEvent { uid }]);
    let types = [finding.code.into()];
    members.finding_info = Some(FindingInfo { uid: &uid, title: &finding.title, types, related_events });
    let subject = attempt.and_then(|attempt| attempt.subject.as_ref());
    members.actor = subject.map(|subject| Actor { app_uid: &subject.sandbox, user: None });
    let destination = attempt.and_then(AttemptState::destination);
    members.evidences = destination.map(|dst_endpoint| [FindingEvidence { dst_endpoint }]);
    let verdict = attempt.and_then(|attempt| attempt.verdict.as_ref());
    members.policy = verdict.and_then(|verdict| verdict.policy.as_ref()).map(policy_in_force);
    let sandbar = SandbarExtension {
        stage: "finding",
        channel: attempt.map(|attempt| &attempt.arrival.channel),
        environment: subject.map(|subject| &subject.environment),
        score: finding.score,
        features: finding.features.get(..LIST_MAX).unwrap_or(&finding.features),
        folded: attempt.and_then(|attempt| attempt.summary.as_ref()).map(|summary| summary.count - 1),
        last: attempt.and_then(AttemptState::last_folded),
        ..SandbarExtension::default()
    };
    let correlation = about.as_deref().unwrap_or(&uid);
    let tenant = subject.map(|subject| &subject.tenant);
    let metadata = metadata(EventClass::Finding, &uid, correlation, tenant);
    let draft = Draft::new(&members, metadata, &sandbar, DraftRole::Event)?;
    Ok(draft.charged_to(attempt.and_then(|attempt| attempt.sandbox.clone())))
}

/// Drafts an event in the life of Sandbar itself.
pub(crate) fn draft_lifecycle(event: &Lifecycle, uid: u128) -> Result<Draft, DraftError> {
    let (activity, name) = match event.event {
        LifecycleEvent::CanaryMade => ((99, "Other"), "canary_made"),
        LifecycleEvent::CanaryRemoved => ((99, "Other"), "canary_removed"),
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
    let mut members = header(EventClass::Lifecycle, activity);
    (members.status_id, members.status) = if bad { FAILURE } else { SUCCESS };
    members.message = event.message.as_ref();
    members.policy = event.policy.as_ref().map(policy_in_force);
    let sandbar = SandbarExtension { event: Some(name), ..SandbarExtension::default() };
    lifecycle_draft(members, uid, sandbar)
}

/// Drafts an event of the log itself: a segment, a recovery, a checkpoint.
pub(crate) fn draft_log_event(
    event: &'static str,
    uid: u128,
    message: Option<&Text<512>>,
    sandbar: SandbarExtension<'_>,
) -> Result<Draft, DraftError> {
    let activity = match event {
        "log_stopped" => (4, "Stop"),
        "log_started" => (3, "Start"),
        _ => (99, "Other"),
    };
    let mut members = header(EventClass::Lifecycle, activity);
    let bad = event == "log_behind_checkpoint";
    (members.status_id, members.status) = if bad { FAILURE } else { SUCCESS };
    members.is_alert = bad.then_some(true);
    members.message = message;
    lifecycle_draft(members, uid, SandbarExtension { event: Some(event), ..sandbar })
}

fn lifecycle_draft(
    mut members: RecordMembers<'_>,
    uid: u128,
    sandbar: SandbarExtension<'_>,
) -> Result<Draft, DraftError> {
    members.app = Some(Product::SELF);
    let uid = Ulid::from(uid).to_string();
    let sandbar = SandbarExtension { stage: "lifecycle", ..sandbar };
    Draft::new(&members, metadata(EventClass::Lifecycle, &uid, &uid, None), &sandbar, DraftRole::Event)
}

fn header(class: EventClass, activity: NamedId) -> RecordMembers<'static> {
    let (class_name, category_name) = class.names();
    let time = unix_millis();
    RecordMembers {
        time,
        time_dt: Rfc3339Time(time),
        class_uid: class.uid(),
        class_name,
        category_uid: class.uid() / 1000,
        category_name,
        activity_id: activity.0,
        activity_name: activity.1,
        type_uid: u32::from(class.uid()) * 100 + u32::from(activity.0),
        severity_id: 1,
        severity: "Informational",
        ..RecordMembers::default()
    }
}

fn metadata<'a>(
    class: EventClass,
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

/// Returns milliseconds since 1970.
pub(crate) fn unix_millis() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
