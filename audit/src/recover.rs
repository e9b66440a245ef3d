//! Opening a log that may have been left in any state: the newest segment is verified line by
//! line, a torn last line is kept and named, decisions without outcome are closed as `unknown`.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use serde::Deserialize;
use ulid::Ulid;

use crate::chain::{Content, Head, Link};
use crate::checkpoint::{self, CheckpointError, Notary};
use crate::config::Config;
use crate::draft::Owed;
use crate::health::Counters;
use crate::id::Ids;
use crate::log::LogDown;
use crate::read::{Lines, Piece};
use crate::record::{Aside, Torn};
use crate::segment::{self, Segment};
use crate::text::Text;
use crate::writer::{self, Kept, Noted, Writer};

/// Why a log could not be opened. Nothing may be served without it.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("checkpoints of the access log cannot be signed")]
    Checkpoint(#[from] CheckpointError),
    #[error("the access log cannot be written in {dir}")]
    Dir { dir: PathBuf, source: io::Error },
    #[error("the access log cannot be begun")]
    Down(#[from] LogDown),
    #[error("{file}:{line}: {what}; move the log's directory aside, keep it, and begin a new one")]
    Tail { file: PathBuf, line: u64, what: &'static str },
    #[error("the access log's thread cannot be started")]
    Thread(#[source] io::Error),
}

/// How a segment ends.
struct Tail {
    head: Head,
    torn: Option<Torn>,
    owed: HashMap<u128, Owed>,
}

/// Opens the log of `config.dir` and writes that it was.
pub(crate) fn open(config: Arc<Config>) -> Result<Writer, OpenError> {
    let fail = |source| OpenError::Dir { dir: config.dir.clone(), source };
    DirBuilder::new().recursive(true).mode(0o750).create(&config.dir).map_err(fail)?;
    let lock = writer::lock(&config.dir).map_err(fail)?;
    let notary = Notary::open(&config.key_path(), &config.name, &config.dir)?;
    let mut aside = Vec::new();
    let newest = newest(&config.dir, &mut aside).map_err(fail)?;
    let tail = newest.as_ref().map(|(first, path)| read_tail(*first, path)).transpose()?;
    let tail = tail.unwrap_or(Tail { head: Head::START, torn: None, owed: HashMap::new() });
    let behind = behind(&config.dir, tail.head);
    let mut writer = Writer {
        counters: Arc::new(Counters::default()),
        ids: Arc::new(Ids::new()),
        notary,
        lock: Some(lock),
        head: tail.head,
        segment: None,
        last: newest.as_ref().map(|(first, _)| segment::name(*first)),
        torn: tail.torn,
        owed: tail.owed,
        trouble: None,
        noted: Noted { sequence: tail.head.sequence, at: Instant::now(), kept: Kept::Yes },
        buffer: Vec::new(),
        marks: Vec::new(),
        config,
    };
    resume(&mut writer, newest.map(|(first, _)| first))?;
    writer.tell("log_started", None)?;
    for aside in aside {
        writer.tell_aside(aside)?;
    }
    if let Some(message) = behind {
        writer.tell("log_behind_checkpoint", Some(&message))?;
    }
    writer.close_unknown()?;
    Ok(writer)
}

/// What to say where the newest checkpoint tells of records that are not here: somebody cut off
/// the tail, or the power failed before it was on disk. Verification will find it; the record
/// tells it at once.
fn behind(dir: &Path, head: Head) -> Option<Text<512>> {
    let noted = checkpoint::newest(dir)?;
    let (size, have) = (noted.sequence, head.sequence);
    (size > have).then(|| format!("a checkpoint tells of {size} records, {have} are here").into())
}

/// Goes on in the newest segment, or in a new one where that has ended or is torn.
fn resume(writer: &mut Writer, newest: Option<u64>) -> Result<(), OpenError> {
    let config = Arc::clone(&writer.config);
    if let Some(first) = newest.filter(|_| writer.torn.is_none()) {
        let fail = |source| OpenError::Dir { dir: config.dir.clone(), source };
        let segment = Segment::resume(&config.dir, first).map_err(fail)?;
        if segment.size < config.segment_bytes && segment.age() < config.segment_age {
            writer.segment = Some(segment);
            return Ok(());
        }
    }
    Ok(writer.open_segment()?)
}

/// The newest segment that holds a record. One that holds none was being made when its maker
/// died; its name is needed, so it is removed where it is empty and moved aside where it is not.
fn newest(dir: &Path, aside: &mut Vec<Aside>) -> io::Result<Option<(u64, PathBuf)>> {
    let mut found = segment::segments(dir)?;
    while let Some((first, path)) = found.pop() {
        match segment::set_aside(&path) {
            Ok(Some(moved)) => aside.push(moved),
            Ok(None) => fs::remove_file(path)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Ok(Some((first, path)));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Verifies a segment and gathers the decisions that have no outcome in it.
fn read_tail(first: u64, path: &Path) -> Result<Tail, OpenError> {
    let fail = |source| OpenError::Dir { dir: path.to_owned(), source };
    let broken = |line, what| OpenError::Tail { file: path.to_owned(), line, what };
    let mut lines = Lines::new(File::open(path).map_err(fail)?);
    let mut tail = Tail { head: Head::START, torn: None, owed: HashMap::new() };
    let mut number = 0;
    while let Some(piece) = lines.next().map_err(fail)? {
        number += 1;
        match piece {
            Piece::Line(line) => {
                let last = (number > 1).then_some(tail.head);
                tail.head = follow(last, line).map_err(|what| broken(number, what))?;
                if number == 1 && tail.head.sequence != first {
                    return Err(broken(number, "a file named after another record"));
                }
                note_owed(line, &mut tail.owed);
            }
            Piece::Long => return Err(broken(number, "a line longer than a record")),
            Piece::Torn(torn) => tail.torn = Some(torn),
        }
    }
    Ok(tail)
}

fn follow(last: Option<Head>, line: &[u8]) -> Result<Head, &'static str> {
    let link = Link::read(line).ok_or("a line that is no record")?;
    match (link.content, last) {
        (Content::Changed, _) => Err("a record that was changed"),
        (Content::Intact, Some(last)) if link.previous != last.hash => {
            Err("a record that does not follow the one before it")
        }
        (Content::Intact, Some(last)) if link.head.sequence != last.sequence + 1 => {
            Err("a record out of its turn")
        }
        (Content::Intact, _) => Ok(link.head),
    }
}

/// As much of a record as tells whether something is owed.
#[derive(Deserialize)]
struct Seen {
    class_uid: u16,
    #[serde(default)]
    src_endpoint: Named,
    #[serde(default)]
    dst_endpoint: Named,
    #[serde(default)]
    query: Named,
    metadata: SeenMetadata,
    unmapped: Unmapped,
}

#[derive(Default, Deserialize)]
struct Named {
    #[serde(default)]
    uid: String,
    #[serde(default)]
    hostname: String,
}

#[derive(Deserialize)]
struct SeenMetadata {
    correlation_uid: String,
    #[serde(default)]
    tenant_uid: String,
}

#[derive(Deserialize)]
struct Unmapped {
    sandbar: SeenSandbar,
}

#[derive(Deserialize)]
struct SeenSandbar {
    stage: String,
    #[serde(default)]
    open: Vec<SeenOpen>,
}

#[derive(Deserialize)]
struct SeenOpen {
    uid: String,
    class_uid: u16,
    #[serde(default)]
    sandbox: String,
    #[serde(default)]
    tenant: String,
    #[serde(default)]
    host: String,
}

fn note_owed(line: &[u8], owed: &mut HashMap<u128, Owed>) {
    let Ok(seen) = serde_json::from_slice::<Seen>(line) else { return };
    let attempt = |uid: &str| Ulid::from_string(uid).ok().map(u128::from);
    match seen.unmapped.sandbar.stage.as_str() {
        "decision" => {
            let Some(attempt) = attempt(&seen.metadata.correlation_uid) else { return };
            let names = [seen.dst_endpoint.hostname, seen.query.hostname];
            let host = names.into_iter().find(|name| !name.is_empty()).unwrap_or_default();
            let open = SeenOpen {
                uid: String::new(),
                class_uid: seen.class_uid,
                sandbox: seen.src_endpoint.uid,
                tenant: seen.metadata.tenant_uid,
                host,
            };
            owed.insert(attempt, owe(attempt, open));
        }
        "outcome" => {
            attempt(&seen.metadata.correlation_uid).map(|attempt| owed.remove(&attempt));
        }
        _ => {
            for open in seen.unmapped.sandbar.open {
                if let Some(attempt) = attempt(&open.uid) {
                    owed.insert(attempt, owe(attempt, open));
                }
            }
        }
    }
}

fn owe(attempt: u128, open: SeenOpen) -> Owed {
    Owed {
        attempt,
        class_uid: open.class_uid,
        sandbox: open.sandbox.into(),
        tenant: open.tenant.into(),
        host: open.host.into(),
    }
}
