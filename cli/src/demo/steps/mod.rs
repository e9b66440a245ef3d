//! The steps of the story, a file each. A new one is a file with its `STEP`, and a line in the list.

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

/// A step: what it is called, what it is about, and what is done.
#[derive(Debug)]
pub(super) struct DemoStep<S> {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) run: fn(&mut S, &mut StepReport) -> Result<(), StepFailure>,
}

/// In the order in which they are told. Each leaves the stage as it found it, but the last, which ends it.
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
