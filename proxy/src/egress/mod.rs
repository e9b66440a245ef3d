//! From a permit to the first byte upstream, and the bytes after it.

pub(crate) mod connect;
pub(crate) mod departure;
pub(crate) mod dial;
pub(crate) mod roots;
pub(crate) mod sending;
pub(crate) mod shared;
pub(crate) mod stream;
pub(crate) mod tunnel;
pub(crate) mod upstream;
