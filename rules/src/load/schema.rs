//! The JSON Schemas of the two files, made from the structs that read them.

use schemars::Schema;

use super::document::{OperatorDocument, PolicyDocument};

/// The schema of a policy file.
pub fn policy_schema() -> Schema {
    schemars::schema_for!(PolicyDocument)
}

/// The schema of the operator's file.
pub fn operator_schema() -> Schema {
    schemars::schema_for!(OperatorDocument)
}
