//! State that every step of a connection's life shares, built once at start.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use arc_swap::ArcSwap;
use audit::{Log, OpenRecord};
use dns_filter::Resolver;
use rules::budget::UsageKind;
use rules::facts::ConnectTarget;
use rules::ids::SandboxId;
use rules::limits::TrafficLimits;
use rules::treatment::{ConnectionTreatment, FirstBytes};
use rules::{Decision, Facts, Host, Permit, Reason, RuleSet, SandboxRef};
use sys::worker::Worker;

use crate::budget::gates::Gates;
use crate::budget::ledger::{Charges, Ledger};
use crate::budget::live::LiveConnections;
use crate::credential::scrub::{EchoCache, EchoPatterns};
use crate::credential::{CredentialStore, PlaceholderKey};
use crate::egress::connect::CountedDialler;
use crate::egress::dial::DialRace;
use crate::inspect::{Inspector, inspect_name};
use crate::policy::grants::GrantStore;
use crate::quota::Quotas;
use crate::report::metrics;
use crate::report::refusal::Refusal;

/// Rules, log, resolver, limits, and what is open.
pub(crate) struct Shared {
    pub(crate) rules: Arc<ArcSwap<RuleSet>>,
    pub(crate) log: Log,
    pub(crate) resolver: Resolver,
    pub(crate) limits: TrafficLimits,
    pub(crate) credentials: Arc<CredentialStore>,
    pub(crate) placeholders: PlaceholderKey,
    /// What answers are searched for.
    pub(crate) echoes: EchoCache,
    pub(crate) inspector: Arc<Inspector>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) grants: Arc<GrantStore>,
    /// The thread that writes state files.
    pub(crate) state_files: Worker,
    pub(crate) live: Arc<LiveConnections>,
    pub(crate) quotas: Arc<Quotas>,
    /// Lets one request at a time connect to an origin server that may speak HTTP/2, by pool key, so that requests which
    /// start together share one connection instead of dialling one each.
    pub(crate) dial_gates: Gates<u64>,
    /// Bounds the TLS handshakes of a sandbox that run at once.
    pub(crate) handshakes: Gates<SandboxId>,
    /// Lets one large document of a sandbox be checked at a time.
    pub(crate) large_checks: Gates<SandboxId>,
    /// The firewall mark of our own connections.
    pub(crate) mark: Option<u32>,
}

impl Shared {
    /// Searches the names of an attempt that no rule allows, and records what is found in them beside its refusal.
    pub(crate) async fn inspect_refused<'a>(
        &self,
        sandbox: &SandboxId,
        hosts: impl Iterator<Item = &'a Host>,
        record: &OpenRecord,
    ) {
        let Some(state) = self.ledger.sandbox(sandbox) else { return };
        for name in hosts.filter_map(Host::name) {
            if let Some(inspected) = inspect_name(&self.inspector, &state.signals, name, None) {
                drop(record.record_finding(&inspected.finding).await); // the refusal meets the same log
            }
        }
    }

    /// Returns what answers to a sandbox are searched for: every credential of its rules; `None` if it has none.
    pub(crate) fn echo_patterns(&self, rules: &RuleSet, sandbox: &SandboxRef) -> Option<Arc<EchoPatterns>> {
        let names = rules.credentials_of(sandbox);
        if names.is_empty() {
            return None;
        }
        let version = self.credentials.version();
        let patterns = self.echoes.patterns(&names, version, || self.credentials.labelled_secrets(&names));
        Some(patterns).filter(|patterns| !patterns.is_empty())
    }

    /// Returns a dialler of a sandbox for the addresses of `race`, which reserves `window` bytes of memory while a connection is in use.
    pub(crate) fn dialler(&self, sandbox: &SandboxId, race: DialRace, window: u64) -> CountedDialler {
        CountedDialler {
            quotas: self.quotas.clone(),
            rules: self.rules.clone(),
            sandbox: sandbox.clone(),
            race,
            mark: self.mark,
            window: Arc::new(AtomicU64::new(window)),
        }
    }

    /// Opens the charges of a permitted attempt, and charges one request.
    pub(crate) async fn charge(&self, permit: &Permit) -> Result<Arc<Charges>, Refusal> {
        let charges = self.ledger.open_charges(permit)?;
        charges.charge(UsageKind::Requests, 1).await?;
        if permit.rule().policy.as_str() == rules::GRANTS_POLICY {
            self.grants.record_use(permit, &self.log, &self.state_files);
        }
        Ok(Arc::new(charges))
    }

    /// Checks that the rules in force still allow what `permit` allowed under earlier ones, and adopts their budgets.
    ///
    /// # Errors
    ///
    /// Returns the reason of the denial.
    pub(crate) fn recheck_permit(
        &self,
        permit: &Permit,
        dialled: IpAddr,
        charges: &Charges,
    ) -> Result<(), Reason> {
        let rules = self.rules.load();
        if rules.generation() == permit.generation() {
            return Ok(());
        }
        match rules.decide_again(permit, Some(dialled)) {
            Decision::Allow(fresh) => {
                charges.adopt_budgets(&fresh);
                Ok(())
            }
            Decision::Deny(denial) => Err(denial.reason),
        }
    }
}

/// Asks the one decider what becomes of a connection, and measures how long it takes.
pub(crate) fn treatment(
    rules: &RuleSet,
    sandbox: &SandboxRef,
    target: &ConnectTarget,
    port: u16,
    first: &FirstBytes,
) -> Result<ConnectionTreatment, Refusal> {
    let started = Instant::now();
    let treatment = rules.treatment(sandbox, target, port, first);
    metrics::observe_decide(started.elapsed());
    treatment.map_err(Refusal::from)
}

/// Asks the one decider, and measures how long it takes.
pub(crate) fn decide(rules: &RuleSet, sandbox: &SandboxRef, facts: &Facts) -> Result<Permit, Refusal> {
    let started = Instant::now();
    let decision = rules.decide(sandbox, facts);
    metrics::observe_decide(started.elapsed());
    match decision {
        Decision::Allow(permit) => Ok(permit),
        Decision::Deny(denial) => Err(denial.into()),
    }
}
