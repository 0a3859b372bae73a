//! Faults that other trainers have had, each with the smallest graph that shows it, in every
//! kernel family with one and two threads.

use graph::{DType, Graph, NodeId, NormKind, Op, Unary, vjp};
use half::f16;

use crate::testing::{Case, Random, devices, to_floats};

fn close(got: &[f32], expected: &[f64], bound: f64) {
    assert_eq!(got.len(), expected.len());
    assert!(!got.is_empty());
    for (got, expected) in got.iter().zip(expected) {
        let error = (f64::from(*got) - expected).abs();
        assert!(error <= bound * expected.abs().max(1e-6), "{got} is not {expected}");
    }
}

#[test]
fn bug_04_only_what_was_asked_for_has_a_gradient() {
    let (x, w, c) = ([0.5f32, -1.25, 2.0], [1.5f32, 0.25, -0.75], [0.1f32, 0.2, 0.3]);
    let mut case = Case::new();
    let ids = [("x", x), ("w", w), ("c", c)].map(|(n, v)| case.floats(n, &[3], &v));
    let wx = case.graph.mul(ids[0], ids[1]).unwrap();
    let sum = case.graph.add(wx, ids[2]).unwrap();
    let loss = case.graph.unary(Unary::Sqr, sum).unwrap();
    let dy = case.floats("dy", &[3], &[1.0; 3]);
    let back = vjp(&case.graph, &[(loss, dy)], &ids[..1]).unwrap();
    assert_eq!(back.grads.len(), 1);
    let more = vjp(&case.graph, &[(loss, dy)], &ids).unwrap();
    assert!(back.graph.len() < more.graph.len(), "what was not asked for is not built");
    let expected: Vec<f64> = (0..3)
        .map(|i| {
            let [x, w, c] = [x, w, c].map(|v| f64::from(v[i]));
            2.0 * (w * x + c) * w
        })
        .collect();
    for cpu in devices() {
        close(&case.gradients(&cpu, loss, dy, &ids[..1])[0], &expected, 1e-5);
    }
}

/// What a router makes of the chances of its experts: the greatest, divided by their clamped sum,
/// scaled, and their experts' results weighed by them.
struct Router {
    used: usize,
    least: f32,
    scale: f32,
}

impl Router {
    /// The experts chosen, and their shares.
    fn shares(&self, graph: &mut Graph, chances: NodeId) -> (NodeId, NodeId) {
        let ids = graph.top_k(chances, self.used, "ids").unwrap();
        let chosen = graph.take(chances, ids, "chosen").unwrap();
        let sum = graph.sum(chosen, &[1]).unwrap();
        let sum = graph.clamp(sum, self.least, f32::INFINITY).unwrap();
        let shares = graph.div(chosen, sum).unwrap();
        (ids, graph.affine(shares, self.scale, 0.0).unwrap())
    }
}

#[test]
fn bug_05_and_11_a_step_of_a_router_is_the_hand_derived_one() {
    let (w0, w1, rate) = (0.75f64, 0.5f64, 0.125f64);
    let mut case = Case::new();
    let w = case.floats("w", &[1, 2], &[w0 as f32, w1 as f32]);
    let router = Router { used: 2, least: 6.103_515_6e-5, scale: 1.0 };
    let (_, shares) = router.shares(&mut case.graph, w);
    // The loss is the first expert's share.
    let results = case.floats("results", &[1, 2, 1], &[1.0, 0.0]);
    let loss = case.graph.mix_experts(results, shares).unwrap();
    let dy = case.floats("dy", &[1, 1], &[1.0]);
    let scale = -rate / (w0 + w1).powi(2);
    for cpu in devices() {
        let gradient = &case.gradients(&cpu, loss, dy, &[w])[0];
        let moved: Vec<f32> = gradient.iter().map(|g| -(rate as f32) * g).collect();
        close(&moved, &[scale * w1, -scale * w0], 1e-6);
    }
}

/// The gradients of a router for its rows, gate and experts, by the formulas.
fn routed(
    router: &Router,
    [x, gate, w, dy]: [&[f32]; 4],
    [rows, experts, k, n]: [usize; 4],
) -> [Vec<f64>; 3] {
    let of = |data: &[f32], at: usize| f64::from(data[at]);
    let (least, scale) = (f64::from(router.least), f64::from(router.scale));
    let mut grads = [vec![0.0; rows * k], vec![0.0; experts * k], vec![0.0; experts * n * k]];
    for r in 0..rows {
        let dot = |a: &[f32], i: usize, b: &[f32], j: usize, n: usize| -> f64 {
            (0..n).map(|c| of(a, i + c) * of(b, j + c)).sum()
        };
        let e: Vec<f64> = (0..experts).map(|e| dot(x, r * k, gate, e * k, k).exp()).collect();
        let p: Vec<f64> = e.iter().map(|x| x / e.iter().sum::<f64>()).collect();
        let mut chosen: Vec<usize> = (0..experts).collect();
        chosen.sort_by(|&a, &b| p[b].total_cmp(&p[a]));
        chosen.truncate(router.used);
        let sum: f64 = chosen.iter().map(|&e| p[e]).sum();
        let divisor = sum.max(least);
        // y = scale * sum of p_e / divisor * (W_e x)
        let result = |e: usize| -> f64 {
            (0..n).map(|o| of(dy, r * n + o) * dot(w, (e * n + o) * k, x, r * k, k)).sum()
        };
        let shared: f64 = chosen.iter().map(|&e| scale * result(e) * p[e]).sum();
        let mut dp = vec![0.0; experts];
        for &e in &chosen {
            let through_sum = if sum > least { shared / divisor.powi(2) } else { 0.0 };
            dp[e] = scale * result(e) / divisor - through_sum;
            let share = scale * p[e] / divisor;
            for o in 0..n {
                for c in 0..k {
                    let at = (e * n + o) * k + c;
                    grads[2][at] += share * of(dy, r * n + o) * of(x, r * k + c);
                    grads[0][r * k + c] += share * of(dy, r * n + o) * of(w, at);
                }
            }
        }
        let mean: f64 = p.iter().zip(&dp).map(|(p, d)| p * d).sum();
        for e in 0..experts {
            let dlogit = p[e] * (dp[e] - mean);
            for c in 0..k {
                grads[0][r * k + c] += dlogit * of(gate, e * k + c);
                grads[1][e * k + c] += dlogit * of(x, r * k + c);
            }
        }
    }
    grads
}

/// Softmax, top-k, gather, sum, clamp, division by the sum, scale, weighted sum of the experts. Of
/// one expert the share is 1 whatever its chance: nothing reaches the gate, unless the sum is
/// clamped.
#[test]
fn bug_05_and_11_a_whole_router_has_the_analytic_gradient() {
    let sizes @ [rows, experts, k, n] = [7, 8, 5, 6];
    for (used, least) in [1, 2, 8].into_iter().flat_map(|u| [(u, 6.103_515_6e-5), (u, 2.0)]) {
        let router = Router { used, least, scale: 1.5 };
        let mut random = Random(used as u64);
        let x_values = random.floats(rows * k);
        let gate_values = random.floats(experts * k);
        let w_values = random.floats(experts * n * k);
        let dy_values = random.floats(rows * n);
        let mut case = Case::new();
        let x = case.floats("x", &[rows, k], &x_values);
        let gate = case.floats("gate", &[experts, k], &gate_values);
        let w = case.floats("w", &[experts, n, k], &w_values);
        let dy = case.floats("dy", &[rows, n], &dy_values);
        let graph = &mut case.graph;
        let op = Op::MatMul { ta: false, tb: true };
        let logits = graph.push(op, &[x, gate], "logits").unwrap();
        let chances = graph.softmax(logits, "chances").unwrap();
        let (ids, shares) = router.shares(graph, chances);
        let each = graph.reshape(x, &[rows, 1, k]).unwrap();
        let results = graph.project_experts(each, w, ids).unwrap();
        let y = graph.mix_experts(results, shares).unwrap();
        let values = [x_values, gate_values, w_values, dy_values];
        let expected = routed(&router, values.each_ref().map(Vec::as_slice), sizes);
        let nothing = used == 1 && least < 1.0;
        let largest = expected[1].iter().fold(0.0f64, |most, x| most.max(x.abs()));
        assert_eq!(largest < 1e-12, nothing, "{largest}");
        for cpu in devices() {
            let got = case.gradients(&cpu, y, dy, &[x, gate, w]);
            for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                assert!(got.len() == expected.len() && !got.is_empty());
                for (got, expected) in got.iter().zip(expected) {
                    // Of terms of about 1.
                    let error = (f64::from(*got) - expected).abs();
                    assert!(error <= 2e-6, "{used} used, {i}: {got} is not {expected}");
                }
            }
        }
    }
}

/// The softmax's result has one reader, its own gradient, in a router and nowhere else.
#[test]
fn bug_05_the_gradient_of_a_softmax_that_nothing_else_reads() {
    let x = [0.3f32, -1.1, 0.8, 0.05];
    let mut case = Case::new();
    let id = case.floats("x", &[1, 4], &x);
    let y = case.graph.softmax(id, "y").unwrap();
    let dy_values = [1.0f32, -0.5, 0.25, 2.0];
    let dy = case.floats("dy", &[1, 4], &dy_values);
    let e: Vec<f64> = x.iter().map(|x| f64::from(*x).exp()).collect();
    let p: Vec<f64> = e.iter().map(|x| x / e.iter().sum::<f64>()).collect();
    let dot: f64 = p.iter().zip(dy_values).map(|(p, d)| p * f64::from(d)).sum();
    let expected: Vec<f64> =
        p.iter().zip(dy_values).map(|(p, d)| p * (f64::from(d) - dot)).collect();
    for cpu in devices() {
        close(&case.gradients(&cpu, y, dy, &[id])[0], &expected, 1e-6);
    }
}

#[test]
fn bug_07_and_08_cotangents_may_lie_in_memory_as_they_like() {
    let mut random = Random(7);
    for cpu in devices() {
        let mut case = Case::new();
        let x = case.random("x", &[5, 1, 6], &mut random);
        let w = case.random("w", &[3, 4, 6], &mut random);
        let ids = case.ints("ids", &[5, 2], &[0, 2, 1, 0, 2, 1, 0, 1, 2, 0]);
        let y = case.graph.project_experts(x, w, ids).unwrap();
        let y = case.graph.slice(y, 2, 1, 3).unwrap();
        let values = random.floats(30);
        let dense = case.floats("dense", &[5, 2, 3], &values);
        // The same numbers, stored the other way round.
        let mut turned = vec![0.0; 30];
        for (i, v) in values.iter().enumerate() {
            turned[(i % 3 * 2 + i / 3 % 2) * 5 + i / 6] = *v;
        }
        let turned = case.floats("turned", &[3, 2, 5], &turned);
        let strided = case.graph.permute(turned, &[2, 1, 0]).unwrap();
        let of = |dy| case.gradients(&cpu, y, dy, &[x, w]);
        assert_eq!(of(dense), of(strided));
    }
}

#[test]
fn bug_09_and_34_half_weights_have_the_gradients_of_their_values() {
    let mut random = Random(9);
    for cpu in devices() {
        let halves: Vec<f16> = random.floats(5 * 24).into_iter().map(f16::from_f32).collect();
        let wide: Vec<f32> = halves.iter().map(|h| h.to_f32()).collect();
        let bytes: Vec<u8> = halves.iter().flat_map(|h| h.to_le_bytes()).collect();
        let (x_values, dy_values) = (random.floats(3 * 24), random.floats(15));
        let of = |case: &mut Case, w: NodeId| {
            let x = case.floats("x", &[3, 24], &x_values);
            let dy = case.floats("dy", &[3, 5], &dy_values);
            let y = case.graph.project(x, w).unwrap();
            case.gradients(&cpu, y, dy, &[x, w])
        };
        let mut half = Case::new();
        let w = half.bytes("w", DType::F16, &[5, 24], &bytes);
        let mut full = Case::new();
        let v = full.floats("w", &[5, 24], &wide);
        assert_eq!(of(&mut half, w), of(&mut full, v));
    }
}

#[test]
fn bug_10_small_differences_of_log_probabilities_survive() {
    for cpu in devices() {
        for d in [5e-5f32, 1e-6, -5e-5] {
            let mut case = Case::new();
            let x = case.floats("d", &[1], &[d]);
            let e = case.graph.unary(Unary::Expm1, x).unwrap();
            let got = to_floats(&case.run(&cpu, &[e]).unwrap()[0]);
            // Half an ulp of d: what is left of d^2/2 once d is taken off.
            let exact = f64::from(d).exp_m1();
            assert!((f64::from(got[0]) - exact).abs() <= f64::from(d).abs() * 1.2e-7, "{got:?}");
            let log = case.graph.unary(Unary::Log1p, x).unwrap();
            let got = to_floats(&case.run(&cpu, &[log]).unwrap()[0]);
            let exact = f64::from(d).ln_1p();
            assert!((f64::from(got[0]) - exact).abs() <= exact.abs() * 3e-7, "{got:?}");
        }
        // What is left of a softplus far below 0 is e^x.
        let mut case = Case::new();
        let x = case.floats("x", &[1], &[-15.0]);
        let y = case.graph.unary(Unary::Softplus, x).unwrap();
        let got = f64::from(to_floats(&case.run(&cpu, &[y]).unwrap()[0])[0]);
        let exact = (-15f64).exp().ln_1p();
        assert!((got - exact).abs() <= exact * 1e-6, "{got}");
    }
}

#[test]
fn bug_13_at_the_clip_bound_the_unclipped_side_keeps_its_gradient() {
    for cpu in devices() {
        let mut case = Case::new();
        let a = case.floats("a", &[3], &[1.2, 1.0, 1.4]);
        let b = case.floats("b", &[3], &[1.2, 1.2, 1.2]);
        let y = case.graph.min(a, b).unwrap();
        let dy = case.floats("dy", &[3], &[1.0; 3]);
        let grads = case.gradients(&cpu, y, dy, &[a, b]);
        assert_eq!(grads, [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]);
    }
}

#[test]
fn bug_19_a_norm_of_a_slice_is_that_of_its_copy() {
    let mut random = Random(19);
    for cpu in devices() {
        for kind in NormKind::ALL {
            let values = random.floats(4 * 20);
            let cut: Vec<f32> = values.chunks(20).flat_map(|row| row[3..11].to_vec()).collect();
            let mut case = Case::new();
            let whole = case.floats("whole", &[4, 20], &values);
            let slice = case.graph.slice(whole, 1, 3, 8).unwrap();
            let copy = case.floats("copy", &[4, 8], &cut);
            let dy = case.random("dy", &[4, 8], &mut random);
            let eps = 1e-5.into();
            let of = |case: &mut Case, x| {
                let y = case.graph.push(Op::Norm { kind, eps }, &[x], "y").unwrap();
                (case.run(&cpu, &[y]).unwrap(), case.gradients(&cpu, y, dy, &[x]))
            };
            assert_eq!(of(&mut case, slice), of(&mut case, copy));
        }
    }
}

#[test]
fn bug_33_rows_of_several_tables_send_their_gradients_home() {
    for cpu in devices() {
        let mut case = Case::new();
        let table = case.floats("table", &[2, 3, 1], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let ids = case.ints("ids", &[2, 2], &[2, 2, 0, 1]);
        let y = case.graph.gather(table, ids, "y").unwrap();
        let dy = case.floats("dy", &[2, 2, 1], &[1.0, 10.0, 100.0, 1000.0]);
        assert_eq!(to_floats(&case.run(&cpu, &[y]).unwrap()[0]), [3.0, 3.0, 4.0, 5.0]);
        let grads = case.gradients(&cpu, y, dy, &[table]);
        assert_eq!(grads, [[0.0, 0.0, 11.0, 100.0, 1000.0, 0.0]]);
    }
}

#[test]
fn f11_an_expert_that_no_row_chose_has_a_gradient_of_zero() {
    let mut random = Random(11);
    for cpu in devices() {
        let mut case = Case::new();
        let x = case.random("x", &[6, 1, 5], &mut random);
        let w = case.random("w", &[8, 3, 5], &mut random);
        let ids = case.ints("ids", &[6, 2], &[0, 2, 1, 0, 2, 7, 6, 4, 5, 0, 2, 1]);
        let y = case.graph.project_experts(x, w, ids).unwrap();
        let dy = case.random("dy", &[6, 2, 3], &mut random);
        let grad = &case.gradients(&cpu, y, dy, &[w])[0];
        for (expert, grad) in grad.chunks(15).enumerate() {
            assert_eq!(grad.iter().all(|g| *g == 0.0), expert == 3, "expert {expert}");
        }
    }
}

#[test]
fn f15_a_norm_has_one_value_and_gradient_however_its_rows_lie() {
    let mut random = Random(15);
    for cpu in devices() {
        let values = random.floats(4 * 24);
        let wide: Vec<f32> = values.chunks(24).flat_map(|r| [r, &[9.0; 5]].concat()).collect();
        let mut case = Case::new();
        let dense = case.floats("dense", &[4, 24], &values);
        let leaf = case.floats("wide", &[4, 29], &wide);
        let strided = case.graph.slice(leaf, 1, 0, 24).unwrap();
        let w = case.random("w", &[24], &mut random);
        let dy = case.random("dy", &[4, 24], &mut random);
        let of = |case: &mut Case, x| {
            let y = case.graph.rms_norm(x, w, 1e-5).unwrap();
            (case.run(&cpu, &[y]).unwrap(), case.gradients(&cpu, y, dy, &[x, w]))
        };
        assert_eq!(of(&mut case, dense), of(&mut case, strided));
    }
}
