//! The steps of the demo, one file each. To add one, add a file with a `STEP` and a line in the list.

mod allowed;
mod credential;
mod cut;
mod denied;
mod fronting;
mod grant;
mod log;
mod memory;
mod metadata;
mod mistake;
mod raw_address;
mod rebinding;
mod tunnel;

use super::context::DemoContext;
use super::report::{StepFailure, StepReport};

/// A step: its name, title and function.
#[derive(Debug)]
pub(super) struct DemoStep<C> {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) run: fn(&mut C, &mut StepReport) -> Result<(), StepFailure>,
}

/// In the order in which they run. Each leaves the context as it found it, except the last, which stops the proxy.
pub(super) const STEPS: &[DemoStep<DemoContext>] = &[
    allowed::STEP,
    denied::STEP,
    fronting::STEP,
    raw_address::STEP,
    metadata::STEP,
    rebinding::STEP,
    tunnel::STEP,
    mistake::STEP,
    credential::STEP,
    memory::STEP,
    cut::STEP,
    grant::STEP,
    log::STEP,
];
