//! Listeners: sockets bound by us or handed over, and the loop that accepts. A socket that cannot do what
//! its mode needs is refused at the start, with the reason and the fix (P16).

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use rules::operator::{Bind, Listener, Mode, Whose};
use socket2::{Domain, Protocol, Socket, Type};
use sys::socket as kernel;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::accept::channel;
use crate::accept::{Accepted, Gate};
use crate::egress::stream;
use crate::report::metrics;

/// Connections that wait in the kernel to be accepted.
const BACKLOG: i32 = 4096;
/// Pause after the process has run out of descriptors.
const BREATH: Duration = Duration::from_millis(50);
/// First descriptor that systemd passes on (sd_listen_fds(3)).
const FIRST_INHERITED: RawFd = 3;

/// An open listener, not serving yet.
pub(crate) struct Open {
    mode: Mode,
    whose: Whose,
    source: Source,
}

enum Source {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

/// Opens every socket of a listener; `base` is where its paths begin.
pub(crate) fn open(listener: &Listener, base: &Path) -> anyhow::Result<Vec<Open>> {
    demands(listener)?;
    let each = |bind: &Bind| {
        let source = source(bind, listener, base)?;
        Ok(Open { mode: listener.mode, whose: listener.whose.clone(), source })
    };
    listener.bind.iter().map(each).collect()
}

fn source(bind: &Bind, listener: &Listener, base: &Path) -> anyhow::Result<Source> {
    match bind {
        Bind::Tcp(address) => {
            let bound = tcp(*address, listener.mode);
            bound.map(Source::Tcp).with_context(|| trouble(listener.mode, *address))
        }
        Bind::Unix(path) => unix(&base.join(path)),
        Bind::Inherited(name) => inherited(name),
    }
}

/// What the mode and the way of knowing sandboxes need of the kernel.
fn demands(listener: &Listener) -> anyhow::Result<()> {
    let tcp = listener.bind.iter().any(|bind| !matches!(bind, Bind::Unix(_)));
    let unix = listener.bind.iter().any(|bind| !matches!(bind, Bind::Tcp(_)));
    match &listener.whose {
        Whose::Unix if listener.bind.iter().any(|bind| matches!(bind, Bind::Tcp(_))) => {
            bail!("`identify = \"unix\"` is for unix sockets: bind `unix:PATH`");
        }
        Whose::Interface | Whose::Mark | Whose::SourceAddress if unix && !tcp => {
            bail!(
                "a unix socket has no interface, mark or address: say `identify = \"unix\"` or `sandbox`"
            );
        }
        Whose::Mark => marks_are_kept(),
        Whose::Dedicated(_) | Whose::Interface | Whose::SourceAddress | Whose::Unix => Ok(()),
    }
}

/// An accepted connection has the mark of its first packet only where the kernel is told so.
fn marks_are_kept() -> anyhow::Result<()> {
    const SETTING: &str = "/proc/sys/net/ipv4/tcp_fwmark_accept";
    let kept =
        std::fs::read_to_string(SETTING).with_context(|| format!("cannot read {SETTING}"))?;
    if kept.trim() != "1" {
        bail!(
            "connections do not keep their firewall mark: run `sysctl -w net.ipv4.tcp_fwmark_accept=1`"
        );
    }
    Ok(())
}

fn trouble(mode: Mode, address: SocketAddr) -> String {
    match mode {
        Mode::Tproxy => format!(
            "cannot listen on {address} for TPROXY: it needs CAP_NET_ADMIN (or use `mode = \"redirect\"`)"
        ),
        Mode::Dns | Mode::Explicit | Mode::Redirect => {
            format!("cannot listen on {address}: free the address or change `bind`")
        }
    }
}

fn tcp(address: SocketAddr, mode: Mode) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if mode == Mode::Tproxy {
        socket.set_ip_transparent_v4(true)?; // the kernel keeps one flag for both versions
    }
    kernel::tell_destination(socket.as_fd(), address)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket.into())
}

/// Open to whoever can reach the path: its directory guards it, and peer credentials tell users apart.
fn unix(path: &Path) -> anyhow::Result<Source> {
    let shown = path.display();
    match std::fs::remove_file(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("cannot remove {shown}")),
    }
    let listener = UnixListener::bind(path).with_context(|| format!("cannot listen on {shown}"))?;
    let everybody = std::fs::Permissions::from_mode(0o666);
    std::fs::set_permissions(path, everybody).with_context(|| format!("cannot open {shown}"))?;
    Ok(Source::Unix(listener, path.to_owned()))
}

fn inherited(name: &str) -> anyhow::Result<Source> {
    let socket = passed(name)?;
    let address = socket.local_addr().with_context(|| format!("`{name}` is no socket"))?;
    socket.set_nonblocking(true)?;
    if let Some(path) = address.as_pathname().map(Path::to_owned) {
        return Ok(Source::Unix(UnixListener::from_std(OwnedFd::from(socket).into())?, path));
    }
    if let Some(address) = address.as_socket() {
        kernel::tell_destination(socket.as_fd(), address)?;
    }
    Ok(Source::Tcp(TcpListener::from_std(socket.into())?))
}

/// The socket that was passed on under this name or number.
pub(crate) fn passed(name: &str) -> anyhow::Result<Socket> {
    let number = match name.parse::<RawFd>() {
        Ok(number) => number,
        Err(_) => *passed_on().get(name).with_context(|| {
            format!("no socket named `{name}` was passed on: see FileDescriptorName= of the systemd socket")
        })?,
    };
    adopt(number).with_context(|| format!("descriptor {number} is no socket"))
}

/// The sockets that systemd says it passed on to this very process, by name.
fn passed_on() -> HashMap<String, RawFd> {
    let own = std::process::id().to_string();
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    if variable("LISTEN_PID") != own {
        return HashMap::new();
    }
    let names = variable("LISTEN_FDNAMES");
    names.split(':').map(str::to_owned).zip(FIRST_INHERITED..).collect()
}

fn adopt(number: RawFd) -> io::Result<Socket> {
    let socket = Socket::from(sys::fd::duplicate(number)?);
    socket.r#type().map(|_| socket)
}

impl Open {
    /// Where it listens, for people.
    pub(crate) fn describe(&self) -> String {
        let mode = match self.mode {
            Mode::Dns => "dns",
            Mode::Explicit => "explicit",
            Mode::Redirect => "redirect",
            Mode::Tproxy => "tproxy",
        };
        match &self.source {
            Source::Tcp(listener) => {
                let address = listener.local_addr().map(|address| address.to_string());
                format!("{mode} {}", address.unwrap_or_default())
            }
            Source::Unix(_, path) => format!("{mode} {}", path.display()),
        }
    }

    /// Accepts until `stop` turns true. Out of descriptors it pauses instead of spinning.
    pub(crate) async fn serve(
        self,
        gate: Arc<Gate>,
        tasks: TaskTracker,
        mut stop: watch::Receiver<bool>,
    ) {
        loop {
            let accepted = tokio::select! {
                accepted = self.accept() => accepted,
                _ = stop.wait_for(|stop| *stop) => return,
            };
            match accepted {
                Ok(accepted) => {
                    let gate = gate.clone();
                    tasks.spawn(async move { gate.serve(accepted).await });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    metrics::shed();
                    tokio::time::sleep(BREATH).await;
                }
            }
        }
    }

    async fn accept(&self) -> io::Result<Accepted> {
        let (socket, source) = match &self.source {
            Source::Tcp(listener) => {
                let (stream, source) = listener.accept().await?;
                stream.set_nodelay(true)?;
                (stream::Socket::Tcp(stream), Some(source))
            }
            Source::Unix(listener, _) => (stream::Socket::Unix(listener.accept().await?.0), None),
        };
        // What the kernel does not tell makes a connection that belongs to nobody: refused and recorded.
        let channels = channel::channels(&socket, &self.whose, source).unwrap_or_default();
        let aimed = channel::aimed(&socket, self.mode).unwrap_or_default();
        Ok(Accepted { socket, mode: self.mode, channels, source, aimed })
    }
}
