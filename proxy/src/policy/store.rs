//! Reload: compiles the files to rules, all or nothing (P9), then rechecks every open connection and cuts those that
//! lost their permission (P10).
//!
//! A reload is atomic in three respects. The files are read until none of them is being written, so that rules do not
//! come from half a file. Everything that can fail (compiling, applying identities, the policy's own tests) happens on
//! the side, before anything changes. Then one `ArcSwap::store` replaces the whole rule set: an attempt loads it once
//! and sees either the old rules or the new ones.
//!
//! Two locks order the changes. `loading` is held over a whole load, which may take seconds for a list of a million
//! names. `timed` is held only to publish, and every change of the rules takes it: loads, grants, expiry, identities.
//! So a grant does not wait for a load, and two changes never get the same generation. A grant may therefore be
//! published between the start of a load and its end; `publish` reads grants, identities and generation again under
//! `timed`, so the load does not undo it. Lock order: `loading`, then `timed` or `last`.
//!
//! A file may be on a mount that never answers. Policies and lists are read by one thread (`loader`), state is written
//! by another (`state_files`), and only `loading` is held meanwhile: the rules in force stay, and status, metrics, the
//! end of grants and everything else on the runtime go on.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use arc_swap::ArcSwap;
use audit::{Lifecycle, LifecycleEvent, Log};
use rules::configuration::{Configuration, OnInvalid};
use rules::load::read_configuration;
use rules::policy::PolicyDigest;
use rules::policy_test::TestOutcome;
use rules::{Decision, LoadSources, RuleSet, TimedState, recompile};
use sys::file;
use sys::worker::{JobLost, Worker};
use tokio::time::sleep;

use crate::budget::ledger::Ledger;
use crate::budget::live::{LiveConnection, LiveConnections};
use crate::credential::{CredentialStore, PreparedCredentials};
use crate::policy::grants::{self, ActiveGrant, GrantRequest, GrantStore};
use crate::policy::identities::{AssignedIdentity, IdentityStore};
use crate::policy::settings::{AppliedSettings, InstanceSettings, PreparedSettings};
use crate::policy::source::PolicySource;
use crate::policy::watch::FileWatcher;
use crate::quota::Quotas;
use crate::report::diagnostics::render_plain;
use crate::report::metrics;
use crate::report::record;

/// How often to check for expired grants and lifetimes.
const CLOCK_INTERVAL: Duration = Duration::from_millis(200);
/// How long `reload --wait` waits for revoked connections to close.
const CUT_GRACE: Duration = Duration::from_secs(5);
/// Names of the threads that read policies and write state.
pub(crate) const LOADER: &str = "policy-files";
pub(crate) const STATE_FILES: &str = "state-files";
/// A file call that takes longer than this is reported as hanging.
pub(crate) const HANGING_AFTER: Duration = Duration::from_secs(2);
/// How long a caller waits for a reload or a change of stored state: less than an admin command may take.
const LOAD_WAIT: Duration = Duration::from_secs(10);
/// A file that changed within this time may still be in the middle of a write...
const SETTLE_TIME: Duration = Duration::from_millis(20);
/// ...so it is read again, this many times; then the load goes ahead anyway.
const SETTLE_RETRIES: usize = 50;
/// Retries for a missing file: some editors delete the old file before creating the new one.
const MISSING_RETRIES: usize = 3;

/// Owns the rules in force: loads, grants, identities, expiry.
pub(crate) struct PolicyStore {
    pub(crate) source: PolicySource,
    /// Applies the rest of the configuration.
    pub(crate) settings: Arc<dyn InstanceSettings>,
    pub(crate) rules: Arc<ArcSwap<RuleSet>>,
    pub(crate) identities: IdentityStore,
    pub(crate) live: Arc<LiveConnections>,
    pub(crate) log: Log,
    pub(crate) on_invalid: OnInvalid,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) quotas: Arc<Quotas>,
    pub(crate) grants: Arc<GrantStore>,
    pub(crate) credentials: Arc<CredentialStore>,
    /// The thread that reads policies and lists. They may be on a mount that does not answer.
    pub(crate) loader: Worker,
    /// The thread that writes state files.
    pub(crate) state_files: Worker,
    /// One load at a time.
    pub(crate) loading: Mutex<()>,
    /// The grants and expired lifetimes in force. Every change of the rules holds this lock; see the module's comment.
    pub(crate) timed: Mutex<TimedState>,
    /// Tracks writers of the files through inotify.
    pub(crate) watcher: Arc<Mutex<FileWatcher>>,
    /// How the last load went. Never locked during a load, so `status` does not wait for one.
    pub(crate) last: Mutex<LoadStatus>,
}

/// How the last load went.
#[derive(Clone, Debug)]
pub(crate) struct LoadStatus {
    pub(crate) at: Instant,
    /// Why the files are not in force; `None` if they are.
    pub(crate) trouble: Option<String>,
    /// Digest of the files as last read; `None` if they could not be read.
    digest: Option<PolicyDigest>,
    /// The files to watch.
    files: Vec<PathBuf>,
    /// What became of the configuration's other settings, in the last load that changed something.
    pub(crate) settings: AppliedSettings,
}

/// What a load changed.
#[derive(Debug)]
pub(crate) struct LoadReport {
    pub(crate) rules: LoadOutcome,
    pub(crate) settings: AppliedSettings,
}

/// The result of a load.
#[derive(Debug)]
pub(crate) enum LoadOutcome {
    /// New rules are in force, and these connections lost their permission.
    Fresh { generation: u64, cut: Vec<Arc<LiveConnection>> },
    /// The files have not changed.
    Same { generation: u64 },
}

impl LoadStatus {
    pub(crate) fn from_sources(sources: &LoadSources) -> Self {
        let (digest, files) = (Some(sources.digest()), source_files(sources));
        LoadStatus { at: Instant::now(), trouble: None, digest, files, settings: AppliedSettings::default() }
    }
}

impl PolicyStore {
    pub(crate) fn last_load(&self) -> LoadStatus {
        sys::lock(&self.last).clone()
    }

    /// Returns every file that the rules come from, as last read.
    pub(crate) fn policy_files(&self) -> Vec<PathBuf> {
        let files = sys::lock(&self.last).files.clone();
        files.into_iter().filter(|file| self.source.is_file(file)).collect()
    }

    /// Loads the files on the thread for policy files, and waits for that, but not longer than [`LOAD_WAIT`].
    ///
    /// # Errors
    ///
    /// As [`PolicyStore::load_now`]; or says which file does not answer. The load then goes on without us.
    pub(crate) async fn reload(self: &Arc<Self>) -> Result<LoadReport, String> {
        let store = self.clone();
        let loaded = self.loader.run(move || store.load_now());
        match wait_for_files(LOADER, loaded).await {
            Ok(loaded) => loaded,
            Err(why) => Err(format!("the load has not finished: {why}. The rules in force stay")),
        }
    }

    /// Loads the files on the calling thread, which must not be one that serves traffic.
    ///
    /// # Errors
    ///
    /// Returns the problems with their locations. The rules in force stay, unless `on_invalid = "deny"`.
    pub(crate) fn load_now(&self) -> Result<LoadReport, String> {
        let _loading = sys::lock(&self.loading);
        let loaded = self.load();
        sys::memory::release_freed();
        loaded
    }

    fn load(&self) -> Result<LoadReport, String> {
        let started = Instant::now();
        let sources = match self.read_sources() {
            Ok(sources) => sources,
            Err(trouble) => return Err(self.reject(trouble, None)),
        };
        let (digest, files) = (sources.digest(), source_files(&sources));
        let before = self.rules.load_full();
        let last = self.last_load();
        if last.digest == Some(digest) {
            let rules = LoadOutcome::Same { generation: before.generation() };
            let AppliedSettings { unapplied, .. } = last.settings;
            let settings = AppliedSettings { unapplied, ..AppliedSettings::default() };
            return last.trouble.map_or(Ok(LoadReport { rules, settings }), Err);
        }
        sys::lock(&self.last).files = files;
        let (fresh, configuration) =
            self.compile(&before, sources).map_err(|trouble| self.reject(trouble, Some(digest)))?;
        // Without a digest: whatever is in the way may be gone at the next load of the same files.
        let settings = configuration.as_ref().map(|configuration| self.settings.prepare(configuration));
        let settings = settings.transpose().map_err(|error| self.reject(format!("{error:#}"), None))?;
        let credentials =
            configuration.as_ref().map(|configuration| self.credentials.prepare(&configuration.credentials));
        let credentials = credentials.transpose().map_err(|error| self.reject(format!("{error:#}"), None))?;
        // Rules never name a credential that is not there: new ones come before the rules, old ones go after them.
        credentials.iter().for_each(PreparedCredentials::add);
        let rules = self.activate(before, fresh, digest);
        credentials.into_iter().for_each(PreparedCredentials::remove_others);
        let settings = settings.map(PreparedSettings::apply).unwrap_or_default();
        metrics::observe_reload(started.elapsed());
        let report = LoadReport { rules, settings };
        self.report_load(&report);
        Ok(report)
    }

    /// Says what a load changed, in the log of the program and in a record.
    fn report_load(&self, report: &LoadReport) {
        let said = report.settings.describe();
        if let LoadOutcome::Fresh { generation, cut } = &report.rules {
            tracing::info!(generation, cut = cut.len(), settings = said.as_deref(), "policies loaded");
            self.record_event(LifecycleEvent::PolicyLoaded, said.as_deref());
        }
        if !report.settings.unapplied.is_empty() {
            tracing::warn!("not applied until a restart: {}", report.settings.unapplied.join(", "));
        }
        sys::lock(&self.last).settings = report.settings.clone();
    }

    /// Reads the files, and again while one of them is being written: half of a list is a valid list, too.
    fn read_sources(&self) -> Result<LoadSources, String> {
        for at in 0..SETTLE_RETRIES {
            let (settled, before) = (SystemTime::now() - SETTLE_TIME, self.has_writers());
            let read = self.source.read();
            let known = read.as_ref().map_or_else(|_| self.policy_files(), source_files);
            let young = before || self.has_writers() || known.iter().any(|file| is_newer(file, settled));
            if !young && (read.is_ok() || at >= MISSING_RETRIES) {
                return read.map_err(|error| format!("{error:#}"));
            }
            drop(read);
            std::thread::sleep(SETTLE_TIME);
        }
        self.source.read().map_err(|error| format!("{error:#}"))
    }

    /// Whether a process is writing one of the files that were read last.
    fn has_writers(&self) -> bool {
        sys::lock(&self.watcher).has_writers() || self.policy_files().iter().any(|file| has_writer(file))
    }

    /// Compiles what was read and runs the policies' own tests.
    fn compile(
        &self,
        before: &RuleSet,
        read: LoadSources,
    ) -> Result<(RuleSet, Option<Configuration>), String> {
        let generation = before.generation() + 1;
        let configuration = read.operator.as_ref().map(read_configuration).transpose();
        let configuration = configuration.map_err(|problems| render_plain(&problems))?;
        let own = configuration.as_ref().map(Configuration::listen_addresses).unwrap_or_default();
        let sources = LoadSources { generation, own, ..read };
        let rules = recompile(before, &sources, &[]).map_err(|problems| render_plain(&problems))?;
        let rules = self.identities.apply(rules).map_err(|error| format!("{error:#}"))?;
        self.quotas.check(&rules).map_err(|error| error.to_string())?;
        let outcomes = rules.run_tests();
        let failed: Vec<String> =
            outcomes.iter().filter(|one| !one.has_passed()).map(describe_failure).collect();
        if failed.is_empty() { Ok((rules, configuration)) } else { Err(failed.join("\n")) }
    }

    /// Publishes new rules, unless their files equal those in force.
    fn activate(&self, before: Arc<RuleSet>, fresh: RuleSet, digest: PolicyDigest) -> LoadOutcome {
        let mut last = sys::lock(&self.last);
        (last.trouble, last.digest) = (None, Some(digest));
        if fresh.files_digest() == before.files_digest() && !before.is_closed() {
            return LoadOutcome::Same { generation: before.generation() };
        }
        last.at = Instant::now();
        drop(last);
        self.ledger.admit_sandboxes(&fresh);
        let loaded = self.publish(fresh, &mut sys::lock(&self.timed));
        metrics::count_reload("loaded");
        drop(before); // frees a large rule set here, not on a thread that serves traffic
        loaded
    }

    /// Reports why a load failed, once, and denies everything if the configuration says so.
    fn reject(&self, trouble: String, digest: Option<PolicyDigest>) -> String {
        let mut last = sys::lock(&self.last);
        let known = last.trouble.as_ref() == Some(&trouble);
        (last.trouble, last.digest) = (Some(trouble.clone()), digest);
        drop(last);
        if known {
            return trouble;
        }
        let what = match self.on_invalid {
            OnInvalid::Deny => "denying everything until they can",
            OnInvalid::Keep => "keeping the rules in force",
        };
        tracing::error!("the configuration and policies cannot be loaded, {what}:\n{trouble}");
        self.record_event(LifecycleEvent::PolicyRejected, Some(&trouble));
        metrics::count_reload("refused");
        let rules = self.rules.load_full();
        if self.on_invalid == OnInvalid::Deny && !rules.is_closed() {
            self.publish(rules.to_closed(), &mut sys::lock(&self.timed));
        }
        trouble
    }

    /// Puts rules in force as the next generation, with the grants and expired lifetimes of now.
    ///
    /// The caller holds `timed` and passes its content, so publications happen one after the other.
    fn publish(&self, fresh: RuleSet, current: &mut TimedState) -> LoadOutcome {
        // An identity may have been assigned while the files were being compiled.
        let fresh = self.identities.apply(fresh.clone()).unwrap_or(fresh);
        let generation = self.rules.load().generation() + 1;
        let ended = self.ledger.expired_sandboxes(&fresh);
        let timed = TimedState { grants: self.grants.active_grants(&fresh), ended };
        let rules = fresh.with_timed_state(&timed, generation).or_else(|_| {
            tracing::error!("the grants do not compile to rules: none is in force");
            fresh.with_timed_state(&TimedState { grants: Vec::new(), ended: timed.ended.clone() }, generation)
        });
        let rules = rules.unwrap_or_else(|_| fresh.to_closed()); // cannot fail without grants
        *current = timed;
        let rules = Arc::new(rules);
        self.log.set_sandboxes(rules.sandboxes().iter().map(|sandbox| sandbox.id.clone()));
        self.rules.store(rules.clone());
        self.quotas.adopt(&rules);
        let cut = self.recheck_live(&rules);
        LoadOutcome::Fresh { generation, cut }
    }

    /// Rechecks every open connection and stream: cuts those that the new rules deny, moves the others to the new
    /// budgets.
    ///
    /// An attempt that was decided under the old rules may not be registered yet and is then missing from the list.
    /// It is not missed: every attempt registers first and then decides again under the rules in force
    /// (`Shared::recheck_permit`), and the new rules were stored before this list was made. So either it is in the
    /// list or it sees the new rules; both may happen, which is harmless.
    fn recheck_live(&self, rules: &RuleSet) -> Vec<Arc<LiveConnection>> {
        let mut cut = Vec::new();
        for open in self.live.list() {
            match rules.decide_again(&open.permit(), open.dialled()) {
                Decision::Allow(permit) => open.adopt_permit(permit),
                Decision::Deny(denial) => {
                    open.cut.trigger(denial.reason);
                    cut.push(open);
                }
            }
        }
        metrics::count_revocations(cut.len());
        cut
    }

    /// Makes a grant, records it, and puts it in force.
    ///
    /// # Errors
    ///
    /// Returns why the grant is refused; the refusal is recorded, too.
    pub(crate) async fn create_grant(
        self: Arc<Self>,
        wish: GrantRequest,
    ) -> anyhow::Result<(ActiveGrant, u64)> {
        let asked = format!("{} for {}, by {}: {}", wish.sandbox, wish.host, wish.by, wish.why);
        let prepared =
            self.change_state("the grant", move |store| store.grants.prepare(wish, &store.rules.load_full()));
        let grant = prepared.await.inspect_err(|error| {
            grants::record_event(&self.log, LifecycleEvent::GrantRefused, format!("{asked}: {error:#}"));
        })?;
        let message = Some(grants::summarize(&grant).into());
        let event = Lifecycle { event: LifecycleEvent::GrantMade, message, policy: None };
        if let Err(down) = self.log.record_lifecycle(&event).await {
            anyhow::bail!("cannot record the grant, so it is not made: {down}");
        }
        let id = grant.id;
        let activated = self.change_state("the grant", move |store| store.activate_grant(grant)).await;
        activated.inspect_err(|_| {
            // It may have been stored after we stopped waiting.
            let store = self.clone();
            let withdraw = move || {
                if store.end_grant(id, "it could not be stored in time").is_ok() {
                    drop(store.grants.store()); // a restart would find it expired at the latest when it ends
                }
            };
            drop(self.state_files.post(withdraw)); // a full queue holds only jobs that wait for the same file system
        })
    }

    /// Changes what is stored, on the thread for state files.
    pub(crate) async fn change_state<T: Send + 'static>(
        self: &Arc<Self>,
        what: &str,
        change: impl FnOnce(&Self) -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<T> {
        let store = self.clone();
        match wait_for_files(STATE_FILES, self.state_files.run(move || change(&store))).await {
            Ok(changed) => changed,
            Err(why) => anyhow::bail!("{what} is not stored: {why}"),
        }
    }

    /// Puts a recorded grant in force: no record, no grant.
    fn activate_grant(&self, grant: ActiveGrant) -> anyhow::Result<(ActiveGrant, u64)> {
        if let Err(error) = self.grants.activate(grant.clone(), &self.rules.load_full()) {
            self.record_grant_end(&grant, &format!("{error:#}"));
            return Err(error);
        }
        let generation = self.republish().generation();
        Ok((grant, generation))
    }

    /// Revokes a grant and cuts the connections that need it, then stores that.
    pub(crate) async fn revoke_grant(self: Arc<Self>, id: u64, by: &str) -> anyhow::Result<LoadOutcome> {
        let (store, why) = (self.clone(), format!("revoked by {by}"));
        let loaded = tokio::task::spawn_blocking(move || store.end_grant(id, &why)).await??;
        let stored = self.change_state("the end of the grant", |store| store.grants.store()).await;
        stored.context("the grant is revoked, but a restart brings it back")?;
        Ok(loaded)
    }

    /// Ends a grant in memory.
    fn end_grant(&self, id: u64, why: &str) -> anyhow::Result<LoadOutcome> {
        let gone = self.grants.remove(id)?;
        let loaded = self.republish();
        self.record_grant_end(&gone, why);
        Ok(loaded)
    }

    /// Assigns an identity to a sandbox of a warm pool.
    pub(crate) async fn assign_identity(self: Arc<Self>, identity: AssignedIdentity) -> anyhow::Result<u64> {
        self.change_state("the identity", move |store| {
            let assigned = store.identities.store(&store.rules.load(), identity)?;
            let _publishing = sys::lock(&store.timed);
            let generation = store.identities.publish(&store.rules, assigned)?;
            store.recheck_live(&store.rules.load_full());
            Ok(generation)
        })
        .await
    }

    /// Ends expired grants and lifetimes, until dropped.
    pub(crate) async fn run_periodic(self: Arc<Self>) {
        loop {
            sleep(CLOCK_INTERVAL).await;
            let rules = self.rules.load();
            if self.grants.is_empty() && !rules.has_lifetimes() {
                continue;
            }
            drop(rules);
            let reloader = self.clone();
            if tokio::task::spawn_blocking(move || reloader.expire()).await.is_err() {
                tracing::error!("the check for expired grants panicked");
            }
        }
    }

    /// Ends expired grants and lifetimes.
    fn expire(&self) {
        let over = self.grants.expire();
        let ended = self.ledger.expired_sandboxes(&self.rules.load());
        if !over.is_empty() || ended != sys::lock(&self.timed).ended {
            self.republish();
        }
        if !over.is_empty() {
            self.grants.store_later(&self.state_files);
        }
        over.iter().for_each(|grant| self.record_grant_end(grant, "it has expired"));
    }

    /// Publishes the same rules with the grants and expired lifetimes of now.
    fn republish(&self) -> LoadOutcome {
        let mut timed = sys::lock(&self.timed);
        let rules = RuleSet::clone(&self.rules.load());
        self.publish(rules, &mut timed)
    }

    fn record_grant_end(&self, grant: &ActiveGrant, why: &str) {
        if let Some(sandbox) = grant.sandbox() {
            self.ledger.forget_grant(&sandbox, &grants::rule_name(grant.id));
        }
        let message = format!("{} has ended: {why}", grants::summarize(grant));
        grants::record_event(&self.log, LifecycleEvent::GrantEnded, message);
    }

    fn record_event(&self, event: LifecycleEvent, message: Option<&str>) {
        let policy = Some(record::policy(&self.rules.load()));
        let event = Lifecycle { event, message: message.map(Into::into), policy };
        let log = self.log.clone();
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            if let Err(down) = log.record_lifecycle(&event).await {
                tracing::warn!(%down, "cannot write the record of a load");
            }
        });
    }
}

/// Waits for a job of a thread for files, until one of its calls hangs or it takes longer than [`LOAD_WAIT`].
async fn wait_for_files<T>(thread: &str, job: impl Future<Output = Result<T, JobLost>>) -> Result<T, String> {
    let hangs = async {
        loop {
            let calls = file::calls_longer_than(HANGING_AFTER);
            if let Some(call) = calls.iter().find(|call| call.thread == thread) {
                let (path, seconds) = (call.path.display(), call.since.elapsed().as_secs());
                return format!("{path} has not answered for {seconds} s");
            }
            sleep(CLOCK_INTERVAL).await;
        }
    };
    tokio::select! {
        biased;
        done = job => done.map_err(|JobLost| "too much waits for its files".to_owned()),
        why = hangs => Err(why),
        () = sleep(LOAD_WAIT) => Err(format!("it takes longer than {} s", LOAD_WAIT.as_secs())),
    }
}

fn describe_failure(outcome: &TestOutcome) -> String {
    let (probe, expected) = (&outcome.trial.probe, outcome.describe_expected());
    format!("{}: the test of {probe} failed: expected {expected}", outcome.trial.at)
}

/// Returns every file that was read, or should have been.
fn source_files(sources: &LoadSources) -> Vec<PathBuf> {
    let named = sources.operator.iter().chain(&sources.policies).map(|file| &file.path);
    named.chain(sources.lists.keys()).map(PathBuf::from).collect()
}

/// Whether another process has a file open for writing.
///
/// Linux has no query for that, but a read lease (fcntl(2), `F_SETLEASE`) answers it: the kernel grants one only while
/// no process has the file open for writing, and otherwise fails with `EAGAIN`. So we ask for a lease and give it back
/// at once. inotify alone is not enough: it reports a write only after it happened, and a writer that has opened the
/// file but not written yet looks like none.
///
/// The answer is wrong in these cases, always as "no writer":
/// - The file belongs to another user and we lack `CAP_LEASE`.
/// - The file system has no leases (some network and FUSE file systems), or the writer is on another machine.
/// - The writer has closed the file between two writes.
///
/// The settle time and [`FileWatcher::has_writers`] cover those. While we hold the lease, a process that opens the file
/// for writing makes the kernel send us `SIGIO`, which would kill the process by default; see `ReloadTrigger::new`.
fn has_writer(path: &Path) -> bool {
    let _note = file::note_call(path);
    file::open_regular(path).is_ok_and(|file| sys::fd::has_writer(&file))
}

/// Whether a file was modified after `since`. A time in the future does not count: the clock has been set back.
fn is_newer(path: &Path, since: SystemTime) -> bool {
    let _note = file::note_call(path);
    let changed = fs::metadata(path).and_then(|metadata| metadata.modified());
    changed.is_ok_and(|changed| changed > since && changed <= SystemTime::now())
}

impl LoadOutcome {
    pub(crate) fn generation(&self) -> u64 {
        match self {
            LoadOutcome::Fresh { generation, .. } | LoadOutcome::Same { generation } => *generation,
        }
    }

    /// Returns how many connections and streams lost their permission.
    pub(crate) fn cut_count(&self) -> usize {
        match self {
            LoadOutcome::Fresh { cut, .. } => cut.len(),
            LoadOutcome::Same { .. } => 0,
        }
    }

    /// Waits until the cut connections have closed.
    pub(crate) async fn wait_closed(&self, live: &LiveConnections) {
        let LoadOutcome::Fresh { cut, .. } = self else { return };
        let until = Instant::now() + CUT_GRACE;
        while Instant::now() < until && cut.iter().any(|open| live.is_open(open.id)) {
            sleep(Duration::from_millis(5)).await;
        }
    }
}
