//! Names that a sandbox asks the DNS filter or the proxy for, searched like everything else that leaves, whether a rule
//! allows them or not.

use std::sync::{Arc, Weak};

use dns_filter::{InspectedName, NameInspector};
use rules::signals::settings::{SignalKind, SignalSettings};
use rules::signals::{Signal, SignalMode};
use rules::{DomainName, Permit, SandboxRef};

use super::scan_set::{AttemptMatchers, Inspector};
use super::state::SandboxSignals;
use super::{findings, head, now_ms};
use crate::report::metrics;

/// Finds the memory of a sandbox.
type FindSignals = Box<dyn Fn(&SandboxRef) -> Option<Arc<SandboxSignals>> + Send + Sync>;

/// Searches the names of DNS queries.
pub(crate) struct QueryInspector {
    inspector: Weak<Inspector>,
    find: FindSignals,
}

impl QueryInspector {
    pub(crate) fn new(inspector: &Arc<Inspector>, find: FindSignals) -> Self {
        QueryInspector { inspector: Arc::downgrade(inspector), find }
    }
}

impl NameInspector for QueryInspector {
    fn inspect(
        &self,
        sandbox: &SandboxRef,
        name: &DomainName,
        permit: Option<&Permit>,
    ) -> Option<InspectedName> {
        inspect_name(&*self.inspector.upgrade()?, &(self.find)(sandbox)?, name, permit)
    }
}

/// Searches a name; `permit` is that of an allowed one. Returns the worst of what is found.
pub(crate) fn inspect_name(
    inspector: &Inspector,
    signals: &Arc<SandboxSignals>,
    name: &DomainName,
    permit: Option<&Permit>,
) -> Option<InspectedName> {
    let set = inspector.current();
    let matchers = AttemptMatchers::new(&set, signals, permit, &[], now_ms());
    let mut found = Vec::new();
    head::scan_name(&matchers, name.as_str(), &mut found);
    let mode = |signal: &Signal| match (SignalKind::of(signal.code, &signal.place), permit) {
        (None, _) => SignalMode::Deny,
        (Some(kind), Some(permit)) => permit.signals().mode(kind),
        (Some(kind), None) => SignalSettings::default().mode(kind),
    };
    found.retain(|signal| mode(signal) != SignalMode::Off);
    let worst = found.iter().max_by_key(|signal| mode(signal))?;
    for signal in &found {
        metrics::count_signal(findings::code(signal.code).code(), mode(signal));
        signals.count(signal.code, mode(signal));
    }
    let denied = mode(worst) == SignalMode::Deny;
    Some(InspectedName {
        finding: findings::name_finding(worst, mode(worst), name),
        refusal: denied.then(|| findings::reason(worst.code)),
    })
}
