//! Credentials that never enter the sandbox (P11): read from files that the configuration names, injected into
//! requests for the bound host only, and masked in whatever the origin server sends back.

pub mod scrub;
mod store;
mod value;

pub(crate) use self::store::CredentialStore;
pub use self::store::FileAccess;
pub(crate) use self::value::CredentialValue;
