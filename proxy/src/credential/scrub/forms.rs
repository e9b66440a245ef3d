//! What an echo of a credential looks like: the forms that are compared with a text and its views, and the spellings
//! that only say which view to read.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use zeroize::Zeroizing;

use super::SHORTEST;
use super::escapes::EscapeFamilies;
use super::views::{Extent, View};

/// Most octets kept of a form that encodes twice. Who finds these has found the rest, too.
const HEAD: usize = 256;

/// How the letters of a form compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LetterCase {
    Exact,
    Ignored,
}

/// Which views show a form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FormKind {
    /// The text itself, and what is left of it without escapes or zeros.
    Text,
    /// The view with one separator between numbers.
    Numbers,
}

/// One form in which a credential may come back.
pub(super) struct Form {
    pub(super) text: Zeroizing<Vec<u8>>,
    /// Length of the whole form, of which `text` is the start.
    pub(super) length: usize,
    pub(super) case: LetterCase,
    pub(super) kind: FormKind,
    /// Which of the credentials it is a form of.
    pub(super) label: usize,
}

/// A view that a spelling calls for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    Unescaped,
    Numbers,
    Narrowed,
}

/// A text that stands where each octet of a credential is spelled the same way.
pub(super) struct Spelling {
    pub(super) text: Zeroizing<Vec<u8>>,
    pub(super) reading: Reading,
}

/// Returns every form of a value.
pub(super) fn forms_of(value: &[u8], label: usize) -> Vec<Form> {
    let mut forms = Vec::new();
    let mut add = |text: Vec<u8>, most: usize, case: LetterCase, kind: FormKind| {
        let length = text.len();
        let mut text = Zeroizing::new(text);
        text.truncate(most);
        forms.push(Form { text, length, case, kind, label });
    };
    add(value.to_vec(), usize::MAX, LetterCase::Ignored, FormKind::Text);
    add(spell(value, |octet| format!("{octet:02x}")), usize::MAX, LetterCase::Ignored, FormKind::Text);
    // A value that contains what looks like an escape, as a view without escapes shows it.
    let decoded = View::unescaped(value, EscapeFamilies::ALL, Extent::Whole).text;
    if decoded != value && decoded.len() >= SHORTEST {
        add(decoded, usize::MAX, LetterCase::Ignored, FormKind::Text);
    }
    for form in base64_forms(value) {
        add(form, usize::MAX, LetterCase::Exact, FormKind::Text);
    }
    for inner in inner_texts(value) {
        for form in base64_forms(&inner) {
            add(form, HEAD, LetterCase::Exact, FormKind::Text);
        }
    }
    for inner in base64_forms(value) {
        add(spell(&inner, |octet| format!("{octet:02x}")), HEAD, LetterCase::Ignored, FormKind::Text);
    }
    let numbers = [
        spell(value, |octet| format!("{octet:02x},")),
        spell(value, |octet| format!("{octet:x},")),
        spell(value, |octet| format!("0x{octet:02x},")),
        spell(value, |octet| format!("{octet},")),
        spell_pairs(value, b',', 0),
        spell_pairs(value, b',', 1),
    ];
    for mut text in numbers {
        if text.last() == Some(&b',') {
            text.pop();
        }
        add(text, usize::MAX, LetterCase::Ignored, FormKind::Numbers);
    }
    let key = |form: &Form| (form.kind == FormKind::Numbers, form.case == LetterCase::Exact);
    forms.sort_by(|one, other| (key(one), &*one.text).cmp(&(key(other), &*other.text)));
    forms.dedup_by(|one, other| {
        key(one) == key(other) && one.text == other.text && one.length == other.length
    });
    forms
}

/// Texts that hold a value and are encoded in base64 as a whole: another encoding of it, or a document that escapes it.
fn inner_texts(value: &[u8]) -> Vec<Vec<u8>> {
    let reserved = |octet: u8| !octet.is_ascii_alphanumeric() && !b"-_.~".contains(&octet);
    let escaped = |which: fn(u8) -> bool, each: fn(u8) -> String| -> Vec<u8> {
        let spelled = |octet: &u8| if which(*octet) { each(*octet).into_bytes() } else { vec![*octet] };
        value.iter().flat_map(spelled).collect()
    };
    let is_slash = |octet: u8| octet == b'/';
    let in_json = |octet: u8| matches!(octet, b'"' | b'\\');
    let in_html = |octet: u8| matches!(octet, b'<' | b'>' | b'&' | b'+' | b'=' | b'\'');
    let mut texts = vec![
        spell(value, |octet| format!("{octet:02x}")),
        spell(value, |octet| format!("{octet:02X}")),
        value.iter().flat_map(|octet| [*octet, 0]).collect(),
        escaped(reserved, |octet| format!("%{octet:02X}")),
        escaped(reserved, |octet| format!("%{octet:02x}")),
        escaped(
            |octet| octet != b'/' && !octet.is_ascii_alphanumeric() && !b"-_.~".contains(&octet),
            |octet| format!("%{octet:02X}"),
        ),
        escaped(is_slash, |_| r"\/".to_owned()),
        escaped(in_json, |octet| format!("\\{}", char::from(octet))),
        escaped(in_html, |octet| format!("\\u{octet:04x}")),
        STANDARD.encode(value).into_bytes(),
    ];
    // A value may also stand anywhere within the text that was encoded first.
    texts.extend(base64_forms(value));
    texts.retain(|text| text != value);
    texts.sort_unstable();
    texts.dedup();
    texts
}

/// Returns the spellings of a value in which every octet is escaped, or is a number or a wide character.
pub(super) fn spellings_of(value: &[u8]) -> Vec<Spelling> {
    let mut spellings = Vec::new();
    let mut add = |text: Vec<u8>, reading: Reading| {
        spellings.push(Spelling { text: Zeroizing::new(text), reading });
    };
    let escapes: [fn(u8) -> String; 22] = [
        |octet| format!("%{octet:02x}"),
        |octet| format!("%25{octet:02x}"),
        |octet| format!("%u{octet:04x}"),
        |octet| format!("\\u{octet:04x}"),
        |octet| format!("\\\\u{octet:04x}"),
        |octet| format!("%5cu{octet:04x}"),
        |octet| format!("\\u{{{octet:x}}}"),
        |octet| format!("\\x{octet:02x}"),
        |octet| format!("\\\\x{octet:02x}"),
        |octet| format!("%5cx{octet:02x}"),
        |octet| format!("\\{octet:03o}"),
        |octet| format!("\\\\{octet:03o}"),
        |octet| format!("&#{octet};"),
        |octet| format!("&#{octet}"),
        |octet| format!("&#x{octet:02x};"),
        |octet| format!("&#x{octet:02x}"),
        |octet| format!("&amp;#{octet};"),
        |octet| format!("&amp;#x{octet:02x};"),
        |octet| format!("%26%23{octet}%3b"),
        |octet| format!("%26%23x{octet:02x}%3b"),
        |octet| format!("={octet:02x}"),
        |octet| format!("=3d{octet:02x}"),
    ];
    for each in escapes {
        add(spell(value, each), Reading::Unescaped);
    }
    // References with leading zeros: how many is the server's choice.
    add(b"&#00000".to_vec(), Reading::Unescaped);
    add(b"&#x0000".to_vec(), Reading::Unescaped);
    let numbers: [fn(u8) -> String; 12] = [
        |octet| format!("{octet:02x}:"),
        |octet| format!("{octet:02x} "),
        |octet| format!("{octet:02x}-"),
        |octet| format!("{octet:02x},"),
        |octet| format!("{octet:02x}, "),
        |octet| format!("0x{octet:02x},"),
        |octet| format!("0x{octet:02x}, "),
        |octet| format!("0x{octet:02x} "),
        |octet| format!("{octet},"),
        |octet| format!("{octet}, "),
        |octet| format!("{octet} "),
        |octet| format!("{octet},\n  "),
    ];
    for each in numbers {
        add(spell(value, each), Reading::Numbers);
    }
    add(spell_pairs(value, b' ', 0), Reading::Numbers);
    add(spell_pairs(value, b' ', 1), Reading::Numbers);
    // Indented lists: how deep is the server's choice, so one number and two blanks must do.
    let (long, short): (Vec<u8>, Vec<u8>) = value.iter().partition(|octet| **octet >= 100);
    for octet in long.into_iter().chain(short).take(2) {
        add(format!("{octet},\n   ").bytes().take(7).collect(), Reading::Numbers);
    }
    add(value.iter().flat_map(|octet| [*octet, 0]).collect(), Reading::Narrowed);
    add(value.iter().flat_map(|octet| [*octet, 0, 0, 0]).collect(), Reading::Narrowed);
    for form in base64_forms(value).into_iter().chain([spell(value, |octet| format!("{octet:02x}"))]) {
        add(form.iter().flat_map(|octet| [*octet, 0]).collect(), Reading::Narrowed);
    }
    spellings
}

fn spell(value: &[u8], each: impl Fn(u8) -> String) -> Vec<u8> {
    value.iter().flat_map(|octet| each(*octet).into_bytes()).collect()
}

/// Hexadecimal digits in groups of two octets, as `xxd` prints them; the first group has `short` octet less.
fn spell_pairs(value: &[u8], separator: u8, short: usize) -> Vec<u8> {
    let mut text = Vec::new();
    for (index, octet) in value.iter().enumerate() {
        if index > 0 && (index + short) % 2 == 0 {
            text.push(separator);
        }
        text.extend_from_slice(format!("{octet:02x}").as_bytes());
    }
    text
}

/// The part of the base64 that does not depend on the surrounding bytes, for each of the three alignments.
fn base64_forms(value: &[u8]) -> Vec<Vec<u8>> {
    let mut forms = Vec::new();
    for before in 0..3usize {
        let padded: Zeroizing<Vec<u8>> =
            Zeroizing::new([[0; 2].get(..before).unwrap_or_default(), value].concat());
        let first = (before * 8).div_ceil(6); // the first digit that consists of the value's bits only
        let last = padded.len() * 8 / 6;
        for text in [STANDARD_NO_PAD.encode(&*padded), URL_SAFE_NO_PAD.encode(&*padded)] {
            forms.push(text.as_bytes().get(first..last).unwrap_or_default().to_vec());
        }
    }
    forms.sort_unstable();
    forms.dedup();
    forms
}
