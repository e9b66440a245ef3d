//! One path for every way in which a set of path patterns can match: what `diff` tries.
//!
//! All patterns are run side by side over the segments any of them names and one that none does, so a
//! path that two patterns treat differently is found however the patterns overlap.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::path::PathPattern;

/// The segment that stands for any a pattern does not name.
const ANY: &str = "any";
/// A path that servers read in different ways: refused where a rule looks at paths.
const AMBIGUOUS: &str = "/any//any";
/// Most states that are looked at; beyond it every pattern still has its own example.
const MAX_STATES: usize = 2_000;

/// A path to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Witness {
    pub(super) path: String,
    pub(super) shown: Shown,
}

/// What a path stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// Paths with more than one reading.
    Ambiguous,
    /// Every path, because no pattern is about paths.
    Every,
    /// Paths that no pattern matches.
    Other,
    /// The closest pattern that matches, with the path itself where that does not say enough.
    Pattern(String),
}

/// The paths worth trying beside `patterns`, of which those in `denied` also hold without a slash at the end.
pub(super) fn witnesses(patterns: &[&PathPattern], denied: &[&PathPattern]) -> Vec<Witness> {
    if patterns.iter().all(|pattern| pattern.is_everything()) {
        return vec![Witness { path: "/".to_owned(), shown: Shown::Every }];
    }
    let mut classes = Search::new(patterns, denied).classes();
    for pattern in patterns {
        let own = pattern.to_string();
        if !classes.keys().any(|(matched, _)| matched.contains(&own)) {
            classes.insert((vec![own], Vec::new()), pattern.example());
        }
    }
    let closest: Vec<Option<String>> = classes
        .keys()
        .map(|(matched, trimmed)| closest(patterns, &[&matched[..], trimmed].concat()))
        .collect();
    let repeated =
        |label: &Option<String>| closest.iter().filter(|other| *other == label).count() > 1;
    let shown = |label: &Option<String>, path: &str| match label {
        None => Shown::Other,
        Some(pattern) if repeated(label) => Shown::Pattern(format!("{pattern} (such as {path})")),
        Some(pattern) => Shown::Pattern(pattern.clone()),
    };
    let mut found: Vec<Witness> = classes
        .values()
        .zip(&closest)
        .map(|(path, label)| Witness { shown: shown(label, path), path: path.clone() })
        .collect();
    found.push(Witness { path: AMBIGUOUS.to_owned(), shown: Shown::Ambiguous });
    found
}

/// The most specific of the patterns that match.
fn closest(patterns: &[&PathPattern], matched: &[String]) -> Option<String> {
    let own = patterns.iter().filter(|pattern| matched.contains(&pattern.to_string()));
    own.max_by_key(|pattern| pattern.specificity()).map(ToString::to_string)
}

/// A walk over every path, as far as the patterns can tell paths apart.
struct Search {
    patterns: Vec<(String, Vec<Segment>)>,
    denied: BTreeSet<String>,
    /// The segments some pattern names, and one none does; the empty one only ends a path.
    alphabet: BTreeSet<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Any,
    Literal(String),
    One,
}

/// The patterns that match a path, and those that deny it only without the slash at its end.
type Class = (Vec<String>, Vec<String>);

/// For each pattern, how many of its segments may be used up.
type State = Vec<BTreeSet<usize>>;

impl Search {
    fn new(patterns: &[&PathPattern], denied: &[&PathPattern]) -> Self {
        let denied = denied.iter().map(ToString::to_string).collect();
        let texts: BTreeSet<String> = patterns.iter().map(ToString::to_string).collect();
        let patterns: Vec<_> = texts.into_iter().map(|text| (text.clone(), parts(&text))).collect();
        let literals = patterns.iter().flat_map(|(_, parts)| parts).filter_map(|part| match part {
            Segment::Any | Segment::One => None,
            Segment::Literal(text) => Some(text.clone()),
        });
        let mut alphabet: BTreeSet<String> = literals.collect();
        let mut other = ANY.to_owned();
        while alphabet.contains(&other) {
            other.push('-');
        }
        alphabet.extend([other, String::new()]);
        Search { patterns, denied, alphabet }
    }

    /// The shortest path found for each set of patterns that some path matches.
    fn classes(&self) -> BTreeMap<Class, String> {
        let start: State =
            self.patterns.iter().map(|(_, parts)| closure(parts, BTreeSet::from([0]))).collect();
        let (mut found, mut seen) = (BTreeMap::new(), BTreeSet::from([start.clone()]));
        let mut queue = VecDeque::from([(start, String::new())]);
        while let Some((state, path)) = queue.pop_front() {
            for segment in &self.alphabet {
                let (next, longer) = (self.step(&state, segment), format!("{path}/{segment}"));
                found.entry(self.class(&state, &next, segment)).or_insert_with(|| longer.clone());
                let ends = segment.is_empty() || seen.len() >= MAX_STATES;
                if !ends && seen.insert(next.clone()) {
                    queue.push_back((next, longer));
                }
            }
        }
        found
    }

    fn class(&self, before: &State, state: &State, segment: &str) -> Class {
        let matched = self.matched(state);
        let mut trimmed = if segment.is_empty() { self.matched(before) } else { Vec::new() };
        trimmed.retain(|pattern| self.denied.contains(pattern) && !matched.contains(pattern));
        (matched, trimmed)
    }

    fn step(&self, state: &State, segment: &str) -> State {
        let advance = |((_, parts), at): (&(String, Vec<Segment>), &BTreeSet<usize>)| {
            let next = at.iter().filter_map(|at| match parts.get(*at)? {
                Segment::Any => Some(*at),
                Segment::Literal(text) => (text == segment).then_some(at + 1),
                Segment::One => (!segment.is_empty()).then_some(at + 1),
            });
            closure(parts, next.collect())
        };
        self.patterns.iter().zip(state).map(advance).collect()
    }

    fn matched(&self, state: &State) -> Vec<String> {
        let ended = self.patterns.iter().zip(state);
        ended
            .filter(|((_, parts), at)| at.contains(&parts.len()))
            .map(|((text, _), _)| text.clone())
            .collect()
    }
}

/// `**` may stand for nothing.
fn closure(parts: &[Segment], mut at: BTreeSet<usize>) -> BTreeSet<usize> {
    for (position, part) in parts.iter().enumerate() {
        if at.contains(&position) && *part == Segment::Any {
            at.insert(position + 1);
        }
    }
    at
}

fn parts(pattern: &str) -> Vec<Segment> {
    let part = |text: &str| match text {
        "*" => Segment::One,
        "**" => Segment::Any,
        text => Segment::Literal(text.to_owned()),
    };
    pattern.split('/').skip(1).map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::CanonicalPath;

    fn paths(patterns: &[&str]) -> Vec<String> {
        let parsed: Vec<_> =
            patterns.iter().map(|text| PathPattern::parse(text).unwrap()).collect();
        let found = witnesses(&parsed.iter().collect::<Vec<_>>(), &[]);
        found.into_iter().map(|witness| witness.path).collect()
    }

    #[test]
    fn every_way_to_match_has_a_path() {
        for (patterns, expected) in [
            (&["/**"][..], &["/"][..]),
            (&["/v1/*", "/v1/**"], &["/", "/v1/any", "/v1", "/any//any"]),
            (&["/v1/*", "/*/b"], &["/", "/any/b", "/v1/b", "/v1/any", "/any//any"]),
            (&["/any/*"], &["/", "/any/any", "/any//any"]),
        ] {
            let mut expected: Vec<String> = expected.iter().map(ToString::to_string).collect();
            let mut found = paths(patterns);
            expected.sort();
            found.sort();
            assert_eq!(found, expected, "{patterns:?}");
        }
    }

    #[test]
    fn many_patterns_stay_bounded_and_each_is_tried() {
        let texts: Vec<String> = (0..40).map(|at| format!("/**/a{at}/**/b{at}/*")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let found = paths(&texts);
        for text in &texts {
            let pattern = PathPattern::parse(text).unwrap();
            let tried =
                |path: &String| CanonicalPath::parse(path).is_ok_and(|path| pattern.matches(&path));
            assert!(found.iter().any(tried), "{text}");
        }
    }
}
