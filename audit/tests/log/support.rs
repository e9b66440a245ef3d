//! What the tests share: a log in a fresh directory, attempts of every class, the lines written.

use std::fs;
use std::path::{Path, PathBuf};

use audit::checkpoint::{self, Keys, Notes};
use audit::verify::{Progress, Report, verify};
use audit::{
    Answer, Arrival, Channel, Code, Config, Connection, Effect, Ending, Environment, Facts, Log,
    MemoryCall, OpenRecord, Outcome, Policy, Query, Request, SandboxId, Scheme, Subject, TenantId,
    Tls, Transport, Verdict,
};
use serde_json::Value;
use tempfile::TempDir;

pub(crate) fn fresh() -> (TempDir, Config) {
    let dir = tempfile::tempdir().unwrap();
    let config = Config::new(dir.path().join("log"));
    (dir, config)
}

pub(crate) fn arrival() -> Arrival {
    Arrival {
        channel: Channel { kind: Code("dedicated"), detail: Some("redirect 0.0.0.0:15001".into()) },
        transport: Transport::TCP,
        source: Some("10.0.0.7:40000".parse().unwrap()),
        aimed: Some("203.0.113.9:443".parse().unwrap()),
    }
}

pub(crate) fn subject() -> Subject {
    Subject {
        sandbox: SandboxId("build-7".into()),
        tenant: TenantId("acme".into()),
        environment: Environment("staging".into()),
    }
}

pub(crate) fn tunnel(host: &str) -> Facts {
    let tls = Some(Tls { version: "1.3".into(), sni: Some(host.into()) });
    Facts::Connection(Connection { host: Some(host.into()), port: Some(443), tls })
}

pub(crate) fn request(target: &str) -> Request {
    let host = "api.openai.com".into();
    let mut request = Request::new(b"POST", Scheme::Https, host, 443, target.as_bytes());
    request.version = Some("2".into());
    request.user_agent = Some("python-httpx/0.28".into());
    request.length = Some(512);
    request
}

pub(crate) fn query() -> Facts {
    Facts::Query(Query { name: "github.com".into(), kind: "AAAA".into() })
}

pub(crate) fn memory() -> Facts {
    Facts::Memory(MemoryCall {
        request: request("/v1/recall?q=secret"),
        service: "astrocyte".into(),
        operation: "recall".into(),
        effect: Effect::Read,
        banks: vec!["staging:team-a".into(), "staging:shared-1".into()],
        identity: Some("spiffe://acme.example/tenant/acme/env/staging/sandbox/build-7".into()),
        checked: Code("verified"),
    })
}

pub(crate) fn verdict(reason: &'static str) -> Verdict {
    let mut verdict = Verdict::new(Code(reason));
    verdict.rule = Some("source code".into());
    verdict.policy = Some(Policy { digest: "sha256:0123456789abcdef".into(), generation: 3 });
    verdict.carried = Some(Code("tunnel"));
    verdict
}

pub(crate) fn record(log: &Log, facts: Facts) -> OpenRecord {
    let mut record = log.open_record(arrival());
    record.sandbox(subject());
    record.facts(facts);
    record
}

pub(crate) fn completed() -> Outcome {
    Outcome::new(Ending::Completed)
}

pub(crate) fn answered() -> Outcome {
    let answer = Answer { kind: "AAAA".into(), rdata: "2001:db8::1".into(), ttl: 60 };
    Outcome { rcode: Some(0), answers: vec![answer], ..completed() }
}

/// Carries one attempt through, decision and outcome.
pub(crate) async fn pass(log: &Log, host: &str) {
    let mut record = record(log, tunnel(host));
    let _receipt = record.decided(verdict("allowed")).await.unwrap();
    record.close(completed());
}

pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    audit::segments(dir).unwrap().into_iter().map(|(_, path)| path).collect()
}

/// Every line of the log, as it is.
pub(crate) fn lines(dir: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    for path in files(dir) {
        lines.extend(fs::read_to_string(path).unwrap().lines().map(str::to_owned));
    }
    lines
}

pub(crate) fn records(dir: &Path) -> Vec<Value> {
    lines(dir).iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The records of one attempt.
pub(crate) fn of_attempt(dir: &Path, id: &str) -> Vec<Value> {
    let all = records(dir).into_iter();
    all.filter(|record| record["metadata"]["correlation_uid"] == id).collect()
}

pub(crate) fn stage(record: &Value) -> &str {
    record["unmapped"]["sandbar"]["stage"].as_str().unwrap()
}

/// Verifies a directory with its checkpoints and its key.
pub(crate) fn check(dir: &Path) -> Report {
    let keys = fs::read_to_string(dir.join("checkpoint.pub")).unwrap();
    let keys = Keys::parse(&keys).unwrap();
    let (file, mut notes) = (dir.join(checkpoint::FILE), Notes::default());
    if file.exists() {
        checkpoint::read(&file, Some(&keys), &mut notes).unwrap();
    }
    verify(&files(dir), &notes.checkpoints, &Progress::default()).unwrap()
}
