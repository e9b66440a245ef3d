//! Parses the entries of a rule: hosts, lists, networks, methods, paths, banks. Each has its own type, and an
//! invalid entry is reported at its location.

use std::ops::Range;

use ipnet::IpNet;
use toml::Spanned;

use super::document::AllowDocument;
use super::list::{self, MAX_LIST, PatternTerms};
use super::list_path;
use super::policy_builder::PolicyBuilder;
use super::problem::{ProblemKind, SourceText, nearest};
use crate::facts::{HttpMethod, QueryType};
use crate::ids::{BankPattern, Environment, IdError};
use crate::network::{is_undialable, spans_forbidden};
use crate::pattern::{HostPattern, PatternWidth};
use crate::policy::AddressEntry;
use crate::url_path::PathPattern;

/// The methods of `access = "read-only"`.
const READ_ONLY_METHODS: [&str; 3] = ["GET", "HEAD", "OPTIONS"];
/// The port of a host pattern without one.
pub(super) const DEFAULT_PORT: u16 = 443;

impl PolicyBuilder<'_> {
    pub(super) fn add_targets(
        &mut self,
        terms: PatternTerms,
        hosts: Option<&[Spanned<String>]>,
        file: Option<&Spanned<String>>,
        addresses: Option<&[Spanned<String>]>,
    ) {
        for entry in hosts.unwrap_or(&[]) {
            if let Some(pattern) = self.parse_host(entry, terms.width) {
                if terms.exact_only && (!pattern.pattern.is_exact() || pattern.port.is_some()) {
                    let why = "a raw TCP rule takes exact names without a port; list its ports in `tcp`";
                    self.report(entry.span(), ProblemKind::Missing(why));
                }
                self.insert_host(&pattern, terms.rule, entry.span());
            }
        }
        for entry in addresses.unwrap_or(&[]) {
            if let Some(net) = self.parse_network(entry, terms.width) {
                self.addresses.push(AddressEntry { net, rule: terms.rule });
            }
        }
        if let Some(entry) = file {
            self.read_list(entry, terms);
        }
    }

    pub(super) fn insert_host(&mut self, pattern: &HostPattern, rule: u16, span: Range<usize>) {
        let line = self.source.line(span.start);
        if let Err(full) = self.hosts.insert(pattern, rule, line) {
            self.report(span, ProblemKind::Set(full));
        }
    }

    pub(super) fn parse_host(&mut self, entry: &Spanned<String>, width: PatternWidth) -> Option<HostPattern> {
        match HostPattern::parse(entry.get_ref(), width) {
            Ok(pattern) => Some(pattern),
            Err(source) => {
                self.report(entry.span(), ProblemKind::Host { entry: entry.get_ref().clone(), source });
                None
            }
        }
    }

    fn read_list(&mut self, entry: &Spanned<String>, terms: PatternTerms) {
        let Some(path) = list_path(&self.source.file, entry.get_ref()) else {
            let why = "it must be in the policy's directory or below: no `..`, no leading `/`".to_owned();
            self.report(entry.span(), ProblemKind::List { path: entry.get_ref().clone(), why });
            return;
        };
        let text = match self.sources.lists.get(&path) {
            None => Err("it was not supplied".to_owned()),
            Some(Err(why)) => Err(why.clone()),
            Some(Ok(bytes)) if bytes.len() > MAX_LIST => Err(format!("it is larger than {MAX_LIST} bytes")),
            Some(Ok(bytes)) => str::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned()),
        };
        match text {
            Ok(text) => {
                let source = SourceText::new(&path, text);
                list::add_list(&source, terms, &mut self.hosts, self.problems);
            }
            Err(why) => {
                self.report(entry.span(), ProblemKind::List { path, why });
            }
        }
    }

    pub(super) fn parse_ports(&mut self, document: &AllowDocument) -> Box<[u16]> {
        match (&document.tcp, &document.ports) {
            (Some(ports), _) | (None, Some(ports)) => self.check_ports(ports),
            (None, None) => [DEFAULT_PORT].into(),
        }
    }

    pub(super) fn check_ports(&mut self, ports: &[Spanned<u16>]) -> Box<[u16]> {
        for port in ports.iter().filter(|port| *port.get_ref() == 0) {
            self.report(port.span(), ProblemKind::Port(0));
        }
        ports.iter().map(|port| *port.get_ref()).collect()
    }

    pub(super) fn parse_access(&mut self, document: &AllowDocument) -> Option<Box<[HttpMethod]>> {
        match (&document.methods, &document.access) {
            (Some(methods), _) => Some(self.parse_methods(methods)),
            (None, Some(_)) => {
                Some(READ_ONLY_METHODS.iter().filter_map(|method| HttpMethod::parse(method).ok()).collect())
            }
            (None, None) => None,
        }
    }

    pub(super) fn parse_methods(&mut self, entries: &[Spanned<String>]) -> Box<[HttpMethod]> {
        entries.iter().filter_map(|entry| self.parse_method(entry)).collect()
    }

    fn parse_method(&mut self, entry: &Spanned<String>) -> Option<HttpMethod> {
        let text = entry.get_ref();
        match HttpMethod::parse(text) {
            Ok(method) if method.is_forwardable() => {
                self.warn_of_method(entry);
                Some(method)
            }
            Ok(_) => self.reject(entry.span(), ProblemKind::MethodNeverForwarded(text.clone())),
            Err(_) => {
                let help = format!("did you mean `{}`?", text.to_uppercase());
                let location = self.source.location(entry.span());
                self.problems.error_with_help(location, ProblemKind::Method(text.clone()), help);
                None
            }
        }
    }

    pub(super) fn parse_paths(&mut self, entries: Option<&[Spanned<String>]>) -> Option<Box<[PathPattern]>> {
        let parse = |entry: &Spanned<String>| match PathPattern::parse(entry.get_ref()) {
            Ok(pattern) => Some(pattern),
            Err(source) => {
                self.reject(entry.span(), ProblemKind::Path { entry: entry.get_ref().clone(), source })
            }
        };
        entries.map(|entries| entries.iter().filter_map(parse).collect())
    }

    pub(super) fn parse_networks(
        &mut self,
        entries: Option<&[Spanned<String>]>,
        width: PatternWidth,
    ) -> Option<Box<[IpNet]>> {
        entries.map(|entries| entries.iter().filter_map(|entry| self.parse_network(entry, width)).collect())
    }

    fn parse_network(&mut self, entry: &Spanned<String>, width: PatternWidth) -> Option<IpNet> {
        let text = entry.get_ref();
        let parsed = text.parse::<IpNet>().ok().filter(|net| net.trunc() == *net && !is_ipv4_mapped(net));
        match parsed {
            None => self.reject(entry.span(), ProblemKind::Network(text.clone())),
            Some(net) if is_undialable(&net) => {
                let why = format!("no address in `{net}` can be dialled; remove it");
                self.reject(entry.span(), ProblemKind::Pointless(why))
            }
            Some(net) if width == PatternWidth::Narrow && spans_forbidden(&net) => {
                self.reject(entry.span(), ProblemKind::WideNetwork(net.to_string()))
            }
            Some(net) => Some(net),
        }
    }

    pub(super) fn parse_query_types(&mut self, entries: Option<&[Spanned<String>]>) -> Box<[QueryType]> {
        let Some(entries) = entries else { return QueryType::DEFAULT.into() };
        entries.iter().filter_map(|entry| self.parse_query_type(entry)).collect()
    }

    pub(super) fn parse_query_type(&mut self, entry: &Spanned<String>) -> Option<QueryType> {
        let known = QueryType::by_name(entry.get_ref());
        if known.is_none() {
            let help = match nearest(entry.get_ref(), QueryType::names()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("use {}", QueryType::names().collect::<Vec<_>>().join(", ")),
            };
            let fault = ProblemKind::Unknown { what: "DNS query type", name: entry.get_ref().clone() };
            let location = self.source.location(entry.span());
            self.problems.error_with_help(location, fault, help);
        }
        known
    }

    pub(super) fn parse_banks(
        &mut self,
        entries: &[Spanned<String>],
        environment: Option<&Environment>,
    ) -> Box<[BankPattern]> {
        let mut banks = Vec::new();
        for entry in entries {
            let Some(pattern) = self.parse_id("bank", entry, BankPattern::parse) else { continue };
            if environment.is_none() && pattern.environment().is_none() {
                let location = self.source.location(entry.span());
                let help = "write `staging:name`, or set `environment = \"staging\"` in the rule if all its banks are in one environment";
                self.problems.error_with_help(
                    location,
                    ProblemKind::NoEnvironment(entry.get_ref().clone()),
                    help,
                );
            }
            let other = pattern.environment().filter(|named| environment.is_some_and(|all| all != named));
            if let Some(other) = other {
                let (bank, other) = (entry.get_ref().clone(), other.to_string());
                self.report(entry.span(), ProblemKind::BankElsewhere { bank, other });
            }
            banks.push(pattern);
        }
        banks.into()
    }

    pub(super) fn parse_id<T>(
        &mut self,
        what: &'static str,
        entry: &Spanned<String>,
        parse: fn(&str) -> Result<T, IdError>,
    ) -> Option<T> {
        self.problems.parse_id(self.source, what, entry, parse)
    }
}

/// Returns whether the network is IPv4-mapped IPv6, which never matches: addresses are unmapped first.
fn is_ipv4_mapped(net: &IpNet) -> bool {
    matches!(net, IpNet::V6(net) if net.addr().to_ipv4_mapped().is_some() && net.prefix_len() >= 96)
}
