//! Placeholders: what a sandbox has in place of a credential, for tools that insist on a key.
//!
//! A placeholder is random to everybody but Sandbar, different for each sandbox and credential, and the same after a
//! restart: it is derived from a key that is kept beside the log. It is no secret. Where it turns up tells who read it.

use std::path::Path;

use anyhow::{Context, bail};
use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use rules::ids::{CredentialName, SandboxId};
use rules::signals::secrets::{PLACEHOLDER_LENGTH, PLACEHOLDER_MARK};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::state_file::{Durability, read_state, write_atomic};

/// The file of the key, in the log directory.
const KEY_FILE: &str = "placeholder-key.json";
const KEY_BYTES: usize = 32;
/// The alphabet of base32 (RFC 4648), in lower case.
const BASE32: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
/// Decodes what clients send as Basic authentication, with padding or without.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);
const BASIC: &str = "basic ";

/// The key from which placeholders are derived.
pub struct PlaceholderKey(hmac::Key);

#[derive(Serialize, Deserialize)]
struct StoredKey {
    key: String,
}

impl PlaceholderKey {
    /// Reads the key of an instance, or makes one.
    ///
    /// # Errors
    ///
    /// Fails for a malformed file, and if a new one cannot be written: placeholders would change with every start.
    pub fn open(log_dir: &Path) -> anyhow::Result<Self> {
        if let Some(known) = Self::read(log_dir)? {
            return Ok(known);
        }
        let path = log_dir.join(KEY_FILE);
        let bytes = Zeroizing::new(certs::random_bytes::<KEY_BYTES>()?);
        let stored = StoredKey { key: STANDARD.encode(&*bytes) };
        write_atomic(&path, &stored, Durability::Disk)
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self::from_bytes(&*bytes))
    }

    /// Reads the key of an instance; `None` if it never ran.
    ///
    /// # Errors
    ///
    /// Fails for a file that cannot be read or is malformed.
    pub fn read(log_dir: &Path) -> anyhow::Result<Option<Self>> {
        let path = log_dir.join(KEY_FILE);
        let shown = path.display();
        let Some(bytes) = read_state(&path).with_context(|| format!("cannot read {shown}"))? else {
            return Ok(None);
        };
        let stored: StoredKey =
            serde_json::from_slice(&bytes).with_context(|| format!("cannot read {shown}"))?;
        let key = Zeroizing::new(STANDARD.decode(&stored.key).unwrap_or_default());
        if key.len() != KEY_BYTES {
            bail!("{shown} does not hold a key of {KEY_BYTES} bytes: remove it, and placeholders change");
        }
        Ok(Some(Self::from_bytes(&key)))
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        PlaceholderKey(hmac::Key::new(hmac::HMAC_SHA256, bytes))
    }

    /// Returns the placeholder of a credential in a sandbox, which begins with `prefix`.
    pub fn placeholder(&self, sandbox: &SandboxId, credential: &CredentialName, prefix: &str) -> String {
        format!("{prefix}{}", self.code(sandbox, credential))
    }

    /// Returns the placeholder without a prefix.
    pub(super) fn code(&self, sandbox: &SandboxId, credential: &CredentialName) -> String {
        let (sandbox, credential) = (sandbox.as_str(), credential.as_str());
        let text = format!("{}:{sandbox}:{credential}", sandbox.len());
        let tag = hmac::sign(&self.0, text.as_bytes());
        let mut code = PLACEHOLDER_MARK.to_owned();
        let (mut bits, mut held) = (0_u32, 0);
        for byte in tag.as_ref() {
            (bits, held) = (bits << 8 | u32::from(*byte), held + 8);
            while held >= 5 {
                held -= 5;
                let digit = BASE32.get((bits >> held & 31) as usize);
                code.extend(digit.map(|digit| char::from(*digit)));
            }
            bits &= (1 << held) - 1;
        }
        code.truncate(PLACEHOLDER_MARK.len() + PLACEHOLDER_LENGTH);
        code
    }
}

/// The value of a header field around a placeholder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FieldTemplate {
    wrapping: Wrapping,
    before: String,
    after: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrapping {
    /// Basic authentication: the text is in base64.
    Basic,
    Plain,
}

/// A placeholder stands in its field, but not as the one credential of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Misplaced;

impl FieldTemplate {
    /// Finds a placeholder in the value of a field, also inside Basic authentication.
    pub(super) fn find(value: &[u8], code: &str, prefix: &str) -> Result<Option<Self>, Misplaced> {
        let Ok(value) = str::from_utf8(value) else { return Ok(None) };
        if value.contains(code) {
            return Self::cut(Wrapping::Plain, value, code, prefix).map(Some);
        }
        let scheme = value.get(..BASIC.len()).filter(|scheme| scheme.eq_ignore_ascii_case(BASIC));
        let encoded = scheme.and_then(|_| value.get(BASIC.len()..)).unwrap_or_default();
        let decoded = LENIENT.decode(encoded.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        match decoded.filter(|decoded| decoded.contains(code)) {
            Some(decoded) => Self::cut(Wrapping::Basic, &decoded, code, prefix).map(Some),
            None => Ok(None),
        }
    }

    fn cut(wrapping: Wrapping, text: &str, code: &str, prefix: &str) -> Result<Self, Misplaced> {
        let (before, after) = text.split_once(code).ok_or(Misplaced)?;
        let before = before.strip_suffix(prefix).unwrap_or(before);
        // Beside another credential in a list, ours would be one of two accounts.
        let is_list =
            wrapping == Wrapping::Plain && (before.contains([',', ';']) || after.contains([',', ';']));
        if is_list || after.contains(code) {
            return Err(Misplaced);
        }
        Ok(FieldTemplate { wrapping, before: before.to_owned(), after: after.to_owned() })
    }

    /// Returns the value without the placeholder: what the sandbox chose of it.
    pub(super) fn without(&self) -> String {
        self.with("").trim_end().to_owned()
    }

    /// Returns the value with the secret in place of the placeholder.
    pub(super) fn with(&self, secret: &str) -> Zeroizing<String> {
        let text = Zeroizing::new(format!("{}{secret}{}", self.before, self.after));
        match self.wrapping {
            Wrapping::Basic => Zeroizing::new(format!("Basic {}", &*Zeroizing::new(STANDARD.encode(&*text)))),
            Wrapping::Plain => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn names(sandbox: &str, credential: &str) -> (SandboxId, CredentialName) {
        (SandboxId::parse(sandbox).unwrap(), CredentialName::parse(credential).unwrap())
    }

    #[test]
    fn a_placeholder_is_of_one_sandbox_and_credential_and_survives_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        assert!(PlaceholderKey::read(dir.path()).unwrap().is_none());
        let key = PlaceholderKey::open(dir.path()).unwrap();
        let again = PlaceholderKey::open(dir.path()).unwrap();
        let mut seen = Vec::new();
        for (sandbox, credential) in
            [("a", "b"), ("a", "c"), ("b", "b"), ("a:1", "b"), ("ab", "c"), ("a", "bc")]
        {
            let Ok(sandbox) = SandboxId::parse(sandbox) else { continue };
            let credential = CredentialName::parse(credential).unwrap();
            let text = key.placeholder(&sandbox, &credential, "sk-");
            assert_eq!(text, again.placeholder(&sandbox, &credential, "sk-"));
            let code = text.strip_prefix("sk-sbxph").unwrap();
            assert!(code.len() == 26 && code.bytes().all(|byte| BASE32.contains(&byte)), "{text}");
            seen.push(text);
        }
        let count = seen.len();
        seen.sort();
        seen.dedup();
        assert_eq!((seen.len(), count), (5, 5));
        let file = dir.path().join(KEY_FILE);
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&file, "{\"key\":\"c2hvcnQ=\"}").unwrap();
        assert!(PlaceholderKey::open(dir.path()).is_err(), "a broken key is not replaced silently");
        let other = tempfile::tempdir().unwrap();
        let (sandbox, credential) = names("a", "b");
        let other = PlaceholderKey::open(other.path()).unwrap().placeholder(&sandbox, &credential, "sk-");
        assert!(!seen.contains(&other), "another instance has others");
    }

    #[test]
    fn a_placeholder_is_replaced_where_it_is_the_credential_of_its_field() {
        const CODE: &str = "sbxphabcdefghijklmnopqrstuvwxyz";
        let basic = |text: &str| format!("Basic {}", STANDARD.encode(text));
        for (value, with) in [
            (format!("Bearer sk-{CODE}"), Ok(Some("Bearer REAL".to_owned()))),
            (format!("Bearer {CODE}"), Ok(Some("Bearer REAL".to_owned()))),
            (CODE.to_owned(), Ok(Some("REAL".to_owned()))),
            (format!("token token=\"sk-{CODE}\""), Ok(Some("token token=\"REAL\"".to_owned()))),
            (basic(&format!("user:sk-{CODE}")), Ok(Some(basic("user:REAL")))),
            (basic(&format!("sk-{CODE}:")), Ok(Some(basic("REAL:")))),
            (basic(&format!("u,v;w:sk-{CODE}")).replace("Basic", "bAsIc"), Ok(Some(basic("u,v;w:REAL")))),
            (
                basic(&format!("user:sk-{CODE}")).trim_end_matches('=').to_owned(),
                Ok(Some(basic("user:REAL"))),
            ),
            (format!("Bearer sk-{CODE}, Bearer other"), Err(Misplaced)),
            (format!("Bearer sk-{CODE} sk-{CODE}"), Err(Misplaced)),
            (basic(&format!("{CODE}:{CODE}")), Err(Misplaced)),
            ("Bearer sk-sbxphabcdefghijklmnopqrstuvwxya".to_owned(), Ok(None)),
            (basic("user:password"), Ok(None)),
            ("Basic !!!".to_owned(), Ok(None)),
            (String::new(), Ok(None)),
        ] {
            let found = FieldTemplate::find(value.as_bytes(), CODE, "sk-");
            let replaced = found.map(|found| found.map(|template| template.with("REAL").to_string()));
            assert_eq!(replaced, with, "{value}");
        }
        let template =
            FieldTemplate::find(format!("Bearer sk-{CODE}").as_bytes(), CODE, "sk-").unwrap().unwrap();
        assert_eq!(template.without(), "Bearer");
        assert_eq!(FieldTemplate::find(b"\xff", CODE, ""), Ok(None));
    }
}
