//! The memory guard as sandboxes and a memory service meet it: the real program between real clients and the real
//! Astrocyte engine, on loopback. Judged by what arrived at the service, and by the records.
//!
//! Rows and tests are named after the numbered attacks they try.
//!
//! | attacks | what they try | where |
//! | --- | --- | --- |
//! | 1, 14, 15 | no token, several, or one in another place | `identity` |
//! | 2 to 12, 16 to 20 | tokens that are forged, stale, another's or malformed | `identity` |
//! | 13 | a token that is revoked meanwhile | `identity` |
//! | 21 | another's principal | `story` |
//! | 22 to 26 | forged fields of every other kind | `framing` |
//! | 27, 28, 30 to 39 | banks in the body | `banks`, bounds of 39 in `bounds` |
//! | 29 | two places that name banks and disagree | `banks`, as 30 and 41: no route of the profile takes two |
//! | 40, 41 | banks in the query | `banks` |
//! | 42 | filter expressions | not applicable: mem0's; no such profile comes with Sandbar |
//! | 43 to 46 | what leads beyond a bank | `banks` |
//! | 47 | an answer of another bank | `banks` |
//! | 48 to 54 | paths and methods in disguise | `framing` |
//! | 55 to 60 | upgrades and lengths | `framing` |
//! | 61 | a second request behind the first | `framing` |
//! | 62, 80 | two sandboxes at once | `parallel` |
//! | 63, 66 to 68 | bodies that are not plain JSON | `framing` |
//! | 64, 65 | bodies too large, too slow | `bounds` |
//! | 69, 70 | HTTP/2: malformed requests, other hosts, resets | `streams` |
//! | 71, 74 | MCP and its older streams | `banks`: those routes are unknown, and refused |
//! | 72, 73 | MCP's sessions | not applicable: no profile that has sessions comes with Sandbar |
//! | 75 | names that disagree, plain HTTP, no name | `framing` |
//! | 76 | another name of the service's address | `modes` |
//! | 77 | a reload in between | `modes` |
//! | 78 | a full disk, no place left, a crash | `failure` |
//! | 79 | honest work | `story`, `matrix` |
//!
//! One-time tokens (12) are not offered: a token is good until its end, on its own path.

#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are tests

mod banks;
mod bounds;
mod client;
mod current;
mod engine;
mod failure;
mod flow;
mod forger;
mod framing;
#[path = "../hostile/http2.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod http2;
mod identity;
mod matrix;
mod modes;
mod parallel;
mod scene;
mod story;
mod streams;
#[path = "../hostile/wire.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod wire;
