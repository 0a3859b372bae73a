//! One entry per family of ops: how often it is made, and how.

use gguf::TensorType;
use graph::{
    AttentionAttrs, AttentionOperand, Binary, CrossEntropyAttrs, DType, Dropout, GatedDeltaAttrs,
    GluKind, GluOperand, KeyHeads, LoraOperand, NodeId, NormKind, NormOperand, Op, Order, Real,
    RopeAngles, RopeStyle, Sections, Shape, SoftmaxAttrs, SsmConvOperand, SsmConvStateOperand,
    Unary, Yarn,
};

use super::maker::Maker;
use super::table::Family;

const Q8_0: DType = DType::Block(TensorType::Q8_0);

/// How often a family is made, relative to the others. Gradients are made seldom: they block.
pub(super) fn weight(family: Family) -> usize {
    match family {
        Family::Binary | Family::Unary => 30,
        Family::Slice | Family::Permute | Family::Reshape => 10,
        Family::Leaf => 3,
        Family::Affine | Family::Clamp | Family::Glu | Family::Sum | Family::Broadcast => 10,
        Family::Pad | Family::Concat => 8,
        Family::Fill | Family::Copy | Family::Round | Family::QuantizeRows => 3,
        // One family of many ops.
        Family::GluBack => 4,
        Family::Cast => 5,
        Family::Gather | Family::ScatterAdd => 8,
        Family::RmsNorm | Family::Rope | Family::Lora | Family::CrossEntropy => 8,
        Family::MatMul => 16,
        Family::MatMulExperts | Family::SsmConv | Family::SsmScan | Family::GatedDeltaRule => 6,
        Family::SsmConvState | Family::LoraExperts | Family::Dropout => 4,
        Family::Attention => 6,
        Family::RopeTable => 2,
        Family::Softmax | Family::Norm | Family::TopK => 8,
        Family::CumSum | Family::LogSoftmax => 5,
        Family::ClampBack
        | Family::SoftmaxBack
        | Family::SoftmaxSinkBack
        | Family::NormBack
        | Family::RmsNormBack
        | Family::LoraBack
        | Family::LoraExpertsBack
        | Family::AttentionQueryBack
        | Family::AttentionBack
        | Family::ExpertOuter
        | Family::SsmConvBack
        | Family::SsmConvStateBack
        | Family::SsmScanBack
        | Family::GatedDeltaRuleBack
        | Family::CrossEntropyBack => 2,
    }
}

/// Makes an op of a family with the operands it needs; `None` where that does not work out.
pub(super) fn make(m: &mut Maker, family: Family) -> Option<NodeId> {
    match family {
        Family::Leaf => {
            let dims = m.some_dims();
            let dtype = m.pick(&[DType::F32, DType::F32, DType::F16, DType::BF16])?;
            m.floats_of(&dims, dtype, -1.5, 1.5)
        }
        Family::Binary => binary(m),
        Family::Unary => unary(m),
        Family::Affine => {
            let x = m.any()?;
            let (scale, bias) = (m.rng.sign() * m.rng.between(0.25, 2.0), m.rng.between(-1.0, 1.0));
            m.push(Op::Affine { scale: (scale as f32).into(), bias: (bias as f32).into() }, &[x])
        }
        Family::Clamp => {
            let x = m.any()?;
            let (min, max) = bounds(m)?;
            m.push(Op::Clamp { min, max }, &[x])
        }
        Family::ClampBack => {
            let x = m.any()?;
            let dy = m.like(&m.dims(x))?;
            let (min, max) = bounds(m)?;
            m.push(Op::ClampBack { min, max }, &[x, dy])
        }
        Family::Fill => {
            let value = m.pick(&[0.0, 1.0, -0.5, 2.0])?;
            let shape = Shape::new(&m.some_dims()).ok()?;
            m.push(Op::Fill { value: value.into(), shape }, &[])
        }
        Family::Glu => {
            let gate = m.any()?;
            let up = m.like(&m.dims(gate))?;
            let kind = glu(m)?;
            m.push(Op::Glu(kind), &[gate, up])
        }
        Family::GluBack => {
            let gate = m.any()?;
            let (up, dy) = (m.like(&m.dims(gate))?, m.like(&m.dims(gate))?);
            let kind = glu(m)?;
            let wrt = m.either(GluOperand::Gate, GluOperand::Up);
            m.push(Op::GluBack { kind, wrt }, &[gate, up, dy])
        }
        Family::Sum => {
            let x = m.any()?;
            let dims = m.below(1 << m.dims(x).len()) as u8;
            m.push(Op::Sum { dims }, &[x])
        }
        Family::CumSum => {
            let x = m.any()?;
            let (dim, reverse) = (m.below(m.dims(x).len()) as u8, m.chance(50));
            m.push(Op::CumSum { dim, reverse }, &[x])
        }
        Family::TopK => {
            let x = m.any()?;
            let dims = m.dims(x);
            let k = 1 + m.below(last(m, x).max(1));
            let order = m.either(Order::Ascending, Order::Descending);
            let at = m.push(Op::TopK { k, order }, &[x])?;
            if m.chance(15) {
                return Some(at);
            }
            // What it chooses, of itself or of others.
            let from = if m.chance(70) { x } else { m.like(&dims)? };
            let (rows, cols) = (dims.iter().rev().skip(1).product(), last(m, x));
            let shape = |dims: &[usize]| Some(Op::Reshape { shape: Shape::new(dims).ok()? });
            let table = m.push(shape(&[rows, cols, 1])?, &[from])?;
            let ids = m.push(shape(&[rows, k])?, &[at])?;
            m.push(Op::Gather, &[table, ids])
        }
        Family::Broadcast => {
            let x = m.any()?;
            let mut dims = m.dims(x);
            for d in &mut dims {
                if *d == 1 && m.chance(60) {
                    *d = m.size();
                }
            }
            while m.has_room(dims.len()) && m.chance(40) {
                let size = m.size();
                dims.insert(0, size);
            }
            m.push(Op::Broadcast { shape: Shape::new(&dims).ok()? }, &[x])
        }
        Family::Reshape => reshape(m),
        Family::Permute => {
            let x = viewable(m)?;
            let mut perm: Vec<u8> = (0..m.dims(x).len() as u8).collect();
            for i in (1..perm.len()).rev() {
                perm.swap(i, m.below(i + 1));
            }
            m.push(Op::Permute { perm }, &[x])
        }
        Family::Slice => {
            let x = viewable(m)?;
            let dims = m.dims(x);
            let dim = m.below(dims.len());
            let size = *dims.get(dim)?;
            let start = m.below(size);
            let len = 1 + m.below((size - start).max(1));
            let len = if m.chance(1) { 0 } else { len };
            m.push(Op::Slice { dim: dim as u8, start, len }, &[x])
        }
        Family::Pad => {
            let x = m.any()?;
            let (before, after) = (m.below(3), m.below(3));
            let dim = m.below(m.dims(x).len()) as u8;
            m.push(Op::Pad { dim, before, after }, &[x])
        }
        Family::Concat => {
            let x = m.any()?;
            let dims = m.dims(x);
            let dim = m.below(dims.len());
            let mut parts = vec![x];
            for _ in 0..m.below(3) {
                let mut other = dims.clone();
                *other.get_mut(dim)? = m.size();
                parts.push(m.like(&other)?);
            }
            let at = m.below(parts.len());
            parts.swap(0, at);
            m.push(Op::Concat { dim: dim as u8 }, &parts)
        }
        Family::Copy => {
            let x = viewable(m)?;
            m.push(Op::Copy, &[x])
        }
        Family::Cast => {
            let half = |m: &Maker, id| matches!(m.dtype(id), DType::F16 | DType::BF16);
            match m.find(half).filter(|_| m.chance(70)) {
                Some(x) => m.push(Op::Cast { dtype: DType::F32 }, &[x]),
                None => {
                    let x = m.any()?;
                    let blocks = m.dims(x).last().is_some_and(|d| d.is_multiple_of(32));
                    let last = if blocks && m.chance(50) { Q8_0 } else { DType::BF16 };
                    let dtype = m.pick(&[DType::F16, DType::BF16, last])?;
                    m.push(Op::Cast { dtype }, &[x])
                }
            }
        }
        Family::Round => {
            let x = m.any()?;
            let blocks = m.dims(x).last().is_some_and(|d| d.is_multiple_of(32));
            let last = if blocks { Q8_0 } else { DType::F32 };
            let dtype = m.pick(&[DType::F16, DType::BF16, last])?;
            m.push(Op::Round { dtype }, &[x])
        }
        Family::QuantizeRows => {
            let rows = m.size();
            let x = m.like(&[rows, 32])?;
            m.push(Op::QuantizeRows, &[x])
        }
        Family::Gather => {
            if m.chance(20) {
                let rows = m.size().max(1);
                let table = m.block_weight(rows, 32)?;
                let n = m.size();
                let ids = m.ids(n, rows, false)?;
                return m.push(Op::Gather, &[table, ids]);
            }
            let x = m.find(|m, id| m.dtype(id).is_float() && m.value(id).len() > 1)?;
            let rank = 2 + m.below(3);
            let x = m.ranked(x, rank)?;
            let dims = m.dims(x);
            let rows = *dims.get(rank - 2)?;
            let mut shape = if rank == 2 { Vec::new() } else { dims.get(..rank - 2)?.to_vec() };
            while rank == 2 && m.chance(25) && shape.len() < 2 {
                shape.push(m.size());
            }
            let n = if rows == 0 { 0 } else { m.size() };
            shape.push(n);
            let ids = m.ids_of(&shape, rows)?;
            m.push(Op::Gather, &[x, ids])
        }
        Family::ScatterAdd => {
            let x = m.any()?;
            let rank = 2 + m.below(2);
            let x = m.ranked(x, rank)?;
            let mut dims = m.dims(x);
            dims.pop();
            let rows = m.size().max(1);
            let ids = m.ids_of(&dims, rows)?;
            m.push(Op::ScatterAdd { rows }, &[ids, x])
        }
        Family::Softmax => {
            let (x, attrs, rest) = softmax(m)?;
            let mut args = vec![x];
            args.extend(rest);
            m.push(Op::Softmax(attrs), &args)
        }
        Family::SoftmaxBack => {
            let y = m.any()?;
            let dy = m.like(&m.dims(y))?;
            m.push(Op::SoftmaxBack { scale: 0.5.into() }, &[y, dy])
        }
        Family::SoftmaxSinkBack => {
            let (x, attrs, rest) = softmax(m)?;
            if !attrs.sinks {
                return None;
            }
            let mut args = vec![x];
            args.extend(rest);
            let y = m.push(Op::Softmax(attrs), &args)?;
            let dy = m.like(&m.dims(x))?;
            args.extend([y, dy]);
            m.push(Op::SoftmaxSinkBack(attrs), &args)
        }
        Family::LogSoftmax => {
            let x = m.any()?;
            m.push(Op::LogSoftmax, &[x])
        }
        Family::Norm => {
            let x = m.any()?;
            let kind = m.pick(&NormKind::ALL)?;
            let eps = epsilon(m)?;
            m.push(Op::Norm { kind, eps }, &[x])
        }
        Family::NormBack => {
            let x = m.any()?;
            let dy = m.like(&m.dims(x))?;
            let kind = m.pick(&NormKind::ALL)?;
            let eps = epsilon(m)?;
            m.push(Op::NormBack { kind, eps }, &[x, dy])
        }
        Family::RmsNorm => {
            let x = m.any()?;
            let w = m.like(&[last(m, x)])?;
            let eps = epsilon(m)?;
            m.push(Op::RmsNorm { eps }, &[x, w])
        }
        Family::RmsNormBack => {
            let x = m.any()?;
            let (w, dy) = (m.like(&[last(m, x)])?, m.like(&m.dims(x))?);
            let eps = epsilon(m)?;
            let wrt = m.either(NormOperand::X, NormOperand::Weight);
            m.push(Op::RmsNormBack { eps, wrt }, &[x, w, dy])
        }
        Family::RopeTable => {
            let rows = m.size();
            let pairs = 1 + m.below(3);
            rope_table(m, rows, pairs)
        }
        Family::Rope => {
            let x = m.any()?;
            let x = m.ranked(x, 3)?;
            let dims = m.dims(x);
            let (rows, width) = (*dims.first()?, *dims.get(2)?);
            let pairs = 1 + m.below((width / 2).max(1));
            let table = rope_table(m, rows, pairs)?;
            let style = m.either(RopeStyle::Interleaved, RopeStyle::Halves);
            let inverse = m.chance(50);
            m.push(Op::Rope { style, inverse }, &[x, table])
        }
        Family::MatMul => mat_mul(m),
        Family::MatMulExperts => {
            let (rows, used, experts) = (m.size().min(7), 1 + m.below(3), 1 + m.below(4));
            let (quantized, tb, n) = (m.chance(25), m.chance(60), 1 + m.below(5));
            let k = if quantized && tb { 32 } else { 1 + m.below(6) };
            let n = if quantized && !tb { 32 } else { n };
            let each = m.either(1, used);
            let x = m.like(&[rows, each, k])?;
            let shape = if tb { [experts, n, k] } else { [experts, k, n] };
            let w = match quantized {
                true => m.block_weight_of(&shape)?,
                false => m.like(&shape)?,
            };
            let x = if quantized && tb { m.push(Op::QuantizeRows, &[x])? } else { x };
            let ids = m.ids_of(&[rows, used], experts)?;
            m.push(Op::MatMulExperts { tb }, &[x, w, ids])
        }
        Family::ExpertOuter => {
            let (rows, used, experts) = (m.size().min(7), 1 + m.below(3), 1 + m.below(4));
            let (each, other) = (m.either(1, used), m.either(1, used));
            let (p, q) = (1 + m.below(4), 1 + m.below(4));
            let (a, b) = (m.like(&[rows, each, p])?, m.like(&[rows, other, q])?);
            let ids = m.ids_of(&[rows, used], experts)?;
            m.push(Op::ExpertOuter { experts }, &[a, b, ids])
        }
        Family::Dropout => {
            let x = m.any()?;
            let x = if m.dims(x).len() < 2 { m.ranked(x, 2)? } else { x };
            let count = *m.dims(x).first()?;
            let numbers = (0..2 * count).map(|_| m.rng.next_u64() as i32).collect();
            let rows = m.ints(&[count, 2], numbers)?;
            let numbers = vec![m.rng.next_u64() as i32, m.rng.next_u64() as i32];
            let key = m.ints(&[2], numbers)?;
            let p = m.pick(&[0.0f32, 0.1, 0.5, 0.75])?;
            let site = m.below(4) as u32;
            m.push(Op::Dropout(Dropout { p: p.into(), site }), &[x, rows, key])
        }
        Family::Lora => {
            let x = m.any()?;
            let x = m.ranked(x, 2)?;
            let (rows, k, n) = (*m.dims(x).first()?, last(m, x), m.size());
            let base = m.like(&[rows, n])?;
            let slots = 1 + m.below(3);
            let ids = m.ids(rows, slots, true)?;
            let mut args = vec![x, base, ids];
            lora_slots(m, &mut args, slots, k, n)?;
            m.push(Op::Lora { slots }, &args)
        }
        Family::LoraBack => {
            let (rows, k, n, slots) = (m.size(), m.size(), m.size(), 1 + m.below(2));
            let dy = m.like(&[rows, n])?;
            let ids = m.ids(rows, slots, true)?;
            let wrt = m.pick(&[LoraOperand::X, LoraOperand::A, LoraOperand::B])?;
            if wrt == LoraOperand::X {
                let mut args = vec![dy, ids];
                lora_slots(m, &mut args, slots, k, n)?;
                return m.push(Op::LoraBack { slots, wrt, slot: 0 }, &args);
            }
            let (x, slot) = (m.like(&[rows, k])?, m.below(slots));
            m.push(Op::LoraBack { slots, wrt, slot }, &[x, dy, ids])
        }
        Family::LoraExperts => {
            let c = chosen(m)?;
            let own = m.either(1, c.used);
            let x = m.like(&[c.rows, own, c.k])?;
            let base = m.like(&[c.rows, c.used, c.n])?;
            let mut args = vec![x, base, c.of, c.ids];
            expert_slots(m, &mut args, &c)?;
            m.push(Op::LoraExperts { slots: c.slots }, &args)
        }
        Family::LoraExpertsBack => {
            let c = chosen(m)?;
            let dy = m.like(&[c.rows, c.used, c.n])?;
            let wrt = m.pick(&[LoraOperand::X, LoraOperand::A, LoraOperand::B])?;
            let (slots, slot) = (c.slots, m.below(c.slots));
            if wrt == LoraOperand::X {
                let mut args = vec![dy, c.of, c.ids];
                expert_slots(m, &mut args, &c)?;
                return m.push(Op::LoraExpertsBack { slots, wrt, slot: 0 }, &args);
            }
            let (rank, own) = (1 + m.below(3), m.either(1, c.used));
            let x = m.like(&[c.rows, own, c.k])?;
            let other = if wrt == LoraOperand::A { [c.n, rank] } else { [rank, c.k] };
            let (other, scale) = (m.like(&[c.experts, other[0], other[1]])?, m.like(&[1])?);
            let args = [x, dy, c.of, c.ids, other, scale];
            m.push(Op::LoraExpertsBack { slots, wrt, slot }, &args)
        }
        Family::Attention => {
            let a = attention(m)?;
            let mut args = vec![a.q, a.k, a.v, a.seqs];
            args.extend(a.sinks);
            args.extend(a.pages);
            m.push(Op::Attention(a.attrs), &args)
        }
        Family::AttentionQueryBack | Family::AttentionBack => {
            let a = attention(m)?;
            let (q, v) = (m.dims(a.q), m.dims(a.v));
            let (rows, heads) = (*q.first()?, *q.get(1)?);
            let mut args = vec![a.q, a.k, a.v, a.seqs];
            if family == Family::AttentionBack {
                args.push(m.floats(&[rows, heads], 0.5, 2.0)?);
            }
            args.push(m.like(&[rows, heads])?);
            args.push(m.like(&[rows, heads, *v.get(2)?])?);
            args.extend(a.sinks);
            args.extend(a.pages);
            if family == Family::AttentionQueryBack {
                return m.push(Op::AttentionQueryBack(a.attrs), &args);
            }
            let mut all = vec![AttentionOperand::Own];
            if a.attrs.sinks {
                all.push(AttentionOperand::Sinks);
            }
            if a.attrs.prefix {
                all.push(AttentionOperand::Pages);
            }
            let wrt = m.pick(&all)?;
            m.push(Op::AttentionBack { attrs: a.attrs, wrt }, &args)
        }
        Family::SsmConv => {
            let args = convolution(m)?;
            m.push(Op::SsmConv, &args)
        }
        Family::SsmConvBack => {
            let mut args = convolution(m)?;
            args.push(m.like(&m.dims(*args.first()?))?);
            let all = [SsmConvOperand::X, SsmConvOperand::Weight, SsmConvOperand::State];
            let wrt = m.pick(&all)?;
            m.push(Op::SsmConvBack { wrt }, &args)
        }
        Family::SsmConvState => {
            let mut args = convolution(m)?;
            args.remove(1);
            m.push(Op::SsmConvState, &args)
        }
        Family::SsmConvStateBack => {
            let mut args = convolution(m)?;
            args.remove(1);
            args.push(m.like(&m.dims(*args.get(1)?))?);
            let wrt = m.either(SsmConvStateOperand::X, SsmConvStateOperand::State);
            m.push(Op::SsmConvStateBack { wrt }, &args)
        }
        Family::SsmScan => {
            let args = scan(m)?.0;
            let both = m.push(Op::SsmScan, &args)?;
            one_of_two(m, both, *args.first()?, *args.get(5)?)
        }
        Family::SsmScanBack => {
            let (mut args, parts) = scan(m)?;
            args.push(m.like(&m.dims(*args.first()?))?);
            args.push(m.like(&m.dims(*args.get(5)?))?);
            m.push(Op::SsmScanBack { parts }, &args)
        }
        Family::GatedDeltaRule => {
            let (attrs, args) = delta(m)?;
            let both = m.push(Op::GatedDeltaRule(attrs), &args)?;
            one_of_two(m, both, *args.get(2)?, *args.get(5)?)
        }
        Family::GatedDeltaRuleBack => {
            let (attrs, mut args) = delta(m)?;
            args.push(m.like(&m.dims(*args.get(2)?))?);
            args.push(m.like(&m.dims(*args.get(5)?))?);
            m.push(Op::GatedDeltaRuleBack(attrs), &args)
        }
        Family::CrossEntropy => {
            let (logits, labels) = logits(m)?;
            let (attrs, weights) = weighted(m, labels)?;
            let mut args = vec![logits, labels];
            args.extend(weights);
            m.push(Op::CrossEntropy(attrs), &args)
        }
        Family::CrossEntropyBack => {
            let (logits, labels) = logits(m)?;
            let dy = m.like(&m.dims(labels))?;
            let (attrs, weights) = weighted(m, labels)?;
            let mut args = vec![logits, labels, dy];
            args.extend(weights);
            m.push(Op::CrossEntropyBack(attrs), &args)
        }
    }
}

fn last(m: &Maker, x: NodeId) -> usize {
    m.dims(x).last().copied().unwrap_or(1)
}

/// A value whose dtype has views.
fn viewable(m: &mut Maker) -> Option<NodeId> {
    if m.chance(85) {
        return m.any();
    }
    m.find(|m, id| m.dtype(id).element_bytes().is_some() && m.dtype(id) != DType::I32)
}

fn binary(m: &mut Maker) -> Option<NodeId> {
    let kind = m.pick(&Binary::ALL)?;
    let x = m.any()?;
    let dims = m.dims(x);
    let y = match m.below(10) {
        0 => x,
        1..4 => m.like(&dims)?,
        // The other operand lacks some of the dimensions.
        _ => {
            let mut other = dims.get(m.below(dims.len() + 1)..)?.to_vec();
            for d in &mut other {
                if m.chance(30) {
                    *d = 1;
                }
            }
            m.like(&other)?
        }
    };
    let (a, b) = m.either((x, y), (y, x));
    if kind == Binary::Div {
        let b = m.positive(b)?;
        let b = match m.chance(30) {
            true => m.push(Op::Unary(Unary::Neg), &[b])?,
            false => b,
        };
        return m.push(Op::Binary(kind), &[a, b]);
    }
    m.push(Op::Binary(kind), &[a, b])
}

fn unary(m: &mut Maker) -> Option<NodeId> {
    let f = m.pick(&Unary::ALL)?;
    let x = m.any()?;
    let x = match f {
        Unary::Log | Unary::Log1p | Unary::Sqrt | Unary::Rsqrt => m.positive(x)?,
        Unary::Tanh
        | Unary::Sigmoid
        | Unary::Silu
        | Unary::Gelu
        | Unary::Exp
        | Unary::Neg
        | Unary::Abs
        | Unary::Sqr
        | Unary::Expm1
        | Unary::Sin
        | Unary::Cos
        | Unary::Relu
        | Unary::GeluErf
        | Unary::GeluQuick
        | Unary::NormalCdf
        | Unary::Softplus
        | Unary::Step
        | Unary::Sign => x,
    };
    m.push(Op::Unary(f), &[x])
}

fn bounds(m: &mut Maker) -> Option<(Real, Real)> {
    let infinity = f32::INFINITY;
    let all = [(-1.0, 1.0), (0.0, infinity), (-infinity, 0.5), (-infinity, infinity), (-0.5, 0.25)];
    m.pick(&all).map(|(min, max)| (min.into(), max.into()))
}

fn glu(m: &mut Maker) -> Option<GluKind> {
    let low = GluKind::SwigluOai { alpha: 1.702.into(), limit: 0.75.into() };
    let all: Vec<GluKind> = GluKind::ALL.into_iter().chain([low]).collect();
    m.pick(&all)
}

fn epsilon(m: &mut Maker) -> Option<Real> {
    m.pick(&[0.01, 0.1, 1.0]).map(Real::new)
}

fn reshape(m: &mut Maker) -> Option<NodeId> {
    let x = viewable(m)?;
    let mut to = m.dims(x);
    for _ in 0..3 {
        let i = m.below(to.len());
        if i + 1 < to.len() && m.chance(50) {
            to[i] *= to.remove(i + 1);
        } else if m.has_room(to.len()) && i < to.len() {
            let size = to[i];
            let factors: Vec<usize> = (1..=size).filter(|f| size.is_multiple_of(*f)).collect();
            if let Some(f) = m.pick(&factors) {
                to[i] = size / f;
                to.insert(i, f);
            }
        }
    }
    m.push(Op::Reshape { shape: Shape::new(&to).ok()? }, &[x])
}

fn rope_table(m: &mut Maker, rows: usize, pairs: usize) -> Option<NodeId> {
    let factors = m.chance(30);
    let yarn = Yarn {
        ext_factor: 1.0.into(),
        attn_factor: 1.0.into(),
        beta_fast: 32.0.into(),
        beta_slow: 1.0.into(),
        context: 16,
        round: m.chance(50),
    };
    let sections = Sections { sizes: [1, 2, 1, 0], interleaved: m.chance(50) };
    let angles = RopeAngles {
        freq_scale: 0.5.into(),
        factors,
        yarn: m.chance(25).then_some(yarn),
        sections: m.chance(25).then_some(sections),
        ..RopeAngles::plain(2 * pairs, 100.0)
    };
    let dims = if angles.sections.is_some() { vec![rows, 4] } else { vec![rows] };
    let positions = (0..dims.iter().product()).map(|_| m.below(40) as i32).collect();
    let mut args = vec![m.ints(&dims, positions)?];
    if factors {
        args.push(m.floats(&[pairs], 0.5, 2.0)?);
    }
    m.push(Op::RopeTable(angles), &args)
}

/// A softmax: its operand, attributes and the operands they name.
fn softmax(m: &mut Maker) -> Option<(NodeId, SoftmaxAttrs, Vec<NodeId>)> {
    let x = m.any()?;
    let mut attrs = SoftmaxAttrs { scale: m.pick(&[1.0, 0.5])?.into(), ..SoftmaxAttrs::PLAIN };
    if m.chance(40) {
        return Some((x, attrs, Vec::new()));
    }
    let rank = m.dims(x).len().max(3);
    let x = m.ranked(x, rank)?;
    let dims = m.dims(x);
    let mut rest = Vec::new();
    attrs.mask = m.chance(60);
    attrs.sinks = m.chance(60);
    if attrs.mask {
        let mut shape = dims.get(m.below(rank)..)?.to_vec();
        let n = shape.len();
        for d in shape.iter_mut().take(n - 1) {
            if m.chance(30) {
                *d = 1;
            }
        }
        rest.push(m.like(&shape)?);
        attrs.max_bias = m.pick(&[0.0, 8.0])?.into();
    }
    if attrs.sinks {
        rest.push(m.like(&[*dims.get(rank - 3)?])?);
    }
    Some((x, attrs, rest))
}

fn mat_mul(m: &mut Maker) -> Option<NodeId> {
    let (ta, tb) = (m.chance(40), m.chance(50));
    if m.chance(25) {
        // A quantized weight, with quantized rows on its left or, untransposed, floats.
        let wide = m.chance(15);
        let (rows, n, k) = (m.size().min(7), 1 + m.below(5), if wide { 256 } else { 32 });
        if tb {
            let w = m.block_weight(n, k)?;
            let quantized = |m: &Maker, id| m.dtype(id) == DType::Q8Rows && last(m, id) == k;
            let x = match m.find(quantized).filter(|_| m.chance(50)) {
                Some(x) => x,
                None => {
                    let x = m.like(&[rows, k])?;
                    m.push(Op::QuantizeRows, &[x])?
                }
            };
            return m.push(Op::MatMul { ta: false, tb }, &[x, w]);
        }
        let (mut x, w) = (m.like(&[rows, n])?, m.block_weight(n, k)?);
        if m.chance(50) {
            let dtype = m.either(DType::BF16, DType::Int16Rows);
            x = m.push(Op::Cast { dtype }, &[x])?;
        }
        return m.push(Op::MatMul { ta: false, tb }, &[x, w]);
    }
    let x = m.any()?;
    let rank = m.dims(x).len().max(2);
    let x = m.ranked(x, rank)?;
    let dims = m.dims(x);
    let (outer, [r, c]) = dims.split_at(rank - 2) else { return None };
    let k = if ta { *r } else { *c };
    let n = m.size();
    let mut other = match m.below(4) {
        0 => outer.to_vec(),
        1 => outer.get(m.below(outer.len() + 1)..)?.to_vec(),
        2 => vec![m.size()],
        _ => vec![],
    };
    for d in &mut other {
        if m.chance(25) {
            *d = 1;
        }
    }
    other.extend(if tb { [n, k] } else { [k, n] });
    let b = match m.below(6) {
        0 => {
            let dtype = m.either(DType::F16, DType::BF16);
            m.floats_of(&other, dtype, -1.5, 1.5)?
        }
        1 => {
            let dtype = m.either(DType::F16, DType::BF16);
            let b = m.like(&other)?;
            m.push(Op::Cast { dtype }, &[b])?
        }
        _ => m.like(&other)?,
    };
    m.push(Op::MatMul { ta, tb }, &[x, b])
}

fn lora_slots(
    m: &mut Maker,
    args: &mut Vec<NodeId>,
    slots: usize,
    k: usize,
    n: usize,
) -> Option<()> {
    for _ in 0..slots {
        let rank = 1 + m.below(4);
        args.extend([m.like(&[rank, k])?, m.like(&[n, rank])?, m.like(&[1])?]);
    }
    Some(())
}

/// Rows that chose experts and adapters of them.
struct Chosen {
    rows: usize,
    used: usize,
    experts: usize,
    k: usize,
    n: usize,
    slots: usize,
    /// The slot of each row.
    of: NodeId,
    ids: NodeId,
}

fn chosen(m: &mut Maker) -> Option<Chosen> {
    let (rows, used, experts) = (m.size().min(7), 1 + m.below(3), 1 + m.below(4));
    let (k, n, slots) = (1 + m.below(5), 1 + m.below(5), 1 + m.below(2));
    let of = m.ids(rows, slots, true)?;
    let ids = m.ids_of(&[rows, used], experts)?;
    Some(Chosen { rows, used, experts, k, n, slots, of, ids })
}

fn expert_slots(m: &mut Maker, args: &mut Vec<NodeId>, c: &Chosen) -> Option<()> {
    for _ in 0..c.slots {
        let rank = 1 + m.below(3);
        let (a, b) = (m.like(&[c.experts, rank, c.k])?, m.like(&[c.experts, c.n, rank])?);
        args.extend([a, b, m.like(&[1])?]);
    }
    Some(())
}

fn logits(m: &mut Maker) -> Option<(NodeId, NodeId)> {
    let x = m.any()?;
    let x = m.ranked(x, 2)?;
    let (rows, words) = (*m.dims(x).first()?, last(m, x));
    let missing = m.chance(50);
    let labels = match words {
        0 => m.ints(&[rows], vec![-1; rows])?,
        _ => m.ids(rows, words, missing)?,
    };
    Some((x, labels))
}

/// What a loss does to logits, and its weights.
fn weighted(m: &mut Maker, labels: NodeId) -> Option<(CrossEntropyAttrs, Option<NodeId>)> {
    let weighted = m.chance(30);
    let attrs = CrossEntropyAttrs {
        scale: m.pick(&[1.0, 1.0, 0.5])?.into(),
        softcap: m.pick(&[None, None, Some(Real::new(3.0))])?,
        weighted,
    };
    let weights = if weighted { Some(m.floats(&m.dims(labels), 0.5, 2.0)?) } else { None };
    Some((attrs, weights))
}

/// Operands of attention.
struct Attention {
    attrs: AttentionAttrs,
    q: NodeId,
    k: NodeId,
    v: NodeId,
    seqs: NodeId,
    sinks: Option<NodeId>,
    /// Pages of keys and values, and their table, where a prefix is cached.
    pages: Vec<NodeId>,
}

fn attention(m: &mut Maker) -> Option<Attention> {
    let prefix = m.chance(40);
    let page = 1 + m.below(3);
    let count = 1 + m.below(2);
    let (mut seqs, mut table, mut first, mut pages) = (Vec::new(), Vec::new(), 0, 0);
    let most = 2;
    for _ in 0..count {
        let rows = 1 + m.below(5);
        let cached = if prefix { m.below(most * page + 1) } else { 0 };
        seqs.extend([first, rows as i32, cached as i32]);
        for _ in 0..most {
            table.push(pages);
            pages += 1;
        }
        first += rows as i32 + i32::from(m.chance(15));
    }
    let rows = first as usize + m.below(2);
    let (kv, group) = (1 + m.below(2), 1 + m.below(2));
    let quantized = prefix && m.chance(30);
    let width = if quantized { 32 } else { 1 + m.below(5) };
    let wide = if quantized || m.chance(50) { width } else { 1 + m.below(5) };
    let attrs = AttentionAttrs {
        scale: m.pick(&[0.5, 1.0])?.into(),
        window: m.pick(&[None, None, Some(1), Some(2), Some(100)])?,
        chunk: m.pick(&[None, None, None, Some(1), Some(3)])?,
        softcap: m.pick(&[None, None, Some(Real::new(2.0))])?,
        alibi: m.pick(&[None, None, Some(Real::new(8.0))])?,
        sinks: m.chance(30),
        prefix,
    };
    let sinks = if attrs.sinks { Some(m.like(&[kv * group])?) } else { None };
    let q = m.like(&[rows, kv * group, width])?;
    let k = m.like(&[rows, kv, width])?;
    let v = m.like(&[rows, kv, wide])?;
    let seqs = m.ints(&[count, 3], seqs)?;
    let mut cached = Vec::new();
    if prefix {
        let dtype = if quantized { Q8_0 } else { m.pick(&[DType::F32, DType::F16, DType::BF16])? };
        for width in [width, wide] {
            cached.push(m.floats_of(&[pages as usize, page, kv, width], dtype, -1.5, 1.5)?);
        }
        cached.push(m.ints(&[count, most], table)?);
    }
    Some(Attention { attrs, q, k, v, seqs, sinks, pages: cached })
}

fn elements(m: &Maker, x: NodeId) -> usize {
    m.graph.node(x).shape.elements()
}

/// Packed sequences without cached prefixes: rows in all, sequences, and their table.
fn sequences(m: &mut Maker) -> Option<(usize, usize, NodeId)> {
    let count = 1 + m.below(2);
    let (mut table, mut first) = (Vec::new(), 0);
    for _ in 0..count {
        let rows = m.below(6) as i32;
        table.extend([first, rows, 0]);
        first += rows + i32::from(m.chance(15));
    }
    let seqs = m.ints(&[count, 3], table)?;
    Some((first as usize + m.below(2), count, seqs))
}

/// Rows, taps, states and sequences of a convolution.
fn convolution(m: &mut Maker) -> Option<Vec<NodeId>> {
    let (rows, count, seqs) = sequences(m)?;
    let (channels, width) = (1 + m.below(4), 1 + m.below(4));
    let (x, w) = (m.like(&[rows, channels])?, m.like(&[channels, width])?);
    let state = m.like(&[count, width - 1, channels])?;
    Some(vec![x, w, state, seqs])
}

/// Operands of a selective scan, and parts its gradient may come in.
fn scan(m: &mut Maker) -> Option<(Vec<NodeId>, usize)> {
    let (rows, count, seqs) = sequences(m)?;
    let (groups, per_group) = (1 + m.below(2), 1 + m.below(3));
    let (heads, width, n) = (groups * per_group, 1 + m.below(3), 1 + m.below(4));
    let x = m.like(&[rows, heads, width])?;
    let dt = m.like(&[rows, heads])?;
    let dt = m.positive(dt)?;
    let decays = m.either(n, 1);
    let a = m.like(&[heads, decays])?;
    let a = m.positive(a)?;
    let a = m.push(Op::Unary(Unary::Neg), &[a])?;
    let (b, c) = (m.like(&[rows, groups, n])?, m.like(&[rows, groups, n])?);
    let state = m.like(&[count, heads, width, n])?;
    Some((vec![x, dt, a, b, c, state, seqs], 1 + m.below(per_group)))
}

/// Operands of a gated delta rule.
fn delta(m: &mut Maker) -> Option<(GatedDeltaAttrs, Vec<NodeId>)> {
    let (rows, count, seqs) = sequences(m)?;
    let (keys, each) = (1 + m.below(2), 1 + m.below(2));
    let (heads, wide, width) = (keys * each, 1 + m.below(4), 1 + m.below(4));
    let (q, k) = (m.like(&[rows, keys, wide])?, m.like(&[rows, keys, wide])?);
    let v = m.like(&[rows, heads, width])?;
    let decay = if m.chance(50) { vec![rows, heads] } else { vec![rows, heads, wide] };
    let decay = m.like(&decay)?;
    let decay = m.positive(decay)?;
    let g = m.push(Op::Affine { scale: (-0.5).into(), bias: 0.0.into() }, &[decay])?;
    let beta = m.like(&[rows, heads])?;
    let beta = m.push(Op::Unary(Unary::Sigmoid), &[beta])?;
    let state = m.like(&[count, heads, wide, width])?;
    let key_heads = m.either(KeyHeads::Blocks, KeyHeads::Cycle);
    let attrs = GatedDeltaAttrs { scale: 0.5.into(), key_heads };
    Some((attrs, vec![q, k, v, g, beta, state, seqs]))
}

/// The outputs or the exit states of a recurrence, or both as they come.
fn one_of_two(m: &mut Maker, both: NodeId, first: NodeId, second: NodeId) -> Option<NodeId> {
    let (n, part) = (elements(m, first), m.below(3));
    let (start, like) = match part {
        0 => (0, first),
        1 => (n, second),
        _ => return Some(both),
    };
    let len = elements(m, like);
    let cut = m.push(Op::Slice { dim: 0, start, len }, &[both])?;
    m.push(Op::Reshape { shape: Shape::new(&m.dims(like)).ok()? }, &[cut])
}
