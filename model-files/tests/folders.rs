//! Folders in Hugging Face's form: whole ones, and ones broken in one place each.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::fs;

use baton_model_files::{LayerTensor, ModelFile, RowOrder, TensorDtype, TensorRole};
use baton_types::{RopeScaling, TokenizerSource};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A folder in parts.
struct Folder {
    config: Value,
    /// Name, type, shape; the bytes are ones.
    tensors: Vec<(String, Dtype, Vec<usize>)>,
    files: HashMap<&'static str, String>,
}

impl Folder {
    fn tiny() -> Self {
        let config = json!({
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
            "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2,
        });
        let layer = "model.layers.0";
        let tensors = [
            ("model.embed_tokens".to_owned(), vec![50, 64]),
            ("lm_head".to_owned(), vec![50, 64]),
            ("model.norm".to_owned(), vec![64]),
            (format!("{layer}.input_layernorm"), vec![64]),
            (format!("{layer}.self_attn.q_proj"), vec![64, 64]),
            (format!("{layer}.self_attn.k_proj"), vec![32, 64]),
            (format!("{layer}.self_attn.v_proj"), vec![32, 64]),
            (format!("{layer}.self_attn.o_proj"), vec![64, 64]),
            (format!("{layer}.post_attention_layernorm"), vec![64]),
            (format!("{layer}.mlp.gate_proj"), vec![96, 64]),
            (format!("{layer}.mlp.up_proj"), vec![96, 64]),
            (format!("{layer}.mlp.down_proj"), vec![64, 96]),
        ];
        let tensors = tensors
            .map(|(name, shape)| (format!("{name}.weight"), Dtype::BF16, shape))
            .into_iter()
            .collect();
        let files = HashMap::from([
            ("tokenizer.json", "{}".to_owned()),
            ("generation_config.json", json!({"eos_token_id": [3, 2]}).to_string()),
            (
                "tokenizer_config.json",
                json!({"chat_template": "T", "add_bos_token": true}).to_string(),
            ),
        ]);
        Self { config, tensors, files }
    }

    fn weights(&self) -> Vec<u8> {
        let bytes: Vec<Vec<u8>> = self
            .tensors
            .iter()
            .map(|(_, dtype, shape)| vec![1; shape.iter().product::<usize>() * dtype.bitsize() / 8])
            .collect();
        let views = self.tensors.iter().zip(&bytes).map(|((name, dtype, shape), bytes)| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize(views, None).unwrap()
    }

    fn write(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        fs::write(folder.path().join("model.safetensors"), self.weights()).unwrap();
        for (name, text) in &self.files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn tensor(&mut self, part: &str) -> &mut (String, Dtype, Vec<usize>) {
        self.tensors.iter_mut().find(|tensor| tensor.0.contains(part)).unwrap()
    }
}

fn opened(change: impl FnOnce(&mut Folder)) -> ModelFile {
    let mut folder = Folder::tiny();
    change(&mut folder);
    ModelFile::open(folder.write().path()).unwrap()
}

fn refused_folder(folder: &TempDir, wanted: &[&str]) {
    let error = ModelFile::open(folder.path()).expect_err("a broken folder was opened");
    let error = error.to_string();
    for part in wanted {
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
}

fn refused(wanted: &[&str], break_it: impl FnOnce(&mut Folder)) {
    let mut folder = Folder::tiny();
    break_it(&mut folder);
    refused_folder(&folder.write(), wanted);
}

#[test]
fn a_whole_folder_opens() {
    let folder = Folder::tiny().write();
    let model = ModelFile::open(folder.path()).unwrap();
    let spec = model.spec();
    assert_eq!((spec.head_dim, spec.rope.theta, spec.tied_embeddings), (16, 500_000.0, false));
    assert_eq!(spec.eos_ids, [3, 2]);
    let artifacts = model.artifacts();
    assert_eq!(artifacts.tokenizer, TokenizerSource::Json("{}".into()));
    assert_eq!((artifacts.chat_template.as_deref(), artifacts.add_bos), (Some("T"), true));
    let k = model.tensor(TensorRole::Layer(0, LayerTensor::K));
    assert_eq!((k.dtype, k.rows, k.row_order), (TensorDtype::Bf16, 32, RowOrder::Plain));
    assert_eq!(model.fingerprint(), ModelFile::open(folder.path()).unwrap().fingerprint());
}

#[test]
fn ties_templates_windows_and_scaling() {
    let mut folder = Folder::tiny();
    folder.tensors.retain(|tensor| tensor.0 != "lm_head.weight");
    folder.config["tie_word_embeddings"] = json!(true);
    folder.config["architectures"] = json!(["MistralForCausalLM"]);
    folder.config["sliding_window"] = json!(128);
    folder.config["rope_scaling"] = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    folder.files.insert("chat_template.jinja", "J".into());
    let written = folder.write();
    let model = ModelFile::open(written.path()).unwrap();
    assert!(model.spec().tied_embeddings);
    let window = model.spec().features.window.as_ref().unwrap();
    assert_eq!((model.spec().context_tokens, window.tokens), (256, 128));
    assert_eq!((&window.layers, &window.rope), (&vec![true], &model.spec().rope));
    assert!(matches!(model.spec().rope.scaling, RopeScaling::Llama3 { .. }));
    assert_eq!(model.artifacts().chat_template.as_deref(), Some("J"));
    assert_eq!(model.tensor(TensorRole::Output).rows, 50);
}

/// Configurations of before transformers 5; those of today are in `engine/tests/golden`.
#[test]
fn older_configurations_of_other_families() {
    let open =
        |changes: Value, tensors: &[(&str, Vec<usize>)], dropped: &[&str]| {
            let mut folder = Folder::tiny();
            folder.config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            folder.tensors.retain(|tensor| !dropped.iter().any(|name| tensor.0.contains(name)));
            folder.tensors.extend(tensors.iter().map(|(name, shape)| {
                (format!("model.layers.0.{name}"), Dtype::BF16, shape.clone())
            }));
            let written = folder.write();
            ModelFile::open(written.path()).unwrap().spec().clone()
        };
    let biases = [
        ("self_attn.q_proj.bias", vec![64]),
        ("self_attn.k_proj.bias", vec![32]),
        ("self_attn.v_proj.bias", vec![32]),
    ];
    let qwen2 = json!({
        "architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "max_window_layers": 0,
        "use_sliding_window": false,
    });
    let spec = open(qwen2, &biases, &[]);
    assert!(spec.features.qkv_bias && spec.features.window.is_none());

    let gemma3 = json!({
        "architectures": ["Gemma3ForCausalLM"], "sliding_window": 64, "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e6, "sliding_window_pattern": 6,
        "rope_local_base_freq": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    });
    let norms = [
        ("self_attn.q_norm.weight", vec![16]),
        ("self_attn.k_norm.weight", vec![16]),
        ("pre_feedforward_layernorm.weight", vec![64]),
        ("post_feedforward_layernorm.weight", vec![64]),
    ];
    let spec = open(gemma3, &norms, &[]);
    let window = spec.features.window.as_ref().unwrap();
    assert_eq!((window.rope.theta, &window.rope.scaling), (5000.0, &RopeScaling::None));
    assert_eq!((spec.rope.theta, &spec.rope.scaling), (1e6, &RopeScaling::Linear { factor: 8.0 }));
    assert_eq!(
        (spec.features.embedding_scale, spec.features.query_scalar),
        (Some(8.0), Some(32.0))
    );

    let qwen3_moe = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
    });
    let mut tensors = norms[..2].to_vec();
    tensors.push(("mlp.gate.weight", vec![2, 64]));
    for part in ["mlp.experts.0", "mlp.experts.1"] {
        for (name, shape) in [("gate", [32, 64]), ("up", [32, 64]), ("down", [64, 32])] {
            let name: &str = format!("{part}.{name}_proj.weight").leak();
            tensors.push((name, shape.to_vec()));
        }
    }
    let spec = open(qwen3_moe, &tensors, &["layers.0.mlp"]);
    let experts = spec.features.experts.unwrap();
    assert_eq!((experts.count, experts.used, experts.normalize_weights), (2, 1, false));
    assert_eq!(spec.ffn, 32);
}

#[test]
fn variants_that_would_need_another_computation() {
    let refused_as = |architecture: &str, wanted: &[&str], key: &str, value: Value| {
        refused(&[wanted, &["config.json"]].concat(), |folder| {
            folder.config["architectures"] = json!([architecture]);
            folder.config["hidden_activation"] = json!("gelu_pytorch_tanh");
            folder.config["sliding_window"] = json!(64);
            folder.config["num_experts"] = json!(4);
            folder.config["num_experts_per_tok"] = json!(2);
            folder.config[key] = value;
        });
    };
    let (phi3, gemma3, moe) = ("Phi3ForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM");
    let longrope = json!({"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]});
    refused_as(phi3, &["rope_type", "longrope"], "rope_scaling", longrope);
    let chunked = json!(["chunked_attention", "sliding_attention"]);
    refused_as(gemma3, &["layer_types", "chunked_attention"], "layer_types", chunked);
    refused_as(gemma3, &["final_logit_softcapping"], "final_logit_softcapping", json!(30.0));
    refused_as(gemma3, &["hidden_activation"], "hidden_activation", json!("silu"));
    refused_as(gemma3, &["sliding_window"], "sliding_window", json!(null));
    refused_as(gemma3, &["query_pre_attn_scalar"], "query_pre_attn_scalar", json!(-1.0));
    refused_as(moe, &["mlp_only_layers"], "mlp_only_layers", json!([0]));
    refused_as(moe, &["num_experts_per_tok", "5"], "num_experts_per_tok", json!(5));
    refused_as(moe, &["num_local_experts", "0"], "num_experts", json!(0));
    let llama = "LlamaForCausalLM";
    refused_as(llama, &["partial_rotary_factor"], "partial_rotary_factor", json!(0.5));
    refused_as("Gemma3ForConditionalGeneration", &["Gemma3ForCausalLM"], "x", json!(0));
}

#[test]
fn windows_are_those_of_transformers() {
    let window = |architecture: &str, changes: Value| {
        let model = opened(|folder| {
            folder.config["architectures"] = json!([architecture]);
            folder.config["max_position_embeddings"] = json!(8192);
            folder.config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            let bias = |(name, len)| {
                (format!("model.layers.0.self_attn.{name}_proj.bias"), Dtype::BF16, vec![len])
            };
            if architecture == "Qwen2ForCausalLM" {
                folder.tensors.extend([("q", 64), ("k", 32), ("v", 32)].map(bias));
            }
        });
        model.spec().features.window.as_ref().map(|window| window.tokens)
    };
    let (mistral, qwen2) = ("MistralForCausalLM", "Qwen2ForCausalLM");
    assert_eq!(window("LlamaForCausalLM", json!({"sliding_window": 16})), None);
    assert_eq!(window(mistral, json!({})), Some(4096));
    assert_eq!(window(mistral, json!({"max_position_embeddings": 4096})), None);
    assert_eq!(window(mistral, json!({"sliding_window": null})), None);
    let on = json!({"use_sliding_window": true, "max_window_layers": 0});
    assert_eq!(window(qwen2, on), Some(4096));
    let all_full = json!({"use_sliding_window": true, "sliding_window": 16});
    assert_eq!(window(qwen2, all_full), None);
}

#[test]
fn keys_that_say_a_thing_twice() {
    let gemma3 = |new: usize, old: usize| {
        let mut folder = Folder::tiny();
        folder.config["architectures"] = json!(["Gemma3ForCausalLM"]);
        folder.config["sliding_window"] = json!(64);
        folder.config["sliding_window_pattern"] = json!(new);
        folder.config["_sliding_window_pattern"] = json!(old);
        folder.write()
    };
    // What it lacks is another matter.
    refused_folder(&gemma3(6, 6), &["tensor", "missing"]);
    refused_folder(&gemma3(6, 4), &["key sliding_window_pattern", "6", "4"]);
    let same = json!({"rope_theta": 500_000.0, "partial_rotary_factor": 1.0});
    opened(|f| f.config["rope_parameters"] = same);
    refused(&["rope_parameters.rope_theta", "500000"], |f| {
        f.config["rope_parameters"] = json!({"rope_theta": 10000.0});
    });
    refused(&["key rope_parameters.partial_rotary_factor", "0.5"], |f| {
        f.config["rope_parameters"] = json!({"partial_rotary_factor": 0.5});
    });
    refused(&["rope_parameters.rope_type"], |f| {
        f.config["rope_parameters"] = json!({"factor": 2.0});
    });
    refused(&["rope_scaling", "rope_parameters"], |f| {
        f.config["rope_parameters"] = json!({"rope_type": "default"});
        f.config["rope_scaling"] = json!({"rope_type": "linear", "factor": 2.0});
    });
    refused(&["rope_parameters.full_attention"], |f| {
        f.config["architectures"] = json!(["Gemma3ForCausalLM"]);
        f.config["sliding_window"] = json!(64);
        f.config["rope_parameters"] = json!({"rope_theta": 500_000.0});
    });
    refused(&["num_local_experts", "num_experts"], |f| {
        f.config["architectures"] = json!(["MixtralForCausalLM"]);
        f.config["num_local_experts"] = json!(4);
        f.config["num_experts"] = json!(8);
        f.config["num_experts_per_tok"] = json!(2);
    });
}

#[test]
fn shards_open_together() {
    let whole = Folder::tiny();
    let folder = whole.write();
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let mut map = HashMap::new();
    for (index, tensors) in whole.tensors.chunks(7).enumerate() {
        let name = format!("model-{index}.safetensors");
        let shard = Folder { tensors: tensors.to_vec(), ..Folder::tiny() };
        fs::write(folder.path().join(&name), shard.weights()).unwrap();
        map.extend(tensors.iter().map(|tensor| (tensor.0.clone(), name.clone())));
    }
    let index = folder.path().join("model.safetensors.index.json");
    fs::write(&index, json!({ "weight_map": map }).to_string()).unwrap();
    ModelFile::open(folder.path()).unwrap();
    fs::remove_file(folder.path().join("model-1.safetensors")).unwrap();
    refused_folder(&folder, &["model-1.safetensors"]);
    fs::write(&index, json!({"weight_map": {"a": "../secret"}}).to_string()).unwrap();
    refused_folder(&folder, &["weight_map", "../secret"]);
    fs::write(&index, json!({"weight_map": {}}).to_string()).unwrap();
    refused_folder(&folder, &["shards"]);
}

#[test]
fn broken_configs() {
    refused(&["Qwen9", "LlamaForCausalLM"], |f| f.config["architectures"] = json!(["Qwen9"]));
    refused(&["config.json", "hidden_size"], |f| {
        f.config.as_object_mut().unwrap().remove("hidden_size");
    });
    refused(&["config.json", "hidden_size", "-4"], |f| f.config["hidden_size"] = json!(-4));
    refused(&["config.json", "layer_types[1]"], |f| f.config["layer_types"] = json!(["a", 2]));
    refused(&["eos_token_id", "list"], |f| f.config["eos_token_id"] = json!("</s>"));
    refused(&["hidden_size"], |f| f.config["hidden_size"] = json!(63));
    refused(&["num_attention_heads"], |f| f.config["num_attention_heads"] = json!(0));
    refused(&["num_key_value_heads"], |f| f.config["num_key_value_heads"] = json!(3));
    refused(&["rms_norm_eps"], |f| f.config["rms_norm_eps"] = json!(0.0));
    refused(&["rope_type", "yarn"], |f| f.config["rope_scaling"] = json!({"type": "yarn"}));
    refused(&["rope_scaling.factor"], |f| f.config["rope_scaling"] = json!({"type": "linear"}));
    refused(&["rope_scaling", "object"], |f| f.config["rope_scaling"] = json!([]));
    refused(&["rope_scaling.rope_type"], |f| f.config["rope_scaling"] = json!({"factor": 2.0}));
    refused(&["rope_parameters.rope_theta", "number"], |f| {
        f.config.as_object_mut().unwrap().remove("rope_theta");
        f.config["rope_parameters"] = json!({"rope_theta": "10000"});
    });
    // Older fields count beside newer ones that say nothing of it.
    refused(&["rope_scaling.rope_type", "yarn"], |f| {
        f.config["rope_parameters"] = json!({"rope_theta": 500_000.0});
        f.config["rope_scaling"] = json!({"rope_type": "yarn", "factor": 2.0});
    });
    refused(&["attention_bias"], |f| f.config["attention_bias"] = json!(true));
    refused(&["hidden_act"], |f| f.config["hidden_act"] = json!("gelu"));
    refused(&["quantization_config"], |f| f.config["quantization_config"] = json!({}));
    refused(&["eos_token_id", "50"], |f| f.config["eos_token_id"] = json!(50));
    refused(&["tokenizer.json"], |f| drop(f.files.remove("tokenizer.json")));
    refused(&["generation_config.json"], |f| {
        f.files.insert("generation_config.json", "{".into());
    });
    refused(&["generation_config.json", "trailing"], |f| {
        f.files.insert("generation_config.json", "{} {}".into());
    });
    for template in [json!(5), json!({"default": "T"}), json!([{"name": "default"}])] {
        refused(&["tokenizer_config.json", "chat_template", "{name, template}"], |f| {
            let config = json!({ "chat_template": template }).to_string();
            f.files.insert("tokenizer_config.json", config);
        });
    }
}

#[test]
fn files_that_are_no_objects_or_no_utf_8() {
    let generation = "generation_config.json";
    refused(&[generation, "an object"], |f| drop(f.files.insert(generation, "[256, 257]".into())));
    refused(&["tokenizer_config.json", "an object"], |f| {
        f.files.insert("tokenizer_config.json", r#"["x", true]"#.into());
    });
    refused(&["tokenizer_config.json", "{name, template}"], |f| {
        f.files.insert("tokenizer_config.json", r#"{"chat_template": [["a", "T"]]}"#.into());
    });
    refused(&["tokenizer.json", "added_tokens"], |f| {
        f.files.insert("tokenizer.json", r#"{"added_tokens": 5}"#.into());
    });
    let marked = opened(|f| {
        let text = f.files["generation_config.json"].clone();
        f.files.insert(generation, format!("\u{feff}{text}"));
        f.files.insert("tokenizer.json", "\u{feff}{}".into());
    });
    assert_eq!(marked.artifacts().tokenizer, TokenizerSource::Json("{}".into()));
    let folder = Folder::tiny().write();
    fs::write(folder.path().join("config.json"), b"\xff{}").unwrap();
    refused_folder(&folder, &["config.json", "not UTF-8"]);
}

#[test]
fn broken_weights() {
    refused(&["lm_head.weight", "missing"], |f| {
        f.tensors.retain(|tensor| tensor.0 != "lm_head.weight");
    });
    refused(&["k_proj", "shape"], |f| f.tensor("k_proj").2 = vec![64, 32]);
    refused(&["q_proj", "I64"], |f| f.tensor("q_proj").1 = Dtype::I64);
    refused(&["q_proj.bias", "not part"], |f| {
        f.tensors.push(("model.layers.0.self_attn.q_proj.bias".into(), Dtype::F32, vec![64]));
    });
    let whole = Folder::tiny();
    for len in [0, 4, 8, 100, 5000] {
        let folder = whole.write();
        let bytes = whole.weights();
        fs::write(folder.path().join("model.safetensors"), &bytes[..len]).unwrap();
        refused_folder(&folder, &["model.safetensors", "again"]);
    }
    let folder = whole.write();
    fs::remove_file(folder.path().join("config.json")).unwrap();
    refused_folder(&folder, &["config.json"]);
}
