//! Name constraints: the names an authority may issue for, according to its certificate (RFC 5280,
//! 4.2.1.10).
//!
//! An authority created for one policy can be limited to that policy's names, so that a stolen key is of
//! little use. Sandbar enforces the constraints too: it does not mint what the certificate forbids.

use std::fmt;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use rcgen::{CidrSubnet, GeneralSubtree};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{GeneralName, GeneralSubtree as ParsedSubtree};

use crate::host::HostName;

/// Maximum number of subtrees in a certificate: every client receives them in every handshake.
pub const MAX_SUBTREES: usize = 64;

/// Permits names at or below `names` and addresses within `networks`, and nothing else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameConstraints {
    names: Vec<String>,
    networks: Vec<IpNet>,
}

impl NameConstraints {
    /// Returns constraints that cover every pattern (`x.com`, `*.x.com`, `.x.com`, `x.com:8443`, `10.0.0.0/8`).
    ///
    /// Returns `None`, which means an authority without constraints, if there is no pattern, if one covers
    /// everything (`*`) or has another form, or if there would be more than [`MAX_SUBTREES`]. A name always
    /// covers the names below it too, because the standard cannot express less.
    pub fn from_patterns<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let mut found = Self::default();
        for pattern in patterns {
            found.add(pattern)?;
        }
        let subtrees = found.names.len() + found.networks.len();
        (1..=MAX_SUBTREES).contains(&subtrees).then_some(found)
    }

    fn add(&mut self, pattern: &str) -> Option<()> {
        if let Some(network) = parse_network(pattern) {
            self.networks.push(network);
            return Some(());
        }
        let pattern = without_port(pattern);
        let base = pattern.strip_prefix("*.").or(pattern.strip_prefix('.')).unwrap_or(pattern);
        let name = HostName::parse(base).ok()?;
        if !self.names.iter().any(|known| is_below(name.as_str(), known)) {
            self.names.retain(|known| !is_below(known, name.as_str()));
            self.names.push(name.as_str().to_owned());
        }
        Some(())
    }

    /// Converts to the extension. A name type that is not mentioned would be unrestricted, so it is excluded.
    pub(crate) fn to_extension(&self) -> rcgen::NameConstraints {
        let names = self.names.iter().cloned().map(GeneralSubtree::DnsName);
        let networks = self.networks.iter().map(|network| to_general_subtree(*network));
        rcgen::NameConstraints {
            permitted_subtrees: names.chain(networks).collect(),
            excluded_subtrees: self.excluded_subtrees(),
        }
    }

    fn excluded_subtrees(&self) -> Vec<GeneralSubtree> {
        let mut excluded = Vec::new();
        if !self.networks.iter().any(|network| network.addr().is_ipv4()) {
            excluded.push(to_general_subtree(IpNet::V4(Ipv4Net::default())));
        }
        if !self.networks.iter().any(|network| network.addr().is_ipv6()) {
            excluded.push(to_general_subtree(IpNet::V6(Ipv6Net::default())));
        }
        if self.names.is_empty() {
            excluded.push(GeneralSubtree::DnsName(String::new()));
        }
        excluded
    }
}

impl fmt::Display for NameConstraints {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let networks = self.networks.iter().map(ToString::to_string);
        let all: Vec<String> = self.names.iter().cloned().chain(networks).collect();
        formatter.write_str(&all.join(", "))
    }
}

/// The constraints of a certificate, ours or an operator's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NameLimits {
    permitted: Vec<Subtree>,
    excluded: Vec<Subtree>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Subtree {
    /// A name and the names below it; with a leading dot only the names below it.
    Name(String),
    Network(IpNet),
}

impl NameLimits {
    /// Parses the extension; `None` if it is not supported and so cannot be enforced.
    pub(crate) fn from_certificate(certificate: &X509Certificate<'_>) -> Option<Self> {
        let Some(extension) = certificate.name_constraints().ok()? else {
            return Some(Self::default());
        };
        Some(Self {
            permitted: parse_subtrees(extension.value.permitted_subtrees.as_deref())?,
            excluded: parse_subtrees(extension.value.excluded_subtrees.as_deref())?,
        })
    }

    /// Returns whether clients would accept a certificate for `host` under these constraints.
    pub(crate) fn permits(&self, host: &HostName) -> bool {
        let mut same_kind = self.permitted.iter().filter(|tree| tree.is_kind_of(host)).peekable();
        let permitted = same_kind.peek().is_none() || same_kind.any(|tree| tree.contains(host));
        permitted && !self.excluded.iter().any(|tree| tree.contains(host))
    }

    /// Returns the permitted names and networks, for display; empty if everything is permitted.
    pub(crate) fn describe_permitted(&self) -> impl Iterator<Item = String> {
        self.permitted.iter().map(Subtree::to_string)
    }

    /// Returns the excluded names and networks, for display.
    pub(crate) fn describe_excluded(&self) -> impl Iterator<Item = String> {
        self.excluded.iter().map(Subtree::to_string)
    }

    /// Returns a host within each permitted subtree, to test the authority with.
    pub(crate) fn examples(&self) -> impl Iterator<Item = HostName> {
        self.permitted.iter().filter_map(|tree| match tree {
            Subtree::Name(base) if base.starts_with('.') => HostName::parse(&format!("x{base}")).ok(),
            Subtree::Name(base) => HostName::parse(base).ok(),
            Subtree::Network(network) => Some(network.addr().into()),
        })
    }
}

impl Subtree {
    fn is_kind_of(&self, host: &HostName) -> bool {
        matches!(self, Self::Name(_)) == host.address().is_none()
    }

    fn contains(&self, host: &HostName) -> bool {
        match (self, host.address()) {
            (Self::Name(base), None) => is_below(host.as_str(), base),
            (Self::Network(network), Some(address)) => network.contains(&address),
            (Self::Name(_), Some(_)) | (Self::Network(_), None) => false,
        }
    }
}

impl fmt::Display for Subtree {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(formatter),
            Self::Network(network) => network.fmt(formatter),
        }
    }
}

fn parse_subtrees(subtrees: Option<&[ParsedSubtree<'_>]>) -> Option<Vec<Subtree>> {
    // A leaf has no mail address and no URI, so such limits do not matter. It does have a directory name,
    // its subject, and limits of that type are not supported here.
    let of_a_leaf =
        |tree: &&ParsedSubtree<'_>| !matches!(tree.base, GeneralName::RFC822Name(_) | GeneralName::URI(_));
    subtrees.unwrap_or_default().iter().filter(of_a_leaf).map(parse_subtree).collect()
}

fn parse_subtree(subtree: &ParsedSubtree<'_>) -> Option<Subtree> {
    if let GeneralName::DNSName(name) = subtree.base {
        return Some(Subtree::Name(name.to_ascii_lowercase()));
    }
    let GeneralName::IPAddress(bytes) = subtree.base else {
        return None;
    };
    parse_masked_address(bytes).map(Subtree::Network)
}

fn parse_masked_address(bytes: &[u8]) -> Option<IpNet> {
    let (address, mask) = bytes.split_at_checked(bytes.len() / 2)?;
    let of = |half: &[u8]| match half.len() {
        4 => <[u8; 4]>::try_from(half).ok().map(IpAddr::from),
        16 => <[u8; 16]>::try_from(half).ok().map(IpAddr::from),
        _ => None,
    };
    IpNet::with_netmask(of(address)?, of(mask)?).ok()
}

/// Parses `pattern` as a network or an address. IPv4-mapped IPv6 becomes IPv4, as in a [`HostName`].
fn parse_network(pattern: &str) -> Option<IpNet> {
    let found = pattern.parse().ok().or_else(|| pattern.parse::<IpAddr>().ok().map(IpNet::from))?;
    match (found.addr().to_canonical(), found.prefix_len().checked_sub(96)) {
        (IpAddr::V4(address), Some(length)) if found.addr().is_ipv6() => {
            Ipv4Net::new(address, length).ok().map(IpNet::V4)
        }
        _ => Some(found),
    }
}

/// Strips a port: a rule may have one, a certificate cannot.
fn without_port(pattern: &str) -> &str {
    match pattern.rsplit_once(':') {
        Some((host, port)) if !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) => host,
        Some(_) | None => pattern,
    }
}

fn to_general_subtree(network: IpNet) -> GeneralSubtree {
    GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(network.network(), network.prefix_len()))
}

/// Returns whether `name` is `base` or below it. Every name is below the empty one, and `.base` covers only
/// the names below it.
fn is_below(name: &str, base: &str) -> bool {
    match name.strip_suffix(base) {
        Some(rest) if base.starts_with('.') => !rest.is_empty(),
        Some(rest) => rest.is_empty() || rest.ends_with('.') || base.is_empty(),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_covered_is_limited() {
        let too_many: Vec<String> = (0..=MAX_SUBTREES).map(|n| format!("h{n}.example")).collect();
        let too_many: Vec<&str> = too_many.iter().map(String::as_str).collect();
        for (patterns, covered) in [
            (&["github.com", "*.github.com"][..], Some("github.com")),
            (&["*.github.com", "github.com", ".github.com"], Some("github.com")),
            (&["api.github.com", "github.com"], Some("github.com")),
            (&["github.com", "notgithub.com"], Some("github.com, notgithub.com")),
            (&["github.com", "10.2.3.4/32", "2001:db8::/32"], Some("github.com, 10.2.3.4/32, 2001:db8::/32")),
            (&["10.2.3.4"], Some("10.2.3.4/32")),
            (&["::ffff:10.2.3.4", "::ffff:11.0.0.0/104"], Some("10.2.3.4/32, 11.0.0.0/8")),
            (&["github.com", "memory.corp.example:8443"], Some("github.com, memory.corp.example")),
            (&["github.com", "*"], None),
            (&["*"], None),
            (&["github.com", "a.*.example"], None),
            (&[], None),
            (&too_many, None),
        ] {
            let found = NameConstraints::from_patterns(patterns.iter().copied());
            assert_eq!(found.map(|found| found.to_string()).as_deref(), covered, "{patterns:?}");
        }
    }

    #[test]
    fn a_leading_dot_is_for_what_is_below_only() {
        for (base, name, below) in [
            ("example.com", "example.com", true),
            ("example.com", "a.example.com", true),
            ("example.com", "notexample.com", false),
            (".example.com", "example.com", false),
            (".example.com", "a.example.com", true),
            (".example.com", "a.b.example.com", true),
            (".example.com", "notexample.com", false),
            ("", "example.com", true),
        ] {
            assert_eq!(is_below(name, base), below, "{name} below {base:?}");
        }
        let limits = NameLimits { permitted: vec![Subtree::Name(".example.com".into())], excluded: vec![] };
        let example = limits.examples().next().unwrap();
        assert!(example.as_str() == "x.example.com" && limits.permits(&example));
        assert!(!limits.permits(&HostName::parse("example.com").unwrap()));
    }
}
