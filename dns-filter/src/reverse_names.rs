//! The names for which one sandbox was given addresses. They serve only the sandbox's own reverse look-ups; no decision
//! uses them, since an address can have many names.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rules::DomainName;

use crate::limits::REVERSE_NAMES;

/// Names by address, bounded; the oldest address is evicted first.
#[derive(Debug, Default)]
pub(crate) struct ReverseNames {
    names: HashMap<IpAddr, DomainName>,
    order: VecDeque<IpAddr>,
}

impl ReverseNames {
    pub(crate) fn insert(&mut self, address: IpAddr, name: &DomainName) {
        if self.names.insert(address, name.clone()).is_none() {
            self.order.push_back(address);
        }
        while self.order.len() > REVERSE_NAMES {
            if let Some(oldest) = self.order.pop_front() {
                self.names.remove(&oldest);
            }
        }
    }

    pub(crate) fn name_of(&self, address: IpAddr) -> Option<&DomainName> {
        self.names.get(&address)
    }

    /// Removes everything: the current rules may not allow what earlier rules did.
    pub(crate) fn clear(&mut self) {
        self.names.clear();
        self.order.clear();
    }
}

/// Parses a reverse name (RFC 1035, 3.5 and RFC 3596, 2.5).
pub(crate) fn parse_reverse_name(name: &DomainName) -> Option<IpAddr> {
    let text = name.as_str();
    if let Some(octets) = text.strip_suffix(".in-addr.arpa") {
        let octets: Vec<u8> = octets.rsplit('.').map(str::parse).collect::<Result<_, _>>().ok()?;
        return Some(Ipv4Addr::from(<[u8; 4]>::try_from(octets).ok()?).into());
    }
    let digits: Vec<u128> = text
        .strip_suffix(".ip6.arpa")?
        .rsplit('.')
        .map(|digit| u128::from_str_radix(digit, 16).ok().filter(|_| digit.len() == 1))
        .collect::<Option<_>>()?;
    let bits = digits.iter().fold(0, |bits, digit| bits << 4 | digit);
    (digits.len() == 32).then(|| Ipv6Addr::from_bits(bits).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> DomainName {
        DomainName::parse(text).unwrap()
    }

    #[test]
    fn only_complete_reverse_names_are_parsed() {
        let v6 = format!("1.{}8.b.d.0.1.0.0.2.ip6.arpa", "0.".repeat(23));
        for (text, address) in [
            ("4.3.2.1.in-addr.arpa", Some("1.2.3.4")),
            ("3.2.1.in-addr.arpa", None),
            ("5.4.3.2.1.in-addr.arpa", None),
            ("256.3.2.1.in-addr.arpa", None),
            ("x.3.2.1.in-addr.arpa", None),
            (v6.as_str(), Some("2001:db8::1")),
            ("1.8.b.d.0.1.0.0.2.ip6.arpa", None),
            ("github.com", None),
        ] {
            let expected = address.map(|address| address.parse().unwrap());
            assert_eq!(parse_reverse_name(&name(text)), expected, "{text}");
        }
    }

    #[test]
    fn p17_reverse_names_are_bounded() {
        let mut reverse = ReverseNames::default();
        let address = |at: usize| IpAddr::from(Ipv4Addr::from_bits(at as u32));
        for at in 0..REVERSE_NAMES * 2 {
            reverse.insert(address(at), &name("a.example"));
            reverse.insert(address(at), &name("b.example"));
        }
        assert_eq!((reverse.names.len(), reverse.order.len()), (REVERSE_NAMES, REVERSE_NAMES));
        assert_eq!(reverse.name_of(address(0)), None, "the oldest is evicted first");
        assert_eq!(reverse.name_of(address(REVERSE_NAMES * 2 - 1)), Some(&name("b.example")));
    }
}
