//! What passes between a run and its owner.

use std::time::Duration;

use gguf::TensorType;
use model::toy::Toy;

use super::*;
use crate::Options;

/// A disk that is slower than the steps: one copy waits to be written, never two.
#[test]
fn a_run_holds_until_its_checkpoint_is_written() {
    let bytes = Toy::new("llama", TensorType::Q4_1, 3).gguf().unwrap();
    let file = gguf::Gguf::from_bytes("toy.gguf", bytes).unwrap();
    let cpu = Arc::new(cpu::Cpu::new(1, None).unwrap());
    let model = Arc::new(Model::from_gguf(file, cpu).unwrap());
    let targets = train::select_targets(&model, &["attn_q".into()]).unwrap();
    let server = Server::start(model, Options { positions: 256, ..Options::default() }).unwrap();
    let config = TrainConfig { targets, epochs: 4, ..TrainConfig::default() };
    let examples = [Example { tokens: (1..30).collect(), weights: vec![1.0; 29] }].into();
    let none = Arc::new([]) as Arc<[Example]>;
    let setup = Setup {
        config: &config,
        examples: &examples,
        held_out: &none,
        budget: None,
        may_recompute: false,
        measure_first: false,
        checkpoint_every: Some(1),
    };
    let control = server.claim("slow").unwrap();
    let Prepared { trainer, .. } = server.set_up(&setup, Start::default()).unwrap();
    let progress = server.hand_over(trainer, control.clone(), Pacing::Never).unwrap();
    for step in 1..=4 {
        let snapshot = progress.iter().find_map(|news| match news {
            Progress::Event(Event::Checkpoint(snapshot), _) => Some(snapshot),
            _ => None,
        });
        assert_eq!(snapshot.unwrap().steps(), step);
        let held = Held { control: &control, to_loop: &server.0.to_loop };
        std::thread::sleep(Duration::from_millis(100));
        assert!(progress.try_iter().all(|news| matches!(news, Progress::Measured(_))));
        drop(held);
    }
    let ended = progress.iter().any(|news| matches!(news, Progress::Ended(_)));
    assert!(ended, "it goes on to its end");
}
