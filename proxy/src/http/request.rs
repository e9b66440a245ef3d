//! A request's facts, for the decision and for the record.

use pingora_http::{RequestHeader, Version};
use rules::facts::{
    Authority, ConnectFacts, Facts, Method, Protocol, RequestFacts, Scheme, Target,
};
use rules::limits::Limits;
use rules::{Host, Reason};

use super::{Exchange, Scope};
use crate::report::record;
use crate::report::refusal::Refusal;

/// What a request says of itself.
pub(super) struct Said {
    pub(super) facts: RequestFacts,
    /// Everything it must pass as a connection, where it names its host itself.
    pub(super) connect: Option<Facts>,
}

/// Reads what a request says; whatever is unclear is refused.
pub(super) fn said(
    head: &RequestHeader,
    exchange: &Exchange,
    limits: &Limits,
) -> Result<Said, Refusal> {
    within(head, limits)?;
    let connection = &exchange.connection;
    let authorities = authorities(head)?;
    let method = Method::parse(head.method.as_str()).map_err(|_| Reason::BadMethod)?;
    let path = head.uri.path().to_owned();
    let named = authorities.first();
    let (port, connect) = match &connection.scope {
        Scope::Anywhere => {
            let first = named.ok_or(Reason::NameMissing)?;
            let port = first.port.unwrap_or(connection.port());
            (port, Some(plain(Target::Named(first.host.clone()), port, named)))
        }
        Scope::Host(_, port) => (*port, None),
        Scope::Target(target, port) => (*port, Some(plain(target.clone(), *port, named))),
    };
    let facts = RequestFacts {
        connection: connection.host().or(promised(&connection.scope)).cloned(),
        authorities,
        port,
        scheme: connection.scheme(),
        version: exchange.version,
        method,
        path,
    };
    Ok(Said { facts, connect })
}

/// HTTP/1 heads were checked as they came; this holds for HTTP/2 alike.
fn within(head: &RequestHeader, limits: &Limits) -> Result<(), Reason> {
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
fn promised(scope: &Scope) -> Option<&Host> {
    match scope {
        Scope::Host(host, _) | Scope::Target(Target::Named(host), _) => Some(host),
        Scope::Anywhere | Scope::Target(Target::Dialled(_), _) => None,
    }
}

/// A request without TLS must also pass as the connection it needs.
fn plain(target: Target, port: u16, named: Option<&Authority>) -> Facts {
    let protocol = Protocol::Http { host: named.map(|named| named.host.clone()) };
    Facts::Connect(ConnectFacts { target, port, protocol })
}

/// Every authority it names: `:authority` or the target's, and `Host`.
fn authorities(head: &RequestHeader) -> Result<Vec<Authority>, Refusal> {
    let bad = |error| Refusal::from(Reason::BadName).because(error);
    let mut all = Vec::with_capacity(2);
    if let Some(authority) = head.uri.authority() {
        all.push(Authority::parse(authority.as_str()).map_err(bad)?);
    }
    for host in head.headers.get_all("host") {
        let host = host.to_str().map_err(|_| Reason::BadName)?;
        all.push(Authority::parse(host).map_err(bad)?);
    }
    Ok(all)
}

/// The port it goes to: it says so itself where the connection does not.
fn port(head: &RequestHeader, exchange: &Exchange) -> u16 {
    let connection = &exchange.connection;
    let named = match connection.scope {
        Scope::Anywhere => authorities(head).ok().and_then(|all| all.first()?.port),
        Scope::Host(..) | Scope::Target(..) => None,
    };
    named.unwrap_or(connection.port())
}

/// The request in the log's words, whether it could be read or not.
pub(super) fn told(head: &RequestHeader, exchange: &Exchange) -> audit::Request {
    let connection = &exchange.connection;
    let named = head.uri.authority().map(|authority| authority.host());
    let field = |name: &str| head.headers.get(name).map(|value| value.as_bytes());
    let said = String::from_utf8_lossy(field("host").unwrap_or_default());
    let host = match (connection.host(), named, Authority::parse(&said)) {
        (Some(host), ..) => record::host(host),
        (None, Some(named), _) => named.into(),
        (None, None, Ok(said)) => record::host(&said.host),
        (None, None, Err(_)) => said.as_ref().into(),
    };
    let scheme = match connection.scheme() {
        Scheme::Http => audit::Scheme::Http,
        Scheme::Https => audit::Scheme::Https,
    };
    let (method, target) = (head.method.as_str().as_bytes(), head.raw_path());
    let mut told = audit::Request::new(method, scheme, host, port(head, exchange), target);
    told.version = Some(if head.version == Version::HTTP_2 { "2" } else { "1.1" }.into());
    told.user_agent = field("user-agent").map(audit::Text::from_bytes);
    told.length = field("content-length")
        .and_then(|length| std::str::from_utf8(length).ok())
        .and_then(|length| length.parse().ok());
    told
}
