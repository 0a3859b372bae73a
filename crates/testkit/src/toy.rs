//! Small random models of any architecture and block format.

use std::borrow::Cow;

use gguf::{Metadata, TensorInfo, TensorType, Value};

use crate::{Random, fixture};

/// A random model: 2 layers, width 256 (so that every block format fits its rows).
#[derive(Clone, Debug)]
pub struct Toy {
    /// `llama`, `qwen2`, `gemma3`, `qwen35` (a delta net, then attention) or `qwen35moe` (the same
    /// with experts).
    pub arch: &'static str,
    /// Format of every matrix.
    pub ty: TensorType,
    /// Query heads; the head's width is 256 over it.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Seeds the weights.
    pub seed: u64,
}

const WIDTH: usize = 256;
const FFN: usize = 512;
const LAYERS: usize = 2;
/// Of delta nets: taps of the convolution, and the width of keys.
const TAPS: usize = 4;
const STATE: usize = 32;
/// Of mixtures: experts, how many a row uses, and the width of each.
const EXPERTS: usize = 8;
const USED: usize = 3;
const EXPERT: usize = 256;

impl Toy {
    /// A llama of 4 query and 2 key heads.
    pub fn new(arch: &'static str, ty: TensorType, seed: u64) -> Toy {
        Toy { arch, ty, heads: 4, kv_heads: 2, seed }
    }

    /// The model as the bytes of a GGUF file. Its tokenizer is the llama fixture's.
    ///
    /// # Errors
    /// When the fixture cannot be read.
    pub fn gguf(&self) -> Result<Vec<u8>, gguf::Error> {
        let fixture = gguf::Gguf::open(fixture("llama", "model.gguf"))?;
        let mut metadata = Metadata::new();
        for (key, value) in fixture.metadata().iter() {
            if key.starts_with("tokenizer.") {
                metadata.insert(key, value.clone());
            }
        }
        let vocab = fixture.metadata().strings("tokenizer.ggml.tokens")?.len();
        let (arch, head) = (self.arch, WIDTH / self.heads);
        metadata.insert("general.architecture", arch);
        for (key, value) in [
            ("block_count", LAYERS),
            ("context_length", 1024),
            ("embedding_length", WIDTH),
            ("feed_forward_length", FFN),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", head),
            ("attention.value_length", head),
            ("attention.sliding_window", 40),
            ("attention.sliding_window_pattern", 2),
            ("full_attention_interval", 2),
            ("ssm.conv_kernel", TAPS),
            ("ssm.state_size", STATE),
            ("ssm.group_count", self.kv_heads),
            ("ssm.time_step_rank", self.heads),
            ("ssm.inner_size", WIDTH),
            ("expert_count", if arch == "qwen35moe" { EXPERTS } else { 0 }),
            ("expert_used_count", USED),
            ("expert_feed_forward_length", EXPERT),
            ("expert_shared_feed_forward_length", EXPERT),
        ] {
            metadata.insert(format!("{arch}.{key}"), Value::U32(value as u32));
        }
        metadata.insert(format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5f32);
        metadata.insert(format!("{arch}.rope.freq_base"), 10_000f32);

        let mut random = Random::new(self.seed);
        let mut tensors: Vec<(TensorInfo, Cow<'static, [u8]>)> = Vec::new();
        let mut matrix = |name: String, shape: &[usize], random: &mut Random| {
            let (cols, rows) = (shape[shape.len() - 1], shape[..shape.len() - 1].iter().product());
            let bytes = random_blocks(self.ty, rows, cols, random);
            TensorInfo::new(name, self.ty, shape).map(|info| tensors.push((info, bytes.into())))
        };
        let kv = self.kv_heads * head;
        let channels = 2 * self.kv_heads * STATE + WIDTH;
        matrix("token_embd.weight".into(), &[vocab, WIDTH], &mut random)?;
        let hybrid = arch.starts_with("qwen35");
        for l in 0..LAYERS {
            let mixer = match l {
                0 if hybrid => vec![
                    ("attn_qkv", channels, WIDTH),
                    ("attn_gate", WIDTH, WIDTH),
                    ("ssm_beta", self.heads, WIDTH),
                    ("ssm_alpha", self.heads, WIDTH),
                    ("ssm_out", WIDTH, WIDTH),
                ],
                _ => vec![
                    ("attn_q", if hybrid { 2 * WIDTH } else { WIDTH }, WIDTH),
                    ("attn_k", kv, WIDTH),
                    ("attn_v", kv, WIDTH),
                    ("attn_output", WIDTH, WIDTH),
                ],
            };
            let ffn = match arch {
                "qwen35moe" => vec![
                    ("ffn_gate_inp", EXPERTS, WIDTH),
                    ("ffn_gate_shexp", EXPERT, WIDTH),
                    ("ffn_up_shexp", EXPERT, WIDTH),
                    ("ffn_down_shexp", WIDTH, EXPERT),
                    ("ffn_gate_inp_shexp", 1, WIDTH),
                ],
                _ => {
                    vec![("ffn_gate", FFN, WIDTH), ("ffn_up", FFN, WIDTH), ("ffn_down", WIDTH, FFN)]
                }
            };
            if arch == "qwen35moe" {
                for (name, out, width) in [
                    ("ffn_gate_exps", EXPERT, WIDTH),
                    ("ffn_up_exps", EXPERT, WIDTH),
                    ("ffn_down_exps", WIDTH, EXPERT),
                ] {
                    let name = format!("blk.{l}.{name}.weight");
                    matrix(name, &[EXPERTS, out, width], &mut random)?;
                }
            }
            for (name, out, width) in mixer.into_iter().chain(ffn) {
                matrix(format!("blk.{l}.{name}.weight"), &[out, width], &mut random)?;
            }
        }
        let mut floats = |name: String, shape: &[usize], random: &mut Random, mean: f32| {
            let values = (0..shape.iter().product()).map(|_| mean + 0.1 * random.normal());
            let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
            TensorInfo::new(name, TensorType::F32, shape)
                .map(|info| tensors.push((info, bytes.into())))
        };
        if hybrid {
            floats("blk.0.ssm_conv1d.weight".into(), &[channels, TAPS], &mut random, 0.2)?;
        }
        let mut vector = |name: String, width: usize, random: &mut Random, mean: f32| {
            floats(name, &[width], random, mean)
        };
        vector("output_norm.weight".into(), WIDTH, &mut random, 1.0)?;
        for l in 0..LAYERS {
            vector(format!("blk.{l}.attn_norm.weight"), WIDTH, &mut random, 1.0)?;
            if hybrid {
                vector(format!("blk.{l}.post_attention_norm.weight"), WIDTH, &mut random, 1.0)?;
            } else {
                vector(format!("blk.{l}.ffn_norm.weight"), WIDTH, &mut random, 1.0)?;
            }
            if hybrid && l == 0 {
                vector("blk.0.ssm_a".into(), self.heads, &mut random, -0.3)?;
                vector("blk.0.ssm_dt.bias".into(), self.heads, &mut random, -1.0)?;
                vector("blk.0.ssm_norm.weight".into(), head, &mut random, 1.0)?;
            }
            if hybrid && l > 0 {
                vector(format!("blk.{l}.attn_q_norm.weight"), head, &mut random, 1.0)?;
                vector(format!("blk.{l}.attn_k_norm.weight"), head, &mut random, 1.0)?;
            }
            if arch == "gemma3" {
                vector(format!("blk.{l}.post_attention_norm.weight"), WIDTH, &mut random, 1.0)?;
                vector(format!("blk.{l}.post_ffw_norm.weight"), WIDTH, &mut random, 1.0)?;
                vector(format!("blk.{l}.attn_q_norm.weight"), head, &mut random, 1.0)?;
                vector(format!("blk.{l}.attn_k_norm.weight"), head, &mut random, 1.0)?;
            }
            if arch == "qwen2" {
                vector(format!("blk.{l}.attn_q.bias"), WIDTH, &mut random, 0.0)?;
                vector(format!("blk.{l}.attn_k.bias"), kv, &mut random, 0.0)?;
                vector(format!("blk.{l}.attn_v.bias"), kv, &mut random, 0.0)?;
            }
        }
        gguf::encode(&metadata, tensors)
    }
}

/// Valid random blocks of `rows x cols` elements with values of about 0.05.
pub fn random_blocks(ty: TensorType, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let size = 0.05f32;
    if !ty.is_quantized() {
        let values = (0..rows * cols).map(|_| size * random.normal());
        return match ty {
            TensorType::F16 => values.flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect(),
            TensorType::BF16 => {
                values.flat_map(|v| half::bf16::from_f32(v).to_le_bytes()).collect()
            }
            _ => values.flat_map(f32::to_le_bytes).collect(),
        };
    }
    let bytes = rows * ty.row_bytes(cols).unwrap_or(0);
    let mut out: Vec<u8> =
        (0..bytes.div_ceil(8)).flat_map(|_| random.bits().to_le_bytes()).collect();
    out.truncate(bytes);
    // Where the f16 scales of a block are, and their size for values of about 0.05.
    let (d, d_size, min, min_size) = match ty {
        TensorType::Q4_0 => (0, size / 4.6, None, 0.0),
        TensorType::Q4_1 => (0, size / 4.6, Some(2), -size * 1.63),
        TensorType::Q5_0 => (0, size / 9.2, None, 0.0),
        TensorType::Q5_1 => (0, size / 9.2, Some(2), -size * 1.68),
        TensorType::Q8_0 => (0, size / 74.0, None, 0.0),
        TensorType::Q2K => (80, size / 9.0, Some(82), size / 9.0),
        TensorType::Q3K => (108, size / 40.0, None, 0.0),
        TensorType::Q4K => (0, size / 200.0, Some(2), size / 30.0),
        TensorType::Q5K => (0, size / 400.0, Some(2), size / 30.0),
        TensorType::Q6K => (208, size / 1300.0, None, 0.0),
        TensorType::IQ4NL => (0, size / 70.0, None, 0.0),
        TensorType::IQ4XS => (0, size / 1200.0, None, 0.0),
        _ => (0, 0.0, None, 0.0),
    };
    for block in out.chunks_exact_mut(ty.block_bytes()) {
        if ty == TensorType::MXFP4 {
            // An exponent byte: 2^(e - 128) times codes up to 12.
            block[0] = 120 + (block[0] & 3);
            continue;
        }
        let mut put = |at: usize, size: f32, jitter: f32| {
            let value = half::f16::from_f32(size * (1.0 + 0.2 * jitter));
            block[at..at + 2].copy_from_slice(&value.to_le_bytes());
        };
        put(d, d_size, random.normal());
        if let Some(min) = min {
            put(min, min_size, random.normal());
        }
    }
    out
}
