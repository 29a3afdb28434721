//! Reads Prometheus text.

/// One scrape.
#[derive(Clone, Debug)]
pub struct Metrics(String);

impl Metrics {
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// Sum over all series of this name; 0 where there is none.
    pub fn sum(&self, name: &str) -> f64 {
        self.sum_where(name, "")
    }

    /// Sum over the series of this name whose labels hold `label`, as `state="used"`.
    pub fn sum_where(&self, name: &str, label: &str) -> f64 {
        self.0
            .lines()
            .filter_map(|line| {
                let rest = line.strip_prefix(name)?;
                let (labels, value) = match rest.strip_prefix('{') {
                    Some(labelled) => labelled.rsplit_once('}')?,
                    None => ("", rest.strip_prefix(' ')?),
                };
                labels.contains(label).then(|| value.trim().parse::<f64>().ok()).flatten()
            })
            .sum()
    }

    /// What of a node is still in use: blocks, grants, requests. Empty where nothing is.
    pub fn in_use(&self) -> Vec<String> {
        let figures = [
            ("blocks used", self.sum_where("baton_kv_blocks", "state=\"used\"")),
            ("grants", self.sum("baton_kv_grants")),
            ("requests running", self.sum("baton_engine_requests_running")),
            ("requests waiting", self.sum("baton_engine_requests_waiting")),
        ];
        let busy = figures.iter().filter(|(_, value)| *value != 0.0);
        busy.map(|(what, value)| format!("{value} {what}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_add_up_by_label() {
        let text = "# HELP a b\nx{state=\"used\"} 2\nx{state=\"free\"} 5\nx_more 9\ny 1.5\n";
        let metrics = Metrics::new(text.into());
        assert_eq!(metrics.sum("x"), 7.0);
        assert_eq!(metrics.sum_where("x", "state=\"used\""), 2.0);
        assert_eq!(metrics.sum("y"), 1.5);
        assert_eq!(metrics.sum("z"), 0.0);
    }
}
