//! The rules in force: where policies come from, how they are reloaded, grants and assigned identities.

pub mod files;
pub mod grants;
pub(crate) mod identities;
pub mod paths;
pub(crate) mod settings;
pub mod source;
pub mod store;
pub(crate) mod watch;
