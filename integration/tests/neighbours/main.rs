//! Neighbours (P16, P17, P20): sandbox A takes everything it can get of one resource, in a bounded loop and with
//! default limits, while sandbox B does honest work through the same instance. B's every attempt succeeds, its
//! latency stays within twice what it was before (or a floor that scheduling noise stays below), and the gateway's
//! memory stays under the limit of a container.
//!
//! Each test prints a line of figures; `cargo nextest run -p integration --test neighbours --no-capture` shows them.
//!
//! | resource that A takes | where |
//! | --- | --- |
//! | bytes that the memory guard holds | `memory_service` |
//! | bytes of answers that A does not read, heads of answers | `downloads`, `answer_heads` |
//! | bytes of requests that an origin does not read | `uploads` |
//! | connections and source ports towards an origin | `ports` |
//! | TCP memory of the kernel | `tunnels` |
//! | decisions without outcome, bytes of the log | `records` |
//! | descriptors, half-open connections | `descriptors`, `half_open` |
//! | state of sandboxes that have left, memory after a burst | `leftovers` |
//! | files that block whoever reads them | `blocking_files` |
//! | look-ups in flight | `look_ups` |
//! | the search of what leaves | `scans` |
//! | processor time | `processor` |

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::string_slice,
    reason = "a test that cannot go on says why and fails"
)]
#![allow(clippy::print_stdout, reason = "figures are read from the output")]

mod answer_heads;
mod attacker;
mod blocking_files;
mod descriptors;
mod downloads;
mod half_open;
mod honest;
mod leftovers;
mod look_ups;
mod memory_limit;
mod memory_service;
mod origin;
mod ports;
mod processor;
mod records;
mod scans;
mod scene;
mod tunnels;
mod uploads;
