//! What PEFT calls the modules that GGUF tensors are made of: one table for all architectures.
//!
//! The names are those of the models' classes in transformers, and the order of rows and columns
//! is what llama.cpp's `conversion/` does to the weights, applied to B and A as its
//! `convert_lora_to_gguf.py` does.

use crate::adapter::Base;
use crate::{Error, Result};

/// How the outputs or inputs of a GGUF tensor are ordered, as seen from transformers.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Order {
    /// The same.
    Same,
    /// Within each head, the two halves that rotate together are interleaved.
    Interleaved,
    /// Heads of values: by key head there, all first ones of every key head first here.
    Values,
    /// As `Values`, of so many elements for each head as its width.
    ValueHeads,
    /// Queries and keys as they are, then values as in `ValueHeads`.
    ValuesOfQkv,
}

/// A kind of projection of a layer.
#[derive(Copy, Clone, Debug)]
pub(super) struct Module {
    /// The tensor's name after `blk.N.` and before `.weight`.
    pub(super) tensor: &'static str,
    /// The module's path within a layer; of a stack of experts `{}` is the expert's number.
    pub(super) path: &'static str,
    /// Other names it goes by.
    pub(super) also: &'static [&'static str],
    /// Of the outputs.
    pub(super) rows: Order,
    /// Of the inputs.
    pub(super) cols: Order,
}

const fn module(tensor: &'static str, path: &'static str) -> Module {
    Module { tensor, path, also: &[], rows: Order::Same, cols: Order::Same }
}

const fn ordered(tensor: &'static str, path: &'static str, rows: Order, cols: Order) -> Module {
    Module { tensor, path, also: &[], rows, cols }
}

/// Attention as it is.
const ATTENTION: &[Module] = &[
    module("attn_q", "self_attn.q_proj"),
    module("attn_k", "self_attn.k_proj"),
    module("attn_v", "self_attn.v_proj"),
    module("attn_output", "self_attn.o_proj"),
];

/// Attention whose queries and keys GGUF stores for interleaved rotation.
const INTERLEAVED: &[Module] = &[
    ordered("attn_q", "self_attn.q_proj", Order::Interleaved, Order::Same),
    ordered("attn_k", "self_attn.k_proj", Order::Interleaved, Order::Same),
    module("attn_v", "self_attn.v_proj"),
    module("attn_output", "self_attn.o_proj"),
];

const DENSE: &[Module] = &[
    module("ffn_gate", "mlp.gate_proj"),
    module("ffn_up", "mlp.up_proj"),
    module("ffn_down", "mlp.down_proj"),
];

const MIXTRAL: &[Module] = &[
    Module {
        tensor: "ffn_gate_inp",
        path: "block_sparse_moe.gate",
        also: &["mlp.gate"],
        rows: Order::Same,
        cols: Order::Same,
    },
    module("ffn_gate_exps", "block_sparse_moe.experts.{}.w1"),
    module("ffn_up_exps", "block_sparse_moe.experts.{}.w3"),
    module("ffn_down_exps", "block_sparse_moe.experts.{}.w2"),
];

const ROUTER: &[Module] = &[module("ffn_gate_inp", "mlp.gate")];

const EXPERTS: &[Module] = &[
    module("ffn_gate_exps", "mlp.experts.{}.gate_proj"),
    module("ffn_up_exps", "mlp.experts.{}.up_proj"),
    module("ffn_down_exps", "mlp.experts.{}.down_proj"),
];

const SHARED: &[Module] = &[
    module("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    module("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    module("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    module("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
];

const DELTA_NET: &[Module] = &[
    ordered("attn_qkv", "linear_attn.in_proj_qkv", Order::ValuesOfQkv, Order::Same),
    ordered("attn_gate", "linear_attn.in_proj_z", Order::ValueHeads, Order::Same),
    ordered("ssm_beta", "linear_attn.in_proj_b", Order::Values, Order::Same),
    ordered("ssm_alpha", "linear_attn.in_proj_a", Order::Values, Order::Same),
    ordered("ssm_out", "linear_attn.out_proj", Order::Same, Order::ValueHeads),
];

/// What PEFT knows of an architecture.
pub(super) struct Family {
    /// `general.architecture`.
    pub(super) arch: &'static str,
    /// The model's class in transformers, and others of the same layers.
    pub(super) classes: &'static [&'static str],
    modules: &'static [&'static [Module]],
    /// Whether an adapter is written on the fused parameters `mlp.experts.gate_up_proj` and
    /// `down_proj`, since there have never been modules for single experts. Both are read for
    /// every architecture with experts.
    pub(super) fused: bool,
}

const FAMILIES: &[Family] = &[
    Family {
        arch: "gemma3",
        classes: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel"],
        modules: &[ATTENTION, DENSE],
        fused: false,
    },
    Family {
        arch: "llama",
        classes: &["LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"],
        modules: &[INTERLEAVED, DENSE, MIXTRAL],
        fused: false,
    },
    Family {
        arch: "qwen2",
        classes: &["Qwen2ForCausalLM"],
        modules: &[ATTENTION, DENSE],
        fused: false,
    },
    Family {
        arch: "qwen3",
        classes: &["Qwen3ForCausalLM"],
        modules: &[ATTENTION, DENSE],
        fused: false,
    },
    Family {
        arch: "qwen35",
        classes: &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
        modules: &[ATTENTION, DELTA_NET, DENSE],
        fused: false,
    },
    Family {
        arch: "qwen35moe",
        classes: &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
        modules: &[ATTENTION, DELTA_NET, ROUTER, EXPERTS, SHARED],
        fused: true,
    },
    Family {
        arch: "qwen3moe",
        classes: &["Qwen3MoeForCausalLM"],
        modules: &[ATTENTION, ROUTER, EXPERTS],
        fused: false,
    },
];

/// The table's entry for an architecture.
///
/// # Errors
/// When there is none.
pub(super) fn family(arch: &str) -> Result<&'static Family> {
    FAMILIES.iter().find(|f| f.arch == arch).ok_or_else(|| {
        let known: Vec<&str> = FAMILIES.iter().map(|f| f.arch).collect();
        let known = known.join(", ");
        Error::new(format!(
            "PEFT's names for architecture `{arch}` are not known, only those of {known}; use the \
             GGUF form of the adapter"
        ))
    })
}

/// What a module's path stands for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// A projection of the model, or of one expert.
    One { target: String, expert: Option<usize>, rows: Order, cols: Order },
    /// The experts of a layer in one: their gates and ups, or their downs.
    Fused { layer: usize },
}

/// The parts of a path before its layer's number that transformers has for text models and for the
/// text half of others.
const PREFIXES: [&str; 3] = ["model.", "language_model.", "text_model."];

impl Family {
    fn all(&self) -> impl Iterator<Item = &'static Module> {
        self.modules.iter().copied().flatten()
    }

    /// The module of a tensor `blk.N.KIND.weight`, and N.
    pub(super) fn module(&self, target: &str) -> Option<(usize, &'static Module)> {
        let (layer, kind) = target.strip_prefix("blk.")?.split_once('.')?;
        let kind = kind.strip_suffix(".weight")?;
        Some((layer.parse().ok()?, self.all().find(|m| m.tensor == kind)?))
    }

    /// Whether a tensor `blk.N.KIND.weight` is what people call by the last part of a module's
    /// path, such as `q_proj` or, of each expert of a stack, `gate_proj`.
    pub(super) fn is_called(&self, target: &str, name: &str) -> bool {
        let last = |path: &str| path.rsplit('.').next() == Some(name);
        self.module(target).is_some_and(|(_, m)| last(m.path) || m.also.iter().any(|p| last(p)))
    }

    /// What a path such as `model.layers.3.mlp.up_proj` stands for, if the architecture has it.
    pub(super) fn place(&self, path: &str) -> Option<Place> {
        let mut rest = path;
        while let Some(shorter) = PREFIXES.iter().find_map(|p| rest.strip_prefix(p)) {
            rest = shorter;
        }
        let outside = match rest {
            "lm_head" => Some("output.weight"),
            "embed_tokens" => Some("token_embd.weight"),
            _ => None,
        };
        if let Some(target) = outside {
            let (rows, cols) = (Order::Same, Order::Same);
            return Some(Place::One { target: target.into(), expert: None, rows, cols });
        }
        let (number, rest) = rest.strip_prefix("layers.")?.split_once('.')?;
        let layer = index(number)?;
        let routed = self.all().any(|m| m.tensor.ends_with("_exps"));
        if routed && matches!(rest, "mlp.experts" | "mlp.experts.base_layer") {
            return Some(Place::Fused { layer });
        }
        self.all().find_map(|m| {
            let names = std::iter::once(m.path).chain(m.also.iter().copied());
            let expert = names.into_iter().find_map(|name| match name.split_once("{}") {
                None => (name == rest).then_some(None),
                Some((before, after)) => {
                    let number = rest.strip_prefix(before)?.strip_suffix(after)?;
                    Some(Some(index(number)?))
                }
            })?;
            let target = format!("blk.{layer}.{}.weight", m.tensor);
            Some(Place::One { target, expert, rows: m.rows, cols: m.cols })
        })
    }
}

/// A number as transformers writes it: without a sign or a leading zero.
fn index(text: &str) -> Option<usize> {
    let number: usize = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// For each row or column of a GGUF tensor the one it is in transformers; `None` where they are
/// the same.
///
/// # Errors
/// When the model's shape does not fit the order.
pub(super) fn order(order: Order, n: usize, base: &Base<'_>) -> Result<Option<Vec<usize>>> {
    let wrong = || Error::new(format!("{n} rows or columns do not fit the model's heads"));
    let values = |from: usize, width: usize| -> Result<Option<Vec<usize>>> {
        let count = |key: &str| -> Result<usize> {
            Ok(base.metadata.u32(&format!("{}.{key}", base.arch))? as usize)
        };
        let (keys, heads) = (count("ssm.group_count")?, count("ssm.time_step_rank")?);
        let whole = from.checked_add(heads.saturating_mul(width)) == Some(n);
        if keys == 0 || !whole || !heads.is_multiple_of(keys) {
            return Err(wrong());
        }
        let each = heads / keys;
        let mut order: Vec<usize> = (0..from).collect();
        // Here [each, keys, width], there [keys, each, width].
        for r in 0..each {
            for k in 0..keys {
                let start = from + (k * each + r) * width;
                order.extend(start..start + width);
            }
        }
        Ok(Some(order))
    };
    let width_of_value = || -> Result<usize> {
        let inner = base.metadata.u32(&format!("{}.ssm.inner_size", base.arch))? as usize;
        let heads = base.metadata.u32(&format!("{}.ssm.time_step_rank", base.arch))? as usize;
        inner.checked_div(heads).ok_or_else(wrong)
    };
    match order {
        Order::Same => Ok(None),
        Order::Interleaved => {
            let width = base.geometry.key_width;
            if width == 0 || !width.is_multiple_of(2) || !n.is_multiple_of(width) {
                return Err(wrong());
            }
            let half = width / 2;
            let there = |i: usize| i / width * width + i % 2 * half + i % width / 2;
            Ok(Some((0..n).map(there).collect()))
        }
        Order::Values => values(0, 1),
        Order::ValueHeads => values(0, width_of_value()?),
        Order::ValuesOfQkv => {
            let width = width_of_value()?;
            let heads = base.metadata.u32(&format!("{}.ssm.time_step_rank", base.arch))? as usize;
            let from = n.checked_sub(heads.saturating_mul(width)).ok_or_else(wrong)?;
            values(from, width)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f51_names_of_every_architecture() {
        let one = |arch: &str, path: &str| match family(arch).unwrap().place(path) {
            Some(Place::One { target, expert, .. }) => (target, expert),
            other => panic!("{arch} {path}: {other:?}"),
        };
        let cases: &[(&str, &str, &str, Option<usize>)] = &[
            ("llama", "model.layers.0.self_attn.q_proj", "blk.0.attn_q.weight", None),
            ("llama", "model.layers.11.mlp.down_proj", "blk.11.ffn_down.weight", None),
            ("llama", "model.text_model.layers.1.self_attn.v_proj", "blk.1.attn_v.weight", None),
            ("llama", "model.layers.2.block_sparse_moe.gate", "blk.2.ffn_gate_inp.weight", None),
            ("llama", "model.layers.2.mlp.gate", "blk.2.ffn_gate_inp.weight", None),
            (
                "llama",
                "model.layers.2.block_sparse_moe.experts.7.w3",
                "blk.2.ffn_up_exps.weight",
                Some(7),
            ),
            ("gemma3", "model.layers.5.self_attn.o_proj", "blk.5.attn_output.weight", None),
            (
                "gemma3",
                "model.language_model.layers.5.mlp.gate_proj",
                "blk.5.ffn_gate.weight",
                None,
            ),
            ("gemma3", "language_model.model.layers.5.mlp.up_proj", "blk.5.ffn_up.weight", None),
            ("gemma3", "language_model.lm_head", "output.weight", None),
            ("qwen2", "model.layers.0.self_attn.k_proj", "blk.0.attn_k.weight", None),
            ("qwen3", "lm_head", "output.weight", None),
            ("qwen2", "model.embed_tokens", "token_embd.weight", None),
            ("gemma3", "language_model.model.embed_tokens", "token_embd.weight", None),
            (
                "qwen3moe",
                "model.layers.1.mlp.experts.12.gate_proj",
                "blk.1.ffn_gate_exps.weight",
                Some(12),
            ),
            ("qwen35", "model.layers.1.linear_attn.in_proj_qkv", "blk.1.attn_qkv.weight", None),
            ("qwen35", "model.layers.1.linear_attn.out_proj", "blk.1.ssm_out.weight", None),
            (
                "qwen35moe",
                "model.layers.1.mlp.shared_expert.up_proj",
                "blk.1.ffn_up_shexp.weight",
                None,
            ),
            (
                "qwen35moe",
                "model.layers.1.mlp.shared_expert_gate",
                "blk.1.ffn_gate_inp_shexp.weight",
                None,
            ),
        ];
        for &(arch, path, target, expert) in cases {
            assert_eq!(one(arch, path), (target.to_string(), expert), "{arch} {path}");
        }
        let fused = family("qwen35moe").unwrap().place("model.layers.4.mlp.experts.base_layer");
        assert_eq!(fused, Some(Place::Fused { layer: 4 }));
        for (arch, path) in [
            ("gemma3", "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"),
            ("gemma3", "model.layers.0.mlp.experts"),
            ("qwen2", "model.layers.0.linear_attn.out_proj"),
            ("qwen2", "model.layers.00.self_attn.q_proj"),
            ("qwen2", "model.layers.-1.self_attn.q_proj"),
            ("qwen3moe", "model.layers.0.mlp.experts.x.up_proj"),
        ] {
            assert_eq!(family(arch).unwrap().place(path), None, "{arch} {path}");
        }
        assert!(family("mamba").is_err());
    }
}
