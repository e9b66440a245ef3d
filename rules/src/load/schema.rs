//! The JSON Schemas of the two files, generated from the structs that read them.

use schemars::Schema;

use super::document::{ConfigurationDocument, PolicyDocument};

/// Returns the JSON Schema of a policy file.
pub fn policy_schema() -> Schema {
    schemars::schema_for!(PolicyDocument)
}

/// Returns the JSON Schema of the configuration.
pub fn configuration_schema() -> Schema {
    schemars::schema_for!(ConfigurationDocument)
}
