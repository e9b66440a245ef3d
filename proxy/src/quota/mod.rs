//! Quotas: what each sandbox uses of the gateway's resources, reserved before it is used (P16, P17, P20).
//!
//! Everything a sandbox can make the gateway hold is taken from here first, and given back when its [`Reservation`]
//! drops. [`rules::share`] decides whether there is room: a sandbox always gets its share, whatever the others do.
//!
//! Memory is reserved by what an object can hold at worst, not by what it holds now: [`cost`] adds up the
//! windows, queues and buffers that the code configures.

pub(crate) mod cost;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use rules::ids::SandboxId;
use rules::limits::TrafficLimits;
use rules::quota::{MachineLimits, QuotaError, QuotaSettings, Resource};
use rules::share::{ShareExhausted, ShareTerms, SharedTotal};
use rules::{Reason, RuleSet};
use serde_json::{Value, json};

use self::cost::{
    CONNECTION_BYTES, DOWNLOAD_BYTES, DOWNLOAD_SHARE, HEAD_COPIES, INSPECTION_SHARE, MIN_WINDOW,
    PIPE_DESCRIPTORS, REQUEST_BYTES, STALLED_SHARE, UPLOAD_BYTES, WINDOW_PART, WINDOWS_PER_SHARE,
};
use crate::report::exhausted::Exhausted;
use crate::report::metrics;
use crate::report::refusal::Refusal;

/// How long a closed connection keeps its source port (TIME_WAIT).
const PORT_LINGER: Duration = Duration::from_secs(60);
/// The same where the kernel reuses such ports.
const PORT_LINGER_REUSED: Duration = Duration::from_secs(1);

/// The quotas of all sandboxes.
#[derive(Debug)]
pub(crate) struct Quotas {
    settings: QuotaSettings,
    machine: MachineLimits,
    limits: TrafficLimits,
    totals: Vec<Mutex<SharedTotal>>,
    /// How many sandboxes divide the totals.
    sandboxes: AtomicU64,
    ports: Mutex<PortTable>,
    /// How long a closed connection keeps its port: towards loopback, and elsewhere.
    linger: [Duration; 2],
    /// Dialled connections in use, by sandbox, for the `connections` budget.
    dialled: Mutex<HashMap<SandboxId, u64>>,
}

/// Source ports in use, by destination.
#[derive(Debug)]
struct PortTable {
    terms: (ShareTerms, u64),
    by_destination: HashMap<SocketAddr, SharedTotal>,
    /// Ports of closed connections, in the order in which they become free: towards loopback, and elsewhere.
    waiting: [VecDeque<(Instant, SocketAddr, SandboxId)>; 2],
}

/// A part of a sandbox's quota, given back on drop.
#[derive(Debug)]
#[must_use = "dropping a reservation gives it back"]
pub(crate) struct Reservation {
    quotas: Arc<Quotas>,
    resource: Resource,
    sandbox: SandboxId,
    amount: u64,
}

/// A source port towards one destination, given back some time after the drop: the kernel keeps it in TIME_WAIT.
#[derive(Debug)]
pub(crate) struct PortReservation {
    quotas: Arc<Quotas>,
    sandbox: SandboxId,
    destination: SocketAddr,
    /// Whether a connection was made: without one, nothing stays in TIME_WAIT.
    connected: bool,
}

/// What an accepted connection holds.
#[derive(Debug)]
#[must_use = "dropping a slot releases it"]
pub(crate) struct ConnectionSlot {
    _connection: Reservation,
    _descriptor: Reservation,
    _buffers: Reservation,
}

/// What an open request holds. Grows with its bodies, up to what they can hold at worst.
#[derive(Debug)]
pub(crate) struct RequestQuota {
    _request: Reservation,
    pub(crate) buffers: Reservation,
}

/// A dialled connection that is in use: as the `connections` budget counts it, and with what its HTTP/2 window can hold.
/// An idle connection receives nothing, so it reserves no window.
#[derive(Debug)]
#[must_use = "dropping it ends the use"]
pub(crate) struct DialledUse {
    quotas: Arc<Quotas>,
    sandbox: SandboxId,
    window: Mutex<Reservation>,
}

impl Quotas {
    /// Divides what the machine has among `sandboxes`.
    ///
    /// # Errors
    ///
    /// Returns [`QuotaError`] if the settings cannot hold on this machine.
    pub(crate) fn new(
        settings: QuotaSettings,
        machine: MachineLimits,
        limits: TrafficLimits,
        rules: &RuleSet,
    ) -> Result<Arc<Self>, QuotaError> {
        let sandboxes = count_sandboxes(rules);
        let terms = |resource: &Resource| settings.terms(*resource, &machine, &limits, sandboxes);
        let totals = Resource::ALL.iter().map(terms).collect::<Result<Vec<_>, _>>()?;
        let totals = totals.into_iter().map(|terms| Mutex::new(SharedTotal::new(terms, sandboxes)));
        let port_terms = (terms(&Resource::Ports)?, sandboxes);
        for resource in Resource::ALL {
            warn_small_share(*resource, &terms(resource)?, sandboxes);
        }
        let ports =
            PortTable { terms: port_terms, by_destination: HashMap::new(), waiting: Default::default() };
        Ok(Arc::new(Quotas {
            settings,
            machine,
            limits,
            totals: totals.collect(),
            sandboxes: AtomicU64::new(sandboxes),
            ports: Mutex::new(ports),
            linger: [true, false].map(|loopback| match sys::machine::reuses_waiting_ports(loopback) {
                true => PORT_LINGER_REUSED,
                false => PORT_LINGER,
            }),
            dialled: Mutex::default(),
        }))
    }

    /// Checks that the quotas can hold for the sandboxes of `rules`.
    pub(crate) fn check(&self, rules: &RuleSet) -> Result<(), QuotaError> {
        let sandboxes = count_sandboxes(rules);
        Resource::ALL.iter().try_for_each(|resource| self.terms(*resource, sandboxes).map(drop))
    }

    /// Divides the totals again, among the sandboxes of `rules`.
    pub(crate) fn adopt(&self, rules: &RuleSet) {
        let sandboxes = count_sandboxes(rules);
        let changed = self.sandboxes.swap(sandboxes, Ordering::Relaxed) != sandboxes;
        for (total, resource) in self.totals.iter().zip(Resource::ALL) {
            let Ok(terms) = self.terms(*resource, sandboxes) else { continue }; // `check` came first
            sys::lock(total).set_terms(terms, sandboxes);
            if changed {
                warn_small_share(*resource, &terms, sandboxes);
            }
            if *resource == Resource::Ports {
                let mut ports = sys::lock(&self.ports);
                ports.terms = (terms, sandboxes);
                ports.by_destination.values_mut().for_each(|used| used.set_terms(terms, sandboxes));
            }
        }
    }

    fn terms(&self, resource: Resource, sandboxes: u64) -> Result<ShareTerms, QuotaError> {
        self.settings.terms(resource, &self.machine, &self.limits, sandboxes)
    }

    /// Reserves a part of a sandbox's quota.
    ///
    /// # Errors
    ///
    /// Returns a refusal that says whose quota it is, how much is used, and what to change.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        resource: Resource,
        sandbox: &SandboxId,
        amount: u64,
    ) -> Result<Reservation, Refusal> {
        self.take(resource, sandbox, amount)?;
        Ok(Reservation { quotas: self.clone(), resource, sandbox: sandbox.clone(), amount })
    }

    fn take(&self, resource: Resource, sandbox: &SandboxId, amount: u64) -> Result<(), Refusal> {
        let Some(total) = self.totals.get(resource as usize) else { return Err(Reason::Internal.into()) };
        let taken = sys::lock(total).take(sandbox, amount);
        taken.map_err(|exhausted| refusal(resource, sandbox, &exhausted))
    }

    fn give_back(&self, resource: Resource, sandbox: &SandboxId, amount: u64) {
        if let Some(total) = self.totals.get(resource as usize) {
            sys::lock(total).give_back(sandbox, amount);
        }
    }

    /// Reserves what an accepted connection needs. `budget` is the sandbox's `connections` budget.
    pub(crate) fn reserve_connection(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        budget: Option<u64>,
    ) -> Result<ConnectionSlot, Refusal> {
        let connection = self.reserve(Resource::Connections, sandbox, 1)?;
        // Reserved first: two that arrive together must not both find the last place free.
        if let Some(limit) = budget.filter(|limit| self.used(Resource::Connections, sandbox) > *limit) {
            return Err(Exhausted::connections(limit).into());
        }
        Ok(ConnectionSlot {
            _connection: connection,
            _descriptor: self.reserve(Resource::Descriptors, sandbox, 1)?,
            _buffers: self.reserve(Resource::Buffers, sandbox, CONNECTION_BYTES)?,
        })
    }

    /// Reserves what a request with a head of `head` bytes needs.
    pub(crate) fn reserve_request(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        head: u64,
    ) -> Result<RequestQuota, Refusal> {
        let request = self.reserve(Resource::Requests, sandbox, 1)?;
        let bytes = REQUEST_BYTES + HEAD_COPIES * head;
        Ok(RequestQuota { _request: request, buffers: self.reserve(Resource::Buffers, sandbox, bytes)? })
    }

    /// Reserves what an open tunnel needs besides its connections: its place among the open attempts, and two pipes.
    pub(crate) fn reserve_tunnel(self: &Arc<Self>, sandbox: &SandboxId) -> Result<[Reservation; 2], Refusal> {
        let request = self.reserve(Resource::Requests, sandbox, 1)?;
        Ok([request, self.reserve(Resource::Descriptors, sandbox, PIPE_DESCRIPTORS)?])
    }

    /// Counts a dialled connection as in use. `budget` is the sandbox's `connections` budget.
    pub(crate) fn use_dialled(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        budget: Option<u64>,
        window: u64,
    ) -> Result<DialledUse, Refusal> {
        let window = Mutex::new(self.reserve(Resource::Buffers, sandbox, window)?);
        let mut dialled = sys::lock(&self.dialled);
        let used = dialled.get(sandbox).copied().unwrap_or_default();
        if let Some(limit) = budget.filter(|limit| used >= *limit) {
            return Err(Exhausted::connections(limit).into());
        }
        dialled.insert(sandbox.clone(), used + 1);
        Ok(DialledUse { quotas: self.clone(), sandbox: sandbox.clone(), window })
    }

    /// Reserves a source port towards `destination`.
    pub(crate) fn reserve_port(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        destination: SocketAddr,
    ) -> Result<PortReservation, Refusal> {
        let mut ports = sys::lock(&self.ports);
        ports.release_waiting(Instant::now());
        let (terms, sandboxes) = ports.terms;
        let used = ports.by_destination.entry(destination);
        let used = used.or_insert_with(|| SharedTotal::new(terms, sandboxes));
        match used.take(sandbox, 1) {
            Ok(()) => {
                let (quotas, sandbox) = (self.clone(), sandbox.clone());
                Ok(PortReservation { quotas, sandbox, destination, connected: false })
            }
            Err(exhausted) => Err(refusal(Resource::Ports, sandbox, &exhausted)),
        }
    }

    /// Returns the bytes of a new HTTP/2 window. It follows the quota: the more memory the sandbox may still reserve, the
    /// larger it is, but never so large that a few windows use up its share.
    pub(crate) fn window(&self, sandbox: &SandboxId, most: u64) -> u64 {
        let Some(total) = self.totals.get(Resource::Buffers as usize) else { return MIN_WINDOW };
        let total = sys::lock(total);
        let part = (total.available(sandbox) / WINDOW_PART).min(total.terms().share / WINDOWS_PER_SHARE);
        part.clamp(MIN_WINDOW, most)
    }

    fn used(&self, resource: Resource, sandbox: &SandboxId) -> u64 {
        self.totals.get(resource as usize).map_or(0, |total| sys::lock(total).used_by(sandbox))
    }

    /// Returns what all sandboxes together use of a resource, and may use. Ports are counted per destination: of them it
    /// returns the destination with the most.
    pub(crate) fn usage(&self, resource: Resource) -> (u64, u64) {
        let Some(total) = self.totals.get(resource as usize) else { return (0, 0) };
        let total = sys::lock(total);
        let used = match resource {
            Resource::Ports => sys::lock(&self.ports).by_destination.values().map(SharedTotal::in_use).max(),
            Resource::Buffers
            | Resource::Connections
            | Resource::Descriptors
            | Resource::Inspection
            | Resource::Requests
            | Resource::Stalled => Some(total.in_use()),
        };
        (used.unwrap_or_default(), total.terms().total)
    }

    /// Describes the quotas of one sandbox, for `sandbar status --sandbox`. Of the ports it shows the destination with
    /// the most.
    pub(crate) fn describe(&self, sandbox: &SandboxId) -> Vec<Value> {
        let describe = |(resource, total): (&Resource, &Mutex<SharedTotal>)| {
            let total = sys::lock(total);
            let (terms, mut used) = (total.terms(), total.used_by(sandbox));
            let (mut in_use, mut towards) = (total.in_use(), None);
            if *resource == Resource::Ports {
                let ports = sys::lock(&self.ports);
                let most = ports.by_destination.iter().max_by_key(|(_, used)| used.used_by(sandbox));
                if let Some((destination, by)) = most {
                    (used, in_use, towards) =
                        (by.used_by(sandbox), by.in_use(), Some(destination.to_string()));
                }
            }
            json!({
                "resource": resource.key(),
                "what": resource.noun(),
                "used": used,
                "share": terms.share,
                "per_sandbox": terms.cap,
                "used_by_all": in_use,
                "total": terms.total,
                "towards": towards.filter(|_| used > 0),
            })
        };
        Resource::ALL.iter().zip(&self.totals).map(describe).collect()
    }
}

impl RequestQuota {
    /// Reserves memory for a request body, of the announced length if there is one.
    pub(crate) fn expect_upload(&mut self, length: Option<u64>) -> Result<(), Refusal> {
        self.buffers.grow(length.map_or(UPLOAD_BYTES, |length| length.min(UPLOAD_BYTES)))
    }

    /// Reserves memory for a response body, of the announced length if there is one.
    pub(crate) fn expect_download(&mut self, length: Option<u64>) -> Result<(), Refusal> {
        self.buffers.grow(length.map_or(DOWNLOAD_BYTES, |length| length.min(DOWNLOAD_BYTES)))
    }
}

/// A buffer whose memory is reserved before it is allocated.
#[derive(Debug)]
pub(crate) struct ReservedBuffer<'a> {
    bytes: BytesMut,
    /// What is reserved for `bytes`.
    reserved: u64,
    reservation: &'a mut Reservation,
}

impl<'a> ReservedBuffer<'a> {
    pub(crate) fn new(reservation: &'a mut Reservation) -> Self {
        ReservedBuffer { bytes: BytesMut::new(), reserved: 0, reservation }
    }

    pub(crate) fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Appends `more`. Doubles the memory when it grows, but never beyond `limit`, so that an append is cheap.
    ///
    /// # Errors
    ///
    /// Returns a refusal if the sandbox's quota does not allow it.
    pub(crate) fn extend(&mut self, more: &[u8], limit: u64) -> Result<(), Refusal> {
        let needed = self.len() + more.len() as u64;
        if needed > self.reserved {
            let wanted = needed.max(2 * self.reserved).min(limit.max(needed));
            self.reservation.grow(wanted - self.reserved)?;
            self.reserved = wanted;
            self.bytes.reserve(usize::try_from(wanted).unwrap_or(usize::MAX) - self.bytes.len());
        }
        self.bytes.extend_from_slice(more);
        Ok(())
    }

    /// The bytes. What is reserved for them stays reserved.
    pub(crate) fn freeze(self) -> Bytes {
        self.bytes.freeze()
    }
}

impl Reservation {
    /// Reserves `amount` in addition.
    pub(crate) fn grow(&mut self, amount: u64) -> Result<(), Refusal> {
        self.quotas.take(self.resource, &self.sandbox, amount)?;
        self.amount += amount;
        Ok(())
    }

    /// Returns how much of the quota is used beyond what could be reserved now, after a reload that divided it again.
    pub(crate) fn excess(&self) -> u64 {
        let total = self.quotas.totals.get(self.resource as usize);
        total.map_or(0, |total| sys::lock(total).excess(&self.sandbox))
    }

    /// Gives a part back.
    pub(crate) fn shrink_by(&mut self, amount: u64) {
        self.shrink_to(self.amount.saturating_sub(amount));
    }

    /// Gives back all but `amount`.
    pub(crate) fn shrink_to(&mut self, amount: u64) {
        if let Some(surplus) = self.amount.checked_sub(amount) {
            self.quotas.give_back(self.resource, &self.sandbox, surplus);
            self.amount = amount;
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.quotas.give_back(self.resource, &self.sandbox, self.amount);
    }
}

impl DialledUse {
    /// Gives the window back: the connection turned out to speak HTTP/1.
    pub(crate) fn release_window(&self) {
        sys::lock(&self.window).shrink_to(0);
    }
}

impl Drop for DialledUse {
    fn drop(&mut self) {
        let mut dialled = sys::lock(&self.quotas.dialled);
        if let Some(used) = dialled.get_mut(&self.sandbox) {
            *used -= 1;
            if *used == 0 {
                dialled.remove(&self.sandbox);
            }
        }
    }
}

impl PortReservation {
    /// Notes that the port is connected.
    pub(crate) fn set_connected(&mut self) {
        self.connected = true;
    }
}

impl Drop for PortReservation {
    fn drop(&mut self) {
        if !self.connected {
            let by_destination = &mut sys::lock(&self.quotas.ports).by_destination;
            return give_back_port(by_destination, &self.destination, &self.sandbox);
        }
        let place = usize::from(!self.destination.ip().is_loopback());
        let linger = self.quotas.linger.get(place).copied().unwrap_or(PORT_LINGER);
        let freed = (Instant::now() + linger, self.destination, self.sandbox.clone());
        if let Some(queue) = sys::lock(&self.quotas.ports).waiting.get_mut(place) {
            queue.push_back(freed);
        }
    }
}

impl PortTable {
    /// Gives back the ports whose time has come.
    fn release_waiting(&mut self, now: Instant) {
        let PortTable { by_destination, waiting, .. } = self;
        for queue in waiting {
            while let Some((_, destination, sandbox)) = queue.pop_front_if(|(free, ..)| *free <= now) {
                give_back_port(by_destination, &destination, &sandbox);
            }
        }
    }
}

fn give_back_port(
    by_destination: &mut HashMap<SocketAddr, SharedTotal>,
    destination: &SocketAddr,
    sandbox: &SandboxId,
) {
    let Some(used) = by_destination.get_mut(destination) else { return };
    used.give_back(sandbox, 1);
    if used.in_use() == 0 {
        by_destination.remove(destination);
    }
}

/// Warns if a share does not suffice for one download or one stalled tunnel: beyond it, a sandbox depends on what the
/// others leave.
fn warn_small_share(resource: Resource, terms: &ShareTerms, sandboxes: u64) {
    let (needed, object) = match resource {
        Resource::Buffers => (DOWNLOAD_SHARE, "download"),
        Resource::Stalled => (STALLED_SHARE, "stalled tunnel"),
        Resource::Inspection => (INSPECTION_SHARE, "host with 12 KB of recalled text"),
        Resource::Connections | Resource::Descriptors | Resource::Ports | Resource::Requests => return,
    };
    if terms.share < needed {
        let (noun, share, total) = (resource.noun(), terms.share, terms.total);
        tracing::warn!(
            "{sandboxes} sandboxes share {total} {noun}, so each is sure of {share}, and one {object} needs {needed}; \
             give Sandbar more memory, or run several instances"
        );
    }
}

fn count_sandboxes(rules: &RuleSet) -> u64 {
    rules.sandboxes().iter().count() as u64
}

/// The refusal for want of quota: whose it is, how much is used, and the key to change.
fn refusal(resource: Resource, sandbox: &SandboxId, exhausted: &ShareExhausted) -> Refusal {
    metrics::count_quota_exhausted(resource.key());
    let reason = match resource {
        Resource::Connections => Reason::TooManyConnections,
        Resource::Ports => Reason::OutOfPorts,
        Resource::Buffers
        | Resource::Descriptors
        | Resource::Inspection
        | Resource::Requests
        | Resource::Stalled => Reason::QuotaExhausted,
    };
    let (noun, key) = (resource.noun(), resource.key());
    Refusal::from(reason).with_detail(format!("{noun}: sandbox `{sandbox}` {exhausted} (`[quota] {key}`)"))
}

#[cfg(test)]
mod tests {
    use rules::quota::QuotaEntry;

    use super::*;

    const MACHINE: MachineLimits =
        MachineLimits { memory: 512 << 20, descriptors: 1024, ports: 100, tcp_memory: 1 << 30 };

    fn id(text: &str) -> SandboxId {
        SandboxId::parse(text).unwrap()
    }

    fn quotas(limits: TrafficLimits) -> Arc<Quotas> {
        Quotas::new(QuotaSettings::default(), MACHINE, limits, &sandboxes(&["a", "b"])).unwrap()
    }

    impl Quotas {
        fn available(&self, sandbox: &SandboxId) -> u64 {
            sys::lock(&self.totals[Resource::Requests as usize]).available(sandbox)
        }
    }

    impl Quotas {
        /// Divides `memory` bytes for the inspection among the sandboxes of some rules.
        pub(crate) fn for_inspection(memory: u64, rules: &RuleSet) -> Arc<Self> {
            let machine = MachineLimits { memory: memory * 8, ..MACHINE };
            Quotas::new(QuotaSettings::default(), machine, TrafficLimits::default(), rules).unwrap()
        }
    }

    #[test]
    fn p20_windows_follow_the_quota_and_leave_room_in_the_share() {
        let quotas = quotas(TrafficLimits::default());
        assert_eq!(quotas.window(&id("a"), 4 << 20), 4 << 20, "plenty");
        let much = quotas.reserve(Resource::Buffers, &id("a"), 128 << 20).unwrap();
        assert_eq!(quotas.window(&id("a"), 4 << 20), 1 << 20, "a sixteenth of the 16 MiB that are left");
        let all = quotas.reserve(Resource::Buffers, &id("a"), 16 << 20).unwrap();
        assert_eq!(quotas.window(&id("a"), 4 << 20), MIN_WINDOW);
        drop((much, all));
        let names: Vec<String> = (0..40).map(|at| format!("s{at}")).collect();
        let many = sandboxes(&names.iter().map(String::as_str).collect::<Vec<_>>());
        quotas.adopt(&many);
        assert_eq!(quotas.window(&id("s1"), 4 << 20), (192 << 20) / 2 / 40 / 8, "an eighth of a small share");
    }

    /// Rules with a sandbox for each name.
    fn sandboxes(names: &[&str]) -> RuleSet {
        let policy = |name: &&str| rules::SourceFile {
            path: format!("{name}.toml"),
            bytes: format!("name = \"{name}\"\n").into_bytes(),
        };
        let policies = names.iter().map(policy).collect();
        rules::compile(&rules::LoadSources { policies, ..rules::LoadSources::default() }, &[]).unwrap()
    }

    #[test]
    fn p17_no_more_connections_than_the_limits_and_each_is_given_back() {
        let limits = TrafficLimits { connections: 4, connections_per_sandbox: 3, ..TrafficLimits::default() };
        let quotas = quotas(limits);
        let refused = |id, budget| quotas.reserve_connection(id, budget).unwrap_err().reason;
        let (a, b) = (id("a"), id("b"));
        let one = quotas.reserve_connection(&a, Some(2)).unwrap();
        assert_eq!(refused(&a, Some(1)), Reason::BudgetSpent);
        let _two = quotas.reserve_connection(&a, None).unwrap();
        let _three = quotas.reserve_connection(&a, None).unwrap();
        assert_eq!(refused(&a, Some(9)), Reason::TooManyConnections);
        let _kept = quotas.reserve_connection(&b, None).unwrap();
        assert_eq!(refused(&b, None), Reason::TooManyConnections);
        drop(one);
        assert!(quotas.reserve_connection(&b, None).is_ok());
        assert_eq!(quotas.usage(Resource::Connections), (3, 4));
        assert_eq!(quotas.usage(Resource::Descriptors).0, 3);
    }

    #[test]
    fn p20_a_refusal_says_whose_quota_it_is() {
        let quotas = quotas(TrafficLimits::default());
        let _all = quotas.reserve(Resource::Requests, &id("a"), 37_500).unwrap();
        let refusal = quotas.reserve(Resource::Requests, &id("a"), 1).unwrap_err();
        assert_eq!(refusal.reason, Reason::QuotaExhausted);
        let detail = "open requests and tunnels: sandbox `a` uses 37500 (its share is 12500) and asked for 1, but what \
                      is common to all sandboxes is used up (`[quota] requests`)";
        assert_eq!(refusal.detail.as_deref(), Some(detail));
        assert!(quotas.reserve(Resource::Requests, &id("b"), 12_500).is_ok());
    }

    #[test]
    fn p20_ports_are_shared_per_destination_and_kept_for_a_while() {
        let mut quotas = quotas(TrafficLimits::default());
        Arc::get_mut(&mut quotas).unwrap().linger = [Duration::ZERO, PORT_LINGER];
        let (near, far) = ("127.0.0.1:443".parse().unwrap(), "192.0.2.1:443".parse().unwrap());
        let take_all = |to| {
            let connect = |mut port: PortReservation| {
                port.set_connected();
                port
            };
            let taken = std::iter::from_fn(|| quotas.reserve_port(&id("a"), to).ok().map(connect));
            taken.collect::<Vec<_>>()
        };
        assert_eq!(take_all(near).len(), 75, "its share and what is common");
        assert_eq!(take_all(near).len(), 75, "free again");
        assert_eq!(take_all(far).len(), 75, "another destination has its own ports");
        assert_eq!(take_all(far).len(), 0, "in TIME_WAIT");
        let refusal = quotas.reserve_port(&id("a"), far).unwrap_err();
        assert_eq!(refusal.reason, Reason::OutOfPorts);
        for _ in 0..100 {
            assert!(quotas.reserve_port(&id("b"), far).is_ok(), "never connected, so free at once");
        }
    }

    #[test]
    fn p17_a_buffer_is_reserved_before_it_grows() {
        let quotas = quotas(TrafficLimits::default());
        let mut reservation = quotas.reserve(Resource::Buffers, &id("a"), 0).unwrap();
        let mut buffer = ReservedBuffer::new(&mut reservation);
        for _ in 0..100 {
            buffer.extend(&[0; 1000], 150_000).unwrap();
            assert!(quotas.used(Resource::Buffers, &id("a")) >= buffer.len());
        }
        assert!(quotas.used(Resource::Buffers, &id("a")) <= 150_000);
        drop(buffer.freeze());
        drop(reservation);
        assert_eq!(quotas.usage(Resource::Buffers).0, 0);
    }

    // proves: quota.buffers.total, quota.buffers.per_sandbox, quota.buffers.share, quota.connections.total
    // proves: quota.connections.per_sandbox, quota.connections.share, quota.descriptors.total
    // proves: quota.descriptors.per_sandbox, quota.descriptors.share, quota.inspection.total
    // proves: quota.inspection.per_sandbox, quota.inspection.share, quota.ports.total, quota.ports.per_sandbox
    // proves: quota.ports.share, quota.requests.total, quota.requests.per_sandbox, quota.requests.share
    // proves: quota.stalled.total, quota.stalled.per_sandbox, quota.stalled.share
    #[test]
    fn p17_each_key_of_a_quota_bounds_its_resource() {
        for resource in Resource::ALL {
            for (keys, most) in [
                ("total = 60\nshare = 10", 50), // the neighbour's share is kept
                ("total = 80\nshare = 10", 70),
                ("total = 60\nshare = 20", 40),
                ("total = 60\nshare = 10\nper_sandbox = 30", 30),
            ] {
                let sandboxes = sandboxes(&["a", "b"]);
                let text = format!(
                    "[quota.{}]\n{keys}\n[[sandbox]]\nid = \"a\"\n[[sandbox]]\nid = \"b\"\n",
                    resource.key()
                );
                let file = rules::SourceFile { path: "sandbar.toml".into(), bytes: text.into() };
                let settings = rules::load::read_configuration(&file).unwrap().quota;
                let quotas = Quotas::new(settings, MACHINE, TrafficLimits::default(), &sandboxes).unwrap();
                let to = "192.0.2.1:443".parse().unwrap();
                let (mut held, mut ports) = (Vec::new(), Vec::new());
                let taken = (0..100).take_while(|_| match resource {
                    Resource::Ports => quotas.reserve_port(&id("a"), to).map(|port| ports.push(port)).is_ok(),
                    Resource::Buffers
                    | Resource::Connections
                    | Resource::Descriptors
                    | Resource::Inspection
                    | Resource::Requests
                    | Resource::Stalled => {
                        quotas.reserve(*resource, &id("a"), 1).map(|one| held.push(one)).is_ok()
                    }
                });
                assert_eq!(taken.count(), most, "{resource:?}: {keys}");
            }
        }
    }

    #[test]
    fn p20_a_reload_divides_the_totals_again() {
        let quotas = quotas(TrafficLimits::default());
        assert_eq!(quotas.available(&id("a")), 37_500);
        let alone = sandboxes(&["a"]);
        quotas.check(&alone).unwrap();
        quotas.adopt(&alone);
        assert_eq!(quotas.available(&id("a")), 50_000);
    }

    #[test]
    fn p17_a_total_above_the_machine_does_not_start() {
        let mut settings = QuotaSettings::default();
        settings.set(Resource::Ports, QuotaEntry { total: Some(101), ..QuotaEntry::default() });
        let error = Quotas::new(settings, MACHINE, TrafficLimits::default(), &sandboxes(&["a"])).unwrap_err();
        assert!(error.to_string().contains("`total` 101 is above the 100 that this machine has"), "{error}");
    }
}
