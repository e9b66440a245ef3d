//! Canaries: values that no honest program sends.
