//! The rootless jail behind `sandbar run`.
//!
//! Four processes: the proxy, outside, which holds the sockets; a keeper, which ends the jail when the proxy
//! dies; the first process inside, with whose end everything inside ends; and the command. What stands in whose
//! way:
//!
//! | what the command tries | what stands in its way | where |
//! | --- | --- | --- |
//! | TCP to any address and port, IPv4 and IPv6 | no interface but `lo`; redirected to the proxy | `network`, `firewall` |
//! | DNS to any resolver, UDP and TCP | redirected to the proxy | `firewall` |
//! | other UDP (QUIC, NTP, STUN, WireGuard, mDNS), ICMP, SCTP, GRE, multicast | rejected at once | `firewall` |
//! | other addresses, routes, firewall rules; raw and packet sockets | no capabilities; an own network namespace | `child`, `namespaces` |
//! | sockets of other kinds (vsock, bluetooth, packet, alg, xdp), `io_uring` | refused by the system call filter | `seccomp` |
//! | abstract unix sockets | belong to the network namespace | `namespaces` |
//! | unix sockets by path: containers, agents, D-Bus, X11, Wayland, admin | `/run`, `/tmp`, the runtime directory are new; those elsewhere are covered, within a second if they are made later | `view`, `mounts` |
//! | processes outside: `/proc`, `ptrace`, signals | an own process namespace; keeper and first process not dumpable | `namespaces`, `inside` |
//! | shared memory, semaphores, message queues | an own IPC namespace; `/dev/shm` is new | `namespaces`, `mounts` |
//! | policies, lists | read-only, or read once where they cannot be | `view` |
//! | log, state, keys of Sandbar | hidden; the authority's key is in the proxy's memory only, and that not dumpable | `view` |
//! | credentials in the home directory | hidden | `view` |
//! | moving what is hidden or read-only away, from a mount namespace without it | no further mount namespaces | `namespaces` |
//! | the caller's cgroup | no further cgroup namespaces, `/sys` read-only | `namespaces`, `mounts` |
//! | files that the caller's programs run or obey later | read-only, as is everything but home and working directory | `view`, `mounts` |
//! | `/proc/sys`, `/sys`, `sysrq-trigger`, devices (by root) | read-only; a `/dev` of six devices; `nodev` elsewhere | `mounts` |
//! | typing into the terminal (`TIOCSTI`, `TIOCLINUX`), other terminals | refused by the system call filter; an own `devpts` | `seccomp`, `mounts` |
//! | keys of the session | an own session keyring; no key calls | `inside`, `seccomp` |
//! | set-user-id programs, file capabilities | no new privileges, no bounding set, `nosuid` | `child`, `mounts` |
//! | descriptors that were left open | closed | `child` |
//! | outliving the proxy, or its time | killed with it, whatever group it is in | `inside` |

mod child;
mod control_channel;
mod filesystem_view;
mod firewall;
mod init;
mod mounts;
mod namespaces;
pub mod netlink;
mod network;
mod paths;
mod seccomp;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nix::unistd::Pid;

pub use child::{CommandSpec, CommandStdio, JobPlacement};
pub use control_channel::CommandExit;
use control_channel::{JailReport, JailRequest};
pub use filesystem_view::{FilesystemView, UnixSocketWatcher, ViewOptions, command_environment};
pub use init::{JailPlan, terminal_device};
pub use mounts::{TRUST_DIR, runtime_dir};
pub use namespaces::blocking_setting;
use sys::process as kernel;
pub use sys::process::{ReceivedSignal, next_signal};

/// Longest time in which a jail must stand.
const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// A jail in which nothing runs yet, or a command does. It ends when this is dropped.
pub struct Jail {
    keeper: Pid,
    channel: UnixStream,
    /// The other end closes when this process dies, however it dies.
    _alive: OwnedFd,
}

/// The sockets at which everything that leaves the jail arrives.
pub struct JailListeners {
    pub dns: Vec<OwnedFd>,
    pub tcp: Vec<OwnedFd>,
}

/// What the jail tells.
#[derive(Clone, Debug)]
pub enum JailEvent {
    Ended(CommandExit),
    /// The jail broke, or could not run the command, which has an exit status.
    Failed {
        status: Option<u8>,
        why: String,
    },
    Started,
    Stopped,
}

/// What the command and everything it started have used.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResourceUsage {
    pub cpu: Duration,
    /// The most memory that any one process held, in bytes.
    pub peak: u64,
}

/// Moves this process, which has one thread still, into a network of its own: nothing but `lo`, to which
/// every address belongs. What is dialled from here arrives here, wherever it was meant to go.
///
/// # Errors
///
/// Says what forbids it, and what to change.
pub fn unshare_network() -> anyhow::Result<()> {
    if !kernel::is_single_threaded() {
        bail!("a network is left before anything else runs");
    }
    namespaces::unshare_network().context("there is no jail")?;
    let denied = || namespaces::explain_failure(None);
    network::claim_all_addresses().with_context(|| format!("cannot set up `lo`; {}", denied()))
}

impl Jail {
    /// Makes the jail. It needs that this process has one thread still.
    ///
    /// # Errors
    ///
    /// Says what forbids it, and what to change.
    pub fn create(plan: &JailPlan) -> anyhow::Result<(Self, JailListeners)> {
        if !kernel::is_single_threaded() {
            bail!("a jail is made before anything else runs");
        }
        let (ours, theirs) = UnixStream::pair().context("cannot make a socket pair")?;
        let (dead, alive) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let Some(keeper) = kernel::fork().context("cannot make a process")? else {
            drop((ours, alive));
            init::run_keeper(plan, theirs, dead);
        };
        // From here on nobody of the same user looks into this process.
        nix::sys::prctl::set_dumpable(false)?;
        drop((theirs, dead));
        let jail = Jail { keeper, channel: ours, _alive: alive };
        let arrivals = jail.receive_listeners()?;
        Ok((jail, arrivals))
    }

    fn receive_listeners(&self) -> anyhow::Result<JailListeners> {
        self.channel.set_read_timeout(Some(READY_TIMEOUT))?;
        let report =
            control_channel::receive(&self.channel).context("the jail was not ready in time")?;
        let count = match report {
            Some(JailReport::Ready { dns }) => dns,
            Some(JailReport::Failed(why)) => bail!("there is no jail: {why}"),
            Some(
                JailReport::Ended(_)
                | JailReport::Refused { .. }
                | JailReport::Started
                | JailReport::Stopped,
            )
            | None => bail!("there is no jail: it ended before it was ready"),
        };
        let mut dns =
            control_channel::receive_sockets(&self.channel).context("no socket was handed over")?;
        self.channel.set_read_timeout(None)?;
        if dns.len() <= count {
            bail!("there is no jail: a socket is missing");
        }
        let tcp = dns.split_off(count);
        Ok(JailListeners { dns, tcp })
    }

    /// Runs the command, whose tools trust what is signed by the authority of these files.
    pub fn start_command(&self, trust: &[(PathBuf, Vec<u8>)]) -> io::Result<()> {
        let coded = trust
            .iter()
            .map(|(path, content)| (path.to_string_lossy().into_owned(), STANDARD.encode(content)));
        control_channel::send(&self.channel, &JailRequest::Go { trust: coded.collect() })
    }

    /// Waits for the next news; none when the jail is gone.
    pub fn next_event(&self) -> Option<JailEvent> {
        let report = control_channel::receive(&self.channel).ok()??;
        Some(match report {
            JailReport::Ended(fate) => JailEvent::Ended(fate),
            JailReport::Failed(why) => JailEvent::Failed { status: None, why },
            JailReport::Ready { .. } | JailReport::Started => JailEvent::Started,
            JailReport::Refused { status, why } => JailEvent::Failed { status: Some(status), why },
            JailReport::Stopped => JailEvent::Stopped,
        })
    }

    /// Passes a signal on to the command. One that has ended needs it no more.
    pub fn signal(&self, number: i32) {
        drop(control_channel::send(&self.channel, &JailRequest::Signal(number)));
    }

    /// Covers unix sockets that were made since. One that is not seen inside needs no cover.
    pub fn hide_sockets(&self, sockets: Vec<PathBuf>) {
        drop(control_channel::send(&self.channel, &JailRequest::Cover(sockets)));
    }

    /// Lets a command that was stopped go on.
    pub fn resume(&self, foreground: bool) {
        drop(control_channel::send(&self.channel, &JailRequest::Resume { foreground }));
    }

    /// Waits until everything inside has ended; what it used.
    pub fn wait(&self) -> ResourceUsage {
        match kernel::wait_child(self.keeper) {
            Ok((_, used)) => ResourceUsage { cpu: used.user + used.system, peak: used.peak },
            Err(_) => ResourceUsage::default(),
        }
    }
}
