//! Budgets: limits on usage. If several apply, the smallest counts.

pub mod window;

use std::time::Duration;

use crate::signals::bits::END_BITS;

/// A kind of budget, one per key in a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BudgetKind {
    /// Bytes in both directions over the lifetime of a grant.
    Bytes,
    Connections,
    DnsBitsPerHour,
    DownloadBytesPerDay,
    DownloadBytesPerHour,
    HeaderBitsPerHour,
    LifetimeSeconds,
    RequestsPerDay,
    RequestsPerHour,
    RequestsPerMinute,
    UploadBytesPerDay,
    UploadBytesPerHour,
}

/// A kind of usage that counts against budgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageKind {
    Download,
    /// Bits that requests say outside their bodies.
    HeaderBits,
    Requests,
    Upload,
}

/// The limit of each budget; an absent one does not limit, zero allows nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budgets([Option<u64>; BudgetKind::ALL.len()]);

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);

impl BudgetKind {
    pub const ALL: [BudgetKind; 12] = [
        BudgetKind::Bytes,
        BudgetKind::Connections,
        BudgetKind::DnsBitsPerHour,
        BudgetKind::DownloadBytesPerDay,
        BudgetKind::DownloadBytesPerHour,
        BudgetKind::HeaderBitsPerHour,
        BudgetKind::LifetimeSeconds,
        BudgetKind::RequestsPerDay,
        BudgetKind::RequestsPerHour,
        BudgetKind::RequestsPerMinute,
        BudgetKind::UploadBytesPerDay,
        BudgetKind::UploadBytesPerHour,
    ];

    pub fn key(self) -> &'static str {
        match self {
            BudgetKind::Bytes => "bytes",
            BudgetKind::Connections => "connections",
            BudgetKind::DnsBitsPerHour => "dns_bits_per_hour",
            BudgetKind::DownloadBytesPerDay => "download_bytes_per_day",
            BudgetKind::DownloadBytesPerHour => "download_bytes_per_hour",
            BudgetKind::HeaderBitsPerHour => "header_bits_per_hour",
            BudgetKind::LifetimeSeconds => "lifetime_seconds",
            BudgetKind::RequestsPerDay => "requests_per_day",
            BudgetKind::RequestsPerHour => "requests_per_hour",
            BudgetKind::RequestsPerMinute => "requests_per_minute",
            BudgetKind::UploadBytesPerDay => "upload_bytes_per_day",
            BudgetKind::UploadBytesPerHour => "upload_bytes_per_hour",
        }
    }

    pub fn by_key(key: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|budget| budget.key() == key)
    }

    /// Returns whether that usage counts against this budget.
    pub fn counts(self, what: UsageKind) -> bool {
        match self {
            BudgetKind::Bytes => matches!(what, UsageKind::Download | UsageKind::Upload),
            BudgetKind::Connections | BudgetKind::DnsBitsPerHour | BudgetKind::LifetimeSeconds => false,
            BudgetKind::DownloadBytesPerDay | BudgetKind::DownloadBytesPerHour => what == UsageKind::Download,
            BudgetKind::HeaderBitsPerHour => what == UsageKind::HeaderBits,
            BudgetKind::RequestsPerDay | BudgetKind::RequestsPerHour | BudgetKind::RequestsPerMinute => {
                what == UsageKind::Requests
            }
            BudgetKind::UploadBytesPerDay | BudgetKind::UploadBytesPerHour => what == UsageKind::Upload,
        }
    }

    /// Returns whether any usage counts against this budget.
    pub fn is_counted(self) -> bool {
        let all = [UsageKind::Download, UsageKind::HeaderBits, UsageKind::Requests, UsageKind::Upload];
        all.iter().any(|what| self.counts(*what))
    }

    /// Returns how much of a limit can be used. Bits of requests have a mark at their end, which is set aside, so that
    /// the limit bounds what a receiver learns: see [`crate::signals::bits`].
    pub fn usable(self, limit: u64) -> u64 {
        match self {
            BudgetKind::HeaderBitsPerHour => limit.saturating_sub(END_BITS),
            BudgetKind::Bytes
            | BudgetKind::Connections
            | BudgetKind::DnsBitsPerHour
            | BudgetKind::DownloadBytesPerDay
            | BudgetKind::DownloadBytesPerHour
            | BudgetKind::LifetimeSeconds
            | BudgetKind::RequestsPerDay
            | BudgetKind::RequestsPerHour
            | BudgetKind::RequestsPerMinute
            | BudgetKind::UploadBytesPerDay
            | BudgetKind::UploadBytesPerHour => limit,
        }
    }

    /// Returns the time window of the budget; `None` if it never refills.
    pub fn window(self) -> Option<Duration> {
        match self {
            BudgetKind::Bytes | BudgetKind::Connections | BudgetKind::LifetimeSeconds => None,
            BudgetKind::DnsBitsPerHour
            | BudgetKind::DownloadBytesPerHour
            | BudgetKind::HeaderBitsPerHour
            | BudgetKind::RequestsPerHour
            | BudgetKind::UploadBytesPerHour => Some(HOUR),
            BudgetKind::DownloadBytesPerDay | BudgetKind::RequestsPerDay | BudgetKind::UploadBytesPerDay => {
                Some(DAY)
            }
            BudgetKind::RequestsPerMinute => Some(MINUTE),
        }
    }
}

impl Budgets {
    /// Returns the limit, if set.
    pub fn limit(&self, budget: BudgetKind) -> Option<u64> {
        self.0.get(budget as usize).copied().flatten()
    }

    /// Returns the same budgets with one limit set or removed.
    #[must_use]
    pub fn with(mut self, budget: BudgetKind, limit: Option<u64>) -> Budgets {
        if let Some(slot) = self.0.get_mut(budget as usize) {
            *slot = limit;
        }
        self
    }

    /// Returns the smaller limit of each kind.
    #[must_use]
    pub fn min(self, other: Budgets) -> Budgets {
        BudgetKind::ALL.into_iter().fold(Budgets::default(), |least, budget| {
            least.with(budget, self.limit(budget).into_iter().chain(other.limit(budget)).min())
        })
    }

    /// Returns the limits that are set.
    pub fn limits(&self) -> impl Iterator<Item = (BudgetKind, u64)> + use<> {
        let all = *self;
        BudgetKind::ALL.into_iter().filter_map(move |budget| Some((budget, all.limit(budget)?)))
    }
}

impl std::fmt::Display for BudgetKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_budget_has_its_index_and_its_key() {
        for (at, budget) in BudgetKind::ALL.into_iter().enumerate() {
            assert_eq!(budget as usize, at, "{budget}");
            assert_eq!(BudgetKind::by_key(budget.key()), Some(budget));
        }
    }

    #[test]
    fn the_smallest_budget_counts() {
        let one = Budgets::default()
            .with(BudgetKind::RequestsPerHour, Some(10))
            .with(BudgetKind::UploadBytesPerHour, Some(0));
        let two = Budgets::default()
            .with(BudgetKind::RequestsPerHour, Some(3))
            .with(BudgetKind::Connections, Some(7));
        let both: Vec<_> = one.min(two).limits().map(|(budget, limit)| (budget.key(), limit)).collect();
        assert_eq!(both, [("connections", 7), ("requests_per_hour", 3), ("upload_bytes_per_hour", 0)]);
    }
}
