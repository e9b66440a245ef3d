//! Names with a meaning of their own: special-use zones, resolver discovery, public resolvers.

use crate::host_set::PatternHit;
use crate::name::DomainName;
use crate::pattern::PatternReach;

// RFC 6761, 6762, 7686, 8375, 9476 and the `internal` reservation: never to be asked of a public resolver.
const SPECIAL_ZONES: [&str; 10] = [
    "alt",
    "arpa",
    "home.arpa",
    "internal",
    "invalid",
    "lan",
    "local",
    "localhost",
    "onion",
    "test",
];

// Asked by clients to find out whether they may leave the resolver they were given.
const DISCOVERY_NAMES: [&str; 4] =
    ["mask-h2.icloud.com", "mask.icloud.com", "resolver.arpa", "use-application-dns.net"];

// Public resolvers over HTTPS, TLS or QUIC: behind one of these no name can be judged.
const PUBLIC_RESOLVERS: [&str; 20] = [
    "adblock.dns.mullvad.net",
    "anycast.uncensoreddns.org",
    "chrome.cloudflare-dns.com",
    "cloudflare-dns.com",
    "dns.adguard-dns.com",
    "dns.alidns.com",
    "dns.controld.com",
    "dns.google",
    "dns.mullvad.net",
    "dns.nextdns.io",
    "dns.quad9.net",
    "dns.sb",
    "doh.cleanbrowsing.org",
    "doh.dns.sb",
    "doh.opendns.com",
    "doh.pub",
    "freedns.controld.com",
    "mozilla.cloudflare-dns.com",
    "one.one.one.one",
    "security.cloudflare-dns.com",
];

/// Whether the name only exists to lead clients to another resolver.
pub(crate) fn is_resolver_discovery(name: &DomainName) -> bool {
    name.suffixes().any(|suffix| DISCOVERY_NAMES.contains(&suffix))
}

/// Whether a public resolver would be opened by something less than its exact name.
pub(crate) fn is_hidden_resolver(name: &DomainName, hit: &PatternHit<'_>) -> bool {
    hit.reach != PatternReach::Exact
        && name.suffixes().any(|suffix| PUBLIC_RESOLVERS.binary_search(&suffix).is_ok())
}

/// The special-use zone a name lies in, which no public resolver is asked for.
pub fn special_zone(name: &DomainName) -> Option<&'static str> {
    name.suffixes().find_map(|suffix| {
        SPECIAL_ZONES.binary_search(&suffix).ok().and_then(|at| SPECIAL_ZONES.get(at)).copied()
    })
}

/// Whether `base`, the name of a pattern, lies in `zone` itself, so that the zone was meant.
pub(crate) fn is_within_zone(base: &str, zone: &str) -> bool {
    base == zone || base.strip_suffix(zone).is_some_and(|front| front.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_sorted_for_the_search() {
        assert!(SPECIAL_ZONES.is_sorted() && PUBLIC_RESOLVERS.is_sorted());
    }

    #[test]
    fn zones_are_told_by_label() {
        for (name, found) in [
            ("localhost", Some("localhost")),
            ("a.localhost", Some("localhost")),
            ("notlocalhost", None),
            ("db.corp.internal", Some("internal")),
            ("x.home.arpa", Some("home.arpa")),
            ("1.0.0.10.in-addr.arpa", Some("arpa")),
            ("internal.example", None),
        ] {
            assert_eq!(special_zone(&DomainName::parse(name).unwrap()), found, "{name}");
        }
        assert!(
            is_within_zone("corp.internal", "internal") && is_within_zone("internal", "internal")
        );
        assert!(!is_within_zone("", "internal") && !is_within_zone("notinternal", "internal"));
    }
}
