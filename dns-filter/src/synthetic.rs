//! Addresses that stand for names: one for each name of a sandbox that is reached by raw TCP, so that
//! the connection that follows names its host. Nothing of it is shared between sandboxes.

use std::collections::HashMap;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use rules::DomainName;

use crate::limits::SYNTHETIC_ADDRESSES;

/// The synthetic addresses of one sandbox, in the order in which it asked.
#[derive(Debug)]
pub(crate) struct SyntheticAddresses {
    range: Ipv4Net,
    by_name: HashMap<DomainName, Ipv4Addr>,
    names: Vec<DomainName>,
}

impl SyntheticAddresses {
    pub(crate) fn new(range: Ipv4Net) -> Self {
        SyntheticAddresses { range, by_name: HashMap::new(), names: Vec::new() }
    }

    /// The address of a name, for the life of the sandbox; none when the range is used up.
    pub(crate) fn address_of(&mut self, name: &DomainName) -> Option<Ipv4Addr> {
        if let Some(address) = self.by_name.get(name) {
            return Some(*address);
        }
        let address = self.nth_address(self.names.len())?;
        self.by_name.insert(name.clone(), address);
        self.names.push(name.clone());
        Some(address)
    }

    /// The name an address stands for in this sandbox.
    pub(crate) fn name_of(&self, address: Ipv4Addr) -> Option<&DomainName> {
        let first = u32::from(self.range.network()) + 1;
        let at = u32::from(address).checked_sub(first)?;
        self.names.get(at as usize)
    }

    /// The network's own address and its broadcast are nobody's.
    fn nth_address(&self, at: usize) -> Option<Ipv4Addr> {
        let room = 2usize.pow(32 - u32::from(self.range.prefix_len())) - 2;
        let at = u32::try_from(at).ok().filter(|_| at < room.min(SYNTHETIC_ADDRESSES))?;
        Some(Ipv4Addr::from(u32::from(self.range.network()) + 1 + at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p17_case_67_no_more_names_have_an_address_than_there_is_room_for() {
        let mut table = SyntheticAddresses::new("198.18.0.0/15".parse().unwrap());
        for at in 0..SYNTHETIC_ADDRESSES + 10 {
            let name = DomainName::parse(&format!("db{at}.corp.example")).unwrap();
            assert_eq!(table.address_of(&name).is_some(), at < SYNTHETIC_ADDRESSES, "{at}");
        }
        assert_eq!(
            (table.names.len(), table.by_name.len()),
            (SYNTHETIC_ADDRESSES, SYNTHETIC_ADDRESSES)
        );
    }

    #[test]
    fn a_name_keeps_its_address_and_the_range_ends() {
        let mut table = SyntheticAddresses::new("198.18.0.0/24".parse().unwrap());
        let name = |at: usize| DomainName::parse(&format!("db{at}.corp.example")).unwrap();
        let first = table.address_of(&name(0));
        assert_eq!(first, Some(Ipv4Addr::new(198, 18, 0, 1)));
        assert_eq!(table.address_of(&name(0)), first);
        for at in 1..254 {
            assert!(table.address_of(&name(at)).is_some(), "{at}");
        }
        assert_eq!(table.address_of(&name(254)), None);
        for (address, found) in [
            ([198, 18, 0, 1], Some("db0.corp.example")),
            ([198, 18, 0, 254], Some("db253.corp.example")),
            ([198, 18, 0, 0], None),
            ([198, 18, 0, 255], None),
            ([10, 0, 0, 1], None),
            ([255, 255, 255, 255], None),
        ] {
            let name = table.name_of(Ipv4Addr::from(address)).map(DomainName::as_str);
            assert_eq!(name, found, "{address:?}");
        }
    }
}
