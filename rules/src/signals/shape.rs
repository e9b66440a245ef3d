//! How unusual the form of requests is, from bounded memory of earlier ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShapeThresholds {}
