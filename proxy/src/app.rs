//! Builds an instance from its configuration and runs it; the only file that uses all crates.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, bail};
use arc_swap::ArcSwap;
use audit::{AttemptEvent, Lifecycle, LifecycleEvent, Log};
use certs::trust::SystemStore;
use certs::{AuthorityOptions, CertificateAuthority, TrustSource, UnixTime};
use dns_filter::server::DnsFront;
use dns_filter::{DnsConfig, DnsFilter, Resolver};
use rules::configuration::{Configuration, DnsSettings, ListenerMode, SystemRootsSetting};
use rules::ids::SandboxId;
use rules::load;
use rules::quota::MachineLimits;
use rules::{LoadSources, RuleSet, SandboxRef, TimedState, compile};
use sd_notify::NotifyState;
use sys::worker::Worker;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::timeout;

use crate::accept::leaf_certs::LeafCerts;
use crate::accept::listener_set::{ListenerSet, PreparedListeners};
use crate::accept::{self, ConnectionHandler};
use crate::admin::pending::PendingList;
use crate::admin::server::AdminServer;
use crate::admin::status::AdminState;
use crate::budget::gates::Gates;
use crate::budget::ledger::Ledger;
use crate::credential::{CredentialStore, credential_files};
use crate::egress::roots::UpstreamRoots;
use crate::egress::shared::Shared;
use crate::housekeeping;
use crate::http::HttpEngine;
use crate::inspect::{CanaryStore, Inspector, QueryInspector};
use crate::memory::MemoryGuard;
use crate::policy::grants::GrantStore;
use crate::policy::identities::IdentityStore;
pub use crate::policy::paths::{InstancePaths, instance_paths};
use crate::policy::source::PolicySource;
use crate::policy::store::{LOADER, LoadStatus, PolicyStore, STATE_FILES};
use crate::policy::watch::{FileWatcher, ReloadTrigger};
use crate::quota::Quotas;
use crate::quota::cost::HANDSHAKES;
use crate::report::diagnostics::InvalidPolicy;
use crate::report::{log_settings, metrics};
use crate::self_test;

/// File of the DNS budgets, in the log directory.
const DNS_BUDGET_FILE: &str = "dns-budget.json";

/// Called with every attempt as it is recorded. Traffic waits for it to return.
pub type RecordObserver = Box<dyn Fn(&AttemptEvent<'_>) + Send + Sync>;

/// What the caller provides instead of files.
#[derive(Default)]
pub struct AppOverrides {
    /// Signs leaf certificates, instead of the authority on disk.
    pub authority: Option<Arc<CertificateAuthority>>,
    /// Observes every attempt.
    pub witness: Option<RecordObserver>,
}

/// An instance, ready to run.
pub struct App {
    filter: Arc<DnsFilter>,
    /// Bound, and not serving yet.
    listeners: PreparedListeners,
    /// Errors of listeners that failed.
    failed: mpsc::UnboundedReceiver<io::Error>,
    gate: Option<Arc<ConnectionHandler>>,
    admin: AdminServer,
    state: Arc<AdminState>,
    log: Log,
    stop: watch::Receiver<bool>,
}

impl App {
    /// Reads the files, opens the log, then the listeners. Serves nothing until all of that has succeeded.
    pub fn build(config: &Path, stop: watch::Receiver<bool>) -> anyhow::Result<Self> {
        Self::from(PolicySource::ConfigFile(config.to_owned()), AppOverrides::default(), stop)
    }

    /// The same from any source, with the caller's overrides.
    pub fn from(
        source: PolicySource,
        overrides: AppOverrides,
        stop: watch::Receiver<bool>,
    ) -> anyhow::Result<Self> {
        let _starting = housekeeping::report_start().context("cannot start a thread")?;
        let config = source.path();
        let mut sources = source.read()?;
        let configuration = load_config(&sources)?;
        let paths = instance_paths(config, &configuration)?;
        let base = config.parent().unwrap_or(Path::new(""));
        let prometheus = metrics::install()?;
        sources.own = configuration.listen_addresses();
        let rules = compile_rules(&sources)?;
        let log = log_settings::open_log(&paths.log, &configuration)?;
        let identities = IdentityStore::open(&paths.log)?;
        let rules = identities.apply(rules)?;
        let state_files = Worker::start(STATE_FILES).context("cannot start a thread")?;
        let quotas = Quotas::new(configuration.quota, machine_limits()?, configuration.limits, &rules)
            .context("the quotas cannot hold, not starting")?;
        let ledger = Arc::new(Ledger::open(&paths.log, &rules, state_files.clone(), quotas.clone())?);
        let grants = Arc::new(GrantStore::open(&paths.log, configuration.grants.clone())?);
        let timed =
            TimedState { grants: grants.active_grants(&rules), ended: ledger.expired_sandboxes(&rules) };
        let rules = rules.with_timed_state(&timed, rules.generation());
        let rules = rules.map_err(|_| anyhow::anyhow!("the grants do not compile to rules"))?;
        log.set_sandboxes(rules.sandboxes().iter().map(|sandbox| sandbox.id.clone()));
        let rules = Arc::new(ArcSwap::from_pointee(rules));
        let pending = Arc::new(PendingList::default());
        subscribe(&log, &rules, &ledger, &pending, overrides.witness);
        let settings = dns_settings(config, &configuration)?;
        let budgets = Some(paths.log.join(DNS_BUDGET_FILE));
        let filter = DnsFilter::new(rules.clone(), log.clone(), DnsConfig { settings, budgets })?;
        let kept = (&ledger, &grants, &state_files);
        let canaries = CanaryStore::open(&paths.log)?;
        let shared = build_shared((&rules, &log, &filter), &configuration, base, kept, quotas, canaries)?;
        let has_proxy = configuration.listeners.iter().any(|listener| listener.mode != ListenerMode::Dns);
        let gate = match has_proxy {
            false => None,
            true => {
                let authority = overrides.authority.map_or_else(|| open_authority(&paths), Ok)?;
                Some(Arc::new(build_handler(&shared, &configuration, authority, base)?))
            }
        };
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        let front = DnsFront::new(filter.clone(), workers);
        let (set, failed) = ListenerSet::new(base.to_owned(), gate.clone(), front, configuration.clone());
        let listeners = set.prepare_start()?;
        let admin = AdminServer::open(&paths.socket)?;
        let last = std::sync::Mutex::new(LoadStatus::from_sources(&sources));
        let reloader = PolicyStore {
            source: source.clone(),
            settings: Arc::new(set.clone()),
            rules: rules.clone(),
            identities,
            live: shared.live.clone(),
            log: log.clone(),
            ledger: ledger.clone(),
            quotas: shared.quotas.clone(),
            grants,
            on_invalid: configuration.on_invalid,
            loader: Worker::start(LOADER).context("cannot start a thread")?,
            state_files,
            loading: std::sync::Mutex::default(),
            watcher: Arc::new(std::sync::Mutex::new(FileWatcher::open()?)),
            last,
            timed: std::sync::Mutex::new(timed),
        };
        let state = Arc::new(AdminState {
            filter: filter.clone(),
            log: log.clone(),
            live: shared.live.clone(),
            rules: rules.clone(),
            pending,
            reloader: Arc::new(reloader),
            canaries: shared.inspector.canaries().clone(),
            ready: AtomicBool::new(false),
            gate: gate.clone(),
            listeners: set,
            started: Instant::now(),
            prometheus,
        });
        Ok(App { filter, listeners, failed, gate, admin, state, log, stop })
    }

    /// Serves until `stop` becomes true, then drains connections and closes the log.
    pub async fn run(self) -> anyhow::Result<()> {
        let App { filter, listeners, mut failed, gate, admin, state, log, mut stop } = self;
        let watch = ReloadTrigger::new(state.reloader.watcher.clone())?;
        record_event(&log, &state, LifecycleEvent::Started).await?;
        filter.pre_resolve_once().await;
        // Before the listeners accept: a sandbox that takes every connection slot must not make the test fail.
        if let Some(gate) = &gate {
            tokio::spawn(gate.guard.clone().run_periodic(stop.clone()));
            let rules = state.rules.load_full();
            self_test::expect_denial(gate, &rules)
                .await
                .map_err(|error| anyhow::anyhow!("the self-test failed, not starting: {error}"))?;
        }
        listeners.apply();
        state.ready.store(true, Ordering::Release);
        notify_systemd(NotifyState::Ready);
        // These run until connections have drained, so that revocation works then, too.
        let mut watching = tokio::spawn(watch.run(state.reloader.clone()));
        let mut timing = tokio::spawn(state.reloader.clone().run_periodic());
        let commands = tokio::spawn(admin.serve(state.clone()));
        let keeping = tokio::spawn(housekeeping::run_periodic(state.clone()));
        let served = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => Ok(()), // a dropped sender stops us, too
            Some(error) = failed.recv() => Err(error),
            () = filter.run_periodic() => Ok(()),
            ended = &mut watching => Err(io::Error::other(format!("the file watcher stopped: {ended:?}"))),
            ended = &mut timing => Err(io::Error::other(format!("the expiry task stopped: {ended:?}"))),
        };
        state.ready.store(false, Ordering::Release);
        notify_systemd(NotifyState::Stopping);
        drain(&state.listeners, gate.as_deref()).await;
        watching.abort();
        timing.abort();
        commands.abort();
        keeping.abort();
        state.reloader.ledger.flush().await;
        filter.stop();
        let recorded = record_event(&log, &state, LifecycleEvent::Stopped).await;
        log.close();
        served.context("a listener failed")?;
        recorded
    }

    /// Returns the state behind the admin API.
    pub fn state(&self) -> Arc<AdminState> {
        self.state.clone()
    }

    /// Describes the listeners for people.
    pub fn listeners(&self) -> Vec<String> {
        self.listeners.describe()
    }
}

/// Subscribes to the log: feeds the pending list and starts sandbox lifetimes at the first attempt.
fn subscribe(
    log: &Log,
    rules: &Arc<ArcSwap<RuleSet>>,
    ledger: &Arc<Ledger>,
    pending: &Arc<PendingList>,
    witness: Option<RecordObserver>,
) {
    let (rules, ledger, pending) = (rules.clone(), ledger.clone(), pending.clone());
    log.subscribe(move |seen| {
        pending.observe(seen, &rules.load());
        if let Some(witness) = &witness {
            witness(seen);
        }
        let subject = seen.subject.filter(|_| rules.load().has_lifetimes());
        let id = subject.and_then(|subject| SandboxId::parse(&subject.sandbox.0.to_display()).ok());
        if let Some(id) = id {
            ledger.start_lifetime(&id);
        }
    });
}

/// Notifies the service manager, if there is one (`Type=notify`, sd_notify(3)).
fn notify_systemd(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

/// Stops accepting, waits for open connections to finish, then cuts them.
async fn drain(listeners: &ListenerSet, gate: Option<&ConnectionHandler>) {
    listeners.stop().await;
    let Some(gate) = gate else { return };
    let tasks = listeners.connections();
    tasks.close();
    if timeout(gate.shared.limits.drain(), tasks.wait()).await.is_err() {
        let open = gate.shared.live.list();
        tracing::warn!(open = open.len(), "cutting connections that did not finish in time");
        open.iter().for_each(|open| open.cut.trigger(rules::Reason::CutByOperator));
        drop(timeout(std::time::Duration::from_secs(1), tasks.wait()).await); // for their records to close
    }
}

async fn record_event(log: &Log, state: &AdminState, event: LifecycleEvent) -> anyhow::Result<()> {
    let policy = Some(crate::report::record::policy(&state.rules.load()));
    let event = Lifecycle { event, message: None, policy };
    log.record_lifecycle(&event).await.map(drop).context("cannot write to the access log")
}

fn build_shared(
    (rules, log, filter): (&Arc<ArcSwap<RuleSet>>, &Log, &Arc<DnsFilter>),
    configuration: &Configuration,
    base: &Path,
    (ledger, grants, state_files): (&Arc<Ledger>, &Arc<GrantStore>, &Worker),
    quotas: Arc<Quotas>,
    canaries: CanaryStore,
) -> anyhow::Result<Arc<Shared>> {
    let credentials = credential_files(&configuration.credentials, base)?;
    let credentials = Arc::new(CredentialStore::open(credentials).context("cannot start a thread")?);
    let patterns = configuration.secret_patterns.clone();
    let inspector = Arc::new(Inspector::new(patterns, Arc::new(canaries), credentials.clone())?);
    let states = ledger.clone();
    let find = move |sandbox: &SandboxRef| Some(states.sandbox(&sandbox.id)?.signals.clone());
    filter.set_name_inspector(Arc::new(QueryInspector::new(&inspector, Box::new(find))));
    Ok(Arc::new(Shared {
        rules: rules.clone(),
        log: log.clone(),
        resolver: Resolver::new(filter.clone()),
        limits: configuration.limits,
        credentials,
        inspector,
        ledger: ledger.clone(),
        grants: grants.clone(),
        state_files: state_files.clone(),
        live: Arc::default(),
        quotas,
        dial_gates: Gates::new(1),
        handshakes: Gates::new(HANDSHAKES),
        large_checks: Gates::new(1),
        mark: configuration.upstream.mark,
    }))
}

/// Measures the machine, and raises the limit on descriptors as far as it goes.
fn machine_limits() -> anyhow::Result<MachineLimits> {
    Ok(MachineLimits {
        memory: sys::machine::memory_limit(),
        descriptors: sys::machine::raise_descriptor_limit().context("cannot read the descriptor limit")?,
        ports: sys::machine::local_ports(),
        tcp_memory: sys::machine::tcp_memory(),
    })
}

fn open_authority(paths: &InstancePaths) -> anyhow::Result<Arc<CertificateAuthority>> {
    CertificateAuthority::open_or_create(&paths.ca, &AuthorityOptions::default(), UnixTime::now())
        .map(Arc::new)
        .context("cannot open the certificate authority")
}

fn build_handler(
    shared: &Arc<Shared>,
    configuration: &Configuration,
    authority: Arc<CertificateAuthority>,
    base: &Path,
) -> anyhow::Result<ConnectionHandler> {
    let system = match configuration.upstream.system_roots {
        SystemRootsSetting::Trusted => SystemStore::Included,
        SystemRootsSetting::Ignored => SystemStore::Excluded,
    };
    let files = configuration.upstream.roots.iter().map(|root| base.join(root)).collect();
    let roots = UpstreamRoots::load(TrustSource { system, files, client: None })?;
    let guard = MemoryGuard::open(configuration, shared, base, &roots)?;
    let engine = HttpEngine::new(shared.clone(), guard.clone(), &roots);
    let leaves = LeafCerts::new(authority, shared.ledger.clone());
    let refused = Semaphore::new(accept::MAX_REFUSED);
    Ok(ConnectionHandler { shared: shared.clone(), engine, guard, leaf_certs: leaves, refused })
}

/// Parses the configuration.
///
/// # Errors
///
/// Returns [`InvalidPolicy`] with every problem in it.
pub fn load_config(sources: &LoadSources) -> anyhow::Result<Configuration> {
    let Some(file) = &sources.operator else { bail!("no configuration was given") };
    load::read_configuration(file)
        .map_err(|problems| InvalidPolicy { problems })
        .with_context(|| format!("invalid configuration {}", file.path))
}

fn compile_rules(sources: &LoadSources) -> anyhow::Result<RuleSet> {
    compile(sources, &[])
        .map_err(|problems| InvalidPolicy { problems })
        .context("invalid policy, not starting")
}

fn dns_settings(config: &Path, configuration: &Configuration) -> anyhow::Result<DnsSettings> {
    match &configuration.dns {
        Some(settings) => Ok(settings.clone()),
        None => {
            bail!("{}: `[dns] upstreams` is required: Sandbar resolves names itself", config.display())
        }
    }
}
