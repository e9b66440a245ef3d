//! The rules in force: where they come from, how they change, what is granted for a while.

pub mod files;
pub mod grants;
pub(crate) mod identities;
pub mod source;
pub mod store;
pub(crate) mod watch;
