//! A small decoder: the shape of graph that training plans.

use gguf::TensorType;
use gradus_graph::*;

use super::shape;

pub struct Toy {
    pub layers: u32,
    pub rows: usize,
    pub width: usize,
    pub heads: usize,
    pub vocab: usize,
}

pub struct Built {
    pub graph: Graph,
    /// The loss of every row.
    pub loss: NodeId,
    /// Every adapter's A and B.
    pub adapters: Vec<NodeId>,
}

struct Maker<'t> {
    toy: &'t Toy,
    g: Graph,
    rows: NodeId,
    scale: NodeId,
    adapters: Vec<NodeId>,
}

impl Maker<'_> {
    fn linear(&mut self, x: NodeId, name: &str, n: usize) -> NodeId {
        let k = self.g.node(x).shape.cols();
        let w = self.g.weight(name, shape(&[n, k]), DType::Block(TensorType::Q4_0)).unwrap();
        let base = self.g.project(x, w).unwrap();
        let a = self.g.leaf(&format!("{name}.a"), shape(&[4, k]), DType::F32).unwrap();
        let b = self.g.leaf(&format!("{name}.b"), shape(&[n, 4]), DType::F32).unwrap();
        self.adapters.extend([a, b]);
        let args = [x, base, self.rows, a, b, self.scale];
        self.g.push(Op::Lora { slots: 1 }, &args, &format!("{name}.lora")).unwrap()
    }

    fn norm(&mut self, x: NodeId, name: &str) -> NodeId {
        let w = self.g.leaf(name, shape(&[self.toy.width]), DType::F32).unwrap();
        self.g.rms_norm(x, w, 1e-5).unwrap()
    }

    fn block(&mut self, x: NodeId, il: u32, table: NodeId, seqs: NodeId) -> NodeId {
        let Toy { rows, width, heads, .. } = *self.toy;
        let name = |what: &str| format!("blk.{il}.{what}");
        self.g.set_layer(Some(il));
        let h = self.norm(x, &name("attn_norm"));
        let mut qkv = ["attn_q", "attn_k", "attn_v"].map(|w| {
            let y = self.linear(h, &name(w), width);
            self.g.reshape(y, &[rows, heads, width / heads]).unwrap()
        });
        for (i, y) in qkv.iter_mut().enumerate() {
            if i < 2 {
                let op = Op::Rope { style: RopeStyle::Halves, inverse: false };
                *y = self.g.push(op, &[*y, table], &name("rope")).unwrap();
            }
            if i > 0 {
                *y = self.g.round(*y, DType::F16).unwrap();
            }
        }
        let attrs = AttentionAttrs::new(0.25);
        let args = [qkv[0], qkv[1], qkv[2], seqs];
        let y = self.g.push(Op::Attention(attrs), &args, &name("attn")).unwrap();
        let y = self.g.reshape(y, &[rows, width]).unwrap();
        let y = self.linear(y, &name("attn_output"), width);
        let x = self.g.add(x, y).unwrap();
        let h = self.norm(x, &name("ffn_norm"));
        let gate = self.linear(h, &name("ffn_gate"), 4 * width);
        let up = self.linear(h, &name("ffn_up"), 4 * width);
        let y = self.g.push(Op::Glu(GluKind::Swiglu), &[gate, up], &name("ffn_act")).unwrap();
        let y = self.linear(y, &name("ffn_down"), width);
        let x = self.g.add(x, y).unwrap();
        self.g.set_layer(None);
        x
    }
}

impl Toy {
    pub fn build(&self) -> Built {
        let mut g = Graph::new();
        let ids = g.leaf("ids", shape(&[self.rows]), DType::I32).unwrap();
        let pos = g.leaf("pos", shape(&[self.rows]), DType::I32).unwrap();
        let seqs = g.leaf("seqs", shape(&[1, 3]), DType::I32).unwrap();
        let labels = g.leaf("labels", shape(&[self.rows]), DType::I32).unwrap();
        let rows = g.leaf("rows", shape(&[self.rows]), DType::I32).unwrap();
        let scale = g.leaf("scale", shape(&[1]), DType::F32).unwrap();
        let embed = g
            .weight("token_embd", shape(&[self.vocab, self.width]), DType::Block(TensorType::Q8_0))
            .unwrap();
        let mut x = g.gather(embed, ids, "token_embd").unwrap();
        let angles = RopeAngles {
            dims: self.width / self.heads,
            base: 1e4.into(),
            freq_scale: 1.0.into(),
            factors: false,
            yarn: None,
            sections: None,
        };
        let table = g.push(Op::RopeTable(angles), &[pos], "rope").unwrap();
        let mut maker = Maker { toy: self, g, rows, scale, adapters: Vec::new() };
        for il in 0..self.layers {
            x = maker.block(x, il, table, seqs);
        }
        let x = maker.norm(x, "output_norm");
        let logits = maker.g.project(x, embed).unwrap();
        let loss = maker
            .g
            .push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[logits, labels], "loss")
            .unwrap();
        Built { graph: maker.g, loss, adapters: maker.adapters }
    }

    /// The training graph: the loss and the gradients of all adapters.
    pub fn train(&self) -> (Graph, Vec<NodeId>) {
        let Built { mut graph, loss, adapters } = self.build();
        let weights = graph.leaf("weights", shape(&[self.rows]), DType::F32).unwrap();
        let back = vjp(&graph, &[(loss, weights)], &adapters).unwrap();
        let outputs = [&[loss], &back.grads[..]].concat();
        (back.graph, outputs)
    }
}
