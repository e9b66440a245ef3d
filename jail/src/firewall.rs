//! The rules of the jail's own network, in the kernel's words: nothing leaves, and what tries to is sent to the
//! sockets that the proxy holds.
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
//! A redirected packet goes to 127.0.0.1 or ::1 by the time the second chain sees it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::netlink::{ACKNOWLEDGE, APPEND, Attribute, CREATE, Message, Netlink};
use super::network::{DNS_PORT, OWN, OWN6, TCP_PORT};

const TABLE: &str = "sandbar";
/// `NFPROTO_INET`, `NFPROTO_IPV4`, `NFPROTO_IPV6`.
const INET: u8 = 1;
const FOUR: u8 = 2;
const SIX: u8 = 10;
/// `NF_INET_LOCAL_OUT`.
const OUTPUT: u32 = 3;
/// `NF_DROP`, `NF_ACCEPT`.
const DROP: u32 = 0;
const ACCEPT: u32 = 1;
/// `NFNL_SUBSYS_NFTABLES`, and the types of its messages.
const NFTABLES: u16 = 10;
const NEW_TABLE: u16 = NFTABLES << 8;
const NEW_CHAIN: u16 = NFTABLES << 8 | 3;
const NEW_RULE: u16 = NFTABLES << 8 | 6;
/// `NFNL_MSG_BATCH_BEGIN`, `NFNL_MSG_BATCH_END`.
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
/// The register that every rule here uses, and the one that holds verdicts.
const REGISTER: u32 = 1;
const VERDICT: u32 = 0;

/// Loads the rules, all or none.
pub(super) fn load() -> io::Result<()> {
    let mut netlink = Netlink::open(libc::NETLINK_NETFILTER)?;
    let table = message(NEW_TABLE, CREATE).with(&Attribute::text(1, TABLE));
    let mut batch = vec![frame(BATCH_BEGIN), table];
    batch.push(chain("redirect", "nat", -100, ACCEPT));
    for protocol in [libc::IPPROTO_UDP, libc::IPPROTO_TCP] {
        let to_dns = [&carried_by(protocol)[..], &port_is(DNS_PORT), &redirect(DNS_PORT)].concat();
        batch.push(rule("redirect", to_dns));
    }
    batch.extend(local().map(|rest| rule("redirect", rest)));
    batch.push(rule("redirect", [carried_by(libc::IPPROTO_TCP), redirect(TCP_PORT)].concat()));
    batch.push(chain("leave", "filter", 0, DROP));
    batch.extend(local().map(|rest| rule("leave", rest)));
    batch.push(rule("leave", vec![reject()]));
    batch.push(frame(BATCH_END));
    netlink.ask(batch)
}

/// What stays inside is nobody's business but the jail's.
fn local() -> impl Iterator<Item = Vec<Expression>> {
    let four = |address: Ipv4Addr, mask: Ipv4Addr| sent_to(address.into(), &mask.octets());
    let six = |address: Ipv6Addr| sent_to(address.into(), &[0xff; 16]);
    let every = Ipv4Addr::BROADCAST;
    [
        four(Ipv4Addr::new(127, 0, 0, 0), Ipv4Addr::new(255, 0, 0, 0)),
        four(OWN, every),
        six(Ipv6Addr::LOCALHOST),
        six(OWN6),
    ]
    .into_iter()
    .map(|mut rule| {
        rule.push(accept());
        rule
    })
}

/// A step of a rule: its name and what it is told.
type Expression = (&'static str, Vec<(u16, Value)>);

#[derive(Clone)]
enum Value {
    /// `NFTA_DATA_VALUE` in a nest.
    Data(Vec<u8>),
    Number(u32),
    Octet(u8),
    /// `NFTA_DATA_VERDICT` in a nest.
    Verdict(u32),
}

fn carried_by(protocol: i32) -> Vec<Expression> {
    const L4PROTO: u32 = 16;
    vec![meta(L4PROTO), is(vec![protocol as u8])]
}

fn port_is(port: u16) -> Vec<Expression> {
    const TRANSPORT: u32 = 2;
    vec![payload(TRANSPORT, 2, 2), is(port.to_be_bytes().to_vec())]
}

fn sent_to(address: IpAddr, mask: &[u8]) -> Vec<Expression> {
    const NFPROTO: u32 = 15;
    const NETWORK: u32 = 1;
    let (family, offset, octets) = match address {
        IpAddr::V4(address) => (FOUR, 16, address.octets().to_vec()),
        IpAddr::V6(address) => (SIX, 24, address.octets().to_vec()),
    };
    let length = octets.len() as u32;
    let bitwise = vec![
        (1, Value::Number(REGISTER)),
        (2, Value::Number(REGISTER)),
        (3, Value::Number(length)),
        (4, Value::Data(mask.to_vec())),
        (5, Value::Data(vec![0; octets.len()])),
    ];
    vec![
        meta(NFPROTO),
        is(vec![family]),
        payload(NETWORK, offset, length),
        ("bitwise", bitwise),
        is(octets),
    ]
}

fn meta(key: u32) -> Expression {
    ("meta", vec![(1, Value::Number(REGISTER)), (2, Value::Number(key))])
}

fn payload(base: u32, offset: u32, length: u32) -> Expression {
    let fields = [REGISTER, base, offset, length].map(Value::Number);
    ("payload", (1..).zip(fields).collect())
}

fn is(value: Vec<u8>) -> Expression {
    const EQUAL: u32 = 0;
    ("cmp", vec![(1, Value::Number(REGISTER)), (2, Value::Number(EQUAL)), (3, Value::Data(value))])
}

fn redirect(port: u16) -> Vec<Expression> {
    let port = Value::Data(port.to_be_bytes().to_vec());
    let load = ("immediate", vec![(1, Value::Number(REGISTER)), (2, port)]);
    vec![load, ("redir", vec![(1, Value::Number(REGISTER))])]
}

fn accept() -> Expression {
    ("immediate", vec![(1, Value::Number(VERDICT)), (2, Value::Verdict(ACCEPT))])
}

/// Whoever sends is told at once, so that a client of QUIC falls back without waiting.
fn reject() -> Expression {
    const ICMPX: u32 = 2;
    const ADMIN_PROHIBITED: u8 = 3;
    ("reject", vec![(1, Value::Number(ICMPX)), (2, Value::Octet(ADMIN_PROHIBITED))])
}

fn chain(name: &str, kind: &str, priority: i32, policy: u32) -> Message {
    let hook = vec![Attribute::number(1, OUTPUT), Attribute::number(2, priority.cast_unsigned())];
    message(NEW_CHAIN, CREATE)
        .with(&Attribute::text(1, TABLE))
        .with(&Attribute::text(3, name))
        .with(&Attribute::Nested(4, hook))
        .with(&Attribute::number(5, policy))
        .with(&Attribute::text(7, kind))
}

fn rule(chain: &str, expressions: Vec<Expression>) -> Message {
    let expressions = expressions.into_iter().map(|(name, fields)| {
        let fields = fields.into_iter().map(|(kind, value)| value.attribute(kind)).collect();
        Attribute::Nested(1, vec![Attribute::text(1, name), Attribute::Nested(2, fields)])
    });
    message(NEW_RULE, APPEND)
        .with(&Attribute::text(1, TABLE))
        .with(&Attribute::text(2, chain))
        .with(&Attribute::Nested(4, expressions.collect()))
}

impl Value {
    fn attribute(self, kind: u16) -> Attribute {
        match self {
            Value::Data(bytes) => Attribute::Nested(kind, vec![Attribute::Bytes(1, bytes)]),
            Value::Number(number) => Attribute::number(kind, number),
            Value::Octet(octet) => Attribute::Bytes(kind, vec![octet]),
            Value::Verdict(code) => {
                let code = Attribute::Nested(2, vec![Attribute::number(1, code)]);
                Attribute::Nested(kind, vec![code])
            }
        }
    }
}

fn message(kind: u16, flags: u16) -> Message {
    Message::new(kind, flags | ACKNOWLEDGE, &[INET, 0, 0, 0])
}

/// What a batch begins and ends with: the subsystem that it is for.
fn frame(kind: u16) -> Message {
    let [high, low] = NFTABLES.to_be_bytes();
    Message::new(kind, 0, &[0, 0, high, low])
}
