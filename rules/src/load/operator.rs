//! The operator's file to the settings of the instance; the same checks run in `compile`.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use ipnet::Ipv4Net;
use toml::Spanned;

use super::document::{
    CredentialDocument, DenialDocument, DnsDocument, IdentifyDocument, ListenerDocument,
    ModeDocument, OnInvalidDocument, OperatorDocument,
};
use super::problem::{Fault, Problem, Problems, Source, printable};
use super::{SourceFile, memory, read, text_of};
use crate::limits::Limits;
use crate::name::DomainName;
use crate::operator::{
    Bind, CredentialFile, DenialForm, DnsSettings, GrantSettings, HostEntry, Listener, Mode,
    OnInvalid, Operator, PreResolve, Reverse, SystemRoots, UpstreamSettings, Whose, Zone,
};
use crate::pattern::{HostPattern, Width};
use crate::word::{CredentialName, SandboxId};

/// Most resolvers, zones and host entries, each.
const MAX_ENTRIES: usize = 1024;
/// Slowest grid: a query that waits longer has been given up by whoever asked.
const MAX_GRID: u64 = 2000;
/// The longest that grants may be allowed to last: a week. What is needed for longer is a rule.
const MAX_GRANT: u64 = 604_800;
/// Longest time in which answers share a record.
const MAX_FOLD: u64 = 3600;

/// Reads the settings of the instance from the operator's file.
///
/// # Errors
///
/// Returns what is wrong with them; what is wrong with sandboxes and policies only `compile` says.
pub fn operator(file: &SourceFile) -> Result<Operator, Vec<Problem>> {
    let mut problems = Problems::default();
    let settings = settings(file, &mut problems);
    match settings {
        Some(settings) if problems.errors.is_empty() => Ok(settings),
        _ => Err(problems.errors),
    }
}

fn settings(file: &SourceFile, problems: &mut Problems) -> Option<Operator> {
    let source = text_of(file, problems)?;
    let document: OperatorDocument = read::read(&source, problems)?;
    Some(Operator {
        dns: dns(&source, &document, problems),
        grants: grants(&source, &document, problems),
        limits: limits(&source, &document, problems),
        upstream: upstream(&document),
        on_invalid: match document.on_invalid {
            Some(OnInvalidDocument::Deny) => OnInvalid::Deny,
            Some(OnInvalidDocument::Keep) | None => OnInvalid::Keep,
        },
        identity: memory::issuers(&source, &document, problems),
        memory_services: memory::services(&source, &document, problems),
        credentials: document
            .credential
            .iter()
            .filter_map(|entry| credential(entry.get_ref()))
            .collect(),
        ca_dir: document.ca.map(|ca| ca.dir.into_inner()),
        listeners: document.listener.iter().filter_map(|entry| listener(entry.get_ref())).collect(),
        log_dir: document.log.map(|log| log.dir.into_inner()),
        admin_socket: document.admin.map(|admin| admin.socket.into_inner()),
    })
}

fn credential(document: &CredentialDocument) -> Option<CredentialFile> {
    let name = CredentialName::parse(document.name.get_ref()).ok()?;
    Some(CredentialFile { name, file: document.file.get_ref().clone() })
}

fn listener(document: &ListenerDocument) -> Option<Listener> {
    let whose = match (&document.sandbox, document.identify.as_ref().map(Spanned::get_ref)) {
        (Some(id), _) => Whose::Dedicated(SandboxId::parse(id.get_ref()).ok()?),
        (None, Some(IdentifyDocument::Interface)) => Whose::Interface,
        (None, Some(IdentifyDocument::Mark)) => Whose::Mark,
        (None, Some(IdentifyDocument::SourceAddress)) => Whose::SourceAddress,
        (None, Some(IdentifyDocument::Unix)) => Whose::Unix,
        (None, None) => return None,
    };
    let mode = match document.mode.get_ref() {
        ModeDocument::Dns => Mode::Dns,
        ModeDocument::Explicit => Mode::Explicit,
        ModeDocument::Redirect => Mode::Redirect,
        ModeDocument::Tproxy => Mode::Tproxy,
    };
    let bind = document.bind.iter().filter_map(|bind| Bind::parse(bind.get_ref())).collect();
    Some(Listener { mode, bind, whose })
}

/// What `[grants]` says, or every problem of it.
pub(crate) fn grants(
    source: &Source<'_>,
    document: &OperatorDocument,
    problems: &mut Problems,
) -> GrantSettings {
    let Some(document) = &document.grants else { return GrantSettings::default() };
    let mut host = |entry: &Spanned<String>| {
        let parsed = HostPattern::parse(entry.get_ref(), Width::DangerouslyWide);
        parsed.map_err(|fault| {
            let fault = Fault::Host { entry: printable(entry.get_ref()), source: fault };
            problems.error(source.place(entry.span()), fault);
        })
    };
    let forbid_hosts = document.forbid_hosts.iter().filter_map(|entry| host(entry).ok()).collect();
    let most_seconds = document.most_seconds.as_ref();
    if let Some(entry) = most_seconds.filter(|entry| *entry.get_ref() > MAX_GRANT) {
        let fault = Fault::Limit { given: *entry.get_ref(), most: MAX_GRANT };
        problems.error(source.place(entry.span()), fault);
    }
    GrantSettings {
        forbid_hosts,
        forbid_bases: document.forbid_bases.iter().map(|base| base.get_ref().clone()).collect(),
        most_seconds: most_seconds
            .map_or(GrantSettings::default().most_seconds, |entry| *entry.get_ref()),
    }
}

/// What `[limits]` says, or every problem of it.
pub(crate) fn limits(
    source: &Source<'_>,
    document: &OperatorDocument,
    problems: &mut Problems,
) -> Limits {
    let Some(document) = &document.limits else { return Limits::default() };
    document.read(|entry, most| {
        let fault = Fault::Limit { given: *entry.get_ref(), most };
        problems.error(source.place(entry.span()), fault);
    })
}

fn upstream(document: &OperatorDocument) -> UpstreamSettings {
    let Some(document) = &document.upstream else { return UpstreamSettings::default() };
    UpstreamSettings {
        roots: document.roots.iter().map(|root| root.get_ref().clone()).collect(),
        system_roots: match document.system_roots {
            Some(false) => SystemRoots::Ignored,
            Some(true) | None => SystemRoots::Believed,
        },
        mark: document.mark,
    }
}

/// What `[dns]` says, or every problem of it.
pub(crate) fn dns(
    source: &Source<'_>,
    document: &OperatorDocument,
    problems: &mut Problems,
) -> Option<DnsSettings> {
    let document = document.dns.as_ref()?;
    let mut reader = Reader { source, problems };
    let known = DnsSettings::new(reader.resolvers(&document.upstreams));
    Some(DnsSettings {
        zones: reader.zones(document),
        hosts: reader.hosts(document),
        denial: denial(document.denial),
        grid_milliseconds: reader.within(
            document.grid_milliseconds.as_ref(),
            known.grid_milliseconds,
            MAX_GRID,
            "the grid has at most 2000 milliseconds: stub resolvers give up soon after",
        ),
        forwards_per_hour: reader.within(
            document.forwards_per_hour.as_ref(),
            known.forwards_per_hour,
            u64::from(u32::MAX),
            "that is more queries an hour than can leave",
        ),
        fold_seconds: reader.within(
            document.fold_seconds.as_ref(),
            known.fold_seconds,
            MAX_FOLD,
            "answers share a record for at most 3600 seconds",
        ),
        pre_resolve: match document.pre_resolve {
            Some(false) => PreResolve::Off,
            Some(true) | None => PreResolve::On,
        },
        reverse: match document.reverse {
            Some(true) => Reverse::Known,
            Some(false) | None => Reverse::Off,
        },
        synthetic: reader.synthetic(document.synthetic.as_ref(), known.synthetic),
        ..known
    })
}

fn denial(document: Option<DenialDocument>) -> DenialForm {
    match document {
        Some(DenialDocument::Nodata) => DenialForm::NoData,
        Some(DenialDocument::Nxdomain) | None => DenialForm::NxDomain,
        Some(DenialDocument::Refused) => DenialForm::Refused,
        Some(DenialDocument::Sinkhole) => DenialForm::Sinkhole,
    }
}

struct Reader<'a, 'b> {
    source: &'a Source<'a>,
    problems: &'b mut Problems,
}

impl Reader<'_, '_> {
    fn resolvers(&mut self, entries: &[Spanned<String>]) -> Vec<SocketAddr> {
        self.bounded(entries.len());
        let why = "a resolver is written `address:port`";
        entries.iter().filter_map(|entry| self.parsed(entry, why)).collect()
    }

    fn zones(&mut self, document: &DnsDocument) -> Vec<Zone> {
        self.bounded(document.zone.len());
        let mut zones: Vec<Zone> = Vec::new();
        for entry in document.zone.iter().map(Spanned::get_ref) {
            let upstreams = self.resolvers(&entry.upstreams);
            let Some(name) = self.name(&entry.name) else { continue };
            if entry.upstreams.is_empty() {
                self.fault(&entry.name, Fault::Missing("a zone names at least one resolver"));
            }
            if zones.iter().any(|zone| zone.name == name) {
                let fault = Fault::Twice { what: "zone", name: name.to_string(), line: 1 };
                self.fault(&entry.name, fault);
            }
            zones.push(Zone { name, upstreams });
        }
        zones
    }

    fn hosts(&mut self, document: &DnsDocument) -> Vec<HostEntry> {
        self.bounded(document.host.len());
        let mut hosts: Vec<HostEntry> = Vec::new();
        for entry in document.host.iter().map(Spanned::get_ref) {
            let why = "an address of a host is written without port or prefix";
            let addresses: Vec<IpAddr> =
                entry.addresses.iter().filter_map(|address| self.parsed(address, why)).collect();
            let Some(name) = self.name(&entry.name) else { continue };
            if hosts.iter().any(|host| host.name == name) {
                let fault = Fault::Twice { what: "host", name: name.to_string(), line: 1 };
                self.fault(&entry.name, fault);
            }
            hosts.push(HostEntry { name, addresses });
        }
        hosts
    }

    fn synthetic(&mut self, entry: Option<&Spanned<String>>, usual: Ipv4Net) -> Ipv4Net {
        let why = "the synthetic range is an IPv4 network of at least 256 addresses, such as `198.18.0.0/15`";
        let Some(entry) = entry else { return usual };
        match self.parsed::<Ipv4Net>(entry, why) {
            Some(net) if net.prefix_len() <= 24 && net.trunc() == net => net,
            Some(_) => {
                self.fault(entry, Fault::Missing(why));
                usual
            }
            None => usual,
        }
    }

    fn within(
        &mut self,
        entry: Option<&Spanned<u64>>,
        usual: u64,
        most: u64,
        why: &'static str,
    ) -> u64 {
        match entry {
            Some(entry) if *entry.get_ref() > most => {
                self.problems.error(self.source.place(entry.span()), Fault::Missing(why));
                usual
            }
            Some(entry) => *entry.get_ref(),
            None => usual,
        }
    }

    fn name(&mut self, entry: &Spanned<String>) -> Option<DomainName> {
        match DomainName::parse(entry.get_ref()) {
            Ok(name) => Some(name),
            Err(source) => {
                let fault =
                    Fault::Host { entry: printable(entry.get_ref()), source: source.into() };
                self.fault(entry, fault);
                None
            }
        }
    }

    fn parsed<T: FromStr>(&mut self, entry: &Spanned<String>, why: &'static str) -> Option<T> {
        let parsed = entry.get_ref().parse().ok();
        if parsed.is_none() {
            self.fault(entry, Fault::Missing(why));
        }
        parsed
    }

    fn bounded(&mut self, count: usize) {
        if count > MAX_ENTRIES {
            let fault = Fault::TooMany { what: "entries under [dns]", limit: MAX_ENTRIES };
            self.problems.error(self.source.place(0..0), fault);
        }
    }

    fn fault(&mut self, entry: &Spanned<String>, fault: Fault) {
        self.problems.error(self.source.place(entry.span()), fault);
    }
}
