//! One module for each command.

pub mod bench;
pub mod chat;
pub mod eval;
pub mod generate;
pub mod status;
pub mod up;

use baton_client::{Client, ClientOptions, Tls};

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

impl EndpointFlags {
    pub fn connect(self) -> anyhow::Result<Client> {
        let tls = Tls { ca: self.ca, identity: None };
        let options = ClientOptions { tls, ..ClientOptions::default() };
        Ok(Client::connect(&self.endpoint, options)?)
    }
}
