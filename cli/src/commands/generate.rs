//! `baton generate`: one prompt, one answer.

use baton_client::{Completion, Event, GenerateRequest};
use serde_json::{Value, json};

use super::{EndpointFlags, StreamingFlags};
use crate::print;

/// Generates from a raw prompt.
///
/// Example: baton generate --prompt "The capital of France is" --max-tokens 16 --temperature 0 \
///   --json
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Flags {
    #[command(flatten)]
    endpoint: EndpointFlags,
    /// The prompt, as text.
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_ids")]
    prompt: Option<String>,
    /// The prompt, as token ids.
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "prompt")]
    prompt_ids: Option<Vec<u32>>,
    /// Needed only where more than one model is served.
    #[arg(long, default_value = "")]
    model: String,
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tokens: u32,
    /// 0 takes the likeliest token.
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f32,
    /// The same seed gives the same tokens; without one, the router draws it.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Number of answers.
    #[arg(long, value_name = "N", default_value_t = 1)]
    n: u32,
    /// A text that ends the answer; may be given more than once.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Go on past the model's own end.
    #[arg(long)]
    ignore_eos: bool,
    #[command(flatten)]
    streaming: StreamingFlags,
    /// Print one JSON object: token_ids, text, finish_reason, usage, explain.
    #[arg(long)]
    json: bool,
}

pub async fn run(flags: Flags) -> anyhow::Result<()> {
    let client = flags.endpoint.connect()?;
    let mut request = match (flags.prompt, flags.prompt_ids) {
        (Some(text), _) => GenerateRequest::text(text),
        (None, ids) => GenerateRequest::token_ids(ids.unwrap_or_default()),
    };
    request = request
        .model(flags.model)
        .max_tokens(flags.max_tokens)
        .temperature(flags.temperature)
        .choices(flags.n)
        .ignore_eos(flags.ignore_eos)
        .explain(flags.json);
    if let Some(streaming) = flags.streaming.attention() {
        request = request.streaming_attention(streaming.sinks, streaming.window);
    }
    request.options.sampling.seed = flags.seed;
    request.options.sampling.top_p = flags.top_p;
    request.options.sampling.top_k = flags.top_k;
    request.options.stop.stop = flags.stop;
    let mut stream = client.generate(request).await?;
    if flags.json {
        return print::json(&to_json(&stream.collect().await?)?);
    }
    if flags.n > 1 {
        let completion = stream.collect().await?;
        for (at, answer) in completion.answers.iter().enumerate() {
            print::line(&format!("--- {at}\n{}", answer.text))?;
        }
        return Ok(());
    }
    while let Some(event) = stream.next().await {
        match event? {
            Event::Token(token) => print::piece(&token.text)?,
            Event::Finished(finished) => print::line(&finished.text)?,
            Event::PromptLogprobs(_) | Event::Done(_) => {}
        }
    }
    Ok(())
}

fn to_json(completion: &Completion) -> anyhow::Result<Value> {
    let done = &completion.done;
    let choices: Vec<Value> = completion
        .answers
        .iter()
        .map(|answer| {
            json!({
                "token_ids": answer.token_ids,
                "text": answer.text,
                "finish_reason": answer.finish_reason,
            })
        })
        .collect();
    let mut object = choices.first().cloned().unwrap_or_else(|| json!({}));
    object["usage"] = json!({
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "cached_tokens": done.cached_tokens,
    });
    object["seed"] = json!(done.seed);
    object["explain"] = serde_json::from_str(&done.explain_json)?;
    if choices.len() > 1 {
        object["choices"] = Value::Array(choices);
    }
    Ok(object)
}
