//! Tests of what is remembered.

use super::*;

const TEXT: &str =
    "The launch code of the northern archive is kept in the blue folder of Marguerite Delacroix";

fn rules(sandboxes: usize) -> rules::RuleSet {
    let policy = |at: usize| rules::SourceFile {
        path: format!("s{at}.toml"),
        bytes: format!("name = \"s{at}\"\n").into(),
    };
    let policies = (0..sandboxes).map(policy).collect();
    rules::compile(&rules::LoadSources { policies, ..rules::LoadSources::default() }, &[]).unwrap()
}

fn open(dir: &Path) -> SandboxSignals {
    open_one(dir, "s", &Quotas::for_inspection(64 << 20, &rules(1)))
}

fn open_one(dir: &Path, id: &str, quotas: &Arc<Quotas>) -> SandboxSignals {
    SandboxSignals::open(&SignalKeys::open(dir).unwrap(), &SandboxId::parse(id).unwrap(), quotas)
}

/// Returns different letters each time.
fn letters(seed: usize, length: usize) -> String {
    let mut state = seed as u64 * 2 + 1;
    let mut letter = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        char::from(b'a' + (state >> 40) as u8 % 26)
    };
    (0..length).map(|_| letter()).collect()
}

async fn say(signals: &SandboxSignals, host: &str) -> u64 {
    let parts =
        RequestParts { method: "GET", path: b"/some/path", query: None, fields: &[("x-a", b"value")] };
    let priced = signals.price_request(host, &parts, "https 2 none 443").await;
    let bits = priced.bits;
    priced.learn();
    bits
}

#[tokio::test]
async fn p17_what_is_remembered_stays_within_the_total_and_each_share_is_kept() {
    const TOTAL: u64 = 16 << 20;
    let (dir, bank) = (tempfile::tempdir().unwrap(), BankId::parse("staging:a").unwrap());
    let quotas = Quotas::for_inspection(TOTAL, &rules(4));
    let used = || quotas.usage(Resource::Inspection).0;
    let all: Vec<SandboxSignals> =
        (0..4).map(|at| open_one(dir.path(), &format!("s{at}"), &quotas)).collect();
    for signals in all.iter().take(3) {
        for at in 0..200 {
            let host = format!("h{at}.example");
            let (first, second) = (say(signals, &host).await, say(signals, &host).await);
            assert!(second < first, "{first} then {second}: no request is refused, and a repeat is cheap");
            signals.with_shape(&host, |_| ());
            signals.add_flows(BTreeMap::from([(bank.clone(), 48)]), &host, "record".to_owned(), 1);
            assert!(used() <= TOTAL);
        }
        let text = letters(7, 256 << 10);
        signals.remember_text(std::iter::once((&bank, text.as_bytes())));
        assert!(used() <= TOTAL);
        let (_, end) = text.split_at(text.len() - 100);
        let snapshot = signals.flow_snapshot().unwrap();
        assert_eq!(
            snapshot.match_text(end, crate::inspect::now_ms() / 1000).len(),
            1,
            "hosts give way to text"
        );
    }
    assert!(used() > TOTAL / 2, "the others took what is common: {}", used());
    let quiet = &all[3];
    assert!(say(quiet, "a.example").await > 50);
    assert!(say(quiet, "a.example").await <= 2, "its share is kept");
    quiet.remember_text(std::iter::once((&bank, TEXT.as_bytes())));
    assert!(quiet.flow_snapshot().is_some());
    drop(all);
    assert_eq!(used(), 0);
}

#[tokio::test]
async fn p17_a_reload_that_adds_sandboxes_takes_back_what_was_common() {
    const TOTAL: u64 = 16 << 20;
    let (dir, bank) = (tempfile::tempdir().unwrap(), BankId::parse("staging:a").unwrap());
    let quotas = Quotas::for_inspection(TOTAL, &rules(1));
    let signals = open_one(dir.path(), "s0", &quotas);
    signals.remember_text(std::iter::once((&bank, letters(1, 256 << 10).as_bytes())));
    for at in 0..100 {
        let host = format!("h{at}.example");
        say(&signals, &host).await;
        signals.with_shape(&host, |_| ());
    }
    let before = quotas.usage(Resource::Inspection).0;
    quotas.adopt(&rules(100));
    let signals = Arc::new(signals);
    let stored = signals.clone();
    tokio::task::spawn_blocking(move || stored.store()).await.unwrap().unwrap();
    let after = quotas.usage(Resource::Inspection).0;
    assert!(before > TOTAL * 6 / 10 && after <= TOTAL / 2 + TOTAL / 200, "{before} then {after}");
    // What is read again is reserved, too.
    drop(signals);
    let tight = Quotas::for_inspection(1 << 20, &rules(4));
    let again = open_one(dir.path(), "s0", &tight);
    assert!((1..=1 << 20).contains(&tight.usage(Resource::Inspection).0));
    assert!(again.flow_snapshot().is_some(), "text comes first");
}

#[test]
fn p15_recalled_text_is_recognised_after_a_restart_and_is_not_stored() {
    let dir = tempfile::tempdir().unwrap();
    let (bank, now) = (BankId::parse("staging:a").unwrap(), crate::inspect::now_ms());
    let signals = open(dir.path());
    signals.remember_text(std::iter::once((&bank, TEXT.as_bytes())));
    signals.add_flows(BTreeMap::from([(bank.clone(), 48)]), "a.example", "record".to_owned(), now);
    signals.store().unwrap();
    let file = std::fs::read_to_string(dir.path().join("signals/s.json")).unwrap();
    assert!(!file.contains("Marguerite"), "{file}");
    let again = open(dir.path());
    let found = again.flow_snapshot().unwrap().match_text(TEXT, now / 1000);
    assert_eq!(found.iter().map(|found| &found.bank).collect::<Vec<_>>(), [&bank]);
    assert_eq!(again.flows().len(), 1);
    let later = now / 1000 + 25 * 3600;
    assert!(open(dir.path()).flow_snapshot().unwrap().match_text(TEXT, later).is_empty());
}

#[tokio::test]
async fn p19_what_was_said_is_cheap_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let parts =
        RequestParts { method: "GET", path: b"/some/path", query: None, fields: &[("x-a", b"value")] };
    let signals = open(dir.path());
    let first = signals.price_request("a.example", &parts, "https 2 none 443").await;
    let dear = first.bits;
    first.learn();
    let signals = Arc::new(signals);
    let stored = signals.clone();
    tokio::task::spawn_blocking(move || stored.store()).await.unwrap().unwrap();
    let again = open(dir.path());
    let cheap = again.price_request("a.example", &parts, "https 2 none 443").await.bits;
    assert!(dear > 50 && cheap <= 2, "{dear} then {cheap}");
}

#[test]
fn p16_memory_that_cannot_be_read_is_forgotten_and_the_key_is_not() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    std::fs::write(dir.path().join("signals/s.json"), "{ not json").unwrap();
    assert!(open(dir.path()).flow_snapshot().is_none());
    std::fs::write(dir.path().join("signals/key"), "short").unwrap();
    assert!(SignalKeys::open(dir.path()).is_err());
}

#[test]
fn p17_hosts_and_flows_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let (signals, bank) = (open(dir.path()), BankId::parse("staging:a").unwrap());
    for at in 0..2_000 {
        let host = format!("h{at}.example");
        signals.with_shape(&host, |_| ());
        signals.block(&host, SignalCode::Beacon, 1);
        signals.add_flows(BTreeMap::from([(bank.clone(), 48)]), &host, "record".to_owned(), 1);
    }
    let memory = sys::lock(&signals.memory);
    assert_eq!((memory.shapes.len(), memory.blocked.len(), memory.flows.len()), (HOSTS, HOSTS, MAX_FLOWS));
    assert!(memory.shapes.contains_key("h1999.example"), "the newest is kept");
}

#[test]
fn p17_answers_and_reloads_at_once_leave_the_quota_right() {
    let (dir, bank) = (tempfile::tempdir().unwrap(), BankId::parse("staging:a").unwrap());
    let quotas = Quotas::for_inspection(64 << 20, &rules(1));
    let signals = open_one(dir.path(), "s0", &quotas);
    let now = crate::inspect::now_ms() / 1000;
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let (signals, bank) = (&signals, &bank);
            scope.spawn(move || {
                for at in 0..10 {
                    let text = letters(seed * 100 + at, 64 << 10);
                    signals.remember_text(std::iter::once((bank, text.as_bytes())));
                }
            });
        }
        // What a reload takes back may be the table that an answer is about to extend.
        scope.spawn(|| (0..500).for_each(|_| drop(signals.forget_text(now))));
    });
    let held =
        sys::lock(&signals.memory).flow.as_ref().map_or(0, |table| table_bytes(table.max_fingerprints()));
    assert_eq!(quotas.usage(Resource::Inspection).0, held, "as much is reserved as there is");
}

#[tokio::test]
async fn p17_memory_of_a_search_is_reserved_and_refused() {
    let dir = tempfile::tempdir().unwrap();
    let quotas = Quotas::for_inspection(64 << 20, &rules(1));
    let signals = open_one(dir.path(), "s0", &quotas);
    let (used, total) = quotas.usage(Resource::Buffers);
    let held = signals.reserve_search(4096).unwrap();
    assert_eq!(quotas.usage(Resource::Buffers).0, used + 4096);
    let refused = signals.reserve_search(total).map(drop).unwrap_err();
    assert_eq!(refused.reason, rules::Reason::QuotaExhausted);
    drop(held);
    assert_eq!(quotas.usage(Resource::Buffers).0, used);
}
