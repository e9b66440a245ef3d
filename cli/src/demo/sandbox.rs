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

use super::agent::{Answer, Fetch, Order, Outcome, Reply, Task};
use jail::{Arrivals, Jail, Place, Plan, Program, Streams, TRUST, View, Wishes, environment};

/// Longest wait for anything that an agent does.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) struct Sandbox {
    pub(super) id: &'static str,
    jail: Jail,
    orders: File,
    replies: Receiver<Reply>,
    /// Replies that nobody has asked for yet.
    early: Vec<Reply>,
    number: u64,
}

/// A jail that stands, and nothing in it yet.
pub(super) struct Cell {
    id: &'static str,
    jail: Jail,
    orders: File,
    replies: File,
    pub(super) arrivals: Arrivals,
}

/// An order that was given.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ticket(u64);

impl Cell {
    /// Makes a jail from which `hidden` is not seen. This process must have one thread still.
    pub(super) fn make(id: &'static str, hidden: &Path) -> anyhow::Result<Self> {
        let (theirs, orders) = pipe2(OFlag::O_CLOEXEC)?;
        let (replies, output) = pipe2(OFlag::O_CLOEXEC)?;
        let plan = plan(hidden, [theirs, output])?;
        // The jail before has shut this process off; a second is made by somebody who may look at itself.
        set_dumpable(true)?;
        let (jail, arrivals) = Jail::make(&plan)?;
        Ok(Cell { id, jail, orders: orders.into(), replies: replies.into(), arrivals })
    }

    /// Lets the agent begin, which trusts these files.
    pub(super) fn begin(self, trust: &[(PathBuf, Vec<u8>)]) -> anyhow::Result<Sandbox> {
        let Cell { id, jail, orders, replies, .. } = self;
        jail.go(trust).context("the jail is gone")?;
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(replies).lines().map_while(Result::ok) {
                let Ok(reply) = serde_json::from_str(&line) else { return };
                if sender.send(reply).is_err() {
                    return;
                }
            }
        });
        Ok(Sandbox { id, jail, orders, replies: receiver, early: Vec::new(), number: 0 })
    }
}

impl Sandbox {
    /// Fetches, and waits for the answer; otherwise why there was none.
    pub(super) fn fetch(&mut self, fetch: &Fetch) -> anyhow::Result<Result<Answer, String>> {
        let ticket = self.start(Task::Fetch(fetch.clone()))?;
        self.fetched(ticket)
    }

    /// Waits for a fetch that was started.
    pub(super) fn fetched(&mut self, ticket: Ticket) -> anyhow::Result<Result<Answer, String>> {
        match self.wait(ticket)? {
            Outcome::Answered(answer) => Ok(Ok(answer)),
            Outcome::Nothing(why) => Ok(Err(why)),
            Outcome::Found(_) => bail!("the agent answers something else"),
        }
    }

    /// Looks a name up; its address, if it has one in there.
    pub(super) fn look(&mut self, name: &str) -> anyhow::Result<Option<String>> {
        let ticket = self.start(Task::Look(name.to_owned()))?;
        match self.wait(ticket)? {
            Outcome::Found(address) => Ok(Some(address)),
            Outcome::Nothing(_) => Ok(None),
            Outcome::Answered(_) => bail!("the agent answers something else"),
        }
    }

    /// Gives an order without waiting.
    pub(super) fn start(&mut self, task: Task) -> anyhow::Result<Ticket> {
        self.number += 1;
        let order = serde_json::to_string(&Order { number: self.number, task })?;
        writeln!(self.orders, "{order}").with_context(|| format!("{} is gone", self.id))?;
        Ok(Ticket(self.number))
    }

    /// What came of an order, if anything yet.
    pub(super) fn poll(&mut self, ticket: Ticket) -> Option<Outcome> {
        self.early.extend(self.replies.try_iter());
        self.take(ticket)
    }

    fn wait(&mut self, ticket: Ticket) -> anyhow::Result<Outcome> {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(outcome) = self.poll(ticket) {
                return Ok(outcome);
            }
            let left = until.saturating_duration_since(Instant::now());
            let reply = self.replies.recv_timeout(left);
            self.early.push(reply.with_context(|| format!("{} does not answer", self.id))?);
        }
    }

    fn take(&mut self, Ticket(number): Ticket) -> Option<Outcome> {
        let at = self.early.iter().position(|reply| reply.number == number)?;
        Some(self.early.swap_remove(at).outcome)
    }
}

impl Drop for Sandbox {
    /// Nothing inside is left.
    fn drop(&mut self) {
        self.jail.signal(Signal::SIGKILL as i32);
        self.jail.wait();
    }
}

/// A jail with nothing to write to but what is new in it, in which this binary runs as the agent.
fn plan(hidden: &Path, pipes: [OwnedFd; 2]) -> anyhow::Result<Plan> {
    let view = View::of(&Wishes {
        cwd: PathBuf::from("/"),
        hidden: vec![hidden.to_owned()],
        ..Wishes::default()
    })?;
    let own = std::env::current_exe().context("cannot find this program")?;
    let trust = certs::variables::variables(Path::new(TRUST))?;
    let trust = trust.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let program = Program {
        words: vec![own.into(), "demo-agent".into()],
        environment: environment(std::env::vars_os(), trust),
        place: Place::Background,
        blocked: SigSet::thread_get_mask()?,
        streams: Streams::Pipes(Arc::new(pipes)),
    };
    let socket = (hidden.to_owned(), CString::new("log/admin.sock")?);
    Ok(Plan { view, program, terminal: None, socket })
}
