//! Reads sandboxes and their layers from the configuration.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::IpNet;
use toml::Spanned;

use super::document::{ConfigurationDocument, ListenerDocument, ModeDocument, SandboxDocument};
use super::problem::{ProblemKind, Problems, SourceText, nearest, printable};
use super::{SourceFile, configuration, credential, decode_file, lint, log, memory, read};
use crate::configuration::BindTarget;
use crate::ids::{AgentCard, Environment, IdError, PolicyName, SandboxId, Tenant};
use crate::policy::Policy;
use crate::ruleset::{BaseLayer, SandboxLayers, Tier};
use crate::sandbox::{Channel, Sandbox, Sandboxes};

/// Most sandboxes in one configuration.
const MAX_SANDBOXES: usize = 100_000;

type PolicyMap = BTreeMap<PolicyName, Arc<Policy>>;
type DeclaredSandboxes = (Sandboxes, HashMap<SandboxId, SandboxLayers>);

/// Makes one sandbox per policy, with the policy's name and base `system`, for a load without configuration.
pub(crate) fn lone_sandboxes(policies: &PolicyMap) -> DeclaredSandboxes {
    let (mut sandboxes, mut layers) = (Sandboxes::default(), HashMap::new());
    for (name, policy) in policies {
        let Ok(id) = SandboxId::parse(name.as_str()) else { continue };
        let (tenant, environment, agent_card, generation) = (None, None, None, None);
        sandboxes.insert(Sandbox { id: id.clone(), tenant, environment, agent_card, generation });
        layers
            .insert(id, SandboxLayers { base: BaseLayer::Tier(Tier::System), sandbox: vec![policy.clone()] });
    }
    (sandboxes, layers)
}

/// Reads the sandboxes of the configuration; `None` if it is not readable as TOML.
pub(crate) fn read_sandboxes(
    file: &SourceFile,
    policies: &PolicyMap,
    problems: &mut Problems,
) -> Option<DeclaredSandboxes> {
    let source = decode_file(file, problems)?;
    let document: ConfigurationDocument = read::read_document(&source, problems)?;
    let credentials = credential::read_credentials(&source, &document, problems);
    let known: Vec<&str> =
        document.credential.iter().map(|entry| entry.get_ref().name.get_ref().as_str()).collect();
    let mut reader = SandboxReader { source: &source, policies, problems, lines: HashMap::new() };
    let forbidden = document.grants.iter().flat_map(|grants| &grants.forbid_bases);
    for base in forbidden.filter(|base| Tier::by_name(base.get_ref()).is_none()) {
        drop(reader.find_policy(base, "base")); // reports an unknown one
    }
    let mut linted = HashSet::new();
    let (mut sandboxes, mut layers) = (Sandboxes::default(), HashMap::new());
    if document.sandbox.len() > MAX_SANDBOXES {
        reader.report(0..0, ProblemKind::TooMany { what: "sandboxes", limit: MAX_SANDBOXES });
    }
    for entry in document.sandbox.iter().take(MAX_SANDBOXES) {
        let Some(sandbox) = reader.read_sandbox(entry) else { continue };
        reader.bind_channels(entry.get_ref(), &sandbox.id, &mut sandboxes);
        if let Some(stack) = reader.read_layers(entry.get_ref()) {
            // Thousands of sandboxes share a few combinations of layers; each combination is linted once.
            if linted.insert((layers_key(entry.get_ref()), sandbox.environment.clone())) {
                lint::lint_sandbox(&sandbox, &stack, (&known, &credentials), reader.problems);
            }
            layers.insert(sandbox.id.clone(), stack);
        }
        sandboxes.insert(sandbox);
    }
    reader.check_paths(&document);
    reader.check_listeners(&document, &sandboxes);
    configuration::read_dns(&source, &document, problems);
    configuration::read_grants(&source, &document, problems);
    configuration::read_limits(&source, &document, problems);
    configuration::read_quota(&source, &document, problems);
    log::read_log(&source, &document, problems);
    let services = memory::read_services(&source, &document, &credentials, problems);
    let identity = memory::read_identity(&source, &document, problems);
    lint::check_memory_services(&layers, &services, identity.as_ref(), problems);
    check_tests(policies, &sandboxes, problems);
    lint::check_unused_policies(policies, &layers, problems);
    Some((sandboxes, layers))
}

/// Returns the layers of a sandbox as written, to compare them.
fn layers_key(document: &SandboxDocument) -> (Option<String>, Vec<String>) {
    let base = document.base.as_ref().map(|base| base.get_ref().clone());
    (base, document.policies.iter().map(|name| name.get_ref().clone()).collect())
}

/// Reports tests for sandboxes that do not exist: such a test never runs and so never fails.
fn check_tests(policies: &PolicyMap, sandboxes: &Sandboxes, problems: &mut Problems) {
    for trial in policies.values().flat_map(|policy| &policy.trials) {
        if let Some(id) = trial.sandbox.as_ref().filter(|id| sandboxes.get(id).is_none()) {
            problems.error(trial.at.clone(), ProblemKind::Unknown { what: "sandbox", name: id.to_string() });
        }
    }
}

/// A listener on all addresses.
const EVERYWHERE: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// Returns the addresses at which a listener is reached. Those of the loopback interface count as one, because whoever
/// reaches one of them reaches all.
fn reached_at(listener: &ListenerDocument) -> impl Iterator<Item = IpAddr> {
    let address = |bind: &Spanned<String>| BindTarget::parse(bind.get_ref())?.address();
    listener.bind.iter().filter_map(address).map(|address| match address.ip().to_canonical() {
        any if any.is_unspecified() => EVERYWHERE,
        local if local.is_loopback() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        other => other,
    })
}

struct SandboxReader<'a> {
    source: &'a SourceText<'a>,
    policies: &'a PolicyMap,
    problems: &'a mut Problems,
    /// The line of each sandbox.
    lines: HashMap<SandboxId, u32>,
}

impl SandboxReader<'_> {
    fn read_sandbox(&mut self, entry: &Spanned<SandboxDocument>) -> Option<Sandbox> {
        let document = entry.get_ref();
        let id = self.parse_id("sandbox id", &document.id, SandboxId::parse)?;
        let line = self.source.line(document.id.span().start);
        if let Some(first) = self.lines.insert(id.clone(), line) {
            self.report(
                document.id.span(),
                ProblemKind::Twice { what: "sandbox", name: id.to_string(), line: first },
            );
            return None;
        }
        Some(Sandbox {
            id,
            tenant: self.parse_optional_id("tenant", document.tenant.as_ref(), Tenant::parse),
            environment: self.parse_optional_id(
                "environment",
                document.environment.as_ref(),
                Environment::parse,
            ),
            agent_card: self.parse_optional_id("agent card", document.agent_card.as_ref(), AgentCard::parse),
            generation: document.generation,
        })
    }

    fn bind_channels(&mut self, document: &SandboxDocument, id: &SandboxId, sandboxes: &mut Sandboxes) {
        let mark = document.mark.as_ref().map(|mark| (mark.span(), Channel::Mark(*mark.get_ref())));
        let interface = document.interface.as_ref();
        let interface = interface.map(|name| (name.span(), Channel::Interface(name.get_ref().clone())));
        let uid = document.unix_uid.as_ref().map(|uid| (uid.span(), Channel::UnixUser(*uid.get_ref())));
        for (span, channel) in [mark, interface, uid].into_iter().flatten() {
            if channel == Channel::Mark(0) {
                let why = "every unmarked connection carries mark 0; choose another mark";
                self.report(span.clone(), ProblemKind::Missing(why));
            }
            if matches!(&channel, Channel::Interface(name) if name.is_empty() || name.len() > 15) {
                self.report(
                    span.clone(),
                    ProblemKind::Missing("an interface name must have 1 to 15 characters"),
                );
            }
            let shown = channel.to_string();
            if let Some(other) = sandboxes.bind_channel(channel, id) {
                self.report_shared_channel(span, &shown, &other);
            }
        }
        self.bind_source_address(document, id, sandboxes);
    }

    fn bind_source_address(&mut self, document: &SandboxDocument, id: &SandboxId, sandboxes: &mut Sandboxes) {
        let Some(entry) = &document.source_address else { return };
        if !document.dangerously_trust_source_address {
            let why = "a neighbour can spoof a source address; set `dangerously_trust_source_address = true` if none can here";
            self.report(entry.span(), ProblemKind::Missing(why));
        }
        let Some(net) = entry.get_ref().parse::<IpNet>().ok().filter(|net| net.trunc() == *net) else {
            self.report(entry.span(), ProblemKind::Network(entry.get_ref().clone()));
            return;
        };
        if let Some(other) = sandboxes.bind_source(net, id) {
            self.report_shared_channel(entry.span(), &format!("source address {net}"), &other);
        }
    }

    fn report_shared_channel(&mut self, span: std::ops::Range<usize>, channel: &str, other: &SandboxId) {
        let line = self.lines.get(other).copied().unwrap_or(1);
        let name = format!("{channel} (of sandbox {other})");
        self.report(span, ProblemKind::Twice { what: "channel", name, line });
    }

    fn read_layers(&mut self, document: &SandboxDocument) -> Option<SandboxLayers> {
        let base = match &document.base {
            None => Some(BaseLayer::Tier(Tier::User)),
            Some(name) => match Tier::by_name(name.get_ref()) {
                Some(tier) => Some(BaseLayer::Tier(tier)),
                None => self.find_policy(name, "base").map(BaseLayer::Policy),
            },
        };
        let sandbox = document.policies.iter().filter_map(|name| self.find_policy(name, "policy")).collect();
        Some(SandboxLayers { base: base?, sandbox })
    }

    fn find_policy(&mut self, name: &Spanned<String>, what: &'static str) -> Option<Arc<Policy>> {
        let found = self.policies.iter().find(|(known, _)| known.as_str() == name.get_ref());
        if found.is_none() {
            let tiers = ["system", "untrusted", "user"].into_iter().filter(|_| what == "base");
            let known = self.policies.keys().map(PolicyName::as_str).chain(tiers);
            let help = match nearest(name.get_ref(), known.clone()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("use one of: {}", known.collect::<Vec<_>>().join(", ")),
            };
            let fault = ProblemKind::Unknown { what, name: printable(name.get_ref()) };
            let location = self.source.location(name.span());
            self.problems.error_with_help(location, fault, help);
        }
        found.map(|(_, policy)| policy.clone())
    }

    /// Reports empty paths, which are ambiguous: some code reads them as the current directory.
    fn check_paths(&mut self, document: &ConfigurationDocument) {
        let log = document.log.iter().map(|log| &log.dir);
        let admin = document.admin.iter().map(|admin| &admin.socket);
        let ca = document.ca.iter().map(|ca| &ca.dir);
        let roots = document.upstream.iter().flat_map(|upstream| &upstream.roots);
        let paths = log.chain(admin).chain(ca).chain(roots).chain(&document.policies);
        let identity = document.identity.iter();
        let keys = identity.clone().flat_map(|identity| &identity.issuer);
        let paths = paths
            .chain(keys.map(|issuer| &issuer.get_ref().keys))
            .chain(identity.flat_map(|identity| &identity.revocations));
        for path in paths.filter(|path| path.get_ref().is_empty()) {
            self.report(path.span(), ProblemKind::Missing("a path must not be empty"));
        }
    }

    fn check_listeners(&mut self, document: &ConfigurationDocument, sandboxes: &Sandboxes) {
        for entry in &document.listener {
            let listener = entry.get_ref();
            match (&listener.sandbox, &listener.identify) {
                (None, None) => {
                    let why = "a listener needs `sandbox`, or `identify` if several sandboxes share it";
                    self.report(listener.mode.span(), ProblemKind::Missing(why));
                }
                (Some(sandbox), Some(_)) => {
                    self.report(sandbox.span(), ProblemKind::Exclusive("sandbox", "identify"));
                }
                (Some(name), None) if !sandboxes.iter().any(|known| known.id.as_str() == name.get_ref()) => {
                    self.report(
                        name.span(),
                        ProblemKind::Unknown { what: "sandbox", name: printable(name.get_ref()) },
                    );
                }
                (Some(_), None) | (None, Some(_)) => {}
            }
            self.check_binds(listener);
        }
        self.check_shared_addresses(document);
    }

    /// Reports a dedicated listener on an address where other sandboxes arrive too: a port is not a channel, because a
    /// process chooses the port it connects to (P2).
    fn check_shared_addresses(&mut self, document: &ConfigurationDocument) {
        let mut listeners: HashMap<IpAddr, Vec<&ListenerDocument>> = HashMap::new();
        for listener in document.listener.iter().map(Spanned::get_ref) {
            for place in reached_at(listener) {
                listeners.entry(place).or_default().push(listener);
            }
        }
        let of = |place: &IpAddr| listeners.get(place).into_iter().flatten();
        for listener in document.listener.iter().map(Spanned::get_ref) {
            let Some(own) = listener.sandbox.as_ref().filter(|_| !listener.dangerously_share_address) else {
                continue;
            };
            let is_other = |other: &&&ListenerDocument| match &other.sandbox {
                Some(name) => name.get_ref() != own.get_ref(),
                None => document.sandbox.len() > 1,
            };
            let shared = reached_at(listener).find_map(|place| match place == EVERYWHERE {
                true => listeners.values().flatten().find(is_other),
                false => of(&place).chain(of(&EVERYWHERE)).find(is_other),
            });
            if let Some(other) = shared {
                let line = self.source.line(other.mode.span().start);
                let other = match &other.sandbox {
                    Some(name) => format!("sandbox `{}`", printable(name.get_ref())),
                    None => "a shared listener".to_owned(),
                };
                let help = "give each sandbox an address or a unix socket of its own, or use `identify`; if a firewall separates the ports, set `dangerously_share_address = true` in both listeners";
                let location = self.source.location(own.span());
                let fault = ProblemKind::SharedAddress { other, line };
                self.problems.error_with_help(location, fault, help.to_owned());
            }
        }
    }

    fn check_binds(&mut self, listener: &ListenerDocument) {
        let explicit = *listener.mode.get_ref() == ModeDocument::Explicit;
        for bind in &listener.bind {
            let why = match BindTarget::parse(bind.get_ref()) {
                None => "write a socket as `address:port`, `unix:PATH` or `inherited:NAME`",
                Some(BindTarget::Unix(_)) if !explicit => {
                    "only a listener with `mode = \"explicit\"` can bind a unix socket"
                }
                Some(BindTarget::Inherited(_) | BindTarget::Tcp(_) | BindTarget::Unix(_)) => {
                    continue;
                }
            };
            self.report(bind.span(), ProblemKind::Missing(why));
        }
        if listener.bind.is_empty() {
            self.report(
                listener.mode.span(),
                ProblemKind::Missing("a listener needs at least one socket in `bind`"),
            );
        }
    }

    fn parse_optional_id<T>(
        &mut self,
        what: &'static str,
        entry: Option<&Spanned<String>>,
        parse: fn(&str) -> Result<T, IdError>,
    ) -> Option<T> {
        entry.and_then(|entry| self.parse_id(what, entry, parse))
    }

    fn parse_id<T>(
        &mut self,
        what: &'static str,
        entry: &Spanned<String>,
        parse: fn(&str) -> Result<T, IdError>,
    ) -> Option<T> {
        self.problems.parse_id(self.source, what, entry, parse)
    }

    fn report(&mut self, span: std::ops::Range<usize>, fault: ProblemKind) {
        self.problems.error(self.source.location(span), fault);
    }
}
