//! A sandbox of the story: a jail like that of `sandbar run`, and the agent in it that is told what to do.

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
    CommandSpec, CommandStdio, FilesystemView, Jail, JailListeners, JailPlan, JobPlacement,
    TRUST_DIR, ViewOptions, command_environment,
};

/// Longest wait for anything that an agent does.
const AGENT_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) struct DemoSandbox {
    pub(super) id: &'static str,
    jail: Jail,
    orders: File,
    replies: Receiver<AgentReply>,
    /// Replies that nobody has asked for yet.
    early: Vec<AgentReply>,
    number: u64,
}

/// A jail that stands, and nothing in it yet.
pub(super) struct PreparedSandbox {
    id: &'static str,
    jail: Jail,
    orders: File,
    replies: File,
    pub(super) arrivals: JailListeners,
}

/// An order that was given.
#[derive(Clone, Copy, Debug)]
pub(super) struct TaskId(u64);

impl PreparedSandbox {
    /// Makes a jail from which `hidden` is not seen. This process must have one thread still.
    pub(super) fn create(id: &'static str, hidden: &Path) -> anyhow::Result<Self> {
        let (theirs, orders) = pipe2(OFlag::O_CLOEXEC)?;
        let (replies, output) = pipe2(OFlag::O_CLOEXEC)?;
        let plan = jail_plan(hidden, [theirs, output])?;
        // The jail before has shut this process off; a second is made by somebody who may look at itself.
        set_dumpable(true)?;
        let (jail, arrivals) = Jail::create(&plan)?;
        Ok(PreparedSandbox { id, jail, orders: orders.into(), replies: replies.into(), arrivals })
    }

    /// Lets the agent begin, which trusts these files.
    pub(super) fn start_agent(self, trust: &[(PathBuf, Vec<u8>)]) -> anyhow::Result<DemoSandbox> {
        let PreparedSandbox { id, jail, orders, replies, .. } = self;
        jail.start_command(trust).context("the jail is gone")?;
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(replies).lines().map_while(Result::ok) {
                let Ok(reply) = serde_json::from_str(&line) else { return };
                if sender.send(reply).is_err() {
                    return;
                }
            }
        });
        Ok(DemoSandbox { id, jail, orders, replies: receiver, early: Vec::new(), number: 0 })
    }
}

impl DemoSandbox {
    /// Fetches, and waits for the answer; otherwise why there was none.
    pub(super) fn fetch(
        &mut self,
        fetch: &FetchRequest,
    ) -> anyhow::Result<Result<FetchResponse, String>> {
        let ticket = self.start_task(AgentTask::Fetch(fetch.clone()))?;
        self.wait_fetch(ticket)
    }

    /// Waits for a fetch that was started.
    pub(super) fn wait_fetch(
        &mut self,
        ticket: TaskId,
    ) -> anyhow::Result<Result<FetchResponse, String>> {
        match self.wait_outcome(ticket)? {
            TaskOutcome::Answered(answer) => Ok(Ok(answer)),
            TaskOutcome::Nothing(why) => Ok(Err(why)),
            TaskOutcome::Found(_) => bail!("the agent answers something else"),
        }
    }

    /// Looks a name up; its address, if it has one in there.
    pub(super) fn resolve(&mut self, name: &str) -> anyhow::Result<Option<String>> {
        let ticket = self.start_task(AgentTask::Look(name.to_owned()))?;
        match self.wait_outcome(ticket)? {
            TaskOutcome::Found(address) => Ok(Some(address)),
            TaskOutcome::Nothing(_) => Ok(None),
            TaskOutcome::Answered(_) => bail!("the agent answers something else"),
        }
    }

    /// Gives an order without waiting.
    pub(super) fn start_task(&mut self, task: AgentTask) -> anyhow::Result<TaskId> {
        self.number += 1;
        let order = serde_json::to_string(&AgentRequest { number: self.number, task })?;
        writeln!(self.orders, "{order}").with_context(|| format!("{} is gone", self.id))?;
        Ok(TaskId(self.number))
    }

    /// What came of an order, if anything yet.
    pub(super) fn poll(&mut self, ticket: TaskId) -> Option<TaskOutcome> {
        self.early.extend(self.replies.try_iter());
        self.take_reply(ticket)
    }

    fn wait_outcome(&mut self, ticket: TaskId) -> anyhow::Result<TaskOutcome> {
        let until = Instant::now() + AGENT_TIMEOUT;
        loop {
            if let Some(outcome) = self.poll(ticket) {
                return Ok(outcome);
            }
            let left = until.saturating_duration_since(Instant::now());
            let reply = self.replies.recv_timeout(left);
            self.early.push(reply.with_context(|| format!("{} does not answer", self.id))?);
        }
    }

    fn take_reply(&mut self, TaskId(number): TaskId) -> Option<TaskOutcome> {
        let at = self.early.iter().position(|reply| reply.number == number)?;
        Some(self.early.swap_remove(at).outcome)
    }
}

impl Drop for DemoSandbox {
    /// Nothing inside is left.
    fn drop(&mut self) {
        self.jail.signal(Signal::SIGKILL as i32);
        self.jail.wait();
    }
}

/// A jail with nothing to write to but what is new in it, in which this binary runs as the agent.
fn jail_plan(hidden: &Path, pipes: [OwnedFd; 2]) -> anyhow::Result<JailPlan> {
    let view = FilesystemView::build(&ViewOptions {
        cwd: PathBuf::from("/"),
        hidden: vec![hidden.to_owned()],
        ..ViewOptions::default()
    })?;
    let own = std::env::current_exe().context("cannot find this program")?;
    let trust = certs::variables::variables(Path::new(TRUST_DIR))?;
    let trust = trust.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let program = CommandSpec {
        words: vec![own.into(), "demo-agent".into()],
        environment: command_environment(std::env::vars_os(), trust),
        place: JobPlacement::Background,
        blocked: SigSet::thread_get_mask()?,
        streams: CommandStdio::Pipes(Arc::new(pipes)),
    };
    let socket = (hidden.to_owned(), CString::new("log/admin.sock")?);
    Ok(JailPlan { view, program, terminal: None, socket })
}
