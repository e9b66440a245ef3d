//! The access log: what was tried, what became of it, in a form that verifies offline.
