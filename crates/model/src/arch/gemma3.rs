//! `gemma3`: the text models of Gemma 3 (arXiv 2503.19786).
//!
//! Embeddings scaled by `sqrt(width)`, normalization before and after each half of a layer, q
//! and k normalized per head, five layers with a sliding window and their own rotation base
//! for each layer without. GGUF stores norm weights as `1 + w`.

use gguf::Metadata;
use graph::{GluKind, NodeId, RopeAngles, RopeStyle};

use super::{Architecture, AttentionShape, Geometry, Hyper, head};
use crate::{Net, Result};

struct Gemma3 {
    shape: AttentionShape,
    eps: f32,
    scale: f32,
    window: u32,
    /// Every how many layers one sees everything.
    pattern: usize,
    global: RopeAngles,
    local: RopeAngles,
    final_cap: Option<f32>,
}

/// Gemma 3 from `gemma3.*` keys.
pub(super) fn read(metadata: &Metadata, vocab: usize) -> Result<Box<dyn Architecture>> {
    let hyper = Hyper::new(metadata, "gemma3");
    let shape = hyper.attention(vocab)?;
    let g = &shape.geometry;
    // The 27B model (62 layers) scales queries by the width per head, the others by the head's.
    let scaled = if g.layers == 62 { g.width / shape.heads } else { g.key_width };
    let angles = |base: f32, freq_scale: f32| RopeAngles {
        dims: shape.rope_dims,
        base: base.into(),
        freq_scale: freq_scale.into(),
        factors: false,
        yarn: None,
        sections: None,
    };
    let global =
        angles(hyper.positive_or("rope.freq_base", 1_000_000.0)?, hyper.rope_freq_scale()?);
    let local = angles(hyper.positive_or("rope.freq_base_swa", 10_000.0)?, 1.0);
    let cap = hyper.real_or("final_logit_softcapping", 0.0)?;
    Ok(Box::new(Gemma3 {
        eps: hyper.rms_eps()?,
        scale: 1.0 / (scaled as f32).sqrt(),
        window: hyper.count("attention.sliding_window")? as u32,
        pattern: hyper.count_or("attention.sliding_window_pattern", 6)?,
        global,
        local,
        final_cap: (cap > 0.0).then_some(cap),
        shape,
    }))
}

impl Architecture for Gemma3 {
    fn geometry(&self) -> &Geometry {
        &self.shape.geometry
    }

    fn hidden(&self, net: &mut Net<'_>) -> Result<NodeId> {
        let (g, heads) = (&self.shape.geometry, self.shape.heads);
        let style = RopeStyle::Halves;
        let x = net.embed("token_embd", g.vocab, g.width)?;
        let mut x = net.scale(x, (g.width as f32).sqrt())?;
        for l in 0..g.layers {
            net.enter_layer(l);
            let sees_all = (l + 1).is_multiple_of(self.pattern);
            let (angles, window) =
                if sees_all { (self.global, None) } else { (self.local, Some(self.window)) };

            let h = net.rms_norm(x, &format!("blk.{l}.attn_norm"), self.eps)?;
            let q = net.linear(h, &format!("blk.{l}.attn_q"), heads * g.key_width)?;
            let k = net.linear(h, &format!("blk.{l}.attn_k"), g.kv_heads * g.key_width)?;
            let v = net.linear(h, &format!("blk.{l}.attn_v"), g.kv_heads * g.value_width)?;
            let q = net.heads(q, heads, g.key_width)?;
            let k = net.heads(k, g.kv_heads, g.key_width)?;
            let v = net.heads(v, g.kv_heads, g.value_width)?;
            let q = net.rms_norm(q, &format!("blk.{l}.attn_q_norm"), self.eps)?;
            let k = net.rms_norm(k, &format!("blk.{l}.attn_k_norm"), self.eps)?;
            let q = net.rope(q, style, angles, None)?;
            let k = net.rope(k, style, angles, None)?;
            let a = net.attention(q, k, v, self.scale, window)?;
            let a = net.linear(a, &format!("blk.{l}.attn_output"), g.width)?;
            let a = net.rms_norm(a, &format!("blk.{l}.post_attention_norm"), self.eps)?;
            x = net.add(x, a)?;

            let h = net.rms_norm(x, &format!("blk.{l}.ffn_norm"), self.eps)?;
            let h = net.feed_forward(h, l, GluKind::Geglu, self.shape.ffn)?;
            let h = net.rms_norm(h, &format!("blk.{l}.post_ffw_norm"), self.eps)?;
            x = net.add(x, h)?;
        }
        net.leave_layers();
        Ok(x)
    }

    fn logits(&self, net: &mut Net<'_>, hidden: NodeId) -> Result<NodeId> {
        let x = net.rms_norm(hidden, "output_norm", self.eps)?;
        let logits = head(net, x, self.shape.geometry.vocab)?;
        match self.final_cap {
            Some(cap) => net.softcap(logits, cap),
            None => Ok(logits),
        }
    }
}
