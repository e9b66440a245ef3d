//! A request's facts, for the decision and for the record.

use pingora_http::{RequestHeader, Version};
use rules::facts::{
    ConnectFacts, ConnectTarget, Facts, HttpMethod, Protocol, RequestAuthority, RequestFacts, UrlScheme,
};
use rules::limits::TrafficLimits;
use rules::{Host, Reason};

use super::{RequestMonitor, RequestScope};
use crate::report::record;
use crate::report::refusal::Refusal;

/// The facts of a request.
pub(super) struct ParsedRequest {
    pub(super) facts: RequestFacts,
    /// The connection it needs, which must be permitted too. None in TLS, where it was decided before.
    pub(super) connect: Option<Facts>,
}

/// Extracts the facts of a request, and refuses one that is malformed.
pub(super) fn request_facts(
    head: &RequestHeader,
    monitor: &RequestMonitor,
    limits: &TrafficLimits,
) -> Result<ParsedRequest, Refusal> {
    check_head_size(head, limits)?;
    let connection = &monitor.connection;
    let authorities = parse_authorities(head)?;
    let method = HttpMethod::parse(head.method.as_str()).map_err(|_| Reason::BadMethod)?;
    let path = head.uri.path().to_owned();
    let named = authorities.first();
    let (port, connect) = match &connection.scope {
        RequestScope::Anywhere => {
            let first = named.ok_or(Reason::NameMissing)?;
            let port = first.port.unwrap_or(connection.port());
            (port, Some(connect_facts(ConnectTarget::Named(first.host.clone()), port, named)))
        }
        RequestScope::Host(_, port) => (*port, None),
        RequestScope::Target(target, port) => (*port, Some(connect_facts(target.clone(), *port, named))),
    };
    let facts = RequestFacts {
        connection: connection.host().or(connection_host(&connection.scope)).cloned(),
        authorities,
        port,
        scheme: connection.scheme(),
        version: monitor.version,
        method,
        path,
    };
    Ok(ParsedRequest { facts, connect })
}

/// Applies the limits on heads. HTTP/1 heads were checked when they were read; HTTP/2 heads only here.
fn check_head_size(head: &RequestHeader, limits: &TrafficLimits) -> Result<(), Reason> {
    let bytes: usize = head.headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    let target = head.raw_path().len();
    if head.headers.len() as u64 > limits.head_fields || (bytes + target) as u64 > limits.head_bytes {
        return Err(Reason::HeadTooLarge);
    }
    if head.headers.get_all("content-length").iter().count() > 1 {
        return Err(Reason::BadRequest);
    }
    Ok(())
}

/// The host for which the client opened the connection by name, whatever its requests name.
fn connection_host(scope: &RequestScope) -> Option<&Host> {
    match scope {
        RequestScope::Host(host, _) | RequestScope::Target(ConnectTarget::Named(host), _) => Some(host),
        RequestScope::Anywhere | RequestScope::Target(ConnectTarget::Dialled(_), _) => None,
    }
}

/// The facts of the connection that a request without TLS needs.
fn connect_facts(target: ConnectTarget, port: u16, named: Option<&RequestAuthority>) -> Facts {
    let protocol = Protocol::Http { host: named.map(|named| named.host.clone()) };
    Facts::Connect(ConnectFacts { target, port, protocol })
}

/// Parses every authority that a request names: `:authority` or the target's, and `Host`.
fn parse_authorities(head: &RequestHeader) -> Result<Vec<RequestAuthority>, Refusal> {
    let bad = |error| Refusal::from(Reason::BadName).with_detail(error);
    let mut all = Vec::with_capacity(2);
    if let Some(authority) = head.uri.authority() {
        all.push(RequestAuthority::parse(authority.as_str()).map_err(bad)?);
    }
    for host in head.headers.get_all("host") {
        let host = host.to_str().map_err(|_| Reason::BadName)?;
        all.push(RequestAuthority::parse(host).map_err(bad)?);
    }
    Ok(all)
}

/// The destination port: the connection's, or on a forward proxy connection the request's own.
fn request_port(head: &RequestHeader, monitor: &RequestMonitor) -> u16 {
    let connection = &monitor.connection;
    let named = match connection.scope {
        RequestScope::Anywhere => parse_authorities(head).ok().and_then(|all| all.first()?.port),
        RequestScope::Host(..) | RequestScope::Target(..) => None,
    };
    named.unwrap_or(connection.port())
}

/// Describes a request for its record, even if its facts are malformed.
pub(super) fn request_record(head: &RequestHeader, monitor: &RequestMonitor) -> audit::RecordedRequest {
    let connection = &monitor.connection;
    let named = head.uri.authority().map(|authority| authority.host());
    let field = |name: &str| head.headers.get(name).map(|value| value.as_bytes());
    let host_field = String::from_utf8_lossy(field("host").unwrap_or_default());
    let host = match (connection.host(), named, RequestAuthority::parse(&host_field)) {
        (Some(host), ..) => record::host(host),
        (None, Some(named), _) => named.into(),
        (None, None, Ok(authority)) => record::host(&authority.host),
        (None, None, Err(_)) => host_field.as_ref().into(),
    };
    let scheme = match connection.scheme() {
        UrlScheme::Http => audit::HttpScheme::Http,
        UrlScheme::Https => audit::HttpScheme::Https,
    };
    let (method, target) = (head.method.as_str().as_bytes(), head.raw_path());
    let mut recorded = audit::RecordedRequest::new(method, scheme, host, request_port(head, monitor), target);
    recorded.version = Some(if head.version == Version::HTTP_2 { "2" } else { "1.1" }.into());
    recorded.user_agent = field("user-agent").map(audit::Text::from_bytes);
    recorded.length = field("content-length")
        .and_then(|length| std::str::from_utf8(length).ok())
        .and_then(|length| length.parse().ok());
    recorded
}
