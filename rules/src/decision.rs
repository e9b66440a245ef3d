//! The result of a decision: a permit, which only this crate can construct, or a denial with its reason.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::budget::Budgets;
use crate::credential::PinAccount;
use crate::facts::{Facts, QueryType};
use crate::ids::{CredentialName, PolicyName, ProfileName, SandboxId};
use crate::name::Host;
use crate::policy::{IdentityMode, PolicyDigest};
use crate::reason::Reason;
use crate::sandbox::SandboxRef;
use crate::signals::settings::SignalTerms;

/// The decision on one attempt.
#[must_use = "an attempt must not proceed without a decision"]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Allow(Permit),
    Deny(Box<Denial>),
}

/// Proof that [`RuleSet::decide`](crate::RuleSet::decide) allowed one attempt; resolving and dialling require it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permit {
    /// The sandbox that made the attempt, with the identity that it had.
    pub(crate) holder: SandboxRef,
    pub(crate) terms: Arc<PermitTerms>,
}

/// The content of a permit, shared by connection, record and ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PermitTerms {
    pub(crate) host: Host,
    pub(crate) port: Option<u16>,
    pub(crate) rule: RuleRef,
    pub(crate) generation: u64,
    pub(crate) treatment: Treatment,
    /// Per layer, the addresses that each allowing rule admits; an address needs one rule of each layer.
    pub(crate) admission: [Box<[AddressAdmission]>; 2],
    pub(crate) lookup: LookupTerms,
    pub(crate) sandbox_budgets: Budgets,
    pub(crate) rule_budgets: Budgets,
    /// The allowing rule of the base with its budgets, which all rules of the sandbox share.
    pub(crate) base_budgets: Option<(RuleRef, Budgets)>,
    pub(crate) credentials: Box<[CredentialName]>,
    pub(crate) is_credential_host: bool,
    pub(crate) pin_account: PinAccount,
    pub(crate) signals: SignalTerms,
    pub(crate) facts: Facts,
}

/// How to handle a permitted attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// Forward this request.
    Forward,
    /// Read each memory request completely, then decide again with its bank and operation.
    Hold { profile: ProfileName, identity: IdentityMode },
    /// Terminate TLS or read plain HTTP, then decide again for each request.
    Intercept,
    /// Relay raw TCP of any protocol.
    Raw,
    /// Query the resolver.
    Resolve,
    /// Relay TLS without terminating it.
    Tunnel,
}

/// The terms of a DNS lookup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LookupTerms {
    /// Octets of the name that the sandbox chose, for the bit budget; 0 for an exact pattern.
    pub chosen_octets: usize,
    /// The query types the rule allows.
    pub types: Box<[QueryType]>,
    /// Whether the name gets a synthetic address, because a rule allows raw TCP to it.
    pub synthetic: bool,
    /// Whether every CNAME target must be allowed too.
    pub strict_cname: bool,
}

/// The addresses that one rule lets a name resolve to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AddressAdmission {
    Any,
    /// Only these networks, even in forbidden ranges.
    Only(Box<[IpNet]>),
    Public,
}

/// The rule that decided, and its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleRef {
    pub policy: PolicyName,
    pub rule: Arc<str>,
    pub layer: PolicyLayer,
    pub digest: PolicyDigest,
    /// The file that lists the host: the policy, or its list file.
    pub file: Arc<str>,
    pub line: u32,
}

/// The base layer, or the sandbox's own policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyLayer {
    Base,
    Sandbox,
}

/// A denial: its reason, its rule if there is one, and the loaded policies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    pub reason: Reason,
    /// The deny rule, or the allow rule that came closest; `None` if no rule names the host.
    pub rule: Option<RuleRef>,
    pub layer: PolicyLayer,
    pub generation: u64,
    /// The digest of all loaded files and grants.
    pub digest: PolicyDigest,
    /// The refused address, for reasons about addresses.
    pub address: Option<IpAddr>,
}

/// Permission to dial these addresses and no others.
#[derive(Debug)]
pub struct DialPermit {
    pub(crate) permit: Permit,
    pub(crate) addresses: Box<[IpAddr]>,
}

impl Permit {
    pub fn sandbox(&self) -> &SandboxId {
        &self.holder.id
    }

    /// Returns the sandbox with the identity that was decided upon: everything done under the permit is done as it.
    pub fn holder(&self) -> &SandboxRef {
        &self.holder
    }

    pub fn host(&self) -> &Host {
        &self.terms.host
    }

    /// Returns the port; `None` for a lookup.
    pub fn port(&self) -> Option<u16> {
        self.terms.port
    }

    pub fn rule(&self) -> &RuleRef {
        &self.terms.rule
    }

    pub fn generation(&self) -> u64 {
        self.terms.generation
    }

    pub fn treatment(&self) -> &Treatment {
        &self.terms.treatment
    }

    pub fn lookup(&self) -> &LookupTerms {
        &self.terms.lookup
    }

    /// Returns the budgets of the whole sandbox: the smallest of its policies' budgets.
    pub fn sandbox_budgets(&self) -> Budgets {
        self.terms.sandbox_budgets
    }

    /// Returns the budgets of this rule.
    pub fn rule_budgets(&self) -> Budgets {
        self.terms.rule_budgets
    }

    /// Returns the allowing rule of the base with its budgets, which all rules of the sandbox share.
    pub fn base_budgets(&self) -> Option<(&RuleRef, Budgets)> {
        self.terms.base_budgets.as_ref().map(|(rule, budgets)| (rule, *budgets))
    }

    /// Returns the credentials to inject, in order.
    pub fn credentials(&self) -> &[CredentialName] {
        &self.terms.credentials
    }

    /// Returns what the rules say about the content of the attempt.
    pub fn signals(&self) -> &SignalTerms {
        &self.terms.signals
    }

    /// Returns whether any rule of the sandbox injects a credential for this host.
    pub fn is_credential_host(&self) -> bool {
        self.terms.is_credential_host
    }

    /// Returns what becomes of credentials of other accounts than Sandbar's.
    pub fn pin_account(&self) -> PinAccount {
        self.terms.pin_account
    }

    /// Returns whether `other` permits the same sandbox the same, ignoring generation and identity.
    pub fn has_same_terms(&self, other: &Permit) -> bool {
        let generation = other.generation();
        let same_sandbox = self.sandbox() == other.sandbox();
        let (own, other) = (&*self.terms, &*other.terms);
        let equal = || own == other || PermitTerms { generation, ..own.clone() } == *other;
        same_sandbox && equal()
    }

    /// Returns the facts of the attempt, to decide it again when the rules change.
    pub fn facts(&self) -> &Facts {
        &self.terms.facts
    }
}

impl DialPermit {
    pub fn permit(&self) -> &Permit {
        &self.permit
    }

    /// Returns at least one address, in the resolver's order.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }
}

impl Decision {
    /// Returns the reason of a denial.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Decision::Allow(_) => None,
            Decision::Deny(denial) => Some(denial.reason),
        }
    }
}

impl Treatment {
    /// Returns the word for it in records and command output.
    pub fn as_str(&self) -> &'static str {
        match self {
            Treatment::Forward => "forward",
            Treatment::Hold { .. } => "hold",
            Treatment::Intercept => "intercept",
            Treatment::Raw => "raw",
            Treatment::Resolve => "resolve",
            Treatment::Tunnel => "tunnel",
        }
    }
}

impl fmt::Display for PolicyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PolicyLayer::Base => "base",
            PolicyLayer::Sandbox => "sandbox",
        })
    }
}
