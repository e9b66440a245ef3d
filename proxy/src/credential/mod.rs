//! Credentials that never enter the sandbox (P11): read from where the configuration says, injected into requests for
//! their hosts only, and masked in whatever the origin server sends back.

pub mod scrub;
mod store;
mod value;

use std::path::{Path, PathBuf};

use anyhow::bail;
use rules::credential::{Credential, CredentialForm, CredentialSource};
use rules::ids::CredentialName;

pub(crate) use self::store::CredentialStore;
pub use self::store::FileAccess;
pub(crate) use self::value::CredentialValue;

/// Returns the file of each credential.
///
/// # Errors
///
/// Fails for a source or a form that this build cannot use.
pub(crate) fn credential_files(
    credentials: &[Credential],
    base: &Path,
) -> anyhow::Result<Vec<(CredentialName, PathBuf)>> {
    let file = |one: &Credential| {
        let (CredentialSource::File(file), CredentialForm::Bearer) = (&one.source, &one.form) else {
            bail!(
                "credential `{}`: this build takes files, as bearer tokens; change its source or form",
                one.name
            )
        };
        Ok((one.name.clone(), base.join(file)))
    };
    credentials.iter().map(file).collect()
}
