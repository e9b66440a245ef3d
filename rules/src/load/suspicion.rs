//! Warns about entries that load but are seldom meant: look-alike names, unknown top-level domains, metadata services,
//! unregistered methods.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use idna::uts46::{AsciiDenyList, Hyphens, Uts46};
use ipnet::IpNet;
use toml::Spanned;

use super::policy_builder::PolicyBuilder;
use super::problem::{ProblemKind, nearest};
use crate::name::DomainName;
use crate::pattern::{HostPattern, PatternWidth};
use crate::special_names;

/// Addresses at which clouds hand out a machine's credentials and configuration.
const METADATA_ADDRESSES: [(IpAddr, &str); 6] = [
    (IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)), "Alibaba Cloud"),
    (IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)), "Azure"),
    (IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)), "AWS, Azure, Google Cloud and others"),
    (IpAddr::V4(Ipv4Addr::new(169, 254, 170, 2)), "AWS containers"),
    (IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)), "Oracle Cloud"),
    (IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)), "AWS"),
];

/// The IANA registry of methods, without `*`, and `PURGE`, which caches take.
const KNOWN_METHODS: [&str; 41] = [
    "ACL",
    "BASELINE-CONTROL",
    "BIND",
    "CHECKIN",
    "CHECKOUT",
    "CONNECT",
    "COPY",
    "DELETE",
    "GET",
    "HEAD",
    "LABEL",
    "LINK",
    "LOCK",
    "MERGE",
    "MKACTIVITY",
    "MKCALENDAR",
    "MKCOL",
    "MKREDIRECTREF",
    "MKWORKSPACE",
    "MOVE",
    "OPTIONS",
    "ORDERPATCH",
    "PATCH",
    "POST",
    "PRI",
    "PROPFIND",
    "PROPPATCH",
    "PURGE",
    "PUT",
    "QUERY",
    "REBIND",
    "REPORT",
    "SEARCH",
    "TRACE",
    "UNBIND",
    "UNCHECKOUT",
    "UNLINK",
    "UNLOCK",
    "UPDATE",
    "UPDATEREDIRECTREF",
    "VERSION-CONTROL",
];

/// Words for "every method", which no server takes.
const EVERY_METHOD: [&str; 3] = ["ALL", "ANY", "EVERY"];

/// Top-level names of private networks, and RFC 2606's `example`. Special-use zones are known elsewhere.
const PRIVATE_TLDS: [&str; 9] =
    ["consul", "corp", "example", "home", "intranet", "localdomain", "mail", "private", "svc"];

/// What a misspelt top-level domain is compared with.
const COMMON_TLDS: [&str; 13] =
    ["ai", "app", "cloud", "com", "de", "dev", "edu", "gov", "info", "io", "net", "org", "sh"];

/// Cyrillic letters that look like Latin ones.
const CYRILLIC_LOOKALIKES: &str = "асеорхуіјѕһԁԛԝӏ";

/// Whether the hosts of a rule lead into a private network, where names need not be public.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum HostNetwork {
    Private,
    Public,
}

impl HostNetwork {
    pub(super) fn of(resolves_to: Option<&[Spanned<String>]>) -> Self {
        if resolves_to.is_some() { HostNetwork::Private } else { HostNetwork::Public }
    }
}

impl PolicyBuilder<'_> {
    pub(super) fn warn_of_hosts(&mut self, entries: &[Spanned<String>], network: HostNetwork) {
        for entry in entries {
            let parsed = HostPattern::parse(entry.get_ref(), PatternWidth::DangerouslyWide).ok();
            let Some(name) = parsed.as_ref().and_then(|parsed| parsed.pattern.base()) else { continue };
            let shown = entry.get_ref();
            if let Some(label) = disguised_label(name) {
                self.warn(
                    entry,
                    format!("`{shown}` is `{name}`: {label}; check that it is the name you mean"),
                );
            } else if network == HostNetwork::Public
                && let Some(tld) = unknown_tld(name)
            {
                let near = nearest(tld, COMMON_TLDS).map(|near| format!("; did you mean `.{near}`?"));
                let near = near.unwrap_or_default();
                self.warn(
                    entry,
                    format!("`.{tld}` is not a public top-level domain, so `{shown}` resolves nowhere{near}"),
                );
            }
        }
    }

    pub(super) fn warn_of_metadata(&mut self, entries: Option<&[Spanned<String>]>) {
        for entry in entries.unwrap_or(&[]) {
            let Ok(net) = entry.get_ref().parse::<IpNet>() else { continue };
            let covered = METADATA_ADDRESSES.iter().find(|(address, _)| net.contains(address));
            if let Some((address, cloud)) = covered {
                self.warn(
                    entry,
                    format!("`{net}` covers {address}, the metadata service of {cloud}, which hands out the machine's credentials"),
                );
            }
        }
    }

    pub(super) fn warn_of_method(&mut self, entry: &Spanned<String>) {
        let method = entry.get_ref();
        if KNOWN_METHODS.contains(&method.as_str()) {
            return;
        }
        let why = match EVERY_METHOD.contains(&method.as_str()) {
            true => {
                format!("`{method}` is one method of that name, not all of them; remove `methods` for all")
            }
            false => {
                let near = nearest(method, KNOWN_METHODS).map(|near| format!("; did you mean `{near}`?"));
                format!("`{method}` is not a registered method{}", near.unwrap_or_default())
            }
        };
        self.warn(entry, why);
    }

    fn warn(&mut self, entry: &Spanned<String>, why: String) {
        self.problems.warning(self.source.location(entry.span()), ProblemKind::Pointless(why));
    }
}

/// Returns the top-level domain of a name, if no public name ends in it and it is not known as private.
fn unknown_tld(name: &DomainName) -> Option<&str> {
    let (_, tld) = name.as_str().rsplit_once('.')?;
    let known = psl::suffix(name.as_str().as_bytes()).is_some_and(|suffix| suffix.is_known());
    let private = PRIVATE_TLDS.contains(&tld) || special_names::special_zone(name).is_some();
    (!known && !private && !tld.starts_with("xn--")).then_some(tld)
}

/// Returns how a label of the name could pass for another: it mixes scripts, or only looks Latin.
fn disguised_label(name: &DomainName) -> Option<String> {
    if !name.as_str().contains("xn--") {
        return None;
    }
    let (unicode, _) = Uts46::new().to_unicode(name.as_str().as_bytes(), AsciiDenyList::URL, Hyphens::Allow);
    let latin_zone = unicode.rsplit('.').next().is_some_and(|tld| tld.is_ascii());
    unicode.split('.').find_map(|label| {
        let mut scripts: Vec<Script> = label.chars().filter_map(script_of).collect();
        scripts.sort_unstable();
        scripts.dedup();
        let looks_latin =
            latin_zone && label.chars().all(|c| CYRILLIC_LOOKALIKES.contains(c) || c.is_ascii());
        match scripts.as_slice() {
            [Script::Cyrillic] if looks_latin => Some(format!("`{label}` is Cyrillic but looks Latin")),
            [] | [_] | [Script::EastAsian, Script::Latin] => None,
            [one, other, ..] => Some(format!("`{label}` mixes {} and {} letters", one.name(), other.name())),
        }
    })
}

/// A script, as far as mixing it with others disguises a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Script {
    Armenian,
    Cherokee,
    Cyrillic,
    /// Chinese, Japanese and Korean, which names mix with Latin.
    EastAsian,
    Georgian,
    Greek,
    Latin,
    /// Any script without letters that look Latin.
    Other,
}

impl Script {
    fn name(self) -> &'static str {
        match self {
            Script::Armenian => "Armenian",
            Script::Cherokee => "Cherokee",
            Script::Cyrillic => "Cyrillic",
            Script::EastAsian => "East Asian",
            Script::Georgian => "Georgian",
            Script::Greek => "Greek",
            Script::Latin => "Latin",
            Script::Other => "other",
        }
    }
}

/// Returns the script of a letter by its block; `None` for digits, hyphens and marks, which belong to any.
fn script_of(letter: char) -> Option<Script> {
    Some(match letter {
        'a'..='z' | '\u{c0}'..='\u{24f}' | '\u{1e00}'..='\u{1eff}' => Script::Latin,
        '\u{370}'..='\u{3ff}' | '\u{1f00}'..='\u{1fff}' => Script::Greek,
        '\u{400}'..='\u{52f}' | '\u{1c80}'..='\u{1c8f}' | '\u{a640}'..='\u{a69f}' => Script::Cyrillic,
        '\u{530}'..='\u{58f}' => Script::Armenian,
        '\u{10a0}'..='\u{10ff}' | '\u{2d00}'..='\u{2d2f}' => Script::Georgian,
        '\u{13a0}'..='\u{13ff}' | '\u{ab70}'..='\u{abbf}' => Script::Cherokee,
        '\u{1100}'..='\u{11ff}'
        | '\u{3005}'..='\u{318f}'
        | '\u{3400}'..='\u{9fff}'
        | '\u{ac00}'..='\u{d7ff}' => Script::EastAsian,
        letter if letter.is_alphabetic() => Script::Other,
        _ => return None,
    })
}
