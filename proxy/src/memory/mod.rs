//! The memory guard (P12, P13): a request to a memory service is held. It is read whole, within bounds,
//! decided upon with everything it says, recorded, sent on in one plain form under the identity of its
//! channel, and its answer is looked at before the sandbox sees it.

mod answer;
mod client;
mod form;
mod identity;
mod json;
mod profile;
mod select;
mod service;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use audit::{
    DetectionFinding, FindingSeverity, MemoryCall, MemoryEffect, OpenRecord, Receipt, StableCode,
    Text,
};
use bytes::{Bytes, BytesMut};
use certs::UnixTime;
use certs::identity::Verifier;
use http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST};
use pingora_core::prelude::HttpPeer;
use pingora_core::protocols::ALPN;
use pingora_http::RequestHeader;
use pingora_proxy::Session;
use rules::budget::UsageKind;
use rules::configuration::Configuration;
use rules::decision::Treatment;
use rules::facts::{
    BankOperation, ConnectFacts, ConnectTarget, EchPresence, Facts, IdentityClaim, MemoryFacts,
    Protocol, RequestFacts,
};
use rules::ids::{BankId, ProfileName};
use rules::policy::IdentityMode;
use rules::{Decision, DialPermit, Host, Permit, Reason, RuleSet};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::budget::ledger::Charges;
use crate::egress::roots::UpstreamRoots;
use crate::egress::shared::Shared;
use crate::egress::upstream::{UpstreamOptions, http_peer};
use crate::http::{RequestMonitor, RequestScope};
use crate::report::metrics;
use crate::report::record;
use crate::report::refusal::Refusal;
use client::{MemoryClient, MemoryResponse, RetryPolicy, ServiceRequest};
use form::QueryParams;
use identity::PresentedIdentity;
use json::JsonValue;
use profile::{MemoryProfile, ProfileRoute, RouteMatch};
use service::{CallSubject, MemoryServices, ServiceEndpoint};

/// How often the keys of issuers and what they revoked are looked at.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// How long a client that was refused is read on.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes read on meanwhile.
const LINGER_BYTES: usize = 16 << 20;

/// Guards the memory services of one instance.
pub(crate) struct MemoryGuard {
    services: MemoryServices,
    verifier: Option<Verifier>,
    client: MemoryClient,
}

/// How the requests of a connection are held.
#[derive(Clone, Debug)]
pub(crate) struct GuardMode {
    profile: ProfileName,
    identity: IdentityMode,
}

/// One request that is held, and what it may be judged by.
pub(crate) struct MemoryRequest<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) exchange: &'a RequestMonitor,
    pub(crate) rules: &'a Arc<RuleSet>,
    pub(crate) record: &'a mut OpenRecord,
    pub(crate) facts: RequestFacts,
    pub(crate) told: audit::RecordedRequest,
}

/// A request that was read and may be sent.
struct AuthorizedCall<'a> {
    found: RouteMatch<'a>,
    query: QueryParams<'a>,
    body: Bytes,
    banks: Vec<BankId>,
    permit: Permit,
    receipt: Receipt,
    tab: Arc<Charges>,
}

/// Whether the requests of a connection are held. It is asked for each of them, so that a reload counts at once.
pub(crate) fn guard_mode(rules: &RuleSet, exchange: &RequestMonitor) -> Option<GuardMode> {
    let RequestScope::Host(host, port) = &exchange.connection.scope else { return None };
    let protocol = Protocol::Tls { sni: Some(host.clone()), ech: EchPresence::Absent };
    let target = ConnectTarget::Named(host.clone());
    let facts = Facts::Connect(ConnectFacts { target, port: *port, protocol });
    match rules.decide(&exchange.connection.sandbox, &facts) {
        Decision::Allow(permit) => match permit.treatment() {
            Treatment::Hold { profile, identity } => {
                Some(GuardMode { profile: profile.clone(), identity: *identity })
            }
            Treatment::Forward
            | Treatment::Intercept
            | Treatment::Raw
            | Treatment::Resolve
            | Treatment::Tunnel => None,
        },
        Decision::Deny(_) => None,
    }
}

impl MemoryGuard {
    /// Reads keys and issuers: what is missing is found at the start.
    pub(crate) fn open(
        operator: &Configuration,
        shared: &Shared,
        base: &Path,
        roots: &UpstreamRoots,
    ) -> anyhow::Result<Arc<Self>> {
        let verifier = operator
            .identity
            .as_ref()
            .map(|identity| identity::build_verifier(identity, base))
            .transpose()?;
        let services = MemoryServices::open(operator, &shared.credentials, base)?;
        let client = MemoryClient::new(&operator.limits, roots);
        Ok(Arc::new(MemoryGuard { services, verifier, client }))
    }

    /// The public keys of the tokens that are signed for services.
    pub(crate) fn jwks(&self) -> Value {
        self.services.jwks(UnixTime::now())
    }

    /// Looks after the issuers' keys and revocations until it is time to stop.
    pub(crate) async fn run_periodic(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        loop {
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return,
                () = sleep(REFRESH_INTERVAL) => {}
            }
            let guard = self.clone();
            let looked = tokio::task::spawn_blocking(move || guard.refresh()).await;
            if looked.is_err() {
                tracing::error!("the keys of issuers are not looked at any more");
                return;
            }
        }
    }

    fn refresh(&self) {
        let Some(verifier) = &self.verifier else { return };
        if let Err(errors) = verifier.refresh(UnixTime::now()) {
            for error in errors {
                tracing::error!(%error, "signed identities are checked by what was read before");
            }
        }
    }

    /// Takes one request from its head to its answer; the status that was answered.
    pub(crate) async fn handle(
        &self,
        session: &mut Session,
        hold: &GuardMode,
        held: MemoryRequest<'_>,
    ) -> Result<u16, Refusal> {
        let answered = self.forward(session, hold, held).await;
        if answered.as_ref().is_err_and(|refusal| refusal.reason != Reason::BodyLate) {
            drain_body(session).await;
        }
        answered
    }

    async fn forward(
        &self,
        session: &mut Session,
        hold: &GuardMode,
        mut held: MemoryRequest<'_>,
    ) -> Result<u16, Refusal> {
        let unread = self.memory_call(&hold.profile, &held, None, &[], None);
        held.record.set_facts(audit::RecordedFacts::Memory(unread));
        let profile = MemoryProfile::by_name(&hold.profile).ok_or(Reason::MemoryService)?;
        let service = self.find_service(&held)?;
        let granted = self.authorize(session, hold, profile, service, &mut held).await?;
        let leave = admit(&held, &granted.permit).await?;
        let _place = register_live(&held, &granted, &leave)?;
        let key = service.current_key(&held.shared.credentials)?;
        let whom = CallSubject {
            sandbox: &held.exchange.connection.sandbox,
            banks: &granted.banks,
            key: key.as_deref(),
        };
        let mut head = canonical_request(session.req_header(), profile, &granted, &held)?;
        service.add_identity(&mut head, profile, &whom)?;
        let told = service::secret_patterns(&head, key.as_deref());
        let received = self.send(head, &granted, &leave, &mut held).await?;
        answer::check_answer(&granted, &told, &received, &held).await?;
        let spent = granted.tab.charge(UsageKind::Download, received.bytes());
        spent.map_err(|spent| spent.into_refusal(&granted.permit))?;
        answer::send_answer(session, &received, &held).await
    }

    fn find_service(&self, held: &MemoryRequest<'_>) -> Result<&ServiceEndpoint, Refusal> {
        let host = held.exchange.connection.host().ok_or(Reason::NameMissing)?;
        self.services.find(host, held.facts.port).ok_or_else(|| Reason::MemoryService.into())
    }

    /// Reads everything the request says, decides, and records the decision.
    async fn authorize<'a>(
        &self,
        session: &mut Session,
        hold: &GuardMode,
        profile: &'a MemoryProfile,
        service: &ServiceEndpoint,
        held: &mut MemoryRequest<'_>,
    ) -> Result<AuthorizedCall<'a>, Refusal> {
        let head = session.req_header();
        let path = form::check_head(head)?;
        let audience = &service.audience;
        let presented =
            identity::verify_identity(head, self.verifier.as_ref(), audience, hold.identity);
        let Some(found) = profile.find_route(held.facts.method.as_str(), path.as_str()) else {
            return Err(deny_unrouted(held, presented));
        };
        let call = self.memory_call(&hold.profile, held, Some(found.route), &[], Some(&presented));
        held.record.set_facts(audit::RecordedFacts::Memory(call));
        if found.route.operation == BankOperation::Admin {
            return Err(deny_unrouted(held, presented)); // whatever it carries
        }
        let query = QueryParams::parse(session.req_header().uri.query(), &found)?;
        let body = read_body(session, found.route, held).await?;
        let json = parse_body(&body, found.route)?;
        let banks = select::select_banks(&found, &query, json.as_ref())?;
        let call =
            self.memory_call(&hold.profile, held, Some(found.route), &banks, Some(&presented));
        held.record.set_facts(audit::RecordedFacts::Memory(call));
        for pointer in &found.route.refused {
            json.as_ref().map_or(Ok(()), |json| select::refuse_field(pointer, json))?;
        }
        let permit = decide(held, found.route.operation, &banks, presented.claim.clone());
        let permit = match permit {
            Ok(permit) => permit,
            Err(refusal) => return Err(explain_denial(refusal, presented, held).await),
        };
        let tab = held.shared.charge(&permit)?;
        let sent = crate::http::request_bytes(session.req_header()) + body.len() as u64;
        tab.charge(UsageKind::Upload, sent).map_err(|spent| spent.into_refusal(&permit))?;
        let receipt = record_decision(held, &permit, service).await?;
        Ok(AuthorizedCall { found, query, body, banks, permit, receipt, tab })
    }

    async fn send(
        &self,
        head: RequestHeader,
        granted: &AuthorizedCall<'_>,
        leave: &DialPermit,
        held: &mut MemoryRequest<'_>,
    ) -> Result<MemoryResponse, Refusal> {
        let repeat = match granted.found.route.operation {
            BankOperation::None | BankOperation::Read => RetryPolicy::Once,
            BankOperation::Admin | BankOperation::Delete | BankOperation::Write => {
                RetryPolicy::Never
            }
        };
        let request = ServiceRequest { head, body: granted.body.clone(), repeat };
        let manner = UpstreamOptions { upgrade: false, body: Some(request.body.len() as u64) };
        let peer = |at| http_peer(held.shared, held.exchange, leave, &granted.receipt, at, manner);
        let peers = (0..leave.addresses().len().min(crate::egress::dial::MAX_DIAL_ADDRESSES))
            .filter_map(peer);
        let peers: Vec<HttpPeer> = peers.map(|peer| force_http1(*peer)).collect();
        if let (Some(address), Some(port)) = (leave.addresses().first(), granted.permit.port()) {
            held.record.set_dialled((*address, port).into());
        }
        self.client.send(&peers, &request).await
    }

    /// The call in the log's words, as far as it is known.
    fn memory_call(
        &self,
        profile: &ProfileName,
        held: &MemoryRequest<'_>,
        route: Option<&ProfileRoute>,
        banks: &[BankId],
        presented: Option<&PresentedIdentity>,
    ) -> MemoryCall {
        let effect = match route.map(|route| route.operation) {
            Some(BankOperation::Admin) | None => MemoryEffect::Admin,
            Some(BankOperation::Delete) => MemoryEffect::Delete,
            Some(BankOperation::None | BankOperation::Read) => MemoryEffect::Read,
            Some(BankOperation::Write) => MemoryEffect::Write,
        };
        MemoryCall {
            request: held.told.clone(),
            service: profile.as_str().into(),
            operation: route.map_or("unknown", |route| route.call.as_str()).into(),
            effect,
            banks: banks.iter().map(|bank| bank.as_str().into()).collect(),
            identity: presented.and_then(|presented| presented.subject.as_deref()).map(Text::from),
            checked: presented.map_or(StableCode("not_looked_at"), |presented| presented.checked),
        }
    }
}

/// Reads the body within its bounds; where none belongs there must be none.
async fn read_body(
    session: &mut Session,
    route: &ProfileRoute,
    held: &MemoryRequest<'_>,
) -> Result<Bytes, Refusal> {
    let limits = &held.shared.limits;
    let head = session.req_header();
    let most = if route.has_body() { limits.memory_body_bytes } else { 0 };
    if route.has_body() {
        form::check_json_type(head)?;
    } else if !form::has_no_body(head) {
        return Err(form::form_refusal("it has a body, and such requests have none"));
    }
    if held.told.length.is_some_and(|length| length > most) {
        return Err(Reason::BodyTooLarge.into());
    }
    if head.headers.contains_key("expect") {
        let told = session.write_continue_response().await;
        told.map_err(|_| Refusal::from(Reason::BodyLate))?;
    }
    let read = timeout(limits.memory_body(), read_to_end(session, most)).await;
    let body = read.map_err(|_| Refusal::from(Reason::BodyLate))??;
    held.record.byte_count().add_sent(body.len() as u64);
    Ok(body)
}

async fn read_to_end(session: &mut Session, most: u64) -> Result<Bytes, Refusal> {
    let mut all = BytesMut::new();
    loop {
        match session.downstream_session.read_request_body().await {
            Ok(Some(bytes)) if (all.len() + bytes.len()) as u64 > most => {
                return Err(Reason::BodyTooLarge.into());
            }
            Ok(Some(bytes)) => all.extend_from_slice(&bytes),
            Ok(None) => return Ok(all.freeze()),
            Err(_) => return Err(Refusal::from(Reason::BodyLate).with_detail("it broke off")),
        }
    }
}

/// Reads on what a client is still sending, for a moment: a connection that is closed on it takes the refusal
/// back before the client gets to see it.
async fn drain_body(session: &mut Session) {
    if session.req_header().headers.contains_key("expect") {
        return; // it waits to be told
    }
    let mut left = LINGER_BYTES;
    let reading = async {
        while let Ok(Some(bytes)) = session.downstream_session.read_request_body().await {
            match left.checked_sub(bytes.len()) {
                Some(fewer) => left = fewer,
                None => break,
            }
        }
    };
    drop(timeout(LINGER, reading).await); // whoever sends more is left
}

/// Reads the body as JSON, strictly.
fn parse_body(body: &[u8], route: &ProfileRoute) -> Result<Option<JsonValue>, Refusal> {
    if !route.has_body() {
        return Ok(None);
    }
    let malformed =
        |why: &dyn ToString| Refusal::from(Reason::BodyMalformed).with_detail(why.to_string());
    match json::parse_json(body).map_err(|fault| malformed(&fault))? {
        json @ JsonValue::Object(_) => Ok(Some(json)),
        JsonValue::Array(_)
        | JsonValue::Null
        | JsonValue::Other
        | JsonValue::Text(_)
        | JsonValue::TextTooLong => Err(malformed(&"it is not an object")),
    }
}

/// Asks the one decider.
fn decide(
    held: &MemoryRequest<'_>,
    operation: BankOperation,
    banks: &[BankId],
    identity: IdentityClaim,
) -> Result<Permit, Refusal> {
    let (request, banks) = (held.facts.clone(), banks.to_vec());
    let facts = Facts::Memory(MemoryFacts { request, operation, banks, identity });
    let started = Instant::now();
    let decision = held.rules.decide(&held.exchange.connection.sandbox, &facts);
    metrics::observe_decide(started.elapsed());
    match decision {
        Decision::Allow(permit) => Ok(permit),
        Decision::Deny(denial) => Err(denial.into()),
    }
}

/// What no route names is administration, which is refused to everybody.
fn deny_unrouted(held: &MemoryRequest<'_>, presented: PresentedIdentity) -> Refusal {
    match decide(held, BankOperation::Admin, &[], presented.claim) {
        Ok(_) => Reason::MemoryOperation.into(),
        Err(refusal) => refusal,
    }
}

/// Says which check failed; and that a token came by another's path is worth a record of its own.
async fn explain_denial(
    refusal: Refusal,
    presented: PresentedIdentity,
    held: &MemoryRequest<'_>,
) -> Refusal {
    match (refusal.reason, presented.claim) {
        (Reason::IdentityInvalid, IdentityClaim::Invalid(code)) => refusal.with_detail(code),
        (reason @ (Reason::IdentityMismatch | Reason::IdentityStale), _) => {
            let named = presented.subject.unwrap_or_default();
            let own = &held.exchange.connection.sandbox;
            let message =
                format!("the channel is that of sandbox {}; the token names {named}", own.id);
            let title = "A signed identity came by the path of another sandbox";
            record_finding(held.record, reason, title, message).await;
            refusal
        }
        _ => refusal,
    }
}

/// Writes down something that somebody should look at.
async fn record_finding(record: &OpenRecord, reason: Reason, title: &str, message: String) {
    let finding = DetectionFinding {
        code: StableCode(reason.code()),
        title: title.into(),
        severity: FindingSeverity::High,
        message: Some(message.into()),
        score: None,
        features: Vec::new(),
    };
    if record.record_finding(&finding).await.is_err() {
        tracing::warn!(%reason, "a finding could not be recorded");
    }
}

/// Records that the request may leave, and waits until that is written.
async fn record_decision(
    held: &mut MemoryRequest<'_>,
    permit: &Permit,
    service: &ServiceEndpoint,
) -> Result<Receipt, Refusal> {
    let mut verdict = record::permit_record(permit, held.rules);
    verdict.treatment = Some(StableCode("hold"));
    verdict.credential = service.credential().map(|name| name.as_str().into());
    let started = Instant::now();
    let receipt = held.record.record_decision(verdict).await?;
    metrics::observe_record(started.elapsed());
    metrics::count_decision("allowed", "hold");
    Ok(receipt)
}

async fn admit(held: &MemoryRequest<'_>, permit: &Permit) -> Result<DialPermit, Refusal> {
    let started = Instant::now();
    let found = held.shared.resolver.resolve(permit).await?;
    metrics::observe_resolve(started.elapsed());
    Ok(held.rules.admit(permit, &found)?)
}

/// From here on a reload can end it.
fn register_live(
    held: &MemoryRequest<'_>,
    granted: &AuthorizedCall<'_>,
    leave: &DialPermit,
) -> Result<crate::budget::live::LiveEntry, Refusal> {
    let (permit, tab) = (&granted.permit, granted.tab.clone());
    let first = leave.addresses().first().copied();
    let (meter, cut) = (held.record.byte_count(), held.exchange.cut.clone());
    let place = held.shared.live.register(permit, first, meter, cut, tab);
    first.map_or(Ok(()), |address| held.shared.recheck_permit(permit, address, &granted.tab))?;
    Ok(place)
}

fn force_http1(mut peer: HttpPeer) -> HttpPeer {
    peer.options.alpn = ALPN::H1;
    peer
}

/// The request in its one plain form: what was decided upon, in our own framing, with nothing of the
/// sandbox's but what the profile passes on.
fn canonical_request(
    sent: &RequestHeader,
    profile: &MemoryProfile,
    granted: &AuthorizedCall<'_>,
    held: &MemoryRequest<'_>,
) -> Result<RequestHeader, Refusal> {
    let facts = &held.facts;
    let target = format!("{}{}", facts.path, granted.query.to_query_string());
    let broken = |_| Refusal::from(Reason::BadRequest);
    let mut head =
        RequestHeader::build(facts.method.as_str(), target.as_bytes(), Some(12)).map_err(broken)?;
    head.insert_header(HOST, host_header(granted.permit.host(), facts.port)).map_err(broken)?;
    for name in &profile.pass {
        if let Some(value) = sent.headers.get(name) {
            head.insert_header(name, value.clone()).map_err(broken)?;
        }
    }
    head.insert_header(ACCEPT_ENCODING, "identity").map_err(broken)?;
    head.insert_header("x-request-id", held.record.id()).map_err(broken)?;
    if granted.found.route.has_body() {
        head.insert_header(CONTENT_TYPE, "application/json").map_err(broken)?;
        head.insert_header(CONTENT_LENGTH, granted.body.len()).map_err(broken)?;
    }
    Ok(head)
}

fn host_header(host: &Host, port: u16) -> String {
    if port == 443 { host.to_string() } else { format!("{host}:{port}") }
}
