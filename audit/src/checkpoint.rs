//! Checkpoints: signed notes of the chain head (record count and last hash), stored beside the log
//! and recorded in it.
//!
//! The format is the C2SP signed note with Ed25519. The text has three lines: the log's name, the
//! number of records, and the hash of the last one in base64. The hash is the head of the chain, not
//! the root of a Merkle tree.
//!
//! What a checkpoint proves, and where that ends: it fixes the hash of one record, and through the
//! chain every record before it. Changing or removing any of those changes the hash and is found.
//! Records after the newest checkpoint are not covered: anyone who can write the files can cut them off
//! or rewrite them, since the hashes need no key. The same attacker can also delete the newest notes
//! from this directory together with the records they cover, and the shorter log verifies. With the
//! signing key, they can even sign a rewritten chain. So the guarantee reaches up to the last
//! checkpoint *held elsewhere*. That is why each note is also a record: the log shipper carries it
//! off the machine within a minute or so, and `verify --checkpoint` compares against it.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sys::file::{self, Durability, Mode};
use zeroize::Zeroizing;

use crate::chain::{ChainHash, ChainHead};
use crate::note::{self, NAME_MAX, NOTE_MAX, Note, Signer, Verifier};

/// File name of the checkpoints, beside the segments.
pub const FILE: &str = "access.checkpoints";
/// File name of the public keys, beside the segments.
pub const PUBLIC_KEY_FILE: &str = "checkpoint.pub";
/// Largest checkpoint file to read: one note per minute for more than thirty years.
const FILE_MAX: u64 = 4 << 30;

/// Why checkpoints cannot be signed or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("cannot use {path}")]
    File { path: PathBuf, source: io::Error },
    #[error("{path} is not a checkpoint key; move it away and a new one is generated")]
    Key { path: PathBuf },
    #[error("other users can read {path}; run: chmod 600 {path}")]
    KeyMode { path: PathBuf },
    #[error("invalid log name `{0}`: use 1 to {NAME_MAX} bytes without spaces or plus signs")]
    Name(String),
    #[error("no public key found; a public key is a line such as name+0123abcd+base64")]
    NoPublicKey,
    #[error("`{0}` is not a public key; a public key looks like name+0123abcd+base64")]
    PublicKey(String),
    #[error("cannot generate a key: the system returned no random bytes")]
    Random,
}

/// Signs checkpoints.
pub(crate) struct CheckpointSigner {
    signer: Signer,
}

impl CheckpointSigner {
    /// Reads or generates the key and adds its public half to the file beside the log in `dir`.
    /// The file keeps earlier keys, so that their notes still verify.
    pub(crate) fn open(path: &Path, name: &str, dir: &Path) -> Result<Self, CheckpointError> {
        let file = |source| CheckpointError::File { path: path.to_owned(), source };
        let key = || CheckpointError::Key { path: path.to_owned() };
        let secret = match read_key(path) {
            Ok(secret) => secret,
            Err(error) if error.kind() == io::ErrorKind::NotFound => generate_key(path, name)?,
            Err(error) => return Err(file(error)),
        };
        if fs::metadata(path).map_err(file)?.permissions().mode() & 0o077 != 0 {
            return Err(CheckpointError::KeyMode { path: path.to_owned() });
        }
        let signer = Signer::parse(secret.trim()).ok_or_else(key)?;
        let beside = dir.join(PUBLIC_KEY_FILE);
        publish_key(&beside, &signer.public_key())
            .map_err(|source| CheckpointError::File { path: beside.clone(), source })?;
        Ok(Self { signer })
    }

    /// Signs a note of `head`.
    pub(crate) fn sign(&self, head: ChainHead) -> Option<String> {
        let text =
            format!("{}\n{}\n{}\n", self.signer.name(), head.sequence, STANDARD.encode(head.hash.bytes()));
        self.signer.sign(&text)
    }
}

/// Reads a key file, no further than a key can be long.
fn read_key(path: &Path) -> io::Result<Zeroizing<String>> {
    let mut secret = Zeroizing::new(String::with_capacity(note::KEY_MAX));
    File::open(path)?.take(note::KEY_MAX as u64).read_to_string(&mut secret)?;
    Ok(secret)
}

fn generate_key(path: &Path, name: &str) -> Result<Zeroizing<String>, CheckpointError> {
    if !note::is_key_name(name) {
        return Err(CheckpointError::Name(name.to_owned()));
    }
    let (signer, secret) = Signer::generate(name).ok_or(CheckpointError::Random)?;
    let file = |source| CheckpointError::File { path: path.to_owned(), source };
    let line = Zeroizing::new(format!("{}\n", *secret));
    file::replace(path, line.as_bytes(), Mode::Owner, Durability::Disk).map_err(file)?;
    publish_key(&path.with_extension("pub"), &signer.public_key()).map_err(file)?;
    Ok(secret)
}

/// Adds a public key to a file of public keys.
fn publish_key(path: &Path, public: &str) -> io::Result<()> {
    let known = match fs::read(path) {
        Ok(known) => String::from_utf8_lossy(&known).into_owned(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error),
    };
    if known.lines().any(|line| line == public) {
        return Ok(());
    }
    let good = known.lines().filter(|line| Verifier::parse(line).is_some()); // drops torn lines
    let all: String = good.chain([public]).map(|line| format!("{line}\n")).collect();
    file::replace(path, all.as_bytes(), Mode::Everybody, Durability::Disk)
}

/// Appends a note to the file beside the segments. A short write is truncated away; if that fails,
/// the next note starts after an empty line, so that a torn note does not spoil it.
pub(crate) fn append_note(dir: &Path, note: &str) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let options = options.read(true).append(true).create(true).mode(0o640);
    let mut file = options.open(dir.join(FILE))?;
    let size = file.metadata()?.len();
    if size == 0 {
        file.set_permissions(Permissions::from_mode(0o640))?; // independent of the umask
    }
    let separator = if ends_with_blank_line(&file, size)? { "" } else { "\n\n" };
    let written = file.write_all(format!("{separator}{note}\n").as_bytes()); // an empty line ends it
    if written.is_err() {
        file.set_len(size).unwrap_or_default();
    }
    written.and_then(|()| file.sync_data())
}

/// Returns whether a file is empty or ends with an empty line.
fn ends_with_blank_line(file: &File, size: u64) -> io::Result<bool> {
    let mut end = [b'\n'; 2];
    let known = size.min(2) as usize;
    file.read_exact_at(end.get_mut(..known).unwrap_or_default(), size - known as u64)?;
    Ok(end == *b"\n\n")
}

/// The public keys that checkpoints must be signed by.
pub struct CheckpointKeys {
    verifiers: Vec<Verifier>,
}

impl std::fmt::Debug for CheckpointKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CheckpointKeys")
    }
}

impl CheckpointKeys {
    /// Parses public keys, one per line.
    ///
    /// # Errors
    ///
    /// Returns [`CheckpointError::PublicKey`] for a line that is not a key, and
    /// [`CheckpointError::NoPublicKey`] if there is no line.
    pub fn parse(text: &str) -> Result<Self, CheckpointError> {
        let key =
            |line: &str| Verifier::parse(line).ok_or_else(|| CheckpointError::PublicKey(line.to_owned()));
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let verifiers = lines.map(key).collect::<Result<Vec<_>, _>>()?;
        if verifiers.is_empty() {
            return Err(CheckpointError::NoPublicKey);
        }
        Ok(Self { verifiers })
    }
}

/// A note, and the result of checking its signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    pub head: ChainHead,
    pub signature: SignatureStatus,
    /// Where the note is.
    pub place: CheckpointPosition,
}

/// A line of a checkpoint file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointPosition {
    pub file: PathBuf,
    /// From 1.
    pub line: u64,
}

/// The contents of checkpoint files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckpointNotes {
    pub checkpoints: Vec<Checkpoint>,
    /// Text that is not a note, such as a torn one. It proves nothing for or against the log.
    pub unreadable: Vec<CheckpointPosition>,
}

/// The result of checking the signature of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignatureStatus {
    /// Invalid, or not by a given key.
    Bad,
    /// Valid, by a given key.
    Good,
    /// Not checked: no key was given.
    Unchecked,
}

/// Reads every checkpoint of a file into `notes`.
///
/// # Errors
///
/// Returns an error if the file cannot be read. Text that is not a note goes to
/// [`CheckpointNotes::unreadable`].
pub fn read_notes(
    path: &Path,
    keys: Option<&CheckpointKeys>,
    notes: &mut CheckpointNotes,
) -> Result<(), CheckpointError> {
    let file = |source| CheckpointError::File { path: path.to_owned(), source };
    if fs::metadata(path).map_err(file)?.len() > FILE_MAX {
        return Err(file(io::Error::new(io::ErrorKind::FileTooLarge, "too many checkpoints")));
    }
    let bytes = fs::read(path).map_err(file)?;
    for (line, text) in split_notes(&String::from_utf8_lossy(&bytes)) {
        let place = CheckpointPosition { file: path.to_owned(), line };
        match parse_note(&text, keys) {
            Some((head, signature)) => {
                notes.checkpoints.push(Checkpoint { head, signature, place });
            }
            None => notes.unreadable.push(place),
        }
    }
    Ok(())
}

/// Returns the head in the newest checkpoint beside the segments of `dir`. Reads only the file's end.
pub(crate) fn newest_head(dir: &Path) -> Option<ChainHead> {
    let mut file = fs::File::open(dir.join(FILE)).ok()?;
    let size = file.metadata().ok()?.len();
    file.seek(io::SeekFrom::Start(size.saturating_sub(2 * NOTE_MAX as u64))).ok()?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail).ok()?;
    // The first note of the tail may be incomplete; the newest is whole.
    let pieces = split_notes(&String::from_utf8_lossy(&tail));
    pieces.iter().rev().find_map(|(_, text)| parse_note(text, None)).map(|(head, _)| head)
}

/// Splits a file into notes and other text, each with its line number. A note is a text, an empty
/// line and its signatures; an empty line ends it.
fn split_notes(text: &str) -> Vec<(u64, String)> {
    let mut pieces: Vec<(u64, String)> = Vec::new();
    let mut before = NoteParagraph::Signatures;
    for (line, paragraph) in split_paragraphs(text) {
        let signs = paragraph.lines().all(|line| line.starts_with('\u{2014}'));
        let kind = if signs { NoteParagraph::Signatures } else { NoteParagraph::Text };
        match pieces.last_mut().filter(|_| before == NoteParagraph::Text && signs) {
            Some((_, note)) => *note = format!("{note}\n{paragraph}"),
            None => pieces.push((line, paragraph)),
        }
        before = kind;
    }
    pieces
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NoteParagraph {
    Signatures,
    Text,
}

/// Splits a text at empty lines, each part with the number of its first line.
fn split_paragraphs(text: &str) -> Vec<(u64, String)> {
    let mut paragraphs: Vec<(u64, String)> = Vec::new();
    let mut start_new = true;
    for (line, number) in text.lines().zip(1..) {
        match paragraphs.last_mut().filter(|_| !start_new) {
            _ if line.is_empty() => {}
            Some((_, paragraph)) => *paragraph += &format!("{line}\n"),
            None => paragraphs.push((number, format!("{line}\n"))),
        }
        start_new = line.is_empty();
    }
    paragraphs
}

/// Parses one note and checks its signature, if there are keys.
fn parse_note(text: &str, keys: Option<&CheckpointKeys>) -> Option<(ChainHead, SignatureStatus)> {
    let note = Note::parse(text)?;
    let mut lines = note.text().lines();
    let (name, size, hash) = (lines.next()?, lines.next()?, lines.next()?);
    let head = ChainHead { sequence: size.parse().ok()?, hash: decode_hash(hash)? };
    let signature = match keys {
        None => SignatureStatus::Unchecked,
        Some(keys) => {
            let named = keys.verifiers.iter().any(|known| known.name() == name);
            let good = named && note.is_signed_by(&keys.verifiers);
            if good { SignatureStatus::Good } else { SignatureStatus::Bad }
        }
    };
    Some((head, signature))
}

fn decode_hash(text: &str) -> Option<ChainHash> {
    let bytes: [u8; 32] = STANDARD.decode(text).ok()?.try_into().ok()?;
    Some(ChainHash::from_bytes(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::note::tests as vector;

    fn head() -> ChainHead {
        ChainHead { sequence: 42, hash: ChainHash::from_bytes(&std::array::from_fn(|at| 0xff - at as u8)) }
    }

    fn write_key(path: &Path, text: &str) {
        file::replace(path, text.as_bytes(), Mode::Owner, Durability::Process).unwrap();
    }

    #[test]
    fn keys_and_checkpoints_on_disk_stay_good() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoint.key");
        write_key(&path, &format!("{}\n", vector::SECRET));
        let signer = CheckpointSigner::open(&path, "another.name", dir.path()).unwrap();
        assert_eq!(signer.sign(head()).unwrap(), vector::NOTE);
        let public = fs::read_to_string(dir.path().join(PUBLIC_KEY_FILE)).unwrap();
        assert_eq!(public, format!("{}\n", vector::PUBLIC));

        append_note(dir.path(), vector::NOTE).unwrap();
        assert_eq!(newest_head(dir.path()), Some(head()));
        let (keys, mut notes) = (CheckpointKeys::parse(&public).unwrap(), CheckpointNotes::default());
        read_notes(&dir.path().join(FILE), Some(&keys), &mut notes).unwrap();
        let read: Vec<_> = notes.checkpoints.iter().map(|it| (it.head, it.signature)).collect();
        assert_eq!(read, [(head(), SignatureStatus::Good)]);
    }

    #[test]
    fn files_that_hold_no_key_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoint.key");
        let huge = "A".repeat(1 << 20);
        for text in ["", "\n", vector::PUBLIC, &format!("{0}\n{0}", vector::SECRET), &huge] {
            write_key(&path, text);
            let refused = CheckpointSigner::open(&path, "log", dir.path()).err().unwrap();
            assert!(matches!(refused, CheckpointError::Key { .. }), "{refused}");
        }
        for name in ["", "a b", "a+b", "a\nb"] {
            let refused =
                CheckpointSigner::open(&dir.path().join("new.key"), name, dir.path()).err().unwrap();
            assert!(matches!(refused, CheckpointError::Name(_)), "{refused}");
        }
        for (text, line) in [("junk", "junk"), (vector::SECRET, vector::SECRET)] {
            let refused = CheckpointKeys::parse(&format!("{}\n{text}", vector::PUBLIC)).unwrap_err();
            assert!(matches!(&refused, CheckpointError::PublicKey(refused) if refused == line));
        }
        assert!(matches!(CheckpointKeys::parse("\n \n"), Err(CheckpointError::NoPublicKey)));
    }
}
