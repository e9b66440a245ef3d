//! Reload: from files to rules, whole or not at all (P9), then every open connection is asked again and those
//! that lost their permission are cut (P10).

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use audit::{Lifecycle, LifecycleEvent, Log};
use rules::configuration::OnInvalid;
use rules::policy::PolicyDigest;
use rules::policy_test::TestOutcome;
use rules::{Decision, LoadSources, RuleSet, TimedState, recompile};

use crate::budget::ledger::Ledger;
use crate::budget::live::{LiveConnection, LiveConnections};
use crate::policy::grants::{self, ActiveGrant, GrantRequest, GrantStore};
use crate::policy::identities::{AssignedIdentity, IdentityStore};
use crate::policy::source::PolicySource;
use crate::policy::watch::FileWatcher;
use crate::report::diagnostics::render_plain;
use crate::report::metrics;
use crate::report::record;

/// How often the clocks are looked at.
const CLOCK_INTERVAL: Duration = Duration::from_millis(200);
/// How long losers are waited for, where somebody waits.
const CUT_GRACE: Duration = Duration::from_secs(5);
/// A file that changed within this time may still be being written...
const SETTLE_TIME: Duration = Duration::from_millis(20);
/// ...and is read again up to so many times; after that whoever writes is not waited for.
const SETTLE_RETRIES: usize = 50;
/// So often it is looked for a file that is not there: some editors take one away before they put its successor.
const MISSING_RETRIES: usize = 3;

/// What loads rules, and what they apply to.
pub(crate) struct PolicyStore {
    pub(crate) source: PolicySource,
    /// Where Sandbar itself listens.
    pub(crate) own: Vec<SocketAddr>,
    pub(crate) rules: Arc<ArcSwap<RuleSet>>,
    pub(crate) identities: IdentityStore,
    pub(crate) live: Arc<LiveConnections>,
    pub(crate) log: Log,
    pub(crate) on_invalid: OnInvalid,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) grants: Arc<GrantStore>,
    /// One load at a time.
    pub(crate) loading: Mutex<()>,
    /// What time gave and took; whoever changes the rules in force holds it, so that no generation is given twice.
    pub(crate) timed: Mutex<TimedState>,
    /// See who is writing the files.
    pub(crate) watcher: Arc<Mutex<FileWatcher>>,
    /// How the last load went. Locked only to look: whoever asks does not wait for a load.
    pub(crate) last: Mutex<LoadStatus>,
}

/// How the last load went.
#[derive(Clone, Debug)]
pub(crate) struct LoadStatus {
    pub(crate) at: Instant,
    /// Why the files are not what is in force; none if they are.
    pub(crate) trouble: Option<String>,
    /// Of the files as they were read last; none if they could not be.
    digest: Option<PolicyDigest>,
    /// The files themselves, to be watched.
    files: Vec<PathBuf>,
}

/// What a load came to.
#[derive(Debug)]
pub(crate) enum LoadOutcome {
    /// These rules are in force; these connections lost their permission.
    Fresh { generation: u64, cut: Vec<Arc<LiveConnection>> },
    /// The files say what they said before.
    Same { generation: u64 },
}

impl LoadStatus {
    pub(crate) fn from_sources(sources: &LoadSources) -> Self {
        let (digest, files) = (Some(sources.digest()), source_files(sources));
        LoadStatus { at: Instant::now(), trouble: None, digest, files }
    }
}

impl PolicyStore {
    pub(crate) fn last_load(&self) -> LoadStatus {
        sys::lock(&self.last).clone()
    }

    /// Every file that rules come from, as last read, to be watched.
    pub(crate) fn policy_files(&self) -> Vec<PathBuf> {
        let files = sys::lock(&self.last).files.clone();
        files.into_iter().filter(|file| self.source.is_file(file)).collect()
    }

    /// Loads the files. Reads and compiles on the calling thread, which is none that carries traffic.
    ///
    /// # Errors
    ///
    /// Says what is wrong, with its place. The rules in force stay, unless the operator wants nothing to pass.
    pub(crate) fn reload(&self) -> Result<LoadOutcome, String> {
        let _loading = sys::lock(&self.loading);
        let loaded = self.load();
        sys::memory::release_freed();
        loaded
    }

    fn load(&self) -> Result<LoadOutcome, String> {
        let started = Instant::now();
        let sources = match self.read_sources() {
            Ok(sources) => sources,
            Err(trouble) => return Err(self.reject(trouble, None)),
        };
        let (digest, files) = (sources.digest(), source_files(&sources));
        let before = self.rules.load_full();
        let last = self.last_load();
        if last.digest == Some(digest) {
            let same = LoadOutcome::Same { generation: before.generation() };
            return last.trouble.map_or(Ok(same), Err);
        }
        sys::lock(&self.last).files = files;
        let compiled = self.compile(&before, sources);
        match compiled {
            Ok(fresh) => {
                let loaded = self.activate(before, fresh, digest);
                metrics::observe_reload(started.elapsed());
                Ok(loaded)
            }
            Err(trouble) => Err(self.reject(trouble, Some(digest))),
        }
    }

    /// Reads the files, again while one of them is being written: half a list is a list too.
    fn read_sources(&self) -> Result<LoadSources, String> {
        for at in 0..SETTLE_RETRIES {
            let (settled, before) = (SystemTime::now() - SETTLE_TIME, self.has_writers());
            let read = self.source.read();
            let known = read.as_ref().map_or_else(|_| self.policy_files(), source_files);
            let young =
                before || self.has_writers() || known.iter().any(|file| is_newer(file, settled));
            if !young && (read.is_ok() || at >= MISSING_RETRIES) {
                return read.map_err(|error| format!("{error:#}"));
            }
            drop(read);
            std::thread::sleep(SETTLE_TIME);
        }
        self.source.read().map_err(|error| format!("{error:#}"))
    }

    /// Whether somebody writes one of the files that were read last.
    fn has_writers(&self) -> bool {
        sys::lock(&self.watcher).has_writers() || self.policy_files().iter().any(has_writer)
    }

    /// Compiles and tries what was read.
    fn compile(&self, before: &RuleSet, read: LoadSources) -> Result<RuleSet, String> {
        let generation = before.generation() + 1;
        let sources = LoadSources { generation, own: self.own.clone(), ..read };
        let rules = recompile(before, &sources, &[]).map_err(|problems| render_plain(&problems))?;
        let rules = self.identities.apply(rules).map_err(|error| format!("{error:#}"))?;
        let tried = rules.run_tests();
        let failed: Vec<String> =
            tried.iter().filter(|one| !one.has_passed()).map(describe_failure).collect();
        if failed.is_empty() { Ok(rules) } else { Err(failed.join("\n")) }
    }

    /// Puts fresh rules in force, unless they say what those in force say.
    fn activate(&self, before: Arc<RuleSet>, fresh: RuleSet, digest: PolicyDigest) -> LoadOutcome {
        let mut last = sys::lock(&self.last);
        (last.trouble, last.digest) = (None, Some(digest));
        if fresh.files_digest() == before.files_digest() && !before.is_closed() {
            return LoadOutcome::Same { generation: before.generation() };
        }
        last.at = Instant::now();
        drop(last);
        let loaded = self.publish(fresh, &mut sys::lock(&self.timed));
        metrics::count_reload("loaded");
        self.record_event(LifecycleEvent::PolicyLoaded, None);
        drop(before); // here, where nobody waits for a million names to be freed
        loaded
    }

    /// Says once what is wrong, and closes where that is wanted.
    fn reject(&self, trouble: String, digest: Option<PolicyDigest>) -> String {
        let mut last = sys::lock(&self.last);
        let known = last.trouble.as_ref() == Some(&trouble);
        (last.trouble, last.digest) = (Some(trouble.clone()), digest);
        drop(last);
        if known {
            return trouble;
        }
        let what = match self.on_invalid {
            OnInvalid::Deny => "nothing passes until they are",
            OnInvalid::Keep => "the rules in force stay",
        };
        tracing::error!("the policies are not good, {what}:\n{trouble}");
        self.record_event(LifecycleEvent::PolicyRejected, Some(&trouble));
        metrics::count_reload("refused");
        let rules = self.rules.load_full();
        if self.on_invalid == OnInvalid::Deny && !rules.is_closed() {
            self.publish(rules.to_closed(), &mut sys::lock(&self.timed));
        }
        trouble
    }

    /// Puts rules in force, with what time gives and takes, as the next generation.
    fn publish(&self, fresh: RuleSet, turn: &mut TimedState) -> LoadOutcome {
        // One that was given an identity while the files were read keeps it.
        let fresh = self.identities.apply(fresh.clone()).unwrap_or(fresh);
        let generation = self.rules.load().generation() + 1;
        let ended = self.ledger.expired_sandboxes(&fresh);
        let timed = TimedState { grants: self.grants.active_grants(&fresh), ended };
        let rules = fresh.with_timed_state(&timed, generation).or_else(|_| {
            tracing::error!("the grants cannot be made rules: none is in force");
            fresh.with_timed_state(
                &TimedState { grants: Vec::new(), ended: timed.ended.clone() },
                generation,
            )
        });
        let rules = rules.unwrap_or_else(|_| fresh.to_closed()); // without grants there is nothing to be wrong
        *turn = timed;
        let rules = Arc::new(rules);
        self.rules.store(rules.clone());
        let cut = self.recheck_live(&rules);
        LoadOutcome::Fresh { generation, cut }
    }

    /// Asks every open connection and stream again: those that lost are cut, the others go on by the new budgets.
    fn recheck_live(&self, rules: &RuleSet) -> Vec<Arc<LiveConnection>> {
        let mut cut = Vec::new();
        for open in self.live.list() {
            match rules.decide_again(&open.permit, open.dialled()) {
                Decision::Allow(permit) => open.charges.adopt_budgets(&permit),
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
    /// Says why there is none; that is recorded too.
    pub(crate) async fn create_grant(
        self: Arc<Self>,
        wish: GrantRequest,
    ) -> anyhow::Result<(ActiveGrant, u64)> {
        let asked = format!("{} for {}, by {}: {}", wish.sandbox, wish.host, wish.by, wish.why);
        let reloader = self.clone();
        let draw_up = move || reloader.grants.prepare(wish, &reloader.rules.load_full());
        let kept = tokio::task::spawn_blocking(draw_up).await?.inspect_err(|error| {
            grants::record_event(
                &self.log,
                LifecycleEvent::GrantRefused,
                format!("{asked}: {error:#}"),
            );
        })?;
        let message = Some(grants::summarize(&kept).into());
        let event = Lifecycle { event: LifecycleEvent::GrantMade, message, policy: None };
        if let Err(down) = self.log.record_lifecycle(&event).await {
            anyhow::bail!("it cannot be recorded, so it is not made: {down}");
        }
        tokio::task::spawn_blocking(move || self.activate_grant(kept)).await?
    }

    /// Puts a grant in force that is recorded: no record, no grant.
    fn activate_grant(&self, kept: ActiveGrant) -> anyhow::Result<(ActiveGrant, u64)> {
        if let Err(error) = self.grants.activate(kept.clone(), &self.rules.load_full()) {
            self.record_grant_end(&kept, &format!("{error:#}"));
            return Err(error);
        }
        let generation = self.republish().generation();
        Ok((kept, generation))
    }

    /// Takes a grant back, and what is open by it.
    pub(crate) fn revoke_grant(&self, id: u64, by: &str) -> anyhow::Result<LoadOutcome> {
        let (gone, written) = self.grants.revoke(id)?;
        let loaded = self.republish();
        self.record_grant_end(&gone, &format!("revoked by {by}"));
        written.map(|()| loaded)
    }

    /// Gives a sandbox of a warm pool its identity.
    pub(crate) fn assign_identity(&self, identity: AssignedIdentity) -> anyhow::Result<u64> {
        let _turn = sys::lock(&self.timed);
        let generation = self.identities.assign(&self.rules, identity)?;
        self.recheck_live(&self.rules.load_full());
        Ok(generation)
    }

    /// Looks at the clocks now and then, until it is dropped: grants end, and lives.
    pub(crate) async fn run_periodic(self: Arc<Self>) {
        loop {
            tokio::time::sleep(CLOCK_INTERVAL).await;
            let rules = self.rules.load();
            if self.grants.is_empty() && !rules.has_lifetimes() {
                continue;
            }
            drop(rules);
            let reloader = self.clone();
            if tokio::task::spawn_blocking(move || reloader.expire()).await.is_err() {
                tracing::error!("the clocks could not be looked at");
            }
        }
    }

    /// Ends what is over.
    fn expire(&self) {
        let over = self.grants.expire();
        let ended = self.ledger.expired_sandboxes(&self.rules.load());
        if !over.is_empty() || ended != sys::lock(&self.timed).ended {
            self.republish();
        }
        over.iter().for_each(|kept| self.record_grant_end(kept, "its time is over"));
    }

    /// The same files with what time gives and takes now.
    fn republish(&self) -> LoadOutcome {
        let mut turn = sys::lock(&self.timed);
        let current = RuleSet::clone(&self.rules.load());
        self.publish(current, &mut turn)
    }

    fn record_grant_end(&self, kept: &ActiveGrant, why: &str) {
        if let Some(sandbox) = kept.sandbox() {
            self.ledger.forget_grant(&sandbox, &grants::rule_name(kept.id));
        }
        let message = format!("{} has ended: {why}", grants::summarize(kept));
        grants::record_event(&self.log, LifecycleEvent::GrantEnded, message);
    }

    fn record_event(&self, event: LifecycleEvent, message: Option<&str>) {
        let policy = Some(record::policy(&self.rules.load()));
        let event = Lifecycle { event, message: message.map(Into::into), policy };
        let log = self.log.clone();
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            if let Err(down) = log.record_lifecycle(&event).await {
                tracing::warn!(%down, "a load could not be recorded");
            }
        });
    }
}

fn describe_failure(outcome: &TestOutcome) -> String {
    let (probe, expected) = (&outcome.trial.probe, outcome.describe_expected());
    format!("{}: the test of {probe} fails: expected {expected}", outcome.trial.at)
}

/// Every file that was read, or should have been.
fn source_files(sources: &LoadSources) -> Vec<PathBuf> {
    let named = sources.operator.iter().chain(&sources.policies).map(|file| &file.path);
    named.chain(sources.lists.keys()).map(PathBuf::from).collect()
}

/// Whether another process has a file open for writing. The kernel does not say so of other people's files; of
/// those only inotify tells, once they have been written to.
fn has_writer(path: &PathBuf) -> bool {
    let file = fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    file.is_ok_and(|file| sys::fd::has_writer(&file))
}

/// Whether a file has been written since; one from the future has not, the clock has jumped.
fn is_newer(file: &PathBuf, since: SystemTime) -> bool {
    let changed = fs::metadata(file).and_then(|metadata| metadata.modified());
    changed.is_ok_and(|changed| changed > since && changed <= SystemTime::now())
}

impl LoadOutcome {
    pub(crate) fn generation(&self) -> u64 {
        match self {
            LoadOutcome::Fresh { generation, .. } | LoadOutcome::Same { generation } => *generation,
        }
    }

    /// How many connections and streams lost their permission.
    pub(crate) fn cut_count(&self) -> usize {
        match self {
            LoadOutcome::Fresh { cut, .. } => cut.len(),
            LoadOutcome::Same { .. } => 0,
        }
    }

    /// Waits until those that were cut have gone.
    pub(crate) async fn wait_closed(&self, live: &LiveConnections) {
        let LoadOutcome::Fresh { cut, .. } = self else { return };
        let until = Instant::now() + CUT_GRACE;
        while Instant::now() < until && cut.iter().any(|open| live.is_open(open.id)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
