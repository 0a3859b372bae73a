//! Routed experts inside of models: what each layer gives beside the oracle, ties in the router,
//! and experts that no row chose.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

mod common;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use gguf::{Gguf, TensorInfo, TensorType, Value};
use graph::{DType, Leaf, NodeId, Op, Segment};
use model::toy::Toy;
use model::{EntryStates, Model, Net, NetConfig};
use testkit::{Golden, fixture, relative_l2};

fn device(threads: usize) -> Arc<cpu::Cpu> {
    Arc::new(cpu::Cpu::new(threads, None).unwrap())
}

/// The residual stream after each layer, and each router's logits.
fn layers(model: &Model, tokens: &[u32]) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let rows = tokens.len();
    let config = NetConfig {
        rows,
        seqs: 1,
        logit_rows: 0,
        cache: DType::F32,
        prefix: None,
        states: EntryStates::Zero,
        adapters: Vec::new(),
        dropout: None,
        trainable: BTreeSet::new(),
    };
    let mut net = Net::new(model.weights(), &config);
    model.arch().hidden(&mut net).unwrap();
    let graph = net.graph;
    let count = model.geometry().layers;
    let last = |layer: usize| -> NodeId {
        graph.ids().rev().find(|&id| graph.node(id).layer == Some(layer as u32)).unwrap()
    };
    let router = |layer: usize| -> Option<NodeId> {
        let name = format!("blk.{layer}.ffn_gate_inp.weight");
        let is = |&id: &NodeId| {
            let node = graph.node(id);
            *node.name == *name && matches!(node.op, Op::MatMul { .. })
        };
        graph.ids().find(is)
    };
    let hidden: Vec<NodeId> = (0..count).map(last).collect();
    let routers: Vec<NodeId> = (0..count).filter_map(router).collect();
    let outputs = [&hidden[..], &routers[..]].concat();
    let plan = graph::plan(&graph, &outputs, model.device().as_ref()).unwrap();
    let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
    let positions: Vec<i32> = (0..rows as i32).collect();
    let seqs = [0, rows as i32, 0];
    let leaf = |name: &str| match name {
        "tokens" => Leaf::Host(bytemuck::cast_slice(&ids)),
        "positions" => Leaf::Host(bytemuck::cast_slice(&positions)),
        "seqs" => Leaf::Host(bytemuck::cast_slice(&seqs)),
        weight => model.weights().get(weight).unwrap().leaf(),
    };
    let leaves: Vec<Leaf<'_>> = plan.leaves.iter().map(|slot| leaf(&slot.name)).collect();
    let mut arena = model.device().arena(plan.arena_bytes).unwrap();
    model.device().run(&plan, &leaves, arena.as_mut(), Segment::default(), &()).unwrap();
    let mut values: Vec<Vec<f32>> = Vec::new();
    for slot in &plan.outputs {
        let mut value = vec![0f32; slot.shape.elements()];
        arena.read(slot.range.clone(), bytemuck::cast_slice_mut(&mut value)).unwrap();
        values.push(value);
    }
    let routers = values.split_off(count);
    (values, routers)
}

#[test]
fn every_layer_and_router_gives_the_golden_values() {
    for (arch, routed) in [
        ("gemma3", false),
        ("llama", false),
        ("mixtral", true),
        ("qwen2", false),
        ("qwen3", false),
        ("qwen3_moe", true),
    ] {
        let model = Model::load(&fixture(arch, "model.gguf"), device(2)).unwrap();
        let golden = Golden::read(&fixture(arch, "golden.safetensors")).unwrap();
        for i in 0..2 {
            let tokens = golden.get(&format!("tokens.{i}")).unwrap();
            let tokens: Vec<u32> = tokens.iter().map(|&t| t as u32).collect();
            let (hidden, routers) = layers(&model, &tokens);
            assert_eq!(routers.len(), if routed { hidden.len() } else { 0 }, "{arch}");
            for (what, values) in [("hidden", hidden), ("router_logits", routers)] {
                for (l, values) in values.iter().enumerate() {
                    let name = format!("{what}.{i}.{l}");
                    let error = relative_l2(values, &golden.get(&name).unwrap());
                    assert!(error < 1e-5, "{arch}, {name}: {error:e}");
                }
            }
        }
    }
}

/// A toy of f32 whose tensors are changed.
fn edited(toy: &Toy, edit: impl Fn(&str, &mut [f32])) -> Vec<u8> {
    let file = Gguf::from_bytes("toy.gguf", toy.gguf().unwrap()).unwrap();
    let tensors = file.tensors().map(|tensor| {
        let mut values = tensor.to_f32().unwrap();
        edit(&tensor.info.name, &mut values);
        (tensor.info.clone(), Cow::Owned(bytemuck::cast_slice(&values).to_vec()))
    });
    let tensors: Vec<(TensorInfo, Cow<'_, [u8]>)> = tensors.collect();
    gguf::encode(file.metadata(), tensors).unwrap()
}

fn load(bytes: Vec<u8>, threads: usize) -> Arc<Model> {
    let file = Gguf::from_bytes("toy.gguf", bytes).unwrap();
    Arc::new(Model::from_gguf(file, device(threads)).unwrap())
}

/// With a router of zeros all shares are equal, and rows take the first experts: the others are
/// never read, whatever they hold.
#[test]
fn ties_go_to_the_first_experts_and_the_others_are_not_read() {
    let toy = Toy { experts_used: 3, ..Toy::new("qwen3moe", TensorType::F32, 5) };
    let tie = |name: &str, values: &mut [f32]| {
        if name.contains("ffn_gate_inp") {
            values.fill(0.0);
        }
    };
    let tokens = common::tokens(3, 70);
    let tied = common::cold(&load(edited(&toy, tie), 2), &tokens, None);
    let spoilt = |name: &str, values: &mut [f32]| {
        tie(name, values);
        if name.contains("_exps.weight") {
            let each = values.len() / toy.experts;
            values[toy.experts_used * each..].fill(f32::NAN);
        }
    };
    for threads in [1, 2] {
        let again = common::cold(&load(edited(&toy, spoilt), threads), &tokens, None);
        assert!(tied == again, "{threads} threads");
    }
    // One of those that were chosen would have shown.
    let other = |name: &str, values: &mut [f32]| {
        tie(name, values);
        if name == "blk.1.ffn_down_exps.weight" {
            let each = values.len() / toy.experts;
            values[(toy.experts_used - 1) * each] += 1.0;
        }
    };
    assert!(tied != common::cold(&load(edited(&toy, other), 2), &tokens, None));
}

/// One expert that all rows use is the feed-forward half of a dense model, bit for bit.
#[test]
fn one_expert_is_the_dense_model() {
    for format in [TensorType::F32, TensorType::Q4_0] {
        let toy = Toy { experts: 1, experts_used: 1, ..Toy::new("llama", format, 5) };
        let bytes = toy.gguf().unwrap();
        let file = Gguf::from_bytes("toy.gguf", bytes.clone()).unwrap();
        let mut metadata = file.metadata().clone();
        metadata.insert("llama.expert_count", Value::U32(0));
        let of_dense = file.tensors().filter(|t| !t.info.name.contains("ffn_gate_inp"));
        let tensors = of_dense.map(|tensor| {
            let info = tensor.info;
            let name = info.name.replace("_exps", "");
            let shape = if name == info.name { &info.shape[..] } else { &info.shape[1..] };
            (TensorInfo::new(name, info.ty, shape).unwrap(), Cow::Borrowed(tensor.bytes))
        });
        let dense = gguf::encode(&metadata, tensors.collect::<Vec<_>>()).unwrap();
        let tokens = common::tokens(3, 70);
        let (one, dense) = (load(bytes, 2), load(dense, 2));
        assert_eq!(dense.projections()["blk.0.ffn_up.weight"].experts, None);
        assert!(common::cold(&one, &tokens, None) == common::cold(&dense, &tokens, None));
    }
}

/// Where one expert is chosen it weighs 1 however sure the router is of it.
#[test]
fn one_expert_alone_weighs_1() {
    let toy = Toy { experts_used: 1, ..Toy::new("qwen3moe", TensorType::F32, 5) };
    let tokens: Vec<u32> = (0..20).map(|i| i * 13 % 320).collect();
    let hidden = |factor: f32| {
        let sure = |name: &str, values: &mut [f32]| {
            if name.contains("ffn_gate_inp") {
                values.iter_mut().for_each(|v| *v *= factor);
            }
        };
        layers(&load(edited(&toy, sure), 2), &tokens).0
    };
    assert!(hidden(1.0) == hidden(4.0) && hidden(1.0) == hidden(0.25));
    assert!(hidden(1.0) != hidden(-1.0), "another expert is chosen");
}
