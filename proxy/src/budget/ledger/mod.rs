//! The ledger: how much of its budgets (requests, bytes up, bytes down) each sandbox has used, also across restarts.
//!
//! Usage is charged before it happens, so no budget overshoots. Requests are charged one at a time. Bytes are charged
//! by lease: a relay leases up to [`MAX_LEASE`], moves at most that many and refunds the rest. A lease is much cheaper
//! than charging each read, and however many connections share a budget, the bytes leased never exceed it.
//!
//! Ledger time starts from the wall clock, advances with the monotonic clock, and never starts before the newest
//! timestamp on disk. Setting the wall clock back therefore refills nothing, neither now nor after a restart.

mod account;
mod window;

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use rules::budget::{BudgetKind, Budgets, UsageKind};
use rules::ids::SandboxId;
use rules::{Permit, Reason, RuleRef, RuleSet};
use serde_json::{Value, json};
use tokio::time::Instant;

use self::account::{BudgetLine, BudgetOwner, ChargeError, SandboxAccount};
use crate::report::refusal::Refusal;

/// Directory of the account files, inside the log directory.
const BUDGETS_DIR: &str = "budgets";
/// Largest lease in bytes: small beside any useful budget, large enough that locking the account does not matter.
pub(crate) const MAX_LEASE: u64 = 256 << 10;
/// How long to keep the account of a sandbox that is no longer configured: longer than any window.
const ACCOUNT_RETENTION: Duration = Duration::from_secs(30 * 86_400);

/// The accounts of all sandboxes.
#[derive(Debug)]
pub(crate) struct Ledger {
    dir: PathBuf,
    /// Ledger time at the start, in milliseconds, and the instant of the start.
    begun: (u64, Instant),
    accounts: Mutex<HashMap<SandboxId, Arc<Mutex<SandboxAccount>>>>,
}

/// The budgets that one attempt is charged to: its sandbox's and its rule's. Counts as open until dropped.
#[derive(Debug)]
pub(crate) struct Charges {
    account: Arc<Mutex<SandboxAccount>>,
    /// The budgets in force, and the generation of the rules that set them.
    lines: Mutex<(u64, Arc<[BudgetLine]>)>,
    /// The budgets whose open count this raised; `drop` lowers the same ones, even after a reload.
    opened_under: Arc<[BudgetLine]>,
    begun: (u64, Instant),
}

/// Bytes that are charged but not yet moved. Refund what does not move.
#[derive(Debug)]
pub(crate) struct ByteLease {
    what: UsageKind,
    pub(crate) bytes: u64,
    at: u64,
    /// The budgets it was charged to: a reload may change them before the refund.
    lines: Arc<[BudgetLine]>,
}

/// Which budget is exhausted, and when it refills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Exhausted {
    Budget {
        budget: BudgetKind,
        limit: u64,
        rule: Option<Arc<str>>,
        refills: Option<Duration>,
    },
    /// The account file cannot be written, so nothing may be used.
    Unkept,
}

impl Ledger {
    /// Reads the accounts that earlier processes wrote.
    ///
    /// # Errors
    ///
    /// Returns an error for an unreadable account: starting without it would refill its budgets.
    pub(crate) fn open(dir: &Path, rules: &RuleSet) -> anyhow::Result<Self> {
        let dir = dir.join(BUDGETS_DIR);
        let shown = dir.display();
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {shown}"))?;
        let mut accounts =
            read_accounts(&dir).with_context(|| format!("cannot read the budgets in {shown}"))?;
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let latest = accounts.values().map(SandboxAccount::saved_at).max().unwrap_or_default();
        let now = u64::try_from(wall).unwrap_or_default().max(latest);
        accounts.retain(|id, account| {
            rules.sandboxes().get(id).is_some() || !account.discard_if_old(now, ACCOUNT_RETENTION)
        });
        accounts.values_mut().for_each(|account| account.restore(now));
        let accounts =
            accounts.into_iter().map(|(id, account)| (id, Arc::new(Mutex::new(account)))).collect();
        Ok(Ledger { dir, begun: (now, Instant::now()), accounts: Mutex::new(accounts) })
    }

    /// Counts an attempt as open and returns what to charge its usage to.
    ///
    /// # Errors
    ///
    /// Returns [`Exhausted`] if a rule's `connections` budget is reached.
    pub(crate) fn open_charges(&self, permit: &Permit) -> Result<Charges, Exhausted> {
        let (lines, account, begun) = (budget_lines(permit), self.account(permit.sandbox()), self.begun);
        sys::lock(&account).open_attempt(&lines).map_err(|error| to_exhausted(error, self.now()))?;
        let charged = Mutex::new((permit.generation(), lines.clone()));
        Ok(Charges { account, lines: charged, opened_under: lines, begun })
    }

    /// Starts the lifetime of a sandbox at its first attempt.
    pub(crate) fn start_lifetime(&self, sandbox: &SandboxId) {
        if let Err(error) = sys::lock(&self.account(sandbox)).start_lifetime(self.now()) {
            tracing::warn!(%error, %sandbox, "cannot write the start of a sandbox lifetime");
        }
    }

    /// Returns the sandboxes whose lifetime has expired.
    pub(crate) fn expired_sandboxes(&self, rules: &RuleSet) -> BTreeSet<SandboxId> {
        let limited = rules.sandboxes().iter().filter_map(|sandbox| {
            let seconds = rules.budgets_of(sandbox).limit(BudgetKind::LifetimeSeconds)?;
            Some((sandbox.id.clone(), seconds))
        });
        let now = self.now();
        let is_over = |(id, seconds): &(SandboxId, u64)| {
            let born = sys::lock(&self.account(id)).lifetime_start();
            born.is_some_and(|born| born.saturating_add(seconds.saturating_mul(1000)) <= now)
        };
        limited.filter(is_over).map(|(id, _)| id).collect()
    }

    /// Returns the usage of every budget that is set, as JSON for `sandbar budget`.
    pub(crate) fn describe(&self, rules: &RuleSet) -> Value {
        let sandboxes = rules.sandboxes().iter().filter_map(|sandbox| {
            let budgets = rules.budgets_of(sandbox);
            let total = self.describe_budgets(&sandbox.id, &BudgetOwner::Sandbox, budgets);
            let rules: Vec<Value> = rules
                .policies_of(sandbox)
                .into_iter()
                .flat_map(|policy| policy.rules().iter().map(move |rule| (policy, rule)))
                .filter(|(_, rule)| rule.budgets().limits().next().is_some())
                .map(|(policy, rule)| {
                    let purse = BudgetOwner::Rule(format!("{}/{}", policy.name(), rule.name()).into());
                    let used = self.describe_budgets(&sandbox.id, &purse, rule.budgets());
                    json!({ "policy": policy.name().as_str(), "rule": rule.name(), "budgets": used })
                })
                .collect();
            let any = !total.is_empty() || !rules.is_empty();
            any.then(|| json!({ "sandbox": sandbox.id.as_str(), "budgets": total, "rules": rules }))
        });
        Value::Array(sandboxes.collect())
    }

    fn describe_budgets(&self, id: &SandboxId, purse: &BudgetOwner, budgets: Budgets) -> Vec<Value> {
        let now = self.now();
        let shown = budgets.limits().filter(|(budget, _)| *budget != BudgetKind::DnsBitsPerHour);
        shown
            .map(|(budget, limit)| {
                let line = BudgetLine { purse: purse.clone(), budget, limit };
                let account = self.account(id);
                let (used, refill) = match budget == BudgetKind::LifetimeSeconds {
                    true => (sys::lock(&account).age(now), None),
                    false => sys::lock(&account).amount_used(&line, now),
                };
                let refill = refill.map(|refill| refill.saturating_sub(now).div_ceil(1000));
                json!({ "budget": budget.key(), "limit": limit, "used": used, "refills_in_seconds": refill })
            })
            .collect()
    }

    /// Forgets the usage of a grant that has ended.
    pub(crate) fn forget_grant(&self, sandbox: &SandboxId, rule: &str) {
        let key = format!("{}/{rule}", rules::GRANTS_POLICY);
        sys::lock(&self.account(sandbox)).forget_rule(&key);
    }

    /// Writes the exact usage of every account, so that a clean stop loses no budget.
    pub(crate) fn flush(&self) {
        let now = self.now();
        for account in self.accounts().values() {
            if let Err(error) = sys::lock(account).flush(now) {
                tracing::warn!(%error, "cannot write budget usage");
            }
        }
    }

    fn account(&self, id: &SandboxId) -> Arc<Mutex<SandboxAccount>> {
        let mut accounts = self.accounts();
        if let Some(account) = accounts.get(id) {
            return account.clone();
        }
        let path = self.dir.join(format!("{id}.json"));
        accounts.entry(id.clone()).or_insert_with(|| Arc::new(Mutex::new(SandboxAccount::new(path)))).clone()
    }

    fn accounts(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<Mutex<SandboxAccount>>>> {
        sys::lock(&self.accounts)
    }

    fn now(&self) -> u64 {
        ledger_time(self.begun)
    }
}

impl Charges {
    /// Charges all of `amount`, or nothing.
    ///
    /// # Errors
    ///
    /// Returns the budget that has less than `amount` left.
    pub(crate) fn charge(&self, what: UsageKind, amount: u64) -> Result<(), Exhausted> {
        self.charge_range(what, (amount, amount)).map(drop)
    }

    /// Leases up to [`MAX_LEASE`] bytes, before they move.
    ///
    /// # Errors
    ///
    /// Returns the budget that is exhausted.
    pub(crate) fn lease(&self, what: UsageKind) -> Result<ByteLease, Exhausted> {
        self.charge_range(what, (1, MAX_LEASE))
    }

    /// Refunds the part of a lease that did not move.
    pub(crate) fn refund(&self, lease: &ByteLease, moved: u64) {
        let rest = lease.bytes.saturating_sub(moved);
        if !lease.lines.is_empty() {
            sys::lock(&self.account).refund(&lease.lines, lease.what, rest, lease.at);
        }
    }

    /// Charges to the budgets of a newer permit from now on.
    ///
    /// Two reloads may call this concurrently and in either order; the higher generation wins.
    pub(crate) fn adopt_budgets(&self, permit: &Permit) {
        let (generation, fresh) = (permit.generation(), budget_lines(permit));
        let mut charged = sys::lock(&self.lines);
        if charged.0 <= generation {
            *charged = (generation, fresh);
        }
    }

    fn charge_range(&self, what: UsageKind, range: (u64, u64)) -> Result<ByteLease, Exhausted> {
        let (lines, at) = (self.lines(), ledger_time(self.begun));
        let bytes = match lines.is_empty() {
            true => range.1, // no budget applies
            false => {
                let charged = sys::lock(&self.account).charge(&lines, what, range, at);
                charged.map_err(|error| to_exhausted(error, at))?
            }
        };
        Ok(ByteLease { what, bytes, at, lines })
    }

    fn lines(&self) -> Arc<[BudgetLine]> {
        sys::lock(&self.lines).1.clone()
    }
}

impl Drop for Charges {
    fn drop(&mut self) {
        if !self.opened_under.is_empty() {
            sys::lock(&self.account).close_attempt(&self.opened_under);
        }
    }
}

impl Exhausted {
    /// Returns the reason for cutting an open connection.
    pub(crate) fn reason(&self) -> Reason {
        match self {
            Exhausted::Budget { .. } => Reason::BudgetSpent,
            Exhausted::Unkept => Reason::BudgetUnkept,
        }
    }

    /// The sandbox's `connections` budget is reached.
    pub(crate) fn connections(limit: u64) -> Self {
        Exhausted::Budget { budget: BudgetKind::Connections, limit, rule: None, refills: None }
    }
}

impl From<Exhausted> for Refusal {
    fn from(spent: Exhausted) -> Self {
        let Exhausted::Budget { budget, limit, rule, refills } = spent else {
            return Reason::BudgetUnkept.into();
        };
        let owner = rule.map_or_else(|| "of the sandbox".to_owned(), |rule| format!("of rule {rule}"));
        let refills = match refills {
            Some(time) => format!("it refills in {} s", time.as_secs().max(1)),
            None if budget == BudgetKind::Connections => "close one first".to_owned(),
            None => "it does not refill".to_owned(),
        };
        Refusal::from(Reason::BudgetSpent)
            .with_detail(format!("{budget} = {limit} {owner} is used up; {refills}"))
    }
}

/// Returns the budgets that an attempt is charged to.
///
/// Three budgets are enforced elsewhere: DNS bits by the DNS filter, a sandbox's connections by
/// [`ConnectionLimit`](crate::budget::slots::ConnectionLimit), and its lifetime by the rules.
fn budget_lines(permit: &Permit) -> Arc<[BudgetLine]> {
    let here = |budgets: Budgets, purse: BudgetOwner| {
        budgets.limits().filter_map(move |(budget, limit)| {
            let charged =
                budget.is_counted() || budget == BudgetKind::Connections && purse != BudgetOwner::Sandbox;
            charged.then(|| BudgetLine { purse: purse.clone(), budget, limit })
        })
    };
    let named = |rule: &RuleRef| BudgetOwner::Rule(format!("{}/{}", rule.policy, rule.rule).into());
    // A base rule's budget covers everything that it lets pass, across all rules of the sandbox.
    let rule = permit.rule();
    let base = permit.base_budgets().filter(|(base, _)| named(base) != named(rule));
    let base = base.map(|(rule, budgets)| here(budgets, named(rule)));
    here(permit.sandbox_budgets(), BudgetOwner::Sandbox)
        .chain(here(permit.rule_budgets(), named(rule)))
        .chain(base.into_iter().flatten())
        .collect()
}

fn to_exhausted(error: ChargeError, now: u64) -> Exhausted {
    match error {
        ChargeError::Spent { line: BudgetLine { purse, budget, limit }, free_at } => {
            let rule = match purse {
                BudgetOwner::Rule(rule) => Some(rule),
                BudgetOwner::Sandbox => None,
            };
            let refills = free_at.map(|at| Duration::from_millis(at.saturating_sub(now)));
            Exhausted::Budget { budget, limit, rule, refills }
        }
        ChargeError::Unkept => Exhausted::Unkept,
    }
}

fn ledger_time((base, begun): (u64, Instant)) -> u64 {
    base.saturating_add(u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX))
}

fn read_accounts(dir: &Path) -> anyhow::Result<HashMap<SandboxId, SandboxAccount>> {
    let mut accounts = HashMap::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        let id = stem.and_then(|stem| SandboxId::parse(stem).ok());
        let (Some(id), true) = (id, path.extension().is_some_and(|ext| ext == "json")) else {
            continue;
        };
        let invalid = || format!("{} is not valid: repair or remove it", path.display());
        accounts.insert(id, SandboxAccount::read(&path).with_context(invalid)?);
    }
    Ok(accounts)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use rules::facts::{ConnectFacts, ConnectTarget, EchPresence, Protocol};
    use rules::{Decision, DomainName, Facts, Host, LoadSources, SourceFile, compile};

    use super::*;

    fn rules(budget: &str) -> RuleSet {
        let text = format!(
            "name = \"p\"\n[budget]\n{budget}\n[[allow]]\nname = \"r\"\nhosts = [\"x.example\"]\ntls = \"tunnel\"\n\
             [allow.budget]\nconnections = 2\nrequests_per_minute = 1000\n"
        );
        let policy = SourceFile { path: "p.toml".into(), bytes: text.into() };
        compile(&LoadSources { policies: vec![policy], ..LoadSources::default() }, &[]).unwrap()
    }

    fn permit(rules: &RuleSet) -> Permit {
        permit_to(rules, "x.example")
    }

    fn permit_to(rules: &RuleSet, host: &str) -> Permit {
        let host = Host::Name(DomainName::parse(host).unwrap());
        let protocol = Protocol::Tls { sni: Some(host.clone()), ech: EchPresence::Absent };
        let facts = ConnectFacts { target: ConnectTarget::Named(host), port: 443, protocol };
        match rules.decide(rules.sandboxes().iter().next().unwrap(), &Facts::Connect(facts)) {
            Decision::Allow(permit) => permit,
            Decision::Deny(denial) => panic!("{denial:?}"),
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(24))]

        /// Concurrent leases and refunds never move more than the limit, and all of the limit can be moved.
        #[test]
        fn budgets_are_exact_under_concurrency(limit in 1u64..4_000_000, part in 1u64..300_000) {
            let dir = tempfile::tempdir().unwrap();
            let rules = rules(&format!("upload_bytes_per_hour = {limit}"));
            let ledger = Ledger::open(dir.path(), &rules).unwrap();
            let moved = AtomicU64::new(0);
            std::thread::scope(|scope| {
                for thread in 0..2 {
                    let (ledger, moved, permit) = (&ledger, &moved, permit(&rules));
                    scope.spawn(move || {
                        let charges = ledger.open_charges(&permit).unwrap();
                        let mut wanted = part + thread;
                        while let Ok(lease) = charges.lease(UsageKind::Upload) {
                            let now = lease.bytes.min(wanted);
                            moved.fetch_add(now, Ordering::SeqCst);
                            assert!(moved.load(Ordering::SeqCst) <= limit);
                            charges.refund(&lease, now);
                            wanted = wanted * 7 % 90_001 + 1;
                        }
                    });
                }
            });
            // One thread may have held a lease when the other was refused; after its refund the rest is available.
            let charges = ledger.open_charges(&permit(&rules)).unwrap();
            while let Ok(lease) = charges.lease(UsageKind::Upload) {
                moved.fetch_add(lease.bytes, Ordering::SeqCst);
            }
            proptest::prop_assert_eq!(moved.into_inner(), limit);
        }
    }

    #[test]
    fn a_restart_gives_nothing_back_and_a_crash_takes_a_little() {
        let rules = rules("requests_per_hour = 160\nupload_bytes_per_day = 1000");
        for (how, used) in [("orderly", 100), ("by a crash", 110)] {
            let dir = tempfile::tempdir().unwrap();
            let ledger = Ledger::open(dir.path(), &rules).unwrap();
            let charges = ledger.open_charges(&permit(&rules)).unwrap();
            (0..100).for_each(|_| charges.charge(UsageKind::Requests, 1).unwrap());
            if how == "orderly" {
                ledger.flush();
            }
            drop((charges, ledger));
            let ledger = Ledger::open(dir.path(), &rules).unwrap();
            let charges = ledger.open_charges(&permit(&rules)).unwrap();
            let left = (0..200).filter(|_| charges.charge(UsageKind::Requests, 1).is_ok()).count();
            assert!((160 - used..=60).contains(&left), "{how}: {left} are left");
            let spent = charges.charge(UsageKind::Requests, 1).unwrap_err();
            let Exhausted::Budget { budget, limit, rule, refills } = spent else { panic!("{spent:?}") };
            assert_eq!((budget, limit, rule), (BudgetKind::RequestsPerHour, 160, None));
            assert!(refills.is_some_and(|time| time > Duration::from_secs(3500)), "{refills:?}");
        }
    }

    #[test]
    fn a_lease_is_given_back_to_what_it_was_taken_from() {
        let dir = tempfile::tempdir().unwrap();
        let free = rules("");
        let ledger = Ledger::open(dir.path(), &free).unwrap();
        let bound = rules("upload_bytes_per_hour = 1000");
        let (other, charges) =
            (ledger.open_charges(&permit(&bound)).unwrap(), ledger.open_charges(&permit(&free)).unwrap());
        other.charge(UsageKind::Upload, 1000).unwrap();
        let lease = charges.lease(UsageKind::Upload).unwrap();
        charges.adopt_budgets(&permit(&bound)); // a reload while a lease is held
        charges.refund(&lease, 0);
        assert!(
            other.charge(UsageKind::Upload, 1).is_err(),
            "a refund must not free another attempt's usage"
        );
    }

    #[test]
    fn the_later_of_two_changes_stands() {
        let dir = tempfile::tempdir().unwrap();
        let free = rules("");
        let ledger = Ledger::open(dir.path(), &free).unwrap();
        let charges = ledger.open_charges(&permit(&free)).unwrap();
        let later =
            rules("upload_bytes_per_hour = 5").with_timed_state(&rules::TimedState::default(), 9).unwrap();
        charges.adopt_budgets(&permit(&later));
        charges
            .adopt_budgets(&permit(&rules("").with_timed_state(&rules::TimedState::default(), 8).unwrap()));
        assert!(charges.charge(UsageKind::Upload, 6).is_err());
    }

    #[test]
    fn a_drip_does_not_write_the_file_for_every_byte() {
        let (dir, rules) = (tempfile::tempdir().unwrap(), rules("upload_bytes_per_hour = 1000000"));
        let ledger = Ledger::open(dir.path(), &rules).unwrap();
        let charges = ledger.open_charges(&permit(&rules)).unwrap();
        let drip = || {
            let lease = charges.lease(UsageKind::Upload)?;
            charges.refund(&lease, 1);
            Ok::<(), Exhausted>(())
        };
        drip().unwrap();
        std::fs::remove_dir_all(dir.path().join(BUDGETS_DIR)).unwrap(); // a write would fail now
        (0..1000).for_each(|at| assert_eq!(drip(), Ok(()), "byte {at}"));
    }

    #[test]
    fn a_rule_of_the_base_bounds_all_that_passes_by_it() {
        let file = |path: &str, text: &str| SourceFile { path: path.into(), bytes: text.into() };
        let operator = "[[sandbox]]\nid = \"s\"\nbase = \"b\"\npolicies = [\"p\"]\n";
        let own = "name = \"p\"\n[[allow]]\nname = \"one\"\nhosts = [\"x.example\"]\ntls = \"tunnel\"\n\
                   [[allow]]\nname = \"two\"\nhosts = [\"y.example\"]\ntls = \"tunnel\"\n";
        let base = "name = \"b\"\n[[allow]]\nname = \"all\"\nhosts = [\".example\"]\ndangerously_wide = true\n\
                    tls = \"tunnel\"\n[allow.budget]\nupload_bytes_per_hour = 10\n";
        let sources = LoadSources {
            operator: Some(file("sandbar.toml", operator)),
            policies: vec![file("p.toml", own), file("b.toml", base)],
            ..LoadSources::default()
        };
        let rules = compile(&sources, &[]).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(dir.path(), &rules).unwrap();
        let charges = |host| ledger.open_charges(&permit_to(&rules, host)).unwrap();
        charges("x.example").charge(UsageKind::Upload, 6).unwrap();
        let spent = charges("y.example").charge(UsageKind::Upload, 6).unwrap_err();
        let Exhausted::Budget { rule, .. } = spent else { panic!("{spent:?}") };
        assert_eq!(rule.as_deref(), Some("b/all"));
        charges("y.example").charge(UsageKind::Upload, 4).unwrap();
    }

    #[test]
    fn p17_so_many_are_open_at_once_and_a_place_is_given_up() {
        let (dir, rules) = (tempfile::tempdir().unwrap(), rules(""));
        let ledger = Ledger::open(dir.path(), &rules).unwrap();
        let one = ledger.open_charges(&permit(&rules)).unwrap();
        let _two = ledger.open_charges(&permit(&rules)).unwrap();
        let spent = ledger.open_charges(&permit(&rules)).unwrap_err();
        let Exhausted::Budget { budget, rule, .. } = spent else { panic!("{spent:?}") };
        assert_eq!((budget, rule.as_deref()), (BudgetKind::Connections, Some("p/r")));
        drop(one);
        assert!(ledger.open_charges(&permit(&rules)).is_ok());
    }

    #[test]
    fn p16_what_cannot_be_written_cannot_be_used() {
        let (dir, rules) = (tempfile::tempdir().unwrap(), rules("requests_per_hour = 9"));
        let ledger = Ledger::open(dir.path(), &rules).unwrap();
        let charges = ledger.open_charges(&permit(&rules)).unwrap();
        charges.charge(UsageKind::Requests, 1).unwrap();
        std::fs::remove_dir_all(dir.path().join(BUDGETS_DIR)).unwrap();
        for _ in 0..3 {
            assert_eq!(charges.charge(UsageKind::Requests, 1), Err(Exhausted::Unkept));
        }
        std::fs::create_dir(dir.path().join(BUDGETS_DIR)).unwrap();
        assert_eq!((0..20).filter(|_| charges.charge(UsageKind::Requests, 1).is_ok()).count(), 8);
    }

    #[test]
    fn p16_a_broken_file_stops_the_start() {
        let (dir, rules) = (tempfile::tempdir().unwrap(), rules(""));
        std::fs::create_dir(dir.path().join(BUDGETS_DIR)).unwrap();
        std::fs::write(dir.path().join(BUDGETS_DIR).join("p.json"), "{").unwrap();
        let error = format!("{:#}", Ledger::open(dir.path(), &rules).unwrap_err());
        assert!(error.contains("p.json is not valid: repair or remove it"), "{error}");
    }
}
