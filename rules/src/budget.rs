//! Budgets: how much may pass. Where several apply, the smallest counts.

use std::time::Duration;

/// One limit that can be set, by its key in a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Budget {
    /// Bytes both ways, for as long as there is the rule: what a grant may let pass.
    Bytes,
    Connections,
    DnsBitsPerHour,
    DownloadBytesPerDay,
    DownloadBytesPerHour,
    LifetimeSeconds,
    RequestsPerDay,
    RequestsPerHour,
    RequestsPerMinute,
    UploadBytesPerDay,
    UploadBytesPerHour,
}

/// What is counted as it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    Download,
    Requests,
    Upload,
}

/// Limits over time; an absent one does not limit, zero lets nothing pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budgets([Option<u64>; Budget::ALL.len()]);

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);

impl Budget {
    pub const ALL: [Budget; 11] = [
        Budget::Bytes,
        Budget::Connections,
        Budget::DnsBitsPerHour,
        Budget::DownloadBytesPerDay,
        Budget::DownloadBytesPerHour,
        Budget::LifetimeSeconds,
        Budget::RequestsPerDay,
        Budget::RequestsPerHour,
        Budget::RequestsPerMinute,
        Budget::UploadBytesPerDay,
        Budget::UploadBytesPerHour,
    ];

    pub fn key(self) -> &'static str {
        match self {
            Budget::Bytes => "bytes",
            Budget::Connections => "connections",
            Budget::DnsBitsPerHour => "dns_bits_per_hour",
            Budget::DownloadBytesPerDay => "download_bytes_per_day",
            Budget::DownloadBytesPerHour => "download_bytes_per_hour",
            Budget::LifetimeSeconds => "lifetime_seconds",
            Budget::RequestsPerDay => "requests_per_day",
            Budget::RequestsPerHour => "requests_per_hour",
            Budget::RequestsPerMinute => "requests_per_minute",
            Budget::UploadBytesPerDay => "upload_bytes_per_day",
            Budget::UploadBytesPerHour => "upload_bytes_per_hour",
        }
    }

    pub fn by_key(key: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|budget| budget.key() == key)
    }

    /// Whether what happens counts against it.
    pub fn counts(self, what: Counted) -> bool {
        match self {
            Budget::Bytes => matches!(what, Counted::Download | Counted::Upload),
            Budget::Connections | Budget::DnsBitsPerHour | Budget::LifetimeSeconds => false,
            Budget::DownloadBytesPerDay | Budget::DownloadBytesPerHour => what == Counted::Download,
            Budget::RequestsPerDay | Budget::RequestsPerHour | Budget::RequestsPerMinute => {
                what == Counted::Requests
            }
            Budget::UploadBytesPerDay | Budget::UploadBytesPerHour => what == Counted::Upload,
        }
    }

    /// Whether anything that happens counts against it.
    pub fn is_counted(self) -> bool {
        [Counted::Download, Counted::Requests, Counted::Upload]
            .iter()
            .any(|what| self.counts(*what))
    }

    /// The time over which it is counted; none where nothing is ever given back.
    pub fn window(self) -> Option<Duration> {
        match self {
            Budget::Bytes | Budget::Connections | Budget::LifetimeSeconds => None,
            Budget::DnsBitsPerHour
            | Budget::DownloadBytesPerHour
            | Budget::RequestsPerHour
            | Budget::UploadBytesPerHour => Some(HOUR),
            Budget::DownloadBytesPerDay | Budget::RequestsPerDay | Budget::UploadBytesPerDay => {
                Some(DAY)
            }
            Budget::RequestsPerMinute => Some(MINUTE),
        }
    }
}

impl Budgets {
    /// The limit, if it is set.
    pub fn of(&self, budget: Budget) -> Option<u64> {
        self.0.get(budget as usize).copied().flatten()
    }

    /// The same with a limit set or left out.
    #[must_use]
    pub fn with(mut self, budget: Budget, limit: Option<u64>) -> Budgets {
        if let Some(slot) = self.0.get_mut(budget as usize) {
            *slot = limit;
        }
        self
    }

    /// The smaller of each.
    #[must_use]
    pub fn min(self, other: Budgets) -> Budgets {
        Budget::ALL.into_iter().fold(Budgets::default(), |least, budget| {
            least.with(budget, self.of(budget).into_iter().chain(other.of(budget)).min())
        })
    }

    /// The limits that are set.
    pub fn set(&self) -> impl Iterator<Item = (Budget, u64)> + use<> {
        let all = *self;
        Budget::ALL.into_iter().filter_map(move |budget| Some((budget, all.of(budget)?)))
    }
}

impl std::fmt::Display for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_budget_has_its_place_and_its_key() {
        for (at, budget) in Budget::ALL.into_iter().enumerate() {
            assert_eq!(budget as usize, at, "{budget}");
            assert_eq!(Budget::by_key(budget.key()), Some(budget));
        }
    }

    #[test]
    fn the_smallest_budget_counts() {
        let one = Budgets::default()
            .with(Budget::RequestsPerHour, Some(10))
            .with(Budget::UploadBytesPerHour, Some(0));
        let two = Budgets::default()
            .with(Budget::RequestsPerHour, Some(3))
            .with(Budget::Connections, Some(7));
        let both: Vec<_> =
            one.min(two).set().map(|(budget, limit)| (budget.key(), limit)).collect();
        assert_eq!(
            both,
            [("connections", 7), ("requests_per_hour", 3), ("upload_bytes_per_hour", 0)]
        );
    }
}
