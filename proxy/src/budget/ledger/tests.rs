//! Tests of the ledger.

use std::sync::atomic::{AtomicU64, Ordering};

use rules::budget::UsageKind;
use rules::facts::{ConnectFacts, ConnectTarget, EchPresence, Protocol};
use rules::{Decision, DomainName, Facts, Host, LoadSources, SourceFile, compile};

use super::charges::{ByteLease, WRITE_WAIT};
use super::*;

fn open(dir: &Path, rules: &RuleSet) -> anyhow::Result<Ledger> {
    Ledger::open(dir, rules, Worker::start("state-files").unwrap(), Quotas::for_inspection(64 << 20, rules))
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
}

impl Charges {
    fn charge_now(&self, what: UsageKind, amount: u64) -> Result<(), Exhausted> {
        wait(self.charge(what, amount))
    }

    fn lease_now(&self, what: UsageKind) -> Result<ByteLease, Exhausted> {
        wait(self.lease(what))
    }
}

fn rules(budget: &str) -> RuleSet {
    let text = format!(
        "name = \"p\"\n[budget]\n{budget}\n[[allow]]\nname = \"r\"\nhosts = [\"x.example\"]\ntls = \"tunnel\"\n\
         [allow.budget]\nconnections = 2\nrequests_per_minute = 1000\n"
    );
    let policy = SourceFile { path: "p.toml".into(), bytes: text.into() };
    compile(&LoadSources { policies: vec![policy], ..LoadSources::default() }, &[]).unwrap()
}

fn permit(rules: &RuleSet) -> Permit {
    permit_to(rules, "x.example")
}

fn permit_to(rules: &RuleSet, host: &str) -> Permit {
    let host = Host::Name(DomainName::parse(host).unwrap());
    let protocol = Protocol::Tls { sni: Some(host.clone()), ech: EchPresence::Absent };
    let facts = ConnectFacts { target: ConnectTarget::Named(host), port: 443, protocol };
    match rules.decide(rules.sandboxes().iter().next().unwrap(), &Facts::Connect(facts)) {
        Decision::Allow(permit) => permit,
        Decision::Deny(denial) => panic!("{denial:?}"),
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(24))]

    /// Concurrent leases and refunds never move more than the limit, and all of the limit can be moved.
    #[test]
    fn budgets_are_exact_under_concurrency(limit in 1u64..4_000_000, part in 1u64..300_000) {
        let dir = tempfile::tempdir().unwrap();
        let rules = rules(&format!("upload_bytes_per_hour = {limit}"));
        let ledger = open(dir.path(), &rules).unwrap();
        let moved = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (ledger, moved, permit) = (&ledger, &moved, permit(&rules));
                scope.spawn(move || {
                    let charges = ledger.open_charges(&permit).unwrap();
                    let mut wanted = part + thread;
                    while let Ok(lease) = charges.lease_now(UsageKind::Upload) {
                        let now = lease.bytes.min(wanted);
                        moved.fetch_add(now, Ordering::SeqCst);
                        assert!(moved.load(Ordering::SeqCst) <= limit);
                        charges.refund(&lease, now);
                        wanted = wanted * 7 % 90_001 + 1;
                    }
                });
            }
        });
        // One thread may have held a lease when the other was refused; after its refund the rest is available.
        let charges = ledger.open_charges(&permit(&rules)).unwrap();
        while let Ok(lease) = charges.lease_now(UsageKind::Upload) {
            moved.fetch_add(lease.bytes, Ordering::SeqCst);
        }
        proptest::prop_assert_eq!(moved.into_inner(), limit);
    }
}

#[test]
fn a_restart_gives_nothing_back_and_a_crash_takes_a_little() {
    let rules = rules("requests_per_hour = 160\nupload_bytes_per_day = 1000");
    // A write that a charge waited for has an allowance for that charge, too.
    for (how, used) in [("orderly", 100), ("by a crash", 111)] {
        let dir = tempfile::tempdir().unwrap();
        let ledger = open(dir.path(), &rules).unwrap();
        let charges = ledger.open_charges(&permit(&rules)).unwrap();
        (0..100).for_each(|_| charges.charge_now(UsageKind::Requests, 1).unwrap());
        if how == "orderly" {
            wait(ledger.flush());
        }
        drop((charges, ledger));
        let ledger = open(dir.path(), &rules).unwrap();
        let charges = ledger.open_charges(&permit(&rules)).unwrap();
        let left = (0..200).filter(|_| charges.charge_now(UsageKind::Requests, 1).is_ok()).count();
        assert!((160 - used..=60).contains(&left), "{how}: {left} are left");
        let spent = charges.charge_now(UsageKind::Requests, 1).unwrap_err();
        let Exhausted::Budget { budget, limit, rule, refills } = spent else { panic!("{spent:?}") };
        assert_eq!((budget, limit, rule), (BudgetKind::RequestsPerHour, 160, None));
        assert!(refills.is_some_and(|time| time > Duration::from_secs(3500)), "{refills:?}");
    }
}

#[test]
fn a_lease_is_given_back_to_what_it_was_taken_from() {
    let dir = tempfile::tempdir().unwrap();
    let free = rules("");
    let ledger = open(dir.path(), &free).unwrap();
    let bound = rules("upload_bytes_per_hour = 1000");
    let (other, charges) =
        (ledger.open_charges(&permit(&bound)).unwrap(), ledger.open_charges(&permit(&free)).unwrap());
    other.charge_now(UsageKind::Upload, 1000).unwrap();
    let lease = charges.lease_now(UsageKind::Upload).unwrap();
    charges.adopt_budgets(&permit(&bound)); // a reload while a lease is held
    charges.refund(&lease, 0);
    assert!(
        other.charge_now(UsageKind::Upload, 1).is_err(),
        "a refund must not free another attempt's usage"
    );
}

#[test]
fn the_later_of_two_changes_stands() {
    let dir = tempfile::tempdir().unwrap();
    let free = rules("");
    let ledger = open(dir.path(), &free).unwrap();
    let charges = ledger.open_charges(&permit(&free)).unwrap();
    let later =
        rules("upload_bytes_per_hour = 5").with_timed_state(&rules::TimedState::default(), 9).unwrap();
    charges.adopt_budgets(&permit(&later));
    charges.adopt_budgets(&permit(&rules("").with_timed_state(&rules::TimedState::default(), 8).unwrap()));
    assert!(charges.charge_now(UsageKind::Upload, 6).is_err());
}

#[test]
fn a_drip_does_not_write_the_file_for_every_byte() {
    let (dir, rules) = (tempfile::tempdir().unwrap(), rules("upload_bytes_per_hour = 1000000"));
    let ledger = open(dir.path(), &rules).unwrap();
    let charges = ledger.open_charges(&permit(&rules)).unwrap();
    let drip = || {
        let lease = charges.lease_now(UsageKind::Upload)?;
        charges.refund(&lease, 1);
        Ok::<(), Exhausted>(())
    };
    drip().unwrap();
    std::fs::remove_dir_all(dir.path().join(BUDGETS_DIR)).unwrap(); // a write would fail now
    (0..1000).for_each(|at| assert_eq!(drip(), Ok(()), "byte {at}"));
}

#[test]
fn a_rule_of_the_base_bounds_all_that_passes_by_it() {
    let file = |path: &str, text: &str| SourceFile { path: path.into(), bytes: text.into() };
    let operator = "[[sandbox]]\nid = \"s\"\nbase = \"b\"\npolicies = [\"p\"]\n";
    let own = "name = \"p\"\n[[allow]]\nname = \"one\"\nhosts = [\"x.example\"]\ntls = \"tunnel\"\n\
               [[allow]]\nname = \"two\"\nhosts = [\"y.example\"]\ntls = \"tunnel\"\n";
    let base = "name = \"b\"\n[[allow]]\nname = \"all\"\nhosts = [\".example\"]\ndangerously_wide = true\n\
                tls = \"tunnel\"\n[allow.budget]\nupload_bytes_per_hour = 10\n";
    let sources = LoadSources {
        operator: Some(file("sandbar.toml", operator)),
        policies: vec![file("p.toml", own), file("b.toml", base)],
        ..LoadSources::default()
    };
    let rules = compile(&sources, &[]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let ledger = open(dir.path(), &rules).unwrap();
    let charges = |host| ledger.open_charges(&permit_to(&rules, host)).unwrap();
    charges("x.example").charge_now(UsageKind::Upload, 6).unwrap();
    let spent = charges("y.example").charge_now(UsageKind::Upload, 6).unwrap_err();
    let Exhausted::Budget { rule, .. } = spent else { panic!("{spent:?}") };
    assert_eq!(rule.as_deref(), Some("b/all"));
    charges("y.example").charge_now(UsageKind::Upload, 4).unwrap();
}

// proves: budget.download_bytes_per_day, budget.download_bytes_per_hour, budget.requests_per_day
// proves: budget.requests_per_hour, budget.requests_per_minute, budget.upload_bytes_per_day
// proves: budget.upload_bytes_per_hour, allow.budget.download_bytes_per_day, allow.budget.download_bytes_per_hour
// proves: allow.budget.requests_per_day, allow.budget.requests_per_hour, allow.budget.requests_per_minute
// proves: allow.budget.upload_bytes_per_day, allow.budget.upload_bytes_per_hour
#[test]
fn each_budget_of_a_policy_and_of_a_rule_is_counted_in_its_window() {
    const MINUTE: u64 = 60;
    for (key, what, window) in [
        ("download_bytes_per_day", UsageKind::Download, 1440 * MINUTE),
        ("download_bytes_per_hour", UsageKind::Download, 60 * MINUTE),
        ("requests_per_day", UsageKind::Requests, 1440 * MINUTE),
        ("requests_per_hour", UsageKind::Requests, 60 * MINUTE),
        ("requests_per_minute", UsageKind::Requests, MINUTE),
        ("upload_bytes_per_day", UsageKind::Upload, 1440 * MINUTE),
        ("upload_bytes_per_hour", UsageKind::Upload, 60 * MINUTE),
    ] {
        for owner in [None, Some("p/r")] {
            let (sandbox, rule) = if owner.is_none() { (100, 900) } else { (900, 100) };
            let text = format!(
                "name = \"p\"\n[budget]\n{key} = {sandbox}\n[[allow]]\nname = \"r\"\nhosts = [\"x.example\"]\n\
                 tls = \"tunnel\"\n[allow.budget]\n{key} = {rule}\n"
            );
            let policy = SourceFile { path: "p.toml".into(), bytes: text.into() };
            let sources = LoadSources { policies: vec![policy], ..LoadSources::default() };
            let (dir, rules) = (tempfile::tempdir().unwrap(), compile(&sources, &[]).unwrap());
            let ledger = open(dir.path(), &rules).unwrap();
            let charges = ledger.open_charges(&permit(&rules)).unwrap();
            charges.charge_now(what, 100).unwrap();
            let spent = charges.charge_now(what, 1).unwrap_err();
            let Exhausted::Budget { budget, limit, rule, refills } = spent else {
                panic!("{key}: {spent:?}")
            };
            assert_eq!((budget.key(), limit, rule.as_deref()), (key, 100, owner));
            let refills = refills.unwrap().as_secs();
            assert!((window - 10..=window + window / 10).contains(&refills), "{key}: {refills} s");
            for other in [UsageKind::Download, UsageKind::Requests, UsageKind::Upload] {
                assert!(other == what || charges.charge_now(other, 1000).is_ok(), "{key} counts {other:?}");
            }
        }
    }
}

// proves: allow.budget.connections
#[test]
fn p17_so_many_are_open_at_once_and_a_place_is_given_up() {
    let (dir, rules) = (tempfile::tempdir().unwrap(), rules(""));
    let ledger = open(dir.path(), &rules).unwrap();
    let one = ledger.open_charges(&permit(&rules)).unwrap();
    let _two = ledger.open_charges(&permit(&rules)).unwrap();
    let spent = ledger.open_charges(&permit(&rules)).unwrap_err();
    let Exhausted::Budget { budget, rule, .. } = spent else { panic!("{spent:?}") };
    assert_eq!((budget, rule.as_deref()), (BudgetKind::Connections, Some("p/r")));
    drop(one);
    assert!(ledger.open_charges(&permit(&rules)).is_ok());
}

#[test]
fn p16_what_cannot_be_written_cannot_be_used() {
    let (dir, rules) = (tempfile::tempdir().unwrap(), rules("requests_per_hour = 9"));
    let ledger = open(dir.path(), &rules).unwrap();
    let charges = ledger.open_charges(&permit(&rules)).unwrap();
    charges.charge_now(UsageKind::Requests, 1).unwrap();
    std::fs::remove_dir_all(dir.path().join(BUDGETS_DIR)).unwrap();
    for _ in 0..3 {
        assert_eq!(charges.charge_now(UsageKind::Requests, 1), Err(Exhausted::Unkept));
    }
    std::fs::create_dir(dir.path().join(BUDGETS_DIR)).unwrap();
    assert_eq!((0..20).filter(|_| charges.charge_now(UsageKind::Requests, 1).is_ok()).count(), 8);
}

#[test]
fn p16_a_charge_waits_for_its_file_but_not_for_long() {
    let (dir, rules) = (tempfile::tempdir().unwrap(), rules("requests_per_hour = 9"));
    let files = Worker::start("state-files").unwrap();
    let ledger =
        Ledger::open(dir.path(), &rules, files.clone(), Quotas::for_inspection(64 << 20, &rules)).unwrap();
    let charges = ledger.open_charges(&permit(&rules)).unwrap();
    charges.charge_now(UsageKind::Requests, 1).unwrap();
    let (release, hang) = std::sync::mpsc::channel::<()>();
    files.post(move || assert!(hang.recv().is_err())).unwrap(); // a file system that does not answer
    let started = std::time::Instant::now();
    assert_eq!(charges.charge_now(UsageKind::Requests, 1), Err(Exhausted::Unkept));
    assert!(started.elapsed() >= WRITE_WAIT);
    assert_eq!(ledger.describe(&rules)[0]["budgets"][0]["used"], 1, "and nobody else waits");
    drop(release);
    assert_eq!((0..20).filter(|_| charges.charge_now(UsageKind::Requests, 1).is_ok()).count(), 8);
}

#[test]
fn leaving_and_returning_refills_nothing() {
    let (dir, with) = (tempfile::tempdir().unwrap(), rules("requests_per_hour = 160"));
    let other = SourceFile {
        path: "q.toml".into(),
        bytes: "name = \"q\"\n[[allow]]\nname = \"r\"\nhosts = [\"x.example\"]\n".into(),
    };
    let without = compile(&LoadSources { policies: vec![other], ..LoadSources::default() }, &[]).unwrap();
    let ledger = Arc::new(open(dir.path(), &with).unwrap());
    let prune = || {
        let pruned = ledger.clone();
        let prune_all = move || pruned.departed().iter().for_each(|id| pruned.prune_sandbox(id));
        wait(ledger.state_files.run(prune_all)).unwrap();
    };
    let charges = ledger.open_charges(&permit(&with)).unwrap();
    (0..100).for_each(|_| charges.charge_now(UsageKind::Requests, 1).unwrap());
    ledger.admit_sandboxes(&without);
    prune();
    assert_eq!(ledger.sandbox_count(), 2, "it has an open connection");
    charges.charge_now(UsageKind::Requests, 1).unwrap();
    drop(charges);
    for round in 0..3 {
        ledger.admit_sandboxes(&without);
        prune();
        assert_eq!(ledger.sandbox_count(), 1, "round {round}");
        assert!(ledger.open_charges(&permit(&with)).is_err(), "refused while it is not configured");
        ledger.admit_sandboxes(&with);
    }
    let charges = ledger.open_charges(&permit(&with)).unwrap();
    assert_eq!((0..200).filter(|_| charges.charge_now(UsageKind::Requests, 1).is_ok()).count(), 59);
    drop(charges);
    let path = dir.path().join(BUDGETS_DIR).join("p.json");
    ledger.admit_sandboxes(&without);
    prune();
    std::fs::write(&path, "{").unwrap();
    ledger.admit_sandboxes(&with);
    let spent = ledger.open_charges(&permit(&with)).unwrap_err();
    assert_eq!(spent, Exhausted::Unkept, "an account that cannot be read refuses its sandbox");
}

#[test]
fn the_file_of_a_sandbox_that_left_is_deleted_once_nothing_in_it_counts() {
    const HOURS: u64 = 3_600_000;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.json");
    for (content, age, kept) in [
        (r#"{"at":0,"born":null,"sandbox":{"requests_per_day":{"parts":[],"ahead":0}}}"#, 24, true),
        (r#"{"at":0,"born":null,"sandbox":{"requests_per_day":{"parts":[],"ahead":0}}}"#, 25, false),
        (r#"{"at":0,"born":1}"#, 25, true),
        (r#"{"at":0,"born":1}"#, 30 * 24 + 1, false),
        (r#"{"at":0,"born":null,"rules":{"g":{"bytes":{"parts":[],"ahead":0}}}}"#, 25, true),
    ] {
        std::fs::write(&path, content).unwrap();
        SandboxAccount::read(&path).unwrap().discard_if_old(age * HOURS, ACCOUNT_RETENTION);
        assert_eq!(path.exists(), kept, "{content} after {age} h");
    }
}

#[test]
fn p16_a_broken_file_stops_the_start() {
    let (dir, rules) = (tempfile::tempdir().unwrap(), rules(""));
    std::fs::create_dir(dir.path().join(BUDGETS_DIR)).unwrap();
    std::fs::write(dir.path().join(BUDGETS_DIR).join("p.json"), "{").unwrap();
    let error = format!("{:#}", open(dir.path(), &rules).err().unwrap());
    assert!(error.contains("p.json is not valid: repair or remove it"), "{error}");
}
