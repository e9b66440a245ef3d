//! List files: one host pattern per line, comments after `#`, up to millions of lines.

use memchr::{memchr, memchr_iter};

use super::problem::{ProblemKind, Problems, SourceText};
use crate::host_set::{HostSet, PatternOrigin};
use crate::pattern::{PatternReach, PatternWidth, RawPattern};

/// Largest list file, in bytes.
pub const MAX_LIST: usize = 256 << 20;

/// What a rule accepts from its list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PatternTerms {
    pub(crate) rule: u16,
    pub(crate) width: PatternWidth,
    /// Whether the rule is for raw TCP, which takes exact names and the rule's own ports.
    pub(crate) exact_only: bool,
}

/// Adds every pattern of a list to `hosts`, and reports the invalid ones.
pub(crate) fn add_list(
    source: &SourceText<'_>,
    terms: PatternTerms,
    hosts: &mut HostSet,
    problems: &mut Problems,
) {
    let ends = || memchr_iter(b'\n', source.text.as_bytes());
    hosts.reserve(ends().count(), source.text.len());
    let mut start = 0;
    for (at, end) in ends().chain([source.text.len()]).enumerate() {
        let line = source.text.get(start..end).unwrap_or_default();
        let entry = strip_comment(line);
        if !entry.is_empty() {
            match parse_entry(entry, terms)
                .and_then(|raw| Ok(hosts.insert_raw(&raw, terms.rule, at as u32 + 1, PatternOrigin::List)?))
            {
                Ok(()) => {}
                Err(fault) => problems.error(source.location(entry_span(line, entry, start)), fault),
            }
            if problems.is_full() {
                break;
            }
        }
        start = end + 1;
    }
}

/// Returns the pattern of a line, which is empty for a blank line or a comment.
fn strip_comment(line: &str) -> &str {
    let entry = match memchr(b'#', line.as_bytes()) {
        Some(comment) => line.get(..comment).unwrap_or_default(),
        None => line,
    };
    // Some editors write a byte-order mark before the first line.
    entry.trim_start_matches('\u{feff}').trim()
}

fn parse_entry(entry: &str, terms: PatternTerms) -> Result<RawPattern<'_>, ProblemKind> {
    let raw = RawPattern::parse(entry, terms.width)
        .map_err(|source| ProblemKind::Host { entry: super::problem::printable(entry), source })?;
    if terms.exact_only && (raw.reach != PatternReach::Exact || raw.port.is_some()) {
        return Err(ProblemKind::Missing(
            "a raw TCP rule takes exact names without a port; list its ports in `tcp`",
        ));
    }
    Ok(raw)
}

fn entry_span(line: &str, entry: &str, offset: usize) -> std::ops::Range<usize> {
    let start = offset + line.find(entry).unwrap_or(0);
    start..start + entry.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::DomainName;

    #[test]
    fn lists_have_one_pattern_per_line_and_comments() {
        let text = "# mirrors\n\n  a.example  # the first\r\n*.b.example\n.c.example:8443\nA.example\n";
        let (mut hosts, mut problems) = (HostSet::default(), Problems::default());
        let source = SourceText::new("l.txt", text);
        let terms = PatternTerms { rule: 3, width: PatternWidth::Narrow, exact_only: false };
        add_list(&source, terms, &mut hosts, &mut problems);
        assert_eq!((hosts.len(), &problems.errors[..]), (3, &[][..]));
        let lines = |name: &str| {
            hosts.hits(&DomainName::parse(name).unwrap()).map(|hit| hit.line).collect::<Vec<_>>()
        };
        assert_eq!(
            (lines("a.example"), lines("x.b.example"), lines("c.example")),
            (vec![3], vec![4], vec![5])
        );
    }

    #[test]
    fn invalid_lines_are_reported_with_line_and_column() {
        let text = "good.example\n  b*d.example\n*.com\nhttps://x.example/\na b\n\u{202e}evil\n";
        let (mut hosts, mut problems) = (HostSet::default(), Problems::default());
        let source = SourceText::new("l.txt", text);
        add_list(
            &source,
            PatternTerms { rule: 0, width: PatternWidth::Narrow, exact_only: false },
            &mut hosts,
            &mut problems,
        );
        let at: Vec<_> = problems.errors.iter().map(|p| (p.at.line, p.at.column, p.at.width)).collect();
        assert_eq!(at, [(2, 3, 11), (3, 1, 5), (4, 1, 18), (5, 1, 3), (6, 1, 5)]);
        assert!(!problems.errors[4].to_string().contains('\u{202e}'));
    }
}
