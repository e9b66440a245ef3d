//! What is tried or looked at, and what it came to.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// Longest that one attempt may take, whatever it waits for.
const LONGEST: Duration = Duration::from_secs(8);
/// Attempts at once.
const AT_ONCE: usize = 8;
/// How often an attempt that is on its way is looked at.
const LOOK: Duration = Duration::from_millis(3);
/// Most bytes that an attempt can say of itself.
const SAID: u64 = 64 << 10;

/// What an attempt, or a look at the set-up, came to; each with how that is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", content = "how", rename_all = "lowercase")]
pub(super) enum Verdict {
    /// It arrived at Sandbar, which answered by its rules.
    Answered(String),
    /// It did not get anywhere.
    Blocked(String),
    /// It got around Sandbar.
    Escaped(String),
    /// The set-up is as it must be.
    Fine(String),
    /// It could not be tried, or what came of it cannot be told from here.
    Unknown(String),
    /// The set-up is not as it must be.
    Wrong(String),
}

impl Verdict {
    /// Whether it is reason enough to say no.
    pub(super) fn is_bad(&self) -> bool {
        match self {
            Verdict::Escaped(_) | Verdict::Wrong(_) => true,
            Verdict::Answered(_) | Verdict::Blocked(_) | Verdict::Fine(_) | Verdict::Unknown(_) => {
                false
            }
        }
    }

    pub(super) fn how(&self) -> &str {
        match self {
            Verdict::Answered(how)
            | Verdict::Blocked(how)
            | Verdict::Escaped(how)
            | Verdict::Fine(how)
            | Verdict::Unknown(how)
            | Verdict::Wrong(how) => how,
        }
    }

    /// The worst of several attempts at one thing, or `none` where there was none.
    pub(super) fn worst(all: impl IntoIterator<Item = Verdict>, none: &str) -> Verdict {
        let badness = |verdict: &Verdict| match verdict {
            Verdict::Fine(_) => 0,
            Verdict::Blocked(_) => 1,
            Verdict::Answered(_) => 2,
            Verdict::Unknown(_) => 3,
            Verdict::Wrong(_) => 4,
            Verdict::Escaped(_) => 5,
        };
        let all: Vec<Verdict> = all.into_iter().collect();
        match (all.iter().max_by_key(|verdict| badness(verdict)), all.len()) {
            (None, _) => Verdict::Blocked(none.to_owned()),
            (Some(Verdict::Blocked(how)), 2..) => {
                Verdict::Blocked(format!("{} tried, the last: {how}", all.len()))
            }
            (Some(worst), _) => worst.clone(),
        }
    }
}

/// One thing to try, on a ground that says whereto.
pub(super) struct Probe<G> {
    pub(super) group: &'static str,
    /// What it is called, in `--json` and in the manual: never renamed.
    pub(super) name: String,
    /// What is tried, for people.
    pub(super) what: String,
    /// What to change where it is bad.
    pub(super) fix: &'static str,
    pub(super) run: Box<dyn Fn(&G) -> Verdict + Send + Sync>,
}

impl<G> Probe<G> {
    pub(super) fn new(
        group: &'static str,
        name: impl Into<String>,
        what: impl Into<String>,
        fix: &'static str,
        run: impl Fn(&G) -> Verdict + Send + Sync + 'static,
    ) -> Self {
        Probe { group, name: name.into(), what: what.into(), fix, run: Box::new(run) }
    }

    pub(super) fn found(&self, verdict: Verdict, took: Duration) -> Finding {
        Finding {
            group: self.group,
            name: self.name.clone(),
            what: self.what.clone(),
            fix: verdict.is_bad().then_some(self.fix),
            verdict,
            milliseconds: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// What was tried, and what it came to.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Finding {
    pub(super) group: &'static str,
    pub(super) name: String,
    pub(super) what: String,
    #[serde(flatten)]
    pub(super) verdict: Verdict,
    /// What to change.
    pub(super) fix: Option<&'static str>,
    pub(super) milliseconds: u64,
}

/// Tries everything, each in a process of its own: one may hang, be killed, or enter another namespace, and the
/// others do not notice.
pub(super) fn try_apart<G>(probes: &[Probe<G>]) -> anyhow::Result<Vec<Finding>> {
    let program = std::env::current_exe().context("where this program lies cannot be seen")?;
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(probe) = probes.get(at) else { return };
            let started = Instant::now();
            let verdict = apart(&program, &probe.name);
            let finding = probe.found(verdict, started.elapsed());
            found.lock().unwrap_or_else(PoisonError::into_inner).push((at, finding));
        }
    };
    // No closure of the probes is called here: they are told by name what to do.
    std::thread::scope(|scope| (0..AT_ONCE).for_each(|_| drop(scope.spawn(work))));
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_by_key(|(at, _)| *at);
    Ok(found.into_iter().map(|(_, finding)| finding).collect())
}

/// Has another process of this program try one thing.
fn apart(program: &std::path::Path, name: &str) -> Verdict {
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).args(["--probe", name]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return Verdict::Unknown(format!("no process could be made: {error}")),
    };
    let Some(status) = ended(&mut child) else {
        return Verdict::Unknown(format!("it took more than {} s", LONGEST.as_secs()));
    };
    let mut said = Vec::new();
    if let Some(out) = child.stdout.take() {
        drop(out.take(SAID).read_to_end(&mut said)); // what cannot be read is no verdict, below
    }
    match (serde_json::from_slice(&said), status.signal()) {
        (Ok(verdict), _) => verdict,
        (Err(_), Some(libc::SIGSYS)) => {
            Verdict::Blocked("killed by the system call filter".to_owned())
        }
        (Err(_), Some(signal)) => Verdict::Unknown(format!("killed by signal {signal}")),
        (Err(_), None) => Verdict::Unknown(format!("it ended without a word, {status}")),
    }
}

/// Waits for the end; one that takes too long is killed.
fn ended(child: &mut Child) -> Option<ExitStatus> {
    let end = Instant::now() + LONGEST;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < end => std::thread::sleep(LOOK),
            Ok(None) | Err(_) => {
                drop(child.kill()); // one that has just ended needs it no more
                drop(child.wait());
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_counts() {
        let some = |text: &str| text.to_owned();
        for (all, wanted) in [
            (vec![], Verdict::Blocked(some("none"))),
            (
                vec![Verdict::Blocked(some("a")), Verdict::Answered(some("b"))],
                Verdict::Answered(some("b")),
            ),
            (
                vec![Verdict::Escaped(some("a")), Verdict::Unknown(some("b"))],
                Verdict::Escaped(some("a")),
            ),
        ] {
            assert_eq!(Verdict::worst(all.clone(), "none"), wanted, "{all:?}");
        }
    }
}
