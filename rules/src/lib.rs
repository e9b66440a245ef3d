//! Pure decisions: no I/O, no async, no clock, no randomness, no logging.
//!
//! Files come in as bytes ([`Sources`]), [`compile`] makes a [`RuleSet`] of them, and
//! [`RuleSet::decide`] is the only place that decides. A [`Permit`] cannot be made elsewhere.

mod admit;
mod agree;
pub mod budget;
mod decide;
pub mod decision;
pub mod diff;
pub mod explain;
pub mod facts;
pub mod limits;
pub mod load;
mod memory;
pub mod name;
pub mod network;
pub mod operator;
pub mod path;
pub mod pattern;
mod permit;
pub mod policy;
pub mod principal;
pub mod probe;
pub mod reason;
mod ruleset;
pub mod sandbox;
pub mod set;
mod special;
pub mod terms;
pub mod trial;
pub mod word;

pub use admit::MAX_ADDRESSES;
pub use decision::{Decision, Denial, DialPermit, Permit, RuleRef};
pub use facts::Facts;
pub use load::{GRANTS, Grant, SourceFile, Sources, Timed, compile, recompile};
pub use name::{DomainName, Host};
pub use reason::Reason;
pub use ruleset::{RuleSet, Tier};
pub use sandbox::{Channel, Given, SandboxRef, Sandboxes};
pub use special::zone as special_zone;
