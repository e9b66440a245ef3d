//! The command itself: what it is stripped of between the first process of the jail and its own first
//! instruction.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::unistd::{Pid, getpid, setpgid, tcsetpgrp};

use sys::process as kernel;

use super::seccomp;

/// Exit statuses of env(1): found but not run, and not found.
const EXIT_CANNOT_RUN: u8 = 126;
const EXIT_NOT_FOUND: u8 = 127;

/// What is run.
#[derive(Clone, Debug)]
pub struct CommandSpec {
    pub words: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
    pub place: JobPlacement,
    /// The signals that the caller had blocked, and no others.
    pub blocked: SigSet,
    pub streams: CommandStdio,
}

/// What the command reads and writes.
#[derive(Clone, Debug)]
pub enum CommandStdio {
    /// The caller's own.
    Inherited,
    /// Pipes for input and output; complaints go nowhere.
    Pipes(Arc<[OwnedFd; 2]>),
}

/// Where the command stands towards the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobPlacement {
    /// In a process group of its own, in the foreground of the terminal.
    Foreground,
    /// In a process group of its own, behind whoever has the terminal.
    Background,
    /// In the caller's process group: it is part of a pipeline, and the shell's signals reach it by themselves.
    Shared,
}

impl CommandStdio {
    /// What has to stay open for them.
    pub(super) fn descriptors(&self) -> Vec<RawFd> {
        match self {
            CommandStdio::Inherited => Vec::new(),
            CommandStdio::Pipes(pipes) => pipes.iter().map(AsRawFd::as_raw_fd).collect(),
        }
    }
}

/// Starts the command; otherwise the exit status that says why not.
pub(super) fn spawn_command(program: &CommandSpec) -> Result<Child, (u8, io::Error)> {
    let Some((first, rest)) = program.words.split_first() else {
        return Err((EXIT_NOT_FOUND, io::ErrorKind::NotFound.into()));
    };
    let (place, blocked) = (program.place, program.blocked);
    let mut command = Command::new(first);
    command.args(rest).env_clear().envs(program.environment.iter().cloned());
    set_stdio(&mut command, &program.streams).map_err(|error| (EXIT_CANNOT_RUN, error))?;
    let hooked = kernel::before_exec(&mut command, move || drop_privileges(place, &blocked));
    hooked.map_err(|error| (EXIT_CANNOT_RUN, error))?;
    let why = |error: io::Error| {
        let missing = error.kind() == io::ErrorKind::NotFound;
        (if missing { EXIT_NOT_FOUND } else { EXIT_CANNOT_RUN }, error)
    };
    command.spawn().map_err(why)
}

fn set_stdio(command: &mut Command, streams: &CommandStdio) -> io::Result<()> {
    match streams {
        CommandStdio::Inherited => {}
        CommandStdio::Pipes(pipes) => {
            let [input, output] = &**pipes;
            command.stdin(input.try_clone()?).stdout(output.try_clone()?).stderr(Stdio::null());
        }
    }
    Ok(())
}

/// Takes everything away that the command shall not have. In this order: a filter of system calls would
/// stand in the way of the rest, and needs that no privilege is gained afterwards.
fn drop_privileges(place: JobPlacement, blocked: &SigSet) -> io::Result<()> {
    match place {
        JobPlacement::Background => setpgid(Pid::from_raw(0), Pid::from_raw(0))?,
        JobPlacement::Foreground => {
            setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
            take_terminal(getpid())?;
        }
        JobPlacement::Shared => {}
    }
    nix::sys::prctl::set_no_new_privs()?;
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(blocked), None)?;
    kernel::close_on_exec()?;
    kernel::drop_capabilities()?;
    seccomp::install_filter(place)
}

/// Makes a process group of the jail the terminal's foreground; whoever asks from behind would be stopped.
pub(super) fn take_terminal(group: Pid) -> io::Result<()> {
    let mut asking = SigSet::empty();
    asking.add(Signal::SIGTTOU);
    let mut before = SigSet::empty();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&asking), Some(&mut before))?;
    let taken = tcsetpgrp(sys::fd::standard_input(), group);
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&before), None)?;
    Ok(taken?)
}
