//! Checkpoints: signed notes of how long the chain was and how it ended, kept beside the log and
//! told in it, so that whoever holds one can tell when the tail was cut off or rewritten.
//!
//! The form is that of C2SP signed notes with Ed25519. The text is three lines: the log's name,
//! the number of records, the hash of the last one in base64. The hash is the chain's, not the
//! root of a tree.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rand_core::OsRng;
use signed_note::{Note, Signer, StandardSigner, StandardVerifier, Verifier, VerifierList};

use crate::chain::{Hash, Head};

/// File name of the checkpoints, beside the segments.
pub const FILE: &str = "access.checkpoints";
/// Longest checkpoint that is read.
const NOTE_MAX: usize = 4096;
/// Largest file of checkpoints that is read: a note a minute for more than thirty years.
const FILE_MAX: u64 = 4 << 30;

/// Why checkpoints cannot be signed or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("{path} is not a key for checkpoints; move it away and a new one is made")]
    Key { path: PathBuf },
    #[error("`{0}` cannot name a log: it must have neither spaces nor plus signs")]
    Name(String),
    #[error("`{0}` is not a public key; it looks like name+0123abcd+base64")]
    PublicKey(String),
}

/// Signs checkpoints.
pub(crate) struct Notary {
    signer: StandardSigner,
}

impl Notary {
    /// Reads the key, or makes one and its public half (`.pub`) beside it.
    pub(crate) fn open(path: &Path, name: &str) -> Result<Self, CheckpointError> {
        let file = |source| CheckpointError::File { path: path.to_owned(), source };
        let secret = match fs::read_to_string(path) {
            Ok(secret) => secret,
            Err(error) if error.kind() == io::ErrorKind::NotFound => generate(path, name)?,
            Err(error) => return Err(file(error)),
        };
        let signer = StandardSigner::new(secret.trim())
            .map_err(|_| CheckpointError::Key { path: path.to_owned() })?;
        Ok(Self { signer })
    }

    /// The signed note of `head`.
    pub(crate) fn sign(&self, head: Head) -> Option<String> {
        let text = format!(
            "{}\n{}\n{}\n",
            self.signer.name(),
            head.sequence,
            STANDARD.encode(head.hash.bytes())
        );
        let mut note = Note::new(text.as_bytes(), &[]).ok()?;
        note.add_sigs(&[&self.signer]).ok()?;
        String::from_utf8(note.to_bytes()).ok()
    }
}

fn generate(path: &Path, name: &str) -> Result<String, CheckpointError> {
    if !signed_note::is_key_name_valid(name) {
        return Err(CheckpointError::Name(name.to_owned()));
    }
    let (secret, public) = signed_note::generate_key(&mut OsRng, name);
    let file = |source| CheckpointError::File { path: path.to_owned(), source };
    write_new(path, 0o600, &secret).map_err(file)?;
    write_new(&path.with_extension("pub"), 0o644, &public).map_err(file)?;
    Ok(secret)
}

fn write_new(path: &Path, mode: u32, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(format!("{text}\n").as_bytes())?;
    file.sync_all()
}

/// Appends a note to the file beside the segments.
pub(crate) fn keep(dir: &Path, note: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).mode(0o640).open(dir.join(FILE))?;
    file.write_all(format!("{note}\n").as_bytes())?; // an empty line parts the notes
    file.sync_data()
}

/// The keys by which checkpoints are believed.
pub struct Keys(VerifierList);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys")
    }
}

impl Keys {
    /// Reads public keys, one a line.
    ///
    /// # Errors
    ///
    /// Returns [`CheckpointError::PublicKey`] for a line that is none.
    pub fn parse(text: &str) -> Result<Self, CheckpointError> {
        let mut keys: Vec<Box<dyn Verifier>> = Vec::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let key = StandardVerifier::new(line)
                .map_err(|_| CheckpointError::PublicKey(line.to_owned()))?;
            keys.push(Box::new(key));
        }
        Ok(Self(VerifierList::new(keys)))
    }
}

/// A note, and whether it can be believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    pub head: Head,
    pub signature: Signature,
}

/// What the signature of a checkpoint is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signature {
    /// Wrong, or by no key that was given.
    Bad,
    /// By a key that was given.
    Good,
    /// No key was given.
    Unchecked,
}

/// Reads every checkpoint of a file.
///
/// # Errors
///
/// Returns the error of reading, or `InvalidData` where something is no note.
pub fn read(path: &Path, keys: Option<&Keys>) -> Result<Vec<Checkpoint>, CheckpointError> {
    let file = |source| CheckpointError::File { path: path.to_owned(), source };
    if fs::metadata(path).map_err(file)?.len() > FILE_MAX {
        return Err(file(io::Error::new(io::ErrorKind::FileTooLarge, "too many checkpoints")));
    }
    let text = fs::read_to_string(path).map_err(file)?;
    notes(&text)
        .map(|note| parse(&note, keys))
        .collect::<Option<_>>()
        .ok_or_else(|| file(io::Error::new(io::ErrorKind::InvalidData, "not a checkpoint")))
}

/// Parts a file into its notes: each ends with the first empty line after a signature.
fn notes(text: &str) -> impl Iterator<Item = String> {
    let mut lines = text.lines().peekable();
    std::iter::from_fn(move || {
        let mut note = String::new();
        while lines.next_if(|line| line.is_empty()).is_some() {}
        while let Some(line) = lines.next() {
            note.push_str(line);
            note.push('\n');
            let signed = line.starts_with('\u{2014}');
            if signed && lines.peek().is_none_or(|next| next.is_empty()) {
                break;
            }
        }
        (!note.is_empty()).then_some(note)
    })
}

/// Reads one note.
pub fn parse(text: &str, keys: Option<&Keys>) -> Option<Checkpoint> {
    let note = Note::from_bytes(text.as_bytes()).ok().filter(|_| text.len() <= NOTE_MAX)?;
    let body = str::from_utf8(note.text()).ok()?;
    let mut lines = body.lines();
    let (_name, size, hash) = (lines.next()?, lines.next()?, lines.next()?);
    let head = Head { sequence: size.parse().ok()?, hash: unbase64(hash)? };
    let signature = match keys {
        None => Signature::Unchecked,
        Some(keys) if note.verify(&keys.0).is_ok() => Signature::Good,
        Some(_) => Signature::Bad,
    };
    Some(Checkpoint { head, signature })
}

fn unbase64(text: &str) -> Option<Hash> {
    let bytes: [u8; 32] = STANDARD.decode(text).ok()?.try_into().ok()?;
    Some(Hash::from_bytes(&bytes))
}
