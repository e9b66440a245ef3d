//! The filter's metrics. The handles are created once, when the filter is built, so a query costs one addition; the
//! metrics recorder must be installed before that.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

/// The counters of one filter.
pub(crate) struct DnsMetrics {
    /// Answered from the cache.
    pub(crate) cached: Counter,
    /// Answered locally: `[[dns.host]]`, synthetic addresses, pre-resolved names.
    pub(crate) here: Counter,
    /// Joined another query in flight.
    pub(crate) joined: Counter,
    pub(crate) refused: Counter,
    pub(crate) sent: Counter,
    /// Not a valid query, or beyond a limit.
    pub(crate) unread: Counter,
    /// Refused because a budget is exhausted; also counted in `refused`.
    pub(crate) spent: Counter,
    pub(crate) in_flight: Gauge,
    upstream: Histogram,
}

impl DnsMetrics {
    pub(crate) fn new() -> Self {
        let queries = |outcome: &'static str| counter!("sandbar_dns_queries_total", "outcome" => outcome);
        DnsMetrics {
            cached: queries("cached"),
            here: queries("here"),
            joined: queries("joined"),
            refused: queries("refused"),
            sent: queries("sent"),
            unread: queries("unread"),
            spent: counter!("sandbar_dns_budget_refusals_total"),
            in_flight: gauge!("sandbar_dns_in_flight"),
            upstream: histogram!("sandbar_dns_upstream_seconds"),
        }
    }

    /// Records how long an upstream query took, over all tries.
    pub(crate) fn record_upstream_time(&self, time: Duration) {
        self.upstream.record(time.as_secs_f64());
    }
}
