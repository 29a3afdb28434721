use proptest::prelude::*;

use super::*;

fn grant() -> Grant {
    Grant {
        transfer_id: TransferId([1; 16]),
        request_id: RequestId([2; 16]),
        epoch: Epoch(1),
        receiver: NodeId::new("decode-0"),
        receiver_incarnation: Incarnation(5),
        sender_incarnation: Incarnation(6),
        tokens: 100,
        cached_tokens: 16,
        unseen: 20..40,
        layout: WireLayout { layers: 2, kv_heads: 3, head_dim: 4, dtype: KvDtype::F16 },
        fingerprint: ModelFingerprint([3; 32]),
        numerics: NumericsVersion("n/kv-f16".into()),
        choices: 2,
        expiry_ms: 500,
    }
}

#[test]
fn a_grant_is_read_by_all_and_verified_by_its_minter() {
    let minter = GrantMinter::new([7; 32]);
    let bytes = minter.mint(&grant(), 1000);
    assert_eq!(Grant::read(&bytes), Ok(grant()));
    assert_eq!(minter.verify(&bytes, 1500), Ok(grant()));
    assert_eq!(minter.verify(&bytes, 1501), Err(GrantError::Expired { late_ms: 1 }));
    assert_eq!(GrantMinter::new([8; 32]).verify(&bytes, 1000), Err(GrantError::Mac));
}

#[test]
fn more_cached_than_there_is_cannot_be_read() {
    let minter = GrantMinter::new([7; 32]);
    let bytes = minter.mint(&Grant { cached_tokens: 101, ..grant() }, 0);
    let error = DecodeError::Value { field: "cached_tokens", value: 101 };
    assert_eq!(Grant::read(&bytes), Err(GrantError::Decode(error)));
    for unseen in [Range { start: 4, end: 3 }, 20..101] {
        let value = unseen.end.into();
        let bytes = minter.mint(&Grant { unseen, ..grant() }, 0);
        let error = DecodeError::Value { field: "unseen", value };
        assert_eq!(Grant::read(&bytes), Err(GrantError::Decode(error)));
    }
}

proptest! {
    #[test]
    fn every_changed_bit_breaks_the_mac(at in 0_usize..1200) {
        let minter = GrantMinter::new([7; 32]);
        let mut bytes = minter.mint(&grant(), 0).to_vec();
        let at = at % (8 * bytes.len());
        bytes[at / 8] ^= 1 << (at % 8);
        prop_assert_eq!(minter.verify(&bytes.into(), 0), Err(GrantError::Mac));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Grant::read(&bytes.into());
    }
}
