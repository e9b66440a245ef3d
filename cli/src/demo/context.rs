//! The stage of the story: the world, the proxy between it and two sandboxes, and what was seen of it all.

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

/// Longest wait for anything that must happen.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);
/// How often something is looked at of which nobody tells.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Everything that a step may use.
pub(super) struct DemoContext {
    pub(super) a: DemoSandbox,
    pub(super) b: DemoSandbox,
    pub(super) world: FakeInternet,
    pub(super) issuer: LocalIssuer,
    state: Arc<AdminState>,
    stop: watch::Sender<bool>,
    /// None once it has ended.
    serving: Option<JoinHandle<anyhow::Result<()>>>,
    runtime: Runtime,
    files: DemoFiles,
    mark: StepBaseline,
}

/// How much of everything there was when a step began.
#[derive(Clone, Copy, Debug, Default)]
struct StepBaseline {
    sequence: u64,
    arrivals: usize,
    asked: usize,
}

/// A record that a step must have caused.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RecordQuery<'a> {
    pub(super) sandbox: &'a str,
    pub(super) stage: &'a str,
    pub(super) reason: &'a str,
    pub(super) host: &'a str,
    pub(super) event: &'a str,
    /// Any where it is zero.
    pub(super) class: u64,
}

impl DemoContext {
    /// Sets everything up. This process must have one thread still.
    pub(super) fn set_up() -> anyhow::Result<Self> {
        let files = DemoFiles::new()?;
        unshare_network()?;
        let hidden = files.path("");
        let (a, b) = (
            PreparedSandbox::create(SANDBOX_A, &hidden)?,
            PreparedSandbox::create(SANDBOX_B, &hidden)?,
        );
        crate::serve::init_tracing("off");
        drop(rustls::crypto::CryptoProvider::install_default(
            certs::crypto_provider().as_ref().clone(),
        ));
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        remove_on_signal(&runtime, &hidden)?;
        let world = runtime.block_on(FakeInternet::start())?;
        let issuer =
            files.write(&world.root, &[(SANDBOX_A, &a.arrivals), (SANDBOX_B, &b.arrivals)])?;
        let authority =
            CertificateAuthority::in_memory(&AuthorityOptions::default(), UnixTime::now())?;
        let trust = bundle::contents(TRUST_DIR.as_ref(), &authority, &[])?;
        let (stop, stopped) = watch::channel(false);
        let given = AppOverrides { authority: Some(Arc::new(authority)), witness: None };
        let entered = runtime.enter();
        let app = App::from(PolicySource::ConfigFile(files.config_path()), given, stopped)?;
        let state = app.state();
        let serving = runtime.spawn(app.run());
        drop(entered);
        wait_ready(&state, &serving)?;
        let serving = Some(serving);
        let (a, b) = (a.start_agent(&trust)?, b.start_agent(&trust)?);
        let mark = StepBaseline::default();
        Ok(DemoContext { a, b, world, issuer, state, stop, serving, runtime, files, mark })
    }

    /// From here on a step is judged.
    pub(super) fn begin_step(&mut self) {
        self.mark = StepBaseline {
            sequence: self.read_records().last().map_or(0, sequence),
            arrivals: self.world.connections_since(0).len(),
            asked: self.world.queries_since(0).len(),
        };
    }

    /// Stops the proxy, which closes its log.
    pub(super) fn stop(&mut self) -> anyhow::Result<()> {
        let Some(serving) = self.serving.take() else { return Ok(()) };
        self.stop.send_replace(true);
        self.runtime.block_on(serving).context("the proxy broke")?
    }

    /// Ends everything; where its files are, if they shall be kept.
    pub(super) fn finish(mut self, keep: bool) -> anyhow::Result<Option<PathBuf>> {
        let stopped = self.stop();
        let DemoContext { a, b, files, .. } = self;
        drop((a, b));
        let kept = keep.then(|| files.persist());
        stopped.map(|()| kept)
    }

    /// What arrived in the world since the step began.
    pub(super) fn new_connections(&self) -> Vec<ObservedConnection> {
        self.world.connections_since(self.mark.arrivals)
    }

    /// The names that left since the step began.
    pub(super) fn new_queries(&self) -> Vec<String> {
        self.world.queries_since(self.mark.asked)
    }

    pub(super) fn expect_no_traffic(&self) -> Result<(), StepFailure> {
        let arrived = self.new_connections();
        ensure(arrived.is_empty(), format!("something arrived: {arrived:?}"))
    }

    /// Waits for a record of this step, and tells it.
    pub(super) fn expect_record(
        &self,
        wanted: RecordQuery<'_>,
        told: &mut StepReport,
    ) -> Result<Value, StepFailure> {
        let since = self.mark.sequence;
        let found = poll_until(|| {
            self.read_records()
                .into_iter()
                .find(|record| sequence(record) > since && wanted.matches(record))
        });
        let Some(record) = found else {
            return Err(StepFailure(format!("there is no record of it: {wanted:?}")));
        };
        told.note_record(&record);
        Ok(record)
    }

    /// Every record so far.
    fn read_records(&self) -> Vec<Value> {
        let mut records = Vec::new();
        for (_, segment) in audit::list_segments(&self.log_dir()).unwrap_or_default() {
            let each = |line: &[u8]| records.extend(serde_json::from_slice::<Value>(line));
            drop(for_each_line(&segment, each)); // what is not there yet is looked for again
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

    /// Edits the first sandbox's policy on disk; nobody is told but by the disk.
    pub(super) fn edit_policy(&self, text: &str) -> anyhow::Result<()> {
        let path = self.path("policies/agent-a.toml");
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Puts the policy back as it was, and waits until it is in force.
    pub(super) fn restore_policy(&self) -> anyhow::Result<()> {
        self.edit_policy(POLICY_A)?;
        let good = poll_until(|| {
            let last = self.state.reload();
            last.is_ok().then_some(())
        });
        good.context("the policy of before is not taken")
    }

    /// Runs this program as an operator would.
    pub(super) fn run_cli(&self, words: &[&str]) -> anyhow::Result<Output> {
        let own = std::env::current_exe()?;
        Command::new(own).args(words).output().context("cannot run this program")
    }

    pub(super) fn admin_socket(&self) -> PathBuf {
        self.log_dir().join("admin.sock")
    }
}

impl RecordQuery<'_> {
    fn matches(&self, record: &Value) -> bool {
        let same = |wanted: &str, places: &[&str]| {
            let found = places.iter().find_map(|place| record.pointer(place)?.as_str());
            wanted.is_empty() || found == Some(wanted)
        };
        let hosts = [
            "/http_request/url/hostname",
            "/dst_endpoint/hostname",
            "/query/hostname",
            "/dst_endpoint/ip",
        ];
        let class = record.pointer("/class_uid").and_then(Value::as_u64);
        (self.class == 0 || class == Some(self.class))
            && same(self.sandbox, &["/src_endpoint/uid", "/actor/app_uid"])
            && same(self.stage, &["/unmapped/sandbar/stage"])
            && same(self.event, &["/unmapped/sandbar/event"])
            && same(self.reason, &["/status_detail"])
            && same(self.host, &hosts)
    }
}

/// Removes the files when somebody has seen enough; the jails end with this process anyway.
fn remove_on_signal(runtime: &Runtime, dir: &Path) -> anyhow::Result<()> {
    let _entered = runtime.enter();
    let dir = dir.to_owned();
    for kind in [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::terminate()] {
        let (mut told, dir) = (signal(kind)?, dir.clone());
        runtime.spawn(async move {
            told.recv().await;
            drop(std::fs::remove_dir_all(&dir)); // there is nobody to tell
            std::process::exit(128 + kind.as_raw_value());
        });
    }
    Ok(())
}

/// Looks again and again until there is something, or it is too late.
pub(super) fn poll_until<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + STEP_TIMEOUT;
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if Instant::now() > end {
            return None;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Returns once the proxy has seen itself refuse something.
fn wait_ready(state: &AdminState, serving: &JoinHandle<anyhow::Result<()>>) -> anyhow::Result<()> {
    let ready = poll_until(|| {
        let done = state.ready.load(Ordering::Acquire) || serving.is_finished();
        done.then_some(())
    });
    if ready.is_none() || serving.is_finished() {
        bail!("the proxy does not begin");
    }
    Ok(())
}

fn sequence(record: &Value) -> u64 {
    record.pointer("/metadata/sequence").and_then(Value::as_u64).unwrap_or_default()
}

/// A path for a command line.
pub(super) fn path_text(path: &Path) -> String {
    path.display().to_string()
}
