//! The bit budget (P14): bounds what a sandbox can send to the outside in DNS names. Every query is charged, in bits,
//! before it leaves.
//!
//! A token bucket with burst S and rate B lets at most S + B·t bits leave in any time t. There is one per rule and one
//! per sandbox; a query must find enough in both. A third bucket bounds the number of queries, because their timing
//! carries information as well ([`timing_bits`]).
//!
//! The price is the length of a codeword in a prefix code over everything the sandbox can choose: the pattern, the
//! octets below a wildcard, the type, and whether the name is new or a repetition. By Kraft's inequality no encoding
//! of data into queries carries more bits than it is charged; a test below adds the code up.
//!
//! The levels are saved at a clean stop and restored at the next start; `budget_store` says how.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use rules::Permit;
use rules::budget::BudgetKind::DnsBitsPerHour;
use rules::ids::PolicyName;
use tokio::time::Instant;

use crate::limits::{BUDGET_NAMES, BUDGET_RULES};

/// Least level of each bucket after a restart: enough for a few names. After a crash the saved levels are 0, and
/// without this nothing would resolve for minutes.
const FORWARDS_AFTER_CRASH: f64 = 30.0;
const SANDBOX_AFTER_CRASH: f64 = 512.0;
const RULE_AFTER_CRASH: f64 = 128.0;
/// Default rate of a rule in bits per hour, and burst in bits.
pub const RULE_RATE: f64 = 2048.0;
pub const RULE_BURST: f64 = 4096.0;
/// Default rate of a sandbox in bits per hour, and burst in bits.
pub const SANDBOX_RATE: f64 = 8192.0;
pub const SANDBOX_BURST: f64 = 8192.0;

/// Price of one octet: log2 of the number of letters, digits, hyphen, underscore and dot, rounded up.
const OCTET_BITS: f64 = 5.3;
/// Price of a new name besides its octets: that it is new, and its length.
const NEW_BITS: f64 = 6.0;
/// Price of saying that a name is a repetition.
const SEEN_BITS: f64 = 1.0;
const HOUR: f64 = 3600.0;

/// Identifies the rule that a budget belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RuleKey {
    pub policy: PolicyName,
    pub rule: Arc<str>,
}

impl RuleKey {
    pub fn from_permit(permit: &Permit) -> Self {
        RuleKey { policy: permit.rule().policy.clone(), rule: permit.rule().rule.clone() }
    }
}

/// A token bucket.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    level: f64,
    burst: f64,
    per_hour: f64,
    filled: Instant,
}

impl TokenBucket {
    pub fn new(burst: f64, per_hour: f64, now: Instant) -> Self {
        TokenBucket { level: burst, burst, per_hour, filled: now }
    }

    /// Returns the level at `now`.
    pub fn level(&self, now: Instant) -> f64 {
        let hours = now.saturating_duration_since(self.filled).as_secs_f64() / HOUR;
        (self.level + hours * self.per_hour).min(self.burst)
    }

    fn draw(&mut self, amount: f64, now: Instant) {
        (self.level, self.filled) = (self.level(now) - amount, now);
    }

    /// Changes rate and burst from `now` on. The level does not rise: a reload must not grant another burst.
    fn set_rate(&mut self, burst: f64, per_hour: f64, now: Instant) {
        if (self.burst, self.per_hour) != (burst, per_hour) {
            (self.level, self.filled) = (self.level(now).min(burst), now);
            (self.burst, self.per_hour) = (burst, per_hour);
        }
    }
}

/// What the sandbox could choose in one query.
#[derive(Clone, Copy, Debug)]
pub struct QueryChoice<'a> {
    /// Name and type, in wire form.
    pub key: &'a [u8],
    /// Number of octets of the name that the sandbox chose.
    pub octets: usize,
    /// Number of types it could choose from.
    pub types: usize,
    /// log2 of the number of patterns it could choose from.
    pub pattern_bits: f64,
}

/// The bucket that has too little for a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExhaustedBudget {
    Forwards,
    Rule,
    Sandbox,
}

impl ExhaustedBudget {
    /// Returns a sentence for the finding.
    pub fn meaning(self) -> &'static str {
        match self {
            ExhaustedBudget::Forwards => "The sandbox has used up its DNS queries per hour.",
            ExhaustedBudget::Rule => "The rule has used up its DNS bits per hour.",
            ExhaustedBudget::Sandbox => "The sandbox has used up its DNS bits per hour.",
        }
    }
}

/// What is left in each bucket, for `sandbar dns`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RemainingBudget {
    pub rule_bits: f64,
    pub sandbox_bits: f64,
    pub forwards: f64,
}

/// The budgets of one sandbox.
#[derive(Debug)]
pub struct DnsBudget {
    bits: TokenBucket,
    forwards: TokenBucket,
    rules: HashMap<RuleKey, RuleBudget>,
    hasher: RandomState,
}

#[derive(Debug)]
struct RuleBudget {
    bits: TokenBucket,
    /// Hashes of names and types that were charged as new.
    seen: HashSet<u64>,
}

/// The levels of a sandbox's buckets, as saved across a restart.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct BudgetLevels {
    pub bits: f64,
    pub forwards: f64,
    /// Policy, rule and level.
    pub rules: Vec<(String, String, f64)>,
}

impl DnsBudget {
    pub fn new(forwards_per_hour: u64, now: Instant) -> Self {
        let forwards = forwards_per_hour as f64;
        DnsBudget {
            bits: TokenBucket::new(SANDBOX_BURST, SANDBOX_RATE, now),
            forwards: TokenBucket::new(forwards, forwards, now),
            rules: HashMap::new(),
            hasher: RandomState::new(),
        }
    }

    /// Charges a query to all three buckets, or to none, and returns the price in bits.
    ///
    /// # Errors
    ///
    /// Returns [`ExhaustedBudget`] if a bucket has too little: the query must not leave.
    pub fn charge(
        &mut self,
        permit: &Permit,
        choice: &QueryChoice<'_>,
        now: Instant,
    ) -> Result<f64, ExhaustedBudget> {
        let key = RuleKey::from_permit(permit);
        let hash = self.hasher.hash_one(choice.key);
        self.adopt_budgets(permit, now);
        let rule = self.rule_budget(&key, permit, now).ok_or(ExhaustedBudget::Rule)?;
        let price = price(choice, rule.seen.contains(&hash).then_some(rule.seen.len()));
        let short = rule.bits.level(now) < price;
        if self.forwards.level(now) < 1.0 {
            return Err(ExhaustedBudget::Forwards);
        }
        if short {
            return Err(ExhaustedBudget::Rule);
        }
        if self.bits.level(now) < price {
            return Err(ExhaustedBudget::Sandbox);
        }
        self.forwards.draw(1.0, now);
        self.bits.draw(price, now);
        if let Some(rule) = self.rules.get_mut(&key) {
            rule.bits.draw(price, now);
            if rule.seen.len() < BUDGET_NAMES {
                rule.seen.insert(hash);
            }
        }
        Ok(price)
    }

    /// Returns what is left for the rule of a permit.
    pub fn remaining(&self, permit: &Permit, now: Instant) -> RemainingBudget {
        let known = self.rules.get(&RuleKey::from_permit(permit)).map(|rule| rule.bits.level(now));
        let (burst, _) = rule_terms(permit);
        RemainingBudget {
            rule_bits: known.unwrap_or(burst),
            sandbox_bits: self.bits.level(now),
            forwards: self.forwards.level(now),
        }
    }

    /// Returns whether a rule has a bucket. If not, its first query must be noted on disk before it leaves.
    pub fn has_rule(&self, key: &RuleKey) -> bool {
        self.rules.contains_key(key)
    }

    /// Forgets which names were sent, so that each is charged as new again.
    pub(crate) fn forget_names(&mut self) {
        self.rules.values_mut().for_each(|rule| rule.seen = HashSet::new());
    }

    /// Whether every bucket is full, as in a new budget.
    pub(crate) fn is_full(&self, now: Instant) -> bool {
        let full = |bucket: &TokenBucket| bucket.level(now) >= bucket.burst;
        full(&self.bits) && full(&self.forwards) && self.rules.values().all(|rule| full(&rule.bits))
    }

    /// Returns the levels at `now`.
    pub fn save(&self, now: Instant) -> BudgetLevels {
        let rule = |(key, rule): (&RuleKey, &RuleBudget)| {
            (key.policy.to_string(), key.rule.to_string(), rule.bits.level(now).max(0.0))
        };
        BudgetLevels {
            bits: self.bits.level(now).max(0.0),
            forwards: self.forwards.level(now).max(0.0),
            rules: self.rules.iter().map(rule).collect(),
        }
    }

    /// Restores the levels that an earlier process saved, raised to the least levels after a restart.
    pub fn restore(&mut self, saved: &BudgetLevels, now: Instant) {
        self.bits.level = saved.bits.clamp(SANDBOX_AFTER_CRASH, self.bits.burst.max(SANDBOX_AFTER_CRASH));
        let least = FORWARDS_AFTER_CRASH.min(self.forwards.burst);
        self.forwards.level = saved.forwards.clamp(least, self.forwards.burst);
        for (policy, rule, level) in saved.rules.iter().take(BUDGET_RULES) {
            let Ok(policy) = PolicyName::parse(policy) else { continue };
            let mut bits = TokenBucket::new(RULE_BURST, RULE_RATE, now);
            bits.level = level.clamp(RULE_AFTER_CRASH, RULE_BURST);
            let key = RuleKey { policy, rule: rule.as_str().into() };
            self.rules.insert(key, RuleBudget { bits, seen: HashSet::new() });
        }
    }

    fn adopt_budgets(&mut self, permit: &Permit, now: Instant) {
        if let Some(rate) = permit.sandbox_budgets().limit(DnsBitsPerHour) {
            let rate = rate as f64;
            self.bits.set_rate(rate.max(SANDBOX_BURST).min(rate * 2.0), rate, now);
        }
    }

    fn rule_budget(&mut self, key: &RuleKey, permit: &Permit, now: Instant) -> Option<&RuleBudget> {
        let (burst, rate) = rule_terms(permit);
        if !self.rules.contains_key(key) {
            if self.rules.len() >= BUDGET_RULES {
                return None;
            }
            let fresh = RuleBudget { bits: TokenBucket::new(burst, rate, now), seen: HashSet::new() };
            self.rules.insert(key.clone(), fresh);
        }
        let rule = self.rules.get_mut(key)?;
        rule.bits.set_rate(burst, rate, now);
        Some(rule)
    }
}

/// Returns burst and rate of the rule that a permit comes from.
fn rule_terms(permit: &Permit) -> (f64, f64) {
    match permit.rule_budgets().limit(DnsBitsPerHour) {
        None => (RULE_BURST, RULE_RATE),
        Some(rate) => (rate as f64 * (RULE_BURST / RULE_RATE), rate as f64),
    }
}

/// Returns the price of a query in bits. For a repeated name, `seen` is the number of names it could have repeated.
pub fn price(choice: &QueryChoice<'_>, seen: Option<usize>) -> f64 {
    let types = (choice.types.max(1) as f64).log2();
    match seen {
        Some(count) => SEEN_BITS + ((count + 1) as f64).log2() + choice.pattern_bits,
        None => NEW_BITS + OCTET_BITS * choice.octets as f64 + types + choice.pattern_bits,
    }
}

/// Returns an upper bound, in bits, of what the timing of `forwards` queries within `time` can carry if they leave on a
/// time grid.
///
/// Several queries can leave at one grid point, so there are C(points + forwards - 1, forwards) ways to spread them,
/// which is at most (e·(points + forwards) / forwards)^forwards.
pub fn timing_bits(forwards: f64, time: Duration, grid: Duration) -> f64 {
    let points = time.as_secs_f64() / grid.as_secs_f64().max(1e-9);
    match forwards < 1.0 {
        true => 0.0,
        false => forwards * (std::f64::consts::E * (points + forwards) / forwards).log2(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rules::facts::{Facts, NameFacts, QueryType};
    use rules::{Decision, DomainName, LoadSources, RuleSet, SourceFile, compile};

    use super::*;
    use crate::message::wire_key;

    const POLICY: &str = "name = \"p\"\n\
        [[allow]]\nname = \"wide\"\nhosts = [\"*.a.example\", \"*.b.example\"]\n\
        [[allow]]\nname = \"poor\"\nhosts = [\"*.c.example\"]\ndns_bits_per_hour = 512\n";

    fn rules() -> RuleSet {
        let policy = SourceFile { path: "p.toml".into(), bytes: POLICY.into() };
        compile(&LoadSources { policies: vec![policy], ..LoadSources::default() }, &[]).unwrap()
    }

    fn permit(rules: &RuleSet, name: &str, query: QueryType) -> Permit {
        let name = DomainName::parse(name).unwrap();
        let sandbox = rules.sandboxes().iter().next().unwrap();
        match rules.decide(sandbox, &Facts::Name(NameFacts { name, query })) {
            Decision::Allow(permit) => permit,
            Decision::Deny(denial) => panic!("{denial:?}"),
        }
    }

    /// Returns, for each `n` up to `longest`, the Kraft sum over all texts of `n` octets that can precede the base of a
    /// wildcard (the joining dot included), at the price of their octets only.
    fn weights(longest: usize) -> Vec<f64> {
        let letter = |count: f64| count * (-OCTET_BITS).exp2();
        let label = |length: usize| match length {
            0 => 0.0,
            1 => letter(36.0),
            more => letter(36.0).powi(2) * letter(37.0).powi(more as i32 - 2),
        };
        let labels = |length: usize| label(length) + letter(1.0) * label(length.saturating_sub(1));
        let mut weights = vec![0.0; longest + 1];
        for n in 2..=longest {
            let several: f64 = (2..n).map(|k| labels(k - 1) * weights[n - k]).sum();
            weights[n] = letter(1.0) * (labels(n - 1) + several);
        }
        weights
    }

    #[test]
    fn p14_the_price_is_that_of_a_prefix_code() {
        let choice = QueryChoice { key: b"", octets: 0, types: 1, pattern_bits: 0.0 };
        let fresh = weights(250).iter().sum::<f64>() * (-price(&choice, None)).exp2();
        for seen in [1, 2, 100, BUDGET_NAMES] {
            let repeats = seen as f64 * (-price(&choice, Some(seen))).exp2();
            assert!(fresh + repeats <= 1.0, "{fresh} + {repeats}");
        }
    }

    // proves: allow.dns_bits_per_hour, allow.budget.dns_bits_per_hour, budget.dns_bits_per_hour
    #[test]
    fn p14_each_key_for_bits_bounds_what_leaves() {
        let passed = |rule: &str, policy: &str| {
            let text = format!(
                "name = \"p\"\n[[allow]]\nname = \"wide\"\nhosts = [\"*.a.example\"]\n{rule}\n{policy}\n"
            );
            let file = SourceFile { path: "p.toml".into(), bytes: text.into() };
            let rules =
                compile(&LoadSources { policies: vec![file], ..LoadSources::default() }, &[]).unwrap();
            let now = Instant::now();
            let mut budget = DnsBudget::new(1_000_000, now);
            let leaves = |at: &usize| {
                let text = format!("{at:04}{}.a.example", "x".repeat(26));
                let (permit, key) = (
                    permit(&rules, &text, QueryType::A),
                    wire_key(&DomainName::parse(&text).unwrap(), QueryType::A),
                );
                let octets = permit.lookup().chosen_octets;
                let choice = QueryChoice { key: &key, octets, types: 1, pattern_bits: 0.0 };
                budget.charge(&permit, &choice, now).is_ok()
            };
            (0..500).take_while(leaves).count()
        };
        let free = passed("", "");
        assert!(free > 4, "{free}");
        for (rule, policy) in [
            ("dns_bits_per_hour = 200", ""),
            ("budget = { dns_bits_per_hour = 200 }", ""),
            ("", "[budget]\ndns_bits_per_hour = 200"),
        ] {
            let bounded = passed(rule, policy);
            assert!((1..free).contains(&bounded), "{rule}{policy}: {bounded} of {free}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// What leaves costs at most S + B·t, per rule and in all, for any queries at any time.
        #[test]
        fn p14_no_stream_sends_more_than_the_burst_and_the_rate(
            stream in proptest::collection::vec(
                (0u64..2_000_000, 0usize..3, 1usize..120, 0usize..3, 0u32..8), 1..300)
        ) {
            let rules = rules();
            let started = Instant::now();
            let mut now = started;
            let mut budget = DnsBudget::new(1200, started);
            let mut sent: HashMap<RuleKey, f64> = HashMap::new();
            let (mut all, mut forwards) = (0.0, 0.0);
            for (pause, base, length, kind, letter) in stream {
                now += Duration::from_millis(pause);
                let base = ["a.example", "b.example", "c.example"][base];
                let letter = char::from(b'a' + letter as u8);
                let labels: String = (0..length).map(|at| if at % 60 == 59 { '.' } else { letter }).collect();
                let text = format!("{}.{base}", labels.trim_end_matches('.'));
                let kind = QueryType::DEFAULT[kind];
                let permit = permit(&rules, &text, kind);
                let key = wire_key(&DomainName::parse(&text).unwrap(), kind);
                let choice = QueryChoice {
                    key: &key,
                    octets: permit.lookup().chosen_octets,
                    types: permit.lookup().types.len(),
                    pattern_bits: 3f64.log2(),
                };
                let Ok(bits) = budget.charge(&permit, &choice, now) else { continue };
                let rule = RuleKey::from_permit(&permit);
                let rate = if &*rule.rule == "poor" { 512.0 } else { RULE_RATE };
                let spent = sent.entry(rule).or_default();
                *spent += bits;
                all += bits;
                forwards += 1.0;
                let hours = (now - started).as_secs_f64() / HOUR;
                prop_assert!(*spent <= rate * 2.0 + rate * hours + 1e-6, "{spent} after {hours} h");
                prop_assert!(all <= SANDBOX_BURST + SANDBOX_RATE * hours + 1e-6);
                prop_assert!(forwards <= 1200.0 + 1200.0 * hours + 1e-6);
            }
        }
    }

    #[test]
    fn p14_the_timing_term_counts_every_way_to_spread_queries_over_the_grid() {
        let ways = |points: u32, forwards: u32| -> f64 {
            (1..=forwards).map(|at| (f64::from(points + at - 1) / f64::from(at)).log2()).sum()
        };
        for points in [1, 2, 10, 100, 3600, 36_000] {
            for forwards in [1, 2, 3, 10, 240, 1200, 50_000] {
                let time = Duration::from_secs(u64::from(points));
                let stated = timing_bits(f64::from(forwards), time, Duration::from_secs(1));
                let true_bits = ways(points, forwards);
                assert!(true_bits <= stated, "{forwards} on {points}: {true_bits} > {stated}");
            }
        }
    }

    #[test]
    fn p17_rules_with_a_budget_and_remembered_names_are_bounded() {
        let (rules, now) = (rules(), Instant::now());
        let mut budget = DnsBudget::new(u64::from(u32::MAX), now);
        let saved = (0..BUDGET_RULES + 10).map(|at| ("p".to_owned(), format!("r{at}"), 9.0));
        budget.restore(&BudgetLevels { bits: 1e6, forwards: 1e6, rules: saved.collect() }, now);
        assert_eq!(budget.rules.len(), BUDGET_RULES);
        let permit = permit(&rules, "x.a.example", QueryType::A);
        let choice = QueryChoice { key: b"k", octets: 0, types: 1, pattern_bits: 0.0 };
        assert_eq!(
            budget.charge(&permit, &choice, now),
            Err(ExhaustedBudget::Rule),
            "a rule beyond the limit has an empty budget"
        );
        let mut budget = DnsBudget::new(u64::from(u32::MAX), now);
        for at in 0..BUDGET_NAMES + 10 {
            let later = now + Duration::from_secs(3600 * at as u64);
            let key = at.to_be_bytes();
            budget.charge(&permit, &QueryChoice { key: &key, ..choice }, later).unwrap();
        }
        assert_eq!(budget.rules[&RuleKey::from_permit(&permit)].seen.len(), BUDGET_NAMES);
    }

    #[test]
    fn p14_a_restart_grants_no_second_burst() {
        let (rules, now) = (rules(), Instant::now());
        let mut first = DnsBudget::new(240, now);
        let permit = permit(&rules, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.a.example", QueryType::A);
        let lookup = permit.lookup();
        let spend = |budget: &mut DnsBudget| {
            (0u32..).find(|at| {
                let key = at.to_be_bytes();
                let choice =
                    QueryChoice { key: &key, octets: lookup.chosen_octets, types: 3, pattern_bits: 0.0 };
                budget.charge(&permit, &choice, now).is_err()
            })
        };
        assert!(spend(&mut first).unwrap() > 10);
        let mut second = DnsBudget::new(240, now);
        second.restore(&first.save(now), now);
        assert_eq!(spend(&mut second), Some(0));
    }
}
