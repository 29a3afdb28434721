//! The Rust SDK: Baton's gRPC API with typed streams, retries by `ErrorCode`, timeouts and TLS.
//!
//! ```no_run
//! # async fn example() -> Result<(), baton_client::ClientError> {
//! use baton_client::{Client, ClientOptions, GenerateRequest};
//!
//! let client = Client::connect("http://127.0.0.1:50051", ClientOptions::default())?;
//! let request = GenerateRequest::text("The capital of France is").max_tokens(16).temperature(0.0);
//! let mut stream = client.generate(request).await?;
//! while let Some(event) = stream.next().await {
//!     if let baton_client::Event::Token(token) = event? {
//!         print!("{}", token.text);
//!     }
//! }
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod client;
mod error;
mod request;
mod stream;

pub use baton_proto::v1::generate_event::Event;
pub use baton_proto::v1::{
    ClusterStatus, Done, Finished, KvWay, Logprobs, Model, Node, PromptLogprobs, Token,
};
pub use client::{Client, ClientOptions, Tls};
pub use error::ClientError;
pub use request::{ChatRequest, GenerateRequest, Options};
pub use stream::{Answer, Completion, GenerateStream};
