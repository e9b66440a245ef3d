//! Hostile clients and hostile origins against the real program on loopback. Judged at the origin, by the very
//! bytes that came, and by the access log: a refusal has its code there, and nothing of it reached anybody.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)] // helpers of tests are tests

mod agreement;
mod answers;
mod attempted;
mod bodies;
mod bytes;
mod credentials;
mod dns_content;
mod echoes;
mod explained;
mod families;
mod fields;
mod files;
mod framing;
mod handshake;
mod hellos;
mod http2;
mod http2_origin;
mod identity;
mod instance;
mod limits;
mod listeners;
mod names;
mod origin;
mod pipelining;
mod refusals;
mod sandboxes;
mod searches;
mod signal_commands;
mod signals;
mod streams;
mod strict_http;
mod upgrades;
mod upstream;
mod wire;
