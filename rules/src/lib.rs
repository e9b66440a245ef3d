//! The policy language and its decisions. Pure: no I/O, no async, no clock, no randomness, no logging.
//!
//! The caller passes files as bytes ([`LoadSources`]), [`compile`] turns them into a [`RuleSet`], and
//! [`RuleSet::decide`] is the only code that decides. No other code can construct a [`Permit`].

mod admit;
pub mod budget;
pub mod configuration;
mod decide;
pub mod decision;
pub mod diff;
pub mod explain;
pub mod facts;
mod host_agreement;
pub mod host_set;
pub mod ids;
pub mod limits;
pub mod load;
mod memory;
pub mod name;
pub mod network;
pub mod pattern;
mod permit;
pub mod policy;
pub mod policy_test;
pub mod principal;
pub mod probe;
pub mod quota;
pub mod reason;
mod ruleset;
pub mod sandbox;
pub mod share;
pub mod signals;
mod special_names;
pub mod terms;
pub mod treatment;
pub mod url_path;

pub use admit::MAX_ADDRESSES;
pub use decision::{Decision, Denial, DialPermit, Permit, RuleRef};
pub use facts::Facts;
pub use load::{GRANTS_POLICY, Grant, LoadSources, SourceFile, TimedState, compile, recompile};
pub use name::{DomainName, Host};
pub use reason::Reason;
pub use ruleset::{RuleSet, Tier};
pub use sandbox::{Channel, IdentityAssignment, SandboxRef, Sandboxes};
pub use special_names::special_zone;
