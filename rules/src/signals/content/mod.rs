//! One pass over the content of a request, raw and decoded, for all matchers.
