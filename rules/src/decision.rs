//! What becomes of an attempt: a permit that only this crate can make, or a denial that explains itself.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::budget::Budgets;
use crate::facts::{Facts, QueryType};
use crate::ids::{CredentialName, PolicyName, ProfileName, SandboxId};
use crate::name::Host;
use crate::policy::{IdentityMode, PolicyDigest};
use crate::reason::Reason;

/// What becomes of one attempt to leave the sandbox.
#[must_use = "an attempt nobody decided must not proceed"]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Allow(Permit),
    Deny(Box<Denial>),
}

/// Leave to do one thing. Resolver and dialler ask for it, and only `decide` makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permit(pub(crate) Arc<PermitTerms>);

/// What a permit says; shared, because it is kept by connection, record and ledger alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PermitTerms {
    pub(crate) sandbox: SandboxId,
    pub(crate) host: Host,
    pub(crate) port: Option<u16>,
    pub(crate) rule: RuleRef,
    pub(crate) generation: u64,
    pub(crate) treatment: Treatment,
    /// For each layer the rules that let the name pass: an address needs one of each.
    pub(crate) admission: [Box<[AddressAdmission]>; 2],
    pub(crate) lookup: LookupTerms,
    pub(crate) sandbox_budgets: Budgets,
    pub(crate) rule_budgets: Budgets,
    /// The base's rule that lets it pass, with what may be used by that one in all.
    pub(crate) base_budgets: Option<(RuleRef, Budgets)>,
    pub(crate) credential: Option<CredentialName>,
    pub(crate) is_credential_host: bool,
    pub(crate) may_receive_memory: bool,
    pub(crate) inspect: bool,
    pub(crate) facts: Facts,
}

/// What a permit is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// Send this request on.
    Forward,
    /// Read memory requests whole, and ask again with what they say.
    Hold { profile: ProfileName, identity: IdentityMode },
    /// End TLS here, or read plain HTTP, and ask again for each request.
    Intercept,
    /// Pass bytes of any protocol.
    Raw,
    /// Ask the resolver.
    Resolve,
    /// Pass TLS unopened.
    Tunnel,
}

/// On which terms a name may be looked up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LookupTerms {
    /// Octets of the name the sandbox could choose, which the bit budget charges; 0 for an exact pattern.
    pub chosen_octets: usize,
    /// The query types the rule allows.
    pub types: Box<[QueryType]>,
    /// Whether the name gets a synthetic address, because it is reached by raw TCP.
    pub synthetic: bool,
    /// Whether every CNAME target must be allowed too.
    pub strict_cname: bool,
}

/// Which addresses one layer lets a name lead to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AddressAdmission {
    Any,
    /// Only these: they open forbidden ranges and shut out everything else.
    Only(Box<[IpNet]>),
    Public,
}

/// The rule that decided, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleRef {
    pub policy: PolicyName,
    pub rule: Arc<str>,
    pub layer: PolicyLayer,
    pub digest: PolicyDigest,
    /// The file that names the host: the policy, or its list.
    pub file: Arc<str>,
    pub line: u32,
}

/// The operator's floor, or the sandbox's own policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyLayer {
    Base,
    Sandbox,
}

/// A refusal: why, by which rule or by the absence of one, under which policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    pub reason: Reason,
    /// The deny rule, or the allow rule that came closest; none when no rule names the host.
    pub rule: Option<RuleRef>,
    pub layer: PolicyLayer,
    pub generation: u64,
    /// The digest of everything that was loaded.
    pub digest: PolicyDigest,
    /// The address that was refused, for reasons about addresses.
    pub address: Option<IpAddr>,
}

/// Leave to dial these addresses and no others.
#[derive(Debug)]
pub struct DialPermit {
    pub(crate) permit: Permit,
    pub(crate) addresses: Box<[IpAddr]>,
}

impl Permit {
    pub fn sandbox(&self) -> &SandboxId {
        &self.0.sandbox
    }

    pub fn host(&self) -> &Host {
        &self.0.host
    }

    /// The port; none for a mere look-up.
    pub fn port(&self) -> Option<u16> {
        self.0.port
    }

    pub fn rule(&self) -> &RuleRef {
        &self.0.rule
    }

    pub fn generation(&self) -> u64 {
        self.0.generation
    }

    pub fn treatment(&self) -> &Treatment {
        &self.0.treatment
    }

    pub fn lookup(&self) -> &LookupTerms {
        &self.0.lookup
    }

    /// What the sandbox may use in all: the smallest of its policies' budgets.
    pub fn sandbox_budgets(&self) -> Budgets {
        self.0.sandbox_budgets
    }

    /// What the sandbox may use by this rule.
    pub fn rule_budgets(&self) -> Budgets {
        self.0.rule_budgets
    }

    /// What the sandbox may use by the rule of its base that lets this pass too, under whichever rules of its own.
    pub fn base_budgets(&self) -> Option<(&RuleRef, Budgets)> {
        self.0.base_budgets.as_ref().map(|(rule, budgets)| (rule, *budgets))
    }

    pub fn credential(&self) -> Option<&CredentialName> {
        self.0.credential.as_ref()
    }

    /// Whether any rule of the sandbox injects a credential towards this host: it sends none of its own there.
    pub fn is_credential_host(&self) -> bool {
        self.0.is_credential_host
    }

    pub fn may_receive_memory(&self) -> bool {
        self.0.may_receive_memory
    }

    pub fn inspect(&self) -> bool {
        self.0.inspect
    }

    /// Whether `other` was given on the same terms, be it by another generation of the rules.
    pub fn has_same_terms(&self, other: &Permit) -> bool {
        let generation = other.generation();
        let (one, two) = (&*self.0, &*other.0);
        one.generation == generation && one == two
            || PermitTerms { generation, ..one.clone() } == *two
    }

    /// What it was given for, to be asked again when the rules change.
    pub fn facts(&self) -> &Facts {
        &self.0.facts
    }
}

impl DialPermit {
    pub fn permit(&self) -> &Permit {
        &self.permit
    }

    /// At least one, in the order they were found.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }
}

impl Decision {
    /// The reason of a denial.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Decision::Allow(_) => None,
            Decision::Deny(denial) => Some(denial.reason),
        }
    }
}

impl Treatment {
    /// The word for it in records and on the terminal.
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
