//! The life of a request, in the phases of Pingora: gather facts, decide, record, resolve; then say whom to
//! connect to, clean what is sent, count what passes, and close the record.

use std::sync::Arc;
use std::time::Instant;

use ::http::{HeaderMap, HeaderValue};
use async_trait::async_trait;
use audit::{
    AttemptOutcome, DetectionFinding, Ending, FindingSeverity, OpenRecord, Receipt, StableCode,
};
use bytes::Bytes;
use pingora_core::prelude::{Error, HttpPeer, Result};
use pingora_core::protocols::Digest;
use pingora_core::{ErrorSource, ErrorType};
use pingora_http::{RequestHeader, ResponseHeader};
use pingora_proxy::{FailToProxy, ProxyHttp, ProxyWarnLogContext, Session};
use rules::budget::UsageKind;
use rules::{Decision, DialPermit, Facts, Host, Permit, Reason, RuleSet};

use super::RequestMonitor;
use super::fields::{strip_hop_by_hop, strip_request};
use super::request::{request_facts, request_record};
use crate::budget::ledger::Charges;
use crate::budget::live::LiveEntry;
use crate::credential::Credential;
use crate::credential::scrub::ResponseScrubber;
use crate::egress::shared::Shared;
use crate::egress::upstream::{UpstreamOptions, http_peer};
use crate::memory::{self, GuardMode, MemoryGuard, MemoryRequest};
use crate::report::metrics;
use crate::report::record;
use crate::report::refusal::{BodyAudience, Refusal, RefusalResponse};

/// How our own reasons travel through Pingora.
const CREDENTIAL: &str = "credential";
const ENCODED: &str = "encoded";
const TOO_LARGE: &str = "too_large";
const OVER_BUDGET: &str = "unpaid";
/// Fields that say that a body, or the messages in it, is encoded.
const ENCODINGS: [&str; 3] = ["connect-content-encoding", "content-encoding", "grpc-encoding"];

/// Our filters.
pub(super) struct RequestFilter {
    shared: Arc<Shared>,
    guard: Arc<MemoryGuard>,
}

/// One request on its way.
#[derive(Default)]
pub(super) struct RequestContext {
    monitor: Option<Arc<RequestMonitor>>,
    rules: Option<Arc<RuleSet>>,
    record: Option<OpenRecord>,
    dial_permit: Option<(DialPermit, Receipt)>,
    /// Which of the addresses is tried.
    at: usize,
    uploaded: u64,
    credential: Option<Arc<Credential>>,
    scrubber: Option<ResponseScrubber>,
    status: Option<u16>,
    live_entry: Option<LiveEntry>,
    charges: Option<Arc<Charges>>,
    /// What could not be paid for.
    over_budget: Option<Refusal>,
}

impl Drop for RequestContext {
    /// A request that was cut ends here.
    fn drop(&mut self) {
        let cut = self.monitor.as_ref().and_then(|exchange| exchange.cut.reason());
        if let (Some(record), Some(reason)) = (self.record.take(), cut) {
            let outcome = AttemptOutcome::new(record::cut_ending(reason));
            record.close(AttemptOutcome { status: self.status, ..outcome });
        }
    }
}

impl RequestContext {
    /// Charges bytes before they are passed on.
    fn charge(&mut self, what: UsageKind, bytes: u64) -> Result<()> {
        let paid = self.charges.as_ref().map_or(Ok(()), |tab| tab.charge(what, bytes));
        paid.map_err(|spent| {
            self.over_budget = Some(spent.into());
            Error::new(ErrorType::Custom(OVER_BUDGET))
        })
    }
}

impl RequestFilter {
    pub(super) fn new(shared: Arc<Shared>, guard: Arc<MemoryGuard>) -> Self {
        RequestFilter { shared, guard }
    }

    /// Lets the memory guard take the request to its answer.
    async fn handle_memory(
        &self,
        session: &mut Session,
        request: &mut RequestContext,
        hold: &GuardMode,
    ) -> Result<(), Refusal> {
        let exchange = request.monitor.clone().ok_or(Reason::UnknownChannel)?;
        let rules = request.rules.clone().ok_or(Reason::UnknownChannel)?;
        let record = request.record.as_mut().ok_or(Reason::LogUnwritable)?;
        exchange.set_byte_count(record.byte_count());
        let facts = request_facts(session.req_header(), &exchange, &self.shared.limits)?.facts;
        let told = request_record(session.req_header(), &exchange);
        let (shared, rules) = (&self.shared, &rules);
        let held = MemoryRequest { shared, exchange: &exchange, rules, record, facts, told };
        request.status = Some(self.guard.handle(session, hold, held).await?);
        Ok(())
    }

    /// Decides, records, resolves: after this the request may be sent to what was found.
    async fn authorize(
        &self,
        session: &Session,
        request: &mut RequestContext,
    ) -> Result<(), Refusal> {
        let exchange = request.monitor.clone().ok_or(Reason::UnknownChannel)?;
        let rules = request.rules.clone().ok_or(Reason::UnknownChannel)?;
        let said = request_facts(session.req_header(), &exchange, &self.shared.limits)?;
        if let Some(connect) = &said.connect {
            decide(&rules, &exchange, connect)?;
        }
        let permit = decide(&rules, &exchange, &Facts::Request(said.facts))?;
        exchange.connection.pin(permit.host());
        let credential = permit.credential().map(|name| self.shared.credentials.current(name));
        request.credential = credential.transpose()?;
        let tab = self.shared.charge(&permit)?;
        let head = request_bytes(session.req_header());
        tab.charge(UsageKind::Upload, head).map_err(|spent| spent.into_refusal(&permit))?;
        request.charges = Some(tab);
        let record = request.record.as_mut().ok_or(Reason::LogUnwritable)?;
        exchange.set_byte_count(record.byte_count());
        let started = Instant::now();
        let receipt = record.record_decision(record::permit_record(&permit, &rules)).await?;
        metrics::observe_record(started.elapsed());
        metrics::count_decision("allowed", permit.treatment().as_str());
        let started = Instant::now();
        let found = self.shared.resolver.resolve(&permit).await?;
        metrics::observe_resolve(started.elapsed());
        let leave = rules.admit(&permit, &found)?;
        self.register_live(request, &exchange, &permit, &leave)?;
        request.dial_permit = Some((leave, receipt));
        Ok(())
    }

    fn register_live(
        &self,
        request: &mut RequestContext,
        exchange: &RequestMonitor,
        permit: &Permit,
        leave: &DialPermit,
    ) -> Result<(), Refusal> {
        let first = leave.addresses().first().copied();
        let record = request.record.as_ref().ok_or(Reason::LogUnwritable)?;
        let (live, cut) = (&self.shared.live, exchange.cut.clone());
        let tab = request.charges.clone().ok_or(Reason::BudgetUnkept)?;
        request.live_entry =
            Some(live.register(permit, first, record.byte_count(), cut, tab.clone()));
        first.map_or(Ok(()), |address| self.shared.recheck_permit(permit, address, &tab))?;
        Ok(())
    }

    /// Records the refusal and tells the client.
    async fn refuse(&self, session: &mut Session, request: &mut RequestContext, refusal: &Refusal) {
        let answer = self.record_refusal(session, request, refusal).await;
        let interim = |status: u16| (100..200).contains(&status) && status != 101;
        let said = session.response_written().map(|said| said.status.as_u16());
        if said.is_none_or(interim) && respond(session, answer).await.is_err() {
            session.set_keepalive(None); // the client has gone
        }
    }

    async fn record_refusal(
        &self,
        session: &Session,
        request: &mut RequestContext,
        refusal: &Refusal,
    ) -> RefusalResponse {
        metrics::count_decision(refusal.reason.code(), "refused");
        let rules = request.rules.clone().unwrap_or_else(|| self.shared.rules.load_full());
        let accept = session.req_header().headers.get("accept").map(|value| value.as_bytes());
        let id = request.record.as_ref().map(OpenRecord::id).unwrap_or_default();
        let answer = RefusalResponse::new(refusal, &rules, &id, BodyAudience::from_accept(accept));
        request.status = Some(answer.status);
        record_echo(request).await;
        if let Some(record) = request.record.take()
            && record.record_refusal(record::refusal_record(refusal, &rules)).await.is_err()
        {
            tracing::warn!(reason = %refusal.reason, "a refusal could not be recorded");
        }
        answer
    }
}

fn decide(rules: &RuleSet, exchange: &RequestMonitor, facts: &Facts) -> Result<Permit, Refusal> {
    let started = Instant::now();
    let decision = rules.decide(&exchange.connection.sandbox, facts);
    metrics::observe_decide(started.elapsed());
    match decision {
        Decision::Allow(permit) => Ok(permit),
        Decision::Deny(denial) => Err(denial.into()),
    }
}

async fn respond(session: &mut Session, answer: RefusalResponse) -> Result<()> {
    let mut head = ResponseHeader::build(answer.status, Some(8))?;
    for (name, value) in answer.fields {
        head.insert_header(name, value)?;
    }
    head.insert_header("Content-Type", answer.kind)?;
    head.insert_header("Content-Length", answer.body.len())?;
    head.insert_header("Cache-Control", "no-store")?;
    session.write_response_header(Box::new(head), false).await?;
    session.write_response_body(Some(Bytes::from(answer.body)), true).await
}

/// Covers echoes in the fields of an answer. One that is encoded cannot be searched, and is withheld.
fn scrub_response(response: &mut ResponseHeader, scrubber: &mut ResponseScrubber) -> Result<()> {
    let encodings = ENCODINGS.iter().flat_map(|name| response.headers.get_all(*name));
    let plain = |encoding: &HeaderValue| encoding.as_bytes().eq_ignore_ascii_case(b"identity");
    if !encodings.into_iter().all(plain) {
        return Err(Error::new(ErrorType::Custom(ENCODED)));
    }
    if has_grpc_messages(response) {
        scrubber.expect_grpc();
    }
    response.set_reason_phrase(None)?; // words of the origin's that nobody needs
    let names: Vec<_> = response.headers.keys().cloned().collect();
    for name in names {
        let values = response.headers.get_all(&name).iter();
        let mut values: Vec<Vec<u8>> = values.map(|value| value.as_bytes().to_vec()).collect();
        let found: usize = values.iter_mut().map(|value| scrubber.mask_field(value)).sum();
        if found > 0 {
            response.remove_header(&name);
            for value in values {
                response.append_header(name.clone(), value)?;
            }
        }
    }
    Ok(())
}

/// Covers echoes in trailers, and ends the body before them: what is left of it.
fn scrub_trailers(trailers: &mut HeaderMap, scrubber: &mut ResponseScrubber) -> Bytes {
    for value in trailers.values_mut() {
        let mut text = value.as_bytes().to_vec();
        if scrubber.mask_field(&mut text) > 0 {
            *value = HeaderValue::from_bytes(&text).unwrap_or(HeaderValue::from_static(""));
        }
    }
    scrubber.scrub(None, true)
}

/// Whether the body is messages of gRPC's, each with its length before it.
fn has_grpc_messages(response: &ResponseHeader) -> bool {
    let kind = response.headers.get("content-type").map(|kind| kind.as_bytes());
    kind.is_some_and(|kind| {
        kind.starts_with(b"application/grpc") && !kind.starts_with(b"application/grpc-web-text")
    })
}

/// An origin that sends a credential back is worth a look: somebody may have asked it to.
async fn record_echo(request: &RequestContext) {
    let found = request.scrubber.as_ref().is_some_and(|scrubber| scrubber.echo_count() > 0);
    let Some(record) = request.record.as_ref().filter(|_| found) else { return };
    let name = request.dial_permit.as_ref().and_then(|(leave, _)| leave.permit().credential());
    let name = name.map(ToString::to_string).unwrap_or_default();
    let finding = DetectionFinding {
        code: StableCode("credential_echoed"),
        title: "The origin sent an injected credential back".into(),
        severity: FindingSeverity::High,
        message: Some(format!("Credential `{name}` was covered in the answer.").into()),
        score: None,
        features: Vec::new(),
    };
    if let Err(down) = record.record_finding(&finding).await {
        tracing::warn!(%down, "a finding could not be written");
    }
}

/// Our word for what went wrong between us and the origin; none where the client went away.
pub(crate) fn refusal_from_error(error: &Error) -> Option<Refusal> {
    let reason = match (error.esource(), error.etype()) {
        (ErrorSource::Downstream, ErrorType::InvalidHTTPHeader | ErrorType::H1Error) => {
            Reason::BadRequest
        }
        (ErrorSource::Downstream, _) => return None,
        (_, ErrorType::CustomCode(TOO_LARGE, _)) => Reason::BodyTooLarge,
        (_, ErrorType::Custom(CREDENTIAL)) => Reason::CredentialUnavailable,
        (_, ErrorType::Custom(ENCODED)) => Reason::AnswerUnreadable,
        (_, ErrorType::ConnectTimedout | ErrorType::ReadTimedout | ErrorType::WriteTimedout) => {
            Reason::UpstreamTimeout
        }
        (
            _,
            ErrorType::InvalidCert | ErrorType::TLSHandshakeFailure | ErrorType::HandshakeError,
        ) => Reason::UpstreamCertificate,
        (
            _,
            ErrorType::ConnectRefused
            | ErrorType::ConnectNoRoute
            | ErrorType::ConnectError
            | ErrorType::SocketError,
        ) => Reason::UpstreamUnreachable,
        _ => Reason::UpstreamBroke,
    };
    Some(Refusal::from(reason).with_detail(error_detail(reason, error)))
}

/// What somebody can mend. Of what went wrong after the connection stood only the kind is told: Pingora's words
/// quote what the origin sent, which may hold secrets.
fn error_detail(reason: Reason, error: &Error) -> String {
    if reason == Reason::UpstreamUnreachable {
        return error.root_cause().to_string();
    }
    let certificate = error.context.as_ref().filter(|_| reason == Reason::UpstreamCertificate);
    let innermost = certificate.and_then(|told| told.as_str().rsplit_once("cause: "));
    let innermost = innermost.and_then(|(_, cause)| cause.split(", SNI: ").next());
    innermost.unwrap_or(error.root_etype().as_str()).to_owned()
}

#[async_trait]
impl ProxyHttp for RequestFilter {
    type CTX = RequestContext;

    fn new_ctx(&self) -> RequestContext {
        RequestContext::default()
    }

    /// Without modules: nothing is compressed, and no Accept-Encoding is added.
    fn init_downstream_modules(&self, _: &mut pingora_core::modules::http::HttpModules) {}

    async fn request_filter(
        &self,
        session: &mut Session,
        request: &mut RequestContext,
    ) -> Result<bool> {
        let data = session.digest().and_then(|digest| digest.proxy_digest.as_ref());
        let data = data.and_then(|digest| digest.user_data.as_ref());
        let Some(exchange) =
            data.and_then(|data| data.downcast_ref::<Arc<RequestMonitor>>()).cloned()
        else {
            return Err(Error::new(ErrorType::InternalError)); // nobody's: closed
        };
        let facts = request_record(session.req_header(), &exchange);
        let facts = audit::RecordedFacts::Request(facts);
        request.record = Some(exchange.connection.record().open_request(facts));
        let rules = self.shared.rules.load_full();
        let hold = memory::guard_mode(&rules, &exchange);
        request.rules = Some(rules);
        exchange.set_reached_filter();
        request.monitor = Some(exchange);
        let done = match &hold {
            Some(hold) => self.handle_memory(session, request, hold).await,
            None => self.authorize(session, request).await,
        };
        match done {
            Ok(()) => Ok(hold.is_some()), // what was held is answered
            Err(refusal) => {
                self.refuse(session, request, &refusal).await;
                Ok(true)
            }
        }
    }

    async fn upstream_peer(
        &self,
        session: &mut Session,
        request: &mut RequestContext,
    ) -> Result<Box<HttpPeer>> {
        let manner =
            UpstreamOptions { upgrade: session.is_upgrade_req(), body: content_length(session) };
        let peer = match (&request.monitor, &request.dial_permit) {
            (Some(exchange), Some((leave, receipt))) => {
                let address = leave.addresses().get(request.at);
                if let (Some(address), Some(record)) = (address, &mut request.record) {
                    let port = leave.permit().port().unwrap_or_default();
                    record.set_dialled((*address, port).into());
                }
                http_peer(&self.shared, exchange, leave, receipt, request.at, manner)
            }
            _ => None,
        };
        peer.ok_or_else(|| Error::new(ErrorType::ConnectError))
    }

    fn fail_to_connect(
        &self,
        _: &mut Session,
        _: &HttpPeer,
        request: &mut RequestContext,
        mut error: Box<Error>,
    ) -> Box<Error> {
        request.at += 1;
        let left = request.dial_permit.as_ref().map_or(0, |(leave, _)| leave.addresses().len());
        error.set_retry(request.at < left);
        error
    }

    async fn connected_to_upstream(
        &self,
        _: &mut Session,
        reused: bool,
        _: &HttpPeer,
        _: std::os::fd::RawFd,
        digest: Option<&Digest>,
        _: &mut RequestContext,
    ) -> Result<()> {
        let layers = digest.map(|digest| digest.timing_digest.as_slice()).unwrap_or_default();
        let took = layers.iter().flatten().filter_map(|layer| layer.establishment_duration).sum();
        metrics::count_upstream(reused, took);
        Ok(())
    }

    async fn upstream_request_filter(
        &self,
        session: &mut Session,
        upstream: &mut RequestHeader,
        request: &mut RequestContext,
    ) -> Result<()> {
        strip_request(upstream);
        let leave = request.dial_permit.as_ref();
        if leave.is_some_and(|(leave, _)| leave.permit().is_credential_host()) {
            upstream.remove_header("authorization"); // its account is ours to choose, by whichever rule
        }
        if let Some(credential) = &request.credential {
            let refused = |_| Error::new(ErrorType::Custom(CREDENTIAL));
            credential.inject(upstream).map_err(refused)?;
            request.scrubber = Some(ResponseScrubber::new(credential.echoes()));
        }
        let nameless = upstream.uri.authority().is_none() && !upstream.headers.contains_key("host");
        if let (true, Some((leave, _))) = (nameless, &request.dial_permit) {
            upstream.insert_header("Host", permit_authority(leave.permit()))?; // HTTP/1.0 may leave it out
        }
        let grpc = upstream
            .headers
            .get("content-type")
            .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
        if grpc && session.req_header().headers.contains_key("te") {
            upstream.insert_header("te", "trailers")?; // Pingora takes it for hop-by-hop, gRPC does not
        }
        Ok(())
    }

    async fn request_body_filter(
        &self,
        _: &mut Session,
        body: &mut Option<Bytes>,
        _: bool,
        request: &mut RequestContext,
    ) -> Result<()> {
        let bytes = body.as_ref().map_or(0, Bytes::len) as u64;
        request.charge(UsageKind::Upload, bytes)?;
        request.uploaded += bytes;
        if let Some(record) = &request.record {
            record.byte_count().add_sent(bytes);
        }
        let inspected =
            request.dial_permit.as_ref().is_some_and(|(leave, _)| leave.permit().inspect());
        if inspected && request.uploaded > self.shared.limits.inspected_body_bytes {
            return Err(Error::new(ErrorType::CustomCode(TOO_LARGE, 413)));
        }
        Ok(())
    }

    async fn response_filter(
        &self,
        session: &mut Session,
        response: &mut ResponseHeader,
        request: &mut RequestContext,
    ) -> Result<()> {
        let unasked = response.status == 101 && !session.is_upgrade_req();
        if unasked || !is_framed(response) {
            return Err(Error::new_up(ErrorType::InvalidHTTPHeader));
        }
        if let Some(scrubber) = &mut request.scrubber {
            scrub_response(response, scrubber)?;
        }
        request
            .charge(UsageKind::Download, head_bytes(&response.headers) + status_bytes(response))?;
        let switched = response.status == ::http::StatusCode::SWITCHING_PROTOCOLS; // the last of its answers
        if !switched {
            strip_hop_by_hop(response);
        }
        response.remove_header("alt-svc"); // another way to the host, which leads around us
        if let Some(exchange) = &request.monitor {
            exchange.set_answered();
        }
        if switched || !response.status.is_informational() {
            request.status = Some(response.status.as_u16());
        }
        Ok(())
    }

    fn response_body_filter(
        &self,
        _: &mut Session,
        body: &mut Option<Bytes>,
        last: bool,
        request: &mut RequestContext,
    ) -> Result<Option<std::time::Duration>> {
        if let Some(scrubber) = &mut request.scrubber {
            let passed = scrubber.scrub(body.as_ref(), last);
            *body = (!passed.is_empty() || body.is_some()).then_some(passed);
        }
        let bytes = body.as_ref().map_or(0, Bytes::len) as u64;
        request.charge(UsageKind::Download, bytes)?;
        if let Some(record) = &request.record {
            record.byte_count().add_received(bytes);
        }
        Ok(None)
    }

    async fn response_trailer_filter(
        &self,
        _: &mut Session,
        trailers: &mut HeaderMap,
        request: &mut RequestContext,
    ) -> Result<Option<Bytes>> {
        let rest = request.scrubber.as_mut().map(|scrubber| scrub_trailers(trailers, scrubber));
        let bytes = head_bytes(trailers) + rest.as_ref().map_or(0, Bytes::len) as u64;
        if request.charge(UsageKind::Download, bytes).is_err() {
            trailers.clear(); // Pingora passes them on whatever is answered here
            if let (Some(exchange), Some(unpaid)) = (&request.monitor, &request.over_budget) {
                exchange.cut.trigger(unpaid.reason);
            }
            return Ok(None);
        }
        // A body that is whole is worth more than trailers, and Pingora takes only one of them from here.
        Ok(rest.filter(|rest| !rest.is_empty()))
    }

    async fn fail_to_proxy(
        &self,
        session: &mut Session,
        error: &Error,
        request: &mut RequestContext,
    ) -> FailToProxy {
        session.set_keepalive(None);
        let malformed = request.monitor.as_ref().and_then(|exchange| exchange.body_refusal());
        let why =
            malformed.or_else(|| request.over_budget.take()).or_else(|| refusal_from_error(error));
        if let Some(refusal) = why {
            tracing::debug!(%error, "a request failed");
            let rule = request.dial_permit.as_ref().map(|(leave, _)| leave.permit().rule().clone());
            let refusal = Refusal { rule, ..refusal };
            self.refuse(session, request, &refusal).await;
        } else if let Some(exchange) = &request.monitor {
            exchange.set_broken();
        }
        FailToProxy { error_code: request.status.unwrap_or_default(), can_reuse_downstream: false }
    }

    async fn logging(&self, _: &mut Session, error: Option<&Error>, request: &mut RequestContext) {
        record_echo(request).await;
        let Some(record) = request.record.take() else { return };
        let ending = match (error, request.over_budget.take()) {
            (_, Some(unpaid)) => record::cut_ending(unpaid.reason), // its trailers were held back
            (None, None) => Ending::Completed,
            (Some(_), None) => Ending::Failed(StableCode("client_gone")),
        };
        metrics::count_bytes(&record.byte_count());
        record.close(AttemptOutcome { status: request.status, ..AttemptOutcome::new(ending) });
        request.live_entry = None;
    }

    fn suppress_error_log(&self, _: &Session, _: &RequestContext, _: &Error) -> bool {
        true // the record and the metrics tell it
    }

    fn suppress_proxy_warn_log(
        &self,
        _: &Session,
        _: &RequestContext,
        _: &Error,
        _: ProxyWarnLogContext,
    ) -> bool {
        true
    }
}

/// The host and port that were decided upon.
fn permit_authority(permit: &Permit) -> String {
    let host = match permit.host() {
        Host::Address(address @ std::net::IpAddr::V6(_)) => format!("[{address}]"),
        Host::Address(address) => address.to_string(),
        Host::Name(name) => name.to_string(),
    };
    permit.port().map_or(host.clone(), |port| format!("{host}:{port}"))
}

/// Whether the end of the answer can be told: `chunked` is the only coding that says (RFC 9112, section 6.3).
fn is_framed(response: &ResponseHeader) -> bool {
    let mut codings = response.headers.get_all("transfer-encoding").iter();
    let chunked =
        codings.next().is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"));
    chunked && codings.next().is_none()
}

/// Bytes of the fields of a head: they carry data as bodies do.
pub(crate) fn head_bytes(fields: &HeaderMap) -> u64 {
    fields.iter().map(|(name, value)| (name.as_str().len() + value.len() + 4) as u64).sum()
}

/// Bytes of a request's head, its target included: `:authority` says in HTTP/2 what a field says in HTTP/1.
pub(crate) fn request_bytes(head: &RequestHeader) -> u64 {
    let target = head.uri.path_and_query().map_or(0, |target| target.as_str().len());
    let authority = head.uri.authority().map_or(0, |authority| authority.as_str().len());
    head_bytes(&head.headers) + (head.method.as_str().len() + target + authority) as u64
}

/// Bytes of the line an answer begins with: the words in it are the origin's to choose, and so is how many interim
/// answers there are.
fn status_bytes(head: &ResponseHeader) -> u64 {
    const CODE: usize = "HTTP/1.1 200 \r\n".len();
    (CODE + head.get_reason_phrase().map_or(0, str::len)) as u64
}

/// Bytes of body the request announces: none where it is chunked.
fn content_length(session: &mut Session) -> Option<u64> {
    let head = session.req_header();
    let length = head.headers.get("content-length").and_then(|length| length.to_str().ok());
    match length {
        Some(length) => length.parse().ok(),
        None => session.as_mut().is_body_empty().then_some(0),
    }
}
