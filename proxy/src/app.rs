//! Builds everything from the operator's file and hands it over; the only file that knows all crates.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, bail};
use arc_swap::ArcSwap;
use audit::{Lifecycle, LifecycleEvent, Log, Seen};
use certs::trust::SystemStore;
use certs::{Authority, AuthorityOptions, TrustSource, UnixTime};
use dns_filter::server::{Identify, Listener, Server};
use dns_filter::{Config, Filter, Resolver};
use rules::load;
use rules::operator::{Bind, DnsSettings, Mode, Operator, SystemRoots};
use rules::word::SandboxId;
use rules::{RuleSet, Sources, Timed, compile};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use crate::accept::Gate;
use crate::accept::leaf_certs::Leaves;
use crate::accept::listen::{self, Open};
use crate::admin::pending::Pending;
use crate::admin::server::Admin;
use crate::admin::status::State;
use crate::budget::ledger::Ledger;
use crate::credential::Credentials;
use crate::egress::roots::Roots;
use crate::egress::shared::Shared;
use crate::http::Engine;
use crate::memory::Guard;
use crate::policy::grants::Grants;
use crate::policy::identities::Identities;
use crate::policy::source::Origin;
use crate::policy::store::{Last, Reloader};
use crate::policy::watch::{Eyes, Watch};
use crate::report::diagnostics::{Severity, complain};
use crate::report::metrics;
use crate::self_test;

/// What budgets are kept in, beside the log.
const BUDGETS: &str = "dns-budget.json";
/// Where commands reach the running program, beside the log.
const SOCKET: &str = "admin.sock";
/// Where the certificate authority is, beside the operator's file.
const AUTHORITY: &str = "ca";

/// Where an instance keeps its things.
pub struct Places {
    pub log: PathBuf,
    pub socket: PathBuf,
    pub ca: PathBuf,
}

/// Sees every attempt as it is recorded; traffic waits for it.
pub type Witness = Box<dyn Fn(&Seen<'_>) + Send + Sync>;

/// What an instance is given instead of looking for it in files.
#[derive(Default)]
pub struct Given {
    /// Signs leaves; otherwise the one that is kept on disk does.
    pub authority: Option<Arc<Authority>>,
    /// Sees every attempt.
    pub witness: Option<Witness>,
}

/// Everything that runs.
pub struct App {
    filter: Arc<Filter>,
    dns: Server,
    listeners: Vec<Open>,
    gate: Option<Arc<Gate>>,
    admin: Admin,
    state: Arc<State>,
    log: Log,
    stop: watch::Receiver<bool>,
}

impl App {
    /// Reads the files, opens the log, then the listeners: nothing is served before all of it stands.
    pub fn build(config: &Path, stop: watch::Receiver<bool>) -> anyhow::Result<Self> {
        Self::from(Origin::Operated(config.to_owned()), Given::default(), stop)
    }

    /// The same from wherever the files come, with what is not to be found in files.
    pub fn from(origin: Origin, given: Given, stop: watch::Receiver<bool>) -> anyhow::Result<Self> {
        let config = origin.path();
        let mut sources = origin.read()?;
        let operator = operator(&sources)?;
        let places = places(config, &operator)?;
        let base = config.parent().unwrap_or(Path::new(""));
        let prometheus = metrics::install()?;
        sources.own = operator.listeners.iter().flat_map(own).collect();
        let rules = rules(&sources)?;
        let log =
            Log::open(audit::Config::new(&places.log)).context("cannot open the access log")?;
        let identities = Identities::open(&places.log)?;
        let rules = identities.apply(rules)?;
        let ledger = Arc::new(Ledger::open(&places.log, &rules)?);
        let grants = Arc::new(Grants::open(&places.log, operator.grants.clone())?);
        let timed = Timed { grants: grants.in_force(&rules), ended: ledger.ended(&rules) };
        let timely = rules.timed(&timed, rules.generation());
        let timely = timely.map_err(|_| anyhow::anyhow!("the grants cannot be made rules"))?;
        let rules = Arc::new(ArcSwap::from_pointee(timely));
        let pending = Arc::new(Pending::default());
        look_on(&log, &rules, &ledger, &pending, given.witness);
        let settings = resolvers(config, &operator)?;
        let budgets = Some(places.log.join(BUDGETS));
        let filter = Filter::new(rules.clone(), log.clone(), Config { settings, budgets })?;
        let dns = dns_server(&filter, &operator)?;
        let listeners = listeners(&operator, base)?;
        let shared = shared(&rules, &log, &filter, &operator, base, (&ledger, &grants));
        let gate = match listeners.is_empty() {
            true => None,
            false => {
                let authority = given.authority.map_or_else(|| authority(&places), Ok)?;
                Some(Arc::new(gate(&shared, &operator, authority, base, stop.clone())?))
            }
        };
        let admin = Admin::open(&places.socket)?;
        let last = std::sync::Mutex::new(Last::of(&sources));
        let reloader = Reloader {
            origin: origin.clone(),
            own: sources.own.clone(),
            rules: rules.clone(),
            identities,
            live: shared.live.clone(),
            log: log.clone(),
            ledger: ledger.clone(),
            grants,
            on_invalid: operator.on_invalid,
            loading: std::sync::Mutex::default(),
            eyes: Arc::new(std::sync::Mutex::new(Eyes::open()?)),
            last,
            turn: std::sync::Mutex::new(timed),
        };
        let state = Arc::new(State {
            filter: filter.clone(),
            log: log.clone(),
            live: shared.live.clone(),
            rules: rules.clone(),
            pending,
            reloader: Arc::new(reloader),
            ready: AtomicBool::new(false),
            gate: gate.clone(),
            listeners: described(&dns, &listeners),
            started: Instant::now(),
            prometheus,
        });
        Ok(App { filter, dns, listeners, gate, admin, state, log, stop })
    }

    /// Serves until told to stop, then finishes what is in flight and closes the log.
    pub async fn run(self) -> anyhow::Result<()> {
        let App { filter, dns, listeners, gate, admin, state, log, stop } = self;
        let watch = Watch::new(state.reloader.eyes.clone())?;
        tell(&log, &state, LifecycleEvent::Started).await?;
        filter.prepare().await;
        let tasks = TaskTracker::new();
        // Before anybody is served: a sandbox that takes every place must not make this fail.
        if let Some(gate) = &gate {
            tokio::spawn(gate.guard.clone().tend(stop.clone()));
            let rules = state.rules.load_full();
            self_test::see_a_denial(gate, &rules).await.map_err(|error| {
                anyhow::anyhow!("the self-test failed, so nothing is guarded: {error}")
            })?;
        }
        for listener in listeners {
            let Some(gate) = gate.clone() else { continue };
            tokio::spawn(listener.serve(gate, tasks.clone(), stop.clone()));
        }
        state.ready.store(true, Ordering::Release);
        // They go on while connections drain: permission ends when it ends, then too.
        let mut watching = tokio::spawn(watch.run(state.reloader.clone()));
        let mut timing = tokio::spawn(state.reloader.clone().tend());
        let commands = tokio::spawn(admin.serve(state.clone()));
        let served = tokio::select! {
            served = serve(dns, stop) => served,
            () = filter.tend() => Ok(()),
            ended = &mut watching => Err(io::Error::other(format!("nobody watches the policies: {ended:?}"))),
            ended = &mut timing => Err(io::Error::other(format!("nobody looks at the clocks: {ended:?}"))),
        };
        state.ready.store(false, Ordering::Release);
        drain(&tasks, gate.as_deref()).await;
        watching.abort();
        timing.abort();
        commands.abort();
        state.reloader.ledger.settle();
        filter.stop();
        let told = tell(&log, &state, LifecycleEvent::Stopped).await;
        log.close();
        served.context("a listener broke")?;
        told
    }

    /// What is told of it while it runs.
    pub fn state(&self) -> Arc<State> {
        self.state.clone()
    }

    /// Where it listens, for people.
    pub fn listeners(&self) -> &[String] {
        &self.state.listeners
    }
}

/// What is to be known of every attempt: what was refused, and whose life has begun.
fn look_on(
    log: &Log,
    rules: &Arc<ArcSwap<RuleSet>>,
    ledger: &Arc<Ledger>,
    pending: &Arc<Pending>,
    witness: Option<Witness>,
) {
    let (rules, ledger, pending) = (rules.clone(), ledger.clone(), pending.clone());
    log.watch(move |seen| {
        pending.note(seen);
        if let Some(witness) = &witness {
            witness(seen);
        }
        let subject = seen.subject.filter(|_| rules.load().has_lifetimes());
        let id = subject.and_then(|subject| SandboxId::parse(&subject.sandbox.0.shown()).ok());
        if let Some(id) = id {
            ledger.begin(&id);
        }
    });
}

/// Serves DNS, if there is any to serve, until it is time to stop.
async fn serve(dns: Server, mut stop: watch::Receiver<bool>) -> std::io::Result<()> {
    if dns.addresses().is_empty() {
        drop(stop.wait_for(|stop| *stop).await); // a sender that is gone stops us too
        return Ok(());
    }
    dns.run(stop).await
}

/// Gives what is open time to finish, then ends it.
async fn drain(tasks: &TaskTracker, gate: Option<&Gate>) {
    let Some(gate) = gate else { return };
    tasks.close();
    if timeout(gate.shared.limits.drain(), tasks.wait()).await.is_err() {
        let open = gate.shared.live.all();
        tracing::warn!(open = open.len(), "connections are cut: they did not finish in time");
        open.iter().for_each(|open| open.cut.now(rules::Reason::CutByOperator));
        drop(timeout(std::time::Duration::from_secs(1), tasks.wait()).await); // their records close
    }
}

async fn tell(log: &Log, state: &State, event: LifecycleEvent) -> anyhow::Result<()> {
    let policy = Some(crate::report::record::policy(&state.rules.load()));
    let event = Lifecycle { event, message: None, policy };
    log.lifecycle(&event).await.map(drop).context("cannot write to the access log")
}

fn shared(
    rules: &Arc<ArcSwap<RuleSet>>,
    log: &Log,
    filter: &Arc<Filter>,
    operator: &Operator,
    base: &Path,
    (ledger, grants): (&Arc<Ledger>, &Arc<Grants>),
) -> Arc<Shared> {
    let credentials = operator.credentials.iter();
    let credentials = credentials.map(|one| (one.name.clone(), base.join(&one.file)));
    Arc::new(Shared {
        rules: rules.clone(),
        log: log.clone(),
        resolver: Resolver::new(filter.clone()),
        limits: operator.limits,
        credentials: Credentials::new(credentials),
        ledger: ledger.clone(),
        grants: grants.clone(),
        live: Arc::default(),
        seats: Arc::default(),
        mark: operator.upstream.mark,
    })
}

fn authority(places: &Places) -> anyhow::Result<Arc<Authority>> {
    Authority::open_or_create(&places.ca, &AuthorityOptions::default(), UnixTime::now())
        .map(Arc::new)
        .context("cannot open the certificate authority")
}

fn gate(
    shared: &Arc<Shared>,
    operator: &Operator,
    authority: Arc<Authority>,
    base: &Path,
    stop: watch::Receiver<bool>,
) -> anyhow::Result<Gate> {
    let system = match operator.upstream.system_roots {
        SystemRoots::Believed => SystemStore::Included,
        SystemRoots::Ignored => SystemStore::Excluded,
    };
    let files = operator.upstream.roots.iter().map(|root| base.join(root)).collect();
    let roots = Roots::load(TrustSource { system, files, client: None })?;
    let guard = Guard::open(operator, shared, base, &roots)?;
    let engine = Engine::new(shared.clone(), guard.clone(), &roots);
    let leaves = Leaves::new(authority);
    Ok(Gate { shared: shared.clone(), engine, guard, leaves, stop })
}

/// The settings of the operator's file.
pub fn operator(sources: &Sources) -> anyhow::Result<Operator> {
    let Some(file) = &sources.operator else { bail!("there is no operator's file") };
    load::operator(file).map_err(|problems| {
        complain(&problems, Severity::Error);
        anyhow::anyhow!("{} is not good", file.path)
    })
}

/// Where an instance keeps its things, by its operator's file.
pub fn places(config: &Path, operator: &Operator) -> anyhow::Result<Places> {
    let base = config.parent().unwrap_or(Path::new(""));
    let Some(dir) = &operator.log_dir else {
        bail!("{}: say where the access log is: `[log]` with `dir`", config.display());
    };
    let log = base.join(dir);
    let socket = operator.admin_socket.as_ref().map_or(log.join(SOCKET), |path| base.join(path));
    let ca = base.join(operator.ca_dir.as_deref().unwrap_or(AUTHORITY));
    Ok(Places { log, socket, ca })
}

fn rules(sources: &Sources) -> anyhow::Result<RuleSet> {
    compile(sources, &[]).map_err(|problems| {
        complain(&problems, Severity::Error);
        anyhow::anyhow!("the policies are not good: nothing is served")
    })
}

fn resolvers(config: &Path, operator: &Operator) -> anyhow::Result<DnsSettings> {
    match &operator.dns {
        Some(settings) => Ok(settings.clone()),
        None => {
            bail!("{}: names are resolved here: say `[dns]` with `upstreams`", config.display())
        }
    }
}

/// The addresses of a listener: no name may lead there.
fn own(listener: &rules::operator::Listener) -> Vec<SocketAddr> {
    listener.bind.iter().filter_map(Bind::address).collect()
}

fn listeners(operator: &Operator, base: &Path) -> anyhow::Result<Vec<Open>> {
    let mut open = Vec::new();
    for listener in operator.listeners.iter().filter(|listener| listener.mode != Mode::Dns) {
        open.extend(listen::open(listener, base)?);
    }
    if operator.listeners.is_empty() {
        bail!("no listener: add a `[[listener]]`");
    }
    Ok(open)
}

fn dns_server(filter: &Arc<Filter>, operator: &Operator) -> anyhow::Result<Server> {
    let (mut listeners, mut given) = (Vec::new(), Vec::new());
    for listener in operator.listeners.iter().filter(|listener| listener.mode == Mode::Dns) {
        let Some(whose) = Identify::of(&listener.whose) else {
            bail!("a dns listener cannot identify its sandboxes by unix socket");
        };
        for bind in &listener.bind {
            match bind {
                Bind::Inherited(name) => given.push((listen::passed(name)?, whose.clone())),
                Bind::Tcp(bind) => listeners.push(Listener { bind: *bind, whose: whose.clone() }),
                Bind::Unix(_) => bail!("a dns listener binds `address:port` or `inherited:NAME`"),
            }
        }
    }
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let mut server = Server::open(filter.clone(), &listeners, workers)?;
    for (socket, whose) in given {
        server.adopt(socket, whose)?;
    }
    Ok(server)
}

fn described(dns: &Server, listeners: &[Open]) -> Vec<String> {
    let dns = dns.addresses().into_iter().map(|address| format!("dns {address}"));
    dns.chain(listeners.iter().map(Open::describe)).collect()
}
