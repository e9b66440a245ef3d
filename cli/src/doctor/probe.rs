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
const PROBE_TIMEOUT: Duration = Duration::from_secs(8);
/// Attempts at once.
const PARALLEL_PROBES: usize = 8;
/// How often an attempt that is on its way is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(3);
/// Most bytes that an attempt can say of itself.
const MAX_OUTPUT: u64 = 64 << 10;

/// What an attempt, or a look at the set-up, came to; each with how that is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", content = "how", rename_all = "lowercase")]
pub(super) enum ProbeVerdict {
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

impl ProbeVerdict {
    /// Whether it is reason enough to say no.
    pub(super) fn is_bad(&self) -> bool {
        match self {
            ProbeVerdict::Escaped(_) | ProbeVerdict::Wrong(_) => true,
            ProbeVerdict::Answered(_)
            | ProbeVerdict::Blocked(_)
            | ProbeVerdict::Fine(_)
            | ProbeVerdict::Unknown(_) => false,
        }
    }

    pub(super) fn how(&self) -> &str {
        match self {
            ProbeVerdict::Answered(how)
            | ProbeVerdict::Blocked(how)
            | ProbeVerdict::Escaped(how)
            | ProbeVerdict::Fine(how)
            | ProbeVerdict::Unknown(how)
            | ProbeVerdict::Wrong(how) => how,
        }
    }

    /// The worst of several attempts at one thing, or `none` where there was none.
    pub(super) fn worst(all: impl IntoIterator<Item = ProbeVerdict>, none: &str) -> ProbeVerdict {
        let badness = |verdict: &ProbeVerdict| match verdict {
            ProbeVerdict::Fine(_) => 0,
            ProbeVerdict::Blocked(_) => 1,
            ProbeVerdict::Answered(_) => 2,
            ProbeVerdict::Unknown(_) => 3,
            ProbeVerdict::Wrong(_) => 4,
            ProbeVerdict::Escaped(_) => 5,
        };
        let all: Vec<ProbeVerdict> = all.into_iter().collect();
        match (all.iter().max_by_key(|verdict| badness(verdict)), all.len()) {
            (None, _) => ProbeVerdict::Blocked(none.to_owned()),
            (Some(ProbeVerdict::Blocked(how)), 2..) => {
                ProbeVerdict::Blocked(format!("{} tried, the last: {how}", all.len()))
            }
            (Some(worst), _) => worst.clone(),
        }
    }
}

/// One thing to try, on a ground that says whereto.
pub(super) struct DoctorProbe<G> {
    pub(super) group: &'static str,
    /// What it is called, in `--json` and in the manual: never renamed.
    pub(super) name: String,
    /// What is tried, for people.
    pub(super) what: String,
    /// What to change where it is bad.
    pub(super) fix: &'static str,
    pub(super) run: Box<dyn Fn(&G) -> ProbeVerdict + Send + Sync>,
}

impl<G> DoctorProbe<G> {
    pub(super) fn new(
        group: &'static str,
        name: impl Into<String>,
        what: impl Into<String>,
        fix: &'static str,
        run: impl Fn(&G) -> ProbeVerdict + Send + Sync + 'static,
    ) -> Self {
        DoctorProbe { group, name: name.into(), what: what.into(), fix, run: Box::new(run) }
    }

    pub(super) fn finding(&self, verdict: ProbeVerdict, took: Duration) -> ProbeFinding {
        ProbeFinding {
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
pub(super) struct ProbeFinding {
    pub(super) group: &'static str,
    pub(super) name: String,
    pub(super) what: String,
    #[serde(flatten)]
    pub(super) verdict: ProbeVerdict,
    /// What to change.
    pub(super) fix: Option<&'static str>,
    pub(super) milliseconds: u64,
}

/// Tries everything, each in a process of its own: one may hang, be killed, or enter another namespace, and the
/// others do not notice.
pub(super) fn run_isolated<G>(probes: &[DoctorProbe<G>]) -> anyhow::Result<Vec<ProbeFinding>> {
    let program = std::env::current_exe().context("where this program lies cannot be seen")?;
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(probe) = probes.get(at) else { return };
            let started = Instant::now();
            let verdict = run_in_process(&program, &probe.name);
            let finding = probe.finding(verdict, started.elapsed());
            found.lock().unwrap_or_else(PoisonError::into_inner).push((at, finding));
        }
    };
    // No closure of the probes is called here: they are told by name what to do.
    std::thread::scope(|scope| (0..PARALLEL_PROBES).for_each(|_| drop(scope.spawn(work))));
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_by_key(|(at, _)| *at);
    Ok(found.into_iter().map(|(_, finding)| finding).collect())
}

/// Has another process of this program try one thing.
fn run_in_process(program: &std::path::Path, name: &str) -> ProbeVerdict {
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).args(["--probe", name]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return ProbeVerdict::Unknown(format!("no process could be made: {error}")),
    };
    let Some(status) = wait_with_timeout(&mut child) else {
        return ProbeVerdict::Unknown(format!("it took more than {} s", PROBE_TIMEOUT.as_secs()));
    };
    let mut said = Vec::new();
    if let Some(out) = child.stdout.take() {
        drop(out.take(MAX_OUTPUT).read_to_end(&mut said)); // what cannot be read is no verdict, below
    }
    match (serde_json::from_slice(&said), status.signal()) {
        (Ok(verdict), _) => verdict,
        (Err(_), Some(libc::SIGSYS)) => {
            ProbeVerdict::Blocked("killed by the system call filter".to_owned())
        }
        (Err(_), Some(signal)) => ProbeVerdict::Unknown(format!("killed by signal {signal}")),
        (Err(_), None) => ProbeVerdict::Unknown(format!("it ended without a word, {status}")),
    }
}

/// Waits for the end; one that takes too long is killed.
fn wait_with_timeout(child: &mut Child) -> Option<ExitStatus> {
    let end = Instant::now() + PROBE_TIMEOUT;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < end => std::thread::sleep(POLL_INTERVAL),
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
            (vec![], ProbeVerdict::Blocked(some("none"))),
            (
                vec![ProbeVerdict::Blocked(some("a")), ProbeVerdict::Answered(some("b"))],
                ProbeVerdict::Answered(some("b")),
            ),
            (
                vec![ProbeVerdict::Escaped(some("a")), ProbeVerdict::Unknown(some("b"))],
                ProbeVerdict::Escaped(some("a")),
            ),
        ] {
            assert_eq!(ProbeVerdict::worst(all.clone(), "none"), wanted, "{all:?}");
        }
    }
}
