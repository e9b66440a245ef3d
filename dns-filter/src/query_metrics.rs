//! What the filter counts for dashboards. The handles are drawn once, when the filter is built, so a
//! recorder must be installed before that; a query then costs one addition.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

/// The counters of one filter.
pub(crate) struct DnsMetrics {
    /// Answered from the cache.
    pub(crate) cached: Counter,
    /// Answered by what is known here: hosts, synthetic addresses, names resolved ahead.
    pub(crate) here: Counter,
    /// Shared the answer of another query in flight.
    pub(crate) joined: Counter,
    pub(crate) refused: Counter,
    pub(crate) sent: Counter,
    /// No query, or more than is served.
    pub(crate) unread: Counter,
    /// Refused because a budget is spent; among the refused too.
    pub(crate) spent: Counter,
    pub(crate) in_flight: Gauge,
    upstream: Histogram,
}

impl DnsMetrics {
    pub(crate) fn new() -> Self {
        let queries =
            |outcome: &'static str| counter!("sandbar_dns_queries_total", "outcome" => outcome);
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

    /// Notes how long resolvers took for one query.
    pub(crate) fn record_upstream_time(&self, time: Duration) {
        self.upstream.record(time.as_secs_f64());
    }
}
