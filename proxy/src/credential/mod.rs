//! Credentials that never enter the sandbox (P11): read from where the configuration says, injected into requests for
//! their hosts only, and masked in whatever the origin server sends back.

mod account;
mod form;
mod injection;
mod placeholder;
pub mod scrub;
pub(crate) mod sigv4;
mod store;
mod value;

use std::path::{Path, PathBuf};

use anyhow::bail;
use rules::credential::{Credential, CredentialSource};
use rules::ids::CredentialName;

pub(crate) use self::injection::{AccountFilter, Injection};
pub use self::placeholder::PlaceholderKey;
pub(crate) use self::store::CredentialStore;
pub use self::store::FileAccess;
pub(crate) use self::value::{CredentialValue, ask_for_searchable_answer};

/// Returns the file of each credential.
///
/// # Errors
///
/// Fails for a source that this build cannot use.
pub(crate) fn credential_files(
    credentials: &[Credential],
    base: &Path,
) -> anyhow::Result<Vec<(CredentialName, PathBuf)>> {
    let file = |one: &Credential| {
        let CredentialSource::File(file) = &one.source else {
            bail!("credential `{}`: this build reads files; change its source", one.name)
        };
        Ok((one.name.clone(), base.join(file)))
    };
    credentials.iter().map(file).collect()
}
