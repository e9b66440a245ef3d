//! The specification's cases, each a test named after its number, judged by what a recording resolver saw.

mod answers;
mod clock;
mod flow;
mod listeners;
mod names;
mod recorder;
mod shapes;
mod world;
