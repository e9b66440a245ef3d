//! Shared by the tests: a log in a fresh directory, attempts of every class, the lines written.

use std::fs;
use std::path::{Path, PathBuf};

use audit::checkpoint::{self, CheckpointKeys, CheckpointNotes};
use audit::verify::{VerifyProgress, VerifyReport, verify};
use audit::{
    AttemptOutcome, DecisionDetails, Ending, Environment, HttpScheme, Log, LogConfig, MemoryCall,
    MemoryEffect, OpenRecord, RecordedAnswer, RecordedArrival, RecordedChannel, RecordedConnection,
    RecordedFacts, RecordedPolicy, RecordedQuery, RecordedRequest, RecordedSandbox, RecordedTls, SandboxId,
    StableCode, TenantId, Transport,
};
use serde_json::Value;
use tempfile::TempDir;

pub(crate) fn temp_config() -> (TempDir, LogConfig) {
    let dir = tempfile::tempdir().unwrap();
    let config = LogConfig::new(dir.path().join("log"));
    (dir, config)
}

pub(crate) fn arrival() -> RecordedArrival {
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

pub(crate) fn subject() -> RecordedSandbox {
    named_subject("build-7")
}

pub(crate) fn named_subject(sandbox: &str) -> RecordedSandbox {
    RecordedSandbox {
        sandbox: SandboxId(sandbox.into()),
        tenant: TenantId("acme".into()),
        environment: Environment("staging".into()),
    }
}

pub(crate) fn tunnel(host: &str) -> RecordedFacts {
    let tls = Some(RecordedTls { version: "1.3".into(), sni: Some(host.into()) });
    RecordedFacts::Connection(RecordedConnection { host: Some(host.into()), port: Some(443), tls })
}

pub(crate) fn request(target: &str) -> RecordedRequest {
    let host = "api.openai.com".into();
    let mut request = RecordedRequest::new(b"POST", HttpScheme::Https, host, 443, target.as_bytes());
    request.version = Some("2".into());
    request.user_agent = Some("python-httpx/0.28".into());
    request.length = Some(512);
    request
}

pub(crate) fn query() -> RecordedFacts {
    RecordedFacts::Query(RecordedQuery { name: "github.com".into(), kind: "AAAA".into() })
}

pub(crate) fn memory() -> RecordedFacts {
    RecordedFacts::Memory(MemoryCall {
        request: request("/v1/recall?q=secret"),
        service: "astrocyte".into(),
        operation: "recall".into(),
        effect: MemoryEffect::Read,
        banks: vec!["staging:team-a".into(), "staging:shared-1".into()],
        identity: Some("spiffe://acme.example/tenant/acme/env/staging/sandbox/build-7".into()),
        checked: StableCode("verified"),
    })
}

pub(crate) fn verdict(reason: &'static str) -> DecisionDetails {
    let mut verdict = DecisionDetails::new(StableCode(reason));
    verdict.rule = Some("source code".into());
    verdict.policy = Some(RecordedPolicy { digest: "sha256:0123456789abcdef".into(), generation: 3 });
    verdict.treatment = Some(StableCode("tunnel"));
    verdict
}

pub(crate) fn open_record(log: &Log, facts: RecordedFacts) -> OpenRecord {
    let mut record = log.open_record(arrival());
    record.set_sandbox(subject());
    record.set_facts(facts);
    record
}

pub(crate) fn completed_outcome() -> AttemptOutcome {
    AttemptOutcome::new(Ending::Completed)
}

pub(crate) fn answered_outcome() -> AttemptOutcome {
    let answer = RecordedAnswer { kind: "AAAA".into(), rdata: "2001:db8::1".into(), ttl: 60 };
    AttemptOutcome { rcode: Some(0), answers: vec![answer], ..completed_outcome() }
}

/// Makes one attempt, with decision and outcome.
pub(crate) async fn record_attempt(log: &Log, host: &str) {
    let mut record = open_record(log, tunnel(host));
    let _receipt = record.record_decision(verdict("allowed")).await.unwrap();
    record.close(completed_outcome());
}

pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    audit::list_segments(dir).unwrap().into_iter().map(|(_, path)| path).collect()
}

/// Every line of the log, unparsed.
pub(crate) fn lines(dir: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    for path in files(dir) {
        let mut add = |line: &[u8]| lines.push(String::from_utf8(line.to_vec()).unwrap());
        audit::view::for_each_line(&path, &mut add).unwrap();
    }
    lines
}

pub(crate) fn records(dir: &Path) -> Vec<Value> {
    lines(dir).iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The records of one attempt.
pub(crate) fn attempt_records(dir: &Path, id: &str) -> Vec<Value> {
    let all = records(dir).into_iter();
    all.filter(|record| record["metadata"]["correlation_uid"] == id).collect()
}

pub(crate) fn stage(record: &Value) -> &str {
    record["unmapped"]["sandbar"]["stage"].as_str().unwrap()
}

/// Verifies a directory with its checkpoints and its key.
pub(crate) fn verify_dir(dir: &Path) -> VerifyReport {
    let keys = fs::read_to_string(dir.join("checkpoint.pub")).unwrap();
    let keys = CheckpointKeys::parse(&keys).unwrap();
    let (file, mut notes) = (dir.join(checkpoint::FILE), CheckpointNotes::default());
    if file.exists() {
        checkpoint::read_notes(&file, Some(&keys), &mut notes).unwrap();
    }
    verify(&files(dir), &notes.checkpoints, &VerifyProgress::default()).unwrap()
}
