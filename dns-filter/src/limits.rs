//! Every bound of the filter in one place (P17): waits, buffers, tables, caches.

use std::time::Duration;

/// Largest answer over UDP without EDNS (RFC 1035, 4.2.1).
pub const UDP_PLAIN: usize = 512;
/// Largest answer over UDP at all: what no path fragments.
pub const UDP_MAX: usize = 1232;
/// Largest query that is read over UDP; a question with its OPT has no need of more.
pub const QUERY_BYTES: usize = sys::datagrams::DATAGRAM_BYTES;
/// Largest answer that a resolver may give.
pub const ANSWER_BYTES: usize = 65_535;

/// Datagrams taken from the kernel, and handed to it, at a time.
pub const DATAGRAM_BATCH: usize = sys::datagrams::BATCH;
/// Queries that wait for a resolver, in all.
pub const IN_FLIGHT: usize = 8192;
/// Queries that wait for a resolver, of one sandbox.
pub const IN_FLIGHT_SANDBOX: usize = 2048;
/// Queries of one sandbox that wait for one and the same answer.
pub const FLIGHT_WAITERS: usize = 64;

/// Times a look-up begins again because whoever asked for it went away.
pub const FLIGHT_REJOINS: usize = 3;

/// How long a stop waits for queries in flight and for the connections they came by.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// TCP connections in all.
pub const TCP_CONNECTIONS: usize = 1024;
/// TCP connections of one sandbox.
pub const TCP_CONNECTIONS_SANDBOX: usize = 64;
/// Queries of one TCP connection that are worked on at once (RFC 7766, 6.2.1.1).
pub const TCP_PIPELINE: usize = 16;
/// How long a message may take from its first byte to its last.
pub const TCP_MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection may be idle.
pub const TCP_IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Octets of answers that wait in the kernel for one connection (it doubles this for its own use).
pub const TCP_SEND_BUFFER: usize = 64 << 10;
/// How long a peer may take to read an answer.
pub const TCP_WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long one resolver is given for one try.
pub const UPSTREAM_TRY_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long a query may take in all.
pub const UPSTREAM_DEADLINE: Duration = Duration::from_secs(4);
/// Tries over all resolvers.
pub const UPSTREAM_TRIES: usize = 3;
/// Sockets towards one resolver, each with a port of its own.
pub const UPSTREAM_SOCKETS: usize = 64;
/// Queries by one socket before it is drawn anew.
pub const UPSTREAM_SOCKET_USES: u32 = 512;
/// Queries that wait at one socket.
pub const UPSTREAM_SOCKET_PENDING: usize = 256;
/// Answers that fit nothing asked, before the query goes on over TCP.
pub const UPSTREAM_STRAYS: u32 = 8;
/// How long a resolver that failed is left alone.
pub const UPSTREAM_BACKOFF: Duration = Duration::from_secs(5);

/// Addresses of one name (`rules::MAX_ADDRESSES`).
pub const ADDRESSES: usize = rules::MAX_ADDRESSES;
/// Records of another kind in one answer.
pub const RECORDS: usize = 32;
/// Hops of a CNAME chain.
pub const CNAME_HOPS: usize = 8;
/// Shortest and longest time an answer is kept, in seconds.
pub const TTL_FLOOR: u32 = 30;
/// The same for a name that is charged: an hour of honest work is a few hundred bits then.
pub const TTL_FLOOR_CHARGED: u32 = 300;
pub const TTL_CEILING: u32 = 3600;
/// Longest time that a name's absence is kept, in seconds.
pub const TTL_NEGATIVE: u32 = 60;
/// How long an address that stands for a name may be kept by the sandbox, in seconds.
pub const TTL_SYNTHETIC: u32 = 60;

/// Cached answers of one sandbox.
pub const CACHE_SANDBOX: usize = 8192;
/// Cached answers in all.
pub const CACHE_ALL: usize = 262_144;
/// Synthetic addresses of one sandbox.
pub const SYNTHETIC_ADDRESSES: usize = 65_536;
/// Addresses of one sandbox whose name is remembered for its reverse look-ups.
pub const REVERSE_NAMES: usize = 4096;
/// Names resolved ahead, of one policy.
pub const PRE_RESOLVE_POLICY: usize = 256;
/// Names resolved ahead, in all.
pub const PRE_RESOLVE_ALL: usize = 4096;
/// Shortest and longest time between two look-ups ahead of the same name.
pub const PRE_RESOLVE_FLOOR: Duration = Duration::from_secs(60);
pub const PRE_RESOLVE_RETRY: Duration = Duration::from_secs(15);
/// Look-ups ahead at once.
pub const PRE_RESOLVE_AT_ONCE: usize = 32;

/// Rules of one sandbox that have a bit budget of their own; a further one has none to spend.
pub const BUDGET_RULES: usize = 4096;
/// Names remembered as sent, of one rule; a further one is paid for as new.
pub const BUDGET_NAMES: usize = 16_384;
/// Denials of one sandbox that have a record of their own, each second; the rest are counted.
pub const DENIED_RECORDS: u32 = 200;
/// Malformed packets in all that have a record of their own, each second.
pub const MALFORMED_RECORDS: u32 = 20;
/// Time between two findings of one kind for one sandbox.
pub const FINDING_INTERVAL: Duration = Duration::from_secs(600);
