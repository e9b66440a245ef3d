//! The memory guard (P12, P13). It reads a request to a memory service whole and within bounds, decides on everything the
//! request says, records it, forwards it in canonical form under the identity of its channel, and checks the answer
//! before the sandbox sees it.

mod answer;
mod body;
mod client;
mod form;
mod identity;
mod json;
mod profile;
mod select;
mod service;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use audit::{
    DetectionFinding, FindingCode, FindingSeverity, MemoryCall, MemoryEffect, OpenRecord,
    StableCode, Text,
};
use bytes::Bytes;
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
    BankOperation, ConnectFacts, ConnectTarget, EchPresence, Facts, HttpVersion, IdentityClaim,
    MemoryFacts, Protocol, RequestFacts, UrlScheme,
};
use rules::ids::{BankId, ProfileName};
use rules::policy::IdentityMode;
use rules::{Host, Permit, Reason, RuleSet, SandboxRef};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::budget::live::CutSignal;
use crate::egress::departure::{Departure, DepartureTerms};
use crate::egress::dial::MAX_DIAL_ADDRESSES;
use crate::egress::roots::UpstreamRoots;
use crate::egress::shared::{self, Shared};
use crate::egress::upstream::{UpstreamOptions, host_header, http_peer, request_bytes};
use crate::report::refusal::Refusal;
use body::{drain_body, parse_body, read_body};
use client::{MemoryClient, MemoryResponse, RetryPolicy, ServiceRequest};
use form::QueryParams;
use identity::PresentedIdentity;
use profile::{MemoryProfile, ProfileRoute, RouteMatch};
use service::{CallSubject, MemoryServices, ServiceEndpoint};

/// How often the keys of issuers and what they revoked are looked at.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

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

/// One request to a memory service, and everything it is decided by.
pub(crate) struct MemoryRequest<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) sandbox: &'a SandboxRef,
    /// The host of the connection.
    pub(crate) host: Option<&'a Host>,
    pub(crate) cut: &'a Arc<CutSignal>,
    pub(crate) rules: &'a Arc<RuleSet>,
    pub(crate) record: &'a mut OpenRecord,
    pub(crate) facts: RequestFacts,
    /// The request in the words of the log.
    pub(crate) recorded: audit::RecordedRequest,
}

/// A request that was read and may be sent.
struct AuthorizedCall<'a> {
    found: RouteMatch<'a>,
    query: QueryParams<'a>,
    body: Bytes,
    banks: Vec<BankId>,
    departure: Departure,
}

/// How the guard treats requests to this host, if it does. Asked for each request, so that a reload takes effect at once.
pub(crate) fn guard_mode(
    rules: &RuleSet,
    sandbox: &SandboxRef,
    host: &Host,
    port: u16,
) -> Option<GuardMode> {
    let protocol = Protocol::Tls { sni: Some(host.clone()), ech: EchPresence::Absent };
    let target = ConnectTarget::Named(host.clone());
    let facts = Facts::Connect(ConnectFacts { target, port, protocol });
    match shared::decide(rules, sandbox, &facts).ok()?.treatment() {
        Treatment::Hold { profile, identity } => {
            Some(GuardMode { profile: profile.clone(), identity: *identity })
        }
        Treatment::Forward
        | Treatment::Intercept
        | Treatment::Raw
        | Treatment::Resolve
        | Treatment::Tunnel => None,
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
        let call = self.authorize(session, hold, profile, service, &mut held).await?;
        let answered = self.call(session, profile, service, &call, &mut held).await;
        answered.map_err(|refusal| refusal.under(call.departure.permit()))
    }

    /// Sends an authorized call in canonical form, checks the answer and passes it on.
    async fn call(
        &self,
        session: &mut Session,
        profile: &MemoryProfile,
        service: &ServiceEndpoint,
        call: &AuthorizedCall<'_>,
        held: &mut MemoryRequest<'_>,
    ) -> Result<u16, Refusal> {
        let key = service.current_key(&held.shared.credentials)?;
        let subject =
            CallSubject { sandbox: held.sandbox, banks: &call.banks, key: key.as_deref() };
        let mut head = canonical_request(session.req_header(), profile, call, held)?;
        service.add_identity(&mut head, profile, &subject)?;
        let secrets = service::secret_patterns(&head, key.as_deref());
        let received = self.send(head, call, held).await?;
        answer::check_answer(call, &secrets, &received, held).await?;
        call.departure.charges.charge(UsageKind::Download, received.bytes())?;
        answer::send_answer(session, &received, held).await
    }

    fn find_service(&self, held: &MemoryRequest<'_>) -> Result<&ServiceEndpoint, Refusal> {
        let host = held.host.ok_or(Reason::NameMissing)?;
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
        let terms = DepartureTerms {
            upfront: request_bytes(session.req_header()) + body.len() as u64,
            treatment: "hold",
            credential: service.credential(),
            cut: held.cut.clone(),
        };
        let departure =
            Departure::begin(held.shared, held.rules, &permit, terms, held.record).await?;
        Ok(AuthorizedCall { found, query, body, banks, departure })
    }

    async fn send(
        &self,
        head: RequestHeader,
        call: &AuthorizedCall<'_>,
        held: &mut MemoryRequest<'_>,
    ) -> Result<MemoryResponse, Refusal> {
        let repeat = match call.found.route.operation {
            BankOperation::None | BankOperation::Read => RetryPolicy::Once,
            BankOperation::Admin | BankOperation::Delete | BankOperation::Write => {
                RetryPolicy::Never
            }
        };
        let request = ServiceRequest { head, body: call.body.clone(), repeat };
        let options = UpstreamOptions {
            sandbox: held.sandbox,
            scheme: UrlScheme::Https,
            version: HttpVersion::Http1,
            upgrade: false,
            body: Some(request.body.len() as u64),
        };
        let peer = |index| http_peer(held.shared, &call.departure, index, options);
        let peers = (0..MAX_DIAL_ADDRESSES).map_while(peer).map(|peer| force_http1(*peer));
        let peers: Vec<HttpPeer> = peers.collect();
        let set_dialled = |index| match call.departure.address(index) {
            Some(address) => call.departure.set_dialled(held.shared, held.record, address),
            None => Ok(()),
        };
        self.client.send(&peers, &request, set_dialled).await
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
            request: held.recorded.clone(),
            service: profile.as_str().into(),
            operation: route.map_or("unknown", |route| route.call.as_str()).into(),
            effect,
            banks: banks.iter().map(|bank| bank.as_str().into()).collect(),
            identity: presented.and_then(|presented| presented.subject.as_deref()).map(Text::from),
            checked: presented.map_or(StableCode("not_looked_at"), |presented| presented.checked),
        }
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
    shared::decide(held.rules, held.sandbox, &facts)
}

/// What no route names is administration, which is refused to everybody.
fn deny_unrouted(held: &MemoryRequest<'_>, presented: PresentedIdentity) -> Refusal {
    match decide(held, BankOperation::Admin, &[], presented.claim) {
        Ok(_) => Reason::MemoryOperation.into(),
        Err(refusal) => refusal,
    }
}

/// Adds which check of the identity failed. A token on the channel of another sandbox is a finding.
async fn explain_denial(
    refusal: Refusal,
    presented: PresentedIdentity,
    held: &MemoryRequest<'_>,
) -> Refusal {
    let finding = match (refusal.reason, presented.claim) {
        (Reason::IdentityInvalid, IdentityClaim::Invalid(code)) => {
            return refusal.with_detail(code);
        }
        (Reason::IdentityMismatch, _) => FindingCode::IdentityMismatch,
        (Reason::IdentityStale, _) => FindingCode::IdentityStale,
        _ => return refusal,
    };
    let (own, named) = (&held.sandbox.id, presented.subject.unwrap_or_default());
    let message = format!("the channel belongs to sandbox {own}; the token names {named}");
    let title = "A signed identity arrived on the channel of another sandbox";
    record_finding(held.record, finding, title, message).await;
    refusal
}

/// Writes a finding about this call.
async fn record_finding(record: &OpenRecord, code: FindingCode, title: &str, message: String) {
    let finding = DetectionFinding {
        code,
        title: title.into(),
        severity: FindingSeverity::High,
        message: Some(message.into()),
        score: None,
        features: Vec::new(),
    };
    if record.record_finding(&finding).await.is_err() {
        tracing::warn!(finding = code.code(), "cannot record a finding");
    }
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
    call: &AuthorizedCall<'_>,
    held: &MemoryRequest<'_>,
) -> Result<RequestHeader, Refusal> {
    let facts = &held.facts;
    let target = format!("{}{}", facts.path, call.query.to_query_string());
    let broken = |_| Refusal::from(Reason::BadRequest);
    let mut head =
        RequestHeader::build(facts.method.as_str(), target.as_bytes(), Some(12)).map_err(broken)?;
    head.insert_header(HOST, host_header(call.departure.permit(), UrlScheme::Https))
        .map_err(broken)?;
    for name in &profile.pass {
        if let Some(value) = sent.headers.get(name) {
            head.insert_header(name, value.clone()).map_err(broken)?;
        }
    }
    head.insert_header(ACCEPT_ENCODING, "identity").map_err(broken)?;
    head.insert_header("x-request-id", held.record.id()).map_err(broken)?;
    if call.found.route.has_body() {
        head.insert_header(CONTENT_TYPE, "application/json").map_err(broken)?;
        head.insert_header(CONTENT_LENGTH, call.body.len()).map_err(broken)?;
    }
    Ok(head)
}
