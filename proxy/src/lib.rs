//! The proxy: listeners, the life of a connection, egress, HTTP, the memory guard, credentials, budgets, admin.
//!
//! A connection is followed through `accept` (whose is it, what does it speak), `egress` (charge, record, resolve,
//! dial) and `http` or `memory` (act). Dependencies between the folders run one way: `app`, `housekeeping`, `admin`,
//! `accept`, `http`, `memory`, `egress`, `policy`, `budget`, `inspect`, `credential`, `report`, `state_file`.

mod accept;
pub mod admin;
pub mod app;
mod budget;
pub mod credential;
mod egress;
mod housekeeping;
mod http;
mod inspect;
mod memory;
pub mod policy;
mod quota;
pub mod report;
mod self_test;
mod state_file;

pub use accept::detect;
pub use credential::scrub;
pub use http::{chunks, head};
pub use quota::cost::limits_markdown;
