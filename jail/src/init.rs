//! The two processes between the proxy and the command: a keeper outside the jail's processes, that takes
//! the jail along when the proxy dies, and the first process inside, with whose end everything inside ends.

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

use super::{firewall, mounts, network};

/// Everything that the jail is made from.
#[derive(Clone, Debug)]
pub struct JailPlan {
    pub view: FilesystemView,
    pub program: CommandSpec,
    /// The caller's terminal, if it has one.
    pub terminal: Option<PathBuf>,
    /// A directory, and the socket in it that goes when the proxy goes without a word.
    pub socket: (PathBuf, CString),
}

/// Leaves the caller's namespaces, makes the first process of the new ones, and stays behind to see that it
/// does not outlive the proxy. `alive` is closed by the proxy's death alone.
pub(super) fn run_keeper(plan: &JailPlan, channel: UnixStream, alive: OwnedFd) -> ! {
    let kept = prepare_keeper(plan, &[channel.as_raw_fd(), alive.as_raw_fd()]);
    let made = kept.and_then(|dir| Ok((dir, unshare_and_fork()?)));
    let (dir, first) = match made {
        Ok((dir, (_, Some(first)))) => (dir, first),
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
    if watch_init(first, &alive).is_err() {
        kill(first, Signal::SIGKILL).unwrap_or_default(); // one that cannot be watched is not left alone
    }
    while waitpid(first, None) == Err(Errno::EINTR) {}
    let dead = poll(&mut [PollFd::new(alive.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO);
    if dead.is_ok_and(|dead| dead > 0) {
        unlinkat(&dir, plan.socket.1.as_c_str(), UnlinkatFlags::NoRemoveDir).unwrap_or_default();
    }
    kernel::exit(0)
}

/// Takes no signals: those of the terminal are for the command. Lets go of what was left open, and keeps hold
/// of a directory that is soon out of sight.
fn prepare_keeper(plan: &JailPlan, own: &[RawFd]) -> anyhow::Result<OwnedFd> {
    let kept = [own, &plan.program.streams.descriptors()].concat();
    kernel::close_all_but(&kept).context("cannot close what was left open")?;
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&SigSet::all()), None)?;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    open(&plan.socket.0, flags, Mode::empty())
        .with_context(|| format!("cannot open {}", plan.socket.0.display()))
}

fn unshare_and_fork() -> anyhow::Result<(NamespaceOwner, Option<Pid>)> {
    let users = namespaces::unshare_namespaces()?;
    set_dumpable(false)?; // from here on nobody looks into it
    Ok((users, kernel::fork().context("cannot make a process")?))
}

/// Waits until the first process has ended, or ends it when the proxy is gone.
fn watch_init(first: Pid, alive: &OwnedFd) -> nix::Result<()> {
    let children = open_sigchld()?;
    loop {
        let mut waits = [
            PollFd::new(alive.as_fd(), PollFlags::POLLIN),
            PollFd::new(children.as_fd(), PollFlags::POLLIN),
        ];
        poll(&mut waits, PollTimeout::NONE)?;
        let [gone, ended] = waits.map(|wait| wait.any().unwrap_or(true));
        if gone {
            return kill(first, Signal::SIGKILL);
        }
        if ended {
            children.read_signal()?;
            let ended = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
            let status = nix::sys::wait::waitid(nix::sys::wait::Id::Pid(first), ended)?;
            if status != WaitStatus::StillAlive {
                return Ok(());
            }
        }
    }
}

fn open_sigchld() -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGCHLD);
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// The life of the first process: arrange everything, run the command, see to its end.
fn run_init(plan: &JailPlan, channel: &UnixStream, users: NamespaceOwner) -> ! {
    let report = match start_in_jail(plan, channel, users) {
        Ok(Some(mut command)) => match supervise(&mut command, plan.program.place, channel) {
            Ok(Some(fate)) => JailReport::Ended(fate),
            Ok(None) => kernel::exit(0), // the proxy is gone, and everything with it
            Err(error) => JailReport::Failed(format!("{error:#}")),
        },
        Ok(None) => kernel::exit(0),
        Err(error) => JailReport::Failed(format!("{error:#}")),
    };
    drop(control_channel::send(channel, &report));
    kernel::exit(0)
}

/// Makes the jail, and starts the command once the proxy is ready.
fn start_in_jail(
    plan: &JailPlan,
    channel: &UnixStream,
    users: NamespaceOwner,
) -> anyhow::Result<Option<Child>> {
    set_pdeathsig(Signal::SIGKILL)?;
    kernel::join_new_keyring().context("cannot leave the session's keys")?;
    mounts::mount_view(&plan.view, plan.terminal.as_deref(), users)?;
    let denied = || namespaces::explain_failure(None);
    let versions =
        network::set_up_loopback().with_context(|| format!("cannot set up `lo`; {}", denied()))?;
    firewall::load_ruleset().context(
        "cannot load the firewall: the kernel needs nf_tables with nat, redir and reject (modprobe nf_tables nft_chain_nat nft_redir nft_reject_inet)",
    )?;
    let sockets = network::bind_sockets(versions).context("cannot listen inside")?;
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
    match child::spawn_command(&plan.program) {
        Ok(command) => {
            control_channel::send(channel, &JailReport::Started)?;
            Ok(Some(command))
        }
        Err((status, error)) => {
            let first = plan.program.words.first().map(|word| word.display().to_string());
            let why = format!("cannot run {}: {error}", first.unwrap_or_default());
            control_channel::send(channel, &JailReport::Refused { status, why })?;
            Ok(None)
        }
    }
}

/// Buries the dead, passes signals on, and tells how the command fares; none when the proxy is gone.
fn supervise(
    command: &mut Child,
    place: JobPlacement,
    channel: &UnixStream,
) -> anyhow::Result<Option<CommandExit>> {
    let own = Pid::from_raw(i32::try_from(command.id())?);
    let children = open_sigchld()?;
    loop {
        if let Some(fate) = reap_children(own, channel)? {
            return Ok(Some(fate));
        }
        let mut waits = [
            PollFd::new(channel.as_fd(), PollFlags::POLLIN),
            PollFd::new(children.as_fd(), PollFlags::POLLIN),
        ];
        poll(&mut waits, PollTimeout::NONE)?;
        let [told, _] = waits.map(|wait| wait.any().unwrap_or(true));
        while children.read_signal()?.is_some() {}
        if told {
            match control_channel::receive(channel)? {
                None => return Ok(None),
                Some(order) => handle_request(&order, own, place),
            }
        }
    }
}

/// Looks at every child that has changed; how the command ended, if it did.
fn reap_children(own: Pid, channel: &UnixStream) -> anyhow::Result<Option<CommandExit>> {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED)) {
            Ok(WaitStatus::Exited(pid, status)) if pid == own => {
                return Ok(Some(CommandExit::Exited(status)));
            }
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == own => {
                return Ok(Some(CommandExit::Killed(signal as i32)));
            }
            Ok(WaitStatus::Stopped(pid, _)) if pid == own => {
                control_channel::send(channel, &JailReport::Stopped)?;
            }
            Ok(WaitStatus::StillAlive) => return Ok(None),
            Ok(_) => {}
            Err(errno) => return Err(errno).context("cannot wait for the command"),
        }
    }
}

/// Does what the proxy says. A command that has just gone needs it no more.
fn handle_request(order: &JailRequest, own: Pid, place: JobPlacement) {
    let signal = |signal: Signal| {
        if signal == Signal::SIGKILL {
            // Everything inside but this process: none of it may have hidden from its end.
            return kill(Pid::from_raw(-1), signal).unwrap_or_default();
        }
        let in_group = getpgid(Some(own)) == Ok(own); // or it has joined another
        match place {
            JobPlacement::Background | JobPlacement::Foreground if in_group => killpg(own, signal),
            JobPlacement::Background | JobPlacement::Foreground | JobPlacement::Shared => {
                kill(own, signal)
            }
        }
        .unwrap_or_default();
    };
    match order {
        JailRequest::Cover(sockets) => sockets.iter().for_each(|socket| {
            mounts::hide_socket(socket).unwrap_or_default(); // what cannot be covered is looked at again
        }),
        JailRequest::Go { .. } => {}
        JailRequest::Resume { foreground } => {
            if *foreground {
                drop(child::take_terminal(own));
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

/// The device file of a terminal that is open as `descriptor`.
pub fn terminal_device(descriptor: BorrowedFd<'_>) -> Option<PathBuf> {
    if !descriptor.is_terminal() {
        return None;
    }
    fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd())).ok()
}
