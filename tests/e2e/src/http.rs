//! HTTP/1.1 by hand, so that a test can send what no client would.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::metrics::Metrics;

/// No answer takes longer.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// `Null` where the body is no JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }
}

/// # Errors
/// Where the connection breaks or the answer is no HTTP.
pub async fn get(address: SocketAddr, path: &str) -> anyhow::Result<Reply> {
    send(address, format!("GET {path} HTTP/1.1\r\n{}", head(0, "")).as_bytes()).await
}

/// # Errors
/// As [`get`].
pub async fn post_json(address: SocketAddr, path: &str, body: &Value) -> anyhow::Result<Reply> {
    send(address, &request("POST", path, "application/json", body.to_string().as_bytes())).await
}

/// # Errors
/// As [`get`].
pub async fn metrics(address: SocketAddr) -> anyhow::Result<Metrics> {
    Ok(Metrics::new(get(address, "/metrics").await?.text()))
}

/// The bytes of a request that closes its connection.
pub fn request(method: &str, path: &str, kind: &str, body: &[u8]) -> Vec<u8> {
    let kind = format!("content-type: {kind}\r\n");
    let mut bytes = format!("{method} {path} HTTP/1.1\r\n{}", head(body.len(), &kind)).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

fn head(length: usize, more: &str) -> String {
    format!("host: baton\r\nconnection: close\r\ncontent-length: {length}\r\n{more}\r\n")
}

/// Sends these bytes and reads the answer to its end.
///
/// # Errors
/// Where the connection breaks or the answer is no HTTP.
pub async fn send(address: SocketAddr, bytes: &[u8]) -> anyhow::Result<Reply> {
    let exchange = async {
        let mut stream = open(address, bytes).await?;
        let mut answer = Vec::new();
        // A server that refuses a body halfway resets the connection behind its answer.
        let read = stream.read_to_end(&mut answer).await;
        ensure!(read.is_ok() || !answer.is_empty(), "the connection broke: {read:?}");
        parse(&answer)
    };
    tokio::time::timeout(ANSWER_WITHIN, exchange).await.context("no answer in time")?
}

/// Sends these bytes and leaves the answer to the caller. Dropped, the connection closes.
///
/// # Errors
/// Where nobody listens.
pub async fn open(address: SocketAddr, bytes: &[u8]) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    // As above: the answer says what was wrong.
    let _refused = stream.write_all(bytes).await;
    Ok(stream)
}

fn parse(answer: &[u8]) -> anyhow::Result<Reply> {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
    let end = end.with_context(|| format!("no HTTP: {}", String::from_utf8_lossy(answer)))?;
    let head = std::str::from_utf8(&answer[..end])?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).context("no status line")?;
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_string()))
        .collect();
    let raw = &answer[end + 4..];
    let chunked = headers
        .iter()
        .any(|(name, value)| name == "transfer-encoding" && value.eq_ignore_ascii_case("chunked"));
    let body = if chunked { unchunk(raw)? } else { raw.to_vec() };
    Ok(Reply { status: status.parse()?, headers, body })
}

fn unchunk(mut raw: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = raw.windows(2).position(|two| two == b"\r\n").context("a chunk has no size")?;
        let size = usize::from_str_radix(std::str::from_utf8(&raw[..end])?.trim(), 16)?;
        if size == 0 {
            return Ok(body);
        }
        let chunk = raw.get(end + 2..end + 2 + size).context("a chunk is cut off")?;
        body.extend_from_slice(chunk);
        raw = raw.get(end + 2 + size + 2..).context("the last chunk is missing")?;
    }
}
