//! One record before, one after, in order and complete, whichever thread writes.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use audit::verify::LogIntegrity;
use audit::{
    AttemptOutcome, Ending, LINE_MAX, Log, LogDown, LogDurability, QueryStrings, Retention, StableCode,
};
use serde_json::Value;

use crate::support::*;

#[tokio::test]
async fn p7_an_attempt_has_a_decision_before_and_an_outcome_after() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    let mut record = open_record(&log, tunnel("github.com"));
    let id = record.id();
    let receipt = record.record_decision(verdict("allowed")).await.unwrap();
    let seen = attempt_records(&dir, &id);
    assert_eq!(seen.len(), 1, "the decision is in the file when the caller is released");
    assert_eq!(seen[0]["metadata"]["sequence"], receipt.sequence());
    record.set_dialled("203.0.113.80:443".parse().unwrap());
    record.byte_count().add_sent(120);
    record.byte_count().add_received(3400);
    record.close(completed_outcome());
    log.close();
    let seen = attempt_records(&dir, &id);
    assert_eq!(seen.iter().map(stage).collect::<Vec<_>>(), ["decision", "outcome"]);
    let outcome = &seen[1];
    assert_eq!(outcome["traffic"]["bytes_out"], 120);
    assert_eq!(outcome["traffic"]["bytes_in"], 3400);
    assert_eq!(outcome["dst_endpoint"]["ip"], "203.0.113.80");
    assert_eq!(outcome["dst_endpoint"]["hostname"], "github.com");
    assert_eq!(outcome["policy"]["version"], "3");
    assert_eq!(outcome["unmapped"]["sandbar"]["channel"]["kind"], "dedicated");
    assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Intact);
}

#[tokio::test]
async fn an_observer_sees_the_status_of_each_attempt() {
    let (_guard, config) = temp_config();
    let seen: Arc<std::sync::Mutex<Vec<String>>> = Arc::default();
    let events = seen.clone();
    let log = Log::open(config).unwrap();
    let subscribed = log.subscribe(move |one| {
        let (host, port) = one.facts.destination();
        let host = host.map(audit::Text::to_display).unwrap_or_default();
        events.lock().unwrap().push(format!("{host} {port:?} {:?}", one.status));
    });
    assert!(subscribed && !log.subscribe(|_| ()), "a log has one observer");
    let mut allowed = open_record(&log, tunnel("a.example"));
    drop(allowed.record_decision(verdict("allowed")).await.unwrap());
    allowed.byte_count().add_sent(3);
    allowed.close(completed_outcome());
    open_record(&log, tunnel("b.example")).record_refusal(verdict("not_listed")).await.unwrap();
    open_record(&log, tunnel("c.example")).post_denial(verdict("not_listed"));
    let mut late = open_record(&log, tunnel("d.example"));
    drop(late.record_decision(verdict("allowed")).await.unwrap());
    late.record_refusal(verdict("private_address")).await.unwrap();
    drop(open_record(&log, tunnel("e.example"))); // no decision: no event
    let port = "Some(443)";
    let wanted = [
        format!("a.example {port} Allowed"),
        format!("a.example {port} Ended {{ sent: 3, received: 0 }}"),
        format!("b.example {port} Refused(StableCode(\"not_listed\"))"),
        format!("c.example {port} Refused(StableCode(\"not_listed\"))"),
        format!("d.example {port} Allowed"),
        format!("d.example {port} Refused(StableCode(\"private_address\"))"),
    ];
    assert_eq!(*seen.lock().unwrap(), wanted);
}

#[tokio::test]
async fn p7_every_way_out_leaves_the_right_records() {
    type CloseFn = fn(audit::OpenRecord, &tokio::runtime::Handle);
    let ways: [(&str, CloseFn, &[&str], &str); 9] = [
        ("dropped undecided", |record, _| drop(record), &["outcome"], "abandoned"),
        (
            "dropped decided",
            |mut record, on| block_on(on, record.record_decision(verdict("allowed"))),
            &["decision", "outcome"],
            "abandoned",
        ),
        ("refused", |record, on| block_on(on, record.record_refusal(verdict("not_listed"))), &["denied"], ""),
        (
            "closed as refused",
            |record, _| record.close(AttemptOutcome::new(Ending::Refused(StableCode("not_listed")))),
            &["denied"],
            "",
        ),
        (
            "refused after the decision",
            |record, on| decide_and_close(record, on, Ending::Refused(StableCode("private_address"))),
            &["decision", "outcome"],
            "refused",
        ),
        (
            "refused by name after the decision",
            |mut record, on| {
                block_on(on, record.record_decision(verdict("allowed")));
                block_on(on, record.record_refusal(verdict("private_address")));
            },
            &["decision", "outcome"],
            "refused",
        ),
        (
            "a request after the decision",
            |mut record, on| {
                block_on(on, record.record_decision(verdict("allowed")));
                drop(record.open_request(query()));
            },
            &["decision", "outcome"],
            "abandoned",
        ),
        (
            "revoked",
            |record, on| decide_and_close(record, on, Ending::Revoked(rules::Reason::NotListed)),
            &["decision", "outcome"],
            "revoked",
        ),
        ("requests stand for it", |mut record, _| drop(record.open_request(query())), &[], ""),
    ];
    for (name, way, stages, ending) in ways {
        let (_guard, config) = temp_config();
        let dir = config.dir.clone();
        let log = Log::open(config).unwrap();
        let record = open_record(&log, tunnel("github.com"));
        let id = record.id();
        let on = tokio::runtime::Handle::current();
        tokio::task::spawn_blocking(move || way(record, &on)).await.unwrap();
        log.close();
        let seen = attempt_records(&dir, &id);
        assert_eq!(seen.iter().map(stage).collect::<Vec<_>>(), stages, "{name}");
        let last = seen.last().map_or(&Value::Null, |last| &last["unmapped"]["sandbar"]["ending"]);
        assert_eq!(last.as_str().unwrap_or_default(), ending, "{name}");
        let uid = |record: &Value| record["metadata"]["uid"].to_string();
        let uids: std::collections::HashSet<_> = records(&dir).iter().map(uid).collect();
        assert_eq!(uids.len(), records(&dir).len(), "{name}: no id is used twice");
        assert_eq!((log.health().lost, log.health().open), (0, 0), "{name}");
    }
}

fn block_on<T>(on: &tokio::runtime::Handle, future: impl Future<Output = Result<T, LogDown>>) {
    on.block_on(future).map(drop).unwrap();
}

fn decide_and_close(mut record: audit::OpenRecord, on: &tokio::runtime::Handle, ending: Ending) {
    block_on(on, record.record_decision(verdict("allowed")));
    record.close(AttemptOutcome::new(ending));
}

#[tokio::test]
async fn outcomes_of_memory_calls_have_their_bytes() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    let mut call = open_record(&log, memory());
    let id = call.id();
    let _receipt = call.record_decision(verdict("allowed")).await.unwrap();
    call.byte_count().add_sent(1234);
    call.byte_count().add_received(5678);
    call.close(completed_outcome());
    log.close();
    let line = attempt_records(&dir, &id).pop().unwrap().to_string();
    assert_eq!(audit::view::RecordView::parse(line.as_bytes()).unwrap().bytes(), (1234, 5678));
}

#[tokio::test]
async fn query_strings_are_written_only_where_asked_for() {
    for (keep, expected) in [(QueryStrings::Drop, false), (QueryStrings::Keep, true)] {
        let (_guard, mut config) = temp_config();
        config.query_strings = keep;
        let dir = config.dir.clone();
        let log = Log::open(config).unwrap();
        let facts = audit::RecordedFacts::Request(request("/v1/chat?key=hunter2"));
        let _receipt = open_record(&log, facts).record_decision(verdict("allowed")).await.unwrap();
        let text = lines(&dir).join("\n");
        assert_eq!(text.contains("hunter2"), expected, "{keep:?}");
        assert!(text.contains(r#""path":"/v1/chat""#));
    }
}

#[tokio::test]
async fn p18_every_refusal_says_what_was_attempted() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    let unnamed = || audit::RecordedConnection { port: Some(443), ..audit::RecordedConnection::default() };
    let addressed = || audit::RecordedConnection { host: Some("2001:db8::7".into()), ..unnamed() };
    for (facts, given, expected) in [
        (tunnel("denied.test"), None, "denied.test:443"),
        (tunnel("allowed.test"), Some("GET denied.test /x"), "GET denied.test /x"),
        (audit::RecordedFacts::Connection(unnamed()), None, "203.0.113.9:443"),
        (audit::RecordedFacts::Connection(addressed()), None, "[2001:db8::7]:443"),
        (audit::RecordedFacts::Request(request("/v1/x?key=hunter2")), None, "POST api.openai.com:443 /v1/x"),
        (memory(), None, "POST api.openai.com:443 /v1/recall"),
        (query(), None, "github.com AAAA"),
        (query(), Some("a\nb\u{1b}[2J\u{202e}"), "a\nb\u{1b}[2J\u{202e}"),
    ] {
        let refused = audit::DecisionDetails { attempted: given.map(Into::into), ..verdict("not_listed") };
        let id = open_record(&log, facts.clone()).record_refusal(refused.clone()).await.unwrap();
        let record = attempt_records(&dir, &id).pop().unwrap();
        assert_eq!(record["unmapped"]["sandbar"]["attempted"], expected);
        // The same after a decision; a decision itself and a completed attempt say nothing.
        let mut late = open_record(&log, facts);
        let id = late.id();
        let _receipt = late.record_decision(verdict("allowed")).await.unwrap();
        late.record_refusal(refused).await.unwrap();
        let [decision, outcome] = &attempt_records(&dir, &id)[..] else { panic!("two records of {id}") };
        assert_eq!(decision["unmapped"]["sandbar"]["attempted"], Value::Null);
        assert_eq!(outcome["unmapped"]["sandbar"]["attempted"], expected);
    }
    for line in lines(&dir) {
        assert!(line.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{line}");
        assert!(!line.contains("hunter2"), "{line}");
    }
}

#[tokio::test]
async fn p17_the_most_hostile_record_fits_a_line() {
    let (_guard, mut config) = temp_config();
    config.query_strings = QueryStrings::Keep;
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    let worst = "\u{1f600}".repeat(20_000);
    for facts in worst_facts(&worst) {
        let mut record = log.open_record(worst_arrival(&worst));
        record.set_sandbox(worst_subject(&worst));
        record.set_facts(facts);
        let _receipt = record.record_decision(worst_verdict(&worst)).await.unwrap();
        record.close(worst_outcome(&worst));
    }
    for facts in worst_facts(&worst) {
        let mut record = log.open_record(worst_arrival(&worst));
        record.set_sandbox(worst_subject(&worst));
        record.set_facts(facts);
        let refused = audit::DecisionDetails { reason: StableCode("bad_name"), ..worst_verdict(&worst) };
        record.record_refusal(refused).await.unwrap();
    }
    log.close();
    for line in lines(&dir) {
        assert!(line.len() < LINE_MAX, "{} bytes", line.len());
        assert!(line.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{line}");
    }
    let cut = |record: &&Value| record["metadata"]["is_truncated"] == true;
    assert_eq!(records(&dir).iter().filter(cut).count(), 12);
    assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Intact);
}

fn worst_arrival(worst: &str) -> audit::RecordedArrival {
    let channel = audit::RecordedChannel { kind: StableCode("proxy_protocol"), detail: Some(worst.into()) };
    audit::RecordedArrival { channel, ..arrival() }
}

fn worst_subject(worst: &str) -> audit::RecordedSandbox {
    audit::RecordedSandbox {
        sandbox: audit::SandboxId(worst.into()),
        tenant: audit::TenantId(worst.into()),
        environment: audit::Environment(worst.into()),
    }
}

fn worst_facts(worst: &str) -> [audit::RecordedFacts; 4] {
    let bytes = worst.as_bytes();
    let target = [bytes, b"?", bytes].concat();
    let mut request =
        audit::RecordedRequest::new(bytes, audit::HttpScheme::Https, worst.into(), 65535, &target);
    (request.version, request.user_agent) = (Some(worst.into()), Some(worst.into()));
    let tls = Some(audit::RecordedTls { version: worst.into(), sni: Some(worst.into()) });
    let call = audit::MemoryCall {
        request: request.clone(),
        service: worst.into(),
        operation: worst.into(),
        effect: audit::MemoryEffect::Read,
        banks: vec![worst.into(); 1000],
        identity: Some(worst.into()),
        checked: audit::StableCode("verified"),
    };
    [
        audit::RecordedFacts::Connection(audit::RecordedConnection {
            host: Some(worst.into()),
            port: Some(1),
            tls,
        }),
        audit::RecordedFacts::Memory(call),
        audit::RecordedFacts::Query(audit::RecordedQuery { name: worst.into(), kind: worst.into() }),
        audit::RecordedFacts::Request(request),
    ]
}

fn worst_verdict(worst: &str) -> audit::DecisionDetails {
    let mut verdict = verdict("allowed");
    verdict.rule = Some(worst.into());
    verdict.policy = Some(audit::RecordedPolicy { digest: worst.into(), generation: u64::MAX });
    verdict.credential = Some(worst.into());
    verdict.message = Some(worst.into());
    verdict.attempted = Some(worst.into());
    verdict.features =
        vec![audit::ScoreFeature { name: StableCode("header_entropy_over_length"), score: u32::MAX }; 1000];
    verdict
}

fn worst_outcome(worst: &str) -> AttemptOutcome {
    let answer = audit::RecordedAnswer { kind: worst.into(), rdata: worst.into(), ttl: u32::MAX };
    AttemptOutcome { answers: vec![answer; 1000], rcode: Some(3), status: Some(999), ..completed_outcome() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn p8_many_writers_make_one_chain_across_rotations() {
    for durability in [LogDurability::Process, LogDurability::Disk] {
        let (_guard, mut config) = temp_config();
        config.durability = durability;
        config.segment_bytes = 256 * 1024;
        config.checkpoint_records = 100;
        let dir = config.dir.clone();
        let log = Log::open(config).unwrap();
        let tasks: Vec<_> = (0..64)
            .map(|task| {
                let log = log.clone();
                tokio::spawn(async move {
                    for round in 0..10 {
                        record_attempt(&log, &format!("{round}.{task}.example")).await;
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        log.close();
        let health = log.health();
        assert_eq!((health.lost, health.folded, health.open), (0, 0, 0), "{durability:?}");
        let report = verify_dir(&dir);
        assert_eq!(report.integrity(), LogIntegrity::Intact, "{:?} {:?}", report.faults, report.gaps);
        assert!(files(&dir).len() > 3, "it rotated");
        assert!(report.checkpoints > 3);
        let decisions = records(&dir).iter().filter(|record| stage(record) == "decision").count();
        assert_eq!(decisions, 640);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p8_a_caller_cancelled_while_it_waits_leaves_the_chain_intact() {
    let (_guard, mut config) = temp_config();
    config.durability = LogDurability::Disk; // callers always wait there
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    for round in 0..50 {
        let log = log.clone();
        let task = tokio::spawn(async move { record_attempt(&log, &format!("{round}.example")).await });
        tokio::task::yield_now().await;
        task.abort();
        match task.await {
            Ok(()) => {}
            Err(error) => assert!(error.is_cancelled()),
        }
    }
    log.close();
    assert_eq!(log.health().open, 0, "every decided attempt was closed");
    assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Intact);
}

/// A leader that never writes: its task is dropped, or only stalled.
#[test]
fn a_caller_that_does_not_write_is_relieved() {
    for dropped in [true, false] {
        let (_guard, config) = temp_config();
        let dir = config.dir.clone();
        let log = Log::open(config).unwrap();
        let mut stalled = open_record(&log, tunnel("stalled.example"));
        let mut turn = Some(Box::pin(stalled.record_decision(verdict("allowed"))));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(turn.as_mut().unwrap().as_mut().poll(&mut context).is_pending());
        if dropped {
            turn = None;
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(record_attempt(&log, "github.com"));
        let polled = turn.as_mut().map(|turn| turn.as_mut().poll(&mut context).is_ready());
        assert_eq!(polled, (!dropped).then_some(true), "its record is already written");
        drop(turn);
        drop(stalled);
        log.close();
        let stages = records(&dir).iter().filter(|r| r["class_uid"] == 4001).count();
        assert_eq!((stages, log.health().open), (4, 0), "dropped: {dropped}");
        assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Intact);
    }
}

#[tokio::test]
async fn retention_removes_only_when_asked_and_says_so() {
    for (retention, kept) in [
        (Retention::Everything, 6),
        (Retention::Age(Duration::from_secs(3600)), 6),
        (Retention::Age(Duration::ZERO), 1),
    ] {
        let (_guard, mut config) = temp_config();
        config.retention = retention;
        let dir = config.dir.clone();
        let log = Log::open(config).unwrap();
        for round in 0..5 {
            record_attempt(&log, &format!("{round}.example")).await;
            log.reopen().unwrap();
        }
        log.close();
        assert_eq!(files(&dir).len(), kept, "{retention:?}");
        let report = verify_dir(&dir);
        assert_eq!(report.integrity(), LogIntegrity::Intact, "{:?} {:?}", report.faults, report.gaps);
    }
}

// proves: log.segment_age
#[tokio::test]
async fn a_segment_ends_when_it_is_old() {
    let (_guard, mut config) = temp_config();
    config.segment_age = Duration::ZERO;
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    record_attempt(&log, "github.com").await;
    log.close();
    assert!(files(&dir).len() >= 2, "{:?}", files(&dir));
    assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Intact);
}

#[tokio::test]
async fn an_idle_segment_ends_when_it_is_old() {
    let (_guard, mut config) = temp_config();
    config.segment_age = Duration::from_millis(50);
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while files(&dir).len() < 2 {
        assert!(std::time::Instant::now() < deadline, "rotation by age needs no attempt");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    log.close();
    assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Intact);
}

#[tokio::test]
async fn a_removal_that_was_cut_short_leaves_no_gap() {
    let (_guard, mut config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config.clone()).unwrap();
    for _ in 0..4 {
        record_attempt(&log, "github.com").await;
        log.reopen().unwrap();
    }
    drop(log);
    let old = files(&dir);
    let unreached: Vec<_> = old[2..4].iter().map(|path| (path, fs::read(path).unwrap())).collect();
    config.retention = Retention::Age(Duration::ZERO);
    drop(Log::open(config).unwrap());
    assert_eq!(files(&dir).len(), 1);
    for (path, bytes) in unreached {
        fs::write(path, bytes).unwrap();
    }
    let report = verify_dir(&dir);
    assert_eq!(report.integrity(), LogIntegrity::Intact, "{:?} {:?}", report.faults, report.gaps);
    fs::remove_file(&old[3]).unwrap();
    assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Incomplete, "the oldest are removed first");
}

#[tokio::test]
async fn p17_too_many_open_decisions_are_refused_not_kept() {
    let (_guard, mut config) = temp_config();
    config.open_max = 3;
    let log = Log::open(config).unwrap();
    let mut open = Vec::new();
    for _ in 0..3 {
        let mut record = open_record(&log, tunnel("github.com"));
        let _receipt = record.record_decision(verdict("allowed")).await.unwrap();
        open.push(record);
    }
    let mut one_more = open_record(&log, tunnel("github.com"));
    let refused = one_more.record_decision(verdict("allowed")).await;
    assert!(matches!(refused, Err(LogDown::TooManyOpen { .. })), "{refused:?}");
    assert!(log.health().ready, "it is the sandbox's own affair");
    assert_eq!(log.health().refused, 1);
    open.clear();
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while log.health().open > 0 {
        assert!(
            std::time::Instant::now() < deadline,
            "outcomes are written although no caller waits for them"
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let _receipt = one_more.record_decision(verdict("allowed")).await.unwrap();
}

#[tokio::test]
async fn files_are_for_owner_and_group_only() {
    use std::os::unix::fs::PermissionsExt;
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Arc::new(Log::open(config).unwrap());
    record_attempt(&log, "github.com").await;
    log.close();
    let mode = |name: &str| dir.join(name).metadata().unwrap().permissions().mode() & 0o777;
    for path in files(&dir) {
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o640);
    }
    assert_eq!(mode("checkpoint.key"), 0o600);
    assert_eq!(mode("access.checkpoints"), 0o640);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn p7_closing_under_load_loses_nothing_uncounted() {
    for round in 0..20 {
        let (_guard, config) = temp_config();
        let dir = config.dir.clone();
        let log = Log::open(config).unwrap();
        let load = |log: Log| async move {
            loop {
                let mut record = open_record(&log, tunnel("github.com"));
                if record.record_decision(verdict("allowed")).await.is_err() {
                    return;
                }
                record.close(completed_outcome());
            }
        };
        let tasks: Vec<_> = (0..8).map(|_| tokio::spawn(load(log.clone()))).collect();
        tokio::time::sleep(Duration::from_millis(round)).await;
        let closing = log.clone();
        tokio::task::spawn_blocking(move || closing.close()).await.unwrap();
        for task in tasks {
            task.await.unwrap();
        }
        let records = records(&dir);
        let count = |wanted| records.iter().filter(|r| stage(r) == wanted).count() as u64;
        let missing = count("decision") - count("outcome");
        assert_eq!(missing, log.health().lost, "round {round}");
    }
}

#[tokio::test]
async fn p7_after_closing_everything_is_refused() {
    let (_guard, config) = temp_config();
    let log = Log::open(config).unwrap();
    log.close();
    let refused = open_record(&log, tunnel("github.com")).record_decision(verdict("allowed")).await;
    assert!(matches!(refused, Err(LogDown::Closed)), "{refused:?}");
    assert_eq!(log.health().refused, 1);
    assert!(!log.health().ready);
}

#[test]
fn a_directory_has_one_writer() {
    let (_guard, config) = temp_config();
    let _log = Log::open(config.clone()).unwrap();
    let error = Log::open(config).unwrap_err();
    assert!(format!("{:#}", error_chain(&error)).contains("another process"), "{error:?}");
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
