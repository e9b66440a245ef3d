//! Bit account of what requests say outside their bodies (P19).
