//! The flags that both node binaries take, and what they make of the configuration.

use std::net::SocketAddr;
use std::path::PathBuf;

use baton_engine::load::WeightsCache;
use baton_runtime::config::{self, ConfigError};
use baton_types::KvDtype;
use serde_json::{Map, Value};

use crate::{KvTransport, NodeConfig};

/// Flags given on the command line; absent ones leave file, environment and defaults as they are.
#[derive(Debug, clap::Args)]
pub struct NodeFlags {
    /// TOML file; its keys are those of `NodeConfig` (see docs/configuration.md).
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Members of the etcd cluster, as http://host:port.
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub etcd: Option<Vec<String>>,
    /// gRPC listens here.
    #[arg(long, value_name = "ADDR")]
    pub grpc: Option<SocketAddr>,
    /// Health and metrics listen here.
    #[arg(long, value_name = "ADDR")]
    pub http: Option<SocketAddr>,
    /// KV is taken on this port of the address of --grpc; 0: any that is free.
    #[arg(long, value_name = "PORT")]
    pub kv_port: Option<u16>,
    /// How KV travels: auto (UCX where both nodes have it, else gRPC), grpc, or ucx alone.
    #[arg(long, value_name = "WAY")]
    pub kv_transport: Option<KvTransport>,
    /// A GGUF file, or a folder with safetensors and config.json.
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Threads that compute; 0: one for each core.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Precision of KV: bf16, int8 in half the memory, int4 in a quarter.
    #[arg(long, value_name = "DTYPE")]
    pub kv_dtype: Option<KvDtype>,
    /// Where packed weights are kept for the next start: beside (the model), off, or a folder.
    #[arg(long, value_name = "PLACE")]
    pub weights_cache: Option<WeightsCache>,
}

impl NodeFlags {
    /// The effective configuration.
    ///
    /// # Errors
    /// All that is wrong with file, environment and flags.
    pub fn load(self, defaults: &NodeConfig) -> Result<NodeConfig, ConfigError> {
        let given = [
            ("etcd", self.etcd.map(Value::from)),
            ("grpc", self.grpc.map(|address| address.to_string().into())),
            ("http", self.http.map(|address| address.to_string().into())),
            ("kv_port", self.kv_port.map(Value::from)),
            ("kv_transport", self.kv_transport.map(|way| way.as_str().into())),
            ("model", self.model.map(|path| path.to_string_lossy().into_owned().into())),
            ("threads", self.threads.map(Value::from)),
            ("kv_dtype", self.kv_dtype.map(|dtype| dtype.as_str().into())),
            ("weights_cache", self.weights_cache.map(|cache| cache.to_string().into())),
        ];
        let flags: Map<String, Value> =
            given.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?))).collect();
        let config = config::load(defaults, self.config.as_deref(), flags)?;
        config.check().map_err(ConfigError::Invalid)?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Binary {
        #[command(flatten)]
        node: NodeFlags,
    }

    fn load(flags: &[&str]) -> Result<NodeConfig, ConfigError> {
        let flags = [&["node", "--model", "m.gguf"], flags].concat();
        Binary::parse_from(flags).node.load(&NodeConfig::on_ports(0, 0, 0))
    }

    #[test]
    fn kv_is_bf16_unless_told_otherwise() {
        assert_eq!(load(&[]).unwrap().kv_dtype, KvDtype::Bf16);
        assert_eq!(load(&["--kv-dtype", "int8"]).unwrap().kv_dtype, KvDtype::Int8);
        let error = load(&["--kv-dtype", "f16"]).unwrap_err().to_string();
        assert!(
            error.contains("kv_dtype: f16 is not supported; bf16, int8 and int4 are"),
            "{error}"
        );
        let error = Binary::try_parse_from(["node", "--kv-dtype", "int2"]).err().unwrap();
        assert!(error.to_string().contains("bf16, int8 and int4"), "{error}");
    }

    #[test]
    fn packed_weights_lie_beside_the_model_unless_told_otherwise() {
        assert_eq!(load(&[]).unwrap().weights_cache, WeightsCache::Beside);
        let cache = |place| load(&["--weights-cache", place]).unwrap().weights_cache;
        assert_eq!(cache("off"), WeightsCache::Off);
        assert_eq!(cache("/var/cache/b"), WeightsCache::Folder("/var/cache/b".into()));
        let error = Binary::try_parse_from(["node", "--weights-cache", ""]).err().unwrap();
        assert!(error.to_string().contains("beside, off, or a folder"), "{error}");
    }
}
