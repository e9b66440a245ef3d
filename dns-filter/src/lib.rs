//! The sandbox's resolver: asks `rules` before a question leaves, and cleans what comes back.
