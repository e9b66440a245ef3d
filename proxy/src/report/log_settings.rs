//! Opens the access log as `[log]` says.

use std::path::Path;

use anyhow::Context;
use audit::{Compression, Log, LogConfig, LogDurability, LogUsage, QueryStrings, Retention};
use rules::configuration::{CompressionSetting, Configuration, DurabilitySetting, QueryStringsSetting};

/// Opens the log in `dir`.
pub(crate) fn open_log(dir: &Path, configuration: &Configuration) -> anyhow::Result<Log> {
    let log = Log::open(log_config(dir, configuration)).context("cannot open the access log")?;
    warn_of_small_disk(dir, &log.usage());
    Ok(log)
}

/// Converts `[log]` to the settings of the log.
fn log_config(dir: &Path, configuration: &Configuration) -> LogConfig {
    let defaults = LogConfig::new(dir);
    let Some(log) = &configuration.log else { return defaults };
    LogConfig {
        durability: match log.durability {
            DurabilitySetting::Disk => LogDurability::Disk,
            DurabilitySetting::Process => LogDurability::Process,
        },
        open_max: log.open_decisions,
        max_bytes: log.max_bytes,
        segment_bytes: log.segment_bytes,
        segment_age: log.segment_age,
        retention: log.retention.map_or(Retention::Everything, Retention::Age),
        compression: match log.compression {
            CompressionSetting::None => Compression::None,
            CompressionSetting::Zstd => Compression::Zstd,
        },
        query_strings: match log.query_strings {
            QueryStringsSetting::Drop => QueryStrings::Drop,
            QueryStringsSetting::Keep => QueryStrings::Keep,
        },
        ..defaults
    }
}

/// Warns if the disk is full before the log reaches `max_bytes`: then one sandbox can stop all.
fn warn_of_small_disk(dir: &Path, usage: &LogUsage) {
    let free = sys::file::free_bytes(dir).unwrap_or_default();
    let disk = free.saturating_add(usage.bytes);
    if usage.max_bytes > disk {
        tracing::warn!(
            max_bytes = usage.max_bytes,
            disk,
            "the log's `max_bytes` exceed the disk: when it is full, every attempt is refused"
        );
    }
}
