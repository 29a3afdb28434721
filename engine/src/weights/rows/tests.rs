//! Widened blocks against the reference of the format's authors (`tests/golden/formats.py`).

use std::collections::BTreeMap;

use baton_model_files::RowOrder;
use serde_json::Value;

use super::*;

fn widen(dtype: TensorDtype, cols: usize, bytes: &[u8]) -> Vec<f32> {
    let view = TensorView { dtype, rows: 1, cols, row_order: RowOrder::Plain, bytes };
    let mut out = vec![0.0; cols];
    widen_row(&view, 0, &mut out);
    out
}

fn bytes_of(hex: &Value) -> Vec<u8> {
    let digits = hex.as_str().unwrap().as_bytes().as_chunks::<2>().0;
    digits
        .iter()
        .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())
        .collect()
}

#[test]
fn blocks_of_every_type_are_what_the_reference_says() {
    let golden = include_str!("../../../tests/golden/formats.json");
    let golden: BTreeMap<String, Value> = serde_json::from_str(golden).unwrap();
    let types = [
        ("Q4_0", TensorDtype::Q4_0),
        ("Q4_1", TensorDtype::Q4_1),
        ("Q5_0", TensorDtype::Q5_0),
        ("Q5_1", TensorDtype::Q5_1),
        ("Q8_0", TensorDtype::Q8_0),
        ("IQ4_NL", TensorDtype::Iq4Nl),
        ("Q2_K", TensorDtype::Q2K),
        ("Q3_K", TensorDtype::Q3K),
        ("Q4_K", TensorDtype::Q4K),
        ("Q5_K", TensorDtype::Q5K),
        ("Q6_K", TensorDtype::Q6K),
    ];
    assert_eq!(golden.len(), types.len());
    for (name, dtype) in types {
        let blocks = bytes_of(&golden[name]["blocks"]);
        let want = bytes_of(&golden[name]["values"]);
        let want: Vec<u32> =
            want.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let got = widen(dtype, want.len(), &blocks);
        let got: Vec<u32> = got.iter().map(|x| x.to_bits()).collect();
        assert_eq!(got, want, "{name}");
    }
}

#[test]
fn floats() {
    let half = f16::from_f32(0.5).to_le_bytes();
    assert_eq!(widen(TensorDtype::Bf16, 1, &[0x80, 0x3f]), [1.0]);
    assert_eq!(widen(TensorDtype::F16, 1, &half), [0.5]);
    assert_eq!(widen(TensorDtype::F32, 1, &1.25f32.to_le_bytes()), [1.25]);
}
