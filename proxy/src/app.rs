//! Builds everything from the operator's file and hands it over; the only file that knows all crates.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use arc_swap::ArcSwap;
use audit::{Lifecycle, LifecycleEvent, Log};
use dns_filter::server::{Identify, Listener, Server};
use dns_filter::{Config, Filter};
use rules::load;
use rules::operator::{Mode, Operator};
use rules::{RuleSet, Sources, compile};
use tokio::sync::watch;

use crate::admin::Admin;
use crate::policies;
use crate::problems::{Severity, complain};

/// What budgets are kept in, beside the log.
const BUDGETS: &str = "dns-budget.json";
/// Where commands reach the running program, beside the log.
const SOCKET: &str = "admin.sock";

/// Where an instance keeps its things.
pub(crate) struct Places {
    pub(crate) log: PathBuf,
    pub(crate) socket: PathBuf,
}

/// Everything that runs.
pub(crate) struct App {
    filter: Arc<Filter>,
    server: Server,
    admin: Admin,
    log: Log,
    policy: audit::Policy,
}

impl App {
    /// Reads the files, opens the log, then the listeners: nothing is served before all of it stands.
    pub(crate) fn build(config: &Path) -> anyhow::Result<Self> {
        let mut sources = policies::operated(config)?;
        let operator = operator(&sources)?;
        let places = places(config, &operator)?;
        sources.own = operator.listeners.iter().flat_map(|one| one.bind.clone()).collect();
        let rules = rules(&sources)?;
        let policy = audit::Policy {
            digest: rules.digest().to_string().into(),
            generation: rules.generation(),
        };
        let listeners = dns_listeners(&operator)?;
        let Some(settings) = operator.dns else {
            bail!("{}: a dns listener needs `[dns]` with `upstreams`", config.display());
        };
        let log =
            Log::open(audit::Config::new(&places.log)).context("cannot open the access log")?;
        let budgets = Some(places.log.join(BUDGETS));
        let rules = Arc::new(ArcSwap::from_pointee(rules));
        let filter = Filter::new(rules, log.clone(), Config { settings, budgets })?;
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        let server = Server::open(filter.clone(), &listeners, workers)?;
        let admin = Admin::open(&places.socket, filter.clone())?;
        Ok(App { filter, server, admin, log, policy })
    }

    /// Serves until `stop` turns true, then finishes what is in flight and closes the log.
    pub(crate) async fn run(self, stop: watch::Receiver<bool>) -> anyhow::Result<()> {
        let App { filter, server, admin, log, policy } = self;
        let started = LifecycleEvent::Started;
        let event = Lifecycle { event: started, message: None, policy: Some(policy.clone()) };
        log.lifecycle(&event).await.map(drop).context("cannot write to the access log")?;
        filter.prepare().await;
        let served = tokio::select! {
            served = server.run(stop) => served,
            () = filter.tend() => Ok(()),
            () = admin.serve() => Ok(()),
        };
        filter.stop();
        let event = Lifecycle { event: LifecycleEvent::Stopped, ..event };
        let told = log.lifecycle(&event).await;
        log.close();
        served.context("a listener broke")?;
        told.map(drop).context("cannot write to the access log")
    }

    pub(crate) fn addresses(&self) -> Vec<std::net::SocketAddr> {
        self.server.addresses()
    }
}

/// The settings of the operator's file.
pub(crate) fn operator(sources: &Sources) -> anyhow::Result<Operator> {
    let Some(file) = &sources.operator else { bail!("there is no operator's file") };
    load::operator(file).map_err(|problems| {
        complain(&problems, Severity::Error);
        anyhow::anyhow!("{} is not good", file.path)
    })
}

/// Where an instance keeps its things, by its operator's file.
pub(crate) fn places(config: &Path, operator: &Operator) -> anyhow::Result<Places> {
    let base = config.parent().unwrap_or(Path::new(""));
    let Some(dir) = &operator.log_dir else {
        bail!("{}: say where the access log is: `[log]` with `dir`", config.display());
    };
    let log = base.join(dir);
    let socket = operator.admin_socket.as_ref().map_or(log.join(SOCKET), |path| base.join(path));
    Ok(Places { log, socket })
}

fn rules(sources: &Sources) -> anyhow::Result<RuleSet> {
    compile(sources, &[]).map_err(|problems| {
        complain(&problems, Severity::Error);
        anyhow::anyhow!("the policies are not good: nothing is served")
    })
}

/// The DNS listeners; any other mode is refused, so that nobody believes it is guarded.
fn dns_listeners(operator: &Operator) -> anyhow::Result<Vec<Listener>> {
    let mut listeners = Vec::new();
    for listener in &operator.listeners {
        match listener.mode {
            Mode::Dns => {}
            Mode::Explicit | Mode::Redirect | Mode::Tproxy => {
                bail!(
                    "this build serves only dns listeners: remove the others from the operator's file"
                );
            }
        }
        let Some(whose) = Identify::of(&listener.whose) else {
            bail!("a dns listener cannot identify its sandboxes by unix socket");
        };
        let each = |bind: &std::net::SocketAddr| Listener { bind: *bind, whose: whose.clone() };
        listeners.extend(listener.bind.iter().map(each));
    }
    if listeners.is_empty() {
        bail!("no listener: add a `[[listener]]` with `mode = \"dns\"`");
    }
    Ok(listeners)
}
