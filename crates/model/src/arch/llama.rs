//! `llama`: Llama 1-3, Mistral, Mixtral, SmolLM, TinyLlama.
//!
//! Touvron et al. 2023 (arXiv 2302.13971); Llama 3's frequency factors are a tensor of the
//! file. GGUF stores q and k permuted for interleaved rotation. With experts it is Mixtral (Jiang
//! et al. 2024, arXiv 2401.04088).

use gguf::Metadata;
use graph::{GluKind, NodeId, RopeAngles, RopeStyle};

use super::{Architecture, AttentionShape, Geometry, Hyper, head};
use crate::{Experts, Net, Result};

/// A decoder of attention and gated units, each on a normalized residual stream.
pub(super) struct Llama {
    shape: AttentionShape,
    experts: Option<Experts>,
    eps: f32,
    scale: f32,
    angles: RopeAngles,
    variant: Variant,
}

/// What differs between the families that are this network.
#[derive(Copy, Clone)]
pub(super) struct Variant {
    /// Which elements of a head rotate together.
    pub(super) style: RopeStyle,
    /// Whether each head of q and k is normalized.
    pub(super) norm_heads: bool,
}

/// Llama from `llama.*` keys.
pub(super) fn read(metadata: &Metadata, vocab: usize) -> Result<Box<dyn Architecture>> {
    let hyper = Hyper::new(metadata, "llama");
    let variant = Variant { style: RopeStyle::Interleaved, norm_heads: false };
    let experts = hyper.experts(GluKind::Swiglu)?;
    Ok(Box::new(Llama::new(&hyper, vocab, variant, experts)?))
}

impl Llama {
    /// Without experts, and a file that has some is refused.
    pub(super) fn dense(hyper: &Hyper<'_>, vocab: usize, variant: Variant) -> Result<Llama> {
        hyper.refuse_nonzero("expert_count", "a mixture of experts")?;
        Llama::new(hyper, vocab, variant, None)
    }

    /// With experts, and a file that has none is refused.
    pub(super) fn sparse(hyper: &Hyper<'_>, vocab: usize, variant: Variant) -> Result<Llama> {
        hyper.count("expert_count")?;
        let experts = hyper.experts(GluKind::Swiglu)?;
        Llama::new(hyper, vocab, variant, experts)
    }

    fn new(
        hyper: &Hyper<'_>,
        vocab: usize,
        variant: Variant,
        experts: Option<Experts>,
    ) -> Result<Llama> {
        let shape = hyper.attention(vocab)?;
        let scale = 1.0 / (shape.geometry.key_width as f32).sqrt();
        Ok(Llama {
            experts,
            eps: hyper.rms_eps()?,
            scale: hyper.positive_or("attention.scale", scale)?,
            angles: RopeAngles {
                dims: shape.rope_dims,
                base: hyper.positive_or("rope.freq_base", 10_000.0)?.into(),
                freq_scale: hyper.rope_freq_scale()?.into(),
                factors: false,
                yarn: None,
                sections: None,
            },
            variant,
            shape,
        })
    }

    /// The second half of a layer, on normalized rows.
    fn feed_forward(&self, net: &mut Net<'_>, layer: usize, h: NodeId) -> Result<NodeId> {
        if let Some(experts) = &self.experts {
            return net.experts(h, &format!("blk.{layer}.ffn"), experts);
        }
        net.feed_forward(h, layer, GluKind::Swiglu, self.shape.ffn)
    }
}

impl Architecture for Llama {
    fn geometry(&self) -> &Geometry {
        &self.shape.geometry
    }

    fn hidden(&self, net: &mut Net<'_>) -> Result<NodeId> {
        let (g, heads) = (&self.shape.geometry, self.shape.heads);
        let factors = net.has("rope_freqs.weight").then_some("rope_freqs.weight");
        let angles = RopeAngles { factors: factors.is_some(), ..self.angles };
        let mut x = net.embed("token_embd", g.vocab, g.width)?;
        for l in 0..g.layers {
            net.enter_layer(l);
            let h = net.rms_norm(x, &format!("blk.{l}.attn_norm"), self.eps)?;
            let q = net.linear(h, &format!("blk.{l}.attn_q"), heads * g.key_width)?;
            let k = net.linear(h, &format!("blk.{l}.attn_k"), g.kv_heads * g.key_width)?;
            let v = net.linear(h, &format!("blk.{l}.attn_v"), g.kv_heads * g.value_width)?;
            let q = net.heads(q, heads, g.key_width)?;
            let k = net.heads(k, g.kv_heads, g.key_width)?;
            let v = net.heads(v, g.kv_heads, g.value_width)?;
            let (q, k) = match self.variant.norm_heads {
                true => (
                    net.rms_norm(q, &format!("blk.{l}.attn_q_norm"), self.eps)?,
                    net.rms_norm(k, &format!("blk.{l}.attn_k_norm"), self.eps)?,
                ),
                false => (q, k),
            };
            let q = net.rope(q, self.variant.style, angles, factors)?;
            let k = net.rope(k, self.variant.style, angles, factors)?;
            let a = net.attention(q, k, v, self.scale, None)?;
            let a = net.linear(a, &format!("blk.{l}.attn_output"), g.width)?;
            x = net.add(x, a)?;

            let h = net.rms_norm(x, &format!("blk.{l}.ffn_norm"), self.eps)?;
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
