//! Random programs and their gradients, in every kernel family, against f64.
//!
//! `GRADUS_PROGRAMS=N` checks N programs of each family instead of 1,500, `GRADUS_SEED=S` others
//! than those of seed 2.

use cpu::{Cpu, Family};
use reference::check::check_programs;

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
