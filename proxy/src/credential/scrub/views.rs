//! Readings of a text in which an echo stands as it was before it was spelled: without escapes and blanks, without the
//! zeros of wide characters, with one separator between numbers. Each octet of a view knows what it stands for.

use super::escapes::{Escape, EscapeFamilies, match_escape};

/// Longest run of blanks, separators or empty lines within an echo.
pub(super) const MAX_BLANKS: usize = 64;
/// Zeros between two characters of UTF-32.
const MAX_ZEROS: usize = 3;
/// Stands where no echo goes on: credentials and their forms are ASCII.
const BARRIER: u8 = 0xff;

/// Whether more text may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    Begun,
    Whole,
}

/// One reading of a text.
#[derive(Debug, Default)]
pub(super) struct View {
    pub(super) text: Vec<u8>,
    /// What each octet of the view stands for: the start and the end in the text.
    spans: Vec<(u32, u32)>,
    /// Where an escape begins that the end of the text cuts off.
    pub(super) open: Option<usize>,
    /// Parts of the text longer than one octet that were read as one.
    tokens: Vec<(u32, u32)>,
}

impl View {
    /// Reads `source` without the escapes of `families`, without blanks, and without the line ends of folded text.
    /// An empty line is a barrier.
    pub(super) fn unescaped(source: &[u8], families: EscapeFamilies, extent: Extent) -> Self {
        View::decode(source, families, extent, |from, to| (from as u32, to as u32))
    }

    /// Reads this view once more without escapes.
    pub(super) fn unescape_again(&self, families: EscapeFamilies, extent: Extent) -> Self {
        let place = |from: usize, to: usize| {
            let start = self.spans.get(from).map_or(0, |span| span.0);
            let end = self.spans.get(to.saturating_sub(1)).map_or(start, |span| span.1);
            (start, end)
        };
        let mut view = View::decode(&self.text, families, extent, place);
        view.open = view.open.map(|open| self.source_start(open)).or(self.open);
        view
    }

    fn decode(
        source: &[u8],
        families: EscapeFamilies,
        extent: Extent,
        place: impl Fn(usize, usize) -> (u32, u32),
    ) -> Self {
        let mut view = View::default();
        view.text.reserve(source.len());
        view.spans.reserve(source.len());
        let mut blanks = BlankRun::default();
        let mut at = 0;
        loop {
            let rest = source.get(at..).unwrap_or_default();
            let plain = rest.iter().take_while(|octet| !is_special(**octet)).count();
            if plain > 0 {
                blanks = BlankRun::default();
                view.text.extend_from_slice(rest.get(..plain).unwrap_or_default());
                view.spans.extend((at..at + plain).map(|at| place(at, at + 1)));
                at += plain;
            }
            let Some(octet) = source.get(at) else { break };
            let escape = match octet {
                b' ' | b'\t' | b'\r' | b'\n' => Escape::Blank(1),
                b'%' | b'\\' | b'&' | b'=' => {
                    escape_within(source.get(at..).unwrap_or_default(), families, extent)
                }
                _ => Escape::None,
            };
            let (length, meant) = match escape {
                Escape::None => (1, Some(*octet)),
                Escape::Octet(length, meant) => (length, Some(meant)),
                Escape::Blank(length) => (length, None),
                Escape::Unfinished => {
                    view.open = Some(at);
                    break;
                }
            };
            if length > 1 {
                view.tokens.push(place(at, at + length));
            }
            match meant {
                Some(meant) => {
                    blanks = BlankRun::default();
                    view.push(meant, place(at, at + length));
                }
                None if blanks.add(*octet, length) => view.push(BARRIER, place(at, at + length)),
                None => {}
            }
            at += length;
        }
        view
    }

    /// Reads `source` without zero octets, as UTF-16 and UTF-32 have them.
    pub(super) fn narrowed(source: &[u8]) -> Self {
        let mut view = View::default();
        let mut zeros = 0;
        for (at, octet) in source.iter().enumerate() {
            zeros = if *octet == 0 { zeros + 1 } else { 0 };
            if *octet != 0 || zeros == MAX_ZEROS + 1 {
                view.push(*octet, (at as u32, at as u32 + 1));
            }
        }
        view
    }

    /// Reads `source` with one comma for each run of separators.
    pub(super) fn separated(source: &[u8]) -> Self {
        let mut view = View::default();
        let mut run = 0;
        for (at, octet) in source.iter().enumerate() {
            let span = (at as u32, at as u32 + 1);
            run = if is_separator(*octet) { run + 1 } else { 0 };
            match run {
                0 => view.push(*octet, span),
                1 => view.push(b',', span),
                _ if run == MAX_BLANKS => view.push(BARRIER, span),
                _ => {}
            }
        }
        view
    }

    fn push(&mut self, octet: u8, span: (u32, u32)) {
        self.text.push(octet);
        self.spans.push(span);
    }

    /// Where in the text an octet of the view begins.
    pub(super) fn source_start(&self, at: usize) -> usize {
        self.spans.get(at).map_or(0, |span| span.0 as usize)
    }

    /// Where in the text an octet of the view ends.
    pub(super) fn source_end(&self, at: usize) -> usize {
        self.spans.get(at).map_or(0, |span| span.1 as usize)
    }

    /// Whether the view has escapes that may spell something else once more.
    pub(super) fn has_escapes(&self) -> bool {
        !self.tokens.is_empty()
            && self.text.iter().any(|octet| EscapeFamilies::of(*octet) != EscapeFamilies::NONE)
    }

    /// Returns the start of what was read as one around `at`.
    pub(super) fn token_start(&self, at: usize) -> usize {
        let after = self.tokens.partition_point(|token| (token.0 as usize) < at);
        let before = after.checked_sub(1).and_then(|last| self.tokens.get(last));
        match before {
            Some((start, end)) if at < *end as usize => *start as usize,
            Some(_) | None => at,
        }
    }
}

/// Whether an octet is a blank or starts an escape.
fn is_special(octet: u8) -> bool {
    matches!(octet, b' ' | b'\t' | b'\r' | b'\n' | b'%' | b'\\' | b'&' | b'=')
}

/// Returns the escape that `text` starts with. One that the end of the text cuts off is whole if nothing follows.
fn escape_within(text: &[u8], families: EscapeFamilies, extent: Extent) -> Escape {
    match match_escape(text, families) {
        Escape::Unfinished if extent == Extent::Whole => {
            let mut ended = text.to_vec(); // shorter than `MAX_ESCAPE`
            ended.push(BARRIER);
            match match_escape(&ended, families) {
                escape @ (Escape::Octet(length, _) | Escape::Blank(length)) if length <= text.len() => escape,
                Escape::Octet(..) | Escape::Blank(_) | Escape::None | Escape::Unfinished => Escape::None,
            }
        }
        escape => escape,
    }
}

/// A run of blanks that may lie within folded text.
#[derive(Default)]
struct BlankRun {
    length: usize,
    lines: usize,
    barred: bool,
}

impl BlankRun {
    /// Adds a blank; returns whether the run became a barrier with it.
    fn add(&mut self, octet: u8, length: usize) -> bool {
        self.length += length;
        self.lines += usize::from(octet == b'\n');
        let bars = !self.barred && (self.lines > 1 || self.length > MAX_BLANKS);
        self.barred |= bars;
        bars
    }
}

/// Whether an octet separates numbers in a list of octets.
pub(super) fn is_separator(octet: u8) -> bool {
    matches!(octet, b' ' | b',' | b':' | b';' | b'-' | b'|' | b'\t' | b'\r' | b'\n')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(view: &View) -> String {
        String::from_utf8_lossy(&view.text).into_owned()
    }

    #[test]
    fn a_view_is_read_once_or_twice() {
        for (source, once, twice) in [
            ("a%252Fb", "a%2Fb", "a/b"),
            (r"a\\/b", r"a\/b", "a/b"),
            (r"a\\u002fb", r"a\u002fb", "a/b"),
            ("a&amp;#47;b", "a&#47;b", "a/b"),
            ("a=\r\nb c\r\n d", "abcd", "abcd"),
            (r"a\nb", "ab", "ab"),
            ("a\n\nb", "a\u{fffd}b", "a\u{fffd}b"),
            ("a&#47", "a/", "a/"),
        ] {
            let view = View::unescaped(source.as_bytes(), EscapeFamilies::ALL, Extent::Whole);
            assert_eq!(text(&view), once, "{source:?}");
            assert_eq!(text(&view.unescape_again(EscapeFamilies::ALL, Extent::Whole)), twice, "{source:?}");
        }
    }

    #[test]
    fn an_octet_knows_what_it_stands_for() {
        let view = View::unescaped(b"x%252Fy", EscapeFamilies::ALL, Extent::Whole);
        let view = view.unescape_again(EscapeFamilies::ALL, Extent::Whole);
        assert_eq!(text(&view), "x/y");
        assert_eq!((view.source_start(1), view.source_end(1)), (1, 6));
        assert_eq!((view.token_start(3), view.token_start(6)), (1, 6));
    }

    #[test]
    fn numbers_and_wide_characters_lie_side_by_side() {
        assert_eq!(text(&View::separated(b"[115, 107,\n  45]")), "[115,107,45]");
        assert_eq!(text(&View::separated(b"73:6b 2d")), "73,6b,2d");
        assert_eq!(text(&View::narrowed(b"s\0k\0-\0\0\0\0x")), "sk-\0x");
    }
}
