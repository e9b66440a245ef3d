//! Any tampering with a log, up to the last checkpoint, is found.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use audit::verify::{FaultKind, Gap, LogIntegrity};
use audit::{Log, LogConfig};
use proptest::prelude::*;
use tempfile::TempDir;

use crate::support::*;

/// A log of three segments with some 90 records, written once.
static LOG: LazyLock<(TempDir, LogConfig)> = LazyLock::new(|| {
    let (guard, mut config) = temp_config();
    config.checkpoint_records = 20;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let log = Log::open(config.clone()).unwrap();
        for round in 0..40 {
            record_attempt(&log, &format!("{round}.example")).await;
            if round % 15 == 14 {
                log.reopen().unwrap();
            }
        }
        log.close();
    });
    (guard, config)
});

fn copy_log() -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(&LOG.1.dir).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

fn split_lines(bytes: &[u8]) -> Vec<Vec<u8>> {
    bytes.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect()
}

/// Edits the lines of one segment.
fn edit_segment(dir: &Path, segment: usize, change: impl FnOnce(&mut Vec<Vec<u8>>)) {
    let files = files(dir);
    let path = &files[segment % files.len()];
    let mut lines = split_lines(&fs::read(path).unwrap());
    change(&mut lines);
    fs::write(path, lines.concat()).unwrap();
}

#[test]
fn p8_the_untouched_log_is_intact() {
    let report = verify_dir(copy_log().path());
    assert_eq!(report.integrity(), LogIntegrity::Intact, "{:?} {:?}", report.faults, report.gaps);
    assert!(report.checkpoints >= 4, "{}", report.checkpoints);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn p8_a_flipped_bit_is_found(segment in 0usize..3, at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let copy = copy_log();
        let path = files(copy.path())[segment].clone();
        let mut bytes = fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        fs::write(&path, bytes).unwrap();
        prop_assert_ne!(verify_dir(copy.path()).integrity(), LogIntegrity::Intact, "byte {}", at);
    }

    #[test]
    fn p8_a_removed_line_is_found(segment in 0usize..3, at in any::<prop::sample::Index>()) {
        let copy = copy_log();
        edit_segment(copy.path(), segment, |lines| drop(lines.remove(at.index(lines.len()))));
        prop_assert_ne!(verify_dir(copy.path()).integrity(), LogIntegrity::Intact);
    }

    #[test]
    fn p8_swapped_lines_are_found(segment in 0usize..3, one in any::<prop::sample::Index>(), other in any::<prop::sample::Index>()) {
        let copy = copy_log();
        let mut same = false;
        edit_segment(copy.path(), segment, |lines| {
            let (one, other) = (one.index(lines.len()), other.index(lines.len()));
            same = one == other;
            lines.swap(one, other);
        });
        prop_assert_eq!(verify_dir(copy.path()).integrity() == LogIntegrity::Intact, same);
    }

    #[test]
    fn p8_a_cut_off_end_is_found(segment in 0usize..3, keep in any::<prop::sample::Index>()) {
        let copy = copy_log();
        let path = files(copy.path())[segment].clone();
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..keep.index(bytes.len())]).unwrap();
        prop_assert_ne!(verify_dir(copy.path()).integrity(), LogIntegrity::Intact);
    }

    #[test]
    fn p8_a_doubled_line_is_found(segment in 0usize..3, from in any::<prop::sample::Index>(), to in any::<prop::sample::Index>()) {
        let copy = copy_log();
        edit_segment(copy.path(), segment, |lines| {
            let line = lines[from.index(lines.len())].clone();
            lines.insert(to.index(lines.len() + 1), line);
        });
        prop_assert_ne!(verify_dir(copy.path()).integrity(), LogIntegrity::Intact);
    }

    /// The forger knows the format and computes the right hash, but does not change the next record.
    #[test]
    fn p8_a_forged_line_is_found(segment in 0usize..3, at in any::<prop::sample::Index>(), replace: bool) {
        let copy = copy_log();
        edit_segment(copy.path(), segment, |lines| {
            let at = at.index(lines.len() - 1);
            let forged = forge_line(&lines[at]);
            if replace {
                lines[at] = forged;
            } else {
                lines.insert(at + 1, forged);
            }
        });
        prop_assert_ne!(verify_dir(copy.path()).integrity(), LogIntegrity::Intact);
    }

    /// Damage to the notes and added empty files must not hide a change.
    #[test]
    fn p8_damaged_notes_hide_no_change(at in any::<prop::sample::Index>(), bit in 0u8..8, cut: bool, line in any::<prop::sample::Index>()) {
        let copy = copy_log();
        let notes = copy.path().join(audit::checkpoint::FILE);
        let mut bytes = fs::read(&notes).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        if cut {
            bytes.truncate(at);
        }
        fs::write(&notes, bytes).unwrap();
        fs::write(copy.path().join("access-00000000000000099999.jsonl"), "").unwrap();
        edit_segment(copy.path(), 1, |lines| {
            let line = line.index(lines.len());
            lines[line][70] ^= 1;
        });
        prop_assert_eq!(verify_dir(copy.path()).integrity(), LogIntegrity::Changed);
    }

    #[test]
    fn p8_rubbish_is_found(segment in 0usize..3, at in any::<prop::sample::Index>(), rubbish in prop::collection::vec(any::<u8>(), 1..200)) {
        let copy = copy_log();
        edit_segment(copy.path(), segment, |lines| lines.insert(at.index(lines.len()), rubbish.clone()));
        prop_assert_ne!(verify_dir(copy.path()).integrity(), LogIntegrity::Intact);
    }
}

/// Changes a word in a line and recomputes its hash.
fn forge_line(line: &[u8]) -> Vec<u8> {
    let text = String::from_utf8(line.to_vec()).unwrap().replace("Informational", "informational");
    let (covered, _) = text.rsplit_once(",\"hash\":").unwrap();
    let hash = audit::ChainHash::digest(covered.as_bytes());
    format!("{covered},\"hash\":\"{}\"}}}}}}}}\n", hash.as_str()).into_bytes()
}

#[test]
fn p8_a_report_says_file_line_and_link() {
    type LineEdit = fn(&mut Vec<Vec<u8>>);
    let table: [(&str, LineEdit, u64, FaultKind); 4] = [
        ("changed", |lines| lines[4][70] ^= 1, 5, FaultKind::Changed),
        ("removed", |lines| drop(lines.remove(4)), 5, FaultKind::Link),
        ("inserted", |lines| lines.insert(4, b"{}\n".to_vec()), 5, FaultKind::NotARecord),
        ("forged", |lines| lines[4] = forge_line(&lines[4]), 6, FaultKind::Link),
    ];
    for (name, change, line, kind) in table {
        let copy = copy_log();
        edit_segment(copy.path(), 1, change);
        let report = verify_dir(copy.path());
        let first = &report.faults[0];
        assert_eq!((first.line, first.kind), (line, kind), "{name}");
        assert_eq!(first.file, files(copy.path())[1], "{name}");
        assert_eq!(report.integrity(), LogIntegrity::Changed, "{name}");
    }
}

#[test]
fn p8_what_is_missing_is_incomplete_not_changed() {
    let copy = copy_log();
    let paths = files(copy.path());
    fs::remove_file(&paths[1]).unwrap();
    let report = verify_dir(copy.path());
    assert_eq!(report.integrity(), LogIntegrity::Incomplete, "{:?}", report.faults);
    assert!(matches!(report.gaps[..], [Gap::Missing { .. }]), "{:?}", report.gaps);

    fs::remove_file(&paths[0]).unwrap();
    let report = verify_dir(copy.path());
    assert!(matches!(report.gaps[..], [Gap::Missing { from: 1, .. }]), "{:?}", report.gaps);
}

#[test]
fn p8_a_cut_off_tail_is_found_by_a_later_note() {
    let copy = copy_log();
    edit_segment(copy.path(), 2, |lines| lines.truncate(lines.len() - 3));
    let report = verify_dir(copy.path());
    assert!(matches!(report.gaps[..], [Gap::Tail { .. }]), "{:?}", report.gaps);
    let blind = audit::verify::verify(&files(copy.path()), &[], &Default::default()).unwrap();
    assert_eq!(blind.integrity(), LogIntegrity::Intact, "undetectable without the note");
}

/// Appends a line that continues the chain, as anyone with write access can.
fn append_forged(dir: &Path, sandbar: &str) {
    let path = files(dir).pop().unwrap();
    let mut text = fs::read_to_string(&path).unwrap();
    let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let sequence = last["metadata"]["sequence"].as_u64().unwrap() + 1;
    let previous = last["unmapped"]["sandbar"]["chain"]["hash"].as_str().unwrap();
    let covered = format!(
        r#"{{"class_uid":6002,"metadata":{{"x":1,"sequence":{sequence}}},"unmapped":{{"sandbar":{{{sandbar},"chain":{{"previous":"{previous}""#
    );
    let hash = audit::ChainHash::digest(covered.as_bytes());
    text += &format!("{covered},\"hash\":\"{}\"}}}}}}}}\n", hash.as_str());
    fs::write(path, text).unwrap();
}

#[test]
fn p8_a_removal_that_no_note_covers_is_not_believed() {
    let copy = copy_log();
    let paths = files(copy.path());
    let next = fs::read_to_string(&paths[2]).unwrap();
    let next: serde_json::Value = serde_json::from_str(next.lines().next().unwrap()).unwrap();
    let through = next["metadata"]["sequence"].as_u64().unwrap() - 1;
    let hash = &next["unmapped"]["sandbar"]["chain"]["previous"];
    fs::remove_file(&paths[0]).unwrap();
    fs::remove_file(&paths[1]).unwrap();
    let forged = format!(r#""stage":"lifecycle","removed":{{"through":{through},"hash":{hash}}}"#);
    append_forged(copy.path(), &forged);
    let report = verify_dir(copy.path());
    assert_eq!(report.integrity(), LogIntegrity::Incomplete, "{:?}", report.faults);
    assert!(matches!(report.gaps[..], [Gap::Missing { from: 1, .. }]), "{:?}", report.gaps);
}

#[test]
fn p8_an_empty_file_hides_no_unfinished_line() {
    let copy = copy_log();
    append_forged(copy.path(), r#""stage":"lifecycle""#);
    edit_segment(copy.path(), 2, |lines| lines.last_mut().unwrap().truncate(40));
    fs::write(copy.path().join("access-00000000000000099998.jsonl"), "no newline").unwrap();
    fs::write(copy.path().join("access-00000000000000099999.jsonl"), "").unwrap();
    let report = verify_dir(copy.path());
    let torn = |gap: &&Gap| matches!(gap, Gap::Torn { .. });
    assert_eq!(report.gaps.iter().filter(torn).count(), 2, "{:?}", report.gaps);
}

#[test]
fn an_empty_file_alone_changes_nothing() {
    let copy = copy_log();
    fs::write(copy.path().join("access-00000000000000099999.jsonl"), "").unwrap();
    assert_eq!(verify_dir(copy.path()).integrity(), LogIntegrity::Intact);
}

#[test]
fn p8_a_file_under_another_name_is_found() {
    let copy = copy_log();
    let name = copy.path().join("access-00000000000000099999.jsonl");
    fs::rename(&files(copy.path())[2], name).unwrap();
    let report = verify_dir(copy.path());
    let kind = report.faults.first().map(|fault| fault.kind);
    assert!(matches!(kind, Some(FaultKind::Name { named: 99999, .. })), "{kind:?}");
}

#[test]
fn text_that_is_not_a_note_is_reported_and_the_rest_still_counts() {
    let file = |dir: &Path| dir.join(audit::checkpoint::FILE);
    let copy = copy_log();
    let intact = fs::read(file(copy.path())).unwrap();
    let read = |dir: &Path| {
        let mut notes = audit::checkpoint::CheckpointNotes::default();
        audit::checkpoint::read_notes(&file(dir), None, &mut notes).unwrap();
        (notes.checkpoints.len(), notes.unreadable.len())
    };
    let (all, none) = read(copy.path());
    assert_eq!(none, 0);
    for cut in 1..intact.len() / all {
        let torn = [&intact[..intact.len() - cut], b"\n\n", &intact].concat();
        fs::write(file(copy.path()), torn).unwrap();
        let (good, bad) = read(copy.path());
        assert!(good + bad >= 2 * all && good >= 2 * all - 1, "{cut}: {good} {bad}");
        let report = verify_dir(copy.path());
        assert_eq!(report.integrity(), LogIntegrity::Intact, "{cut}: {:?}", report.faults);
    }
    fs::write(file(copy.path()), [&b"junk \xff\n"[..], &intact].concat()).unwrap();
    edit_segment(copy.path(), 1, |lines| lines[4][70] ^= 1);
    assert_eq!(
        verify_dir(copy.path()).integrity(),
        LogIntegrity::Changed,
        "the chain is checked all the same"
    );
}

#[test]
fn p8_a_note_by_an_unknown_key_is_not_believed() {
    let copy = copy_log();
    let notes = copy.path().join(audit::checkpoint::FILE);
    let text = fs::read_to_string(&notes).unwrap();
    let (first, rest) = text.split_once('\n').unwrap();
    fs::write(&notes, format!("{first}x\n{rest}")).unwrap();
    let report = verify_dir(copy.path());
    let bad = report.faults.iter().find(|fault| fault.kind == FaultKind::Signature).unwrap();
    assert_eq!((&bad.file, bad.line), (&notes, 1), "the fault names file and line");
}
