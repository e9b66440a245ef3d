//! A request's facts, for the decision and for the record.

use pingora_http::{RequestHeader, Version};
use rules::facts::{
    ConnectFacts, ConnectTarget, Facts, HttpMethod, Protocol, RequestAuthority, RequestFacts,
    UrlScheme,
};
use rules::limits::TrafficLimits;
use rules::{Host, Reason};

use super::{RequestMonitor, RequestScope};
use crate::report::record;
use crate::report::refusal::Refusal;

/// What a request says of itself.
pub(super) struct ParsedRequest {
    pub(super) facts: RequestFacts,
    /// Everything it must pass as a connection, where it names its host itself.
    pub(super) connect: Option<Facts>,
}

/// Reads what a request says; whatever is unclear is refused.
pub(super) fn request_facts(
    head: &RequestHeader,
    exchange: &RequestMonitor,
    limits: &TrafficLimits,
) -> Result<ParsedRequest, Refusal> {
    check_head_size(head, limits)?;
    let connection = &exchange.connection;
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
        RequestScope::Target(target, port) => {
            (*port, Some(connect_facts(target.clone(), *port, named)))
        }
    };
    let facts = RequestFacts {
        connection: connection.host().or(connection_host(&connection.scope)).cloned(),
        authorities,
        port,
        scheme: connection.scheme(),
        version: exchange.version,
        method,
        path,
    };
    Ok(ParsedRequest { facts, connect })
}

/// HTTP/1 heads were checked as they came; this holds for HTTP/2 alike.
fn check_head_size(head: &RequestHeader, limits: &TrafficLimits) -> Result<(), Reason> {
    let bytes: usize =
        head.headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    let target = head.raw_path().len();
    if head.headers.len() as u64 > limits.head_fields || (bytes + target) as u64 > limits.head_bytes
    {
        return Err(Reason::HeadTooLarge);
    }
    if head.headers.get_all("content-length").iter().count() > 1 {
        return Err(Reason::BadRequest);
    }
    Ok(())
}

/// The host a connection was opened for by name, whatever its requests say.
fn connection_host(scope: &RequestScope) -> Option<&Host> {
    match scope {
        RequestScope::Host(host, _) | RequestScope::Target(ConnectTarget::Named(host), _) => {
            Some(host)
        }
        RequestScope::Anywhere | RequestScope::Target(ConnectTarget::Dialled(_), _) => None,
    }
}

/// A request without TLS must also pass as the connection it needs.
fn connect_facts(target: ConnectTarget, port: u16, named: Option<&RequestAuthority>) -> Facts {
    let protocol = Protocol::Http { host: named.map(|named| named.host.clone()) };
    Facts::Connect(ConnectFacts { target, port, protocol })
}

/// Every authority it names: `:authority` or the target's, and `Host`.
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

/// The port it goes to: it says so itself where the connection does not.
fn request_port(head: &RequestHeader, exchange: &RequestMonitor) -> u16 {
    let connection = &exchange.connection;
    let named = match connection.scope {
        RequestScope::Anywhere => parse_authorities(head).ok().and_then(|all| all.first()?.port),
        RequestScope::Host(..) | RequestScope::Target(..) => None,
    };
    named.unwrap_or(connection.port())
}

/// The request in the log's words, whether it could be read or not.
pub(super) fn request_record(
    head: &RequestHeader,
    exchange: &RequestMonitor,
) -> audit::RecordedRequest {
    let connection = &exchange.connection;
    let named = head.uri.authority().map(|authority| authority.host());
    let field = |name: &str| head.headers.get(name).map(|value| value.as_bytes());
    let said = String::from_utf8_lossy(field("host").unwrap_or_default());
    let host = match (connection.host(), named, RequestAuthority::parse(&said)) {
        (Some(host), ..) => record::host(host),
        (None, Some(named), _) => named.into(),
        (None, None, Ok(said)) => record::host(&said.host),
        (None, None, Err(_)) => said.as_ref().into(),
    };
    let scheme = match connection.scheme() {
        UrlScheme::Http => audit::HttpScheme::Http,
        UrlScheme::Https => audit::HttpScheme::Https,
    };
    let (method, target) = (head.method.as_str().as_bytes(), head.raw_path());
    let mut told =
        audit::RecordedRequest::new(method, scheme, host, request_port(head, exchange), target);
    told.version = Some(if head.version == Version::HTTP_2 { "2" } else { "1.1" }.into());
    told.user_agent = field("user-agent").map(audit::Text::from_bytes);
    told.length = field("content-length")
        .and_then(|length| std::str::from_utf8(length).ok())
        .and_then(|length| length.parse().ok());
    told
}
