//! Losses: the faults that others have had.

use graph::{CrossEntropyAttrs, Op, vjp};

use crate::Cpu;
use crate::testing::{Case, Random, devices, to_floats};

const PLAIN: CrossEntropyAttrs = CrossEntropyAttrs::PLAIN;
const WEIGHTED: CrossEntropyAttrs = CrossEntropyAttrs { weighted: true, ..PLAIN };

/// Losses and the gradient of logits.
fn run(
    cpu: &Cpu,
    attrs: CrossEntropyAttrs,
    (logits, vocab): (&[f32], usize),
    labels: &[i32],
    (dy, weights): (&[f32], &[f32]),
) -> [Vec<f32>; 2] {
    let mut case = Case::new();
    let rows = labels.len();
    let logits = case.floats("logits", &[rows, vocab], logits);
    let labels = case.ints("labels", &[rows], labels);
    let dy = case.floats("dy", &[rows], dy);
    let mut args = vec![logits, labels];
    if attrs.weighted {
        args.push(case.floats("weights", &[rows], weights));
    }
    let y = case.graph.push(Op::CrossEntropy(attrs), &args, "y").unwrap();
    let back = vjp(&case.graph, &[(y, dy)], &[logits]).unwrap();
    case.graph = back.graph;
    let out = case.run(cpu, &[y, back.grads[0]]).unwrap();
    [to_floats(&out[0]), to_floats(&out[1])]
}

/// Saturated logits in a masked row once made the whole loss NaN by way of 0 * NaN; stray values
/// in padding did by way of weights of 0. Such rows are written as zeros and never read.
#[test]
fn bugs_15_and_16_rows_that_do_not_count_poison_nothing() {
    let (rows, vocab) = (6, 21);
    let mut clean = Random(1).floats(rows * vocab);
    let labels = [3, -1, 5, 20, -100, 0];
    let weights = [0.5, 2.0, 0.0, 1.0, 1.0, -0.0];
    let dy = [1.0, 1.0, 1.0, 0.25, 1.0, 1.0];
    for attrs in [WEIGHTED, CrossEntropyAttrs { softcap: Some(5.0.into()), ..WEIGHTED }] {
        for cpu in devices() {
            let expected = run(&cpu, attrs, (&clean, vocab), &labels, (&dy, &weights));
            for junk in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
                let (mut logits, mut stray) = (clean.clone(), dy);
                for row in [1, 2, 4, 5] {
                    logits[row * vocab..][..vocab].fill(junk);
                    stray[row] = junk;
                }
                let got = run(&cpu, attrs, (&logits, vocab), &labels, (&stray, &weights));
                assert!(got == expected, "{junk} in rows that do not count shows");
                for row in [1, 2, 4, 5] {
                    assert_eq!(got[0][row].to_bits(), 0);
                    assert!(got[1][row * vocab..][..vocab].iter().all(|x| x.to_bits() == 0));
                }
                assert!(got[0][0] > 0.0 && got[0][3] > 0.0);
            }
        }
    }
    // A cotangent of 0 does what a weight of 0 does.
    clean[..vocab].fill(f32::NAN);
    for cpu in devices() {
        let got = run(&cpu, PLAIN, (&clean, vocab), &labels, (&[0.0; 6], &[]));
        assert!(got[1].iter().all(|x| x.to_bits() == 0));
    }
}

/// A backward pass was once wrong by a factor wherever a weight was not 1, which differences of
/// quantized models hid. Against f64 differences of the definition.
#[test]
fn bug_32_weights_that_are_not_1() {
    let (rows, vocab) = (5, 13);
    let logits: Vec<f32> = Random(2).floats(rows * vocab).iter().map(|x| x * 4.0).collect();
    let labels = [0, 12, 5, -1, 7];
    let weights = [0.25f32, 3.0, -1.5, 2.0, 0.875];
    let dy = [1.0, 0.5, -2.0, 1.0, 0.75];
    for (scale, cap) in [(1.0f32, None), (0.5, Some(2.5f32)), (1.0, Some(30.0))] {
        let softcap = cap.map(Into::into);
        let attrs = CrossEntropyAttrs { scale: scale.into(), softcap, ..WEIGHTED };
        let total = |logits: &[f64]| -> f64 {
            let rows = logits.chunks(vocab).zip(labels).zip(weights).zip(dy);
            rows.filter(|(((_, label), _), _)| *label >= 0)
                .map(|(((row, label), weight), dy)| {
                    let z: Vec<f64> = row
                        .iter()
                        .map(|x| {
                            let u = x * f64::from(scale);
                            cap.map_or(u, |c| f64::from(c) * (u / f64::from(c)).tanh())
                        })
                        .collect();
                    let sum: f64 = z.iter().map(|z| z.exp()).sum();
                    f64::from(dy) * f64::from(weight) * (sum.ln() - z[label as usize])
                })
                .sum()
        };
        let wide: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
        for cpu in devices() {
            let [losses, grad] = run(&cpu, attrs, (&logits, vocab), &labels, (&dy, &weights));
            let sum: f64 = losses.iter().zip(dy).map(|(l, d)| f64::from(*l) * f64::from(d)).sum();
            assert!((sum - total(&wide)).abs() <= 1e-5 * sum.abs());
            for i in 0..rows * vocab {
                let moved = |h: f64| {
                    let mut x = wide.clone();
                    x[i] += h;
                    total(&x)
                };
                let expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                let error = (f64::from(grad[i]) - expected).abs();
                assert!(error <= 2e-6 * (1.0 + expected.abs()), "{i}: {} and {expected}", grad[i]);
            }
        }
    }
}

/// A scale of 1 and weights of 1 change no bit of what the loss was without them.
#[test]
fn neutral_attributes_change_no_bit() {
    let (rows, vocab) = (7, 37);
    let logits: Vec<f32> = Random(3).floats(rows * vocab).iter().map(|x| x * 8.0).collect();
    let labels = [3, 36, -1, 0, 20, 11, 5];
    let dy = Random(4).floats(rows);
    for cpu in devices() {
        let plain = run(&cpu, PLAIN, (&logits, vocab), &labels, (&dy, &[]));
        let ones = run(&cpu, WEIGHTED, (&logits, vocab), &labels, (&dy, &[1.0; 7]));
        assert!(plain == ones);
        for (attrs, same) in [
            (CrossEntropyAttrs { scale: 0.5.into(), ..PLAIN }, false),
            (CrossEntropyAttrs { softcap: Some(9.0.into()), ..PLAIN }, false),
            (CrossEntropyAttrs { scale: 1.0.into(), ..PLAIN }, true),
        ] {
            let other = run(&cpu, attrs, (&logits, vocab), &labels, (&dy, &[]));
            assert!((plain == other) == same);
        }
    }
}
