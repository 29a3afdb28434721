use baton_types::{ErrorCode, KvDtype, NumericsVersion, TransferId};

use super::*;
use crate::lossy_link::{DEADLINE_MS, Faults, Setup, commit_info, grant, identity, span};
use crate::sender::{Sender, SenderAction, SenderConfig, SenderIdentity};

const TOKENS: u32 = 20;

fn setup() -> Setup {
    Setup {
        seed: 1,
        faults: Faults::default(),
        tokens: TOKENS,
        cached_tokens: 0,
        frame_max_bytes: 1 << 20,
        window_bytes: 1 << 20,
        sender_stops_ms: None,
        receiver_stops_ms: None,
    }
}

fn granted() -> (Receiver, Bytes) {
    let minter = Arc::new(GrantMinter::new([7; 32]));
    Receiver::grant(ReceiverConfig::default(), minter, grant(&setup()), 0, DEADLINE_MS)
}

fn open(bytes: Bytes, identity: SenderIdentity) -> Sender {
    Sender::open(SenderConfig::default(), identity, bytes, 0, DEADLINE_MS).unwrap()
}

fn said_by_sender(sender: &mut Sender) -> Vec<KvMessage> {
    std::iter::from_fn(|| sender.next_action())
        .filter_map(|action| match action {
            SenderAction::Send(message) => Some(message),
            _ => None,
        })
        .collect()
}

fn actions(receiver: &mut Receiver) -> Vec<ReceiverAction> {
    std::iter::from_fn(|| receiver.next_action()).collect()
}

/// An accepted transfer, and the messages of all spans and the commit.
fn accepted() -> (Receiver, Vec<KvMessage>) {
    let (mut receiver, bytes) = granted();
    let mut sender = open(bytes, identity());
    for message in said_by_sender(&mut sender) {
        receiver.on_message(message, 1);
    }
    for action in actions(&mut receiver) {
        let ReceiverAction::Send(message) = action else { panic!("{action:?}") };
        sender.on_message(message, 1);
    }
    (0..3).for_each(|layer| sender.push_span(&span(layer, 0, TOKENS)).unwrap());
    sender.finish(commit_info());
    (receiver, said_by_sender(&mut sender))
}

fn corrupt(message: &KvMessage) -> KvMessage {
    let mut bytes = message.encode().to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    KvMessage::decode(bytes.into()).unwrap()
}

fn refusal(change: impl FnOnce(&mut KvMessage)) -> TransferError {
    let (mut receiver, bytes) = granted();
    let mut message = said_by_sender(&mut open(bytes, identity())).remove(0);
    change(&mut message);
    receiver.on_message(message, 1);
    assert!(receiver.is_granted(), "a stranger ended the grant");
    match actions(&mut receiver).as_slice() {
        [
            ReceiverAction::Send(KvMessage { body: Body::Abort { .. }, .. }),
            ReceiverAction::Refused(error),
        ] => error.clone(),
        other => panic!("{other:?}"),
    }
}

fn changed(change: impl FnOnce(&mut Open)) -> TransferError {
    refusal(|message| match &mut message.body {
        Body::Open(open) => change(open),
        other => panic!("{other:?}"),
    })
}

#[test]
fn whoever_does_not_fit_is_refused_and_the_field_is_named() {
    let what = |error| match error {
        TransferError::Mismatch { what, .. } => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(what(changed(|open| open.sender_incarnation.0 += 1)), "sender incarnation");
    assert_eq!(what(changed(|open| open.fingerprint.0[0] ^= 1)), "fingerprint");
    assert_eq!(what(changed(|open| open.numerics.0.push('x'))), "numerics");
    assert_eq!(what(changed(|open| open.layout.head_dim = 8)), "layout");
    assert_eq!(what(changed(|open| open.checksum = 2)), "checksum");
    let version = changed(|open| (open.version_min, open.version_max) = (2, 9));
    assert_eq!(version, TransferError::Version { min: 2, max: 9 });
    let mac = changed(|open| open.grant = Bytes::from(vec![0; 200]));
    assert_eq!(mac.code(), ErrorCode::FailedPrecondition);
    let stale = refusal(|message| message.context.epoch = Epoch(1));
    assert_eq!(stale, TransferError::Superseded);
}

/// A sender with bfloat16 opens a grant for `granted`; each end converts or does not.
fn opened_by_bf16(
    granted: &NumericsVersion,
    sender_converts: bool,
    receiver_converts: bool,
) -> Result<(Receiver, Vec<ReceiverAction>), TransferError> {
    let minter = Arc::new(GrantMinter::new([7; 32]));
    let grant = Grant { numerics: granted.clone(), ..grant(&setup()) };
    let config = ReceiverConfig { kv_conversion: receiver_converts, ..ReceiverConfig::default() };
    let (mut receiver, bytes) = Receiver::grant(config, minter, grant, 0, DEADLINE_MS);
    let numerics = NumericsVersion::new("n", KvDtype::Bf16);
    let identity = SenderIdentity { numerics, ..identity() };
    let config = SenderConfig { kv_conversion: sender_converts, ..SenderConfig::default() };
    let mut sender = Sender::open(config, identity, bytes, 0, DEADLINE_MS)?;
    receiver.on_message(said_by_sender(&mut sender).remove(0), 1);
    let actions = actions(&mut receiver);
    Ok((receiver, actions))
}

#[test]
fn kv_of_another_precision_is_taken_only_where_both_convert() {
    let int8 = NumericsVersion::new("n", KvDtype::Int8);
    let refused = opened_by_bf16(&int8, false, true).unwrap_err();
    let TransferError::KvPrecision { granted, sender } = &refused else { panic!("{refused}") };
    assert_eq!((granted.0.as_str(), sender.0.as_str()), ("n/kv-int8", "n/kv-bf16"));
    assert_eq!(refused.code(), ErrorCode::FailedPrecondition);
    assert!(refused.to_string().contains("kv_conversion = true"), "{refused}");

    let (receiver, actions) = opened_by_bf16(&int8, true, false).unwrap();
    assert!(receiver.is_granted() && !receiver.is_converted());
    assert_eq!(actions.last(), Some(&ReceiverAction::Refused(refused)));

    let (receiver, actions) = opened_by_bf16(&int8, true, true).unwrap();
    assert!(receiver.is_converted() && !receiver.is_granted());
    let [ReceiverAction::Send(KvMessage { body: Body::OpenAccepted(_), .. })] = &actions[..] else {
        panic!("{actions:?}")
    };

    // Whoever may convert need not.
    let (receiver, _) =
        opened_by_bf16(&NumericsVersion::new("n", KvDtype::Bf16), true, true).unwrap();
    assert!(!receiver.is_converted() && !receiver.is_granted());
    // Other arithmetic stays other arithmetic.
    let error = opened_by_bf16(&NumericsVersion::new("m", KvDtype::Int8), true, true).unwrap_err();
    assert!(matches!(error, TransferError::Mismatch { what: "numerics", .. }), "{error}");
}

#[test]
fn a_grant_that_is_opened_again_forgets_that_kv_was_converted() {
    let int8 = NumericsVersion::new("n", KvDtype::Int8);
    let (mut receiver, _) = opened_by_bf16(&int8, true, true).unwrap();
    receiver.abort(TransferError::Superseded, 2);
    receiver.on_closed();
    let exact = SenderIdentity { numerics: int8, ..identity() };
    let bytes = receiver.regrant(exact.incarnation, 3, DEADLINE_MS).expect("it is free");
    receiver.on_message(said_by_sender(&mut open(bytes, exact)).remove(0), 4);
    assert!(!receiver.is_granted() && !receiver.is_converted());
}

#[test]
fn another_receivers_grant_is_of_no_use() {
    let (mut receiver, bytes) = granted();
    let mut message = said_by_sender(&mut open(bytes, identity())).remove(0);
    message.context.transfer_id = TransferId([0; 16]);
    receiver.on_message(message, 1);
    assert_eq!(receiver.counters().foreign, 1);
    assert_eq!(actions(&mut receiver), []);
}

#[test]
fn a_grant_that_nobody_opens_expires() {
    let (mut receiver, _) = granted();
    receiver.tick(1000);
    assert!(receiver.is_granted());
    assert_eq!(receiver.next_tick_ms(), 1001);
    receiver.tick(1001);
    assert_eq!(actions(&mut receiver), [ReceiverAction::Free(Err(TransferError::GrantUnused))]);
}

#[test]
fn a_commit_waits_for_the_last_frame_and_is_idempotent() {
    let (mut receiver, mut messages) = accepted();
    messages.reverse();
    let commit = messages[0].clone();
    messages.into_iter().for_each(|message| receiver.on_message(message, 2));
    let placed: Vec<FrameKey> = actions(&mut receiver)
        .into_iter()
        .map(|action| match action {
            ReceiverAction::Place(frame) => frame.key(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(placed.len(), 3);
    placed.into_iter().for_each(|key| receiver.placed(key, Ok(()), 3));
    let activation = actions(&mut receiver).pop();
    assert!(matches!(activation, Some(ReceiverAction::Activate(_))));
    receiver.activated(Ok(()), 4);
    receiver.on_message(commit, 5);
    let said = actions(&mut receiver);
    assert_eq!(said.len(), 2);
    assert!(said.iter().all(|action| matches!(
        action,
        ReceiverAction::Send(KvMessage { body: Body::Committed, .. })
    )));
    receiver.abort(TransferError::Superseded, 6);
    receiver.on_closed();
    assert_eq!(actions(&mut receiver), [ReceiverAction::Free(Ok(()))]);
    assert_eq!(receiver.regrant(Incarnation(9), 7, DEADLINE_MS), None);
}

#[test]
fn a_regrant_waits_for_the_quarantine_and_refuses_the_old_epoch() {
    let (mut receiver, messages) = accepted();
    receiver.on_message(messages[0].clone(), 2);
    let Some(ReceiverAction::Place(frame)) = receiver.next_action() else { panic!() };
    receiver.abort(TransferError::Superseded, 3);
    receiver.on_message(messages[1].clone(), 3);
    assert_eq!((receiver.counters().frames, receiver.counters().stale), (1, 1));
    assert_eq!(receiver.regrant(Incarnation(10), 3, DEADLINE_MS), None);
    receiver.on_closed();
    assert!(!receiver.is_free(), "a frame is still being placed");
    receiver.placed(frame.key(), Ok(()), 4);
    assert!(receiver.is_free());
    let bytes = receiver.regrant(Incarnation(10), 5, DEADLINE_MS).unwrap();
    let next = Grant::read(&bytes).unwrap();
    assert_eq!((next.epoch, next.sender_incarnation), (Epoch(3), Incarnation(10)));
    messages.into_iter().for_each(|message| receiver.on_message(message, 6));
    assert_eq!(receiver.counters().stale, 5);
    assert!(receiver.is_granted() && actions(&mut receiver).is_empty());
}

#[test]
fn a_corrupt_frame_is_asked_for_once_more_and_then_fails_the_transfer() {
    let (mut receiver, messages) = accepted();
    receiver.on_message(corrupt(&messages[0]), 2);
    let Body::Frame(frame) = &messages[0].body else { panic!() };
    let context = messages[0].context;
    let asked = KvMessage { context, body: Body::Resend(frame.key()) };
    assert_eq!(actions(&mut receiver), [ReceiverAction::Send(asked)]);
    receiver.on_message(corrupt(&messages[0]), 3);
    let Some(ReceiverAction::Send(abort)) = receiver.next_action() else { panic!() };
    assert!(matches!(abort.body, Body::Abort { code: ErrorCode::DataLoss, .. }));
    receiver.on_closed();
    let error = TransferError::Corrupt(frame.key());
    assert_eq!(actions(&mut receiver), [ReceiverAction::Free(Err(error))]);
    assert_eq!((receiver.counters().corrupt, receiver.counters().frames), (2, 0));
}

#[test]
fn a_placer_that_fails_ends_the_transfer() {
    let (mut receiver, messages) = accepted();
    receiver.on_message(messages[0].clone(), 2);
    let Some(ReceiverAction::Place(frame)) = receiver.next_action() else { panic!() };
    receiver.placed(frame.key(), Err(Error::internal("engine")), 3);
    assert!(!receiver.is_free());
    receiver.tick(3 + 500);
    assert_eq!(actions(&mut receiver).pop(), Some(ReceiverAction::Close));
    receiver.on_closed();
    assert!(receiver.is_free());
}

#[test]
fn a_commit_that_speaks_of_other_frames_is_refused() {
    let (mut receiver, mut messages) = accepted();
    let Some(KvMessage { body: Body::Commit(commit), .. }) = messages.last_mut() else { panic!() };
    commit.digest[0] ^= 1;
    messages.into_iter().for_each(|message| receiver.on_message(message, 2));
    for action in actions(&mut receiver) {
        let ReceiverAction::Place(frame) = action else { panic!("{action:?}") };
        receiver.placed(frame.key(), Ok(()), 3);
    }
    let Some(ReceiverAction::Send(abort)) = actions(&mut receiver).pop() else { panic!() };
    assert!(matches!(abort.body, Body::Abort { code: ErrorCode::DataLoss, .. }));
}

#[test]
fn a_sender_that_ignores_credit_is_cut_off() {
    let (mut receiver, messages) = accepted();
    receiver.link.granted_bytes = 10;
    receiver.on_message(messages[0].clone(), 2);
    let said = actions(&mut receiver);
    assert!(!said.iter().any(|action| matches!(action, ReceiverAction::Place(_))));
    receiver.on_closed();
    let freed = actions(&mut receiver);
    assert!(matches!(freed[..], [ReceiverAction::Free(Err(TransferError::CreditExceeded { .. }))]));
}

#[test]
fn a_grant_for_another_start_of_the_sender_is_never_sent() {
    let (_, bytes) = granted();
    let other = SenderIdentity { incarnation: Incarnation(10), ..identity() };
    let error = Sender::open(SenderConfig::default(), other, bytes, 0, DEADLINE_MS);
    let what = match error {
        Err(TransferError::Mismatch { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(what, "incarnation");
}
