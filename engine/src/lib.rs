//! The inference engine of one node: packed weights, the forward pass and its kernels, sampling,
//! and the pure step planner. It owns the arithmetic and the order of steps; it knows no network
//! and no async.

pub mod backend;
pub mod bench;
pub mod convert;
pub mod core;
pub mod cpu;
pub mod eval;
pub mod kernels;
pub mod limits;
pub mod load;
mod memory;
pub mod packed_file;
pub mod planner;
mod pool;
pub mod sampler;
mod simd;
pub mod thread;
mod weights;

pub use pool::SpinPolicy;
pub use simd::Isa;
