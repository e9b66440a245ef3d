//! The admin commands for canaries: made, listed and removed while the instance runs, each change with a record.
//!
//! The value of a canary is in the answer to `POST /canaries` and nowhere else: not in a list, a record or a message.

use std::sync::Arc;

use anyhow::Context;
use audit::{Lifecycle, LifecycleEvent, Log};
use rules::signals::canary::{CanaryError, CanaryShape};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::admin::status::AdminState;
use crate::inspect::CanaryStore;
use crate::policy::store::PolicyStore;

/// The body of `POST /canaries`, for `sandbar canary new`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CanaryRequest {
    pub name: String,
    /// The name of a [`CanaryShape`].
    pub shape: String,
}

/// Changes the canaries of an instance.
#[derive(Clone)]
pub(super) struct CanaryChanges {
    canaries: Arc<CanaryStore>,
    reloader: Arc<PolicyStore>,
    log: Log,
    /// Who asks, for the records.
    by: String,
}

impl AdminState {
    pub(super) fn canary_changes(&self, by: String) -> CanaryChanges {
        let (canaries, reloader) = (self.canaries.clone(), self.reloader.clone());
        CanaryChanges { canaries, reloader, log: self.log.clone(), by }
    }

    /// Lists names and shapes.
    pub(super) fn list_canaries(&self) -> Value {
        let listed = self.canaries.list().into_iter();
        let listed = listed.map(|(name, shape)| json!({ "name": name, "shape": shape.as_str() }));
        json!({ "canaries": listed.collect::<Vec<_>>() })
    }
}

impl CanaryChanges {
    /// Makes a canary and records that. A canary without a record is removed again.
    pub(super) async fn create(self, request: CanaryRequest) -> anyhow::Result<Value> {
        let CanaryRequest { name, shape } = request;
        let shape: CanaryShape = shape.parse().map_err(|error: CanaryError| anyhow::anyhow!(error))?;
        let (canaries, wanted) = (self.canaries.clone(), name.clone());
        let made = self.reloader.change_state("the canary", move |_| canaries.create(&wanted, shape)).await?;
        if let Err(error) = self.record(LifecycleEvent::CanaryMade, &name, "made").await {
            self.delete(&name).await.context("the canary is not recorded, and cannot be removed again")?;
            return Err(error.context("the canary is not made"));
        }
        Ok(json!({ "name": name, "shape": shape.as_str(), "text": made.text() }))
    }

    /// Records the removal of a canary, then removes it: without a record, it stays.
    pub(super) async fn remove(self, name: String) -> anyhow::Result<Value> {
        if !self.canaries.list().iter().any(|(known, _)| *known == name) {
            anyhow::bail!("there is no canary `{name}`: see `sandbar canary list`");
        }
        self.record(LifecycleEvent::CanaryRemoved, &name, "removed").await.context("the canary stays")?;
        if let Err(error) = self.delete(&name).await {
            self.record(LifecycleEvent::CanaryMade, &name, "kept, because the removal failed").await?;
            return Err(error);
        }
        Ok(json!({ "name": name, "removed": true }))
    }

    async fn delete(&self, name: &str) -> anyhow::Result<()> {
        let (canaries, name) = (self.canaries.clone(), name.to_owned());
        self.reloader.change_state("the removal of the canary", move |_| canaries.remove(&name)).await
    }

    async fn record(&self, event: LifecycleEvent, name: &str, verb: &str) -> anyhow::Result<()> {
        let message = Some(format!("canary `{name}` {verb} by {}", self.by).into());
        let event = Lifecycle { event, message, policy: None };
        self.log.record_lifecycle(&event).await.map(drop).context("cannot write to the access log")
    }
}
