//! One module for each command.

pub mod bench;
pub mod chat;
pub mod eval;
pub mod generate;
pub mod status;
pub mod up;

use baton_client::{Client, ClientOptions, Tls};
use baton_types::StreamingAttention;

/// Where the router is; every command that talks to one takes these.
#[derive(Debug, clap::Args)]
pub struct EndpointFlags {
    /// The router's gRPC API.
    #[arg(
        long,
        value_name = "URL",
        default_value = "http://127.0.0.1:50051",
        env = "BATON_ENDPOINT"
    )]
    pub endpoint: String,
    /// Authority that signs the router's certificate, PEM; for https endpoints.
    #[arg(long, value_name = "FILE")]
    pub ca: Option<std::path::PathBuf>,
}

/// What tokens see, where that is not all before them.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct StreamingFlags {
    /// See the last so many tokens and the sinks only (StreamingLLM); what is between is forgotten.
    #[arg(long, value_name = "TOKENS")]
    streaming_window: Option<u32>,
    /// First tokens that stay visible with --streaming-window; 0: none.
    #[arg(long, value_name = "TOKENS", default_value_t = 4, requires = "streaming_window")]
    streaming_sinks: u32,
}

impl StreamingFlags {
    pub fn attention(self) -> Option<StreamingAttention> {
        let sinks = self.streaming_sinks;
        self.streaming_window.map(|window| StreamingAttention { sinks, window })
    }
}

impl EndpointFlags {
    pub fn connect(self) -> anyhow::Result<Client> {
        let tls = Tls { ca: self.ca, identity: None };
        let options = ClientOptions { tls, ..ClientOptions::default() };
        Ok(Client::connect(&self.endpoint, options)?)
    }
}
