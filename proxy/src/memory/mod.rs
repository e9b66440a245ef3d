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

use audit::{Code, Effect, Finding, MemoryCall, OpenRecord, Receipt, Severity, Text};
use bytes::{Bytes, BytesMut};
use certs::UnixTime;
use certs::identity::Verifier;
use http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST};
use pingora_core::prelude::HttpPeer;
use pingora_core::protocols::ALPN;
use pingora_http::RequestHeader;
use pingora_proxy::Session;
use rules::budget::Counted;
use rules::decision::How;
use rules::facts::{
    ConnectFacts, Ech, Facts, IdentityClaim, MemoryFacts, Operation, Protocol, RequestFacts, Target,
};
use rules::operator::Operator;
use rules::policy::IdentityMode;
use rules::word::{BankId, ProfileName};
use rules::{Decision, DialPermit, Host, Permit, Reason, RuleSet};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::budget::ledger::Tab;
use crate::egress::roots::Roots;
use crate::egress::shared::Shared;
use crate::egress::upstream::{Manner, peer};
use crate::http::{Exchange, Scope};
use crate::report::metrics;
use crate::report::record;
use crate::report::refusal::Refusal;
use client::{Client, Outgoing, Received, Repeat};
use form::Query;
use identity::Presented;
use json::Json;
use profile::{Found, Profile, Route};
use service::{Service, Services, Whom};

/// How often the keys of issuers and what they revoked are looked at.
const REFRESH: Duration = Duration::from_secs(1);

/// How long a client that was refused is read on.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes read on meanwhile.
const LINGER_BYTES: usize = 16 << 20;

/// Guards the memory services of one instance.
pub(crate) struct Guard {
    services: Services,
    verifier: Option<Verifier>,
    client: Client,
}

/// How the requests of a connection are held.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    profile: ProfileName,
    identity: IdentityMode,
}

/// One request that is held, and what it may be judged by.
pub(crate) struct Held<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) exchange: &'a Exchange,
    pub(crate) rules: &'a Arc<RuleSet>,
    pub(crate) record: &'a mut OpenRecord,
    pub(crate) facts: RequestFacts,
    pub(crate) told: audit::Request,
}

/// A request that was read and may be sent.
struct Granted<'a> {
    found: Found<'a>,
    query: Query<'a>,
    body: Bytes,
    banks: Vec<BankId>,
    permit: Permit,
    receipt: Receipt,
    tab: Arc<Tab>,
}

/// Whether the requests of a connection are held. It is asked for each of them, so that a reload counts at once.
pub(crate) fn held(rules: &RuleSet, exchange: &Exchange) -> Option<Hold> {
    let Scope::Host(host, port) = &exchange.connection.scope else { return None };
    let protocol = Protocol::Tls { sni: Some(host.clone()), ech: Ech::Absent };
    let target = Target::Named(host.clone());
    let facts = Facts::Connect(ConnectFacts { target, port: *port, protocol });
    match rules.decide(&exchange.connection.sandbox, &facts) {
        Decision::Allow(permit) => match permit.how() {
            How::Hold { profile, identity } => {
                Some(Hold { profile: profile.clone(), identity: *identity })
            }
            How::Forward | How::Intercept | How::Raw | How::Resolve | How::Tunnel => None,
        },
        Decision::Deny(_) => None,
    }
}

impl Guard {
    /// Reads keys and issuers: what is missing is found at the start.
    pub(crate) fn open(
        operator: &Operator,
        shared: &Shared,
        base: &Path,
        roots: &Roots,
    ) -> anyhow::Result<Arc<Self>> {
        let verifier = operator
            .identity
            .as_ref()
            .map(|identity| identity::verifier(identity, base))
            .transpose()?;
        let services = Services::open(operator, &shared.credentials, base)?;
        let client = Client::new(&operator.limits, roots);
        Ok(Arc::new(Guard { services, verifier, client }))
    }

    /// The public keys of the tokens that are signed for services.
    pub(crate) fn jwks(&self) -> Value {
        self.services.jwks(UnixTime::now())
    }

    /// Looks after the issuers' keys and revocations until it is time to stop.
    pub(crate) async fn tend(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        loop {
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return,
                () = sleep(REFRESH) => {}
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
    pub(crate) async fn hold(
        &self,
        session: &mut Session,
        hold: &Hold,
        held: Held<'_>,
    ) -> Result<u16, Refusal> {
        let answered = self.carry(session, hold, held).await;
        if answered.as_ref().is_err_and(|refusal| refusal.reason != Reason::BodyLate) {
            read_on(session).await;
        }
        answered
    }

    async fn carry(
        &self,
        session: &mut Session,
        hold: &Hold,
        mut held: Held<'_>,
    ) -> Result<u16, Refusal> {
        let unread = self.call(&hold.profile, &held, None, &[], None);
        held.record.facts(audit::Facts::Memory(unread));
        let profile = Profile::named(&hold.profile).ok_or(Reason::MemoryService)?;
        let service = self.service(&held)?;
        let granted = self.grant(session, hold, profile, service, &mut held).await?;
        let leave = admit(&held, &granted.permit).await?;
        let _place = enter(&held, &granted, &leave)?;
        let key = service.key(&held.shared.credentials)?;
        let whom = Whom {
            sandbox: &held.exchange.connection.sandbox,
            banks: &granted.banks,
            key: key.as_deref(),
        };
        let mut head = plain(session.req_header(), profile, &granted, &held)?;
        service.introduce(&mut head, profile, &whom)?;
        let told = service::secrets(&head, key.as_deref());
        let received = self.send(head, &granted, &leave, &mut held).await?;
        answer::check(&granted, &told, &received, &held).await?;
        let spent = granted.tab.charge(Counted::Download, received.bytes());
        spent.map_err(|spent| spent.of(&granted.permit))?;
        answer::pass(session, &received, &held).await
    }

    fn service(&self, held: &Held<'_>) -> Result<&Service, Refusal> {
        let host = held.exchange.connection.host().ok_or(Reason::NameMissing)?;
        self.services.at(host, held.facts.port).ok_or_else(|| Reason::MemoryService.into())
    }

    /// Reads everything the request says, decides, and records the decision.
    async fn grant<'a>(
        &self,
        session: &mut Session,
        hold: &Hold,
        profile: &'a Profile,
        service: &Service,
        held: &mut Held<'_>,
    ) -> Result<Granted<'a>, Refusal> {
        let head = session.req_header();
        let path = form::head(head)?;
        let audience = &service.audience;
        let presented = identity::presented(head, self.verifier.as_ref(), audience, hold.identity);
        let Some(found) = profile.route(held.facts.method.as_str(), path.as_str()) else {
            return Err(unknown(held, presented));
        };
        let call = self.call(&hold.profile, held, Some(found.route), &[], Some(&presented));
        held.record.facts(audit::Facts::Memory(call));
        if found.route.operation == Operation::Admin {
            return Err(unknown(held, presented)); // whatever it carries
        }
        let query = Query::parse(session.req_header().uri.query(), &found)?;
        let body = body(session, found.route, held).await?;
        let json = read(&body, found.route)?;
        let banks = select::banks(&found, &query, json.as_ref())?;
        let call = self.call(&hold.profile, held, Some(found.route), &banks, Some(&presented));
        held.record.facts(audit::Facts::Memory(call));
        for pointer in &found.route.refused {
            json.as_ref().map_or(Ok(()), |json| select::refuse(pointer, json))?;
        }
        let permit = decide(held, found.route.operation, &banks, presented.claim.clone());
        let permit = match permit {
            Ok(permit) => permit,
            Err(refusal) => return Err(explained(refusal, presented, held).await),
        };
        let tab = held.shared.charge(&permit)?;
        let sent = crate::http::request_bytes(session.req_header()) + body.len() as u64;
        tab.charge(Counted::Upload, sent).map_err(|spent| spent.of(&permit))?;
        let receipt = decided(held, &permit, service).await?;
        Ok(Granted { found, query, body, banks, permit, receipt, tab })
    }

    async fn send(
        &self,
        head: RequestHeader,
        granted: &Granted<'_>,
        leave: &DialPermit,
        held: &mut Held<'_>,
    ) -> Result<Received, Refusal> {
        let repeat = match granted.found.route.operation {
            Operation::None | Operation::Read => Repeat::Once,
            Operation::Admin | Operation::Delete | Operation::Write => Repeat::Never,
        };
        let request = Outgoing { head, body: granted.body.clone(), repeat };
        let manner = Manner { upgrade: false, body: Some(request.body.len() as u64) };
        let peer = |at| peer(held.shared, held.exchange, leave, &granted.receipt, at, manner);
        let peers =
            (0..leave.addresses().len().min(crate::egress::dial::ATTEMPTS)).filter_map(peer);
        let peers: Vec<HttpPeer> = peers.map(|peer| http1(*peer)).collect();
        if let (Some(address), Some(port)) = (leave.addresses().first(), granted.permit.port()) {
            held.record.dialled((*address, port).into());
        }
        self.client.send(&peers, &request).await
    }

    /// The call in the log's words, as far as it is known.
    fn call(
        &self,
        profile: &ProfileName,
        held: &Held<'_>,
        route: Option<&Route>,
        banks: &[BankId],
        presented: Option<&Presented>,
    ) -> MemoryCall {
        let effect = match route.map(|route| route.operation) {
            Some(Operation::Admin) | None => Effect::Admin,
            Some(Operation::Delete) => Effect::Delete,
            Some(Operation::None | Operation::Read) => Effect::Read,
            Some(Operation::Write) => Effect::Write,
        };
        MemoryCall {
            request: held.told.clone(),
            service: profile.as_str().into(),
            operation: route.map_or("unknown", |route| route.call.as_str()).into(),
            effect,
            banks: banks.iter().map(|bank| bank.as_str().into()).collect(),
            identity: presented.and_then(|presented| presented.subject.as_deref()).map(Text::from),
            checked: presented.map_or(Code("not_looked_at"), |presented| presented.checked),
        }
    }
}

/// Reads the body within its bounds; where none belongs there must be none.
async fn body(session: &mut Session, route: &Route, held: &Held<'_>) -> Result<Bytes, Refusal> {
    let limits = &held.shared.limits;
    let head = session.req_header();
    let most = if route.has_body() { limits.memory_body_bytes } else { 0 };
    if route.has_body() {
        form::is_json(head)?;
    } else if !form::announces_nothing(head) {
        return Err(form::form("it has a body, and such requests have none"));
    }
    if held.told.length.is_some_and(|length| length > most) {
        return Err(Reason::BodyTooLarge.into());
    }
    if head.headers.contains_key("expect") {
        let told = session.write_continue_response().await;
        told.map_err(|_| Refusal::from(Reason::BodyLate))?;
    }
    let read = timeout(limits.memory_body(), whole(session, most)).await;
    let body = read.map_err(|_| Refusal::from(Reason::BodyLate))??;
    held.record.meter().sent(body.len() as u64);
    Ok(body)
}

async fn whole(session: &mut Session, most: u64) -> Result<Bytes, Refusal> {
    let mut all = BytesMut::new();
    loop {
        match session.downstream_session.read_request_body().await {
            Ok(Some(bytes)) if (all.len() + bytes.len()) as u64 > most => {
                return Err(Reason::BodyTooLarge.into());
            }
            Ok(Some(bytes)) => all.extend_from_slice(&bytes),
            Ok(None) => return Ok(all.freeze()),
            Err(_) => return Err(Refusal::from(Reason::BodyLate).because("it broke off")),
        }
    }
}

/// Reads on what a client is still sending, for a moment: a connection that is closed on it takes the refusal
/// back before the client gets to see it.
async fn read_on(session: &mut Session) {
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
fn read(body: &[u8], route: &Route) -> Result<Option<Json>, Refusal> {
    if !route.has_body() {
        return Ok(None);
    }
    let malformed =
        |why: &dyn ToString| Refusal::from(Reason::BodyMalformed).because(why.to_string());
    match json::read(body).map_err(|fault| malformed(&fault))? {
        json @ Json::Object(_) => Ok(Some(json)),
        Json::Array(_) | Json::Null | Json::Other | Json::Text(_) | Json::TextTooLong => {
            Err(malformed(&"it is not an object"))
        }
    }
}

/// Asks the one decider.
fn decide(
    held: &Held<'_>,
    operation: Operation,
    banks: &[BankId],
    identity: IdentityClaim,
) -> Result<Permit, Refusal> {
    let (request, banks) = (held.facts.clone(), banks.to_vec());
    let facts = Facts::Memory(MemoryFacts { request, operation, banks, identity });
    let started = Instant::now();
    let decision = held.rules.decide(&held.exchange.connection.sandbox, &facts);
    metrics::decided_in(started.elapsed());
    match decision {
        Decision::Allow(permit) => Ok(permit),
        Decision::Deny(denial) => Err(denial.into()),
    }
}

/// What no route names is administration, which is refused to everybody.
fn unknown(held: &Held<'_>, presented: Presented) -> Refusal {
    match decide(held, Operation::Admin, &[], presented.claim) {
        Ok(_) => Reason::MemoryOperation.into(),
        Err(refusal) => refusal,
    }
}

/// Says which check failed; and that a token came by another's path is worth a record of its own.
async fn explained(refusal: Refusal, presented: Presented, held: &Held<'_>) -> Refusal {
    match (refusal.reason, presented.claim) {
        (Reason::IdentityInvalid, IdentityClaim::Invalid(code)) => refusal.because(code),
        (reason @ (Reason::IdentityMismatch | Reason::IdentityStale), _) => {
            let named = presented.subject.unwrap_or_default();
            let own = &held.exchange.connection.sandbox;
            let message =
                format!("the channel is that of sandbox {}; the token names {named}", own.id);
            let title = "A signed identity came by the path of another sandbox";
            find(held.record, reason, title, message).await;
            refusal
        }
        _ => refusal,
    }
}

/// Writes down something that somebody should look at.
async fn find(record: &OpenRecord, reason: Reason, title: &str, message: String) {
    let finding = Finding {
        code: Code(reason.code()),
        title: title.into(),
        severity: Severity::High,
        message: Some(message.into()),
        score: None,
        features: Vec::new(),
    };
    if record.finding(&finding).await.is_err() {
        tracing::warn!(%reason, "a finding could not be recorded");
    }
}

/// Records that the request may leave, and waits until that is written.
async fn decided(
    held: &mut Held<'_>,
    permit: &Permit,
    service: &Service,
) -> Result<Receipt, Refusal> {
    let mut verdict = record::allowed(permit, held.rules);
    verdict.carried = Some(Code("hold"));
    verdict.credential = service.credential().map(|name| name.as_str().into());
    let started = Instant::now();
    let receipt = held.record.decided(verdict).await?;
    metrics::recorded_in(started.elapsed());
    metrics::decision("allowed", "hold");
    Ok(receipt)
}

async fn admit(held: &Held<'_>, permit: &Permit) -> Result<DialPermit, Refusal> {
    let started = Instant::now();
    let found = held.shared.resolver.resolve(permit).await?;
    metrics::resolved_in(started.elapsed());
    Ok(held.rules.admit(permit, &found)?)
}

/// From here on a reload can end it.
fn enter(
    held: &Held<'_>,
    granted: &Granted<'_>,
    leave: &DialPermit,
) -> Result<crate::budget::live::Place, Refusal> {
    let (permit, tab) = (&granted.permit, granted.tab.clone());
    let first = leave.addresses().first().copied();
    let (meter, cut) = (held.record.meter(), held.exchange.cut.clone());
    let place = held.shared.live.enter(permit, first, meter, cut, tab);
    first.map_or(Ok(()), |address| held.shared.still_allows(permit, address, &granted.tab))?;
    Ok(place)
}

fn http1(mut peer: HttpPeer) -> HttpPeer {
    peer.options.alpn = ALPN::H1;
    peer
}

/// The request in its one plain form: what was decided upon, in our own framing, with nothing of the
/// sandbox's but what the profile passes on.
fn plain(
    sent: &RequestHeader,
    profile: &Profile,
    granted: &Granted<'_>,
    held: &Held<'_>,
) -> Result<RequestHeader, Refusal> {
    let facts = &held.facts;
    let target = format!("{}{}", facts.path, granted.query.sent());
    let broken = |_| Refusal::from(Reason::BadRequest);
    let mut head =
        RequestHeader::build(facts.method.as_str(), target.as_bytes(), Some(12)).map_err(broken)?;
    head.insert_header(HOST, authority(granted.permit.host(), facts.port)).map_err(broken)?;
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

fn authority(host: &Host, port: u16) -> String {
    if port == 443 { host.to_string() } else { format!("{host}:{port}") }
}
