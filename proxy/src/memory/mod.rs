//! The memory guard (P12, P13). It reads a request to a memory service completely and within limits, decides on every
//! bank it names, records it, forwards it in canonical form under the identity of its channel, and checks the answer
//! before the sandbox sees it.
//!
//! Other requests stream through Pingora; these do not. A request names its banks in the path, the query and in
//! several places of the body, so the guard cannot decide before it has read all of it, and the service must not
//! receive the first byte of a request that is refused for its last. The answer is read completely for the same
//! reason: it may contain a foreign bank at its end.
//!
//! The guard does not forward the bytes it received. It builds a new request from what it parsed: the canonical path,
//! the known query parameters encoded again, the fields the profile passes, its own `Content-Length`. Only the body
//! keeps its bytes, after the strict parser has refused every document that two parsers could read differently. What
//! the service reads is therefore what was decided, even if its parsers are more lenient than ours: an ambiguity that
//! the checks should miss is not in the canonical form any more.

mod answer;
mod body;
mod client;
mod form;
mod identity;
mod json;
mod profile;
mod record;
mod select;
mod service;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use audit::OpenRecord;
use bytes::Bytes;
use certs::UnixTime;
use certs::identity::{IdentityError, Verifier};
use certs::trust::RefreshStatus;
use http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST};
use pingora_http::RequestHeader;
use pingora_proxy::Session;
use rules::configuration::Configuration;
use rules::decision::Treatment;
use rules::facts::{
    BankOperation, ConnectFacts, ConnectTarget, EchPresence, Facts, HttpVersion, IdentityClaim, MemoryFacts,
    Protocol, RequestFacts, UrlScheme,
};
use rules::ids::{BankId, ProfileName};
use rules::policy::IdentityMode;
use rules::signals::shape::RequestOutcome;
use rules::{Host, Permit, Reason, RuleSet, SandboxRef};
use serde_json::Value;
use sys::worker::Worker;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::budget::live::{CutSignal, LiveConnections};
use crate::egress::departure::{Departure, DepartureTerms};
use crate::egress::dial::DialRace;
use crate::egress::roots::UpstreamRoots;
use crate::egress::sending::{SentFraming, describe_sending};
use crate::egress::shared::{self, Shared};
use crate::egress::upstream::{UpstreamOptions, host_header, http_peer, request_bytes};
use crate::inspect::{AttemptContent, RequestHead};
use crate::quota::Reservation;
use crate::quota::cost::LARGE_DOCUMENT;
use crate::report::refusal::Refusal;
use body::{drain_body, parse_body, read_body};
use client::{MemoryClient, MemoryResponse, RetryPolicy, ServiceRequest};
use form::QueryParams;
use identity::PresentedIdentity;
use profile::{MemoryProfile, RouteMatch};
use record::{explain_denial, memory_call};
use service::{CallSubject, MemoryServices, ServiceEndpoint};

/// How often the guard reads issuers' keys and revocations again.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// Guards the memory services of one instance.
pub(crate) struct MemoryGuard {
    services: MemoryServices,
    verifier: Option<Verifier>,
    client: MemoryClient,
    live: Arc<LiveConnections>,
}

/// How the guard treats a request: by which profile, and whether a signed identity is required.
#[derive(Clone, Debug)]
pub(crate) struct GuardMode {
    profile: ProfileName,
    identity: IdentityMode,
}

/// One request to a memory service, with everything that a decision on it needs.
pub(crate) struct MemoryRequest<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) sandbox: &'a SandboxRef,
    /// The host of the connection.
    pub(crate) host: Option<&'a Host>,
    pub(crate) cut: &'a Arc<CutSignal>,
    pub(crate) rules: &'a Arc<RuleSet>,
    pub(crate) record: &'a mut OpenRecord,
    /// What the request holds in memory.
    pub(crate) buffers: &'a mut Reservation,
    pub(crate) facts: RequestFacts,
    /// The request as its record describes it.
    pub(crate) recorded: audit::RecordedRequest,
}

/// A request that was read, decided and departed.
struct AuthorizedCall<'a> {
    matched: RouteMatch<'a>,
    query: QueryParams<'a>,
    body: Bytes,
    banks: Vec<BankId>,
    departure: Departure,
}

/// How the guard treats requests to this host, or none if it is not a memory service. Evaluated for each request, so
/// that a reload takes effect immediately.
pub(crate) fn guard_mode(rules: &RuleSet, sandbox: &SandboxRef, host: &Host, port: u16) -> Option<GuardMode> {
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
    /// Loads keys and issuers, so that a missing file fails the start and not a request.
    pub(crate) fn open(
        configuration: &Configuration,
        shared: &Shared,
        base: &Path,
        roots: &UpstreamRoots,
    ) -> anyhow::Result<Arc<Self>> {
        let verifier = configuration
            .identity
            .as_ref()
            .map(|identity| identity::build_verifier(identity, base))
            .transpose()?;
        let services = MemoryServices::open(configuration, &shared.credentials, base)?;
        let client = MemoryClient::new(&configuration.limits, roots);
        Ok(Arc::new(MemoryGuard { services, verifier, client, live: shared.live.clone() }))
    }

    /// The public keys of the tokens that Sandbar signs for services.
    pub(crate) fn jwks(&self) -> Value {
        self.services.jwks(UnixTime::now())
    }

    /// Reads issuers' keys and revocations again, periodically, until `stop`.
    pub(crate) async fn run_periodic(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        let stopped = "stopped reading issuers' keys and revocations; restart Sandbar";
        let files = match Worker::start("identity-files") {
            Ok(files) => files,
            Err(error) => return tracing::error!(%error, "{stopped}"),
        };
        loop {
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return,
                () = sleep(REFRESH_INTERVAL) => {}
            }
            let guard = self.clone();
            if files.run(move || guard.refresh()).await.is_err() {
                return tracing::error!("{stopped}");
            }
        }
    }

    /// Reads issuers' keys and revocations again, and cuts the open calls of sandboxes that are revoked by now (P10).
    fn refresh(&self) {
        let Some(verifier) = &self.verifier else { return };
        match verifier.refresh(UnixTime::now()) {
            Ok(RefreshStatus::Unchanged) => return,
            Ok(RefreshStatus::Changed) => {}
            Err(errors) => {
                for error in errors {
                    tracing::error!(%error, "cannot read issuers' keys or revocations; still using the last good ones");
                }
            }
        }
        for open in self.live.list().iter().filter(|open| self.is_revoked(&open.permit())) {
            open.cut.trigger(Reason::SandboxRevoked);
        }
    }

    /// Whether a permit is for a memory call of a sandbox that is revoked.
    fn is_revoked(&self, permit: &Permit) -> bool {
        let check = |verifier: &Verifier| verifier.check_sandbox(permit.holder(), UnixTime::now());
        let checked = self.verifier.as_ref().map_or(Ok(()), check);
        matches!(permit.facts(), Facts::Memory(_)) && checked == Err(IdentityError::Revoked)
    }

    /// Handles one request from its head to its response, and returns the status of the response.
    pub(crate) async fn handle(
        &self,
        session: &mut Session,
        mode: &GuardMode,
        request: MemoryRequest<'_>,
    ) -> Result<u16, Refusal> {
        let status = self.forward(session, mode, request).await;
        if status.as_ref().is_err_and(|refusal| refusal.reason != Reason::BodyLate) {
            drain_body(session).await;
        }
        status
    }

    async fn forward(
        &self,
        session: &mut Session,
        mode: &GuardMode,
        mut request: MemoryRequest<'_>,
    ) -> Result<u16, Refusal> {
        let unread = memory_call(&mode.profile, &request, None, &[], None);
        request.record.set_facts(audit::RecordedFacts::Memory(unread));
        let profile = MemoryProfile::by_name(&mode.profile).ok_or(Reason::MemoryService)?;
        let service = self.find_service(&request)?;
        let mut call = self.authorize(session, mode, profile, service, &mut request).await?;
        let status = self.call(session, profile, service, &mut call, &mut request).await;
        status.map_err(|refusal| refusal.under(call.departure.permit()))
    }

    /// Sends an authorized call in canonical form, checks the answer and passes it on.
    async fn call(
        &self,
        session: &mut Session,
        profile: &MemoryProfile,
        service: &ServiceEndpoint,
        call: &mut AuthorizedCall<'_>,
        request: &mut MemoryRequest<'_>,
    ) -> Result<u16, Refusal> {
        let key = service.current_key(&request.shared.credentials)?;
        let subject = CallSubject {
            sandbox: call.departure.permit().holder(),
            banks: &call.banks,
            key: key.as_deref(),
        };
        let passed = passed_head(session.req_header(), profile, &request.facts, &call.query)?;
        let mut head = canonical_request(passed.clone(), call, request)?;
        service.add_identity(&mut head, profile, &subject)?;
        let secrets = service::secret_patterns(&head, key.as_deref());
        let framing = SentFraming::of_length(Some(call.body.len() as u64));
        let port = call.departure.permit().port();
        let sending = describe_sending(UrlScheme::Https, http::Version::HTTP_11, framing, port);
        call.departure.charge_head(&RequestHead::of(&passed), &sending, request.record).await?;
        let received = self.send(head, call, request).await?;
        answer::check_answer(call, &secrets, &received, request).await?;
        if call.matched.route.operation == BankOperation::Read {
            answer::remember_text(call, &received, request).await;
        }
        call.departure.count_received(received.bytes()).await?;
        let outcome = call.outcome(&received);
        call.departure.inspection.end(outcome, request.record).await;
        answer::send_answer(session, &received).await
    }

    fn find_service(&self, request: &MemoryRequest<'_>) -> Result<&ServiceEndpoint, Refusal> {
        let host = request.host.ok_or(Reason::NameMissing)?;
        self.services.find(host, request.facts.port).ok_or_else(|| Reason::MemoryService.into())
    }

    /// Reads the whole request, decides, and departs.
    async fn authorize<'a>(
        &self,
        session: &mut Session,
        mode: &GuardMode,
        profile: &'a MemoryProfile,
        service: &ServiceEndpoint,
        request: &mut MemoryRequest<'_>,
    ) -> Result<AuthorizedCall<'a>, Refusal> {
        let head = session.req_header();
        let path = form::check_head(head)?;
        let audience = &service.audience;
        let presented =
            identity::verify_identity(head, self.verifier.as_ref(), request.sandbox, audience, mode.identity);
        let Some(matched) = profile.find_route(request.facts.method.as_str(), path.as_str()) else {
            return Err(deny_unrouted(request, presented));
        };
        let call = memory_call(&mode.profile, request, Some(matched.route), &[], Some(&presented));
        request.record.set_facts(audit::RecordedFacts::Memory(call));
        if matched.route.operation == BankOperation::Admin {
            return Err(deny_unrouted(request, presented)); // without reading its query and body
        }
        let query = QueryParams::parse(session.req_header().uri.query(), &matched)?;
        if let Err(refusal) = prejudge(request, matched.route.operation, presented.claim.clone()) {
            return Err(explain_denial(refusal, presented, request).await);
        }
        let body = read_body(session, matched.route, request).await?;
        let json = run_check(request, body.len(), || parse_body(&body, matched.route)).await?;
        let banks = select::select_banks(&matched, &query, json.as_ref())?;
        let call = memory_call(&mode.profile, request, Some(matched.route), &banks, Some(&presented));
        request.record.set_facts(audit::RecordedFacts::Memory(call));
        for pointer in &matched.route.refused {
            json.as_ref().map_or(Ok(()), |json| select::refuse_field(pointer, json))?;
        }
        drop(json); // it may be larger than the body, and what follows may take long
        let permit = decide(request, matched.route.operation, &banks, presented.claim.clone());
        let permit = match permit {
            Ok(permit) => permit,
            Err(refusal) => return Err(explain_denial(refusal, presented, request).await),
        };
        let leaving = passed_head(session.req_header(), profile, &request.facts, &query)?;
        let head = RequestHead::of(&leaving);
        let terms = DepartureTerms {
            upfront: request_bytes(session.req_header()) + body.len() as u64,
            treatment: "hold",
            credential: service.credential(),
            cut: request.cut.clone(),
            content: AttemptContent::Call { head: &head, body: &body, banks: &banks },
        };
        let departure =
            Departure::begin(request.shared, request.rules, &permit, terms, request.record).await?;
        // Registered first, looked up second: a revocation in between is found here or cuts the call.
        if self.is_revoked(departure.permit()) {
            return Err(Refusal::from(Reason::SandboxRevoked).under(departure.permit()));
        }
        Ok(AuthorizedCall { matched, query, body, banks, departure })
    }

    async fn send(
        &self,
        head: RequestHeader,
        call: &AuthorizedCall<'_>,
        request: &mut MemoryRequest<'_>,
    ) -> Result<MemoryResponse, Refusal> {
        let retry = match call.matched.route.operation {
            BankOperation::None | BankOperation::Read => RetryPolicy::Once,
            BankOperation::Admin | BankOperation::Delete | BankOperation::Write => RetryPolicy::Never,
        };
        let departure = &call.departure;
        let outgoing = ServiceRequest { head, body: call.body.clone(), retry, departure };
        let options = UpstreamOptions {
            scheme: UrlScheme::Https,
            version: HttpVersion::Http1,
            upgrade: false,
            http1_only: true,
            body: Some(outgoing.body.len() as u64),
        };
        let (shared, departure) = (request.shared, &call.departure);
        let race = DialRace::new(&departure.dial_permit)?;
        let peer = |race: &DialRace| http_peer(shared, departure, race, options);
        let mut set_dialled = |address| departure.set_dialled(shared, request.record, address);
        race.first().map_or(Ok(()), &mut set_dialled)?;
        self.client.send(race, peer, &outgoing, set_dialled, request.buffers).await
    }
}

impl AuthorizedCall<'_> {
    fn outcome(&self, received: &MemoryResponse) -> RequestOutcome {
        RequestOutcome {
            sent_bytes: self.body.len() as u64,
            received_bytes: received.bytes(),
            unchanged: false,
        }
    }
}

/// Decides on a call, with the same decider as for all other attempts.
fn decide(
    request: &MemoryRequest<'_>,
    operation: BankOperation,
    banks: &[BankId],
    identity: IdentityClaim,
) -> Result<Permit, Refusal> {
    let facts = Facts::Memory(MemoryFacts {
        request: request.facts.clone(),
        operation,
        banks: banks.to_vec(),
        identity,
    });
    shared::decide(request.rules, request.sandbox, &facts)
}

/// Decides on identity and operation before the body is read: who may not call at all cannot make us hold a body. The
/// banks are not known yet, so a missing bank does not count.
fn prejudge(
    request: &MemoryRequest<'_>,
    operation: BankOperation,
    identity: IdentityClaim,
) -> Result<(), Refusal> {
    match decide(request, operation, &[], identity) {
        Err(refusal) if refusal.reason != Reason::BankMissing => Err(refusal),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Runs the check of a document: at once if it is small, else off the runtime, one at a time for each sandbox.
async fn run_check<T>(request: &MemoryRequest<'_>, length: usize, check: impl FnOnce() -> T) -> T {
    if length <= LARGE_DOCUMENT {
        return check();
    }
    request.shared.large_checks.turn(request.sandbox.id.clone()).await.run(check)
}

/// Denies a request that matches no route. It counts as administration, which no sandbox is permitted.
fn deny_unrouted(request: &MemoryRequest<'_>, presented: PresentedIdentity) -> Refusal {
    match decide(request, BankOperation::Admin, &[], presented.claim) {
        Ok(_) => Reason::MemoryOperation.into(),
        Err(refusal) => refusal,
    }
}

/// Builds what the sandbox says in the head of a call: the decided method, path and query, and the fields that the
/// profile passes.
fn passed_head(
    sent: &RequestHeader,
    profile: &MemoryProfile,
    facts: &RequestFacts,
    query: &QueryParams<'_>,
) -> Result<RequestHeader, Refusal> {
    let target = format!("{}{}", facts.path, query.to_query_string());
    let malformed = |_| Refusal::from(Reason::BadRequest);
    let mut head =
        RequestHeader::build(facts.method.as_str(), target.as_bytes(), Some(12)).map_err(malformed)?;
    for name in &profile.pass {
        if let Some(value) = sent.headers.get(name) {
            head.insert_header(name, value.clone()).map_err(malformed)?;
        }
    }
    Ok(head)
}

/// Builds the head of the canonical request: the decided method, path and query, our own framing, and of the
/// sandbox's fields only those that the profile passes.
fn canonical_request(
    mut head: RequestHeader,
    call: &AuthorizedCall<'_>,
    request: &MemoryRequest<'_>,
) -> Result<RequestHeader, Refusal> {
    let malformed = |_| Refusal::from(Reason::BadRequest);
    head.insert_header(HOST, host_header(call.departure.permit(), UrlScheme::Https)).map_err(malformed)?;
    head.insert_header(ACCEPT_ENCODING, "identity").map_err(malformed)?;
    head.insert_header("x-request-id", request.record.id()).map_err(malformed)?;
    if call.matched.route.has_body() {
        head.insert_header(CONTENT_TYPE, "application/json").map_err(malformed)?;
        head.insert_header(CONTENT_LENGTH, call.body.len()).map_err(malformed)?;
    }
    Ok(head)
}
