//! The JSON Schemas of the two files, made from the structs that read them.

use schemars::Schema;

use super::document::{ConfigurationDocument, PolicyDocument};

/// The schema of a policy file.
pub fn policy_schema() -> Schema {
    schemars::schema_for!(PolicyDocument)
}

/// The schema of the operator's file.
pub fn configuration_schema() -> Schema {
    schemars::schema_for!(ConfigurationDocument)
}
