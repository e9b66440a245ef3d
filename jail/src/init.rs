//! The two processes between the proxy and the command: the keeper, outside the jail's pid namespace, which kills
//! the jail when the proxy dies, and init, the jail's pid 1: when it exits, the kernel kills everything else inside.

use std::ffi::CString;
use std::fs;
use std::io::IsTerminal;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Child;

use anyhow::Context;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::{set_dumpable, set_pdeathsig};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, killpg, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::stat::Mode;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, UnlinkatFlags, getpgid, unlinkat};

use super::child::{self, CommandSpec, JobPlacement};
use super::control_channel::{self, CommandExit, JailReport, JailRequest};
use super::filesystem_view::FilesystemView;
use super::namespaces::{self, NamespaceOwner};
use sys::process as kernel;

use super::stdio::{self, ReadOnlyInput};
use super::{firewall, mounts, network};

/// Everything needed to create a jail.
#[derive(Clone, Debug)]
pub struct JailPlan {
    pub view: FilesystemView,
    pub program: CommandSpec,
    /// The caller's terminal, if it has one.
    pub terminal: Option<PathBuf>,
    /// A directory, and the name of the socket in it that the keeper removes if the proxy is killed.
    pub socket: (PathBuf, CString),
}

/// Unshares the namespaces, forks init, and waits for it; kills it when the proxy dies. Runs in the keeper.
///
/// `alive` is the read end of a pipe whose write end only the proxy holds. It becomes readable (end of file) when
/// the proxy dies in any way, `SIGKILL` included, so no cooperation of the proxy is needed. Init does not need the
/// pipe: its parent-death signal kills it if the keeper dies first.
pub(super) fn run_keeper(plan: &JailPlan, channel: UnixStream, alive: OwnedFd) -> ! {
    let prepared = prepare_keeper(plan, &[channel.as_raw_fd(), alive.as_raw_fd()]);
    let forked = prepared.and_then(|dir| Ok((dir, unshare_and_fork()?)));
    let (dir, init) = match forked {
        Ok((dir, (_, Some(init)))) => (dir, init),
        Ok((_, (users, None))) => {
            drop(alive);
            run_init(plan, &channel, users)
        }
        Err(error) => {
            drop(control_channel::send(&channel, &JailReport::Failed(format!("{error:#}"))));
            kernel::exit(1)
        }
    };
    drop(channel);
    if watch_init(init, &alive).is_err() {
        kill(init, Signal::SIGKILL).unwrap_or_default(); // never leave init unwatched
    }
    while waitpid(init, None) == Err(Errno::EINTR) {}
    let proxy_gone = poll(&mut [PollFd::new(alive.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO);
    if proxy_gone.is_ok_and(|ready| ready > 0) {
        unlinkat(&dir, plan.socket.1.as_c_str(), UnlinkatFlags::NoRemoveDir).unwrap_or_default();
    }
    kernel::exit(0)
}

/// Closes inherited file descriptors, blocks all signals, and opens the socket's directory. Runs in the keeper.
///
/// Signals of the terminal are meant for the command. The directory is opened now because the keeper shares init's
/// mount namespace, in which it will be hidden by the time the keeper has to remove the socket.
fn prepare_keeper(plan: &JailPlan, own: &[RawFd]) -> anyhow::Result<OwnedFd> {
    let keep_open = [own, &stdio::descriptors(&plan.program.streams)].concat();
    kernel::close_all_but(&keep_open).context("cannot close inherited file descriptors")?;
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&SigSet::all()), None)?;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    open(&plan.socket.0, flags, Mode::empty())
        .with_context(|| format!("cannot open {}", plan.socket.0.display()))
}

/// Enters the new namespaces and forks init. Runs in the keeper and returns in both: `None` is init.
fn unshare_and_fork() -> anyhow::Result<(NamespaceOwner, Option<Pid>)> {
    let users = namespaces::unshare_namespaces()?;
    // After the id maps: the /proc files of a process that is not dumpable belong to root. Init inherits the flag.
    set_dumpable(false)?;
    Ok((users, kernel::fork().context("cannot fork init")?))
}

/// Blocks until init has exited; kills it if the proxy dies first. Runs in the keeper.
fn watch_init(init: Pid, alive: &OwnedFd) -> nix::Result<()> {
    let sigchld = open_sigchld()?;
    loop {
        let mut waits =
            [PollFd::new(alive.as_fd(), PollFlags::POLLIN), PollFd::new(sigchld.as_fd(), PollFlags::POLLIN)];
        poll(&mut waits, PollTimeout::NONE)?;
        let [proxy_gone, child_changed] = waits.map(|wait| wait.any().unwrap_or(true));
        if proxy_gone {
            return kill(init, Signal::SIGKILL);
        }
        if child_changed {
            sigchld.read_signal()?;
            // WNOWAIT: `run_keeper` reaps it.
            let exited = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
            let status = nix::sys::wait::waitid(nix::sys::wait::Id::Pid(init), exited)?;
            if status != WaitStatus::StillAlive {
                return Ok(());
            }
        }
    }
}

/// Runs in the keeper and in init, which both block all signals.
fn open_sigchld() -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGCHLD);
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// The main function of init: sets up the jail, runs the command, reports how it exited.
fn run_init(plan: &JailPlan, channel: &UnixStream, users: NamespaceOwner) -> ! {
    let report = match start_in_jail(plan, channel, users) {
        Ok(Some((mut command, input))) => match supervise(&mut command, plan.program.place, channel) {
            Ok(Some(exit)) => {
                input.give_offset_back();
                JailReport::Ended(exit)
            }
            Ok(None) => kernel::exit(0), // the proxy is gone; exiting kills everything inside
            Err(error) => JailReport::Failed(format!("{error:#}")),
        },
        Ok(None) => kernel::exit(0),
        Err(error) => JailReport::Failed(format!("{error:#}")),
    };
    drop(control_channel::send(channel, &report));
    kernel::exit(0)
}

/// Sets up the jail and starts the command once the proxy asks for it. Runs in init.
///
/// Everything here needs the capabilities of the new user namespace; the command gives them up before it starts. The
/// command is started last, so it never runs without the mounts and the firewall, or before the proxy serves the
/// listening sockets.
fn start_in_jail(
    plan: &JailPlan,
    channel: &UnixStream,
    users: NamespaceOwner,
) -> anyhow::Result<Option<(Child, ReadOnlyInput)>> {
    set_pdeathsig(Signal::SIGKILL)?;
    kernel::join_new_keyring().context("cannot join a new session keyring")?;
    let input = ReadOnlyInput::open(&plan.program.streams)?;
    mounts::mount_view(&plan.view, plan.terminal.as_deref(), users)?;
    let denied = || namespaces::explain_failure(None);
    let versions = network::set_up_loopback().with_context(|| format!("cannot set up `lo`; {}", denied()))?;
    firewall::load_ruleset().context(
        "cannot load the firewall: the kernel needs nf_tables with nat, redir and reject (modprobe nf_tables nft_chain_nat nft_redir nft_reject_inet)",
    )?;
    let sockets = network::bind_sockets(versions).context("cannot bind the listening sockets")?;
    let dns = sockets.dns.len();
    control_channel::send(channel, &JailReport::Ready { dns })?;
    control_channel::send_sockets(
        channel,
        &[sockets.dns, sockets.tcp].into_iter().flatten().collect::<Vec<_>>(),
    )?;
    let Some(JailRequest::Go { trust }) = control_channel::receive(channel)? else {
        return Ok(None);
    };
    let mut files = Vec::new();
    for (name, content) in trust {
        files.push((name, STANDARD.decode(content)?));
    }
    mounts::write_trust_files(&files).context("cannot write the trust files")?;
    match child::spawn_command(&plan.program, &input) {
        Ok(command) => {
            control_channel::send(channel, &JailReport::Started)?;
            Ok(Some((command, input)))
        }
        Err((status, error)) => {
            let first = plan.program.words.first().map(|word| word.display().to_string());
            let why = format!("cannot run {}: {error}", first.unwrap_or_default());
            control_channel::send(channel, &JailReport::Refused { status, why })?;
            Ok(None)
        }
    }
}

/// Reaps children, serves the proxy's requests, and returns how the command exited; `None` when the proxy is gone.
/// Runs in init.
fn supervise(
    command: &mut Child,
    place: JobPlacement,
    channel: &UnixStream,
) -> anyhow::Result<Option<CommandExit>> {
    let command = Pid::from_raw(i32::try_from(command.id())?);
    let sigchld = open_sigchld()?;
    loop {
        if let Some(exit) = reap_children(command, channel)? {
            return Ok(Some(exit));
        }
        let mut waits = [
            PollFd::new(channel.as_fd(), PollFlags::POLLIN),
            PollFd::new(sigchld.as_fd(), PollFlags::POLLIN),
        ];
        poll(&mut waits, PollTimeout::NONE)?;
        let [has_request, _] = waits.map(|wait| wait.any().unwrap_or(true));
        while sigchld.read_signal()?.is_some() {}
        if has_request {
            match control_channel::receive(channel)? {
                None => return Ok(None),
                Some(request) => handle_request(&request, command, place),
            }
        }
    }
}

/// Reaps every child that has changed state, orphans included, and returns how the command exited, if it did. Runs
/// in init.
fn reap_children(command: Pid, channel: &UnixStream) -> anyhow::Result<Option<CommandExit>> {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED)) {
            Ok(WaitStatus::Exited(pid, status)) if pid == command => {
                return Ok(Some(CommandExit::Exited(status)));
            }
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == command => {
                return Ok(Some(CommandExit::Killed(signal as i32)));
            }
            Ok(WaitStatus::Stopped(pid, _)) if pid == command => {
                control_channel::send(channel, &JailReport::Stopped)?;
            }
            Ok(WaitStatus::StillAlive) => return Ok(None),
            Ok(_) => {}
            Err(errno) => return Err(errno).context("cannot wait for the command"),
        }
    }
}

/// Serves one request of the proxy. Errors are ignored: the command may just have exited. Runs in init.
fn handle_request(request: &JailRequest, command: Pid, place: JobPlacement) {
    let signal = |signal: Signal| {
        if signal == Signal::SIGKILL {
            // -1 is every process inside except init, whatever process group or session it has moved to.
            return kill(Pid::from_raw(-1), signal).unwrap_or_default();
        }
        let leads_group = getpgid(Some(command)) == Ok(command); // it may have joined another
        match place {
            JobPlacement::Background | JobPlacement::Foreground if leads_group => killpg(command, signal),
            JobPlacement::Background | JobPlacement::Foreground | JobPlacement::Shared => {
                kill(command, signal)
            }
        }
        .unwrap_or_default();
    };
    match request {
        JailRequest::Cover(sockets) => sockets.iter().for_each(|socket| {
            mounts::hide_socket(socket).unwrap_or_default(); // it may be gone again
        }),
        JailRequest::Go { .. } => {}
        JailRequest::Hide(paths) => paths.iter().for_each(|path| {
            mounts::hide_path(path).unwrap_or_default(); // it may be gone again
        }),
        JailRequest::Resume { foreground } => {
            if *foreground {
                drop(child::take_terminal(command));
            }
            signal(Signal::SIGCONT);
        }
        JailRequest::Signal(number) => {
            if let Ok(number) = Signal::try_from(*number) {
                signal(number);
            }
        }
    }
}

/// Returns the device file of the terminal open as `descriptor`; `None` if it is not a terminal. Runs in the proxy.
pub fn terminal_device(descriptor: BorrowedFd<'_>) -> Option<PathBuf> {
    if !descriptor.is_terminal() {
        return None;
    }
    fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd())).ok()
}
