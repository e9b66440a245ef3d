//! Closed segments: compressing them, and removing those that are too old. The keeper's work, off every runtime thread;
//! compression takes a second or so for a segment and has a thread of its own, one at a time.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use crate::segment::{self, segment_name};
use crate::usage::SegmentUsage;

/// Compression level: zstd's default, some 200 MB/s and a tenth of the size.
const LEVEL: i32 = 3;
/// Closed segments that stay plain.
const PLAIN: usize = 1;

/// The closed segments, oldest first.
pub(crate) struct SegmentArchive {
    dir: PathBuf,
    closed: VecDeque<ClosedSegment>,
    compressing: Option<(u64, JoinHandle<io::Result<u64>>)>,
}

/// A segment that is no longer written.
struct ClosedSegment {
    first: u64,
    /// When its last record was written.
    ended: SystemTime,
    usage: SegmentUsage,
    form: SegmentForm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SegmentForm {
    Compressed,
    Plain,
    /// Compressing it failed; it stays as it is until the next start.
    Stuck,
}

impl SegmentArchive {
    /// Reads what each of the segments holds.
    pub(crate) fn open(dir: &Path, segments: &[(u64, PathBuf)]) -> io::Result<Self> {
        let mut closed = VecDeque::new();
        for (first, path) in segments {
            let form = match segment::is_compressed(path) {
                true => SegmentForm::Compressed,
                false => SegmentForm::Plain,
            };
            let usage = SegmentUsage::of_segment(&usage_path(dir, *first), path)?;
            closed.push_back(ClosedSegment {
                first: *first,
                ended: fs::metadata(path)?.modified()?,
                usage,
                form,
            });
        }
        Ok(Self { dir: dir.to_owned(), closed, compressing: None })
    }

    pub(crate) fn usages(&self) -> impl Iterator<Item = &SegmentUsage> {
        self.closed.iter().map(|closed| &closed.usage)
    }

    /// Adds a segment that was just closed.
    pub(crate) fn add(&mut self, first: u64, usage: SegmentUsage) {
        usage.write(&usage_path(&self.dir, first)).unwrap_or_default(); // or the next start reads the segment
        let (ended, form) = (SystemTime::now(), SegmentForm::Plain);
        self.closed.push_back(ClosedSegment { first, ended, usage, form });
    }

    /// Returns how many of the oldest segments ended longer than `age` ago and can be removed. If the clock was
    /// set back, none.
    pub(crate) fn count_expired(&self, age: Duration) -> usize {
        let busy = self.compressing.as_ref().map(|(first, _)| *first);
        let old = |closed: &ClosedSegment| closed.ended.elapsed().is_ok_and(|elapsed| elapsed > age);
        self.closed.iter().take_while(|closed| old(closed) && busy != Some(closed.first)).count()
    }

    /// Returns the number of the first record after the `count` oldest segments, and the path of its segment if
    /// it is closed.
    pub(crate) fn first_after(&self, count: usize) -> Option<(u64, PathBuf)> {
        self.closed.get(count).map(|next| (next.first, self.path(next)))
    }

    /// Removes the `count` oldest segments and returns their usage. What cannot be removed now stays.
    pub(crate) fn remove_oldest(&mut self, count: usize) -> Vec<SegmentUsage> {
        let mut removed = Vec::new();
        for _ in 0..count {
            let Some(oldest) = self.closed.front() else { break };
            if remove_existing(&self.path(oldest)).is_err() {
                break;
            }
            remove_existing(&usage_path(&self.dir, oldest.first)).unwrap_or_default();
            removed.extend(self.closed.pop_front().map(|oldest| oldest.usage));
        }
        removed
    }

    /// Compresses the next segment, and returns the usage that compression of the last one freed.
    pub(crate) fn compress(&mut self) -> Option<SegmentUsage> {
        if let Some((first, thread)) = self.compressing.take_if(|(_, thread)| thread.is_finished()) {
            let result = thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
            return self.finish(first, result);
        }
        let plain = self.closed.len().saturating_sub(PLAIN);
        let next = self.closed.iter_mut().take(plain).find(|closed| closed.form == SegmentForm::Plain)?;
        if self.compressing.is_none() {
            let (first, dir) = (next.first, self.dir.clone());
            let builder = std::thread::Builder::new().name("log-compress".to_owned());
            match builder.spawn(move || compress_segment(&dir, first)) {
                Ok(thread) => self.compressing = Some((first, thread)),
                Err(_) => next.form = SegmentForm::Stuck,
            }
        }
        None
    }

    /// Waits for compression that is under way.
    pub(crate) fn wait(&mut self) {
        if let Some((first, thread)) = self.compressing.take() {
            let result = thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
            self.finish(first, result);
        }
    }

    fn finish(&mut self, first: u64, result: io::Result<u64>) -> Option<SegmentUsage> {
        let closed = self.closed.iter_mut().find(|closed| closed.first == first)?;
        let Ok(size) = result else {
            closed.form = SegmentForm::Stuck;
            return None;
        };
        let small = closed.usage.scaled_to(size);
        let freed = closed.usage.minus(&small);
        (closed.usage, closed.form) = (small, SegmentForm::Compressed);
        Some(freed)
    }

    fn path(&self, closed: &ClosedSegment) -> PathBuf {
        let plain = self.dir.join(segment_name(closed.first));
        match closed.form {
            SegmentForm::Compressed => segment::compressed_path(&plain),
            SegmentForm::Plain | SegmentForm::Stuck => plain,
        }
    }
}

fn usage_path(dir: &Path, first: u64) -> PathBuf {
    dir.join(segment_name(first)).with_extension("usage")
}

fn remove_existing(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Compresses a segment and returns the new size. The plain file goes only after the compressed one is on disk under its
/// name and was read back: a crash leaves both, and readers then use the plain one.
fn compress_segment(dir: &Path, first: u64) -> io::Result<u64> {
    let plain = dir.join(segment_name(first));
    let (done, temporary) = (segment::compressed_path(&plain), plain.with_extension("jsonl.zst.new"));
    remove_existing(&temporary)?;
    let written = write_compressed(&plain, &temporary).and_then(|size| {
        fs::rename(&temporary, &done)?;
        File::open(dir)?.sync_all()?;
        Ok(size)
    });
    let size = written.inspect_err(|_| remove_existing(&temporary).unwrap_or_default())?;
    if digest(&mut segment::open_reader(&done)?)? != digest(&mut File::open(&plain)?)? {
        fs::remove_file(&done)?;
        return Err(io::ErrorKind::InvalidData.into());
    }
    fs::remove_file(&plain)?;
    Ok(size)
}

/// Writes the compressed form, with the mode and the time of the plain one.
fn write_compressed(plain: &Path, to: &Path) -> io::Result<u64> {
    let mut source = File::open(plain)?;
    let metadata = source.metadata()?;
    let target = OpenOptions::new().write(true).create_new(true).mode(segment::MODE).open(to)?;
    let mut encoder = zstd::Encoder::new(target, LEVEL)?;
    encoder.include_checksum(true)?;
    io::copy(&mut source, &mut encoder)?;
    let target = encoder.finish()?;
    target.set_permissions(metadata.permissions())?;
    target.set_modified(metadata.modified()?)?;
    target.sync_all()?;
    Ok(target.metadata()?.len())
}

fn digest(source: &mut dyn Read) -> io::Result<[u8; 32]> {
    let mut hasher = Sha256::new();
    let mut chunk = vec![0; 64 << 10];
    loop {
        match source.read(&mut chunk)? {
            0 => return Ok(hasher.finalize().into()),
            count => hasher.update(chunk.get(..count).unwrap_or_default()),
        }
    }
}
