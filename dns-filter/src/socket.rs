//! UDP sockets towards one resolver, against spoofed answers: many of them, each connected, each with a random port and
//! replaced after a number of queries. An answer must match the id and the question of a query sent by the same socket.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use hickory_proto::op::{Message, Query};
use rand::RngExt;
use tokio::net::UdpSocket;
use tokio::sync::oneshot;

use crate::limits::{UPSTREAM_SOCKET_PENDING, UPSTREAM_SOCKET_USES, UPSTREAM_SOCKETS, UPSTREAM_STRAYS};
use crate::lock;
use crate::upstream::answers_question;

/// First unprivileged port.
const FIRST_PORT: u16 = 1024;
/// Largest answer over UDP, more than we announce in EDNS.
const REPLY_BUFFER: usize = 4096;
/// Random ports to try, since one may be in use.
const PORT_ATTEMPTS: usize = 16;

/// The result of a query over UDP.
#[derive(Debug)]
pub(crate) enum UdpReply {
    /// Too many answers that match no query, so possibly an attack: repeat over TCP, which is hard to spoof.
    Contested,
    Fits(Box<Message>),
    Unreachable,
}

/// The sockets towards one resolver.
pub(crate) struct UpstreamSockets {
    resolver: SocketAddr,
    open: Mutex<Vec<Arc<UpstreamSocket>>>,
}

/// One socket and the queries that wait for an answer on it.
struct UpstreamSocket {
    socket: UdpSocket,
    uses: AtomicU32,
    waiting: Mutex<HashMap<u16, ReplyWaiter>>,
}

struct ReplyWaiter {
    question: Query,
    strays: u32,
    reply: oneshot::Sender<UdpReply>,
}

impl UpstreamSockets {
    pub(crate) fn new(resolver: SocketAddr) -> Self {
        UpstreamSockets { resolver, open: Mutex::default() }
    }

    /// Sends a query with a random id on a random socket, and waits for the matching answer.
    pub(crate) async fn ask(
        &self,
        question: &Query,
        build: impl FnOnce(u16) -> Option<Vec<u8>>,
        strays: &AtomicU64,
    ) -> UdpReply {
        let Ok(port) = self.pick_socket() else { return UdpReply::Unreachable };
        let (sender, receiver) = oneshot::channel();
        let Some(guard) = port.register(question, sender) else { return UdpReply::Unreachable };
        let Some(packet) = build(guard.id) else { return UdpReply::Unreachable };
        if port.socket.send(&packet).await.is_err() {
            return UdpReply::Unreachable;
        }
        let reply = receiver.await.unwrap_or(UdpReply::Unreachable);
        if matches!(reply, UdpReply::Contested) {
            strays.fetch_add(u64::from(UPSTREAM_STRAYS), Ordering::Relaxed);
        }
        reply
    }

    /// Returns a random socket; a new one while there are few, or in place of one that has sent enough queries.
    fn pick_socket(&self) -> io::Result<Arc<UpstreamSocket>> {
        let mut open = lock(&self.open);
        let at = rand::rng().random_range(0..UPSTREAM_SOCKETS);
        if let Some(port) = open.get(at) {
            if port.uses.fetch_add(1, Ordering::Relaxed) < UPSTREAM_SOCKET_USES {
                return Ok(port.clone());
            }
            let fresh = UpstreamSocket::open(self.resolver)?;
            if let Some(place) = open.get_mut(at) {
                *place = fresh.clone(); // the old one stays open until its last query is done
            }
            return Ok(fresh);
        }
        let fresh = UpstreamSocket::open(self.resolver)?;
        open.push(fresh.clone());
        Ok(fresh)
    }
}

impl UpstreamSocket {
    fn open(resolver: SocketAddr) -> io::Result<Arc<Self>> {
        let socket = UdpSocket::from_std(bind_random_port(resolver)?)?;
        let port = Arc::new(UpstreamSocket { socket, uses: AtomicU32::new(1), waiting: Mutex::default() });
        tokio::spawn(read_replies(Arc::downgrade(&port)));
        Ok(port)
    }

    /// Registers a query under a free random id; `None` if too many are pending.
    fn register(
        self: &Arc<Self>,
        question: &Query,
        reply: oneshot::Sender<UdpReply>,
    ) -> Option<QueryIdGuard> {
        let mut waiting = lock(&self.waiting);
        if waiting.len() >= UPSTREAM_SOCKET_PENDING {
            return None;
        }
        let mut id = rand::random();
        while waiting.contains_key(&id) {
            id = rand::random();
        }
        waiting.insert(id, ReplyWaiter { question: question.clone(), strays: 0, reply });
        Some(QueryIdGuard { port: self.clone(), id })
    }

    fn deliver(&self, packet: &[u8]) {
        let message = Message::from_vec(packet).ok();
        let mut waiting = lock(&self.waiting);
        if let Some(message) = message {
            let id = message.metadata.id;
            if waiting.get(&id).is_some_and(|waiter| answers_question(&waiter.question, &message)) {
                if let Some(waiter) = waiting.remove(&id) {
                    drop(waiter.reply.send(UdpReply::Fits(Box::new(message))));
                }
                return;
            }
        }
        count_stray(&mut waiting);
    }

    fn fail_waiters(&self) {
        for (_, waiter) in lock(&self.waiting).drain() {
            drop(waiter.reply.send(UdpReply::Unreachable));
        }
    }
}

/// Counts an answer that matches no query against all queries pending on the socket.
fn count_stray(waiting: &mut HashMap<u16, ReplyWaiter>) {
    for waiter in waiting.values_mut() {
        waiter.strays += 1;
    }
    let contested: Vec<u16> =
        waiting.iter().filter(|(_, waiter)| waiter.strays >= UPSTREAM_STRAYS).map(|(id, _)| *id).collect();
    for id in contested {
        if let Some(waiter) = waiting.remove(&id) {
            drop(waiter.reply.send(UdpReply::Contested));
        }
    }
}

/// The id of a pending query, released when dropped.
struct QueryIdGuard {
    port: Arc<UpstreamSocket>,
    id: u16,
}

impl Drop for QueryIdGuard {
    fn drop(&mut self) {
        lock(&self.port.waiting).remove(&self.id);
    }
}

/// Reads answers from a socket until its last owner drops it.
async fn read_replies(port: Weak<UpstreamSocket>) {
    let mut buffer = vec![0; REPLY_BUFFER];
    loop {
        let Some(port) = port.upgrade() else { return };
        let wait = port.socket.readable();
        // Release the reference from time to time, so that an idle socket closes once it is dropped elsewhere.
        let ready = tokio::time::timeout(crate::limits::UPSTREAM_DEADLINE, wait).await;
        if ready.is_err() {
            continue;
        }
        loop {
            match port.socket.try_recv(&mut buffer) {
                Ok(length) => port.deliver(buffer.get(..length).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    port.fail_waiters(); // an ICMP error: the resolver is unreachable
                    break;
                }
            }
        }
    }
}

/// Binds a random port and connects, so that the kernel drops answers from other addresses.
fn bind_random_port(resolver: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let any = |port| match resolver {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)),
    };
    let mut drawn = (0..PORT_ATTEMPTS).map(|_| rand::rng().random_range(FIRST_PORT..=u16::MAX));
    let socket = drawn
        .find_map(|port| std::net::UdpSocket::bind(any(port)).ok())
        .map_or_else(|| std::net::UdpSocket::bind(any(0)), Ok)?;
    socket.connect(resolver)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::{Name, RecordType};

    use super::*;

    fn question() -> Query {
        Query::query(Name::from_ascii("a.example.").unwrap(), RecordType::A)
    }

    #[tokio::test]
    async fn p17_sockets_and_queries_per_socket_are_bounded() {
        let resolver = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let sockets = UpstreamSockets::new(resolver.local_addr().unwrap());
        let mut ports = std::collections::HashSet::new();
        for _ in 0..UPSTREAM_SOCKETS * 40 {
            let port = sockets.pick_socket().unwrap();
            ports.insert(port.socket.local_addr().unwrap().port());
            assert!(lock(&sockets.open).len() <= UPSTREAM_SOCKETS);
        }
        assert!(ports.len() > UPSTREAM_SOCKETS / 2, "{}", ports.len());
        let first = lock(&sockets.open)[0].clone();
        first.uses.store(UPSTREAM_SOCKET_USES, Ordering::Relaxed);
        while Arc::ptr_eq(&lock(&sockets.open)[0], &first) {
            sockets.pick_socket().unwrap(); // until a random pick hits the used-up socket and replaces it
        }
    }

    #[tokio::test]
    async fn p17_pending_queries_per_socket_are_bounded() {
        let resolver = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = UpstreamSocket::open(resolver.local_addr().unwrap()).unwrap();
        let enter = || port.register(&question(), oneshot::channel().0);
        let mut guards: Vec<QueryIdGuard> = (0..UPSTREAM_SOCKET_PENDING).filter_map(|_| enter()).collect();
        assert_eq!(guards.len(), UPSTREAM_SOCKET_PENDING);
        assert!(enter().is_none(), "one too many");
        guards.pop();
        assert!(enter().is_some(), "a released id is free again");
    }
}
