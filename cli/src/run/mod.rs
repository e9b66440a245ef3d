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
use certs::{AuthorityOptions, CertificateAuthority, UnixTime, bundle, trust};
use nix::sys::signal::Signal;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, spawn_blocking};

use self::denials::DenialReporter;
use self::prepare::PreparedRun;
use self::summary::RunSummary;
use self::terminal::TerminalState;
use super::OutputOptions;
use crate::terminal::{BAD, paint, print_error};
use jail::{CommandExit, Jail, JailEvent, ReceivedSignal, TRUST_DIR, UnixSocketWatcher};
use proxy::admin::status::AdminState;
use proxy::app::{App, AppOverrides, RecordObserver};

/// Exit status for what is ours and not the command's, as of env(1).
const EXIT_INTERNAL: u8 = 125;
/// Exit status for a command that took too long, as of timeout(1).
const EXIT_TIMED_OUT: u8 = 124;
/// How long a command that took too long has for its end.
const KILL_GRACE: Duration = Duration::from_secs(5);
/// How long the last connections have for their end, once everything inside is gone.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often it is looked for unix sockets that were made since.
const HIDE_INTERVAL: Duration = Duration::from_secs(1);
/// News and signals that wait to be looked at.
const EVENT_QUEUE: usize = 64;
/// How often something is looked at of which nobody tells.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

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
pub(crate) fn run(args: &RunArgs, output: OutputOptions) -> ExitCode {
    match run_in_jail(args, output) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            print_error(&error);
            ExitCode::from(EXIT_INTERNAL)
        }
    }
}

fn run_in_jail(args: &RunArgs, output: OutputOptions) -> anyhow::Result<u8> {
    let terminal = TerminalState::detect();
    let prepared = PreparedRun::prepare(args, &terminal)?;
    let signals = terminal::block_signals()?;
    // While there is one thread; the authority's key is made afterwards, so that the jail never had it.
    let (jail, arrivals) =
        Jail::create(&prepared.plan).inspect_err(|_| prepared.remove_run_dir())?;
    super::serve::init_tracing("warn");
    drop(rustls::crypto::CryptoProvider::install_default(
        certs::crypto_provider().as_ref().clone(),
    ));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let done = runtime.block_on(async {
        let denials =
            Arc::new(DenialReporter::new(args.quiet, terminal.clone(), prepared.advice()));
        let authority = Arc::new(CertificateAuthority::in_memory(
            &AuthorityOptions::default(),
            UnixTime::now(),
        )?);
        let trust = bundle::contents(TRUST_DIR.as_ref(), &authority, &trust::system_roots())?;
        let (stop, stopped) = watch::channel(false);
        let seeing = denials.clone();
        let witness: RecordObserver = Box::new(move |seen| seeing.observe(seen));
        let given = AppOverrides { authority: Some(authority), witness: Some(witness) };
        let app = App::from(prepared.policy_source(&arrivals), given, stopped)?;
        drop(arrivals); // the listeners have taken their own
        let run = RunSession {
            jail: Arc::new(jail),
            state: app.state(),
            denials: denials.clone(),
            terminal: terminal.clone(),
            limit: args.timeout,
        };
        let mut serving = tokio::spawn(app.run());
        let ended = run.supervise(&trust, signals, &mut serving).await;
        let summary = run.summarize(&prepared, ended.as_ref().ok().copied()).await;
        run.record_end(&summary).await;
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
    prepared.remove_socket();
    done
}

/// One run on its way.
struct RunSession {
    jail: Arc<Jail>,
    state: Arc<AdminState>,
    denials: Arc<DenialReporter>,
    terminal: TerminalState,
    limit: Option<Duration>,
}

impl RunSession {
    /// From a proxy that is about to serve to a command that has ended; its exit status.
    async fn supervise(
        &self,
        trust: &[(PathBuf, Vec<u8>)],
        signals: nix::sys::signal::SigSet,
        serving: &mut JoinHandle<anyhow::Result<()>>,
    ) -> anyhow::Result<u8> {
        let started = Instant::now();
        tokio::select! {
            ended = &mut *serving => proxy_failure(ended)?,
            () = self.wait_ready() => {}
        }
        self.denials.start_counting();
        self.jail.start_command(trust).context("the jail is gone")?;
        let mut news = spawn_event_reader(&self.jail);
        let mut told = spawn_signal_reader(signals);
        let mut ending = None;
        let (mut sockets, mut again) =
            (UnixSocketWatcher::default(), tokio::time::interval(HIDE_INTERVAL));
        loop {
            let due = ending.or_else(|| self.limit.map(|limit| started + limit));
            tokio::select! {
                ended = &mut *serving => proxy_failure(ended)?,
                news = news.recv() => match news {
                    None => return Ok(128 + Signal::SIGKILL as u8), // somebody has killed the jail
                    Some(JailEvent::Ended(_)) if ending.is_some() => return Ok(EXIT_TIMED_OUT),
                    Some(JailEvent::Ended(fate)) => return Ok(exit_status(fate)),
                    Some(JailEvent::Failed { status: Some(status), why }) => {
                        anstream::eprintln!("{} {why}", paint(BAD, "sandbar:"));
                        return Ok(status);
                    }
                    Some(JailEvent::Failed { status: None, why }) => bail!("the jail broke: {why}"),
                    Some(JailEvent::Started) => {}
                    Some(JailEvent::Stopped) => self.terminal.stop_with_command(&self.jail),
                },
                Some(signal) = told.recv() => self.terminal.forward_signal(signal, &self.jail),
                () = wait_until(due) => {
                    let last = if ending.is_some() { Signal::SIGKILL } else { Signal::SIGTERM };
                    self.jail.signal(last as i32);
                    self.jail.signal(Signal::SIGCONT as i32); // one that is stopped could not end
                    ending = Some(Instant::now() + KILL_GRACE);
                }
                _ = again.tick() => {
                    if let Some(found) = sockets.poll_changes() {
                        self.jail.hide_sockets(found);
                    }
                }
                () = self.denials.print_when_free() => {}
            }
        }
    }

    /// Returns once the proxy has seen itself refuse something.
    async fn wait_ready(&self) {
        while !self.state.ready.load(Ordering::Acquire) {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits for the end of everything inside, and of its connections; then counts.
    async fn summarize(&self, prepared: &PreparedRun, status: Option<u8>) -> RunSummary {
        let jail = self.jail.clone();
        jail.signal(Signal::SIGKILL as i32); // where it goes on although we do not
        let usage = spawn_blocking(move || jail.wait()).await.unwrap_or_default();
        let settled = async {
            while self.state.open_connections() > 0 {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        drop(tokio::time::timeout(SETTLE_TIMEOUT, settled).await); // what is still open is cut with the proxy
        RunSummary {
            wall: prepared.started.elapsed(),
            usage,
            status,
            log: prepared.log_dir(),
            tally: self.denials.tally(),
        }
    }

    async fn record_end(&self, summary: &RunSummary) {
        let policy = Some(audit::words::policy(&self.state.rules.load()));
        let message = Some(summary.sentence().as_str().into());
        let event = Lifecycle { event: LifecycleEvent::RunEnded, message, policy };
        if let Err(down) = self.state.log.record_lifecycle(&event).await {
            tracing::warn!(%down, "the end of the run could not be recorded");
        }
    }
}

/// The proxy ends before its command only if something is wrong.
fn proxy_failure(ended: Result<anyhow::Result<()>, tokio::task::JoinError>) -> anyhow::Result<()> {
    ended.context("the proxy broke")??;
    bail!("the proxy ended before its command")
}

/// The exit status that a shell would tell.
fn exit_status(fate: CommandExit) -> u8 {
    let number = match fate {
        CommandExit::Exited(status) => status,
        CommandExit::Killed(signal) => 128 + signal,
    };
    u8::try_from(number).unwrap_or(EXIT_INTERNAL)
}

async fn wait_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

/// What the jail tells, read by a thread of its own.
fn spawn_event_reader(jail: &Arc<Jail>) -> mpsc::Receiver<JailEvent> {
    let (sender, receiver) = mpsc::channel(EVENT_QUEUE);
    let jail = jail.clone();
    std::thread::spawn(move || {
        while let Some(news) = jail.next_event() {
            if sender.blocking_send(news).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Signals to this process, waited for by a thread of its own.
fn spawn_signal_reader(signals: nix::sys::signal::SigSet) -> mpsc::Receiver<ReceivedSignal> {
    let (sender, receiver) = mpsc::channel(EVENT_QUEUE);
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
