//! GGUF files that are whole, and files broken in one place each.

mod support;

use baton_model_files::{ExpertTensor, LayerTensor, ModelFile, TensorDtype, TensorRole};
use baton_types::RopeScaling;
use support::families::{self, FAMILIES};
use support::{Dtype, Gguf, Meta, Random, Shape, TINY};

fn tiny() -> Gguf {
    Gguf::tiny(TINY, Dtype::Q4_1, 7)
}

fn error_of(bytes: Vec<u8>) -> String {
    match ModelFile::from_gguf_bytes(bytes, "broken.gguf") {
        Ok(_) => panic!("a broken file was taken for a model"),
        Err(error) => error.to_string(),
    }
}

/// A tiny model with a change that does no harm.
fn opened(change: impl FnOnce(&mut Gguf)) -> ModelFile {
    let mut file = tiny();
    change(&mut file);
    ModelFile::from_gguf_bytes(file.to_bytes(), "tiny.gguf").expect("the change does no harm")
}

/// Breaks a tiny model and checks that the error names the file and `wanted`.
fn refused(wanted: &[&str], break_it: impl FnOnce(&mut Gguf)) {
    let mut file = tiny();
    break_it(&mut file);
    let error = error_of(file.to_bytes());
    for part in wanted.iter().chain(&["broken.gguf"]) {
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
}

fn raw(kind: u32, parts: &[&[u8]]) -> Meta {
    Meta::Raw(kind, parts.concat())
}

#[test]
fn every_type_opens() {
    for (dtype, want) in Dtype::ALL.into_iter().zip([
        TensorDtype::F32,
        TensorDtype::F16,
        TensorDtype::Q4_0,
        TensorDtype::Q4_1,
        TensorDtype::Q5_0,
        TensorDtype::Q5_1,
        TensorDtype::Q8_0,
        TensorDtype::Q2K,
        TensorDtype::Q3K,
        TensorDtype::Q4K,
        TensorDtype::Q5K,
        TensorDtype::Q6K,
        TensorDtype::Iq4Nl,
        TensorDtype::Bf16,
    ]) {
        let bytes = Gguf::tiny(Shape::tiny(dtype), dtype, 3).to_bytes();
        let model = ModelFile::from_gguf_bytes(bytes, "tiny-q4_1.gguf").unwrap();
        assert_eq!(model.spec().name, "tiny");
        let last = model.spec().layers - 1;
        let down = model.tensor(TensorRole::Layer(last, LayerTensor::Down));
        assert_eq!((down.dtype, down.row(down.rows - 1).len()), (want, want.row_bytes(down.cols)));
        assert_eq!(model.tensor(TensorRole::Output).rows, TINY.vocab);
    }
}

#[test]
fn version_2_and_other_alignments_open() {
    let mut file = tiny();
    file.version = 2;
    ModelFile::from_gguf_bytes(file.to_bytes(), "v2.gguf").unwrap();
    file.set("general.alignment", Meta::U32(16));
    // The writer aligns to 32, which is aligned to 16 only if the directory ends so.
    let _ = ModelFile::from_gguf_bytes(file.to_bytes(), "v2.gguf");
}

#[test]
fn the_fingerprint_ignores_the_name_and_sees_every_byte() {
    let open = |bytes: &[u8], name| ModelFile::from_gguf_bytes(bytes.to_vec(), name).unwrap();
    let mut bytes = tiny().to_bytes();
    let first = open(&bytes, "a.gguf").fingerprint();
    assert_eq!(first, open(&bytes, "b.gguf").fingerprint());
    *bytes.last_mut().unwrap() ^= 1;
    assert_ne!(first, open(&bytes, "a.gguf").fingerprint());
}

#[test]
fn llama_3_scaling_is_found_again() {
    let mut file = tiny();
    let factors: Vec<u8> = (0..TINY.head_dim / 2)
        .map(|pair| {
            baton_model_files::llama3_factor(pair, TINY.head_dim, 10_000.0, 8.0, 1.0, 4.0, 8192)
        })
        .flat_map(|factor| (factor as f32).to_le_bytes())
        .collect();
    file.add("rope_freqs.weight", Dtype::F32, TINY.head_dim / 2, 0, &mut Random(1));
    file.tensor("rope_freqs.weight").bytes = factors;
    let model = ModelFile::from_gguf_bytes(file.to_bytes(), "l3.gguf").unwrap();
    let scaling = format!("{:?}", model.spec().rope.scaling);
    assert!(scaling.contains("Llama3") && scaling.contains("factor: 8.0"), "{scaling}");
    file.set("llama.rope.scaling.factor", Meta::F32(2.0));
    assert!(error_of(file.to_bytes()).contains("llama.rope.scaling.factor"));
    refused(&["rope_freqs.weight", "Llama 3"], |file| {
        file.add("rope_freqs.weight", Dtype::F32, TINY.head_dim / 2, 0, &mut Random(1));
    });
}

#[test]
fn truncated_anywhere() {
    let whole = tiny().to_bytes();
    let steps = (0..whole.len()).step_by(whole.len() / 400).chain(0..200);
    for len in steps {
        let error = error_of(whole[..len].to_vec());
        assert!(error.contains("broken.gguf"), "{len}: {error}");
    }
}

#[test]
fn every_flipped_byte_is_an_error_or_a_model() {
    let whole = tiny().to_bytes();
    let header = whole.len().min(6000);
    for at in 0..header {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= flip;
            let _ = ModelFile::from_gguf_bytes(bytes, "flipped.gguf");
        }
    }
    for family in FAMILIES {
        let whole = families::family(family, TINY, Dtype::Q8_0, 3).to_bytes();
        for at in (0..6000).step_by(5) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x81;
            let _ = ModelFile::from_gguf_bytes(bytes, "flipped.gguf");
        }
    }
}

#[test]
fn broken_headers() {
    assert!(error_of(Vec::new()).contains("header"));
    refused(&["no GGUF"], |file| file.magic = *b"GGML");
    refused(&["version 1", "2 and 3"], |file| file.version = 1);
    refused(&["version 50331648"], |file| file.version = 3u32.swap_bytes());
    refused(&["tensor count", "damaged"], |file| file.tensor_count = Some(u64::MAX));
    refused(&["metadata count"], |file| file.key_count = Some(1 << 40));
    refused(&["metadata key"], |file| file.key_count = Some(40));
    refused(&["tensor 20"], |file| file.tensor_count = Some(21));
}

#[test]
fn broken_metadata() {
    let bytes = |n: u64| n.to_le_bytes();
    refused(&["general.name", "13"], |f| f.set("general.name", raw(13, &[])));
    refused(&["general.name", "ends inside"], |file| {
        file.set("general.name", raw(8, &[&bytes(u64::MAX)]));
    });
    refused(&["general.name", "UTF-8"], |file| {
        file.set("general.name", raw(8, &[&bytes(2), &[0xff, 0xfe]]));
    });
    refused(&["general.name", "claims"], |file| {
        file.set("general.name", raw(9, &[&8u32.to_le_bytes(), &bytes(1 << 60)]));
    });
    refused(&["general.name", "nested"], |file| {
        let nested: Vec<u8> =
            (0..8).flat_map(|_| [&9u32.to_le_bytes()[..], &bytes(1)].concat()).collect();
        file.set("general.name", raw(9, &[&nested, &[0; 16]]));
    });
    refused(&["llama.block_count", "twice"], |file| {
        file.keys.push(("llama.block_count".into(), Meta::U32(2)));
    });
    refused(&["general.alignment", "power of two"], |file| {
        file.set("general.alignment", Meta::U32(33));
    });
    refused(&["general.alignment"], |f| f.set("general.alignment", Meta::U32(0)));
    refused(&["general.alignment", "integer"], |file| {
        file.set("general.alignment", Meta::Str("32".into()));
    });
}

#[test]
fn broken_hyperparameters() {
    refused(&["general.architecture", "missing"], |f| f.unset("general.architecture"));
    refused(&["\"mamba\"", "supported"], |file| {
        file.set("general.architecture", Meta::Str("mamba".into()));
    });
    refused(&["llama.block_count", "missing"], |f| f.unset("llama.block_count"));
    refused(&["llama.block_count", "0"], |f| f.set("llama.block_count", Meta::U32(0)));
    refused(&["blk.2.attn_norm"], |f| f.set("llama.block_count", Meta::U32(3)));
    refused(&["blk.1."], |f| f.set("llama.block_count", Meta::U32(1)));
    for given in [true, false] {
        refused(&["key llama.attention.head_count:"], |file| {
            file.set("llama.attention.head_count", Meta::U32(0));
            if !given {
                file.unset("llama.attention.key_length");
            }
        });
    }
    refused(&["llama.attention.head_count_kv", "divide"], |file| {
        file.set("llama.attention.head_count_kv", Meta::U32(4));
    });
    refused(&["llama.embedding_length", "a string"], |file| {
        file.set("llama.embedding_length", Meta::Str("64".into()));
    });
    refused(&["llama.embedding_length", "multiple of 32"], |file| {
        file.set("llama.embedding_length", Meta::U32(65));
    });
    refused(&["layer_norm_rms_epsilon", "NaN"], |file| {
        file.set("llama.attention.layer_norm_rms_epsilon", Meta::F32(f32::NAN));
    });
    refused(&["llama.rope.freq_base"], |file| {
        file.set("llama.rope.freq_base", Meta::F32(f32::INFINITY));
    });
    refused(&["llama.rope.dimension_count"], |file| {
        file.set("llama.rope.dimension_count", Meta::U32(8));
    });
    refused(&["llama.rope.scaling.type", "yarn"], |file| {
        file.set("llama.rope.scaling.type", Meta::Str("yarn".into()));
    });
    refused(&["llama.expert_used_count", "missing"], |file| {
        file.set("llama.expert_count", Meta::U32(8));
    });
    refused(&["llama.attn_logit_softcapping"], |file| {
        file.set("llama.attn_logit_softcapping", Meta::F32(30.0));
    });
    refused(&["llama.context_length"], |f| f.set("llama.context_length", Meta::U32(0)));
    refused(&["llama.vocab_size"], |f| f.set("llama.vocab_size", Meta::U32(101)));
}

#[test]
fn keys_that_would_change_the_numbers() {
    for (name, value, harmless) in [
        ("attention.scale", 2.0, 0.0),
        ("attention.clamp_kqv", 8.0, 0.0),
        ("logit_scale", 0.5, 1.0),
        ("residual_scale", 0.5, 1.0),
        ("embedding_scale", 12.0, 1.0),
        ("rope.scaling.attn_factor", 1.5, 1.0),
    ] {
        let key = format!("llama.{name}");
        refused(&[&key], |file| file.set(&key, Meta::F32(value)));
        opened(|file| file.set(&key, Meta::F32(harmless)));
    }
    refused(&["llama.attention.causal"], |file| {
        file.set("llama.attention.causal", Meta::Bool(false));
    });
    let count = |count: u16| raw(2, &[&count.to_le_bytes()]);
    refused(&["split.count", "3"], |file| file.set("split.count", count(3)));
    opened(|file| file.set("split.count", count(1)));
}

#[test]
fn a_factor_without_a_type_is_linear() {
    let scaling = |key: &str, factor: f32, kind: Option<&str>| {
        let model = opened(|file| {
            file.set(key, Meta::F32(factor));
            if let Some(kind) = kind {
                file.set("llama.rope.scaling.type", Meta::Str(kind.into()));
            }
        });
        model.spec().rope.scaling.clone()
    };
    let linear = RopeScaling::Linear { factor: 4.0 };
    for key in ["llama.rope.scaling.factor", "llama.rope.scale_linear"] {
        assert_eq!(scaling(key, 4.0, None), linear);
        assert_eq!(scaling(key, 4.0, Some("linear")), linear);
        assert_eq!(scaling(key, 4.0, Some("none")), RopeScaling::None);
        assert_eq!(scaling(key, 1.0, None), RopeScaling::None);
        assert_eq!(scaling(key, 0.0, None), RopeScaling::None);
    }
}

/// As llama.cpp's `llama-tokenize` answers for each name.
#[test]
fn bos_before_prompts_as_llama_cpp_has_it() {
    let adds = |pre: &str, says: Option<bool>| {
        let model = opened(|file| {
            file.set("tokenizer.ggml.pre", Meta::Str(pre.into()));
            file.unset("tokenizer.ggml.add_bos_token");
            if let Some(says) = says {
                file.set("tokenizer.ggml.add_bos_token", Meta::Bool(says));
            }
        });
        model.artifacts().add_bos
    };
    for pre in ["llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "tekken"] {
        assert!(adds(pre, None) && !adds(pre, Some(false)), "{pre}");
    }
    for pre in ["gpt-2", "smollm", "qwen2", "dbrx", "smaug-bpe", "gpt-4o", "llama4", "default"] {
        assert!(!adds(pre, None) && adds(pre, Some(true)), "{pre}");
    }
    for pre in ["llama-bpe", "gpt-2"] {
        refused(&["tokenizer.ggml.bos_token_id", "missing"], |file| {
            file.set("tokenizer.ggml.pre", Meta::Str(pre.into()));
            file.set("tokenizer.ggml.add_bos_token", Meta::Bool(true));
            file.unset("tokenizer.ggml.bos_token_id");
        });
    }
}

/// As in published files of Phi-3 and Gemma 3; where a key names one that ends a turn, it counts.
#[test]
fn turns_end_though_no_key_says_at_which_token() {
    let eos_ids = |texts: &[(usize, &str)], eot: Option<u32>| {
        let model = opened(|file| {
            let mut tokens: Vec<String> = (0..100).map(|id| format!("t{id}")).collect();
            texts.iter().for_each(|(id, text)| tokens[*id] = (*text).into());
            file.set("tokenizer.ggml.tokens", Meta::Strings(tokens));
            if let Some(eot) = eot {
                file.set("tokenizer.ggml.eot_token_id", Meta::U32(eot));
            }
        });
        model.artifacts().eos_ids.clone()
    };
    assert_eq!(eos_ids(&[(2, "<eos>"), (7, "<end_of_turn>")], None), [2, 7]);
    assert_eq!(eos_ids(&[(2, "<|endoftext|>"), (9, "<|end|>")], None), [2, 9]);
    assert_eq!(eos_ids(&[(2, "<|im_end|>"), (9, "<|end|>")], None), [2]);
    assert_eq!(eos_ids(&[(7, "<|eot_id|>"), (9, "<|end|>")], Some(7)), [2, 7]);
}

#[test]
fn every_family_opens() {
    for family in FAMILIES {
        let file = families::family(family, TINY, Dtype::Q8_0, 3);
        let model = ModelFile::from_gguf_bytes(file.to_bytes(), "tiny.gguf").unwrap();
        let shapes: Vec<_> = model.roles().map(|role| (role, model.tensor(role).rows)).collect();
        assert!(shapes.iter().all(|(_, rows)| *rows > 0), "{family}");
        assert_eq!(model.spec().features.window.is_some(), has_window(family), "{family}");
    }
}

fn has_window(family: &str) -> bool {
    matches!(family, "mistral" | "gemma3" | "phi3")
}

#[test]
fn parts_of_a_larger_tensor_lie_where_they_should() {
    let file = families::family("phi3", TINY, Dtype::Bf16, 3);
    let model = ModelFile::from_gguf_bytes(file.to_bytes(), "phi3.gguf").unwrap();
    let part = |part| model.tensor(TensorRole::Layer(1, part)).bytes.to_vec();
    let whole = |name: &str| file.tensors.iter().find(|t| t.name == name).unwrap().bytes.clone();
    let qkv = [part(LayerTensor::Q), part(LayerTensor::K), part(LayerTensor::V)].concat();
    assert_eq!(qkv, whole("blk.1.attn_qkv.weight"));
    let gate_up = [part(LayerTensor::Gate), part(LayerTensor::Up)].concat();
    assert_eq!(gate_up, whole("blk.1.ffn_up.weight"));

    let file = families::family("qwen3moe", TINY, Dtype::Q8_0, 3);
    let model = ModelFile::from_gguf_bytes(file.to_bytes(), "moe.gguf").unwrap();
    let down: Vec<u8> = (0..model.spec().features.experts.unwrap().count)
        .flat_map(|e| model.tensor(TensorRole::Expert(0, e, ExpertTensor::Down)).bytes.to_vec())
        .collect();
    assert!(file.tensors.iter().any(|t| t.name == "blk.0.ffn_down_exps.weight" && t.bytes == down));
}

#[test]
fn variants_of_other_families_that_are_refused() {
    let refused_as = |family: &str, wanted: &[&str], break_it: &dyn Fn(&mut Gguf)| {
        let mut file = families::family(family, TINY, Dtype::Q8_0, 3);
        break_it(&mut file);
        let error = error_of(file.to_bytes());
        for part in wanted.iter().chain(&["broken.gguf"]) {
            assert!(error.contains(part), "{error:?} does not say {part:?}");
        }
    };
    refused_as("phi3", &["longrope", "phi3.rope.scaling"], &|file| {
        file.add("rope_factors_long.weight", Dtype::F32, 4, 0, &mut Random(1));
    });
    refused_as("phi3", &["blk.0.attn_qkv.weight", "shape"], &|file| {
        file.tensor("blk.0.attn_qkv.weight").dims[1] -= 1;
    });
    refused_as("qwen2", &["blk.1.attn_k.bias", "missing"], &|file| {
        file.tensors.retain(|tensor| tensor.name != "blk.1.attn_k.bias");
    });
    refused_as("qwen3", &["qwen3.attention.sliding_window", "which layers"], &|file| {
        file.set("qwen3.attention.sliding_window", Meta::U32(64));
    });
    refused_as("gemma3", &["gemma3.attention.sliding_window", "missing"], &|file| {
        file.unset("gemma3.attention.sliding_window");
    });
    refused_as("gemma3", &["gemma3.attention.sliding_window_pattern"], &|file| {
        file.set("gemma3.attention.sliding_window_pattern", Meta::U32(0));
    });
    refused_as("qwen3moe", &["qwen3moe.expert_used_count", "6"], &|file| {
        file.set("qwen3moe.expert_used_count", Meta::U32(6));
    });
    refused_as("qwen3moe", &["qwen3moe.expert_gating_func", "softmax"], &|file| {
        file.set("qwen3moe.expert_gating_func", Meta::U32(2));
    });
    refused_as("qwen3", &["qwen3.expert_count"], &|file| {
        file.set("qwen3.expert_count", Meta::U32(4));
    });
    refused_as("gemma3", &["gemma3.block_count"], &|file| {
        file.set("gemma3.block_count", Meta::U32(u32::MAX));
    });
}

#[test]
fn broken_vocabularies() {
    refused(&["tokenizer.ggml.model", "missing"], |f| f.unset("tokenizer.ggml.model"));
    refused(&["tokenizer.ggml.merges", "missing"], |f| f.unset("tokenizer.ggml.merges"));
    refused(&["tokenizer.ggml.tokens", "99"], |file| {
        file.set("tokenizer.ggml.tokens", Meta::Strings(vec!["x".into(); 99]));
    });
    refused(&["tokenizer.ggml.tokens", "strings"], |file| {
        file.set("tokenizer.ggml.tokens", Meta::I32s(vec![0; 100]));
    });
    refused(&["tokenizer.ggml.token_type", "3"], |file| {
        file.set("tokenizer.ggml.token_type", Meta::I32s(vec![1; 3]));
    });
    refused(&["tokenizer.ggml.eos_token_id", "100"], |file| {
        file.set("tokenizer.ggml.eos_token_id", Meta::U32(100));
    });
}

#[test]
fn broken_tensors() {
    let down = "blk.0.ffn_down.weight";
    refused(&["output_norm.weight", "missing"], |file| {
        file.tensors.retain(|tensor| tensor.name != "output_norm.weight");
    });
    refused(&["token_embd.weight", "missing"], |file| drop(file.tensors.remove(0)));
    refused(&[down, "twice"], |file| {
        let copy = file.tensor(down).clone();
        file.tensors.push(copy);
    });
    refused(&["blk.0.attn_q.bias", "not part"], |file| {
        file.add("blk.0.attn_q.bias", Dtype::F32, 96, 0, &mut Random(1));
    });
    refused(&[down, "IQ4_XS", "Q8_0", "Q4_K"], |file| file.tensor(down).code = 23);
    refused(&[down, "MXFP4", "IQ4_NL"], |file| file.tensor(down).code = 39);
    refused(&[down, "number 99"], |file| file.tensor(down).code = 99);
    refused(&[down, "shape"], |file| file.tensor(down).dims = vec![64, 96]);
    refused(&[down, "dimension is zero"], |file| file.tensor(down).dims = vec![96, 0]);
    refused(&[down, "dimensions"], |file| file.tensor(down).dims = vec![96; 5]);
    refused(&[down, "0 dimensions"], |file| file.tensor(down).dims = vec![]);
    refused(&[down, "blocks of 32"], |file| file.tensor(down).dims = vec![97, 64]);
    // 96 columns are no super-blocks, whatever the type.
    for code in [10, 11, 12, 13, 14] {
        refused(&[down, "96 columns", "blocks of 256"], |file| file.tensor(down).code = code);
    }
    // Q5_1 takes more than the Q4_1 that is there: into the next tensor, or beyond the end.
    refused(&[down, "outside the file"], |file| {
        file.tensor(down).code = 7;
        file.tensors.retain(|tensor| !tensor.name.starts_with("blk.1."));
        file.set("llama.block_count", Meta::U32(1));
    });
    refused(&["blk.1.attn_norm.weight", "overlap"], |file| file.tensor(down).code = 7);
    refused(&[down, "overflow"], |file| {
        file.tensor(down).dims = vec![1 << 32, 1 << 31, 1 << 30];
    });
    refused(&[down, "overflow"], |file| file.tensor(down).offset = Some(u64::MAX - 31));
    refused(&[down, "outside the file"], |file| file.tensor(down).offset = Some(1 << 40));
    refused(&[down, "aligned"], |file| file.tensor(down).offset = Some(33));
    refused(&["overlap"], |file| file.tensor(down).offset = Some(0));
    refused(&["tensor 2", "empty"], |file| {
        file.tensor("blk.0.attn_norm.weight").name = String::new();
    });
}
