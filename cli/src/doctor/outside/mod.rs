//! Outside, where Sandbar runs: checks the set-up that makes it the only way out.

mod evidence;
mod firewall;
mod instance;
mod keys;
mod machine;
mod storage;

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rules::LoadSources;
use rules::configuration::{Attribution, Configuration, ListenerMode, ListenerSettings};
use serde_json::Value;

use super::DoctorArgs;
use super::probe;
use super::report::DoctorReport;
use proxy::admin::client as admin;
use proxy::app::{InstancePaths, instance_paths, load_config};
use proxy::policy::files;

type OutsideProbe = probe::DoctorProbe<DeploymentState>;

/// The state that the checks examine.
struct DeploymentState {
    /// The configuration and its files, or why they cannot be read.
    files: Result<ConfigFiles, String>,
    /// The status of the running instance, or why there is none.
    status: Result<Value, String>,
    /// The process of the running instance.
    process: Option<InstanceProcess>,
}

/// The running instance's process, from the peer credentials of the admin socket.
#[derive(Clone, Copy, Debug)]
struct InstanceProcess {
    pid: i32,
    uid: u32,
}

/// The configuration and the files it names.
struct ConfigFiles {
    config: PathBuf,
    sources: LoadSources,
    configuration: Configuration,
    paths: InstancePaths,
}

impl ConfigFiles {
    fn read(config: &Path) -> anyhow::Result<Self> {
        let sources = files::read_config(config)?;
        let configuration = load_config(&sources)?;
        let paths = instance_paths(config, &configuration)?;
        Ok(ConfigFiles { config: config.to_owned(), sources, configuration, paths })
    }

    /// Resolves a path written in the configuration.
    fn resolve(&self, written: &str) -> PathBuf {
        self.config.parent().unwrap_or(Path::new("")).join(written)
    }

    /// The listeners to which a firewall must redirect connections.
    fn transparent_listeners(&self) -> impl Iterator<Item = &ListenerSettings> {
        let transparent = |mode: ListenerMode| match mode {
            ListenerMode::Redirect | ListenerMode::Tproxy => true,
            ListenerMode::Dns | ListenerMode::Explicit => false,
        };
        self.configuration.listeners.iter().filter(move |listener| transparent(listener.mode))
    }

    /// The ports of these listeners.
    fn ports(listeners: impl Iterator<Item = impl std::borrow::Borrow<ListenerSettings>>) -> Vec<u16> {
        let ports = listeners.flat_map(|listener| {
            let binds = listener.borrow().bind.iter();
            binds.filter_map(|bind| bind.address()).map(|to| to.port()).collect::<Vec<_>>()
        });
        ports.collect()
    }

    fn addresses(&self, mode: ListenerMode) -> Vec<SocketAddr> {
        let listeners = self.configuration.listeners.iter().filter(|listener| listener.mode == mode);
        listeners.flat_map(|one| one.bind.iter()).filter_map(|bind| bind.address()).collect()
    }

    fn identifies_by_mark(&self) -> bool {
        self.configuration.listeners.iter().any(|listener| listener.attribution == Attribution::Mark)
    }
}

impl DeploymentState {
    fn collect(config: Option<&Path>) -> Self {
        let files = match config {
            None => Err("no sandbar.toml: use -c FILE".to_owned()),
            Some(config) => ConfigFiles::read(config).map_err(|error| format!("{error:#}")),
        };
        let socket = files.as_ref().map(|files| files.paths.socket.clone());
        let status = match &socket {
            Ok(socket) => fetch_status(socket).map_err(|error| format!("{error:#}")),
            Err(why) => Err((*why).clone()),
        };
        let process = socket.ok().and_then(|socket| listening_process(&socket).ok());
        DeploymentState { files, status, process }
    }

    /// Returns the configuration, or `Unknown` if it cannot be read.
    fn files(&self) -> Result<&ConfigFiles, probe::ProbeVerdict> {
        self.files.as_ref().map_err(|why| probe::ProbeVerdict::Unknown(why.clone()))
    }
}

fn fetch_status(socket: &Path) -> anyhow::Result<Value> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let reply = runtime.block_on(admin::send_command(socket, "GET", "/status", &Value::Null))?;
    Ok(serde_json::from_str(&reply)?)
}

fn listening_process(socket: &Path) -> io::Result<InstanceProcess> {
    let peer = getsockopt(&UnixStream::connect(socket)?.as_fd(), PeerCredentials)?;
    Ok(InstanceProcess { pid: peer.pid(), uid: peer.uid() })
}

/// Runs all checks and collects the evidence.
pub(super) fn examine(args: &DoctorArgs, config: Option<&Path>) -> anyhow::Result<DoctorReport> {
    let started = Instant::now();
    let site = DeploymentState::collect(config);
    let probes =
        [instance::probes(), machine::probes(), firewall::probes(), keys::probes(), storage::probes()];
    let findings = probes.into_iter().flatten().map(|probe| {
        let started = Instant::now();
        probe.finding((probe.run)(&site), started.elapsed())
    });
    let findings = findings.collect();
    let evidence = site.files.as_ref().map(|files| evidence::collect(files, args));
    let evidence = evidence.unwrap_or_default();
    Ok(DoctorReport { side: "outside", findings, evidence, took: started.elapsed() })
}
