//! The nftables ruleset of the jail's network namespace, loaded by init: no packet leaves, and TCP and DNS are
//! redirected to the listening sockets that the proxy serves. In the syntax of `nft`:
//!
//! ```text
//! table inet sandbar {
//!     chain redirect { type nat hook output priority -100; policy accept;
//!         meta l4proto udp th dport 53 redirect to :53
//!         meta l4proto tcp th dport 53 redirect to :53
//!         ip daddr 127.0.0.0/8 accept; ip daddr OWN accept; ip6 daddr ::1 accept; ip6 daddr OWN accept
//!         meta l4proto tcp redirect to :1
//!     }
//!     chain leave { type filter hook output priority 0; policy drop;
//!         ip daddr 127.0.0.0/8 accept; ip daddr OWN accept; ip6 daddr ::1 accept; ip6 daddr OWN accept
//!         reject with icmpx admin-prohibited
//!     }
//! }
//! ```
//!
//! A redirected packet has the destination 127.0.0.1 or ::1 by the time the second chain sees it.
//!
//! The messages are encoded by hand; the opening of `netlink` says why. The attribute numbers are those of
//! `linux/netfilter/nf_tables.h`, written where they are used, since the ruleset is fixed.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::netlink::{FLAG_ACK, FLAG_APPEND, FLAG_CREATE, NetlinkAttribute, NetlinkMessage, NetlinkSocket};
use super::network::{DNS_PORT, JAIL_ADDRESS, JAIL_ADDRESS6, TCP_PORT};

const TABLE: &str = "sandbar";
/// `NFPROTO_INET`, `NFPROTO_IPV4`, `NFPROTO_IPV6`.
const NFPROTO_INET: u8 = 1;
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;
/// `NF_INET_LOCAL_OUT`.
const HOOK_OUTPUT: u32 = 3;
/// `NF_DROP`, `NF_ACCEPT`.
const NF_DROP: u32 = 0;
const NF_ACCEPT: u32 = 1;
/// `NFNL_SUBSYS_NFTABLES`, and its message types.
const SUBSYS_NFTABLES: u16 = 10;
const NEW_TABLE: u16 = SUBSYS_NFTABLES << 8;
const NEW_CHAIN: u16 = SUBSYS_NFTABLES << 8 | 3;
const NEW_RULE: u16 = SUBSYS_NFTABLES << 8 | 6;
/// `NFNL_MSG_BATCH_BEGIN`, `NFNL_MSG_BATCH_END`.
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
/// The register that every rule here uses, and the verdict register.
const REGISTER: u32 = 1;
const VERDICT_REGISTER: u32 = 0;

/// Loads the ruleset in one batch, which the kernel applies as a whole or not at all. Runs in init.
pub(super) fn load_ruleset() -> io::Result<()> {
    let mut netlink = NetlinkSocket::open(libc::NETLINK_NETFILTER)?;
    let table = nft_message(NEW_TABLE, FLAG_CREATE).with(&NetlinkAttribute::string(1, TABLE));
    let mut batch = vec![batch_frame(BATCH_BEGIN), table];
    batch.push(new_chain("redirect", "nat", -100, NF_ACCEPT));
    for protocol in [libc::IPPROTO_UDP, libc::IPPROTO_TCP] {
        let to_dns = [&match_protocol(protocol)[..], &match_port(DNS_PORT), &redirect_to(DNS_PORT)].concat();
        batch.push(new_rule("redirect", to_dns));
    }
    batch.extend(accept_local_rules().map(|rule| new_rule("redirect", rule)));
    batch.push(new_rule("redirect", [match_protocol(libc::IPPROTO_TCP), redirect_to(TCP_PORT)].concat()));
    batch.push(new_chain("leave", "filter", 0, NF_DROP));
    batch.extend(accept_local_rules().map(|rule| new_rule("leave", rule)));
    batch.push(new_rule("leave", vec![reject_prohibited()]));
    batch.push(batch_frame(BATCH_END));
    netlink.request(batch)
}

/// Returns rules that accept traffic between processes inside the jail.
fn accept_local_rules() -> impl Iterator<Item = Vec<NftExpression>> {
    let four = |address: Ipv4Addr, mask: Ipv4Addr| match_destination(address.into(), &mask.octets());
    let six = |address: Ipv6Addr| match_destination(address.into(), &[0xff; 16]);
    let all_bits = Ipv4Addr::BROADCAST;
    [
        four(Ipv4Addr::new(127, 0, 0, 0), Ipv4Addr::new(255, 0, 0, 0)),
        four(JAIL_ADDRESS, all_bits),
        six(Ipv6Addr::LOCALHOST),
        six(JAIL_ADDRESS6),
    ]
    .into_iter()
    .map(|mut rule| {
        rule.push(accept_verdict());
        rule
    })
}

/// An expression of a rule: its name and attributes.
type NftExpression = (&'static str, Vec<(u16, NftValue)>);

#[derive(Clone)]
enum NftValue {
    /// A nested `NFTA_DATA_VALUE`.
    Data(Vec<u8>),
    Number(u32),
    Octet(u8),
    /// A nested `NFTA_DATA_VERDICT`.
    Verdict(u32),
}

fn match_protocol(protocol: i32) -> Vec<NftExpression> {
    const L4PROTO: u32 = 16;
    vec![load_meta(L4PROTO), compare_equal(vec![protocol as u8])]
}

fn match_port(port: u16) -> Vec<NftExpression> {
    const TRANSPORT: u32 = 2;
    vec![load_payload(TRANSPORT, 2, 2), compare_equal(port.to_be_bytes().to_vec())]
}

fn match_destination(address: IpAddr, mask: &[u8]) -> Vec<NftExpression> {
    const NFPROTO: u32 = 15;
    const NETWORK: u32 = 1;
    let (family, offset, octets) = match address {
        IpAddr::V4(address) => (NFPROTO_IPV4, 16, address.octets().to_vec()),
        IpAddr::V6(address) => (NFPROTO_IPV6, 24, address.octets().to_vec()),
    };
    let length = octets.len() as u32;
    let bitwise = vec![
        (1, NftValue::Number(REGISTER)),
        (2, NftValue::Number(REGISTER)),
        (3, NftValue::Number(length)),
        (4, NftValue::Data(mask.to_vec())),
        (5, NftValue::Data(vec![0; octets.len()])),
    ];
    vec![
        load_meta(NFPROTO),
        compare_equal(vec![family]),
        load_payload(NETWORK, offset, length),
        ("bitwise", bitwise),
        compare_equal(octets),
    ]
}

fn load_meta(key: u32) -> NftExpression {
    ("meta", vec![(1, NftValue::Number(REGISTER)), (2, NftValue::Number(key))])
}

fn load_payload(base: u32, offset: u32, length: u32) -> NftExpression {
    let fields = [REGISTER, base, offset, length].map(NftValue::Number);
    ("payload", (1..).zip(fields).collect())
}

fn compare_equal(value: Vec<u8>) -> NftExpression {
    const EQUAL: u32 = 0;
    ("cmp", vec![(1, NftValue::Number(REGISTER)), (2, NftValue::Number(EQUAL)), (3, NftValue::Data(value))])
}

fn redirect_to(port: u16) -> Vec<NftExpression> {
    let port = NftValue::Data(port.to_be_bytes().to_vec());
    let load = ("immediate", vec![(1, NftValue::Number(REGISTER)), (2, port)]);
    vec![load, ("redir", vec![(1, NftValue::Number(REGISTER))])]
}

fn accept_verdict() -> NftExpression {
    ("immediate", vec![(1, NftValue::Number(VERDICT_REGISTER)), (2, NftValue::Verdict(NF_ACCEPT))])
}

/// Rejects instead of dropping: the sender gets an ICMP error, so a QUIC client falls back to TCP without waiting.
fn reject_prohibited() -> NftExpression {
    const ICMPX: u32 = 2;
    const ADMIN_PROHIBITED: u8 = 3;
    ("reject", vec![(1, NftValue::Number(ICMPX)), (2, NftValue::Octet(ADMIN_PROHIBITED))])
}

fn new_chain(name: &str, kind: &str, priority: i32, policy: u32) -> NetlinkMessage {
    let hook =
        vec![NetlinkAttribute::u32_be(1, HOOK_OUTPUT), NetlinkAttribute::u32_be(2, priority.cast_unsigned())];
    nft_message(NEW_CHAIN, FLAG_CREATE)
        .with(&NetlinkAttribute::string(1, TABLE))
        .with(&NetlinkAttribute::string(3, name))
        .with(&NetlinkAttribute::Nested(4, hook))
        .with(&NetlinkAttribute::u32_be(5, policy))
        .with(&NetlinkAttribute::string(7, kind))
}

fn new_rule(chain: &str, expressions: Vec<NftExpression>) -> NetlinkMessage {
    let expressions = expressions.into_iter().map(|(name, fields)| {
        let fields = fields.into_iter().map(|(kind, value)| value.into_attribute(kind)).collect();
        NetlinkAttribute::Nested(
            1,
            vec![NetlinkAttribute::string(1, name), NetlinkAttribute::Nested(2, fields)],
        )
    });
    nft_message(NEW_RULE, FLAG_APPEND)
        .with(&NetlinkAttribute::string(1, TABLE))
        .with(&NetlinkAttribute::string(2, chain))
        .with(&NetlinkAttribute::Nested(4, expressions.collect()))
}

impl NftValue {
    fn into_attribute(self, kind: u16) -> NetlinkAttribute {
        match self {
            NftValue::Data(bytes) => NetlinkAttribute::Nested(kind, vec![NetlinkAttribute::Bytes(1, bytes)]),
            NftValue::Number(number) => NetlinkAttribute::u32_be(kind, number),
            NftValue::Octet(octet) => NetlinkAttribute::Bytes(kind, vec![octet]),
            NftValue::Verdict(code) => {
                let code = NetlinkAttribute::Nested(2, vec![NetlinkAttribute::u32_be(1, code)]);
                NetlinkAttribute::Nested(kind, vec![code])
            }
        }
    }
}

fn nft_message(kind: u16, flags: u16) -> NetlinkMessage {
    NetlinkMessage::new(kind, flags | FLAG_ACK, &[NFPROTO_INET, 0, 0, 0])
}

/// The first or last message of a batch, which names the subsystem.
fn batch_frame(kind: u16) -> NetlinkMessage {
    let [high, low] = SUBSYS_NFTABLES.to_be_bytes();
    NetlinkMessage::new(kind, 0, &[0, 0, high, low])
}
