//! Conversions from the types of `rules` to those of the log, for every crate that records.

use rules::{Channel, Host, RuleSet, SandboxRef};

use crate::attempt::{RecordedPolicy, RecordedSandbox};
use crate::record::{self, Environment, SandboxId, StableCode, TenantId};

/// Converts a channel.
pub fn channel(channel: &Channel) -> record::RecordedChannel {
    let (kind, detail) = match channel {
        Channel::Dedicated(id) => ("dedicated", id.to_string()),
        Channel::Interface(name) => ("interface", name.clone()),
        Channel::Mark(mark) => ("mark", format!("{mark:#x}")),
        Channel::SourceAddress(address) => ("source_address", address.to_string()),
        Channel::UnixUser(uid) => ("unix", uid.to_string()),
    };
    record::RecordedChannel { kind: StableCode(kind), detail: Some(detail.into()) }
}

/// Converts a sandbox. A missing tenant or environment becomes `unset`.
pub fn subject(sandbox: &SandboxRef) -> RecordedSandbox {
    let unset = "unset";
    let tenant = sandbox.tenant.as_ref().map_or(unset, |tenant| tenant.as_str());
    let environment = sandbox.environment.as_ref().map_or(unset, |name| name.as_str());
    RecordedSandbox {
        sandbox: SandboxId(sandbox.id.as_str().into()),
        tenant: TenantId(tenant.into()),
        environment: Environment(environment.into()),
    }
}

/// Describes the rules in force.
pub fn policy(rules: &RuleSet) -> RecordedPolicy {
    RecordedPolicy { digest: rules.digest().to_string().into(), generation: rules.generation() }
}

/// Converts a host.
pub fn host(host: &Host) -> record::HostText {
    match host {
        Host::Address(address) => address.to_string().as_str().into(),
        Host::Name(name) => name.as_str().into(),
    }
}
