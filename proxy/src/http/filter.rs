//! The life of a request, in the phases of Pingora: gather facts, decide, record, resolve; then say whom to
//! connect to, clean what is sent, count what passes, and close the record.

use std::sync::Arc;
use std::time::Instant;

use ::http::{HeaderMap, HeaderValue};
use async_trait::async_trait;
use audit::{Code, Ending, Finding, OpenRecord, Outcome, Receipt, Severity};
use bytes::Bytes;
use pingora_core::prelude::{Error, HttpPeer, Result};
use pingora_core::protocols::Digest;
use pingora_core::{ErrorSource, ErrorType};
use pingora_http::{RequestHeader, ResponseHeader};
use pingora_proxy::{FailToProxy, ProxyHttp, ProxyWarnLogContext, Session};
use rules::budget::Counted;
use rules::{Decision, DialPermit, Facts, Host, Permit, Reason, RuleSet};

use super::Exchange;
use super::fields::{strip, strip_hops};
use super::request::{said, told};
use crate::budget::ledger::Tab;
use crate::budget::live::Place;
use crate::credential::Credential;
use crate::credential::scrub::Scrubber;
use crate::egress::shared::Shared;
use crate::egress::upstream::{Manner, peer};
use crate::memory::{self, Guard, Held, Hold};
use crate::report::metrics;
use crate::report::record;
use crate::report::refusal::{Answer, Reader, Refusal};

/// How our own reasons travel through Pingora.
const CREDENTIAL: &str = "credential";
const ENCODED: &str = "encoded";
const TOO_LARGE: &str = "too_large";
const UNPAID: &str = "unpaid";
/// Fields that say that a body, or the messages in it, is encoded.
const ENCODINGS: [&str; 3] = ["connect-content-encoding", "content-encoding", "grpc-encoding"];

/// Our filters.
pub(super) struct Filter {
    shared: Arc<Shared>,
    guard: Arc<Guard>,
}

/// One request on its way.
#[derive(Default)]
pub(super) struct Request {
    exchange: Option<Arc<Exchange>>,
    rules: Option<Arc<RuleSet>>,
    record: Option<OpenRecord>,
    leave: Option<(DialPermit, Receipt)>,
    /// Which of the addresses is tried.
    at: usize,
    uploaded: u64,
    credential: Option<Arc<Credential>>,
    scrubber: Option<Scrubber>,
    status: Option<u16>,
    place: Option<Place>,
    tab: Option<Arc<Tab>>,
    /// What could not be paid for.
    unpaid: Option<Refusal>,
}

impl Drop for Request {
    /// A request that was cut ends here.
    fn drop(&mut self) {
        let cut = self.exchange.as_ref().and_then(|exchange| exchange.cut.why());
        if let (Some(record), Some(reason)) = (self.record.take(), cut) {
            let outcome = Outcome::new(record::cut(reason));
            record.close(Outcome { status: self.status, ..outcome });
        }
    }
}

impl Request {
    /// Charges bytes before they are passed on.
    fn pay(&mut self, what: Counted, bytes: u64) -> Result<()> {
        let paid = self.tab.as_ref().map_or(Ok(()), |tab| tab.charge(what, bytes));
        paid.map_err(|spent| {
            self.unpaid = Some(spent.into());
            Error::new(ErrorType::Custom(UNPAID))
        })
    }
}

impl Filter {
    pub(super) fn new(shared: Arc<Shared>, guard: Arc<Guard>) -> Self {
        Filter { shared, guard }
    }

    /// Lets the memory guard take the request to its answer.
    async fn hold(
        &self,
        session: &mut Session,
        request: &mut Request,
        hold: &Hold,
    ) -> Result<(), Refusal> {
        let exchange = request.exchange.clone().ok_or(Reason::UnknownChannel)?;
        let rules = request.rules.clone().ok_or(Reason::UnknownChannel)?;
        let record = request.record.as_mut().ok_or(Reason::LogUnwritable)?;
        exchange.count_with(record.meter());
        let facts = said(session.req_header(), &exchange, &self.shared.limits)?.facts;
        let told = told(session.req_header(), &exchange);
        let (shared, rules) = (&self.shared, &rules);
        let held = Held { shared, exchange: &exchange, rules, record, facts, told };
        request.status = Some(self.guard.hold(session, hold, held).await?);
        Ok(())
    }

    /// Decides, records, resolves: after this the request may be sent to what was found.
    async fn admit(&self, session: &Session, request: &mut Request) -> Result<(), Refusal> {
        let exchange = request.exchange.clone().ok_or(Reason::UnknownChannel)?;
        let rules = request.rules.clone().ok_or(Reason::UnknownChannel)?;
        let said = said(session.req_header(), &exchange, &self.shared.limits)?;
        if let Some(connect) = &said.connect {
            decide(&rules, &exchange, connect)?;
        }
        let permit = decide(&rules, &exchange, &Facts::Request(said.facts))?;
        exchange.connection.pin(permit.host());
        let credential = permit.credential().map(|name| self.shared.credentials.current(name));
        request.credential = credential.transpose()?;
        let tab = self.shared.charge(&permit)?;
        let head = request_bytes(session.req_header());
        tab.charge(Counted::Upload, head).map_err(|spent| spent.of(&permit))?;
        request.tab = Some(tab);
        let record = request.record.as_mut().ok_or(Reason::LogUnwritable)?;
        exchange.count_with(record.meter());
        let started = Instant::now();
        let receipt = record.decided(record::allowed(&permit, &rules)).await?;
        metrics::recorded_in(started.elapsed());
        metrics::decision("allowed", permit.how().word());
        let started = Instant::now();
        let found = self.shared.resolver.resolve(&permit).await?;
        metrics::resolved_in(started.elapsed());
        let leave = rules.admit(&permit, &found)?;
        self.enter(request, &exchange, &permit, &leave)?;
        request.leave = Some((leave, receipt));
        Ok(())
    }

    fn enter(
        &self,
        request: &mut Request,
        exchange: &Exchange,
        permit: &Permit,
        leave: &DialPermit,
    ) -> Result<(), Refusal> {
        let first = leave.addresses().first().copied();
        let record = request.record.as_ref().ok_or(Reason::LogUnwritable)?;
        let (live, cut) = (&self.shared.live, exchange.cut.clone());
        let tab = request.tab.clone().ok_or(Reason::BudgetUnkept)?;
        request.place = Some(live.enter(permit, first, record.meter(), cut, tab.clone()));
        first.map_or(Ok(()), |address| self.shared.still_allows(permit, address, &tab))?;
        Ok(())
    }

    /// Records the refusal and tells the client.
    async fn refuse(&self, session: &mut Session, request: &mut Request, refusal: &Refusal) {
        let answer = self.note(session, request, refusal).await;
        let interim = |status: u16| (100..200).contains(&status) && status != 101;
        let said = session.response_written().map(|said| said.status.as_u16());
        if said.is_none_or(interim) && respond(session, answer).await.is_err() {
            session.set_keepalive(None); // the client has gone
        }
    }

    async fn note(&self, session: &Session, request: &mut Request, refusal: &Refusal) -> Answer {
        metrics::decision(refusal.reason.code(), "refused");
        let rules = request.rules.clone().unwrap_or_else(|| self.shared.rules.load_full());
        let accept = session.req_header().headers.get("accept").map(|value| value.as_bytes());
        let id = request.record.as_ref().map(OpenRecord::id).unwrap_or_default();
        let answer = Answer::new(refusal, &rules, &id, Reader::of(accept));
        request.status = Some(answer.status);
        tell_echo(request).await;
        if let Some(record) = request.record.take()
            && record.refused(record::refused(refusal, &rules)).await.is_err()
        {
            tracing::warn!(reason = %refusal.reason, "a refusal could not be recorded");
        }
        answer
    }
}

fn decide(rules: &RuleSet, exchange: &Exchange, facts: &Facts) -> Result<Permit, Refusal> {
    let started = Instant::now();
    let decision = rules.decide(&exchange.connection.sandbox, facts);
    metrics::decided_in(started.elapsed());
    match decision {
        Decision::Allow(permit) => Ok(permit),
        Decision::Deny(denial) => Err(denial.into()),
    }
}

async fn respond(session: &mut Session, answer: Answer) -> Result<()> {
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
fn clean(response: &mut ResponseHeader, scrubber: &mut Scrubber) -> Result<()> {
    let encodings = ENCODINGS.iter().flat_map(|name| response.headers.get_all(*name));
    let plain = |encoding: &HeaderValue| encoding.as_bytes().eq_ignore_ascii_case(b"identity");
    if !encodings.into_iter().all(plain) {
        return Err(Error::new(ErrorType::Custom(ENCODED)));
    }
    if has_messages(response) {
        scrubber.expect_messages();
    }
    response.set_reason_phrase(None)?; // words of the origin's that nobody needs
    let names: Vec<_> = response.headers.keys().cloned().collect();
    for name in names {
        let values = response.headers.get_all(&name).iter();
        let mut values: Vec<Vec<u8>> = values.map(|value| value.as_bytes().to_vec()).collect();
        let found: usize = values.iter_mut().map(|value| scrubber.cover(value)).sum();
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
fn cover(trailers: &mut HeaderMap, scrubber: &mut Scrubber) -> Bytes {
    for value in trailers.values_mut() {
        let mut text = value.as_bytes().to_vec();
        if scrubber.cover(&mut text) > 0 {
            *value = HeaderValue::from_bytes(&text).unwrap_or(HeaderValue::from_static(""));
        }
    }
    scrubber.pass(None, true)
}

/// Whether the body is messages of gRPC's, each with its length before it.
fn has_messages(response: &ResponseHeader) -> bool {
    let kind = response.headers.get("content-type").map(|kind| kind.as_bytes());
    kind.is_some_and(|kind| {
        kind.starts_with(b"application/grpc") && !kind.starts_with(b"application/grpc-web-text")
    })
}

/// An origin that sends a credential back is worth a look: somebody may have asked it to.
async fn tell_echo(request: &Request) {
    let found = request.scrubber.as_ref().is_some_and(|scrubber| scrubber.found() > 0);
    let Some(record) = request.record.as_ref().filter(|_| found) else { return };
    let name = request.leave.as_ref().and_then(|(leave, _)| leave.permit().credential());
    let name = name.map(ToString::to_string).unwrap_or_default();
    let finding = Finding {
        code: Code("credential_echoed"),
        title: "The origin sent an injected credential back".into(),
        severity: Severity::High,
        message: Some(format!("Credential `{name}` was covered in the answer.").into()),
        score: None,
        features: Vec::new(),
    };
    if let Err(down) = record.finding(&finding).await {
        tracing::warn!(%down, "a finding could not be written");
    }
}

/// Our word for what went wrong between us and the origin; none where the client went away.
pub(crate) fn failure(error: &Error) -> Option<Refusal> {
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
    Some(Refusal::from(reason).because(cause(reason, error)))
}

/// What somebody can mend. Of what went wrong after the connection stood only the kind is told: Pingora's words
/// quote what the origin sent, which may hold secrets.
fn cause(reason: Reason, error: &Error) -> String {
    if reason == Reason::UpstreamUnreachable {
        return error.root_cause().to_string();
    }
    let certificate = error.context.as_ref().filter(|_| reason == Reason::UpstreamCertificate);
    let innermost = certificate.and_then(|told| told.as_str().rsplit_once("cause: "));
    let innermost = innermost.and_then(|(_, cause)| cause.split(", SNI: ").next());
    innermost.unwrap_or(error.root_etype().as_str()).to_owned()
}

#[async_trait]
impl ProxyHttp for Filter {
    type CTX = Request;

    fn new_ctx(&self) -> Request {
        Request::default()
    }

    /// Without modules: nothing is compressed, and no Accept-Encoding is added.
    fn init_downstream_modules(&self, _: &mut pingora_core::modules::http::HttpModules) {}

    async fn request_filter(&self, session: &mut Session, request: &mut Request) -> Result<bool> {
        let data = session.digest().and_then(|digest| digest.proxy_digest.as_ref());
        let data = data.and_then(|digest| digest.user_data.as_ref());
        let Some(exchange) = data.and_then(|data| data.downcast_ref::<Arc<Exchange>>()).cloned()
        else {
            return Err(Error::new(ErrorType::InternalError)); // nobody's: closed
        };
        let facts = told(session.req_header(), &exchange);
        let facts = audit::Facts::Request(facts);
        request.record = Some(exchange.connection.record().request(facts));
        let rules = self.shared.rules.load_full();
        let hold = memory::held(&rules, &exchange);
        request.rules = Some(rules);
        exchange.set_met();
        request.exchange = Some(exchange);
        let done = match &hold {
            Some(hold) => self.hold(session, request, hold).await,
            None => self.admit(session, request).await,
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
        request: &mut Request,
    ) -> Result<Box<HttpPeer>> {
        let manner = Manner { upgrade: session.is_upgrade_req(), body: announced(session) };
        let peer = match (&request.exchange, &request.leave) {
            (Some(exchange), Some((leave, receipt))) => {
                let address = leave.addresses().get(request.at);
                if let (Some(address), Some(record)) = (address, &mut request.record) {
                    let port = leave.permit().port().unwrap_or_default();
                    record.dialled((*address, port).into());
                }
                peer(&self.shared, exchange, leave, receipt, request.at, manner)
            }
            _ => None,
        };
        peer.ok_or_else(|| Error::new(ErrorType::ConnectError))
    }

    fn fail_to_connect(
        &self,
        _: &mut Session,
        _: &HttpPeer,
        request: &mut Request,
        mut error: Box<Error>,
    ) -> Box<Error> {
        request.at += 1;
        let left = request.leave.as_ref().map_or(0, |(leave, _)| leave.addresses().len());
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
        _: &mut Request,
    ) -> Result<()> {
        let layers = digest.map(|digest| digest.timing_digest.as_slice()).unwrap_or_default();
        let took = layers.iter().flatten().filter_map(|layer| layer.establishment_duration).sum();
        metrics::upstream(reused, took);
        Ok(())
    }

    async fn upstream_request_filter(
        &self,
        session: &mut Session,
        upstream: &mut RequestHeader,
        request: &mut Request,
    ) -> Result<()> {
        strip(upstream);
        let leave = request.leave.as_ref();
        if leave.is_some_and(|(leave, _)| leave.permit().is_credential_host()) {
            upstream.remove_header("authorization"); // its account is ours to choose, by whichever rule
        }
        if let Some(credential) = &request.credential {
            let refused = |_| Error::new(ErrorType::Custom(CREDENTIAL));
            credential.inject(upstream).map_err(refused)?;
            request.scrubber = Some(Scrubber::new(credential.echoes()));
        }
        let nameless = upstream.uri.authority().is_none() && !upstream.headers.contains_key("host");
        if let (true, Some((leave, _))) = (nameless, &request.leave) {
            upstream.insert_header("Host", authority(leave.permit()))?; // HTTP/1.0 may leave it out
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
        request: &mut Request,
    ) -> Result<()> {
        let bytes = body.as_ref().map_or(0, Bytes::len) as u64;
        request.pay(Counted::Upload, bytes)?;
        request.uploaded += bytes;
        if let Some(record) = &request.record {
            record.meter().sent(bytes);
        }
        let inspected = request.leave.as_ref().is_some_and(|(leave, _)| leave.permit().inspect());
        if inspected && request.uploaded > self.shared.limits.inspected_body_bytes {
            return Err(Error::new(ErrorType::CustomCode(TOO_LARGE, 413)));
        }
        Ok(())
    }

    async fn response_filter(
        &self,
        session: &mut Session,
        response: &mut ResponseHeader,
        request: &mut Request,
    ) -> Result<()> {
        let unasked = response.status == 101 && !session.is_upgrade_req();
        if unasked || !is_framed(response) {
            return Err(Error::new_up(ErrorType::InvalidHTTPHeader));
        }
        if let Some(scrubber) = &mut request.scrubber {
            clean(response, scrubber)?;
        }
        request.pay(Counted::Download, head_bytes(&response.headers) + status_bytes(response))?;
        let switched = response.status == ::http::StatusCode::SWITCHING_PROTOCOLS; // the last of its answers
        if !switched {
            strip_hops(response);
        }
        response.remove_header("alt-svc"); // another way to the host, which leads around us
        if let Some(exchange) = &request.exchange {
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
        request: &mut Request,
    ) -> Result<Option<std::time::Duration>> {
        if let Some(scrubber) = &mut request.scrubber {
            let passed = scrubber.pass(body.as_ref(), last);
            *body = (!passed.is_empty() || body.is_some()).then_some(passed);
        }
        let bytes = body.as_ref().map_or(0, Bytes::len) as u64;
        request.pay(Counted::Download, bytes)?;
        if let Some(record) = &request.record {
            record.meter().received(bytes);
        }
        Ok(None)
    }

    async fn response_trailer_filter(
        &self,
        _: &mut Session,
        trailers: &mut HeaderMap,
        request: &mut Request,
    ) -> Result<Option<Bytes>> {
        let rest = request.scrubber.as_mut().map(|scrubber| cover(trailers, scrubber));
        let bytes = head_bytes(trailers) + rest.as_ref().map_or(0, Bytes::len) as u64;
        if request.pay(Counted::Download, bytes).is_err() {
            trailers.clear(); // Pingora passes them on whatever is answered here
            if let (Some(exchange), Some(unpaid)) = (&request.exchange, &request.unpaid) {
                exchange.cut.now(unpaid.reason);
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
        request: &mut Request,
    ) -> FailToProxy {
        session.set_keepalive(None);
        let malformed = request.exchange.as_ref().and_then(|exchange| exchange.malformed());
        let why = malformed.or_else(|| request.unpaid.take()).or_else(|| failure(error));
        if let Some(refusal) = why {
            tracing::debug!(%error, "a request failed");
            let rule = request.leave.as_ref().map(|(leave, _)| leave.permit().rule().clone());
            let refusal = Refusal { rule, ..refusal };
            self.refuse(session, request, &refusal).await;
        } else if let Some(exchange) = &request.exchange {
            exchange.set_broken();
        }
        FailToProxy { error_code: request.status.unwrap_or_default(), can_reuse_downstream: false }
    }

    async fn logging(&self, _: &mut Session, error: Option<&Error>, request: &mut Request) {
        tell_echo(request).await;
        let Some(record) = request.record.take() else { return };
        let ending = match (error, request.unpaid.take()) {
            (_, Some(unpaid)) => record::cut(unpaid.reason), // its trailers were held back
            (None, None) => Ending::Completed,
            (Some(_), None) => Ending::Failed(Code("client_gone")),
        };
        metrics::bytes(&record.meter());
        record.close(Outcome { status: request.status, ..Outcome::new(ending) });
        request.place = None;
    }

    fn suppress_error_log(&self, _: &Session, _: &Request, _: &Error) -> bool {
        true // the record and the metrics tell it
    }

    fn suppress_proxy_warn_log(
        &self,
        _: &Session,
        _: &Request,
        _: &Error,
        _: ProxyWarnLogContext,
    ) -> bool {
        true
    }
}

/// The host and port that were decided upon.
fn authority(permit: &Permit) -> String {
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
fn announced(session: &mut Session) -> Option<u64> {
    let head = session.req_header();
    let length = head.headers.get("content-length").and_then(|length| length.to_str().ok());
    match length {
        Some(length) => length.parse().ok(),
        None => session.as_mut().is_body_empty().then_some(0),
    }
}
