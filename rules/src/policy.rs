//! A compiled policy: rules, the patterns that select them, budgets and tests.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use ipnet::IpNet;

use crate::budget::Budgets;
use crate::credential::PinAccount;
use crate::facts::{HttpMethod, QueryType};
use crate::host_set::{HostSet, PatternHit, PatternOrigin};
use crate::ids::{BankPattern, CredentialName, Environment, PolicyName, ProfileName};
use crate::load::problem::SourceLocation;
use crate::name::{DomainName, Host};
use crate::pattern::PatternReach;
use crate::policy_test::PolicyTest;
use crate::signals::settings::{MemoryReceipt, SignalSettings};
use crate::url_path::PathPattern;

/// Most rules in one policy.
pub const MAX_RULES: usize = 10_000;

/// One compiled policy file, shared by every sandbox that uses it.
#[derive(Debug)]
pub struct Policy {
    pub(crate) name: PolicyName,
    pub(crate) file: Arc<str>,
    pub(crate) digest: PolicyDigest,
    pub(crate) rules: Vec<Rule>,
    pub(crate) hosts: HostSet,
    pub(crate) addresses: Vec<AddressEntry>,
    /// Every port that a rule opens to some target, in order.
    pub(crate) open_ports: Box<[u16]>,
    pub(crate) budgets: Budgets,
    pub(crate) trials: Vec<PolicyTest>,
}

/// A literal IP target of a rule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AddressEntry {
    pub(crate) net: IpNet,
    pub(crate) rule: u16,
}

/// One `[[allow]]`, `[[deny]]` or `[[memory]]`.
#[derive(Debug)]
pub struct Rule {
    pub(crate) name: Arc<str>,
    pub(crate) line: u32,
    /// The location of its name, for problems found after parsing.
    pub(crate) at: SourceLocation,
    /// The path of its list file, if it has one.
    pub(crate) list: Option<Arc<str>>,
    pub(crate) ports: PortSet,
    pub(crate) methods: Option<Box<[HttpMethod]>>,
    pub(crate) paths: Option<Box<[PathPattern]>>,
    pub(crate) verdict: RuleAction,
}

/// What a rule does with matching attempts.
#[derive(Debug)]
pub(crate) enum RuleAction {
    Allow(AllowTerms),
    Deny,
    Memory(MemoryTerms),
}

/// The terms of an allow rule.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct AllowTerms {
    /// The only networks the hosts may resolve to; `None` means every public address, an empty list no address.
    pub(crate) resolves_to: Option<Box<[IpNet]>>,
    pub(crate) raw_tcp: bool,
    pub(crate) tls: TlsMode,
    pub(crate) tolerate_ech: bool,
    /// In order, each once.
    pub(crate) credentials: Box<[CredentialName]>,
    /// What the rule says itself.
    pub(crate) pin_account: Option<PinAccount>,
    pub(crate) strict_cname: bool,
    pub(crate) dns_types: Box<[QueryType]>,
    pub(crate) budgets: Budgets,
    pub(crate) signals: SignalSettings,
    pub(crate) inspect: InspectTerm,
    pub(crate) receipt: MemoryReceipt,
    /// The header fields that requests keep; `None`: all.
    pub(crate) fields: Option<Box<[String]>>,
}

/// Whether a rule says `inspect`, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum InspectTerm {
    /// Bodies are searched where Sandbar sees them.
    #[default]
    Unset,
    Off,
    /// Bodies are searched, so requests must be seen.
    On,
}

/// The terms of a memory rule: which banks of a memory service a sandbox may use.
#[derive(Debug)]
pub(crate) struct MemoryTerms {
    pub(crate) resolves_to: Option<Box<[IpNet]>>,
    pub(crate) profile: ProfileName,
    pub(crate) identity: IdentityMode,
    /// The environment of all banks; `None` means each bank names its own.
    pub(crate) environment: Option<Environment>,
    pub(crate) recall: Box<[BankPattern]>,
    pub(crate) retain: Box<[BankPattern]>,
    pub(crate) forget: Box<[BankPattern]>,
    pub(crate) signals: SignalSettings,
    /// Other banks whose recalled text may be retained.
    pub(crate) receives: Box<[BankPattern]>,
}

/// Whether a memory request must carry a signed identity or takes that of its channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityMode {
    FromChannel,
    Required,
}

/// How an allow rule treats TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    #[default]
    Intercept,
    Tunnel,
}

/// The ports of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PortSet {
    All,
    Listed(Box<[u16]>),
}

/// SHA-256 of the loaded files; every record carries it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PolicyDigest(pub [u8; 32]);

/// A rule that names the host of an attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RuleMatch<'p> {
    pub(crate) policy: &'p Arc<Policy>,
    pub(crate) rule: &'p Rule,
    pub(crate) by: MatchedEntry<'p>,
}

/// The entry of a rule that names the host.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MatchedEntry<'p> {
    Address(IpNet),
    Host(PatternHit<'p>),
}

impl Policy {
    pub fn name(&self) -> &PolicyName {
        &self.name
    }

    pub fn file(&self) -> &str {
        &self.file
    }

    pub fn digest(&self) -> PolicyDigest {
        self.digest
    }

    pub fn budgets(&self) -> Budgets {
        self.budgets
    }

    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Returns the file and line of a pattern of `rule`.
    pub fn pattern_location(&self, rule: &Rule, hit: &PatternHit<'_>) -> (Arc<str>, u32) {
        pattern_location(self, rule, hit)
    }

    /// Returns every host pattern with its rule.
    pub fn hosts(&self) -> impl Iterator<Item = (PatternHit<'_>, &Rule)> {
        self.hosts.iter().filter_map(|hit| self.rule_at(hit.rule).map(|rule| (hit, rule)))
    }

    /// Returns the number of host patterns.
    pub fn pattern_count(&self) -> usize {
        self.hosts.len()
    }

    /// Returns the first exact names of the policy itself, not of its lists, each with its rule.
    pub fn literals(&self) -> impl Iterator<Item = (&DomainName, &Rule)> {
        let literals = self.hosts.literals().iter();
        literals.filter_map(|(name, at)| self.rule_at(*at).map(|rule| (name, rule)))
    }

    /// Returns every literal IP target with its rule.
    pub fn addresses(&self) -> impl Iterator<Item = (IpNet, &Rule)> {
        self.addresses.iter().filter_map(|entry| self.rule_at(entry.rule).map(|rule| (entry.net, rule)))
    }

    /// Returns whether any rule opens `port` to some target.
    pub(crate) fn opens_port(&self, port: u16) -> bool {
        self.open_ports.binary_search(&port).is_ok()
    }

    pub(crate) fn rule_at(&self, at: u16) -> Option<&Rule> {
        self.rules.get(usize::from(at))
    }
}

/// Returns every port that `rules` open, in order: their own, and those written with a pattern.
pub(crate) fn open_ports(rules: &[Rule], hosts: &HostSet) -> Box<[u16]> {
    let opens = |rule: &&Rule| !rule.is_deny();
    let written = hosts.iter().filter(|hit| rules.get(usize::from(hit.rule)).as_ref().is_some_and(opens));
    let written = written.filter_map(|hit| hit.port);
    let own = rules.iter().filter(opens).flat_map(|rule| rule.ports().unwrap_or(&[])).copied();
    own.chain(written).collect::<BTreeSet<u16>>().into_iter().collect()
}

/// Returns every rule of `policy` that names `host`, the most specific base name first.
pub(crate) fn matching_rules<'p>(
    policy: &'p Arc<Policy>,
    host: &'p Host,
) -> impl Iterator<Item = RuleMatch<'p>> {
    let named = host
        .name()
        .into_iter()
        .flat_map(|name| policy.hosts.hits(name))
        .map(|hit| (hit.rule, MatchedEntry::Host(hit)));
    let listed = policy.addresses.iter().filter_map(move |entry| match host {
        Host::Address(address) if entry.net.contains(address) => {
            Some((entry.rule, MatchedEntry::Address(entry.net)))
        }
        Host::Address(_) | Host::Name(_) => None,
    });
    named
        .chain(listed)
        .filter_map(move |(at, by)| policy.rule_at(at).map(|rule| RuleMatch { policy, rule, by }))
}

/// Returns the file and line of a pattern.
pub(crate) fn pattern_location(policy: &Policy, rule: &Rule, hit: &PatternHit<'_>) -> (Arc<str>, u32) {
    let list = rule.list.as_ref().filter(|_| hit.origin == PatternOrigin::List);
    (list.unwrap_or(&policy.file).clone(), hit.line)
}

impl RuleMatch<'_> {
    /// Returns the file and line of the matched entry.
    pub(crate) fn location(&self) -> (Arc<str>, u32) {
        match self.by {
            MatchedEntry::Address(_) => (self.policy.file.clone(), self.rule.line),
            MatchedEntry::Host(hit) => pattern_location(self.policy, self.rule, &hit),
        }
    }

    /// Returns whether the rule applies to `port`: the pattern's port if it has one, else the rule's.
    pub(crate) fn has_port(&self, port: u16) -> bool {
        match self.by {
            MatchedEntry::Host(PatternHit { port: Some(written), .. }) => written == port,
            MatchedEntry::Host(_) | MatchedEntry::Address(_) => self.rule.ports.contains(port),
        }
    }

    pub(crate) fn is_on_every_port(&self) -> bool {
        let written = matches!(self.by, MatchedEntry::Host(PatternHit { port: Some(_), .. }));
        !written && self.rule.ports == PortSet::All
    }

    /// Returns the pattern that names the host, as written.
    pub(crate) fn pattern(&self) -> String {
        match self.by {
            MatchedEntry::Address(net) => net.to_string(),
            MatchedEntry::Host(hit) => hit.pattern(),
        }
    }

    /// Returns a rank that is higher for more specific matches: longer base first, then exact name, then port.
    pub(crate) fn specificity(&self) -> (usize, bool, bool) {
        match self.by {
            MatchedEntry::Address(net) => (usize::from(net.prefix_len()), true, false),
            MatchedEntry::Host(hit) => (hit.base.len(), hit.reach == PatternReach::Exact, hit.port.is_some()),
        }
    }
}

impl Rule {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the first line of the rule in the policy file.
    pub fn line(&self) -> u32 {
        self.line
    }

    /// Returns the path of its list file.
    pub fn list_file(&self) -> Option<&str> {
        self.list.as_deref()
    }

    pub fn methods(&self) -> Option<&[HttpMethod]> {
        self.methods.as_deref()
    }

    pub fn paths(&self) -> Option<&[PathPattern]> {
        self.paths.as_deref()
    }

    /// Returns the ports for patterns without one; `None` means every port.
    pub fn ports(&self) -> Option<&[u16]> {
        match &self.ports {
            PortSet::All => None,
            PortSet::Listed(ports) => Some(ports),
        }
    }

    /// Returns the credentials that the rule injects.
    pub fn credentials(&self) -> &[CredentialName] {
        self.allow_terms().map_or(&[], |terms| &terms.credentials)
    }

    /// Returns what the rule says about credentials of other accounts.
    pub fn pin_account(&self) -> Option<PinAccount> {
        self.allow_terms().and_then(|terms| terms.pin_account)
    }

    /// Returns the only networks its hosts may resolve to.
    pub fn resolves_to(&self) -> Option<&[IpNet]> {
        match &self.verdict {
            RuleAction::Allow(terms) => terms.resolves_to.as_deref(),
            RuleAction::Deny => None,
            RuleAction::Memory(terms) => terms.resolves_to.as_deref(),
        }
    }

    pub fn is_deny(&self) -> bool {
        matches!(self.verdict, RuleAction::Deny)
    }

    /// Describes what the rule does.
    pub fn describe(&self) -> &'static str {
        match &self.verdict {
            RuleAction::Allow(terms) if terms.raw_tcp => "raw TCP",
            RuleAction::Allow(_) if self.tls() == TlsMode::Tunnel => "tunnel",
            RuleAction::Allow(_) => "intercept",
            RuleAction::Deny => "deny",
            RuleAction::Memory(_) => "memory",
        }
    }

    pub(crate) fn allow_terms(&self) -> Option<&AllowTerms> {
        match &self.verdict {
            RuleAction::Allow(terms) => Some(terms),
            RuleAction::Deny | RuleAction::Memory(_) => None,
        }
    }

    pub(crate) fn memory_terms(&self) -> Option<&MemoryTerms> {
        match &self.verdict {
            RuleAction::Memory(terms) => Some(terms),
            RuleAction::Allow(_) | RuleAction::Deny => None,
        }
    }

    pub(crate) fn is_raw(&self) -> bool {
        self.allow_terms().is_some_and(|terms| terms.raw_tcp)
    }

    pub(crate) fn tls(&self) -> TlsMode {
        self.allow_terms().map_or(TlsMode::Intercept, |terms| terms.tls)
    }

    /// Returns whether the rule needs to see requests, which forces interception of its hosts and ports.
    pub(crate) fn needs_requests(&self) -> bool {
        let terms = self.allow_terms().is_some_and(AllowTerms::need_requests);
        self.methods.is_some() || self.paths.is_some() || terms || self.memory_terms().is_some()
    }

    /// Returns whether the rule filters by method or path.
    pub(crate) fn filters_requests(&self) -> bool {
        self.methods.is_some() || self.paths.is_some()
    }

    /// Returns whether Sandbar passes bytes without reading them: tunnelled TLS or raw TCP.
    pub(crate) fn is_opaque(&self) -> bool {
        self.allow_terms().is_some_and(|terms| terms.raw_tcp || terms.tls == TlsMode::Tunnel)
    }
}

impl AllowTerms {
    /// Returns whether the terms are about requests.
    pub(crate) fn need_requests(&self) -> bool {
        let pins = self.pin_account.is_some_and(|pin| pin != PinAccount::Off);
        !self.credentials.is_empty() || pins || self.inspect == InspectTerm::On || self.fields.is_some()
    }
}

impl PortSet {
    pub(crate) fn contains(&self, port: u16) -> bool {
        match self {
            PortSet::All => true,
            PortSet::Listed(ports) => ports.contains(&port),
        }
    }
}

impl PolicyDigest {
    /// Returns the first twelve hex digits, for display.
    pub fn short(&self) -> String {
        self.to_string().chars().take(12).collect()
    }
}

impl fmt::Display for PolicyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|octet| write!(f, "{octet:02x}"))
    }
}

impl fmt::Debug for PolicyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
