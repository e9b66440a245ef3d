//! The operator's file to sandboxes and their layers.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use ipnet::IpNet;
use toml::Spanned;

use super::document::{ListenerDocument, ModeDocument, OperatorDocument, SandboxDocument};
use super::problem::{Fault, Problems, Source, nearest, printable};
use super::{SourceFile, lint, memory, operator, read, text_of};
use crate::operator::Bind;
use crate::policy::Policy;
use crate::ruleset::{Base, Layers, Tier};
use crate::sandbox::{Channel, Sandbox, Sandboxes};
use crate::word::{
    AgentCard, CredentialName, Environment, PolicyName, SandboxId, Tenant, WordError,
};

/// Most sandboxes in one operator's file.
const MAX_SANDBOXES: usize = 100_000;

type Policies = BTreeMap<PolicyName, Arc<Policy>>;
type Declared = (Sandboxes, HashMap<SandboxId, Layers>);

/// Without an operator's file each policy is a sandbox of its own name, under a base that forbids nothing.
pub(crate) fn lone(policies: &Policies) -> Declared {
    let (mut sandboxes, mut layers) = (Sandboxes::default(), HashMap::new());
    for (name, policy) in policies {
        let Ok(id) = SandboxId::parse(name.as_str()) else { continue };
        let (tenant, environment, agent_card, generation) = (None, None, None, None);
        sandboxes.insert(Sandbox { id: id.clone(), tenant, environment, agent_card, generation });
        layers.insert(id, Layers { base: Base::Tier(Tier::System), sandbox: vec![policy.clone()] });
    }
    (sandboxes, layers)
}

/// What the operator's file declares; `None` when it cannot be read at all.
pub(crate) fn declared(
    file: &SourceFile,
    policies: &Policies,
    problems: &mut Problems,
) -> Option<Declared> {
    let source = text_of(file, problems)?;
    let document: OperatorDocument = read::read(&source, problems)?;
    let credentials = credentials(&source, &document, problems);
    let mut reader = Reader { source: &source, policies, problems, lines: HashMap::new() };
    let forbidden = document.grants.iter().flat_map(|grants| &grants.forbid_bases);
    for base in forbidden.filter(|base| Tier::by_name(base.get_ref()).is_none()) {
        drop(reader.policy(base, "base")); // only that there is one
    }
    let mut judged = HashSet::new();
    let (mut sandboxes, mut layers) = (Sandboxes::default(), HashMap::new());
    if document.sandbox.len() > MAX_SANDBOXES {
        reader.fault(0..0, Fault::TooMany { what: "sandboxes", limit: MAX_SANDBOXES });
    }
    for entry in document.sandbox.iter().take(MAX_SANDBOXES) {
        let Some(sandbox) = reader.sandbox(entry) else { continue };
        reader.channels(entry.get_ref(), &sandbox.id, &mut sandboxes);
        if let Some(stack) = reader.layers(entry.get_ref()) {
            // Sandboxes by the thousand share a few stacks: each is judged once.
            if judged.insert((document_key(entry.get_ref()), sandbox.environment.clone())) {
                lint::sandbox(&sandbox, &stack, &credentials, reader.problems);
            }
            layers.insert(sandbox.id.clone(), stack);
        }
        sandboxes.insert(sandbox);
    }
    reader.paths(&document);
    reader.listeners(&document, &sandboxes);
    operator::dns(&source, &document, problems);
    operator::grants(&source, &document, problems);
    operator::limits(&source, &document, problems);
    let services = memory::services(&source, &document, problems);
    let identity = memory::issuers(&source, &document, problems);
    lint::unspoken(&layers, &services, identity.as_ref(), problems);
    trials(policies, &sandboxes, problems);
    lint::unused(policies, &layers, problems);
    Some((sandboxes, layers))
}

/// What a sandbox is judged by, as written.
fn document_key(document: &SandboxDocument) -> (Option<String>, Vec<String>) {
    let base = document.base.as_ref().map(|base| base.get_ref().clone());
    (base, document.policies.iter().map(|name| name.get_ref().clone()).collect())
}

/// A test for a sandbox that does not exist would never run, and so never fail.
fn trials(policies: &Policies, sandboxes: &Sandboxes, problems: &mut Problems) {
    for trial in policies.values().flat_map(|policy| &policy.trials) {
        if let Some(id) = trial.sandbox.as_ref().filter(|id| sandboxes.get(id).is_none()) {
            problems
                .error(trial.at.clone(), Fault::Unknown { what: "sandbox", name: id.to_string() });
        }
    }
}

fn credentials(
    source: &Source<'_>,
    document: &OperatorDocument,
    problems: &mut Problems,
) -> Vec<CredentialName> {
    let mut names: Vec<CredentialName> = Vec::new();
    let mut lines: HashMap<CredentialName, u32> = HashMap::new();
    for entry in &document.credential {
        let name = &entry.get_ref().name;
        match CredentialName::parse(name.get_ref()) {
            Ok(parsed) => {
                let line = source.line(name.span().start);
                if let Some(line) = lines.insert(parsed.clone(), line) {
                    let fault = Fault::Twice { what: "credential", name: parsed.to_string(), line };
                    problems.error(source.place(name.span()), fault);
                }
                names.push(parsed);
            }
            Err(error) => {
                let fault = Fault::Word {
                    what: "credential",
                    entry: printable(name.get_ref()),
                    source: error,
                };
                problems.error(source.place(name.span()), fault);
            }
        }
    }
    names
}

struct Reader<'a> {
    source: &'a Source<'a>,
    policies: &'a Policies,
    problems: &'a mut Problems,
    /// The line each sandbox stands on.
    lines: HashMap<SandboxId, u32>,
}

impl Reader<'_> {
    fn sandbox(&mut self, entry: &Spanned<SandboxDocument>) -> Option<Sandbox> {
        let document = entry.get_ref();
        let id = self.word("sandbox id", &document.id, SandboxId::parse)?;
        let line = self.source.line(document.id.span().start);
        if let Some(first) = self.lines.insert(id.clone(), line) {
            self.fault(
                document.id.span(),
                Fault::Twice { what: "sandbox", name: id.to_string(), line: first },
            );
            return None;
        }
        Some(Sandbox {
            id,
            tenant: self.optional("tenant", document.tenant.as_ref(), Tenant::parse),
            environment: self.optional(
                "environment",
                document.environment.as_ref(),
                Environment::parse,
            ),
            agent_card: self.optional("agent card", document.agent_card.as_ref(), AgentCard::parse),
            generation: document.generation,
        })
    }

    fn channels(&mut self, document: &SandboxDocument, id: &SandboxId, sandboxes: &mut Sandboxes) {
        let mark = document.mark.as_ref().map(|mark| (mark.span(), Channel::Mark(*mark.get_ref())));
        let interface = document.interface.as_ref();
        let interface =
            interface.map(|name| (name.span(), Channel::Interface(name.get_ref().clone())));
        let uid =
            document.unix_uid.as_ref().map(|uid| (uid.span(), Channel::UnixUser(*uid.get_ref())));
        for (span, channel) in [mark, interface, uid].into_iter().flatten() {
            if channel == Channel::Mark(0) {
                let why = "mark 0 is what every unmarked connection carries";
                self.fault(span.clone(), Fault::Missing(why));
            }
            if matches!(&channel, Channel::Interface(name) if name.is_empty() || name.len() > 15) {
                self.fault(
                    span.clone(),
                    Fault::Missing("an interface name has 1 to 15 characters"),
                );
            }
            let shown = channel.to_string();
            if let Some(other) = sandboxes.bind(channel, id) {
                self.shared(span, &shown, &other);
            }
        }
        self.source_address(document, id, sandboxes);
    }

    fn source_address(
        &mut self,
        document: &SandboxDocument,
        id: &SandboxId,
        sandboxes: &mut Sandboxes,
    ) {
        let Some(entry) = &document.source_address else { return };
        if !document.dangerously_trust_source_address {
            let why = "a neighbour can take a source address; say `dangerously_trust_source_address = true` if none can";
            self.fault(entry.span(), Fault::Missing(why));
        }
        let Some(net) = entry.get_ref().parse::<IpNet>().ok().filter(|net| net.trunc() == *net)
        else {
            self.fault(entry.span(), Fault::Network(entry.get_ref().clone()));
            return;
        };
        if let Some(other) = sandboxes.bind_source(net, id) {
            self.shared(entry.span(), &format!("source address {net}"), &other);
        }
    }

    fn shared(&mut self, span: std::ops::Range<usize>, channel: &str, other: &SandboxId) {
        let line = self.lines.get(other).copied().unwrap_or(1);
        let name = format!("{channel} (of sandbox {other})");
        self.fault(span, Fault::Twice { what: "channel", name, line });
    }

    fn layers(&mut self, document: &SandboxDocument) -> Option<Layers> {
        let base = match &document.base {
            None => Some(Base::Tier(Tier::User)),
            Some(name) => match Tier::by_name(name.get_ref()) {
                Some(tier) => Some(Base::Tier(tier)),
                None => self.policy(name, "base").map(Base::Policy),
            },
        };
        let sandbox =
            document.policies.iter().filter_map(|name| self.policy(name, "policy")).collect();
        Some(Layers { base: base?, sandbox })
    }

    fn policy(&mut self, name: &Spanned<String>, what: &'static str) -> Option<Arc<Policy>> {
        let found = self.policies.iter().find(|(known, _)| known.as_str() == name.get_ref());
        if found.is_none() {
            let tiers = ["system", "untrusted", "user"].into_iter().filter(|_| what == "base");
            let known = self.policies.keys().map(PolicyName::as_str).chain(tiers);
            let help = match nearest(name.get_ref(), known.clone()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("there are: {}", known.collect::<Vec<_>>().join(", ")),
            };
            let fault = Fault::Unknown { what, name: printable(name.get_ref()) };
            let place = self.source.place(name.span());
            self.problems.error_with(place, fault, help);
        }
        found.map(|(_, policy)| policy.clone())
    }

    /// An empty path would mean the current directory to some and nothing to others.
    fn paths(&mut self, document: &OperatorDocument) {
        let log = document.log.iter().map(|log| &log.dir);
        let secrets = document.credential.iter().map(|entry| &entry.get_ref().file);
        let admin = document.admin.iter().map(|admin| &admin.socket);
        let ca = document.ca.iter().map(|ca| &ca.dir);
        let roots = document.upstream.iter().flat_map(|upstream| &upstream.roots);
        let paths =
            log.chain(secrets).chain(admin).chain(ca).chain(roots).chain(&document.policies);
        let identity = document.identity.iter();
        let keys = identity.clone().flat_map(|identity| &identity.issuer);
        let paths = paths
            .chain(keys.map(|issuer| &issuer.get_ref().keys))
            .chain(identity.flat_map(|identity| &identity.revocations));
        for path in paths.filter(|path| path.get_ref().is_empty()) {
            self.fault(path.span(), Fault::Missing("a path must not be empty"));
        }
    }

    fn listeners(&mut self, document: &OperatorDocument, sandboxes: &Sandboxes) {
        for entry in &document.listener {
            let listener = entry.get_ref();
            match (&listener.sandbox, &listener.identify) {
                (None, None) => {
                    let why =
                        "a listener says whose it is: `sandbox`, or `identify` if it is shared";
                    self.fault(listener.mode.span(), Fault::Missing(why));
                }
                (Some(sandbox), Some(_)) => {
                    self.fault(sandbox.span(), Fault::Exclusive("sandbox", "identify"));
                }
                (Some(name), None)
                    if !sandboxes.iter().any(|known| known.id.as_str() == name.get_ref()) =>
                {
                    self.fault(
                        name.span(),
                        Fault::Unknown { what: "sandbox", name: printable(name.get_ref()) },
                    );
                }
                (Some(_), None) | (None, Some(_)) => {}
            }
            self.binds(listener);
        }
    }

    fn binds(&mut self, listener: &ListenerDocument) {
        let explicit = *listener.mode.get_ref() == ModeDocument::Explicit;
        for bind in &listener.bind {
            let why = match Bind::parse(bind.get_ref()) {
                None => "a socket is written `address:port`, `unix:PATH` or `inherited:NAME`",
                Some(Bind::Unix(_)) if !explicit => "only an explicit listener has a unix socket",
                Some(Bind::Inherited(_) | Bind::Tcp(_) | Bind::Unix(_)) => continue,
            };
            self.fault(bind.span(), Fault::Missing(why));
        }
        if listener.bind.is_empty() {
            self.fault(
                listener.mode.span(),
                Fault::Missing("a listener binds at least one socket"),
            );
        }
    }

    fn optional<T>(
        &mut self,
        what: &'static str,
        entry: Option<&Spanned<String>>,
        parse: fn(&str) -> Result<T, WordError>,
    ) -> Option<T> {
        entry.and_then(|entry| self.word(what, entry, parse))
    }

    fn word<T>(
        &mut self,
        what: &'static str,
        entry: &Spanned<String>,
        parse: fn(&str) -> Result<T, WordError>,
    ) -> Option<T> {
        self.problems.word(self.source, what, entry, parse)
    }

    fn fault(&mut self, span: std::ops::Range<usize>, fault: Fault) {
        self.problems.error(self.source.place(span), fault);
    }
}
