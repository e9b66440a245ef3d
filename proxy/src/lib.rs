//! The program behind `sandbar`: listeners, one connection's life, the HTTP engine, the command line.
//!
//! A connection is followed through `listen` (accept), `channel` (whose is it), `connection` (its life),
//! `classify` (what does it speak), `dial` and `tunnel` or `http` (act), and its record in between.

mod admin;
mod app;
mod channel;
pub mod chunks;
pub mod classify;
mod command;
mod connection;
mod dial;
mod explicit;
mod grants;
pub mod head;
mod http;
mod identities;
mod inject;
mod jail;
mod keep;
mod leaves;
mod ledger;
mod listen;
mod live;
mod memory;
mod meters;
mod origin;
mod pending;
mod policies;
mod problems;
mod record;
mod refusal;
mod reload;
pub mod scrub;
mod seats;
mod self_test;
mod shared;
mod splice;
mod status;
mod stream;
mod terminal;
mod trust;
mod tunnel;
mod watch;

pub use command::run;
