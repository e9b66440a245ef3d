//! Names agree, or the attempt ends (P6): CONNECT host, SNI, Host and `:authority` are one host.

use crate::facts::{ConnectFacts, Facts, HttpVersion, Protocol, RequestFacts, Target};
use crate::name::Host;
use crate::reason::Reason;

/// The one host that everything visible in the attempt names.
pub(crate) fn agreed_host(facts: &Facts) -> Result<Host, Reason> {
    match facts {
        Facts::Connect(facts) => of_connection(facts),
        Facts::Memory(facts) => of_request(&facts.request),
        Facts::Name(facts) => Ok(Host::Name(facts.name.clone())),
        Facts::Request(facts) => of_request(facts),
    }
}

fn of_connection(facts: &ConnectFacts) -> Result<Host, Reason> {
    match (&facts.target, &facts.protocol) {
        (_, Protocol::Tls { sni: Some(Host::Address(_)), .. }) => Err(Reason::AddressAsSni),
        (Target::Named(Host::Name(_)), Protocol::Tls { sni: None, .. }) => Err(Reason::NameMissing),
        (Target::Named(host), Protocol::Raw) => Ok(host.clone()),
        (Target::Named(host), Protocol::Http { host: seen } | Protocol::Tls { sni: seen, .. }) => {
            agree(host, seen.iter())
        }
        (
            Target::Dialled(_),
            Protocol::Http { host: Some(seen @ Host::Name(_)) }
            | Protocol::Tls { sni: Some(seen), .. },
        ) => Ok(seen.clone()),
        (Target::Dialled(address), Protocol::Http { host: seen }) => {
            agree(&Host::from(*address), seen.iter())
        }
        (Target::Dialled(address), Protocol::Raw | Protocol::Tls { sni: None, .. }) => {
            Ok(Host::from(*address))
        }
    }
}

fn agree<'a>(host: &Host, mut seen: impl Iterator<Item = &'a Host>) -> Result<Host, Reason> {
    if seen.all(|other| other == host) { Ok(host.clone()) } else { Err(Reason::NamesDisagree) }
}

/// Every authority of a request must be the connection's host, on the connection's port.
fn of_request(facts: &RequestFacts) -> Result<Host, Reason> {
    let named =
        facts.connection.as_ref().or_else(|| facts.authorities.first().map(|first| &first.host));
    let host = named.ok_or(Reason::NameMissing)?;
    let same = |port: Option<u16>| port.is_none_or(|port| port == facts.port);
    if facts.authorities.iter().all(|authority| authority.host == *host && same(authority.port)) {
        return Ok(host.clone());
    }
    // 421 makes an honest client that coalesced connections try again on one of its own.
    Err(match facts.version {
        HttpVersion::Http1 => Reason::NamesDisagree,
        HttpVersion::Http2 => Reason::Misdirected,
    })
}

impl ConnectFacts {
    /// Whether nothing but the dialled address says where the connection goes.
    pub(crate) fn is_nameless(&self) -> bool {
        matches!(self.target, Target::Dialled(_))
    }
}
