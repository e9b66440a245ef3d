//! What each object costs at worst, as its quota counts it, and `proxy/LIMITS.md`, which adds it up (P17).

use rules::limits::TrafficLimits;
use rules::quota::{MachineLimits, QuotaSettings, Resource};
use rules::signals::content::{MAX_OPEN_STREAMS, MAX_OPEN_VIEWS, MAX_UNDECIDED, VIEW_BYTES};
use rules::signals::decode::STREAM_BYTES;
use rules::signals::flow::{DEFAULT_FINGERPRINTS, FlowTable, MIN_FINGERPRINTS};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Memory of an accepted connection: TLS state, its task, and its first bytes.
pub(crate) const CONNECTION_BYTES: u64 = 64 * KIB;
/// Largest flow-control window of a client's HTTP/2 connection: what its streams can have sent that nobody has read.
/// Sandboxes are near: a round trip takes far less than a millisecond.
pub(crate) const HTTP2_WINDOW: u64 = 512 * KIB;
/// Largest flow-control window of one of its streams.
pub(crate) const HTTP2_STREAM_WINDOW: u64 = 128 * KIB;
/// Bytes that `h2` may queue for one stream of a client.
pub(crate) const SEND_QUEUE_BYTES: u64 = 64 * KIB;
/// Memory of an open request besides its head and bodies: the tasks and queues of Pingora and `h2`.
pub(crate) const REQUEST_BYTES: u64 = 32 * KIB;
/// Copies of a request head that exist at once: as received, as forwarded, as encoded.
pub(crate) const HEAD_COPIES: u64 = 3;
/// Memory of a request body on its way up: what `h2` queues towards an origin server (400 KiB), and Pingora's buffers.
pub(crate) const UPLOAD_BYTES: u64 = 512 * KIB;
/// Bytes of a block in which bodies leave.
pub(crate) const BLOCK_BYTES: usize = 16 << 10;
/// Most bytes of a body that wait to leave: what is undecided, less than a block of what is decided, a block that came
/// last, and two that were read ahead. What Pingora keeps for a retry is among its own buffers.
pub(crate) const HELD_BYTES: u64 = (MAX_UNDECIDED + 4 * BLOCK_BYTES) as u64;
/// Memory that the search of one body takes before anything in it is decoded: the scanner with its raw view.
pub(crate) const SEARCH_BYTES: usize = 128 << 10;
/// Memory that the search of one request takes at most.
const SEARCH_MOST: u64 =
    (SEARCH_BYTES + MAX_OPEN_VIEWS * VIEW_BYTES + MAX_OPEN_STREAMS * STREAM_BYTES) as u64;
/// Memory of a response body on its way down. Pingora queues up to five buffers of 64 KiB, TLS as much again on either
/// side, and `h2` [`SEND_QUEUE_BYTES`]; a download that nobody reads was measured at 770 KiB.
pub(crate) const DOWNLOAD_BYTES: u64 = 11 * 64 * KIB + SEND_QUEUE_BYTES;
/// Memory of a dialled connection: TLS state and its task.
pub(crate) const DIALLED_BYTES: u64 = 32 * KIB;
/// Smallest HTTP/2 window.
pub(crate) const MIN_WINDOW: u64 = 64 * KIB;
/// Largest HTTP/2 window towards an origin server, for all streams of a connection.
pub(crate) const MAX_WINDOW: u64 = 4 * MIB;
/// What one download over HTTP/2 on both sides reserves, with the smallest windows and a small head.
pub(crate) const DOWNLOAD_SHARE: u64 =
    CONNECTION_BYTES + MIN_WINDOW + REQUEST_BYTES + DOWNLOAD_BYTES + DIALLED_BYTES + MIN_WINDOW;
/// A new HTTP/2 window has at most this part of the memory that its sandbox may still reserve...
pub(crate) const WINDOW_PART: u64 = 16;
/// ...and of the sandbox's share.
pub(crate) const WINDOWS_PER_SHARE: u64 = 8;
/// Kernel memory of a direction of a tunnel that is stalled, besides the receive buffer of one socket: a pipe, and what
/// waits unsent in the other socket.
pub(crate) const STALLED_BYTES: u64 = 640 * KIB;
/// Receive buffer of a socket that has not received much yet.
const FRESH_RECEIVE_BUFFER: u64 = 128 * KIB;
/// What one stalled direction reserves at least.
pub(crate) const STALLED_SHARE: u64 = STALLED_BYTES + FRESH_RECEIVE_BUFFER;
/// Descriptors of a tunnel's pipes, one for each direction.
pub(crate) const PIPE_DESCRIPTORS: u64 = 4;

/// Memory of the form of requests to one host; measured at 74 KB.
pub(crate) const SHAPE_BYTES: u64 = 80 * KIB;
/// Memory of the prices of requests to one host.
pub(crate) const PRICES_BYTES: u64 = rules::signals::bits::HOST_BYTES as u64;
/// Memory of one flow of recalled text that `sandbar flow` shows.
pub(crate) const FLOW_BYTES: u64 = KIB;
/// What the inspection of one host and of little recalled text reserves.
pub(crate) const INSPECTION_SHARE: u64 = SHAPE_BYTES + PRICES_BYTES + 64 * KIB;

/// TLS handshakes of one sandbox that run at once. The others wait, so that they do not fill the processor's queue.
pub(crate) const HANDSHAKES: usize = 16;
/// A document of a memory service above this size is checked off the runtime, one at a time for each sandbox.
pub(crate) const LARGE_DOCUMENT: usize = 256 << 10;

/// The machine of the worked example in `proxy/LIMITS.md`.
const EXAMPLE: MachineLimits =
    MachineLimits { memory: 512 * MIB, descriptors: 1_048_576, ports: 28_232, tcp_memory: 384 * MIB };
/// Its number of sandboxes.
const EXAMPLE_SANDBOXES: u64 = 4;

/// Returns the content of `proxy/LIMITS.md`.
pub fn limits_markdown() -> String {
    let mut text = rules::limits::markdown_table();
    text += "\n# Quotas\n\nWhat a sandbox can make the gateway hold is reserved from its quota first, and refused \
             without one (`quota_exhausted`, `too_many_connections`, `out_of_ports`). Each total is divided: half of \
             it in equal shares, one for each `[[sandbox]]`, which nobody else can take; the other half is common. \
             `[quota]` in the configuration changes this, for example `requests = { total = 10000, per_sandbox = \
             2000, share = 100 }`. `sandbar status --sandbox ID` shows the use.\n\n\
             | key | default total | counts |\n| --- | --- | --- |\n";
    for resource in Resource::ALL {
        text += &format!("| `{}` | {} | {} |\n", resource.key(), resource.source(), resource.meaning());
    }
    text += "\n## What things cost\n\nMemory is reserved by what an object can hold at worst: its windows, queues and \
             buffers, added up. A body that announces its length reserves no more than that.\n\n\
             | object | reserves |\n| --- | --- |\n";
    for (object, cost) in costs(&TrafficLimits::default()) {
        text += &format!("| {object} | {cost} |\n");
    }
    text += &format!(
        "\n## The products, worked out\n\nWith default settings, on a machine with {} of memory and {EXAMPLE_SANDBOXES} \
         sandboxes. *Alone* is what one sandbox can take while the others are idle, *kept* what each has left then.\n\n\
         | resource | total | alone | kept |\n| --- | --- | --- | --- |\n",
        bytes(EXAMPLE.memory)
    );
    let (settings, limits) = (QuotaSettings::default(), TrafficLimits::default());
    for resource in Resource::ALL {
        let Ok(terms) = settings.terms(*resource, &EXAMPLE, &limits, EXAMPLE_SANDBOXES) else { continue };
        let common = terms.total - terms.share * EXAMPLE_SANDBOXES;
        let row = [terms.total, (terms.share + common).min(terms.cap), terms.share];
        let row = row.map(|amount| amount_text(*resource, amount)).join(" | ");
        text += &format!("| {} | {row} |\n", resource.noun());
    }
    text += "\nSo the buffers of that machine hold, at most, one of these, or any mixture:\n\n\
             | objects | all sandboxes | one alone | kept for each |\n| --- | --- | --- | --- |\n";
    let buffers = settings.terms(Resource::Buffers, &EXAMPLE, &limits, EXAMPLE_SANDBOXES);
    for (object, cost) in products(&limits) {
        let Ok(terms) = buffers else { continue };
        let alone = terms.total - terms.share * (EXAMPLE_SANDBOXES - 1);
        let row = [terms.total, alone, terms.share].map(|amount| (amount / cost).to_string()).join(" | ");
        text += &format!("| {object}, {} each | {row} |\n", bytes(cost));
    }
    text += "\nWhat the inspection remembers is never refused: a sandbox that may not remember more gives up its own \
             oldest, hosts before recalled text. Requests to a forgotten host cost their full bits again, and their form is \
             compared with nothing; text that was given up is not recognised any more. Besides, each sandbox may hold \
             32 KiB, and 4 bytes for each character of the canaries. While a table of fingerprints grows, its old and its \
             new memory exist, in at most one table for each thread. On that machine the inspection remembers, at most:\n\n\
             | objects | all sandboxes | one alone | kept for each |\n| --- | --- | --- | --- |\n";
    if let Ok(terms) = settings.terms(Resource::Inspection, &EXAMPLE, &limits, EXAMPLE_SANDBOXES) {
        let alone = terms.total - terms.share * (EXAMPLE_SANDBOXES - 1);
        for (object, cost) in [
            ("hosts, priced and compared", PRICES_BYTES + SHAPE_BYTES),
            ("full tables of recalled text", FlowTable::bytes_for(DEFAULT_FINGERPRINTS) as u64),
        ] {
            let row = [terms.total, alone, terms.share].map(|amount| (amount / cost).to_string()).join(" | ");
            text += &format!("| {object}, {} each | {row} |\n", bytes(cost));
        }
    }
    text
}

fn costs(limits: &TrafficLimits) -> Vec<(String, String)> {
    let head = limits.head_bytes;
    [
        ("connection", format!("{} of buffers, 1 connection, 1 descriptor", bytes(CONNECTION_BYTES))),
        (
            "connection until it is decided, in addition",
            format!("{} of buffers: `hello_bytes`", bytes(limits.hello_bytes)),
        ),
        ("HTTP/2 connection, in addition", format!("its window, {} to {} of buffers", bytes(MIN_WINDOW), bytes(HTTP2_WINDOW))),
        (
            "request or HTTP/2 stream",
            format!(
                "1 request, {} of buffers and {HEAD_COPIES} times its head (at most {})",
                bytes(REQUEST_BYTES),
                bytes(head)
            ),
        ),
        ("request body", format!("at most {} of buffers", bytes(UPLOAD_BYTES))),
        (
            "request body on its way out, in addition",
            format!("at most {} of buffers: what is undecided, and blocks", bytes(HELD_BYTES)),
        ),
        (
            "body that is searched, in addition",
            format!("at most {} of buffers; with all that follows, {}", bytes(SEARCH_BYTES as u64), bytes(SEARCH_MOST)),
        ),
        ("encoded part of what is searched", format!("{}, at most {MAX_OPEN_VIEWS} at a time", bytes(VIEW_BYTES as u64))),
        (
            "compressed part of what is searched, in addition",
            format!("{}, at most {MAX_OPEN_STREAMS} at a time", bytes(STREAM_BYTES as u64)),
        ),
        ("response body", format!("at most {} of buffers", bytes(DOWNLOAD_BYTES))),
        ("memory request body", format!("its bytes, at most {}", bytes(limits.memory_body_bytes))),
        ("memory response body", format!("its bytes, at most {}", bytes(limits.memory_answer_bytes))),
        (
            "connection to an origin server",
            format!("{} of buffers, 1 descriptor, 1 port until a minute after its end", bytes(DIALLED_BYTES)),
        ),
        (
            "HTTP/2 connection to an origin server in use, in addition",
            format!(
                "its window, {} to {} of buffers: at most 1/{WINDOW_PART} of what the sandbox may still reserve, and \
                 1/{WINDOWS_PER_SHARE} of its share",
                bytes(MIN_WINDOW),
                bytes(MAX_WINDOW)
            ),
        ),
        (
            "tunnel, besides its two connections",
            format!("1 request, {PIPE_DESCRIPTORS} descriptors for pipes"),
        ),
        (
            "direction of a tunnel that takes no bytes for 200 ms",
            format!(
                "{} of stalled bytes, and the receive buffer that the kernel gave its socket",
                bytes(STALLED_BYTES)
            ),
        ),
        (
            "host whose requests are priced, at most 64 of a sandbox",
            format!("{} of what the inspection remembers", bytes(PRICES_BYTES)),
        ),
        (
            "host whose requests are compared, at most 64 of a sandbox",
            format!("{} of what the inspection remembers", bytes(SHAPE_BYTES)),
        ),
        (
            "recalled text",
            format!(
                "{} to {} of what the inspection remembers; one fingerprint for each 12 letters and digits",
                bytes(FlowTable::bytes_for(MIN_FINGERPRINTS) as u64),
                bytes(FlowTable::bytes_for(DEFAULT_FINGERPRINTS) as u64)
            ),
        ),
        (
            "flow of recalled text in `sandbar flow`, at most 512 of a sandbox",
            format!("{} of what the inspection remembers", bytes(FLOW_BYTES)),
        ),
    ]
    .map(|(object, cost)| (object.to_owned(), cost))
    .into()
}

fn products(limits: &TrafficLimits) -> [(&'static str, u64); 5] {
    let request = REQUEST_BYTES + HEAD_COPIES * limits.head_bytes;
    [
        ("idle connections", CONNECTION_BYTES),
        ("idle HTTP/2 connections", CONNECTION_BYTES + HTTP2_WINDOW),
        ("requests with the largest head", request),
        ("downloads that nobody reads", request + DOWNLOAD_BYTES),
        ("memory request bodies", request + limits.memory_body_bytes),
    ]
}

fn amount_text(resource: Resource, amount: u64) -> String {
    match resource {
        Resource::Buffers | Resource::Inspection | Resource::Stalled => bytes(amount),
        Resource::Connections | Resource::Descriptors | Resource::Ports | Resource::Requests => {
            amount.to_string()
        }
    }
}

fn bytes(amount: u64) -> String {
    match amount {
        amount if amount >= MIB && amount % MIB == 0 => format!("{} MiB", amount / MIB),
        amount => format!("{} KiB", amount.div_ceil(KIB)),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn p17_the_documented_table_is_the_code() {
        assert_eq!(
            include_str!("../../LIMITS.md"),
            super::limits_markdown(),
            "regenerate it: cargo run -p cli -- limits --markdown > proxy/LIMITS.md"
        );
    }
}
