//! `baton chat`: a conversation in the terminal.

use std::io::IsTerminal;

use anyhow::Context;
use baton_client::{ChatRequest, Client, Event};
use serde_json::json;

use super::{EndpointFlags, StreamingFlags};
use crate::print;

/// Chats with the model: one line is one message; an empty line is skipped, /reset forgets the
/// conversation, Ctrl-C stops an answer, Ctrl-D ends. Lines from a pipe are answered in turn, and
/// the first that fails ends it with an error.
///
/// Example: baton chat --system "Answer in one sentence."
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Flags {
    #[command(flatten)]
    endpoint: EndpointFlags,
    /// Needed only where more than one model is served.
    #[arg(long, default_value = "")]
    model: String,
    /// A message before the conversation.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[arg(long, value_name = "N", default_value_t = 512)]
    max_tokens: u32,
    #[arg(long, value_name = "T", default_value_t = 0.7)]
    temperature: f32,
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    #[command(flatten)]
    streaming: StreamingFlags,
    /// Print each answer as one JSON object on a line, and no prompt.
    #[arg(long)]
    json: bool,
}

pub async fn run(flags: Flags) -> anyhow::Result<()> {
    let connection =
        EndpointFlags { endpoint: flags.endpoint.endpoint.clone(), ca: flags.endpoint.ca.clone() };
    let client = connection.connect()?;
    let by_hand = std::io::stdin().is_terminal();
    let mut history: Vec<(String, String)> = Vec::new();
    while let Some(line) = read_line(by_hand && !flags.json).await? {
        match line.trim() {
            "" => continue,
            "/reset" => {
                history.clear();
                continue;
            }
            _ => history.push(("user".into(), line)),
        }
        match answer(&client, &flags, &history).await {
            Ok(text) => history.push(("assistant".into(), text)),
            Err(error) if !by_hand => return Err(error),
            Err(error) => {
                // The conversation goes on without the message that failed.
                history.pop();
                eprintln!("{error:#}");
            }
        }
    }
    Ok(())
}

async fn read_line(with_prompt: bool) -> anyhow::Result<Option<String>> {
    if with_prompt {
        print::piece("> ")?;
    }
    let read = tokio::task::spawn_blocking(|| std::io::stdin().lines().next().transpose());
    read.await?.context("standard input cannot be read as UTF-8 text")
}

async fn answer(
    client: &Client,
    flags: &Flags,
    history: &[(String, String)],
) -> anyhow::Result<String> {
    let mut request = ChatRequest::new();
    if let Some(system) = &flags.system {
        request = request.message("system", system);
    }
    for (role, content) in history {
        request = request.message(role, content);
    }
    request =
        request.model(&flags.model).max_tokens(flags.max_tokens).temperature(flags.temperature);
    if let Some(streaming) = flags.streaming.attention() {
        request = request.streaming_attention(streaming.sinks, streaming.window);
    }
    request.options.sampling.seed = flags.seed;
    let mut stream = client.chat(request).await?;
    let mut text = String::new();
    let mut usage = json!(null);
    loop {
        let event = tokio::select! {
            event = stream.next() => event,
            // Dropping the stream cancels it; what has come stays in the conversation.
            _ = tokio::signal::ctrl_c() => None,
        };
        let piece = match event.transpose()? {
            Some(Event::Token(token)) => token.text,
            Some(Event::Finished(finished)) => finished.text,
            Some(Event::Done(done)) => {
                usage = json!({
                    "prompt_tokens": done.prompt_tokens,
                    "completion_tokens": done.completion_tokens,
                    "cached_tokens": done.cached_tokens,
                });
                String::new()
            }
            Some(Event::PromptLogprobs(_)) => String::new(),
            None => break,
        };
        if !flags.json {
            print::piece(&piece)?;
        }
        text.push_str(&piece);
    }
    if flags.json {
        print::json(&json!({"role": "assistant", "content": text, "usage": usage}))?;
    } else {
        print::line("")?;
    }
    Ok(text)
}
