//! P4: what a plan says of a run's memory is said before any of it is taken.
#![allow(clippy::unwrap_used)] // helpers of tests may panic
#![cfg(target_os = "linux")]

use std::path::PathBuf;
use std::sync::Arc;

use gguf::TensorType;
use model::Model;
use model::toy::Toy;
use train::{Example, GraphConfig, TrainConfig, Trainer, select_targets, select_weights};

/// Bytes of memory of this process's own.
fn anonymous() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// The only test of its process, whose memory it measures.
#[test]
fn what_moves_is_neither_drawn_nor_read_for_a_plan() {
    let mut toy = Toy::new("llama", TensorType::F32, 3);
    (toy.width, toy.ffn) = (512, 4096);
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("memory.gguf");
    std::fs::write(&path, toy.gguf().unwrap()).unwrap();
    let model = Model::load(&path, Arc::new(cpu::Cpu::new(1, None).unwrap())).unwrap();
    let graph = GraphConfig { rows: 16, ..GraphConfig::default() };
    let adapter = TrainConfig {
        targets: select_targets(&model, &["all".into()]).unwrap(),
        rank: 512,
        graph: graph.clone(),
        ..TrainConfig::default()
    };
    let weights = select_weights(&model, &["ffn".into()]).unwrap();
    let own = TrainConfig { targets: Vec::new(), weights, graph, ..TrainConfig::default() };
    for config in [adapter, own] {
        let before = anonymous();
        let mut trainer = Trainer::new(&model, config).unwrap();
        let example = Example { tokens: (1..12).collect(), weights: vec![1.0; 11] };
        trainer.load(vec![example], Vec::new()).unwrap();
        let planned = trainer.planned_bytes();
        let moves = trainer.parameter_bytes() / 4;
        let taken = anonymous().saturating_sub(before);
        assert!(moves > 16 << 20, "{moves} bytes are too few to be seen");
        assert!(taken < moves / 4, "{taken} bytes are taken for a plan of {planned}");
        assert_eq!(trainer.held_bytes(), 0);
        assert!(trainer.reserve().is_ok() && trainer.held_bytes() > 0);
    }
}
