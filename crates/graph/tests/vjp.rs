//! What differentiating a graph builds, in what order, and what it refuses by name.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers are tests"
)]

mod common;

use common::toy::{Built, Toy};
use common::*;
use gguf::TensorType;
use gradus_graph::*;

const Q4: DType = DType::Block(TensorType::Q4_0);

fn f32s(g: &mut Graph, name: &str, dims: &[usize]) -> NodeId {
    g.leaf(name, shape(dims), DType::F32).unwrap()
}

fn i32s(g: &mut Graph, name: &str, dims: &[usize]) -> NodeId {
    g.leaf(name, shape(dims), DType::I32).unwrap()
}

/// A cotangent for a node.
fn seed(g: &mut Graph, y: NodeId) -> (NodeId, NodeId) {
    let shape = g.node(y).shape;
    (y, g.leaf(&format!("d{}", y.index()), shape, DType::F32).unwrap())
}

fn differentiate(g: &Graph, y: NodeId, wrt: &[NodeId]) -> Result<Backward> {
    let mut g = g.clone();
    let seeded = seed(&mut g, y);
    vjp(&g, &[seeded], wrt)
}

fn refusal(g: &Graph, y: NodeId, wrt: &[NodeId]) -> Refusal {
    match differentiate(g, y, wrt) {
        Err(Error::Refusal(r)) => *r,
        other => panic!("not refused: {:?}", other.map(|b| b.grads)),
    }
}

/// A node as text: what it computes, from what, down to leaves and to nodes of `graph`.
fn show(back: &Graph, forward: usize, id: NodeId) -> String {
    let node = back.node(id);
    if matches!(node.op, Op::Leaf) || id.index() < forward {
        return node.name.to_string();
    }
    let args: Vec<String> = node.args.iter().map(|&a| show(back, forward, a)).collect();
    format!("{}({})", node.op.name(), args.join(", "))
}

// ---- refusals, one operand at a time ------------------------------------------------------

/// Asks for the gradient of `y` with respect to each of `wrt`, which must be refused with
/// exactly this line.
fn says(g: &Graph, y: NodeId, wrt: NodeId, line: &str) {
    let r = refusal(g, y, &[wrt]);
    assert_eq!(r.to_string(), line);
    assert_eq!(r.code, Code::OpNotDifferentiable);
    assert_eq!(Error::from(r.clone()).code().as_str(), "op_not_differentiable");
    let node = g.ids().map(|id| g.node(id)).find(|n| *n.name == *r.node && n.op.name() == r.op);
    assert!(node.is_some(), "the refusal names a node of the graph");
    assert_eq!((r.device, r.code.kind()), (None, Kind::Refusal));
}

#[test]
fn rows_looked_up_by_index() {
    let mut g = Graph::new();
    let (table, ids) = (f32s(&mut g, "table", &[5, 32]), i32s(&mut g, "ids", &[3]));
    let quantized = g.weight("token_embd", shape(&[5, 32]), Q4).unwrap();
    let y = g.gather(table, ids, "embed").unwrap();
    let q = g.gather(quantized, ids, "embed_q").unwrap();
    let x = f32s(&mut g, "x", &[3, 2]);
    let s = g.push(Op::ScatterAdd { rows: 4 }, &[ids, x], "scatter").unwrap();
    let index = "the operand is an index: nothing changes smoothly with it";
    says(&g, y, ids, &format!("Gather at node `embed`, operand 1 (`ids`, i32): {index}"));
    says(&g, s, ids, &format!("ScatterAdd at node `scatter`, operand 0 (`ids`, i32): {index}"));
    says(
        &g,
        q,
        quantized,
        "Gather at node `embed_q`, operand 0 (`token_embd`, Q4_0): the operand is a quantized \
         weight, which has no gradient; train a LoRA adapter on it, or use a float copy of the \
         weight",
    );
}

#[test]
fn a_quantized_weight() {
    let mut g = Graph::new();
    let x = f32s(&mut g, "x", &[2, 32]);
    let w = g.weight("blk.3.ffn_down.weight", shape(&[4, 32]), Q4).unwrap();
    let y = g.project(x, w).unwrap();
    says(
        &g,
        y,
        w,
        "MatMul at node `blk.3.ffn_down.weight`, operand 1 (`blk.3.ffn_down.weight`, Q4_0): the \
         operand is a quantized weight, which has no gradient; train a LoRA adapter on it, or \
         use a float copy of the weight",
    );
    // With respect to the rows there is one, straight through the rounding of activations.
    let back = differentiate(&g, y, &[x]).unwrap();
    assert_eq!(
        show(&back.graph, g.len(), back.grads[0]),
        format!("MatMul(d{}, blk.3.ffn_down.weight)", y.index())
    );
}

#[test]
fn labels() {
    let mut g = Graph::new();
    let (logits, labels) = (f32s(&mut g, "logits", &[3, 7]), i32s(&mut g, "labels", &[3]));
    let y = g.push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[logits, labels], "loss").unwrap();
    says(
        &g,
        y,
        labels,
        "CrossEntropy at node `loss`, operand 1 (`labels`, i32): the operand holds labels: \
         nothing changes smoothly with them",
    );
}

#[test]
fn a_mask_of_a_softmax() {
    let mut g = Graph::new();
    let (x, mask) = (f32s(&mut g, "x", &[1, 2, 3, 5]), f32s(&mut g, "mask", &[3, 5]));
    let sinks = f32s(&mut g, "sinks", &[2]);
    let attrs = SoftmaxAttrs { mask: true, sinks: true, ..SoftmaxAttrs::PLAIN };
    let y = g.push(Op::Softmax(attrs), &[x, mask, sinks], "scores").unwrap();
    says(&g, y, mask, "Softmax at node `scores`, operand 1 (`mask`, f32): the operand is a mask");
    // Without a mask what comes second are sinks, which have a gradient, as they do behind one.
    assert_eq!(differentiate(&g, y, &[x, sinks]).unwrap().grads.len(), 2);
    let attrs = SoftmaxAttrs { mask: false, ..attrs };
    let y = g.push(Op::Softmax(attrs), &[x, sinks], "scores").unwrap();
    assert_eq!(differentiate(&g, y, &[x, sinks]).unwrap().grads.len(), 2);
}

#[test]
fn positions_frequency_factors_and_angles() {
    let mut g = Graph::new();
    let (pos, factors) = (i32s(&mut g, "pos", &[3]), f32s(&mut g, "rope_freqs", &[2]));
    let angles = RopeAngles {
        dims: 4,
        base: 1e4.into(),
        freq_scale: 1.0.into(),
        factors: true,
        yarn: None,
        sections: None,
    };
    let table = g.push(Op::RopeTable(angles), &[pos, factors], "rope").unwrap();
    let x = f32s(&mut g, "x", &[3, 2, 4]);
    let op = Op::Rope { style: RopeStyle::Halves, inverse: false };
    let y = g.push(op, &[x, table], "turned").unwrap();
    says(
        &g,
        y,
        pos,
        "RopeTable at node `rope`, operand 0 (`pos`, i32): the operand is an index: nothing \
         changes smoothly with it",
    );
    says(
        &g,
        y,
        factors,
        "RopeTable at node `rope`, operand 1 (`rope_freqs`, f32): the operand holds rope \
         frequency factors, which are constants",
    );
    says(
        &g,
        y,
        table,
        "Rope at node `turned`, operand 1 (`rope`, f32): the operand holds rotation angles, \
         which follow from positions",
    );
}

#[test]
fn sequences_pages_and_tables_of_attention() {
    let mut g = Graph::new();
    let mut args =
        [("q", 4), ("k", 2), ("v", 2)].map(|(n, heads)| f32s(&mut g, n, &[3, heads, 32])).to_vec();
    args.push(i32s(&mut g, "seqs", &[1, 3]));
    args.push(g.leaf("k_pages", shape(&[2, 8, 2, 32]), DType::F16).unwrap());
    let q8 = DType::Block(TensorType::Q8_0);
    args.push(g.leaf("v_pages", shape(&[2, 8, 2, 32]), q8).unwrap());
    args.push(i32s(&mut g, "table", &[1, 4]));
    let attrs = AttentionAttrs { prefix: true, ..AttentionAttrs::new(0.5) };
    let y = g.push(Op::Attention(attrs), &args, "blk.0.attn").unwrap();
    let index = "the operand is an index: nothing changes smoothly with it";
    for (i, name) in [(3, "seqs"), (6, "table")] {
        let line = format!("Attention at node `blk.0.attn`, operand {i} (`{name}`, i32): {index}");
        says(&g, y, args[i], &line);
    }
    let wrt = [&args[..3], &args[4..6]].concat();
    let back = differentiate(&g, y, &wrt).unwrap();
    let dy = format!("d{}", y.index());
    let delta = format!("Reshape(Sum(Mul({dy}, blk.0.attn)))");
    let of_q = format!("AttentionQueryBack(q, k, v, seqs, {delta}, {dy}, k_pages, v_pages, table)");
    let lse = format!("Reshape(Slice({of_q}))");
    let others =
        format!("AttentionBack(q, k, v, seqs, {lse}, {delta}, {dy}, k_pages, v_pages, table)");
    for (i, &grad) in back.grads.iter().enumerate() {
        let of = if i == 0 { &of_q } else { &others };
        assert_eq!(show(&back.graph, g.len(), grad), format!("Reshape(Slice({of}))"));
    }
    // The row sums and the three gradients are made once for all five: what is left are two views
    // of each part.
    assert_eq!(back.graph.len(), g.len() + 1 + 3 + 3 + 2 * 6);
    // Whatever pages are stored as, their gradient is f32 and of their shape.
    for (of, grad) in wrt.iter().zip(&back.grads) {
        let grad = back.graph.node(*grad);
        assert_eq!((grad.dtype, grad.shape), (DType::F32, g.node(*of).shape));
    }
}

#[test]
fn sinks_of_attention_and_what_comes_after_them() {
    let mut g = Graph::new();
    let mut args =
        [("q", 4), ("k", 2), ("v", 2)].map(|(n, heads)| f32s(&mut g, n, &[3, heads, 32])).to_vec();
    args.push(i32s(&mut g, "seqs", &[1, 3]));
    args.push(f32s(&mut g, "sinks", &[4]));
    args.push(g.leaf("k_pages", shape(&[2, 8, 2, 32]), DType::BF16).unwrap());
    args.push(f32s(&mut g, "v_pages", &[2, 8, 2, 32]));
    args.push(i32s(&mut g, "table", &[1, 4]));
    let attrs = AttentionAttrs { prefix: true, sinks: true, ..AttentionAttrs::new(0.5) };
    let y = g.push(Op::Attention(attrs), &args, "attn").unwrap();
    let wrt = args[4..7].to_vec();
    let back = differentiate(&g, y, &wrt).unwrap();
    use AttentionOperand::{Pages, Sinks};
    for ((of, grad), part) in wrt.iter().zip(&back.grads).zip([Sinks, Pages, Pages]) {
        let grad = back.graph.node(*grad);
        assert_eq!((grad.dtype, grad.shape), (DType::F32, g.node(*of).shape));
        let behind = |mut id: NodeId| loop {
            let node = back.graph.node(id);
            match node.op.is_view() {
                true => id = node.args[0],
                false => break node,
            }
        };
        let grad = if part == Sinks { grad } else { behind(grad.args[0]) };
        assert_eq!(grad.op, Op::AttentionBack { attrs, wrt: part });
        let of_q = behind(grad.args[4]);
        assert_eq!(of_q.op, Op::AttentionQueryBack(attrs));
        for node in [grad, of_q] {
            assert_eq!(
                (&node.args[..4], &node.args[node.args.len() - 4..]),
                (&args[..4], &args[4..])
            );
        }
    }
    for at in [3, 7] {
        assert!(differentiate(&g, y, &[args[at]]).is_err());
    }
}

#[test]
fn weights_of_a_loss() {
    let mut g = Graph::new();
    let (logits, weights) = (f32s(&mut g, "logits", &[3, 8]), f32s(&mut g, "weights", &[3]));
    let labels = i32s(&mut g, "labels", &[3]);
    let attrs = CrossEntropyAttrs { weighted: true, ..CrossEntropyAttrs::PLAIN };
    let y = g.push(Op::CrossEntropy(attrs), &[logits, labels, weights], "loss").unwrap();
    says(
        &g,
        y,
        weights,
        "CrossEntropy at node `loss`, operand 2 (`weights`, f32): the operand holds the weights \
         of rows, which are settings of the loss and whose rows of weight 0 are not read; where \
         a weight is computed, multiply the unweighted losses by it",
    );
    let back = differentiate(&g, y, &[logits]).unwrap();
    let grad = back.graph.node(back.grads[0]);
    assert_eq!(grad.op, Op::CrossEntropyBack(attrs));
    assert_eq!((grad.args[0], grad.args[1], grad.args[3]), (logits, labels, weights));
}

#[test]
fn rows_and_scales_of_adapters() {
    let mut g = Graph::new();
    let mut args = vec![f32s(&mut g, "x", &[3, 8]), f32s(&mut g, "base", &[3, 4])];
    args.push(i32s(&mut g, "rows", &[3]));
    for s in 0..2 {
        args.push(f32s(&mut g, &format!("a{s}"), &[2 + s, 8]));
        args.push(f32s(&mut g, &format!("b{s}"), &[4, 2 + s]));
        args.push(f32s(&mut g, &format!("scale{s}"), &[1]));
    }
    let y = g.push(Op::Lora { slots: 2 }, &args, "lora").unwrap();
    says(
        &g,
        y,
        args[2],
        "Lora at node `lora`, operand 2 (`rows`, i32): the operand is an index: nothing changes \
         smoothly with it",
    );
    for (i, s) in [(5, 0), (8, 1)] {
        let line = format!(
            "Lora at node `lora`, operand {i} (`scale{s}`, f32): the operand is an adapter's \
             scale, which is a setting"
        );
        says(&g, y, args[i], &line);
    }
    let dy = format!("d{}", y.index());
    let back = differentiate(&g, y, &[args[0], args[1], args[3], args[4], args[6], args[7]]);
    let Backward { graph, grads } = back.unwrap();
    let shown: Vec<String> = grads.iter().map(|&d| show(&graph, g.len(), d)).collect();
    assert_eq!(
        shown,
        [
            format!("LoraBack({dy}, rows, a0, b0, scale0, a1, b1, scale1)"),
            dy.clone(),
            format!("LoraBack(x, Mul(MatMul({dy}, b0), scale0), rows)"),
            format!("LoraBack(Mul(MatMul(x, a0), scale0), {dy}, rows)"),
            format!("LoraBack(x, Mul(MatMul({dy}, b1), scale1), rows)"),
            format!("LoraBack(Mul(MatMul(x, a1), scale1), {dy}, rows)"),
        ]
    );
    let slot = |d: NodeId| match graph.node(d).op {
        Op::LoraBack { slot, wrt, .. } => (slot, wrt),
        _ => panic!("no LoraBack"),
    };
    use LoraOperand::{A, B, X};
    assert_eq!([0, 2, 3, 4, 5].map(|i| slot(grads[i])), [(0, X), (0, A), (0, B), (1, A), (1, B)]);
}

/// The gradient drops what the value drops: the same op, of the same rows and key.
#[test]
fn dropout_drops_the_same_of_its_gradient() {
    let mut g = Graph::new();
    let x = f32s(&mut g, "x", &[3, 8]);
    let (rows, key) = (i32s(&mut g, "rows", &[3, 2]), i32s(&mut g, "key", &[2]));
    let op = Op::Dropout(Dropout { p: 0.25.into(), site: 6 });
    let y = g.push(op.clone(), &[x, rows, key], "drop").unwrap();
    for (i, name, node) in [(1, "rows", rows), (2, "key", key)] {
        let line = format!(
            "Dropout at node `drop`, operand {i} (`{name}`, i32): the operand holds the counters \
             that decide what is dropped: nothing changes smoothly with them"
        );
        says(&g, y, node, &line);
    }
    let Backward { graph, grads } = differentiate(&g, y, &[x]).unwrap();
    let dx = graph.node(grads[0]);
    assert_eq!((&dx.op, &dx.args[1..]), (&op, &[rows, key][..]));
}

/// The first node of the way that makes indices is named: not one that no output uses, not one
/// that does not depend on what is asked for, none that only moves indices.
#[test]
fn a_way_of_indices_alone_ends_where_they_are_made() {
    let mut g = Graph::new();
    let (x, z) = (f32s(&mut g, "x", &[3, 8]), f32s(&mut g, "z", &[3, 8]));
    let table = f32s(&mut g, "table", &[8, 4]);
    let other = g.top_k(z, 2, "other").unwrap();
    g.top_k(x, 3, "unused").unwrap();
    let scores = g.unary(Unary::Exp, x).unwrap();
    let chosen = g.top_k(scores, 2, "chosen").unwrap();
    let chosen = g.reshape(chosen, &[6]).unwrap();
    let other = g.reshape(other, &[6]).unwrap();
    let rows = g.gather(table, chosen, "rows").unwrap();
    let beside = g.gather(table, other, "beside").unwrap();
    let y = g.add(rows, beside).unwrap();
    says(
        &g,
        y,
        x,
        "TopK at node `chosen`, operand 0 (`x`, f32): the result is indices: they do not \
         change smoothly",
    );
    let r = refusal(&g, rows, &[z]);
    assert_eq!((r.code, r.node.as_str()), (Code::NoGradientPath, "z"));
}

#[test]
fn choices_and_scales_of_adapted_experts() {
    let mut g = Graph::new();
    let mut args = vec![f32s(&mut g, "x", &[3, 1, 8]), f32s(&mut g, "base", &[3, 2, 4])];
    args.extend([i32s(&mut g, "rows", &[3]), i32s(&mut g, "ids", &[3, 2])]);
    for s in 0..2 {
        args.push(f32s(&mut g, &format!("a{s}"), &[5, 2 + s, 8]));
        args.push(f32s(&mut g, &format!("b{s}"), &[5, 4, 2 + s]));
        args.push(f32s(&mut g, &format!("scale{s}"), &[1]));
    }
    let y = g.push(Op::LoraExperts { slots: 2 }, &args, "lora").unwrap();
    for (i, name) in [(2, "rows"), (3, "ids")] {
        let line = format!(
            "LoraExperts at node `lora`, operand {i} (`{name}`, i32): the operand is an index: \
             nothing changes smoothly with it"
        );
        says(&g, y, args[i], &line);
    }
    for (i, s) in [(6, 0), (9, 1)] {
        let line = format!(
            "LoraExperts at node `lora`, operand {i} (`scale{s}`, f32): the operand is an \
             adapter's scale, which is a setting"
        );
        says(&g, y, args[i], &line);
    }
    let dy = format!("d{}", y.index());
    let back = differentiate(&g, y, &[0, 1, 4, 5, 7, 8].map(|i| args[i]));
    let Backward { graph, grads } = back.unwrap();
    let shown: Vec<String> = grads.iter().map(|&d| show(&graph, g.len(), d)).collect();
    assert_eq!(
        shown,
        [
            format!("Sum(LoraExpertsBack({dy}, rows, ids, a0, b0, scale0, a1, b1, scale1))"),
            dy.clone(),
            format!("LoraExpertsBack(x, {dy}, rows, ids, b0, scale0)"),
            format!("LoraExpertsBack(x, {dy}, rows, ids, a0, scale0)"),
            format!("LoraExpertsBack(x, {dy}, rows, ids, b1, scale1)"),
            format!("LoraExpertsBack(x, {dy}, rows, ids, a1, scale1)"),
        ]
    );
    let slot = |&d: &NodeId| match graph.node(d).op {
        Op::LoraExpertsBack { slot, wrt, .. } => Some((slot, wrt)),
        _ => None,
    };
    let of: Vec<_> = grads.iter().filter_map(slot).collect();
    use LoraOperand::{A, B};
    assert_eq!(of, [(0, A), (0, B), (1, A), (1, B)]);
}

#[test]
fn a_value_stored_in_blocks() {
    let mut g = Graph::new();
    let x = f32s(&mut g, "x", &[3, 32]);
    let stored = g.push(Op::Cast { dtype: DType::Block(TensorType::Q8_0) }, &[x], "store");
    let ids = i32s(&mut g, "ids", &[2]);
    let y = g.gather(stored.unwrap(), ids, "read").unwrap();
    says(
        &g,
        y,
        x,
        "Cast at node `store`, operand 0 (`x`, f32): the value is stored in a block format, \
         which carries no gradient",
    );
}

#[test]
fn gradient_ops_have_no_second_order() {
    const WHY: &str = "it is a gradient op, and there are no second-order gradients";
    let mut g = Graph::new();
    let (x, y) = (f32s(&mut g, "x", &[3, 32]), f32s(&mut g, "y", &[3, 32]));
    let w = f32s(&mut g, "w", &[32]);
    let rows = i32s(&mut g, "rows", &[3]);
    let (a, b) = (f32s(&mut g, "a", &[2, 32]), f32s(&mut g, "b", &[32, 2]));
    let scale = f32s(&mut g, "scale", &[1]);
    let heads = f32s(&mut g, "heads", &[3, 1, 32]);
    let block = g.weight("block", shape(&[5, 32]), Q4).unwrap();
    let seqs = i32s(&mut g, "seqs", &[1, 3]);
    let forward = [
        g.push(Op::Glu(GluKind::Geglu), &[x, y], "glu").unwrap(),
        g.push(Op::RmsNorm { eps: 1e-5.into() }, &[x, w], "norm").unwrap(),
        g.push(Op::Lora { slots: 1 }, &[x, y, rows, a, b, scale], "lora").unwrap(),
        g.push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[x, rows], "loss").unwrap(),
        g.project(x, block).unwrap(),
    ];
    let chosen = i32s(&mut g, "chosen", &[3, 1]);
    let (a3, b3) = (f32s(&mut g, "a3", &[4, 2, 32]), f32s(&mut g, "b3", &[4, 32, 2]));
    let adapted = [heads, heads, rows, chosen, a3, b3, scale];
    let adapted = g.push(Op::LoraExperts { slots: 1 }, &adapted, "adapted").unwrap();
    let attrs = AttentionAttrs::new(0.5);
    let attention = g.push(Op::Attention(attrs), &[heads, heads, heads, seqs], "attn").unwrap();
    let taps = f32s(&mut g, "taps", &[32, 1]);
    let none = f32s(&mut g, "none", &[1, 0, 32]);
    let gates = f32s(&mut g, "gates", &[3, 1]);
    let decay = f32s(&mut g, "decay", &[1, 1]);
    let state = f32s(&mut g, "state", &[1, 1, 32, 32]);
    let conv = g.ssm_conv(x, taps, none, seqs, "conv").unwrap();
    let exit = g.ssm_conv_state(x, none, seqs, "exit").unwrap();
    let scan = [heads, gates, decay, heads, heads, state, seqs];
    let scan = g.push(Op::SsmScan, &scan, "scan").unwrap();
    let attrs = GatedDeltaAttrs { scale: 0.5.into(), key_heads: KeyHeads::Cycle };
    let delta = [heads, heads, heads, gates, gates, state, seqs];
    let delta = g.push(Op::GatedDeltaRule(attrs), &delta, "delta").unwrap();
    let all = forward.iter().map(|&y| (y, x)).chain([
        (attention, heads),
        (conv, x),
        (exit, x),
        (scan, gates),
        (delta, gates),
        (adapted, a3),
    ]);
    for ((y, x), op) in all.zip([
        "GegluBack",
        "RmsNormBack",
        "LoraBack",
        "CrossEntropyBack",
        "MatMul",
        "AttentionQueryBack",
        "SsmConvBack",
        "SsmConvStateBack",
        "SsmScanBack",
        "GatedDeltaRuleBack",
        "LoraExpertsBack",
    ]) {
        let mut g = g.clone();
        let seeded = seed(&mut g, y);
        let first = vjp(&g, &[seeded], &[x]).unwrap();
        // With respect to the cotangent, which every gradient is linear in.
        let r = refusal(&first.graph, first.grads[0], &[seeded.1]);
        assert_eq!(
            (r.op.as_str(), r.reason.as_str(), r.code.as_str()),
            (op, WHY, "op_not_differentiable")
        );
        assert_eq!(*r.node, *g.node(y).name);
    }
    // Ops whose gradient is made of ordinary ops differentiate again.
    let y = g.unary(Unary::Tanh, x).unwrap();
    let first = differentiate(&g, y, &[x]).unwrap();
    assert!(differentiate(&first.graph, first.grads[0], &[x]).is_ok());
}

// ---- which refusal ------------------------------------------------------------------------

#[test]
fn the_first_blocked_node_in_forward_order_is_named() {
    let mut g = Graph::new();
    let x = f32s(&mut g, "x", &[3, 32]);
    let q8 = DType::Block(TensorType::Q8_0);
    let ids = i32s(&mut g, "ids", &[3]);
    let mut y = x;
    for i in 0..3 {
        y = g.push(Op::Cast { dtype: q8 }, &[y], &format!("store{i}")).unwrap();
        y = g.gather(y, ids, &format!("read{i}")).unwrap();
    }
    let other = g.push(Op::Cast { dtype: q8 }, &[y], "beside").unwrap();
    let other = g.gather(other, ids, "beside").unwrap();
    let z = g.add(other, y).unwrap();
    assert_eq!(refusal(&g, z, &[x]).node, "store0");
    // Whatever the order of cotangents and wrt.
    let mut g = g.clone();
    let (a, b) = (seed(&mut g, z), seed(&mut g, y));
    for cotangents in [[a, b], [b, a]] {
        for wrt in [[x, y], [y, x]] {
            match vjp(&g, &cotangents, &wrt) {
                Err(Error::Refusal(r)) => assert_eq!(r.node, "store0"),
                other => panic!("not refused: {:?}", other.map(|b| b.grads)),
            }
        }
    }
    // From `y` on, only the last is in the way.
    assert_eq!(refusal(&g, z, &[y]).node, "beside");
    // Nodes that are blocked but not on the way are not.
    assert!(differentiate(&g, y, &[y]).is_ok());
}

#[test]
fn of_one_node_the_first_blocked_operand_is_named() {
    let mut g = Graph::new();
    let (pos, factors) = (i32s(&mut g, "pos", &[3]), f32s(&mut g, "factors", &[2]));
    let angles = RopeAngles {
        dims: 4,
        base: 1e4.into(),
        freq_scale: 1.0.into(),
        factors: true,
        yarn: None,
        sections: None,
    };
    let table = g.push(Op::RopeTable(angles), &[pos, factors], "rope").unwrap();
    for wrt in [[pos, factors], [factors, pos]] {
        assert_eq!(refusal(&g, table, &wrt).operand.unwrap(), "0 (`pos`, i32)");
    }
}

#[test]
fn what_no_output_depends_on_has_no_gradient_path() {
    let mut g = Graph::new();
    let (x, y) = (f32s(&mut g, "x", &[3]), f32s(&mut g, "blk.0.unused", &[3]));
    let z = g.unary(Unary::Tanh, x).unwrap();
    let later = g.unary(Unary::Exp, z).unwrap();
    let r = refusal(&g, z, &[x, y]);
    assert_eq!((r.code.as_str(), r.node.as_str()), ("no_gradient_path", "blk.0.unused"));
    assert_eq!(
        r.to_string(),
        "Leaf at node `blk.0.unused`: no output depends on it, so there is no gradient to compute"
    );
    assert_eq!(refusal(&g, z, &[later]).code, Code::NoGradientPath);
    let Err(e) = vjp(&g, &[], &[x]) else { panic!("no output, yet a gradient") };
    assert_eq!(e.code(), Code::NoGradientPath);
    // Nothing asked, nothing built.
    let back = differentiate(&g, later, &[]).unwrap();
    assert_eq!((back.graph.len(), back.grads.len()), (g.len() + 1, 0));
}

#[test]
fn cotangents_that_do_not_fit_are_invalid() {
    let mut g = Graph::new();
    let x = f32s(&mut g, "x", &[3, 2]);
    let y = g.push(Op::Unary(Unary::Tanh), &[x], "act").unwrap();
    let half = g.leaf("half", shape(&[3, 2]), DType::F16).unwrap();
    let flat = f32s(&mut g, "flat", &[6]);
    let ids = i32s(&mut g, "ids", &[6]);
    let block = g.weight("w", shape(&[2, 32]), Q4).unwrap();
    let wide = f32s(&mut g, "wide", &[2, 32]);
    let line = |y, dy, wrt| match vjp(&g, &[(y, dy)], &[wrt]) {
        Err(Error::Invalid(e)) => e.message,
        other => panic!("not invalid: {:?}", other.map(|b| b.grads)),
    };
    assert_eq!(line(y, flat, x), "the cotangent of node `act` must be f32 [3, 2], is f32 [6]");
    assert_eq!(line(y, half, x), "the cotangent of node `act` must be f32 [3, 2], is f16 [3, 2]");
    assert_eq!(
        line(ids, flat, ids),
        "node `ids` is i32, which has no cotangent; differentiate a float value"
    );
    assert_eq!(
        line(block, wide, block),
        "node `w` is Q4_0, which has no cotangent; differentiate a float value"
    );
    let foreign = Toy { layers: 1, rows: 2, width: 32, heads: 1, vocab: 8 }.build().loss;
    let message = format!("node {} is not of this graph", foreign.index());
    assert_eq!(line(foreign, x, x), message);
    assert_eq!(line(y, foreign, x), message);
    assert_eq!(line(y, x, foreign), message);
}

// ---- what is built ------------------------------------------------------------------------

#[test]
fn only_what_wrt_needs_is_built() {
    let mut g = Graph::new();
    let x = f32s(&mut g, "x", &[2, 3]);
    let (w1, w2) = (f32s(&mut g, "w1", &[4, 3]), f32s(&mut g, "w2", &[5, 4]));
    let h = g.project(x, w1).unwrap();
    let act = g.unary(Unary::Tanh, h).unwrap();
    let y = g.project(act, w2).unwrap();
    let (y, dy) = seed(&mut g, y);
    let count = |wrt: &[NodeId]| vjp(&g, &[(y, dy)], wrt).unwrap().graph.len() - g.len();
    // A product takes one node per operand, tanh takes three.
    assert_eq!(count(&[w2]), 1);
    assert_eq!(count(&[act]), 1);
    assert_eq!(count(&[h]), 1 + 3);
    assert_eq!(count(&[w1]), 1 + 3 + 1);
    assert_eq!(count(&[x]), 1 + 3 + 1);
    assert_eq!(count(&[x, w1]), 1 + 3 + 2);
    assert_eq!(count(&[x, w1, w2]), 1 + 3 + 2 + 1);
    assert_eq!(count(&[y]), 0);
    // The forward nodes keep their ids and are as they were.
    let back = vjp(&g, &[(y, dy)], &[x, w1, w2]).unwrap();
    for id in g.ids() {
        assert_eq!(g.node(id), back.graph.node(id));
    }
    // A cotangent that does not depend on wrt costs nothing.
    let beside = g.clone();
    let free = g.unary(Unary::Exp, w2).unwrap();
    let free = seed(&mut g, free);
    let both = vjp(&g, &[free, (y, dy)], &[x]).unwrap();
    assert_eq!(both.graph.len() - g.len(), 5);
    assert_eq!(vjp(&beside, &[(y, dy)], &[x]).unwrap().graph.len() - beside.len(), 5);
}

#[test]
fn frozen_weights_of_a_model_cost_nothing() {
    let toy = Toy { layers: 3, rows: 8, width: 32, heads: 2, vocab: 64 };
    let Built { graph, loss, adapters } = toy.build();
    let names = |wrt: &[NodeId]| {
        let back = differentiate(&graph, loss, wrt).unwrap();
        let nodes = back.graph.ids().skip(graph.len() + 1).map(|id| back.graph.node(id).clone());
        nodes.collect::<Vec<Node>>()
    };
    let all = names(&adapters);
    // No gradient has the shape of a frozen matrix, and none of the norm's weight is made.
    let weight_grads = |n: &&Node| matches!(n.op, Op::RmsNormBack { wrt: NormOperand::Weight, .. });
    assert_eq!(all.iter().filter(weight_grads).count(), 0);
    assert!(all.iter().all(|n| n.shape != shape(&[64, 32])));
    // With respect to the last layer's adapters alone, the other layers are left in peace.
    let last = names(&adapters[adapters.len() - 2..]);
    assert!(last.iter().all(|n| n.layer.is_none_or(|l| l == 2)));
    assert!(last.len() < 12, "{}", last.len());
}

#[test]
fn several_cotangents_are_added_up() {
    let mut g = Graph::new();
    let x = f32s(&mut g, "x", &[3]);
    let y = g.push(Op::Unary(Unary::Exp), &[x], "y").unwrap();
    let z = g.push(Op::Unary(Unary::Log), &[y], "z").unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|n| f32s(&mut g, n, &[3]));
    let shown = |cotangents: &[(NodeId, NodeId)], wrt| {
        let back = vjp(&g, cotangents, &[wrt]).unwrap();
        show(&back.graph, g.len(), back.grads[0])
    };
    assert_eq!(shown(&[(y, a), (z, b)], x), "Mul(Add(a, Div(b, y)), y)");
    assert_eq!(shown(&[(z, b), (y, a)], x), "Mul(Add(a, Div(b, y)), y)");
    assert_eq!(shown(&[(y, a), (z, b)], y), "Add(a, Div(b, y))");
    assert_eq!(shown(&[(y, a), (y, b), (y, c)], y), "Add(Add(a, b), c)");
    assert_eq!(shown(&[(y, a), (y, a)], y), "Add(a, a)");
    // The gradient at an output is its cotangent.
    assert_eq!(shown(&[(z, b)], z), "b");
    // A value may be its own cotangent, and a cotangent may be in the graph.
    assert_eq!(shown(&[(y, y)], x), "Mul(y, y)");
}

#[test]
fn intermediate_values_have_gradients_too() {
    let mut g = Graph::new();
    let x = f32s(&mut g, "x", &[3]);
    let h = g.push(Op::Unary(Unary::Exp), &[x], "h").unwrap();
    let y = g.push(Op::Unary(Unary::Exp), &[h], "y").unwrap();
    let z = g.push(Op::Binary(Binary::Mul), &[y, h], "z").unwrap();
    let (z, dz) = seed(&mut g, z);
    let back = vjp(&g, &[(z, dz)], &[h, x, y, h]).unwrap();
    let shown: Vec<String> = back.grads.iter().map(|&d| show(&back.graph, g.len(), d)).collect();
    let dh = "Add(Mul(d3, y), Mul(Mul(d3, h), y))";
    assert_eq!(shown, [dh, &format!("Mul({dh}, h)"), "Mul(d3, h)", dh]);
    assert_eq!(back.grads[0], back.grads[3]);
}

#[test]
fn contributions_are_added_from_the_last_reader_to_the_first() {
    let mut g = Graph::new();
    let x = f32s(&mut g, "x", &[3]);
    let parts: Vec<NodeId> = (0..4).map(|i| g.affine(x, i as f32 + 2.0, 0.0).unwrap()).collect();
    let seeds: Vec<_> = parts.iter().map(|&p| seed(&mut g, p)).collect();
    let mut shown = Vec::new();
    for order in [[0, 1, 2, 3], [3, 1, 0, 2]] {
        let cotangents = order.map(|i| seeds[i]);
        let back = vjp(&g, &cotangents, &[x]).unwrap();
        shown.push(show(&back.graph, g.len(), back.grads[0]));
    }
    assert_eq!(shown[0], "Add(Add(Add(Affine(d4), Affine(d3)), Affine(d2)), Affine(d1))");
    assert_eq!(shown[0], shown[1], "the order of cotangents decides the order of a sum");
}

#[test]
fn a_value_used_twice_by_one_node_is_counted_twice() {
    let mut g = Graph::new();
    let x = f32s(&mut g, "x", &[3, 3]);
    let shown = |g: &Graph, y: NodeId| {
        let back = differentiate(g, y, &[x]).unwrap();
        show(&back.graph, g.len(), back.grads[0])
    };
    let y = g.mul(x, x).unwrap();
    assert_eq!(shown(&g, y), format!("Add(Mul(d{0}, x), Mul(d{0}, x))", y.index()));
    let y = g.sub(x, x).unwrap();
    assert_eq!(shown(&g, y), format!("Add(d{0}, Affine(d{0}))", y.index()));
    let y = g.concat(&[x, x], 0).unwrap();
    assert_eq!(shown(&g, y), format!("Add(Slice(d{0}), Slice(d{0}))", y.index()));
    let y = g.push(Op::MatMul { ta: false, tb: true }, &[x, x], "gram").unwrap();
    assert_eq!(shown(&g, y), format!("Add(MatMul(d{0}, x), MatMul(d{0}, x))", y.index()));
}

#[test]
fn gradients_are_summed_back_over_what_was_broadcast() {
    let dims: &[&[usize]] =
        &[&[], &[1], &[4], &[1, 4], &[3, 1], &[3, 4], &[1, 1], &[2, 3, 4], &[2, 1, 4], &[1, 3, 1]];
    let mut summed = 0;
    for a_dims in dims {
        for b_dims in dims {
            for op in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div] {
                let mut g = Graph::new();
                let (a, b) = (f32s(&mut g, "a", a_dims), f32s(&mut g, "b", b_dims));
                let y = g.push(Op::Binary(op), &[a, b], "y").unwrap();
                let wide = g.node(y).shape;
                let back = differentiate(&g, y, &[a, b]).unwrap();
                for (&x, &dx) in [a, b].iter().zip(&back.grads) {
                    let x = g.node(x).shape;
                    assert_eq!(
                        (back.graph.node(dx).shape, back.graph.node(dx).dtype),
                        (x, DType::F32)
                    );
                    let text = show(&back.graph, g.len(), dx);
                    let sums = text.matches("Sum(").count();
                    let stretched = wide.elements() != x.elements();
                    assert_eq!(sums, usize::from(stretched || wide.rank() > x.rank()), "{text}");
                    summed += sums;
                }
            }
        }
    }
    assert!(summed > 300);
    // Which dimensions: the absent ones in front, and those of size 1.
    let mut g = Graph::new();
    let (a, b) = (f32s(&mut g, "a", &[2, 3, 4]), f32s(&mut g, "b", &[3, 1]));
    let y = g.add(a, b).unwrap();
    let back = differentiate(&g, y, &[b]).unwrap();
    let reshape = back.graph.node(back.grads[0]);
    let sum = back.graph.node(reshape.args[0]);
    assert_eq!(
        (&reshape.op, &sum.op),
        (&Op::Reshape { shape: shape(&[3, 1]) }, &Op::Sum { dims: 0b101 })
    );
    // Batches of a shared matrix likewise.
    let (x, w) = (f32s(&mut g, "x", &[2, 5, 4, 3]), f32s(&mut g, "w", &[1, 6, 3]));
    let y = g.project(x, w).unwrap();
    let back = differentiate(&g, y, &[x, w]).unwrap();
    assert_eq!(back.graph.node(back.grads[1]).shape, shape(&[1, 6, 3]));
    assert_eq!(
        show(&back.graph, g.len(), back.grads[1]),
        format!("Reshape(Sum(MatMul(d{}, x)))", y.index())
    );
}

#[test]
fn products_differentiate_in_every_orientation() {
    for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for lead in [vec![], vec![2], vec![2, 1]] {
                let mut g = Graph::new();
                let dims = |t: bool, r: usize, c: usize| {
                    let mut dims = lead.clone();
                    dims.extend(if t { [c, r] } else { [r, c] });
                    shape(&dims)
                };
                let a = g.leaf("a", dims(ta, 3, 4), DType::F32).unwrap();
                let b = g.leaf("b", dims(tb, 4, 5), dtype).unwrap();
                let y = g.push(Op::MatMul { ta, tb }, &[a, b], "y").unwrap();
                let back = differentiate(&g, y, &[a, b]).unwrap();
                for (&x, &dx) in [a, b].iter().zip(&back.grads) {
                    let (x, dx) = (g.node(x), back.graph.node(dx));
                    assert_eq!((dx.shape, dx.dtype), (x.shape, DType::F32), "{ta} {tb} {dtype}");
                }
            }
        }
    }
}

#[test]
fn a_graph_differentiates_to_the_same_nodes_every_time() {
    let toy = Toy { layers: 2, rows: 8, width: 32, heads: 2, vocab: 64 };
    let (one, two) = (toy.train(), toy.train());
    let nodes = |g: &Graph| g.ids().map(|id| g.node(id).clone()).collect::<Vec<_>>();
    assert_eq!(one.1, two.1);
    assert_eq!(nodes(&one.0), nodes(&two.0));
    // Again on top of the first: every node is there already.
    let Built { mut graph, loss, adapters } = toy.build();
    let seeded = seed(&mut graph, loss);
    let first = vjp(&graph, &[seeded], &adapters).unwrap();
    let second = vjp(&first.graph, &[seeded], &adapters).unwrap();
    assert_eq!(first.grads, second.grads);
    assert_eq!(nodes(&first.graph), nodes(&second.graph));
}

#[test]
fn gradient_nodes_carry_the_name_and_layer_of_their_forward_node() {
    let toy = Toy { layers: 3, rows: 8, width: 32, heads: 2, vocab: 64 };
    let Built { mut graph, loss, adapters } = toy.build();
    let seeded = seed(&mut graph, loss);
    let back = vjp(&graph, &[seeded], &adapters).unwrap().graph;
    let forward: std::collections::HashSet<_> =
        graph.ids().map(|id| (graph.node(id).name.clone(), graph.node(id).layer)).collect();
    assert!(graph.ids().all(|id| back.node(id).pass == Pass::Forward));
    for id in back.ids().skip(graph.len()) {
        let node = back.node(id);
        assert_eq!(node.pass, Pass::Backward, "{} `{}`", node.op.name(), node.name);
        assert!(
            forward.contains(&(node.name.clone(), node.layer)),
            "`{}` of layer {:?} names no forward node",
            node.name,
            node.layer
        );
        if let Some(rest) = node.name.strip_prefix("blk.") {
            let layer: u32 = rest.split('.').next().unwrap().parse().unwrap();
            assert_eq!(node.layer.unwrap_or(layer), layer);
        }
    }
    // What is pushed afterwards is forward again, and of no layer.
    let mut after = back.clone();
    let y = after.unary(Unary::Exp, seeded.1).unwrap();
    assert_eq!((after.node(y).pass, after.node(y).layer), (Pass::Forward, None));
    assert_eq!(after.node(y).name, graph.node(seeded.1).name);
}

// ---- random graphs ------------------------------------------------------------------------

/// Which operands have no gradient, told apart from the rules.
fn blocked(g: &Graph, node: &Node, i: usize) -> bool {
    let dtype = g.node(node.args[i]).dtype;
    let block = matches!(dtype, DType::Block(_));
    match &node.op {
        Op::Gather | Op::MatMul { .. } if block => true,
        // The gradient of a product with a block matrix has no gradient itself.
        Op::MatMul { tb: false, .. } => {
            i == 0 && matches!(g.node(node.args[1]).dtype, DType::Block(_))
        }
        Op::RopeTable(_) => true,
        Op::Rope { .. } => i == 1,
        Op::Lora { .. } => i > 3 && i % 3 == 2 || dtype == DType::I32,
        Op::Attention(_) => dtype == DType::I32,
        Op::CrossEntropy(_) => i > 0,
        op => op.name().ends_with("Back") || dtype == DType::I32,
    }
}

/// Whether any of `to` depends on `from`, or is it.
fn reaches(g: &Graph, from: NodeId, to: &[NodeId]) -> bool {
    let mut on = vec![false; g.len()];
    on[from.index()] = true;
    for id in g.ids() {
        on[id.index()] |= g.node(id).args.iter().any(|a| on[a.index()]);
    }
    to.iter().any(|t| on[t.index()])
}

/// The first blocked operand on a way from `wrt` to `ys`, by walking every way.
fn predicted(g: &Graph, ys: &[NodeId], wrt: NodeId) -> Option<(NodeId, usize)> {
    for id in g.ids() {
        let node = g.node(id);
        for (i, &a) in node.args.iter().enumerate() {
            if blocked(g, node, i) && reaches(g, wrt, &[a]) && reaches(g, id, ys) {
                return Some((id, i));
            }
        }
    }
    None
}

#[test]
fn random_graphs_differentiate_or_are_refused_where_predicted() {
    let (mut made, mut refused, mut unreachable) = (0, 0, 0);
    for seed_ in 0..300 {
        let mut random = random::graph(seed_ + 5000, 4 + (seed_ as usize * 5) % 30);
        let mut rng = Rng(seed_);
        // In the second half, of graphs that hold gradients already: second order.
        let mut ys: Vec<NodeId> = random.values.iter().rev().take(2).copied().collect();
        if seed_ >= 150 {
            let cotangents: Vec<_> = ys.iter().map(|&y| seed(&mut random.graph, y)).collect();
            let wrt = rng.pick(&random.leaves);
            let Ok(back) = vjp(&random.graph, &cotangents, &[wrt]) else { continue };
            random.graph = back.graph;
            ys = back.grads;
        }
        let mut g = random.graph;
        let cotangents: Vec<_> = ys.iter().map(|&y| seed(&mut g, y)).collect();
        let leaves: Vec<NodeId> = g.ids().filter(|&id| matches!(g.node(id).op, Op::Leaf)).collect();
        for _ in 0..8 {
            let mut wrt = rng.pick(&leaves);
            while !reaches(&g, wrt, &ys) && rng.chance(80) {
                wrt = rng.pick(&leaves);
            }
            let expected = predicted(&g, &ys, wrt);
            match vjp(&g, &cotangents, &[wrt]) {
                Ok(back) => {
                    assert_eq!(expected, None);
                    let (x, dx) = (g.node(wrt), back.graph.node(back.grads[0]));
                    assert_eq!((dx.shape, dx.dtype), (x.shape, DType::F32));
                    made += 1;
                }
                Err(Error::Refusal(r)) if r.code == Code::NoGradientPath => {
                    assert!(!reaches(&g, wrt, &ys), "{r}");
                    unreachable += 1;
                }
                Err(Error::Refusal(r)) => {
                    let (id, i) = expected.unwrap_or_else(|| panic!("refused: {r}"));
                    assert_eq!(r.code, Code::OpNotDifferentiable, "{r}");
                    assert_eq!(
                        (r.op.as_str(), &*r.node),
                        (g.node(id).op.name(), &*g.node(id).name)
                    );
                    assert!(r.operand.unwrap().starts_with(&format!("{i} ")));
                    refused += 1;
                }
                Err(e) => panic!("{e}"),
            }
        }
    }
    println!("{made} differentiated, {refused} refused, {unreachable} without a path");
    assert!(made > 500 && refused > 300 && unreachable > 100);
}
