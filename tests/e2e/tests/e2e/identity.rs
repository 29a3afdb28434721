//! Acceptance 3: the same tokens, whatever the way.
//!
//! Factors are covered in pairs: for any two factors, every pair of their levels occurs in some
//! cluster. `BATON_TEST_FULL=1` runs every combination, over 50 prompts: each combination has four
//! of them, in turn, so that each prompt goes along some thirty.

use std::time::{Duration, Instant};

use baton_client::Client;
use baton_engine_host::{IsaChoice, KvTransport, NodeConfig};
use baton_router::RouterConfig;
use baton_tests::ask::prompt;
use baton_tests::load::{self, Case, Progress, Recorded};
use baton_tests::local::{Local, node_config, router_config};
use baton_tests::prompts::Numbers;
use baton_tests::{alone, wait};
use baton_types::TokenId;

/// Levels of each factor, in the order of [`Way`]'s fields.
const FACTORS: usize = 8;
const LEVELS: [usize; FACTORS] = [2, 4, 2, 2, 3, 2, 2, 3];

/// Where a chunk is one token, or kernels are scalar, prompts are at most so long.
const SLOW_PROMPT_TOKENS: usize = 128;

/// Answers to prompts longer than this are longer too.
const SHORT_PROMPT_TOKENS: usize = 40;

/// Of the 50 prompts of the full test, those that one combination has.
const FULL_SHARE: usize = 4;

const CHUNKS: [usize; 4] = [1, 7, 64, 512];
const ISAS: [IsaChoice; 3] = [IsaChoice::Scalar, IsaChoice::Avx2, IsaChoice::Avx512];
/// UCX as it finds its way, which inside one machine is the kernel's copy, and over TCP.
const TRANSPORTS: [(KvTransport, &str); 3] =
    [(KvTransport::Grpc, ""), (KvTransport::Ucx, ""), (KvTransport::Ucx, "tcp")];
const OTHERS: u64 = 16;

/// One way for a request to go: a level of each factor.
#[derive(Clone, Copy, Debug)]
struct Way {
    remote_prefill: bool,
    chunk_tokens: usize,
    among_others: bool,
    threads: usize,
    isa: IsaChoice,
    block_tokens: u16,
    /// Ask a second time, when the prompt's KV is cached.
    cached: bool,
    /// How KV travels, and over which of UCX's transports.
    transport: (KvTransport, &'static str),
}

impl Way {
    fn from_levels(levels: [usize; FACTORS]) -> Self {
        Self {
            remote_prefill: levels[0] == 1,
            chunk_tokens: CHUNKS[levels[1]],
            among_others: levels[2] == 1,
            threads: 1 + levels[3],
            isa: ISAS[levels[4]],
            block_tokens: [16, 32][levels[5]],
            cached: levels[6] == 1,
            transport: TRANSPORTS[levels[7]],
        }
    }

    /// The longest prompt that is run along this way.
    fn prompt_tokens_max(&self) -> usize {
        match self {
            Way { isa: IsaChoice::Scalar, .. } | Way { chunk_tokens: 1, .. } => SLOW_PROMPT_TOKENS,
            _ => 3_000,
        }
    }

    /// Pairs do without the ways that take minutes: scalar steps among others, for few tokens each.
    fn is_bearable(&self) -> bool {
        self.isa != IsaChoice::Scalar || !self.among_others || self.chunk_tokens >= 64
    }

    fn node(&self) -> NodeConfig {
        NodeConfig {
            threads: self.threads,
            isa: self.isa,
            block_tokens: self.block_tokens,
            prefill_chunk_tokens: self.chunk_tokens,
            mixed_prefill_tokens: self.chunk_tokens,
            kv_pool_mib: 384,
            kv_transport: self.transport.0,
            ucx_tls: self.transport.1.to_owned(),
            ..node_config()
        }
    }

    fn router(&self) -> RouterConfig {
        let local_prefill_max_tokens = if self.remote_prefill { 0 } else { usize::MAX >> 1 };
        RouterConfig { local_prefill_max_tokens, ..router_config() }
    }
}

/// A prompt in ids, how it is asked, and what must come.
struct Asked {
    prompt: Vec<TokenId>,
    case: Case,
    expected: Recorded,
}

/// Rows of levels in which every pair of levels of any two factors occurs; greedy.
fn pairwise() -> Vec<[usize; FACTORS]> {
    let mut all = every_combination();
    all.retain(|row| Way::from_levels(*row).is_bearable());
    let pairs = |row: &[usize; FACTORS]| {
        let row = *row;
        (0..FACTORS).flat_map(move |a| (a + 1..FACTORS).map(move |b| (a, row[a], b, row[b])))
    };
    let mut missing: std::collections::BTreeSet<_> = all.iter().flat_map(pairs).collect();
    let mut rows = Vec::new();
    while !missing.is_empty() {
        let gain =
            |row: &&[usize; FACTORS]| pairs(row).filter(|pair| missing.contains(pair)).count();
        // The first of the best, so that the rows are the same in every run.
        let best = *all.iter().rev().max_by_key(gain).expect("there are combinations");
        pairs(&best).for_each(|pair| {
            missing.remove(&pair);
        });
        rows.push(best);
    }
    rows
}

fn every_combination() -> Vec<[usize; FACTORS]> {
    let count: usize = LEVELS.iter().product();
    let row = |mut number: usize| {
        LEVELS.map(|levels| {
            let level = number % levels;
            number /= levels;
            level
        })
    };
    (0..count).map(row).collect()
}

fn is_available(isa: IsaChoice) -> bool {
    match isa {
        IsaChoice::Auto | IsaChoice::Scalar => true,
        IsaChoice::Avx2 => std::arch::is_x86_feature_detected!("avx2"),
        IsaChoice::Avx512 => {
            std::arch::is_x86_feature_detected!("avx512vnni")
                && std::arch::is_x86_feature_detected!("avx512bf16")
        }
    }
}

/// Prompts of these lengths, each a text of its own, in turn greedy with one answer and drawn
/// with three.
fn unanswered(lengths: &[usize], ids: impl Fn(u64, usize) -> Vec<TokenId>) -> Vec<Asked> {
    let asked = lengths.iter().enumerate().map(|(at, &length)| {
        let drawn = at % 2 == 1;
        Asked {
            prompt: ids(at as u64, length),
            case: Case {
                prompt: String::new(),
                max_tokens: if length > SHORT_PROMPT_TOKENS { 16 } else { 6 },
                temperature: if drawn { 0.8 } else { 0.0 },
                seed: 40 + at as u64,
                choices: if drawn { 3 } else { 1 },
            },
            expected: Recorded::default(),
        }
    });
    asked.collect()
}

async fn ask(client: &Client, asked: &Asked) -> Recorded {
    let what = format!("an answer to {} tokens", asked.prompt.len());
    let progress = Progress::default();
    let answer = load::record_ids(client, &asked.case, &asked.prompt, &progress);
    let answer = wait::in_time(load::ANSWER_WITHIN, &what, answer).await;
    answer.unwrap_or_else(|error| panic!("{what}: {error}"))
}

/// Prompts with the answers of one plain way: prefilled locally, alone, one thread, whole chunks.
async fn reference(lengths: &[usize]) -> Vec<Asked> {
    let router = RouterConfig { local_prefill_max_tokens: usize::MAX >> 1, ..router_config() };
    let local = Local::start(router, node_config(), node_config()).await;
    let client = local.client();
    let longest = lengths.iter().copied().max().unwrap_or(1);
    let mut texts = Vec::new();
    for at in 0..lengths.len() {
        texts.push(prompt(&client, 900 + at as u64, longest).await);
    }
    let mut all = unanswered(lengths, |at, length| texts[at as usize][..length].to_vec());
    for asked in &mut all {
        asked.expected = ask(&client, asked).await;
        let answers = &asked.expected.ids;
        assert!(answers.iter().all(|ids| ids.len() == asked.case.max_tokens as usize));
        if let [first, second, third] = &answers[..] {
            assert!(
                first != second && second != third && first != third,
                "choices differ from one another"
            );
        }
    }
    local.end().await;
    all
}

/// Runs prompts along one way.
async fn follow(way: Way, all: &[&Asked]) {
    let began = Instant::now();
    let local = Local::start(way.router(), way.node(), way.node()).await;
    let client = local.client();
    let others: Vec<Case> = load::mixed(OTHERS, 70)
        .into_iter()
        .enumerate()
        .map(|(at, case)| Case { prompt: format!("{at} is"), max_tokens: 2_000, ..case })
        .collect();
    let crowd = way.among_others.then(|| load::start(&[local.client()], &others));
    if let Some(crowd) = &crowd {
        wait::until(Duration::from_secs(60), "the others' first tokens", || async {
            let tokens = crowd.progress.tokens();
            if tokens >= OTHERS as usize { Ok(()) } else { Err(format!("{tokens} came")) }
        })
        .await;
    }
    for asked in all {
        for _ in 0..if way.cached { 2 } else { 1 } {
            let got = ask(&client, asked).await;
            let what = format!("{} prompt tokens, {way:?}", asked.prompt.len());
            load::assert_equal(std::slice::from_ref(&asked.expected), &[got], &what);
        }
    }
    drop(crowd);
    local.idle(Duration::from_secs(2)).await;
    local.end().await;
    eprintln!("{} prompts equal in {:?}: {way:?}", all.len(), began.elapsed());
}

async fn follow_all(rows: Vec<[usize; FACTORS]>, lengths: &[usize], full: bool) {
    let all = reference(lengths).await;
    for (row_at, way) in rows.into_iter().map(Way::from_levels).enumerate() {
        if !is_available(way.isa) {
            eprintln!("skipped, this machine lacks {:?}: {way:?}", way.isa);
            continue;
        }
        let most = way.prompt_tokens_max();
        let fits = |asked: &&Asked| asked.prompt.len() <= most;
        let mut prompts: Vec<&Asked> = all.iter().filter(fits).collect();
        if full {
            let first = row_at * FULL_SHARE % prompts.len();
            prompts.rotate_left(first);
            prompts.truncate(FULL_SHARE);
        }
        follow(way, &prompts).await;
    }
}

#[test]
fn every_pair_of_levels_occurs() {
    let rows = pairwise();
    assert!(rows.len() <= 16, "{} rows are more than pairs need", rows.len());
    for a in 0..7 {
        for b in a + 1..7 {
            for (one, two) in (0..LEVELS[a]).flat_map(|i| (0..LEVELS[b]).map(move |j| (i, j))) {
                assert!(rows.iter().any(|row| row[a] == one && row[b] == two));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_the_same_along_every_way() {
    let _alone = alone().await;
    if std::env::var_os("BATON_TEST_FULL").is_some() {
        let mut numbers = Numbers::new(3);
        // Half short, for the slow ways too; the others up to 3,000.
        let lengths = (0..50).map(|at| match at {
            0 => 1,
            1 => 3_000,
            at if at % 2 == 0 => 1 + numbers.below(SLOW_PROMPT_TOKENS),
            _ => 1 + numbers.below(3_000),
        });
        return follow_all(every_combination(), &lengths.collect::<Vec<_>>(), true).await;
    }
    follow_all(pairwise(), &[1, 2, 33, 128, 3_000, 700], false).await;
}
