//! The verdict on one program: predicted and found refusals, and its gradient against central
//! differences along one direction.

use graph::{Code, DType, Error};

use super::program::{Moves, Program};
use crate::check::rule::Differentiate;
use crate::check::{RULE_BOUND, Rng};
use crate::{Mode, Value, eval};

/// What checking one program gave.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Verdict {
    /// Refused, as predicted, with this code.
    Refused(Code),
    /// Its gradient agrees: the relative error, and the number of gradient elements.
    Agrees {
        /// Relative error.
        error: f64,
        /// Elements of all gradients.
        elements: usize,
        /// The gradient is zero everywhere, and so are the differences.
        zero: bool,
    },
    /// Differences along no direction tried tell anything: it stands at a kink, or they disagree
    /// among themselves.
    Unclear,
    /// It is wrong; how.
    Failed(String),
}

/// Steps tried in turn, the largest that crosses no kink is taken.
const STEPS: [f64; 3] = [1e-4, 1e-5, 1e-6];

/// Directions tried in turn.
const DIRECTIONS: usize = 3;

/// Checks a program with a differentiating function, which is [`graph::vjp`] but in tests of
/// this check.
pub(super) fn check(program: &Program, differentiate: &Differentiate, rng: &mut Rng) -> Verdict {
    let made = differentiate(&program.graph, &program.cotangents, &program.wrt);
    let back = match (program.predicted(), made) {
        (None, Ok(back)) => back,
        (None, Err(e)) => return Verdict::Failed(format!("a gradient was expected, got: {e}")),
        (Some(blocked), Ok(_)) => {
            let node = program.graph.node(blocked.node);
            let at = (node.op.name(), &node.name, blocked.operand);
            return Verdict::Failed(format!("a refusal at {at:?} was expected, got a gradient"));
        }
        (Some(blocked), Err(Error::Refusal(refusal))) => {
            let node = program.graph.node(blocked.node);
            let code = match blocked.operand {
                Some(_) => Code::OpNotDifferentiable,
                None => Code::NoGradientPath,
            };
            let operand = blocked.operand.map(|i| {
                let arg = node.args.get(i).map(|&a| program.graph.node(a));
                let (name, dtype) = arg.map_or(("", DType::F32), |a| (&*a.name, a.dtype));
                format!("{i} (`{name}`, {dtype})")
            });
            let same = refusal.code == code
                && refusal.op == node.op.name()
                && refusal.node == *node.name
                && refusal.operand == operand
                && !refusal.reason.is_empty()
                && !refusal.to_string().contains('\n');
            if same {
                return Verdict::Refused(code);
            }
            return Verdict::Failed(format!(
                "{} at {} `{}`, operand {operand:?}, was expected, got {}: {refusal}",
                code.as_str(),
                node.op.name(),
                node.name,
                refusal.code.as_str()
            ));
        }
        (Some(_), Err(e)) => return Verdict::Failed(format!("a refusal was expected, got: {e}")),
    };
    if back.grads.len() != program.wrt.len() {
        return Verdict::Failed("another number of gradients than asked for".into());
    }
    for (g, x) in back.grads.iter().zip(&program.wrt) {
        let (made, of) = (back.graph.node(*g), program.graph.node(*x));
        if made.shape != of.shape || made.dtype != DType::F32 {
            let found = (made.dtype, made.shape);
            return Verdict::Failed(format!("a gradient {found:?} for a value {}", of.shape));
        }
    }
    let grads = match eval(&back.graph, &program.values(), &back.grads, Mode::Smooth) {
        Ok(grads) => grads,
        Err(e) => return Verdict::Failed(format!("the gradient does not compute: {e}")),
    };
    match along(program, &grads, rng) {
        Ok(verdict) => verdict,
        Err(e) => Verdict::Failed(format!("the program does not compute: {e}")),
    }
}

fn along(program: &Program, grads: &[Value], rng: &mut Rng) -> graph::Result<Verdict> {
    let still = Moves::new();
    let (values, here) = program.compute(&still, 0.0)?;
    let cotangents: Vec<&[f64]> = program
        .cotangents
        .iter()
        .map(|(_, dy)| values[dy.index()].as_floats().unwrap_or(&[]))
        .collect();
    let mut total = 1.0;
    for ((y, _), dy) in program.cotangents.iter().zip(&cotangents) {
        let y = values[y.index()].as_floats().unwrap_or(&[]);
        total += y.iter().zip(*dy).map(|(y, dy)| (y * dy).abs()).sum::<f64>();
    }
    for _ in 0..DIRECTIONS {
        // A bound of the sum's size, and the sum, of gradient times direction.
        let (mut size, mut slope, mut elements) = (0.0, 0.0, 0);
        let mut directions = Vec::with_capacity(grads.len());
        for g in grads {
            let g = g.as_floats().unwrap_or(&[]);
            let d: Vec<f64> = g.iter().map(|_| rng.between(-1.0, 1.0)).collect();
            for (g, d) in g.iter().zip(&d) {
                slope += g * d;
                size += (g * d).abs();
            }
            elements += g.len();
            directions.push(d);
        }
        let mut moves = Moves::new();
        for (x, d) in program.wrt.iter().zip(&directions) {
            moves.insert(*x, d);
        }
        for (i, &step) in STEPS.iter().enumerate() {
            let Some(wide) = difference(program, &moves, step, &cotangents, &here)? else {
                continue;
            };
            let Some(narrow) = difference(program, &moves, step / 2.0, &cotangents, &here)? else {
                continue;
            };
            // Richardson: what is left is of the fourth order in the step.
            let found = narrow + (narrow - wide) / 3.0;
            let scale = f64::max(size, found.abs());
            let off = (found - slope).abs();
            if off <= RULE_BOUND * scale {
                let error = if scale == 0.0 { 0.0 } else { off / scale };
                return Ok(Verdict::Agrees { error, elements, zero: size == 0.0 });
            }
            // The two differences are apart by three times the error of the better one, before
            // it is improved; below some distance rounding is all there is.
            let doubt = (narrow - wide).abs() + 1e-15 * total / step;
            if off <= doubt || !found.is_finite() {
                continue;
            }
            if i + 1 == STEPS.len() || off > 10.0 * doubt {
                let error = off / scale;
                return Ok(Verdict::Failed(format!(
                    "the derivative is {slope:e}, differences give {found:e} (relative error \
                     {error:.1e}, step {step:e})"
                )));
            }
        }
    }
    Ok(Verdict::Unclear)
}

/// The central difference at a step; `None` when a kink lies between.
fn difference(
    program: &Program,
    moves: &Moves<'_>,
    step: f64,
    cotangents: &[&[f64]],
    here: &[i32],
) -> graph::Result<Option<f64>> {
    let above = program.point(moves, step)?;
    if above.sides != here {
        return Ok(None);
    }
    let below = program.point(moves, -step)?;
    if below.sides != here {
        return Ok(None);
    }
    let mut sum = 0.0;
    for ((a, b), dy) in above.outputs.iter().zip(&below.outputs).zip(cotangents) {
        let (a, b) = (a.as_floats().unwrap_or(&[]), b.as_floats().unwrap_or(&[]));
        sum += a.iter().zip(b).zip(*dy).map(|((a, b), c)| c * (a - b)).sum::<f64>();
    }
    Ok(Some(sum / (2.0 * step)))
}
