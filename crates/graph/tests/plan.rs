//! Plans: bytes, places, order, copies and refusals.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers are tests"
)]

mod common;

use common::check::{check, peak};
use common::*;
use gradus_graph::*;

#[test]
fn random_graphs_compute_what_they_say() {
    let (mut differentiated, mut worst) = (0, 0.0f64);
    for seed in 0..400 {
        let (graph, outputs) = random::with_gradients(seed, 4 + (seed as usize * 7) % 40);
        differentiated += usize::from(outputs.len() > 3);
        let mut devices: Vec<Box<dyn Device>> =
            vec![Box::new(any_layout()), Box::new(dense_only()), Box::new(picky(seed))];
        for device in devices.drain(..) {
            let plan = plan(&graph, &outputs, &*device).unwrap();
            check(&graph, &outputs, &plan);
            worst = worst.max(plan.arena_bytes as f64 / peak(&plan).max(1) as f64);
        }
    }
    println!("differentiated {differentiated}, arena up to {worst:.3} of the peak");
    assert!(differentiated > 250, "only {differentiated} graphs had gradients");
}
