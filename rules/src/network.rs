//! The addresses that Sandbar may dial. The forbidden ranges are built in; only an explicit network in a rule opens
//! one (P4).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// A range that no name may resolve into, and its purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForbiddenRange {
    pub range: IpNet,
    pub what: &'static str,
}

/// Returns the forbidden range of `address`, also of an IPv4 address embedded in an IPv6 one.
pub fn forbidden_range(address: IpAddr) -> Option<ForbiddenRange> {
    match address.to_canonical() {
        IpAddr::V4(address) => forbidden_v4(address),
        IpAddr::V6(address) => forbidden_v6(address),
    }
}

/// Returns the address and every IPv4 address embedded in it; a deny rule for one applies to all.
pub fn address_forms(address: IpAddr) -> impl Iterator<Item = IpAddr> {
    let address = address.to_canonical();
    let embedded = match address {
        IpAddr::V4(_) => [None, None],
        IpAddr::V6(address) => embedded_ipv4(address),
    };
    std::iter::once(address).chain(embedded.into_iter().flatten().map(IpAddr::V4))
}

/// Returns whether no TCP server can have an address in `range`, so that a rule for it has no effect.
pub fn is_undialable(range: &IpNet) -> bool {
    match range {
        IpNet::V4(net) => {
            MULTICAST_V4.contains(net) || UNSPECIFIED_V4.contains(net) || net.addr().is_broadcast()
        }
        IpNet::V6(net) => {
            MULTICAST_V6.contains(net) || net.addr().is_unspecified() && net.prefix_len() == 128
        }
    }
}

/// Returns whether `range` is within one forbidden range.
pub fn is_forbidden(range: &IpNet) -> bool {
    forbidden_ranges().any(|net| net.contains(range))
}

/// Returns whether `range` includes a forbidden range and more, which is rarely intended.
pub fn spans_forbidden(range: &IpNet) -> bool {
    forbidden_ranges().any(|net| range.contains(&net) && net != *range) && !is_forbidden(range)
}

fn forbidden_ranges() -> impl Iterator<Item = IpNet> {
    let v4 = FORBIDDEN_V4.iter().map(|(net, _)| IpNet::V4(*net));
    v4.chain(FORBIDDEN_V6.iter().map(|(net, _)| IpNet::V6(*net)))
}

fn forbidden_v4(address: Ipv4Addr) -> Option<ForbiddenRange> {
    let (net, what) = FORBIDDEN_V4.iter().find(|(net, _)| net.contains(&address))?;
    Some(ForbiddenRange { range: IpNet::V4(*net), what })
}

fn forbidden_v6(address: Ipv6Addr) -> Option<ForbiddenRange> {
    let own = FORBIDDEN_V6.iter().find(|(net, _)| net.contains(&address));
    own.map(|(net, what)| ForbiddenRange { range: IpNet::V6(*net), what })
        .or_else(|| embedded_ipv4(address).into_iter().flatten().find_map(forbidden_v4))
}

/// Returns the IPv4 addresses that an IPv6 address reaches through a translator or a tunnel.
fn embedded_ipv4(address: Ipv6Addr) -> [Option<Ipv4Addr>; 2] {
    let bits = address.to_bits();
    let last = Ipv4Addr::from_bits(bits as u32);
    // RFC 5214, 6.1: an interface identifier of ::[02]00:5efe:a.b.c.d, under any prefix.
    let isatap = matches!((bits >> 32) as u32, 0x0000_5efe | 0x0200_5efe);
    if NAT64.contains(&address)
        || IPV4_COMPATIBLE.contains(&address)
        || IPV4_TRANSLATED.contains(&address)
        || isatap
    {
        return [Some(last), None];
    }
    if SIX_TO_FOUR.contains(&address) {
        return [Some(Ipv4Addr::from_bits((bits >> 80) as u32)), None];
    }
    if TEREDO.contains(&address) {
        // RFC 4380, section 4: the server's address, and the client's address with every bit inverted.
        return [Some(Ipv4Addr::from_bits((bits >> 64) as u32)), Some(Ipv4Addr::from_bits(!(bits as u32)))];
    }
    [None, None]
}

const fn ipv4_net(a: u8, b: u8, c: u8, d: u8, length: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), length)
}

const fn ipv6_net(a: u16, b: u16, c: u16, d: u16, length: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0), length)
}

const MULTICAST_V4: Ipv4Net = ipv4_net(224, 0, 0, 0, 4);
const UNSPECIFIED_V4: Ipv4Net = ipv4_net(0, 0, 0, 0, 8);
const MULTICAST_V6: Ipv6Net = ipv6_net(0xff00, 0, 0, 0, 8);
const IPV4_COMPATIBLE: Ipv6Net = ipv6_net(0, 0, 0, 0, 96); // RFC 4291, 2.5.5.1
const IPV4_TRANSLATED: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, 0, 0), 96); // RFC 2765
const NAT64: Ipv6Net = ipv6_net(0x64, 0xff9b, 0, 0, 96); // RFC 6052
const SIX_TO_FOUR: Ipv6Net = ipv6_net(0x2002, 0, 0, 0, 16); // RFC 3056
const TEREDO: Ipv6Net = ipv6_net(0x2001, 0, 0, 0, 32); // RFC 4380

// The special-purpose registries of RFC 6890, and the metadata services of clouds.
const FORBIDDEN_V4: [(Ipv4Net, &str); 16] = [
    (UNSPECIFIED_V4, "this network"),
    (ipv4_net(10, 0, 0, 0, 8), "private"),
    (ipv4_net(100, 64, 0, 0, 10), "carrier-grade NAT"),
    (ipv4_net(127, 0, 0, 0, 8), "loopback"),
    (ipv4_net(168, 63, 129, 16, 32), "cloud metadata"),
    (ipv4_net(169, 254, 0, 0, 16), "link-local and cloud metadata"),
    (ipv4_net(172, 16, 0, 0, 12), "private"),
    (ipv4_net(192, 0, 0, 0, 24), "protocol assignments"),
    (ipv4_net(192, 0, 2, 0, 24), "documentation"),
    (ipv4_net(192, 88, 99, 0, 24), "6to4 relay"),
    (ipv4_net(192, 168, 0, 0, 16), "private"),
    (ipv4_net(198, 18, 0, 0, 15), "benchmarking"),
    (ipv4_net(198, 51, 100, 0, 24), "documentation"),
    (ipv4_net(203, 0, 113, 0, 24), "documentation"),
    (MULTICAST_V4, "multicast"),
    (ipv4_net(240, 0, 0, 0, 4), "reserved and broadcast"),
];

const FORBIDDEN_V6: [(Ipv6Net, &str); 14] = [
    (Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 128), "unspecified"),
    (Ipv6Net::new_assert(Ipv6Addr::LOCALHOST, 128), "loopback"),
    (ipv6_net(0x64, 0xff9b, 1, 0, 48), "local-use NAT64"),
    (ipv6_net(0x100, 0, 0, 0, 64), "discard"),
    (ipv6_net(0x2001, 2, 0, 0, 48), "benchmarking"),
    (ipv6_net(0x2001, 0x10, 0, 0, 28), "ORCHID"),
    (ipv6_net(0x2001, 0x20, 0, 0, 28), "ORCHID"),
    (ipv6_net(0x2001, 0xdb8, 0, 0, 32), "documentation"),
    (ipv6_net(0x3fff, 0, 0, 0, 20), "documentation"),
    (ipv6_net(0x5f00, 0, 0, 0, 16), "segment routing"),
    (ipv6_net(0xfc00, 0, 0, 0, 7), "unique local"),
    (ipv6_net(0xfe80, 0, 0, 0, 10), "link-local"),
    (ipv6_net(0xfec0, 0, 0, 0, 10), "site-local"),
    (MULTICAST_V6, "multicast"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p4_only_public_addresses_are_not_forbidden() {
        for (address, what) in [
            ("1.1.1.1", None),
            ("172.15.255.255", None),
            ("172.32.0.0", None),
            ("100.63.255.255", None),
            ("100.128.0.0", None),
            ("198.17.255.255", None),
            ("2606:4700::1111", None),
            ("64:ff9b::1.1.1.1", None),
            ("2002:101:101::1", None),
            ("::ffff:1.1.1.1", None),
            ("0.0.0.0", Some("this network")),
            ("0.1.2.3", Some("this network")),
            ("10.0.0.1", Some("private")),
            ("100.64.0.1", Some("carrier-grade NAT")),
            ("127.0.0.1", Some("loopback")),
            ("127.255.255.254", Some("loopback")),
            ("168.63.129.16", Some("cloud metadata")),
            ("169.254.169.254", Some("link-local and cloud metadata")),
            ("172.16.0.1", Some("private")),
            ("172.31.255.255", Some("private")),
            ("192.0.0.8", Some("protocol assignments")),
            ("192.168.1.1", Some("private")),
            ("198.19.0.1", Some("benchmarking")),
            ("203.0.113.9", Some("documentation")),
            ("224.0.0.1", Some("multicast")),
            ("255.255.255.255", Some("reserved and broadcast")),
            ("::", Some("unspecified")),
            ("::1", Some("loopback")),
            ("::127.0.0.1", Some("loopback")),
            ("::7f00:1", Some("loopback")),
            ("::ffff:127.0.0.1", Some("loopback")),
            ("::ffff:c0a8:101", Some("private")),
            ("64:ff9b::169.254.169.254", Some("link-local and cloud metadata")),
            ("64:ff9b::a9fe:a9fe", Some("link-local and cloud metadata")),
            ("64:ff9b:1::1", Some("local-use NAT64")),
            ("2002:0a00:0001::", Some("private")),
            ("2002:7f00:1::1", Some("loopback")),
            ("2001:0:0a00:1::1", Some("private")),
            ("2001:0:101:101:0:0:f5ff:fffe", Some("private")),
            ("::ffff:0:7f00:1", Some("loopback")),
            ("2606:4700::5efe:a00:1", Some("private")),
            ("2606:4700::200:5efe:7f00:1", Some("loopback")),
            ("2001:20::1", Some("ORCHID")),
            ("2001:db8::1", Some("documentation")),
            ("fd00:ec2::254", Some("unique local")),
            ("fe80::1", Some("link-local")),
            ("fec0::1", Some("site-local")),
            ("ff02::1", Some("multicast")),
        ] {
            let found = forbidden_range(address.parse().unwrap()).map(|forbidden| forbidden.what);
            assert_eq!(found, what, "{address}");
        }
    }

    #[test]
    fn ranges_are_classified_by_their_position() {
        for (range, forbidden, wide, undial) in [
            ("10.1.0.0/16", true, false, false),
            ("10.0.0.0/8", true, false, false),
            ("0.0.0.0/0", false, true, false),
            ("8.0.0.0/5", false, true, false),
            ("8.8.8.0/24", false, false, false),
            ("::/0", false, true, false),
            ("fd00::/8", true, false, false),
            ("2606:4700::/32", false, false, false),
            ("224.0.0.0/8", true, false, true),
            ("ff02::/16", true, false, true),
            ("0.0.0.0/32", true, false, true),
            ("127.0.0.1/32", true, false, false),
        ] {
            let range: IpNet = range.parse().unwrap();
            let found = (is_forbidden(&range), spans_forbidden(&range), is_undialable(&range));
            assert_eq!(found, (forbidden, wide, undial), "{range}");
        }
    }
}
