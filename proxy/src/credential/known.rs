//! Every secret that was in use lately: those of now and, for a day, those they replaced. Answers are searched for them,
//! and so is what leaves.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rules::ids::CredentialName;
use rules::signals::SignalCode;
use rules::signals::secrets::ExactValue;
use secrecy::SecretString;
use tokio::time::Instant;

use crate::credential::value::CredentialValue;

/// How long a value is known after it was replaced. A copy of it may still work, or lie in a cache of the origin.
pub(super) const REMEMBERED: Duration = Duration::from_secs(86_400);
/// Most replaced values of one credential that are known; the oldest is forgotten first.
pub(super) const MAX_PREVIOUS: usize = 16;
/// Most credentials that are known, those that left the configuration included.
pub(super) const MAX_NAMES: usize = 1024;

/// The values of all credentials.
#[derive(Default)]
pub(crate) struct KnownValues {
    by: Mutex<HashMap<CredentialName, KnownCredential>>,
    /// Grows whenever a value changes.
    version: AtomicU64,
}

#[derive(Default)]
struct KnownCredential {
    current: Option<Arc<CredentialValue>>,
    previous: VecDeque<PreviousValue>,
}

struct PreviousValue {
    value: Arc<CredentialValue>,
    until: Instant,
}

impl KnownValues {
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Takes note of the value of now.
    pub(super) fn adopt(&self, name: &CredentialName, value: &Arc<CredentialValue>) {
        let mut by = sys::lock(&self.by);
        make_room(&mut by, name);
        let known = by.entry(name.clone()).or_default();
        if known.current.as_ref().is_some_and(|current| current.secrets().eq(value.secrets())) {
            return;
        }
        let replaced = known.current.replace(value.clone());
        known.remember(replaced);
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    /// Takes note that a credential is no longer configured. Its value is known for a day, like a replaced one.
    pub(super) fn retire(&self, name: &CredentialName) {
        let mut by = sys::lock(&self.by);
        let Some(known) = by.get_mut(name) else { return };
        let replaced = known.current.take();
        known.remember(replaced);
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns every secret, to recognise it where it must not be.
    pub(crate) fn exact_values(&self) -> Vec<ExactValue> {
        let (by, now) = (sys::lock(&self.by), Instant::now());
        let mut values: Vec<ExactValue> = Vec::new();
        for (name, known) in by.iter() {
            for (value, label) in known.values(now) {
                for secret in value.secrets() {
                    let (label, bytes) =
                        (format!("{label} of credential `{name}`"), secret.as_bytes().to_vec());
                    if values.iter().all(|value| value.bytes != bytes) {
                        values.push(ExactValue { label, code: SignalCode::CredentialLeaving, bytes });
                    }
                }
            }
        }
        values
    }

    /// Returns the secrets of these credentials, to mask them in answers.
    pub(crate) fn secrets_of(&self, name: &CredentialName) -> Vec<SecretString> {
        let (by, now) = (sys::lock(&self.by), Instant::now());
        let values = by.get(name).into_iter().flat_map(|known| known.values(now));
        values.flat_map(|(value, _)| value.secrets().map(SecretString::from).collect::<Vec<_>>()).collect()
    }
}

impl KnownCredential {
    fn values(&self, now: Instant) -> impl Iterator<Item = (&CredentialValue, &'static str)> {
        let current = self.current.iter().map(|value| (&**value, "the value"));
        let previous = self.previous.iter().filter(move |previous| previous.until > now);
        current.chain(previous.map(|previous| (&*previous.value, "a previous value")))
    }

    fn remember(&mut self, replaced: Option<Arc<CredentialValue>>) {
        let now = Instant::now();
        self.previous.retain(|previous| previous.until > now);
        let Some(value) = replaced else { return };
        if self.previous.len() >= MAX_PREVIOUS {
            self.previous.pop_front();
        }
        self.previous.push_back(PreviousValue { value, until: now + REMEMBERED });
    }
}

/// Forgets credentials that are no longer configured once their day is over, or the one that left first.
fn make_room(by: &mut HashMap<CredentialName, KnownCredential>, for_name: &CredentialName) {
    let now = Instant::now();
    by.retain(|_, known| {
        known.current.is_some() || known.previous.iter().any(|previous| previous.until > now)
    });
    if by.len() < MAX_NAMES || by.contains_key(for_name) {
        return;
    }
    let left = by.iter().filter(|(_, known)| known.current.is_none());
    let first = left.min_by_key(|(_, known)| known.previous.back().map(|previous| previous.until));
    if let Some(name) = first.map(|(name, _)| name.clone()) {
        by.remove(&name);
    }
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::*;

    fn value(text: &str) -> Arc<CredentialValue> {
        Arc::new(CredentialValue::parse(text).unwrap())
    }

    fn secrets(known: &KnownValues, name: &CredentialName) -> Vec<String> {
        known.secrets_of(name).iter().map(|secret| secret.expose_secret().to_owned()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn p11_a_replaced_value_is_known_for_a_day_and_no_longer() {
        let (known, name) = (KnownValues::default(), CredentialName::parse("model").unwrap());
        assert_eq!(known.version(), 0);
        known.adopt(&name, &value("first-value"));
        let first = known.version();
        known.adopt(&name, &value("first-value"));
        assert_eq!(known.version(), first, "the same value again changes nothing");
        tokio::time::advance(Duration::from_secs(3600)).await;
        known.adopt(&name, &value("other-value"));
        assert!(known.version() > first);
        assert_eq!(secrets(&known, &name), ["other-value", "first-value"]);
        let labels: Vec<_> = known.exact_values().into_iter().map(|value| value.label).collect();
        assert_eq!(labels, ["the value of credential `model`", "a previous value of credential `model`"]);
        tokio::time::advance(REMEMBERED).await;
        assert_eq!(secrets(&known, &name), ["other-value"]);

        known.retire(&name);
        assert_eq!(secrets(&known, &name), ["other-value"], "it may still be used elsewhere");
        tokio::time::advance(REMEMBERED).await;
        assert!(secrets(&known, &name).is_empty() && known.exact_values().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn p17_what_is_remembered_is_bounded() {
        let (known, name) = (KnownValues::default(), CredentialName::parse("model").unwrap());
        for at in 0..40 {
            known.adopt(&name, &value(&format!("value-number-{at:02}")));
        }
        let kept = secrets(&known, &name);
        assert_eq!(kept.len(), 1 + MAX_PREVIOUS);
        assert!(
            kept.contains(&"value-number-23".to_owned()) && !kept.contains(&"value-number-22".to_owned())
        );
        for at in 0..2 * MAX_NAMES {
            let name = CredentialName::parse(&format!("gone-{at}")).unwrap();
            known.adopt(&name, &value("value-of-a-removed-one"));
            known.retire(&name);
        }
        assert!(sys::lock(&known.by).len() <= MAX_NAMES);
        assert_eq!(secrets(&known, &name).len(), 1 + MAX_PREVIOUS, "those that are configured stay");
    }
}
