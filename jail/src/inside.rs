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

use super::child::{self, Place, Program};
use super::handover::{self, Fate, Order, Report};
use super::namespaces::{self, Whose};
use super::view::View;
use sys::process as kernel;

use super::{firewall, mounts, network};

/// Everything that the jail is made from.
#[derive(Clone, Debug)]
pub struct Plan {
    pub view: View,
    pub program: Program,
    /// The caller's terminal, if it has one.
    pub terminal: Option<PathBuf>,
    /// A directory, and the socket in it that goes when the proxy goes without a word.
    pub socket: (PathBuf, CString),
}

/// Leaves the caller's namespaces, makes the first process of the new ones, and stays behind to see that it
/// does not outlive the proxy. `alive` is closed by the proxy's death alone.
pub(super) fn keep(plan: &Plan, channel: UnixStream, alive: OwnedFd) -> ! {
    let kept = begin(plan, &[channel.as_raw_fd(), alive.as_raw_fd()]);
    let made = kept.and_then(|dir| Ok((dir, leave()?)));
    let (dir, first) = match made {
        Ok((dir, (_, Some(first)))) => (dir, first),
        Ok((_, (users, None))) => {
            drop(alive);
            be_first(plan, &channel, users)
        }
        Err(error) => {
            drop(handover::send(&channel, &Report::Failed(format!("{error:#}"))));
            kernel::exit(1)
        }
    };
    drop(channel);
    if watch(first, &alive).is_err() {
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
fn begin(plan: &Plan, own: &[RawFd]) -> anyhow::Result<OwnedFd> {
    let kept = [own, &plan.program.streams.descriptors()].concat();
    kernel::close_all_but(&kept).context("cannot close what was left open")?;
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&SigSet::all()), None)?;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    open(&plan.socket.0, flags, Mode::empty())
        .with_context(|| format!("cannot open {}", plan.socket.0.display()))
}

fn leave() -> anyhow::Result<(Whose, Option<Pid>)> {
    let users = namespaces::leave()?;
    set_dumpable(false)?; // from here on nobody looks into it
    Ok((users, kernel::fork().context("cannot make a process")?))
}

/// Waits until the first process has ended, or ends it when the proxy is gone.
fn watch(first: Pid, alive: &OwnedFd) -> nix::Result<()> {
    let children = children()?;
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

fn children() -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGCHLD);
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// The life of the first process: arrange everything, run the command, see to its end.
fn be_first(plan: &Plan, channel: &UnixStream, users: Whose) -> ! {
    let report = match arranged(plan, channel, users) {
        Ok(Some(mut command)) => match follow(&mut command, plan.program.place, channel) {
            Ok(Some(fate)) => Report::Ended(fate),
            Ok(None) => kernel::exit(0), // the proxy is gone, and everything with it
            Err(error) => Report::Failed(format!("{error:#}")),
        },
        Ok(None) => kernel::exit(0),
        Err(error) => Report::Failed(format!("{error:#}")),
    };
    drop(handover::send(channel, &report));
    kernel::exit(0)
}

/// Makes the jail, and starts the command once the proxy is ready.
fn arranged(plan: &Plan, channel: &UnixStream, users: Whose) -> anyhow::Result<Option<Child>> {
    set_pdeathsig(Signal::SIGKILL)?;
    kernel::leave_keyring().context("cannot leave the session's keys")?;
    mounts::arrange(&plan.view, plan.terminal.as_deref(), users)?;
    let denied = || namespaces::advice(None);
    let versions = network::raise().with_context(|| format!("cannot set up `lo`; {}", denied()))?;
    firewall::load().context(
        "cannot load the firewall: the kernel needs nf_tables with nat, redir and reject (modprobe nf_tables nft_chain_nat nft_redir nft_reject_inet)",
    )?;
    let sockets = network::sockets(versions).context("cannot listen inside")?;
    let dns = sockets.dns.len();
    handover::send(channel, &Report::Ready { dns })?;
    handover::hand_over(
        channel,
        &[sockets.dns, sockets.tcp].into_iter().flatten().collect::<Vec<_>>(),
    )?;
    let Some(Order::Go { trust }) = handover::receive(channel)? else { return Ok(None) };
    let mut files = Vec::new();
    for (name, content) in trust {
        files.push((name, STANDARD.decode(content)?));
    }
    mounts::trust(&files).context("cannot write the trust files")?;
    match child::start(&plan.program) {
        Ok(command) => {
            handover::send(channel, &Report::Started)?;
            Ok(Some(command))
        }
        Err((status, error)) => {
            let first = plan.program.words.first().map(|word| word.display().to_string());
            let why = format!("cannot run {}: {error}", first.unwrap_or_default());
            handover::send(channel, &Report::Refused { status, why })?;
            Ok(None)
        }
    }
}

/// Buries the dead, passes signals on, and tells how the command fares; none when the proxy is gone.
fn follow(command: &mut Child, place: Place, channel: &UnixStream) -> anyhow::Result<Option<Fate>> {
    let own = Pid::from_raw(i32::try_from(command.id())?);
    let children = children()?;
    loop {
        if let Some(fate) = bury(own, channel)? {
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
            match handover::receive(channel)? {
                None => return Ok(None),
                Some(order) => obey(&order, own, place),
            }
        }
    }
}

/// Looks at every child that has changed; how the command ended, if it did.
fn bury(own: Pid, channel: &UnixStream) -> anyhow::Result<Option<Fate>> {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED)) {
            Ok(WaitStatus::Exited(pid, status)) if pid == own => {
                return Ok(Some(Fate::Exited(status)));
            }
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == own => {
                return Ok(Some(Fate::Killed(signal as i32)));
            }
            Ok(WaitStatus::Stopped(pid, _)) if pid == own => {
                handover::send(channel, &Report::Stopped)?;
            }
            Ok(WaitStatus::StillAlive) => return Ok(None),
            Ok(_) => {}
            Err(errno) => return Err(errno).context("cannot wait for the command"),
        }
    }
}

/// Does what the proxy says. A command that has just gone needs it no more.
fn obey(order: &Order, own: Pid, place: Place) {
    let signal = |signal: Signal| {
        if signal == Signal::SIGKILL {
            // Everything inside but this process: none of it may have hidden from its end.
            return kill(Pid::from_raw(-1), signal).unwrap_or_default();
        }
        let in_group = getpgid(Some(own)) == Ok(own); // or it has joined another
        match place {
            Place::Background | Place::Foreground if in_group => killpg(own, signal),
            Place::Background | Place::Foreground | Place::Shared => kill(own, signal),
        }
        .unwrap_or_default();
    };
    match order {
        Order::Cover(sockets) => sockets.iter().for_each(|socket| {
            mounts::hide_socket(socket).unwrap_or_default(); // what cannot be covered is looked at again
        }),
        Order::Go { .. } => {}
        Order::Resume { foreground } => {
            if *foreground {
                drop(child::take_terminal(own));
            }
            signal(Signal::SIGCONT);
        }
        Order::Signal(number) => {
            if let Ok(number) = Signal::try_from(*number) {
                signal(number);
            }
        }
    }
}

/// The device file of a terminal that is open as `descriptor`.
pub fn terminal_of(descriptor: BorrowedFd<'_>) -> Option<PathBuf> {
    if !descriptor.is_terminal() {
        return None;
    }
    fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd())).ok()
}
