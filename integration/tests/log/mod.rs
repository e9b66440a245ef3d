//! The access log as operators, auditors and a SIEM meet it.

mod command;
mod rsyslog;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use audit::{
    Arrival, Channel, Code, Config, Connection, Ending, Environment, Facts, Log, Outcome, Request,
    SandboxId, Scheme, Subject, TenantId, Transport, Verdict,
};
use tokio::runtime::{Builder, Runtime};

/// The program under test, built once.
static SANDBAR: LazyLock<PathBuf> = LazyLock::new(|| {
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", "proxy", "--bin", "sandbar"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status();
    assert!(built.is_ok_and(|status| status.success()), "sandbar does not build");
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().join("sandbar")
});

pub(crate) fn sandbar() -> Command {
    Command::new(&*SANDBAR)
}

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

    fn deny(&self, sandbox: &str, host: &str) {
        let mut record = self.open(sandbox);
        let host = Some(host.into());
        record.facts(Facts::Connection(Connection { host, port: Some(443), tls: None }));
        let receipt = self.runtime.block_on(record.refused(verdict("not_listed", None)));
        assert!(receipt.unwrap().sequence() > 0);
    }
}

fn verdict(reason: &'static str, rule: Option<&str>) -> Verdict {
    let mut verdict = Verdict::new(Code(reason));
    verdict.rule = rule.map(Into::into);
    verdict
}
