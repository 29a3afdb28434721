use super::*;
use baton_types::{RequestId, StopParams};

fn request(sampling: SamplingParams) -> GenerateRequest {
    GenerateRequest {
        id: RequestId([1; 16]),
        prompt: vec![3, 4],
        sampling,
        stop: StopParams {
            max_tokens: 8,
            min_tokens: 0,
            stop_token_ids: vec![],
            ignore_eos: false,
        },
        choices: 1,
        logprobs: None,
        prompt_logprobs: None,
        streaming_attention: None,
        tenant_salt: vec![],
        deadline_ms: 1_000,
    }
}

fn frequencies(params: &SamplingParams, logits: &[f32], draws: u32) -> Vec<f64> {
    let request = request(params.clone());
    let mut scratch = Scratch::default();
    let mut counts = vec![0_u32; logits.len()];
    let mut state = SamplerState::replay(&request, 0, &[]);
    for _ in 0..draws {
        let id = state.draw(logits, params, &[], &mut scratch).unwrap();
        counts[id as usize] += 1;
        state.drawn += 1;
    }
    counts.iter().map(|&count| f64::from(count) / f64::from(draws)).collect()
}

#[test]
fn draws_follow_the_softmax() {
    let logits = [0.0, 1.0, 2.0, -1.0, 0.5];
    let total: f64 = logits.iter().map(|&x| libm::exp(f64::from(x))).sum();
    let got = frequencies(&SamplingParams::default(), &logits, 200_000);
    for (x, share) in logits.iter().zip(got) {
        let want = libm::exp(f64::from(*x)) / total;
        assert!((share - want).abs() < 0.005, "{share} against {want}");
    }
}

#[test]
fn filters_keep_what_they_say() {
    let logits = [4.0, 3.0, 2.0, 1.0, 0.0];
    let kept = |params: SamplingParams| {
        let got = frequencies(&params, &logits, 20_000);
        got.iter().filter(|&&share| share > 0.0).count()
    };
    let base = SamplingParams::default();
    assert_eq!(kept(SamplingParams { top_k: 2, ..base.clone() }), 2);
    assert_eq!(kept(SamplingParams { top_k: 1, ..base.clone() }), 1);
    assert_eq!(kept(SamplingParams { top_p: 0.6, ..base.clone() }), 1);
    assert_eq!(kept(SamplingParams { top_p: 0.7, ..base.clone() }), 2);
    assert_eq!(kept(SamplingParams { min_p: 0.1, ..base.clone() }), 3);
    assert_eq!(kept(SamplingParams { temperature: 0.0, ..base.clone() }), 1);
    assert_eq!(kept(base), 5);
}

#[test]
fn top_p_over_a_flat_vocabulary_looks_beyond_the_first_candidates() {
    let logits = vec![0.0; 5_000];
    let params = SamplingParams { top_p: 0.9, ..SamplingParams::default() };
    let got = frequencies(&params, &logits, 50_000);
    let last = got.iter().rposition(|&share| share > 0.0).unwrap();
    assert!((4_400..4_502).contains(&last), "last drawn id is {last}");
}

#[test]
fn penalties_bias_and_bans_change_the_greedy_choice() {
    let logits = [1.0, 1.5, 1.2, 2.0, 1.9];
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let draw = |params: &SamplingParams, answer: &[TokenId], banned: &[TokenId]| {
        let state = SamplerState::replay(&request(params.clone()), 0, answer);
        state.draw(&logits, params, banned, &mut Scratch::default()).unwrap()
    };
    assert_eq!(draw(&greedy, &[], &[]), 3);
    assert_eq!(draw(&greedy, &[], &[3]), 4);
    // 3 and 4 stand in the prompt.
    let repetition = SamplingParams { repetition_penalty: 2.0, ..greedy.clone() };
    assert_eq!(draw(&repetition, &[], &[]), 1);
    let presence = SamplingParams { presence_penalty: 1.0, ..greedy.clone() };
    assert_eq!(draw(&presence, &[], &[]), 3);
    assert_eq!(draw(&presence, &[3, 4], &[]), 1);
    let frequency = SamplingParams { frequency_penalty: 0.5, ..greedy.clone() };
    assert_eq!(draw(&frequency, &[3, 3, 4], &[]), 1);
    let bias = SamplingParams { logit_bias: vec![(0, 5.0)], ..greedy };
    assert_eq!(draw(&bias, &[], &[]), 0);
}

#[test]
fn nan_and_an_empty_choice_are_refused() {
    let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let state = SamplerState::replay(&request(params.clone()), 0, &[]);
    let mut scratch = Scratch::default();
    let nan = [0.0, f32::NAN];
    assert_eq!(state.draw(&nan, &params, &[], &mut scratch), Err(UnusableLogits));
    let none = [f32::NEG_INFINITY; 4];
    assert_eq!(state.draw(&none, &params, &[], &mut scratch), Err(UnusableLogits));
    assert_eq!(state.draw(&[0.0, 1.0], &params, &[0, 1], &mut scratch), Err(UnusableLogits));
}

#[test]
fn a_replayed_state_has_the_digest_of_one_that_lived() {
    let params = SamplingParams { frequency_penalty: 0.2, seed: 9, ..SamplingParams::default() };
    let request = request(params);
    let mut lived = SamplerState::replay(&request, 2, &[]);
    for id in [5, 7, 5] {
        lived.push(id);
    }
    assert_eq!(lived.digest(), SamplerState::replay(&request, 2, &[5, 7, 5]).digest());
    assert_ne!(lived.digest(), SamplerState::replay(&request, 1, &[5, 7, 5]).digest());
    assert_ne!(lived.digest(), SamplerState::replay(&request, 2, &[5, 7, 7]).digest());
}

#[test]
fn choices_and_indices_draw_apart() {
    let draws: Vec<u64> = (0..3)
        .flat_map(|choice| (0..100).map(move |index| random::uniform(7, choice, index)))
        .map(f64::to_bits)
        .collect();
    let distinct: std::collections::HashSet<_> = draws.iter().collect();
    assert_eq!(distinct.len(), draws.len());
}

#[test]
fn the_weight_is_e_to_the_x() {
    for step in 0..8_700 {
        let x = -step as f32 / 100.0;
        let want = libm::exp(f64::from(x));
        let got = f64::from(crate::kernels::numerics::exp_unfused(x));
        // The product x · log2(e) is rounded once, so the error grows with x.
        let tolerance = want * 2e-7 * (1.0 - f64::from(x));
        assert!((got - want).abs() <= tolerance, "{x}: {got} against {want}");
    }
}

#[test]
fn logprobs_sum_to_one_and_rank() {
    let logits = [0.3, 2.0, -1.0, 1.0];
    let all = token_logprobs(&logits, 3, 4);
    let sum: f64 = all.top.iter().map(|&(_, logprob)| libm::exp(f64::from(logprob))).sum();
    assert!((sum - 1.0).abs() < 1e-5);
    let ids: Vec<_> = all.top.iter().map(|&(id, _)| id).collect();
    assert_eq!(ids, [1, 3, 0, 2]);
    assert_eq!(all.logprob, all.top[1].1);
    assert!(token_logprobs(&logits, 0, 0).top.is_empty());
}

#[test]
fn next_to_no_temperature_takes_the_likeliest() {
    let logits = [0.5, 3.0, 2.9, -1.0];
    for temperature in [f32::from_bits(1), f32::MIN_POSITIVE / 8.0, f32::MIN_POSITIVE, 1e-30] {
        let params = SamplingParams { temperature, ..SamplingParams::default() };
        assert_eq!(frequencies(&params, &logits, 100), [0.0, 1.0, 0.0, 0.0], "{temperature:e}");
    }
}

#[test]
fn infinite_logits_are_no_logits() {
    let state = SamplerState::replay(&request(SamplingParams::default()), 0, &[]);
    for temperature in [0.0, 1.0] {
        let params = SamplingParams { temperature, ..SamplingParams::default() };
        for logits in [[f32::INFINITY, 1.0], [f32::NAN, 1.0], [f32::NEG_INFINITY; 2]] {
            let drawn = state.draw(&logits, &params, &[], &mut Scratch::default());
            assert_eq!(drawn, Err(UnusableLogits), "{logits:?} at {temperature}");
        }
    }
}
