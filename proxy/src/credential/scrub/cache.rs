//! The patterns of each set of credentials, made when a value changes and not for each request.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use rules::ids::CredentialName;
use zeroize::Zeroizing;

use super::EchoPatterns;

/// Most sets whose patterns are kept: one for each group of sandboxes with the same rules.
const MAX_SETS: usize = 256;

/// A secret and the name of its credential.
pub(crate) struct LabelledSecret {
    pub(crate) name: CredentialName,
    pub(crate) value: Zeroizing<String>,
}

/// The patterns of the sets in use.
#[derive(Default)]
pub(crate) struct EchoCache(Mutex<HashMap<Vec<CredentialName>, CachedPatterns>>);

struct CachedPatterns {
    version: u64,
    patterns: Arc<EchoPatterns>,
}

impl EchoCache {
    /// Returns the patterns of a set of credentials, made of `secrets` unless they are of this version.
    pub(crate) fn patterns(
        &self,
        names: &[&CredentialName],
        version: u64,
        secrets: impl FnOnce() -> Vec<LabelledSecret>,
    ) -> Arc<EchoPatterns> {
        let key: Vec<CredentialName> = names.iter().map(|name| (*name).clone()).collect();
        if let Some(cached) = sys::lock(&self.0).get(&key).filter(|cached| cached.version == version) {
            return cached.patterns.clone();
        }
        let secrets = secrets();
        let values = secrets.iter().map(|secret| (secret.name.to_string(), secret.value.as_str()));
        let patterns = Arc::new(EchoPatterns::new(values));
        let mut sets = sys::lock(&self.0);
        if sets.len() >= MAX_SETS {
            sets.clear();
        }
        sets.insert(key, CachedPatterns { version, patterns: patterns.clone() });
        patterns
    }
}
