//! The admin API of a running instance: status, grants, pending refusals, explanations.

pub mod canaries;
pub mod client;
pub mod explain;
pub mod pending;
pub mod server;
pub mod status;
pub mod try_request;
