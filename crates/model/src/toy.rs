//! Small random models of every architecture, for tests, bug reports and demos.
//!
//! A toy has the hyper-parameters of [`FAMILIES`], and whatever tensors the architecture's own
//! graph then asks for. So a new architecture needs one entry there.

mod blocks;
mod vocabulary;

use std::borrow::Cow;
use std::cell::RefCell;
use std::path::Path;

use gguf::{Array, Metadata, TensorInfo, TensorType, Value};
use graph::{DType, Shape};
use text::sampler::Rng;

use crate::arch::ARCHITECTURES;
use crate::model::needs;
use crate::{Error, Result, TensorSource};

/// A random model.
#[derive(Clone, PartialEq, Debug)]
pub struct Toy {
    /// Its architecture, one of [`ARCHITECTURES`].
    pub arch: String,
    /// The format of its matrices. Vectors and routers are F32, as in the files of real models.
    pub format: TensorType,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Inner width of the feed-forward half of a layer, or of each expert.
    pub ffn: usize,
    /// Query heads; a head's width is `width` over it.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Experts of each layer; 0 for none.
    pub experts: usize,
    /// Experts that a row uses.
    pub experts_used: usize,
    /// Positions.
    pub context: usize,
    /// Seeds the weights.
    pub seed: u64,
}

/// Whether an architecture has experts.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Routed {
    Never,
    Perhaps,
    Always,
}

/// What is special about the toys of an architecture.
struct Family {
    arch: &'static str,
    routed: Routed,
    /// Hyper-parameters that only this one has.
    keys: fn(&Toy) -> Vec<(&'static str, Value)>,
    /// How the names of those tensors end that a model may have or not, and toys do.
    optional: &'static [&'static str],
}

/// All of them.
const FAMILIES: &[Family] = &[
    Family {
        arch: "gemma3",
        routed: Routed::Never,
        keys: |_| {
            vec![
                ("attention.sliding_window", Value::U32(40)),
                ("attention.sliding_window_pattern", Value::U32(2)),
            ]
        },
        optional: &[],
    },
    Family { arch: "llama", routed: Routed::Perhaps, keys: |_| Vec::new(), optional: &[] },
    Family {
        arch: "qwen2",
        routed: Routed::Never,
        keys: |_| Vec::new(),
        optional: &["attn_q.bias", "attn_k.bias", "attn_v.bias"],
    },
    Family { arch: "qwen3", routed: Routed::Never, keys: |_| Vec::new(), optional: &[] },
    Family { arch: "qwen35", routed: Routed::Never, keys: hybrid, optional: &[] },
    Family {
        arch: "qwen35moe",
        routed: Routed::Always,
        keys: |toy| {
            let shared = ("expert_shared_feed_forward_length", Value::U32(toy.ffn as u32));
            hybrid(toy).into_iter().chain([shared]).collect()
        },
        optional: &["output.weight"],
    },
    Family {
        arch: "qwen3moe",
        routed: Routed::Always,
        keys: |_| Vec::new(),
        optional: &["output.weight"],
    },
];

/// Delta nets in every layer but each second one, which has attention.
fn hybrid(toy: &Toy) -> Vec<(&'static str, Value)> {
    let head = toy.width / toy.heads;
    let pairs = (head / 4).max(1);
    let third = pairs / 3;
    let sections: Vec<i32> = [pairs - 2 * third, third, third, 0].map(|n| n as i32).into();
    let mut keys = vec![("rope.dimension_sections", Value::Array(Array::I32(sections)))];
    for (key, value) in [
        ("full_attention_interval", 2),
        ("rope.dimension_count", 2 * pairs),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", head),
        ("ssm.group_count", toy.kv_heads),
        ("ssm.time_step_rank", toy.heads),
        ("ssm.inner_size", toy.width),
    ] {
        keys.push((key, Value::U32(value as u32)));
    }
    keys
}

/// The largest toy, in bytes of its tensors: they are made in memory.
const MOST_BYTES: usize = 4 << 30;

/// A tensor and its bytes.
type Tensor = (TensorInfo, Cow<'static, [u8]>);

/// A tensor, and how it is stored.
struct Planned {
    info: TensorInfo,
    /// No matrix to multiply by.
    plain: bool,
}

/// Tensors that are not there yet: every one that is needed, and the optional ones.
struct Wish {
    optional: &'static [&'static str],
    asked: RefCell<Vec<(String, Shape)>>,
}

impl TensorSource for Wish {
    fn tensor(&self, name: &str) -> Option<(Shape, DType)> {
        let wanted = self.optional.iter().any(|end| name.ends_with(end));
        wanted.then(|| Shape::new(&[]).ok().map(|shape| (shape, DType::F32))).flatten()
    }

    fn needed(&self, name: &str, dims: &[usize]) -> Option<(Shape, DType)> {
        let shape = Shape::new(dims).ok()?;
        let mut asked = self.asked.borrow_mut();
        if !asked.iter().any(|(known, _)| known == name) {
            asked.push((name.to_string(), shape));
        }
        Some((shape, DType::F32))
    }
}

impl Toy {
    /// Two layers, 256 wide, so that the rows of matrices are whole blocks of any format.
    pub fn new(arch: &str, format: TensorType, seed: u64) -> Toy {
        let routed = family(arch).is_some_and(|f| f.routed == Routed::Always);
        Toy {
            arch: arch.to_string(),
            format,
            layers: 2,
            width: 256,
            ffn: if routed { 256 } else { 512 },
            heads: 4,
            kv_heads: 2,
            experts: if routed { 8 } else { 0 },
            experts_used: 2,
            context: 1024,
            seed,
        }
    }

    /// The model as the bytes of a GGUF file.
    ///
    /// # Errors
    /// By field, when the sizes do not fit each other, the architecture or the format.
    pub fn gguf(&self) -> Result<Vec<u8>> {
        let (metadata, tensors) = self.make()?;
        Ok(gguf::encode(&metadata, tensors)?)
    }

    /// Writes it to a file, atomically.
    ///
    /// # Errors
    /// As [`Toy::gguf`], and when the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let (metadata, tensors) = self.make()?;
        Ok(gguf::write(path, &metadata, tensors)?)
    }

    fn make(&self) -> Result<(Metadata, Vec<Tensor>)> {
        let family = family(&self.arch).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().map(|f| f.arch).collect();
            let known = known.join(", ");
            Error::new(format!("no toys of architecture `{}`; there are {known}", self.arch))
        })?;
        self.check(family)?;
        let metadata = self.metadata(family);
        let planned = self.plan(family, &metadata)?;
        let mut random = Rng::new(self.seed);
        let mut tensors = Vec::with_capacity(planned.len());
        for Planned { info, plain } in planned {
            let bytes = if plain {
                values(&info, &mut random)
            } else {
                let (cols, rows) = rows_of(&info);
                blocks::random(info.ty, rows, cols, &mut random)
            };
            tensors.push((info, bytes.into()));
        }
        Ok((metadata, tensors))
    }

    fn check(&self, family: &Family) -> Result<()> {
        let wrong = |field: &str, found: usize, wanted: &str| {
            Err(Error::new(format!("`{field}` is {found}; expected {wanted}")))
        };
        for (field, found, most) in [
            ("layers", self.layers, 1024),
            ("width", self.width, 1 << 16),
            ("ffn", self.ffn, 1 << 18),
            ("heads", self.heads, 1024),
            ("kv_heads", self.kv_heads, 1024),
            ("context", self.context, 1 << 24),
        ] {
            if found == 0 || found > most {
                return wrong(field, found, &format!("1 to {most}"));
            }
        }
        if !self.width.is_multiple_of(2 * self.heads) {
            return wrong("width", self.width, "an even number for each head");
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let wanted = format!("a divisor of the {} query heads", self.heads);
            return wrong("kv_heads", self.kv_heads, &wanted);
        }
        match (family.routed, self.experts) {
            (Routed::Never, 1..) => {
                let wanted = format!("0: `{}` has no experts", self.arch);
                return wrong("experts", self.experts, &wanted);
            }
            (Routed::Always, 0) => {
                let wanted = format!("at least 1: `{}` has experts", self.arch);
                return wrong("experts", 0, &wanted);
            }
            _ => {}
        }
        if self.experts > 1 << 16 {
            return wrong("experts", self.experts, "at most 65536");
        }
        if self.experts > 0 && !(1..=self.experts).contains(&self.experts_used) {
            let wanted = format!("1 to the {} experts there are", self.experts);
            return wrong("experts_used", self.experts_used, &wanted);
        }
        Ok(())
    }

    fn metadata(&self, family: &Family) -> Metadata {
        let head = self.width / self.heads;
        let mut metadata = Metadata::new();
        metadata.insert("general.architecture", self.arch.as_str());
        metadata.insert("general.type", "model");
        metadata.insert("general.name", format!("toy of seed {}", self.seed));
        let mut keys = vec![
            ("attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
            ("rope.freq_base", Value::F32(10_000.0)),
        ];
        let mut counts = vec![
            ("block_count", self.layers),
            ("context_length", self.context),
            ("embedding_length", self.width),
            ("feed_forward_length", self.ffn),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", head),
            ("attention.value_length", head),
        ];
        if self.experts > 0 {
            counts.push(("expert_count", self.experts));
            counts.push(("expert_used_count", self.experts_used));
            counts.push(("expert_feed_forward_length", self.ffn));
        }
        keys.extend(counts.into_iter().map(|(key, n)| (key, Value::U32(n as u32))));
        keys.extend((family.keys)(self));
        for (key, value) in keys {
            metadata.insert(format!("{}.{key}", self.arch), value);
        }
        vocabulary::add(&mut metadata);
        metadata
    }

    /// What the architecture's graph asks for.
    fn plan(&self, family: &Family, metadata: &Metadata) -> Result<Vec<Planned>> {
        let (_, read) = ARCHITECTURES
            .iter()
            .find(|(name, _)| *name == self.arch)
            .ok_or_else(|| Error::new(format!("no architecture `{}`", self.arch)))?;
        let arch = read(metadata, vocabulary::SIZE)?;
        let wish = Wish { optional: family.optional, asked: RefCell::default() };
        let tensors = needs(&wish, arch.as_ref())?;
        let mut planned = Vec::new();
        let mut total = 0usize;
        for (name, shape) in wish.asked.into_inner() {
            let plain = tensors.plain.contains(&name);
            // Where experts are chosen, rounding would choose others.
            let exact = plain || name.contains("ffn_gate_inp");
            let ty = if exact { TensorType::F32 } else { self.format };
            if !shape.cols().is_multiple_of(ty.block_len()) {
                return Err(Error::new(format!(
                    "the rows of `{name}` have {} elements, which are not whole blocks of {} of \
                     {ty}; choose `width` and `ffn` as multiples of it",
                    shape.cols(),
                    ty.block_len()
                )));
            }
            let info = TensorInfo::new(name, ty, shape.dims())?;
            total = total.saturating_add(info.byte_len());
            planned.push(Planned { info, plain });
        }
        if total > MOST_BYTES {
            return Err(Error::new(format!(
                "its tensors would take {total} bytes; a toy has at most {MOST_BYTES}"
            )));
        }
        Ok(planned)
    }
}

fn family(arch: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.arch == arch)
}

/// The length of the rows of a tensor, and how many there are.
fn rows_of(info: &TensorInfo) -> (usize, usize) {
    let cols = info.shape.last().copied().unwrap_or(1);
    (cols, info.shape.iter().rev().skip(1).product())
}

/// Values of a tensor that is no matrix to multiply by: what its name says it does tells about
/// what size they have in real models.
fn values(info: &TensorInfo, random: &mut Rng) -> Vec<u8> {
    let name = info.name.as_str();
    let mean = if name.ends_with("norm.weight") {
        1.0
    } else if name.ends_with("ssm_a") {
        // Minus a decay.
        -0.7
    } else if name.ends_with("ssm_dt.bias") {
        -1.0
    } else if name.ends_with("conv1d.weight") {
        0.2
    } else {
        0.0
    };
    let (cols, rows) = rows_of(info);
    let values = (0..cols * rows).map(|_| mean + 0.1 * blocks::normal(random));
    values.flat_map(f32::to_le_bytes).collect()
}
