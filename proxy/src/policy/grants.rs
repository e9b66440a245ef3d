//! Grants: temporary exceptions. A person lets one sandbox reach one host for a while and gives the reason. A record
//! is written when a grant is made, refused, first used and ended. A grant expires on its own, also across restarts.
//!
//! Two clocks bound a grant, and the first to reach its end wins. The wall clock works across reboots but can be set
//! back, which would prolong a grant. The time since boot cannot be set back but starts again at every reboot, so it
//! only counts while the boot id is the same. After a reboot, a wall clock that shows a time before the grant was made
//! is evidently wrong, and the grant is over.
//!
//! The grants are in memory; the file keeps them across restarts. A grant is in force only once it is stored. Its end
//! counts at once and is stored afterwards, because a file system that does not answer must not prolong it. Whatever
//! writes the file ([`GrantStore::prepare`], [`GrantStore::activate`], [`GrantStore::store`]) runs on the thread for
//! state files, one at a time, and holds no lock while it writes.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};
use audit::{Lifecycle, LifecycleEvent, Log};
use rules::budget::{BudgetKind, Budgets};
use rules::configuration::GrantSettings;
use rules::facts::{ConnectFacts, ConnectTarget, EchPresence, HttpMethod, Protocol};
use rules::ids::SandboxId;
use rules::pattern::{DomainPattern, HostPattern, PatternWidth};
use rules::url_path::PathPattern;
use rules::{Decision, DomainName, Facts, Grant, Host, Permit, RuleSet};
use serde::{Deserialize, Serialize};
use sys::worker::Worker;

use crate::state_file::{Durability, read_state, write_atomic};

/// File of the grants, in the log directory.
const GRANTS_FILE: &str = "grants.json";
/// Most grants in force at once.
const MAX_GRANTS: usize = 1000;
/// Longest reason, and longest name of the person who grants, in bytes.
const MAX_TEXT: usize = 200;
/// The rule of a grant is named this and the grant's number.
const RULE_PREFIX: &str = "grant ";
/// Port of a host that is written without one.
const DEFAULT_PORT: u16 = 443;

/// A request for a grant, as sent to the admin socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GrantRequest {
    pub sandbox: String,
    pub host: String,
    #[serde(default)]
    pub methods: Option<Vec<String>>,
    #[serde(default)]
    pub paths: Option<Vec<String>>,
    /// Byte budget, both directions together.
    #[serde(default)]
    pub bytes: Option<u64>,
    pub seconds: u64,
    pub why: String,
    pub by: String,
}

/// A grant in force.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ActiveGrant {
    pub id: u64,
    pub wish: GrantRequest,
    /// Unix time in milliseconds when it was made and when it ends.
    pub made: u64,
    pub until: u64,
    /// The id of the boot it was made in, and when it ends, in milliseconds since that boot.
    boot: String,
    boot_until: u64,
    pub used: bool,
}

/// The content of the grants file.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GrantFile {
    /// The last number used. Numbers are never reused, because records refer to grants by them.
    made: u64,
    grants: Vec<ActiveGrant>,
}

/// The grants of an instance.
#[derive(Debug)]
pub struct GrantStore {
    path: PathBuf,
    settings: GrantSettings,
    book: Mutex<GrantFile>,
}

/// A reading of both clocks.
#[derive(Clone, Debug)]
struct ClockReading {
    wall: u64,
    boot: String,
    since_boot: u64,
}

impl GrantStore {
    /// Reads the grants that earlier processes made.
    pub fn open(dir: &Path, settings: GrantSettings) -> anyhow::Result<Self> {
        let path = dir.join(GRANTS_FILE);
        let shown = path.display();
        let read = read_state(&path).with_context(|| format!("cannot read {shown}"))?;
        let book = read.map(|bytes| serde_json::from_slice(&bytes)).transpose();
        let book: Option<GrantFile> =
            book.with_context(|| format!("{shown} is not valid: repair or remove it"))?;
        Ok(GrantStore { path, settings, book: Mutex::new(book.unwrap_or_default()) })
    }

    /// Returns the grants in force. Skips those whose sandbox is no longer configured or that the configuration now
    /// forbids; they take effect again if that changes before they expire.
    pub fn active_grants(&self, rules: &RuleSet) -> Vec<Grant> {
        self.active_in(&self.lock(), rules)
    }

    fn active_in(&self, book: &GrantFile, rules: &RuleSet) -> Vec<Grant> {
        let now = ClockReading::read().ok();
        let lasts = |grant: &&ActiveGrant| now.as_ref().is_some_and(|now| !grant.is_expired(now));
        let lasting = book.grants.iter().filter(lasts);
        let grants = lasting.filter_map(|grant| parse_grant(grant.id, &grant.wish).ok());
        grants.filter(|grant| self.forbidden_reason(grant, rules).is_none()).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.lock().grants.is_empty()
    }

    pub fn list(&self) -> Vec<ActiveGrant> {
        self.lock().grants.clone()
    }

    /// Checks a request and reserves its number on disk. The grant is not in force until [`GrantStore::activate`].
    ///
    /// # Errors
    ///
    /// Returns why the grant is refused.
    pub fn prepare(&self, wish: GrantRequest, rules: &RuleSet) -> anyhow::Result<ActiveGrant> {
        let book = self.lock().clone();
        let id = book.made + 1;
        let grant = parse_grant(id, &wish)?;
        self.check_allowed(&wish, &grant, rules)?;
        self.check_room(&book, grant, rules)?;
        let now = ClockReading::read()?;
        let length = wish.seconds * 1000;
        self.save(&GrantFile { made: id, ..book })?;
        self.lock().made = id;
        Ok(ActiveGrant {
            id,
            wish,
            made: now.wall,
            until: now.wall + length,
            boot: now.boot,
            boot_until: now.since_boot + length,
            used: false,
        })
    }

    /// Stores a grant that has been recorded, on disk first. The caller publishes the rules.
    pub fn activate(&self, grant: ActiveGrant, rules: &RuleSet) -> anyhow::Result<()> {
        let mut book = self.lock().clone();
        self.check_room(&book, parse_grant(grant.id, &grant.wish)?, rules)?; // others may have been made since
        book.grants.push(grant.clone());
        self.save(&book)?;
        self.lock().grants.push(grant);
        Ok(())
    }

    /// Ends a grant in memory; [`GrantStore::store`] keeps it from coming back.
    pub fn remove(&self, id: u64) -> anyhow::Result<ActiveGrant> {
        let mut book = self.lock();
        match book.grants.iter().position(|grant| grant.id == id) {
            Some(at) => Ok(book.grants.remove(at)),
            None => bail!("no grant {id} is in force: see `sandbar grants`"),
        }
    }

    /// Writes the grants in force.
    pub fn store(&self) -> anyhow::Result<()> {
        let book = self.lock().clone();
        self.save(&book)
    }

    /// Writes the grants in force, without waiting for that.
    pub fn store_later(self: &Arc<Self>, state_files: &Worker) {
        let store = self.clone();
        let posted = state_files.post(move || {
            if let Err(error) = store.store() {
                tracing::warn!("{error:#}");
            }
        });
        if posted.is_err() {
            tracing::warn!("too many state files wait to be written; the grants are not stored");
        }
    }

    /// Removes and returns expired grants. A restart finds them expired again.
    pub fn expire(&self) -> Vec<ActiveGrant> {
        let mut book = self.lock();
        if book.grants.is_empty() {
            return Vec::new();
        }
        let now = ClockReading::read().ok(); // without a clock every grant expires
        let over = |grant: &ActiveGrant| now.as_ref().is_none_or(|now| grant.is_expired(now));
        let (over, grants) = std::mem::take(&mut book.grants).into_iter().partition(over);
        book.grants = grants;
        over
    }

    /// Records the first use of a grant.
    pub fn record_use(self: &Arc<Self>, permit: &Permit, log: &Log, state_files: &Worker) {
        let id = permit.rule().rule.strip_prefix(RULE_PREFIX).and_then(|id| id.parse().ok());
        let mut book = self.lock();
        let named = |grant: &&mut ActiveGrant| Some(grant.id) == id;
        let Some(grant) = book.grants.iter_mut().find(named).filter(|grant| !grant.used) else {
            return;
        };
        grant.used = true;
        let message = format!("{} was used for the first time", summarize(grant));
        drop(book);
        self.store_later(state_files);
        record_event(log, LifecycleEvent::GrantUsed, message);
    }

    /// Checks that the rules compile with one more grant. One that does not would disable all of them.
    fn check_room(&self, book: &GrantFile, grant: Grant, rules: &RuleSet) -> anyhow::Result<()> {
        ensure!(book.grants.len() < MAX_GRANTS, "{MAX_GRANTS} grants are in force: revoke some first");
        let mut grants = self.active_in(book, rules);
        grants.push(grant);
        let all = rules::TimedState { grants, ..rules::TimedState::default() };
        match rules.with_timed_state(&all, rules.generation()) {
            Ok(_) => Ok(()),
            Err(_) => {
                bail!("too many grants for one host or sandbox are in force: revoke some first")
            }
        }
    }

    /// Checks that the configuration permits the grant and that it would have an effect.
    fn check_allowed(&self, wish: &GrantRequest, grant: &Grant, rules: &RuleSet) -> anyhow::Result<()> {
        let max = self.settings.most_seconds;
        ensure!(wish.seconds > 0, "a grant needs a duration");
        ensure!(wish.seconds <= max, "a grant lasts at most {max} s (`most_seconds` of `[grants]`)");
        if let Some(why) = self.forbidden_reason(grant, rules) {
            bail!(why);
        }
        let Some(sandbox) = rules.sandboxes().get(&grant.sandbox) else {
            bail!("unknown sandbox `{}`", grant.sandbox);
        };
        let timed = rules::TimedState { grants: vec![grant.clone()], ..rules::TimedState::default() };
        let tried = rules.with_timed_state(&timed, rules.generation());
        let tried = tried.map_err(|_| anyhow::anyhow!("the grant does not compile to a rule"))?;
        match tried.decide(sandbox, &example_facts(grant)) {
            Decision::Allow(_) => Ok(()),
            Decision::Deny(denial) => {
                let rule = denial.rule.map(|rule| format!(", by {} of {}", rule.rule, rule.policy));
                let (reason, rule) = (denial.reason, rule.unwrap_or_default());
                bail!("the grant would have no effect: {reason}{rule}. {}", reason.next_step())
            }
        }
    }

    /// Returns why the configuration forbids a grant, if it does. Applies to existing grants, too.
    fn forbidden_reason(&self, grant: &Grant, rules: &RuleSet) -> Option<String> {
        let GrantSettings { forbid_hosts, forbid_bases, .. } = &self.settings;
        if let Some(host) = forbid_hosts.iter().find(|host| overlaps(host, &grant.host)) {
            let why = format!("the configuration forbids grants for `{host}`");
            return Some(format!("{why} (`forbid_hosts` of `[grants]`)"));
        }
        let base = rules.base_of(rules.sandboxes().get(&grant.sandbox)?).unwrap_or_default();
        forbid_bases.iter().any(|name| name == base).then(|| {
            format!("the configuration forbids grants for base `{base}` (`forbid_bases` of `[grants]`)")
        })
    }

    fn save(&self, book: &GrantFile) -> anyhow::Result<()> {
        write_atomic(&self.path, book, Durability::Disk)
            .with_context(|| format!("cannot write {}", self.path.display()))
    }

    fn lock(&self) -> MutexGuard<'_, GrantFile> {
        sys::lock(&self.book)
    }
}

impl ActiveGrant {
    /// Whether either clock has reached the end, or the wall clock is evidently wrong (see the module's comment).
    fn is_expired(&self, now: &ClockReading) -> bool {
        let same_boot = self.boot == now.boot;
        now.wall >= self.until
            || (same_boot && now.since_boot >= self.boot_until)
            || (!same_boot && now.wall < self.made)
    }

    /// Returns the remaining time by the wall clock.
    pub fn remaining(&self) -> Duration {
        Duration::from_millis(self.until.saturating_sub(wall_clock_ms()))
    }

    pub fn sandbox(&self) -> Option<SandboxId> {
        SandboxId::parse(&self.wish.sandbox).ok()
    }
}

impl ClockReading {
    fn read() -> anyhow::Result<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        let uptime = std::fs::read_to_string("/proc/uptime")?;
        let seconds: f64 = uptime.split(' ').next().unwrap_or_default().parse()?;
        Ok(ClockReading { wall: wall_clock_ms(), boot, since_boot: (seconds * 1000.0) as u64 })
    }
}

/// Returns the name of a grant's rule.
pub fn rule_name(id: u64) -> String {
    format!("{RULE_PREFIX}{id}")
}

/// Describes a grant in one line, for records and people.
pub fn summarize(grant: &ActiveGrant) -> String {
    let GrantRequest { sandbox, host, methods, paths, bytes, seconds, why, by } = &grant.wish;
    let list = |all: &Option<Vec<String>>| all.as_ref().map(|all| format!(" {}", all.join(",")));
    let bytes = bytes.map(|bytes| format!(", at most {bytes} bytes")).unwrap_or_default();
    format!(
        "grant {}: {sandbox} may reach {host}{}{} for {seconds} s{bytes}; by {by}: {why}",
        grant.id,
        list(methods).unwrap_or_default(),
        list(paths).unwrap_or_default(),
    )
}

/// Writes a record about a grant.
pub fn record_event(log: &Log, event: LifecycleEvent, message: String) {
    let event = Lifecycle { event, message: Some(message.into()), policy: None };
    let log = log.clone();
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    runtime.spawn(async move {
        if let Err(down) = log.record_lifecycle(&event).await {
            tracing::warn!(%down, "cannot write the record of a grant");
        }
    });
}

fn parse_grant(id: u64, wish: &GrantRequest) -> anyhow::Result<Grant> {
    let host = HostPattern::parse(&wish.host, PatternWidth::Narrow).context("invalid host")?;
    let methods = wish.methods.as_ref().map(|all| {
        all.iter().map(|text| HttpMethod::parse(text).with_context(|| format!("method `{text}`"))).collect()
    });
    let paths = wish.paths.as_ref().map(|all| {
        all.iter().map(|text| PathPattern::parse(text).with_context(|| format!("path `{text}`"))).collect()
    });
    ensure!(!wish.why.trim().is_empty(), "a grant needs a reason, which is recorded");
    let odd = |text: &str| text.chars().any(char::is_control);
    ensure!(!odd(&wish.why) && !odd(&wish.by), "reason and name must be one line without control characters");
    ensure!(
        wish.why.len() <= MAX_TEXT && wish.by.len() <= MAX_TEXT,
        "reason and name may have {MAX_TEXT} bytes each"
    );
    Ok(Grant {
        id: id.to_string(),
        sandbox: SandboxId::parse(&wish.sandbox).context("invalid sandbox")?,
        host,
        methods: methods.transpose()?,
        paths: paths.transpose()?,
        budgets: Budgets::default().with(BudgetKind::Bytes, wish.bytes),
    })
}

/// Whether a forbidden host pattern and the host of a grant have names in common.
fn overlaps(forbidden: &HostPattern, host: &HostPattern) -> bool {
    let port = |pattern: &HostPattern| pattern.port.unwrap_or(DEFAULT_PORT);
    let same_port = forbidden.port.is_none() || port(forbidden) == port(host);
    same_port && (forbidden.pattern.covers(&host.pattern) || host.pattern.covers(&forbidden.pattern))
}

/// Returns the facts of an attempt that the grant is meant to allow.
fn example_facts(grant: &Grant) -> Facts {
    let base = match &grant.host.pattern {
        DomainPattern::Below(base) => DomainName::parse(&format!("sandbar-example.{base}")).ok(),
        DomainPattern::Exact(base) | DomainPattern::Tree(base) => Some(base.clone()),
        DomainPattern::Any => None,
    };
    let base = base.or_else(|| DomainName::parse("sandbar-example.example").ok());
    let host = base.map(Host::Name).unwrap_or(Host::Address(std::net::Ipv4Addr::UNSPECIFIED.into()));
    let port = grant.host.port.unwrap_or(DEFAULT_PORT);
    let protocol = match port {
        80 => Protocol::Http { host: Some(host.clone()) },
        _ => Protocol::Tls { sni: Some(host.clone()), ech: EchPresence::Absent },
    };
    Facts::Connect(ConnectFacts { target: ConnectTarget::Named(host), port, protocol })
}

fn wall_clock_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use rules::{LoadSources, SourceFile, compile};

    use super::*;

    fn rules() -> RuleSet {
        let text = "name = \"p\"\n[[allow]]\nname = \"r\"\nhosts = [\"x.example\"]\n";
        let policy = SourceFile { path: "p.toml".into(), bytes: text.into() };
        compile(&LoadSources { policies: vec![policy], ..LoadSources::default() }, &[]).unwrap()
    }

    fn sample_request() -> GrantRequest {
        let (why, by) = ("a test".to_owned(), "alice".to_owned());
        let (sandbox, host) = ("p".to_owned(), "y.example".to_owned());
        GrantRequest { sandbox, host, methods: None, paths: None, bytes: None, seconds: 60, why, by }
    }

    #[test]
    fn what_is_drawn_up_is_not_in_force_and_its_number_is_taken() {
        let (dir, rules) = (tempfile::tempdir().unwrap(), rules());
        let grants = GrantStore::open(dir.path(), GrantSettings::default()).unwrap();
        let grant = grants.prepare(sample_request(), &rules).unwrap();
        assert!(grants.active_grants(&rules).is_empty(), "its record may not be written yet");
        let again = GrantStore::open(dir.path(), GrantSettings::default()).unwrap();
        assert_eq!(again.prepare(sample_request(), &rules).unwrap().id, grant.id + 1);
        grants.activate(grant, &rules).unwrap();
        assert_eq!(grants.active_grants(&rules).len(), 1);
    }

    #[test]
    fn p17_one_too_many_is_refused_and_takes_none_along() {
        let (dir, rules) = (tempfile::tempdir().unwrap(), rules());
        let grants = GrantStore::open(dir.path(), GrantSettings::default()).unwrap();
        let grant = grants.prepare(sample_request(), &rules).unwrap();
        grants.lock().grants = (1..=255).map(|id| ActiveGrant { id, ..grant.clone() }).collect();
        grants.activate(ActiveGrant { id: 256, ..grant.clone() }, &rules).unwrap();
        let refused = grants.prepare(sample_request(), &rules).unwrap_err().to_string();
        assert!(refused.contains("revoke some first"), "{refused}");
        assert!(grants.activate(ActiveGrant { id: 257, ..grant.clone() }, &rules).is_err());
        let timed =
            rules::TimedState { grants: grants.active_grants(&rules), ..rules::TimedState::default() };
        assert_eq!((timed.grants.len(), rules.with_timed_state(&timed, 2).is_ok()), (256, true));
    }

    #[test]
    fn p16_a_grant_is_revoked_although_that_cannot_be_written() {
        let (dir, rules) = (tempfile::tempdir().unwrap(), rules());
        let grants = GrantStore::open(dir.path(), GrantSettings::default()).unwrap();
        let grant = grants.prepare(sample_request(), &rules).unwrap();
        grants.activate(grant.clone(), &rules).unwrap();
        std::fs::remove_dir_all(dir.path()).unwrap();
        grants.remove(grant.id).unwrap();
        assert!(grants.active_grants(&rules).is_empty());
        assert!(grants.store().is_err());
    }
}
