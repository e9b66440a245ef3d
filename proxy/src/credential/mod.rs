//! Credentials that never enter the sandbox (P11): read from files that the configuration names, injected into
//! requests for the bound host only, and masked in whatever the origin server sends back.

pub mod scrub;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use ::http::HeaderValue;
use pingora_http::RequestHeader;
use rules::Reason;
use rules::ids::CredentialName;
use secrecy::{ExposeSecret, SecretString};
use zeroize::Zeroizing;

use crate::credential::scrub::EchoPatterns;
use crate::report::refusal::Refusal;

/// Longest credential, in bytes.
const LENGTH: u64 = 8192;
/// Shortest credential: a shorter one would occur by chance in responses.
const SHORTEST: usize = 8;
/// Request fields that ask for a response the scrubber cannot search: partial content, or compression inside the
/// body.
const UNSEARCHABLE_FIELDS: [&str; 6] = [
    "a-im",
    "connect-accept-encoding",
    "grpc-accept-encoding",
    "if-range",
    "range",
    "sec-websocket-extensions",
];

/// The credentials of the configuration.
pub(crate) struct CredentialStore {
    by: HashMap<CredentialName, CredentialSource>,
}

/// A credential file, and the credential last read from it.
struct CredentialSource {
    path: PathBuf,
    last: Mutex<Option<(FileVersion, Arc<Credential>)>>,
}

/// Metadata that changes when a file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileVersion {
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// A credential, and the forms in which an origin server may echo it.
pub(crate) struct Credential {
    value: SecretString,
    echoes: Arc<EchoPatterns>,
}

/// Why a credential cannot be used. Never contains its value.
#[derive(Debug, thiserror::Error)]
enum CredentialError {
    #[error("cannot read the file: {0}")]
    File(#[from] std::io::Error),
    #[error("it is longer than {LENGTH} bytes")]
    Long,
    #[error("it contains characters that a header field cannot carry")]
    Malformed,
    #[error("it is shorter than {SHORTEST} characters")]
    Short,
}

impl CredentialStore {
    pub(crate) fn new(files: impl IntoIterator<Item = (CredentialName, PathBuf)>) -> Self {
        let source = |(name, path)| (name, CredentialSource { path, last: Mutex::default() });
        CredentialStore { by: files.into_iter().map(source).collect() }
    }

    /// Returns the credential that the file holds now.
    ///
    /// # Errors
    ///
    /// Returns a refusal if there is none: the request must not leave without it.
    pub(crate) fn current(&self, name: &CredentialName) -> Result<Arc<Credential>, Refusal> {
        let refused = |why: String| {
            Refusal::from(Reason::CredentialUnavailable).with_detail(format!("credential `{name}`: {why}"))
        };
        let source = self.by.get(name).ok_or_else(|| refused("it is not in the configuration".to_owned()))?;
        source.current().map_err(|error| refused(error.to_string()))
    }
}

impl CredentialSource {
    /// Returns the credential in the file, reading it again if the file has changed.
    fn current(&self) -> Result<Arc<Credential>, CredentialError> {
        let version = FileVersion::from_metadata(&fs::metadata(&self.path)?);
        let mut last = sys::lock(&self.last);
        if let Some((known, credential)) = &*last
            && *known == version
        {
            return Ok(credential.clone());
        }
        *last = None; // a file that has become unreadable must not leave its old value in use
        let credential = Arc::new(Credential::parse(&read_secret(&self.path)?)?);
        *last = Some((version, credential.clone()));
        Ok(credential)
    }
}

impl FileVersion {
    fn from_metadata(metadata: &fs::Metadata) -> Self {
        FileVersion {
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

fn read_secret(path: &PathBuf) -> Result<Zeroizing<String>, CredentialError> {
    let mut text = Zeroizing::new(String::with_capacity(LENGTH as usize + 1));
    let read = File::open(path)?.take(LENGTH + 1).read_to_string(&mut text)?;
    if read as u64 > LENGTH { Err(CredentialError::Long) } else { Ok(text) }
}

impl Credential {
    /// Parses one line of visible characters, without the line end that editors add.
    fn parse(text: &str) -> Result<Self, CredentialError> {
        let value = text.strip_suffix('\n').unwrap_or(text);
        let value = value.strip_suffix('\r').unwrap_or(value);
        match value.bytes().all(|byte| byte.is_ascii_graphic()) {
            false => Err(CredentialError::Malformed),
            true if value.len() < SHORTEST => Err(CredentialError::Short),
            true => {
                let echoes = Arc::new(EchoPatterns::new(value));
                Ok(Credential { value: SecretString::from(value), echoes })
            }
        }
    }

    /// Sets `Authorization`, replacing whatever the sandbox sent there.
    ///
    /// Also removes the fields that ask for compressed or partial responses, in which the scrubber could not find
    /// an echo.
    pub(crate) fn inject(&self, request: &mut RequestHeader) -> Result<(), Refusal> {
        request.remove_header("authorization");
        for name in UNSEARCHABLE_FIELDS {
            request.remove_header(name);
        }
        let text = Zeroizing::new(format!("Bearer {}", self.value.expose_secret()));
        let mut value = HeaderValue::from_str(&text).map_err(|_| Reason::CredentialUnavailable)?;
        value.set_sensitive(true); // keeps it out of HPACK's dynamic table
        let set = request.insert_header("Authorization", value);
        set.map_err(|_| Reason::CredentialUnavailable)?;
        let set = request.insert_header("Accept-Encoding", "identity");
        set.map_err(|_| Reason::CredentialUnavailable.into())
    }

    /// Returns the bare value, for a header field other than `Authorization`.
    pub(crate) fn header_value(&self) -> Result<HeaderValue, Refusal> {
        let value = HeaderValue::from_str(self.value.expose_secret());
        let mut value = value.map_err(|_| Reason::CredentialUnavailable)?;
        value.set_sensitive(true);
        Ok(value)
    }

    pub(crate) fn echoes(&self) -> Arc<EchoPatterns> {
        self.echoes.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_is_one_line_that_a_header_can_carry() {
        for (text, good) in [
            ("sk-0123456789", true),
            ("sk-0123456789\n", true),
            ("sk-0123456789\r\n", true),
            ("sk-0123456789\n\n", false),
            ("sk-01234 56789", false),
            ("sk-0123\r\nX: y", false),
            ("sk-0123456789\0", false),
            ("short", false),
            ("", false),
        ] {
            assert_eq!(Credential::parse(text).is_ok(), good, "{text:?}");
        }
    }

    #[test]
    fn a_file_is_read_again_when_it_changes_and_not_used_when_it_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let name = CredentialName::parse("openai").unwrap();
        let all = CredentialStore::new([(name.clone(), path.clone())]);
        let value = || all.current(&name).map(|one| one.value.expose_secret().to_owned()).ok();
        assert_eq!(value(), None);
        fs::write(&path, "sk-first-value\n").unwrap();
        assert_eq!(value().as_deref(), Some("sk-first-value"));
        fs::write(dir.path().join("new"), "sk-other-value\n").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        assert_eq!(value().as_deref(), Some("sk-other-value"));
        fs::remove_file(&path).unwrap();
        assert_eq!(value(), None);
    }

    #[test]
    fn p11_whatever_the_sandbox_sent_is_gone() {
        let credential = Credential::parse("sk-0123456789").unwrap();
        let mut request = RequestHeader::build("GET", b"/", None).unwrap();
        for value in ["Bearer mine", "Basic bWluZQ=="] {
            request.append_header("aUTHORIZATION", value).unwrap();
        }
        for name in UNSEARCHABLE_FIELDS.into_iter().chain(["Accept-Encoding"]) {
            request.append_header(name, "bytes=0-7").unwrap();
        }
        credential.inject(&mut request).unwrap();
        let sent: Vec<_> = request.headers.get_all("authorization").iter().collect();
        assert_eq!(sent.len(), 1);
        assert_eq!(sent[0].as_bytes(), b"Bearer sk-0123456789");
        assert!(sent[0].is_sensitive());
        let mut rest: Vec<_> = request.headers.keys().map(|name| name.as_str()).collect();
        rest.sort_unstable();
        assert_eq!(rest, ["accept-encoding", "authorization"]);
        assert_eq!(request.headers["accept-encoding"], "identity");
    }
}
