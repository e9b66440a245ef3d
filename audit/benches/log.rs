//! The cost of a record: throughput, wait for the receipt, CPU; and how fast a log verifies. Prints
//! one table. `cargo bench -p audit`, or a part of it with `cargo bench -p audit -- process`, `disk`
//! or `verify`.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // a bench prints, and stops on failure

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use audit::verify::{LogIntegrity, VerifyProgress, verify};
use audit::{
    AttemptOutcome, DecisionDetails, Ending, Environment, HttpScheme, Log, LogConfig, LogDurability,
    RecordedArrival, RecordedChannel, RecordedFacts, RecordedPolicy, RecordedRequest, RecordedSandbox,
    SandboxId, StableCode, TenantId, Transport,
};

const RUN: Duration = Duration::from_secs(3);
const CALLERS: [usize; 3] = [1, 16, 256];
/// Size of the log to verify.
const VERIFY_BYTES: u64 = 1 << 30;

fn main() {
    println!("durability  threads  callers   records/s   p50 us   p99 us   CPU us/record  batch");
    let wanted = |part: &str| std::env::args().skip(1).all(|arg| arg == part || arg.starts_with('-'));
    for (part, durability) in [("process", LogDurability::Process), ("disk", LogDurability::Disk)] {
        if !wanted(part) {
            continue;
        }
        for threads in [1, 2] {
            for callers in CALLERS {
                let row = measure(durability, threads, callers);
                println!("{durability:<10?}  {threads:>7}  {callers:>7}   {row}");
            }
        }
    }
    if wanted("verify") {
        measure_verify();
    }
}

fn config(dir: &Path, durability: LogDurability) -> LogConfig {
    let mut config = LogConfig::new(dir.join("log"));
    config.durability = durability;
    config
}

fn measure(durability: LogDurability, threads: usize, callers: usize) -> String {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(config(dir.path(), durability)).unwrap();
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(threads).enable_time().build().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (began, cpu) = (Instant::now(), cpu_seconds());
    let mut waits = runtime.block_on(async {
        let load = |_| tokio::spawn(run_load(log.clone(), Arc::clone(&stop)));
        let tasks: Vec<_> = (0..callers).map(load).collect();
        tokio::time::sleep(RUN).await;
        stop.store(true, Ordering::Relaxed);
        let mut waits = Vec::new();
        for task in tasks {
            waits.append(&mut task.await.unwrap());
        }
        waits
    });
    let (took, cpu) = (began.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let health = log.health();
    assert_eq!((health.lost, health.refused), (0, 0));
    waits.sort_unstable();
    let records = health.written as f64;
    format!(
        "{:>9.0} {:>8.1} {:>8.1} {:>15.2} {:>6.1}",
        records / took,
        percentile(&waits, 50),
        percentile(&waits, 99),
        cpu / records * 1e6,
        records / health.batches as f64,
    )
}

fn percentile(waits: &[u64], percent: usize) -> f64 {
    waits[(waits.len() - 1) * percent / 100] as f64 / 1000.0
}

/// Makes attempts one after the other: waits for the decision, not for the outcome.
async fn run_load(log: Log, stop: Arc<AtomicBool>) -> Vec<u64> {
    let (arrival, subject, verdict) = (arrival(), subject(), verdict());
    let mut waits = Vec::with_capacity(1 << 16);
    while !stop.load(Ordering::Relaxed) {
        let mut record = log.open_record(arrival.clone());
        record.set_sandbox(subject.clone());
        record.set_facts(RecordedFacts::Request(request()));
        let started = Instant::now();
        let _receipt = record.record_decision(verdict.clone()).await.unwrap();
        waits.push(started.elapsed().as_nanos() as u64);
        record.byte_count().add_sent(512);
        record.byte_count().add_received(2048);
        let mut outcome = AttemptOutcome::new(Ending::Completed);
        outcome.status = Some(200);
        record.close(outcome);
        // A real attempt does I/O between decision and outcome: let other tasks run.
        tokio::task::yield_now().await;
    }
    waits
}

fn arrival() -> RecordedArrival {
    RecordedArrival {
        channel: RecordedChannel {
            kind: StableCode("dedicated"),
            detail: Some("redirect 0.0.0.0:15001".into()),
        },
        transport: Transport::TCP,
        source: Some("10.0.0.7:40000".parse().unwrap()),
        original_dst: Some("203.0.113.9:443".parse().unwrap()),
    }
}

fn subject() -> RecordedSandbox {
    RecordedSandbox {
        sandbox: SandboxId("build-7".into()),
        tenant: TenantId("acme".into()),
        environment: Environment("staging".into()),
    }
}

fn request() -> RecordedRequest {
    let host = "api.openai.com".into();
    let mut request = RecordedRequest::new(b"POST", HttpScheme::Https, host, 443, b"/v1/chat/completions");
    request.version = Some("2".into());
    request.user_agent = Some("python-httpx/0.28.1".into());
    request.length = Some(512);
    request
}

fn verdict() -> DecisionDetails {
    let mut verdict = DecisionDetails::new(StableCode("allowed"));
    verdict.rule = Some("model".into());
    let digest = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
    verdict.policy = Some(RecordedPolicy { digest: digest.into(), generation: 3 });
    verdict.treatment = Some(StableCode("intercept"));
    verdict
}

/// Returns the CPU time of this process, user and system, from `stat` (in hundredths of a second).
fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    ticks as f64 / 100.0
}

fn measure_verify() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), LogDurability::Process);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let log = Log::open(config.clone()).unwrap();
    while log.health().bytes < VERIFY_BYTES {
        runtime.block_on(write_attempts(&log));
    }
    log.close();
    let files: Vec<_> = audit::list_segments(&config.dir).unwrap().into_iter().map(|(_, p)| p).collect();
    let (began, cpu) = (Instant::now(), cpu_seconds());
    let report = verify(&files, &[], &VerifyProgress::default()).unwrap();
    let (took, cpu) = (began.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    assert_eq!(report.integrity(), LogIntegrity::Intact);
    let megabytes = report.bytes as f64 / 1e6;
    println!(
        "verify: {megabytes:.0} MB, {} records of {} bytes in {took:.2} s: {:.0} MB/s, {:.0} MB per CPU second",
        report.records,
        report.bytes / report.records,
        megabytes / took,
        megabytes / cpu,
    );
}

async fn write_attempts(log: &Log) {
    for _ in 0..1000 {
        let mut record = log.open_record(arrival());
        record.set_sandbox(subject());
        record.set_facts(RecordedFacts::Request(request()));
        let _receipt = record.record_decision(verdict()).await.unwrap();
        record.close(AttemptOutcome::new(Ending::Completed));
    }
}
