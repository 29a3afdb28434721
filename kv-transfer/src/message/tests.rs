use baton_types::KvDtype;
use proptest::prelude::*;

use super::*;

fn context() -> Context {
    Context { transfer_id: TransferId([4; 16]), epoch: Epoch(2) }
}

fn key() -> FrameKey {
    FrameKey { layer: 3, token_first: 70, token_count: 9, head_first: 1, head_count: 2 }
}

fn logprobs() -> TokenLogprobs {
    TokenLogprobs { logprob: -0.5, top: vec![(1, -0.5), (9, -2.0)] }
}

fn bodies() -> Vec<Body> {
    let first_tokens = vec![
        TokenOutput { choice: 0, index: 0, id: 17, logprobs: None },
        TokenOutput { choice: 1, index: 0, id: 18, logprobs: Some(logprobs()) },
    ];
    let info = CommitInfo {
        first_tokens,
        sampler_digest: [8; 32],
        prompt_logprobs: vec![logprobs(), TokenLogprobs { logprob: -1.0, top: vec![] }],
        cached_tokens: 32,
    };
    vec![
        Body::Open(Box::new(Open {
            grant: Bytes::from_static(b"opaque"),
            sender: NodeId::new("prefill-1"),
            sender_incarnation: Incarnation(77),
            version_min: 1,
            version_max: 3,
            features: 0,
            checksum: CHECKSUM_CRC32C,
            layout: WireLayout { layers: 30, kv_heads: 3, head_dim: 64, dtype: KvDtype::Bf16 },
            fingerprint: ModelFingerprint([6; 32]),
            numerics: NumericsVersion("x86-int8.1/kv-bf16".into()),
        })),
        Body::OpenAccepted(OpenAccepted { version: 1, features: 0, granted_bytes: 1 << 24 }),
        Body::Credit(Credit { granted_bytes: 1 << 40, placed: key() }),
        Body::Resend(key()),
        Body::Commit(Box::new(Commit { info, frame_count: 5, digest: [1; 16] })),
        Body::Committed,
        Body::Abort { code: ErrorCode::DataLoss, message: "corrupt".into() },
        Body::Heartbeat { sequence: 12 },
        Body::HeartbeatAck(HeartbeatAck {
            sequence: 12,
            granted_bytes: 5,
            has_commit: true,
            committed: false,
        }),
    ]
}

/// Appends the checksum that belongs to a message's bytes.
fn sealed(mut bytes: Vec<u8>) -> Bytes {
    let crc = crate::checksum::crc32c(&bytes);
    bytes.extend(crc.to_le_bytes());
    bytes.into()
}

#[test]
fn every_message_survives_the_wire() {
    for body in bodies() {
        let message = KvMessage { context: context(), body };
        assert_eq!(KvMessage::decode(message.encode()), Ok(message));
    }
}

#[test]
fn a_message_cut_short_or_too_long_is_refused() {
    for body in bodies() {
        let bytes = KvMessage { context: context(), body }.encode();
        for len in 0..bytes.len() {
            assert!(KvMessage::decode(bytes.slice(..len)).is_err());
        }
        let mut longer = bytes[..bytes.len() - 4].to_vec();
        longer.push(0);
        let error = MessageError::Decode(DecodeError::Trailing(1));
        assert_eq!(KvMessage::decode(sealed(longer)), Err(error));
    }
}

#[test]
fn a_long_reason_is_cut_at_a_character() {
    let message = "ä".repeat(TEXT_MAX_BYTES);
    let body = Body::Abort { code: ErrorCode::Internal, message };
    let decoded = KvMessage::decode(KvMessage { context: context(), body }.encode()).unwrap();
    let Body::Abort { message, .. } = decoded.body else { panic!("{decoded:?}") };
    assert_eq!(message.len(), TEXT_MAX_BYTES);
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = KvMessage::decode(bytes.clone().into());
        let _ = KvMessage::decode(sealed(bytes));
    }

    #[test]
    fn one_flipped_bit_is_noticed(which in 0_usize..9, at in any::<prop::sample::Index>()) {
        let message = KvMessage { context: context(), body: bodies().swap_remove(which) };
        let mut bytes = message.encode().to_vec();
        let at = at.index(8 * bytes.len());
        bytes[at / 8] ^= 1 << (at % 8);
        prop_assert!(KvMessage::decode(bytes.into()).is_err());
    }

    #[test]
    fn changed_messages_never_panic(
        which in 0_usize..9,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let message = KvMessage { context: context(), body: bodies().swap_remove(which) };
        let mut bytes = message.encode().to_vec();
        bytes.truncate(bytes.len() - 4);
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(message) = KvMessage::decode(sealed(bytes)) {
            let again = KvMessage::decode(message.encode()).unwrap();
            prop_assert_eq!(again.encode(), message.encode());
        }
    }
}
