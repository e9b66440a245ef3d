//! Probes, their verdicts, and running them in separate processes.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// Longest time one probe may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(8);
/// Number of probes run at once.
const PARALLEL_PROBES: usize = 8;
/// How often to check whether a probe has finished.
const POLL_INTERVAL: Duration = Duration::from_millis(3);
/// Maximum output of a probe process.
const MAX_OUTPUT: u64 = 64 << 10;

/// The result of an attempt or a check, with the evidence for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", content = "how", rename_all = "lowercase")]
pub(super) enum ProbeVerdict {
    /// The attempt reached Sandbar, which applied its rules.
    Answered(String),
    /// The attempt failed.
    Blocked(String),
    /// The attempt got around Sandbar.
    Escaped(String),
    /// The set-up is correct.
    Fine(String),
    /// The attempt could not be made, or its result cannot be determined from here.
    Unknown(String),
    /// The set-up is wrong.
    Wrong(String),
}

impl ProbeVerdict {
    /// Whether this verdict makes the command exit with 1.
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

    /// Returns the worst of several verdicts, or `Blocked(none)` if there are none.
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
                ProbeVerdict::Blocked(format!("{} tried, last: {how}", all.len()))
            }
            (Some(worst), _) => worst.clone(),
        }
    }
}

/// One attempt or check, which takes its targets from `T`.
pub(super) struct DoctorProbe<T> {
    pub(super) group: &'static str,
    /// Name in `--json` and in DOCTOR.md; never renamed.
    pub(super) name: String,
    /// Description for people.
    pub(super) what: String,
    /// What to change if the verdict is bad.
    pub(super) fix: &'static str,
    pub(super) run: Box<dyn Fn(&T) -> ProbeVerdict + Send + Sync>,
}

impl<T> DoctorProbe<T> {
    pub(super) fn new(
        group: &'static str,
        name: impl Into<String>,
        what: impl Into<String>,
        fix: &'static str,
        run: impl Fn(&T) -> ProbeVerdict + Send + Sync + 'static,
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

/// A probe and its verdict.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ProbeFinding {
    pub(super) group: &'static str,
    pub(super) name: String,
    pub(super) what: String,
    #[serde(flatten)]
    pub(super) verdict: ProbeVerdict,
    /// What to change, if the verdict is bad.
    pub(super) fix: Option<&'static str>,
    pub(super) milliseconds: u64,
}

/// Runs every probe in a process of its own: a probe may hang, be killed, or enter another namespace without
/// affecting the others.
pub(super) fn run_isolated<T>(probes: &[DoctorProbe<T>]) -> anyhow::Result<Vec<ProbeFinding>> {
    let program = std::env::current_exe().context("cannot find the path of this binary")?;
    let (next, findings) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(probe) = probes.get(at) else { return };
            let started = Instant::now();
            let verdict = run_in_process(&program, &probe.name);
            let finding = probe.finding(verdict, started.elapsed());
            findings.lock().unwrap_or_else(PoisonError::into_inner).push((at, finding));
        }
    };
    // This process calls no probe itself: it passes the name to a child, which runs it.
    std::thread::scope(|scope| (0..PARALLEL_PROBES).for_each(|_| drop(scope.spawn(work))));
    let mut findings = findings.into_inner().unwrap_or_else(PoisonError::into_inner);
    findings.sort_by_key(|(at, _)| *at);
    Ok(findings.into_iter().map(|(_, finding)| finding).collect())
}

/// Runs one probe in a child process of this binary.
fn run_in_process(program: &std::path::Path, name: &str) -> ProbeVerdict {
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).args(["--probe", name]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return ProbeVerdict::Unknown(format!("cannot start a process: {error}")),
    };
    let Some(status) = wait_with_timeout(&mut child) else {
        return ProbeVerdict::Unknown(format!("it took longer than {} s", PROBE_TIMEOUT.as_secs()));
    };
    let mut output = Vec::new();
    if let Some(out) = child.stdout.take() {
        drop(out.take(MAX_OUTPUT).read_to_end(&mut output)); // an incomplete verdict fails to parse below
    }
    match (serde_json::from_slice(&output), status.signal()) {
        (Ok(verdict), _) => verdict,
        (Err(_), Some(libc::SIGSYS)) => ProbeVerdict::Blocked("killed by the system call filter".to_owned()),
        (Err(_), Some(signal)) => ProbeVerdict::Unknown(format!("killed by signal {signal}")),
        (Err(_), None) => ProbeVerdict::Unknown(format!("it ended without a verdict, {status}")),
    }
}

/// Waits for the child; kills it and returns `None` after the timeout.
fn wait_with_timeout(child: &mut Child) -> Option<ExitStatus> {
    let end = Instant::now() + PROBE_TIMEOUT;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < end => std::thread::sleep(POLL_INTERVAL),
            Ok(None) | Err(_) => {
                drop(child.kill()); // fails if it has just ended
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
