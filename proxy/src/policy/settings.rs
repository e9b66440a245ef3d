//! What a reload applies of the configuration besides sandboxes and policies, and what it leaves to a restart.

use rules::configuration::Configuration;

/// Applies a changed configuration to the running instance.
pub(crate) trait InstanceSettings: Send + Sync {
    /// Prepares everything that can fail. The change takes effect with [`PreparedSettings::apply`], and not at all if
    /// that is not called.
    ///
    /// # Errors
    ///
    /// Returns why the change is impossible, and what to do about it.
    fn prepare(&self, configuration: &Configuration) -> anyhow::Result<Box<dyn PreparedSettings>>;
}

/// A change that cannot fail any more.
pub(crate) trait PreparedSettings {
    fn apply(self: Box<Self>) -> AppliedSettings;
}

/// What became of a changed configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AppliedSettings {
    /// Listeners that were opened or changed.
    pub(crate) opened: Vec<String>,
    /// Listeners that were closed.
    pub(crate) closed: Vec<String>,
    /// Changes that take effect with a restart only.
    pub(crate) unapplied: Vec<String>,
}

impl AppliedSettings {
    /// Says it in one line; `None` if there is nothing to say.
    pub(crate) fn describe(&self) -> Option<String> {
        let AppliedSettings { opened, closed, unapplied } = self;
        let parts = [("opened", opened), ("closed", closed), ("not applied until a restart:", unapplied)];
        let said: Vec<String> = parts
            .iter()
            .filter(|(_, what)| !what.is_empty())
            .map(|(verb, what)| format!("{verb} {}", what.join(", ")))
            .collect();
        (!said.is_empty()).then(|| said.join("; "))
    }
}

/// Names the parts of the configuration that differ from those the instance started with and need a restart.
pub(crate) fn unapplied_parts(started: &Configuration, now: &Configuration) -> Vec<String> {
    let Configuration {
        log,
        on_invalid,
        admin_socket,
        ca_dir,
        credentials: _, // the store of credentials applies them
        dns,
        grants,
        limits,
        quota,
        listeners: _, // the listeners apply them
        upstream,
        identity,
        memory_services,
        secret_patterns,
    } = now;
    let parts = [
        ("`[log]`", *log != started.log),
        ("`on_invalid`", *on_invalid != started.on_invalid),
        ("`[admin]`", *admin_socket != started.admin_socket),
        ("`ca`", *ca_dir != started.ca_dir),
        ("`[dns]`", *dns != started.dns),
        ("`[grants]`", *grants != started.grants),
        ("`[limits]`", *limits != started.limits),
        ("`[quota]`", *quota != started.quota),
        ("`[upstream]`", *upstream != started.upstream),
        ("`[identity]`", *identity != started.identity),
        ("`[[memory_service]]`", *memory_services != started.memory_services),
        ("`[[secret_pattern]]`", *secret_patterns != started.secret_patterns),
    ];
    parts.iter().filter(|(_, changed)| *changed).map(|(part, _)| (*part).to_owned()).collect()
}
