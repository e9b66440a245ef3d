//! The whole program under test; the tests are in `tests/`, one binary.
