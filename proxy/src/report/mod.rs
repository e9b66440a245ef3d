//! What is said: records, refusals, metrics, diagnostics.

pub(crate) mod attempted;
pub mod diagnostics;
pub(crate) mod exhausted;
pub(crate) mod log_settings;
pub(crate) mod metrics;
pub(crate) mod record;
pub(crate) mod refusal;
pub mod terminal;

/// A question that makes no sense: an unknown sandbox, a bad method, two configuration files.
#[derive(Debug)]
pub struct UsageError(pub String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}
