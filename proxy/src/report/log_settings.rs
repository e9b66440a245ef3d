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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rules::load::{SourceFile, read_configuration};

    use super::*;

    // proves: log.segment_age, log.durability
    #[test]
    fn every_key_reaches_the_log() {
        let text = "[log]\ndir = \"l\"\nretention = \"30d\"\nmax_bytes = 8388608\nsegment_bytes = 131072\n\
                    segment_age = \"12h\"\ndurability = \"disk\"\ncompress = true\nquery_strings = true\n\
                    open_decisions = 100\n";
        let file = SourceFile { path: "sandbar.toml".to_owned(), bytes: text.into() };
        let config = log_config(Path::new("l"), &read_configuration(&file).unwrap());
        assert_eq!(config.retention, Retention::Age(Duration::from_secs(30 * 86_400)));
        assert_eq!((config.max_bytes, config.segment_bytes), (Some(8_388_608), 131_072));
        assert_eq!(config.segment_age, Duration::from_secs(12 * 3600));
        assert_eq!((config.durability, config.compression), (LogDurability::Disk, Compression::Zstd));
        assert_eq!((config.query_strings, config.open_max), (QueryStrings::Keep, 100));
    }
}
