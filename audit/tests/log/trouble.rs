//! Full disk, missing directory, full queue: attempts are refused, health reports it, and the log
//! recovers on its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use audit::verify::LogIntegrity;
use audit::{AttemptOutcome, Log, LogConfig, LogDown, LogDurability};

use crate::support::*;

const DEADLINE: Duration = Duration::from_secs(10);

/// A small tmpfs, unmounted on drop.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Needs root, like the whole suite; without it the test fails and says so.
    fn mount(at: &Path, size: &str) -> Self {
        fs::create_dir_all(at).unwrap();
        let options = format!("size={size},mode=0755");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(at).status();
        assert!(mounted.unwrap().success(), "this test mounts a tmpfs, which needs root");
        Self(at.to_owned())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let status = Command::new("umount").arg("-l").arg(&self.0).status();
        assert!(status.is_ok_and(|status| status.success()), "{} stays mounted", self.0.display());
    }
}

async fn wait_until_ready(log: &Log, ready: bool) {
    let deadline = Instant::now() + DEADLINE;
    while log.health().ready != ready {
        assert!(Instant::now() < deadline, "ready is not {ready}: {:?}", log.health());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Uses up the free space.
fn fill_disk(path: &Path) {
    use std::io::Write;
    let mut file = fs::File::create(path).unwrap();
    while file.write_all(&[0; 4096]).is_ok() {}
}

/// Makes attempts until one is refused at once. Returns how many were released.
async fn record_until_refused(log: &Log) -> (u64, LogDown) {
    for released in 0.. {
        let mut record = open_record(log, tunnel("github.com"));
        match record.record_decision(verdict("allowed")).await {
            Ok(_) => record.close(completed_outcome()),
            Err(down) => {
                record.close(AttemptOutcome::new(audit::Ending::Refused(audit::StableCode("log_down"))));
                return (released, down);
            }
        }
    }
    unreachable!()
}

#[tokio::test]
async fn p16_a_full_disk_refuses_and_recovers_by_itself() {
    for durability in [LogDurability::Process, LogDurability::Disk] {
        let guard = tempfile::tempdir().unwrap();
        let disk = SmallDisk::mount(&guard.path().join("disk"), "512k");
        let ballast = disk.0.join("ballast");
        fs::write(&ballast, vec![0; 300 * 1024]).unwrap();
        let mut config = LogConfig::new(disk.0.join("log"));
        config.durability = durability;
        config.max_bytes = Some(1 << 30); // more than there is
        let dir = config.dir.clone();
        let log = Log::open(config).unwrap();

        let mut kept_open = open_record(&log, tunnel("kept.example"));
        let kept_id = kept_open.id();
        let _receipt = kept_open.record_decision(verdict("allowed")).await.unwrap();
        let mut released = 0;
        for crumbs in ["one", "two"] {
            // A last free page lets the log recover for a moment, so this one may still be accepted.
            let (some, down) = record_until_refused(&log).await;
            assert!(matches!(down, LogDown::Unwritable(_)), "{down}");
            released += some;
            fill_disk(&disk.0.join(crumbs));
        }
        wait_until_ready(&log, false).await;
        kept_open.close(completed_outcome()); // its traffic has happened: the outcome must not be lost
        for _ in 0..10 {
            let refused = open_record(&log, tunnel("github.com")).record_refusal(verdict("not_listed")).await;
            assert!(refused.is_err());
        }
        let written = count_parsable_lines(&dir);
        assert!(written >= released * 2 - 1, "every released record is in the log");

        for path in [ballast, disk.0.join("one"), disk.0.join("two")] {
            fs::remove_file(path).unwrap();
        }
        wait_until_ready(&log, true).await;
        record_attempt(&log, "after.example").await;
        log.close();
        let health = log.health();
        assert_eq!((health.lost, health.open), (0, 0), "{durability:?}");
        assert!(health.folded >= 10, "{health:?}");
        let report = verify_dir(&dir);
        assert_eq!(report.integrity(), LogIntegrity::Intact, "{:?} {:?}", report.faults, report.gaps);
        let folded: u64 = parse_records(&dir)
            .iter()
            .filter_map(|record| record["unmapped"]["sandbar"]["folded"].as_u64())
            .sum();
        assert_eq!(folded, health.folded, "attempts that were only counted are recorded as a count");
        let kept = parse_records(&dir).into_iter().filter(|r| r["metadata"]["correlation_uid"] == kept_id);
        assert_eq!(kept.count(), 2);
    }
}

/// Parses the records, skipping torn lines.
fn parse_records(dir: &Path) -> Vec<serde_json::Value> {
    lines(dir).iter().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn count_parsable_lines(dir: &Path) -> u64 {
    parse_records(dir).len() as u64
}

#[tokio::test]
async fn p16_a_removed_directory_refuses_until_it_is_back() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    record_attempt(&log, "github.com").await;
    fs::remove_dir_all(&dir).unwrap();
    wait_until_ready(&log, false).await; // noticed even without traffic
    let refused = open_record(&log, tunnel("github.com")).record_decision(verdict("allowed")).await;
    assert!(matches!(refused, Err(LogDown::Unwritable(_))), "{refused:?}");
    let health = log.health();
    assert!(!health.ready && health.trouble.unwrap().contains("removed"));
    fs::create_dir(&dir).unwrap();
    wait_until_ready(&log, true).await;
    record_attempt(&log, "github.com").await;
    log.close();
    assert_eq!(log.health().lost, 0);
    let blind = audit::verify::verify(&files(&dir), &[], &Default::default()).unwrap();
    assert_eq!(blind.integrity(), LogIntegrity::Incomplete, "the removed segment is missing");
}

#[tokio::test]
async fn p17_a_full_queue_waits_and_then_refuses() {
    let (_guard, mut config) = temp_config();
    config.queue_records = 0;
    config.patience = Duration::from_millis(20);
    let log = Log::open(config).unwrap();
    let refused = open_record(&log, tunnel("github.com")).record_decision(verdict("allowed")).await;
    assert!(matches!(refused, Err(LogDown::Full(_))), "{refused:?}");
    assert_eq!(log.health().refused, 1);
}

#[tokio::test]
async fn callers_cancelled_while_the_queue_is_full_are_counted() {
    let (_guard, mut config) = temp_config();
    config.queue_records = 0;
    let log = Log::open(config).unwrap();
    let moment = Duration::from_millis(20);
    let mut decided = open_record(&log, tunnel("github.com"));
    assert!(tokio::time::timeout(moment, decided.record_decision(verdict("allowed"))).await.is_err());
    drop(decided);
    assert_eq!(log.health().folded, 1);
    let refused = open_record(&log, tunnel("github.com")).record_refusal(verdict("not_listed"));
    assert!(tokio::time::timeout(moment, refused).await.is_err());
    assert_eq!(log.health().folded, 2);
    log.close();
    assert_eq!((log.health().open, log.health().lost), (0, 0));
}

#[test]
fn p16_a_directory_that_cannot_be_created_fails_the_start() {
    let (_guard, mut config) = temp_config();
    config.dir = PathBuf::from("/dev/null/log");
    let error = Log::open(config).unwrap_err();
    assert!(error.to_string().contains("/dev/null/log"), "{error}");
}

/// Set in the child process, which exhausts its own descriptors instead of those of other tests.
const CHILD: &str = "SANDBAR_TEST_FEW_DESCRIPTORS";

#[test]
fn p16_a_rotation_without_descriptors_recovers_when_there_are_some() {
    let this = std::env::current_exe().unwrap();
    let script = format!("ulimit -n 64; exec {this:?} --ignored --exact trouble::runs_out");
    let output = Command::new("sh").args(["-c", &script]).env(CHILD, "1").output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
}

#[tokio::test]
#[ignore = "run by p16_a_rotation_without_descriptors_recovers_when_there_are_some"]
async fn runs_out() {
    assert!(std::env::var_os(CHILD).is_some(), "exhausts the descriptors of its process");
    for spare in 0..3 {
        let (_guard, config) = temp_config();
        let dir = config.dir.clone();
        let log = Log::open(config).unwrap();
        record_attempt(&log, "github.com").await;
        let mut held = Vec::new();
        while let Ok(file) = fs::File::open("/dev/null") {
            held.push(file);
        }
        held.truncate(held.len() - spare);
        let rotated = log.reopen();
        assert_eq!(rotated.is_ok(), spare >= 1, "{spare}: {rotated:?}"); // the old segment frees one more
        drop(held);
        wait_until_ready(&log, true).await;
        record_attempt(&log, "github.com").await;
        log.close();
        assert_eq!(verify_dir(&dir).integrity(), LogIntegrity::Intact, "{spare}");
    }
}

#[tokio::test]
async fn p16_a_renamed_directory_is_noticed() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    record_attempt(&log, "github.com").await;
    let moved = dir.with_file_name("moved");
    fs::rename(&dir, &moved).unwrap();
    let mut between = open_record(&log, tunnel("between.example"));
    let between_id = between.id();
    let receipt = between.record_decision(verdict("allowed")).await;
    wait_until_ready(&log, false).await;
    assert!(log.health().trouble.unwrap().contains("moved away"));
    fs::create_dir(&dir).unwrap();
    wait_until_ready(&log, true).await;
    record_attempt(&log, "after.example").await;
    drop(between);
    log.close();
    assert!(
        lines(&dir).iter().any(|line| line.contains("after.example")),
        "the new segment is at the configured path"
    );
    if receipt.is_ok() {
        let (there, here) = (attempt_records(&moved, &between_id), attempt_records(&dir, &between_id));
        assert_eq!(there.len() + here.len(), 2, "every released record is in one of the two");
    }
    let both = [files(&moved), files(&dir)].concat();
    let report = audit::verify::verify(&both, &[], &Default::default()).unwrap();
    assert_eq!(report.integrity(), LogIntegrity::Intact, "{:?} {:?}", report.faults, report.gaps);
}

#[tokio::test]
async fn p7_no_caller_is_released_for_a_record_in_a_removed_file() {
    let (_guard, config) = temp_config();
    let dir = config.dir.clone();
    let log = Log::open(config).unwrap();
    record_attempt(&log, "github.com").await;
    for path in files(&dir) {
        fs::remove_file(path).unwrap();
    }
    let mut after = open_record(&log, tunnel("after.example"));
    if after.record_decision(verdict("allowed")).await.is_ok() {
        assert_eq!(attempt_records(&dir, &after.id()).len(), 1, "released, so it is in a file");
    }
}
