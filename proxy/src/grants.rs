//! Grants: the escape hatch. A person lets one sandbox reach one host for a while and says why; it is recorded
//! when it is made, refused, first used and ended, and it ends by itself, also over a restart.
//!
//! A grant ends at the earlier of two clocks: the wall's, which may be set back, and the time since boot, which
//! may not, but which a reboot forgets.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};
use audit::{Lifecycle, LifecycleEvent, Log};
use rules::budget::{Budget, Budgets};
use rules::facts::{ConnectFacts, Ech, Method, Protocol, Target};
use rules::operator::GrantSettings;
use rules::path::PathPattern;
use rules::pattern::{DomainPattern, HostPattern, Width};
use rules::word::SandboxId;
use rules::{Decision, DomainName, Facts, Grant, Host, Permit, RuleSet};
use serde::{Deserialize, Serialize};

/// What they are kept in, beside the log.
const FILE: &str = "grants.json";
/// Most grants in force at a time.
const MOST: usize = 1000;
/// Longest reason and longest name of who grants, in bytes.
const WORDS: usize = 200;
/// The port of a host written without one.
const PORT: u16 = 443;

/// What somebody asks for, as it is sent to the admin socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Wish {
    pub(crate) sandbox: String,
    pub(crate) host: String,
    #[serde(default)]
    pub(crate) methods: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) paths: Option<Vec<String>>,
    /// Bytes both ways.
    #[serde(default)]
    pub(crate) bytes: Option<u64>,
    pub(crate) seconds: u64,
    pub(crate) why: String,
    pub(crate) by: String,
}

/// A grant in force.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kept {
    pub(crate) id: u64,
    pub(crate) wish: Wish,
    /// Unix time in milliseconds: when it was made, and when it ends.
    pub(crate) made: u64,
    pub(crate) until: u64,
    /// The boot it was made in, and when it ends in milliseconds since then.
    boot: String,
    boot_until: u64,
    pub(crate) used: bool,
}

/// All of them, as they are written.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Book {
    /// Numbers are not used twice, for records name grants by them.
    made: u64,
    grants: Vec<Kept>,
}

/// The grants of an instance.
#[derive(Debug)]
pub(crate) struct Grants {
    path: PathBuf,
    settings: GrantSettings,
    book: Mutex<Book>,
}

/// What both clocks say.
#[derive(Clone, Debug)]
struct Now {
    wall: u64,
    boot: String,
    since_boot: u64,
}

impl Grants {
    /// Reads what earlier processes granted.
    pub(crate) fn open(dir: &Path, settings: GrantSettings) -> anyhow::Result<Self> {
        let path = dir.join(FILE);
        let shown = path.display();
        let book = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .with_context(|| format!("{shown} is broken: mend or remove it"))?,
            Err(error) if error.kind() == ErrorKind::NotFound => Book::default(),
            Err(error) => return Err(error).with_context(|| format!("cannot read {shown}")),
        };
        Ok(Grants { path, settings, book: Mutex::new(book) })
    }

    /// Those in force, for the rules. One of a sandbox that has left waits for it to come back, or for its end.
    pub(crate) fn in_force(&self) -> Vec<Grant> {
        let (book, now) = (self.lock(), Now::read().ok());
        let lasts = |kept: &&Kept| now.as_ref().is_some_and(|now| !kept.is_over(now));
        let lasting = book.grants.iter().filter(lasts);
        lasting.filter_map(|kept| parsed(kept.id, &kept.wish).ok()).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().grants.is_empty()
    }

    pub(crate) fn all(&self) -> Vec<Kept> {
        self.lock().grants.clone()
    }

    /// Makes a grant: on disk first. The rules are the caller's to change.
    ///
    /// # Errors
    ///
    /// Says why there will be none.
    pub(crate) fn make(&self, wish: Wish, rules: &RuleSet) -> anyhow::Result<Kept> {
        let mut book = self.lock();
        let id = book.made + 1;
        let grant = parsed(id, &wish)?;
        ensure!(book.grants.len() < MOST, "{MOST} grants are in force: revoke some first");
        self.permitted(&wish, &grant, rules)?;
        let now = Now::read()?;
        let length = wish.seconds * 1000;
        let kept = Kept {
            id,
            wish,
            made: now.wall,
            until: now.wall + length,
            boot: now.boot,
            boot_until: now.since_boot + length,
            used: false,
        };
        let grants = book.grants.iter().cloned().chain([kept.clone()]).collect();
        self.write(&mut book, Book { made: id, grants })?;
        Ok(kept)
    }

    /// Takes a grant back before its time.
    pub(crate) fn revoke(&self, id: u64) -> anyhow::Result<Kept> {
        let mut book = self.lock();
        let Some(gone) = book.grants.iter().find(|kept| kept.id == id).cloned() else {
            bail!("no grant {id} is in force: see `sandbar grants`");
        };
        let grants = book.grants.iter().filter(|kept| kept.id != id).cloned().collect();
        let made = book.made;
        self.write(&mut book, Book { made, grants })?;
        Ok(gone)
    }

    /// Takes out those whose time is over.
    pub(crate) fn expire(&self) -> Vec<Kept> {
        let mut book = self.lock();
        if book.grants.is_empty() {
            return Vec::new();
        }
        let now = Now::read().ok(); // without a clock every grant is over
        let over = |kept: &Kept| now.as_ref().is_none_or(|now| kept.is_over(now));
        let (over, grants): (Vec<Kept>, Vec<Kept>) = book.grants.iter().cloned().partition(over);
        if over.is_empty() {
            return over;
        }
        let fresh = Book { made: book.made, grants };
        // What cannot be written is over all the same: after a restart its end is found again.
        if let Err(error) = self.write(&mut book, fresh) {
            tracing::warn!("{error:#}");
            book.grants.retain(|kept| !over.iter().any(|gone| gone.id == kept.id));
        }
        over
    }

    /// Notes that a grant was used; its first use is recorded.
    pub(crate) fn use_of(&self, permit: &Permit, log: &Log) {
        let mut book = self.lock();
        let named = |kept: &&mut Kept| *rule_name(kept.id) == *permit.rule().rule;
        let Some(kept) = book.grants.iter_mut().find(named).filter(|kept| !kept.used) else {
            return;
        };
        kept.used = true;
        let message = format!("{} is used for the first time", describe(kept));
        let (made, grants) = (book.made, book.grants.clone());
        if let Err(error) = self.write(&mut book, Book { made, grants }) {
            tracing::warn!("{error:#}");
        }
        tell(log, LifecycleEvent::GrantUsed, message);
    }

    /// Whether the operator lets it be granted, and whether it would act at all.
    fn permitted(&self, wish: &Wish, grant: &Grant, rules: &RuleSet) -> anyhow::Result<()> {
        let most = self.settings.most_seconds;
        ensure!(wish.seconds > 0, "say for how long");
        ensure!(wish.seconds <= most, "no grant lasts longer than {most} s (`most_seconds`)");
        let forbidden = self.settings.forbid_hosts.iter().find(|host| meets(host, &grant.host));
        if let Some(host) = forbidden {
            bail!("the operator forbids grants for `{host}` (`forbid_hosts` of `[grants]`)");
        }
        let Some(sandbox) = rules.sandboxes().get(&grant.sandbox) else {
            bail!("there is no sandbox `{}`", grant.sandbox);
        };
        let base = rules.base_of(sandbox).unwrap_or_default();
        if self.settings.forbid_bases.iter().any(|name| name == base) {
            bail!("the operator forbids grants over base `{base}` (`forbid_bases` of `[grants]`)");
        }
        let timed = rules::Timed { grants: vec![grant.clone()], ..rules::Timed::default() };
        let tried = rules.timed(&timed, rules.generation());
        let tried = tried.map_err(|_| anyhow::anyhow!("the grant cannot be made a rule"))?;
        match tried.decide(sandbox, &example(grant)) {
            Decision::Allow(_) => Ok(()),
            Decision::Deny(denial) => {
                let rule = denial.rule.map(|rule| format!(", by {} of {}", rule.rule, rule.policy));
                let (reason, rule) = (denial.reason, rule.unwrap_or_default());
                bail!("it would stay refused: {reason}{rule}. {}", reason.next_step())
            }
        }
    }

    fn write(&self, book: &mut Book, fresh: Book) -> anyhow::Result<()> {
        let path = self.path.with_extension("new");
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&path)?;
            file.write_all(&serde_json::to_vec_pretty(&fresh)?)?;
            file.sync_all()?;
            std::fs::rename(&path, &self.path)
        };
        write().with_context(|| format!("cannot write {}", self.path.display()))?;
        *book = fresh;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// By either clock; and a wall clock that shows a time before it was made cannot be trusted with it.
    fn is_over(&self, now: &Now) -> bool {
        let same_boot = self.boot == now.boot;
        now.wall >= self.until
            || (same_boot && now.since_boot >= self.boot_until)
            || (!same_boot && now.wall < self.made)
    }

    /// How long it has left, by the wall clock.
    pub(crate) fn left(&self) -> Duration {
        Duration::from_millis(self.until.saturating_sub(wall()))
    }

    pub(crate) fn sandbox(&self) -> Option<SandboxId> {
        SandboxId::parse(&self.wish.sandbox).ok()
    }
}

impl Now {
    fn read() -> anyhow::Result<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        let uptime = std::fs::read_to_string("/proc/uptime")?;
        let seconds: f64 = uptime.split(' ').next().unwrap_or_default().parse()?;
        Ok(Now { wall: wall(), boot, since_boot: (seconds * 1000.0) as u64 })
    }
}

/// What a grant is called among the rules.
pub(crate) fn rule_name(id: u64) -> String {
    format!("grant {id}")
}

/// A grant in one line, for records and people.
pub(crate) fn describe(kept: &Kept) -> String {
    let Wish { sandbox, host, methods, paths, bytes, seconds, why, by } = &kept.wish;
    let list = |all: &Option<Vec<String>>| all.as_ref().map(|all| format!(" {}", all.join(",")));
    let bytes = bytes.map(|bytes| format!(", at most {bytes} bytes")).unwrap_or_default();
    format!(
        "grant {}: {sandbox} may reach {host}{}{} for {seconds} s{bytes}; by {by}: {why}",
        kept.id,
        list(methods).unwrap_or_default(),
        list(paths).unwrap_or_default(),
    )
}

/// Records what became of a grant.
pub(crate) fn tell(log: &Log, event: LifecycleEvent, message: String) {
    let event = Lifecycle { event, message: Some(message.into()), policy: None };
    let log = log.clone();
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    runtime.spawn(async move {
        if let Err(down) = log.lifecycle(&event).await {
            tracing::warn!(%down, "a grant could not be recorded");
        }
    });
}

fn parsed(id: u64, wish: &Wish) -> anyhow::Result<Grant> {
    let host = HostPattern::parse(&wish.host, Width::Narrow).context("the host is not good")?;
    let methods = wish.methods.as_ref().map(|all| {
        all.iter()
            .map(|text| Method::parse(text).with_context(|| format!("method `{text}`")))
            .collect()
    });
    let paths = wish.paths.as_ref().map(|all| {
        all.iter()
            .map(|text| PathPattern::parse(text).with_context(|| format!("path `{text}`")))
            .collect()
    });
    ensure!(!wish.why.trim().is_empty(), "say why: it is recorded");
    ensure!(wish.why.len() <= WORDS && wish.by.len() <= WORDS, "say it in {WORDS} bytes");
    Ok(Grant {
        id: id.to_string(),
        sandbox: SandboxId::parse(&wish.sandbox).context("the sandbox is not good")?,
        host,
        methods: methods.transpose()?,
        paths: paths.transpose()?,
        budgets: Budgets::default().with(Budget::Bytes, wish.bytes),
    })
}

/// Whether a host that no grant may touch is one that this would open.
fn meets(forbidden: &HostPattern, host: &HostPattern) -> bool {
    let port = |pattern: &HostPattern| pattern.port.unwrap_or(PORT);
    let here = forbidden.port.is_none() || port(forbidden) == port(host);
    here && (forbidden.pattern.covers(&host.pattern) || host.pattern.covers(&forbidden.pattern))
}

/// An attempt that the grant is for.
fn example(grant: &Grant) -> Facts {
    let base = match &grant.host.pattern {
        DomainPattern::Below(base) => DomainName::parse(&format!("sandbar-example.{base}")).ok(),
        DomainPattern::Exact(base) | DomainPattern::Tree(base) => Some(base.clone()),
        DomainPattern::Any => None,
    };
    let base = base.or_else(|| DomainName::parse("sandbar-example.example").ok());
    let host =
        base.map(Host::Name).unwrap_or(Host::Address(std::net::Ipv4Addr::UNSPECIFIED.into()));
    let port = grant.host.port.unwrap_or(PORT);
    let protocol = match port {
        80 => Protocol::Http { host: Some(host.clone()) },
        _ => Protocol::Tls { sni: Some(host.clone()), ech: Ech::Absent },
    };
    Facts::Connect(ConnectFacts { target: Target::Named(host), port, protocol })
}

fn wall() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or_default()
}
