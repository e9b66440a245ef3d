//! What `sandbar check` and `sandbar secret` do with a credential, without a running instance.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use dns_filter::own::OwnResolver;
use rules::configuration::Configuration;
use rules::credential::Credential;
use tokio::time::timeout;

use super::CredentialError;
use super::cell::ValueSource;
use super::source::endpoint::{TokenClient, trust_source};
use super::source::{self, Lifetime, Source};

/// What a fetch gave, without the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CredentialTrial {
    /// Characters of the value; for keys of AWS, of the secret key.
    pub length: usize,
    /// How long it is valid, if its source says so.
    pub life: Option<Duration>,
    /// How long it is used before it is fetched again, if its source does not say how long it is valid.
    pub cache: Option<Duration>,
    pub took: Duration,
}

/// Checks what a credential needs on this machine, without asking its source.
///
/// # Errors
///
/// Returns what is missing, malformed or open to others.
pub fn check_credential(credential: &Credential, base: &Path) -> Result<(), CredentialError> {
    source::check(credential, base)
}

/// Fetches the value of a credential once, as a running instance would.
///
/// # Errors
///
/// Returns why there is none, or that the runtime fails.
pub async fn try_credential(
    credential: &Credential,
    configuration: &Configuration,
    base: &Path,
) -> anyhow::Result<Result<CredentialTrial, CredentialError>> {
    let resolver = configuration.dns.as_ref().map(OwnResolver::new);
    let client =
        TokenClient::new(resolver, trust_source(&configuration.upstream, base), configuration.upstream.mark);
    let mut source = Source::open(credential, base, &client).context("cannot start a thread")?;
    let started = std::time::Instant::now();
    let fetched = timeout(credential.timeout, source.fetch()).await;
    let fetched = fetched.unwrap_or(Err(CredentialError::TimedOut(credential.timeout)));
    Ok(fetched.map(|(value, lifetime)| {
        let (life, cache) = match lifetime {
            Lifetime::Stated(life) => (Some(life), None),
            Lifetime::Cached(cache) => (None, Some(cache)),
            Lifetime::Endless => (None, None),
        };
        let length = value.secrets().next().map(str::len).unwrap_or_default();
        CredentialTrial { length, life, cache, took: started.elapsed() }
    }))
}
