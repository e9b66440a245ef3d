//! One load after another: what did not change is taken over, and rules that are closed allow nothing.

use std::sync::Arc;

use rules::load::problem::Problem;
use rules::{Reason, RuleSet, Sources, compile, recompile};

use super::{attempt, file, good, shown};

const LISTED: &str = "name = \"listed\"\n[[allow]]\nname = \"list\"\nhosts_file = \"l.txt\"\n[[allow]]\nname = \"idle\"\nhosts = []\n";
const SMALL: &str = "name = \"small\"\n[[allow]]\nname = \"r\"\nhosts = [\"a.example\"]\n";

fn sources(generation: u64, small: &str, list: &str) -> Sources {
    Sources {
        policies: vec![file("listed.toml", LISTED), file("small.toml", small)],
        lists: [("l.txt".to_owned(), Ok(list.as_bytes().to_vec()))].into(),
        generation,
        ..Sources::default()
    }
}

/// Which policies of two loads are one and the same.
fn shared(before: &RuleSet, after: &RuleSet) -> Vec<bool> {
    before.policies().zip(after.policies()).map(|(one, other)| Arc::ptr_eq(one, other)).collect()
}

#[test]
fn what_did_not_change_is_taken_over_with_its_warnings() {
    let first = good(compile(&sources(1, SMALL, "b.example\n"), &[]));
    let next = SMALL.replace("a.example", "c.example");
    for (small, list, kept) in [
        (SMALL, "b.example\n", [true, true]),
        (next.as_str(), "b.example\n", [true, false]),
        (SMALL, "d.example\n", [false, true]),
        (SMALL, "", [false, true]),
    ] {
        let sources = sources(2, small, list);
        let again = good(recompile(&first, &sources, &[]));
        assert_eq!(shared(&first, &again), kept, "{small} {list}");
        let afresh = good(compile(&sources, &[]));
        assert_eq!(again.digest(), afresh.digest(), "{small} {list}");
        assert_eq!(shown(again.warnings()), shown(afresh.warnings()), "{small} {list}");
        assert_eq!(again.generation(), 2);
        let listed = attempt(&again, "listed", "https://b.example/");
        assert_eq!(listed.is_ok(), list.contains("b.example"), "{small} {list}");
        let own = attempt(&again, "small", "https://c.example/");
        assert_eq!(own.is_ok(), small.contains("c.example"), "{small} {list}");
    }
    assert!(!first.warnings().is_empty(), "there is a warning to be taken over");
}

#[test]
fn what_is_wrong_is_never_taken_over() {
    let first = good(compile(&sources(1, SMALL, "b.example\n"), &[]));
    let phrase = |result: Result<RuleSet, Vec<Problem>>| shown(&result.unwrap_err()).join("\n");
    let mut gone = sources(2, SMALL, "");
    gone.lists.insert("l.txt".to_owned(), Err("it is gone".to_owned()));
    assert!(phrase(recompile(&first, &gone, &[])).contains("it is gone"));
    let mut unasked = sources(2, SMALL, "");
    unasked.lists.clear();
    assert!(phrase(recompile(&first, &unasked, &[])).contains("it was not given"));
    let mut twice = sources(2, SMALL, "b.example\n");
    twice.policies.push(file("other.toml", SMALL));
    assert!(phrase(recompile(&first, &twice, &[])).contains("stands twice"));
    let bad = sources(2, SMALL, "b.example\n*.com\n");
    assert!(phrase(recompile(&first, &bad, &[])).contains("l.txt:2:1"));
}

#[test]
fn the_digest_of_sources_is_of_everything_that_was_read() {
    let digest = |sources: &Sources| sources.digest();
    let first = sources(1, SMALL, "b.example\n");
    assert_eq!(digest(&first), digest(&sources(9, SMALL, "b.example\n")), "the number is no file");
    let mut moved = first.clone();
    moved.policies[0].path = "elsewhere.toml".to_owned();
    let mut missing = first.clone();
    missing.lists.insert("l.txt".to_owned(), Err("b.example\n".to_owned()));
    let mut operated = first.clone();
    operated.operator = Some(file("sandbar.toml", ""));
    for other in [&sources(1, SMALL, "c.example\n"), &moved, &missing, &operated] {
        assert_ne!(digest(&first), digest(other));
    }
}

#[test]
fn closed_rules_allow_nothing_and_say_why() {
    let rules = good(compile(&sources(3, SMALL, "b.example\n"), &[]));
    let closed = rules.closed();
    assert_eq!((closed.generation(), closed.is_closed(), rules.is_closed()), (4, true, false));
    for (sandbox, url) in [
        ("small", "https://a.example/"),
        ("small", "https://never.example/"),
        ("listed", "https://b.example/"),
    ] {
        assert_eq!(attempt(&closed, sandbox, url), Err(Reason::PolicyInvalid), "{url}");
    }
    let open = good(recompile(&closed, &sources(5, SMALL, "b.example\n"), &[]));
    assert_eq!(attempt(&open, "small", "https://a.example/").as_deref(), Ok("r"));
    assert_eq!(shared(&closed, &open), [true, true]);
}
