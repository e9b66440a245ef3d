//! The rootless jail behind `sandbar run`.
//!
//! Four processes take part, each the parent of the next. The docs of the functions below say which one runs them.
//!
//! ```text
//! proxy    outside; serves the jail's sockets; this module
//!   keeper   outside the pid namespace; kills init when the proxy dies; `init::run_keeper`
//!     init     pid 1 of the jail: when it exits, the kernel kills everything else inside; `init::run_init`
//!       command  what the caller asked for, without privileges; `child`
//! ```
//!
//! The keeper exists for two reasons. `unshare(2)` moves the calling process into the new user, mount and network
//! namespaces, and the proxy must stay in the caller's to reach the internet; into the new pid namespace it moves
//! only the children, so the process that unshares has to fork once more. And a process outside the jail has to
//! clean up if the proxy is killed. Proxy and init talk over `control_channel`; init creates the listening sockets
//! in the jail's network namespace and passes them to the proxy, which serves them from outside.
//!
//! | what the command tries | what stops it | where |
//! | --- | --- | --- |
//! | TCP to any address and port, IPv4 and IPv6 | no interface except `lo`; redirected to the proxy | `network`, `firewall` |
//! | DNS to any resolver, UDP and TCP | redirected to the proxy | `firewall` |
//! | other UDP (QUIC, NTP, STUN, WireGuard, mDNS), ICMP, SCTP, GRE, multicast | rejected at once | `firewall` |
//! | other addresses, routes, firewall rules; raw and packet sockets | no capabilities; its own network namespace | `child`, `namespaces` |
//! | sockets of other families (vsock, bluetooth, packet, alg, xdp), `io_uring` | refused by the seccomp filter | `seccomp` |
//! | abstract unix sockets | belong to the network namespace | `namespaces` |
//! | unix sockets by path: containers, agents, D-Bus, X11, Wayland, admin | `/run`, `/tmp` and the runtime directory are new; sockets elsewhere are covered, within about 50 ms if created later | `filesystem_view`, `mounts` |
//! | processes outside: `/proc`, `ptrace`, signals | its own pid namespace; keeper and init are not dumpable | `namespaces`, `init` |
//! | shared memory, semaphores, message queues | its own IPC namespace; `/dev/shm` is new | `namespaces`, `mounts` |
//! | policies, lists | read-only; read once where that is impossible | `filesystem_view` |
//! | log, state, keys of Sandbar | hidden; the authority's key exists only in the proxy's memory, which is not dumpable | `filesystem_view` |
//! | credentials in home directories, and of the machine | hidden, within about 50 ms if replaced later | `credential_files`, `mounts` |
//! | credentials in the environment | removed | `environment` |
//! | moving hidden or read-only paths away in a new mount namespace | no more mount namespaces | `namespaces` |
//! | the caller's cgroup | no more cgroup namespaces, `/sys` read-only | `namespaces`, `mounts` |
//! | files that the caller's programs run or obey later | read-only, as is everything except home and working directory | `filesystem_view`, `mounts` |
//! | `/proc/sys`, `/sys`, `sysrq-trigger`, devices (by root) | read-only; a `/dev` of six devices; `nodev` elsewhere | `mounts` |
//! | typing into the terminal (`TIOCSTI`, `TIOCLINUX`), other terminals | refused by the seccomp filter; its own `devpts` | `seccomp`, `mounts` |
//! | keys of the session | its own session keyring; no key calls | `init`, `seccomp` |
//! | set-user-id programs, file capabilities | `no_new_privs`, empty bounding set, `nosuid` | `child`, `mounts` |
//! | files given as standard streams, opened again through `/proc/self/fd` | read-only mount for input, pipe for output | `stdio` |
//! | other inherited file descriptors | closed | `init`, `child` |
//! | outliving the proxy, or its timeout | killed with it, in any process group | `init` |

mod child;
mod control_channel;
mod credential_files;
mod environment;
mod filesystem_view;
mod firewall;
mod init;
mod mounts;
mod namespaces;
pub mod netlink;
mod network;
mod paths;
mod seccomp;
mod stdio;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nix::unistd::Pid;

pub use child::{CommandSpec, JobPlacement};
pub use control_channel::CommandExit;
use control_channel::{JailReport, JailRequest};
pub use credential_files::{HOME_CREDENTIALS, SYSTEM_CREDENTIALS, home_credentials, relocated_credentials};
pub use environment::{command_environment, is_credential_variable};
pub use filesystem_view::{
    FilesystemView, HiddenFileWatcher, PolicyExposure, UnixSocketWatcher, ViewOptions,
};
pub use init::{JailPlan, terminal_device};
pub use mounts::{TRUST_DIR, runtime_dir};
pub use namespaces::blocking_setting;
pub use stdio::{CommandStdio, CommandStream, CopyDirection, StreamCopy, confine_stdio};
use sys::process as kernel;
pub use sys::process::{ReceivedSignal, next_signal};

/// How long the proxy waits for init to set up the jail.
const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// The proxy's handle on a jail, before and while the command runs. Dropping it kills the jail.
pub struct Jail {
    keeper: Pid,
    channel: UnixStream,
    /// Write end of a pipe that the keeper polls. The kernel closes it however the proxy dies.
    _alive: OwnedFd,
}

/// The listening sockets that receive all traffic of the jail.
pub struct JailListeners {
    pub dns: Vec<OwnedFd>,
    pub tcp: Vec<OwnedFd>,
}

/// A change of state that the jail reports.
#[derive(Clone, Debug)]
pub enum JailEvent {
    Ended(CommandExit),
    /// The jail failed, or could not run the command; the latter has an exit status.
    Failed {
        status: Option<u8>,
        why: String,
    },
    Started,
    Stopped,
}

/// Resources used by the command and everything it started.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResourceUsage {
    pub cpu: Duration,
    /// Peak memory of the largest process, in bytes.
    pub peak: u64,
}

/// Moves the calling process into a new network namespace with only `lo`, which owns every IPv4 address: every
/// connection it makes arrives at the process itself, whatever the destination.
///
/// # Errors
///
/// Fails if the process has more than one thread, or if the kernel refuses; the error names the setting to change.
pub fn unshare_network() -> anyhow::Result<()> {
    if !kernel::is_single_threaded() {
        bail!("the network namespace must be created before the first thread is started");
    }
    namespaces::unshare_network().context("cannot create the jail")?;
    let denied = || namespaces::explain_failure(None);
    network::claim_all_addresses().with_context(|| format!("cannot set up `lo`; {}", denied()))
}

impl Jail {
    /// Forks the keeper, which creates the jail, and waits until the jail is ready. Runs in the proxy.
    ///
    /// # Errors
    ///
    /// Fails if the process has more than one thread, or if the kernel refuses; the error names the setting to change.
    pub fn create(plan: &JailPlan) -> anyhow::Result<(Self, JailListeners)> {
        if !kernel::is_single_threaded() {
            bail!("the jail must be created before the first thread is started");
        }
        let (ours, theirs) = UnixStream::pair().context("cannot create a socket pair")?;
        let (alive_read, alive) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let Some(keeper) = kernel::fork().context("cannot fork the keeper")? else {
            drop((ours, alive));
            init::run_keeper(plan, theirs, alive_read);
        };
        // No other process of this user can read our memory from here on. Not before the fork: the keeper writes its
        // own uid map, and the /proc files of a process that is not dumpable belong to root.
        nix::sys::prctl::set_dumpable(false)?;
        drop((theirs, alive_read));
        let jail = Jail { keeper, channel: ours, _alive: alive };
        let listeners = jail.receive_listeners()?;
        Ok((jail, listeners))
    }

    /// Runs in the proxy.
    fn receive_listeners(&self) -> anyhow::Result<JailListeners> {
        self.channel.set_read_timeout(Some(READY_TIMEOUT))?;
        let report = control_channel::receive(&self.channel).context("the jail was not ready in time")?;
        let count = match report {
            Some(JailReport::Ready { dns }) => dns,
            Some(JailReport::Failed(why)) => bail!("cannot create the jail: {why}"),
            Some(
                JailReport::Ended(_) | JailReport::Refused { .. } | JailReport::Started | JailReport::Stopped,
            )
            | None => bail!("cannot create the jail: it exited before it was ready"),
        };
        let mut dns = control_channel::receive_sockets(&self.channel)
            .context("cannot receive the jail's listening sockets")?;
        self.channel.set_read_timeout(None)?;
        if dns.len() <= count {
            bail!("cannot create the jail: a listening socket is missing");
        }
        let tcp = dns.split_off(count);
        Ok(JailListeners { dns, tcp })
    }

    /// Asks init to write the trust files and start the command. Runs in the proxy.
    pub fn start_command(&self, trust: &[(PathBuf, Vec<u8>)]) -> io::Result<()> {
        let encoded = trust
            .iter()
            .map(|(path, content)| (path.to_string_lossy().into_owned(), STANDARD.encode(content)));
        control_channel::send(&self.channel, &JailRequest::Go { trust: encoded.collect() })
    }

    /// Blocks until the jail reports something; `None` when it is gone. Runs in the proxy.
    pub fn next_event(&self) -> Option<JailEvent> {
        let report = control_channel::receive(&self.channel).ok()??;
        Some(match report {
            JailReport::Ended(exit) => JailEvent::Ended(exit),
            JailReport::Failed(why) => JailEvent::Failed { status: None, why },
            JailReport::Ready { .. } | JailReport::Started => JailEvent::Started,
            JailReport::Refused { status, why } => JailEvent::Failed { status: Some(status), why },
            JailReport::Stopped => JailEvent::Stopped,
        })
    }

    /// Asks init to send the command a signal; does nothing once the jail is gone. Runs in the proxy.
    pub fn signal(&self, number: i32) {
        drop(control_channel::send(&self.channel, &JailRequest::Signal(number)));
    }

    /// Asks init to cover these unix sockets, created since the start; it ignores those invisible inside. Runs in the
    /// proxy.
    pub fn hide_sockets(&self, sockets: Vec<PathBuf>) {
        drop(control_channel::send(&self.channel, &JailRequest::Cover(sockets)));
    }

    /// Asks init to hide these credentials again, which were replaced since the start. Runs in the proxy.
    pub fn hide_credentials(&self, paths: Vec<PathBuf>) {
        drop(control_channel::send(&self.channel, &JailRequest::Hide(paths)));
    }

    /// Asks init to resume a stopped command. Runs in the proxy.
    pub fn resume(&self, foreground: bool) {
        drop(control_channel::send(&self.channel, &JailRequest::Resume { foreground }));
    }

    /// Blocks until everything inside has ended, and returns what it used. Runs in the proxy.
    pub fn wait(&self) -> ResourceUsage {
        match kernel::wait_child(self.keeper) {
            Ok((_, usage)) => ResourceUsage { cpu: usage.user + usage.system, peak: usage.peak },
            Err(_) => ResourceUsage::default(),
        }
    }
}
