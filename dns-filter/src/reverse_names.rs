//! Which name an address was given for, of one sandbox: for the sandbox's own reverse look-ups and for
//! nothing else. No decision rests on it, since an address has many names.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rules::DomainName;

use crate::limits::REVERSE_NAMES;

/// The addresses a sandbox was told, the oldest forgotten first.
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

    /// Forgets all: what was learned under rules that are no more may not be allowed any more.
    pub(crate) fn clear(&mut self) {
        self.names.clear();
        self.order.clear();
    }
}

/// The address that a reverse name stands for (RFC 1035, 3.5 and RFC 3596, 2.5).
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
    fn only_whole_reverse_names_stand_for_an_address() {
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
    fn p17_no_more_is_learned_than_there_is_room_for() {
        let mut learned = ReverseNames::default();
        let address = |at: usize| IpAddr::from(Ipv4Addr::from_bits(at as u32));
        for at in 0..REVERSE_NAMES * 2 {
            learned.insert(address(at), &name("a.example"));
            learned.insert(address(at), &name("b.example"));
        }
        assert_eq!((learned.names.len(), learned.order.len()), (REVERSE_NAMES, REVERSE_NAMES));
        assert_eq!(learned.name_of(address(0)), None, "the oldest goes first");
        assert_eq!(learned.name_of(address(REVERSE_NAMES * 2 - 1)), Some(&name("b.example")));
    }
}
