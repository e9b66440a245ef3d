//! The filters that `tail` and `query` share.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use audit::view::{DecisionKind, HostFilter, RecordFilter};

/// Which records are wanted
#[derive(clap::Args)]
pub(crate) struct FilterArgs {
    /// Only this sandbox
    #[arg(long, value_name = "ID")]
    sandbox: Option<String>,
    /// Only this host: `x.com` that name, `*.x.com` any below it, `.x.com` both
    #[arg(long, value_name = "PATTERN")]
    host: Option<String>,
    /// Only what was decided so
    #[arg(long, value_enum)]
    decision: Option<DecisionFilter>,
    /// Only this reason code, as `not_listed`
    #[arg(long, value_name = "CODE")]
    reason: Option<String>,
    /// Only from this moment on: RFC 3339, or an age as `90s`, `15m`, `2h`, `7d`
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    since: Option<u64>,
    /// Only before this moment
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    until: Option<u64>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum DecisionFilter {
    Allowed,
    Denied,
}

impl FilterArgs {
    pub(crate) fn to_filter(&self) -> RecordFilter {
        RecordFilter {
            sandbox: self.sandbox.clone(),
            host: self.host.as_deref().map(HostFilter::parse),
            decision: self.decision.map(|decided| match decided {
                DecisionFilter::Allowed => DecisionKind::Allowed,
                DecisionFilter::Denied => DecisionKind::Denied,
            }),
            reason: self.reason.clone(),
            since: self.since,
            until: self.until,
        }
    }
}

/// Milliseconds since 1970 of a moment or an age.
fn parse_time(text: &str) -> Result<u64, String> {
    let millis = |duration: Duration| duration.as_millis() as u64;
    if let Some(age) = parse_age(text) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        return Ok(millis(now.saturating_sub(age)));
    }
    let parsed: Result<jiff::Timestamp, _> = text.parse();
    let moment = parsed.map_err(|_| "write 2026-11-16T10:00:00Z, or an age as 15m".to_owned())?;
    u64::try_from(moment.as_millisecond()).map_err(|_| "that is before 1970".to_owned())
}

fn parse_age(text: &str) -> Option<Duration> {
    let unit = text.chars().last()?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 60 * 60,
        'd' => 24 * 60 * 60,
        _ => return None,
    };
    let count: u64 = text.strip_suffix(unit)?.parse().ok()?;
    count.checked_mul(seconds).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_times_or_ages() {
        for (text, expected) in [
            ("1970-01-01T00:00:01Z", Some(1000)),
            ("2026-11-16T10:00:00+01:00", Some(1_794_819_600_000)),
            ("yesterday", None),
            ("1969-12-31T00:00:00Z", None),
            ("", None),
            ("m", None),
            ("-5m", None),
        ] {
            assert_eq!(parse_time(text).ok(), expected, "{text}");
        }
        let now = parse_time("0s").unwrap();
        assert!(now - parse_time("2h").unwrap() >= 2 * 60 * 60 * 1000);
        assert_eq!(parse_time("999999999999999d").ok(), None, "an age that overflows is no time");
    }
}
