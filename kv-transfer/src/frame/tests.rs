use proptest::prelude::*;

use super::*;

fn header(payload_len: u32) -> FrameHeader {
    FrameHeader {
        transfer_id: TransferId([9; 16]),
        epoch: Epoch(3),
        key: FrameKey { layer: 1, token_first: 16, token_count: 2, head_first: 0, head_count: 3 },
        dtype: KvDtype::Bf16,
        kind: KIND_CANONICAL,
        payload_len,
        crc32c: 0,
    }
}

fn frame(payload: &[u8]) -> Frame {
    Frame::build(header(payload.len() as u32), &FrameMemory::heap(), |out| out.put_slice(payload))
}

#[test]
fn the_header_lies_as_the_protocol_says() {
    let frame = frame(b"abcdef");
    let bytes = &frame.as_message()[1..];
    assert_eq!(bytes[..16], [9; 16]);
    assert_eq!(bytes[16..20], 3_u32.to_le_bytes());
    assert_eq!(bytes[20..22], 1_u16.to_le_bytes());
    assert_eq!(bytes[24..26], 3_u16.to_le_bytes());
    assert_eq!(bytes[26..30], 16_u32.to_le_bytes());
    assert_eq!(bytes[34..36], [2, 0]);
    assert_eq!(bytes[36..40], 6_u32.to_le_bytes());
    let mut zeroed = bytes.to_vec();
    zeroed[40..44].fill(0);
    assert_eq!(bytes[40..44], crc32c(&zeroed).to_le_bytes());
    assert_eq!(bytes[..44], frame.header().to_bytes());
    assert_eq!(bytes[44..], *b"abcdef");
}

#[test]
fn each_field_out_of_bounds_is_named() {
    let good = frame(b"abcdef").as_message().to_vec();
    let with = |at: usize, bytes: &[u8]| {
        let mut bad = good.clone();
        bad[1 + at..1 + at + bytes.len()].copy_from_slice(bytes);
        Frame::decode_message(bad.into()).unwrap_err()
    };
    assert_eq!(with(34, &[7]), FrameError::Dtype(7));
    assert_eq!(with(35, &[1]), FrameError::Kind(1));
    assert_eq!(with(24, &[0, 0]), FrameError::Empty("head_count"));
    assert_eq!(with(30, &[0; 4]), FrameError::Empty("token_count"));
    assert_eq!(with(30, &[255; 4]), FrameError::Overflow("token_count"));
    assert_eq!(with(22, &[1, 0, 255, 255]), FrameError::Overflow("head_count"));
    assert_eq!(with(36, &[7, 0, 0, 0]), FrameError::PayloadLen { header: 7, got: 6 });
    assert_eq!(with(36, &[0, 0, 32, 0]), FrameError::PayloadTooLong(1 << 21));
    let short = Frame::decode_message(Bytes::from_static(&[TAG_FRAME, 0]));
    assert_eq!(short, Err(FrameError::Short { got: 1 }));
}

proptest! {
    #[test]
    fn a_frame_survives_the_wire(payload in prop::collection::vec(any::<u8>(), 0..300)) {
        let sent = frame(&payload);
        let got = Frame::decode_message(sent.as_message().clone()).unwrap();
        prop_assert_eq!(&got, &sent);
        prop_assert_eq!(got.payload(), &payload[..]);
        prop_assert!(got.is_intact());
    }

    #[test]
    fn one_flipped_bit_is_noticed(at in 0_usize..8 * (HEADER_BYTES + 40)) {
        let mut bytes = frame(&[0x5a; 40]).as_message().to_vec();
        bytes[1 + at / 8] ^= 1 << (at % 8);
        let decoded = Frame::decode_message(bytes.into());
        prop_assert!(decoded.is_err() || decoded.is_ok_and(|frame| !frame.is_intact()));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 1..200)) {
        let _ = Frame::decode_message(bytes.into()).map(|frame| frame.is_intact());
    }
}
