//! The inference engine of one node: packed weights, the forward pass and its kernels, sampling,
//! and the pure step planner. It owns the arithmetic and the order of steps; it knows no network
//! and no async.

pub mod backend;
pub mod core;
pub mod planner;
pub mod sampler;
pub mod thread;
