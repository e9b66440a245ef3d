//! Keys as others see them: our leaves, our trust files and our tokens before the tools people really use.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on says why and fails")]

mod commands;
mod leaves;
mod program;
mod server;
mod tools;
