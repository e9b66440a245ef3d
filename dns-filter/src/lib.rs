//! The sandbox's resolver: listeners, the life of one query, our own upstream client.
//!
//! `query` is the life of a query, `message` the wire, `clean` what may be told, `upstream` and `socket`
//! who is asked, `budget` what may leave (P14), `score` what looks like a tunnel, `resolver` what the
//! proxy asks, `ahead` the names resolved before anybody asks, `server` the listeners, `limits` every bound.

mod ahead;
pub mod budget;
mod cache;
pub mod clean;
mod explain;
mod filter;
mod learned;
pub mod limits;
pub mod message;
mod meter;
mod query;
pub mod record;
mod resolver;
mod score;
pub mod server;
mod socket;
mod state;
mod store;
mod synthetic;
mod tally;
pub mod upstream;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use explain::Explanation;
pub use filter::{Config, Filter, StartError};
pub use query::{Arrived, Pending, Step, Toward};
pub use resolver::{Refusal, Resolver};

/// A panic while holding one of our locks leaves data that is whole: each is changed in one step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
