//! `sandbar run`: a command in a jail of its own, with Sandbar as its only way out.

mod denials;
mod prepare;
mod summary;
mod terminal;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use audit::{Lifecycle, LifecycleEvent};
use certs::{Authority, AuthorityOptions, UnixTime, bundle, trust};
use nix::sys::signal::Signal;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, spawn_blocking};

use self::denials::Denials;
use self::prepare::Prepared;
use self::summary::Summary;
use self::terminal::Terminal;
use super::Output;
use crate::terminal::{BAD, paint};
use jail::{Fate, Jail, News, Sockets, TRUST, Told};
use proxy::admin::status::State;
use proxy::app::{App, Given, Witness};

/// Exit status for what is ours and not the command's, as of env(1).
const OWN_FAILURE: u8 = 125;
/// Exit status for a command that took too long, as of timeout(1).
const TIMED_OUT: u8 = 124;
/// How long a command that took too long has for its end.
const GRACE: Duration = Duration::from_secs(5);
/// How long the last connections have for their end, once everything inside is gone.
const SETTLE: Duration = Duration::from_secs(2);
/// How often it is looked for unix sockets that were made since.
const COVER: Duration = Duration::from_secs(1);
/// News and signals that wait to be looked at.
const WAITING: usize = 64;
/// How often something is looked at of which nobody tells.
const LOOK: Duration = Duration::from_millis(2);

/// Run a command in a jail whose only way out is Sandbar
///
/// No root, no Docker. Nothing is allowed but what --allow and --policy say. Exit status: the command's, or 128
/// and its signal; 124 if it took too long, 125 if there was no jail, 126 if it cannot be run, 127 if it is not
/// there.
#[derive(clap::Args, Debug)]
pub(crate) struct RunArgs {
    /// A policy file or a directory of them; may be given several times
    #[arg(long, short = 'p', value_name = "PATH")]
    policy: Vec<PathBuf>,
    /// A host that may be reached, such as `github.com`, `*.example.com` or `db.example.com:8443`
    #[arg(long, short = 'a', value_name = "HOST")]
    allow: Vec<String>,
    /// What the sandbox is called in records [default: run-PID]
    #[arg(long, value_name = "NAME")]
    sandbox: Option<String>,
    /// End the command after this long, such as `90s` or `2h`
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    /// A directory that may be written besides the working directory and the home directory
    #[arg(long, value_name = "DIR")]
    writable: Vec<PathBuf>,
    /// Something that would be hidden and shall be seen, such as `~/.config/gh`; read-only
    #[arg(long, value_name = "PATH")]
    visible: Vec<PathBuf>,
    /// The resolver to ask [default: those of /etc/resolv.conf]
    #[arg(long, value_name = "ADDRESS:PORT")]
    resolver: Vec<SocketAddr>,
    /// A file of further root certificates that hosts may be signed by
    #[arg(long, value_name = "FILE")]
    roots: Vec<PathBuf>,
    /// Where the log is kept [default: $XDG_STATE_HOME/sandbar or ~/.local/state/sandbar]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Say nothing about denials, and no summary
    #[arg(long, short = 'q')]
    quiet: bool,
    /// The command and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    command: Vec<OsString>,
}

/// Runs the command. Exit status: see above.
pub(crate) fn run(args: &RunArgs, output: Output) -> ExitCode {
    match jailed(args, output) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            anstream::eprintln!("{} {error:#}", paint(BAD, "sandbar:"));
            ExitCode::from(OWN_FAILURE)
        }
    }
}

fn jailed(args: &RunArgs, output: Output) -> anyhow::Result<u8> {
    let terminal = Terminal::look();
    let prepared = Prepared::of(args, &terminal)?;
    let signals = terminal::block_signals()?;
    // While there is one thread; the authority's key is made afterwards, so that the jail never had it.
    let (jail, arrivals) = Jail::make(&prepared.plan).inspect_err(|_| prepared.forget())?;
    super::serve::tell_operator("warn");
    drop(rustls::crypto::CryptoProvider::install_default(certs::provider().as_ref().clone()));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let done = runtime.block_on(async {
        let denials = Arc::new(Denials::new(args.quiet, terminal.clone(), prepared.advice()));
        let authority =
            Arc::new(Authority::in_memory(&AuthorityOptions::default(), UnixTime::now())?);
        let trust = bundle::contents(TRUST.as_ref(), &authority, &trust::system_roots())?;
        let (stop, stopped) = watch::channel(false);
        let seeing = denials.clone();
        let witness: Witness = Box::new(move |seen| seeing.see(seen));
        let given = Given { authority: Some(authority), witness: Some(witness) };
        let app = App::from(prepared.origin(&arrivals), given, stopped)?;
        drop(arrivals); // the listeners have taken their own
        let run = Run {
            jail: Arc::new(jail),
            state: app.state(),
            denials: denials.clone(),
            terminal: terminal.clone(),
            limit: args.timeout,
        };
        let mut serving = tokio::spawn(app.run());
        let ended = run.through(&trust, signals, &mut serving).await;
        let summary = run.summary(&prepared, ended.as_ref().ok().copied()).await;
        run.record(&summary).await;
        stop.send_replace(true);
        drop(serving.await); // what broke it was told already
        terminal.restore();
        denials.flush_all();
        let status = ended?;
        if !args.quiet {
            summary.print(output);
        }
        Ok(status)
    });
    prepared.clean();
    done
}

/// One run on its way.
struct Run {
    jail: Arc<Jail>,
    state: Arc<State>,
    denials: Arc<Denials>,
    terminal: Terminal,
    limit: Option<Duration>,
}

impl Run {
    /// From a proxy that is about to serve to a command that has ended; its exit status.
    async fn through(
        &self,
        trust: &[(PathBuf, Vec<u8>)],
        signals: nix::sys::signal::SigSet,
        serving: &mut JoinHandle<anyhow::Result<()>>,
    ) -> anyhow::Result<u8> {
        let started = Instant::now();
        tokio::select! {
            ended = &mut *serving => broke(ended)?,
            () = self.ready() => {}
        }
        self.denials.arm();
        self.jail.go(trust).context("the jail is gone")?;
        let mut news = news(&self.jail);
        let mut told = told(signals);
        let mut ending = None;
        let (mut sockets, mut again) = (Sockets::default(), tokio::time::interval(COVER));
        loop {
            let due = ending.or_else(|| self.limit.map(|limit| started + limit));
            tokio::select! {
                ended = &mut *serving => broke(ended)?,
                news = news.recv() => match news {
                    None => return Ok(128 + Signal::SIGKILL as u8), // somebody has killed the jail
                    Some(News::Ended(_)) if ending.is_some() => return Ok(TIMED_OUT),
                    Some(News::Ended(fate)) => return Ok(status(fate)),
                    Some(News::Failed { status: Some(status), why }) => {
                        anstream::eprintln!("{} {why}", paint(BAD, "sandbar:"));
                        return Ok(status);
                    }
                    Some(News::Failed { status: None, why }) => bail!("the jail broke: {why}"),
                    Some(News::Started) => {}
                    Some(News::Stopped) => self.terminal.stop_with(&self.jail),
                },
                Some(signal) = told.recv() => self.terminal.pass(signal, &self.jail),
                () = at(due) => {
                    let last = if ending.is_some() { Signal::SIGKILL } else { Signal::SIGTERM };
                    self.jail.signal(last as i32);
                    self.jail.signal(Signal::SIGCONT as i32); // one that is stopped could not end
                    ending = Some(Instant::now() + GRACE);
                }
                _ = again.tick() => {
                    if let Some(found) = sockets.changed() {
                        self.jail.cover(found);
                    }
                }
                () = self.denials.tell() => {}
            }
        }
    }

    /// Returns once the proxy has seen itself refuse something.
    async fn ready(&self) {
        while !self.state.ready.load(Ordering::Acquire) {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Waits for the end of everything inside, and of its connections; then counts.
    async fn summary(&self, prepared: &Prepared, status: Option<u8>) -> Summary {
        let jail = self.jail.clone();
        jail.signal(Signal::SIGKILL as i32); // where it goes on although we do not
        let usage = spawn_blocking(move || jail.wait()).await.unwrap_or_default();
        let settled = async {
            while self.state.open_connections() > 0 {
                tokio::time::sleep(LOOK).await;
            }
        };
        drop(tokio::time::timeout(SETTLE, settled).await); // what is still open is cut with the proxy
        Summary {
            wall: prepared.started.elapsed(),
            usage,
            status,
            log: prepared.log(),
            tally: self.denials.tally(),
        }
    }

    async fn record(&self, summary: &Summary) {
        let policy = Some(audit::words::policy(&self.state.rules.load()));
        let message = Some(summary.sentence().as_str().into());
        let event = Lifecycle { event: LifecycleEvent::RunEnded, message, policy };
        if let Err(down) = self.state.log.lifecycle(&event).await {
            tracing::warn!(%down, "the end of the run could not be recorded");
        }
    }
}

/// The proxy ends before its command only if something is wrong.
fn broke(ended: Result<anyhow::Result<()>, tokio::task::JoinError>) -> anyhow::Result<()> {
    ended.context("the proxy broke")??;
    bail!("the proxy ended before its command")
}

/// The exit status that a shell would tell.
fn status(fate: Fate) -> u8 {
    let number = match fate {
        Fate::Exited(status) => status,
        Fate::Killed(signal) => 128 + signal,
    };
    u8::try_from(number).unwrap_or(OWN_FAILURE)
}

async fn at(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

/// What the jail tells, read by a thread of its own.
fn news(jail: &Arc<Jail>) -> mpsc::Receiver<News> {
    let (sender, receiver) = mpsc::channel(WAITING);
    let jail = jail.clone();
    std::thread::spawn(move || {
        while let Some(news) = jail.news() {
            if sender.blocking_send(news).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Signals to this process, waited for by a thread of its own.
fn told(signals: nix::sys::signal::SigSet) -> mpsc::Receiver<Told> {
    let (sender, receiver) = mpsc::channel(WAITING);
    std::thread::spawn(move || {
        loop {
            match jail::next_signal(&signals) {
                Ok(told) if sender.blocking_send(told).is_err() => return,
                Ok(_) | Err(_) => {}
            }
        }
    });
    receiver
}
