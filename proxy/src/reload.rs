//! Reload: from files to rules, whole or not at all (P9), then every open connection is asked again and those
//! that lost their permission are cut (P10).

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use audit::{Lifecycle, LifecycleEvent, Log};
use rules::trial::Outcome;
use rules::{Decision, RuleSet, Sources, Timed, compile};

use crate::grants::{self, Grants, Kept, Wish};
use crate::identities::{Identities, Identity};
use crate::ledger::Ledger;
use crate::live::{Live, Open};
use crate::origin::Origin;
use crate::problems::{Severity, render};
use crate::{meters, record};

/// How often the clocks are looked at.
const TICK: Duration = Duration::from_millis(200);
/// How long losers are waited for, where somebody waits.
const LEAVE: Duration = Duration::from_secs(5);

/// What loads rules, and what they apply to.
pub(crate) struct Reloader {
    pub(crate) origin: Origin,
    /// Where Sandbar itself listens.
    pub(crate) own: Vec<SocketAddr>,
    pub(crate) rules: Arc<ArcSwap<RuleSet>>,
    pub(crate) identities: Identities,
    pub(crate) live: Arc<Live>,
    pub(crate) log: Log,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) grants: Arc<Grants>,
    /// One load at a time, and how the last one went.
    pub(crate) last: Mutex<Last>,
    /// What time gave and took; whoever changes the rules in force holds it.
    pub(crate) turn: Mutex<Timed>,
}

/// How the last load went.
#[derive(Clone, Debug)]
pub(crate) struct Last {
    pub(crate) at: Instant,
    /// Why the files are not what is in force; none if they are.
    pub(crate) trouble: Option<String>,
    digest: String,
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
    pub(crate) fn of(rules: &RuleSet) -> Self {
        Last { at: Instant::now(), trouble: None, digest: rules.files().to_string() }
    }
}

impl Reloader {
    pub(crate) fn last(&self) -> Last {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Every file that rules come from, to be watched.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let fixed = self.origin.files();
        let Ok(sources) = self.origin.read() else { return fixed };
        let named = sources.policies.iter().map(|file| PathBuf::from(&file.path));
        let lists = sources.lists.keys().map(PathBuf::from);
        fixed.into_iter().chain(named).chain(lists).collect()
    }

    /// Loads the files. Reads and compiles on the calling thread, which is none that carries traffic.
    ///
    /// # Errors
    ///
    /// Says what is wrong, with its place. The rules in force stay.
    pub(crate) fn reload(&self) -> Result<Loaded, String> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = self.rules.load().generation();
        match self.compiled(generation + 1) {
            Ok(fresh) if fresh.files().to_string() == last.digest => {
                last.trouble = None;
                Ok(Loaded::Same { generation })
            }
            Ok(fresh) => {
                *last = Last::of(&fresh);
                Ok(self.take_over(fresh))
            }
            Err(trouble) => {
                if last.trouble.as_ref() != Some(&trouble) {
                    tracing::error!(
                        "the policies are not good, the rules in force stay:\n{trouble}"
                    );
                    self.tell(LifecycleEvent::PolicyRejected, Some(&trouble));
                }
                last.trouble = Some(trouble.clone());
                meters::reload("refused");
                Err(trouble)
            }
        }
    }

    /// Reads, compiles and tries the files.
    fn compiled(&self, generation: u64) -> Result<RuleSet, String> {
        let read = self.origin.read().map_err(|error| format!("{error:#}"))?;
        let sources = Sources { generation, own: self.own.clone(), ..read };
        let rules = compile(&sources, &[]).map_err(|problems| {
            let shown = problems.iter().map(|problem| render(problem, Severity::Error));
            let shown = shown.collect::<Vec<_>>().join("\n");
            anstream::adapter::strip_str(&shown).to_string() // it is read in logs too
        })?;
        let rules = self.identities.apply(rules).map_err(|error| format!("{error:#}"))?;
        let tried = rules.run_trials();
        let failed: Vec<String> = tried.iter().filter(|one| !one.passed()).map(failure).collect();
        if failed.is_empty() { Ok(rules) } else { Err(failed.join("\n")) }
    }

    fn take_over(&self, fresh: RuleSet) -> Loaded {
        let loaded = self.put(fresh, &mut self.turn());
        meters::reload("loaded");
        self.tell(LifecycleEvent::PolicyLoaded, None);
        loaded
    }

    /// Puts rules in force, with what time gives and takes, as the next generation.
    fn put(&self, fresh: RuleSet, turn: &mut Timed) -> Loaded {
        // One that was given an identity while the files were read keeps it.
        let fresh = self.identities.apply(fresh.clone()).unwrap_or(fresh);
        let generation = self.rules.load().generation() + 1;
        let ended = self.ledger.ended(&fresh);
        let timed = Timed { grants: self.grants.in_force(), ended };
        let rules = fresh.timed(&timed, generation).unwrap_or_else(|_| {
            tracing::error!("the grants cannot be made rules: none is in force");
            RuleSet::clone(&fresh)
        });
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
        meters::revoked(cut.len());
        cut
    }

    /// Makes a grant, records it, and puts it in force.
    ///
    /// # Errors
    ///
    /// Says why there is none; that is recorded too.
    pub(crate) async fn grant(&self, wish: Wish) -> anyhow::Result<(Kept, u64)> {
        let asked = format!("{} for {}, by {}: {}", wish.sandbox, wish.host, wish.by, wish.why);
        let rules = self.rules.load_full();
        let kept = self.grants.make(wish, &rules).inspect_err(|error| {
            grants::tell(&self.log, LifecycleEvent::GrantRefused, format!("{asked}: {error:#}"));
        })?;
        let message = Some(grants::describe(&kept).into());
        let event = Lifecycle { event: LifecycleEvent::GrantMade, message, policy: None };
        if let Err(down) = self.log.lifecycle(&event).await {
            self.grants.revoke(kept.id)?; // no record, no grant
            anyhow::bail!("it cannot be recorded, so it is not made: {down}");
        }
        let generation = self.change().generation();
        Ok((kept, generation))
    }

    /// Takes a grant back, and what is open by it.
    pub(crate) fn revoke(&self, id: u64, by: &str) -> anyhow::Result<Loaded> {
        let gone = self.grants.revoke(id)?;
        let loaded = self.change();
        self.part(&gone, &format!("revoked by {by}"));
        Ok(loaded)
    }

    /// Gives a sandbox of a warm pool its identity.
    pub(crate) fn identify(&self, identity: Identity) -> anyhow::Result<u64> {
        let _turn = self.turn();
        self.identities.give(&self.rules, identity)
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
        if !over.is_empty() || ended != self.turn().ended {
            self.change();
        }
        over.iter().for_each(|kept| self.part(kept, "its time is over"));
    }

    /// The same files with what time gives and takes now.
    fn change(&self) -> Loaded {
        let mut turn = self.turn();
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

    fn turn(&self) -> MutexGuard<'_, Timed> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
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
    let (file, line) = (outcome.policy.file(), outcome.trial.line);
    let (probe, expected) = (&outcome.trial.probe, outcome.expected());
    format!("{file}:{line}: the test of {probe} fails: expected {expected}")
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
