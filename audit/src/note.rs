//! Signed notes: a text and its signatures, as specified by <https://c2sp.org/signed-note>, with
//! Ed25519 keys only.
//!
//! Every key has exactly one spelling. A signature by an unknown key is ignored; an invalid one by a
//! known key invalidates the note.

use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair, ParsedPublicKey};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

/// Longest note to read.
pub(crate) const NOTE_MAX: usize = 4096;
/// Longest text of a private key: its name and less than a hundred bytes.
pub(crate) const KEY_MAX: usize = 2048;
/// Longest name of a key. A checkpoint contains it twice and must fit into [`NOTE_MAX`].
pub(crate) const NAME_MAX: usize = 1900;
/// The prefix of a private key, so that it cannot be mistaken for a public one.
const PRIVATE: &str = "PRIVATE+KEY+";
/// The signature type of Ed25519.
const TYPE: u8 = 1;
/// Bytes of a key id and an Ed25519 signature. A shorter one was torn.
const SIGNATURE_BYTES: usize = 4 + 64;

/// Returns whether `name` is a valid name for a key.
pub(crate) fn is_key_name(name: &str) -> bool {
    let refused = |c: char| c.is_whitespace() || c < ' ' || c == '+';
    (1..=NAME_MAX).contains(&name.len()) && !name.contains(refused)
}

/// A private key and the name it signs under.
pub(crate) struct Signer {
    name: String,
    id: u32,
    pair: Ed25519KeyPair,
}

impl Signer {
    /// Generates a key for a name that passes [`is_key_name`], and its text for [`Signer::parse`].
    /// Returns `None` if the system returns no random bytes.
    pub(crate) fn generate(name: &str) -> Option<(Self, Zeroizing<String>)> {
        let mut seed = Zeroizing::new([0; 32]);
        aws_lc_rs::rand::fill(seed.as_mut()).ok()?;
        let signer = Self::from_seed(name, &seed)?;
        let text = signer.private_key(&seed);
        Some((signer, text))
    }

    /// Parses `PRIVATE+KEY+name+id+base64`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (name, seed) = parse_key(text.strip_prefix(PRIVATE)?)?;
        Self::from_seed(name, &seed).filter(|signer| *signer.private_key(&seed) == text)
    }

    fn from_seed(name: &str, seed: &[u8; 32]) -> Option<Self> {
        let pair = Ed25519KeyPair::from_seed_unchecked(seed).ok()?;
        let id = key_id(name, pair.public_key().as_ref());
        Some(Self { name: name.to_owned(), id, pair })
    }

    fn private_key(&self, seed: &[u8; 32]) -> Zeroizing<String> {
        let key = Zeroizing::new(encode_key(&self.name, self.id, seed));
        Zeroizing::new([PRIVATE, key.as_str()].concat())
    }

    /// Returns the text of the public key: `name+id+base64`.
    pub(crate) fn public_key(&self) -> String {
        encode_key(&self.name, self.id, self.pair.public_key().as_ref())
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Signs `text`, which ends with a newline, and returns the note.
    pub(crate) fn sign(&self, text: &str) -> Option<String> {
        let signature = self.pair.try_sign(text.as_bytes()).ok()?;
        let bytes = [&self.id.to_be_bytes(), signature.as_ref()].concat();
        Some(format!("{text}\n\u{2014} {} {}\n", self.name, STANDARD.encode(bytes)))
    }
}

/// A public key and its name.
pub(crate) struct Verifier {
    name: String,
    id: u32,
    key: ParsedPublicKey,
}

impl Verifier {
    /// Parses `name+id+base64`. AWS-LC decodes the point only when it verifies, so a key that is not on
    /// the curve parses but never verifies a signature.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (name, public) = parse_key(text)?;
        let id = key_id(name, &*public);
        let key = ParsedPublicKey::new(&ED25519, *public).ok()?;
        (encode_key(name, id, &*public) == text).then(|| Self { name: name.to_owned(), id, key })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

/// A text and its signatures.
pub(crate) struct Note<'a> {
    text: &'a str,
    signatures: Vec<SignatureLine<'a>>,
}

struct SignatureLine<'a> {
    name: &'a str,
    id: u32,
    signature: Vec<u8>,
}

impl<'a> Note<'a> {
    /// Parses a note. [`NOTE_MAX`] bytes leave room for some forty signatures.
    pub(crate) fn parse(note: &'a str) -> Option<Self> {
        if note.len() > NOTE_MAX || note.contains(|c: char| c < ' ' && c != '\n') {
            return None;
        }
        let (text, signatures) = note.split_at_checked(note.rfind("\n\n")? + 1)?;
        let lines = signatures.strip_prefix('\n')?.strip_suffix('\n')?.split('\n');
        Some(Self { text, signatures: lines.map(SignatureLine::parse).collect::<Option<_>>()? })
    }

    /// Returns the signed text, including its final newline.
    pub(crate) fn text(&self) -> &'a str {
        self.text
    }

    /// Returns whether one of `keys` signed it and no signature by any of them is invalid. Keys that
    /// share a name and an id cannot be told apart, so all of them would have to match.
    pub(crate) fn is_signed_by(&self, keys: &[Verifier]) -> bool {
        let mut good = 0;
        for line in &self.signatures {
            for key in keys.iter().filter(|key| key.id == line.id && key.name == line.name) {
                if key.key.verify_sig(self.text.as_bytes(), &line.signature).is_err() {
                    return false;
                }
                good += 1;
            }
        }
        good > 0
    }
}

impl<'a> SignatureLine<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (name, encoded) = line.strip_prefix("\u{2014} ")?.split_once(' ')?;
        let bytes = STANDARD.decode(encoded).ok().filter(|bytes| bytes.len() >= SIGNATURE_BYTES)?;
        let (id, signature) = bytes.split_first_chunk()?;
        let id = u32::from_be_bytes(*id);
        is_key_name(name).then(|| Self { name, id, signature: signature.to_owned() })
    }
}

/// Parses the name and the 32 bytes of a key. The caller encodes the result again and compares it with
/// the input, which checks the id and rejects any other spelling.
fn parse_key(text: &str) -> Option<(&str, Zeroizing<[u8; 32]>)> {
    let (name, rest) = text.split_once('+').filter(|_| text.len() <= KEY_MAX)?;
    let (_, encoded) = rest.split_once('+').filter(|_| is_key_name(name))?;
    let bytes = Zeroizing::new(STANDARD.decode(encoded).ok()?);
    let key = bytes.strip_prefix(&[TYPE])?.try_into().ok()?;
    Some((name, Zeroizing::new(key)))
}

fn encode_key(name: &str, id: u32, key: &[u8]) -> String {
    let bytes = Zeroizing::new([&[TYPE], key].concat());
    let encoded = Zeroizing::new(STANDARD.encode(&*bytes));
    format!("{name}+{id:08x}+{}", *encoded)
}

/// Returns the first four bytes of SHA-256 over name, newline, type and public key.
fn key_id(name: &str, public: &[u8]) -> u32 {
    let hash = Sha256::new().chain_update(name).chain_update([b'\n', TYPE]).chain_update(public);
    let [a, b, c, d, ..]: [u8; 32] = hash.finalize().into();
    u32::from_be_bytes([a, b, c, d])
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    // Generated by the crate `signed_note` 0.2.0, which signed checkpoints before this module did.
    pub(crate) const SECRET: &str = "PRIVATE+KEY+sandbar.example/log+8eb4dbea+\
        AQAlSm+Uud4DKE1yl7zhBitQdZq/5AkuU3idwucMMVZ7";
    pub(crate) const PUBLIC: &str =
        "sandbar.example/log+8eb4dbea+AaYr1qinl5url/tJqsCcsVhpwmmkLQ6G+pPqHcZID0FV";
    pub(crate) const NOTE: &str = "sandbar.example/log\n42\n\
        //79/Pv6+fj39vX08/Lx8O/u7ezr6uno5+bl5OPi4eA=\n\n\
        — sandbar.example/log jrTb6jgm/OeMCGn4Gjmks/qiGI/KNjhu09ffQt6Zc0PnOT2qHB6ON9XeT1WKo3HOfl9ex5a3vmF2P+zld1mmOT3PxQk=\n";
    /// Another key of the same name, with an id that starts with a zero, and its signature of that text.
    const NEXT_SECRET: &str = "PRIVATE+KEY+sandbar.example/log+03a16509+\
        AR1CZ4yx1vsgRWqPtNn+I0htkrfcASZLcJW63wQpTnOY";
    const NEXT_PUBLIC: &str = "sandbar.example/log+03a16509+AXJ3ltn973wQzkVjn2Bvc/+E365LgEhExjFCKRunjPsV";
    const NEXT_LINE: &str = "— sandbar.example/log A6FlCTRDjgB7+wWU9anBnyHApOq5CZsm2jUKYAsDx0MiTQKXmOBWz/GA0TQIxZXp7Qp4JsqUrvhmbc1htfj3iUOvBgk=\n";
    const WITNESS: &str = "witness.example+67d0d0f7+AepKbGPinFIKvvVQexMuxfmVR3auvr57kkIe6mkURtIs";
    const WITNESS_LINE: &str = "— witness.example Z9DQ979oi8I1nlGe0drwSeUPMmc1ol+fWzbziK2VFtvnbJ15KVcXsFf7dOgSTQJqKa7HkpE0z7kgey+rMS72f2iIhg8=\n";

    // From Go's golang.org/x/mod/sumdb/note.
    const GO_SECRET: &str = "PRIVATE+KEY+PeterNeumann+c74f20a3+\
        AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz";
    const GO_PUBLIC: &str = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW";
    const GO_NOTE: &str = "If you think cryptography is the answer to your problem,\n\
        then you don't know what your problem is.\n\n\
        — PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n";

    fn text(note: &str) -> &str {
        Note::parse(note).unwrap().text()
    }

    #[test]
    fn other_implementations_keys_and_notes_are_ours_to_the_byte() {
        let next = format!("{}\n{NEXT_LINE}", text(NOTE));
        for (secret, public, note) in
            [(SECRET, PUBLIC, NOTE), (NEXT_SECRET, NEXT_PUBLIC, &next), (GO_SECRET, GO_PUBLIC, GO_NOTE)]
        {
            let signer = Signer::parse(secret).unwrap();
            assert_eq!(signer.public_key(), public);
            assert_eq!(signer.sign(text(note)).unwrap(), note);
            let key = Verifier::parse(public).unwrap();
            assert!(Note::parse(note).unwrap().is_signed_by(&[key]), "{public}");
        }
    }

    #[test]
    fn a_key_that_was_made_signs() {
        let (signer, secret) = Signer::generate("log").unwrap();
        assert_ne!(secret, Signer::generate("log").unwrap().1);
        let note = signer.sign("text\n").unwrap();
        assert_eq!(Signer::parse(&secret).unwrap().sign("text\n").unwrap(), note);
        let key = Verifier::parse(&signer.public_key()).unwrap();
        assert!(Note::parse(&note).unwrap().is_signed_by(&[key]));
    }

    #[test]
    fn names_are_one_word() {
        let longest = "n".repeat(NAME_MAX);
        for good in ["n", "sandbar.example/log", "prüfung", "a\u{2014}b", &longest] {
            assert!(is_key_name(good), "{good:?}");
            let (signer, secret) = Signer::generate(good).unwrap();
            assert!(Signer::parse(&secret).is_some(), "{good:?}");
            let longest = format!("{good}\n{}\n{}\n", u64::MAX, STANDARD.encode([0; 32]));
            assert!(Note::parse(&signer.sign(&longest).unwrap()).is_some(), "{good:?}");
        }
        let long = "n".repeat(NAME_MAX + 1);
        for bad in ["", " ", "a b", "a+b", "a\nb", "a\tb", "a\0b", "a\u{a0}b", "a\u{2003}b", &long] {
            assert!(!is_key_name(bad), "{bad:?}");
        }
    }

    #[test]
    fn malformed_keys_are_refused() {
        let key = |name: &str, bytes: &[u8]| {
            let hash = Sha256::digest([name.as_bytes(), b"\n", bytes].concat());
            let id = u32::from_be_bytes(hash[..4].try_into().unwrap());
            format!("{name}+{id:08x}+{}", STANDARD.encode(bytes))
        };
        let long = "n".repeat(NAME_MAX + 1);
        let public = STANDARD.decode(PUBLIC.split_once("8eb4dbea+").unwrap().1).unwrap();
        assert_eq!(key("sandbar.example/log", &public), PUBLIC, "or the rows below test nothing");
        let rows = [
            ("empty", String::new()),
            ("only plus signs", "++".to_owned()),
            ("no key", "sandbar.example/log+8eb4dbea".to_owned()),
            ("an empty key", "sandbar.example/log+8eb4dbea+".to_owned()),
            ("an empty key of the right id", key("n", &[])),
            ("a type and no key", key("n", &[1])),
            ("a byte too few", key("n", &public[..32])),
            ("a byte too many", key("n", &[&public[..], &[0]].concat())),
            ("another type", key("n", &[&[2], &public[1..]].concat())),
            ("as DER", key("n", &[&[1; 13], &public[1..]].concat())),
            ("no name", key("", &public)),
            ("a name with a space", key("a b", &public)),
            ("a name with a newline", key("a\nb", &public)),
            ("a name with a control character", key("a\u{1}b", &public)),
            ("a name with a plus", key("a+b", &public)),
            ("too long a name", key(&long, &public)),
            ("a huge key", key("n", &[1; 1 << 20])),
            ("another's id", PUBLIC.replace("8eb4dbea", "03a16509")),
            ("another's name", PUBLIC.replace("example", "exannple")),
            ("an id in capitals", PUBLIC.replace("8eb4dbea", "8EB4DBEA")),
            ("an id with a sign", PUBLIC.replace("8eb4dbea", "+8eb4dbea")),
            ("too long an id", PUBLIC.replace("8eb4dbea", "08eb4dbea")),
            ("an id that lost its zero", NEXT_PUBLIC.replace("03a1", "3a1")),
            ("padding that does not belong there", format!("{PUBLIC}=")),
            ("URL-safe base64", PUBLIC.replace("url/tJ", "url_tJ")),
            ("a space before", format!(" {PUBLIC}")),
            ("a newline after", format!("{PUBLIC}\n")),
            ("more after", format!("{PUBLIC}+")),
            ("bits flipped", PUBLIC.replace("AaYr", "AaYs")),
        ];
        for (what, key) in &rows {
            assert!(Verifier::parse(key).is_none(), "{what}");
            assert!(Signer::parse(&format!("{PRIVATE}{key}")).is_none(), "{what}");
        }
        assert!(Verifier::parse(SECRET).is_none(), "a private key where a public one belongs");
        let named = |name| Signer::from_seed(name, &[7; 32]).unwrap().private_key(&[7; 32]);
        assert!(Signer::parse(&named("n")).is_some());
        let rows = [
            ("no name", named("").to_string()),
            ("a name with a space", named("a b").to_string()),
            ("a name with a plus", named("a+b").to_string()),
            ("too long a name", named(&long).to_string()),
            ("another type", SECRET.replace("+AQAl", "+AgAl")),
            ("a newline after", format!("{SECRET}\n")),
            ("a public key", PUBLIC.to_owned()),
            ("one that says it is private", format!("{PRIVATE}{PUBLIC}")),
            ("half a prefix", SECRET.replacen("PRIVATE+", "", 1)),
            ("lower case", SECRET.replacen("PRIVATE", "private", 1)),
            ("another's id", SECRET.replace("8eb4dbea", "03a16509")),
            ("an id in capitals", SECRET.replace("8eb4dbea", "8EB4DBEA")),
            ("another's name", SECRET.replace("example", "exannple")),
            ("another seed", SECRET.replace("AQAlSm", "AQAlSn")),
            ("cut off", SECRET.replace("MVZ7", "")),
            ("more after", format!("{SECRET}AAAA")),
        ];
        for (what, key) in &rows {
            assert!(Signer::parse(key).is_none(), "{what}");
        }
    }

    #[test]
    fn malformed_notes_are_refused() {
        let text = text(NOTE);
        let (_, line) = NOTE.split_once("\n\n").unwrap();
        let encoded = line.trim_end().rsplit(' ').next().unwrap();
        let short = STANDARD.encode([0; SIGNATURE_BYTES - 1]);
        let many = |count| format!("{text}\n{}", line.repeat(count));
        assert!(Note::parse(&many(30)).is_some());
        for (what, note) in [
            ("empty", String::new()),
            ("newlines", "\n\n\n".to_owned()),
            ("no signature", text.to_owned()),
            ("no signature after the empty line", format!("{text}\n")),
            ("no empty line", format!("{text}{line}")),
            ("no text, no empty line", line.to_owned()),
            ("no newline at the end", NOTE.trim_end().to_owned()),
            ("an empty line at the end", format!("{NOTE}\n")),
            ("another line at the end", format!("{NOTE}more\n")),
            ("lines that end with CRLF", NOTE.replace('\n', "\r\n")),
            ("a control character in the text", NOTE.replace("42", "4\u{1b}2")),
            ("a NUL in the name", NOTE.replace("— sandbar", "— sand\0bar")),
            ("a hyphen", NOTE.replace('\u{2014}', "-")),
            ("an en dash", NOTE.replace('\u{2014}', "\u{2013}")),
            ("no space after the dash", NOTE.replace("\u{2014} ", "\u{2014}")),
            ("two spaces after the dash", NOTE.replace("\u{2014} ", "\u{2014}  ")),
            ("two spaces before the signature", NOTE.replace(encoded, &format!(" {encoded}"))),
            ("a space at the end", NOTE.replace(encoded, &format!("{encoded} "))),
            ("no name", format!("{text}\n— {encoded}\n")),
            ("an empty name", format!("{text}\n—  {encoded}\n")),
            ("a plus in the name", format!("{text}\n— a+b {encoded}\n")),
            ("a space of another kind in the name", format!("{text}\n— a\u{a0}b {encoded}\n")),
            ("an empty signature", format!("{text}\n— n \n")),
            ("a short signature", format!("{text}\n— n {short}\n")),
            ("no padding", NOTE.replace("xQk=", "xQk")),
            ("bits where there are none", NOTE.replace("xQk=", "xQl=")),
            ("URL-safe base64", NOTE.replace("jgm/", "jgm_")),
            ("one good line and one bad", format!("{NOTE}— n AAAA\n")),
            ("too long", many(40)),
        ] {
            assert!(Note::parse(&note).is_none(), "{what}");
        }
    }

    #[test]
    fn unknown_signers_are_ignored_and_forgeries_found() {
        let (_, line) = NOTE.split_once("\n\n").unwrap();
        let signed = |text: &str, lines: &[&str]| format!("{text}\n{}", lines.concat());
        let text = text(NOTE);
        let forged = line.replace("jgm/", "jgn/");
        let longer = {
            let encoded = line.trim_end().rsplit(' ').next().unwrap();
            let bytes = [STANDARD.decode(encoded).unwrap(), vec![0]].concat();
            format!("— sandbar.example/log {}\n", STANDARD.encode(bytes))
        };
        // The right id and signature under another name.
        let renamed = line.replace("sandbar.example/log", "witness.example");
        // The name and id of a known key with the signature of another.
        let relabelled = {
            let mut bytes = STANDARD.decode(NEXT_LINE.trim_end().rsplit(' ').next().unwrap()).unwrap();
            bytes[..4].copy_from_slice(&0x8eb4_dbea_u32.to_be_bytes());
            format!("— sandbar.example/log {}\n", STANDARD.encode(bytes))
        };
        let no_point = "n+43308ffd+AQIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
        let zeros = [&0x4330_8ffd_u32.to_be_bytes()[..], &[0; 64]].concat();
        let zeros = format!("— n {}\n", STANDARD.encode(zeros));
        let more = format!("{text}more\n");
        let other = text.replace("42", "43");
        let rows: [(&str, String, &[&str], bool); 19] = [
            ("by the key", signed(text, &[line]), &[PUBLIC], true),
            ("by one of two keys", signed(text, &[line]), &[WITNESS, PUBLIC], true),
            ("the key is given twice", signed(text, &[line]), &[PUBLIC, PUBLIC], true),
            ("signed twice", signed(text, &[line, line]), &[PUBLIC], true),
            ("an unknown witness", signed(text, &[line, WITNESS_LINE]), &[PUBLIC], true),
            ("and before it", signed(text, &[WITNESS_LINE, line]), &[PUBLIC], true),
            ("the next key, unknown", signed(text, &[NEXT_LINE, line]), &[PUBLIC], true),
            ("two known", signed(text, &[line, WITNESS_LINE]), &[PUBLIC, WITNESS], true),
            ("no key", signed(text, &[line]), &[], false),
            ("unknown only", signed(text, &[line]), &[WITNESS], false),
            ("unknown of that name", signed(text, &[line]), &[NEXT_PUBLIC], false),
            ("another text", signed(&other, &[line]), &[PUBLIC], false),
            ("a longer text", signed(&more, &[line]), &[PUBLIC], false),
            ("a forged signature", signed(text, &[&forged]), &[PUBLIC], false),
            ("forged beside a good one", signed(text, &[line, &forged]), &[PUBLIC], false),
            ("a byte more", signed(text, &[&longer]), &[PUBLIC], false),
            ("by a key off the curve", signed(text, &[&zeros]), &[no_point], false),
            ("another's name", signed(text, &[&renamed]), &[PUBLIC, WITNESS], false),
            ("another's id", signed(text, &[&relabelled, WITNESS_LINE]), &[PUBLIC, WITNESS], false),
        ];
        for (what, note, keys, good) in rows {
            let keys: Vec<_> = keys.iter().map(|key| Verifier::parse(key).unwrap()).collect();
            assert_eq!(Note::parse(&note).unwrap().is_signed_by(&keys), good, "{what}");
        }
    }
}
