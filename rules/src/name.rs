//! `DomainName`: the one normal form of a host name, for policy text, Host, SNI, CONNECT, SOCKS and DNS. No other
//! code compares host strings, so a name has one meaning everywhere (P6).

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use idna::uts46::{AsciiDenyList, DnsLength, Hyphens, Uts46};

/// Longest name in text form without the trailing dot (RFC 1035, 2.3.4: 255 octets on the wire).
pub const MAX_NAME: usize = 253;
/// Longest label (RFC 1035, 2.3.4).
pub const MAX_LABEL: usize = 63;

/// A host name: lower-case A-labels, no trailing dot, letters, digits and hyphens only.
///
/// A name from a DNS question may also have labels that begin with `_`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DomainName(Arc<str>);

/// Why a text is not a host name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("it is an address, or some programs read it as one; list addresses under `addresses`")]
    Address,
    #[error("{} is not allowed in a host name", describe_character(*.0))]
    Character(char),
    #[error("it is empty")]
    Empty,
    #[error("it has an empty label (two dots in a row, or an extra dot at either end)")]
    EmptyLabel,
    #[error("one of its labels begins or ends with a hyphen")]
    Hyphen,
    #[error("it is not a valid internationalized name (UTS-46)")]
    International,
    #[error("one of its labels is longer than 63 octets")]
    LabelTooLong,
    #[error("it is not ASCII; an internationalized name is sent as A-labels (`xn--...`)")]
    NotAscii,
    #[error("it has characters that normalise to others; write the normalised form")]
    NotNormal,
    #[error("it is longer than 253 octets")]
    TooLong,
}

/// The source of a name, which determines whether a label may begin with `_`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NameUse {
    Host,
    Question,
}

impl DomainName {
    /// Parses `text` as people write it, in a policy or a command: a Unicode name becomes A-labels. [`Host::parse`] is
    /// for names that arrive in traffic.
    ///
    /// # Errors
    ///
    /// Returns [`NameError`], also for an address: rules match addresses by network, not by name.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        normalise(text, NameUse::Host).map(Self::from_normal)
    }

    /// Builds the name of a DNS question from its labels, without the root label.
    ///
    /// # Errors
    ///
    /// As [`DomainName::parse`], but a label may begin with `_` and must not contain a dot.
    pub fn from_labels<'a>(labels: impl IntoIterator<Item = &'a [u8]>) -> Result<Self, NameError> {
        let mut text = String::new();
        for label in labels {
            let label = parse_wire_label(label)?;
            match label {
                "" => return Err(NameError::EmptyLabel),
                dotted if dotted.contains('.') => return Err(NameError::Character('.')),
                _ => {}
            }
            if !text.is_empty() {
                text.push('.');
            }
            text.push_str(label);
        }
        Self::parse_question(&text)
    }

    /// Parses the name of a DNS question in text form; a label may begin with `_`.
    ///
    /// # Errors
    ///
    /// As [`DomainName::parse`].
    pub fn parse_question(text: &str) -> Result<Self, NameError> {
        normalise(text, NameUse::Question).map(Self::from_normal)
    }

    fn from_normal(text: Cow<'_, str>) -> Self {
        DomainName(Arc::from(text.as_ref()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the name and its parents, longest first: `a.b.c`, `b.c`, `c`.
    pub fn suffixes(&self) -> impl Iterator<Item = &str> {
        std::iter::successors(Some(self.as_str()), |name| name.split_once('.').map(|(_, rest)| rest))
    }

    /// Returns whether this name is `parent` or below it.
    pub fn is_within(&self, parent: &str) -> bool {
        self.suffixes().any(|suffix| suffix == parent)
    }
}

impl fmt::Display for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

fn parse_wire_label(bytes: &[u8]) -> Result<&str, NameError> {
    let text = str::from_utf8(bytes).ok().filter(|text| text.is_ascii());
    text.ok_or(NameError::Character(char::REPLACEMENT_CHARACTER))
}

/// Normalises a host name; does not allocate if it is already normal.
pub(crate) fn normalise_host(text: &str) -> Result<Cow<'_, str>, NameError> {
    normalise(text, NameUse::Host)
}

fn normalise(text: &str, source: NameUse) -> Result<Cow<'_, str>, NameError> {
    if is_normal_form(text) {
        return Ok(Cow::Borrowed(text));
    }
    let text = text.strip_suffix('.').unwrap_or(text);
    if text.is_empty() {
        return Err(NameError::Empty);
    }
    let name = if text.is_ascii() { lowercase_ascii(text) } else { Cow::Owned(map_international(text)?) };
    check_name(&name, source)?;
    if has_punycode(&name) {
        check_punycode(&name)?;
    }
    Ok(name)
}

/// Returns whether a text is certainly a name in normal form, in one pass, for lists of a million lines.
///
/// A text it rejects is not invalid: the full checks then decide.
pub(crate) fn is_normal_form(text: &str) -> bool {
    let mut label = 0;
    let mut previous = b'.';
    for byte in text.bytes() {
        match byte {
            b'x' if previous == b'0' => return false, // may be a hexadecimal number
            b'a'..=b'z' | b'0'..=b'9' => label += 1,
            b'-' if label != 0 && previous != b'-' => label += 1, // two in a row may be punycode
            b'.' if label != 0 && previous != b'-' => label = 0,
            _ => return false,
        }
        if label > MAX_LABEL {
            return false;
        }
        previous = byte;
    }
    previous.is_ascii_lowercase() && text.len() <= MAX_NAME // a final letter: not a number
}

fn lowercase_ascii(text: &str) -> Cow<'_, str> {
    if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Cow::Owned(text.to_ascii_lowercase());
    }
    Cow::Borrowed(text)
}

/// Maps a name with non-ASCII labels by UTS-46, but accepts only the lower-case normal form: with full-width letters,
/// soft hyphens and other dots one host would have many spellings.
fn map_international(text: &str) -> Result<String, NameError> {
    if let Some(dot) = text.chars().find(|c| matches!(c, '\u{3002}' | '\u{ff0e}' | '\u{ff61}')) {
        return Err(NameError::Character(dot));
    }
    let mapped = to_ascii(text)?.into_owned();
    let (unicode, valid) = Uts46::new().to_unicode(mapped.as_bytes(), AsciiDenyList::EMPTY, Hyphens::Allow);
    match valid {
        Ok(()) if unicode == text.to_lowercase() => Ok(mapped),
        _ => Err(NameError::NotNormal),
    }
}

/// Checks that each A-label is the one its U-label maps to; otherwise two spellings would name one host.
fn check_punycode(name: &str) -> Result<(), NameError> {
    let bare: Vec<&str> = name.split('.').map(|label| label.strip_prefix('_').unwrap_or(label)).collect();
    let bare = bare.join(".");
    match to_ascii(&bare)? {
        same if same == bare => Ok(()),
        _ => Err(NameError::International),
    }
}

fn to_ascii(text: &str) -> Result<Cow<'_, str>, NameError> {
    Uts46::new()
        .to_ascii(text.as_bytes(), AsciiDenyList::EMPTY, Hyphens::Allow, DnsLength::Ignore)
        .map_err(|_| NameError::International)
}

fn has_punycode(name: &str) -> bool {
    name.split('.').any(|label| label.trim_start_matches('_').starts_with("xn--"))
}

fn check_name(name: &str, source: NameUse) -> Result<(), NameError> {
    let mut last = "";
    for label in name.split('.') {
        check_label(label, source)?;
        last = label;
    }
    if name.len() > MAX_NAME {
        return Err(NameError::TooLong);
    }
    // As in browsers (WHATWG URL, host parsing), a name whose last label is a number is an IPv4 address.
    if is_number(last) { Err(NameError::Address) } else { Ok(()) }
}

fn check_label(label: &str, source: NameUse) -> Result<(), NameError> {
    let letters = match source {
        NameUse::Host => label,
        NameUse::Question => label.strip_prefix('_').unwrap_or(label),
    };
    if let Some(bad) = letters.chars().find(|c| !matches!(c, 'a'..='z' | '0'..='9' | '-')) {
        return Err(NameError::Character(bad));
    }
    match label.len() {
        0 => Err(NameError::EmptyLabel),
        1..=MAX_LABEL if letters.starts_with('-') || letters.ends_with('-') => Err(NameError::Hyphen),
        1..=MAX_LABEL => Ok(()),
        _ => Err(NameError::LabelTooLong),
    }
}

fn is_number(label: &str) -> bool {
    let decimal = !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_digit());
    let hex = label.strip_prefix("0x").is_some_and(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()));
    decimal || hex
}

fn describe_character(character: char) -> String {
    match character {
        '.' => "a dot inside a label".to_owned(),
        ' '..='~' => format!("`{character}`"),
        other => format!("U+{:04X}", u32::from(other)),
    }
}

/// The host of an attempt: a name or a literal IP address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Host {
    Address(IpAddr),
    Name(DomainName),
}

impl Host {
    /// Parses the host of an attempt, from `Host`, `:authority`, SNI, CONNECT or SOCKS: a name, a dotted IPv4 address or
    /// a bracketed IPv6 address. Names in traffic are ASCII: what a client would map to A-labels, two clients may map
    /// differently.
    ///
    /// # Errors
    ///
    /// Returns [`NameError`] for anything else, such as Unicode names, zone ids, bracketed names, and short or hex
    /// addresses.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        if text.is_ascii() { Self::parse_written(text) } else { Err(NameError::NotAscii) }
    }

    /// The same for text that people write: a Unicode name becomes A-labels.
    ///
    /// # Errors
    ///
    /// As [`Host::parse`].
    pub fn parse_written(text: &str) -> Result<Self, NameError> {
        if let Some(inside) = text.strip_prefix('[') {
            let address = inside.strip_suffix(']').and_then(|text| text.parse::<Ipv6Addr>().ok());
            return address.map(|address| Host::from(IpAddr::V6(address))).ok_or(NameError::Character('['));
        }
        match text.parse::<Ipv4Addr>() {
            Ok(address) => Ok(Host::Address(IpAddr::V4(address))),
            Err(_) => DomainName::parse(text).map(Host::Name),
        }
    }

    pub fn name(&self) -> Option<&DomainName> {
        match self {
            Host::Address(_) => None,
            Host::Name(name) => Some(name),
        }
    }
}

/// An IPv4-mapped IPv6 address becomes the IPv4 address.
impl From<IpAddr> for Host {
    fn from(address: IpAddr) -> Self {
        Host::Address(address.to_canonical())
    }
}

impl From<DomainName> for Host {
    fn from(name: DomainName) -> Self {
        Host::Name(name)
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Address(IpAddr::V4(address)) => write!(f, "{address}"),
            Host::Address(IpAddr::V6(address)) => write!(f, "[{address}]"),
            Host::Name(name) => write!(f, "{name}"),
        }
    }
}

/// Splits `host:port` of CONNECT, `Host` and policies; a colon inside brackets belongs to the address.
///
/// # Errors
///
/// Returns [`NameError::Character`] for a port that is not a number from 1 to 65535.
pub fn split_port(text: &str) -> Result<(&str, Option<u16>), NameError> {
    match text.rsplit_once(':') {
        Some((host, _)) if host.starts_with('[') && !host.ends_with(']') => Ok((text, None)),
        None => Ok((text, None)),
        Some((host, digits)) => match parse_port(digits) {
            Some(port) => Ok((host, Some(port))),
            None => Err(NameError::Character(':')),
        },
    }
}

/// Parses a port of digits only; Rust's parser would accept `+443`.
fn parse_port(digits: &str) -> Option<u16> {
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0');
    digits.parse().ok().filter(|port| plain && *port != 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_error_shows_the_character() {
        for (text, shown) in
            [("a b.example", "` `"), ("a\u{7f}.example", "U+007F"), ("a\u{3002}example", "U+3002")]
        {
            let error = DomainName::parse(text).unwrap_err().to_string();
            assert!(error.contains(shown), "{text:?}: {error}");
        }
    }

    #[test]
    fn p6_one_host_has_one_form() {
        for (text, normal) in [
            ("api.example.com", "api.example.com"),
            ("API.Example.COM", "api.example.com"),
            ("api.example.com.", "api.example.com"),
            ("localhost", "localhost"),
            ("bücher.example", "xn--bcher-kva.example"),
            ("BÜCHER.example", "xn--bcher-kva.example"),
            ("xn--bcher-kva.example", "xn--bcher-kva.example"),
            ("XN--BCHER-KVA.example.", "xn--bcher-kva.example"),
            ("faß.example", "xn--fa-hia.example"),
            ("r3---sn-4g5e.video.example", "r3---sn-4g5e.video.example"),
            ("1password.com", "1password.com"),
            ("1.2.3.4.in-addr.arpa", "1.2.3.4.in-addr.arpa"),
            ("0xff.example", "0xff.example"),
        ] {
            assert_eq!(DomainName::parse(text).as_ref().map(DomainName::as_str), Ok(normal), "{text:?}");
        }
    }

    #[test]
    fn p6_tricks_are_refused() {
        use NameError::*;
        for (text, why) in [
            ("", Empty),
            (".", Empty),
            ("..", EmptyLabel),
            ("a..b", EmptyLabel),
            (".example.com", EmptyLabel),
            ("example.com..", EmptyLabel),
            ("attacker\0.allowed.com", Character('\0')),
            ("attacker.com\0", Character('\0')),
            ("allowed.com%00", Character('%')),
            ("allowed%2ecom", Character('%')),
            ("allowed.com\r\n", Character('\r')),
            ("allowed.com\t", Character('\t')),
            (" allowed.com", Character(' ')),
            ("user@allowed.com", Character('@')),
            ("evil.com#allowed.com", Character('#')),
            ("evil.com\\allowed.com", Character('\\')),
            ("evil.com;allowed.com", Character(';')),
            ("evil.com/allowed.com", Character('/')),
            ("evil.com?allowed.com", Character('?')),
            ("[example.com]", Character('[')),
            ("[[example.com]]", Character('[')),
            ("*.example.com", Character('*')),
            ("example.com:443", Character(':')),
            ("::1", Character(':')),
            ("::1%25eth0", Character(':')),
            ("fe80::1%eth0", Character(':')),
            ("_dmarc.example.com", Character('_')),
            ("a_b.example.com", Character('_')),
            ("127.0.0.1", Address),
            ("127.0.0.1.", Address),
            ("127.1", Address),
            ("2130706433", Address),
            ("0177.0.0.1", Address),
            ("0x7f.1", Address),
            ("0x7f000001", Address),
            ("1.2.3.0x", Address),
            ("1.2.3.0XFF", Address),
            ("example.123", Address),
            ("-a.example", Hyphen),
            ("a-.example", Hyphen),
            ("example。com", Character('\u{3002}')),
            ("example．com", Character('\u{ff0e}')),
            ("example｡com", Character('\u{ff61}')),
            ("ｅxample.com", NotNormal),
            ("exa\u{ad}mple.com", NotNormal),
            ("exam\u{200d}ple.com", International),
            ("ⓔxample.com", NotNormal),
            ("１２７.0.0.1", NotNormal),
            ("ｘn--bcher-kva.example", NotNormal),
            ("bücher\u{ad}.example", NotNormal),
            ("bu\u{308}cher.example", NotNormal),
            ("xn--.example", Hyphen),
            ("xn--a.example", International),
            ("xn--example-.com", Hyphen),
            ("xn--99999999.example", International),
        ] {
            assert_eq!(DomainName::parse(text), Err(why), "{text:?}");
        }
    }

    #[test]
    fn lengths_are_those_of_the_wire() {
        let label = "a".repeat(63);
        let longest = format!("{label}.{label}.{label}.{}", "a".repeat(61));
        assert_eq!(longest.len(), MAX_NAME);
        assert!(DomainName::parse(&longest).is_ok());
        assert!(DomainName::parse(&format!("{longest}.")).is_ok());
        assert_eq!(DomainName::parse(&format!("{longest}a")), Err(NameError::TooLong));
        assert_eq!(DomainName::parse(&format!("{label}a.example")), Err(NameError::LabelTooLong));
        assert!(DomainName::parse(&"ü".repeat(60)).is_err(), "the A-label counts");
    }

    #[test]
    fn questions_may_have_underscores_at_the_front_of_a_label() {
        for (labels, normal) in [
            (&[&b"_443"[..], b"_tcp", b"Example", b"com"][..], Ok("_443._tcp.example.com")),
            (&[b"a_b", b"example"], Err(NameError::Character('_'))),
            (&[b"__a", b"example"], Err(NameError::Character('_'))),
            (&[b"foo.example", b"com"], Err(NameError::Character('.'))),
            (&[b"foo", b""], Err(NameError::EmptyLabel)),
            (&[b"\xff\xfe", b"com"], Err(NameError::Character('\u{fffd}'))),
            (&["bücher".as_bytes(), b"example"], Err(NameError::Character('\u{fffd}'))),
            (&[b"+/", b"com"], Err(NameError::Character('+'))),
            (&[b"_xn--bcher-kva", b"example"], Ok("_xn--bcher-kva.example")),
            (&[], Err(NameError::Empty)),
        ] {
            let found = DomainName::from_labels(labels.iter().copied());
            assert_eq!(found.as_ref().map(DomainName::as_str), normal.as_ref().copied(), "{labels:?}");
        }
    }

    #[test]
    fn a_host_in_traffic_is_ascii() {
        for (text, sent, written) in [
            ("xn--bcher-kva.example", true, true),
            ("bücher.example", false, true),
            ("BÜCHER.example", false, true),
            ("b\u{fc}cher.example.", false, true),
            ("bu\u{308}cher.example", false, false),
            ("ｅxample.com", false, false),
            ("a。example", false, false),
            ("\u{fffd}.example", false, false),
        ] {
            assert_eq!(Host::parse(text).is_ok(), sent, "{text:?}");
            assert_eq!(Host::parse_written(text).is_ok(), written, "{text:?}");
            let same =
                Host::parse_written(text).is_ok_and(|host| host.to_string() == "xn--bcher-kva.example");
            assert_eq!(same, written, "{text:?}");
        }
    }

    #[test]
    fn hosts_are_names_or_addresses_and_nothing_between() {
        for (text, shown) in [
            ("10.0.0.1", Some("10.0.0.1")),
            ("[2001:db8::1]", Some("[2001:db8::1]")),
            ("[::ffff:10.0.0.1]", Some("10.0.0.1")),
            ("[::ffff:a00:1]", Some("10.0.0.1")),
            ("Example.com", Some("example.com")),
            ("[10.0.0.1]", None),
            ("[::1%eth0]", None),
            ("[::1", None),
            ("::1", None),
            ("010.0.0.1", None),
            ("10.0.0.1.", None),
        ] {
            assert_eq!(Host::parse(text).ok().map(|host| host.to_string()).as_deref(), shown, "{text:?}");
        }
    }

    #[test]
    fn ports_are_split_off_once() {
        for (text, split) in [
            ("a.example:443", Some(("a.example", Some(443)))),
            ("a.example", Some(("a.example", None))),
            ("[::1]:8443", Some(("[::1]", Some(8443)))),
            ("[::1]", Some(("[::1]", None))),
            ("a.example:", None),
            ("a.example:0", None),
            ("a.example:+1", None),
            ("a.example:0443", None),
            ("a.example:65536", None),
        ] {
            assert_eq!(split_port(text).ok(), split, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn normalisation_is_idempotent(text in "\\PC{0,40}|[a-zA-Z0-9.ü-]{1,30}|(xn--)?[a-z0-9-]{1,12}\\.[a-z]{1,6}") {
            if let Ok(name) = DomainName::parse(&text) {
                prop_assert_eq!(DomainName::parse(name.as_str()), Ok(name.clone()));
                prop_assert_eq!(DomainName::parse(&format!("{name}.")), Ok(name.clone()));
                prop_assert_eq!(DomainName::parse(&name.as_str().to_ascii_uppercase()), Ok(name.clone()));
                prop_assert_eq!(DomainName::parse_question(name.as_str()), Ok(name.clone()));
                prop_assert!(name.as_str().bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.')));
            }
        }

        #[test]
        fn the_fast_check_agrees_with_the_full_one(text in "[a-c0x.-]{1,20}|[a-z0-9-]{1,70}\\.[a-z0-9]{1,4}|(xn--)?[a-z.]{1,9}") {
            if is_normal_form(&text) {
                prop_assert!(check_name(&text, NameUse::Host).is_ok() && !has_punycode(&text), "{}", text);
            }
        }

        #[test]
        fn wire_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            drop(str::from_utf8(&bytes).map(Host::parse));
            drop(DomainName::from_labels(bytes.chunks(7)));
        }
    }
}
