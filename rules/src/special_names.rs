//! Names with special meaning: special-use zones, resolver discovery, public resolvers.

use crate::host_set::PatternHit;
use crate::name::DomainName;
use crate::pattern::PatternReach;

// RFC 6761, 6762, 7686, 8375, 9476 and the `internal` reservation. Sandbar never sends these names to a public resolver.
const SPECIAL_ZONES: [&str; 10] =
    ["alt", "arpa", "home.arpa", "internal", "invalid", "lan", "local", "localhost", "onion", "test"];

// Clients query these to find out whether they may switch to another resolver.
const DISCOVERY_NAMES: [&str; 4] =
    ["mask-h2.icloud.com", "mask.icloud.com", "resolver.arpa", "use-application-dns.net"];

// Public resolvers over HTTPS, TLS or QUIC: names resolved through them bypass the DNS filter.
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

/// Returns whether the name exists only to switch clients to another resolver.
pub(crate) fn is_resolver_discovery(name: &DomainName) -> bool {
    name.suffixes().any(|suffix| DISCOVERY_NAMES.contains(&suffix))
}

/// Returns whether the pattern would open a public resolver without naming it exactly.
pub(crate) fn is_hidden_resolver(name: &DomainName, hit: &PatternHit<'_>) -> bool {
    hit.reach != PatternReach::Exact
        && name.suffixes().any(|suffix| PUBLIC_RESOLVERS.binary_search(&suffix).is_ok())
}

/// Returns the special-use zone of a name, which Sandbar never sends to a public resolver.
pub fn special_zone(name: &DomainName) -> Option<&'static str> {
    name.suffixes().find_map(|suffix| {
        SPECIAL_ZONES.binary_search(&suffix).ok().and_then(|at| SPECIAL_ZONES.get(at)).copied()
    })
}

/// Returns whether `base`, the base name of a pattern, is in `zone`, so that the pattern opens the zone on purpose.
pub(crate) fn is_within_zone(base: &str, zone: &str) -> bool {
    base == zone || base.strip_suffix(zone).is_some_and(|front| front.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_sorted_for_binary_search() {
        assert!(SPECIAL_ZONES.is_sorted() && PUBLIC_RESOLVERS.is_sorted());
    }

    #[test]
    fn zones_match_whole_labels() {
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
        assert!(is_within_zone("corp.internal", "internal") && is_within_zone("internal", "internal"));
        assert!(!is_within_zone("", "internal") && !is_within_zone("notinternal", "internal"));
    }
}
