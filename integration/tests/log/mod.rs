//! The access log as operators, auditors and a SIEM meet it.

mod command;
mod rsyslog;

use std::path::Path;

use audit::{
    AttemptOutcome, DecisionDetails, DetectionFinding, Ending, Environment, FindingSeverity, HttpScheme, Log,
    LogConfig, RecordedArrival, RecordedChannel, RecordedConnection, RecordedFacts, RecordedRequest,
    RecordedSandbox, SandboxId, StableCode, TenantId, Transport,
};
use integration::sandbar;
use tokio::runtime::{Builder, Runtime};

/// Writes a log as the proxy will.
struct TestLog {
    log: Log,
    runtime: Runtime,
}

impl TestLog {
    fn new(dir: &Path) -> Self {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        Self { log: Log::open(LogConfig::new(dir)).unwrap(), runtime }
    }

    fn open_record(&self, sandbox: &str) -> audit::OpenRecord {
        let channel = RecordedChannel { kind: StableCode("dedicated"), detail: None };
        let (transport, source) = (Transport::TCP, Some("10.0.0.7:40000".parse().unwrap()));
        let mut record =
            self.log.open_record(RecordedArrival { channel, transport, source, original_dst: None });
        record.set_sandbox(RecordedSandbox {
            sandbox: SandboxId(sandbox.into()),
            tenant: TenantId("acme".into()),
            environment: Environment("staging".into()),
        });
        record
    }

    fn write_allowed(&self, sandbox: &str, host: &str) {
        let mut record = self.open_record(sandbox);
        let request = RecordedRequest::new(b"GET", HttpScheme::Https, host.into(), 443, b"/v1/x?key=hunter2");
        record.set_facts(RecordedFacts::Request(request));
        let receipt = self.runtime.block_on(record.record_decision(verdict("allowed", Some("model"))));
        assert!(receipt.unwrap().sequence() > 0);
        record.byte_count().add_sent(100);
        record.byte_count().add_received(2000);
        record.close(AttemptOutcome { status: Some(200), ..AttemptOutcome::new(Ending::Completed) });
    }

    /// Allowed, and refused by the address rules after that.
    fn write_overruled(&self, sandbox: &str, host: &str) {
        let mut record = self.open_record(sandbox);
        record.set_facts(tunnel_facts(host));
        let receipt = self.runtime.block_on(record.record_decision(verdict("allowed", Some("model"))));
        assert!(receipt.unwrap().sequence() > 0);
        record.close(AttemptOutcome::new(Ending::Refused(StableCode("private_address"))));
    }

    fn write_finding(&self, sandbox: &str, host: &str) {
        let mut record = self.open_record(sandbox);
        record.set_facts(tunnel_facts(host));
        let finding = DetectionFinding {
            code: audit::FindingCode::IdentityMismatch,
            title: "the signed identity is another sandbox's".into(),
            severity: FindingSeverity::High,
            message: None,
            score: None,
            features: Vec::new(),
        };
        self.runtime.block_on(record.record_finding(&finding)).unwrap();
    }

    fn write_denied(&self, sandbox: &str, host: &str) {
        let mut record = self.open_record(sandbox);
        record.set_facts(tunnel_facts(host));
        self.runtime.block_on(record.record_refusal(verdict("not_listed", None))).unwrap();
    }
}

fn tunnel_facts(host: &str) -> RecordedFacts {
    let host = Some(host.into());
    RecordedFacts::Connection(RecordedConnection { host, port: Some(443), tls: None })
}

fn verdict(reason: &'static str, rule: Option<&str>) -> DecisionDetails {
    let mut verdict = DecisionDetails::new(StableCode(reason));
    verdict.rule = rule.map(Into::into);
    verdict
}
