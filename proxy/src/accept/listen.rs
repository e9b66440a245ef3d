//! Listeners: sockets that we bind or inherit, and the accept loop. A socket that cannot do what its mode needs fails
//! at start, with the reason and the fix (P16).

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use rules::configuration::{Attribution, BindTarget, ListenerMode, ListenerSettings};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use sys::socket as kernel;
use tokio::net::{TcpListener, UnixListener};
use tokio_util::task::TaskTracker;

use crate::accept::channel;
use crate::accept::{AcceptedConnection, ConnectionHandler, ListenerSignals};
use crate::budget::live::CutSignal;
use crate::egress::connect::UNSENT_BYTES;
use crate::egress::stream;
use crate::report::metrics;

/// Length of the kernel's accept queue.
const BACKLOG: i32 = 4096;
/// Pause after a failed accept, as when the process is out of file descriptors.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);
/// How long connections that were cut with their listener have for their records.
const CUT_GRACE: Duration = Duration::from_secs(1);

/// A bound listener that does not serve yet.
pub(crate) struct BoundListener {
    pub(super) mode: ListenerMode,
    pub(super) attribution: Attribution,
    pub(super) source: Arc<ListenerSocket>,
}

pub(super) enum ListenerSocket {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

/// Binds one socket of a listener. Relative paths start at `base`.
pub(super) fn bind_socket(
    bind: &BindTarget,
    mode: ListenerMode,
    base: &Path,
) -> anyhow::Result<ListenerSocket> {
    match bind {
        BindTarget::Tcp(address) => {
            let bound = bind_tcp(*address, mode);
            bound.map(ListenerSocket::Tcp).with_context(|| bind_hint(mode, *address))
        }
        BindTarget::Unix(path) => bind_unix(&base.join(path)),
        BindTarget::Inherited(name) => inherit_listener(name),
    }
}

/// Checks what the mode and the attribution need from the kernel.
pub(super) fn check_requirements(listener: &ListenerSettings) -> anyhow::Result<()> {
    let tcp = listener.bind.iter().any(|bind| !matches!(bind, BindTarget::Unix(_)));
    let unix = listener.bind.iter().any(|bind| !matches!(bind, BindTarget::Tcp(_)));
    match &listener.attribution {
        Attribution::Unix if listener.bind.iter().any(|bind| matches!(bind, BindTarget::Tcp(_))) => {
            bail!("`identify = \"unix\"` is for unix sockets: bind `unix:PATH`");
        }
        Attribution::Interface | Attribution::Mark | Attribution::SourceAddress if unix && !tcp => {
            bail!("a unix socket has no interface, mark or address: use `identify = \"unix\"` or `sandbox`");
        }
        Attribution::Mark => check_fwmark_accept(),
        Attribution::Dedicated(_)
        | Attribution::Interface
        | Attribution::SourceAddress
        | Attribution::Unix => Ok(()),
    }
}

/// Accepted connections inherit the mark of their first packet only if this sysctl is set.
fn check_fwmark_accept() -> anyhow::Result<()> {
    const SETTING: &str = "/proc/sys/net/ipv4/tcp_fwmark_accept";
    let setting = std::fs::read_to_string(SETTING).with_context(|| format!("cannot read {SETTING}"))?;
    if setting.trim() != "1" {
        bail!("connections lose their firewall mark: run `sysctl -w net.ipv4.tcp_fwmark_accept=1`");
    }
    Ok(())
}

fn bind_hint(mode: ListenerMode, address: SocketAddr) -> String {
    match mode {
        ListenerMode::Tproxy => format!(
            "cannot listen on {address} for TPROXY: it needs CAP_NET_ADMIN (or use `mode = \"redirect\"`)"
        ),
        ListenerMode::Dns | ListenerMode::Explicit | ListenerMode::Redirect => {
            format!("cannot listen on {address}: free the address or change `bind`")
        }
    }
}

fn bind_tcp(address: SocketAddr, mode: ListenerMode) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if mode == ListenerMode::Tproxy {
        socket.set_ip_transparent_v4(true)?; // one kernel flag serves IPv4 and IPv6
    }
    kernel::enable_packet_info(socket.as_fd(), address)?;
    socket.set_tcp_notsent_lowat(UNSENT_BYTES)?; // accepted sockets inherit it
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket.into())
}

/// Binds a unix socket that every user may connect to: its directory restricts access, and peer credentials identify
/// users.
fn bind_unix(path: &Path) -> anyhow::Result<ListenerSocket> {
    let shown = path.display();
    let found = std::fs::symlink_metadata(path);
    if found.is_ok_and(|found| !found.file_type().is_socket()) {
        bail!("{shown} exists and is not a socket: remove it, or change `bind`");
    }
    match std::fs::remove_file(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("cannot remove {shown}")),
    }
    let listener = UnixListener::bind(path).with_context(|| format!("cannot listen on {shown}"))?;
    let everybody = std::fs::Permissions::from_mode(0o666);
    std::fs::set_permissions(path, everybody).with_context(|| format!("cannot open {shown}"))?;
    Ok(ListenerSocket::Unix(listener, path.to_owned()))
}

fn inherit_listener(name: &str) -> anyhow::Result<ListenerSocket> {
    let socket = inherited_socket(name)?;
    let address = socket.local_addr().with_context(|| format!("`{name}` is not a socket"))?;
    socket.set_nonblocking(true)?;
    if let Some(path) = address.as_pathname().map(Path::to_owned) {
        return Ok(ListenerSocket::Unix(UnixListener::from_std(OwnedFd::from(socket).into())?, path));
    }
    if let Some(address) = address.as_socket() {
        kernel::enable_packet_info(socket.as_fd(), address)?;
        socket.set_tcp_notsent_lowat(UNSENT_BYTES)?;
    }
    Ok(ListenerSocket::Tcp(TcpListener::from_std(socket.into())?))
}

/// Returns the inherited socket with this name or file descriptor number.
pub(crate) fn inherited_socket(name: &str) -> anyhow::Result<Socket> {
    let number = match name.parse::<RawFd>() {
        Ok(number) => number,
        Err(_) => systemd_socket(name).with_context(|| {
            format!(
                "no inherited socket is named `{name}`: set FileDescriptorName= in the systemd socket unit"
            )
        })?,
    };
    duplicate_socket(number).with_context(|| format!("file descriptor {number} is not a socket"))
}

/// The socket that systemd passed to this process under this name (sd_listen_fds(3)).
fn systemd_socket(name: &str) -> Option<RawFd> {
    let mut sockets = sd_notify::listen_fds_with_names().ok()?;
    sockets.find(|(_, socket)| socket == name).map(|(number, _)| number)
}

fn duplicate_socket(number: RawFd) -> io::Result<Socket> {
    let socket = Socket::from(sys::fd::duplicate(number)?);
    socket.r#type().map(|_| socket)
}

impl ListenerSocket {
    /// Describes where it listens, for people.
    pub(super) fn describe(&self) -> String {
        match self {
            ListenerSocket::Tcp(listener) => {
                listener.local_addr().map(|address| address.to_string()).unwrap_or_default()
            }
            ListenerSocket::Unix(_, path) => path.display().to_string(),
        }
    }

    /// Prepares a socket that serves for another mode.
    pub(super) fn adopt_mode(&self, mode: ListenerMode) -> io::Result<()> {
        match (self, mode) {
            (ListenerSocket::Tcp(listener), ListenerMode::Tproxy) => {
                SockRef::from(listener).set_ip_transparent_v4(true)
            }
            (ListenerSocket::Tcp(_) | ListenerSocket::Unix(..), _) => Ok(()),
        }
    }
}

impl BoundListener {
    /// Accepts connections until the listener stops. Each counts at the trackers while it is open. Pauses after a failed accept instead of spinning.
    pub(super) async fn serve(
        self,
        handler: Arc<ConnectionHandler>,
        trackers: [TaskTracker; 2],
        signals: ListenerSignals,
    ) {
        let mut stop = signals.stop.clone();
        loop {
            let accepted = tokio::select! {
                accepted = self.accept(&signals) => accepted,
                _ = stop.wait_for(|stop| *stop) => return,
            };
            match accepted {
                Ok(accepted) => {
                    let (handler, cut) = (handler.clone(), signals.cut.clone());
                    let tracked = trackers.each_ref().map(TaskTracker::token);
                    tokio::spawn(async move {
                        let _tracked = tracked;
                        tokio::select! {
                            () = handler.serve(accepted) => {}
                            () = wait_for_end(&cut) => {}
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    metrics::count_shed_accept();
                    tokio::time::sleep(ACCEPT_BACKOFF).await;
                }
            }
        }
    }

    async fn accept(&self, signals: &ListenerSignals) -> io::Result<AcceptedConnection> {
        let (socket, source) = match &*self.source {
            ListenerSocket::Tcp(listener) => {
                let (stream, source) = listener.accept().await?;
                stream.set_nodelay(true)?;
                (stream::StreamSocket::Tcp(stream), Some(source))
            }
            ListenerSocket::Unix(listener, _) => {
                (stream::StreamSocket::Unix(listener.accept().await?.0), None)
            }
        };
        // A connection without a channel belongs to no sandbox: it is refused and recorded.
        let channels = channel::channels(&socket, &self.attribution, source).unwrap_or_default();
        let original_dst = channel::original_dst(&socket, self.mode).unwrap_or_default();
        let listener = signals.clone();
        Ok(AcceptedConnection { socket, mode: self.mode, channels, source, original_dst, listener })
    }
}

/// Waits until a connection whose listener was cut must be gone: a moment after the cut, for its record to close.
async fn wait_for_end(cut: &CutSignal) {
    cut.wait().await;
    tokio::time::sleep(CUT_GRACE).await;
}
