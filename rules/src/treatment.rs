//! `RuleSet::treatment`: what becomes of a connection, from its target and its first bytes (P3). Listeners, the
//! explicit proxy, `explain`, `[[test]]` and `diff` all ask it, so none of them can expect a connection to be
//! intercepted that another passes unseen.

use crate::decision::{Decision, Denial, Permit, Treatment};
use crate::facts::{ConnectFacts, ConnectTarget, EchPresence, Facts, Protocol};
use crate::reason::Reason;
use crate::ruleset::RuleSet;
use crate::sandbox::SandboxRef;

/// What is known about the first bytes of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FirstBytes {
    /// Nothing yet: the client may be waiting for the server to speak.
    Unread,
    Read(Protocol),
}

/// What becomes of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionTreatment {
    /// Some protocol is allowed to this target: read the first bytes, then ask again.
    Detect,
    /// Terminate TLS, then decide each request.
    Intercept(Permit),
    /// Relay bytes unseen: raw TCP, or TLS in a tunnel.
    Relay(Permit),
    /// Plain HTTP: decide each request by itself.
    Requests,
}

impl RuleSet {
    /// Returns what becomes of a connection of `sandbox` to `target`.
    ///
    /// Raw TCP comes first, whatever the client speaks: in SSH or SMTP the server speaks first, so Sandbar must not
    /// wait for bytes to find out. A policy that opens a host and port to raw TCP and to requests does not load.
    ///
    /// # Errors
    ///
    /// Returns the denial; for [`FirstBytes::Unread`] only if no protocol could be allowed.
    pub fn treatment(
        &self,
        sandbox: &SandboxRef,
        target: &ConnectTarget,
        port: u16,
        first: &FirstBytes,
    ) -> Result<ConnectionTreatment, Box<Denial>> {
        let decide = |protocol: &Protocol| {
            let facts = ConnectFacts { target: target.clone(), port, protocol: protocol.clone() };
            match self.decide(sandbox, &Facts::Connect(facts)) {
                Decision::Allow(permit) => Ok(permit),
                Decision::Deny(denial) => Err(denial),
            }
        };
        let not_raw = match decide(&Protocol::Raw) {
            Ok(permit) => return Ok(ConnectionTreatment::Relay(permit)),
            Err(denial) => denial,
        };
        match (first, target) {
            (FirstBytes::Unread, ConnectTarget::Dialled(_)) => {
                self.check_port(sandbox, port, *not_raw).map(|()| ConnectionTreatment::Detect)
            }
            (FirstBytes::Unread, ConnectTarget::Named(host)) => {
                let sni = host.name().map(|_| host.clone());
                let tls = decide(&Protocol::Tls { sni, ech: EchPresence::Absent });
                let http = || decide(&Protocol::Http { host: Some(host.clone()) });
                tls.or_else(|denial| http().map_err(|_| denial)).map(|_| ConnectionTreatment::Detect)
            }
            (FirstBytes::Read(Protocol::Http { .. }), _) => Ok(ConnectionTreatment::Requests),
            (FirstBytes::Read(Protocol::Raw), _) => Err(not_raw),
            (FirstBytes::Read(protocol @ Protocol::Tls { .. }), _) => decide(protocol).map(from_permit),
        }
    }

    /// Denies a connection to an address on a port that no rule of the sandbox opens: whatever name its first bytes
    /// bring, it stays refused.
    fn check_port(&self, sandbox: &SandboxRef, port: u16, not_raw: Denial) -> Result<(), Box<Denial>> {
        let layers = self.layers.get(&sandbox.id);
        let mut policies = layers.into_iter().flat_map(|layers| &layers.sandbox);
        if policies.any(|policy| policy.opens_port(port)) {
            return Ok(());
        }
        let unlisted = matches!(not_raw.reason, Reason::AddressNotListed | Reason::NameMissing);
        let reason = if unlisted { Reason::PortNotListed } else { not_raw.reason };
        Err(Box::new(Denial { reason, ..not_raw }))
    }
}

fn from_permit(permit: Permit) -> ConnectionTreatment {
    match permit.treatment() {
        Treatment::Raw | Treatment::Tunnel => ConnectionTreatment::Relay(permit),
        Treatment::Forward | Treatment::Hold { .. } | Treatment::Intercept | Treatment::Resolve => {
            ConnectionTreatment::Intercept(permit)
        }
    }
}
