//! Writes GGUF files for tests: tiny models, and files broken on purpose.

#![allow(dead_code)]

pub mod families;

/// A metadata value.
#[derive(Clone, Debug)]
pub enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Str(String),
    Strings(Vec<String>),
    I32s(Vec<i32>),
    /// Kind and bytes as they are.
    Raw(u32, Vec<u8>),
}

/// `ggml_type` of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q8_0 = 8,
    Bf16 = 30,
}

impl Dtype {
    pub const ALL: [Dtype; 6] =
        [Dtype::F32, Dtype::F16, Dtype::Q4_0, Dtype::Q4_1, Dtype::Q8_0, Dtype::Bf16];
}

#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    /// Columns first.
    pub dims: Vec<u64>,
    pub code: u32,
    pub bytes: Vec<u8>,
    /// Instead of the place where the bytes go.
    pub offset: Option<u64>,
}

/// A GGUF file in parts.
#[derive(Clone, Debug)]
pub struct Gguf {
    pub magic: [u8; 4],
    pub version: u32,
    pub tensor_count: Option<u64>,
    pub key_count: Option<u64>,
    pub keys: Vec<(String, Meta)>,
    pub tensors: Vec<Tensor>,
}

/// Shape of a tiny model.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub vocab: usize,
    pub context: usize,
}

/// Two layers; nothing is a multiple of more than it must be.
pub const TINY: Shape = Shape {
    layers: 2,
    hidden: 64,
    heads: 6,
    kv_heads: 2,
    head_dim: 16,
    ffn: 96,
    vocab: 100,
    context: 1024,
};

impl Gguf {
    /// A Llama with random weights, matrices of `dtype`, and a vocabulary of single characters.
    pub fn tiny(shape: Shape, dtype: Dtype, seed: u64) -> Self {
        let mut random = Random(seed | 1);
        let mut file = Self {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            key_count: None,
            keys: tiny_keys(shape),
            tensors: Vec::new(),
        };
        let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        file.add("token_embd.weight", dtype, shape.hidden, shape.vocab, &mut random);
        file.add("output_norm.weight", Dtype::F32, shape.hidden, 0, &mut random);
        for layer in 0..shape.layers {
            let matrices = [
                ("attn_norm", Dtype::F32, shape.hidden, 0),
                ("attn_q", dtype, shape.hidden, q),
                ("attn_k", dtype, shape.hidden, kv),
                ("attn_v", dtype, shape.hidden, kv),
                ("attn_output", dtype, q, shape.hidden),
                ("ffn_norm", Dtype::F32, shape.hidden, 0),
                ("ffn_gate", dtype, shape.hidden, shape.ffn),
                ("ffn_up", dtype, shape.hidden, shape.ffn),
                ("ffn_down", dtype, shape.ffn, shape.hidden),
            ];
            for (name, dtype, cols, rows) in matrices {
                file.add(&format!("blk.{layer}.{name}.weight"), dtype, cols, rows, &mut random);
            }
        }
        file
    }

    /// Adds a tensor of random weights; a vector when `rows` is 0.
    pub fn add(&mut self, name: &str, dtype: Dtype, cols: usize, rows: usize, random: &mut Random) {
        let bytes = random_weights(dtype, cols, rows, random);
        let dims = if rows == 0 { vec![cols as u64] } else { vec![cols as u64, rows as u64] };
        let (name, code) = (name.to_owned(), dtype as u32);
        self.tensors.push(Tensor { name, dims, code, bytes, offset: None });
    }

    pub fn set(&mut self, key: &str, value: Meta) {
        match self.keys.iter_mut().find(|(known, _)| known == key) {
            Some((_, old)) => *old = value,
            None => self.keys.push((key.to_owned(), value)),
        }
    }

    pub fn unset(&mut self, key: &str) {
        self.keys.retain(|(known, _)| known != key);
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).expect("a tensor of that name")
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            put_string(&mut out, key.as_bytes());
            put_value(&mut out, value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            put_string(&mut out, tensor.name.as_bytes());
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.code.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }
}

/// Xorshift: the same numbers everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Between -1 and 1.
    pub fn number(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

fn tiny_keys(shape: Shape) -> Vec<(String, Meta)> {
    let size = |n: usize| Meta::U32(n as u32);
    let token = |i: usize| char::from_u32(0x21 + i as u32).expect("a character").to_string();
    [
        ("general.architecture", Meta::Str("llama".into())),
        ("llama.block_count", size(shape.layers)),
        ("llama.context_length", size(shape.context)),
        ("llama.embedding_length", size(shape.hidden)),
        ("llama.feed_forward_length", size(shape.ffn)),
        ("llama.attention.head_count", size(shape.heads)),
        ("llama.attention.head_count_kv", size(shape.kv_heads)),
        ("llama.attention.key_length", size(shape.head_dim)),
        ("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5)),
        ("llama.rope.freq_base", Meta::F32(10_000.0)),
        ("llama.rope.dimension_count", size(shape.head_dim)),
        ("tokenizer.ggml.model", Meta::Str("gpt2".into())),
        ("tokenizer.ggml.pre", Meta::Str("smollm".into())),
        ("tokenizer.ggml.tokens", Meta::Strings((0..shape.vocab).map(token).collect())),
        ("tokenizer.ggml.token_type", Meta::I32s(vec![1; shape.vocab])),
        ("tokenizer.ggml.merges", Meta::Strings(vec!["! \"".into()])),
        ("tokenizer.ggml.bos_token_id", size(1)),
        ("tokenizer.ggml.eos_token_id", size(2)),
        ("tokenizer.ggml.add_bos_token", Meta::Bool(false)),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

/// Weights of about `1 / sqrt(cols)`; a vector is near 1.
fn random_weights(dtype: Dtype, cols: usize, rows: usize, random: &mut Random) -> Vec<u8> {
    let scale = 1.7 / (cols as f32).sqrt();
    let mut out = Vec::new();
    let half = |x: f32| f32_to_half(x).to_le_bytes();
    for _ in 0..rows.max(1) * cols / if dtype_is_blocked(dtype) { 32 } else { 1 } {
        let spread = scale * (1.0 + 0.5 * random.number());
        match dtype {
            Dtype::F32 if rows == 0 => out.extend((1.0 + 0.3 * random.number()).to_le_bytes()),
            Dtype::F32 => out.extend((scale * random.number()).to_le_bytes()),
            Dtype::F16 => out.extend(half(scale * random.number())),
            Dtype::Bf16 => {
                out.extend(((scale * random.number()).to_bits() >> 16).to_le_bytes()[..2].iter());
            }
            Dtype::Q4_0 => {
                out.extend(half(spread / 8.0));
                out.extend((0..16).map(|_| random.bits() as u8));
            }
            Dtype::Q4_1 => {
                out.extend(half(spread / 7.5));
                out.extend(half(-spread));
                out.extend((0..16).map(|_| random.bits() as u8));
            }
            Dtype::Q8_0 => {
                out.extend(half(spread / 128.0));
                out.extend((0..32).map(|_| random.bits() as u8));
            }
        }
    }
    out
}

fn dtype_is_blocked(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q8_0)
}

/// Half-precision bits of a normal number, rounded toward zero.
fn f32_to_half(x: f32) -> u16 {
    let bits = x.to_bits();
    let exponent = ((bits >> 23) & 0xff) as i32 - 127 + 15;
    let sign = ((bits >> 16) & 0x8000) as u16;
    if exponent <= 0 {
        sign
    } else {
        sign | (exponent as u16) << 10 | ((bits >> 13) & 0x3ff) as u16
    }
}

fn put_string(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

fn put_value(out: &mut Vec<u8>, value: &Meta) {
    let kind: u32 = match value {
        Meta::U32(_) => 4,
        Meta::F32(_) => 6,
        Meta::Bool(_) => 7,
        Meta::Str(_) => 8,
        Meta::Strings(_) | Meta::I32s(_) => 9,
        Meta::Raw(kind, _) => *kind,
    };
    out.extend(kind.to_le_bytes());
    match value {
        Meta::U32(x) => out.extend(x.to_le_bytes()),
        Meta::F32(x) => out.extend(x.to_le_bytes()),
        Meta::Bool(x) => out.push(u8::from(*x)),
        Meta::Str(text) => put_string(out, text.as_bytes()),
        Meta::Strings(texts) => {
            out.extend(8u32.to_le_bytes());
            out.extend((texts.len() as u64).to_le_bytes());
            texts.iter().for_each(|text| put_string(out, text.as_bytes()));
        }
        Meta::I32s(numbers) => {
            out.extend(5u32.to_le_bytes());
            out.extend((numbers.len() as u64).to_le_bytes());
            numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
        }
        Meta::Raw(_, bytes) => out.extend(bytes),
    }
}
