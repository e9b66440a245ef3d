//! The resolver of the world: answers from a table, and remembers what it was asked.

use std::collections::BTreeMap;
use std::net::{IpAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::net::NetNamespace;

/// Where it answers.
pub(crate) const RESOLVER: &str = "9.9.9.9:53";

const A: u16 = 1;
const AAAA: u16 = 28;

#[derive(Debug, Default)]
struct FakeResolverState {
    known: Mutex<BTreeMap<String, Vec<IpAddr>>>,
    asked: Mutex<Vec<String>>,
    mute: AtomicBool,
}

#[derive(Clone, Debug)]
pub(crate) struct FakeResolver(Arc<FakeResolverState>);

impl FakeResolver {
    pub(crate) fn start(world: &NetNamespace) -> Self {
        let names = FakeResolver(Arc::default());
        // Answers must come from the address that was asked, which a wildcard socket does not see to.
        world.ip("addr add 9.9.9.9/32 dev lo\n");
        let socket = world.enter(|| UdpSocket::bind(RESOLVER)).unwrap();
        let inner = names.0.clone();
        std::thread::spawn(move || {
            let mut query = [0; 1500];
            while let Ok((length, from)) = socket.recv_from(&mut query) {
                if let Some(answer) = inner.answer(&query[..length]) {
                    drop(socket.send_to(&answer, from)); // whoever has gone needs no answer
                }
            }
        });
        names
    }

    /// Says what a name's addresses are from now on.
    pub(crate) fn set_addresses(&self, name: &str, addresses: &[&str]) {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        self.0.known.lock().unwrap().insert(name.to_owned(), addresses);
    }

    /// Every name it was asked for.
    pub(crate) fn queried_names(&self) -> Vec<String> {
        self.0.asked.lock().unwrap().clone()
    }

    /// Gives no answers any more.
    pub(crate) fn stop_answering(&self) {
        self.0.mute.store(true, Ordering::SeqCst);
    }
}

impl FakeResolverState {
    /// One question, answered with all the addresses of its type that the name has.
    fn answer(&self, query: &[u8]) -> Option<Vec<u8>> {
        let mut name = Vec::new();
        let mut at = 12;
        while let Some(length) = query.get(at).copied().map(usize::from).filter(|more| *more > 0) {
            name.push(String::from_utf8_lossy(query.get(at + 1..at + 1 + length)?).to_lowercase());
            at += 1 + length;
        }
        let kind = u16::from_be_bytes([*query.get(at + 1)?, *query.get(at + 2)?]);
        let name = name.join(".");
        self.asked.lock().unwrap().push(name.clone());
        if self.mute.load(Ordering::SeqCst) {
            return None;
        }
        let known = self.known.lock().unwrap().get(&name).cloned();
        let found: Vec<Vec<u8>> =
            known.iter().flatten().filter_map(|address| rdata(*address, kind)).collect();
        let code = if known.is_some() { 0 } else { 3 };
        let mut answer = query.get(..2)?.to_vec();
        answer.extend([0x81, 0x80 | code, 0, 1, 0, u8::try_from(found.len()).ok()?, 0, 0, 0, 0]);
        answer.extend(query.get(12..at + 5)?);
        for data in found {
            answer.extend([0xc0, 12]);
            answer.extend(kind.to_be_bytes());
            answer.extend([0, 1, 0, 0, 0, 60, 0, u8::try_from(data.len()).ok()?]);
            answer.extend(data);
        }
        Some(answer)
    }
}

fn rdata(address: IpAddr, kind: u16) -> Option<Vec<u8>> {
    match (address, kind) {
        (IpAddr::V4(address), A) => Some(address.octets().to_vec()),
        (IpAddr::V6(address), AAAA) => Some(address.octets().to_vec()),
        _ => None,
    }
}
