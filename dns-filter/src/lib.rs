//! The sandbox's resolver: DNS listeners, the life of a query, and our own upstream client.
//!
//! `server` has the listeners, `message` the wire format, `query` the life of a query up to a local answer. `resolver`
//! runs look-ups that leave, for sandboxes and the proxy, over `upstream` and `socket`; `clean` filters their answers;
//! `cache` keeps them; `pre_resolve` looks up exact names on a timer, `own` those that Sandbar itself needs. `budget` bounds what a sandbox can send in names
//! (P14), `score` flags what looks like a tunnel, `limits` has every bound.

pub mod budget;
mod budget_store;
mod cache;
pub mod clean;
mod explain;
mod filter;
pub mod limits;
pub mod message;
pub mod own;
mod pre_resolve;
mod query;
mod query_metrics;
pub mod record;
mod resolver;
mod reverse_names;
mod sandbox_quota;
mod score;
pub mod server;
mod socket;
mod state;
mod synthetic;
pub mod upstream;

pub use explain::DnsExplanation;
pub use filter::{DnsConfig, DnsFilter, InspectedName, NameInspector, StartError};
pub use query::{PendingQuery, QueryArrival, QueryStep, QueryTarget};
pub use resolver::{ResolveError, Resolver};
use sys::lock;
