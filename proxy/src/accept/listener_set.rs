//! The listeners of an instance, which a reload opens and closes.
//!
//! A change has two halves. [`ListenerSet::prepare`] binds every new socket and fails if one cannot be bound; nothing has
//! changed then (P9). [`PreparedSettings::apply`] starts the new listeners and stops the others, after the rules that
//! belong to them are in force.
//!
//! A socket is known by its `bind`. One that stays keeps its queue of connections, whatever else changes. A listener
//! that is removed stops accepting, its connections finish within `drain_seconds`, and then they are cut. If a bind goes
//! to another sandbox or another mode, the connections that it accepted before are cut at once: they were identified
//! by a channel that exists no longer (P2, P10).

use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Context, bail};
use dns_filter::server::{DnsAttribution, DnsFront, DnsListener, DnsServer};
use rules::Reason;
use rules::configuration::{Attribution, BindTarget, Configuration, ListenerMode, ListenerSettings};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use super::listen::{self, BoundListener, ListenerSocket};
use super::{ConnectionHandler, ListenerSignals};
use crate::budget::live::CutSignal;
use crate::policy::settings::{AppliedSettings, InstanceSettings, PreparedSettings, unapplied_parts};

/// All listeners of an instance.
#[derive(Clone)]
pub(crate) struct ListenerSet {
    inner: Arc<ListenerState>,
}

struct ListenerState {
    /// Relative paths start here.
    base: PathBuf,
    /// None if the instance started without proxy listeners: it has no certificate authority then.
    handler: Option<Arc<ConnectionHandler>>,
    dns: DnsFront,
    runtime: Handle,
    /// The configuration that the instance runs with.
    started: Configuration,
    running: Mutex<Vec<RunningListener>>,
    /// Set at the stop, while `running` is locked: no listener is opened any more.
    stopping: AtomicBool,
    next_id: AtomicU64,
    /// Connections of proxy listeners.
    connections: TaskTracker,
    /// Tasks of DNS listeners.
    dns_tasks: TaskTracker,
    /// Errors of listeners that failed.
    failures: mpsc::UnboundedSender<io::Error>,
}

/// One socket and how its connections are treated.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SocketSettings {
    mode: ListenerMode,
    bind: BindTarget,
    attribution: Attribution,
}

struct RunningListener {
    id: u64,
    settings: SocketSettings,
    /// None for DNS.
    socket: Option<Arc<ListenerSocket>>,
    description: String,
    stop: watch::Sender<bool>,
    cut: Arc<CutSignal>,
    connections: TaskTracker,
}

/// A socket that is bound and does not serve yet.
struct OpenedListener {
    settings: SocketSettings,
    socket: OpenedSocket,
    /// The running listener whose socket it takes over.
    replaces: Option<u64>,
}

enum OpenedSocket {
    Dns(DnsServer),
    Proxy(Arc<ListenerSocket>),
}

/// A change of the listeners that cannot fail any more.
pub(crate) struct PreparedListeners {
    set: ListenerSet,
    opened: Vec<OpenedListener>,
    /// The listeners that go on as they are.
    kept: Vec<u64>,
    unapplied: Vec<String>,
}

impl ListenerSet {
    /// Returns an empty set; errors of listeners arrive at the receiver.
    pub(crate) fn new(
        base: PathBuf,
        handler: Option<Arc<ConnectionHandler>>,
        dns: DnsFront,
        started: Configuration,
    ) -> (Self, mpsc::UnboundedReceiver<io::Error>) {
        let (failures, failed) = mpsc::unbounded_channel();
        let inner = ListenerState {
            base,
            handler,
            dns,
            runtime: Handle::current(),
            started,
            running: Mutex::default(),
            stopping: AtomicBool::new(false),
            next_id: AtomicU64::new(0),
            connections: TaskTracker::new(),
            dns_tasks: TaskTracker::new(),
            failures,
        };
        (ListenerSet { inner: Arc::new(inner) }, failed)
    }

    /// Binds the listeners that the instance starts with.
    pub(crate) fn prepare_start(&self) -> anyhow::Result<PreparedListeners> {
        self.prepare_sockets(&self.inner.started.listeners)
    }

    /// Describes the listeners for people.
    pub(crate) fn describe(&self) -> Vec<String> {
        sys::lock(&self.inner.running).iter().map(|running| running.description.clone()).collect()
    }

    /// Stops accepting, and waits for DNS queries in flight.
    pub(crate) async fn stop(&self) {
        self.finish_all();
        self.inner.dns_tasks.close();
        self.inner.dns_tasks.wait().await; // bounded by the DNS filter's own drain
    }

    fn finish_all(&self) {
        let mut running = sys::lock(&self.inner.running);
        self.inner.stopping.store(true, Ordering::Relaxed);
        running.iter_mut().for_each(RunningListener::finish);
    }

    /// The connections of all proxy listeners.
    pub(crate) fn connections(&self) -> &TaskTracker {
        &self.inner.connections
    }

    /// Binds what is new in `listeners`.
    fn prepare_sockets(&self, listeners: &[ListenerSettings]) -> anyhow::Result<PreparedListeners> {
        if listeners.is_empty() {
            bail!("no listener: add a `[[listener]]` to the configuration");
        }
        let _entered = self.inner.runtime.enter(); // sockets register with the runtime
        let mut wanted = Vec::new();
        for listener in listeners {
            listen::check_requirements(listener)?;
            let ListenerSettings { mode, bind, attribution } = listener.clone();
            let each =
                |bind| SocketSettings { mode, bind: normalize_bind(bind), attribution: attribution.clone() };
            wanted.extend(bind.into_iter().map(each));
        }
        let mut prepared = PreparedListeners {
            set: self.clone(),
            opened: Vec::new(),
            kept: Vec::new(),
            unapplied: Vec::new(),
        };
        let running = sys::lock(&self.inner.running);
        let mut unmatched: Vec<&RunningListener> = running.iter().collect();
        // Those that stay as they are come first: with port 0, several sockets have the same `bind`.
        wanted.retain(|wanted| match unmatched.iter().position(|running| running.settings == *wanted) {
            Some(at) => {
                prepared.kept.push(unmatched.swap_remove(at).id);
                false
            }
            None => true,
        });
        for wanted in wanted {
            match unmatched.iter().position(|running| running.settings.bind == wanted.bind) {
                Some(at) => Self::prepare_change(unmatched.swap_remove(at), wanted, &mut prepared)?,
                None => self.prepare_new(wanted, &running, &mut prepared)?,
            }
        }
        Ok(prepared)
    }

    /// Prepares a socket that serves, for another mode or another attribution.
    fn prepare_change(
        serving: &RunningListener,
        wanted: SocketSettings,
        prepared: &mut PreparedListeners,
    ) -> anyhow::Result<()> {
        match &serving.socket {
            Some(socket) if wanted.mode != ListenerMode::Dns => {
                let description = &serving.description;
                socket
                    .adopt_mode(wanted.mode)
                    .with_context(|| format!("cannot change listener {description}"))?;
                let (socket, replaces) = (OpenedSocket::Proxy(socket.clone()), Some(serving.id));
                prepared.opened.push(OpenedListener { settings: wanted, socket, replaces });
            }
            // Two sets of DNS sockets cannot share an address while one replaces the other.
            Some(_) | None => {
                prepared.unapplied.push(format!("the change of listener {}", serving.description));
                prepared.kept.push(serving.id);
            }
        }
        Ok(())
    }

    fn prepare_new(
        &self,
        wanted: SocketSettings,
        running: &[RunningListener],
        prepared: &mut PreparedListeners,
    ) -> anyhow::Result<()> {
        let socket = match (wanted.mode, &self.inner.handler) {
            (ListenerMode::Dns, _) => self.open_dns(&wanted).map(OpenedSocket::Dns),
            (_, Some(_)) => listen::bind_socket(&wanted.bind, wanted.mode, &self.inner.base)
                .map(|socket| OpenedSocket::Proxy(Arc::new(socket))),
            (_, None) => {
                let bind = describe_bind(&wanted.bind);
                let first = format!("listener {} {bind}, the first proxy listener", wanted.mode.as_str());
                prepared.unapplied.push(first);
                return Ok(());
            }
        };
        let socket = socket.map_err(|error| match port_holder(&wanted.bind, running) {
            Some(holder) => error.context(format!(
                "{} has the port: remove it first and reload, or restart",
                holder.description
            )),
            None => error,
        })?;
        prepared.opened.push(OpenedListener { settings: wanted, socket, replaces: None });
        Ok(())
    }

    fn open_dns(&self, wanted: &SocketSettings) -> anyhow::Result<DnsServer> {
        let Some(whose) = DnsAttribution::from_rules(&wanted.attribution) else {
            bail!("a dns listener cannot attribute queries to sandboxes by unix socket");
        };
        let dns = &self.inner.dns;
        match &wanted.bind {
            BindTarget::Inherited(name) => Ok(dns.adopt(listen::inherited_socket(name)?, whose)?),
            BindTarget::Tcp(bind) => Ok(dns.open(&[DnsListener { bind: *bind, whose }])?),
            BindTarget::Unix(_) => bail!("a dns listener must bind to `address:port` or `inherited:NAME`"),
        }
    }

    /// Starts a bound listener.
    fn start(&self, opened: OpenedListener) -> RunningListener {
        let description = opened.describe();
        let OpenedListener { settings, socket, .. } = opened;
        let id = self.inner.next_id.fetch_add(1, Ordering::Relaxed);
        let (stop, stopped) = watch::channel(false);
        let (cut, connections) = (Arc::<CutSignal>::default(), TaskTracker::new());
        let socket = match socket {
            OpenedSocket::Dns(server) => {
                let (failures, stop) = (self.inner.failures.clone(), stopped.clone());
                let serve = async move {
                    let served = server.run(stopped).await;
                    // A listener that was removed may end as it likes.
                    if let Some(error) = served.err().filter(|_| !*stop.borrow()) {
                        drop(failures.send(error)); // the receiver is gone while the program stops
                    }
                };
                self.inner.dns_tasks.spawn_on(serve, &self.inner.runtime);
                None
            }
            OpenedSocket::Proxy(socket) => {
                if let Some(handler) = self.inner.handler.clone() {
                    let SocketSettings { mode, attribution, .. } = settings.clone();
                    let bound = BoundListener { mode, attribution, source: socket.clone() };
                    let signals = ListenerSignals { stop: stopped, cut: cut.clone() };
                    let trackers = [self.inner.connections.clone(), connections.clone()];
                    self.inner.runtime.spawn(bound.serve(handler, trackers, signals));
                }
                Some(socket)
            }
        };
        RunningListener { id, settings, socket, description, stop, cut, connections }
    }

    /// Ends a removed listener: its connections finish within the drain time, and are cut then.
    fn retire(&self, mut removed: RunningListener) {
        removed.finish();
        let Some(handler) = &self.inner.handler else { return };
        let drain = handler.shared.limits.drain();
        self.inner.runtime.spawn(async move {
            removed.connections.close();
            if timeout(drain, removed.connections.wait()).await.is_err() {
                removed.cut.trigger(Reason::CutByOperator);
            }
        });
    }
}

impl InstanceSettings for ListenerSet {
    fn prepare(&self, configuration: &Configuration) -> anyhow::Result<Box<dyn PreparedSettings>> {
        let mut prepared = self.prepare_sockets(&configuration.listeners)?;
        prepared.unapplied.extend(unapplied_parts(&self.inner.started, configuration));
        Ok(Box::new(prepared))
    }
}

impl PreparedSettings for PreparedListeners {
    fn apply(self: Box<Self>) -> AppliedSettings {
        PreparedListeners::apply(*self)
    }
}

impl PreparedListeners {
    /// Describes the listeners that will be opened, for people.
    pub(crate) fn describe(&self) -> Vec<String> {
        self.opened.iter().map(OpenedListener::describe).collect()
    }

    /// Starts what is new and stops what is no longer wanted.
    pub(crate) fn apply(self) -> AppliedSettings {
        let PreparedListeners { set, opened, kept, unapplied } = self;
        let mut applied = AppliedSettings { unapplied, ..AppliedSettings::default() };
        let mut running = sys::lock(&set.inner.running);
        let (staying, leaving): (Vec<_>, Vec<_>) =
            running.drain(..).partition(|running| kept.contains(&running.id));
        *running = staying;
        for mut removed in leaving {
            if opened.iter().any(|opened| opened.replaces == Some(removed.id)) {
                removed.finish();
                removed.cut.trigger(Reason::IdentityChanged);
            } else {
                applied.closed.push(removed.description.clone());
                set.retire(removed);
            }
        }
        let opened = if set.inner.stopping.load(Ordering::Relaxed) { Vec::new() } else { opened };
        for opened in opened {
            let started = set.start(opened);
            applied.opened.push(started.description.clone());
            running.push(started);
        }
        applied
    }
}

impl OpenedListener {
    fn describe(&self) -> String {
        let place = match &self.socket {
            OpenedSocket::Dns(server) => {
                server.addresses().first().map(ToString::to_string).unwrap_or_default()
            }
            OpenedSocket::Proxy(socket) => socket.describe(),
        };
        format!("{} {place}", self.settings.mode.as_str())
    }
}

impl RunningListener {
    /// Stops accepting, and lets connections finish. The socket closes unless another listener has taken it over.
    fn finish(&mut self) {
        self.stop.send_replace(true);
        self.socket = None;
    }
}

/// Returns the listener that holds the port which `bind` needs, on an overlapping address.
fn port_holder<'a>(bind: &BindTarget, running: &'a [RunningListener]) -> Option<&'a RunningListener> {
    let wanted = bind.address()?;
    running.iter().find(|running| {
        running.settings.bind.address().is_some_and(|held| {
            let overlaps =
                held.ip() == wanted.ip() || held.ip().is_unspecified() || wanted.ip().is_unspecified();
            held.port() == wanted.port() && held.is_ipv4() == wanted.is_ipv4() && overlaps
        })
    })
}

/// Spells a path in one way: two spellings of one socket must not look like two sockets.
fn normalize_bind(bind: BindTarget) -> BindTarget {
    match bind {
        BindTarget::Unix(path) => {
            let parts = Path::new(&path).components().filter(|part| *part != Component::CurDir);
            BindTarget::Unix(parts.collect::<PathBuf>().display().to_string())
        }
        BindTarget::Inherited(_) | BindTarget::Tcp(_) => bind,
    }
}

fn describe_bind(bind: &BindTarget) -> String {
    match bind {
        BindTarget::Inherited(name) => format!("inherited:{name}"),
        BindTarget::Tcp(address) => address.to_string(),
        BindTarget::Unix(path) => path.clone(),
    }
}
