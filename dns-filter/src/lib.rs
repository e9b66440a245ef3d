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

pub use explain::DnsExplanation;
pub use filter::{DnsConfig, DnsFilter, StartError};
pub use query::{PendingQuery, QueryArrival, QueryStep, QueryTarget};
pub use resolver::{ResolveError, Resolver};
use sys::lock;
