//! Host agreement (P6): CONNECT host, SNI, Host and `:authority` must name one host, or the attempt is refused.

use crate::facts::{ConnectFacts, ConnectTarget, Facts, HttpVersion, Protocol, RequestFacts};
use crate::name::Host;
use crate::reason::Reason;

/// Returns the one host that everything visible in the attempt names.
pub(crate) fn agreed_host(facts: &Facts) -> Result<Host, Reason> {
    match facts {
        Facts::Connect(facts) => connection_host(facts),
        Facts::Memory(facts) => request_host(&facts.request),
        Facts::Name(facts) => Ok(Host::Name(facts.name.clone())),
        Facts::Request(facts) => request_host(facts),
    }
}

fn connection_host(facts: &ConnectFacts) -> Result<Host, Reason> {
    match (&facts.target, &facts.protocol) {
        (_, Protocol::Tls { sni: Some(Host::Address(_)), .. }) => Err(Reason::AddressAsSni),
        (ConnectTarget::Named(Host::Name(_)), Protocol::Tls { sni: None, .. }) => Err(Reason::NameMissing),
        (ConnectTarget::Named(host), Protocol::Raw) => Ok(host.clone()),
        (ConnectTarget::Named(host), Protocol::Http { host: seen } | Protocol::Tls { sni: seen, .. }) => {
            require_same(host, seen.iter())
        }
        (
            ConnectTarget::Dialled(_),
            Protocol::Http { host: Some(seen @ Host::Name(_)) } | Protocol::Tls { sni: Some(seen), .. },
        ) => Ok(seen.clone()),
        (ConnectTarget::Dialled(address), Protocol::Http { host: seen }) => {
            require_same(&Host::from(*address), seen.iter())
        }
        (ConnectTarget::Dialled(address), Protocol::Raw | Protocol::Tls { sni: None, .. }) => {
            Ok(Host::from(*address))
        }
    }
}

fn require_same<'a>(host: &Host, mut seen: impl Iterator<Item = &'a Host>) -> Result<Host, Reason> {
    if seen.all(|other| other == host) { Ok(host.clone()) } else { Err(Reason::NamesDisagree) }
}

/// Returns the host of a request, whose every authority must be the connection's host and port.
fn request_host(facts: &RequestFacts) -> Result<Host, Reason> {
    let named = facts.connection.as_ref().or_else(|| facts.authorities.first().map(|first| &first.host));
    let host = named.ok_or(Reason::NameMissing)?;
    let same = |port: Option<u16>| port.is_none_or(|port| port == facts.port);
    if facts.authorities.iter().all(|authority| authority.host == *host && same(authority.port)) {
        return Ok(host.clone());
    }
    // A 421 makes a client that coalesced connections retry on a separate one.
    Err(match facts.version {
        HttpVersion::Http1 => Reason::NamesDisagree,
        HttpVersion::Http2 => Reason::Misdirected,
    })
}

impl ConnectFacts {
    /// Returns whether only the original destination names the target.
    pub(crate) fn is_nameless(&self) -> bool {
        matches!(self.target, ConnectTarget::Dialled(_))
    }
}
