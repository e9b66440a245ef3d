//! Verifying a log offline: hashes every line and follows every link, across segments and against
//! checkpoints.
//!
//! Each record names the previous one, so several threads can check spans of a file independently;
//! joining them only compares the last record of one span with the first of the next.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use serde::Deserialize;

use crate::chain::{ChainHash, ChainHead, ChainLink, LineIntegrity};
use crate::checkpoint::{Checkpoint, SignatureStatus};
use crate::line_reader::{LineReader, RawLine};
use crate::record::{RemovedSegments, TornLine};
use crate::segment;

/// Bytes of a file that one thread checks at a time.
const SPAN_BYTES: u64 = 4 << 20;
/// Maximum number of faults in a report; one is enough to reject the log.
const FAULTS_MAX: usize = 100;
/// Maximum number of threads: a disk does not deliver more than a few can hash.
const THREADS_MAX: usize = 8;
/// Maximum number of removals remembered per file. A rotation adds one; forged ones come last.
const REMOVED_MAX: usize = 4096;

/// The result of a verification.
#[derive(Debug)]
pub struct VerifyReport {
    pub records: u64,
    pub bytes: u64,
    /// Number of the first record.
    pub first: Option<u64>,
    /// The end of the chain.
    pub last: Option<ChainHead>,
    /// Number of checkpoints that match the log.
    pub checkpoints: u64,
    /// The newest record that a matching checkpoint covers.
    pub covered: Option<u64>,
    /// The newest record that a matching checkpoint with a valid signature covers.
    pub attested: Option<u64>,
    pub faults: Vec<LogFault>,
    pub gaps: Vec<Gap>,
}

/// The verdict on a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogIntegrity {
    Changed,
    Incomplete,
    Intact,
}

impl VerifyReport {
    /// Returns the verdict.
    pub fn integrity(&self) -> LogIntegrity {
        match (self.faults.is_empty(), self.gaps.is_empty()) {
            (false, _) => LogIntegrity::Changed,
            (true, false) => LogIntegrity::Incomplete,
            (true, true) => LogIntegrity::Intact,
        }
    }
}

/// A place where the log is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFault {
    pub file: PathBuf,
    /// From 1.
    pub line: u64,
    pub kind: FaultKind,
}

/// How a line differs from what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultKind {
    #[error("the record's bytes are not those that were hashed")]
    Changed,
    #[error("a checkpoint has another hash for this record")]
    Checkpoint,
    #[error("the next segment follows a later record of this file: its end was cut off")]
    CutOff,
    #[error("the link to the record before it is broken: that record was changed, removed or moved")]
    Link,
    #[error("the file is named after record {named}, but begins with {found}")]
    Name { named: u64, found: u64 },
    #[error("the line is not a record")]
    NotARecord,
    #[error("the record has number {found}, expected {expected}")]
    Sequence { expected: u64, found: u64 },
    #[error("the signature of a checkpoint is invalid")]
    Signature,
    #[error("the unfinished line is not the one that the next segment names")]
    Torn,
}

/// Something that is missing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Gap {
    #[error("the given files contain no records")]
    Empty,
    #[error("records {from} to {to} are missing from the given files")]
    Missing { from: u64, to: u64 },
    #[error("a checkpoint covers {size} records: the last {} are missing", size - have)]
    Tail { size: u64, have: u64 },
    #[error("the last line of {file} is unfinished: {bytes} bytes", file = file.display())]
    Torn { file: PathBuf, bytes: u64 },
    #[error("no checkpoint with a valid signature matches the log")]
    Unattested,
}

/// The progress of a verification, for another thread to read.
#[derive(Debug, Default)]
pub struct VerifyProgress {
    pub bytes: AtomicU64,
}

/// Verifies segments, in the order of their records, against checkpoints.
///
/// # Errors
///
/// Returns the path and the error of the first file that cannot be read.
pub fn verify(
    files: &[PathBuf],
    checkpoints: &[Checkpoint],
    progress: &VerifyProgress,
) -> Result<VerifyReport, (PathBuf, io::Error)> {
    let mut notes: Vec<&Checkpoint> = checkpoints.iter().collect();
    notes.sort_by_key(|note| note.head.sequence);
    let pieces = plan_spans(files)?;
    let checked = check_spans(&pieces, &notes, progress)?;
    let mut segments = join_spans(files, checked);
    segments.sort_by_key(|segment| segment.first.map_or(u64::MAX, |(_, first)| first));
    Ok(build_report(segments, checkpoints, &notes))
}

/// A span of a file: the lines that start in it.
struct FileSpan<'a> {
    file: usize,
    path: &'a Path,
    from: u64,
    to: u64,
    /// Its size on disk.
    bytes: u64,
}

fn plan_spans(files: &[PathBuf]) -> Result<Vec<FileSpan<'_>>, (PathBuf, io::Error)> {
    let mut spans = Vec::new();
    for (file, path) in files.iter().enumerate() {
        let size = std::fs::metadata(path).map_err(|error| (path.clone(), error))?.len();
        if segment::is_compressed(path) {
            spans.push(FileSpan { file, path, from: 0, to: u64::MAX, bytes: size }); // it cannot be entered in between
            continue;
        }
        let starts = (0..size).step_by(SPAN_BYTES as usize);
        spans.extend(starts.map(|from| {
            let to = (from + SPAN_BYTES).min(size);
            FileSpan { file, path, from, to, bytes: to - from }
        }));
    }
    Ok(spans)
}

/// The result for one span, or for one file once its spans are joined.
#[derive(Default)]
struct CheckedSpan {
    file: usize,
    lines: u64,
    records: u64,
    bytes: u64,
    /// The `previous` hash and the number of the first record.
    first: Option<(ChainHash, u64)>,
    last: Option<ChainHead>,
    /// Line number within the span, and the fault.
    faults: Vec<(u64, FaultKind)>,
    torn: Option<TornLine>,
    opening: Option<SegmentOpening>,
    /// Removals that records announce, with the numbers of those records.
    removed: Vec<(u64, RemovedSegments)>,
    noted: u64,
    covered: Option<u64>,
    attested: Option<u64>,
}

/// The first record of a segment, as far as it describes the previous segment.
#[derive(Clone, Debug, Default, Deserialize)]
struct SegmentOpening {
    #[serde(default)]
    after: Option<String>,
    #[serde(default)]
    torn: Option<TornLine>,
}

fn check_spans(
    spans: &[FileSpan<'_>],
    notes: &[&Checkpoint],
    progress: &VerifyProgress,
) -> Result<Vec<CheckedSpan>, (PathBuf, io::Error)> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(span) = spans.get(at) else { return };
            let result = check_span(span, notes).map_err(|error| (span.path.to_owned(), error));
            progress.bytes.fetch_add(span.bytes, Ordering::Relaxed);
            sys::lock(&done).push((at, result));
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

fn check_span(span: &FileSpan<'_>, notes: &[&Checkpoint]) -> io::Result<CheckedSpan> {
    // A line that continues into this span belongs to the previous one: start after its newline.
    let skip = span.from > 0;
    let source: Box<dyn Read> = match skip {
        false => segment::open_reader(span.path)?,
        true => {
            let mut file = File::open(span.path)?;
            file.seek(SeekFrom::Start(span.from - 1))?;
            Box::new(file)
        }
    };
    let mut lines = LineReader::new(source);
    let mut checked = CheckedSpan { file: span.file, ..CheckedSpan::default() };
    let base = span.from - u64::from(skip);
    if skip {
        lines.skip_line(span.to - base)?;
    }
    let mut note = 0;
    while base + lines.offset < span.to {
        let Some(piece) = lines.next()? else { break };
        match piece {
            RawLine::Line(line) => {
                checked.bytes += line.len() as u64 + 1;
                checked.check_line(line, notes, &mut note);
            }
            RawLine::Long => checked.add_line_fault(FaultKind::NotARecord),
            RawLine::Torn(torn) => checked.torn = Some(torn),
        }
    }
    Ok(checked)
}

impl CheckedSpan {
    fn check_line(&mut self, line: &[u8], notes: &[&Checkpoint], note: &mut usize) {
        let Some(link) = ChainLink::parse(line) else {
            return self.add_line_fault(FaultKind::NotARecord);
        };
        self.lines += 1;
        self.records += 1;
        if link.content == LineIntegrity::Changed {
            self.add_fault(FaultKind::Changed);
        }
        match self.last {
            None => self.first = Some((link.previous, link.head.sequence)),
            Some(last) => self.check_link(last, link.previous, link.head.sequence),
        }
        self.last = Some(link.head);
        self.check_checkpoints(link.head, notes, note);
        if memchr::memmem::find(line.get(..128).unwrap_or(line), LIFECYCLE).is_some() {
            self.read_lifecycle(line);
        }
    }

    /// Checks that a record follows the one before it.
    fn check_link(&mut self, last: ChainHead, previous: ChainHash, sequence: u64) {
        let expected = last.sequence + 1;
        if previous != last.hash {
            self.add_fault(FaultKind::Link);
        } else if sequence != expected {
            self.add_fault(FaultKind::Sequence { expected, found: sequence });
        }
    }

    fn check_checkpoints(&mut self, head: ChainHead, notes: &[&Checkpoint], note: &mut usize) {
        while notes.get(*note).is_some_and(|noted| noted.head.sequence < head.sequence) {
            *note += 1;
        }
        for noted in notes.get(*note..).unwrap_or_default() {
            match noted.head.sequence == head.sequence {
                true if noted.head.hash == head.hash => self.count_checkpoint(noted),
                true => self.add_fault(FaultKind::Checkpoint),
                false => break,
            }
        }
    }

    fn count_checkpoint(&mut self, note: &Checkpoint) {
        let through = Some(note.head.sequence);
        match note.signature {
            SignatureStatus::Bad => return,
            SignatureStatus::Good => self.attested = self.attested.max(through),
            SignatureStatus::Unchecked => {}
        }
        self.covered = self.covered.max(through);
        self.noted += 1;
    }

    fn read_lifecycle(&mut self, line: &[u8]) {
        let Ok(record) = serde_json::from_slice::<LifecycleLine>(line) else { return };
        let sandbar = record.unmapped.sandbar;
        if self.records == 1 {
            self.opening = sandbar.segment;
        }
        let sequence = self.last.map_or(0, |last| last.sequence);
        let room = REMOVED_MAX.saturating_sub(self.removed.len());
        self.removed.extend(sandbar.removed.map(|removed| (sequence, removed)).into_iter().take(room));
    }

    /// Counts a line that is not a record and adds a fault for it.
    fn add_line_fault(&mut self, kind: FaultKind) {
        self.lines += 1;
        self.add_fault(kind);
    }

    /// Adds a fault for the last line counted.
    fn add_fault(&mut self, kind: FaultKind) {
        if self.faults.len() < FAULTS_MAX {
            self.faults.push((self.lines, kind));
        }
    }

    /// Joins the next span of the same file.
    fn extend(&mut self, next: CheckedSpan) {
        for (line, kind) in next.faults {
            self.faults.push((self.lines + line, kind));
        }
        if let (Some(last), Some((previous, sequence))) = (self.last, next.first) {
            self.lines += 1; // a fault belongs to the first line of the next span
            self.check_link(last, previous, sequence);
            self.lines -= 1;
        }
        if self.records == 0 {
            (self.first, self.opening) = (next.first, next.opening);
        }
        self.lines += next.lines;
        self.records += next.records;
        self.bytes += next.bytes;
        self.noted += next.noted;
        self.last = next.last.or(self.last);
        self.torn = next.torn.or(self.torn.take());
        let room = REMOVED_MAX.saturating_sub(self.removed.len());
        self.removed.extend(next.removed.into_iter().take(room));
        self.covered = self.covered.max(next.covered);
        self.attested = self.attested.max(next.attested);
    }
}

const LIFECYCLE: &[u8] = br#""class_uid":6002,"#;

#[derive(Deserialize)]
struct LifecycleLine {
    unmapped: LifecycleUnmapped,
}

#[derive(Deserialize)]
struct LifecycleUnmapped {
    sandbar: LifecycleExtension,
}

#[derive(Deserialize)]
struct LifecycleExtension {
    #[serde(default)]
    segment: Option<SegmentOpening>,
    #[serde(default)]
    removed: Option<RemovedSegments>,
}

/// One file and its joined result.
struct CheckedFile {
    path: PathBuf,
    checked: CheckedSpan,
}

impl std::ops::Deref for CheckedFile {
    type Target = CheckedSpan;
    fn deref(&self) -> &CheckedSpan {
        &self.checked
    }
}

fn join_spans(files: &[PathBuf], pieces: Vec<CheckedSpan>) -> Vec<CheckedFile> {
    let mut whole: Vec<CheckedFile> = files
        .iter()
        .map(|path| CheckedFile { path: path.clone(), checked: CheckedSpan::default() })
        .collect();
    for piece in pieces {
        if let Some(file) = whole.get_mut(piece.file) {
            file.checked.extend(piece);
        }
    }
    whole
}

fn build_report(
    segments: Vec<CheckedFile>,
    checkpoints: &[Checkpoint],
    notes: &[&Checkpoint],
) -> VerifyReport {
    let mut report = VerifyReport {
        records: segments.iter().map(|segment| segment.records).sum(),
        bytes: segments.iter().map(|segment| segment.bytes).sum(),
        first: segments.iter().find_map(|segment| segment.first).map(|(_, first)| first),
        last: segments.iter().rev().find_map(|segment| segment.last),
        checkpoints: segments.iter().map(|segment| segment.noted).sum(),
        covered: segments.iter().filter_map(|segment| segment.covered).max(),
        attested: segments.iter().filter_map(|segment| segment.attested).max(),
        faults: Vec::new(),
        gaps: Vec::new(),
    };
    for segment in &segments {
        let faults = segment.faults.iter();
        report.faults.extend(faults.map(|(line, kind)| file_fault(segment, *line, *kind)));
    }
    // A file without a record has no place in the chain.
    let (chain, rest): (Vec<&CheckedFile>, Vec<&CheckedFile>) =
        segments.iter().partition(|segment| segment.first.is_some());
    chain.iter().for_each(|segment| check_name(segment, &mut report));
    check_beginning(&chain, &mut report);
    for pair in chain.windows(2) {
        if let [one, next] = pair {
            check_succession(one, next, &mut report);
        }
    }
    chain.last().into_iter().chain(&rest).for_each(|segment| report_torn_line(segment, &mut report));
    let have = report.last.map_or(0, |last| last.sequence);
    if let Some(size) = notes.last().map(|note| note.head.sequence).filter(|size| *size > have) {
        report.gaps.push(Gap::Tail { size, have });
    }
    let bad = checkpoints.iter().filter(|note| note.signature == SignatureStatus::Bad);
    report.faults.extend(bad.map(|note| LogFault {
        file: note.place.file.clone(),
        line: note.place.line,
        kind: FaultKind::Signature,
    }));
    report.faults.truncate(FAULTS_MAX);
    report
}

/// Checks that a file with a segment's name is named after its first record.
fn check_name(segment: &CheckedFile, report: &mut VerifyReport) {
    let file = segment.path.file_name().and_then(|name| name.to_str());
    let named = file.and_then(segment::first_sequence);
    if let (Some(named), Some((_, found))) = (named, segment.first)
        && named != found
    {
        report.faults.push(file_fault(segment, 1, FaultKind::Name { named, found }));
    }
}

/// Reports an unfinished line that no later segment names.
fn report_torn_line(segment: &CheckedFile, report: &mut VerifyReport) {
    if let Some(torn) = &segment.torn {
        report.gaps.push(Gap::Torn { file: segment.path.clone(), bytes: torn.bytes });
    }
}

fn file_fault(segment: &CheckedFile, line: u64, kind: FaultKind) -> LogFault {
    LogFault { file: segment.path.clone(), line, kind }
}

/// Checks that the log starts with record 1, or that retention removed everything before its start.
/// A removal counts only if a signed checkpoint covers its record: anyone with write access can
/// append a record after the last one.
fn check_beginning(segments: &[&CheckedFile], report: &mut VerifyReport) {
    let Some((segment, (previous, first))) =
        segments.iter().find_map(|segment| segment.first.map(|first| (*segment, first)))
    else {
        return report.gaps.push(Gap::Empty);
    };
    let attested = report.attested;
    let removed = segments.iter().flat_map(|segment| &segment.removed);
    // If the removal was interrupted, some removed segments are still there, and still chained.
    let retained = |(sequence, removed): &(u64, RemovedSegments)| {
        let last = removed.through.checked_add(1) == Some(first);
        let follows = last && ChainHash::parse(removed.hash.as_bytes()) == Some(previous);
        attested >= Some(*sequence) && (follows || removed.through >= first)
    };
    if first == 1 {
        if previous != ChainHash::NONE {
            report.faults.push(file_fault(segment, 1, FaultKind::Link));
        }
    } else if !removed.into_iter().any(retained) {
        report.gaps.push(Gap::Missing { from: 1, to: first - 1 });
    }
}

/// Checks that a segment follows the previous one and names its unfinished line.
fn check_succession(one: &CheckedFile, next: &CheckedFile, report: &mut VerifyReport) {
    let (Some(last), Some((previous, first))) = (one.last, next.first) else { return };
    let opening = next.opening.clone().unwrap_or_default();
    let named = one.path.file_name().and_then(|name| name.to_str());
    let named = named.map(|name| segment::plain_name(name).to_owned());
    let expected = last.sequence + 1;
    if first > expected {
        if opening.after.is_some() && opening.after == named {
            report.faults.push(file_fault(one, one.lines + 1, FaultKind::CutOff));
        } else {
            report.gaps.push(Gap::Missing { from: expected, to: first - 1 });
            report_torn_line(one, report);
        }
    } else if previous != last.hash {
        report.faults.push(file_fault(next, 1, FaultKind::Link));
    } else if first != expected {
        let kind = FaultKind::Sequence { expected, found: first };
        report.faults.push(file_fault(next, 1, kind));
    } else if one.torn != opening.torn {
        report.faults.push(file_fault(one, one.lines + 1, FaultKind::Torn));
    }
}
