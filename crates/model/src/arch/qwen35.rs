//! `qwen35` and `qwen35moe`: the text models of Qwen 3.5 and 3.6. Most layers are gated delta nets (Yang et al.
//! 2024, arXiv 2412.06464), every fourth one is attention whose output is gated. With experts, a
//! row uses the greatest of many and one that all rows share.
//!
//! GGUF stores norm weights as `1 + w` (that of the delta net as it is), `ssm_a` as
//! `-exp(A_log)`, and the value heads of a delta net in the order in which head `h` reads key
//! head `h % Hk`.

use gguf::Metadata;
use graph::{GatedDeltaAttrs, GluKind, KeyHeads, NodeId, RopeAngles, RopeStyle, Shape, Unary};

use super::{Architecture, AttentionShape, Geometry, Hyper, head};
use crate::{Experts, Net, Result};

/// Added to the sum of squares of a key or query, as the model's own code has it.
const L2_EPS: f32 = 1e-6;

/// The most elements of a delta net's state, per sequence and layer.
const MOST_STATE: usize = 1 << 28;

struct Qwen35 {
    shape: AttentionShape,
    eps: f32,
    scale: f32,
    angles: RopeAngles,
    recurrent: Vec<bool>,
    delta: DeltaNet,
    sparse: Option<Sparse>,
}

/// The experts of every layer.
struct Sparse {
    experts: Experts,
    /// The width of the expert that all rows share.
    shared: usize,
}

/// The shape of a gated delta net.
struct DeltaNet {
    key_heads: usize,
    value_heads: usize,
    key_width: usize,
    value_width: usize,
    taps: usize,
}

impl DeltaNet {
    fn read(hyper: &Hyper<'_>) -> Result<DeltaNet> {
        let inner = hyper.count("ssm.inner_size")?;
        let value_heads = hyper.count("ssm.time_step_rank")?;
        let key_heads = hyper.count("ssm.group_count")?;
        let (key_width, taps) = (hyper.count("ssm.state_size")?, hyper.count("ssm.conv_kernel")?);
        if !inner.is_multiple_of(value_heads) {
            let wanted = format!("a divisor of the inner width {inner}");
            return Err(hyper.bad("ssm.time_step_rank", value_heads, &wanted));
        }
        if !value_heads.is_multiple_of(key_heads) {
            let wanted = format!("a divisor of the {value_heads} value heads");
            return Err(hyper.bad("ssm.group_count", key_heads, &wanted));
        }
        if !(2..=64).contains(&taps) {
            return Err(hyper.bad("ssm.conv_kernel", taps, "2 to 64 taps"));
        }
        if key_width.saturating_mul(inner) > MOST_STATE {
            let wanted = format!("at most 2^28 elements of state with the inner width {inner}");
            return Err(hyper.bad("ssm.state_size", key_width, &wanted));
        }
        Ok(DeltaNet { key_heads, value_heads, key_width, value_width: inner / value_heads, taps })
    }

    fn keys(&self) -> usize {
        self.key_heads * self.key_width
    }

    fn values(&self) -> usize {
        self.value_heads * self.value_width
    }

    /// Channels of the convolution: queries, keys, values.
    fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// What a layer keeps, in the order of the graph.
    fn states(&self) -> Result<[Shape; 2]> {
        let memory = [self.value_heads, self.key_width, self.value_width];
        Ok([Shape::new(&[self.taps - 1, self.channels()])?, Shape::new(&memory)?])
    }
}

/// Qwen 3.5 from `qwen35.*` keys.
pub(super) fn read(metadata: &Metadata, vocab: usize) -> Result<Box<dyn Architecture>> {
    let hyper = Hyper::new(metadata, "qwen35");
    hyper.refuse_nonzero("expert_count", "a mixture of experts")?;
    Ok(Box::new(Qwen35::read(&hyper, vocab, None)?))
}

/// Qwen 3.5 with experts from `qwen35moe.*` keys.
pub(super) fn read_sparse(metadata: &Metadata, vocab: usize) -> Result<Box<dyn Architecture>> {
    let hyper = Hyper::new(metadata, "qwen35moe");
    hyper.count("expert_count")?;
    let shared = hyper.count("expert_shared_feed_forward_length")?;
    let experts = hyper.experts(GluKind::Swiglu)?;
    let sparse = experts.map(|experts| Sparse { experts, shared });
    Ok(Box::new(Qwen35::read(&hyper, vocab, sparse)?))
}

impl Qwen35 {
    fn read(hyper: &Hyper<'_>, vocab: usize, sparse: Option<Sparse>) -> Result<Qwen35> {
        let mut shape = hyper.attention(vocab)?;
        let (key, value) = (shape.geometry.key_width, shape.geometry.value_width);
        if key != value {
            let wanted = format!("the width {key} of keys, of which each output has a gate");
            return Err(hyper.bad("attention.value_length", value, &wanted));
        }
        let delta = DeltaNet::read(hyper)?;
        let layers = shape.geometry.layers;
        let all = layers + shape.geometry.draft_layers;
        let recurrent = match hyper.flags("attention.recurrent_layers", all)? {
            Some(mut flags) => {
                flags.truncate(layers);
                flags
            }
            None => {
                let every = hyper.count_or("full_attention_interval", 4)?;
                (0..layers).map(|l| !(l + 1).is_multiple_of(every)).collect()
            }
        };
        let g = &mut shape.geometry;
        g.attention_layers.retain(|&l| recurrent.get(l) == Some(&false));
        let count = layers - g.attention_layers.len();
        g.states = delta.states()?.repeat(count);
        Ok(Qwen35 {
            eps: hyper.rms_eps()?,
            scale: 1.0 / (shape.geometry.key_width as f32).sqrt(),
            // Rows of text have the same position in every section of the multi-section rotation,
            // so that its pairs turn as without sections.
            angles: RopeAngles {
                freq_scale: hyper.rope_freq_scale()?.into(),
                ..RopeAngles::plain(
                    shape.rope_dims,
                    hyper.positive_or("rope.freq_base", 10_000_000.0)?,
                )
            },
            recurrent,
            delta,
            sparse,
            shape,
        })
    }

    /// Attention whose query projection also gives a gate for each output.
    fn attention(&self, net: &mut Net<'_>, l: usize, h: NodeId) -> Result<NodeId> {
        let (g, heads) = (&self.shape.geometry, self.shape.heads);
        let both = net.linear(h, &format!("blk.{l}.attn_q"), heads * 2 * g.key_width)?;
        let k = net.linear(h, &format!("blk.{l}.attn_k"), g.kv_heads * g.key_width)?;
        let v = net.linear(h, &format!("blk.{l}.attn_v"), g.kv_heads * g.value_width)?;
        let both = net.heads(both, heads, 2 * g.key_width)?;
        let q = net.columns(both, 0, g.key_width)?;
        let gate = net.columns(both, g.key_width, g.key_width)?;
        let k = net.heads(k, g.kv_heads, g.key_width)?;
        let v = net.heads(v, g.kv_heads, g.value_width)?;
        let q = net.rms_norm(q, &format!("blk.{l}.attn_q_norm"), self.eps)?;
        let k = net.rms_norm(k, &format!("blk.{l}.attn_k_norm"), self.eps)?;
        let q = net.rope(q, RopeStyle::Halves, self.angles, None)?;
        let k = net.rope(k, RopeStyle::Halves, self.angles, None)?;
        let a = net.attention(q, k, v, self.scale, None)?;
        let a = net.heads(a, heads, g.value_width)?;
        let gate = net.unary(Unary::Sigmoid, gate)?;
        let a = net.mul(a, gate)?;
        let a = net.flat(a)?;
        net.linear(a, &format!("blk.{l}.attn_output"), g.width)
    }

    fn delta_net(&self, net: &mut Net<'_>, l: usize, h: NodeId) -> Result<NodeId> {
        let d = &self.delta;
        let (keys, values, heads) = (d.keys(), d.values(), d.value_heads);
        let mixed = net.linear(h, &format!("blk.{l}.attn_qkv"), d.channels())?;
        let z = net.linear(h, &format!("blk.{l}.attn_gate"), values)?;
        let beta = net.linear(h, &format!("blk.{l}.ssm_beta"), heads)?;
        let alpha = net.linear(h, &format!("blk.{l}.ssm_alpha"), heads)?;

        let mixed = net.convolution(mixed, &format!("blk.{l}.ssm_conv1d"), d.taps)?;
        let mixed = net.unary(Unary::Silu, mixed)?;
        let q = net.columns(mixed, 0, keys)?;
        let k = net.columns(mixed, keys, keys)?;
        let v = net.columns(mixed, 2 * keys, values)?;
        let q = net.heads(q, d.key_heads, d.key_width)?;
        let k = net.heads(k, d.key_heads, d.key_width)?;
        let v = net.heads(v, heads, d.value_width)?;
        let q = net.l2_norm(q, L2_EPS)?;
        let k = net.l2_norm(k, L2_EPS)?;

        let beta = net.unary(Unary::Sigmoid, beta)?;
        let bias = net.values(&format!("blk.{l}.ssm_dt.bias"), &[heads])?;
        let step = net.add(alpha, bias)?;
        let step = net.unary(Unary::Softplus, step)?;
        let a = net.values(&format!("blk.{l}.ssm_a"), &[heads])?;
        let decay = net.mul(step, a)?;

        let scale = 1.0 / (d.key_width as f32).sqrt();
        let attrs = GatedDeltaAttrs { scale: scale.into(), key_heads: KeyHeads::Cycle };
        let y = net.gated_delta(attrs, [q, k, v, decay, beta])?;
        let y = net.rms_norm(y, &format!("blk.{l}.ssm_norm"), self.eps)?;
        let z = net.heads(z, heads, d.value_width)?;
        let y = net.glu(GluKind::Swiglu, z, y)?;
        let y = net.flat(y)?;
        net.linear(y, &format!("blk.{l}.ssm_out"), self.shape.geometry.width)
    }

    fn feed_forward(&self, net: &mut Net<'_>, l: usize, h: NodeId) -> Result<NodeId> {
        if let Some(Sparse { experts, shared }) = &self.sparse {
            let name = format!("blk.{l}.ffn");
            let routed = net.experts(h, &name, experts)?;
            let shared = net.shared_expert(h, &name, *shared, experts.activation)?;
            return net.add(routed, shared);
        }
        net.feed_forward(h, l, GluKind::Swiglu, self.shape.ffn)
    }
}

impl Architecture for Qwen35 {
    fn geometry(&self) -> &Geometry {
        &self.shape.geometry
    }

    fn hidden(&self, net: &mut Net<'_>) -> Result<NodeId> {
        let g = &self.shape.geometry;
        let mut x = net.embed("token_embd", g.vocab, g.width)?;
        for (l, &recurrent) in self.recurrent.iter().enumerate() {
            net.enter_layer(l);
            let h = net.rms_norm(x, &format!("blk.{l}.attn_norm"), self.eps)?;
            let mixed =
                if recurrent { self.delta_net(net, l, h)? } else { self.attention(net, l, h)? };
            x = net.add(x, mixed)?;
            let h = net.rms_norm(x, &format!("blk.{l}.post_attention_norm"), self.eps)?;
            let h = self.feed_forward(net, l, h)?;
            x = net.add(x, h)?;
        }
        net.leave_layers();
        Ok(x)
    }

    fn logits(&self, net: &mut Net<'_>, hidden: NodeId) -> Result<NodeId> {
        let x = net.rms_norm(hidden, "output_norm", self.eps)?;
        head(net, x, self.shape.geometry.vocab)
    }
}
