//! The bytes of each sandbox in a segment, so that they can be given back when the segment expires. Kept in a small
//! file beside a closed segment, or a start would have to read the whole log.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::Path;

use rules::ids::SandboxId;
use serde::{Deserialize, Serialize};
use sys::file::{self, Durability, Mode};

use crate::view::{self, RecordView};

/// Largest usage file to read: a line of it for each of some hundred thousand sandboxes.
const FILE_MAX: u64 = 16 << 20;

/// Bytes of the records in one segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SegmentUsage {
    /// Of records without a sandbox.
    pub(crate) own: u64,
    pub(crate) sandboxes: HashMap<SandboxId, u64>,
}

#[derive(Deserialize, Serialize)]
struct UsageFile {
    own: u64,
    sandboxes: BTreeMap<String, u64>,
}

impl SegmentUsage {
    pub(crate) fn add(&mut self, sandbox: Option<&SandboxId>, bytes: u64) {
        match sandbox {
            None => self.own += bytes,
            Some(sandbox) => match self.sandboxes.get_mut(sandbox) {
                Some(used) => *used += bytes,
                None => drop(self.sandboxes.insert(sandbox.clone(), bytes)),
            },
        }
    }

    /// Adds a line of a segment, with its newline.
    pub(crate) fn add_line(&mut self, line: &[u8]) {
        let view = RecordView::parse(line);
        let sandbox = view.as_ref().and_then(RecordView::sandbox).and_then(|id| SandboxId::parse(id).ok());
        self.add(sandbox.as_ref(), line.len() as u64 + 1);
    }

    pub(crate) fn total(&self) -> u64 {
        self.own + self.sandboxes.values().sum::<u64>()
    }

    /// Returns what each part becomes if all of it becomes `bytes`, as after compression.
    pub(crate) fn scaled_to(&self, bytes: u64) -> Self {
        let total = u128::from(self.total().max(1));
        let part = |used: u64| (u128::from(used) * u128::from(bytes) / total) as u64;
        let sandboxes = self.sandboxes.iter().map(|(id, used)| (id.clone(), part(*used)));
        Self { own: part(self.own), sandboxes: sandboxes.collect() }
    }

    /// Returns what is left of it after taking `less` away.
    pub(crate) fn minus(&self, less: &Self) -> Self {
        let rest = |id: &SandboxId, used: u64| used - less.sandboxes.get(id).copied().unwrap_or(0).min(used);
        let sandboxes = self.sandboxes.iter().map(|(id, used)| (id.clone(), rest(id, *used)));
        Self { own: self.own.saturating_sub(less.own), sandboxes: sandboxes.collect() }
    }

    /// Reads the usage file of a segment; without a readable one, the segment itself. The result adds up to
    /// the size of the segment's file.
    pub(crate) fn of_segment(usage_file: &Path, segment: &Path) -> io::Result<Self> {
        let size = fs::metadata(segment)?.len();
        if let Some(usage) = Self::read(usage_file) {
            return Ok(usage.scaled_to(size));
        }
        let mut usage = Self::default();
        view::for_each_line(segment, |line| usage.add_line(line))?;
        usage.write(usage_file).unwrap_or_default(); // the next start reads the segment again
        Ok(usage.scaled_to(size))
    }

    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let sandboxes = self.sandboxes.iter().map(|(id, used)| (id.to_string(), *used)).collect();
        let text = serde_json::to_vec(&UsageFile { own: self.own, sandboxes })?;
        file::replace(path, &text, Mode::Owner, Durability::Process)
    }

    fn read(path: &Path) -> Option<Self> {
        let found = fs::symlink_metadata(path).ok()?;
        let text = (found.is_file() && found.len() <= FILE_MAX).then(|| fs::read(path).ok())??;
        let UsageFile { own, sandboxes } = serde_json::from_slice(&text).ok()?;
        let parsed = sandboxes.iter().filter_map(|(id, used)| Some((SandboxId::parse(id).ok()?, *used)));
        Some(Self { own, sandboxes: parsed.collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> SandboxId {
        SandboxId::parse(name).unwrap()
    }

    #[test]
    fn usage_scales_and_is_read_back() {
        let mut usage = SegmentUsage::default();
        usage.add(None, 100);
        usage.add(Some(&id("a")), 200);
        usage.add(Some(&id("a")), 300);
        usage.add(Some(&id("b")), 400);
        let small = usage.scaled_to(100);
        assert_eq!((small.own, small.sandboxes[&id("a")], small.sandboxes[&id("b")]), (10, 50, 40));
        assert_eq!(usage.minus(&small).sandboxes[&id("a")], 450);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("usage");
        usage.write(&path).unwrap();
        assert_eq!(SegmentUsage::read(&path), Some(usage));
        fs::write(&path, "no").unwrap();
        assert_eq!(SegmentUsage::read(&path), None);
    }
}
