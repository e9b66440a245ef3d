//! Budgets: how much may pass. Where several apply, the smallest counts.

/// Limits over time; an absent one does not limit, zero lets nothing pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budgets {
    pub connections: Option<u64>,
    pub dns_bits_per_hour: Option<u64>,
    pub download_bytes_per_hour: Option<u64>,
    pub lifetime_seconds: Option<u64>,
    pub requests_per_hour: Option<u64>,
    pub upload_bytes_per_hour: Option<u64>,
}

impl Budgets {
    /// The smaller of each.
    #[must_use]
    pub fn min(self, other: Budgets) -> Budgets {
        let least = |a: Option<u64>, b: Option<u64>| a.into_iter().chain(b).min();
        Budgets {
            connections: least(self.connections, other.connections),
            dns_bits_per_hour: least(self.dns_bits_per_hour, other.dns_bits_per_hour),
            download_bytes_per_hour: least(
                self.download_bytes_per_hour,
                other.download_bytes_per_hour,
            ),
            lifetime_seconds: least(self.lifetime_seconds, other.lifetime_seconds),
            requests_per_hour: least(self.requests_per_hour, other.requests_per_hour),
            upload_bytes_per_hour: least(self.upload_bytes_per_hour, other.upload_bytes_per_hour),
        }
    }

    /// The limits that are set, by their key in the policy.
    pub fn set(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("connections", self.connections),
            ("dns_bits_per_hour", self.dns_bits_per_hour),
            ("download_bytes_per_hour", self.download_bytes_per_hour),
            ("lifetime_seconds", self.lifetime_seconds),
            ("requests_per_hour", self.requests_per_hour),
            ("upload_bytes_per_hour", self.upload_bytes_per_hour),
        ]
        .into_iter()
        .filter_map(|(key, value)| value.map(|value| (key, value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_budget_counts() {
        let one = Budgets {
            requests_per_hour: Some(10),
            upload_bytes_per_hour: Some(0),
            ..Budgets::default()
        };
        let two =
            Budgets { requests_per_hour: Some(3), connections: Some(7), ..Budgets::default() };
        let both: Vec<_> = one.min(two).set().collect();
        assert_eq!(
            both,
            [("connections", 7), ("requests_per_hour", 3), ("upload_bytes_per_hour", 0)]
        );
    }
}
