//! Outside, where Sandbar runs: the set-up that makes it the only way out.

mod evidence;
mod firewall;
mod instance;
mod keep;
mod keys;
mod machine;

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rules::Sources;
use rules::operator::{Listener, Mode, Operator, Whose};
use serde_json::Value;

use super::DoctorArgs;
use super::probe;
use super::report::Report;
use proxy::admin::server as admin;
use proxy::app::{Places, operator, places};
use proxy::policy::files;

type Probe = probe::Probe<Site>;

/// What is looked at.
struct Site {
    /// Why there is nothing more, or everything that the operator's file says.
    files: Result<Files, String>,
    /// What the running instance says of itself, or why nothing.
    told: Result<Value, String>,
    /// The process of the running instance.
    process: Option<Process>,
}

/// The running instance's process, as the admin socket tells it.
#[derive(Clone, Copy, Debug)]
struct Process {
    pid: i32,
    uid: u32,
}

/// What the operator's file says, and the files it names.
struct Files {
    config: PathBuf,
    sources: Sources,
    operator: Operator,
    places: Places,
}

impl Files {
    fn read(config: &Path) -> anyhow::Result<Self> {
        let sources = files::operated(config)?;
        let operator = operator(&sources)?;
        let places = places(config, &operator)?;
        Ok(Files { config: config.to_owned(), sources, operator, places })
    }

    /// A path as written in the operator's file.
    fn at(&self, written: &str) -> PathBuf {
        self.config.parent().unwrap_or(Path::new("")).join(written)
    }

    /// The listeners to which a firewall must bring connections.
    fn transparent(&self) -> impl Iterator<Item = &Listener> {
        let transparent = |mode: Mode| match mode {
            Mode::Redirect | Mode::Tproxy => true,
            Mode::Dns | Mode::Explicit => false,
        };
        self.operator.listeners.iter().filter(move |listener| transparent(listener.mode))
    }

    /// The ports at which these listen.
    fn ports(listeners: impl Iterator<Item = impl std::borrow::Borrow<Listener>>) -> Vec<u16> {
        let ports = listeners.flat_map(|listener| {
            let binds = listener.borrow().bind.iter();
            binds.filter_map(|bind| bind.address()).map(|to| to.port()).collect::<Vec<_>>()
        });
        ports.collect()
    }

    fn addresses(&self, mode: Mode) -> Vec<SocketAddr> {
        let listeners = self.operator.listeners.iter().filter(|listener| listener.mode == mode);
        listeners.flat_map(|one| one.bind.iter()).filter_map(|bind| bind.address()).collect()
    }

    fn knows_by_mark(&self) -> bool {
        self.operator.listeners.iter().any(|listener| listener.whose == Whose::Mark)
    }
}

impl Site {
    fn of(config: Option<&Path>) -> Self {
        let files = match config {
            None => Err("there is no sandbar.toml: name one with -c FILE".to_owned()),
            Some(config) => Files::read(config).map_err(|error| format!("{error:#}")),
        };
        let socket = files.as_ref().map(|files| files.places.socket.clone());
        let told = match &socket {
            Ok(socket) => ask(socket).map_err(|error| format!("{error:#}")),
            Err(why) => Err((*why).clone()),
        };
        let process = socket.ok().and_then(|socket| listening(&socket).ok());
        Site { files, told, process }
    }

    /// The operator's file, or the verdict that there is none.
    fn files(&self) -> Result<&Files, probe::Verdict> {
        self.files.as_ref().map_err(|why| probe::Verdict::Unknown(why.clone()))
    }
}

fn ask(socket: &Path) -> anyhow::Result<Value> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let told = runtime.block_on(admin::ask(socket, "GET", "/status", &Value::Null))?;
    Ok(serde_json::from_str(&told)?)
}

fn listening(socket: &Path) -> io::Result<Process> {
    let peer = getsockopt(&UnixStream::connect(socket)?.as_fd(), PeerCredentials)?;
    Ok(Process { pid: peer.pid(), uid: peer.uid() })
}

/// Looks at everything.
pub(super) fn examine(args: &DoctorArgs, config: Option<&Path>) -> anyhow::Result<Report> {
    let started = Instant::now();
    let site = Site::of(config);
    let probes =
        [instance::probes(), machine::probes(), firewall::probes(), keys::probes(), keep::probes()];
    let findings = probes.into_iter().flatten().map(|probe| {
        let started = Instant::now();
        probe.found((probe.run)(&site), started.elapsed())
    });
    let findings = findings.collect();
    let evidence = site.files.as_ref().map(|files| evidence::collect(files, args));
    let evidence = evidence.unwrap_or_default();
    Ok(Report { side: "outside", findings, evidence, took: started.elapsed() })
}
