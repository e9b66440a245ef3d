//! Our own upstream client. It builds every query from a name and a type only, so nothing else that a sandbox sent can
//! leave, and it accepts an answer only if id, question and letter case match. Ports, ids and letter case are random.
//! It repeats the query over TCP if the answer is truncated or if answers that match no query arrive.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use audit::Receipt;
use hickory_proto::op::{DEFAULT_MAX_PAYLOAD_LEN, Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::opt::{ClientSubnet, EdnsOption};
use hickory_proto::rr::{Name, RecordType};
use rules::DomainName;
use rules::configuration::DnsSettings;
use rules::facts::QueryType;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use crate::limits::{
    ANSWER_BYTES, UDP_MAX, UPSTREAM_BACKOFF, UPSTREAM_DEADLINE, UPSTREAM_TRIES, UPSTREAM_TRY_TIMEOUT,
};
use crate::lock;
use crate::socket::{UdpReply, UpstreamSockets};

/// Sends queries to upstream resolvers. Tests implement it to observe what leaves.
pub trait UpstreamClient: Send + Sync + 'static {
    /// Asks for a name and a type. The receipt proves that the query is in the log.
    fn ask<'a>(
        &'a self,
        name: &'a DomainName,
        kind: QueryType,
        receipt: &'a Receipt,
    ) -> std::pin::Pin<Box<dyn Future<Output = Result<UpstreamAnswer, UpstreamError>> + Send + 'a>>;

    /// Returns whether a configured `[[dns.zone]]` contains the name.
    fn has_zone(&self, name: &DomainName) -> bool;

    /// Returns whether a received query is one of our own that waits for its answer.
    fn is_own(&self, _id: u16, _question: &[u8]) -> bool {
        false
    }
}

/// A resolver's answer.
#[derive(Clone, Debug)]
pub struct UpstreamAnswer {
    pub message: Message,
    pub from: SocketAddr,
}

/// Why there is no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum UpstreamError {
    #[error("no resolver is configured for this name: add one to `upstreams` under `[dns]`")]
    NoResolver,
    #[error("no resolver answered within {0:?}")]
    TimedOut(Duration),
    #[error("the resolver {0} is unreachable")]
    Unreachable(SocketAddr),
    #[error("the resolver {0} sent an invalid answer")]
    Nonsense(SocketAddr),
}

/// All resolvers, by zone.
pub struct ResolverPool {
    /// Longest zone first; the last, without a name, is for all other names.
    zones: Vec<(Option<DomainName>, Vec<UpstreamResolver>)>,
    strays: AtomicU64,
    waiting: SentQueries,
}

/// The pending queries, by id and question, to detect forwarding loops. The id and the letter case are random, so a
/// sandbox cannot guess them; a match comes from a resolver that forwards to us.
#[derive(Default)]
struct SentQueries {
    queries: Mutex<HashSet<(u16, Box<[u8]>)>>,
    count: AtomicUsize,
}

/// A pending query, removed when dropped.
struct SentQuery<'a> {
    waiting: &'a SentQueries,
    query: (u16, Box<[u8]>),
}

impl SentQueries {
    fn register(&self, packet: &[u8]) -> Option<SentQuery<'_>> {
        let query = crate::message::DnsQuery::parse(packet).ok()?;
        let query = (query.id(), query.question().into());
        self.count.fetch_add(1, Ordering::Relaxed);
        lock(&self.queries).insert(query.clone());
        Some(SentQuery { waiting: self, query })
    }

    fn contains(&self, id: u16, question: &[u8]) -> bool {
        self.count.load(Ordering::Relaxed) > 0 && lock(&self.queries).contains(&(id, Box::from(question)))
    }
}

impl Drop for SentQuery<'_> {
    fn drop(&mut self) {
        lock(&self.waiting.queries).remove(&self.query);
        self.waiting.count.fetch_sub(1, Ordering::Relaxed);
    }
}

struct UpstreamResolver {
    address: SocketAddr,
    sockets: UpstreamSockets,
    health: Mutex<UpstreamHealth>,
}

#[derive(Debug, Default)]
struct UpstreamHealth {
    rests_until: Option<Instant>,
    plain: bool,
}

impl ResolverPool {
    pub fn new(settings: &DnsSettings) -> Self {
        let pool = |addresses: &[SocketAddr]| addresses.iter().map(|a| UpstreamResolver::new(*a)).collect();
        let mut zones: Vec<(Option<DomainName>, Vec<UpstreamResolver>)> =
            settings.zones.iter().map(|zone| (Some(zone.name.clone()), pool(&zone.upstreams))).collect();
        zones.sort_by_key(|(name, _)| std::cmp::Reverse(name.as_ref().map(|n| n.as_str().len())));
        zones.push((None, pool(&settings.upstreams)));
        ResolverPool { zones, strays: AtomicU64::new(0), waiting: SentQueries::default() }
    }

    /// Returns the number of answers that matched no query.
    pub fn strays(&self) -> u64 {
        self.strays.load(Ordering::Relaxed)
    }

    fn resolvers_for(&self, name: &DomainName) -> &[UpstreamResolver] {
        let holds =
            |zone: &Option<DomainName>| zone.as_ref().is_none_or(|zone| name.is_within(zone.as_str()));
        self.zones.iter().find(|(zone, _)| holds(zone)).map_or(&[], |(_, pool)| pool)
    }

    pub(crate) async fn ask_with_retries(
        &self,
        name: &DomainName,
        kind: QueryType,
    ) -> Result<UpstreamAnswer, UpstreamError> {
        let pool = self.resolvers_for(name);
        let deadline = Instant::now() + UPSTREAM_DEADLINE;
        let mut last = Err(UpstreamError::NoResolver);
        for turn in 0..UPSTREAM_TRIES {
            let Some(upstream) = choose_resolver(pool, turn) else { break };
            let until = deadline.min(Instant::now() + UPSTREAM_TRY_TIMEOUT);
            last = upstream.ask(name, kind, until, self).await;
            match &last {
                Ok(reply) if !is_failure(&reply.message) => {
                    upstream.mark_healthy();
                    return last;
                }
                Ok(_) if pool.len() == 1 => return last, // the only resolver would fail again
                Ok(_) | Err(_) => upstream.mark_failed(),
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        last
    }
}

impl UpstreamClient for ResolverPool {
    fn ask<'a>(
        &'a self,
        name: &'a DomainName,
        kind: QueryType,
        _receipt: &'a Receipt,
    ) -> std::pin::Pin<Box<dyn Future<Output = Result<UpstreamAnswer, UpstreamError>> + Send + 'a>> {
        Box::pin(self.ask_with_retries(name, kind))
    }

    fn is_own(&self, id: u16, question: &[u8]) -> bool {
        self.waiting.contains(id, question)
    }

    fn has_zone(&self, name: &DomainName) -> bool {
        self.zones.iter().any(|(zone, _)| zone.as_ref().is_some_and(|zone| name.is_within(zone.as_str())))
    }
}

fn is_failure(message: &Message) -> bool {
    !matches!(message.metadata.response_code, ResponseCode::NoError | ResponseCode::NXDomain)
}

/// Returns the resolver for a try: healthy ones in turn, or any if none is healthy.
fn choose_resolver(pool: &[UpstreamResolver], turn: usize) -> Option<&UpstreamResolver> {
    let now = Instant::now();
    let healthy: Vec<&UpstreamResolver> = pool.iter().filter(|upstream| upstream.is_healthy(now)).collect();
    let candidates = if healthy.is_empty() { pool.iter().collect() } else { healthy };
    candidates.get(turn % candidates.len().max(1)).copied()
}

impl UpstreamResolver {
    fn new(address: SocketAddr) -> Self {
        UpstreamResolver { address, sockets: UpstreamSockets::new(address), health: Mutex::default() }
    }

    fn is_healthy(&self, now: Instant) -> bool {
        lock(&self.health).rests_until.is_none_or(|until| until <= now)
    }

    fn mark_healthy(&self) {
        lock(&self.health).rests_until = None;
    }

    fn mark_failed(&self) {
        lock(&self.health).rests_until = Some(Instant::now() + UPSTREAM_BACKOFF);
    }

    async fn ask(
        &self,
        name: &DomainName,
        kind: QueryType,
        until: Instant,
        all: &ResolverPool,
    ) -> Result<UpstreamAnswer, UpstreamError> {
        let plain = lock(&self.health).plain;
        let reply = self.ask_once(name, kind, until, plain, all).await?;
        if reply.message.metadata.response_code == ResponseCode::FormErr && !plain {
            let reply = self.ask_once(name, kind, until, true, all).await?; // RFC 6891, 7
            lock(&self.health).plain = !is_failure(&reply.message);
            return Ok(reply);
        }
        Ok(reply)
    }

    async fn ask_once(
        &self,
        name: &DomainName,
        kind: QueryType,
        until: Instant,
        plain: bool,
        all: &ResolverPool,
    ) -> Result<UpstreamAnswer, UpstreamError> {
        let from = self.address;
        let timed_out = |_| UpstreamError::TimedOut(UPSTREAM_TRY_TIMEOUT);
        let question = build_question(name, kind).ok_or(UpstreamError::Nonsense(from))?;
        let mut registered = None;
        let packet = |id| {
            let packet = build_query(&question, id, plain)?;
            registered = all.waiting.register(&packet);
            Some(packet)
        };
        let asked = self.sockets.ask(&question, packet, &all.strays);
        match timeout_at(until, asked).await.map_err(timed_out)? {
            UdpReply::Fits(message) if !message.metadata.truncation => {
                Ok(UpstreamAnswer { message: *message, from })
            }
            UdpReply::Fits(_) | UdpReply::Contested => {
                let message =
                    timeout_at(until, self.ask_tcp(&question, plain, all)).await.map_err(timed_out)??;
                Ok(UpstreamAnswer { message, from })
            }
            UdpReply::Unreachable => Err(UpstreamError::Unreachable(from)),
        }
    }

    async fn ask_tcp(
        &self,
        question: &Query,
        plain: bool,
        all: &ResolverPool,
    ) -> Result<Message, UpstreamError> {
        let unreachable = |_| UpstreamError::Unreachable(self.address);
        let nonsense = UpstreamError::Nonsense(self.address);
        let id = rand::random();
        let query = build_query(question, id, plain).ok_or(nonsense.clone())?;
        let _registered = all.waiting.register(&query);
        let mut framed = (query.len() as u16).to_be_bytes().to_vec();
        framed.extend_from_slice(&query);
        let mut stream = TcpStream::connect(self.address).await.map_err(unreachable)?;
        stream.write_all(&framed).await.map_err(unreachable)?;
        let length = stream.read_u16().await.map_err(unreachable)?;
        let mut answer = vec![0; usize::from(length).min(ANSWER_BYTES)];
        stream.read_exact(&mut answer).await.map_err(unreachable)?;
        let message = Message::from_vec(&answer).map_err(|_| nonsense.clone())?;
        match message.metadata.id == id && answers_question(question, &message) {
            true => Ok(message),
            false => Err(nonsense),
        }
    }
}

/// Builds the question, with the case of every letter chosen at random.
fn build_question(name: &DomainName, kind: QueryType) -> Option<Query> {
    let mut name = Name::from_ascii(format!("{name}.")).ok()?;
    name.randomize_label_case();
    Some(Query::query(name, RecordType::from(kind.0)))
}

/// Builds a query with our own flags and EDNS, and nothing about the client.
fn build_query(question: &Query, id: u16, plain: bool) -> Option<Vec<u8>> {
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(question.clone());
    if !plain {
        let mut edns = Edns::new();
        edns.set_max_payload((UDP_MAX as u16).min(DEFAULT_MAX_PAYLOAD_LEN)).set_version(0);
        // RFC 7871, 7.1.2: a zero prefix forbids resolvers to add the client's subnet.
        let no_subnet = ClientSubnet::new(std::net::Ipv4Addr::UNSPECIFIED.into(), 0, 0);
        edns.options_mut().insert(EdnsOption::Subnet(no_subnet));
        message.set_edns(edns);
    }
    message.to_vec().ok()
}

/// Returns whether a message answers the question, with the same letter case.
pub(crate) fn answers_question(question: &Query, message: &Message) -> bool {
    let [echoed] = message.queries.as_slice() else { return false };
    message.metadata.message_type == MessageType::Response
        && message.metadata.op_code == OpCode::Query
        && echoed.name.eq_case(&question.name)
        && echoed.query_type == question.query_type
        && echoed.query_class == question.query_class
}
