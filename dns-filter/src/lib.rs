//! The sandbox's resolver: listeners, the life of one query, our own upstream client.
//!
//! `query` is the life of a query, `message` the wire, `clean` what may be told, `upstream` and `socket`
//! who is asked, `budget` what may leave (P14), `score` what looks like a tunnel, `resolver` what the
//! proxy asks, `ahead` the names resolved before anybody asks, `server` the listeners, `limits` every bound.

pub mod budget;
mod budget_store;
mod cache;
pub mod clean;
mod explain;
mod filter;
pub mod limits;
pub mod message;
mod pre_resolve;
mod query;
mod query_metrics;
pub mod record;
mod record_rate;
mod resolver;
mod reverse_names;
mod score;
pub mod server;
mod socket;
mod state;
mod synthetic;
pub mod upstream;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use explain::DnsExplanation;
pub use filter::{DnsConfig, DnsFilter, StartError};
pub use query::{PendingQuery, QueryArrival, QueryStep, QueryTarget};
pub use resolver::{ResolveError, Resolver};

/// A panic while holding one of our locks leaves data that is whole: each is changed in one step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
