//! The state of a running instance: status, open connections, budgets, grants, metrics.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use arc_swap::ArcSwap;
use audit::{Log, LogUsage};
use dns_filter::DnsFilter;
use metrics::gauge;
use metrics_exporter_prometheus::PrometheusHandle;
use rules::RuleSet;
use rules::facts::Facts;
use rules::ids::{Environment, SandboxId, Tenant};
use rules::quota::Resource;
use serde_json::{Value, json};

use crate::accept::ConnectionHandler;
use crate::accept::listener_set::ListenerSet;
use crate::admin::pending::PendingList;
use crate::budget::live::{LiveConnection, LiveConnections};
use crate::credential::CredentialStatus;
use crate::inspect::CanaryStore;
use crate::policy::grants::{ActiveGrant, GrantRequest};
use crate::policy::store::{HANGING_AFTER, PolicyStore};

/// Most connections in one answer.
const MAX_LISTED: usize = 10_000;

/// What the admin API answers from.
pub struct AdminState {
    pub filter: Arc<DnsFilter>,
    pub log: Log,
    pub(crate) live: Arc<LiveConnections>,
    pub rules: Arc<ArcSwap<RuleSet>>,
    pub pending: Arc<PendingList>,
    pub(crate) reloader: Arc<PolicyStore>,
    pub(crate) canaries: Arc<CanaryStore>,
    /// Set when the self-test has seen a denial.
    pub ready: AtomicBool,
    pub(crate) gate: Option<Arc<ConnectionHandler>>,
    pub(crate) listeners: ListenerSet,
    pub started: Instant,
    pub prometheus: PrometheusHandle,
}

impl AdminState {
    /// Returns the number of open tunnels and requests.
    pub fn open_connections(&self) -> usize {
        self.live.len()
    }

    /// Loads the policies on the calling thread.
    ///
    /// # Errors
    ///
    /// Returns the problems, rendered with their locations.
    pub fn reload(&self) -> Result<(), String> {
        self.reloader.load_now().map(drop)
    }

    /// Returns the JWK Set with which memory services verify our tokens.
    pub fn jwks(&self) -> Value {
        let empty = || json!({ "keys": [] });
        self.gate.as_ref().map_or_else(empty, |gate| gate.guard.jwks())
    }

    pub fn status(&self) -> Value {
        let rules = self.rules.load();
        let health = self.log.health();
        let last = self.reloader.last_load();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "uptime_seconds": self.started.elapsed().as_secs(),
            "ready": self.ready.load(std::sync::atomic::Ordering::Acquire) && health.ready,
            "listeners": self.listeners.describe(),
            "unapplied": last.settings.unapplied,
            "policy": {
                "generation": rules.generation(),
                "digest": rules.digest().to_string(),
                "sandboxes": rules.sandboxes().iter().count(),
                "age_seconds": last.at.elapsed().as_secs(),
                "closed": rules.is_closed(),
                "policy_stale": last.trouble.is_some(),
                "trouble": last.trouble,
            },
            "credentials": self.reloader.credentials.status().iter().map(credential_json).collect::<Vec<_>>(),
            "hanging_files": hanging_files(),
            "connections": self.gate.as_ref().map_or(0, |gate| gate.shared.quotas.usage(Resource::Connections).0),
            "open": self.live.len(),
            "log": {
                "ready": health.ready,
                "trouble": health.trouble,
                "written": health.written,
                "lost": health.lost,
                "refused": health.refused,
                "queued": health.queued,
                "folded": health.folded,
                "usage": log_usage_json(&self.log.usage()),
            },
        })
    }

    /// Describes one sandbox: its identity, what it uses of its quotas, and its signals since the start. None if it is not configured.
    pub fn sandbox(&self, id: &SandboxId) -> Option<Value> {
        let rules = self.rules.load();
        let sandbox = rules.sandboxes().get(id)?;
        let quotas = self.gate.as_ref().map(|gate| gate.shared.quotas.describe(id));
        Some(json!({
            "sandbox": sandbox.id.as_str(),
            "tenant": sandbox.tenant.as_ref().map(Tenant::as_str),
            "environment": sandbox.environment.as_ref().map(Environment::as_str),
            "generation": rules.generation(),
            "quotas": quotas.unwrap_or_default(),
            "signals": self.signal_counts(id),
        }))
    }

    /// Returns how often each signal was flagged and denied since the start, by code.
    fn signal_counts(&self, id: &SandboxId) -> Value {
        let counts = self.reloader.ledger.sandbox(id).map(|state| state.signals.counts()).unwrap_or_default();
        let counts = counts.into_iter().map(|(code, [flagged, denied])| {
            (code.to_owned(), json!({ "flagged": flagged, "denied": denied }))
        });
        Value::Object(counts.collect())
    }

    /// Lists which bank's text a sandbox sent where, the newest last. None if it is not configured.
    pub(super) fn flows(&self, id: &SandboxId) -> Option<Value> {
        self.rules.load().sandboxes().get(id)?;
        let flows = self.reloader.ledger.sandbox(id)?.signals.flows();
        Some(json!({ "sandbox": id.as_str(), "flows": flows }))
    }

    pub fn connections(&self) -> Value {
        let all = self.live.list();
        let listed: Vec<Value> = all.iter().take(MAX_LISTED).map(|open| connection_json(open)).collect();
        json!({ "open": all.len(), "connections": listed })
    }

    pub fn budgets(&self) -> Value {
        json!({ "sandboxes": self.reloader.ledger.describe(&self.rules.load()) })
    }

    pub fn grants(&self) -> Value {
        let all = self.reloader.grants.list();
        json!({ "grants": all.iter().map(grant_json).collect::<Vec<_>>() })
    }

    pub fn pending(&self) -> Value {
        let listed = self.pending.list().into_iter().map(|refused| {
            let seconds = refused.last.elapsed().unwrap_or_default().as_secs();
            let mut value = json!(refused);
            value["seconds_ago"] = seconds.into();
            value
        });
        json!({ "pending": listed.collect::<Vec<_>>() })
    }

    /// Returns the metrics as Prometheus text; sets the gauges that are only computed on request.
    pub fn metrics(&self) -> String {
        let (rules, health) = (self.rules.load(), self.log.health());
        gauge!("sandbar_open").set(self.live.len() as f64);
        gauge!("sandbar_policy_generation").set(rules.generation() as f64);
        let last = self.reloader.last_load();
        gauge!("sandbar_policy_age_seconds").set(last.at.elapsed().as_secs_f64());
        gauge!("sandbar_policy_stale").set(if last.trouble.is_some() { 1.0 } else { 0.0 });
        gauge!("sandbar_unapplied_settings").set(last.settings.unapplied.len() as f64);
        gauge!("sandbar_grants").set(self.reloader.grants.list().len() as f64);
        gauge!("sandbar_pending").set(self.pending.list().len() as f64);
        gauge!("sandbar_hanging_files").set(hanging_files().len() as f64);
        gauge!("sandbar_sandbox_states").set(self.reloader.ledger.sandbox_count() as f64);
        gauge!("sandbar_dns_sandbox_states").set(self.filter.sandbox_count() as f64);
        gauge!("sandbar_log_queued").set(health.queued as f64);
        gauge!("sandbar_log_lost").set(health.lost as f64);
        gauge!("sandbar_log_refused").set(health.refused as f64);
        let usage = self.log.usage();
        gauge!("sandbar_log_bytes").set(usage.bytes as f64);
        gauge!("sandbar_log_max_bytes").set(usage.max_bytes as f64);
        if let Some(gate) = &self.gate {
            gauge!("sandbar_connections").set(gate.shared.quotas.usage(Resource::Connections).0 as f64);
            for resource in Resource::ALL {
                let (used, total) = gate.shared.quotas.usage(*resource);
                gauge!("sandbar_quota_used", "resource" => resource.key()).set(used as f64);
                gauge!("sandbar_quota_total", "resource" => resource.key()).set(total as f64);
            }
            gauge!("sandbar_leaves").set(self.reloader.ledger.leaf_count() as f64);
        }
        self.prometheus.render()
    }
}

/// Returns the files that do not answer, and for how long.
pub(crate) fn hanging_files() -> Vec<Value> {
    let calls = sys::file::calls_longer_than(HANGING_AFTER);
    let describe = |call: &sys::file::FileCall| json!({ "path": call.path.display().to_string(), "seconds": call.since.elapsed().as_secs() });
    calls.iter().map(describe).collect()
}

/// The state of a credential, never its value.
fn credential_json(status: &CredentialStatus) -> Value {
    let CredentialStatus { name, kind, value } = status;
    json!({
        "name": name.as_str(),
        "source": kind,
        "usable": value.usable,
        "fetching": value.fetching,
        "age_seconds": value.age.map(|age| age.as_secs()),
        "expires_in_seconds": value.left.map(|left| left.as_secs()),
        "error": value.error,
    })
}

/// What the log has on disk of what it may have, and each sandbox's part.
fn log_usage_json(usage: &LogUsage) -> Value {
    let percent = |bytes: u64, of: u64| bytes.saturating_mul(100) / of.max(1);
    let sandboxes = usage.sandboxes.iter().map(|(id, used)| {
        let value = json!({ "bytes": used.bytes, "open": used.open, "percent_of_share": percent(used.bytes, usage.share) });
        (id.to_string(), value)
    });
    json!({
        "bytes": usage.bytes,
        "max_bytes": usage.max_bytes,
        "percent": percent(usage.bytes, usage.max_bytes),
        "share": usage.share,
        "sandboxes": sandboxes.collect::<serde_json::Map<_, _>>(),
    })
}

pub fn grant_json(grant: &ActiveGrant) -> Value {
    let GrantRequest { sandbox, host, methods, paths, bytes, seconds, why, by } = &grant.wish;
    json!({
        "id": grant.id,
        "sandbox": sandbox,
        "host": host,
        "methods": methods,
        "paths": paths,
        "bytes": bytes,
        "seconds": seconds,
        "left_seconds": grant.remaining().as_secs(),
        "why": why,
        "by": by,
        "used": grant.used,
    })
}

fn connection_json(open: &LiveConnection) -> Value {
    let (sent, received) = open.byte_count.sent_and_received();
    let permit = open.permit();
    let request = match permit.facts() {
        Facts::Request(facts) => Some(format!("{} {}", facts.method, facts.path)),
        Facts::Connect(_) | Facts::Memory(_) | Facts::Name(_) => None,
    };
    json!({
        "id": open.id,
        "sandbox": permit.sandbox().as_str(),
        "host": permit.host().to_string(),
        "port": permit.port(),
        "how": permit.treatment().as_str(),
        "request": request,
        "rule": &*permit.rule().rule,
        "generation": permit.generation(),
        "dialled": open.dialled(),
        "seconds": open.since.elapsed().as_secs(),
        "sent": sent,
        "received": received,
    })
}
