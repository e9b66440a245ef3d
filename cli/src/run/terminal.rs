//! The terminal, job control and signals: the command has them as if we were not there.

use std::io::IsTerminal;
use std::os::fd::AsFd;

use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{getpgid, getpgrp, getpid, getppid, getsid, tcgetpgrp, tcsetpgrp};

use jail::{Jail, JobPlacement, ReceivedSignal};

/// Signals that are waited for: most are passed on.
const AWAITED_SIGNALS: [Signal; 9] = [
    Signal::SIGALRM,
    Signal::SIGCONT,
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGTSTP,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// What is known of the terminal from before the command had it.
#[derive(Clone, Debug)]
pub(super) struct TerminalState {
    pub(super) place: JobPlacement,
    modes: Option<libc::termios>,
}

impl TerminalState {
    pub(super) fn detect() -> Self {
        let (input, output) = (std::io::stdin(), std::io::stdout());
        let has_one = std::fs::File::open("/dev/tty").is_ok();
        let place = match (has_one, input.is_terminal() && output.is_terminal()) {
            (false, _) => JobPlacement::Background,
            // Part of a pipeline: its other parts need the terminal as much.
            (true, false) => JobPlacement::Shared,
            (true, true) => match tcgetpgrp(input.as_fd()) {
                Ok(group) if group == getpgrp() => JobPlacement::Foreground,
                Ok(_) | Err(_) => JobPlacement::Background,
            },
        };
        let modes = tcgetattr(std::io::stdin().as_fd()).ok();
        TerminalState { place, modes: modes.map(Into::into) }
    }

    /// Whether something is drawn on it that a line of ours would spoil.
    pub(super) fn is_raw_mode(&self) -> bool {
        let error = std::io::stderr();
        error.is_terminal()
            && tcgetattr(error.as_fd())
                .is_ok_and(|modes| !modes.local_flags.contains(LocalFlags::ICANON))
    }

    /// Takes the terminal back, as it was before.
    pub(super) fn restore(&self) {
        if self.place == JobPlacement::Shared {
            return;
        }
        let input = std::io::stdin();
        // Only from the command that had it: whoever else has it by now keeps it.
        if self.place == JobPlacement::Foreground {
            tcsetpgrp(input.as_fd(), getpgrp()).unwrap_or_default();
        }
        let ours = tcgetpgrp(input.as_fd()).is_ok_and(|group| group == getpgrp());
        if let (true, Some(modes)) = (ours, self.modes) {
            tcsetattr(input.as_fd(), SetArg::TCSADRAIN, &Termios::from(modes)).unwrap_or_default();
        }
    }

    /// Passes a signal on, unless the terminal has told the command itself.
    pub(super) fn forward_signal(&self, told: ReceivedSignal, jail: &Jail) {
        let Ok(signal) = Signal::try_from(told.number) else { return };
        if signal == Signal::SIGCONT {
            let input = std::io::stdin();
            let ours = tcgetpgrp(input.as_fd()).is_ok_and(|group| group == getpgrp());
            return jail.resume(ours && self.place != JobPlacement::Shared);
        }
        let told_already = told.by_terminal && self.place == JobPlacement::Shared;
        if !told_already {
            jail.signal(told.number);
        } else if signal == Signal::SIGTSTP {
            stop_self();
        }
    }

    /// The command was stopped, so we stop: the shell sees one job. Where no shell would let us go on, a command
    /// that stops itself must not stop the clock.
    pub(super) fn stop_with_command(&self, _jail: &Jail) {
        if self.place != JobPlacement::Shared && is_job_controlled() {
            stop_self();
        }
    }
}

/// Whether somebody controls this process as a job: the parent, from another group of the same session of a terminal.
fn is_job_controlled() -> bool {
    let parent = getppid();
    let beside = getsid(Some(parent)).is_ok_and(|session| getsid(None) == Ok(session));
    let apart = getpgid(Some(parent)).is_ok_and(|group| group != getpgrp());
    parent.as_raw() > 0 && beside && apart && std::fs::File::open("/dev/tty").is_ok()
}

/// Stops until somebody lets us go on, of which SIGCONT tells.
fn stop_self() {
    kill(getpid(), Signal::SIGSTOP).unwrap_or_default();
}

/// Blocks the signals in this thread and all that come of it, to be waited for. Writing to the terminal from
/// behind its foreground must not stop us either.
pub(super) fn block_signals() -> nix::Result<SigSet> {
    let waited: SigSet = AWAITED_SIGNALS.into_iter().collect();
    let mut blocked = waited;
    blocked.add(Signal::SIGTTOU);
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&blocked), None)?;
    Ok(waited)
}
