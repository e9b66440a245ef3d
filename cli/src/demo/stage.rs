//! The stage of the story: the world, the proxy between it and two sandboxes, and what was seen of it all.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use audit::view::each_line;
use certs::identity::LocalIssuer;
use certs::{Authority, AuthorityOptions, UnixTime, bundle};
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::files::{A, B, Files, POLICY_A};
use super::sandbox::{Cell, Sandbox};
use super::told::{Misbehaved, Told, promise};
use super::world::{Arrival, World};
use jail::{TRUST, leave_network};
use proxy::admin::status::State;
use proxy::app::{App, Given};
use proxy::policy::source::Origin;

/// Longest wait for anything that must happen.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often something is looked at of which nobody tells.
const LOOK: Duration = Duration::from_millis(5);

/// Everything that a step may use.
pub(super) struct Stage {
    pub(super) a: Sandbox,
    pub(super) b: Sandbox,
    pub(super) world: World,
    pub(super) issuer: LocalIssuer,
    state: Arc<State>,
    stop: watch::Sender<bool>,
    /// None once it has ended.
    serving: Option<JoinHandle<anyhow::Result<()>>>,
    runtime: Runtime,
    files: Files,
    mark: Mark,
}

/// How much of everything there was when a step began.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    sequence: u64,
    arrivals: usize,
    asked: usize,
}

/// A record that a step must have caused.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted<'a> {
    pub(super) sandbox: &'a str,
    pub(super) stage: &'a str,
    pub(super) reason: &'a str,
    pub(super) host: &'a str,
    pub(super) event: &'a str,
    /// Any where it is zero.
    pub(super) class: u64,
}

impl Stage {
    /// Sets everything up. This process must have one thread still.
    pub(super) fn set() -> anyhow::Result<Self> {
        let files = Files::new()?;
        leave_network()?;
        let hidden = files.at("");
        let (a, b) = (Cell::make(A, &hidden)?, Cell::make(B, &hidden)?);
        crate::serve::tell_operator("off");
        drop(rustls::crypto::CryptoProvider::install_default(certs::provider().as_ref().clone()));
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        leave_no_trace(&runtime, &hidden)?;
        let world = runtime.block_on(World::serve())?;
        let issuer = files.write(&world.root, &[(A, &a.arrivals), (B, &b.arrivals)])?;
        let authority = Authority::in_memory(&AuthorityOptions::default(), UnixTime::now())?;
        let trust = bundle::contents(TRUST.as_ref(), &authority, &[])?;
        let (stop, stopped) = watch::channel(false);
        let given = Given { authority: Some(Arc::new(authority)), witness: None };
        let entered = runtime.enter();
        let app = App::from(Origin::Operated(files.config()), given, stopped)?;
        let state = app.state();
        let serving = runtime.spawn(app.run());
        drop(entered);
        ready(&state, &serving)?;
        let serving = Some(serving);
        let (a, b) = (a.begin(&trust)?, b.begin(&trust)?);
        let mark = Mark::default();
        Ok(Stage { a, b, world, issuer, state, stop, serving, runtime, files, mark })
    }

    /// From here on a step is judged.
    pub(super) fn begin(&mut self) {
        self.mark = Mark {
            sequence: self.records().last().map_or(0, sequence),
            arrivals: self.world.arrivals(0).len(),
            asked: self.world.asked(0).len(),
        };
    }

    /// Stops the proxy, which closes its log.
    pub(super) fn stop(&mut self) -> anyhow::Result<()> {
        let Some(serving) = self.serving.take() else { return Ok(()) };
        self.stop.send_replace(true);
        self.runtime.block_on(serving).context("the proxy broke")?
    }

    /// Ends everything; where its files are, if they shall be kept.
    pub(super) fn end(mut self, keep: bool) -> anyhow::Result<Option<PathBuf>> {
        let stopped = self.stop();
        let Stage { a, b, files, .. } = self;
        drop((a, b));
        let kept = keep.then(|| files.keep());
        stopped.map(|()| kept)
    }

    /// What arrived in the world since the step began.
    pub(super) fn arrived(&self) -> Vec<Arrival> {
        self.world.arrivals(self.mark.arrivals)
    }

    /// The names that left since the step began.
    pub(super) fn asked(&self) -> Vec<String> {
        self.world.asked(self.mark.asked)
    }

    pub(super) fn nothing_arrived(&self) -> Result<(), Misbehaved> {
        let arrived = self.arrived();
        promise(arrived.is_empty(), format!("something arrived: {arrived:?}"))
    }

    /// Waits for a record of this step, and tells it.
    pub(super) fn record(&self, wanted: Wanted<'_>, told: &mut Told) -> Result<Value, Misbehaved> {
        let since = self.mark.sequence;
        let found = until(|| {
            self.records().into_iter().find(|record| sequence(record) > since && wanted.is(record))
        });
        let Some(record) = found else {
            return Err(Misbehaved(format!("there is no record of it: {wanted:?}")));
        };
        told.record(&record);
        Ok(record)
    }

    /// Every record so far.
    fn records(&self) -> Vec<Value> {
        let mut records = Vec::new();
        for (_, segment) in audit::segments(&self.log()).unwrap_or_default() {
            let each = |line: &[u8]| records.extend(serde_json::from_slice::<Value>(line));
            drop(each_line(&segment, each)); // what is not there yet is looked for again
        }
        records
    }

    pub(super) fn log(&self) -> PathBuf {
        self.files.at("log")
    }

    pub(super) fn at(&self, name: &str) -> PathBuf {
        self.files.at(name)
    }

    pub(super) fn generation(&self) -> u64 {
        self.state.rules.load().generation()
    }

    /// Edits the first sandbox's policy on disk; nobody is told but by the disk.
    pub(super) fn edit(&self, text: &str) -> anyhow::Result<()> {
        let path = self.at("policies/agent-a.toml");
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Puts the policy back as it was, and waits until it is in force.
    pub(super) fn restore(&self) -> anyhow::Result<()> {
        self.edit(POLICY_A)?;
        let good = until(|| {
            let last = self.state.reload();
            last.is_ok().then_some(())
        });
        good.context("the policy of before is not taken")
    }

    /// Runs this program as an operator would.
    pub(super) fn operate(&self, words: &[&str]) -> anyhow::Result<Output> {
        let own = std::env::current_exe()?;
        Command::new(own).args(words).output().context("cannot run this program")
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.log().join("admin.sock")
    }
}

impl Wanted<'_> {
    fn is(&self, record: &Value) -> bool {
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
fn leave_no_trace(runtime: &Runtime, dir: &Path) -> anyhow::Result<()> {
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
pub(super) fn until<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if Instant::now() > end {
            return None;
        }
        std::thread::sleep(LOOK);
    }
}

/// Returns once the proxy has seen itself refuse something.
fn ready(state: &State, serving: &JoinHandle<anyhow::Result<()>>) -> anyhow::Result<()> {
    let ready = until(|| {
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
pub(super) fn shown(path: &Path) -> String {
    path.display().to_string()
}
