//! Reload: from files to rules, whole or not at all (P9), then every open connection is asked again and those
//! that lost their permission are cut (P10).

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use audit::{Lifecycle, LifecycleEvent, Log};
use rules::operator::OnInvalid;
use rules::policy::Digest;
use rules::trial::Outcome;
use rules::{Decision, RuleSet, Sources, Timed, recompile};

use crate::budget::ledger::Ledger;
use crate::budget::live::{Live, Open};
use crate::policy::grants::{self, Grants, Kept, Wish};
use crate::policy::identities::{Identities, Identity};
use crate::policy::source::Origin;
use crate::policy::watch::Eyes;
use crate::report::diagnostics::{Severity, render};
use crate::report::metrics;
use crate::report::record;

/// How often the clocks are looked at.
const TICK: Duration = Duration::from_millis(200);
/// How long losers are waited for, where somebody waits.
const LEAVE: Duration = Duration::from_secs(5);
/// A file that changed within this time may still be being written...
const SETTLE: Duration = Duration::from_millis(20);
/// ...and is read again up to so many times; after that whoever writes is not waited for.
const SETTLES: usize = 50;
/// So often it is looked for a file that is not there: some editors take one away before they put its successor.
const MISSES: usize = 3;

/// What loads rules, and what they apply to.
pub(crate) struct Reloader {
    pub(crate) origin: Origin,
    /// Where Sandbar itself listens.
    pub(crate) own: Vec<SocketAddr>,
    pub(crate) rules: Arc<ArcSwap<RuleSet>>,
    pub(crate) identities: Identities,
    pub(crate) live: Arc<Live>,
    pub(crate) log: Log,
    pub(crate) on_invalid: OnInvalid,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) grants: Arc<Grants>,
    /// One load at a time.
    pub(crate) loading: Mutex<()>,
    /// What time gave and took; whoever changes the rules in force holds it, so that no generation is given twice.
    pub(crate) turn: Mutex<Timed>,
    /// See who is writing the files.
    pub(crate) eyes: Arc<Mutex<Eyes>>,
    /// How the last load went. Locked only to look: whoever asks does not wait for a load.
    pub(crate) last: Mutex<Last>,
}

/// How the last load went.
#[derive(Clone, Debug)]
pub(crate) struct Last {
    pub(crate) at: Instant,
    /// Why the files are not what is in force; none if they are.
    pub(crate) trouble: Option<String>,
    /// Of the files as they were read last; none if they could not be.
    digest: Option<Digest>,
    /// The files themselves, to be watched.
    files: Vec<PathBuf>,
}

/// What a load came to.
#[derive(Debug)]
pub(crate) enum Loaded {
    /// These rules are in force; these connections lost their permission.
    Fresh { generation: u64, cut: Vec<Arc<Open>> },
    /// The files say what they said before.
    Same { generation: u64 },
}

impl Last {
    pub(crate) fn of(sources: &Sources) -> Self {
        let (digest, files) = (Some(sources.digest()), files(sources));
        Last { at: Instant::now(), trouble: None, digest, files }
    }
}

impl Reloader {
    pub(crate) fn last(&self) -> Last {
        lock(&self.last).clone()
    }

    /// Every file that rules come from, as last read, to be watched.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let files = lock(&self.last).files.clone();
        files.into_iter().filter(|file| self.origin.is_file(file)).collect()
    }

    /// Loads the files. Reads and compiles on the calling thread, which is none that carries traffic.
    ///
    /// # Errors
    ///
    /// Says what is wrong, with its place. The rules in force stay, unless the operator wants nothing to pass.
    pub(crate) fn reload(&self) -> Result<Loaded, String> {
        let _loading = lock(&self.loading);
        let loaded = self.load();
        sys::memory::release_freed();
        loaded
    }

    fn load(&self) -> Result<Loaded, String> {
        let started = Instant::now();
        let sources = match self.read() {
            Ok(sources) => sources,
            Err(trouble) => return Err(self.refuse(trouble, None)),
        };
        let (digest, files) = (sources.digest(), files(&sources));
        let before = self.rules.load_full();
        let last = self.last();
        if last.digest == Some(digest) {
            let same = Loaded::Same { generation: before.generation() };
            return last.trouble.map_or(Ok(same), Err);
        }
        lock(&self.last).files = files;
        let compiled = self.compiled(&before, sources);
        match compiled {
            Ok(fresh) => {
                let loaded = self.take_over(before, fresh, digest);
                metrics::reloaded_in(started.elapsed());
                Ok(loaded)
            }
            Err(trouble) => Err(self.refuse(trouble, Some(digest))),
        }
    }

    /// Reads the files, again while one of them is being written: half a list is a list too.
    fn read(&self) -> Result<Sources, String> {
        for at in 0..SETTLES {
            let (settled, before) = (SystemTime::now() - SETTLE, self.is_writing());
            let read = self.origin.read();
            let known = read.as_ref().map_or_else(|_| self.files(), files);
            let young =
                before || self.is_writing() || known.iter().any(|file| is_younger(file, settled));
            if !young && (read.is_ok() || at >= MISSES) {
                return read.map_err(|error| format!("{error:#}"));
            }
            drop(read);
            std::thread::sleep(SETTLE);
        }
        self.origin.read().map_err(|error| format!("{error:#}"))
    }

    /// Whether somebody writes one of the files that were read last.
    fn is_writing(&self) -> bool {
        lock(&self.eyes).see_writers() || self.files().iter().any(is_held)
    }

    /// Compiles and tries what was read.
    fn compiled(&self, before: &RuleSet, read: Sources) -> Result<RuleSet, String> {
        let generation = before.generation() + 1;
        let sources = Sources { generation, own: self.own.clone(), ..read };
        let rules = recompile(before, &sources, &[]).map_err(|problems| {
            let shown = problems.iter().map(|problem| render(problem, Severity::Error));
            let shown = shown.collect::<Vec<_>>().join("\n");
            anstream::adapter::strip_str(&shown).to_string() // it is read in logs too
        })?;
        let rules = self.identities.apply(rules).map_err(|error| format!("{error:#}"))?;
        let tried = rules.run_trials();
        let failed: Vec<String> = tried.iter().filter(|one| !one.passed()).map(failure).collect();
        if failed.is_empty() { Ok(rules) } else { Err(failed.join("\n")) }
    }

    /// Puts fresh rules in force, unless they say what those in force say.
    fn take_over(&self, before: Arc<RuleSet>, fresh: RuleSet, digest: Digest) -> Loaded {
        let mut last = lock(&self.last);
        (last.trouble, last.digest) = (None, Some(digest));
        if fresh.files() == before.files() && !before.is_closed() {
            return Loaded::Same { generation: before.generation() };
        }
        last.at = Instant::now();
        drop(last);
        let loaded = self.put(fresh, &mut lock(&self.turn));
        metrics::reload("loaded");
        self.tell(LifecycleEvent::PolicyLoaded, None);
        drop(before); // here, where nobody waits for a million names to be freed
        loaded
    }

    /// Says once what is wrong, and closes where that is wanted.
    fn refuse(&self, trouble: String, digest: Option<Digest>) -> String {
        let mut last = lock(&self.last);
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
        self.tell(LifecycleEvent::PolicyRejected, Some(&trouble));
        metrics::reload("refused");
        let rules = self.rules.load_full();
        if self.on_invalid == OnInvalid::Deny && !rules.is_closed() {
            self.put(rules.closed(), &mut lock(&self.turn));
        }
        trouble
    }

    /// Puts rules in force, with what time gives and takes, as the next generation.
    fn put(&self, fresh: RuleSet, turn: &mut Timed) -> Loaded {
        // One that was given an identity while the files were read keeps it.
        let fresh = self.identities.apply(fresh.clone()).unwrap_or(fresh);
        let generation = self.rules.load().generation() + 1;
        let ended = self.ledger.ended(&fresh);
        let timed = Timed { grants: self.grants.in_force(&fresh), ended };
        let rules = fresh.timed(&timed, generation).or_else(|_| {
            tracing::error!("the grants cannot be made rules: none is in force");
            fresh.timed(&Timed { grants: Vec::new(), ended: timed.ended.clone() }, generation)
        });
        let rules = rules.unwrap_or_else(|_| fresh.closed()); // without grants there is nothing to be wrong
        *turn = timed;
        let rules = Arc::new(rules);
        self.rules.store(rules.clone());
        let cut = self.ask_again(&rules);
        Loaded::Fresh { generation, cut }
    }

    /// Asks every open connection and stream again: those that lost are cut, the others go on by the new budgets.
    fn ask_again(&self, rules: &RuleSet) -> Vec<Arc<Open>> {
        let mut cut = Vec::new();
        for open in self.live.all() {
            match rules.decide_again(&open.permit, open.dialled) {
                Decision::Allow(permit) => open.tab.retune(&permit),
                Decision::Deny(denial) => {
                    open.cut.now(denial.reason);
                    cut.push(open);
                }
            }
        }
        metrics::revoked(cut.len());
        cut
    }

    /// Makes a grant, records it, and puts it in force.
    ///
    /// # Errors
    ///
    /// Says why there is none; that is recorded too.
    pub(crate) async fn grant(self: Arc<Self>, wish: Wish) -> anyhow::Result<(Kept, u64)> {
        let asked = format!("{} for {}, by {}: {}", wish.sandbox, wish.host, wish.by, wish.why);
        let reloader = self.clone();
        let draw_up = move || reloader.grants.draw_up(wish, &reloader.rules.load_full());
        let kept = tokio::task::spawn_blocking(draw_up).await?.inspect_err(|error| {
            grants::tell(&self.log, LifecycleEvent::GrantRefused, format!("{asked}: {error:#}"));
        })?;
        let message = Some(grants::describe(&kept).into());
        let event = Lifecycle { event: LifecycleEvent::GrantMade, message, policy: None };
        if let Err(down) = self.log.lifecycle(&event).await {
            anyhow::bail!("it cannot be recorded, so it is not made: {down}");
        }
        tokio::task::spawn_blocking(move || self.open(kept)).await?
    }

    /// Puts a grant in force that is recorded: no record, no grant.
    fn open(&self, kept: Kept) -> anyhow::Result<(Kept, u64)> {
        if let Err(error) = self.grants.keep(kept.clone(), &self.rules.load_full()) {
            self.part(&kept, &format!("{error:#}"));
            return Err(error);
        }
        let generation = self.change().generation();
        Ok((kept, generation))
    }

    /// Takes a grant back, and what is open by it.
    pub(crate) fn revoke(&self, id: u64, by: &str) -> anyhow::Result<Loaded> {
        let (gone, written) = self.grants.revoke(id)?;
        let loaded = self.change();
        self.part(&gone, &format!("revoked by {by}"));
        written.map(|()| loaded)
    }

    /// Gives a sandbox of a warm pool its identity.
    pub(crate) fn identify(&self, identity: Identity) -> anyhow::Result<u64> {
        let _turn = lock(&self.turn);
        let generation = self.identities.give(&self.rules, identity)?;
        self.ask_again(&self.rules.load_full());
        Ok(generation)
    }

    /// Looks at the clocks now and then, until it is dropped: grants end, and lives.
    pub(crate) async fn tend(self: Arc<Self>) {
        loop {
            tokio::time::sleep(TICK).await;
            let rules = self.rules.load();
            if self.grants.is_empty() && !rules.has_lifetimes() {
                continue;
            }
            drop(rules);
            let reloader = self.clone();
            if tokio::task::spawn_blocking(move || reloader.pass_time()).await.is_err() {
                tracing::error!("the clocks could not be looked at");
            }
        }
    }

    /// Ends what is over.
    fn pass_time(&self) {
        let over = self.grants.expire();
        let ended = self.ledger.ended(&self.rules.load());
        if !over.is_empty() || ended != lock(&self.turn).ended {
            self.change();
        }
        over.iter().for_each(|kept| self.part(kept, "its time is over"));
    }

    /// The same files with what time gives and takes now.
    fn change(&self) -> Loaded {
        let mut turn = lock(&self.turn);
        let current = RuleSet::clone(&self.rules.load());
        self.put(current, &mut turn)
    }

    fn part(&self, kept: &Kept, why: &str) {
        if let Some(sandbox) = kept.sandbox() {
            self.ledger.forget(&sandbox, &grants::rule_name(kept.id));
        }
        let message = format!("{} has ended: {why}", grants::describe(kept));
        grants::tell(&self.log, LifecycleEvent::GrantEnded, message);
    }

    fn tell(&self, event: LifecycleEvent, message: Option<&str>) {
        let policy = Some(record::policy(&self.rules.load()));
        let event = Lifecycle { event, message: message.map(Into::into), policy };
        let log = self.log.clone();
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            if let Err(down) = log.lifecycle(&event).await {
                tracing::warn!(%down, "a load could not be recorded");
            }
        });
    }
}

fn failure(outcome: &Outcome) -> String {
    let (probe, expected) = (&outcome.trial.probe, outcome.expected());
    format!("{}: the test of {probe} fails: expected {expected}", outcome.trial.at)
}

/// Every file that was read, or should have been.
fn files(sources: &Sources) -> Vec<PathBuf> {
    let named = sources.operator.iter().chain(&sources.policies).map(|file| &file.path);
    named.chain(sources.lists.keys()).map(PathBuf::from).collect()
}

/// Whether another process has a file open for writing. The kernel does not say so of other people's files; of
/// those only inotify tells, once they have been written to.
fn is_held(path: &PathBuf) -> bool {
    let file = fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    file.is_ok_and(|file| sys::fd::has_writer(&file))
}

/// Whether a file has been written since; one from the future has not, the clock has jumped.
fn is_younger(file: &PathBuf, since: SystemTime) -> bool {
    let changed = fs::metadata(file).and_then(|metadata| metadata.modified());
    changed.is_ok_and(|changed| changed > since && changed <= SystemTime::now())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Loaded {
    pub(crate) fn generation(&self) -> u64 {
        match self {
            Loaded::Fresh { generation, .. } | Loaded::Same { generation } => *generation,
        }
    }

    /// How many connections and streams lost their permission.
    pub(crate) fn cut(&self) -> usize {
        match self {
            Loaded::Fresh { cut, .. } => cut.len(),
            Loaded::Same { .. } => 0,
        }
    }

    /// Waits until those that were cut have gone.
    pub(crate) async fn settled(&self, live: &Live) {
        let Loaded::Fresh { cut, .. } = self else { return };
        let until = Instant::now() + LEAVE;
        while Instant::now() < until && cut.iter().any(|open| live.is_open(open.id)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
