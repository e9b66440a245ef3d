//! Credentials that never enter the sandbox (P11): read from where the configuration says, injected into requests for
//! their hosts only, and masked in whatever the origin server sends back.

pub mod scrub;
pub(crate) mod sigv4;
mod store;
mod value;

pub(crate) use self::store::CredentialStore;
pub use self::store::FileAccess;
pub(crate) use self::value::CredentialValue;
