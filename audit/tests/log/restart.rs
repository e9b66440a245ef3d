//! A restart continues the chain in whatever state it finds the log, and closes open decisions.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::mem;

use audit::verify::LogIntegrity;
use audit::{Log, OpenError};
use serde_json::Value;

use crate::support::*;

/// Leaves decisions without an outcome, as a killed process does.
async fn leave_open(log: &Log) -> Vec<String> {
    let mut ids = Vec::new();
    let http = audit::RecordedFacts::Request(request("/v1/x"));
    for facts in [tunnel("github.com"), http, query(), memory()] {
        let mut record = open_record(log, facts);
        let _receipt = record.record_decision(verdict("allowed")).await.unwrap();
        ids.push(record.id());
        mem::forget(record);
    }
    ids
}

fn events(records: &[Value]) -> Vec<&str> {
    records.iter().filter_map(|record| record["unmapped"]["sandbar"]["event"].as_str()).collect()
}

#[tokio::test]
async fn decisions_left_open_are_closed_as_unknown_even_across_rotations() {
    for rotations in [0, 3] {
        let (_guard, config) = temp_config();
        let dir = config.dir.clone();
        let log = Log::open(config.clone()).unwrap();
        let ids = leave_open(&log).await;
        for _ in 0..rotations {
            log.reopen().unwrap();
        }
        log.close();
        let log = Log::open(config.clone()).unwrap();
        log.close();
        for id in &ids {
            let seen = attempt_records(&dir, id);
            assert_eq!(seen.iter().map(stage).collect::<Vec<_>>(), ["decision", "outcome"], "{rotations}");
            assert_eq!(seen[1]["unmapped"]["sandbar"]["ending"], "unknown");
            assert_eq!(seen[1]["class_uid"], seen[0]["class_uid"]);
            assert_eq!(seen[1]["src_endpoint"]["uid"], "build-7");
            assert_eq!(seen[1]["dst_endpoint"]["hostname"], seen[0]["dst_endpoint"]["hostname"]);
            assert_eq!(seen[1]["metadata"]["tenant_uid"], "acme");
            for guess in ["duration", "traffic", "connection_info", "tls"] {
                assert!(seen[1].get(guess).is_none(), "{guess} is not known: {}", seen[1]);
            }
            assert_eq!(seen[1]["activity_id"], 0);
            assert!(seen[1]["http_request"].get("url").is_none());
        }
        let before = lines(&dir).len();
        drop(Log::open(config).unwrap());
        let after = &records(&dir)[before..];
        assert!(after.iter().all(|record| stage(record) == "lifecycle"), "closed once, not twice");
        assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Intact);
    }
}

#[tokio::test]
async fn a_restart_continues_in_the_same_segment() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    for _ in 0..3 {
        let log = Log::open(config.clone()).unwrap();
        record_attempt(&log, "github.com").await;
        log.close();
    }
    assert_eq!(files(&dir).len(), 1);
    assert_eq!(events(&records(&dir)).iter().filter(|event| **event == "log_started").count(), 3);
    assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Intact);
}

#[tokio::test]
async fn p8_a_torn_last_line_is_kept_and_named() {
    for fragment in [&b"{"[..], b"{\"time\":17", &[0; 100_000]] {
        let (_guard, config) = temp_config();
        let dir = config.dir.clone();
        let log = Log::open(config.clone()).unwrap();
        record_attempt(&log, "github.com").await;
        log.close();
        let torn = files(&dir).pop().unwrap();
        OpenOptions::new().append(true).open(&torn).unwrap().write_all(fragment).unwrap();
        let length = torn.metadata().unwrap().len();
        assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Incomplete);

        let log = Log::open(config).unwrap();
        record_attempt(&log, "github.com").await;
        log.close();
        assert_eq!(torn.metadata().unwrap().len(), length, "the torn line stays");
        let newest = fs::read_to_string(files(&dir).pop().unwrap()).unwrap();
        let opening: Value = serde_json::from_str(newest.lines().next().unwrap()).unwrap();
        let segment = &opening["unmapped"]["sandbar"]["segment"];
        assert_eq!(segment["torn"]["bytes"], fragment.len());
        assert_eq!(segment["after"], torn.file_name().unwrap().to_str().unwrap());
        assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Intact);

        fs::write(&torn, &fs::read(&torn).unwrap()[..length as usize - 1]).unwrap();
        assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Changed, "the torn line is covered too");
    }
}

#[tokio::test]
async fn a_segment_whose_making_was_cut_short_is_made_again() {
    for content in [&b""[..], b"{\"time\":1"] {
        let (_guard, config) = temp_config();
        let dir = config.dir.clone();
        let log = Log::open(config.clone()).unwrap();
        record_attempt(&log, "github.com").await;
        log.close();
        let next = log.head().sequence + 1;
        fs::write(dir.join(format!("access-{next:020}.jsonl")), content).unwrap();
        let log = Log::open(config).unwrap();
        record_attempt(&log, "github.com").await;
        log.close();
        assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Intact);
        let aside = dir.join(format!("access-{next:020}.jsonl.torn"));
        assert_eq!(aside.exists(), !content.is_empty(), "its content is preserved");
        let asides = records(&dir).into_iter();
        let asides = asides.map(|mut record| record["unmapped"]["sandbar"]["aside"].take());
        let bytes: Vec<_> = asides.filter_map(|aside| aside["bytes"].as_u64()).collect();
        assert_eq!(bytes.into_iter().sum::<u64>(), content.len() as u64);
    }
}

#[tokio::test]
async fn p8_a_changed_tail_prevents_the_start() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config.clone()).unwrap();
    record_attempt(&log, "github.com").await;
    drop(log);
    let path = files(&dir).pop().unwrap();
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("github.com", "gitlab.com")).unwrap();
    let error = Log::open(config).unwrap_err();
    assert!(matches!(&error, OpenError::Tail { line: 3, .. }), "{error}");
}

#[tokio::test]
async fn p8_a_tail_cut_off_before_a_restart_is_recorded_at_once() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config.clone()).unwrap();
    record_attempt(&log, "github.com").await;
    drop(log);
    let path = files(&dir).pop().unwrap();
    let text = fs::read_to_string(&path).unwrap();
    let kept: String = text.lines().take(3).map(|line| format!("{line}\n")).collect();
    fs::write(&path, kept).unwrap();
    drop(Log::open(config).unwrap());
    assert!(events(&records(&dir)).contains(&"log_behind_checkpoint"));
    assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Changed, "the old note never matches again");
}

#[tokio::test]
async fn p8_a_note_torn_by_a_crash_spoils_no_other() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let notes = dir.join(audit::checkpoint::FILE);
    for _ in 0..2 {
        let log = Log::open(config.clone()).unwrap();
        record_attempt(&log, "github.com").await;
        log.close();
        drop(log);
        let text = fs::read(&notes).unwrap();
        fs::write(&notes, &text[..text.len() - 40]).unwrap();
    }
    let log = Log::open(config).unwrap();
    log.close();
    let report = verify_dir(&dir);
    assert_eq!(report.integrity(), LogIntegrity::Intact, "{:?} {:?}", report.faults, report.gaps);
    assert_eq!(report.attested, report.last.map(|last| last.sequence));
}

#[tokio::test]
async fn a_key_may_be_lost_or_replaced() {
    for content in [Some(""), Some("PRIVATE+KEY+half"), None] {
        let (_guard, config) = temp_config();
        let dir = config.dir.clone();
        let key = dir.join("checkpoint.key");
        let log = Log::open(config.clone()).unwrap();
        record_attempt(&log, "github.com").await;
        drop(log);
        if let Some(content) = content {
            fs::write(&key, content).unwrap();
            let error = Log::open(config.clone()).unwrap_err();
            let cause = std::error::Error::source(&error).unwrap().to_string();
            assert!(cause.contains("move it away"), "{cause}");
        }
        fs::rename(&key, dir.join("checkpoint.key.old")).unwrap(); // as the error suggests
        let log = Log::open(config).unwrap();
        record_attempt(&log, "github.com").await;
        drop(log);
        let report = verify_dir(&dir);
        assert_eq!(report.integrity(), LogIntegrity::Intact, "{:?}", report.faults);
        assert_eq!(fs::read_to_string(dir.join("checkpoint.pub")).unwrap().lines().count(), 2);
    }
}

#[tokio::test]
async fn the_public_key_is_beside_the_log_wherever_the_secret_is() {
    use std::os::unix::fs::PermissionsExt;
    let (guard, mut config) = temp_config();
    let key = guard.path().join("elsewhere.key");
    config.key = Some(key.clone());
    drop(Log::open(config.clone()).unwrap());
    fs::remove_file(config.dir.join("checkpoint.pub")).unwrap();
    drop(Log::open(config.clone()).unwrap());
    assert_eq!(verify_dir(&config.dir).integrity(), LogIntegrity::Intact);
    fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).unwrap();
    let error = Log::open(config).unwrap_err();
    assert!(std::error::Error::source(&error).unwrap().to_string().contains("chmod 600"));
}
