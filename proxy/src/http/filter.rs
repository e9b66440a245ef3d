//! One request in Pingora's phases: gather facts, decide, depart; then choose the peer, rewrite the request, count and
//! scrub what passes, and close the record.

use std::sync::Arc;

use ::http::{HeaderMap, Version};
use async_trait::async_trait;
use audit::{AttemptOutcome, DetectionFinding, Ending, FailureCode, FindingCode, FindingSeverity};
use bytes::Bytes;
use pingora_core::ErrorType;
use pingora_core::connectors::TransportConnector;
use pingora_core::prelude::{Error, HttpPeer, Result};
use pingora_core::protocols::Digest;
use pingora_core::upstreams::peer::Peer;
use pingora_http::{RequestHeader, ResponseHeader};
use pingora_proxy::{FailToProxy, ProxyHttp, ProxyWarnLogContext, Session};
use rules::budget::UsageKind;
use rules::facts::HttpVersion;
use rules::signals::shape::RequestOutcome;
use rules::{Facts, Permit, Reason, RuleSet, SandboxRef};

use super::canonical::{normalize_fields, strip_unlisted};
use super::chunks::ChunkFault;
use super::context::{DepartedRequest, DialledRequest, RequestContext, RequestState, internal};
use super::fields::{strip_forged, strip_hop_by_hop, strip_request, strip_request_hops, strip_trailers};
use super::outgoing::{BodyKind, OutgoingBody, has_type};
use super::request::{ParsedRequest, request_facts, request_record};
use super::scrub_fields::{ScrubOutcome, scrub_response, scrub_trailers};
use super::upgrade::is_websocket;
use super::{PacedBody, RequestMonitor, RequestScope};
use crate::credential::scrub::ResponseScrubber;
use crate::egress::connect::DialledConnection;
use crate::egress::departure::{Departure, DepartureTerms, LengthHold};
use crate::egress::sending::{SentFraming, describe_sending, normalize_framing};
use crate::egress::shared::{Shared, decide};
use crate::egress::upstream::{
    UpstreamOptions, check_answer_fields, check_interim_answers, head_bytes, host_header, http_peer,
    refusal_from_error, request_bytes, response_bytes,
};
use crate::inspect::{AttemptContent, RequestHead};
use crate::memory::{self, GuardMode, MemoryGuard, MemoryRequest};
use crate::quota::cost::{HELD_BYTES, SEARCH_BYTES};
use crate::report::refusal::{self, BodyAudience, Refusal, RefusalResponse};
use crate::report::{attempted, metrics, record};

/// Implements Pingora's phases.
pub(super) struct RequestFilter {
    pub(super) shared: Arc<Shared>,
    guard: Arc<MemoryGuard>,
    /// Connects for upgrades.
    pub(super) connector: TransportConnector,
}

impl RequestFilter {
    pub(super) fn new(shared: Arc<Shared>, guard: Arc<MemoryGuard>, connector: TransportConnector) -> Self {
        RequestFilter { shared, guard, connector }
    }

    /// Reserves what the request needs, before anything of it is decided or read.
    fn reserve(
        &self,
        session: &Session,
        state: &mut RequestState,
        sandbox: &SandboxRef,
    ) -> Result<(), Refusal> {
        let head = request_bytes(session.req_header());
        state.quota = Some(self.shared.quotas.reserve_request(&sandbox.id, head)?);
        Ok(())
    }

    /// Lets the memory guard handle the request.
    async fn handle_memory(
        &self,
        session: &mut Session,
        state: &mut RequestState,
        sandbox: &SandboxRef,
        mode: &GuardMode,
    ) -> Result<(), Refusal> {
        let record = state.record.as_mut().ok_or(Reason::Internal)?;
        let quota = state.quota.as_mut().ok_or(Reason::Internal)?;
        let connection = &state.monitor.connection;
        state.monitor.set_byte_count(record.byte_count());
        let facts = request_facts(session.req_header(), &state.monitor, &self.shared.limits)?.facts;
        let request = MemoryRequest {
            shared: &self.shared,
            sandbox,
            host: connection.host(),
            cut: &state.monitor.cut,
            rules: &state.rules,
            recorded: request_record(session.req_header(), &state.monitor),
            record,
            buffers: &mut quota.buffers,
            facts,
        };
        state.status = Some(self.guard.handle(session, mode, request).await?);
        Ok(())
    }

    /// Decides and departs. On success, Pingora may send the request to an admitted address.
    async fn authorize(
        &self,
        session: &mut Session,
        state: &mut RequestState,
        sandbox: &SandboxRef,
    ) -> Result<(), Refusal> {
        let (monitor, rules) = (&state.monitor, &state.rules);
        if session.req_header().headers.contains_key("trailer") {
            return Err(Refusal::from(Reason::BadRequest).with_detail(ChunkFault::Trailers));
        }
        let ParsedRequest { facts, connect } =
            request_facts(session.req_header(), monitor, &self.shared.limits)?;
        let record = state.record.as_mut().ok_or(Reason::Internal)?;
        let connected = connect.map_or(Ok(()), |facts| decide(rules, sandbox, &facts).map(drop));
        let facts = Facts::Request(facts);
        let permit = match connected.and_then(|()| decide(rules, sandbox, &facts)) {
            Ok(permit) => permit,
            Err(refusal) => {
                if let Facts::Request(request) = &facts {
                    let hosts = request.authorities.iter().map(|named| &named.host);
                    self.shared.inspect_refused(&sandbox.id, hosts, record).await;
                }
                return Err(refusal);
            }
        };
        monitor.connection.pin(permit.host());
        let credential = permit.credential().map(|name| self.shared.credentials.current(name));
        let credential = credential.transpose();
        let credential = credential.map_err(|refusal| refusal.under(&permit))?;
        monitor.set_byte_count(record.byte_count());
        let leaving = outgoing_head(session.req_header(), Some(&permit))?;
        let head = RequestHead::of(&leaving);
        let terms = DepartureTerms {
            upfront: request_bytes(session.req_header()),
            treatment: permit.treatment().as_str(),
            credential: permit.credential(),
            cut: monitor.cut.clone(),
            content: AttemptContent::Request(&head),
        };
        let body = if is_websocket(session) { None } else { content_length(session) };
        let quota = state.quota.as_mut().ok_or(Reason::Internal)?;
        quota.expect_upload(body).map_err(|refusal| refusal.under(&permit))?;
        if body != Some(0) && !session.is_upgrade_req() {
            monitor.set_paced(PacedBody::Request);
        }
        let departure = Departure::begin(&self.shared, rules, &permit, terms, record).await?;
        let mut departed = DepartedRequest::new(departure, credential)?;
        if body != Some(0) && !is_websocket(session) {
            let fields = &session.req_header().headers;
            let coding = fields.get("content-encoding").map(|coding| coding.as_bytes());
            let kind = BodyKind::of(body, fields);
            let inspection = &departed.departure.inspection;
            let inspector = inspection.body(coding);
            let needed = HELD_BYTES + if inspector.is_some() { SEARCH_BYTES as u64 } else { 0 };
            let quota = state.quota.as_mut().ok_or(Reason::Internal)?;
            let needed = body.map_or(needed, |length| length.min(needed));
            quota.buffers.grow(needed).map_err(|refusal| refusal.under(&permit))?;
            departed.body = Some(OutgoingBody::new(kind, inspector, inspection.signals()));
        }
        state.departed = Some(departed);
        Ok(())
    }

    /// Refuses the request, and responds unless a response has begun.
    async fn refuse(&self, session: &mut Session, state: &mut RequestState, refusal: &Refusal) {
        record_echo(state).await;
        if let RequestState { departed: Some(departed), record: Some(record), .. } = state {
            let outcome = departed.body_bytes;
            departed.departure.inspection.end_refused(outcome, record).await;
        }
        let Some(record) = state.record.take() else { return }; // already refused
        let accept = session.req_header().headers.get("accept").map(|value| value.as_bytes());
        let audience = BodyAudience::from_accept(accept);
        let attempted = Some(attempted::of_request(session.req_header()));
        let response = refusal::refuse(record, refusal, &state.rules, audience, attempted).await;
        state.status = Some(response.status);
        let interim = |status: u16| (100..200).contains(&status) && status != 101;
        let written = session.response_written().map(|written| written.status.as_u16());
        // A stream without quota must not wait for the client: without a body, its answer needs no window. An HTTP/1
        // request waits on its connection, which has its own reservation.
        let body = match (&state.quota, state.monitor.version) {
            (None, HttpVersion::Http2) => RefusalBody::Omitted,
            (Some(_), _) | (None, HttpVersion::Http1) => RefusalBody::Explained,
        };
        if written.is_none_or(interim) && respond(session, response, body).await.is_err() {
            session.set_keepalive(None); // the client went away
        }
    }
}

/// Whether the response of a refusal has a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RefusalBody {
    Explained,
    /// The fields alone give the reason.
    Omitted,
}

/// Writes the response of a refusal.
async fn respond(session: &mut Session, response: RefusalResponse, body: RefusalBody) -> Result<()> {
    let mut head = ResponseHeader::build(response.status, Some(8))?;
    for (name, value) in response.fields {
        head.insert_header(name, value)?;
    }
    head.insert_header("Cache-Control", "no-store")?;
    if body == RefusalBody::Omitted {
        head.insert_header("Content-Length", 0)?;
        return session.write_response_header(Box::new(head), true).await;
    }
    head.insert_header("Content-Type", response.kind)?;
    head.insert_header("Content-Length", response.body.len())?;
    session.write_response_header(Box::new(head), false).await?;
    session.write_response_body(Some(Bytes::from(response.body)), true).await
}

/// Records a finding if the origin server echoed an injected credential: the sandbox may have made it do so.
async fn record_echo(state: &RequestState) {
    let Some(departed) = &state.departed else { return };
    let echoed = departed.scrubber.as_ref().is_some_and(|scrubber| scrubber.echo_count() > 0);
    let Some(record) = state.record.as_ref().filter(|_| echoed) else { return };
    let name = departed.departure.permit().credential().map(ToString::to_string);
    let message = format!("Credential `{}` was masked in the response.", name.unwrap_or_default());
    let finding = DetectionFinding {
        code: FindingCode::CredentialEchoed,
        title: "The origin server echoed an injected credential".into(),
        severity: FindingSeverity::High,
        message: Some(message.into()),
        score: None,
        features: Vec::new(),
    };
    if let Err(down) = record.record_finding(&finding).await {
        tracing::warn!(%down, "cannot record a finding");
    }
}

#[async_trait]
impl ProxyHttp for RequestFilter {
    type CTX = RequestContext;

    fn new_ctx(&self) -> RequestContext {
        RequestContext::default()
    }

    /// Installs no modules, so that Pingora neither compresses responses nor adds `Accept-Encoding`.
    fn init_downstream_modules(&self, _: &mut pingora_core::modules::http::HttpModules) {}

    async fn request_filter(&self, session: &mut Session, request: &mut RequestContext) -> Result<bool> {
        let digest = session.digest().and_then(|digest| digest.proxy_digest.as_ref());
        let data = digest.and_then(|digest| digest.user_data.as_ref());
        let monitor = data.and_then(|data| data.downcast_ref::<Arc<RequestMonitor>>()).cloned();
        let monitor = monitor.ok_or_else(internal)?; // `RequestMonitor::digest` puts it into every session
        let recorded = request_record(session.req_header(), &monitor);
        let recorded = audit::RecordedFacts::Request(recorded);
        let rules = self.shared.rules.load_full(); // one snapshot, so one request sees one policy
        let (record, identified) = monitor.connection.open_request(&rules, recorded);
        let mode = identified.as_ref().ok().and_then(|sandbox| guard_mode(&rules, sandbox, &monitor));
        monitor.set_reached_filter();
        let (record, quota, departed) = (Some(record), None, None);
        let state = RequestState {
            monitor,
            rules,
            record,
            quota,
            departed,
            status: None,
            interim_answers: 0,
            upgraded: false,
            refusal: None,
        };
        let state = request.state.insert(state);
        let identified = identified.inspect_err(|_| session.set_keepalive(None));
        let admitted = identified.map_err(Refusal::from);
        let admitted = admitted.and_then(|sandbox| self.reserve(session, state, &sandbox).map(|()| sandbox));
        let done = match (admitted, &mode) {
            (Ok(sandbox), Some(mode)) => self.handle_memory(session, state, &sandbox, mode).await,
            (Ok(sandbox), None) => self.authorize(session, state, &sandbox).await,
            (Err(refusal), _) => Err(refusal),
        };
        match done {
            Ok(()) if mode.is_none() && is_websocket(session) => {
                self.upgrade(session, request).await?;
                Ok(true)
            }
            Ok(()) => Ok(mode.is_some()), // true ends the request here: the guard has responded
            Err(refusal) => {
                self.refuse(session, state, &refusal).await;
                Ok(true)
            }
        }
    }

    async fn upstream_peer(
        &self,
        session: &mut Session,
        request: &mut RequestContext,
    ) -> Result<Box<HttpPeer>> {
        let state = request.state()?;
        let monitor = state.monitor.clone();
        let options = UpstreamOptions {
            scheme: monitor.connection.scheme(),
            version: monitor.version,
            upgrade: is_websocket(session),
            http1_only: is_websocket(session),
            body: content_length(session),
        };
        let RequestState { departed: Some(departed), record: Some(record), .. } = state else {
            return Err(internal());
        };
        let DepartedRequest { departure, race, turn, .. } = departed;
        let address = race.first().ok_or_else(internal)?;
        let peer = http_peer(&self.shared, departure, race, options).ok_or_else(internal)?;
        if peer.options.alpn.get_max_http_version() == 2 {
            *turn = None; // of the address before this one
            *turn = Some(self.shared.dial_gates.turn(peer.reuse_hash()).await);
        }
        match departure.set_dialled(&self.shared, record, address) {
            Ok(()) => Ok(peer),
            Err(refusal) => Err(state.fail(refusal)),
        }
    }

    fn fail_to_connect(
        &self,
        _: &mut Session,
        _: &HttpPeer,
        request: &mut RequestContext,
        mut error: Box<Error>,
    ) -> Box<Error> {
        match request.state().and_then(RequestState::departed) {
            Ok(departed) => {
                if let Some(turn) = departed.turn.take() {
                    turn.open_to_all();
                }
                error.set_retry(departed.race.next_try());
                error
            }
            Err(internal) => internal,
        }
    }

    async fn connected_to_upstream(
        &self,
        _: &mut Session,
        reused: bool,
        _: &HttpPeer,
        _: std::os::fd::RawFd,
        digest: Option<&Digest>,
        request: &mut RequestContext,
    ) -> Result<()> {
        let state = request.state()?;
        let connection = DialledConnection::of(digest).ok_or_else(internal)?.clone();
        let RequestState { departed: Some(departed), record: Some(record), .. } = &mut *state else {
            return Err(internal());
        };
        let address = connection.address();
        if !departed.departure.dial_permit.addresses().contains(&address.ip()) {
            return Err(internal()); // the pool key says otherwise
        }
        let dialled = departed.departure.set_dialled(&self.shared, record, address);
        match dialled.and_then(|()| connection.claim()) {
            Ok(in_use) => departed.dialled = Some(DialledRequest { connection, in_use }),
            Err(refusal) => return Err(state.fail(refusal)),
        }
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
        upstream.remove_header("upgrade"); // `RequestFilter::upgrade` adds it again
        let state = request.state()?;
        let scheme = state.monitor.connection.scheme();
        let monitor = state.monitor.clone();
        let length = content_length(session);
        let framing = SentFraming::of_length(length);
        let departed = state.departed()?;
        departed.end_turn(upstream.version);
        if let Some(body) = &mut departed.body {
            body.restart(upstream.version); // Pingora may send a request again on another connection
            monitor.set_cut_body(body.is_cut());
        }
        departed.body_bytes = RequestOutcome::default();
        let permit = departed.departure.permit();
        if let Some(listed) = permit.signals().listed_fields() {
            strip_unlisted(upstream, listed);
        }
        if permit.is_credential_host() {
            upstream.remove_header("authorization"); // we choose the account, whichever rule matched
        }
        normalize_framing(upstream, framing)?;
        normalize_fields(upstream)?;
        let said = upstream.clone(); // by the sandbox: without what is set below
        let departed = state.departed()?;
        let permit = departed.departure.permit();
        // However the client spelt it, and although HTTP/1.0 may omit it.
        set_authority(upstream, &host_header(permit, scheme))?;
        if let Some(credential) = departed.credential.clone() {
            departed.scrubber = Some(ResponseScrubber::new(credential.echoes()));
            if credential.inject(upstream).is_err() {
                return Err(state.fail(Reason::CredentialUnavailable));
            }
        }
        if is_grpc(&upstream.headers) {
            // Pingora strips it as hop-by-hop; gRPC needs it. Always, so that its presence says nothing.
            upstream.insert_header("te", "trailers")?;
        }
        let port = departed.departure.permit().port();
        let sending = describe_sending(scheme, upstream.version, framing, port);
        let counted = departed.departure.count_send(request_bytes(upstream)).await;
        counted.map_err(|exhausted| state.fail(exhausted))?;
        let RequestState { departed: Some(departed), record: Some(record), .. } = &mut *state else {
            return Err(internal());
        };
        // A client may announce any length, and then break off.
        let open_bodies = departed.body.as_ref().map_or(1, OutgoingBody::open_bodies);
        departed.length_hold = match length {
            None | Some(0) => None,
            Some(length) => match departed.departure.hold_length(length, open_bodies).await {
                Ok(hold) => Some(hold),
                Err(refusal) => return Err(state.fail(refusal)),
            },
        };
        // Last, because it learns the request: one that does not leave must not make later ones cheaper.
        let charged = departed.departure.charge_head(&RequestHead::of(&said), &sending, record).await;
        if let Err(refusal) = charged {
            departed.length_hold.take().into_iter().for_each(LengthHold::refund);
            return Err(state.fail(refusal));
        }
        Ok(())
    }

    async fn request_body_filter(
        &self,
        _: &mut Session,
        body: &mut Option<Bytes>,
        last: bool,
        request: &mut RequestContext,
    ) -> Result<()> {
        let state = request.state()?;
        state.monitor.add_upload(body.as_ref().map_or(0, Bytes::len) as u64);
        if last {
            state.monitor.end_upload();
        }
        state.release_body(body, last).await?;
        let bytes = body.as_ref().map_or(&[][..], |bytes| bytes.as_ref());
        state.charge(UsageKind::Upload, bytes.len() as u64).await?;
        if let Some(record) = &state.record {
            record.byte_count().add_sent(bytes.len() as u64);
        }
        let sent = bytes.len() as u64;
        let departed = state.departed()?;
        departed.body_bytes.sent_bytes += sent;
        if last {
            departed.length_hold.take().into_iter().for_each(LengthHold::refund);
        }
        Ok(())
    }

    async fn response_filter(
        &self,
        _: &mut Session,
        response: &mut ResponseHeader,
        request: &mut RequestContext,
    ) -> Result<()> {
        let state = request.state()?;
        let unrequested = response.status == 101 && !state.upgraded;
        if unrequested || !is_framed(response) {
            return Err(Error::new_up(ErrorType::InvalidHTTPHeader));
        }
        let received = response_bytes(response);
        strip_forged(response);
        let switched = response.status == ::http::StatusCode::SWITCHING_PROTOCOLS;
        // 101 is informational by its number, but it is the last head of the response.
        let interim = response.status.is_informational() && !switched;
        state.interim_answers += u64::from(interim);
        let limits = &self.shared.limits;
        let checked = check_answer_fields(&response.headers, limits)
            .and_then(|()| check_interim_answers(state.interim_answers, limits));
        checked.map_err(|refusal| state.fail(refusal))?;
        if let Some(scrubber) = state.scrubber()
            && scrub_response(response, scrubber)? == ScrubOutcome::Unreadable
        {
            return Err(state.fail(Reason::AnswerUnreadable));
        }
        state.count_received(received).await?;
        let departed = state.departed()?;
        departed.body_bytes.unchanged = response.status == ::http::StatusCode::NOT_MODIFIED;
        departed.departure.inspection.learn_answer(&response.headers);
        if !switched {
            strip_hop_by_hop(response);
        }
        let carries_trailers =
            state.monitor.version == HttpVersion::Http2 && response.version == Version::HTTP_2;
        if !carries_trailers {
            response.remove_header("trailer"); // Pingora drops what it announces
        }
        response.remove_header("alt-svc"); // points clients at another address or port of the host
        state.monitor.set_answered();
        if !interim {
            state.status = Some(response.status.as_u16());
            let length = response.headers.get("content-length").and_then(|length| length.to_str().ok());
            let length = length.and_then(|length| length.parse().ok()).filter(|_| !switched);
            let paced = if length.is_some() { PacedBody::Response } else { PacedBody::None };
            state.monitor.set_paced(paced);
            if switched {
                state.monitor.set_switched();
            }
            let reserved = state.quota.as_mut().map_or(Ok(()), |quota| quota.expect_download(length));
            reserved.map_err(|refusal| state.fail(refusal))?;
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
        let state = request.state()?;
        if let Some(scrubber) = state.scrubber() {
            let scrubbed = scrubber.scrub(body.as_ref(), last);
            *body = (!scrubbed.is_empty() || body.is_some()).then_some(scrubbed);
        }
        let bytes = body.as_ref().map_or(0, Bytes::len) as u64;
        state.charge_blocking(UsageKind::Download, bytes)?;
        if let Some(record) = &state.record {
            record.byte_count().add_received(bytes);
        }
        state.departed()?.body_bytes.received_bytes += bytes;
        Ok(None)
    }

    async fn response_trailer_filter(
        &self,
        _: &mut Session,
        trailers: &mut HeaderMap,
        request: &mut RequestContext,
    ) -> Result<Option<Bytes>> {
        strip_trailers(trailers);
        let state = request.state()?;
        let rest = state.scrubber().map(|scrubber| scrub_trailers(trailers, scrubber));
        let bytes = head_bytes(trailers) + rest.as_ref().map_or(0, Bytes::len) as u64;
        let checked =
            check_answer_fields(trailers, &self.shared.limits).map_err(|refusal| state.fail(refusal));
        if checked.is_err() || state.count_received(bytes).await.is_err() {
            trailers.clear(); // Pingora forwards them even if this phase fails
            if let Some(refusal) = &state.refusal {
                state.monitor.cut.trigger(refusal.reason);
            }
            return Ok(None);
        }
        // Pingora forwards either these bytes or the trailers, not both. A complete body matters more.
        Ok(rest.filter(|rest| !rest.is_empty()))
    }

    async fn fail_to_proxy(
        &self,
        session: &mut Session,
        error: &Error,
        request: &mut RequestContext,
    ) -> FailToProxy {
        session.set_keepalive(None);
        let Ok(state) = request.state() else {
            return FailToProxy { error_code: 0, can_reuse_downstream: false };
        };
        let malformed = state.monitor.body_refusal();
        let refusal = malformed.or_else(|| state.refusal.take());
        match refusal.or_else(|| refusal_from_error(error)) {
            Some(refusal) => {
                tracing::debug!(%error, "request failed");
                let refusal = match &state.departed {
                    Some(departed) => refusal.under(departed.departure.permit()),
                    None => refusal,
                };
                self.refuse(session, state, &refusal).await;
            }
            None => state.monitor.set_broken(),
        }
        FailToProxy { error_code: state.status.unwrap_or_default(), can_reuse_downstream: false }
    }

    async fn logging(&self, _: &mut Session, error: Option<&Error>, request: &mut RequestContext) {
        let Ok(state) = request.state() else { return };
        record_echo(state).await;
        let Some(record) = state.record.take() else { return };
        let ending = match (error, state.refusal.take()) {
            (_, Some(refusal)) => record::cut_ending(refusal.reason), // from `response_trailer_filter`
            (None, None) => Ending::Completed,
            (Some(_), None) => Ending::Failed(FailureCode::ClientGone.into()),
        };
        metrics::count_bytes(&record.byte_count());
        if let Some(departed) = &mut state.departed {
            let outcome = departed.body_bytes;
            departed.departure.inspection.end(outcome, &record).await;
        }
        record.close(AttemptOutcome { status: state.status, ..AttemptOutcome::new(ending) });
        state.departed = None; // no longer live
    }

    fn suppress_error_log(&self, _: &Session, _: &RequestContext, _: &Error) -> bool {
        true // the record and the metrics have it
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

/// Returns the head of a request with the fields that leave, in the order in which they do, without those of ours.
pub(crate) fn outgoing_head(
    request: &RequestHeader,
    permit: Option<&Permit>,
) -> Result<RequestHeader, Refusal> {
    let mut head = request.clone();
    strip_request_hops(&mut head);
    strip_request(&mut head);
    if permit.is_some_and(Permit::is_credential_host) {
        head.remove_header("authorization");
    }
    if let Some(listed) = permit.and_then(|permit| permit.signals().listed_fields()) {
        strip_unlisted(&mut head, listed);
    }
    normalize_fields(&mut head).map_err(|_| Refusal::from(Reason::BadRequest))?;
    Ok(head)
}

/// Names the host in the one way that Sandbar spells it: letter case and a dot at its end could carry a message.
fn set_authority(upstream: &mut RequestHeader, authority: &str) -> Result<()> {
    let named = upstream.uri.authority().is_some();
    if !named || upstream.headers.contains_key("host") {
        upstream.insert_header("Host", authority)?;
    }
    if !named {
        return Ok(());
    }
    let mut parts = upstream.uri.clone().into_parts();
    parts.authority = authority.parse().ok();
    if let Ok(uri) = ::http::Uri::from_parts(parts) {
        upstream.set_uri(uri);
    }
    Ok(())
}

/// Whether client and server exchange messages within one request, with trailers.
fn is_grpc(fields: &HeaderMap) -> bool {
    has_type(fields, b"application/grpc") && !has_type(fields, b"application/grpc-web")
}

/// Whether the response's framing is unambiguous: `chunked` is the only transfer coding that marks the end (RFC 9112,
/// section 6.3).
fn is_framed(response: &ResponseHeader) -> bool {
    let mut codings = response.headers.get_all("transfer-encoding").iter();
    let chunked = codings.next().is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"));
    chunked && codings.next().is_none()
}

/// The body length that the request announces, or none if it is chunked.
fn content_length(session: &mut Session) -> Option<u64> {
    let head = session.req_header();
    let length = head.headers.get("content-length").and_then(|length| length.to_str().ok());
    match length {
        Some(length) => length.parse().ok(),
        None => session.as_mut().is_body_empty().then_some(0),
    }
}

/// How the memory guard treats this request, or none if it is not one for a memory service.
fn guard_mode(rules: &RuleSet, sandbox: &SandboxRef, monitor: &RequestMonitor) -> Option<GuardMode> {
    match &monitor.connection.scope {
        RequestScope::Host(host, port) => memory::guard_mode(rules, sandbox, host, *port),
        RequestScope::Anywhere | RequestScope::Target(..) => None,
    }
}
