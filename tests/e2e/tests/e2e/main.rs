//! The end-to-end tests, one module for each promise; one binary, since each takes a while to
//! link. Run one with `cargo test --release -p baton-tests --test e2e faults:: -- --nocapture`.

mod cancel;
mod corruption;
mod cut_link;
mod damaged_model;
mod deadlines;
mod drain;
mod faults;
mod identity;
mod malformed_grpc;
mod malformed_http;
mod overload;
mod precision;
mod prefix_pull;
mod refuses_to_start;
mod start;
mod streaming;
mod transfer_hidden;
