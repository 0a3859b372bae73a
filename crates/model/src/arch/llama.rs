//! `llama`: Llama 1-3, Mistral, SmolLM, TinyLlama.
//!
//! Touvron et al. 2023 (arXiv 2302.13971); Llama 3's frequency factors are a tensor of the
//! file. GGUF stores q and k permuted for interleaved rotation.

use gguf::Metadata;
use graph::{GluKind, NodeId, RopeAngles, RopeStyle};

use super::{Architecture, AttentionShape, Geometry, Hyper, head};
use crate::{Net, Result};

struct Llama {
    shape: AttentionShape,
    eps: f32,
    scale: f32,
    angles: RopeAngles,
    style: RopeStyle,
}

/// Llama from `llama.*` keys.
pub(super) fn read(metadata: &Metadata, vocab: usize) -> Result<Box<dyn Architecture>> {
    with_style(&Hyper::new(metadata, "llama"), vocab, RopeStyle::Interleaved)
}

/// The same network under another prefix and rotation.
pub(super) fn with_style(
    hyper: &Hyper<'_>,
    vocab: usize,
    style: RopeStyle,
) -> Result<Box<dyn Architecture>> {
    hyper.refuse_nonzero("expert_count", "a mixture of experts")?;
    let shape = hyper.attention(vocab)?;
    let scale = 1.0 / (shape.geometry.key_width as f32).sqrt();
    Ok(Box::new(Llama {
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
        style,
        shape,
    }))
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
            let q = net.rope(q, self.style, angles, factors)?;
            let k = net.rope(k, self.style, angles, factors)?;
            let a = net.attention(q, k, v, self.scale, None)?;
            let a = net.linear(a, &format!("blk.{l}.attn_output"), g.width)?;
            x = net.add(x, a)?;

            let h = net.rms_norm(x, &format!("blk.{l}.ffn_norm"), self.eps)?;
            let gate = net.linear(h, &format!("blk.{l}.ffn_gate"), self.shape.ffn)?;
            let up = net.linear(h, &format!("blk.{l}.ffn_up"), self.shape.ffn)?;
            let h = net.glu(GluKind::Swiglu, gate, up)?;
            let h = net.linear(h, &format!("blk.{l}.ffn_down"), g.width)?;
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
