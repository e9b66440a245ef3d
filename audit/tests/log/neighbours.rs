//! One sandbox does not cost another its log (P20): open decisions, floods of refusals, bytes on disk.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use audit::verify::LogIntegrity;
use audit::view::Follower;
use audit::{Compression, Log, LogDown, OpenRecord, Retention};
use rules::Reason;
use rules::ids::SandboxId;
use serde_json::Value;

use crate::support::*;

fn id(name: &str) -> SandboxId {
    SandboxId::parse(name).unwrap()
}

fn open_for(log: &Log, sandbox: Option<&str>, host: &str) -> OpenRecord {
    let mut record = log.open_record(arrival());
    sandbox.into_iter().for_each(|sandbox| record.set_sandbox(named_subject(sandbox)));
    record.set_facts(tunnel(host));
    record
}

async fn allow(log: &Log, sandbox: &str) -> Result<OpenRecord, LogDown> {
    let mut record = open_for(log, Some(sandbox), "github.com");
    record.record_decision(verdict("allowed")).await.map(|_| record)
}

fn folded(record: &Value) -> u64 {
    record["unmapped"]["sandbar"]["folded"].as_u64().unwrap_or_default()
}

/// The denied attempts of a sandbox that the log accounts for.
fn denied(records: &[Value], sandbox: Option<&str>) -> u64 {
    let of = |record: &&Value| stage(record) == "denied" && record["src_endpoint"]["uid"].as_str() == sandbox;
    records.iter().filter(of).map(|record| 1 + folded(record)).sum()
}

fn size(dir: &Path) -> u64 {
    files(dir).iter().map(|path| fs::metadata(path).unwrap().len()).sum()
}

async fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn p20_open_decisions_of_one_sandbox_leave_room_for_another() {
    let (_guard, mut config) = temp_config();
    config.open_max = 40;
    let log = Log::open(config).unwrap();
    log.set_sandboxes([id("a"), id("b")]);
    let mut held = Vec::new();
    let down = loop {
        match allow(&log, "a").await {
            Ok(record) => held.push(record),
            Err(down) => break down,
        }
    };
    assert_eq!(held.len(), 30, "its share of 10, and the common 20");
    assert_eq!(down.reason(), Reason::QuotaExhausted);
    let said = down.to_string();
    for part in ["open decisions in the log", "`a`", "uses 30", "its share is 10", "`open_decisions`"] {
        assert!(said.contains(part), "{said}");
    }
    for _ in 0..10 {
        held.push(allow(&log, "b").await.unwrap());
    }
    assert_eq!(allow(&log, "b").await.unwrap_err().reason(), Reason::QuotaExhausted);
    assert!(log.health().ready);
    held.clear();
    wait_for("outcomes give their places back", || log.health().open == 0).await;
    assert!(log.usage().sandboxes.iter().all(|(_, usage)| usage.open == 0));
    drop(allow(&log, "a").await.unwrap());
}

#[tokio::test]
async fn p17_a_flood_of_refusals_is_folded_and_counted_exactly() {
    const FLOOD: u64 = 20_000;
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    log.set_sandboxes([id("a"), id("b")]);
    let seen = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&seen);
    log.subscribe(move |event| {
        counter.fetch_add(1 + event.folded, Ordering::Relaxed);
    });
    let (mut ids, started) = (Vec::new(), Instant::now());
    for round in 0..FLOOD {
        let record = open_for(&log, Some("a"), &format!("{round}.example"));
        let attempted = Some(format!("GET {round}.evil.test /x").into());
        let refused = audit::DecisionDetails { attempted, ..verdict("not_listed") };
        ids.push(record.record_refusal(refused).await.unwrap());
        open_for(&log, None, "unknown.example").post_denial(verdict("unknown_channel"));
    }
    let quiet = open_for(&log, Some("b"), "b.example").record_refusal(verdict("not_listed")).await.unwrap();
    open_for(&log, Some("a"), "other.example").post_denial(verdict("port_not_listed"));
    wait_for("summaries are written without another attempt", || {
        denied(&records(&dir), Some("a")) == FLOOD + 1 && denied(&records(&dir), None) == FLOOD
    })
    .await;
    let all = records(&dir);
    assert_eq!(seen.load(Ordering::Relaxed), 2 * FLOOD + 2, "observers see every attempt, once");
    let own = all.iter().find(|record| record["metadata"]["correlation_uid"] == quiet.as_str()).unwrap();
    assert_eq!((folded(own), &own["src_endpoint"]["uid"]), (0, &"b".into()), "a neighbour's is not folded");
    let reasons = all.iter().filter(|record| record["status_detail"] == "port_not_listed");
    assert_eq!(reasons.map(|record| 1 + folded(record)).sum::<u64>(), 1, "reasons do not mix");
    let known: std::collections::HashSet<&str> =
        all.iter().filter_map(|record| record["metadata"]["correlation_uid"].as_str()).collect();
    assert!(ids.iter().all(|id| known.contains(id.as_str())), "each id that a client got is in the log");
    let summary =
        all.iter().rfind(|record| folded(record) > 0 && record["status_detail"] == "not_listed").unwrap();
    let last = &summary["unmapped"]["sandbar"]["last"];
    assert_eq!(last["hostname"], format!("{}.example", FLOOD - 1));
    assert_eq!(last["attempted"], format!("GET {}.evil.test /x", FLOOD - 1));
    let first = summary["dst_endpoint"]["hostname"].as_str().unwrap().replace(".example", "");
    assert_eq!(summary["unmapped"]["sandbar"]["attempted"], format!("GET {first}.evil.test /x"));
    // Of each: half a megabyte at once, then 64 KiB and a summary a second.
    let most = (3 << 19) + 2 * (started.elapsed().as_secs() + 2) * (72 << 10);
    assert!(size(&dir) < most, "{} bytes for {} attempts", size(&dir), 2 * FLOOD);
    log.close();
    assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Intact);
}

#[tokio::test]
async fn p17_what_was_folded_is_written_at_the_end() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    for _ in 0..2_000 {
        drop(open_for(&log, Some("a"), "gone.example")); // ended before a decision
        open_for(&log, Some("a"), "no.example").post_denial(verdict("not_listed"));
    }
    log.close();
    let all = records(&dir);
    assert_eq!(denied(&all, Some("a")), 2_000);
    let abandoned = all.iter().filter(|record| record["unmapped"]["sandbar"]["ending"] == "abandoned");
    assert_eq!(abandoned.map(|record| 1 + folded(record)).sum::<u64>(), 2_000);
    assert!(all.len() < 600, "{}", all.len());
}

#[tokio::test]
async fn p20_a_sandbox_that_used_up_its_bytes_is_refused_and_no_other() {
    const MAX: u64 = 2 << 20;
    let (_guard, mut config) = temp_config();
    (config.max_bytes, config.segment_bytes) = (Some(MAX), 256 << 10);
    let dir = config.dir.clone();
    let log = Log::open(config.clone()).unwrap();
    log.set_sandboxes([id("a"), id("b")]);
    let (mut passed, down) = (0, loop_until_refused(&log, "a").await);
    assert_eq!(down.reason(), Reason::LogQuota, "{down}");
    assert!(down.to_string().contains("`a`"), "{down}");
    for _ in 0..1_000 {
        let refused = open_for(&log, Some("a"), "no.example").record_refusal(verdict("not_listed")).await;
        refused.unwrap();
    }
    let before = size(&dir);
    while allow(&log, "b").await.is_ok() {
        passed += 1;
    }
    assert!(passed > 50, "b has its share: {passed}");
    assert!(log.health().ready);
    assert!(size(&dir) <= MAX, "{}", size(&dir));
    assert!(before < MAX * 3 / 4, "{before}");
    let usage = log.usage();
    assert_eq!((usage.max_bytes, usage.sandboxes.len()), (MAX, 2));
    wait_for("all outcomes", || log.health().open == 0).await;
    let usage = log.usage();
    log.close();
    assert_eq!(denied(&records(&dir), Some("a")), 1_000, "folded to the bone, and exact");
    assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Intact);

    // A restart knows what is used, and age alone gives it back.
    let log = Log::open(config.clone()).unwrap();
    log.set_sandboxes([id("a"), id("b")]);
    let again = log.usage();
    for ((name, was), (_, is)) in usage.sandboxes.iter().zip(&again.sandboxes) {
        assert!(is.bytes.abs_diff(was.bytes) < was.bytes / 10, "{name}: {was:?} {is:?}");
    }
    log.close();
    for path in files(&dir) {
        let old = SystemTime::now() - Duration::from_secs(7200);
        fs::File::options().append(true).open(path).unwrap().set_modified(old).unwrap();
    }
    config.retention = Retention::Age(Duration::from_secs(3600));
    let log = Log::open(config).unwrap();
    log.set_sandboxes([id("a"), id("b")]);
    wait_for("expired segments are removed", || files(&dir).len() == 1).await;
    drop(allow(&log, "a").await.unwrap());
    log.close();
    let report = verify_dir(&dir);
    assert_eq!(report.integrity(), LogIntegrity::Intact, "{:?} {:?}", report.faults, report.gaps);
    assert!(report.first > Some(1));
}

async fn loop_until_refused(log: &Log, sandbox: &str) -> LogDown {
    loop {
        if let Err(down) = allow(log, sandbox).await {
            return down;
        }
    }
}

#[tokio::test]
async fn p20_bytes_of_departed_sandboxes_count_until_they_expire() {
    let (_guard, mut config) = temp_config();
    config.max_bytes = Some(1 << 20);
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    for job in 0..8 {
        let name = format!("job-{job}");
        log.set_sandboxes([id(&name)]);
        loop_until_refused(&log, &name).await;
    }
    assert!(size(&dir) <= 1 << 20, "{}", size(&dir));
    log.set_sandboxes([id("job-0"), id("job-9")]);
    assert!(log.usage().sandboxes.iter().any(|(id, usage)| id.as_str() == "job-0" && usage.bytes > 0));
}

#[tokio::test]
async fn p8_compressed_segments_read_and_verify_like_plain_ones() {
    let (_guard, mut config) = temp_config();
    config.compression = Compression::Zstd;
    let dir = config.dir.clone();
    let log = Log::open(config.clone()).unwrap();
    for round in 0..4 {
        for _ in 0..50 {
            drop(allow(&log, "a").await.unwrap());
        }
        record_attempt(&log, &format!("{round}.example")).await;
        log.reopen().unwrap();
    }
    let compressed = || {
        files(&dir).iter().filter(|path| path.extension().is_some_and(|extension| extension == "zst")).count()
    };
    wait_for("all closed segments but the newest are compressed", || compressed() == 3).await;
    wait_for("bytes are given back", || log.usage().bytes <= size(&dir) + (64 << 10)).await;
    log.close();
    assert_eq!(files(&dir).len(), 5);
    let report = verify_dir(&dir);
    assert_eq!(report.integrity(), LogIntegrity::Intact, "{:?} {:?}", report.faults, report.gaps);
    let mut followed = 0;
    Follower::new(&dir).poll(|_| followed += 1).unwrap();
    assert_eq!((followed, report.records), (lines(&dir).len() as u64, lines(&dir).len() as u64));
    // The log goes on after a restart, also if only compressed segments are left.
    for path in files(&dir).iter().skip(3) {
        fs::remove_file(path).unwrap();
    }
    drop(Log::open(config.clone()).unwrap());
    assert_eq!(files(&dir).len(), 4);
    // Both forms of a segment, as after a crash between two steps: the plain one counts.
    let path = files(&dir).remove(0);
    let plain = path.with_extension("");
    let mut text = String::new();
    audit::view::for_each_line(&path, |line| text += &format!("{}\n", str::from_utf8(line).unwrap()))
        .unwrap();
    fs::write(&plain, text).unwrap();
    assert_eq!(files(&dir)[0], plain);
    drop(Log::open(config).unwrap());
    // A changed byte does not pass.
    let path = files(&dir).remove(1);
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).unwrap();
    let verified = audit::verify::verify(&files(&dir), &[], &audit::verify::VerifyProgress::default());
    assert!(verified.is_err() || !verified.unwrap().faults.is_empty());
}

#[tokio::test]
async fn p17_a_flood_of_many_kinds_is_counted_too() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    let codes: Vec<&'static str> = (0..100).map(|at| &*format!("kind_{at}").leak()).collect();
    for round in 0..5_000 {
        open_for(&log, Some("a"), "no.example").post_denial(verdict(codes[round % codes.len()]));
    }
    log.close();
    let all = records(&dir);
    let counted = all.iter().filter(|record| record["unmapped"]["sandbar"]["event"] == "attempts_folded");
    assert_eq!(denied(&all, Some("a")) + counted.map(folded).sum::<u64>(), 5_000);
    assert!(all.len() < 600, "{}", all.len());
}

#[tokio::test]
async fn p17_a_flood_of_findings_is_folded_and_each_names_an_attempt_that_is_there() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    let finding = audit::DetectionFinding {
        code: audit::FindingCode::DnsTunnelSuspected,
        title: "again".into(),
        severity: audit::FindingSeverity::Medium,
        message: None,
        score: None,
        features: Vec::new(),
    };
    for _ in 0..2_000 {
        let record = open_for(&log, Some("a"), "no.example");
        record.record_finding(&finding).await.unwrap();
        record.record_refusal(verdict("not_listed")).await.unwrap();
    }
    log.close();
    let all = records(&dir);
    let findings: Vec<&Value> = all.iter().filter(|record| record["class_uid"] == 2004).collect();
    assert_eq!(findings.iter().map(|record| 1 + folded(record)).sum::<u64>(), 2_000);
    assert_eq!(denied(&all, Some("a")), 2_000);
    assert!(all.len() < 600, "{}", all.len());
    for found in findings {
        let named = found["finding_info"]["related_events"][0]["uid"].as_str().unwrap();
        assert!(attempt_records(&dir, named).iter().any(|record| stage(record) == "denied"), "{found}");
    }
}
