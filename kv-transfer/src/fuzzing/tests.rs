//! The corpora of both targets are run here on stable; a whole honest transfer is among them.

use std::fs;
use std::path::{Path, PathBuf};

use baton_types::TokenOutput;
use proptest::prelude::*;

use super::*;
use crate::message::CommitInfo;
use crate::sender::{Sender, SenderAction, SenderConfig, SenderIdentity};
use crate::split::KvSpan;

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
}

fn inputs(target: &str) -> Vec<Vec<u8>> {
    let folder = fs::read_dir(corpus(target)).expect("the corpus is checked in");
    folder.map(|entry| fs::read(entry.unwrap().path()).unwrap()).collect()
}

#[test]
fn corpora_replay() {
    let (over_grpc, over_ucx) = (inputs("kv_grpc"), inputs("kv_ucx"));
    assert!(!over_grpc.is_empty() && !over_ucx.is_empty());
    over_grpc.iter().for_each(|input| grpc(input));
    over_ucx.iter().for_each(|input| ucx(input));
}

/// What an honest sender says, behind its `Open`.
fn honest() -> Vec<Bytes> {
    let bytes = GrantMinter::new([1; 32]).mint(&grant(), 0);
    let identity = SenderIdentity {
        node: NodeId::new("p"),
        incarnation: Incarnation(2),
        fingerprint: ModelFingerprint([3; 32]),
        numerics: NumericsVersion("n".into()),
    };
    let config = SenderConfig { frame_max_bytes: 40, ..SenderConfig::default() };
    let mut sender = Sender::open(config, identity, bytes, 0, DEADLINE_MS).unwrap();
    let accepted = crate::message::OpenAccepted { version: 1, features: 0, granted_bytes: 1 << 20 };
    let accepted = KvMessage { context: CONTEXT, body: Body::OpenAccepted(accepted) };
    sender.on_message(accepted, 1);
    for layer in 0..LAYOUT.layers {
        let payload = vec![layer as u8; TOKENS as usize * LAYOUT.token_layer_bytes()].into();
        let span = KvSpan { layer, token_first: 0, token_count: TOKENS, payload };
        sender.push_span(&span).unwrap();
    }
    sender.finish(CommitInfo {
        first_tokens: vec![TokenOutput { choice: 0, index: 0, id: 4, logprobs: None }],
        sampler_digest: [0; 32],
        prompt_logprobs: Vec::new(),
        cached_tokens: 0,
    });
    let mut said = Vec::new();
    while let Some(action) = sender.next_action() {
        if let SenderAction::Send(message) = action
            && !matches!(message.body, Body::Open(_))
        {
            said.push(message.encode());
        }
    }
    said
}

fn behind_lengths<'a>(messages: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut out = Vec::new();
    for message in messages {
        out.extend((message.len() as u16).to_le_bytes());
        out.extend_from_slice(message);
    }
    out
}

fn seeds() -> [(&'static str, &'static str, Vec<u8>); 3] {
    let said = honest();
    let mended = [vec![1], behind_lengths(said.iter().map(|message| &message[..]))].concat();
    let body = said.iter().flat_map(|message| {
        let mut field = vec![0x0a];
        match message.len() {
            short @ 0..128 => field.push(short as u8),
            long => field.extend([long as u8 | 0x80, (long >> 7) as u8]),
        }
        let len = (field.len() + message.len()) as u32;
        [&[0][..], &len.to_be_bytes(), &field, &message[..]].concat()
    });
    let raw = std::iter::once(40).chain(body).collect();
    let notices: Vec<_> = said
        .iter()
        .filter(|message| message.first() == Some(&TAG_FRAME))
        .enumerate()
        .map(|(at, frame)| {
            let slot = Slot { slot: at as u16 % SLOTS, len: frame.len() as u32 };
            let notice = notice::encode(9, &[slot]);
            [&[notice.len() as u8][..], &notice, frame].concat()
        })
        .collect();
    let notices = behind_lengths(notices.iter().map(|message| &message[..]));
    [("kv_grpc", "seed-mended", mended), ("kv_grpc", "seed-raw", raw), ("kv_ucx", "seed", notices)]
}

#[test]
#[ignore = "writes into fuzz/corpus"]
fn write_seeds() {
    for (target, name, input) in seeds() {
        fs::create_dir_all(corpus(target)).unwrap();
        fs::write(corpus(target).join(name), input).unwrap();
    }
}

#[test]
fn an_honest_transfer_is_taken_both_ways() {
    for message in honest() {
        let decoded = KvMessage::decode(message.clone()).unwrap();
        assert_eq!(decoded.encode(), message);
    }
    let mut machine = Machine::open();
    for message in honest() {
        machine.take(Some(KvMessage::decode(message).unwrap()));
    }
    assert_eq!(machine.placed.len(), 2 * 2 * TOKENS as usize);
    assert!(!machine.receiver.is_free(), "it is committed, and waits for the sender to close");
    machine.end();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Honest transfers with bytes changed, left out and doubled.
    #[test]
    fn what_is_nearly_honest_does_no_harm(
        which in 0..3_usize,
        cuts in prop::collection::vec((0..4_000_usize, 0..40_usize, any::<u8>(), 0..3_u8), 0..6),
    ) {
        let (target, _, mut input) = seeds()[which].clone();
        for (at, len, byte, how) in cuts {
            let at = at % input.len();
            let end = (at + len).min(input.len());
            match how {
                0 => input[at] = byte,
                1 => drop(input.drain(at..end.min(input.len() - 1).max(at))),
                _ => {
                    let piece = input[at..end].to_vec();
                    input.splice(at..at, piece);
                }
            }
        }
        if target == "kv_ucx" { ucx(&input) } else { grpc(&input) }
    }
}
