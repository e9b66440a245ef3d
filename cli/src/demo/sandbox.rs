//! A sandbox of the demo: a jail like that of `sandbar run`, with an agent inside that executes tasks.

use std::ffi::CString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::fcntl::OFlag;
use nix::sys::prctl::set_dumpable;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::pipe2;

use super::agent::{AgentReply, AgentRequest, AgentTask, FetchRequest, FetchResponse, TaskOutcome};
use jail::{
    CommandSpec, CommandStream, FilesystemView, Jail, JailListeners, JailPlan, JobPlacement, TRUST_DIR,
    ViewOptions, command_environment,
};

/// Longest wait for a reply of an agent.
const AGENT_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) struct DemoSandbox {
    pub(super) id: &'static str,
    jail: Jail,
    requests: File,
    replies: Receiver<AgentReply>,
    /// Replies received before their task was waited for.
    early: Vec<AgentReply>,
    number: u64,
}

/// A jail whose agent has not started yet.
pub(super) struct PreparedSandbox {
    id: &'static str,
    jail: Jail,
    requests: File,
    replies: File,
    pub(super) arrivals: JailListeners,
}

/// A task sent to the agent.
#[derive(Clone, Copy, Debug)]
pub(super) struct TaskId(u64);

impl PreparedSandbox {
    /// Creates a jail that cannot see `hidden`. This process must still be single-threaded.
    pub(super) fn create(id: &'static str, hidden: &Path) -> anyhow::Result<Self> {
        let (theirs, requests) = pipe2(OFlag::O_CLOEXEC)?;
        let (replies, output) = pipe2(OFlag::O_CLOEXEC)?;
        let plan = jail_plan(hidden, [theirs, output])?;
        // Creating the first jail made this process undumpable, and then /proc/self belongs to root and its uid_map cannot
        // be written. Undo that for the second jail, which makes the process undumpable again.
        set_dumpable(true)?;
        let (jail, arrivals) = Jail::create(&plan)?;
        Ok(PreparedSandbox { id, jail, requests: requests.into(), replies: replies.into(), arrivals })
    }

    /// Starts the agent with these trust files.
    pub(super) fn start_agent(self, trust: &[(PathBuf, Vec<u8>)]) -> anyhow::Result<DemoSandbox> {
        let PreparedSandbox { id, jail, requests, replies, .. } = self;
        jail.start_command(trust).context("the jail has exited")?;
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(replies).lines().map_while(Result::ok) {
                let Ok(reply) = serde_json::from_str(&line) else { return };
                if sender.send(reply).is_err() {
                    return;
                }
            }
        });
        Ok(DemoSandbox { id, jail, requests, replies: receiver, early: Vec::new(), number: 0 })
    }
}

impl DemoSandbox {
    /// Fetches and waits for the response; the inner error says why there was none.
    pub(super) fn fetch(&mut self, fetch: &FetchRequest) -> anyhow::Result<Result<FetchResponse, String>> {
        let task_id = self.start_task(AgentTask::Fetch(fetch.clone()))?;
        self.wait_fetch(task_id)
    }

    /// Waits for a fetch started with [`Self::start_task`].
    pub(super) fn wait_fetch(&mut self, task_id: TaskId) -> anyhow::Result<Result<FetchResponse, String>> {
        match self.wait_outcome(task_id)? {
            TaskOutcome::Answered(answer) => Ok(Ok(answer)),
            TaskOutcome::Nothing(why) => Ok(Err(why)),
            TaskOutcome::Found(_) => bail!("unexpected reply from the agent"),
        }
    }

    /// Resolves a name inside the sandbox; returns its address, if any.
    pub(super) fn resolve(&mut self, name: &str) -> anyhow::Result<Option<String>> {
        let task_id = self.start_task(AgentTask::Look(name.to_owned()))?;
        match self.wait_outcome(task_id)? {
            TaskOutcome::Found(address) => Ok(Some(address)),
            TaskOutcome::Nothing(_) => Ok(None),
            TaskOutcome::Answered(_) => bail!("unexpected reply from the agent"),
        }
    }

    /// Sends a task without waiting for the reply.
    pub(super) fn start_task(&mut self, task: AgentTask) -> anyhow::Result<TaskId> {
        self.number += 1;
        let request = serde_json::to_string(&AgentRequest { number: self.number, task })?;
        writeln!(self.requests, "{request}").with_context(|| format!("{} has exited", self.id))?;
        Ok(TaskId(self.number))
    }

    /// Returns the outcome of a task, if it has arrived.
    pub(super) fn poll(&mut self, task_id: TaskId) -> Option<TaskOutcome> {
        self.early.extend(self.replies.try_iter());
        self.take_reply(task_id)
    }

    fn wait_outcome(&mut self, task_id: TaskId) -> anyhow::Result<TaskOutcome> {
        let until = Instant::now() + AGENT_TIMEOUT;
        loop {
            if let Some(outcome) = self.poll(task_id) {
                return Ok(outcome);
            }
            let left = until.saturating_duration_since(Instant::now());
            let reply = self.replies.recv_timeout(left);
            self.early.push(reply.with_context(|| format!("{} did not reply in time", self.id))?);
        }
    }

    fn take_reply(&mut self, TaskId(number): TaskId) -> Option<TaskOutcome> {
        let at = self.early.iter().position(|reply| reply.number == number)?;
        Some(self.early.swap_remove(at).outcome)
    }
}

impl Drop for DemoSandbox {
    /// Kills everything inside.
    fn drop(&mut self) {
        self.jail.signal(Signal::SIGKILL as i32);
        self.jail.wait();
    }
}

/// Plans a jail without writable host directories, which runs this binary as the agent.
fn jail_plan(hidden: &Path, [input, output]: [OwnedFd; 2]) -> anyhow::Result<JailPlan> {
    let view = FilesystemView::build(&ViewOptions {
        cwd: PathBuf::from("/"),
        hidden: vec![hidden.to_owned()],
        ..ViewOptions::default()
    })?;
    let binary = std::env::current_exe().context("cannot find this binary")?;
    let trust = certs::variables::variables(Path::new(TRUST_DIR))?;
    let trust = trust.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let program = CommandSpec {
        words: vec![binary.into(), "demo-agent".into()],
        environment: command_environment(std::env::vars_os(), trust),
        place: JobPlacement::Background,
        blocked: SigSet::thread_get_mask()?,
        streams: [
            CommandStream::Pipe(Arc::new(input)),
            CommandStream::Pipe(Arc::new(output)),
            CommandStream::Null,
        ],
    };
    let socket = (hidden.to_owned(), CString::new("log/admin.sock")?);
    Ok(JailPlan { view, program, terminal: None, socket })
}
