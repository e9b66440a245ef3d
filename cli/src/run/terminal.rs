//! Terminal, job control and signals: they work for the command as if Sandbar were not in between.

use std::io::IsTerminal;
use std::os::fd::AsFd;

use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{getpgid, getpgrp, getpid, getppid, getsid, tcgetpgrp, tcsetpgrp};

use jail::{Jail, JobPlacement, ReceivedSignal};

/// Signals that this process waits for; it forwards most of them to the command.
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

/// State of the terminal before the command started.
#[derive(Clone, Debug)]
pub(super) struct TerminalState {
    pub(super) placement: JobPlacement,
    modes: Option<libc::termios>,
}

impl TerminalState {
    pub(super) fn detect() -> Self {
        let (input, output) = (std::io::stdin(), std::io::stdout());
        let has_one = std::fs::File::open("/dev/tty").is_ok();
        let placement = match (has_one, input.is_terminal() && output.is_terminal()) {
            (false, _) => JobPlacement::Background,
            // Part of a pipeline, whose other commands need the terminal too.
            (true, false) => JobPlacement::Shared,
            (true, true) => match tcgetpgrp(input.as_fd()) {
                Ok(group) if group == getpgrp() => JobPlacement::Foreground,
                Ok(_) | Err(_) => JobPlacement::Background,
            },
        };
        let modes = tcgetattr(std::io::stdin().as_fd()).ok();
        TerminalState { placement, modes: modes.map(Into::into) }
    }

    /// Whether a full-screen program is using the terminal, which a line of output would disturb.
    pub(super) fn is_raw_mode(&self) -> bool {
        let error = std::io::stderr();
        error.is_terminal()
            && tcgetattr(error.as_fd()).is_ok_and(|modes| !modes.local_flags.contains(LocalFlags::ICANON))
    }

    /// Takes the terminal back and restores its modes.
    pub(super) fn restore(&self) {
        if self.placement == JobPlacement::Shared {
            return;
        }
        let input = std::io::stdin();
        // Only if the command had it. Otherwise another job may own the terminal by now.
        if self.placement == JobPlacement::Foreground {
            tcsetpgrp(input.as_fd(), getpgrp()).unwrap_or_default();
        }
        let ours = tcgetpgrp(input.as_fd()).is_ok_and(|group| group == getpgrp());
        if let (true, Some(modes)) = (ours, self.modes) {
            tcsetattr(input.as_fd(), SetArg::TCSADRAIN, &Termios::from(modes)).unwrap_or_default();
        }
    }

    /// Forwards a signal to the command, unless the terminal has already sent it to the command's process group.
    pub(super) fn forward_signal(&self, received: ReceivedSignal, jail: &Jail) {
        let Ok(signal) = Signal::try_from(received.number) else { return };
        if signal == Signal::SIGCONT {
            let input = std::io::stdin();
            let ours = tcgetpgrp(input.as_fd()).is_ok_and(|group| group == getpgrp());
            return jail.resume(ours && self.placement != JobPlacement::Shared);
        }
        let delivered = received.by_terminal && self.placement == JobPlacement::Shared;
        if !delivered {
            jail.signal(received.number);
        } else if signal == Signal::SIGTSTP {
            stop_self();
        }
    }

    /// Stops this process when the command was stopped, so that the shell sees one job. Without a shell nothing
    /// would resume us, and a command could evade `--timeout` by stopping itself, so then keep running.
    pub(super) fn stop_with_command(&self, _jail: &Jail) {
        if self.placement != JobPlacement::Shared && is_job_controlled() {
            stop_self();
        }
    }
}

/// Whether the parent is a shell with job control: same session, different process group, with a terminal.
fn is_job_controlled() -> bool {
    let parent = getppid();
    let same_session = getsid(Some(parent)).is_ok_and(|session| getsid(None) == Ok(session));
    let other_group = getpgid(Some(parent)).is_ok_and(|group| group != getpgrp());
    parent.as_raw() > 0 && same_session && other_group && std::fs::File::open("/dev/tty").is_ok()
}

/// Stops this process until it receives SIGCONT.
fn stop_self() {
    kill(getpid(), Signal::SIGSTOP).unwrap_or_default();
}

/// Blocks the awaited signals in this thread and the threads it spawns, and returns them for `sigwaitinfo`. Also
/// blocks SIGTTOU, so that writing to the terminal from the background does not stop us.
pub(super) fn block_signals() -> nix::Result<SigSet> {
    let awaited: SigSet = AWAITED_SIGNALS.into_iter().collect();
    let mut blocked = awaited;
    blocked.add(Signal::SIGTTOU);
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&blocked), None)?;
    Ok(awaited)
}
