//! Shapes of keys, tokens and passwords.
