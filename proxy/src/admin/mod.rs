//! What the operator sees and does while the program runs.

pub mod client;
pub mod explain;
pub mod pending;
pub mod server;
pub mod status;
