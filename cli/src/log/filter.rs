//! The record filters that `tail` and `query` share.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use audit::view::{DecisionKind, HostFilter, RecordFilter};

/// Selects records
#[derive(clap::Args)]
pub(crate) struct FilterArgs {
    /// Only records of this sandbox
    #[arg(long, value_name = "ID")]
    sandbox: Option<String>,
    /// Only records of this host: `x.com` that name, `*.x.com` any name below it, `.x.com` both
    #[arg(long, value_name = "PATTERN")]
    host: Option<String>,
    /// Only records with this decision
    #[arg(long, value_enum)]
    decision: Option<DecisionFilter>,
    /// Only records with this reason code, such as `not_listed`
    #[arg(long, value_name = "CODE")]
    reason: Option<String>,
    /// Only records since this time: RFC 3339, or an age such as `90s`, `15m`, `2h`, `7d`
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    since: Option<u64>,
    /// Only records before this time
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
            decision: self.decision.map(|decision| match decision {
                DecisionFilter::Allowed => DecisionKind::Allowed,
                DecisionFilter::Denied => DecisionKind::Denied,
            }),
            reason: self.reason.clone(),
            since: self.since,
            until: self.until,
        }
    }
}

/// Parses a time or an age into milliseconds since 1970.
fn parse_time(text: &str) -> Result<u64, String> {
    let millis = |duration: Duration| duration.as_millis() as u64;
    if let Some(age) = parse_age(text) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        return Ok(millis(now.saturating_sub(age)));
    }
    let parsed: Result<jiff::Timestamp, _> = text.parse();
    let timestamp =
        parsed.map_err(|_| "use a time such as 2026-11-16T10:00:00Z, or an age such as 15m".to_owned())?;
    u64::try_from(timestamp.as_millisecond()).map_err(|_| "the time is before 1970".to_owned())
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
    fn a_time_is_rfc_3339_or_an_age() {
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
        assert_eq!(parse_time("999999999999999d").ok(), None, "an age that overflows is rejected");
    }
}
