//! Graphs around one op with operands of any shape that fits, of any view, and leaves that hold
//! anything: no elements, NaN, infinities, indices out of range, bytes that are no block.
//!
//! Nothing is asked of what they compute but that it is an error by name, or values.

use gguf::TensorType;
use graph::*;

use super::case::Draw;
use super::{CaseGraph, Fill, Made, Rng, View};

const Q8_0: DType = DType::Block(TensorType::Q8_0);

/// Leaves and results of more elements are not made.
const MOST: usize = 1 << 14;

/// An op, and the types and shapes of its operands.
type Call = (Op, Vec<(DType, Vec<usize>)>);

/// A graph of [`wild`].
pub struct Wild {
    /// The graph and its leaves.
    pub built: CaseGraph,
    /// The op's result, and its gradients where it has any and they are of the graph.
    pub outputs: Vec<NodeId>,
    /// Its floats are zero or normal numbers of at most 2 in size, its constants at most 30: what is
    /// finite in f64 is so on any device.
    pub tame: bool,
}

/// The graph of this number; `None` where what was drawn does not fit together.
pub fn wild(seed: u64, number: u64) -> Option<Wild> {
    let mut rng = Rng::new(seed, &format!("wild {number}"));
    let tame = rng.below(3) == 0;
    let mut maker = Maker { rng, tame };
    let (op, operands) = maker.call().ok()?;
    let mut built = CaseGraph::new("Leaf", maker.rng.clone());
    built.draw = Draw::Wild { tame };
    let mut args = Vec::new();
    for (n, (dtype, dims)) in operands.iter().enumerate() {
        let shape = Shape::new(dims).ok()?;
        if shape.elements() > MOST / 4 {
            return None;
        }
        let name = format!("operand {n}");
        let weight =
            matches!((&op, n), (Op::MatMul { .. } | Op::MatMulExperts { .. }, 1) | (Op::Gather, 0));
        args.push(maker.operand(&mut built, &name, *dtype, shape, weight).ok()?);
    }
    let y = built.graph.push(op, &args, "y").ok()?;
    let of = built.graph.node(y);
    if of.shape.elements() > MOST {
        return None;
    }
    let mut outputs = vec![y];
    if of.dtype == DType::F32 && maker.one_in(2) {
        let cotangent = built.cotangent_of(y).ok()?;
        let leaves: Vec<NodeId> = built.inputs.iter().map(|input| input.node).collect();
        let gradient = |wrt: &NodeId| vjp(&built.graph, &[(y, cotangent)], &[*wrt]).is_ok();
        let wrt: Vec<NodeId> = leaves.into_iter().filter(gradient).collect();
        if !wrt.is_empty() {
            let back = vjp(&built.graph, &[(y, cotangent)], &wrt).ok()?;
            built.graph = back.graph;
            outputs.extend(back.grads);
        }
    }
    Some(Wild { built, outputs, tame })
}

/// A number that is not asked for anything.
pub(super) fn number(rng: &mut Rng, tame: bool) -> f64 {
    let x = rng.between(-2.0, 2.0);
    match rng.below(40) {
        0 if !tame => f64::NAN,
        1 if !tame => f64::INFINITY,
        2 if !tame => -1e38,
        3 if !tame => 1e-42,
        4..8 => 0.0,
        _ => x,
    }
}

fn is_block(dtype: DType) -> bool {
    matches!(dtype, DType::Block(_))
}

/// Makes ops and operands.
struct Maker {
    rng: Rng,
    /// No number is beyond a few dozens.
    tame: bool,
}

impl Maker {
    /// A leaf, or a view of one. A weight of an op is often resident, another operand seldom.
    fn operand(
        &mut self,
        g: &mut CaseGraph,
        name: &str,
        dtype: DType,
        shape: Shape,
        weight: bool,
    ) -> Made {
        let dims = shape.dims();
        if dtype == DType::I32 {
            let large = self.one_in(20);
            let data = (0..shape.elements()).map(|_| match large {
                true => self.pick(&[i32::MIN, i32::MAX, 1 << 30]),
                false => self.rng.below(4) as i32 - i32::from(self.one_in(8)),
            });
            let data: Vec<i32> = data.collect();
            return g.ints(name, dims, &data);
        }
        let rows = matches!(dtype, DType::Q8Rows | DType::Int16Rows);
        let loads = matches!(dims.len(), 2 | 3) && !rows;
        if loads && self.one_in(if weight { 2 } else { 100 }) {
            return g.weight(name, dims, dtype);
        }
        match dtype {
            DType::F32 if self.one_in(3) => {
                let view = self.pick(&View::STRIDED);
                g.viewed(name, dims, view, Fill::Signed)
            }
            DType::Block(format) if format != TensorType::Q8_0 => g.block_leaf(name, dims, format),
            _ => g.float_of(name, dims, dtype, Fill::Signed),
        }
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.rng.below(of.len())].clone()
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.rng.below(n) == 0
    }

    fn size(&mut self) -> usize {
        self.pick(&[0, 1, 1, 2, 3, 4, 17, 32])
    }

    fn dims(&mut self) -> Vec<usize> {
        let rank = self.rng.below(5);
        (0..rank).map(|_| self.size()).collect()
    }

    fn real(&mut self) -> Real {
        let most = if self.tame { 5 } else { 6 };
        self.pick(&[0.0, 1.0, -1.5, 0.01, 30.0, 1e30][..most]).into()
    }

    /// A weight's type, and columns that it can have.
    fn blocks(&mut self, dtype: DType, columns: usize) -> (DType, usize) {
        if !is_block(dtype) {
            return (dtype, columns);
        }
        let formats = TensorType::ALL.into_iter().filter(|format| format.is_quantized());
        let format = self.pick(&formats.collect::<Vec<_>>());
        (DType::Block(format), format.block_len() * self.pick(&[0, 1, 1, 2]))
    }

    /// What stands left of a matrix.
    fn left(&mut self, matrix: DType, tb: bool) -> DType {
        match (is_block(matrix), tb) {
            (true, true) => DType::Q8Rows,
            (true, false) => self.pick(&[DType::F32, DType::BF16, DType::Int16Rows]),
            (false, _) => DType::F32,
        }
    }

    fn attention(&mut self, prefix: bool) -> AttentionAttrs {
        AttentionAttrs {
            scale: self.real(),
            window: self.pick(&[None, None, Some(1), Some(2), Some(u32::MAX)]),
            chunk: self.pick(&[None, None, Some(1), Some(3), Some(u32::MAX)]),
            softcap: self.cap(),
            alibi: self.pick(&[None, None, Some(0.0.into()), Some(8.0.into())]),
            sinks: self.one_in(3),
            prefix,
        }
    }

    /// A recurrence and operands that fit together.
    fn recurrence(&mut self) -> Call {
        let f = |dims: &[usize]| (DType::F32, dims.to_vec());
        let [t, n, width] = [(); 3].map(|()| self.size());
        let s = self.rng.below(4);
        let seqs = (DType::I32, vec![s, 3]);
        let (few, many) = self.pick(&[(1, 1), (1, 3), (2, 2), (2, 4), (3, 0)]);
        match self.rng.below(6) {
            0 => {
                let taps = self.pick(&[1, 2, 4]);
                let mut args = vec![f(&[t, n]), f(&[n, taps]), f(&[s, taps - 1, n]), seqs];
                if self.one_in(2) {
                    return (Op::SsmConv, args);
                }
                args.push(f(&[t, n]));
                let all = [SsmConvOperand::X, SsmConvOperand::Weight, SsmConvOperand::State];
                (Op::SsmConvBack { wrt: self.pick(&all) }, args)
            }
            1 => {
                let kept = self.rng.below(4);
                let mut args = vec![f(&[t, n]), f(&[s, kept, n]), seqs];
                if self.one_in(2) {
                    return (Op::SsmConvState, args);
                }
                args.push(f(&[s, kept, n]));
                let wrt = self.pick(&[SsmConvStateOperand::X, SsmConvStateOperand::State]);
                (Op::SsmConvStateBack { wrt }, args)
            }
            2 | 3 => {
                let decays = if self.one_in(2) { 1 } else { n };
                let mut args = vec![
                    f(&[t, many, width]),
                    f(&[t, many]),
                    f(&[many, decays]),
                    f(&[t, few, n]),
                    f(&[t, few, n]),
                    f(&[s, many, width, n]),
                    seqs,
                ];
                if self.one_in(2) {
                    return (Op::SsmScan, args);
                }
                args.extend([f(&[t, many, width]), f(&[s, many, width, n])]);
                (Op::SsmScanBack { parts: self.pick(&[1, 2, 3]) }, args)
            }
            _ => {
                let decays = if self.one_in(2) { vec![t, many] } else { vec![t, many, n] };
                let mut args = vec![
                    f(&[t, few, n]),
                    f(&[t, few, n]),
                    f(&[t, many, width]),
                    f(&decays),
                    f(&[t, many]),
                    f(&[s, many, n, width]),
                    seqs,
                ];
                let key_heads = self.pick(&[KeyHeads::Blocks, KeyHeads::Cycle]);
                let attrs = GatedDeltaAttrs { scale: self.real(), key_heads };
                if self.one_in(2) {
                    return (Op::GatedDeltaRule(attrs), args);
                }
                args.extend([f(&[t, many, width]), f(&[s, many, n, width])]);
                (Op::GatedDeltaRuleBack(attrs), args)
            }
        }
    }

    fn cap(&mut self) -> Option<Real> {
        let most = if self.tame { 3 } else { 4 };
        self.pick(&[None, Some(2.0), Some(2.0), Some(1e-30)][..most]).map(Into::into)
    }

    fn loss(&mut self) -> CrossEntropyAttrs {
        CrossEntropyAttrs { scale: self.real(), softcap: self.cap(), weighted: self.one_in(2) }
    }

    /// An op and operands that often fit together.
    fn call(&mut self) -> std::result::Result<Call, Invalid> {
        let f = |dims: &[usize]| (DType::F32, dims.to_vec());
        let i = |dims: &[usize]| (DType::I32, dims.to_vec());
        let d = self.dims();
        let last = d.last().copied().unwrap_or(1);
        let dim = self.rng.below(4) as u8;
        let [t, k, n, h] = [(); 4].map(|()| self.size());
        let real = self.real();
        Ok(match self.rng.below(46) {
            45 => {
                let x = self.pick(&[vec![t, k], vec![t, h, n]]);
                let p = self.pick(&[0.0, 0.3, 0.9999]);
                let op = Op::Dropout(Dropout { p: Real::new(p), site: self.rng.below(3) as u32 });
                (op, vec![f(&x), i(&[t, 2]), i(&[2])])
            }
            44 => {
                let (e, own) = (self.size(), self.one_in(2));
                let x = vec![t, if own { 2 } else { 1 }, k];
                let ids = i(&[t, 2]);
                if self.one_in(3) {
                    let (x, y) = (f(&x), f(&[t, 2, n]));
                    let (a, b, scale) = (f(&[e, h, k]), f(&[e, n, h]), f(&[1]));
                    let back = |wrt| Op::LoraExpertsBack { slots: 1, wrt, slot: 0 };
                    return Ok(match self.rng.below(4) {
                        0 => (Op::LoraExperts { slots: 1 }, vec![x, y, i(&[t]), ids, a, b, scale]),
                        1 => (back(LoraOperand::X), vec![y, i(&[t]), ids, a, b, scale]),
                        2 => (back(LoraOperand::A), vec![x, y, i(&[t]), ids, b, scale]),
                        _ => (back(LoraOperand::B), vec![x, y, i(&[t]), ids, a, scale]),
                    });
                }
                if self.one_in(3) {
                    return Ok((Op::ExpertOuter { experts: e }, vec![f(&x), f(&[t, 1, n]), ids]));
                }
                let tb = self.one_in(2);
                let dtype = self.pick(&[DType::F32, DType::F16, Q8_0]);
                let (dtype, k) = self.blocks(dtype, k);
                let left = self.left(dtype, tb);
                let x = vec![t, x[1], k];
                let w = if tb { vec![e, n, k] } else { vec![e, k, n] };
                (Op::MatMulExperts { tb }, vec![(left, x), (dtype, w), ids])
            }
            0 => {
                let kind = self.pick(&Binary::ALL);
                let other = if self.one_in(2) { d.clone() } else { self.dims() };
                (Op::Binary(kind), vec![f(&d), f(&other)])
            }
            1 => (Op::Unary(self.pick(&Unary::ALL)), vec![f(&d)]),
            2 => (Op::Affine { scale: real, bias: real }, vec![f(&d)]),
            3 => (Op::Glu(self.pick(&GluKind::ALL)), vec![f(&d), f(&d)]),
            4 => {
                let kind = self.pick(&GluKind::ALL);
                let wrt = self.pick(&[GluOperand::Gate, GluOperand::Up]);
                (Op::GluBack { kind, wrt }, vec![f(&d), f(&d), f(&d)])
            }
            5 => (Op::Sum { dims: self.rng.below(16) as u8 }, vec![f(&d)]),
            6 => {
                let mut wide: Vec<usize> = d.iter().map(|&d| if d == 1 { k } else { d }).collect();
                if self.one_in(2) {
                    wide.insert(0, n);
                }
                (Op::Broadcast { shape: Shape::new(&wide)? }, vec![f(&d)])
            }
            7 => {
                let mut to = d.clone();
                to.reverse();
                to.push(1);
                (Op::Reshape { shape: Shape::new(&to)? }, vec![f(&d)])
            }
            8 => {
                let mut perm: Vec<u8> = (0..d.len() as u8).collect();
                let turn = self.rng.below(perm.len().max(1));
                perm.rotate_left(turn);
                (Op::Permute { perm }, vec![self.pick(&[f(&d), i(&d)])])
            }
            9 => {
                let (start, len) = (self.rng.below(3), self.rng.below(3));
                (Op::Slice { dim, start, len }, vec![self.pick(&[f(&d), i(&d)])])
            }
            10 => {
                let (before, after) = (self.rng.below(3), self.rng.below(3));
                (Op::Pad { dim, before, after }, vec![f(&d)])
            }
            11 => {
                let mut other = d.clone();
                if let Some(size) = other.get_mut(usize::from(dim)) {
                    *size = self.size();
                }
                (Op::Concat { dim }, vec![f(&d), f(&other), f(&d)])
            }
            12 => (Op::Copy, vec![self.pick(&[f(&d), i(&d), (DType::F16, d.clone())])]),
            13 => {
                let dtype = self.pick(&[DType::F16, DType::BF16, DType::Int16Rows, Q8_0]);
                (Op::Cast { dtype }, vec![f(&d)])
            }
            14 => {
                let from = self.pick(&[DType::F16, DType::BF16]);
                (Op::Cast { dtype: DType::F32 }, vec![(from, d)])
            }
            15 => {
                let dtype = self.pick(&[DType::F32, DType::F16, DType::BF16, Q8_0]);
                (Op::Round { dtype }, vec![f(&d)])
            }
            16 => (Op::QuantizeRows, vec![f(&d)]),
            17 => {
                let dtype = self.pick(&[DType::F32, DType::BF16, Q8_0]);
                let (dtype, k) = self.blocks(dtype, k);
                (Op::Gather, vec![(dtype, vec![n, k]), i(&[t])])
            }
            18 => (Op::ScatterAdd { rows: n }, vec![i(&[t]), f(&[t, k])]),
            19 => (Op::RmsNorm { eps: real }, vec![f(&d), f(&[last])]),
            20 => {
                let wrt = self.pick(&[NormOperand::X, NormOperand::Weight]);
                (Op::RmsNormBack { eps: real, wrt }, vec![f(&d), f(&[last]), f(&d)])
            }
            21 => {
                let factors = self.one_in(2);
                let angles = RopeAngles {
                    dims: 2 * k,
                    base: real,
                    freq_scale: real,
                    factors,
                    yarn: None,
                    sections: None,
                };
                let mut args = vec![i(&[t])];
                if factors {
                    args.push(f(&[k]));
                }
                (Op::RopeTable(angles), args)
            }
            22 => {
                let style = self.pick(&[RopeStyle::Interleaved, RopeStyle::Halves]);
                let inverse = self.one_in(2);
                (Op::Rope { style, inverse }, vec![f(&[t, h, 2 * k + n]), f(&[t, 2 * k])])
            }
            23 => {
                let (ta, tb) = (self.one_in(2), self.one_in(2));
                let dtype = self.pick(&[DType::F32, DType::F16, Q8_0]);
                let (dtype, k) = self.blocks(dtype, k);
                let a = if ta { [k, t] } else { [t, k] };
                let b = if tb { [n, k] } else { [k, n] };
                let outer = self.pick(&[vec![], vec![1], vec![3], vec![2, 1]]);
                let b_outer = self.pick(&[vec![], vec![3]]);
                let left = self.left(dtype, tb);
                let a = [outer, a.to_vec()].concat();
                (Op::MatMul { ta, tb }, vec![(left, a), (dtype, [b_outer, b.to_vec()].concat())])
            }
            24 => {
                let mut args = vec![f(&[t, k]), f(&[t, n]), i(&[t])];
                for rank in [1, h] {
                    args.extend([f(&[rank, k]), f(&[n, rank]), f(&[1])]);
                }
                (Op::Lora { slots: 2 }, args)
            }
            25 => {
                let slot = self.rng.below(2);
                match self.rng.below(3) {
                    0 => {
                        let mut args = vec![f(&[t, n]), i(&[t])];
                        for rank in [1, h] {
                            args.extend([f(&[rank, k]), f(&[n, rank]), f(&[1])]);
                        }
                        (Op::LoraBack { slots: 2, wrt: LoraOperand::X, slot }, args)
                    }
                    part => {
                        let wrt = if part == 1 { LoraOperand::A } else { LoraOperand::B };
                        let args = vec![f(&[t, k]), f(&[t, n]), i(&[t])];
                        (Op::LoraBack { slots: 2, wrt, slot }, args)
                    }
                }
            }
            30 => {
                let (min, max) = self.pick(&[(0.0, 1.0), (-1e30, f32::INFINITY), (0.5, 0.5)]);
                let (min, max) = (Real::new(min), Real::new(max));
                match self.one_in(2) {
                    true => (Op::Clamp { min, max }, vec![f(&d)]),
                    false => (Op::ClampBack { min, max }, vec![f(&d), f(&d)]),
                }
            }
            31 => (Op::Fill { value: real, shape: Shape::new(&d)? }, vec![]),
            32 => (Op::CumSum { dim, reverse: self.one_in(2) }, vec![f(&d)]),
            33 => {
                let order = self.pick(&[Order::Ascending, Order::Descending]);
                (Op::TopK { k: self.rng.below(4), order }, vec![f(&d)])
            }
            34 => {
                let (mask, sinks) = (self.one_in(2), self.one_in(2));
                let max_bias = if mask && self.one_in(2) { 8.0 } else { 0.0 }.into();
                let attrs = SoftmaxAttrs { scale: real, mask, max_bias, sinks };
                let x = [2, h, t, k];
                let mut args = vec![f(&x)];
                args.extend(mask.then(|| self.pick(&[f(&[t, k]), f(&[k]), f(&[2, 1, t, k])])));
                args.extend(sinks.then(|| f(&[h])));
                if sinks && self.one_in(2) {
                    args.extend([f(&x), f(&x)]);
                    return Ok((Op::SoftmaxSinkBack(attrs), args));
                }
                (Op::Softmax(attrs), args)
            }
            35 => match self.one_in(2) {
                true => (Op::LogSoftmax, vec![f(&d)]),
                false => (Op::SoftmaxBack { scale: real }, vec![f(&d), f(&d)]),
            },
            36 => {
                let kind = self.pick(&NormKind::ALL);
                match self.one_in(2) {
                    true => (Op::Norm { kind, eps: real }, vec![f(&d)]),
                    false => (Op::NormBack { kind, eps: real }, vec![f(&d), f(&d)]),
                }
            }
            37 => match self.one_in(2) {
                true => (Op::Gather, vec![f(&[t, h, n, k]), i(&[t, h, 3])]),
                false => (Op::ScatterAdd { rows: n }, vec![i(&[t, h, 3]), f(&[t, h, 3, k])]),
            },
            26 => {
                let v = self.pick(&[1, 3, 32]);
                let attrs = self.loss();
                let mut args = vec![f(&[t, v]), i(&[t])];
                args.extend(attrs.weighted.then(|| f(&[t])));
                (Op::CrossEntropy(attrs), args)
            }
            27 => {
                let v = self.pick(&[1, 3, 32]);
                let attrs = self.loss();
                let mut args = vec![f(&[t, v]), i(&[t]), f(&[t])];
                args.extend(attrs.weighted.then(|| f(&[t])));
                (Op::CrossEntropyBack(attrs), args)
            }
            38..=43 => self.recurrence(),
            which => {
                let prefix = self.one_in(2);
                let attrs = self.attention(prefix);
                let (hkv, group) = (self.pick(&[1, 2]), self.pick(&[0, 1, 2]));
                let (width, wide) = self.pick(&[(1, 2), (4, 4), (32, 32)]);
                let s = self.rng.below(4);
                let (q, own) = (f(&[t, hkv * group, width]), f(&[t, hkv, width]));
                let (v, seqs) = (f(&[t, hkv, wide]), i(&[s, 3]));
                let dtype = if width == 32 { Q8_0 } else { DType::F16 };
                let (pages, page) = (self.rng.below(4), self.pick(&[1, 2]));
                let k_pages = (dtype, vec![pages, page, hkv, width]);
                let v_pages = (dtype, vec![pages, page, hkv, wide]);
                let table = i(&[s, self.rng.below(3)]);
                let [lse, delta] = [(); 2].map(|()| f(&[t, hkv * group]));
                let dout = f(&[t, hkv * group, wide]);
                let (op, mut args, cached) = match (which, self.rng.below(2)) {
                    (28, 0) => {
                        let args = vec![q, own, v, seqs, delta, dout];
                        (Op::AttentionQueryBack(attrs), args, vec![k_pages, v_pages, table])
                    }
                    (28, _) => {
                        let args = vec![q, own, v, seqs];
                        (Op::Attention(attrs), args, vec![k_pages, v_pages, table])
                    }
                    _ => {
                        use AttentionOperand::{Own, Pages, Sinks};
                        let all = [Own, Sinks, Pages];
                        let op = Op::AttentionBack { attrs, wrt: self.pick(&all) };
                        let args = vec![q, own, v, seqs, lse, delta, dout];
                        (op, args, vec![k_pages, v_pages, table])
                    }
                };
                args.extend(attrs.sinks.then(|| f(&[hkv * group])));
                if prefix {
                    args.extend(cached);
                }
                (op, args)
            }
        })
    }
}
