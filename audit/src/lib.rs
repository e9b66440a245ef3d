//! The access log: a record of every attempt and its outcome, in a form that verifies offline.
//!
//! `record` is the schema, `open_record` the life of one record, `log` the API for callers, `queue`
//! decides who writes and when, `writer` appends to the chain on disk, `archive` keeps closed segments,
//! `recover` handles a restart, `verify` is for auditors. `meter` and `quota` bound what a sandbox can use.

mod archive;
mod attempt;
mod chain;
pub mod checkpoint;
mod codes;
mod compose;
mod config;
mod draft;
mod encode;
mod health;
mod id;
mod line_reader;
mod log;
mod meter;
mod note;
mod observer;
mod open_record;
mod queue;
mod quota;
#[cfg(test)]
mod readme_table;
mod record;
mod recover;
mod segment;
mod text;
mod usage;
pub mod verify;
pub mod view;
pub mod words;
mod writer;

pub use attempt::{
    AlertFlag, AttemptOutcome, ByteCount, DecisionDetails, DetectionFinding, Ending, FindingSeverity,
    HttpScheme, Lifecycle, LifecycleEvent, MemoryCall, MemoryEffect, RecordedArrival, RecordedConnection,
    RecordedFacts, RecordedPolicy, RecordedQuery, RecordedRequest, RecordedSandbox,
};
pub use chain::{ChainHash, ChainHead};
pub use codes::{EndCode, FailureCode, FindingCode};
pub use config::{Compression, DenialRate, LogConfig, LogDurability, QueryStrings, Retention};
pub use health::LogHealth;
pub use log::{Log, LogDown, Receipt};
pub use observer::{AttemptEvent, AttemptStatus};
pub use open_record::OpenRecord;
pub use quota::{LogUsage, SandboxUsage};
pub use record::{
    AttemptedText, Environment, HostText, LINE_MAX, LIST_MAX, OCSF_VERSION, RecordedAnswer, RecordedChannel,
    RecordedTls, SandboxId, ScoreFeature, StableCode, TenantId, Transport,
};
pub use recover::OpenError;
pub use segment::list_segments;
pub use text::Text;
