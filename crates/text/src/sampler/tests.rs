use std::collections::BTreeSet;

use super::math::{log_prob, log_sum_exp};
use super::*;

fn random_logits(len: usize, seed: u64, spread: f32) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..len)
        .map(|_| {
            // A sum of uniforms: most logits lie close together, a few stand out.
            let x: f64 = (0..4).map(|_| rng.next_f64() - 0.5).sum();
            x as f32 * spread
        })
        .collect()
}

fn sampler(config: SamplerConfig) -> Sampler {
    Sampler::new(config, 1).unwrap()
}

/// The chain in f64, straight from the definitions, with a set of survivors.
fn expected(config: &SamplerConfig, logits: &[f32], history: &[u32]) -> Vec<(u32, f64)> {
    let mut l: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
    for (&id, &b) in &config.logit_bias {
        l[id as usize] += f64::from(b);
    }
    let window = &history[history.len().saturating_sub(config.repeat_last_n as usize)..];
    for id in window.iter().collect::<BTreeSet<_>>() {
        let count = window.iter().filter(|x| *x == id).count() as f64;
        let x = &mut l[*id as usize];
        let r = f64::from(config.repeat_penalty);
        *x = if *x > 0.0 { *x / r } else { *x * r };
        *x -= count * f64::from(config.frequency_penalty) + f64::from(config.presence_penalty);
    }
    let mut alive: Vec<u32> =
        (0..l.len() as u32).filter(|&i| l[i as usize] > f64::NEG_INFINITY).collect();
    let softmax = |alive: &[u32]| -> Vec<f64> {
        let e: Vec<f64> = alive.iter().map(|&i| l[i as usize].exp()).collect();
        let sum: f64 = e.iter().sum();
        e.iter().map(|x| x / sum).collect()
    };
    let descending = |alive: &mut Vec<u32>| {
        alive.sort_by(|&a, &b| l[b as usize].total_cmp(&l[a as usize]).then(a.cmp(&b)));
    };
    if config.top_k > 0 {
        descending(&mut alive);
        alive.truncate(config.top_k as usize);
    }
    if config.typical_p < 1.0 {
        let p = softmax(&alive);
        let h: f64 = p.iter().map(|p| -p * p.ln()).sum();
        let mut order: Vec<usize> = (0..alive.len()).collect();
        order.sort_by(|&a, &b| {
            (-p[a].ln() - h).abs().total_cmp(&(-p[b].ln() - h).abs()).then(alive[a].cmp(&alive[b]))
        });
        let mut sum = 0.0;
        let mut kept = Vec::new();
        for i in order {
            kept.push(alive[i]);
            sum += p[i];
            if sum > f64::from(config.typical_p) {
                break;
            }
        }
        alive = kept;
    }
    if config.top_p < 1.0 {
        descending(&mut alive);
        let p = softmax(&alive);
        let mut sum = 0.0;
        let n = p.iter().position(|p| {
            sum += p;
            sum >= f64::from(config.top_p)
        });
        alive.truncate(n.map_or(alive.len(), |n| n + 1));
    }
    if config.min_p > 0.0 {
        let p = softmax(&alive);
        let max = p.iter().copied().fold(0.0, f64::max);
        let least = max * f64::from(config.min_p);
        alive = alive.into_iter().zip(p).filter(|(_, p)| *p >= least).map(|(i, _)| i).collect();
    }
    alive.sort_unstable();
    let t = f64::from(config.temperature);
    let max = alive.iter().map(|&i| l[i as usize]).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = alive.iter().map(|&i| ((l[i as usize] - max) / t).exp()).sum();
    alive.iter().map(|&i| (i, (l[i as usize] - max) / t - sum.ln())).collect()
}

fn off() -> SamplerConfig {
    SamplerConfig::unfiltered()
}

#[test]
fn the_chain_follows_its_definitions() {
    let configs = [
        off(),
        SamplerConfig { temperature: 0.3, ..off() },
        SamplerConfig { temperature: 2.5, top_k: 7, ..off() },
        SamplerConfig { top_p: 0.8, ..off() },
        SamplerConfig { top_p: 0.9999, ..off() },
        SamplerConfig { top_p: 0.0, ..off() },
        SamplerConfig { min_p: 0.1, ..off() },
        SamplerConfig { min_p: 1.0, ..off() },
        SamplerConfig { typical_p: 0.5, ..off() },
        SamplerConfig { typical_p: 0.0, ..off() },
        SamplerConfig { repeat_penalty: 1.4, repeat_last_n: 5, ..off() },
        SamplerConfig { presence_penalty: 0.7, frequency_penalty: 0.3, ..off() },
        SamplerConfig { presence_penalty: 0.7, repeat_last_n: 0, ..off() },
        SamplerConfig { logit_bias: [(3, 5.0), (4, f32::NEG_INFINITY)].into(), ..off() },
        SamplerConfig {
            temperature: 0.7,
            top_k: 60,
            typical_p: 0.95,
            top_p: 0.9,
            min_p: 0.02,
            repeat_penalty: 1.1,
            presence_penalty: 0.2,
            frequency_penalty: 0.1,
            repeat_last_n: 20,
            logit_bias: [(1, -2.0), (2, 3.0)].into(),
        },
    ];
    let mut compared = 0;
    for (seed, len) in [(1, 5usize), (2, 100), (3, 3000), (4, 20_000)] {
        let mut logits = random_logits(len, seed, 8.0);
        logits[0] = f32::NEG_INFINITY;
        let history: Vec<u32> = (0..40).map(|i| (i * i * 7 + 2) % len.min(11) as u32).collect();
        for config in &configs {
            // Below e^-87 the sampler's weights are 0.
            let mut want = expected(config, &logits, &history);
            want.retain(|w| w.1 > -80.0);
            let mut got = sampler(config.clone()).distribution(&logits, &history).unwrap();
            got.retain(|g| g.logprob > -80.0);
            let got: BTreeMap<u32, f64> =
                got.iter().map(|s| (s.id, f64::from(s.logprob))).collect();
            let want: BTreeMap<u32, f64> = want.into_iter().collect();
            // At the edge of a nucleus the rounding of the sum decides; what it moves is tiny.
            let moved: f64 = got
                .iter()
                .filter(|(id, _)| !want.contains_key(id))
                .chain(want.iter().filter(|(id, _)| !got.contains_key(id)))
                .map(|(_, logprob)| logprob.exp())
                .sum();
            assert!(moved < 2e-6, "{config:?} on {len}: {moved} of the probability");
            for (id, w) in &want {
                let Some(g) = got.get(id) else { continue };
                assert!((g - w).abs() < 1e-5, "{config:?} on {len}: token {id} {g} {w}");
                compared += 1;
            }
        }
    }
    assert!(compared > 100_000, "{compared}");
}

#[test]
fn draws_follow_the_distribution() {
    let logits = random_logits(50, 9, 6.0);
    let config = SamplerConfig { temperature: 0.9, top_k: 20, top_p: 0.97, ..off() };
    let mut s = sampler(config);
    let want = s.distribution(&logits, &[]).unwrap();
    const N: usize = 40_000;
    let mut counts = vec![0u32; logits.len()];
    for _ in 0..N {
        let drawn = s.sample(&logits, &[]).unwrap();
        counts[drawn.id as usize] += 1;
        // F35: the probability told is that of the distribution drawn from.
        assert!(want.contains(&drawn));
    }
    let mut chi = 0.0;
    for w in &want {
        let e = f64::from(w.logprob).exp() * N as f64;
        chi += (f64::from(counts[w.id as usize]) - e).powi(2) / e;
        counts[w.id as usize] = 0;
    }
    assert!(counts.iter().all(|&n| n == 0), "drew a filtered token");
    // The 0.1 % point of chi-squared with up to 19 degrees of freedom.
    assert!(chi < 43.8, "{chi} with {} tokens", want.len());
}

#[test]
fn f34_the_logprob_of_a_near_certain_token_is_finite_and_not_positive() {
    for gap in [20.0f32, 88.0, 1e4, 1e30, f32::MAX] {
        for temperature in [1e-30, 0.5, 1.0, 100.0] {
            let mut logits = vec![-gap / 2.0; 1000];
            logits[777] = gap / 2.0;
            let mut s = sampler(SamplerConfig { temperature, ..off() });
            for _ in 0..20 {
                let got = s.sample(&logits, &[]).unwrap();
                assert!(got.logprob <= 0.0 && got.logprob.is_finite(), "{gap} {got:?}");
                if gap / temperature > 100.0 {
                    assert_eq!(got, Sampled { id: 777, logprob: 0.0 });
                }
            }
        }
    }
}

#[test]
fn f35_the_logprob_is_that_of_the_tempered_distribution() {
    let logits = random_logits(32_000, 11, 7.0);
    let mut s = sampler(SamplerConfig { temperature: 0.6, ..off() });
    let scaled: Vec<f32> = logits.iter().map(|x| x / 0.6).collect();
    for _ in 0..100 {
        let got = s.sample(&logits, &[]).unwrap();
        let trainers = log_prob(&scaled, got.id).unwrap();
        assert!((got.logprob - trainers).abs() < 1e-5, "{got:?} {trainers}");
    }
}

#[test]
fn the_path_of_a_filter_changes_no_bit() {
    let logits = random_logits(5000, 5, 5.0);
    let neutral = |config| {
        let mut s = Sampler::new(config, 77).unwrap();
        (0..200).map(|_| s.sample(&logits, &[]).unwrap()).collect::<Vec<_>>()
    };
    let none = neutral(off());
    // Each of these goes another way and keeps every token.
    assert_eq!(neutral(SamplerConfig { top_k: 5000, ..off() }), none);
    assert_eq!(neutral(SamplerConfig { top_k: 6000, ..off() }), none);
    assert_eq!(neutral(SamplerConfig { min_p: 1e-30, ..off() }), none);
    // And these keep the same 40 tokens, one by selection, one by a ban of the others.
    let forty = neutral(SamplerConfig { top_k: 40, ..off() });
    let mut order: Vec<u32> = (0..5000).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    let ban = order[40..].iter().map(|&id| (id, f32::NEG_INFINITY)).collect();
    assert_eq!(neutral(SamplerConfig { logit_bias: ban, ..off() }), forty);
    // The log-sum-exp of the survivors is that of the vocabulary with the rest at -inf.
    let mut masked = logits.clone();
    order[40..].iter().for_each(|&id| masked[id as usize] = f32::NEG_INFINITY);
    let some: Vec<Candidate> = (0..5000)
        .filter(|&id| masked[id as usize] > f32::NEG_INFINITY)
        .map(|id| Candidate::new(id, masked[id as usize]))
        .collect();
    assert_eq!(log_total(&some).to_bits(), log_sum_exp(&masked).to_bits());
}

#[test]
fn same_seed_same_tokens_and_a_generation_can_be_resumed() {
    let logits = random_logits(1000, 6, 4.0);
    let run = |seed, skip: u64| {
        let mut s = Sampler::new(SamplerConfig::default(), seed).unwrap();
        s.set_draws(skip);
        (skip..50).map(|_| s.sample(&logits, &[1, 2]).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(run(5, 0), run(5, 0));
    assert_ne!(run(5, 0), run(6, 0));
    assert_eq!(run(5, 0)[20..], run(5, 20));
    // A greedy draw counts as one, so that it can stand among others.
    let mut s = Sampler::new(SamplerConfig::greedy(), 5).unwrap();
    s.sample(&logits, &[]).unwrap();
    assert_eq!(s.draws(), 1);
}

#[test]
fn greedy_takes_the_greatest_and_of_equals_the_lowest_id() {
    let mut s = sampler(SamplerConfig::greedy());
    assert_eq!(s.sample(&[1.0, 3.0, 3.0, 2.0], &[]).unwrap().id, 1);
    assert_eq!(s.sample(&[f32::NEG_INFINITY, -5.0], &[]).unwrap().id, 1);
    assert_eq!(s.sample(&[0.0, -0.0], &[]).unwrap().id, 0);
    // Bias and penalties come before.
    let config = SamplerConfig { logit_bias: [(3, 2.0)].into(), ..SamplerConfig::greedy() };
    assert_eq!(sampler(config).sample(&[1.0, 3.0, 3.0, 2.0], &[]).unwrap().id, 3);
    let config = SamplerConfig { repeat_penalty: 2.0, ..SamplerConfig::greedy() };
    assert_eq!(sampler(config).sample(&[1.0, 3.0, 2.0], &[1]).unwrap().id, 2);
    // Only the last tokens of the history count.
    let config = SamplerConfig { repeat_penalty: 2.0, repeat_last_n: 2, ..SamplerConfig::greedy() };
    assert_eq!(sampler(config).sample(&[1.0, 3.0, 2.0], &[1, 0, 0]).unwrap().id, 1);
    // A draw's ties are settled alike: top-k keeps the lowest ids.
    let kept = sampler(SamplerConfig { top_k: 2, ..off() }).distribution(&[1.0; 9], &[]).unwrap();
    assert_eq!(kept.iter().map(|s| s.id).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn bad_logits_and_ids_are_errors() {
    let text = |config: SamplerConfig, logits: &[f32], history: &[u32]| {
        let mut s = sampler(config);
        let error = s.sample(logits, history).unwrap_err().to_string();
        assert_eq!(s.draws(), 0);
        assert_eq!(s.distribution(logits, history).unwrap_err().to_string(), error);
        error
    };
    for config in [off(), SamplerConfig::greedy()] {
        let expected = "expected finite logits or -inf, and at least one finite: weights or an \
                        adapter that are damaged or too large are the cause";
        assert_eq!(
            text(config.clone(), &[0.0, f32::NAN], &[]),
            format!("logit 1 of 2 is NaN; {expected}")
        );
        assert_eq!(
            text(config.clone(), &[0.0, -1.0, f32::INFINITY], &[]),
            format!("logit 2 of 3 is inf; {expected}")
        );
        let none = format!("no token is left to choose from; {expected}");
        assert_eq!(text(config.clone(), &[], &[]), none);
        assert_eq!(text(config.clone(), &[f32::NEG_INFINITY], &[]), none);
        // What the settings lead to is the fault of whoever set them.
        let adjusted =
            "after bias and penalties; expected at least one finite logit, and none above";
        let banned =
            SamplerConfig { logit_bias: [(0, f32::NEG_INFINITY)].into(), ..config.clone() };
        let none = format!("no token is left to choose from {adjusted}");
        assert_eq!(text(banned, &[1.0], &[]), none);
        let range = "token id 9 is out of range; the vocabulary has 2 tokens";
        let biased = SamplerConfig { logit_bias: [(9, 1.0)].into(), ..config.clone() };
        assert_eq!(text(biased, &[1.0, 2.0], &[]), range);
        let penalized = SamplerConfig { presence_penalty: 1.0, ..config.clone() };
        assert_eq!(text(penalized, &[1.0, 2.0], &[9]), range);
        let boosted = SamplerConfig { repeat_penalty: 0.01, ..config };
        assert_eq!(text(boosted, &[1e38, 2.0], &[0]), format!("logit 0 of 2 is inf {adjusted}"));
    }
}

#[test]
fn settings_are_checked_by_name() {
    let refused = |config: SamplerConfig| Sampler::new(config, 0).unwrap_err().to_string();
    let d = SamplerConfig::default;
    assert_eq!(
        refused(SamplerConfig { temperature: -0.1, ..d() }),
        "`temperature` is -0.1; expected a number from 0 to 100"
    );
    assert_eq!(
        refused(SamplerConfig { top_p: f32::NAN, ..d() }),
        "`top_p` is NaN; expected a number from 0 to 1"
    );
    assert_eq!(
        refused(SamplerConfig { repeat_penalty: 0.0, ..d() }),
        "`repeat_penalty` is 0; expected a number above 0, at most 100"
    );
    assert_eq!(
        refused(SamplerConfig { logit_bias: [(8, f32::NAN)].into(), ..d() }),
        "`logit_bias` is NaN for token 8; expected finite numbers or -inf"
    );
    for config in [
        SamplerConfig { min_p: 1.1, ..d() },
        SamplerConfig { typical_p: -1.0, ..d() },
        SamplerConfig { presence_penalty: f32::INFINITY, ..d() },
        SamplerConfig { frequency_penalty: 101.0, ..d() },
    ] {
        refused(config);
    }
}

#[test]
fn f46_settings_are_read_whole_or_not_at_all() {
    let config: SamplerConfig =
        serde_json::from_str(r#"{"temperature": 0.5, "logit_bias": {"42": -1.5}}"#).unwrap();
    assert_eq!(
        config,
        SamplerConfig {
            temperature: 0.5,
            logit_bias: [(42, -1.5)].into(),
            ..SamplerConfig::default()
        }
    );
    let again: SamplerConfig =
        serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
    assert_eq!(again, config);
    let error = serde_json::from_str::<SamplerConfig>(r#"{"temprature": 1}"#).unwrap_err();
    assert!(error.to_string().contains("temprature"), "{error}");
}
