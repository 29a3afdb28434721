//! Requests with answers that can be compared, and many of them at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_client::{Client, ClientError, Event, GenerateRequest};
use baton_types::TokenId;
use tokio::task::JoinSet;

use crate::prompts::{Numbers, text};

/// No request of a test takes longer, whatever dies under it.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(150);

/// One request.
#[derive(Clone, Debug)]
pub struct Case {
    pub prompt: String,
    pub max_tokens: u32,
    pub temperature: f32,
    pub seed: u64,
    pub choices: u32,
}

/// What came back, by choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recorded {
    pub ids: Vec<Vec<TokenId>>,
    pub texts: Vec<String>,
    pub reasons: Vec<String>,
}

impl Case {
    pub fn request(&self) -> GenerateRequest {
        GenerateRequest::text(&self.prompt)
            .max_tokens(self.max_tokens)
            .temperature(self.temperature)
            .seed(self.seed)
            .choices(self.choices)
            .ignore_eos(true)
            .explain(true)
    }
}

/// So many requests: short ones that are prefilled at the decode node, and longer ones, up to
/// about 700 tokens, that are handed over; greedy and drawn ones.
pub fn mixed(count: u64, seed: u64) -> Vec<Case> {
    let mut numbers = Numbers::new(seed);
    (0..count)
        .map(|at| Case {
            prompt: text(seed * 1_000 + at, [20, 90, 150, 560][(at % 4) as usize]),
            max_tokens: 48 + numbers.below(49) as u32,
            temperature: if at % 3 == 0 { 0.8 } else { 0.0 },
            seed: seed + at,
            choices: 1,
        })
        .collect()
}

/// Counts what has come, over all requests.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<AtomicUsize>);

impl Progress {
    pub fn tokens(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

/// Runs one request to its end and checks the order of its tokens.
///
/// # Errors
/// The error that ended it.
///
/// # Panics
/// Where a token comes twice, or one is missing, or there is more than one end.
pub async fn record(
    client: &Client,
    case: &Case,
    progress: &Progress,
) -> Result<Recorded, ClientError> {
    read(client, case.request(), case.choices as usize, progress).await
}

/// As [`record`], with the prompt in ids instead of the case's own.
///
/// # Errors
/// The error that ended it.
///
/// # Panics
/// As [`record`].
pub async fn record_ids(
    client: &Client,
    case: &Case,
    prompt: &[TokenId],
    progress: &Progress,
) -> Result<Recorded, ClientError> {
    let ids = GenerateRequest::token_ids(prompt.to_vec());
    let request = GenerateRequest { prompt: ids.prompt, ..case.request() };
    read(client, request, case.choices as usize, progress).await
}

async fn read(
    client: &Client,
    request: GenerateRequest,
    choices: usize,
    progress: &Progress,
) -> Result<Recorded, ClientError> {
    let mut recorded = Recorded {
        ids: vec![Vec::new(); choices],
        texts: vec![String::new(); choices],
        reasons: vec![String::new(); choices],
    };
    let mut stream = client.generate(request).await?;
    let mut done = 0;
    while let Some(event) = stream.next().await {
        match event? {
            Event::Token(token) => {
                let choice = token.choice as usize;
                let next = recorded.ids[choice].len();
                assert_eq!(token.index as usize, next, "each index comes once and in order");
                assert!(recorded.reasons[choice].is_empty(), "a token came behind the end");
                recorded.ids[choice].push(token.id);
                recorded.texts[choice].push_str(&token.text);
                progress.0.fetch_add(1, Ordering::AcqRel);
            }
            Event::Finished(finished) => {
                let choice = finished.choice as usize;
                assert!(recorded.reasons[choice].is_empty(), "a choice ends once");
                recorded.texts[choice].push_str(&finished.text);
                recorded.reasons[choice] = finished.reason;
            }
            Event::Done(_) => done += 1,
            Event::PromptLogprobs(_) => {}
        }
    }
    assert_eq!(done, 1, "there is one last word");
    Ok(recorded)
}

/// Many requests at once, spread over the clients.
#[derive(Debug)]
pub struct Running {
    pub progress: Progress,
    tasks: JoinSet<(usize, Result<Recorded, ClientError>)>,
}

/// Starts them all.
pub fn start(clients: &[Client], cases: &[Case]) -> Running {
    let progress = Progress::default();
    let mut tasks = JoinSet::new();
    for (at, case) in cases.iter().cloned().enumerate() {
        let (client, progress) = (clients[at % clients.len()].clone(), progress.clone());
        tasks.spawn(async move {
            let answer = tokio::time::timeout(ANSWER_WITHIN, record(&client, &case, &progress));
            (at, answer.await.unwrap_or_else(|_| panic!("request {at} hangs")))
        });
    }
    Running { progress, tasks }
}

impl Running {
    /// All answers, in the order of the cases.
    ///
    /// # Panics
    /// Where one failed.
    pub async fn finish(self) -> Vec<Recorded> {
        let answers = self.outcomes().await;
        let numbered = answers.into_iter().enumerate();
        numbered
            .map(|(at, answer)| answer.unwrap_or_else(|error| panic!("request {at}: {error}")))
            .collect()
    }

    /// All outcomes, in the order of the cases.
    ///
    /// # Panics
    /// Where one hangs or breaks the order of its tokens.
    pub async fn outcomes(mut self) -> Vec<Result<Recorded, ClientError>> {
        let mut all: Vec<_> = (0..self.tasks.len()).map(|_| None).collect();
        while let Some(joined) = self.tasks.join_next().await {
            let (at, answer) = joined.unwrap_or_else(|error| match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(error) => panic!("a request's task was ended: {error}"),
            });
            all[at] = Some(answer);
        }
        all.into_iter().map(|answer| answer.expect("each case has one task")).collect()
    }
}

/// # Panics
/// Where they differ, with the first difference.
pub fn assert_equal(expected: &[Recorded], got: &[Recorded], what: &str) {
    assert_eq!(expected.len(), got.len());
    for (at, (expected, got)) in expected.iter().zip(got).enumerate() {
        for (choice, (wanted, ids)) in expected.ids.iter().zip(&got.ids).enumerate() {
            let differs = wanted.iter().zip(ids).position(|(a, b)| a != b);
            assert!(
                differs.is_none() && wanted.len() == ids.len(),
                "{what}: request {at}, choice {choice} differs at {differs:?} of {} ({} came)",
                wanted.len(),
                ids.len()
            );
        }
        assert_eq!(expected, got, "{what}: request {at} has another text or end");
    }
}
