//! Properties that hold for any input. Used by the fuzzers here and by a bounded run in `proxy/tests/fuzz.rs`.
#![allow(dead_code, reason = "each fuzz target uses one of these")]

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use proxy::chunks::ChunkValidator;
use proxy::scrub::{EchoPatterns, ResponseScrubber};
use proxy::{detect, head};
use rules::limits::TrafficLimits;

/// A request head is rejected, or has exactly one reading, also after it is rewritten for the origin server.
pub(super) fn head(data: &[u8]) {
    let limits = TrafficLimits::default();
    for cut in [data.len() / 3, data.len() / 2] {
        if head::find_end(&data[..cut], &limits).is_err() {
            assert!(head::find_end(data, &limits).is_err(), "more bytes made an invalid head valid");
        }
    }
    let Ok(Some(length)) = head::find_end(data, &limits) else { return };
    let text = &data[..length];
    assert!(text.ends_with(b"\r\n\r\n"));
    let bare = |pair: &[u8]| (pair[0] == b'\r') != (pair[1] == b'\n');
    assert!(!text.windows(2).any(bare), "a bare CR or LF");
    let Ok(read) = head::parse(text, &limits) else { return };
    assert!(read.method.bytes().all(|byte| byte.is_ascii_graphic()), "{read:?}");
    assert!(read.target.bytes().all(|byte| byte > b' ' && byte != 0x7f), "{read:?}");
    if read.is_absolute() {
        let mut bytes = BytesMut::from(data);
        read.to_origin_form(&mut bytes, length);
        let fresh = head::find_end(&bytes, &limits).ok().flatten().map(|end| {
            assert_eq!(bytes[end..], data[length..], "the body has changed");
            head::parse(&bytes[..end], &limits)
        });
        let Some(Ok(fresh)) = fresh else {
            panic!("the rewritten head cannot be parsed: {bytes:?}");
        };
        assert!(!fresh.is_absolute() && fresh.host() == read.host(), "{fresh:?}");
        assert_eq!((&fresh.method, fresh.body), (&read.method, read.body));
    }
}

/// A chunked body is read the same however it is split, and as [`parse_chunked`] reads it.
pub(super) fn chunks(data: &[u8]) {
    let mut whole = ChunkValidator::default();
    let judged = whole.validate(data);
    let mut cut = ChunkValidator::default();
    let at = data.first().map_or(0, |first| usize::from(*first) % data.len());
    let parts = data[..at].chunks(1).chain([&data[at..]]).map(|part| cut.validate(part));
    assert_eq!(parts.sum::<Result<usize, _>>(), judged);
    let done = judged.is_ok() && whole.is_done();
    assert_eq!(done, parse_chunked(data).is_some(), "{}", data.escape_ascii());
}

/// The credential of the scrubber check.
pub(super) const SECRET: &str = "sk-a/b+c=d9";

/// A response is masked the same however it is split, contains no echo afterwards, and keeps its length.
pub(super) fn scrub(data: &[u8]) {
    let echoes = Arc::new(EchoPatterns::new([("key", SECRET)]));
    let mut whole = data.to_vec();
    let found = echoes.mask(&mut whole);
    let size = data.first().map_or(1, |first| 1 + usize::from(*first) % 9);
    let mut scrubber = ResponseScrubber::new(echoes.clone());
    let parts = data.chunks(size).map(Bytes::copy_from_slice);
    let mut out: Vec<u8> = parts.flat_map(|part| scrubber.scrub(Some(&part), false)).collect();
    out.extend(scrubber.scrub(None, true));
    assert_eq!((scrubber.echo_count() > 0, &out), (found > 0, &whole), "{}", data.escape_ascii());
    let kept = |(one, other): (&u8, &u8)| one == other || *one == b'*';
    assert!(whole.iter().zip(data).all(kept), "{}", data.escape_ascii());
    assert_eq!(echoes.mask(&mut whole), 0, "{}", data.escape_ascii());
}

/// A second implementation of RFC 9112, section 7.1, line by line; `None` for an incomplete or invalid body.
fn parse_chunked(mut data: &[u8]) -> Option<()> {
    loop {
        let line = take_line(&mut data)?;
        let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        let (digits, spare) = line.split_at(digits);
        if digits.is_empty() || digits.len() > 15 || spare.len() > 4097 {
            return None;
        }
        if !matches!(spare.first(), None | Some(b';' | b' ' | b'\t')) {
            return None;
        }
        let size = usize::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?;
        if size == 0 {
            break;
        }
        data = data.get(size..)?.strip_prefix(b"\r\n")?;
    }
    take_line(&mut data).filter(|line| line.is_empty()).map(drop)
}

fn take_line<'a>(data: &mut &'a [u8]) -> Option<&'a [u8]> {
    let end = data.windows(2).position(|pair| pair == b"\r\n")?;
    let (line, rest) = data.split_at(end);
    *data = rest.get(2..)?;
    let plain = |byte: &u8| *byte == b'\t' || (*byte >= b' ' && *byte != 0x7f);
    line.iter().all(plain).then_some(line)
}

/// A detected protocol does not change when more bytes arrive. For TLS, checks only that nothing panics.
pub(super) fn first_bytes(data: &[u8]) {
    let limits = TrafficLimits::default();
    let whole = detect::protocol_name(data, &limits);
    for cut in [1, data.len() / 2, data.len().saturating_sub(1)] {
        let part = data.get(..cut).unwrap_or(data);
        match detect::protocol_name(part, &limits) {
            _ if data.first() == Some(&22) => {}
            Ok("more") => {}
            Ok(kind) => assert_eq!(whole, Ok(kind), "{}", data.escape_ascii()),
            Err(_) => assert!(whole.is_err(), "{}", data.escape_ascii()),
        }
    }
}
