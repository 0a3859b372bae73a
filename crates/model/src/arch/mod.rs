//! Architectures: one file each. An architecture is a function from hyper-parameters to graph
//! nodes, and the same function serves and trains.

mod gemma3;
mod llama;
mod qwen2;
mod qwen3;
mod qwen35;
mod qwen3moe;

use gguf::Metadata;
use graph::{GluKind, NodeId, Shape};

use crate::{Error, Experts, Net, Result};

/// What the rest of the engine needs to know about a model's shape.
#[derive(Clone, PartialEq, Debug)]
pub struct Geometry {
    /// Layers.
    pub layers: usize,
    /// Layers after those that only draft further tokens (multi-token prediction). The file holds
    /// their tensors, which nothing reads: what the model itself says does not depend on them.
    pub draft_layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Rows of the embedding table.
    pub vocab: usize,
    /// Positions the model was trained for.
    pub context: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a key head.
    pub key_width: usize,
    /// Width of a value head.
    pub value_width: usize,
    /// Layers that keep keys and values, ascending.
    pub attention_layers: Vec<usize>,
    /// What a sequence keeps beside keys and values, f32, in the order in which the graph asks
    /// for it (see [`Net::states`]); empty for models without recurrent layers.
    pub states: Vec<Shape>,
}

/// A model family with the hyper-parameters of one file.
pub trait Architecture: Send + Sync {
    /// Its shape.
    fn geometry(&self) -> &Geometry;

    /// From the input tokens to the residual stream after the last layer: `[T, width]`.
    ///
    /// # Errors
    /// When a tensor is missing or of another shape than the hyper-parameters say.
    fn hidden(&self, net: &mut Net<'_>) -> Result<NodeId>;

    /// From rows of the residual stream to logits: `[L, vocab]`.
    ///
    /// # Errors
    /// As [`Architecture::hidden`].
    fn logits(&self, net: &mut Net<'_>, hidden: NodeId) -> Result<NodeId>;
}

type Read = fn(&Metadata, vocab: usize) -> Result<Box<dyn Architecture>>;

/// Every architecture, under its name in `general.architecture`.
pub const ARCHITECTURES: &[(&str, Read)] = &[
    ("gemma3", gemma3::read),
    ("llama", llama::read),
    ("qwen2", qwen2::read),
    ("qwen3", qwen3::read),
    ("qwen35", qwen35::read),
    ("qwen35moe", qwen35::read_sparse),
    ("qwen3moe", qwen3moe::read),
];

/// The architecture of a file.
///
/// # Errors
/// When the architecture is not known, or a key is missing or out of range.
pub fn read(file: &gguf::Gguf) -> Result<(String, Box<dyn Architecture>)> {
    let metadata = file.metadata();
    let name = metadata.str("general.architecture")?;
    let Some((_, read)) = ARCHITECTURES.iter().find(|(known, _)| *known == name) else {
        let known: Vec<&str> = ARCHITECTURES.iter().map(|(n, _)| *n).collect();
        return Err(Error::new(format!(
            "{}: architecture `{name}` is not supported; supported: {}",
            metadata.file(),
            known.join(", ")
        )));
    };
    let table = file.require("token_embd.weight")?;
    let vocab = table.info.shape.first().copied().unwrap_or(0);
    Ok((name.to_string(), read(metadata, vocab)?))
}

/// Typed reading of `ARCH.key` hyper-parameters, bounded.
pub(crate) struct Hyper<'a> {
    metadata: &'a Metadata,
    arch: &'a str,
}

/// Far above any model there is; keeps products of hyper-parameters from overflowing.
const MOST: usize = 1 << 24;

/// As far above any model's number of layers; each is built.
const MOST_LAYERS: usize = 1024;

impl<'a> Hyper<'a> {
    pub(crate) fn new(metadata: &'a Metadata, arch: &'a str) -> Hyper<'a> {
        Hyper { metadata, arch }
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    fn bad(&self, key: &str, found: impl std::fmt::Display, wanted: &str) -> Error {
        let file = self.metadata.file();
        Error::new(format!("{file}: key `{}` is {found}, expected {wanted}", self.key(key)))
    }

    /// A count between 1 and 2^24.
    pub(crate) fn count(&self, key: &str) -> Result<usize> {
        let value = self.metadata.u32(&self.key(key))? as usize;
        if value == 0 || value > MOST {
            return Err(self.bad(key, value, "a count from 1 to 2^24"));
        }
        Ok(value)
    }

    /// As `count`, or a default where the key is absent.
    pub(crate) fn count_or(&self, key: &str, default: usize) -> Result<usize> {
        match self.metadata.get(&self.key(key)) {
            Some(_) => self.count(key),
            None => Ok(default),
        }
    }

    /// A finite number, or a default where the key is absent.
    pub(crate) fn real_or(&self, key: &str, default: f32) -> Result<f32> {
        match self.metadata.opt_f32(&self.key(key))? {
            Some(x) if !x.is_finite() => Err(self.bad(key, x, "a finite number")),
            Some(x) => Ok(x),
            None => Ok(default),
        }
    }

    /// A positive number, or a default where the key is absent.
    pub(crate) fn positive_or(&self, key: &str, default: f32) -> Result<f32> {
        match self.real_or(key, default)? {
            x if x > 0.0 => Ok(x),
            x => Err(self.bad(key, x, "a positive number")),
        }
    }

    /// The epsilon of RMS normalization.
    pub(crate) fn rms_eps(&self) -> Result<f32> {
        let key = "attention.layer_norm_rms_epsilon";
        self.metadata.f32(&self.key(key))?;
        self.positive_or(key, 0.0)
    }

    /// The linear position scale `1/factor` of `rope.scaling`.
    ///
    /// # Errors
    /// When the scaling is of a type other than none or linear.
    pub(crate) fn rope_freq_scale(&self) -> Result<f32> {
        match self.metadata.opt_str(&self.key("rope.scaling.type"))? {
            None | Some("none") => Ok(1.0),
            Some("linear") => Ok(1.0 / self.positive_or("rope.scaling.factor", 1.0)?),
            Some(other) => {
                Err(self.bad("rope.scaling.type", format!("`{other}`"), "`none` or `linear`"))
            }
        }
    }

    /// Refuses a file that has a feature this architecture does not compute.
    pub(crate) fn refuse_nonzero(&self, key: &str, what: &str) -> Result<()> {
        match self.metadata.get(&self.key(key)).and_then(gguf::Value::as_integer) {
            None | Some(0) => Ok(()),
            Some(n) => Err(self.bad(key, n, &format!("0: {what} is not supported"))),
        }
    }

    /// A list of one flag per layer (of `layers`, all of the file), or `None` where the key is
    /// absent.
    pub(crate) fn flags(&self, key: &str, layers: usize) -> Result<Option<Vec<bool>>> {
        match self.metadata.get(&self.key(key)) {
            None => Ok(None),
            Some(gguf::Value::Array(gguf::Array::Bool(flags))) if flags.len() == layers => {
                Ok(Some(flags.clone()))
            }
            Some(other) => Err(self.bad(key, other, &format!("an array of {layers} bool"))),
        }
    }

    /// The routed experts of each layer; `None` for a dense model.
    pub(crate) fn experts(&self, activation: GluKind) -> Result<Option<Experts>> {
        if self.metadata.opt_u32(&self.key("expert_count"))?.unwrap_or(0) == 0 {
            return Ok(None);
        }
        let (count, used) = (self.count("expert_count")?, self.count("expert_used_count")?);
        if used > count {
            let wanted = format!("at most the {count} experts there are");
            return Err(self.bad("expert_used_count", used, &wanted));
        }
        let inner = "expert_feed_forward_length";
        let width = match self.metadata.get(&self.key(inner)) {
            Some(_) => self.count(inner)?,
            None => self.count("feed_forward_length")?,
        };
        // As llama.cpp reads it: 0 is no scale.
        let scale = match self.real_or("expert_weights_scale", 0.0)? {
            0.0 => 1.0,
            scale => scale,
        };
        Ok(Some(Experts { count, used, width, scale, activation }))
    }

    /// The fields every attention model has, its head counts checked against each other.
    pub(crate) fn attention(&self, vocab: usize) -> Result<AttentionShape> {
        let width = self.count("embedding_length")?;
        let heads = self.count("attention.head_count")?;
        let kv_heads = self.count_or("attention.head_count_kv", heads)?;
        if !heads.is_multiple_of(kv_heads) {
            let wanted = format!("a divisor of the {heads} query heads");
            return Err(self.bad("attention.head_count_kv", kv_heads, &wanted));
        }
        let key_width = self.count_or("attention.key_length", width / heads)?;
        let value_width = self.count_or("attention.value_length", width / heads)?;
        let rope_dims = self.count_or("rope.dimension_count", key_width)?;
        if rope_dims > key_width || !rope_dims.is_multiple_of(2) {
            let wanted = format!("an even number up to the head width {key_width}");
            return Err(self.bad("rope.dimension_count", rope_dims, &wanted));
        }
        let all = self.count("block_count")?;
        if all > MOST_LAYERS {
            return Err(self.bad("block_count", all, "at most 1024 layers"));
        }
        let draft = "nextn_predict_layers";
        let draft_layers = self.metadata.opt_u32(&self.key(draft))?.unwrap_or(0) as usize;
        let Some(layers) = all.checked_sub(draft_layers).filter(|&layers| layers > 0) else {
            return Err(self.bad(draft, draft_layers, &format!("fewer than the {all} layers")));
        };
        let geometry = Geometry {
            layers,
            draft_layers,
            width,
            vocab,
            context: self.count("context_length")?,
            kv_heads,
            key_width,
            value_width,
            attention_layers: (0..layers).collect(),
            states: Vec::new(),
        };
        // A model of experts alone may say nothing of dense layers.
        let ffn = match self.metadata.opt_u32(&self.key("expert_count"))? {
            None | Some(0) => self.count("feed_forward_length")?,
            Some(_) => self.count_or("feed_forward_length", 1)?,
        };
        Ok(AttentionShape { geometry, heads, ffn, rope_dims })
    }
}

/// The common hyper-parameters of attention models.
pub(crate) struct AttentionShape {
    pub(crate) geometry: Geometry,
    pub(crate) heads: usize,
    pub(crate) ffn: usize,
    pub(crate) rope_dims: usize,
}

/// Logits from normed rows: the model's `output` matrix, or the embedding it is tied to.
pub(crate) fn head(net: &mut Net<'_>, x: NodeId, vocab: usize) -> Result<NodeId> {
    let name = if net.has("output.weight") { "output" } else { "token_embd" };
    net.linear(x, name, vocab)
}
