//! The context of the demo: the fake internet, the proxy between it and two sandboxes, and the log.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use audit::view::for_each_line;
use certs::identity::LocalIssuer;
use certs::{AuthorityOptions, CertificateAuthority, UnixTime, bundle};
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::fake_internet::{FakeInternet, ObservedConnection};
use super::files::{DemoFiles, POLICY_A, SANDBOX_A, SANDBOX_B};
use super::report::{StepFailure, StepReport, ensure};
use super::sandbox::{DemoSandbox, PreparedSandbox};
use jail::{TRUST_DIR, unshare_network};
use proxy::admin::status::AdminState;
use proxy::app::{App, AppOverrides};
use proxy::policy::source::PolicySource;

/// Longest wait for an expected event.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);
/// Polling interval for state that has no notification.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Everything a step can use.
pub(super) struct DemoContext {
    pub(super) a: DemoSandbox,
    pub(super) b: DemoSandbox,
    pub(super) internet: FakeInternet,
    pub(super) issuer: LocalIssuer,
    state: Arc<AdminState>,
    stop: watch::Sender<bool>,
    /// `None` once stopped.
    serving: Option<JoinHandle<anyhow::Result<()>>>,
    runtime: Runtime,
    files: DemoFiles,
    baseline: StepBaseline,
}

/// Position in the log and in the observed traffic when a step began.
#[derive(Clone, Copy, Debug, Default)]
struct StepBaseline {
    sequence: u64,
    connections: usize,
    queries: usize,
}

/// Matches a record; empty members match anything.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RecordQuery<'a> {
    pub(super) sandbox: &'a str,
    pub(super) stage: &'a str,
    pub(super) reason: &'a str,
    pub(super) host: &'a str,
    pub(super) event: &'a str,
    /// Zero matches any class.
    pub(super) class: u64,
}

impl DemoContext {
    /// Sets everything up. This process must still be single-threaded, because creating a jail forks.
    pub(super) fn set_up() -> anyhow::Result<Self> {
        let files = DemoFiles::new()?;
        unshare_network()?;
        let hidden = files.path("");
        let (a, b) =
            (PreparedSandbox::create(SANDBOX_A, &hidden)?, PreparedSandbox::create(SANDBOX_B, &hidden)?);
        crate::serve::init_tracing("off");
        drop(rustls::crypto::CryptoProvider::install_default(certs::crypto_provider().as_ref().clone()));
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        remove_on_signal(&runtime, &hidden)?;
        let internet = runtime.block_on(FakeInternet::start())?;
        let issuer = files.write(&internet.root, &[(SANDBOX_A, &a.arrivals), (SANDBOX_B, &b.arrivals)])?;
        let authority = CertificateAuthority::in_memory(&AuthorityOptions::default(), UnixTime::now())?;
        let trust = bundle::contents(TRUST_DIR.as_ref(), &authority, &[])?;
        let (stop, stopped) = watch::channel(false);
        let overrides = AppOverrides { authority: Some(Arc::new(authority)), witness: None };
        let entered = runtime.enter();
        let app = App::from(PolicySource::ConfigFile(files.config_path()), overrides, stopped)?;
        let state = app.state();
        let serving = runtime.spawn(app.run());
        drop(entered);
        wait_ready(&state, &serving)?;
        let serving = Some(serving);
        let (a, b) = (a.start_agent(&trust)?, b.start_agent(&trust)?);
        let baseline = StepBaseline::default();
        Ok(DemoContext { a, b, internet, issuer, state, stop, serving, runtime, files, baseline })
    }

    /// Starts a step: only what happens from here on counts for it.
    pub(super) fn begin_step(&mut self) {
        self.baseline = StepBaseline {
            sequence: self.read_records().last().map_or(0, sequence),
            connections: self.internet.connections_since(0).len(),
            queries: self.internet.queries_since(0).len(),
        };
    }

    /// Stops the proxy, which closes and signs its log.
    pub(super) fn stop(&mut self) -> anyhow::Result<()> {
        let Some(serving) = self.serving.take() else { return Ok(()) };
        self.stop.send_replace(true);
        self.runtime.block_on(serving).context("the proxy panicked")?
    }

    /// Ends everything; with `keep`, returns the directory of the files.
    pub(super) fn finish(mut self, keep: bool) -> anyhow::Result<Option<PathBuf>> {
        let stopped = self.stop();
        let DemoContext { a, b, files, .. } = self;
        drop((a, b));
        let kept = keep.then(|| files.persist());
        stopped.map(|()| kept)
    }

    /// Connections that reached the fake internet since the step began.
    pub(super) fn new_connections(&self) -> Vec<ObservedConnection> {
        self.internet.connections_since(self.baseline.connections)
    }

    /// Names queried at the fake internet's resolver since the step began.
    pub(super) fn new_queries(&self) -> Vec<String> {
        self.internet.queries_since(self.baseline.queries)
    }

    pub(super) fn expect_no_traffic(&self) -> Result<(), StepFailure> {
        let arrived = self.new_connections();
        ensure(arrived.is_empty(), format!("unexpected connections: {arrived:?}"))
    }

    /// Waits for a record of this step and adds it to the report.
    pub(super) fn expect_record(
        &self,
        wanted: RecordQuery<'_>,
        report: &mut StepReport,
    ) -> Result<Value, StepFailure> {
        let since = self.baseline.sequence;
        let found = poll_until(|| {
            self.read_records().into_iter().find(|record| sequence(record) > since && wanted.matches(record))
        });
        let Some(record) = found else {
            return Err(StepFailure(format!("no matching record: {wanted:?}")));
        };
        report.note_record(&record);
        Ok(record)
    }

    /// Every record so far.
    fn read_records(&self) -> Vec<Value> {
        let mut records = Vec::new();
        for (_, segment) in audit::list_segments(&self.log_dir()).unwrap_or_default() {
            let each = |line: &[u8]| records.extend(serde_json::from_slice::<Value>(line));
            drop(for_each_line(&segment, each)); // the caller polls
        }
        records
    }

    pub(super) fn log_dir(&self) -> PathBuf {
        self.files.path("log")
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.files.path(name)
    }

    pub(super) fn generation(&self) -> u64 {
        self.state.rules.load().generation()
    }

    /// Edits the first sandbox's policy on disk; the proxy must notice by itself.
    pub(super) fn edit_policy(&self, text: &str) -> anyhow::Result<()> {
        let path = self.path("policies/agent-a.toml");
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Restores the policy and waits until it is in force.
    pub(super) fn restore_policy(&self) -> anyhow::Result<()> {
        self.edit_policy(POLICY_A)?;
        let good = poll_until(|| {
            let last = self.state.reload();
            last.is_ok().then_some(())
        });
        good.context("the restored policy did not take effect")
    }

    /// Runs this binary as an operator would.
    pub(super) fn run_cli(&self, words: &[&str]) -> anyhow::Result<Output> {
        let binary = std::env::current_exe()?;
        Command::new(binary).args(words).output().context("cannot run this binary")
    }

    pub(super) fn admin_socket(&self) -> PathBuf {
        self.log_dir().join("admin.sock")
    }
}

impl RecordQuery<'_> {
    fn matches(&self, record: &Value) -> bool {
        let same = |wanted: &str, pointers: &[&str]| {
            let value = pointers.iter().find_map(|pointer| record.pointer(pointer)?.as_str());
            wanted.is_empty() || value == Some(wanted)
        };
        let hosts =
            ["/http_request/url/hostname", "/dst_endpoint/hostname", "/query/hostname", "/dst_endpoint/ip"];
        let class = record.pointer("/class_uid").and_then(Value::as_u64);
        (self.class == 0 || class == Some(self.class))
            && same(self.sandbox, &["/src_endpoint/uid", "/actor/app_uid"])
            && same(self.stage, &["/unmapped/sandbar/stage"])
            && same(self.event, &["/unmapped/sandbar/event"])
            && same(self.reason, &["/status_detail"])
            && same(self.host, &hosts)
    }
}

/// Removes the files when a signal ends the demo. The jails end with this process.
fn remove_on_signal(runtime: &Runtime, dir: &Path) -> anyhow::Result<()> {
    let _entered = runtime.enter();
    let dir = dir.to_owned();
    for kind in [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::terminate()] {
        let (mut received, dir) = (signal(kind)?, dir.clone());
        runtime.spawn(async move {
            received.recv().await;
            drop(std::fs::remove_dir_all(&dir)); // nothing to report to while exiting
            std::process::exit(128 + kind.as_raw_value());
        });
    }
    Ok(())
}

/// Polls until `poll` returns something, or until the timeout.
pub(super) fn poll_until<T>(mut poll: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + STEP_TIMEOUT;
    loop {
        if let Some(found) = poll() {
            return Some(found);
        }
        if Instant::now() > end {
            return None;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Returns once the proxy is ready, that is, once its self-test has seen a refusal.
fn wait_ready(state: &AdminState, serving: &JoinHandle<anyhow::Result<()>>) -> anyhow::Result<()> {
    let ready = poll_until(|| {
        let done = state.ready.load(Ordering::Acquire) || serving.is_finished();
        done.then_some(())
    });
    if ready.is_none() || serving.is_finished() {
        bail!("the proxy did not become ready");
    }
    Ok(())
}

fn sequence(record: &Value) -> u64 {
    record.pointer("/metadata/sequence").and_then(Value::as_u64).unwrap_or_default()
}

/// The path as a command line argument.
pub(super) fn path_text(path: &Path) -> String {
    path.display().to_string()
}
