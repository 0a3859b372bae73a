//! Reverse mode: the only function that differentiates, and all gradient rules on one page.
//!
//! [`rule`] has one arm per op and operand: how the cotangent `dy` of the node's value gives
//! the gradient of that operand, or in words why there is none. There is no default arm.
//! Rules are written in ops, so gradients are planned and run like any graph; formulas stand
//! at the variants of [`Op`].

use std::collections::HashMap;
use std::ops::Range;

use crate::*;

/// A graph together with the gradients [`vjp`] appended to it.
#[derive(Clone, Debug)]
pub struct Backward {
    /// The forward nodes under their old ids, then the gradient nodes.
    pub graph: Graph,
    /// One gradient per entry of `wrt`: f32, of that node's shape.
    pub grads: Vec<NodeId>,
}

#[cfg(test)]
#[path = "grad_tests.rs"]
mod tests;

type Made = std::result::Result<NodeId, Invalid>;
type Build<'a> = Box<dyn FnOnce(&mut Graph, NodeId) -> Made + 'a>;

/// How one operand of a node is differentiated.
enum Rule<'a> {
    /// Builds the gradient from the cotangent of the node's value.
    Is(Build<'a>),
    /// There is none; why.
    Not(&'static str),
}

/// The gradients of `sum over (y, dy) of <y, dy>` with respect to the nodes `wrt`.
///
/// `cotangents` pairs nodes with a node holding their cotangent (f32, same shape). Only what
/// `wrt` needs is built. Several contributions to one gradient are added in reverse order of
/// their consumers.
///
/// # Errors
/// `Refusal` for the first node in forward order that has no rule for an operand on the way to
/// `wrt`, for a member of `wrt` that nothing depends on, and for a rule whose result has the
/// wrong shape or dtype. `Invalid` for cotangents of the wrong shape or dtype.
pub fn vjp(graph: &Graph, cotangents: &[(NodeId, NodeId)], wrt: &[NodeId]) -> Result<Backward> {
    let mut g = graph.clone();
    for &(y, dy) in cotangents {
        let (y, dy) = (graph.get(y)?, graph.get(dy)?);
        if matches!(y.dtype, DType::I32 | DType::Block(_)) {
            return Err(Invalid::new(format!(
                "node `{}` is {}, which has no cotangent; differentiate a float value",
                y.name, y.dtype
            ))
            .into());
        }
        if dy.shape != y.shape || dy.dtype != DType::F32 {
            return Err(Invalid::new(format!(
                "the cotangent of node `{}` must be f32 {}, is {} {}",
                y.name, y.shape, dy.dtype, dy.shape
            ))
            .into());
        }
    }
    for &x in wrt {
        graph.get(x)?;
    }

    // `needed`: depends on wrt and reaches a cotangent.
    // Indices end a path: what they choose has a gradient, they have none.
    let index = |id: NodeId| graph.node(id).dtype == DType::I32;
    let follows = |id: NodeId, a: NodeId| !index(id) || index(a);
    let mut depends = vec![false; graph.len()];
    for id in graph.ids() {
        let args = &graph.node(id).args;
        let on = wrt.contains(&id) || args.iter().any(|&a| at(&depends, a) && follows(id, a));
        set(&mut depends, id, on);
    }
    let mut needed = vec![false; graph.len()];
    for &(y, _) in cotangents {
        set(&mut needed, y, at(&depends, y));
    }
    for id in graph.ids().rev() {
        if at(&needed, id) {
            for &a in &graph.node(id).args {
                if at(&depends, a) && follows(id, a) {
                    set(&mut needed, a, true);
                }
            }
        }
    }
    for &x in wrt {
        if !at(&needed, x) {
            if let Some(blocked) = only_by_indices(graph, cotangents, x) {
                return Err(blocked);
            }
            return Err(refusal(
                Code::NoGradientPath,
                graph.node(x),
                None,
                "no output depends on it, so there is no gradient to compute".into(),
            ));
        }
    }

    // Look every rule up in forward order, so that the first blocked node is the one named.
    let mut rules: Vec<(NodeId, usize, Build<'_>)> = Vec::new();
    for id in graph.ids().filter(|&id| at(&needed, id)) {
        for (i, &a) in graph.node(id).args.iter().enumerate() {
            if !at(&needed, a) || !follows(id, a) {
                continue;
            }
            match rule(graph, id, i) {
                Rule::Is(build) => rules.push((id, i, build)),
                Rule::Not(why) => {
                    let operand = Some(operand_name(i, graph.node(a)));
                    let (code, node) = (Code::OpNotDifferentiable, graph.node(id));
                    return Err(refusal(code, node, operand, why.into()));
                }
            }
        }
    }

    let mut grads: HashMap<NodeId, NodeId> = HashMap::new();
    for &(y, dy) in cotangents {
        if at(&needed, y) {
            accumulate(&mut g, &mut grads, y, dy)?;
        }
    }
    while let Some(last) = rules.last().map(|r| r.0) {
        // All rules of one node, in operand order.
        let first = rules.iter().rposition(|r| r.0 != last).map_or(0, |p| p + 1);
        let Some(&dy) = grads.get(&last) else {
            rules.truncate(first);
            continue;
        };
        let node = graph.node(last);
        for (id, i, build) in rules.drain(first..) {
            g.set_origin(Some((node.name.clone(), node.layer)));
            let built = build(&mut g, dy);
            #[cfg(test)]
            let built = tests::broken(&mut g, &node.op, built);
            let Some(&operand) = graph.node(id).args.get(i) else { continue };
            let x = graph.node(operand);
            let broken = |why: String| {
                let why = format!("the gradient rule {why}; this is a bug in Gradus");
                refusal(Code::BrokenRule, node, Some(operand_name(i, x)), why)
            };
            let made = built.map_err(|e| broken(format!("does not fit together ({e})")))?;
            let of = g.node(made);
            if of.shape != x.shape || of.dtype != DType::F32 {
                return Err(broken(format!(
                    "gave {} {} for an operand of shape {}",
                    of.dtype, of.shape, x.shape
                )));
            }
            accumulate(&mut g, &mut grads, operand, made)?;
        }
    }
    g.set_origin(None);
    let mut out = Vec::with_capacity(wrt.len());
    for x in wrt {
        match grads.get(x) {
            Some(&id) => out.push(id),
            None => {
                let why = "no gradient reached it; this is a bug in Gradus".to_string();
                return Err(refusal(Code::BrokenRule, graph.node(*x), None, why));
            }
        }
    }
    Ok(Backward { graph: g, grads: out })
}

/// Where the outputs depend on `x` by way of indices alone, the refusal of the first node that
/// makes them.
fn only_by_indices(graph: &Graph, cotangents: &[(NodeId, NodeId)], x: NodeId) -> Option<Error> {
    let mut reached = vec![false; graph.len()];
    for id in graph.ids() {
        let on = id == x || graph.node(id).args.iter().any(|&a| at(&reached, a));
        set(&mut reached, id, on);
    }
    let mut used = vec![false; graph.len()];
    cotangents.iter().for_each(|&(y, _)| set(&mut used, y, true));
    for id in graph.ids().rev() {
        if at(&used, id) {
            graph.node(id).args.iter().for_each(|&a| set(&mut used, a, true));
        }
    }
    let indices = |&id: &NodeId| {
        let node = graph.node(id);
        let floats = node.args.iter().any(|&a| graph.node(a).dtype != DType::I32);
        at(&reached, id) && at(&used, id) && node.dtype == DType::I32 && floats
    };
    let id = graph.ids().find(indices)?;
    let node = graph.node(id);
    let (i, &a) = node.args.iter().enumerate().find(|&(_, &a)| at(&reached, a))?;
    let Rule::Not(why) = rule(graph, id, i) else { return None };
    let operand = Some(operand_name(i, graph.node(a)));
    Some(refusal(Code::OpNotDifferentiable, node, operand, why.into()))
}

fn at(flags: &[bool], id: NodeId) -> bool {
    flags.get(id.index()).copied().unwrap_or(false)
}

fn set(flags: &mut [bool], id: NodeId, on: bool) {
    if let Some(flag) = flags.get_mut(id.index()) {
        *flag = on;
    }
}

fn operand_name(i: usize, operand: &Node) -> String {
    format!("{i} (`{}`, {})", operand.name, operand.dtype)
}

fn refusal(code: Code, node: &Node, operand: Option<String>, reason: String) -> Error {
    Refusal {
        code,
        op: node.op.name().into(),
        node: node.name.to_string(),
        operand,
        device: None,
        reason,
    }
    .into()
}

fn accumulate(
    g: &mut Graph,
    grads: &mut HashMap<NodeId, NodeId>,
    of: NodeId,
    grad: NodeId,
) -> std::result::Result<(), Invalid> {
    let sum = match grads.get(&of) {
        Some(&so_far) => {
            let node = g.node(of);
            let origin = (node.name.clone(), node.layer);
            g.set_origin(Some(origin));
            g.add(so_far, grad)?
        }
        None => grad,
    };
    grads.insert(of, sum);
    Ok(())
}

/// Sums a gradient back over the dimensions along which `shape` was broadcast.
fn unbroadcast(g: &mut Graph, dy: NodeId, shape: Shape) -> Made {
    let wide = g.node(dy).shape;
    let lead = wide.rank().saturating_sub(shape.rank());
    let dims: Vec<usize> = (0..wide.rank())
        .filter(|&i| i < lead || (shape.dim(i - lead) == 1 && wide.dim(i) != 1))
        .collect();
    let sum = if dims.is_empty() { dy } else { g.sum(dy, &dims)? };
    g.reshape(sum, shape.dims())
}

/// The density of the normal distribution, `e^(-x^2/2) / sqrt(2 pi)`.
fn normal_density(g: &mut Graph, x: NodeId) -> Made {
    let xx = g.mul(x, x)?;
    // The bias is -ln(sqrt(2 pi)).
    let exponent = g.affine(xx, -0.5, -0.918_938_5)?;
    g.unary(Unary::Exp, exponent)
}

/// Columns of a state that one gradient op of the delta rule takes. They do not mix, and an op of
/// all of them would be long; neither they nor [`SCAN_TILE`] follow from the number of rows, on
/// which no sum's order may depend.
const DELTA_COLUMNS: usize = 16;

/// Elements of the states that one tile of a scan's gradient takes through a sequence; a quarter
/// where each has a decay of its own, which is most of the work.
const SCAN_TILE: usize = 2048;

/// Tiles per sequence that one gradient op of a scan has at least, if there are as many.
const SCAN_TILES: usize = 16;

/// Gradient `i` of a flat tensor that holds one after the other.
fn part_of(g: &mut Graph, all: NodeId, shapes: &[Shape], i: usize) -> Made {
    let start = shapes.iter().take(i).map(|s| s.elements()).sum();
    let shape = shapes.get(i).copied().unwrap_or(g.node(all).shape);
    let part = g.slice(all, 0, start, shape.elements())?;
    g.reshape(part, shape.dims())
}

/// A range of a dimension of `x`.
fn cut(g: &mut Graph, x: NodeId, dim: usize, range: &Range<usize>) -> Made {
    match g.node(x).shape.dim(dim) == range.len() {
        true => Ok(x),
        false => g.slice(x, dim, range.start, range.len()),
    }
}

/// `0..n` in runs of `len`; one empty run where there is nothing.
fn runs(n: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
    let len = len.max(1);
    (0..n.div_ceil(len).max(1)).map(move |i| i * len..n.min((i + 1) * len))
}

/// A gradient that several ops compute parts of.
struct Joined {
    /// The dimension along which the parts lie; `None` where they are summed, in order.
    dim: Option<usize>,
    parts: Vec<NodeId>,
}

impl Joined {
    fn new(dim: Option<usize>) -> Joined {
        Joined { dim, parts: Vec::new() }
    }

    /// Takes the next part; `rest` says that there are others. A part that is to lie beside them
    /// is copied, so that all else its op computed need not stay until they are there.
    fn push(
        &mut self,
        g: &mut Graph,
        part: NodeId,
        rest: bool,
    ) -> std::result::Result<(), Invalid> {
        let node = g.node(part);
        let (name, is_view) = (node.name.clone(), node.op.is_view());
        let part = match (self.dim, self.parts.pop()) {
            (None, Some(sum)) => g.add(sum, part)?,
            (None, None) => part,
            (Some(_), last) => {
                self.parts.extend(last);
                if rest && is_view { g.push(Op::Copy, &[part], &name)? } else { part }
            }
        };
        self.parts.push(part);
        Ok(())
    }

    fn done(self, g: &mut Graph) -> Made {
        g.concat(&self.parts, self.dim.unwrap_or(0))
    }
}

/// Gradient `i` of [`Op::GatedDeltaRule`] on `x`: an op for every few columns of the state.
fn delta_rule(
    g: &mut Graph,
    attrs: GatedDeltaAttrs,
    x: [NodeId; 7],
    dy: NodeId,
    name: &str,
    i: usize,
) -> Made {
    let [q, k, v, gate, beta, state, seqs] = x;
    let [q_shape, v_shape, gate_shape, beta_shape, state_shape] =
        [q, v, gate, beta, state].map(|x| g.node(x).shape);
    let (dy, d_exit) = g.two_parts(dy, v_shape, state_shape)?;
    let [rows, key_heads, keys] = [0, 1, 2].map(|d| q_shape.dim(d));
    let (heads, width) = (v_shape.dim(1), v_shape.dim(2));
    let per_head = Shape::new(&[rows, heads, keys])?;
    let mut all = Joined::new(match i {
        2 => Some(2),
        5 => Some(3),
        _ => None,
    });
    for columns in runs(width, DELTA_COLUMNS) {
        let v = cut(g, v, 2, &columns)?;
        let state = cut(g, state, 3, &columns)?;
        let (dy, d_exit) = (cut(g, dy, 2, &columns)?, cut(g, d_exit, 3, &columns)?);
        let operands = [q, k, v, gate, beta, state, seqs, dy, d_exit];
        let (v_shape, state_shape) = (g.node(v).shape, g.node(state).shape);
        let back = g.push(Op::GatedDeltaRuleBack(attrs), &operands, name)?;
        let shapes = [per_head, per_head, v_shape, gate_shape, beta_shape, state_shape];
        let part = part_of(g, back, &shapes, i)?;
        all.push(g, part, columns.len() < width)?;
    }
    let all = all.done(g)?;
    let shared = heads / key_heads.max(1);
    if i > 1 || shared == 1 {
        return Ok(all);
    }
    // Value heads `h`, `h + 1` .. share a key head, or `h`, `h + Hk` ..
    let (dims, of) = match attrs.key_heads {
        KeyHeads::Blocks => ([rows, key_heads, shared, keys], 2),
        KeyHeads::Cycle => ([rows, shared, key_heads, keys], 1),
    };
    let all = g.reshape(all, &dims)?;
    let sum = g.sum(all, &[of])?;
    g.reshape(sum, q_shape.dims())
}

/// Gradient `i` of [`Op::SsmScan`] on `x`: an op for every few columns of some heads, so that
/// none is long and its parts of the gradients of `b` and `c` are no larger than that of `x`.
fn scan(g: &mut Graph, x: [NodeId; 7], dy: NodeId, name: &str, i: usize) -> Made {
    let [x, dt, a, b, c, state, seqs] = x;
    let [x_shape, b_shape, state_shape] = [x, b, state].map(|x| g.node(x).shape);
    let (dy, d_exit) = g.two_parts(dy, x_shape, state_shape)?;
    let (all_heads, width) = (x_shape.dim(1), x_shape.dim(2));
    let (groups, states) = (b_shape.dim(1), b_shape.dim(2).max(1));
    let of_group = all_heads / groups.max(1);
    let tile = if g.node(a).shape.dim(1) > 1 { SCAN_TILE / 4 } else { SCAN_TILE };
    let columns_each = (tile / states).clamp(1, width.max(1));
    let heads_each = (tile / states / columns_each).clamp(1, of_group.max(1));
    // Heads of an op, all of one group or those of whole groups.
    let most = heads_each * SCAN_TILES.max(all_heads * width / (2 * states));
    let (groups_each, most) = ((most / of_group.max(1)).max(1), most.min(of_group));
    let mut by_groups = Joined::new(Some(if i == 2 { 0 } else { 1 }));
    for groups in runs(groups, groups_each) {
        let (b, c) = (cut(g, b, 1, &groups)?, cut(g, c, 1, &groups)?);
        let mut by_heads = Joined::new(match i {
            3 | 4 => None,
            2 => Some(0),
            _ => Some(1),
        });
        for run in runs(of_group, most) {
            let first = groups.start * of_group + run.start;
            let heads = first..first + (groups.len() - 1) * of_group + run.len();
            let parts = run.len().div_ceil(heads_each).max(1);
            let (x, dt) = (cut(g, x, 1, &heads)?, cut(g, dt, 1, &heads)?);
            let (a, state) = (cut(g, a, 0, &heads)?, cut(g, state, 1, &heads)?);
            let (dy, d_exit) = (cut(g, dy, 1, &heads)?, cut(g, d_exit, 1, &heads)?);
            let mut by_columns = Joined::new(matches!(i, 0 | 5).then_some(2));
            for columns in runs(width, columns_each) {
                let (x, state) = (cut(g, x, 2, &columns)?, cut(g, state, 2, &columns)?);
                let (dy, d_exit) = (cut(g, dy, 2, &columns)?, cut(g, d_exit, 2, &columns)?);
                let operands = [x, dt, a, b, c, state, seqs, dy, d_exit];
                let back = g.push(Op::SsmScanBack { parts }, &operands, name)?;
                // What several tiles add to is still to be summed.
                let several = |x: NodeId, n: usize| {
                    let mut dims = vec![n];
                    dims.extend(g.node(x).shape.dims());
                    Shape::new(&dims)
                };
                let sequences = state_shape.dim(0);
                let (a, b) = (several(a, sequences)?, several(b, parts)?);
                let [x, dt, state] = [x, dt, state].map(|x| g.node(x).shape);
                let mut part = part_of(g, back, &[x, dt, a, b, b, state], i)?;
                if (2..5).contains(&i) {
                    let dims = g.node(part).shape;
                    part = g.sum(part, &[0])?;
                    part = g.reshape(part, dims.dims().get(1..).unwrap_or(&[]))?;
                }
                by_columns.push(g, part, columns.len() < width)?;
            }
            let part = by_columns.done(g)?;
            by_heads.push(g, part, heads.len() < all_heads)?;
        }
        let part = by_heads.done(g)?;
        by_groups.push(g, part, false)?;
    }
    by_groups.done(g)
}

const NO_SECOND_ORDER: &str = "it is a gradient op, and there are no second-order gradients";
const INDEX: &str = "the operand is an index: nothing changes smoothly with it";
const LABEL: &str = "the operand holds labels: nothing changes smoothly with them";
const LOSS_WEIGHT: &str = "the operand holds the weights of rows, which are settings of the loss \
                           and whose rows of weight 0 are not read; where a weight is computed, \
                           multiply the unweighted losses by it";
const COUNTERS: &str = "the operand holds the counters that decide what is dropped: nothing \
                        changes smoothly with them";
const SCALE: &str = "the operand is an adapter's scale, which is a setting";
const QUANTIZED: &str = "the operand is a quantized weight, which has no gradient; train a LoRA \
                         adapter on it, or use a float copy of the weight";

/// The gradient rule of operand `i` of node `y`. One arm per op; see the module's head.
#[allow(clippy::too_many_lines)]
fn rule(graph: &Graph, y: NodeId, i: usize) -> Rule<'_> {
    use Rule::{Is, Not};
    let node = graph.node(y);
    let args = &node.args;
    let arg = move |i: usize| args.get(i).copied().unwrap_or(y);
    let name = node.name.clone();
    let x = arg(i);
    let x_shape = graph.node(x).shape;
    let x_quantized = matches!(graph.node(x).dtype, DType::Block(_));

    match &node.op {
        Op::Leaf => Not("a leaf has no operands"),

        // ---- elementwise
        Op::Binary(Binary::Add) => Is(Box::new(move |g, dy| unbroadcast(g, dy, x_shape))),
        Op::Binary(Binary::Sub) => Is(Box::new(move |g, dy| {
            let dx = if i == 0 { dy } else { g.affine(dy, -1.0, 0.0)? };
            unbroadcast(g, dx, x_shape)
        })),
        Op::Binary(Binary::Mul) => {
            let other = arg(1 - i.min(1));
            Is(Box::new(move |g, dy| {
                let dx = g.mul(dy, other)?;
                unbroadcast(g, dx, x_shape)
            }))
        }
        Op::Binary(Binary::Div) => {
            let b = arg(1);
            Is(Box::new(move |g, dy| {
                let dx = if i == 0 {
                    g.div(dy, b)?
                } else {
                    // y first: where it is 0, dy / b may have overflowed.
                    let dx = g.mul(dy, y)?;
                    let dx = g.div(dx, b)?;
                    g.affine(dx, -1.0, 0.0)?
                };
                unbroadcast(g, dx, x_shape)
            }))
        }
        Op::Binary(kind @ (Binary::Min | Binary::Max)) => {
            // The second operand has the gradient where it is chosen, the first everywhere else:
            // also where both are equal.
            let (a, b) = (arg(0), arg(1));
            let (low, high) = if *kind == Binary::Min { (b, a) } else { (a, b) };
            Is(Box::new(move |g, dy| {
                let gap = g.sub(high, low)?;
                let second = g.unary(Unary::Step, gap)?;
                let mask = if i == 0 { g.affine(second, -1.0, 1.0)? } else { second };
                let dx = g.mul(dy, mask)?;
                unbroadcast(g, dx, x_shape)
            }))
        }
        Op::Unary(Unary::Tanh) => Is(Box::new(move |g, dy| {
            let yy = g.mul(y, y)?;
            let slope = g.affine(yy, -1.0, 1.0)?;
            g.mul(dy, slope)
        })),
        Op::Unary(Unary::Sigmoid) => Is(Box::new(move |g, dy| {
            let rest = g.affine(y, -1.0, 1.0)?;
            let slope = g.mul(y, rest)?;
            g.mul(dy, slope)
        })),
        Op::Unary(Unary::Silu) => Is(Box::new(move |g, dy| {
            // s + y (1 - s), with y = x s
            let s = g.unary(Unary::Sigmoid, x)?;
            let rest = g.affine(s, -1.0, 1.0)?;
            let tail = g.mul(y, rest)?;
            let slope = g.add(s, tail)?;
            g.mul(dy, slope)
        })),
        Op::Unary(Unary::Gelu) => Is(Box::new(move |g, dy| {
            // (1 + t)/2 + x (1 - t^2)/2 u', t = tanh u, u = c (x + a x^3), u' = c (1 + 3 a x^2)
            let (c, a) = ((2.0 / std::f32::consts::PI).sqrt(), 0.044_715);
            let xx = g.mul(x, x)?;
            let poly = g.affine(xx, c * a, c)?;
            let u = g.mul(x, poly)?;
            let t = g.unary(Unary::Tanh, u)?;
            let tt = g.mul(t, t)?;
            let sech = g.affine(tt, -0.5, 0.5)?;
            let du = g.affine(xx, 3.0 * c * a, c)?;
            let tail = g.mul(x, sech)?;
            let tail = g.mul(tail, du)?;
            let head = g.affine(t, 0.5, 0.5)?;
            let slope = g.add(head, tail)?;
            g.mul(dy, slope)
        })),
        Op::Unary(Unary::Exp) => Is(Box::new(move |g, dy| g.mul(dy, y))),
        Op::Unary(Unary::Log) => Is(Box::new(move |g, dy| g.div(dy, x))),
        Op::Unary(Unary::Neg) => Is(Box::new(move |g, dy| g.affine(dy, -1.0, 0.0))),
        Op::Unary(Unary::Abs) => Is(Box::new(move |g, dy| {
            let sign = g.unary(Unary::Sign, x)?;
            g.mul(dy, sign)
        })),
        Op::Unary(Unary::Sqr) => Is(Box::new(move |g, dy| {
            let slope = g.affine(x, 2.0, 0.0)?;
            g.mul(dy, slope)
        })),
        Op::Unary(Unary::Sqrt) => Is(Box::new(move |g, dy| {
            let half = g.affine(dy, 0.5, 0.0)?;
            g.div(half, y)
        })),
        Op::Unary(Unary::Rsqrt) => Is(Box::new(move |g, dy| {
            // Not y / x, which overflows long before this does.
            let dx = g.mul(dy, y)?;
            let dx = g.div(dx, x)?;
            g.affine(dx, -0.5, 0.0)
        })),
        Op::Unary(Unary::Expm1) => Is(Box::new(move |g, dy| {
            // Not y + 1, which cancels where x is far below 0.
            let slope = g.unary(Unary::Exp, x)?;
            g.mul(dy, slope)
        })),
        Op::Unary(Unary::Log1p) => Is(Box::new(move |g, dy| {
            let inverse = g.affine(x, 1.0, 1.0)?;
            g.div(dy, inverse)
        })),
        Op::Unary(Unary::Sin) => Is(Box::new(move |g, dy| {
            let slope = g.unary(Unary::Cos, x)?;
            g.mul(dy, slope)
        })),
        Op::Unary(Unary::Cos) => Is(Box::new(move |g, dy| {
            let slope = g.unary(Unary::Sin, x)?;
            let slope = g.affine(slope, -1.0, 0.0)?;
            g.mul(dy, slope)
        })),
        Op::Unary(Unary::Relu) => {
            let op = Op::ClampBack { min: Real::new(0.0), max: Real::new(f32::INFINITY) };
            Is(Box::new(move |g, dy| g.push(op, &[x, dy], &name)))
        }
        Op::Unary(Unary::NormalCdf) => Is(Box::new(move |g, dy| {
            let slope = normal_density(g, x)?;
            g.mul(dy, slope)
        })),
        Op::Unary(Unary::GeluErf) => Is(Box::new(move |g, dy| {
            // Phi(x) + x Phi'(x)
            let density = normal_density(g, x)?;
            let tail = g.mul(x, density)?;
            let head = g.unary(Unary::NormalCdf, x)?;
            let slope = g.add(head, tail)?;
            g.mul(dy, slope)
        })),
        Op::Unary(Unary::GeluQuick) => Is(Box::new(move |g, dy| {
            // s + c y (1 - s), with s = sigmoid(c x)
            let c = 1.702;
            let inner = g.affine(x, c, 0.0)?;
            let s = g.unary(Unary::Sigmoid, inner)?;
            let rest = g.affine(s, -c, c)?;
            let tail = g.mul(y, rest)?;
            let slope = g.add(s, tail)?;
            g.mul(dy, slope)
        })),
        Op::Unary(Unary::Softplus) => Is(Box::new(move |g, dy| {
            let slope = g.unary(Unary::Sigmoid, x)?;
            g.mul(dy, slope)
        })),
        // Flat but for a jump at 0: the gradient is zero, not absent.
        Op::Unary(Unary::Step | Unary::Sign) => Is(Box::new(move |g, _| g.fill(0.0, x_shape))),
        Op::Affine { scale, .. } => {
            let scale = scale.get();
            Is(Box::new(move |g, dy| g.affine(dy, scale, 0.0)))
        }
        Op::Clamp { .. } if cfg!(feature = "test-without-clamp-rule") => {
            Not("this build was made without its rule")
        }
        Op::Clamp { min, max } => {
            let op = Op::ClampBack { min: *min, max: *max };
            Is(Box::new(move |g, dy| g.push(op, &[x, dy], &name)))
        }
        Op::ClampBack { .. } => Not(NO_SECOND_ORDER),
        Op::Fill { .. } => Not("a constant has no operands"),
        Op::Glu(kind) => {
            let (kind, gate, up) = (*kind, arg(0), arg(1));
            let wrt = if i == 0 { GluOperand::Gate } else { GluOperand::Up };
            Is(Box::new(move |g, dy| g.push(Op::GluBack { kind, wrt }, &[gate, up, dy], &name)))
        }
        Op::GluBack { .. } => Not(NO_SECOND_ORDER),

        // ---- reductions and layout
        Op::Sum { .. } => Is(Box::new(move |g, dy| g.broadcast(dy, x_shape))),
        Op::CumSum { dim, reverse } => {
            let op = Op::CumSum { dim: *dim, reverse: !reverse };
            Is(Box::new(move |g, dy| g.push(op, &[dy], &name)))
        }
        Op::TopK { .. } => Not("the result is indices: they do not change smoothly"),
        Op::Broadcast { .. } => Is(Box::new(move |g, dy| unbroadcast(g, dy, x_shape))),
        Op::Reshape { .. } => Is(Box::new(move |g, dy| g.reshape(dy, x_shape.dims()))),
        Op::Permute { perm } => {
            let mut inverse = vec![0u8; perm.len()];
            for (to, &from) in perm.iter().enumerate() {
                if let Some(slot) = inverse.get_mut(usize::from(from)) {
                    *slot = to as u8;
                }
            }
            Is(Box::new(move |g, dy| g.permute(dy, &inverse)))
        }
        Op::Slice { dim, start, len } => {
            let after = x_shape.dim(usize::from(*dim)).saturating_sub(start + len);
            let pad = Op::Pad { dim: *dim, before: *start, after };
            Is(Box::new(move |g, dy| g.push(pad, &[dy], &name)))
        }
        Op::Pad { dim, before, .. } => {
            let (dim, before) = (usize::from(*dim), *before);
            Is(Box::new(move |g, dy| g.slice(dy, dim, before, x_shape.dim(dim))))
        }
        Op::Concat { dim } => {
            let dim = usize::from(*dim);
            let start: usize = args.iter().take(i).map(|&a| graph.node(a).shape.dim(dim)).sum();
            Is(Box::new(move |g, dy| g.slice(dy, dim, start, x_shape.dim(dim))))
        }
        Op::Copy => Is(Box::new(|_, dy| Ok(dy))),

        // ---- dtype: straight through
        Op::Cast { dtype: DType::Block(_) } => {
            Not("the value is stored in a block format, which carries no gradient")
        }
        Op::Cast { .. } | Op::Round { .. } | Op::QuantizeRows => Is(Box::new(|_, dy| Ok(dy))),

        // ---- indexing
        Op::Gather if i == 1 => Not(INDEX),
        Op::Gather if x_quantized => Not(QUANTIZED),
        Op::Gather => {
            let ids = arg(1);
            if let &[_, .., rows, _] = x_shape.dims() {
                let scatter = Op::ScatterAdd { rows };
                return Is(Box::new(move |g, dy| g.push(scatter, &[ids, dy], &name)));
            }
            // One table for all ids: they are one list.
            let (rows, count) = (x_shape.dim(0), graph.node(ids).shape.elements());
            Is(Box::new(move |g, dy| {
                let ids = g.reshape(ids, &[count])?;
                let dy = g.reshape(dy, &[count, x_shape.cols()])?;
                g.push(Op::ScatterAdd { rows }, &[ids, dy], &name)
            }))
        }
        Op::ScatterAdd { .. } if i == 0 => Not(INDEX),
        Op::ScatterAdd { .. } => {
            let ids = arg(0);
            Is(Box::new(move |g, dy| g.gather(dy, ids, &name)))
        }

        // ---- softmax
        Op::Softmax(attrs) if attrs.mask && i == 1 => Not("the operand is a mask"),
        Op::Softmax(attrs) if i == 0 => {
            let op = Op::SoftmaxBack { scale: attrs.scale };
            Is(Box::new(move |g, dy| g.push(op, &[y, dy], &name)))
        }
        Op::Softmax(attrs) => {
            let mut operands = args.clone();
            Is(Box::new(move |g, dy| {
                operands.extend([y, dy]);
                g.push(Op::SoftmaxSinkBack(*attrs), &operands, &name)
            }))
        }
        Op::SoftmaxBack { .. } | Op::SoftmaxSinkBack(_) => Not(NO_SECOND_ORDER),
        Op::LogSoftmax => Is(Box::new(move |g, dy| {
            let p = g.unary(Unary::Exp, y)?;
            let sum = g.sum(dy, &[x_shape.rank().saturating_sub(1)])?;
            let share = g.mul(p, sum)?;
            g.sub(dy, share)
        })),

        // ---- normalization and position
        Op::Norm { kind, eps } => {
            let op = Op::NormBack { kind: *kind, eps: *eps };
            Is(Box::new(move |g, dy| g.push(op, &[x, dy], &name)))
        }
        Op::NormBack { .. } => Not(NO_SECOND_ORDER),
        Op::RmsNorm { eps } => {
            let (eps, x, w) = (*eps, arg(0), arg(1));
            let wrt = if i == 0 { NormOperand::X } else { NormOperand::Weight };
            Is(Box::new(move |g, dy| g.push(Op::RmsNormBack { eps, wrt }, &[x, w, dy], &name)))
        }
        Op::RmsNormBack { .. } => Not(NO_SECOND_ORDER),
        Op::RopeTable(_) if i == 0 => Not(INDEX),
        Op::RopeTable(_) => Not("the operand holds rope frequency factors, which are constants"),
        Op::Rope { .. } if i == 1 => {
            Not("the operand holds rotation angles, which follow from positions")
        }
        Op::Rope { style, inverse } => {
            let (op, table) = (Op::Rope { style: *style, inverse: !inverse }, arg(1));
            Is(Box::new(move |g, dy| g.push(op, &[dy, table], &name)))
        }

        // ---- products
        Op::MatMul { .. } if x_quantized => Not(QUANTIZED),
        Op::MatMul { ta, tb } => {
            let (a, b) = (arg(0), arg(1));
            let (ta, tb) = (*ta, *tb);
            if i == 0 && !tb && matches!(graph.node(b).dtype, DType::Block(_)) {
                return Not(NO_SECOND_ORDER);
            }
            let (op, l, r) = match (i, ta, tb) {
                (0, false, _) => (Op::MatMul { ta: false, tb: !tb }, None, Some(b)),
                (0, true, _) => (Op::MatMul { ta: tb, tb: true }, Some(b), None),
                (_, _, false) => (Op::MatMul { ta: !ta, tb: false }, Some(a), None),
                (_, _, true) => (Op::MatMul { ta: true, tb: ta }, None, Some(a)),
            };
            let half = matches!(graph.node(b).dtype, DType::F16 | DType::BF16);
            if i == 0 && ta && half {
                // A half matrix is only taken on the right, so this is the transpose.
                return Is(Box::new(move |g, dy| {
                    let dx = g.push(Op::MatMul { ta: false, tb: !tb }, &[dy, b], &name)?;
                    let rank = g.node(dx).shape.rank() as u8;
                    let mut perm: Vec<u8> = (0..rank.saturating_sub(2)).collect();
                    perm.extend([rank.saturating_sub(1), rank.saturating_sub(2)]);
                    let dx = g.permute(dx, &perm)?;
                    unbroadcast(g, dx, x_shape)
                }));
            }
            Is(Box::new(move |g, dy| {
                let dx = g.push(op, &[l.unwrap_or(dy), r.unwrap_or(dy)], &name)?;
                unbroadcast(g, dx, x_shape)
            }))
        }
        Op::MatMulExperts { .. } if i == 2 => Not(INDEX),
        Op::MatMulExperts { .. } if i == 1 && x_quantized => Not(QUANTIZED),
        Op::MatMulExperts { tb } => {
            let (rows, w, ids, tb) = (arg(0), arg(1), arg(2), *tb);
            if i == 0 {
                if !tb && matches!(graph.node(w).dtype, DType::Block(_)) {
                    return Not(NO_SECOND_ORDER);
                }
                return Is(Box::new(move |g, dy| {
                    let dx = g.push(Op::MatMulExperts { tb: !tb }, &[dy, w, ids], &name)?;
                    // A row that several experts read: their shares add up in order of rank.
                    unbroadcast(g, dx, x_shape)
                }));
            }
            let op = Op::ExpertOuter { experts: x_shape.dim(0) };
            Is(Box::new(move |g, dy| {
                let (a, b) = if tb { (dy, rows) } else { (rows, dy) };
                g.push(op, &[a, b, ids], &name)
            }))
        }
        Op::ExpertOuter { .. } => Not(NO_SECOND_ORDER),
        Op::Dropout(_) if i > 0 => Not(COUNTERS),
        Op::Dropout(dropout) => {
            let (op, rows, key) = (Op::Dropout(*dropout), arg(1), arg(2));
            Is(Box::new(move |g, dy| g.push(op, &[dy, rows, key], &name)))
        }
        Op::Lora { .. } if i == 1 => Is(Box::new(|_, dy| Ok(dy))),
        Op::Lora { .. } if i == 2 => Not(INDEX),
        Op::Lora { slots } => {
            let slots = *slots;
            let (slot, part) = (i.saturating_sub(3) / 3, i.saturating_sub(3) % 3);
            let part_of = move |p: usize| 3 + 3 * slot + p;
            let (x, rows, a, b, scale) =
                (arg(0), arg(2), arg(part_of(0)), arg(part_of(1)), arg(part_of(2)));
            let back = move |wrt| Op::LoraBack { slots, wrt, slot: if i == 0 { 0 } else { slot } };
            match (i, part) {
                (0, _) => Is(Box::new(move |g, dy| {
                    let mut operands = vec![dy, rows];
                    operands.extend(args.iter().skip(3));
                    g.push(back(LoraOperand::X), &operands, &name)
                })),
                // What lies between A and B is a product of its own: the tiles of a sum over rows
                // would all compute it.
                (_, 0) => Is(Box::new(move |g, dy| {
                    let inner = g.push(Op::MatMul { ta: false, tb: false }, &[dy, b], &name)?;
                    let inner = g.mul(inner, scale)?;
                    g.push(back(LoraOperand::A), &[x, inner, rows], &name)
                })),
                (_, 1) => Is(Box::new(move |g, dy| {
                    let inner = g.push(Op::MatMul { ta: false, tb: true }, &[x, a], &name)?;
                    let inner = g.mul(inner, scale)?;
                    g.push(back(LoraOperand::B), &[inner, dy, rows], &name)
                })),
                _ => Not(SCALE),
            }
        }
        Op::LoraBack { .. } => Not(NO_SECOND_ORDER),
        Op::LoraExperts { .. } if i == 1 => Is(Box::new(|_, dy| Ok(dy))),
        Op::LoraExperts { .. } if i == 2 || i == 3 => Not(INDEX),
        Op::LoraExperts { slots } => {
            let slots = *slots;
            let (slot, part) = (i.saturating_sub(4) / 3, i.saturating_sub(4) % 3);
            let part_of = move |p: usize| 4 + 3 * slot + p;
            let (x, rows, ids) = (arg(0), arg(2), arg(3));
            let (a, b, scale) = (arg(part_of(0)), arg(part_of(1)), arg(part_of(2)));
            let back = move |wrt, slot| Op::LoraExpertsBack { slots, wrt, slot };
            match (i, part) {
                (0, _) => Is(Box::new(move |g, dy| {
                    let mut operands = vec![dy, rows, ids];
                    operands.extend(args.iter().skip(4));
                    let dx = g.push(back(LoraOperand::X, 0), &operands, &name)?;
                    // A row that several experts read: their shares add up in order of rank.
                    unbroadcast(g, dx, x_shape)
                })),
                (_, 0) => Is(Box::new(move |g, dy| {
                    g.push(back(LoraOperand::A, slot), &[x, dy, rows, ids, b, scale], &name)
                })),
                (_, 1) => Is(Box::new(move |g, dy| {
                    g.push(back(LoraOperand::B, slot), &[x, dy, rows, ids, a, scale], &name)
                })),
                _ => Not(SCALE),
            }
        }
        Op::LoraExpertsBack { .. } => Not(NO_SECOND_ORDER),

        // ---- attention
        Op::Attention(attrs) => {
            let attrs = *attrs;
            // The first of the pages, straight through where they are not f32.
            let pages = 4 + usize::from(attrs.sinks);
            if i == 3 || i > pages + 1 {
                return Not(INDEX);
            }
            Is(Box::new(move |g, dy| {
                let (q, k, v, seqs) = (arg(0), arg(1), arg(2), arg(3));
                let rest = args.get(4..).unwrap_or(&[]);
                let weighted = g.mul(dy, y)?;
                let delta = g.sum(weighted, &[2])?;
                let of_q = g.node(q).shape;
                let rows_heads = Shape::new(&[of_q.dim(0), of_q.dim(1)])?;
                let delta = g.reshape(delta, rows_heads.dims())?;
                let operands = [&[q, k, v, seqs, delta, dy], rest].concat();
                // Whatever is asked for: its second part is the rows' log-sum-exps.
                let back = g.push(Op::AttentionQueryBack(attrs), &operands, &name)?;
                let part = usize::from(i > 0);
                let made = part_of(g, back, &[of_q, rows_heads], part)?;
                if i == 0 {
                    return Ok(made);
                }
                let operands = [&[q, k, v, seqs, made, delta, dy], rest].concat();
                let mut back = |wrt| g.push(Op::AttentionBack { attrs, wrt }, &operands, &name);
                let (both, first) = match i {
                    1 | 2 => (back(AttentionOperand::Own)?, 1),
                    _ if i < pages => return back(AttentionOperand::Sinks),
                    _ => (back(AttentionOperand::Pages)?, pages),
                };
                let shapes = [first, first + 1].map(|i| g.node(arg(i)).shape);
                part_of(g, both, &shapes, i - first)
            }))
        }
        Op::AttentionQueryBack(_) | Op::AttentionBack { .. } => Not(NO_SECOND_ORDER),

        // ---- recurrences
        Op::SsmConv => {
            let wrt = match i {
                0 => SsmConvOperand::X,
                1 => SsmConvOperand::Weight,
                2 => SsmConvOperand::State,
                _ => return Not(INDEX),
            };
            Is(Box::new(move |g, dy| {
                let operands = [arg(0), arg(1), arg(2), arg(3), dy];
                g.push(Op::SsmConvBack { wrt }, &operands, &name)
            }))
        }
        Op::SsmConvBack { .. } => Not(NO_SECOND_ORDER),
        Op::SsmConvState => {
            let wrt = match i {
                0 => SsmConvStateOperand::X,
                1 => SsmConvStateOperand::State,
                _ => return Not(INDEX),
            };
            Is(Box::new(move |g, dy| {
                let operands = [arg(0), arg(1), arg(2), dy];
                g.push(Op::SsmConvStateBack { wrt }, &operands, &name)
            }))
        }
        Op::SsmConvStateBack { .. } => Not(NO_SECOND_ORDER),
        Op::SsmScan | Op::GatedDeltaRule(_) if i == 6 => Not(INDEX),
        Op::SsmScan => {
            Is(Box::new(move |g, dy| scan(g, [0, 1, 2, 3, 4, 5, 6].map(arg), dy, &name, i)))
        }
        Op::SsmScanBack { .. } => Not(NO_SECOND_ORDER),
        Op::GatedDeltaRule(attrs) => {
            let attrs = *attrs;
            Is(Box::new(move |g, dy| {
                delta_rule(g, attrs, [0, 1, 2, 3, 4, 5, 6].map(arg), dy, &name, i)
            }))
        }
        Op::GatedDeltaRuleBack(_) => Not(NO_SECOND_ORDER),

        // ---- loss
        Op::CrossEntropy(_) if i == 1 => Not(LABEL),
        Op::CrossEntropy(_) if i == 2 => Not(LOSS_WEIGHT),
        Op::CrossEntropy(attrs) => {
            let attrs = *attrs;
            let (logits, labels) = (arg(0), arg(1));
            Is(Box::new(move |g, dy| {
                let mut operands = vec![logits, labels, dy];
                operands.extend(args.get(2));
                g.push(Op::CrossEntropyBack(attrs), &operands, &name)
            }))
        }
        Op::CrossEntropyBack(_) => Not(NO_SECOND_ORDER),
    }
}
