//! Reloads: unchanged policies are reused, closed rules allow nothing, and a channel may change hands.

use std::sync::Arc;

use rules::load::problem::Problem;
use rules::probe::PolicyProbe;
use rules::{Channel, Decision, LoadSources, Reason, RuleSet, compile, recompile};

use super::{compile_configured, decide_attempt, problem_texts, sandbox_ref, source_file, unwrap_rules};

const LISTED: &str = "name = \"listed\"\n[[allow]]\nname = \"list\"\nhosts_file = \"l.txt\"\n[[allow]]\nname = \"idle\"\nhosts = []\n";
const SMALL: &str = "name = \"small\"\n[[allow]]\nname = \"r\"\nhosts = [\"a.example\"]\n";

fn load_sources(generation: u64, small: &str, list: &str) -> LoadSources {
    LoadSources {
        policies: vec![source_file("listed.toml", LISTED), source_file("small.toml", small)],
        lists: [("l.txt".to_owned(), Ok(list.as_bytes().to_vec()))].into(),
        generation,
        ..LoadSources::default()
    }
}

/// Returns which policies of two loads are shared.
fn reused_policies(before: &RuleSet, after: &RuleSet) -> Vec<bool> {
    before.policies().zip(after.policies()).map(|(one, other)| Arc::ptr_eq(one, other)).collect()
}

#[test]
fn unchanged_policies_are_reused_with_their_warnings() {
    let first = unwrap_rules(compile(&load_sources(1, SMALL, "b.example\n"), &[]));
    let next = SMALL.replace("a.example", "c.example");
    for (small, list, reused) in [
        (SMALL, "b.example\n", [true, true]),
        (next.as_str(), "b.example\n", [true, false]),
        (SMALL, "d.example\n", [false, true]),
        (SMALL, "", [false, true]),
    ] {
        let sources = load_sources(2, small, list);
        let again = unwrap_rules(recompile(&first, &sources, &[]));
        assert_eq!(reused_policies(&first, &again), reused, "{small} {list}");
        let afresh = unwrap_rules(compile(&sources, &[]));
        assert_eq!(again.digest(), afresh.digest(), "{small} {list}");
        assert_eq!(problem_texts(again.warnings()), problem_texts(afresh.warnings()), "{small} {list}");
        assert_eq!(again.generation(), 2);
        let listed = decide_attempt(&again, "listed", "https://b.example/");
        assert_eq!(listed.is_ok(), list.contains("b.example"), "{small} {list}");
        let own = decide_attempt(&again, "small", "https://c.example/");
        assert_eq!(own.is_ok(), small.contains("c.example"), "{small} {list}");
    }
    assert!(!first.warnings().is_empty(), "the first load must have a warning to carry over");
}

#[test]
fn p9_errors_are_never_hidden_by_reuse() {
    let first = unwrap_rules(compile(&load_sources(1, SMALL, "b.example\n"), &[]));
    let errors = |result: Result<RuleSet, Vec<Problem>>| problem_texts(&result.unwrap_err()).join("\n");
    let mut gone = load_sources(2, SMALL, "");
    gone.lists.insert("l.txt".to_owned(), Err("it is gone".to_owned()));
    assert!(errors(recompile(&first, &gone, &[])).contains("it is gone"));
    let mut unsupplied = load_sources(2, SMALL, "");
    unsupplied.lists.clear();
    assert!(errors(recompile(&first, &unsupplied, &[])).contains("it was not supplied"));
    let mut twice = load_sources(2, SMALL, "b.example\n");
    twice.policies.push(source_file("other.toml", SMALL));
    assert!(errors(recompile(&first, &twice, &[])).contains("is defined twice"));
    let bad = load_sources(2, SMALL, "b.example\n*.com\n");
    assert!(errors(recompile(&first, &bad, &[])).contains("l.txt:2:1"));
}

#[test]
fn the_digest_of_sources_covers_everything_read() {
    let digest = |sources: &LoadSources| sources.digest();
    let first = load_sources(1, SMALL, "b.example\n");
    assert_eq!(
        digest(&first),
        digest(&load_sources(9, SMALL, "b.example\n")),
        "the generation is not part of the digest"
    );
    let mut moved = first.clone();
    moved.policies[0].path = "elsewhere.toml".to_owned();
    let mut missing = first.clone();
    missing.lists.insert("l.txt".to_owned(), Err("b.example\n".to_owned()));
    let mut configured = first.clone();
    configured.operator = Some(source_file("sandbar.toml", ""));
    for other in [&load_sources(1, SMALL, "c.example\n"), &moved, &missing, &configured] {
        assert_ne!(digest(&first), digest(other));
    }
}

#[test]
fn p16_closed_rules_allow_nothing_and_give_the_reason() {
    let rules = unwrap_rules(compile(&load_sources(3, SMALL, "b.example\n"), &[]));
    let closed = rules.to_closed();
    assert_eq!((closed.generation(), closed.is_closed(), rules.is_closed()), (4, true, false));
    for (sandbox, url) in [
        ("small", "https://a.example/"),
        ("small", "https://never.example/"),
        ("listed", "https://b.example/"),
    ] {
        assert_eq!(decide_attempt(&closed, sandbox, url), Err(Reason::PolicyInvalid), "{url}");
    }
    let open = unwrap_rules(recompile(&closed, &load_sources(5, SMALL, "b.example\n"), &[]));
    assert_eq!(decide_attempt(&open, "small", "https://a.example/").as_deref(), Ok("r"));
    assert_eq!(reused_policies(&closed, &open), [true, true]);
}

/// Two sandboxes with the same policy, and keys of their own.
fn compile_pair(a: &str, b: &str) -> RuleSet {
    let sandbox = |id: &str, keys: &str| {
        format!("[[sandbox]]\nid = \"{id}\"\nbase = \"system\"\npolicies = [\"small\"]\n{keys}\n")
    };
    unwrap_rules(compile_configured(&(sandbox("a", a) + &sandbox("b", b)), &[SMALL]))
}

const ACME: &str = "unix_uid = 1\ntenant = \"acme\"\nenvironment = \"staging\"\ngeneration = 1";

/// What is done again on a connection of uid 1 after the sandboxes changed: a permit that it holds, and a new attempt.
#[test]
fn p2_p10_a_connection_is_identified_by_its_channel_at_every_decision() {
    use Reason::{ChannelsDisagree, IdentityChanged, UnknownChannel, UnknownSandbox};
    let none = "unix_uid = 1";
    let change = |from: &str, to: &str| ACME.replace(from, to);
    let both = [Channel::UnixUser(1), Channel::Mark(7)];
    for (what, channels, before, [a, b], held, fresh) in [
        ("nothing", &both[..1], ACME, [ACME, "unix_uid = 2"], None, None),
        ("exchanged", &both[..1], ACME, ["unix_uid = 2", ACME], Some(IdentityChanged), Some(IdentityChanged)),
        ("nobody's", &both[..1], ACME, ["unix_uid = 3", ""], Some(UnknownChannel), Some(UnknownChannel)),
        ("another tenant", &both[..1], ACME, [&change("acme", "initech"), ""], Some(IdentityChanged), None),
        (
            "another environment",
            &both[..1],
            ACME,
            [&change("staging", "production"), ""],
            Some(IdentityChanged),
            None,
        ),
        (
            "created again",
            &both[..1],
            ACME,
            [&change("generation = 1", "generation = 2"), ""],
            Some(IdentityChanged),
            None,
        ),
        ("no tenant any more", &both[..1], ACME, [none, ""], Some(IdentityChanged), None),
        ("assigned", &both[..1], none, [ACME, ""], None, None),
        (
            "half of its channels went",
            &both[..],
            "unix_uid = 1\nmark = 7",
            ["unix_uid = 1", "mark = 7"],
            Some(ChannelsDisagree),
            Some(ChannelsDisagree),
        ),
    ] {
        let (old, new) = (compile_pair(before, "unix_uid = 9"), compile_pair(a, b));
        let connection = old.sandboxes().identify_connection(&channels.into()).unwrap();
        let facts = PolicyProbe::parse("https://a.example/").unwrap().facts(&connection);
        let Decision::Allow(permit) = old.decide(&connection, &facts[0]) else { panic!("{what}: denied") };
        assert_eq!(permit.holder(), &connection, "{what}");
        assert_eq!(new.decide_again(&permit, None).reason(), held, "{what}: held");
        let again = new.decide(&connection, &facts[0]);
        assert_eq!(again.reason(), fresh, "{what}: fresh");
        if let Decision::Allow(permit) = again {
            assert_eq!(
                permit.holder().tenant,
                sandbox_ref(&new, "a").tenant,
                "{what}: as the sandbox is now"
            );
        }
    }
    let gone = unwrap_rules(compile_configured("[[sandbox]]\nid = \"b\"\npolicies = [\"small\"]", &[SMALL]));
    let old = compile_pair(ACME, "");
    let connection = old.sandboxes().identify_connection(&both[..1].into()).unwrap();
    assert_eq!(gone.sandboxes().identify_again(&connection), Err(UnknownSandbox));
}
