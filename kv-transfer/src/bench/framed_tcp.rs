//! The baseline: frames over plain TCP, read straight into the destination. Nothing that carries
//! frames in order over TCP can do with less.

use std::io;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{ARENA_BYTES, Level, Plan, Window};
use crate::checksum::crc32c;
use crate::frame::PAYLOAD_MAX_BYTES;

/// Length u32, checksum u32 (0: none is wanted); little-endian. Length 0 ends a stream.
const HEADER_BYTES: usize = 8;

/// Takes streams until the process ends.
///
/// # Errors
/// Where nothing can be accepted.
pub async fn serve_framed(listening: TcpListener) -> io::Result<()> {
    loop {
        let (stream, _) = listening.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(async move {
            if let Err(error) = take(stream).await {
                tracing::warn!(%error, "a stream failed");
            }
        });
    }
}

async fn take(mut stream: TcpStream) -> io::Result<()> {
    let (mut arena, mut at) = (vec![1; ARENA_BYTES], 0);
    // The memory is there: now the sender may begin.
    stream.write_all(&[0]).await?;
    loop {
        let mut header = [0; HEADER_BYTES];
        stream.read_exact(&mut header).await?;
        let [len, crc] = fields(header);
        if len == 0 {
            return stream.write_all(&[1]).await;
        }
        if len as usize > PAYLOAD_MAX_BYTES {
            return Err(io::Error::other("a frame is too long"));
        }
        if at + len as usize > arena.len() {
            at = 0;
        }
        let place = &mut arena[at..at + len as usize];
        stream.read_exact(place).await?;
        if crc != 0 && crc32c(place) != crc {
            return Err(io::Error::other("a checksum does not fit"));
        }
        at += len as usize;
    }
}

fn fields(header: [u8; HEADER_BYTES]) -> [u32; 2] {
    let field = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
    [field(0), field(4)]
}

/// Sends a plan's bytes, and waits until the receiver has them.
///
/// # Errors
/// Where a connection fails.
pub async fn send_framed<T>(
    peer: &str,
    plan: Plan,
    meter: impl Fn() -> T,
) -> io::Result<Window<T>> {
    let frame_bytes = plan.message_bytes.min(PAYLOAD_MAX_BYTES);
    let mut streams = Vec::new();
    for _ in 0..plan.streams {
        let mut stream = TcpStream::connect(peer).await?;
        stream.set_nodelay(true)?;
        stream.read_exact(&mut [0]).await?;
        streams.push((stream, vec![7; ARENA_BYTES / plan.streams]));
    }
    let (before, start) = (meter(), Instant::now());
    let mut running = tokio::task::JoinSet::new();
    for (mut stream, arena) in streams {
        let bytes = plan.total_bytes / plan.streams as u64;
        running.spawn(async move {
            let mut frames = arena.chunks_exact(frame_bytes).cycle();
            let count = bytes.div_ceil(frame_bytes as u64);
            for _ in 0..count {
                let Some(frame) = frames.next() else { break };
                let crc = if plan.level == Level::Checked { crc32c(frame) } else { 0 };
                let mut header = [0; HEADER_BYTES];
                header[..4].copy_from_slice(&(frame.len() as u32).to_le_bytes());
                header[4..].copy_from_slice(&crc.to_le_bytes());
                let mut both = bytes::Buf::chain(&header[..], frame);
                stream.write_all_buf(&mut both).await?;
            }
            stream.write_all(&[0; HEADER_BYTES]).await?;
            stream.read_exact(&mut [0]).await?;
            io::Result::Ok(count * frame_bytes as u64)
        });
    }
    let mut bytes = 0;
    while let Some(sent) = running.join_next().await {
        bytes += sent.map_err(io::Error::other)??;
    }
    Ok(Window { took: start.elapsed(), before, after: meter(), bytes })
}
