//! How Pingora reaches an origin server: an admitted address, under the decided name, verified as such; and what its errors
//! mean.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ::http::HeaderMap;
use pingora_core::prelude::{Error, HttpPeer};
use pingora_core::protocols::ALPN;
use pingora_core::upstreams::peer::PeerOptions;
use pingora_core::{ErrorSource, ErrorType};
use pingora_http::{RequestHeader, ResponseHeader};
use rules::facts::{HttpVersion, UrlScheme};
use rules::ids::SandboxId;
use rules::limits::TrafficLimits;
use rules::sandbox::Sandbox;
use rules::{Host, Permit, Reason};

use crate::egress::connect::{http2_windows, refusal_of_dial};
use crate::egress::departure::Departure;
use crate::egress::dial::DialRace;
use crate::egress::shared::Shared;
use crate::report::refusal::Refusal;

/// Concurrent streams on one HTTP/2 connection to an origin server.
const MAX_STREAMS: usize = 100;
/// A body up to this many bytes is sent before the read timeout matters.
const SMALL_BODY: u64 = 1 << 20;

/// How a request is sent upstream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpstreamOptions {
    pub(crate) scheme: UrlScheme,
    pub(crate) version: HttpVersion,
    /// The request asks to switch to WebSocket, which only HTTP/1 can.
    pub(crate) upgrade: bool,
    /// HTTP/2 must not be negotiated.
    pub(crate) http1_only: bool,
    /// Bytes of body that the request announces, if it does.
    pub(crate) body: Option<u64>,
}

/// The peer of a departure, to which the addresses of `race` are dialled.
pub(crate) fn http_peer(
    shared: &Shared,
    departure: &Departure,
    race: &DialRace,
    options: UpstreamOptions,
) -> Option<Box<HttpPeer>> {
    // Pingora wants one address. It is part of the pool key, so it must not depend on the order of the addresses.
    let mut admitted = departure.dial_permit.addresses().to_vec();
    admitted.sort_unstable();
    let address = SocketAddr::new(*admitted.first()?, departure.permit().port()?);
    let tls = options.scheme == UrlScheme::Https;
    // An empty name would turn verification off; a host always has one.
    let name = match departure.permit().host() {
        Host::Address(address) => address.to_string(),
        Host::Name(name) => name.as_str().to_owned(),
    };
    let mut peer = HttpPeer::new(address, tls, name);
    peer.group_key = pool_group(shared, departure.permit(), &admitted);
    peer.options = peer_options(shared, departure.permit().sandbox(), race, options);
    peer.options.total_connection_timeout = Some(shared.limits.connect());
    Some(Box::new(peer))
}

fn alpn(options: UpstreamOptions) -> ALPN {
    match (options.scheme, options.version) {
        _ if options.http1_only => ALPN::H1,
        (UrlScheme::Https, _) => ALPN::H2H1,
        (UrlScheme::Http, HttpVersion::Http1) => ALPN::H1,
        (UrlScheme::Http, HttpVersion::Http2) => ALPN::H2,
    }
}

fn peer_options(
    shared: &Shared,
    sandbox: &SandboxId,
    race: &DialRace,
    wanted: UpstreamOptions,
) -> PeerOptions {
    let limits = &shared.limits;
    let mut options = PeerOptions::new();
    options.alpn = alpn(wanted);
    options.verify_cert = true;
    options.verify_hostname = true;
    options.max_h2_streams = MAX_STREAMS;
    options.write_timeout = Some(limits.idle());
    options.idle_timeout = Some(limits.keep_alive());
    let small = wanted.body.is_some_and(|length| length <= SMALL_BODY) && !wanted.upgrade;
    options.read_timeout = small.then(|| limits.first_byte().max(limits.idle()));
    let window = match options.alpn.get_max_http_version() {
        2 => {
            let (connection, stream) = http2_windows(&shared.quotas, sandbox);
            options.h2_connection_window_size = Some(connection);
            options.h2_stream_window_size = Some(stream);
            u64::from(connection)
        }
        _ => 0,
    };
    options.custom_l4 = Some(Arc::new(shared.dialler(sandbox, race.clone(), window)));
    options
}

/// The pool key: connections are shared within the sandbox that the permit was given to, while its identity lasts.
/// Pingora's own key knows neither the sandbox nor our mark, and only one address. A connection may be to any of the
/// admitted ones, so a request must admit the same to use it. Some origin servers authenticate the connection with its
/// first request, so requests with other credentials, or none, have connections of their own.
fn pool_group(shared: &Shared, permit: &Permit, admitted: &[IpAddr]) -> u64 {
    let Sandbox { id, tenant, environment, agent_card: _, generation } = &**permit.holder();
    let mut hasher = DefaultHasher::new();
    (id, tenant, environment, generation, permit.credentials()).hash(&mut hasher);
    (shared.mark, admitted).hash(&mut hasher);
    hasher.finish()
}

/// The `Host` field for the decided host and port, without the scheme's default port.
pub(crate) fn host_header(permit: &Permit, scheme: UrlScheme) -> String {
    let host = match permit.host() {
        Host::Address(address @ IpAddr::V6(_)) => format!("[{address}]"),
        Host::Address(address) => address.to_string(),
        Host::Name(name) => name.to_string(),
    };
    match (permit.port(), scheme) {
        (None, _) | (Some(443), UrlScheme::Https) | (Some(80), UrlScheme::Http) => host,
        (Some(port), _) => format!("{host}:{port}"),
    }
}

/// The refusal for a Pingora error; none if the client went away.
pub(crate) fn refusal_from_error(error: &Error) -> Option<Refusal> {
    if let Some(refusal) = refusal_of_dial(error) {
        return Some(refusal);
    }
    let reason = match (error.esource(), error.etype()) {
        (ErrorSource::Downstream, ErrorType::InvalidHTTPHeader | ErrorType::H1Error) => Reason::BadRequest,
        // The client owes the rest of its body: nothing else is read from it while a request is under way.
        (ErrorSource::Downstream, ErrorType::ReadTimedout) => Reason::BodyLate,
        (ErrorSource::Downstream, _) => return None,
        (_, ErrorType::InternalError) => Reason::Internal,
        (_, ErrorType::ConnectTimedout | ErrorType::ReadTimedout | ErrorType::WriteTimedout) => {
            Reason::UpstreamTimeout
        }
        (_, ErrorType::InvalidCert | ErrorType::TLSHandshakeFailure | ErrorType::HandshakeError) => {
            Reason::UpstreamCertificate
        }
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

/// Detail for the operator. Once connected, report only the kind of error: Pingora's messages quote bytes of the origin
/// server, which may contain secrets.
fn error_detail(reason: Reason, error: &Error) -> String {
    if reason == Reason::UpstreamUnreachable {
        return error.root_cause().to_string();
    }
    let certificate = error.context.as_ref().filter(|_| reason == Reason::UpstreamCertificate);
    let innermost = certificate.and_then(|context| context.as_str().rsplit_once("cause: "));
    let innermost = innermost.and_then(|(_, cause)| cause.split(", SNI: ").next());
    innermost.unwrap_or(error.root_etype().as_str()).to_owned()
}

/// Refuses a response head, or trailers, beyond their limits. HTTP/2 compresses heads: a few kilobytes can stand for
/// megabytes, which an HTTP/1 client would be sent in full.
pub(crate) fn check_answer_fields(head: &HeaderMap, limits: &TrafficLimits) -> Result<(), Refusal> {
    let (bytes, fields) = (head_bytes(head), head.len() as u64);
    if bytes <= limits.answer_head_bytes && fields <= limits.answer_head_fields {
        return Ok(());
    }
    let detail = format!(
        "{fields} fields of {bytes} bytes; {} fields of {} bytes are allowed",
        limits.answer_head_fields, limits.answer_head_bytes
    );
    Err(Refusal::from(Reason::AnswerTooLarge).with_detail(detail))
}

/// Refuses an origin server that sends interim responses instead of an answer.
pub(crate) fn check_interim_answers(count: u64, limits: &TrafficLimits) -> Result<(), Refusal> {
    if count <= limits.interim_answers {
        return Ok(());
    }
    let detail = format!("more than {} interim responses", limits.interim_answers);
    Err(Refusal::from(Reason::AnswerTooLarge).with_detail(detail))
}

/// Bytes of the fields of a head: they carry data as bodies do.
pub(crate) fn head_bytes(fields: &HeaderMap) -> u64 {
    fields.iter().map(|(name, value)| (name.as_str().len() + value.len() + 4) as u64).sum()
}

/// Bytes of a request's head as HTTP/1 text, whatever its version. HTTP/2 says in `:authority` what HTTP/1 says in
/// `Host`.
pub(crate) fn request_bytes(head: &RequestHeader) -> u64 {
    const FIXED: usize = "  HTTP/1.1\r\n\r\n".len();
    let target = head.uri.path_and_query().map_or(0, |target| target.as_str().len());
    let unnamed = !head.headers.contains_key("host");
    let authority = head.uri.authority().filter(|_| unnamed);
    let authority = authority.map_or(0, |authority| "host: \r\n".len() + authority.as_str().len());
    head_bytes(&head.headers) + (FIXED + head.method.as_str().len() + target + authority) as u64
}

/// Bytes of a response's head as HTTP/1 text, whatever its version. The origin server chooses the reason phrase and how
/// many interim responses it sends, so they count too.
pub(crate) fn response_bytes(head: &ResponseHeader) -> u64 {
    const FIXED: usize = "HTTP/1.1 200 \r\n\r\n".len();
    head_bytes(&head.headers) + (FIXED + head.get_reason_phrase().map_or(0, str::len)) as u64
}
