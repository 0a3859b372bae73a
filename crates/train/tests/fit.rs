//! Settings that are said to fit do, with the data they are for.
#![allow(clippy::unwrap_used)] // helpers of tests may panic

use std::sync::Arc;

use gguf::TensorType;
use model::Model;
use model::toy::Toy;
use train::{
    Cut, Example, Goal, Gradients, GraphConfig, Masks, Parameters, TrainConfig, Trainer, Wanted,
    Window, halves, nearest, select_targets,
};

fn toy() -> Model {
    let device = Arc::new(cpu::Cpu::new(2, None).unwrap());
    let bytes = Toy::new("llama", TensorType::Q8_0, 3).gguf().unwrap();
    Model::from_gguf(gguf::Gguf::from_bytes("toy.gguf", bytes).unwrap(), device).unwrap()
}

fn example(rows: usize) -> Example {
    Example {
        tokens: (0..=rows).map(|i| 20 + (i * 7 % 250) as u32).collect(),
        weights: vec![1.0; rows + 1],
    }
}

fn config(model: &Model, rows: usize) -> TrainConfig {
    TrainConfig {
        targets: select_targets(model, &["attn".into()]).unwrap(),
        rank: 4,
        epochs: 2,
        graph: GraphConfig { rows, ..GraphConfig::default() },
        ..TrainConfig::default()
    }
}

/// The plan is that of the largest graph, whatever the number of rows.
#[test]
fn no_window_needs_more_than_the_plan() {
    let model = toy();
    for rows in [16, 44, 64, 100, 128] {
        let graph = GraphConfig { rows, ..GraphConfig::default() };
        let mut gradients = Gradients::new(&model, graph).unwrap();
        let targets = select_targets(&model, &["attn".into()]).unwrap();
        let targets = targets.iter().map(|target| (target.as_str(), 4));
        let adapter = Some(model::Adapter::fresh(&model, targets, 8.0, 1).unwrap());
        let parameters = Parameters { adapter, ..Parameters::default() };
        let planned = gradients.plan(&parameters).unwrap().arena_bytes();
        for labelled in [1, rows / 2, rows - 1, rows] {
            let mut example = example(rows);
            let quiet = rows - labelled;
            example.weights.iter_mut().take(quiet + 1).for_each(|w| *w = 0.0);
            let window = Window::from(vec![example]);
            let (arena, _) = gradients.prepare(&window, false, &parameters).unwrap();
            assert!(arena <= planned, "{labelled} of {rows} rows: {arena} of {planned} bytes");
            let goal = Goal::Gradient(Masks::of(0, 0));
            gradients.measure(&window, labelled as f64, goal, &parameters, &()).unwrap();
        }
    }
}

#[test]
fn settings_that_are_said_to_fit_fit() {
    let model = toy();
    let examples: Arc<[Example]> = [44, 20, 31, 10].map(example).into();
    let held_out: Arc<[Example]> = [30, 9].map(example).into();
    type Set<'s> = (&'s str, &'s dyn Fn(&mut TrainConfig));
    let set: [Set<'_>; 4] = [
        ("nothing", &|_| {}),
        ("patience", &|c| c.patience = Some(2)),
        ("keep_best", &|c| c.keep_best = true),
        ("eval_every", &|c| c.eval_every = 1),
    ];
    let (mut found, mut shortened) = (0, 0);
    for (name, change) in set {
        let mut config = config(&model, 512);
        change(&mut config);
        for allowed in (200..12_000).step_by(200).map(|kib| kib << 10) {
            let wanted = Wanted {
                fallback: None,
                examples: &examples,
                held_out: &held_out,
                allowed,
                checkpoint_every: Some(1),
                cut: Cut::Anywhere,
                window: &|rows| rows,
                chunks: &|window| halves(window).collect(),
            };
            let Some(near) = nearest(&&model, &config, &wanted).unwrap() else { continue };
            // A window that texts are cut into.
            if near.config.longest() < 44 {
                shortened += 1;
                continue;
            }
            found += 1;
            let mut trainer = Trainer::new(&model, near.config.clone()).unwrap();
            trainer.checkpoint_every(1);
            trainer.load(examples.clone(), held_out.clone()).unwrap();
            let needs = trainer.planned_bytes() + trainer.scratch_bytes();
            let (window, chunk) = near.window();
            assert!(needs <= allowed, "{name}: {window}, {chunk:?}: {needs} of {allowed} bytes");
        }
    }
    assert!(found > 20 && shortened > 0, "{found} {shortened}");
}

/// A shorter window is named where what is taught has room in it, all of it, and nowhere else; and
/// it is one that the host allows, as are chunks.
#[test]
fn what_is_named_holds_the_answers_and_is_what_the_host_allows() {
    let model = toy();
    let taught = |rows: usize, answer: usize| {
        let mut example = example(rows);
        example.weights.iter_mut().take(rows + 1 - answer).for_each(|w| *w = 0.0);
        example
    };
    let none: Arc<[Example]> = Arc::new([]);
    let short: Arc<[Example]> = [taught(240, 20), taught(30, 9)].into();
    let long: Arc<[Example]> = [taught(240, 20), taught(200, 150)].into();
    let few = |allowed: usize, examples: &Arc<[Example]>, held_out: &Arc<[Example]>, cut| {
        let wanted = Wanted {
            fallback: None,
            examples,
            held_out,
            cut,
            allowed,
            checkpoint_every: None,
            window: &|rows| rows.next_multiple_of(24),
            chunks: &|_| vec![160, 80],
        };
        nearest(&&model, &config(&model, 480), &wanted).unwrap()
    };
    let mut windows = std::collections::BTreeSet::new();
    let mut chunks = std::collections::BTreeSet::new();
    for allowed in (100..8_000).step_by(200).map(|kib| kib << 10) {
        let of_short = few(allowed, &short, &none, Cut::BeforeAnswers);
        for (named, longest) in [
            (of_short.clone(), 20),
            (few(allowed, &long, &none, Cut::BeforeAnswers), 150),
            (few(allowed, &short, &long, Cut::BeforeAnswers), 150),
        ] {
            let Some(named) = named else { continue };
            let (window, chunk) = named.window();
            assert!(window >= longest && window.is_multiple_of(24), "{window}");
            assert_eq!(named.shortens, window < 240);
            assert_eq!(named.in_words().contains("`fit` \"left\""), named.shortens);
            windows.insert(window);
            chunks.extend(chunk);
        }
        // Of texts nothing has to stay whole.
        if let Some(named) = few(allowed, &long, &none, Cut::Anywhere) {
            assert!(!named.shortens);
        } else {
            assert_eq!(of_short, None);
        }
    }
    assert!(windows.range(..150).next().is_some() && windows.contains(&240), "{windows:?}");
    assert!(chunks.contains(&80), "{chunks:?}");
}
