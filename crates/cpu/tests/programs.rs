//! Random programs and their gradients, in every kernel family, against f64.
//!
//! `GRADUS_PROGRAMS=N` checks N programs of each family instead of 1,500, `GRADUS_SEED=S` others
//! than those of seed 2.

use cpu::{Cpu, Family};
use reference::check::{check_placed, check_programs};

#[test]
fn programs_compute_what_they_do_in_f64() {
    let number = |variable: &str, default: u64| {
        std::env::var(variable).map_or(default, |text| text.parse().unwrap())
    };
    let (count, seed) = (number("GRADUS_PROGRAMS", 1_500), number("GRADUS_SEED", 2));
    for (i, family) in Family::ALL.into_iter().filter(|f| f.is_available()).enumerate() {
        let cpu = Cpu::new(1 + i % 2, Some(family)).unwrap();
        let first = count * i as u64;
        let report = check_programs(Some((&cpu, 1)), seed, first..first + count, 2);
        println!("{}: {report}", family.name());
        assert!(report.passed(), "{}: {report}", family.name());
        assert!(report.on_device as u64 > count / 2);
    }
}

/// Also what `strict` refuses, and that the arenas are exactly as large as planned.
#[test]
fn programs_over_two_devices_compute_what_one_does() {
    let cpu = Cpu::new(2, None).unwrap();
    let found = check_placed(&cpu, 11, 1_500);
    assert!(found.failures.is_empty(), "{}", found.failures.join("\n"));
    // Were nothing to fall back, nothing would be compared.
    let enough = found.compared > 1_000 && found.several > 500 && found.refused > 500;
    assert!(enough && found.crossed > 100_000, "{found:?}");
    println!("{found:?}");
}

/// What no device runs is refused as the first that cannot run, in graph order.
#[test]
fn what_no_device_runs_is_refused() {
    use graph::{Code, DType, Device, Error, Graph, Op, Policy, Shape, Unary, place};
    let cpu = Cpu::new(1, None).unwrap();
    let shape = |dims: &[usize]| Shape::new(dims).unwrap();
    let mut g = Graph::new();
    let w = g.weight("w", shape(&[4, 32]), DType::F32).unwrap();
    let turned = g.permute(w, &[1, 0]).unwrap();
    let x = g.leaf("x", shape(&[3, 4]), DType::F32).unwrap();
    let tanh = g.unary(Unary::Tanh, x).unwrap();
    let y = g.push(Op::MatMul { ta: false, tb: true }, &[tanh, turned], "y").unwrap();
    let devices: [&dyn Device; 2] = [&cpu, &cpu];
    match place(&g, &[y], &devices, Policy::Fallback) {
        Err(Error::Refusal(refusal)) => assert_eq!(refusal.code, Code::NoKernel, "{refusal}"),
        other => panic!("{other:?}"),
    }
    let none = place(&g, &[y], &[], Policy::Fallback).unwrap_err();
    assert_eq!(none.code(), Code::InvalidInput);
}

/// Rows of a part of a packed weight, and a product with its transpose: refused by name, where
/// they once gave other rows.
#[test]
fn views_of_packed_weights_are_refused() {
    use graph::{Code, DType, Error, Graph, Op, Shape, plan};
    let cpu = Cpu::new(1, None).unwrap();
    let shape = |dims: &[usize]| Shape::new(dims).unwrap();
    let mut g = Graph::new();
    let w = g.weight("w", shape(&[8, 32]), DType::F32).unwrap();
    let ids = g.leaf("ids", shape(&[3]), DType::I32).unwrap();
    let x = g.leaf("x", shape(&[3, 8]), DType::F32).unwrap();
    let part = g.slice(w, 0, 2, 4).unwrap();
    let rows = g.gather(part, ids, "rows").unwrap();
    let turned = g.permute(w, &[1, 0]).unwrap();
    let y = g.push(Op::MatMul { ta: false, tb: true }, &[x, turned], "y").unwrap();
    for (output, view) in [(rows, part), (y, turned)] {
        match plan(&g, &[output], &cpu) {
            Err(Error::Refusal(refusal)) => {
                assert_eq!((refusal.code, refusal.op.as_str()), (Code::NoKernel, "Copy"));
                assert_eq!(refusal.node, *g.node(view).name);
                assert!(refusal.to_string().contains("a copy of a packed weight"), "{refusal}");
            }
            other => panic!("{other:?}"),
        }
    }
}
