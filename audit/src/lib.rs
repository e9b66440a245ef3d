//! The access log: what was tried, what became of it, in a form that verifies offline.
//!
//! `record` is the schema, `open` the life of one record, `log` what callers call, `queue` who
//! writes when,
//! `writer` the chain on disk, `recover` what a restart does, `verify` what an auditor runs.

mod attempt;
mod chain;
pub mod checkpoint;
mod compose;
mod config;
mod draft;
mod encode;
mod health;
mod id;
mod log;
mod note;
mod open;
mod queue;
mod read;
mod record;
mod recover;
mod segment;
#[cfg(test)]
mod table;
mod text;
pub mod verify;
pub mod view;
mod witness;
pub mod words;
mod writer;

pub use attempt::{
    Arrival, Attention, Connection, Effect, Ending, Facts, Finding, Lifecycle, LifecycleEvent,
    MemoryCall, Meter, Outcome, Policy, Query, Request, Scheme, Severity, Subject, Verdict,
};
pub use chain::{Hash, Head};
pub use config::{Config, Durability, QueryStrings, Retention};
pub use health::Health;
pub use log::{Log, LogDown, Receipt};
pub use open::OpenRecord;
pub use record::{
    Answer, Channel, Code, Environment, Feature, Host, LINE_MAX, LIST_MAX, OCSF_VERSION, SandboxId,
    TenantId, Tls, Transport,
};
pub use recover::OpenError;
pub use segment::segments;
pub use text::Text;
pub use witness::{Seen, Turn};
