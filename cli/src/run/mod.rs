//! `sandbar run`: runs a command in a jail of its own, with Sandbar as its only way out.

mod credential;
mod denials;
mod draft;
mod environment;
mod prepare;
mod preset;
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

use self::credential::CredentialArg;
use self::denials::DenialReporter;
use self::prepare::PreparedRun;
use self::summary::RunSummary;
use self::terminal::TerminalState;
use super::{EXIT_USAGE, OutputOptions, UsageError};
use crate::terminal::{BAD, paint, print_error};
use jail::{
    CommandExit, CopyDirection, HiddenFileWatcher, Jail, JailEvent, ReceivedSignal, StreamCopy, TRUST_DIR,
    UnixSocketWatcher,
};
use proxy::admin::status::AdminState;
use proxy::app::{App, AppOverrides, RecordObserver};

/// Exit status for failures of Sandbar rather than of the command, as in env(1).
const EXIT_INTERNAL: u8 = 125;
/// Exit status for a command that timed out, as in timeout(1).
const EXIT_TIMED_OUT: u8 = 124;
/// Time between SIGTERM and SIGKILL for a command that timed out.
const KILL_GRACE: Duration = Duration::from_secs(5);
/// How long to wait for connections to close after the last process in the jail has exited.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often to look for new unix sockets and replaced credentials outside, which the jail then hides.
const HIDE_INTERVAL: Duration = Duration::from_millis(50);
/// How long to wait for the rest of the command's output to be written to a file.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);
/// Capacity of the queues of jail events and of signals.
const EVENT_QUEUE: usize = 64;
/// Polling interval for state that has no notification.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Run a command in a jail whose only way out is Sandbar
///
/// Needs neither root nor Docker. Everything is denied unless --allow or --policy allows it. Exit status: that of
/// the command, or 128 plus the number of the signal that killed it; 64 usage error, 124 timed out, 125 the jail could
/// not be created, 126 the command cannot be executed, 127 the command was not found.
#[derive(clap::Args, Debug)]
pub(crate) struct RunArgs {
    /// Policy file, or directory of policy files; repeatable
    #[arg(long, short = 'p', value_name = "PATH")]
    policy: Vec<PathBuf>,
    /// Allow a host, such as `github.com`, `*.example.com` or `db.example.com:8443`; repeatable
    #[arg(long, short = 'a', value_name = "HOST")]
    allow: Vec<String>,
    /// Open a service and inject its credential: a preset, or several with commas; `--list-presets` lists them
    #[arg(long, short = 'w', value_name = "PRESET", value_delimiter = ',')]
    with: Vec<String>,
    /// Where a credential comes from, such as `anthropic=env:ANTHROPIC_API_KEY`, `github=file:PATH` or
    /// `mine=command:pass show mine`; without a preset of that name also `,host=HOST`, and `,header=FIELD` or
    /// `,basic=USER` unless it is a bearer token; repeatable
    #[arg(long, short = 'c', value_name = "NAME=SOURCE")]
    credential: Vec<CredentialArg>,
    /// Configuration file with `[[credential]]` entries, as `sandbar serve` reads them
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Pass on a variable that is removed by default, such as `NPM_TOKEN`; repeatable
    #[arg(long, short = 'e', value_name = "VARIABLE")]
    env: Vec<String>,
    /// Print the presets, and run nothing
    #[arg(long)]
    list_presets: bool,
    /// Print the credentials, policies and variables that would be in force, without secrets, and run nothing
    #[arg(long)]
    print_policy: bool,
    /// Sandbox id in records [default: run-PID]
    #[arg(long, value_name = "NAME")]
    sandbox: Option<String>,
    /// End the command after this time, such as `90s` or `2h`
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    /// Make another directory writable, besides the working and home directories
    #[arg(long, value_name = "DIR")]
    writable: Vec<PathBuf>,
    /// Expose a path that is hidden by default, such as `~/.config/gh` (read-only)
    #[arg(long, value_name = "PATH")]
    visible: Vec<PathBuf>,
    /// Upstream DNS resolver [default: those in /etc/resolv.conf]
    #[arg(long, value_name = "ADDRESS:PORT")]
    resolver: Vec<SocketAddr>,
    /// Additional CA certificates to trust for upstream servers (PEM)
    #[arg(long, value_name = "FILE")]
    roots: Vec<PathBuf>,
    /// Directory for logs [default: $XDG_STATE_HOME/sandbar or ~/.local/state/sandbar]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Print neither denials nor the summary
    #[arg(long, short = 'q')]
    quiet: bool,
    /// Command and its arguments
    #[arg(required_unless_present_any = ["list_presets", "print_policy"], trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Runs the command. Exit status: see [`RunArgs`].
pub(crate) fn run(args: &RunArgs, output: OutputOptions) -> ExitCode {
    let result = if args.list_presets {
        preset::list(output.json).map(|()| 0)
    } else if args.print_policy {
        prepare::print_policy(args, output).map(|()| 0)
    } else {
        run_in_jail(args, output)
    };
    match result {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            print_error(&error);
            let usage = error.downcast_ref::<UsageError>().is_some();
            ExitCode::from(if usage { EXIT_USAGE } else { EXIT_INTERNAL })
        }
    }
}

fn run_in_jail(args: &RunArgs, output: OutputOptions) -> anyhow::Result<u8> {
    let terminal = TerminalState::detect();
    let mut prepared = PreparedRun::prepare(args, &terminal)?;
    let signals = terminal::block_signals()?;
    // Create the jail while this process has one thread: it forks, and only the calling thread survives a fork, so
    // a lock held by another would stay locked in the child. Generate the authority's key afterwards, so that no
    // process in the jail ever had it in memory.
    let hidden = prepared.plan.view.watch_hidden();
    let (jail, arrivals) = Jail::create(&prepared.plan).inspect_err(|_| prepared.remove_run_dir())?;
    prepared.restore_variables()?;
    let output_ended = spawn_copies(prepared.take_copies());
    super::serve::init_tracing("warn");
    drop(rustls::crypto::CryptoProvider::install_default(certs::crypto_provider().as_ref().clone()));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let denials = Arc::new(DenialReporter::new(args.quiet, terminal.clone(), prepared.advice()));
        let authority =
            Arc::new(CertificateAuthority::in_memory(&AuthorityOptions::default(), UnixTime::now())?);
        let trust = bundle::contents(TRUST_DIR.as_ref(), &authority, &trust::system_roots())?;
        let (stop, stopped) = watch::channel(false);
        let observer = denials.clone();
        let observe: RecordObserver = Box::new(move |event| observer.observe(event));
        let overrides = AppOverrides { authority: Some(authority), witness: Some(observe) };
        let app = App::from(prepared.policy_source(&arrivals), overrides, stopped)?;
        drop(arrivals); // the listeners hold duplicates
        let run = RunSession {
            jail: Arc::new(jail),
            state: app.state(),
            denials: denials.clone(),
            terminal: terminal.clone(),
            limit: args.timeout,
        };
        let mut serving = tokio::spawn(app.run());
        let ended = run.supervise(&trust, signals, hidden, &mut serving).await;
        let summary = run.summarize(&prepared, ended.as_ref().ok().copied()).await;
        wait_for_output(output_ended).await;
        run.record_end(&summary).await;
        stop.send_replace(true);
        drop(serving.await); // `supervise` reported its error
        terminal.restore();
        denials.flush_all();
        let status = ended?;
        if !args.quiet {
            summary.print(output);
        }
        Ok(status)
    });
    prepared.remove_socket();
    result
}

/// A run in progress.
struct RunSession {
    jail: Arc<Jail>,
    state: Arc<AdminState>,
    denials: Arc<DenialReporter>,
    terminal: TerminalState,
    limit: Option<Duration>,
}

impl RunSession {
    /// Waits for the proxy to be ready, starts the command and handles events until it ends; returns the exit
    /// status.
    async fn supervise(
        &self,
        trust: &[(PathBuf, Vec<u8>)],
        signals: nix::sys::signal::SigSet,
        mut hidden: HiddenFileWatcher,
        serving: &mut JoinHandle<anyhow::Result<()>>,
    ) -> anyhow::Result<u8> {
        let started = Instant::now();
        tokio::select! {
            ended = &mut *serving => proxy_failure(ended)?,
            () = self.wait_ready() => {}
        }
        self.denials.start_counting();
        self.jail.start_command(trust).context("the jail has exited")?;
        let mut events = spawn_event_reader(&self.jail);
        let mut received = spawn_signal_reader(signals);
        let mut kill_at = None;
        let (mut sockets, mut hide_timer) =
            (UnixSocketWatcher::default(), tokio::time::interval(HIDE_INTERVAL));
        loop {
            let deadline = kill_at.or_else(|| self.limit.map(|limit| started + limit));
            tokio::select! {
                ended = &mut *serving => proxy_failure(ended)?,
                event = events.recv() => match event {
                    None => return Ok(128 + Signal::SIGKILL as u8), // the jail was killed
                    Some(JailEvent::Ended(_)) if kill_at.is_some() => return Ok(EXIT_TIMED_OUT),
                    Some(JailEvent::Ended(exit)) => return Ok(exit_status(exit)),
                    Some(JailEvent::Failed { status: Some(status), why }) => {
                        anstream::eprintln!("{} {why}", paint(BAD, "sandbar:"));
                        return Ok(status);
                    }
                    Some(JailEvent::Failed { status: None, why }) => bail!("the jail failed: {why}"),
                    Some(JailEvent::Started) => {}
                    Some(JailEvent::Stopped) => self.terminal.stop_with_command(&self.jail),
                },
                Some(signal) = received.recv() => self.terminal.forward_signal(signal, &self.jail),
                () = wait_until(deadline) => {
                    let last = if kill_at.is_some() { Signal::SIGKILL } else { Signal::SIGTERM };
                    self.jail.signal(last as i32);
                    self.jail.signal(Signal::SIGCONT as i32); // a stopped process would not handle the signal
                    kill_at = Some(Instant::now() + KILL_GRACE);
                }
                _ = hide_timer.tick() => {
                    let new = sockets.poll_new();
                    if !new.is_empty() {
                        self.jail.hide_sockets(new);
                    }
                    let replaced = hidden.poll_replaced();
                    if !replaced.is_empty() {
                        self.jail.hide_credentials(replaced);
                    }
                }
                () = self.denials.print_when_free() => {}
            }
        }
    }

    /// Returns once the proxy is ready, that is, once its self-test has seen a refusal.
    async fn wait_ready(&self) {
        while !self.state.ready.load(Ordering::Acquire) {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Ends every process in the jail, waits for its connections to close, and returns the totals.
    async fn summarize(&self, prepared: &PreparedRun, status: Option<u8>) -> RunSummary {
        let jail = self.jail.clone();
        jail.signal(Signal::SIGKILL as i32); // it may still run if the proxy failed
        let usage = spawn_blocking(move || jail.wait()).await.unwrap_or_default();
        let settled = async {
            while self.state.open_connections() > 0 {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        drop(tokio::time::timeout(SETTLE_TIMEOUT, settled).await); // stopping the proxy cuts the rest
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
            tracing::warn!(%down, "cannot record the end of the run");
        }
    }
}

/// Turns the early end of the proxy into an error.
fn proxy_failure(ended: Result<anyhow::Result<()>, tokio::task::JoinError>) -> anyhow::Result<()> {
    ended.context("the proxy panicked")??;
    bail!("the proxy stopped before the command ended")
}

/// The exit status as a shell reports it.
fn exit_status(exit: CommandExit) -> u8 {
    let number = match exit {
        CommandExit::Exited(status) => status,
        CommandExit::Killed(signal) => 128 + signal,
    };
    u8::try_from(number).unwrap_or(EXIT_INTERNAL)
}

async fn wait_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

/// Copies between our standard streams and the command's, each in a thread of its own. The receiver ends when all
/// output is written.
fn spawn_copies(copies: Vec<StreamCopy>) -> mpsc::Receiver<()> {
    let (writing, ended) = mpsc::channel(1);
    for copy in copies {
        let writing = (copy.direction() == CopyDirection::FromCommand).then(|| writing.clone());
        std::thread::spawn(move || {
            if let Err(error) = copy.run() {
                print_error(&error);
            }
            drop(writing);
        });
    }
    ended
}

async fn wait_for_output(mut ended: mpsc::Receiver<()>) {
    if tokio::time::timeout(FLUSH_TIMEOUT, ended.recv()).await.is_err() {
        let shown = FLUSH_TIMEOUT.as_secs();
        anstream::eprintln!("{} the output could not be written in {shown} s", paint(BAD, "sandbar:"));
    }
}

/// Receives the jail's events, read by a dedicated thread because the read blocks.
fn spawn_event_reader(jail: &Arc<Jail>) -> mpsc::Receiver<JailEvent> {
    let (sender, receiver) = mpsc::channel(EVENT_QUEUE);
    let jail = jail.clone();
    std::thread::spawn(move || {
        while let Some(event) = jail.next_event() {
            if sender.blocking_send(event).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Receives the signals sent to this process, awaited by a dedicated thread because `sigwaitinfo` blocks.
fn spawn_signal_reader(signals: nix::sys::signal::SigSet) -> mpsc::Receiver<ReceivedSignal> {
    let (sender, receiver) = mpsc::channel(EVENT_QUEUE);
    std::thread::spawn(move || {
        loop {
            match jail::next_signal(&signals) {
                Ok(received) if sender.blocking_send(received).is_err() => return,
                Ok(_) | Err(_) => {}
            }
        }
    });
    receiver
}
