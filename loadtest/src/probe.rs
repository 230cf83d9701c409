//! What a gateway's probe listener says: `/livez`, `/readyz`, and the figures of `/metrics`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::wire::{header, read_head};

/// Beyond this a probe has failed; orchestrators give 1 to 5 s.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// `GET path`; status and body.
///
/// # Errors
/// No connection, no whole answer, or none in time.
pub async fn get(address: SocketAddr, path: &str) -> Result<(u16, String), String> {
    let asking = async {
        let mut stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.map_err(|error| error.to_string())?;
        let (head, mut body) = read_head(&mut stream).await?;
        let length: Option<usize> = header(&head, "content-length").and_then(|length| length.parse().ok());
        while length.is_none_or(|length| body.len() < length) {
            if stream.read_buf(&mut body).await.map_err(|error| error.to_string())? == 0 {
                break;
            }
        }
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or("no status")?;
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    };
    timeout(PROBE_TIMEOUT, asking).await.unwrap_or_else(|_| Err("no answer in time".to_owned()))
}

/// One reading of `/metrics`, or the sum or difference of several: value by name with labels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    pub async fn read(probes: SocketAddr) -> Result<Metrics, String> {
        Ok(Metrics::parse(&get(probes, "/metrics").await?.1))
    }

    /// The sum over these nodes; one that does not answer is an error.
    pub async fn read_all(probes: impl IntoIterator<Item = SocketAddr>) -> Result<Metrics, String> {
        let mut sum = Metrics::default();
        for address in probes {
            for (name, value) in Metrics::read(address).await?.0 {
                *sum.0.entry(name).or_default() += value;
            }
        }
        Ok(sum)
    }

    fn parse(text: &str) -> Metrics {
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        Metrics(text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect())
    }

    /// What was added to `earlier`.
    pub fn since(&self, earlier: &Metrics) -> Metrics {
        let added = |(name, value): (&String, &f64)| (name.clone(), value - earlier.0.get(name).unwrap_or(&0.0));
        Metrics(self.0.iter().map(added).collect())
    }

    /// The sum of all series of a name, whatever their labels; `None` where there is none.
    pub fn sum(&self, name: &str) -> Option<f64> {
        let is_series =
            |series: &str| series.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('{'));
        let values: Vec<f64> = self.0.iter().filter(|(series, _)| is_series(series)).map(|(_, value)| *value).collect();
        (!values.is_empty()).then(|| values.iter().sum())
    }

    /// The values of a name by one label, those above zero.
    pub fn by(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut found = BTreeMap::new();
        for (series, value) in &self.0 {
            let Some(labels) = series.strip_prefix(name).and_then(|rest| rest.strip_prefix('{')) else { continue };
            if let Some(word) = label_of(labels, label).filter(|_| *value > 0.0) {
                *found.entry(word.to_owned()).or_insert(0.0) += value;
            }
        }
        found
    }

    /// A histogram's quantile in seconds: the upper bound of the bucket it lies in, which is never
    /// too low. `None` without such a histogram or without samples; infinite beyond its last bound.
    pub fn quantile(&self, name: &str, part: f64) -> Option<f64> {
        let prefix = format!("{name}_bucket");
        let mut buckets: Vec<(f64, f64)> = Vec::new();
        for (bound, count) in self.by(&prefix, "le") {
            buckets.push((bound.parse().unwrap_or(f64::INFINITY), count));
        }
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let total = buckets.last().map(|(_, count)| *count)?;
        buckets.iter().find(|(_, count)| *count >= total * part).map(|(bound, _)| *bound)
    }

    /// Series whose name holds one of these words, for a look at what nobody thought of.
    pub fn like<'a>(&'a self, words: &'a [&str]) -> impl Iterator<Item = (&'a str, f64)> {
        let is_like = move |name: &str| words.iter().any(|word| name.contains(word));
        self.0.iter().filter(move |(name, _)| is_like(name)).map(|(name, value)| (name.as_str(), *value))
    }
}

fn label_of<'a>(labels: &'a str, label: &str) -> Option<&'a str> {
    let mut pairs = labels.trim_end_matches('}').split(',').filter_map(|pair| pair.split_once('='));
    pairs.find(|(name, _)| *name == label).map(|(_, value)| value.trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# TYPE a counter\na_total{code=\"x\",t=\"1\"} 3\na_total{code=\"y\",t=\"1\"} 0\na_total{code=\"x\",t=\"2\"} 4\n\
        ab_total 9\nh_seconds_bucket{le=\"0.01\"} 90\nh_seconds_bucket{le=\"0.02\"} 99\nh_seconds_bucket{le=\"+Inf\"} 100\n";

    #[test]
    fn series_are_summed_by_name_and_by_label() {
        let metrics = Metrics::parse(TEXT);
        assert_eq!((metrics.sum("a_total"), metrics.sum("ab_total"), metrics.sum("b")), (Some(7.0), Some(9.0), None));
        assert_eq!(metrics.by("a_total", "code"), BTreeMap::from([("x".to_owned(), 7.0)]));
        let earlier = Metrics::parse("ab_total 4\n");
        assert_eq!(metrics.since(&earlier).sum("ab_total"), Some(5.0));
    }

    #[test]
    fn a_quantile_is_its_buckets_upper_bound() {
        let metrics = Metrics::parse(TEXT);
        assert_eq!(metrics.quantile("h_seconds", 0.9), Some(0.01));
        assert_eq!(metrics.quantile("h_seconds", 0.99), Some(0.02));
        assert_eq!(metrics.quantile("h_seconds", 1.0), Some(f64::INFINITY));
        assert_eq!(metrics.quantile("other", 0.5), None);
    }
}
