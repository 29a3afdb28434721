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
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2K = 10,
    Q3K = 11,
    Q4K = 12,
    Q5K = 13,
    Q6K = 14,
    Iq4Nl = 20,
    Bf16 = 30,
}

impl Dtype {
    pub const ALL: [Dtype; 14] = [
        Dtype::F32,
        Dtype::F16,
        Dtype::Q4_0,
        Dtype::Q4_1,
        Dtype::Q5_0,
        Dtype::Q5_1,
        Dtype::Q8_0,
        Dtype::Q2K,
        Dtype::Q3K,
        Dtype::Q4K,
        Dtype::Q5K,
        Dtype::Q6K,
        Dtype::Iq4Nl,
        Dtype::Bf16,
    ];

    /// Elements and bytes of a block.
    pub fn block(self) -> (usize, usize) {
        match self {
            Dtype::F32 => (1, 4),
            Dtype::F16 | Dtype::Bf16 => (1, 2),
            Dtype::Q4_0 | Dtype::Iq4Nl => (32, 18),
            Dtype::Q4_1 => (32, 20),
            Dtype::Q5_0 => (32, 22),
            Dtype::Q5_1 => (32, 24),
            Dtype::Q8_0 => (32, 34),
            Dtype::Q2K => (256, 84),
            Dtype::Q3K => (256, 110),
            Dtype::Q4K => (256, 144),
            Dtype::Q5K => (256, 176),
            Dtype::Q6K => (256, 210),
        }
    }

    /// Where a block keeps its f16 numbers, and by what weights of -1 to 1 are to be multiplied to
    /// get them when the other bytes are random.
    fn halves(self) -> &'static [(usize, f32)] {
        match self {
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => &[],
            Dtype::Q4_0 => &[(0, 1.0 / 8.0)],
            Dtype::Q4_1 => &[(0, 1.0 / 7.5), (2, -1.0)],
            Dtype::Q5_0 => &[(0, 1.0 / 16.0)],
            Dtype::Q5_1 => &[(0, 1.0 / 15.5), (2, -1.0)],
            Dtype::Q8_0 => &[(0, 1.0 / 128.0)],
            Dtype::Iq4Nl => &[(0, 1.0 / 127.0)],
            Dtype::Q2K => &[(80, 1.0 / 11.0), (82, 1.5 / 11.0)],
            Dtype::Q3K => &[(108, 1.0 / 64.0)],
            Dtype::Q4K => &[(0, 1.0 / 240.0), (2, 7.5 / 240.0)],
            Dtype::Q5K => &[(0, 1.0 / 500.0), (2, 15.5 / 500.0)],
            Dtype::Q6K => &[(208, 1.0 / 2000.0)],
        }
    }
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

impl Shape {
    /// `TINY`, or the least that blocks of 256 allow.
    pub fn tiny(dtype: Dtype) -> Self {
        match dtype.block().0 {
            256 => Shape { layers: 1, hidden: 256, heads: 16, ffn: 256, ..TINY },
            _ => TINY,
        }
    }
}

impl Gguf {
    /// A Llama with random weights, matrices of `dtype`, and a vocabulary of single characters.
    pub fn tiny(shape: Shape, dtype: Dtype, seed: u64) -> Self {
        Self::mixed(shape, seed, |_| dtype)
    }

    /// The same with a type for each matrix, by its name.
    pub fn mixed(shape: Shape, seed: u64, dtype_of: impl Fn(&str) -> Dtype) -> Self {
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
        let embedding = "token_embd.weight";
        file.add(embedding, dtype_of(embedding), shape.hidden, shape.vocab, &mut random);
        file.add("output_norm.weight", Dtype::F32, shape.hidden, 0, &mut random);
        for layer in 0..shape.layers {
            let matrices = [
                ("attn_norm", shape.hidden, 0),
                ("attn_q", shape.hidden, q),
                ("attn_k", shape.hidden, kv),
                ("attn_v", shape.hidden, kv),
                ("attn_output", q, shape.hidden),
                ("ffn_norm", shape.hidden, 0),
                ("ffn_gate", shape.hidden, shape.ffn),
                ("ffn_up", shape.hidden, shape.ffn),
                ("ffn_down", shape.ffn, shape.hidden),
            ];
            for (name, cols, rows) in matrices {
                let name = format!("blk.{layer}.{name}.weight");
                let dtype = if rows == 0 { Dtype::F32 } else { dtype_of(&name) };
                file.add(&name, dtype, cols, rows, &mut random);
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
    let (block_len, block_bytes) = dtype.block();
    for _ in 0..rows.max(1) * cols / block_len {
        let spread = scale * (1.0 + 0.5 * random.number());
        match dtype {
            Dtype::F32 if rows == 0 => out.extend((1.0 + 0.3 * random.number()).to_le_bytes()),
            Dtype::F32 => out.extend((scale * random.number()).to_le_bytes()),
            Dtype::F16 => out.extend(f32_to_half(scale * random.number()).to_le_bytes()),
            Dtype::Bf16 => {
                out.extend(((scale * random.number()).to_bits() >> 16).to_le_bytes()[..2].iter());
            }
            _ => {
                let start = out.len();
                out.extend((0..block_bytes).map(|_| random.bits() as u8));
                for &(at, factor) in dtype.halves() {
                    let half = f32_to_half(spread * factor).to_le_bytes();
                    out[start + at..][..2].copy_from_slice(&half);
                }
            }
        }
    }
    out
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
