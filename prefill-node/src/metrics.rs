//! Metrics of a prefill node's own.

use baton_engine::convert::KvConversion;
use prometheus::{IntCounterVec, Opts, Registry};

#[derive(Clone, Debug)]
pub(crate) struct PrefillMetrics {
    converted: IntCounterVec,
}

impl PrefillMetrics {
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let opts = Opts::new(
            "baton_kv_converted_bytes_total",
            "KV payload that was brought into its decode node's precision, as it was sent.",
        );
        let converted = IntCounterVec::new(opts, &["from", "to"])?;
        registry.register(Box::new(converted.clone()))?;
        Ok(Self { converted })
    }

    pub fn converted(&self, conversion: &KvConversion, bytes: usize) {
        let (from, to) = (conversion.from().as_str(), conversion.to().as_str());
        self.converted.with_label_values(&[from, to]).inc_by(bytes as u64);
    }
}
