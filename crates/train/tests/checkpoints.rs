//! P6 across a stop: a run goes on from a checkpoint bit for bit, and from no other run's.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::path::PathBuf;
use std::sync::Arc;

use gguf::TensorType;
use graph::Stop;
use model::Model;
use model::toy::Toy;
use testkit::Random;
use train::{
    Advance, Checkpoints, Event, Example, GraphConfig, Method, Outcome, Schedule, Snapshot,
    TrainConfig, Trainer, select_targets,
};

fn toy(arch: &'static str, ty: TensorType, seed: u64) -> Model {
    let device = Arc::new(cpu::Cpu::new(2, None).unwrap());
    // A file, since a model's own tensors are read from it again.
    let name = format!("checkpoints-{arch}-{}-{seed}.gguf", ty.name());
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let whole = path.with_extension(format!("{:?}", std::thread::current().id()));
    std::fs::write(&whole, Toy::new(arch, ty, seed).gguf().unwrap()).unwrap();
    std::fs::rename(&whole, &path).unwrap();
    Model::load(&path, device).unwrap()
}

fn examples(seed: u64, lengths: &[usize]) -> Vec<Example> {
    let mut random = Random::new(seed);
    let example = |&n: &usize| Example {
        tokens: (0..n).map(|_| random.below(320) as u32).collect(),
        weights: (0..n).map(|i| if i < n / 3 { 0.0 } else { 1.0 }).collect(),
    };
    lengths.iter().map(example).collect()
}

fn config(model: &Model) -> TrainConfig {
    TrainConfig {
        targets: select_targets(model, &["attn".into()]).unwrap(),
        rank: 4,
        alpha: 12.0,
        lr: 3e-3,
        schedule: Schedule::Wsd,
        warmup: 2,
        weight_decay: 0.01,
        epochs: 3,
        accumulate: 2,
        clip: 1.0,
        seed: 11,
        eval_every: 2,
        graph: GraphConfig { rows: 32, ..GraphConfig::default() },
        ..TrainConfig::default()
    }
}

fn trainer<'m>(model: &'m Model, config: &TrainConfig) -> Trainer<&'m Model> {
    let mut trainer = Trainer::new(model, config.clone()).unwrap();
    let held_out = examples(77, &[9, 20]);
    trainer.load(examples(5, &[9, 31, 17, 30, 5, 22, 32, 12]), held_out).unwrap();
    trainer.checkpoint_every(1);
    trainer
}

/// Runs to the end: events but checkpoints, what was written down after each event of a step, as
/// where a run is ended by a signal, and after how many of these events, outcome.
fn run(mut trainer: Trainer<&Model>) -> (Vec<Event>, Vec<(usize, Snapshot)>, Outcome) {
    let (mut events, mut snapshots) = (Vec::new(), Vec::new());
    loop {
        match trainer.advance(&()).unwrap() {
            Advance::Event(Event::Checkpoint(snapshot)) => {
                snapshots.push((events.len(), *snapshot))
            }
            Advance::Event(event) => {
                let ends = matches!(event, Event::EarlyStop { .. });
                events.push(event);
                if trainer.steps() > 0 && !ends {
                    snapshots.push((events.len(), trainer.snapshot().unwrap()));
                }
            }
            Advance::Stopped => {}
            Advance::Done => return (events, snapshots, trainer.finish().unwrap()),
        }
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

#[test]
fn a_run_goes_on_from_any_checkpoint_bit_for_bit() {
    let model = toy("qwen35moe", TensorType::Q8_0, 3);
    let kept =
        TrainConfig { keep_best: true, method: Method::Sgd { momentum: 0.9 }, ..config(&model) };
    let own = TrainConfig {
        targets: Vec::new(),
        weights: train::select_weights(&model, &["norm".into()]).unwrap(),
        method: Method::Sgd { momentum: 0.0 },
        ..config(&model)
    };
    // It gets worse after its first epoch.
    let ended = TrainConfig { patience: Some(1), eval_every: 1, lr: 1.0, ..config(&model) };
    let mut early = 0;
    for (i, config) in [config(&model), kept, own, ended].into_iter().enumerate() {
        let (events, snapshots, whole) = run(trainer(&model, &config));
        assert!(whole.steps >= 3 && snapshots.len() as u64 >= 2 * whole.steps, "{}", whole.steps);
        early += events.iter().filter(|e| matches!(e, Event::EarlyStop { .. })).count();
        let file = folder(&format!("any-checkpoint-{i}")).with_extension("safetensors");
        for (same, snapshot) in snapshots {
            let step = snapshot.steps();
            snapshot.write(&file).unwrap();
            let read = Snapshot::read(&file).unwrap();
            assert!(read == snapshot, "step {step} reads otherwise than it was written");
            let mut resumed = trainer(&model, &config);
            resumed.restore(read, false).unwrap();
            let (later, _, outcome) = run(resumed);
            assert!(outcome == whole, "setting {i}: going on from step {step} ends elsewhere");
            assert_eq!(events[same..], later[..], "setting {i}: other events after step {step}");
        }
    }
    assert_eq!(early, 1, "no run ended early");
}

/// After every so many steps, wherever an epoch ends, and after the last one.
#[test]
fn what_is_held_out_is_evaluated_when_its_step_has_come_and_nowhere_else() {
    let model = toy("llama", TensorType::Q8_0, 3);
    let evaluated = |eval_every: u64| {
        let config = TrainConfig { eval_every, accumulate: 1, epochs: 4, ..config(&model) };
        let (events, _, outcome) = run(trainer(&model, &config));
        let (mut step, mut at, mut epochs) = (0, Vec::new(), Vec::new());
        for event in events {
            match event {
                Event::Step { step: now, .. } => step = now,
                Event::Epoch { held_out, .. } => {
                    epochs.push(step);
                    at.extend(held_out.map(|_| step));
                }
                Event::Evaluated { step, .. } => at.push(step),
                _ => {}
            }
        }
        (at, epochs, outcome.steps)
    };
    let (at, epochs, last) = evaluated(0);
    assert_eq!((&at, epochs.len()), (&epochs, 4));
    for every in [2, 3, 7, 1000] {
        let (at, ends, _) = evaluated(every);
        let mut expected: Vec<u64> = (1..=last).filter(|step| step % every == 0).collect();
        expected.extend((!last.is_multiple_of(every)).then_some(last));
        assert_eq!(at, expected, "every {every}");
        assert_eq!(ends, epochs, "epochs are told all the same");
    }
}

/// Stops at every edge there is.
struct Everywhere;

impl Stop for Everywhere {
    fn should_stop(&self) -> bool {
        true
    }
}

/// A process is told to end where it happens to be: also while a step moves parameters, or the best
/// ones are kept.
#[test]
fn what_is_written_down_at_any_edge_is_whole() {
    let model = toy("llama", TensorType::Q8_0, 3);
    let config = TrainConfig { keep_best: true, epochs: 2, ..config(&model) };
    let fresh = || {
        let mut trainer = Trainer::new(&model, config.clone()).unwrap();
        trainer.load(examples(5, &[31, 30, 17]), examples(77, &[9, 20])).unwrap();
        trainer
    };
    let (events, _, whole) = run(fresh());
    assert!(whole.steps >= 3, "{}", whole.steps);
    // Of the edges within graphs, a few of each step will do.
    let (mut edges, mut seen, mut trainer) = (Vec::new(), 0, fresh());
    let mut steps = 0;
    for edge in 0.. {
        match trainer.advance(&Everywhere).unwrap() {
            Advance::Done => break,
            Advance::Event(Event::Step { step, .. }) => (steps, seen) = (step, 0),
            Advance::Event(_) => seen = 0,
            Advance::Stopped => {
                seen += 1;
                if seen < 3 || trainer.steps() > steps {
                    edges.push(edge);
                }
            }
        }
    }
    assert!(edges.len() > 4 * trainer.parameters().unwrap().names().len(), "{}", edges.len());
    for edge in edges {
        let (mut trainer, mut before) = (fresh(), Vec::new());
        for _ in 0..=edge {
            if let Advance::Event(event) = trainer.advance(&Everywhere).unwrap() {
                before.push(event);
            }
        }
        let snapshot = trainer.snapshot().unwrap();
        let step = snapshot.steps();
        let mut resumed = fresh();
        resumed.restore(snapshot, false).unwrap();
        let (_, _, outcome) = run(resumed);
        assert!(outcome == whole, "edge {edge}: going on from step {step} ends elsewhere");
        // Nothing is lost on the run itself either.
        let (later, _, outcome) = run(trainer);
        assert!(outcome == whole, "edge {edge}: the run that was written down ends elsewhere");
        assert_eq!([before, later].concat(), events, "edge {edge}");
    }
}

#[test]
fn checkpoints_of_other_runs_are_refused_by_name() {
    let model = toy("llama", TensorType::Q8_0, 3);
    let config = config(&model);
    let snapshot = trainer(&model, &config).snapshot().unwrap();
    let refused = |model: &Model, config: &TrainConfig, lengths: &[usize]| {
        let mut other = Trainer::new(model, config.clone()).unwrap();
        other.load(examples(5, lengths), examples(77, &[9, 20])).unwrap();
        other.restore(snapshot.clone(), false).map_err(|e| e.to_string())
    };
    let lengths = [9, 31, 17, 30, 5, 22, 32, 12];
    refused(&model, &config, &lengths).unwrap();
    let e = refused(&toy("llama", TensorType::Q8_0, 4), &config, &lengths).unwrap_err();
    assert!(e.starts_with("the checkpoint is of another model"), "{e}");
    let e = refused(&model, &config, &lengths[1..]).unwrap_err();
    assert!(e.starts_with("the checkpoint is of other data"), "{e}");
    // The same conversations, of which more are held out.
    let mut all = examples(5, &lengths);
    all.extend(examples(77, &[9, 20]));
    let mut other = Trainer::new(&model, config.clone()).unwrap();
    let held_out = all.split_off(7);
    other.load(all, held_out).unwrap();
    let e = other.restore(snapshot.clone(), false).unwrap_err().to_string();
    assert!(e.starts_with("the checkpoint is of other data"), "{e}");
    let other = |change: &dyn Fn(&mut TrainConfig)| {
        let mut config = config.clone();
        change(&mut config);
        refused(&model, &config, &lengths).unwrap_err()
    };
    let e = other(&|c| c.lr = 1e-3);
    assert!(e.contains("a run with `lr` 0.003, this one has 0.001;"), "{e}");
    // As options are spelled.
    let e = other(&|c| c.schedule = Schedule::Constant);
    assert!(e.contains("a run with `schedule` \"wsd\", this one has \"constant\";"), "{e}");
    let e = other(&|c| c.method = Method::Sgd { momentum: 0.5 });
    assert!(e.contains("a run with `optimizer` \"adamw\", this one has \"sgd\";"), "{e}");
    let e = other(&|c| c.graph.cache = graph::DType::Block(TensorType::Q8_0));
    assert!(e.contains("a run with `cache` \"f16\", this one has \"q8_0\";"), "{e}");
    for (change, name) in [
        (&(|c: &mut TrainConfig| c.rank = 5) as &dyn Fn(&mut TrainConfig), "rank"),
        (&|c| c.seed = 1, "seed"),
        (&|c| c.graph.rows = 64, "window"),
        (&|c| c.method = Method::Sgd { momentum: 0.0 }, "optimizer"),
        (&|c| c.method = Method::AdamW { beta1: 0.8, beta2: 0.999, eps: 1e-8 }, "beta1"),
        (&|c| c.schedule = Schedule::Linear, "schedule"),
        (&|c| c.keep_best = true, "keep_best"),
    ] {
        let e = other(change);
        assert!(e.contains(&format!("`{name}`")), "{name}: {e}");
    }
}

/// Other kernels end in other bits: going on with them has to be asked for.
#[test]
fn a_checkpoint_of_another_kernel_family_is_refused_unless_forced() {
    let of = |family: cpu::Family| {
        let device = Arc::new(cpu::Cpu::new(2, Some(family)).unwrap());
        let bytes = Toy::new("llama", TensorType::Q8_0, 3).gguf().unwrap();
        Model::from_gguf(gguf::Gguf::from_bytes("toy.gguf", bytes).unwrap(), device).unwrap()
    };
    let families = cpu::Family::ALL;
    let Some(other) =
        families.into_iter().find(|f| *f != cpu::Family::Portable && f.is_available())
    else {
        return;
    };
    let (portable, other) = (of(cpu::Family::Portable), of(other));
    let snapshot = trainer(&portable, &config(&portable)).snapshot().unwrap();
    let mut resumed = trainer(&other, &config(&other));
    let e = resumed.restore(snapshot.clone(), false).unwrap_err().to_string();
    assert!(e.contains("a run with `portable` kernels"), "{e}");
    resumed.restore(snapshot, true).unwrap();
    run(resumed);
}

/// Another build may compute in another order: going on with it has to be asked for.
#[test]
fn a_checkpoint_of_another_arithmetic_is_refused_unless_forced() {
    let model = toy("llama", TensorType::Q8_0, 3);
    let config = config(&model);
    let path = folder("arithmetic").with_extension("safetensors");
    trainer(&model, &config).snapshot().unwrap().write(&path).unwrap();
    let key = format!("\\\"numerics\\\":{}", graph::NUMERICS);
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(key.len()).position(|w| w == key.as_bytes()).unwrap() + key.len() - 1;
    bytes[at] = if bytes[at] == b'9' { b'8' } else { bytes[at] + 1 };
    std::fs::write(&path, &bytes).unwrap();
    let snapshot = Snapshot::read(&path).unwrap();
    let mut resumed = trainer(&model, &config);
    let e = resumed.restore(snapshot.clone(), false).unwrap_err().to_string();
    let own = format!("that of this one has {}", graph::NUMERICS);
    assert!(e.contains("a build whose arithmetic has the number") && e.contains(&own), "{e}");
    resumed.restore(snapshot, true).unwrap();
    run(resumed);
}

#[test]
fn damaged_checkpoints_are_named_and_passed_over() {
    let model = toy("llama", TensorType::Q8_0, 3);
    let (_, mut snapshots, _) = run(trainer(&model, &config(&model)));
    snapshots.dedup_by_key(|(_, snapshot)| snapshot.steps());
    let checkpoints = Checkpoints::new(folder("damaged"), 2);
    assert!(checkpoints.last().unwrap().is_none());
    let files: Vec<PathBuf> =
        snapshots.iter().map(|(_, s)| checkpoints.write(s).unwrap()).collect();
    let there: Vec<bool> = files.iter().map(|f| f.exists()).collect();
    assert_eq!(there.iter().filter(|t| **t).count(), 2);
    let (last, before) = (&files[files.len() - 1], &files[files.len() - 2]);
    assert_eq!(checkpoints.last().unwrap().unwrap().1, *last);
    let bytes = std::fs::read(last).unwrap();
    for cut in [0, 4, 8, 100, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(last, &bytes[..cut]).unwrap();
        let e = Snapshot::read(last).unwrap_err().to_string();
        assert!(e.contains("no checkpoint") && e.contains("step-"), "{e}");
        assert_eq!(checkpoints.last().unwrap().unwrap().1, *before);
    }
    // A header that lies.
    let header =
        String::from_utf8_lossy(&bytes).replacen("\\\"version\\\":4", "\\\"version\\\":9", 1);
    assert!(header.contains("\\\"version\\\":9"));
    let at = bytes.windows(13).position(|w| w == b"\\\"version\\\":4").unwrap();
    let mut lies = bytes.clone();
    lies[at + 12] = b'9';
    std::fs::write(last, &lies).unwrap();
    let e = Snapshot::read(last).unwrap_err().to_string();
    assert!(e.contains("its version is 9, expected 4; go on with the build that wrote it"), "{e}");
    checkpoints.clear();
    assert!(!checkpoints.folder().exists());
}

/// What others have in a folder of checkpoints is theirs.
#[test]
fn files_of_others_stay_in_a_folder_of_checkpoints() {
    let model = toy("llama", TensorType::Q8_0, 3);
    let (_, mut snapshots, _) = run(trainer(&model, &config(&model)));
    snapshots.dedup_by_key(|(_, snapshot)| snapshot.steps());
    let (place, _) = (folder("others"), folder("others.old"));
    std::fs::create_dir(&place).unwrap();
    let names = ["run", "lock", ".tmpABC", ".step-notes.tmp", "step-7.safetensors", "step-one"];
    let theirs = || names.map(|name| std::fs::read_to_string(place.join(name)).ok());
    names.iter().for_each(|name| std::fs::write(place.join(name), name).unwrap());
    let whole = names.map(|name| Some(name.to_string()));
    // What a killed process left is ours.
    let partial = place.join(".step-00000009.safetensors.tmp");
    std::fs::write(&partial, "half").unwrap();
    let checkpoints = Checkpoints::new(place.clone(), 1);
    let (lock, old) = checkpoints.claim(false).unwrap();
    assert_eq!((theirs(), old), (whole.clone(), None));
    snapshots.iter().for_each(|(_, snapshot)| drop(checkpoints.write(snapshot).unwrap()));
    assert!(!partial.exists());
    assert_eq!(theirs(), whole);
    drop(lock);
    // Another run moves ours aside, and no others.
    let (lock, old) = checkpoints.claim(false).unwrap();
    let old = old.unwrap();
    assert_eq!((theirs(), old.file_name().unwrap()), (whole.clone(), "others.old".as_ref()));
    assert!(Checkpoints::new(old.clone(), 1).last().unwrap().is_some());
    checkpoints.write(&snapshots[0].1).unwrap();
    checkpoints.clear();
    drop(lock);
    assert_eq!(theirs(), whole);
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), names.len());
    std::fs::remove_dir_all(&old).unwrap();

    // What is called like a checkpoint and is none is not written over, moved or removed, and
    // neither is it in the folder that earlier ones are moved to.
    let foreign = place.join("step-00000001.safetensors");
    std::fs::write(&foreign, "theirs").unwrap();
    let refused = |checkpoints: &Checkpoints| {
        let e = checkpoints.claim(false).unwrap_err().to_string();
        assert!(e.contains("step-00000001.safetensors is called like a checkpoint"), "{e}");
        assert_eq!(std::fs::read_to_string(&foreign).unwrap(), "theirs");
    };
    refused(&checkpoints);
    assert!(checkpoints.check().is_err());
    let earlier = Checkpoints::new(place.clone(), 1);
    std::fs::rename(&place, place.with_extension("moved")).unwrap();
    drop(earlier.claim(false).unwrap());
    earlier.write(&snapshots[0].1).unwrap();
    std::fs::rename(place.with_extension("moved"), place.with_extension("old")).unwrap();
    let foreign = place.with_extension("old").join("step-00000001.safetensors");
    assert!(earlier.claim(false).is_err());
    assert_eq!(std::fs::read_to_string(foreign).unwrap(), "theirs");
    assert!(earlier.last().unwrap().is_some());
    // Checkpoints that somebody has copied are checkpoints.
    std::fs::remove_file(place.join("gradus.lock")).unwrap();
    earlier.check().unwrap();
    drop(earlier.claim(true).unwrap());
}

/// The adapter that a run goes on with decides what comes of it, and so do its scales, which no
/// checkpoint has.
#[test]
fn a_run_that_went_on_with_another_adapter_is_refused() {
    let model = toy("llama", TensorType::Q8_0, 3);
    let start = |change: &dyn Fn(&mut model::Adapter)| {
        let config = config(&model);
        let mut adapter = model::Adapter::fresh(&model, config.ranks(), 12.0, 5).unwrap();
        change(&mut adapter);
        let optimizer = train::Optimizer::new(config.method, config.weight_decay);
        let start = train::Start { from: Some((adapter, optimizer)), fallback: None };
        let mut trainer = Trainer::start(&model, config, start).unwrap();
        trainer.load(examples(5, &[9, 31]), examples(77, &[9, 20])).unwrap();
        trainer
    };
    let fresh = || {
        let mut trainer = Trainer::new(&model, config(&model)).unwrap();
        trainer.load(examples(5, &[9, 31]), examples(77, &[9, 20])).unwrap();
        trainer
    };
    let name = "blk.0.attn_q.weight";
    let snapshot = start(&|_| ()).snapshot().unwrap();
    let file = folder("from").with_extension("safetensors");
    snapshot.write(&file).unwrap();
    let read = Snapshot::read(&file).unwrap();
    start(&|_| ()).restore(read, false).unwrap();
    let refused = |mut trainer: Trainer<&Model>, snapshot: &Snapshot, what: &str| {
        let e = trainer.restore(snapshot.clone(), false).unwrap_err().to_string();
        assert!(e.starts_with("the checkpoint is of a run ") && e.contains(what), "{e}");
    };
    let other = "went on with another adapter";
    refused(start(&|a| a.tensors.get_mut(name).unwrap().a[0] += 1.0), &snapshot, other);
    refused(start(&|a| a.tensors.get_mut(name).unwrap().scale *= 2.0), &snapshot, other);
    refused(fresh(), &snapshot, "this one has none");
    refused(start(&|_| ()), &fresh().snapshot().unwrap(), "without an adapter to go on with");
}

#[test]
fn a_run_that_gets_no_better_ends_with_its_best() {
    let model = toy("llama", TensorType::F32, 3);
    let config = TrainConfig {
        lr: 0.05,
        schedule: Schedule::Constant,
        weight_decay: 0.0,
        epochs: 60,
        patience: Some(3),
        ..config(&model)
    };
    let (events, _, outcome) = run(trainer(&model, &config));
    let held_out: Vec<(u64, f64)> = events
        .iter()
        .scan(0, |step, event| {
            if let Event::Step { step: now, .. } = event {
                *step = *now;
            }
            Some(match event {
                Event::Evaluated { held_out, .. } => Some((*step, *held_out)),
                Event::Epoch { held_out, .. } => held_out.map(|loss| (*step, loss)),
                _ => None,
            })
        })
        .flatten()
        .collect();
    let best = held_out.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert_eq!(outcome.best, Some(best));
    let Some(Event::EarlyStop { best: step, held_out: loss }) = events.last() else {
        panic!("{:?}", events.last());
    };
    assert_eq!((*step, *loss), best);
    let at = held_out.iter().position(|e| *e == best).unwrap();
    assert_eq!(held_out.len(), at + 1 + 3, "three evaluations without a new best");
    assert!(outcome.steps > best.0);
    // The file is the best one's: a run that ends there gives the same.
    let epochs = TrainConfig { patience: None, ..config };
    let mut again = trainer(&model, &epochs);
    while again.steps() < best.0 {
        again.advance(&()).unwrap();
    }
    assert!(again.finish().unwrap().adapter == outcome.adapter);
}

#[test]
fn patience_needs_something_held_out() {
    let model = toy("llama", TensorType::F32, 3);
    let config = TrainConfig { patience: Some(1), ..config(&model) };
    let mut trainer = Trainer::new(&model, config).unwrap();
    let e = trainer.load(examples(5, &[9]), Vec::new()).unwrap_err().to_string();
    assert_eq!(e, "`patience` is set, but nothing is held out to evaluate");
}

/// F23: rsLoRA divides by the root of the rank, and a file says so by its alpha.
#[test]
fn f23_rslora_scales_by_the_root_of_the_rank() {
    let model = toy("llama", TensorType::F32, 3);
    let config = TrainConfig { rank: 16, alpha: 16.0, rslora: true, ..config(&model) };
    let adapter = trainer(&model, &config).finish().unwrap().adapter;
    assert!(adapter.tensors.values().all(|t| t.scale == 4.0), "{}", adapter.alpha);
    assert_eq!(adapter.alpha, 64.0);
    let file = folder("rslora").with_extension("gguf");
    adapter.write(&file, &model).unwrap();
    assert!(model::Adapter::read(&file, &model).unwrap() == adapter);
}

#[test]
fn each_target_may_have_its_rank() {
    let model = toy("llama", TensorType::F32, 3);
    let mut config = config(&model);
    let queries = select_targets(&model, &["attn_q.".into()]).unwrap();
    config.ranks = queries.iter().map(|name| (name.clone(), 2)).collect();
    let (_, _, outcome) = run(trainer(&model, &config));
    for (name, pair) in &outcome.adapter.tensors {
        let rank = if queries.contains(name) { 2 } else { 4 };
        assert_eq!((pair.rank, pair.scale), (rank, 12.0 / rank as f32), "{name}");
    }
    let file = folder("ranks").with_extension("gguf");
    outcome.adapter.write(&file, &model).unwrap();
    assert!(model::Adapter::read(&file, &model).unwrap() == outcome.adapter);
    let rslora = TrainConfig { rslora: true, ..config.clone() };
    let e = Trainer::new(&model, rslora).err().unwrap().to_string();
    assert!(e.contains("`rslora`") && e.contains("one rank"), "{e}");
    let stray = TrainConfig { ranks: [("blk.0.ffn_up.weight".to_string(), 2)].into(), ..config };
    let e = Trainer::new(&model, stray).err().unwrap().to_string();
    assert!(e.contains("`ranks` is about `blk.0.ffn_up.weight`"), "{e}");
}

/// What a run is said to cost has its evaluations in it.
#[test]
fn evaluations_are_in_what_a_run_costs() {
    let model = toy("llama", TensorType::F32, 3);
    let cost = |held_out: &[usize], eval_every: u64, first: bool| {
        let config = TrainConfig { eval_every, ..config(&model) };
        let mut trainer = Trainer::new(&model, config).unwrap();
        if first {
            trainer.measure_first();
        }
        trainer.load(examples(5, &[30; 8]), examples(77, held_out)).unwrap();
        trainer.cost().unwrap().float
    };
    let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
    // Where nothing is held out, the last window is run forward once more.
    let one = cost(&[30], 0, true) - cost(&[30], 0, false);
    let none = cost(&[], 0, false) - one;
    // Eight windows an epoch, two in a step: four steps, in three epochs.
    let epochs = cost(&[30], 0, false) - none;
    assert!(one > 0.0 && close(epochs, 3.0 * one));
    assert!(close(cost(&[30, 30], 0, false) - none, 2.0 * epochs));
    assert!(close(cost(&[30], 2, false) - none, 2.0 * epochs));
    assert!(close(cost(&[30], 1, false) - none, 4.0 * epochs));
    // After steps 3, 6, 9 and 12, and after 5, 10 and the last.
    assert!(close(cost(&[30], 3, false) - none, epochs / 3.0 * 4.0));
    assert!(close(cost(&[30], 5, false) - none, epochs));
}
