//! Synthetic addresses: one for each name that a sandbox reaches by raw TCP, so that the destination address of the
//! connection identifies the name. Sandboxes share none of them.

use std::collections::HashMap;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use rules::DomainName;

use crate::limits::SYNTHETIC_ADDRESSES;

/// The synthetic addresses of one sandbox, in the order of first use.
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

    /// Returns the address of a name, assigned for the life of the sandbox; `None` if the range is used up.
    pub(crate) fn address_of(&mut self, name: &DomainName) -> Option<Ipv4Addr> {
        if let Some(address) = self.by_name.get(name) {
            return Some(*address);
        }
        let address = self.nth_address(self.names.len())?;
        self.by_name.insert(name.clone(), address);
        self.names.push(name.clone());
        Some(address)
    }

    /// Returns the name that has an address in this sandbox.
    pub(crate) fn name_of(&self, address: Ipv4Addr) -> Option<&DomainName> {
        let first = u32::from(self.range.network()) + 1;
        let at = u32::from(address).checked_sub(first)?;
        self.names.get(at as usize)
    }

    /// Returns the address at an index of the range, skipping the network and broadcast addresses.
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
    fn p17_case_67_synthetic_addresses_are_bounded() {
        let mut table = SyntheticAddresses::new("198.18.0.0/15".parse().unwrap());
        for at in 0..SYNTHETIC_ADDRESSES + 10 {
            let name = DomainName::parse(&format!("db{at}.corp.example")).unwrap();
            assert_eq!(table.address_of(&name).is_some(), at < SYNTHETIC_ADDRESSES, "{at}");
        }
        assert_eq!((table.names.len(), table.by_name.len()), (SYNTHETIC_ADDRESSES, SYNTHETIC_ADDRESSES));
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
