//! The score: how much a sandbox's queries look like a tunnel. It stops nothing (the budget does that);
//! it says so early, and names what it is made of.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};

use audit::{ScoreFeature, StableCode};
use tokio::time::Instant;

/// Time in which what was seen loses half its weight, in seconds.
const HALF_LIFE: f64 = 600.0;
/// Names remembered to tell new from repeated.
const MAX_NAMES: usize = 4096;
/// A finding is made at this score.
pub(crate) const ALARM_SCORE: u32 = 60;
/// Below so many names nothing is said: a start-up asks for a dozen new names too.
const MIN_NAMES: f64 = 6.0;

/// What was seen of one sandbox, fading.
#[derive(Debug)]
pub(crate) struct TunnelScore {
    names: HashSet<u64>,
    hasher: RandomState,
    at: Instant,
    /// Names under wildcards that were sent, and how many of them were new.
    asked: f64,
    fresh: f64,
    /// Octets, longest label and bits of the new ones.
    octets: f64,
    longest: f64,
    bits: f64,
    /// Answers that said there is no such name, of all answers.
    absent: f64,
    answers: f64,
    /// Types beyond addresses that were refused or asked.
    odd: f64,
    /// Bits of new names that were refused.
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

    /// Notes a name that a wildcard lets pass; `chosen` is the part the sandbox chose.
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

    /// Notes a name that was refused.
    pub(crate) fn note_denied(&mut self, name: &str, now: Instant) {
        self.decay(now);
        if self.is_new(name) {
            self.denied += name_bits(name);
        }
    }

    /// Notes a type that no stub resolver asks for by itself.
    pub(crate) fn note_odd_type(&mut self, now: Instant) {
        self.decay(now);
        self.odd += 1.0;
    }

    /// Notes whether a name that was sent exists.
    pub(crate) fn note_answer(&mut self, exists: bool, now: Instant) {
        self.decay(now);
        self.answers += 1.0;
        self.absent += f64::from(u8::from(!exists));
    }

    /// The score and what it is made of.
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
            (
                "absent_names",
                scale(of(self.absent, self.answers), 0.5, 1.0, 15.0),
                self.answers >= 20.0,
            ),
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
            self.names.clear(); // counts too much then, never too little
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

/// From 0 at `low` to `most` at `high`.
fn scale(value: f64, low: f64, high: f64, most: f64) -> u32 {
    (((value - low) / (high - low)).clamp(0.0, 1.0) * most) as u32
}

fn longest_label(name: &str) -> f64 {
    name.split('.').map(str::len).max().unwrap_or_default() as f64
}

/// Bits of a name by the classes of its labels: words say little, digits and mixtures much.
fn name_bits(name: &str) -> f64 {
    name.split('.').filter(|label| !label.is_empty()).map(label_bits).sum()
}

fn label_bits(label: &str) -> f64 {
    let digits = label.bytes().filter(u8::is_ascii_digit).count();
    let vowels = label.bytes().filter(|byte| b"aeiouy".contains(byte)).count();
    let length = label.len();
    let hex = label.bytes().all(|byte| byte.is_ascii_hexdigit());
    let rate = match digits {
        0 if vowels * 5 >= length && length <= 20 => 1.6, // a word, or several
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
    fn tunnels_are_told_from_work() {
        let base32 = |at: u32| {
            let letters: String = (0..50u32)
                .map(|n| {
                    char::from(
                        b"abcdefghijklmnopqrstuvwxyz234567"
                            [((at * 31 + n * n * 7 + n * at) % 32) as usize],
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
            let mut watch = TunnelScore::new(now);
            for name in names {
                watch.note_sent(&name, now);
            }
            let (score, features) = watch.score();
            assert_eq!(score >= ALARM_SCORE, alarm, "{what}: {score} {features:?}");
        }
    }

    #[test]
    fn p17_no_more_names_are_remembered_than_there_is_room_for() {
        let now = Instant::now();
        let mut watch = TunnelScore::new(now);
        for at in 0..MAX_NAMES * 3 {
            watch.note_denied(&format!("n{at}"), now);
            assert!(watch.names.len() <= MAX_NAMES);
        }
    }

    #[test]
    fn a_search_list_and_a_browser_raise_nothing() {
        let now = Instant::now();
        let mut watch = TunnelScore::new(now);
        for host in
            ["api.openai.com", "github.com", "files.example", "objects.example", "auth.example"]
        {
            for suffix in [
                "default.svc.cluster.local",
                "svc.cluster.local",
                "cluster.local",
                "corp.example",
                "example",
            ] {
                watch.note_denied(&format!("{host}.{suffix}"), now);
            }
        }
        for probe in ["kdjfhgweru", "qpwoeirutyals", "zmxncbvlaksj"] {
            watch.note_denied(probe, now);
        }
        assert_eq!(watch.score().0, 0);
    }
}
