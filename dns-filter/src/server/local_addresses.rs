//! Tells queries sent to this host from queries sent to another resolver and redirected here. Asks the kernel which
//! addresses are local, and caches the result for a while.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use tokio::time::Instant;

use crate::query::QueryTarget;

/// How long a result is cached.
const ADDRESS_AGE: Duration = Duration::from_secs(10);
/// Number of cached results.
const REMEMBERED_ADDRESSES: usize = 64;

/// A cache of local and foreign addresses.
#[derive(Debug)]
pub(super) struct LocalAddresses {
    bind: IpAddr,
    known: Vec<(IpAddr, QueryTarget, Instant)>,
}

impl LocalAddresses {
    pub(super) fn new(bind: SocketAddr) -> Self {
        LocalAddresses { bind: bind.ip(), known: Vec::new() }
    }

    /// Returns the target of a query sent to `address`; an unknown address counts as ours.
    pub(super) fn query_target(&mut self, address: Option<IpAddr>) -> QueryTarget {
        match address.map(|address| address.to_canonical()) {
            None => QueryTarget::Us,
            Some(address) if address == self.bind.to_canonical() => QueryTarget::Us,
            Some(address) => self.probe_address(address),
        }
    }

    fn probe_address(&mut self, address: IpAddr) -> QueryTarget {
        let now = Instant::now();
        self.known.retain(|(_, _, at)| now < *at + ADDRESS_AGE);
        if let Some((_, toward, _)) = self.known.iter().find(|(known, _, _)| *known == address) {
            return *toward;
        }
        // Only an address of this host, or a broadcast or multicast address, can be bound.
        let toward = match UdpSocket::bind((address, 0)) {
            Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => QueryTarget::Elsewhere,
            Ok(_) | Err(_) => QueryTarget::Us,
        };
        self.known.truncate(REMEMBERED_ADDRESSES - 1);
        self.known.push((address, toward, now));
        toward
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_this_host_are_ours() {
        for (bind, to, toward) in [
            ("0.0.0.0:53", Some("127.0.0.1"), QueryTarget::Us),
            ("0.0.0.0:53", Some("127.0.0.53"), QueryTarget::Us),
            ("0.0.0.0:53", Some("8.8.8.8"), QueryTarget::Elsewhere),
            ("127.0.0.1:53", Some("127.0.0.1"), QueryTarget::Us),
            ("127.0.0.1:53", Some("1.1.1.1"), QueryTarget::Elsewhere),
            ("[::]:53", Some("::ffff:127.0.0.1"), QueryTarget::Us),
            ("[::]:53", Some("2001:4860:4860::8888"), QueryTarget::Elsewhere),
            ("0.0.0.0:53", None, QueryTarget::Us),
        ] {
            let mut local = LocalAddresses::new(bind.parse().unwrap());
            let to = to.map(|to| to.parse().unwrap());
            assert_eq!(local.query_target(to), toward, "{bind} {to:?}");
            assert_eq!(local.query_target(to), toward, "{bind} {to:?}, remembered");
        }
    }

    #[test]
    fn p17_cached_results_are_bounded() {
        let mut local = LocalAddresses::new("0.0.0.0:53".parse().unwrap());
        for at in 0..200u8 {
            local.query_target(Some(IpAddr::from([203, 0, 113, at])));
        }
        assert_eq!(local.known.len(), REMEMBERED_ADDRESSES);
    }
}
