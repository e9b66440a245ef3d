//! Metrics and their names. The admin API serves them as Prometheus text.

use std::time::Duration;

use audit::ByteCount;
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use rules::signals::SignalMode;

const BUCKETS: &[f64] = &[1e-6, 5e-6, 25e-6, 1e-4, 5e-4, 0.0025, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0];

/// Installs the recorder and describes every metric.
pub(crate) fn install() -> anyhow::Result<PrometheusHandle> {
    let suffix = Matcher::Suffix("_seconds".to_owned());
    let handle = PrometheusBuilder::new().set_buckets_for_metric(suffix, BUCKETS)?.install_recorder()?;
    describe_counter!("sandbar_decisions_total", "Decisions, by reason and treatment.");
    describe_counter!(
        "sandbar_upstream_connections_total",
        "Connections to origin servers, new or reused from the pool."
    );
    describe_counter!("sandbar_signals_total", "Signs of exfiltration, by code and verdict.");
    describe_counter!("sandbar_header_bits_total", "Bits that requests said outside their bodies.");
    describe_counter!(
        "sandbar_credential_fetches_total",
        "Fetches of credentials, by credential and outcome."
    );
    describe_counter!("sandbar_reloads_total", "Policy loads, by result.");
    describe_histogram!("sandbar_reload_seconds", "Time to read, compile and publish changed policies.");
    describe_counter!(
        "sandbar_revoked_total",
        "Connections and streams cut because they lost their permission."
    );
    describe_gauge!(
        "sandbar_unapplied_settings",
        "Changed parts of the configuration that take effect with a restart only."
    );
    describe_gauge!("sandbar_policy_stale", "1 while the policies on disk are invalid.");
    describe_counter!("sandbar_sent_bytes_total", "Bytes from sandboxes.");
    describe_counter!("sandbar_received_bytes_total", "Bytes to sandboxes.");
    describe_counter!("sandbar_accepts_shed_total", "Failed accepts, such as for lack of file descriptors.");
    describe_counter!("sandbar_quota_exhausted_total", "Refusals for want of quota, by resource.");
    describe_gauge!("sandbar_quota_used", "What all sandboxes use of a resource.");
    describe_gauge!("sandbar_quota_total", "What all sandboxes may use of a resource.");
    describe_histogram!("sandbar_decide_seconds", "Time to decide an attempt.");
    describe_histogram!("sandbar_resolve_seconds", "Time to resolve a name, from the cache or not.");
    describe_histogram!("sandbar_connect_seconds", "Time to connect to an origin server.");
    describe_histogram!("sandbar_record_seconds", "Time to write the record of a decision.");
    describe_gauge!("sandbar_connections", "Open connections.");
    describe_gauge!("sandbar_open", "Open tunnels and requests.");
    describe_gauge!("sandbar_leaves", "Cached leaf certificates.");
    describe_gauge!("sandbar_policy_generation", "Generation of the rules in force.");
    describe_gauge!("sandbar_policy_age_seconds", "Seconds since the rules were loaded.");
    describe_gauge!("sandbar_grants", "Grants in force.");
    describe_gauge!("sandbar_pending", "Refusals that a grant could lift.");
    describe_counter!("sandbar_memory_returns_total", "Returns of freed memory to the kernel.");
    describe_counter!("sandbar_memory_returned_bytes_total", "Bytes returned to the kernel.");
    describe_gauge!("sandbar_hanging_files", "Files that have not answered for two seconds.");
    describe_gauge!("sandbar_sandbox_states", "Sandboxes for which the proxy keeps state.");
    describe_gauge!("sandbar_dns_sandbox_states", "Sandboxes for which the DNS filter keeps state.");
    describe_gauge!("sandbar_log_queued", "Records waiting to be written.");
    describe_gauge!("sandbar_log_lost", "Lost records of traffic; anything but 0 is a bug.");
    describe_gauge!("sandbar_log_bytes", "Bytes of the log on disk.");
    describe_gauge!("sandbar_log_max_bytes", "Bytes that the log may have on disk.");
    describe_gauge!("sandbar_log_refused", "Attempts refused because their record could not be written.");
    Ok(handle)
}

pub(crate) fn count_decision(reason: &'static str, how: &'static str) {
    counter!("sandbar_decisions_total", "reason" => reason, "how" => how).increment(1);
}

pub(crate) fn count_bytes(meter: &ByteCount) {
    let (sent, received) = meter.sent_and_received();
    counter!("sandbar_sent_bytes_total").increment(sent);
    counter!("sandbar_received_bytes_total").increment(received);
}

pub(crate) fn count_memory_return(bytes: u64) {
    counter!("sandbar_memory_returns_total").increment(1);
    counter!("sandbar_memory_returned_bytes_total").increment(bytes);
}

pub(crate) fn count_shed_accept() {
    counter!("sandbar_accepts_shed_total").increment(1);
}

pub(crate) fn count_quota_exhausted(resource: &'static str) {
    counter!("sandbar_quota_exhausted_total", "resource" => resource).increment(1);
}

pub(crate) fn observe_decide(took: Duration) {
    histogram!("sandbar_decide_seconds").record(took);
}

pub(crate) fn observe_resolve(took: Duration) {
    histogram!("sandbar_resolve_seconds").record(took);
}

pub(crate) fn observe_connect(took: Duration) {
    histogram!("sandbar_connect_seconds").record(took);
}

pub(crate) fn count_signal(code: &'static str, mode: SignalMode) {
    let verdict = if mode == SignalMode::Deny { "denied" } else { "flagged" };
    counter!("sandbar_signals_total", "code" => code, "verdict" => verdict).increment(1);
}

pub(crate) fn count_header_bits(bits: u64) {
    counter!("sandbar_header_bits_total").increment(bits);
}

/// Counts a fetch of a credential, or a look at its file that found something new.
pub(crate) fn count_credential_fetch(name: &str, fetched: bool) {
    let outcome = if fetched { "fetched" } else { "failed" };
    counter!("sandbar_credential_fetches_total", "credential" => name.to_owned(), "outcome" => outcome)
        .increment(1);
}

pub(crate) fn count_reload(result: &'static str) {
    counter!("sandbar_reloads_total", "result" => result).increment(1);
}

pub(crate) fn observe_reload(took: Duration) {
    histogram!("sandbar_reload_seconds").record(took);
}

pub(crate) fn count_revocations(count: usize) {
    counter!("sandbar_revoked_total").increment(count as u64);
}

/// Counts a connection to an origin server, new or reused.
pub(crate) fn count_upstream(reused: bool, took: Duration) {
    let kind = if reused { "reused" } else { "new" };
    counter!("sandbar_upstream_connections_total", "kind" => kind).increment(1);
    if !reused {
        observe_connect(took);
    }
}

pub(crate) fn observe_record(took: Duration) {
    histogram!("sandbar_record_seconds").record(took);
}
