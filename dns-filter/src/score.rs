//! The tunnel score: how much a sandbox's queries look like a tunnel. It blocks nothing (the budget does); it raises a
//! finding early and names the features that it adds up.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};

use audit::{ScoreFeature, StableCode};
use tokio::time::Instant;

/// Half-life of all observations, in seconds.
const HALF_LIFE: f64 = 600.0;
/// Names remembered to tell new from repeated.
const MAX_NAMES: usize = 4096;
/// The score that raises a finding.
pub(crate) const ALARM_SCORE: u32 = 60;
/// New names before the features about their shape count: every program asks for some at its start.
const MIN_NAMES: f64 = 6.0;

/// Observations of one sandbox, which decay over time.
#[derive(Debug)]
pub(crate) struct TunnelScore {
    names: HashSet<u64>,
    hasher: RandomState,
    at: Instant,
    /// Names below wildcards that were sent, and how many of them were new.
    asked: f64,
    fresh: f64,
    /// Sums over the new ones: octets, length of the longest label, bits.
    octets: f64,
    longest: f64,
    bits: f64,
    /// Answers that the name does not exist, and all answers.
    absent: f64,
    answers: f64,
    /// Queries of types that were denied.
    odd: f64,
    /// Bits of new names that were denied.
    denied: f64,
}

impl TunnelScore {
    pub(crate) fn new(now: Instant) -> Self {
        TunnelScore {
            names: HashSet::new(),
            hasher: RandomState::new(),
            at: now,
            asked: 0.0,
            fresh: 0.0,
            octets: 0.0,
            longest: 0.0,
            bits: 0.0,
            absent: 0.0,
            answers: 0.0,
            odd: 0.0,
            denied: 0.0,
        }
    }

    /// Adds a name sent below a wildcard; `chosen` is the part that the sandbox chose.
    pub(crate) fn note_sent(&mut self, chosen: &str, now: Instant) {
        self.decay(now);
        self.asked += 1.0;
        if self.is_new(chosen) {
            self.fresh += 1.0;
            self.octets += chosen.len() as f64;
            self.longest += longest_label(chosen);
            self.bits += name_bits(chosen);
        }
    }

    /// Adds a denied name.
    pub(crate) fn note_denied(&mut self, name: &str, now: Instant) {
        self.decay(now);
        if self.is_new(name) {
            self.denied += name_bits(name);
        }
    }

    /// Adds a query with a type that was denied.
    pub(crate) fn note_odd_type(&mut self, now: Instant) {
        self.decay(now);
        self.odd += 1.0;
    }

    /// Adds whether a name that was sent exists.
    pub(crate) fn note_answer(&mut self, exists: bool, now: Instant) {
        self.decay(now);
        self.answers += 1.0;
        self.absent += f64::from(u8::from(!exists));
    }

    /// Returns the score and its features.
    pub(crate) fn score(&self) -> (u32, Vec<ScoreFeature>) {
        let of = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let many = self.fresh >= MIN_NAMES;
        let ratio = of(self.fresh, self.asked);
        let entropy = of(self.bits, self.octets);
        let parts = [
            ("new_name_bits", scale(self.bits, 1500.0, 6000.0, 40.0), true),
            ("distinct_names", scale(ratio, 0.8, 1.0, 10.0), many),
            ("label_length", scale(of(self.longest, self.fresh), 24.0, 52.0, 25.0), many),
            ("name_entropy", scale(entropy, 3.2, 4.4, 25.0), many),
            ("absent_names", scale(of(self.absent, self.answers), 0.5, 1.0, 15.0), self.answers >= 20.0),
            ("odd_types", scale(self.odd, 10.0, 60.0, 30.0), true),
            ("denied_name_bits", scale(self.denied, 12_000.0, 40_000.0, 60.0), true),
        ];
        let features: Vec<ScoreFeature> = parts
            .into_iter()
            .filter(|(_, score, counts)| *counts && *score > 0)
            .map(|(name, score, _)| ScoreFeature { name: StableCode(name), score })
            .collect();
        (features.iter().map(|feature| feature.score).sum(), features)
    }

    fn is_new(&mut self, name: &str) -> bool {
        if self.names.len() >= MAX_NAMES {
            self.names.clear(); // old names count as new again: the score is too high, never too low
        }
        self.names.insert(self.hasher.hash_one(name))
    }

    fn decay(&mut self, now: Instant) {
        let seconds = now.saturating_duration_since(self.at).as_secs_f64();
        let keep = (-seconds / HALF_LIFE).exp2();
        self.at = now;
        for weight in [
            &mut self.asked,
            &mut self.fresh,
            &mut self.octets,
            &mut self.longest,
            &mut self.bits,
            &mut self.absent,
            &mut self.answers,
            &mut self.odd,
            &mut self.denied,
        ] {
            *weight *= keep;
        }
    }
}

/// Scales `value` linearly, from 0 at `low` to `max` at `high`.
fn scale(value: f64, low: f64, high: f64, max: f64) -> u32 {
    (((value - low) / (high - low)).clamp(0.0, 1.0) * max) as u32
}

fn longest_label(name: &str) -> f64 {
    name.split('.').map(str::len).max().unwrap_or_default() as f64
}

/// Estimates the bits of a name by the kind of its labels: words carry little, digits and mixtures much.
fn name_bits(name: &str) -> f64 {
    name.split('.').filter(|label| !label.is_empty()).map(label_bits).sum()
}

fn label_bits(label: &str) -> f64 {
    let digits = label.bytes().filter(u8::is_ascii_digit).count();
    let vowels = label.bytes().filter(|byte| b"aeiouy".contains(byte)).count();
    let length = label.len();
    let hex = label.bytes().all(|byte| byte.is_ascii_hexdigit());
    let rate = match digits {
        0 if vowels * 5 >= length && length <= 20 => 1.6, // words
        _ if digits == length => 3.3,
        _ if hex && length >= 8 => 4.0,
        0 if length <= 6 => 2.5,
        _ if digits * 4 <= length && length <= 16 => 3.0,
        _ => 5.0,
    };
    rate * length as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tunnels_raise_an_alarm_and_work_does_not() {
        let base32 = |at: u32| {
            let letters: String = (0..50u32)
                .map(|n| {
                    char::from(
                        b"abcdefghijklmnopqrstuvwxyz234567"[((at * 31 + n * n * 7 + n * at) % 32) as usize],
                    )
                })
                .collect();
            format!("{letters}.")
        };
        let words = ["api.", "files.", "uploads.", "edge.", "static.", "www.", "cdn.", "eu-west."];
        for (what, alarm, names) in [
            ("base32", true, (0..30).map(base32).collect::<Vec<_>>()),
            ("words", false, words.iter().map(|word| (*word).to_owned()).collect()),
            ("repeats", false, (0..200).map(|_| "api.".to_owned()).collect()),
            ("shards", false, (0..12).map(|at| format!("s{at}.")).collect()),
        ] {
            let now = Instant::now();
            let mut score = TunnelScore::new(now);
            for name in names {
                score.note_sent(&name, now);
            }
            let (score, features) = score.score();
            assert_eq!(score >= ALARM_SCORE, alarm, "{what}: {score} {features:?}");
        }
    }

    #[test]
    fn p17_remembered_names_are_bounded() {
        let now = Instant::now();
        let mut score = TunnelScore::new(now);
        for at in 0..MAX_NAMES * 3 {
            score.note_denied(&format!("n{at}"), now);
            assert!(score.names.len() <= MAX_NAMES);
        }
    }

    #[test]
    fn a_search_list_and_a_browser_score_nothing() {
        let now = Instant::now();
        let mut score = TunnelScore::new(now);
        for host in ["api.openai.com", "github.com", "files.example", "objects.example", "auth.example"] {
            for suffix in
                ["default.svc.cluster.local", "svc.cluster.local", "cluster.local", "corp.example", "example"]
            {
                score.note_denied(&format!("{host}.{suffix}"), now);
            }
        }
        for probe in ["kdjfhgweru", "qpwoeirutyals", "zmxncbvlaksj"] {
            score.note_denied(probe, now);
        }
        assert_eq!(score.score().0, 0);
    }
}
