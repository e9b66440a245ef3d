//! How unusual the form of requests is, from bounded memory of earlier ones.
