//! Which addresses are ours: a query that was sent to another and answered here was meant to go around
//! us. The kernel knows; it is asked once in a while.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use tokio::time::Instant;

use crate::query::Toward;

/// How long an answer is believed.
const AGE: Duration = Duration::from_secs(10);
/// Addresses whose answer is remembered.
const REMEMBERED: usize = 64;

/// Tells queries to us from those to others.
#[derive(Debug)]
pub(super) struct Local {
    bind: IpAddr,
    known: Vec<(IpAddr, Toward, Instant)>,
}

impl Local {
    pub(super) fn new(bind: SocketAddr) -> Self {
        Local { bind: bind.ip(), known: Vec::new() }
    }

    /// Whom a query that was sent to `address` was meant for, as far as it is known.
    pub(super) fn toward(&mut self, address: Option<IpAddr>) -> Toward {
        match address.map(|address| address.to_canonical()) {
            None => Toward::Us,
            Some(address) if address == self.bind.to_canonical() => Toward::Us,
            Some(address) => self.ask(address),
        }
    }

    fn ask(&mut self, address: IpAddr) -> Toward {
        let now = Instant::now();
        self.known.retain(|(_, _, at)| now < *at + AGE);
        if let Some((_, toward, _)) = self.known.iter().find(|(known, _, _)| *known == address) {
            return *toward;
        }
        // Only an address of this host can be bound; broadcast and multicast are nobody's.
        let toward = match UdpSocket::bind((address, 0)) {
            Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => Toward::Elsewhere,
            Ok(_) | Err(_) => Toward::Us,
        };
        self.known.truncate(REMEMBERED - 1);
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
            ("0.0.0.0:53", Some("127.0.0.1"), Toward::Us),
            ("0.0.0.0:53", Some("127.0.0.53"), Toward::Us),
            ("0.0.0.0:53", Some("8.8.8.8"), Toward::Elsewhere),
            ("127.0.0.1:53", Some("127.0.0.1"), Toward::Us),
            ("127.0.0.1:53", Some("1.1.1.1"), Toward::Elsewhere),
            ("[::]:53", Some("::ffff:127.0.0.1"), Toward::Us),
            ("[::]:53", Some("2001:4860:4860::8888"), Toward::Elsewhere),
            ("0.0.0.0:53", None, Toward::Us),
        ] {
            let mut local = Local::new(bind.parse().unwrap());
            let to = to.map(|to| to.parse().unwrap());
            assert_eq!(local.toward(to), toward, "{bind} {to:?}");
            assert_eq!(local.toward(to), toward, "{bind} {to:?}, remembered");
        }
    }

    #[test]
    fn no_more_is_remembered_than_there_is_room_for() {
        let mut local = Local::new("0.0.0.0:53".parse().unwrap());
        for at in 0..200u8 {
            local.toward(Some(IpAddr::from([203, 0, 113, at])));
        }
        assert_eq!(local.known.len(), REMEMBERED);
    }
}
