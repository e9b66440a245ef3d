//! The entries of a rule: hosts, lists, networks, methods, paths, banks. Each is parsed by its own type,
//! and a fault is put where the entry stands.

use std::ops::Range;

use ipnet::IpNet;
use toml::Spanned;

use super::document::AllowDocument;
use super::list::{self, MAX_LIST, Terms};
use super::list_path;
use super::problem::{Fault, Source, nearest};
use super::rule::Builder;
use crate::facts::{Method, QueryType};
use crate::network::{is_wide, undialable};
use crate::path::PathPattern;
use crate::pattern::{HostPattern, Width};
use crate::policy::AddressEntry;
use crate::word::{BankPattern, Environment, WordError};

/// What `access = "read-only"` stands for.
const READ_ONLY: [&str; 3] = ["GET", "HEAD", "OPTIONS"];
/// The port of a host written without one.
pub(super) const DEFAULT_PORT: u16 = 443;

impl Builder<'_> {
    pub(super) fn targets(
        &mut self,
        terms: Terms,
        hosts: Option<&[Spanned<String>]>,
        file: Option<&Spanned<String>>,
        addresses: Option<&[Spanned<String>]>,
    ) {
        for entry in hosts.unwrap_or(&[]) {
            if let Some(pattern) = self.host(entry, terms.width) {
                if terms.exact_only && (!pattern.pattern.is_exact() || pattern.port.is_some()) {
                    let why =
                        "a raw TCP rule takes exact names without a port; its ports stand in `tcp`";
                    self.fault(entry.span(), Fault::Missing(why));
                }
                self.insert(&pattern, terms.rule, entry.span());
            }
        }
        for entry in addresses.unwrap_or(&[]) {
            if let Some(net) = self.network(entry, terms.width) {
                self.addresses.push(AddressEntry { net, rule: terms.rule });
            }
        }
        if let Some(entry) = file {
            self.list(entry, terms);
        }
    }

    pub(super) fn insert(&mut self, pattern: &HostPattern, rule: u16, span: Range<usize>) {
        let line = self.source.line(span.start);
        if let Err(full) = self.hosts.insert(pattern, rule, line) {
            self.fault(span, Fault::Set(full));
        }
    }

    pub(super) fn host(&mut self, entry: &Spanned<String>, width: Width) -> Option<HostPattern> {
        match HostPattern::parse(entry.get_ref(), width) {
            Ok(pattern) => Some(pattern),
            Err(source) => {
                self.fault(entry.span(), Fault::Host { entry: entry.get_ref().clone(), source });
                None
            }
        }
    }

    fn list(&mut self, entry: &Spanned<String>, terms: Terms) {
        let Some(path) = list_path(&self.source.file, entry.get_ref()) else {
            let why = "it must lie beside the policy or below: no `..`, no leading `/`".to_owned();
            self.fault(entry.span(), Fault::List { path: entry.get_ref().clone(), why });
            return;
        };
        let text = match self.sources.lists.get(&path) {
            None => Err("it was not given".to_owned()),
            Some(Err(why)) => Err(why.clone()),
            Some(Ok(bytes)) if bytes.len() > MAX_LIST => {
                Err(format!("it is larger than {MAX_LIST} bytes"))
            }
            Some(Ok(bytes)) => str::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned()),
        };
        match text {
            Ok(text) => {
                let source = Source::new(&path, text);
                list::add(&source, terms, &mut self.hosts, self.problems);
            }
            Err(why) => {
                self.fault(entry.span(), Fault::List { path, why });
            }
        }
    }

    pub(super) fn ports(&mut self, document: &AllowDocument) -> Box<[u16]> {
        match (&document.tcp, &document.ports) {
            (Some(ports), _) | (None, Some(ports)) => self.port_list(ports),
            (None, None) => [DEFAULT_PORT].into(),
        }
    }

    pub(super) fn port_list(&mut self, ports: &[Spanned<u16>]) -> Box<[u16]> {
        for port in ports.iter().filter(|port| *port.get_ref() == 0) {
            self.fault(port.span(), Fault::Port(0));
        }
        ports.iter().map(|port| *port.get_ref()).collect()
    }

    pub(super) fn methods_or_access(&mut self, document: &AllowDocument) -> Option<Box<[Method]>> {
        match (&document.methods, &document.access) {
            (Some(methods), _) => Some(self.methods(methods)),
            (None, Some(_)) => {
                Some(READ_ONLY.iter().filter_map(|method| Method::parse(method).ok()).collect())
            }
            (None, None) => None,
        }
    }

    pub(super) fn methods(&mut self, entries: &[Spanned<String>]) -> Box<[Method]> {
        entries.iter().filter_map(|entry| self.method(entry)).collect()
    }

    fn method(&mut self, entry: &Spanned<String>) -> Option<Method> {
        let text = entry.get_ref();
        match Method::parse(text) {
            Ok(method) if method.is_forwardable() => Some(method),
            Ok(_) => self.refuse(entry.span(), Fault::MethodNeverForwarded(text.clone())),
            Err(_) => {
                let help = format!("did you mean `{}`?", text.to_uppercase());
                let place = self.source.place(entry.span());
                self.problems.error_with(place, Fault::Method(text.clone()), help);
                None
            }
        }
    }

    pub(super) fn paths(
        &mut self,
        entries: Option<&[Spanned<String>]>,
    ) -> Option<Box<[PathPattern]>> {
        let parse = |entry: &Spanned<String>| match PathPattern::parse(entry.get_ref()) {
            Ok(pattern) => Some(pattern),
            Err(source) => {
                self.refuse(entry.span(), Fault::Path { entry: entry.get_ref().clone(), source })
            }
        };
        entries.map(|entries| entries.iter().filter_map(parse).collect())
    }

    pub(super) fn networks(
        &mut self,
        entries: Option<&[Spanned<String>]>,
        width: Width,
    ) -> Option<Box<[IpNet]>> {
        entries
            .map(|entries| entries.iter().filter_map(|entry| self.network(entry, width)).collect())
    }

    fn network(&mut self, entry: &Spanned<String>, width: Width) -> Option<IpNet> {
        let text = entry.get_ref();
        let parsed =
            text.parse::<IpNet>().ok().filter(|net| net.trunc() == *net && !is_mapped(net));
        match parsed {
            None => self.refuse(entry.span(), Fault::Network(text.clone())),
            Some(net) if undialable(&net) => {
                let why = format!("nothing can be dialled in `{net}`");
                self.refuse(entry.span(), Fault::Pointless(why))
            }
            Some(net) if width == Width::Narrow && is_wide(&net) => {
                self.refuse(entry.span(), Fault::WideNetwork(net.to_string()))
            }
            Some(net) => Some(net),
        }
    }

    pub(super) fn query_types(&mut self, entries: Option<&[Spanned<String>]>) -> Box<[QueryType]> {
        let Some(entries) = entries else { return QueryType::DEFAULT.into() };
        entries.iter().filter_map(|entry| self.query_type(entry)).collect()
    }

    pub(super) fn query_type(&mut self, entry: &Spanned<String>) -> Option<QueryType> {
        let known = QueryType::by_name(entry.get_ref());
        if known.is_none() {
            let help = match nearest(entry.get_ref(), QueryType::names()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => {
                    format!("known types: {}", QueryType::names().collect::<Vec<_>>().join(", "))
                }
            };
            let fault = Fault::Unknown {
                what: "DNS query type that can be allowed",
                name: entry.get_ref().clone(),
            };
            let place = self.source.place(entry.span());
            self.problems.error_with(place, fault, help);
        }
        known
    }

    pub(super) fn banks(
        &mut self,
        entries: &[Spanned<String>],
        environment: Option<&Environment>,
    ) -> Box<[BankPattern]> {
        let mut banks = Vec::new();
        for entry in entries {
            let Some(pattern) = self.word("bank", entry, BankPattern::parse) else { continue };
            if environment.is_none() && pattern.environment().is_none() {
                let place = self.source.place(entry.span());
                let help = "write `staging:name`, or say `environment = \"staging\"` in the rule if every bank there is of one";
                self.problems.error_with(
                    place,
                    Fault::NoEnvironment(entry.get_ref().clone()),
                    help,
                );
            }
            let other =
                pattern.environment().filter(|own| environment.is_some_and(|all| all != own));
            if let Some(other) = other {
                let (bank, other) = (entry.get_ref().clone(), other.to_string());
                self.fault(entry.span(), Fault::BankElsewhere { bank, other });
            }
            banks.push(pattern);
        }
        banks.into()
    }

    pub(super) fn word<T>(
        &mut self,
        what: &'static str,
        entry: &Spanned<String>,
        parse: fn(&str) -> Result<T, WordError>,
    ) -> Option<T> {
        self.problems.word(self.source, what, entry, parse)
    }
}

/// IPv4 in IPv6 clothes would never be met: addresses are unwrapped before they are compared.
fn is_mapped(net: &IpNet) -> bool {
    matches!(net, IpNet::V6(net) if net.addr().to_ipv4_mapped().is_some() && net.prefix_len() >= 96)
}
