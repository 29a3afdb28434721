//! Folders in Hugging Face's form: the tokens that begin a prompt and end an answer.

#![allow(clippy::unwrap_used)]

use std::fs;

use baton_model_files::{ModelFile, ModelFileError};
use baton_types::{ModelArtifacts, TokenId};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

const BOS: TokenId = 10;
const EOS: TokenId = 11;
const END: TokenId = 12;

/// What a folder says; the rest of it is the least that opens.
#[derive(Clone)]
struct Says {
    config: Value,
    tokenizer_config: Value,
    post_processor: Value,
}

impl Says {
    /// BOS and EOS by their ids alone.
    fn ids() -> Self {
        Self {
            config: json!({"bos_token_id": BOS, "eos_token_id": EOS}),
            tokenizer_config: json!({}),
            post_processor: json!(null),
        }
    }

    fn tokenizer_config(config: Value) -> Self {
        Self { tokenizer_config: config, ..Self::ids() }
    }

    fn post_processor(post_processor: Value) -> Self {
        Self { post_processor, ..Self::ids() }
    }

    fn open(&self) -> Result<ModelArtifacts, ModelFileError> {
        let folder = tempfile::tempdir().unwrap();
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 32,
            "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
        });
        config.as_object_mut().unwrap().extend(self.config.as_object().unwrap().clone());
        let token = |id, content: &str| json!({"id": id, "content": content, "special": true});
        let tokenizer = json!({
            "added_tokens": [token(BOS, "<s>"), token(EOS, "</s>"), token(END, "<|im_end|>")],
            "model": {"type": "BPE", "vocab": {"a": 0, "<x>": 13, "far": 20}, "merges": []},
            "post_processor": self.post_processor,
        });
        for (name, value) in [
            ("config.json", &config),
            ("tokenizer.json", &tokenizer),
            ("tokenizer_config.json", &self.tokenizer_config),
        ] {
            fs::write(folder.path().join(name), value.to_string()).unwrap();
        }
        fs::write(folder.path().join("model.safetensors"), weights()).unwrap();
        ModelFile::open(folder.path()).map(|model| model.artifacts().clone())
    }

    fn refused(&self, wanted: &[&str]) {
        let error = self.open().expect_err("a broken folder was opened").to_string();
        for part in wanted {
            assert!(error.contains(part), "{error:?} does not say {part:?}");
        }
    }
}

fn weights() -> Vec<u8> {
    let layer = [
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ];
    let names = (layer.iter().map(|name| format!("layers.0.{name}")))
        .chain(["embed_tokens", "norm"].map(str::to_owned));
    let ones = [1; 32 * 32 * 2];
    let views = names.map(|name| {
        let shape = match name.as_str() {
            "embed_tokens" => vec![20, 32],
            norm if norm.ends_with("norm") => vec![32],
            _ => vec![32, 32],
        };
        let bytes = &ones[..2 * shape.iter().product::<usize>()];
        (format!("model.{name}.weight"), TensorView::new(Dtype::BF16, shape, bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// A template that puts tokens before and after the prompt.
fn template(before: &[TokenId], after: &[TokenId]) -> Value {
    let piece = |id: &TokenId| json!({"SpecialToken": {"id": id.to_string(), "type_id": 0}});
    let mut single: Vec<Value> = before.iter().map(piece).collect();
    single.push(json!({"Sequence": {"id": "A", "type_id": 0}}));
    single.extend(after.iter().map(piece));
    let tokens: serde_json::Map<String, Value> = (before.iter().chain(after))
        .map(|id| (id.to_string(), json!({"id": id.to_string(), "ids": [id], "tokens": ["?"]})))
        .collect();
    json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens})
}

fn bos_of(says: &Says) -> (Option<TokenId>, bool) {
    let artifacts = says.open().unwrap();
    (artifacts.bos_id, artifacts.add_bos)
}

#[test]
fn the_post_processor_says_whether_bos_begins_a_prompt() {
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false,
        "use_regex": true});
    let sequence = json!({"type": "Sequence", "processors": [byte_level, template(&[BOS], &[])]});
    let roberta = json!({"type": "RobertaProcessing", "cls": ["<s>", BOS], "sep": ["</s>", EOS],
        "trim_offsets": true, "add_prefix_space": false});
    for (post_processor, adds) in [
        (json!(null), false),
        (byte_level, false),
        (template(&[], &[]), false),
        (template(&[BOS], &[]), true),
        (sequence, true),
        // A prompt is to be continued: EOS after it is left out.
        (template(&[BOS], &[EOS]), true),
        (roberta, true),
    ] {
        let says = Says::post_processor(post_processor);
        assert_eq!(bos_of(&says), (Some(BOS), adds), "{}", says.post_processor);
        let nameless = Says { config: json!({"eos_token_id": EOS}), ..says };
        let bos = adds.then_some(BOS);
        assert_eq!(bos_of(&nameless), (bos, adds), "{}", nameless.post_processor);
    }
    let nameless = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}],
        "special_tokens": {}});
    for (post_processor, wanted) in [
        (nameless, ["<s>", "no ids"]),
        (template(&[END], &[]), ["12", "bos_token"]),
        (template(&[END, BOS], &[]), ["[12, 10]", "only BOS"]),
        (template(&[BOS], &[END]), ["12", "after a prompt"]),
        (json!({"type": "Klingon"}), ["Klingon", "TemplateProcessing"]),
    ] {
        let says = Says::post_processor(post_processor);
        says.refused(&["tokenizer.json", "post_processor", wanted[0], wanted[1]]);
    }
}

#[test]
fn add_bos_token_and_the_class_come_before_the_template() {
    let says =
        |tokenizer_config, post_processor| Says { tokenizer_config, post_processor, ..Says::ids() };
    let with_bos = || template(&[BOS], &[]);
    let class = |class: &str| json!({"tokenizer_class": class});
    for (config, post_processor, adds) in [
        (json!({"add_bos_token": true}), json!(null), true),
        (json!({"add_bos_token": false}), with_bos(), false),
        (json!({"add_bos_token": null}), with_bos(), true),
        (json!({"add_bos_token": null}), json!(null), false),
        (class("LlamaTokenizerFast"), json!(null), true),
        (class("LlamaTokenizerFast"), template(&[], &[]), false),
        (class("PreTrainedTokenizerFast"), json!(null), false),
    ] {
        let says = says(config, post_processor);
        assert_eq!(bos_of(&says), (Some(BOS), adds), "{}", says.tokenizer_config);
    }
    let nameless = Says { config: json!({}), ..says(json!({"add_bos_token": true}), json!(null)) };
    nameless.refused(&["tokenizer_config.json", "add_bos_token", "bos_token"]);
}

#[test]
fn the_tokenizers_own_tokens_come_first() {
    let own = json!({"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}});
    let nameless = Says { config: json!({}), ..Says::tokenizer_config(own.clone()) };
    let artifacts = nameless.open().unwrap();
    assert_eq!((artifacts.bos_id, artifacts.eos_ids), (Some(BOS), vec![END]));
    let artifacts = Says::tokenizer_config(own).open().unwrap();
    assert_eq!((artifacts.bos_id, artifacts.eos_ids), (Some(BOS), vec![END, EOS]));
    let artifacts = Says::tokenizer_config(json!({"bos_token": "<x>"})).open().unwrap();
    assert_eq!((artifacts.bos_id, artifacts.eos_ids), (Some(13), vec![EOS]));
    let none = Says::tokenizer_config(json!({"bos_token": null, "eos_token": null}));
    let artifacts = none.open().unwrap();
    assert_eq!((artifacts.bos_id, artifacts.eos_ids), (None, vec![EOS]));
}

#[test]
fn tokens_that_are_none() {
    let file = "tokenizer_config.json";
    for key in ["bos_token", "eos_token"] {
        let says = |value: Value| Says::tokenizer_config(json!({ key: value }));
        says(json!("<zz>")).refused(&[file, key, "<zz>", "tokenizer.json"]);
        says(json!("far")).refused(&[file, key, "20"]);
        says(json!({"text": "<s>"})).refused(&[file, key, "content"]);
    }
    for key in ["bos_token_id", "eos_token_id"] {
        let says = Says { config: json!({ key: 20 }), ..Says::ids() };
        says.refused(&["/config.json", &format!("key {key}:"), "20"]);
    }
}

#[test]
fn a_list_of_templates_without_a_default_says_so_when_it_is_used() {
    let template = |list: Value| {
        Says::tokenizer_config(json!({"chat_template": list})).open().unwrap().chat_template
    };
    let named =
        |name: &str| json!([{"name": "rag", "template": "R"}, {"name": name, "template": "T"}]);
    assert_eq!(template(named("default")).as_deref(), Some("T"));
    assert!(template(named("tool_use")).unwrap().contains("raise_exception"));
    assert_eq!(template(json!([])), None);
}
