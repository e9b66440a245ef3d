//! Properties that hold for any input, for the fuzzers here and a bounded run in the tests.
#![allow(dead_code, reason = "each fuzz target uses one of these")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rules::load::problem::Problem;
use rules::load::{list_files, policy_dir};
use rules::pattern::{HostPattern, PatternWidth};
use rules::probe::PolicyProbe;
use rules::signals::SignalPlace;
use rules::signals::content::{BoxedMatcher, ContentScanner, MatcherFactory, ScanLimits, UndecidedTail};
use rules::signals::flow::{FlowKey, FlowLimits, FlowTable};
use rules::signals::secrets::{PatternSet, SecretMatcher, SecretSettings};
use rules::url_path::{CanonicalPath, PathPattern, RequestPath};
use rules::{DomainName, Host, LoadSources, RuleSet, SourceFile, compile};

/// A name is refused, or its normal form parses to itself.
pub(super) fn name(data: &[u8]) {
    drop(DomainName::from_labels(data.split(|byte| *byte == b'.')));
    let Ok(text) = str::from_utf8(data) else { return };
    let Ok(name) = DomainName::parse(text) else { return };
    assert!(text.is_ascii() || Host::parse(text).is_err(), "a name in traffic is ASCII");
    let plain = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.');
    assert!(name.as_str().bytes().all(plain), "{name:?}");
    assert_eq!(DomainName::parse(name.as_str()).as_ref(), Ok(&name));
    assert!(name.as_str().parse::<std::net::IpAddr>().is_err(), "{name:?} is an address");
    assert_eq!(Host::parse(name.as_str()), Ok(Host::Name(name.clone())));
}

/// Stored fingerprints are refused, or read and stored again with the same entries. The same bytes as content are
/// never recognised in an empty table.
pub(super) fn flow_table(data: &[u8]) {
    let (key, limits) = (FlowKey::new(&[7; 32]), FlowLimits::default());
    let mut valid = FlowTable::new(&key, limits).to_bytes();
    valid.truncate(13);
    valid.extend_from_slice(data);
    for bytes in [data, &valid] {
        let Ok(table) = FlowTable::from_bytes(&key, limits, bytes, 1) else { continue };
        let again = FlowTable::from_bytes(&key, limits, &table.to_bytes(), 1);
        assert_eq!(again.map(|again| again.len()).ok(), Some(table.len()));
    }
    let text = String::from_utf8_lossy(data);
    assert!(FlowTable::new(&key, limits).snapshot().match_text(&text, 1).is_empty());
}

/// A pattern is refused, or prints as an equal pattern.
pub(super) fn pattern(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let Ok(wide) = HostPattern::parse(text, PatternWidth::DangerouslyWide) else {
        assert!(HostPattern::parse(text, PatternWidth::Narrow).is_err(), "narrow accepts less, not more");
        return;
    };
    assert_eq!(HostPattern::parse(&wide.to_string(), PatternWidth::DangerouslyWide).as_ref(), Ok(&wide));
    if let Some(base) = wide.pattern.base() {
        let below = DomainName::parse(&format!("a.{base}"));
        let covers = |name: &DomainName| wide.pattern.matches(name);
        assert!(covers(base) || below.as_ref().map_or(true, covers), "{wide} covers nothing");
    }
}

/// A path is refused, or has one canonical form; a pattern matches its own example.
pub(super) fn path(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    if let Ok(path) = CanonicalPath::parse(text) {
        assert_eq!(CanonicalPath::parse(path.as_str()).as_ref(), Ok(&path));
        assert!(!path.as_str().contains("/../") && !path.as_str().contains("//"));
    }
    if let Ok(path) = RequestPath::parse(text) {
        assert_eq!(RequestPath::parse(path.as_str()).as_ref(), Ok(&path));
        assert!(
            CanonicalPath::parse(&path.as_str().replace("%2F", "/")).is_ok(),
            "{path:?} has two readings"
        );
        assert_eq!(path.has_encoded_slash(), CanonicalPath::parse(text).is_err(), "{path:?}");
    }
    if let Ok(pattern) = PathPattern::parse(text) {
        let example = RequestPath::parse(&pattern.example());
        assert!(example.is_ok_and(|path| pattern.matches(&path)), "{pattern}");
    }
}

/// A list loads completely, or every error has a location in it.
pub(super) fn list(data: &[u8]) {
    let policy = "name = \"p\"\n[[allow]]\nname = \"r\"\nhosts_file = \"l.txt\"\n";
    let lists = BTreeMap::from([("l.txt".to_owned(), Ok(data.to_vec()))]);
    let sources =
        LoadSources { policies: vec![file("p.toml", policy.as_bytes())], lists, ..LoadSources::default() };
    check_load(compile(&sources, &[]), "l.txt", data);
}

/// A policy loads completely and decides without panic, or every error has a location in it.
pub(super) fn policy(data: &[u8]) {
    let policy = file("p.toml", data);
    drop(list_files(&policy));
    check_load(
        compile(&LoadSources { policies: vec![policy], ..LoadSources::default() }, &[]),
        "p.toml",
        data,
    );
}

/// The configuration loads completely and decides without panic, or every error has a location in it.
pub(super) fn operator(data: &[u8]) {
    let operator = file("sandbar.toml", data);
    drop(policy_dir(&operator));
    let policies = vec![file("p.toml", b"name = \"p\"\n[[allow]]\nname = \"r\"\nhosts = [\"x.example\"]\n")];
    check_load(
        compile(&LoadSources { operator: Some(operator), policies, ..LoadSources::default() }, &[]),
        "sandbar.toml",
        data,
    );
}

/// Content in pieces has the findings of the whole, and holds back no more than it got.
pub(super) fn content(data: &[u8]) {
    let Some((piece, content)) = data.split_first() else { return };
    let Ok(set) = PatternSet::compile(&SecretSettings::default()) else { return };
    let set = Arc::new(set);
    let factory = move || vec![Box::new(SecretMatcher::new(Arc::clone(&set))) as BoxedMatcher];
    let factory: Arc<dyn MatcherFactory> = Arc::new(factory);
    let scan = |piece: usize| {
        let mut scanner = ContentScanner::new(SignalPlace::Body, Arc::clone(&factory), ScanLimits::default());
        let mut signals = Vec::new();
        for (at, bytes) in content.chunks(piece).enumerate() {
            scanner.feed(bytes, &mut signals);
            let [possible, begun] =
                [UndecidedTail::Possible, UndecidedTail::Begun].map(|tail| scanner.undecided(tail));
            assert!(begun <= possible && possible <= at * piece + bytes.len());
        }
        scanner.finish(&mut signals);
        let findings = signals.into_iter().map(|signal| (signal.what, signal.encodings));
        findings.collect::<BTreeSet<_>>()
    };
    assert_eq!(scan(usize::from(*piece).max(1)), scan(content.len().max(1)));
}

fn file(path: &str, bytes: &[u8]) -> SourceFile {
    SourceFile { path: path.to_owned(), bytes: bytes.to_vec() }
}

fn check_load(loaded: Result<RuleSet, Vec<Problem>>, file: &str, data: &[u8]) {
    let lines = data.iter().filter(|byte| **byte == b'\n').count() as u32 + 1;
    match loaded {
        Err(problems) => {
            assert!(!problems.is_empty(), "refused without a problem");
            for problem in problems {
                assert!(
                    problem.at.line >= 1
                        && problem.at.column >= 1
                        && (problem.at.line <= lines || *problem.at.file != *file),
                    "{problem}"
                );
                assert!(!problem.at.excerpt.chars().any(char::is_control), "{problem:?}");
            }
        }
        Ok(rules) => {
            drop(rules.run_tests());
            for sandbox in rules.sandboxes().iter() {
                for target in ["x.example", "https://a.x.example/v1/..", "http://x.example", "10.0.0.1:22"] {
                    let Ok(probe) = PolicyProbe::parse(target) else { continue };
                    drop(rules.explain(sandbox, &probe));
                }
            }
        }
    }
}
