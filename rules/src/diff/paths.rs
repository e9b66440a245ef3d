//! Finds one path for every combination of patterns that can match together: the paths that `diff` probes.
//!
//! It runs all patterns in parallel, as one automaton, over the segments that any of them names and one that none
//! names. So it finds a path for every pair of patterns that can be distinguished, however they overlap.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::url_path::{ENCODED_SLASH, PathPattern};

/// The segment that represents all segments no pattern names.
const ANY_SEGMENT: &str = "any";
/// A path that servers interpret differently; refused if a rule matches on paths.
const AMBIGUOUS_PATH: &str = "/any//any";
/// Most automaton states to visit; beyond that, every pattern still gets its own example.
const MAX_STATES: usize = 2_000;

/// A path to probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SamplePath {
    pub(super) path: String,
    pub(super) shown: PathLabel,
}

/// What a path represents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PathLabel {
    /// Ambiguous paths.
    Ambiguous,
    /// Every path, because no pattern distinguishes paths.
    Every,
    /// Paths that no pattern matches.
    Other,
    /// The most specific matching pattern, with the path itself if the pattern alone is ambiguous.
    Pattern(String),
}

/// Returns the paths to probe for `patterns`; those in `denied` also match a path with a trailing slash.
pub(super) fn sample_paths(patterns: &[&PathPattern], denied: &[&PathPattern]) -> Vec<SamplePath> {
    if patterns.iter().all(|pattern| pattern.is_everything()) {
        return vec![SamplePath { path: "/".to_owned(), shown: PathLabel::Every }];
    }
    let mut classes = PathSearch::new(patterns, denied).match_classes();
    for pattern in patterns {
        let own = pattern.to_string();
        if !classes.keys().any(|(matched, _)| matched.contains(&own)) {
            classes.insert((vec![own], Vec::new()), pattern.example());
        }
    }
    let closest: Vec<Option<String>> = classes
        .keys()
        .map(|(matched, trimmed)| most_specific(patterns, &[&matched[..], trimmed].concat()))
        .collect();
    let repeated = |label: &Option<String>| closest.iter().filter(|other| *other == label).count() > 1;
    let shown = |label: &Option<String>, path: &str| match label {
        None => PathLabel::Other,
        Some(pattern) if repeated(label) => PathLabel::Pattern(format!("{pattern} (such as {path})")),
        Some(pattern) => PathLabel::Pattern(pattern.clone()),
    };
    let mut found: Vec<SamplePath> = classes
        .values()
        .zip(&closest)
        .map(|(path, label)| SamplePath { shown: shown(label, path), path: path.clone() })
        .collect();
    for (pattern, path) in encoded_samples(patterns, denied) {
        if found.iter().all(|sample| sample.path != path) {
            let shown = PathLabel::Pattern(format!("{pattern} (such as {path})"));
            found.push(SamplePath { path, shown });
        }
    }
    found.push(SamplePath { path: AMBIGUOUS_PATH.to_owned(), shown: PathLabel::Ambiguous });
    found
}

/// Returns paths that a denied pattern matches only under the other reading of their encoded slashes: patterns that
/// spell them, with names of a denied pattern in the place of stars.
fn encoded_samples(patterns: &[&PathPattern], denied: &[&PathPattern]) -> Vec<(String, String)> {
    let names = |pattern: &&PathPattern| -> Vec<String> {
        let text = pattern.to_string().replace(ENCODED_SLASH, "/");
        text.split('/').filter(|name| !name.is_empty() && !name.contains('*')).map(str::to_owned).collect()
    };
    let mut found = Vec::new();
    let encoded = patterns.iter().map(ToString::to_string).filter(|text| text.contains(ENCODED_SLASH));
    for pattern in encoded.collect::<BTreeSet<_>>() {
        for names in denied.iter().map(names) {
            for first in 0..names.len() {
                let mut names = names.iter().skip(first).map(String::as_str);
                let mut piece = |text: &str| match text {
                    "*" => names.next().unwrap_or(ANY_SEGMENT).to_owned(),
                    "**" => ANY_SEGMENT.to_owned(),
                    text => text.to_owned(),
                };
                let mut segment = |text: &str| {
                    text.split(ENCODED_SLASH).map(&mut piece).collect::<Vec<_>>().join(ENCODED_SLASH)
                };
                let path = pattern.split('/').map(&mut segment).collect::<Vec<_>>().join("/");
                if found.len() < MAX_STATES {
                    found.push((pattern.clone(), path));
                }
            }
        }
    }
    found
}

/// Returns the most specific of the matching patterns.
fn most_specific(patterns: &[&PathPattern], matched: &[String]) -> Option<String> {
    let own = patterns.iter().filter(|pattern| matched.contains(&pattern.to_string()));
    own.max_by_key(|pattern| pattern.specificity()).map(ToString::to_string)
}

/// A breadth-first search over the paths that the patterns can distinguish.
struct PathSearch {
    patterns: Vec<(String, Vec<SearchSegment>)>,
    denied: BTreeSet<String>,
    /// The segments that patterns name, one that none names, and the empty segment, which only ends a path.
    alphabet: BTreeSet<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum SearchSegment {
    Any,
    Literal(String),
    One,
}

/// The patterns that match a path, and those that deny it only without its trailing slash.
type MatchClass = (Vec<String>, Vec<String>);

/// For each pattern, the positions it may have reached: the states of a nondeterministic automaton.
type SearchState = Vec<BTreeSet<usize>>;

impl PathSearch {
    fn new(patterns: &[&PathPattern], denied: &[&PathPattern]) -> Self {
        let denied = denied.iter().map(ToString::to_string).collect();
        let texts: BTreeSet<String> = patterns.iter().map(ToString::to_string).collect();
        let patterns: Vec<_> = texts.into_iter().map(|text| (text.clone(), parse_segments(&text))).collect();
        let literals = patterns.iter().flat_map(|(_, parts)| parts).filter_map(|part| match part {
            SearchSegment::Any | SearchSegment::One => None,
            SearchSegment::Literal(text) => Some(text.replace("*", ANY_SEGMENT)),
        });
        let mut alphabet: BTreeSet<String> = literals.collect();
        let mut other = ANY_SEGMENT.to_owned();
        while alphabet.contains(&other) {
            other.push('-');
        }
        alphabet.extend([other, String::new()]);
        PathSearch { patterns, denied, alphabet }
    }

    /// Returns the shortest path for each combination of matching patterns.
    fn match_classes(&self) -> BTreeMap<MatchClass, String> {
        let start: SearchState =
            self.patterns.iter().map(|(_, parts)| closure(parts, BTreeSet::from([0]))).collect();
        let (mut found, mut seen) = (BTreeMap::new(), BTreeSet::from([start.clone()]));
        let mut queue = VecDeque::from([(start, String::new())]);
        while let Some((state, path)) = queue.pop_front() {
            for segment in &self.alphabet {
                let (next, longer) = (self.step(&state, segment), format!("{path}/{segment}"));
                found.entry(self.classify(&state, &next, segment)).or_insert_with(|| longer.clone());
                let ends = segment.is_empty() || seen.len() >= MAX_STATES;
                if !ends && seen.insert(next.clone()) {
                    queue.push_back((next, longer));
                }
            }
        }
        found
    }

    fn classify(&self, before: &SearchState, state: &SearchState, segment: &str) -> MatchClass {
        let matched = self.matching_patterns(state);
        let mut trimmed = if segment.is_empty() { self.matching_patterns(before) } else { Vec::new() };
        trimmed.retain(|pattern| self.denied.contains(pattern) && !matched.contains(pattern));
        (matched, trimmed)
    }

    fn step(&self, state: &SearchState, segment: &str) -> SearchState {
        let advance = |((_, parts), at): (&(String, Vec<SearchSegment>), &BTreeSet<usize>)| {
            let next = at.iter().filter_map(|at| match parts.get(*at)? {
                SearchSegment::Any => (!segment.contains(ENCODED_SLASH)).then_some(*at),
                SearchSegment::Literal(text) => literal_matches(text, segment).then_some(at + 1),
                SearchSegment::One => {
                    (!segment.is_empty() && !segment.contains(ENCODED_SLASH)).then_some(at + 1)
                }
            });
            closure(parts, next.collect())
        };
        self.patterns.iter().zip(state).map(advance).collect()
    }

    fn matching_patterns(&self, state: &SearchState) -> Vec<String> {
        let ended = self.patterns.iter().zip(state);
        ended
            .filter(|((_, parts), at)| at.contains(&parts.len()))
            .map(|((text, _), _)| text.clone())
            .collect()
    }
}

/// Returns whether a segment of a pattern matches: literally, or piece by piece if it spells encoded slashes.
fn literal_matches(text: &str, segment: &str) -> bool {
    let pieces = || text.split(ENCODED_SLASH).zip(segment.split(ENCODED_SLASH));
    let alike = text.split(ENCODED_SLASH).count() == segment.split(ENCODED_SLASH).count();
    let encoded = text.contains(ENCODED_SLASH);
    text == segment || (encoded && alike && pieces().all(|(own, found)| own == "*" || own == found))
}

/// Adds the positions reachable without consuming a segment: `**` may match nothing.
fn closure(parts: &[SearchSegment], mut at: BTreeSet<usize>) -> BTreeSet<usize> {
    for (position, part) in parts.iter().enumerate() {
        if at.contains(&position) && *part == SearchSegment::Any {
            at.insert(position + 1);
        }
    }
    at
}

fn parse_segments(pattern: &str) -> Vec<SearchSegment> {
    let part = |text: &str| match text {
        "*" => SearchSegment::One,
        "**" => SearchSegment::Any,
        text => SearchSegment::Literal(text.to_owned()),
    };
    pattern.split('/').skip(1).map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::url_path::RequestPath;

    fn paths(patterns: &[&str]) -> Vec<String> {
        let parsed: Vec<_> = patterns.iter().map(|text| PathPattern::parse(text).unwrap()).collect();
        let found = sample_paths(&parsed.iter().collect::<Vec<_>>(), &[]);
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
    fn p17_many_patterns_stay_bounded_and_each_is_probed() {
        let texts: Vec<String> = (0..40).map(|at| format!("/**/a{at}/**/b{at}/*")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let found = paths(&texts);
        for text in &texts {
            let pattern = PathPattern::parse(text).unwrap();
            let tried = |path: &String| RequestPath::parse(path).is_ok_and(|path| pattern.matches(&path));
            assert!(found.iter().any(tried), "{text}");
        }
    }
}
