//! The checker must be able to fail: planted faults.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use graph::{
    Arena, Backward, Call, Code, Fault, HostTensor, Leaf, Needs, Op, Plan, Progress, Refusal,
    Resident, Segment, Stop, Unary, Unsupported,
};

use super::*;
use crate::Reference;

fn report_failures(report: &Report) -> Vec<&Failure> {
    report.ops.iter().flat_map(|op| &op.failures).collect()
}

#[test]
fn every_rule_and_the_interpreter_as_a_device() {
    let report = check_all(Some(&Reference), 1, None);
    assert!(report.passed(), "{report}");
    for op in &report.ops {
        let rule = op.rule.as_ref().unwrap();
        assert!(rule.elements > 0 || op.refusals > 0, "{}", op.op);
        assert!(op.device.as_ref().unwrap().elements > 0, "{}", op.op);
    }
    let faults: usize = report.ops.iter().map(|op| op.faults).sum();
    assert!(faults >= 30, "{faults}");
    // Case counts that the project has promised not to fall below.
    let least = [
        ("Add", 59),
        ("Sub", 57),
        ("Mul", 59),
        ("Div", 57),
        ("Gather", 111),
        ("ScatterAdd", 55),
        ("Attention", 120),
        ("SsmConv", 24),
        ("SsmConvState", 24),
        ("SsmScan", 24),
        ("GatedDeltaRule", 60),
    ];
    let units = GluKind::ALL.map(|kind| (Op::Glu(kind).name(), 24));
    for (op, least) in least.into_iter().chain(units) {
        let report = report.ops.iter().find(|r| r.op == op).unwrap();
        let cases = report.rule.as_ref().unwrap().cases;
        assert!(cases >= least, "{op} has {cases} cases");
    }
}

/// `cargo test --release -p gradus-reference -- --ignored` checks the rules with seeds 100 to 119,
/// `GRADUS_SEEDS=FIRST-LAST` with others.
#[test]
#[ignore = "takes minutes"]
fn twenty_seeds() {
    let text = std::env::var("GRADUS_SEEDS").unwrap_or("100-119".into());
    let (first, last) = text.split_once('-').unwrap_or((&text, &text));
    let [first, last] = [first, last].map(|text| text.parse::<u64>().unwrap());
    assert!(first <= last, "GRADUS_SEEDS: the last is before the first");
    for seed in first..=last {
        let report = check_all(Some(&Reference), seed, None);
        assert!(report.passed(), "seed {seed}\n{report}");
        println!("seed {seed}: every rule agrees with differences");
    }
}

#[test]
fn names_are_those_of_the_ops() {
    for op in op_names() {
        for case in cases(op) {
            let (built, output) = case.build(1).unwrap();
            assert!(contains(&built.graph, output, op), "{op}: {}", case.name);
            for id in built.graph.ids() {
                let op = &built.graph.node(id).op;
                assert_eq!(cases::listed(op), op.name());
            }
        }
    }
}

#[test]
fn a_seed_gives_its_inputs() {
    let values = |seed| {
        let (built, _) = cases("Mul")[3].build(seed).unwrap();
        built.inputs.into_iter().map(|i| i.bytes).collect::<Vec<_>>()
    };
    assert_eq!(values(7), values(7));
    assert_ne!(values(7), values(8));
    assert_eq!(check_all(None, 7, Some("tanh")), check_all(None, 7, Some("TANH")));
    assert!(!check_all(None, 7, Some("no such op")).passed());
}

// ---- rules

/// Checks one op with a broken way to differentiate, and expects a failure whose text has
/// `what` in it.
#[track_caller]
fn catches(op: &'static str, differentiate: &Differentiate, what: &str) {
    let checks = Checks { rules: Some(differentiate), device: None, segments: false };
    let report = check_op(&checks, 1, op, &cases(op));
    let found = report.failures.iter().any(|f| f.found.contains(what));
    assert!(found, "{op}: {:?}", report.failures.first());
}

type Made = std::result::Result<NodeId, graph::Invalid>;

/// [`vjp`], with every gradient passed through `change`.
fn changed(
    change: impl Fn(&mut Graph, NodeId) -> Made,
) -> impl Fn(&Graph, &[(NodeId, NodeId)], &[NodeId]) -> Result<Backward> {
    move |graph, cotangents, wrt| {
        let mut back = vjp(graph, cotangents, wrt)?;
        for grad in &mut back.grads {
            *grad = change(&mut back.graph, *grad)?;
        }
        Ok(back)
    }
}

#[test]
fn a_scaled_gradient_is_caught() {
    for op in ["Add", "Tanh", "RmsNorm", "Attention", "CrossEntropy"] {
        catches(op, &changed(|g, dx| g.affine(dx, 1.01, 0.0)), "expected");
        catches(op, &changed(|g, dx| g.affine(dx, -1.0, 0.0)), "expected");
        catches(op, &changed(|g, dx| g.affine(dx, 0.0, 0.0)), "expected");
    }
    catches("Tanh", &changed(|g, dx| g.affine(dx, 1.0 + 1e-5, 0.0)), "expected");
}

#[test]
fn one_wrong_element_is_caught() {
    let differentiate = changed(|g, dx| {
        let shape = g.node(dx).shape;
        if shape.rank() != 2 || shape.dim(0) < 2 {
            return Ok(dx);
        }
        // The last row is left at zero.
        let rows = shape.dim(0) - 1;
        let top = g.slice(dx, 0, 0, rows)?;
        g.push(Op::Pad { dim: 0, before: 0, after: 1 }, &[top], "broken")
    });
    catches("Silu", &differentiate, "expected");
    catches("MatMul", &differentiate, "expected");
}

#[test]
fn numbers_that_are_not_finite_are_caught() {
    let nan = changed(|g, dx| {
        let negative = g.mul(dx, dx)?;
        let negative = g.affine(negative, -1.0, -1.0)?;
        g.unary(Unary::Log, negative)
    });
    catches("Mul", &nan, "NaN");
    let infinite = changed(|g, dx| {
        let zero = g.affine(dx, 0.0, 0.0)?;
        g.div(dx, zero)
    });
    catches("Mul", &infinite, "inf");
}

/// The rule of another function: sigmoid's for tanh.
#[test]
fn the_rule_of_another_op_is_caught() {
    let differentiate = |graph: &Graph, cotangents: &[(NodeId, NodeId)], wrt: &[NodeId]| {
        let mut other = graph.clone();
        let &[(y, dy)] = cotangents else { return vjp(graph, cotangents, wrt) };
        let node = graph.node(y).clone();
        let y = match node.op {
            Op::Unary(Unary::Tanh) => {
                other.push(Op::Unary(Unary::Sigmoid), &node.args, &node.name)?
            }
            _ => y,
        };
        vjp(&other, &[(y, dy)], wrt)
    };
    catches("Tanh", &differentiate, "expected");
}

/// The gradient of a broadcast operand is one row of the cotangent, not their sum.
#[test]
fn a_sum_that_was_dropped_is_caught() {
    let differentiate = |graph: &Graph, cotangents: &[(NodeId, NodeId)], wrt: &[NodeId]| {
        let mut back = vjp(graph, cotangents, wrt)?;
        let &[(_, dy)] = cotangents else { return Ok(back) };
        for (grad, x) in back.grads.iter_mut().zip(wrt) {
            let (g, x) = (&mut back.graph, graph.node(*x).shape);
            if x.dims() == [6] && g.node(dy).shape.dims() == [4, 6] {
                let row = g.slice(dy, 0, 0, 1)?;
                *grad = g.reshape(row, x.dims())?;
            }
        }
        Ok(back)
    };
    catches("Add", &differentiate, "expected");
}

#[test]
fn gradients_of_another_shape_are_caught() {
    let differentiate = changed(|g, dx| {
        let shape = g.node(dx).shape;
        let mut dims = shape.dims().to_vec();
        dims.push(1);
        g.reshape(dx, &dims)
    });
    catches("Tanh", &differentiate, "the gradient of a leaf");
}

#[test]
fn refusals_are_checked() {
    let refuse = |code| {
        move |_: &Graph, _: &[(NodeId, NodeId)], _: &[NodeId]| -> Result<Backward> {
            let (op, node) = ("Gather".into(), "y".into());
            let operand = Some("1 (`ids`, i32)".into());
            Err(Refusal { code, op, node, operand, device: None, reason: "no".into() }.into())
        }
    };
    // A refusal where there is a gradient; a refusal with another code; one of another op.
    catches("Gather", &refuse(Code::OpNotDifferentiable), "refused: ");
    catches("Gather", &refuse(Code::BrokenRule), "op_not_differentiable at Gather was expected");
    catches("Rope", &refuse(Code::OpNotDifferentiable), "at RopeTable was expected");
    // A gradient where there is none.
    let differentiate = |graph: &Graph, _: &[(NodeId, NodeId)], wrt: &[NodeId]| {
        Ok(Backward { graph: graph.clone(), grads: wrt.to_vec() })
    };
    catches("Gather", &differentiate, "where a refusal was expected");
}

/// A rule that depends on what else is asked for.
#[test]
fn gradients_together_are_compared_with_those_alone() {
    let differentiate = |graph: &Graph, cotangents: &[(NodeId, NodeId)], wrt: &[NodeId]| {
        let mut back = vjp(graph, cotangents, wrt)?;
        if let (2.., Some(first)) = (wrt.len(), back.grads.first_mut()) {
            *first = back.graph.affine(*first, 1.0 + 1e-7, 0.0)?;
        }
        Ok(back)
    };
    catches("Mul", &differentiate, "another one when asked for alone");
}

// ---- cases

#[track_caller]
fn fails(op: &'static str, add: impl Fn(&mut Cases), what: &str) {
    let mut cases = Cases::new(op);
    add(&mut cases);
    let checks = Checks { rules: Some(&vjp), device: Some(&Reference), segments: false };
    let report = check_op(&checks, 1, op, &cases.into_list());
    let found = report.failures.iter().any(|f| f.found.contains(what));
    assert!(found, "{:?}", report.failures);
}

#[test]
fn cases_that_show_nothing_are_caught() {
    let add = |c: &mut Cases| {
        c.add("no elements", |g| {
            let x = g.float("x", &[0, 4], Fill::Signed)?;
            g.graph.unary(Unary::Tanh, x)
        });
    };
    fails("Tanh", add, "no element was compared");
    fails("Tanh", |_| {}, "the op has no cases");
    let add = |c: &mut Cases| {
        c.add("another op", |g| {
            let x = g.float("x", &[3, 4], Fill::Signed)?;
            let _ = g.graph.unary(Unary::Tanh, x)?;
            g.graph.unary(Unary::Exp, x)
        });
    };
    fails("Tanh", add, "does not depend on the op");
    let add = |c: &mut Cases| {
        c.add("nothing asked", |g| {
            let x = g.float("x", &[3, 4], Fill::Signed)?;
            g.expect(x, Expected::Nothing);
            g.graph.unary(Unary::Tanh, x)
        });
    };
    fails("Tanh", add, "asks for no gradient and no refusal");
    let add = |c: &mut Cases| {
        c.add("no finite value", |g| {
            let x = g.float("x", &[3, 4], Fill::Between(-2.0, -1.0))?;
            g.graph.unary(Unary::Log, x)
        });
    };
    fails("Log", add, "NaN");
    let add = |c: &mut Cases| {
        c.add_outside("nothing outside", |g| {
            let table = g.float("table", &[3, 4], Fill::Signed)?;
            let ids = g.ints("ids", &[2], &[0, 2])?;
            g.graph.gather(table, ids, "y")
        });
    };
    fails("Gather", add, "where a fault was expected");
}

#[test]
fn equal_cases_count_once_and_zeros_are_listed() {
    let mut cases = Cases::new("Mul");
    for name in ["one", "the same again"] {
        cases.add(name, |g| {
            let x = g.float("x", &[3], Fill::Signed)?;
            let zero = g.given("zero", &[3], &[0.0; 3])?;
            g.expect(zero, Expected::Nothing);
            g.graph.mul(x, zero)
        });
    }
    let checks = Checks { rules: Some(&vjp), device: Some(&Reference), segments: false };
    let report = check_op(&checks, 1, "Mul", &cases.into_list());
    let (rule, device) = (report.rule.unwrap(), report.device.unwrap());
    assert_eq!((rule.cases, device.cases), (1, 1));
    assert_eq!(rule.zeros, ["one, wrt x", "the same again, wrt x"]);
    assert_eq!(device.zeros, ["one", "the same again"]);
    assert!(report.failures.is_empty());
}

// ---- the measure

fn measured(got: &[f64], expected: &[f64]) -> Measure {
    let mut measure = Measure::default();
    measure.compare(got, expected, 1e-3);
    measure
}

#[test]
fn elements_are_measured_as_documented() {
    let m = measured(&[1.0, 0.0, -3.0], &[1.001, 0.0, -3.0]);
    assert_eq!((m.compared, m.excused, m.verdict(1e-3)), (3, 0, None));
    assert!((m.worst - 0.001 / 2.001).abs() < 1e-12);
    // Beyond the bound, and beyond the bound times the rms.
    assert!(measured(&[1.01, 1.0], &[1.0, 1.0]).verdict(1e-3).is_some());
    // Signs matter, and so does one zero.
    assert!(measured(&[-1.0], &[1.0]).verdict(1e-3).is_some());
    assert!(measured(&[0.0], &[1e-30]).verdict(1e-3).is_some());
    // Beyond the bound, but small beside the tensor: excused, and counted.
    let (mut got, expected) = (vec![1.0; 40], vec![1.0; 40]);
    let expected = [expected, vec![1e-5]].concat();
    got.push(1e-4);
    let m = measured(&got, &expected);
    assert_eq!((m.excused, m.verdict(1e-3)), (1, None));
    // More than one in twenty are too many.
    let m = measured(&[1.0, 1.0, 1e-4], &[1.0, 1.0, 1e-5]);
    assert!(m.verdict(1e-3).unwrap().contains("1 of 3"));
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert!(measured(&[bad, 1.0], &[1.0, 1.0]).verdict(1e-3).is_some());
        assert!(measured(&[1.0, 1.0], &[bad, 1.0]).verdict(1e-3).is_some());
        assert!(measured(&[bad], &[bad]).verdict(1e-3).is_some());
    }
    assert!(measured(&[], &[]).verdict(1e-3).unwrap().contains("no element"));
    assert!(measured(&[1.0], &[1.0, 2.0]).verdict(1e-3).is_some());
    let m = measured(&[0.0, -0.0], &[0.0, 0.0]);
    assert_eq!((m.zeros, m.nonzero, m.verdict(1e-3)), (1, 0, None));
}

// ---- devices

/// What is wrong with a device.
#[derive(Copy, Clone, PartialEq, Debug)]
enum Wrong {
    /// It computes sigmoid for tanh.
    Kernel,
    /// It leaves the last step's result unwritten.
    Unwritten,
    /// It has no kernel for tanh, and says so.
    Missing,
    /// Its second run differs from its first.
    Forgetful,
    /// It skips a step when it resumes.
    Resume,
    /// It stops at once, always.
    Stuck,
    /// It writes beyond what it was told to.
    Greedy,
    /// It faults.
    Faults,
    /// It says that all went well when something did not.
    Careless,
}

struct Broken {
    wrong: Wrong,
    runs: AtomicUsize,
}

struct Larger(Box<dyn Arena>);

impl Arena for Larger {
    fn bytes(&self) -> usize {
        self.0.bytes()
    }
    fn high_water(&self) -> usize {
        self.0.high_water() + 64
    }
    fn poison(&mut self) {
        self.0.poison();
    }
    fn read(&self, range: std::ops::Range<usize>, to: &mut [u8]) -> std::result::Result<(), Fault> {
        self.0.read(range, to)
    }
    fn as_any_mut(&mut self) -> &mut dyn std::any::Any {
        self.0.as_any_mut()
    }
}

impl Device for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn family(&self) -> &'static str {
        "f64"
    }

    fn supports(&self, call: &Call<'_>) -> std::result::Result<Needs, Unsupported> {
        match (self.wrong, call.op) {
            (Wrong::Missing, Op::Unary(Unary::Tanh)) => {
                Err(Unsupported::Kernel("hyperbolic functions".into()))
            }
            _ => Reference.supports(call),
        }
    }

    fn load(&self, tensor: &HostTensor<'_>) -> std::result::Result<Arc<dyn Resident>, Fault> {
        Reference.load(tensor)
    }

    fn arena(&self, bytes: usize) -> std::result::Result<Box<dyn Arena>, Fault> {
        let arena = Reference.arena(bytes)?;
        Ok(if self.wrong == Wrong::Greedy { Box::new(Larger(arena)) } else { arena })
    }

    fn run(
        &self,
        plan: &Plan,
        leaves: &[Leaf<'_>],
        arena: &mut dyn Arena,
        mut from: Segment,
        stop: &dyn Stop,
    ) -> std::result::Result<Progress, Fault> {
        let mut plan = plan.clone();
        let runs = self.runs.fetch_add(1, Ordering::Relaxed);
        match self.wrong {
            Wrong::Forgetful if runs == 0 => {}
            Wrong::Kernel | Wrong::Forgetful => {
                for step in &mut plan.steps {
                    if step.op == Op::Unary(Unary::Tanh) {
                        step.op = Op::Unary(Unary::Sigmoid);
                    }
                }
            }
            Wrong::Unwritten => {
                plan.steps.pop();
            }
            Wrong::Resume if from.step > 0 => from.step += 1,
            Wrong::Stuck if stop.should_stop() => return Ok(Progress::Stopped(from)),
            Wrong::Faults => {
                return Err(Fault::new(Code::Internal, "y", "the device is out of order"));
            }
            Wrong::Careless => {
                let ran = Reference.run(&plan, leaves, arena, from, stop);
                return Ok(ran.unwrap_or(Progress::Done));
            }
            Wrong::Missing | Wrong::Greedy | Wrong::Resume | Wrong::Stuck => {}
        }
        Reference.run(&plan, leaves, arena, from, stop)
    }
}

#[test]
fn broken_devices_are_caught() {
    let found = [
        (Wrong::Kernel, "device against f64", "expected"),
        (Wrong::Unwritten, "device against f64", "expected"),
        (Wrong::Missing, "case", "no kernel for hyperbolic functions"),
        (Wrong::Forgetful, "again", "other bits"),
        (Wrong::Resume, "resume", ""),
        (Wrong::Greedy, "memory", "high-water mark"),
        (Wrong::Faults, "case", "out of order"),
    ];
    for (wrong, check, what) in found {
        let device = Broken { wrong, runs: AtomicUsize::new(0) };
        let checks = Checks { rules: None, device: Some(&device), segments: true };
        let report = check_op(&checks, 1, "Tanh", &cases("Tanh"));
        let caught = report.failures.iter().any(|f| f.check == check && f.found.contains(what));
        assert!(caught, "{wrong:?}: {:?}", report.failures.first());
    }
    let device = Broken { wrong: Wrong::Careless, runs: AtomicUsize::new(0) };
    let checks = Checks { rules: None, device: Some(&device), segments: true };
    for (op, check, failures) in [("Leaf", "misuse", 9), ("ScatterAdd", "fault", 5)] {
        let report = check_op(&checks, 1, op, &cases(op));
        let caught = report.failures.iter().filter(|f| f.check == check).count();
        assert_eq!(caught, failures, "{:?}", report.failures);
    }
    // A device that stops as soon as it is told to makes progress when it is not.
    let device = Broken { wrong: Wrong::Stuck, runs: AtomicUsize::new(0) };
    let checks = Checks { rules: None, device: Some(&device), segments: true };
    assert_eq!(check_op(&checks, 1, "Tanh", &cases("Tanh")).failures, []);

    let device = Broken { wrong: Wrong::Kernel, runs: AtomicUsize::new(0) };
    let report = conformance(&device, 1, None).unwrap_err();
    assert!(report.to_string().contains("FAILED: Tanh"));
    assert!(report_failures(&report.0).len() > 10);
}

#[test]
fn random_blocks_are_valid() {
    for format in gguf::TensorType::ALL.into_iter().filter(|f| f.is_quantized()) {
        let mut g = CaseGraph::new("MatMul", Rng::new(1, format.name()));
        let w = g.weight("w", &[8, 512], format.into()).unwrap();
        let values = g.leaves[&w].as_floats().unwrap();
        assert!(values.iter().all(|x| x.is_finite() && x.abs() < 64.0), "{format}");
        let rms = (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64).sqrt();
        assert!((0.05..8.0).contains(&rms), "{format}: {rms}");
    }
}

#[test]
fn a_report_can_be_read() {
    let report = check_all(Some(&Reference), 1, Some("cross"));
    let table = report.to_string();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 1 + 4 + 2, "{table}");
    assert!(lines[1].starts_with("CrossEntropy       differences"));
}
