//! The access log as operators, auditors and a SIEM meet it.

mod command;
mod rsyslog;

use std::path::Path;

use audit::{
    Arrival, Channel, Code, Config, Connection, Ending, Environment, Facts, Finding, Log, Outcome,
    Request, SandboxId, Scheme, Severity, Subject, TenantId, Transport, Verdict,
};
use integration::sandbar;
use tokio::runtime::{Builder, Runtime};

/// Writes a log as the proxy will.
struct Writing {
    log: Log,
    runtime: Runtime,
}

impl Writing {
    fn new(dir: &Path) -> Self {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        Self { log: Log::open(Config::new(dir)).unwrap(), runtime }
    }

    fn open(&self, sandbox: &str) -> audit::OpenRecord {
        let channel = Channel { kind: Code("dedicated"), detail: None };
        let (transport, source) = (Transport::TCP, Some("10.0.0.7:40000".parse().unwrap()));
        let mut record = self.log.open_record(Arrival { channel, transport, source, aimed: None });
        record.sandbox(Subject {
            sandbox: SandboxId(sandbox.into()),
            tenant: TenantId("acme".into()),
            environment: Environment("staging".into()),
        });
        record
    }

    fn allow(&self, sandbox: &str, host: &str) {
        let mut record = self.open(sandbox);
        let request = Request::new(b"GET", Scheme::Https, host.into(), 443, b"/v1/x?key=hunter2");
        record.facts(Facts::Request(request));
        let receipt = self.runtime.block_on(record.decided(verdict("allowed", Some("model"))));
        assert!(receipt.unwrap().sequence() > 0);
        record.meter().sent(100);
        record.meter().received(2000);
        record.close(Outcome { status: Some(200), ..Outcome::new(Ending::Completed) });
    }

    /// Allowed, and refused by the address rules after that.
    fn overrule(&self, sandbox: &str, host: &str) {
        let mut record = self.open(sandbox);
        record.facts(tunnel(host));
        let receipt = self.runtime.block_on(record.decided(verdict("allowed", Some("model"))));
        assert!(receipt.unwrap().sequence() > 0);
        record.close(Outcome::new(Ending::Refused(Code("private_address"))));
    }

    fn find(&self, sandbox: &str, host: &str) {
        let mut record = self.open(sandbox);
        record.facts(tunnel(host));
        let finding = Finding {
            code: Code("identity_mismatch"),
            title: "the signed identity is another sandbox's".into(),
            severity: Severity::High,
            message: None,
            score: None,
            features: Vec::new(),
        };
        self.runtime.block_on(record.finding(&finding)).unwrap();
    }

    fn deny(&self, sandbox: &str, host: &str) {
        let mut record = self.open(sandbox);
        record.facts(tunnel(host));
        self.runtime.block_on(record.refused(verdict("not_listed", None))).unwrap();
    }
}

fn tunnel(host: &str) -> Facts {
    let host = Some(host.into());
    Facts::Connection(Connection { host, port: Some(443), tls: None })
}

fn verdict(reason: &'static str, rule: Option<&str>) -> Verdict {
    let mut verdict = Verdict::new(Code(reason));
    verdict.rule = rule.map(Into::into);
    verdict
}
