//! Reads the settings of the instance from the configuration; `compile` runs the same checks.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use ipnet::Ipv4Net;
use toml::Spanned;

use super::document::{
    AttributionDocument, ConfigurationDocument, DenialDocument, DnsDocument, ListenerDocument, ModeDocument,
    OnInvalidDocument,
};
use super::problem::{Problem, ProblemKind, Problems, SourceText, printable};
use super::{SourceFile, credential, decode_file, log, memory, read};
use crate::configuration::{
    Attribution, BindTarget, Configuration, DenialForm, DnsSettings, ForwardZone, GrantSettings, HostEntry,
    ListenerMode, ListenerSettings, OnInvalid, PreResolve, ReverseLookups, SystemRootsSetting,
    UpstreamSettings,
};
use crate::ids::SandboxId;
use crate::limits::TrafficLimits;
use crate::name::DomainName;
use crate::pattern::{HostPattern, PatternWidth};
use crate::quota::QuotaSettings;
use crate::signals::secrets::OwnPattern;

/// Most resolvers, zones and host entries, of each kind.
const MAX_ENTRIES: usize = 1024;
/// Largest query grid: a stub resolver gives up on queries that wait longer.
const MAX_GRID_MILLISECONDS: u64 = 2000;
/// Upper limit of `most_seconds`: one week. A longer need deserves a rule.
const MAX_GRANT_SECONDS: u64 = 604_800;
/// Upper limit of `fold_seconds`.
const MAX_FOLD_SECONDS: u64 = 3600;

/// Reads the settings of the instance from the configuration.
///
/// # Errors
///
/// Returns the errors of the settings; only `compile` reports those of sandboxes and policies.
pub fn read_configuration(file: &SourceFile) -> Result<Configuration, Vec<Problem>> {
    let mut problems = Problems::default();
    let settings = parse_configuration(file, &mut problems);
    match settings {
        Some(settings) if problems.errors.is_empty() => Ok(settings),
        _ => Err(problems.errors),
    }
}

fn parse_configuration(file: &SourceFile, problems: &mut Problems) -> Option<Configuration> {
    let source = decode_file(file, problems)?;
    let document: ConfigurationDocument = read::read_document(&source, problems)?;
    let log = log::read_log(&source, &document, problems);
    let credentials = credential::read_credentials(&source, &document, problems);
    Some(Configuration {
        dns: read_dns(&source, &document, problems),
        grants: read_grants(&source, &document, problems),
        limits: read_limits(&source, &document, problems),
        quota: read_quota(&source, &document, problems),
        upstream: upstream_settings(&document),
        on_invalid: match document.on_invalid {
            Some(OnInvalidDocument::Deny) => OnInvalid::Deny,
            Some(OnInvalidDocument::Keep) | None => OnInvalid::Keep,
        },
        identity: memory::read_identity(&source, &document, problems),
        memory_services: memory::read_services(&source, &document, &credentials, problems),
        secret_patterns: read_patterns(&source, &document, problems),
        credentials,
        ca_dir: document.ca.map(|ca| ca.dir.into_inner()),
        listeners: document.listener.iter().filter_map(|entry| listener_settings(entry.get_ref())).collect(),
        log,
        admin_socket: document.admin.map(|admin| admin.socket.into_inner()),
    })
}

fn read_patterns(
    source: &SourceText<'_>,
    document: &ConfigurationDocument,
    problems: &mut Problems,
) -> Vec<OwnPattern> {
    let entries = document.secret_pattern.iter().map(Spanned::get_ref);
    let patterns = entries.filter_map(|entry| {
        let parsed = OwnPattern::parse(entry.name.get_ref(), entry.pattern.get_ref());
        parsed
            .map_err(|error| {
                let fault = ProblemKind::SecretPattern { source: error };
                problems.error(source.location(entry.pattern.span()), fault);
            })
            .ok()
    });
    patterns.collect()
}

fn listener_settings(document: &ListenerDocument) -> Option<ListenerSettings> {
    let attribution = match (&document.sandbox, document.identify.as_ref().map(Spanned::get_ref)) {
        (Some(id), _) => Attribution::Dedicated(SandboxId::parse(id.get_ref()).ok()?),
        (None, Some(AttributionDocument::Interface)) => Attribution::Interface,
        (None, Some(AttributionDocument::Mark)) => Attribution::Mark,
        (None, Some(AttributionDocument::SourceAddress)) => Attribution::SourceAddress,
        (None, Some(AttributionDocument::Unix)) => Attribution::Unix,
        (None, None) => return None,
    };
    let mode = match document.mode.get_ref() {
        ModeDocument::Dns => ListenerMode::Dns,
        ModeDocument::Explicit => ListenerMode::Explicit,
        ModeDocument::Redirect => ListenerMode::Redirect,
        ModeDocument::Tproxy => ListenerMode::Tproxy,
    };
    let bind = document.bind.iter().filter_map(|bind| BindTarget::parse(bind.get_ref())).collect();
    Some(ListenerSettings { mode, bind, attribution })
}

/// Reads `[grants]` and reports its problems.
pub(crate) fn read_grants(
    source: &SourceText<'_>,
    document: &ConfigurationDocument,
    problems: &mut Problems,
) -> GrantSettings {
    let Some(document) = &document.grants else { return GrantSettings::default() };
    let mut host = |entry: &Spanned<String>| {
        let parsed = HostPattern::parse(entry.get_ref(), PatternWidth::DangerouslyWide);
        parsed.map_err(|fault| {
            let fault = ProblemKind::Host { entry: printable(entry.get_ref()), source: fault };
            problems.error(source.location(entry.span()), fault);
        })
    };
    let forbid_hosts = document.forbid_hosts.iter().filter_map(|entry| host(entry).ok()).collect();
    let most_seconds = document.most_seconds.as_ref();
    if let Some(entry) = most_seconds.filter(|entry| *entry.get_ref() > MAX_GRANT_SECONDS) {
        let fault = ProblemKind::Limit { given: *entry.get_ref(), most: MAX_GRANT_SECONDS };
        problems.error(source.location(entry.span()), fault);
    }
    GrantSettings {
        forbid_hosts,
        forbid_bases: document.forbid_bases.iter().map(|base| base.get_ref().clone()).collect(),
        most_seconds: most_seconds.map_or(GrantSettings::default().most_seconds, |entry| *entry.get_ref()),
    }
}

/// Reads `[limits]` and reports its problems.
pub(crate) fn read_limits(
    source: &SourceText<'_>,
    document: &ConfigurationDocument,
    problems: &mut Problems,
) -> TrafficLimits {
    let Some(document) = &document.limits else { return TrafficLimits::default() };
    document.to_limits(|entry, most| {
        let fault = ProblemKind::Limit { given: *entry.get_ref(), most };
        problems.error(source.location(entry.span()), fault);
    })
}

/// Reads `[quota]` and reports its problems.
pub(crate) fn read_quota(
    source: &SourceText<'_>,
    document: &ConfigurationDocument,
    problems: &mut Problems,
) -> QuotaSettings {
    let Some(quota) = &document.quota else { return QuotaSettings::default() };
    let limits = document.limits.as_ref().map(|limits| limits.to_limits(|_, _| {})).unwrap_or_default();
    quota.to_settings(document.sandbox.len() as u64, &limits, |entry, error| {
        problems.error(source.location(entry.span()), error.into());
    })
}

fn upstream_settings(document: &ConfigurationDocument) -> UpstreamSettings {
    let Some(document) = &document.upstream else { return UpstreamSettings::default() };
    UpstreamSettings {
        roots: document.roots.iter().map(|root| root.get_ref().clone()).collect(),
        system_roots: match document.system_roots {
            Some(false) => SystemRootsSetting::Ignored,
            Some(true) | None => SystemRootsSetting::Trusted,
        },
        mark: document.mark,
    }
}

/// Reads `[dns]` and reports its problems.
pub(crate) fn read_dns(
    source: &SourceText<'_>,
    document: &ConfigurationDocument,
    problems: &mut Problems,
) -> Option<DnsSettings> {
    let document = document.dns.as_ref()?;
    let mut reader = DnsReader { source, problems };
    let defaults = DnsSettings::new(reader.parse_resolvers(&document.upstreams));
    Some(DnsSettings {
        zones: reader.parse_zones(document),
        hosts: reader.parse_hosts(document),
        denial: denial_form(document.denial),
        grid_milliseconds: reader.read_bounded(
            document.grid_milliseconds.as_ref(),
            defaults.grid_milliseconds,
            MAX_GRID_MILLISECONDS,
            "`grid_milliseconds` is at most 2000: stub resolvers give up soon after",
        ),
        forwards_per_hour: reader.read_bounded(
            document.forwards_per_hour.as_ref(),
            defaults.forwards_per_hour,
            u64::from(u32::MAX),
            "`forwards_per_hour` is at most 4294967295",
        ),
        fold_seconds: reader.read_bounded(
            document.fold_seconds.as_ref(),
            defaults.fold_seconds,
            MAX_FOLD_SECONDS,
            "`fold_seconds` is at most 3600",
        ),
        pre_resolve: match document.pre_resolve {
            Some(false) => PreResolve::Off,
            Some(true) | None => PreResolve::On,
        },
        reverse: match document.reverse {
            Some(true) => ReverseLookups::Known,
            Some(false) | None => ReverseLookups::Off,
        },
        synthetic: reader.parse_synthetic(document.synthetic.as_ref(), defaults.synthetic),
        ..defaults
    })
}

fn denial_form(document: Option<DenialDocument>) -> DenialForm {
    match document {
        Some(DenialDocument::Nodata) => DenialForm::NoData,
        Some(DenialDocument::Nxdomain) | None => DenialForm::NxDomain,
        Some(DenialDocument::Refused) => DenialForm::Refused,
        Some(DenialDocument::Sinkhole) => DenialForm::Sinkhole,
    }
}

struct DnsReader<'a, 'b> {
    source: &'a SourceText<'a>,
    problems: &'b mut Problems,
}

impl DnsReader<'_, '_> {
    fn parse_resolvers(&mut self, entries: &[Spanned<String>]) -> Vec<SocketAddr> {
        self.check_count(entries.len());
        let why = "write a resolver as `address:port`, such as `9.9.9.9:53`";
        entries.iter().filter_map(|entry| self.parse_entry(entry, why)).collect()
    }

    fn parse_zones(&mut self, document: &DnsDocument) -> Vec<ForwardZone> {
        self.check_count(document.zone.len());
        let mut zones: Vec<ForwardZone> = Vec::new();
        for entry in document.zone.iter().map(Spanned::get_ref) {
            let upstreams = self.parse_resolvers(&entry.upstreams);
            let Some(name) = self.parse_name(&entry.name) else { continue };
            if entry.upstreams.is_empty() {
                self.report(
                    &entry.name,
                    ProblemKind::Missing("a zone needs at least one resolver in `upstreams`"),
                );
            }
            if zones.iter().any(|zone| zone.name == name) {
                let fault = ProblemKind::Twice { what: "zone", name: name.to_string(), line: 1 };
                self.report(&entry.name, fault);
            }
            zones.push(ForwardZone { name, upstreams });
        }
        zones
    }

    fn parse_hosts(&mut self, document: &DnsDocument) -> Vec<HostEntry> {
        self.check_count(document.host.len());
        let mut hosts: Vec<HostEntry> = Vec::new();
        for entry in document.host.iter().map(Spanned::get_ref) {
            let why = "write the address of a host without port or prefix length";
            let addresses: Vec<IpAddr> =
                entry.addresses.iter().filter_map(|address| self.parse_entry(address, why)).collect();
            let Some(name) = self.parse_name(&entry.name) else { continue };
            if hosts.iter().any(|host| host.name == name) {
                let fault = ProblemKind::Twice { what: "host", name: name.to_string(), line: 1 };
                self.report(&entry.name, fault);
            }
            hosts.push(HostEntry { name, addresses });
        }
        hosts
    }

    fn parse_synthetic(&mut self, entry: Option<&Spanned<String>>, default: Ipv4Net) -> Ipv4Net {
        let why =
            "the synthetic range must be an IPv4 network of at least 256 addresses, such as `198.18.0.0/15`";
        let Some(entry) = entry else { return default };
        match self.parse_entry::<Ipv4Net>(entry, why) {
            Some(net) if net.prefix_len() <= 24 && net.trunc() == net => net,
            Some(_) => {
                self.report(entry, ProblemKind::Missing(why));
                default
            }
            None => default,
        }
    }

    fn read_bounded(
        &mut self,
        entry: Option<&Spanned<u64>>,
        default: u64,
        max: u64,
        why: &'static str,
    ) -> u64 {
        match entry {
            Some(entry) if *entry.get_ref() > max => {
                self.problems.error(self.source.location(entry.span()), ProblemKind::Missing(why));
                default
            }
            Some(entry) => *entry.get_ref(),
            None => default,
        }
    }

    fn parse_name(&mut self, entry: &Spanned<String>) -> Option<DomainName> {
        match DomainName::parse(entry.get_ref()) {
            Ok(name) => Some(name),
            Err(source) => {
                let fault = ProblemKind::Host { entry: printable(entry.get_ref()), source: source.into() };
                self.report(entry, fault);
                None
            }
        }
    }

    fn parse_entry<T: FromStr>(&mut self, entry: &Spanned<String>, why: &'static str) -> Option<T> {
        let parsed = entry.get_ref().parse().ok();
        if parsed.is_none() {
            self.report(entry, ProblemKind::Missing(why));
        }
        parsed
    }

    fn check_count(&mut self, count: usize) {
        if count > MAX_ENTRIES {
            let fault = ProblemKind::TooMany { what: "entries under [dns]", limit: MAX_ENTRIES };
            self.problems.error(self.source.location(0..0), fault);
        }
    }

    fn report(&mut self, entry: &Spanned<String>, fault: ProblemKind) {
        self.problems.error(self.source.location(entry.span()), fault);
    }
}
