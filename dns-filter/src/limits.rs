//! Every bound of the filter in one place (P17): waits, buffers, tables, caches.

use std::time::Duration;

/// Largest answer over UDP without EDNS (RFC 1035, 4.2.1).
pub const UDP_PLAIN: usize = 512;
/// Largest answer over UDP with EDNS: small enough to avoid fragmentation.
pub const UDP_MAX: usize = 1232;
/// Largest query; a question with its OPT record is smaller.
pub const QUERY_BYTES: usize = sys::datagrams::DATAGRAM_BYTES;
/// Largest answer of a resolver.
pub const ANSWER_BYTES: usize = 65_535;

/// UDP sockets of an address whose queries belong to several sandboxes: each sandbox's queries wait in one of them.
pub const SHARED_SOCKETS: usize = 32;
/// Datagrams per `recvmmsg` and `sendmmsg`.
pub const DATAGRAM_BATCH: usize = sys::datagrams::BATCH;
/// Upstream queries in flight, in all. Half of them are divided among the sandboxes: a share that no other can take.
pub const IN_FLIGHT: usize = 8192;
/// Upstream queries in flight, per sandbox.
pub const IN_FLIGHT_SANDBOX: usize = 2048;
/// Queries that wait for an upstream query of their own or of others, in all; shared like [`IN_FLIGHT`].
pub const WAITING: usize = 8192;
/// Queries that wait, per sandbox.
pub const WAITING_SANDBOX: usize = 4096;
/// Queries that join one query in flight.
pub const FLIGHT_WAITERS: usize = 64;

/// Times a look-up joins or leads a flight before it gives up, because the leaders were cancelled.
pub const FLIGHT_REJOINS: usize = 3;

/// How long shutdown waits for queries in flight and open connections.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// TCP connections of sandboxes, in all; shared like [`IN_FLIGHT`].
pub const TCP_CONNECTIONS: usize = 1024;
/// TCP connections per sandbox.
pub const TCP_CONNECTIONS_SANDBOX: usize = 64;
/// TCP connections of channels that belong to no sandbox.
pub const TCP_CONNECTIONS_UNKNOWN: usize = 64;
/// Concurrent queries per TCP connection (RFC 7766, 6.2.1.1).
pub const TCP_PIPELINE: usize = 16;
/// How long a message may take from first to last byte.
pub const TCP_MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection may be idle.
pub const TCP_IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Send buffer of a connection, in octets (the kernel doubles it for bookkeeping).
pub const TCP_SEND_BUFFER: usize = 64 << 10;
/// How long a client may take to read an answer.
pub const TCP_WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout of one try at one resolver.
pub const UPSTREAM_TRY_TIMEOUT: Duration = Duration::from_millis(1500);
/// Deadline of a query over all tries.
pub const UPSTREAM_DEADLINE: Duration = Duration::from_secs(4);
/// Tries over all resolvers.
pub const UPSTREAM_TRIES: usize = 3;
/// Sockets per resolver, each with its own port.
pub const UPSTREAM_SOCKETS: usize = 64;
/// Queries per socket before a new one, with another port, replaces it.
pub const UPSTREAM_SOCKET_USES: u32 = 512;
/// Pending queries per socket.
pub const UPSTREAM_SOCKET_PENDING: usize = 256;
/// Answers that match no pending query before the pending ones are repeated over TCP.
pub const UPSTREAM_STRAYS: u32 = 8;
/// How long a resolver that failed is not asked while others are healthy.
pub const UPSTREAM_BACKOFF: Duration = Duration::from_secs(5);

/// Addresses per name (`rules::MAX_ADDRESSES`).
pub const ADDRESSES: usize = rules::MAX_ADDRESSES;
/// Records per answer.
pub const RECORDS: usize = 32;
/// Hops of a CNAME chain.
pub const CNAME_HOPS: usize = 8;
/// Shortest TTL of an answer, in seconds.
pub const TTL_FLOOR: u32 = 30;
/// Shortest TTL of an answer for a charged name: it keeps an hour of honest work at a few hundred bits.
pub const TTL_FLOOR_CHARGED: u32 = 300;
/// Longest TTL of an answer, in seconds.
pub const TTL_CEILING: u32 = 3600;
/// Longest TTL of a negative answer, in seconds.
pub const TTL_NEGATIVE: u32 = 60;
/// TTL of a synthetic address, in seconds.
pub const TTL_SYNTHETIC: u32 = 60;

/// Cached answers per sandbox.
pub const CACHE_SANDBOX: usize = 8192;
/// Cached answers in all.
pub const CACHE_ALL: usize = 262_144;
/// Synthetic addresses per sandbox.
pub const SYNTHETIC_ADDRESSES: usize = 65_536;
/// Addresses per sandbox with a name for reverse look-ups.
pub const REVERSE_NAMES: usize = 4096;
/// Pre-resolved names per policy.
pub const PRE_RESOLVE_POLICY: usize = 256;
/// Pre-resolved names in all.
pub const PRE_RESOLVE_ALL: usize = 4096;
/// Shortest time between two successful pre-resolutions of a name.
pub const PRE_RESOLVE_FLOOR: Duration = Duration::from_secs(60);
/// Time to the next try after a failed pre-resolution.
pub const PRE_RESOLVE_RETRY: Duration = Duration::from_secs(15);
/// Concurrent pre-resolutions.
pub const PRE_RESOLVE_AT_ONCE: usize = 32;

/// How long a query waits until the budget file says that its rule has had its burst.
pub const BUDGET_WRITE_WAIT: Duration = Duration::from_secs(2);
/// How long a stop waits for the budget file.
pub const BUDGET_SAVE_WAIT: Duration = Duration::from_secs(5);
/// Sandboxes that have left and whose budgets are not full again. Beyond that, states of sandboxes that leave are kept.
pub const DEPARTED_SANDBOXES: usize = 16_384;
/// Longest time until the default budgets are full again: those that an earlier process left are forgotten after it.
pub const BUDGET_REFILL: Duration = Duration::from_secs(2 * 3600);
/// Rules per sandbox with a bit budget; a rule beyond that has an empty one.
pub const BUDGET_RULES: usize = 4096;
/// Names per rule remembered as sent; a name beyond that is charged as new each time.
pub const BUDGET_NAMES: usize = 16_384;
/// Time between two findings with the same code for one sandbox.
pub const FINDING_INTERVAL: Duration = Duration::from_secs(600);
