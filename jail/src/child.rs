//! Starts the command: init forks, and the child gives up its privileges before it executes the command.

use std::ffi::OsString;
use std::io;
use std::process::{Child, Command};

use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::unistd::{Pid, getpid, setpgid, tcsetpgrp};

use sys::process as kernel;

use super::seccomp;
use super::stdio::{CommandStdio, ReadOnlyInput};

/// Exit statuses of env(1): the command cannot be executed, and was not found.
const EXIT_CANNOT_RUN: u8 = 126;
const EXIT_NOT_FOUND: u8 = 127;

/// The command to run, and how.
#[derive(Clone, Debug)]
pub struct CommandSpec {
    pub words: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
    pub place: JobPlacement,
    /// The command's signal mask: exactly the signals that the caller had blocked.
    pub blocked: SigSet,
    pub streams: CommandStdio,
}

/// The process group of the command, and whether it owns the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobPlacement {
    /// A new process group in the foreground of the terminal.
    Foreground,
    /// A new process group in the background.
    Background,
    /// The caller's process group: the command is part of a pipeline, and the shell's signals reach it directly.
    Shared,
}

/// Forks and executes the command. Runs in init.
///
/// # Errors
///
/// Returns the exit status that env(1) would have, and the error.
pub(super) fn spawn_command(program: &CommandSpec, input: &ReadOnlyInput) -> Result<Child, (u8, io::Error)> {
    let Some((first, rest)) = program.words.split_first() else {
        return Err((EXIT_NOT_FOUND, io::ErrorKind::NotFound.into()));
    };
    let (place, blocked) = (program.place, program.blocked);
    let mut command = Command::new(first);
    command.args(rest).env_clear().envs(program.environment.iter().cloned());
    let set = input.set_stdio(&mut command, &program.streams);
    set.map_err(|error| (EXIT_CANNOT_RUN, error))?;
    let hooked = kernel::before_exec(&mut command, move || drop_privileges(place, &blocked));
    hooked.map_err(|error| (EXIT_CANNOT_RUN, error))?;
    let why = |error: io::Error| {
        let missing = error.kind() == io::ErrorKind::NotFound;
        (if missing { EXIT_NOT_FOUND } else { EXIT_CANNOT_RUN }, error)
    };
    command.spawn().map_err(why)
}

/// Gives up everything that the command must not have. Runs in the command's process, between fork and exec.
///
/// The order matters:
///
/// 1. Job control first, while every signal is still blocked (inherited from the keeper): a `SIGTTOU` or `SIGTSTP`
///    must not stop a process that is in its new group and has not the terminal yet.
/// 2. `no_new_privs` before capabilities and seccomp. Without `CAP_SYS_ADMIN` the kernel accepts a filter only from
///    a process with this flag, and the next steps drop that capability.
/// 3. The caller's signal mask. Signals that were pending arrive here, in the right process group.
/// 4. Other file descriptors are marked close-on-exec, not closed: the standard library reports a failed exec
///    through a pipe that has to survive until then.
/// 5. Capabilities. The filter is installed without any, by virtue of step 2.
/// 6. The seccomp filter last, so that it need not allow any call of the steps above. It survives the exec.
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

/// Makes `group` the foreground process group of the terminal. Runs in the command's process (at the start) and in
/// init (when it resumes the command).
///
/// The kernel sends `SIGTTOU` to a background process that calls `tcsetpgrp`, which would stop it; it lets the call
/// pass if the signal is blocked.
pub(super) fn take_terminal(group: Pid) -> io::Result<()> {
    let mut sigttou = SigSet::empty();
    sigttou.add(Signal::SIGTTOU);
    let mut before = SigSet::empty();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&sigttou), Some(&mut before))?;
    let result = tcsetpgrp(sys::fd::standard_input(), group);
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&before), None)?;
    Ok(result?)
}
