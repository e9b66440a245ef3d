//! Tests of the memory that a search takes, and of where it holds content back.

use std::sync::atomic::AtomicUsize;

use super::*;

pub(super) fn open_streams(scanner: &ContentScanner) -> usize {
    scanner.shared.open_streams.load(Ordering::Relaxed)
}

/// Makes the usual matchers, and reserves at most so many bytes.
struct Metered {
    set: Arc<PatternSet>,
    /// Bytes that are left, and the fewest that ever were.
    left: Arc<AtomicUsize>,
    fewest: Arc<AtomicUsize>,
}

struct MeteredMemory(Arc<AtomicUsize>, usize);

impl Drop for MeteredMemory {
    fn drop(&mut self) {
        self.0.fetch_add(self.1, Ordering::Relaxed);
    }
}

impl MatcherFactory for Metered {
    fn matchers(&self) -> Vec<BoxedMatcher> {
        vec![Box::new(SecretMatcher::new(self.set.clone()))]
    }

    fn reserve(&self, bytes: usize) -> Option<SearchMemory> {
        let left = self.left.load(Ordering::Relaxed).checked_sub(bytes)?;
        self.left.store(left, Ordering::Relaxed);
        self.fewest.fetch_min(left, Ordering::Relaxed);
        Some(Box::new(MeteredMemory(self.left.clone(), bytes)))
    }
}

/// Returns a scanner that may reserve `most` bytes, and how many it has left and had at least.
fn metered(most: usize) -> (ContentScanner, Arc<AtomicUsize>, Arc<AtomicUsize>) {
    let (left, fewest) = (Arc::new(AtomicUsize::new(most)), Arc::new(AtomicUsize::new(most)));
    let factory = Metered { set: known(), left: left.clone(), fewest: fewest.clone() };
    (ContentScanner::new(SignalPlace::Body, Arc::new(factory), ScanLimits::default()), left, fewest)
}

/// Gzip headers whose names end at the same place, where a block begins that never ends: each would be a stream.
fn stalled_streams() -> Vec<u8> {
    [&b"\x1f\x8b\x08\x08\x01\x01\x01\x01\x01\x01".repeat(MAX_GZIP_PARTS)[..], b"\0\0\xff\xff\0\0abc"].concat()
}

#[test]
fn p17_few_bytes_open_few_streams_and_the_rest_is_said() {
    const ALL: usize = 64 << 20;
    let streams = stalled_streams();
    let spaced: Vec<u8> =
        (0..40).flat_map(|_| [encode(Encoding::Base64, &gzip(b"", 0)), b" ".to_vec()].concat()).collect();
    let zlib: Vec<u8> = b"\x78\x9c\0\xff\xff\0\0abcdefghijk".to_vec();
    for (name, content, is_unsearched) in [
        ("at one place", [b".", &streams[..]].concat(), true),
        ("in base64", encode(Encoding::Base64, &[b".", &streams[..]].concat()), true),
        ("zlib around base64 around them", encode(Encoding::Base64, &[&zlib[..], &streams].concat()), true),
        ("one after the other", spaced, false),
        ("a stream in a stream", gzip(&gzip(b"nothing", 0), 0), false),
    ] {
        for piece in [1, 100, usize::MAX] {
            let (mut scanner, left, fewest) = metered(ALL);
            let mut signals = Vec::new();
            for piece in content.chunks(piece) {
                scanner.feed(piece, &mut signals);
                assert!(open_streams(&scanner) <= MAX_OPEN_STREAMS, "{name} by {piece:?}");
            }
            let streams = ALL - fewest.load(Ordering::Relaxed);
            let most = MAX_OPEN_STREAMS * STREAM_BYTES + MAX_OPEN_VIEWS * VIEW_BYTES;
            assert!(streams <= most, "{name}: {streams} bytes");
            scanner.finish(&mut signals);
            assert_eq!(open_streams(&scanner), 0, "{name}: all are closed at the end");
            let said = signals.iter().any(|signal| signal.code == SignalCode::ContentUnsearched);
            assert_eq!(said, is_unsearched, "{name} by {piece}: {signals:?}");
            drop(scanner);
            assert_eq!(left.load(Ordering::Relaxed), ALL, "{name}: all is given back");
        }
    }
}

#[test]
fn p17_what_there_is_no_memory_for_is_said_to_be_unsearched() {
    let (what, secret) = samples().swap_remove(2);
    let zipped = gzip(format!("key: {secret}\n").as_bytes(), 0);
    let encoded = encode(Encoding::Base64, format!("a key: {secret}\n").as_bytes());
    for (content, needed, encoding) in
        [(&zipped, STREAM_BYTES + VIEW_BYTES, Encoding::Gzip), (&encoded, VIEW_BYTES, Encoding::Base64)]
    {
        let (mut enough, ..) = metered(needed);
        assert!(finds(&scan(&mut enough, &[content]), what, &[encoding]), "{needed} bytes are enough");
        let (mut less, left, _) = metered(needed - 1);
        let mut signals = Vec::new();
        less.feed(content, &mut signals);
        less.finish(&mut signals);
        let codes: Vec<SignalCode> = signals.iter().map(|signal| signal.code).collect();
        assert_eq!(codes, [SignalCode::ContentUnsearched], "{encoding:?}");
        drop(less);
        assert_eq!(left.load(Ordering::Relaxed), needed - 1);
    }
}

/// Writes each byte of deflate in a block of its own, `between` empty blocks apart.
fn deflate_with_gaps(content: &[u8], between: usize) -> Vec<u8> {
    let mut stream = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
    for byte in content {
        stream.extend([0, 1, 0, 0xfe, 0xff, *byte]); // a stored block
        stream.extend(b"\0\0\0\xff\xff".repeat(between));
    }
    stream.extend([1, 0, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
    stream
}

/// The smallest number of raw bytes that must not have left: up to the first that depends on `secret`.
fn first_difference(one: &[u8], other: &[u8]) -> usize {
    one.iter().zip(other).position(|(one, other)| one != other).unwrap()
}

/// However far an encoding spreads a secret, what is held back begins where the secret does.
#[test]
fn nothing_of_a_secret_leaves_however_far_it_is_spread() {
    let gap = format!("\n{}", " ".repeat(15));
    let lines = |bytes: Vec<u8>, by: usize| {
        bytes.chunks(by).flat_map(|line| [line, gap.as_bytes()].concat()).collect::<Vec<u8>>()
    };
    let hex_lines = |text: &[u8], by: usize| {
        let all = encode(Encoding::Hex, text);
        let (head, rest) = all.split_at(64);
        [head, &lines(rest.to_vec(), by)].concat()
    };
    let base64_lines = |text: &[u8], by: usize| {
        let all = encode(Encoding::Base64, text);
        let (head, rest) = all.split_at(64);
        [head, &lines(rest.to_vec(), by)].concat()
    };
    let prose = "The quick brown fox jumps over the lazy dog again. ".repeat(6);
    type Spread<'a> = Box<dyn Fn(&[u8]) -> Vec<u8> + 'a>;
    let spreads: Vec<(&str, Spread<'_>)> = vec![
        ("hex, a digit in each line", Box::new(|text| hex_lines(text, 1))),
        ("hex, three digits in each line", Box::new(|text| hex_lines(text, 3))),
        ("base64, a character in each line", Box::new(|text| base64_lines(text, 1))),
        ("base64, five in each line", Box::new(|text| base64_lines(text, 5))),
        ("hex lines in hex", Box::new(|text| encode(Encoding::Hex, &hex_lines(text, 2)))),
        (
            "JSON escapes in HTML escapes",
            Box::new(|text| encode(Encoding::HtmlEscapes, &encode(Encoding::JsonEscapes, text))),
        ),
        ("gzip, blocks of one byte", Box::new(|text| deflate_with_gaps(text, 0))),
        ("gzip, twenty empty blocks between two bytes", Box::new(|text| deflate_with_gaps(text, 20))),
        (
            "a part that is gzip with gaps",
            Box::new(|text| [b"--b\r\n\r\n", &deflate_with_gaps(text, 5)[..]].concat()),
        ),
        ("gzip with gaps in base64", Box::new(|text| encode(Encoding::Base64, &deflate_with_gaps(text, 5)))),
    ];
    for (what, secret) in samples().into_iter().filter(|(what, _)| !what.starts_with("connection")).step_by(4)
    {
        for (name, spread) in &spreads {
            let content = spread(format!("{prose}{secret} and more").as_bytes());
            // What the same text without the secret has in common with it has nothing of the secret.
            let other: String = secret.chars().map(|_| '\u{1}').collect();
            let free = first_difference(&content, &spread(format!("{prose}{other} and more").as_bytes()));
            for piece in [1, 7, 1000] {
                let left = left_at_finding(&content, piece, UndecidedTail::Possible);
                assert!(
                    left.is_some_and(|left| left <= free),
                    "{what}: {name} by {piece}: {left:?} of {free}"
                );
            }
        }
    }
}

/// What is spread too far to hold back is not searched, and says so before anything of it has left.
#[test]
fn a_match_that_cannot_be_held_back_is_said_to_be_unsearched() {
    let (_, secret) = samples().swap_remove(2);
    for between in [2_000, 20_000] {
        let content = deflate_with_gaps(format!("a key: {secret}\n").as_bytes(), between);
        let free = first_difference(&content, &deflate_with_gaps(b"a key: \x01", between));
        for piece in [1000, 16 << 10] {
            let left = left_at_finding(&content, piece, UndecidedTail::Possible);
            assert!(left.is_some_and(|left| left <= free), "{between} by {piece}: {left:?} of {free}");
        }
    }
    // Honest content of every kind is far from it.
    for (name, content) in corpora::contents(400_000) {
        let mut scanner = scanner(SignalPlace::Body);
        for piece in content.chunks(1000) {
            scanner.feed(piece, &mut Vec::new());
            let held = scanner.undecided(UndecidedTail::Possible);
            assert!(held < MAX_UNDECIDED / 4, "{name}: {held}");
        }
    }
}
