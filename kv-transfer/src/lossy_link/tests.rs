use baton_types::ErrorCode;
use proptest::prelude::*;

use super::*;

fn setup(seed: u64, faults: Faults) -> Setup {
    Setup {
        seed,
        faults,
        tokens: 70,
        cached_tokens: 16,
        frame_max_bytes: 200,
        window_bytes: 1000,
        sender_stops_ms: None,
        receiver_stops_ms: None,
    }
}

fn check(world: &World) {
    let ended = |what: &str| format!("{what} had not ended by {} ms", world.now_ms);
    if world.setup.receiver_stops_ms.is_none() {
        let outcome =
            world.receiver_end.as_ref().unwrap_or_else(|| panic!("{}", ended("receiver")));
        assert_eq!(outcome.is_ok(), world.activated);
    }
    if world.setup.sender_stops_ms.is_none() {
        let outcome = world.sender_end.as_ref().unwrap_or_else(|| panic!("{}", ended("sender")));
        assert!(outcome.is_err() || world.activated, "done without a commit");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_slow_link_that_reorders_and_repeats_loses_nothing(
        seed in any::<u64>(),
        tokens in 1_u32..150,
        cached_share in 0_u32..=4,
        frame_max_bytes in 100_usize..600,
        window_frames in 8_u64..40,
        repeat in 0_u64..30,
        inject in 0_u64..30,
        delay_max_ms in 0_u64..25,
    ) {
        let faults = Faults { repeat, inject, delay_max_ms, ..Faults::default() };
        let world = World::new(Setup {
            tokens,
            cached_tokens: tokens * cached_share / 4,
            frame_max_bytes,
            window_bytes: window_frames * frame_max_bytes as u64,
            ..setup(seed, faults)
        }).run();
        check(&world);
        prop_assert!(world.activated, "{:?} {:?}", world.sender_end, world.receiver_end);
    }

    #[test]
    fn a_bad_link_ends_in_a_commit_or_in_two_failures(
        seed in any::<u64>(),
        drop in 0_u64..20,
        repeat in 0_u64..20,
        corrupt in 0_u64..10,
        inject in 0_u64..20,
        delay_max_ms in 0_u64..80,
        window_bytes in 200_u64..5000,
    ) {
        let faults = Faults { drop, repeat, corrupt, inject, delay_max_ms };
        check(&World::new(Setup { window_bytes, ..setup(seed, faults) }).run());
    }

    #[test]
    fn a_stopped_peer_is_noticed(
        seed in any::<u64>(),
        at_ms in 0_u64..200,
        sender in any::<bool>(),
        delay_max_ms in 0_u64..10,
    ) {
        let faults = Faults { delay_max_ms, ..Faults::default() };
        let stops = |this: bool| this.then_some(at_ms);
        let world = World::new(Setup {
            sender_stops_ms: stops(sender),
            receiver_stops_ms: stops(!sender),
            ..setup(seed, faults)
        }).run();
        check(&world);
        prop_assert!(world.now_ms <= at_ms + 2100, "noticed only after {} ms", world.now_ms);
    }
}

#[test]
fn a_little_loss_and_corruption_is_repaired() {
    let faults = Faults { drop: 1, corrupt: 1, delay_max_ms: 3, ..Faults::default() };
    let (mut committed, mut resends, mut corrupt) = (0, 0, 0);
    for seed in 0..100 {
        let world = World::new(Setup { window_bytes: 5000, ..setup(seed, faults) }).run();
        check(&world);
        committed += u32::from(world.activated);
        resends += world.counters().resends;
        corrupt += world.counters().corrupt;
    }
    assert!(committed > 70 && resends > 0 && corrupt > 0, "{committed} {resends} {corrupt}");
}

#[test]
fn strangers_are_counted_by_kind() {
    let faults = Faults { inject: 50, ..Faults::default() };
    let world = World::new(setup(3, faults)).run();
    let counters = world.counters();
    assert!(counters.stale > 0 && counters.foreign > 0, "{counters:?}");
    assert_eq!((counters.outside, counters.corrupt, counters.duplicate), (0, 0, 0));
    assert!(world.activated);
}

#[test]
fn a_clean_run_takes_each_byte_once() {
    let world = World::new(setup(1, Faults::default())).run();
    let report = world.sender_end.clone().unwrap().unwrap();
    let bytes = (70 - 16) * LAYOUT.token_layer_bytes() as u64 * u64::from(LAYOUT.layers);
    assert_eq!((report.bytes, report.resent_frames), (bytes, 0));
    assert_eq!((world.counters().bytes, world.counters().frames), (bytes, report.frames));
    assert_eq!(world.receiver_end, Some(Ok(())));
}

#[test]
fn the_reason_reaches_the_other_end() {
    let mut world = World::new(setup(1, Faults::default()));
    for _ in 0..5 {
        world.step_sender();
        world.step_receiver();
        world.now_ms += 1;
    }
    world.receiver.abort(TransferError::Cancelled, world.now_ms);
    let world = world.run();
    assert_eq!(world.receiver_end, Some(Err(TransferError::Cancelled)));
    let Some(Err(TransferError::PeerAborted { code, .. })) = world.sender_end else {
        panic!("{:?}", world.sender_end)
    };
    assert_eq!(code, ErrorCode::Cancelled);
}
