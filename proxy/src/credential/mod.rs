//! Credentials that never enter the sandbox (P11): fetched from where the configuration says, injected into requests for
//! their hosts only, and masked in whatever the origin server sends back.

mod account;
mod bounds;
mod cell;
mod error;
mod file_watch;
mod form;
mod injection;
mod known;
mod placeholder;
pub mod scrub;
mod secret_file;
pub(crate) mod sigv4;
mod source;
mod store;
mod trial;
mod value;

pub(crate) use self::bounds::bounds;
pub use self::error::CredentialError;
pub(crate) use self::injection::{AccountFilter, Injection};
pub use self::placeholder::PlaceholderKey;
pub use self::secret_file::FileAccess;
pub(crate) use self::source::endpoint::trust_source;
pub use self::source::kind;
pub(crate) use self::store::{CredentialStatus, CredentialStore, PreparedCredentials};
pub use self::trial::{CredentialTrial, check_credential, try_credential};
pub(crate) use self::value::CredentialValue;
