//! Reads `[log]`: sizes, ages, and whether the shares of all sandboxes fit.

use std::time::Duration;

use toml::Spanned;

use super::document::{ConfigurationDocument, DurabilityDocument};
use super::problem::{ProblemKind, Problems, SourceText, printable};
use crate::configuration::{CompressionSetting, DurabilitySetting, LogSettings, QueryStringsSetting};
use crate::share::ShareTerms;

/// Bounds of `max_bytes`.
const MAX_BYTES: (u64, u64) = (1 << 20, 1 << 50);
/// Bounds of `segment_bytes`.
const SEGMENT_BYTES: (u64, u64) = (64 << 10, 1 << 30);
/// Segments that must fit into `max_bytes`: only closed ones expire.
const SEGMENTS_MIN: u64 = 4;
/// Upper limit of `open_decisions`: some 400 MB of memory.
const MAX_OPEN_DECISIONS: u64 = 1_000_000;
/// Bounds of `segment_age` and `retention`, in seconds.
const SEGMENT_AGE: (u64, u64) = (60, 30 * DAY);
const RETENTION: (u64, u64) = (60, 3650 * DAY);
const DAY: u64 = 86_400;
/// What must be kept for each sandbox: bytes of the log, and open decisions.
const SHARE_BYTES: u64 = 64 << 10;
const SHARE_OPEN: u64 = 8;

/// Reads `[log]` and reports its problems.
pub(crate) fn read_log(
    source: &SourceText<'_>,
    document: &ConfigurationDocument,
    problems: &mut Problems,
) -> Option<LogSettings> {
    let sandboxes = document.sandbox.len() as u64;
    let document = document.log.as_ref()?;
    let mut reader = LogReader { source, problems, sandboxes };
    let max_bytes = reader.read_size("max_bytes", document.max_bytes.as_ref(), MAX_BYTES);
    let segment_bytes = reader.read_size("segment_bytes", document.segment_bytes.as_ref(), SEGMENT_BYTES);
    if let (Some(max), Some(segment), Some(entry)) = (max_bytes, segment_bytes, &document.segment_bytes)
        && segment > max / SEGMENTS_MIN
    {
        let needed = segment * SEGMENTS_MIN;
        let text = format!(
            "`segment_bytes` is too large: {SEGMENTS_MIN} segments x {segment} = {needed}, but `max_bytes` is {max}"
        );
        reader.report(entry.span(), text);
    }
    if let (Some(max), Some(entry)) = (max_bytes, &document.max_bytes) {
        // An eighth is Sandbar's own, and half of the rest is common.
        reader.check_shares("max_bytes", entry, (max - max / 8) / 2, SHARE_BYTES);
    }
    let open_bounds = (1, MAX_OPEN_DECISIONS);
    let open_decisions = reader.read_size("open_decisions", document.open_decisions.as_ref(), open_bounds);
    if let (Some(open), Some(entry)) = (open_decisions, &document.open_decisions) {
        reader.check_shares("open_decisions", entry, open / 2, SHARE_OPEN);
    }
    let retention = reader.read_duration("retention", document.retention.as_ref(), RETENTION);
    let segment_age = reader.read_duration("segment_age", document.segment_age.as_ref(), SEGMENT_AGE);
    let usual_bytes = max_bytes.map_or(u64::MAX, |max| max / SEGMENTS_MIN).min(LogSettings::SEGMENT_BYTES);
    let usual_open = LogSettings::OPEN_DECISIONS.max(sandboxes * 2 * SHARE_OPEN);
    Some(LogSettings {
        dir: document.dir.get_ref().clone(),
        retention,
        max_bytes,
        segment_bytes: segment_bytes.unwrap_or(usual_bytes),
        segment_age: segment_age.unwrap_or(LogSettings::SEGMENT_AGE),
        durability: match document.durability {
            Some(DurabilityDocument::Disk) => DurabilitySetting::Disk,
            Some(DurabilityDocument::Process) | None => DurabilitySetting::Process,
        },
        compression: match document.compress {
            Some(true) => CompressionSetting::Zstd,
            Some(false) | None => CompressionSetting::None,
        },
        query_strings: match document.query_strings {
            Some(true) => QueryStringsSetting::Keep,
            Some(false) | None => QueryStringsSetting::Drop,
        },
        open_decisions: open_decisions.unwrap_or(usual_open),
    })
}

struct LogReader<'a, 'b> {
    source: &'a SourceText<'a>,
    problems: &'b mut Problems,
    sandboxes: u64,
}

impl LogReader<'_, '_> {
    fn read_size(
        &mut self,
        key: &str,
        entry: Option<&Spanned<u64>>,
        (least, most): (u64, u64),
    ) -> Option<u64> {
        let entry = entry?;
        let given = *entry.get_ref();
        if (least..=most).contains(&given) {
            return Some(given);
        }
        self.report(entry.span(), format!("`{key}` = {given} is out of range: use {least} to {most}"));
        None
    }

    fn read_duration(
        &mut self,
        key: &str,
        entry: Option<&Spanned<String>>,
        (least, most): (u64, u64),
    ) -> Option<Duration> {
        let entry = entry?;
        let seconds = parse_seconds(entry.get_ref());
        if let Some(seconds) = seconds.filter(|seconds| (least..=most).contains(seconds)) {
            return Some(Duration::from_secs(seconds));
        }
        let (given, days) = (printable(entry.get_ref()), most / DAY);
        let text = format!(
            "`{key}` = `{given}` is not an age from {least}s to {days}d; write one such as `30d` or `12h`"
        );
        self.report(entry.span(), text);
        None
    }

    /// Checks that the least share of every sandbox fits into what the shares may have.
    fn check_shares(&mut self, key: &str, entry: &Spanned<u64>, total: u64, share: u64) {
        if let Err(exceeded) = (ShareTerms { total, cap: total, share }).check(self.sandboxes) {
            let text =
                format!("`{key}` is too small to keep a share for each sandbox: {exceeded} for shares");
            self.report(entry.span(), text);
        }
    }

    fn report(&mut self, span: std::ops::Range<usize>, text: String) {
        self.problems.error(self.source.location(span), ProblemKind::LogQuota(text));
    }
}

/// Parses a number with a unit: `90s`, `15m`, `12h`, `30d`.
fn parse_seconds(text: &str) -> Option<u64> {
    let unit = text.chars().last()?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => DAY,
        _ => return None,
    };
    let number = text.strip_suffix(unit).filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()))?;
    number.parse::<u64>().ok()?.checked_mul(seconds)
}
