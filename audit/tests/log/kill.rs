//! `kill -9` under load, again and again: every released record is in the log, and the chain
//! continues.

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use audit::verify::LogIntegrity;
use audit::{Log, LogConfig};

use crate::support::*;

const DIR: &str = "SANDBAR_TEST_LOG_DIR";
const ROUNDS: u64 = 12;
const DEADLINE: Duration = Duration::from_secs(20);

#[test]
fn p7_every_released_record_survives_kill_9() {
    let (_guard, config) = temp_config();
    let mut released = HashSet::new();
    for round in 0..ROUNDS {
        let (child, ids) = run_until(&config.dir, 200 + 37 * round as usize);
        drop(child);
        assert!(!ids.is_empty());
        released.extend(ids);
    }
    drop(Log::open(config.clone()).unwrap()); // the last restart closes open decisions
    let report = verify_dir(&config.dir);
    assert_eq!(report.integrity(), LogIntegrity::Intact, "{:?} {:?}", report.faults, report.gaps);
    let records = parse_records(&config.dir);
    let decided: HashSet<String> = ids(&records, "decision");
    let lost: Vec<_> = released.difference(&decided).collect();
    assert!(lost.is_empty(), "released but not in the log: {lost:?}");
    assert_eq!(decided, ids(&records, "outcome"), "every decision has an outcome");
}

fn parse_records(dir: &Path) -> Vec<serde_json::Value> {
    lines(dir).iter().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn ids(records: &[serde_json::Value], wanted: &str) -> HashSet<String> {
    let of_stage = records.iter().filter(|record| stage(record) == wanted);
    of_stage.map(|r| r["metadata"]["correlation_uid"].as_str().unwrap().to_owned()).collect()
}

/// Kills the child even if the test fails.
struct KilledChild(Child);

impl Drop for KilledChild {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Starts a child that writes, and kills it once it has printed `count` released records. Those it
/// prints before it dies count too.
fn run_until(dir: &Path, count: usize) -> (KilledChild, Vec<String>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "kill::child", "--ignored", "--nocapture"]);
    let mut child = command.env(DIR, dir).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let child = KilledChild(child);
    let deadline = Instant::now() + DEADLINE;
    let mut ids = Vec::new();
    while ids.len() < count {
        assert!(Instant::now() < deadline, "the child is too slow");
        let line = lines.next().expect("the child exited on its own").unwrap();
        ids.extend(line.strip_prefix("released ").map(str::to_owned));
    }
    let mut child = child;
    child.0.kill().unwrap();
    let printed = lines.map_while(Result::ok);
    ids.extend(printed.filter_map(|line| line.strip_prefix("released ").map(str::to_owned)));
    ids.retain(|id| id.len() == 26); // the last line may be incomplete
    (child, ids)
}

/// Not a test: the process to kill.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started and killed by p7_every_released_record_survives_kill_9"]
async fn child() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let mut config = LogConfig::new(dir);
    config.segment_bytes = 200 * 1024;
    config.checkpoint_records = 50;
    let log = Log::open(config).unwrap();
    let tasks: Vec<_> = (0..32).map(|_| tokio::spawn(run_load(log.clone()))).collect();
    for task in tasks {
        task.await.unwrap();
    }
}

async fn run_load(log: Log) {
    loop {
        let mut record = open_record(&log, tunnel("github.com"));
        let _receipt = record.record_decision(verdict("allowed")).await.unwrap();
        let released = format!("released {}\n", record.id());
        std::io::stdout().write_all(released.as_bytes()).unwrap();
        tokio::task::yield_now().await;
        record.close(completed_outcome());
    }
}
