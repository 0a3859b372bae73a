//! The table: per op, operands that are taken with what comes of them, and operands that are
//! refused with the words they are refused in.

#[path = "recurrent.rs"]
mod recurrent;

use gguf::TensorType;
use gradus_graph::*;

use crate::common::shape;
use crate::dtype;
use crate::heads::{attention, losses};
use crate::rows::{adapted_experts, experts, rows};

pub const Q8: DType = DType::Block(TensorType::Q8_0);

/// One op and a list of operands with what must come of them.
pub struct Case {
    pub op: Op,
    pub taken: Vec<(&'static str, &'static str)>,
    pub refused: Vec<(&'static str, &'static str)>,
}

pub fn case(
    op: Op,
    taken: &[(&'static str, &'static str)],
    refused: &[(&'static str, &'static str)],
) -> Case {
    Case { op, taken: taken.to_vec(), refused: refused.to_vec() }
}

pub const AND_TWO: (&str, &str) = ("f32 [2]", "takes 2 operands, was given 1");
pub const ONE_NOT_TWO: (&str, &str) = ("f32 [2]; f32 [2]", "takes 1 operands, was given 2");
pub const NONE: (&str, &str) = ("", "takes 1 operands, was given 0");

fn elementwise() -> Vec<Case> {
    let mut cases = Vec::new();
    for op in Binary::ALL {
        cases.push(case(
            Op::Binary(op),
            &[
                ("f32 [2, 3]; f32 [2, 3]", "f32 [2, 3]"),
                ("f32 [2, 3]; f32 [3]", "f32 [2, 3]"),
                ("f32 [3]; f32 [2, 3]", "f32 [2, 3]"),
                ("f32 [2, 1]; f32 [1, 3]", "f32 [2, 3]"),
                ("f32 []; f32 [4]", "f32 [4]"),
                ("f32 []; f32 []", "f32 []"),
                ("f32 [0, 3]; f32 [1]", "f32 [0, 3]"),
                ("f32 [1]; f32 [0]", "f32 [0]"),
                ("f32 [1, 1, 1, 1, 1, 2]; f32 [3, 1, 1, 1, 1, 1]", "f32 [3, 1, 1, 1, 1, 2]"),
            ],
            &[
                ("f32 [2, 3]; f32 [2]", "shapes [2, 3] and [2] do not broadcast"),
                ("f32 [4]; f32 [5]", "shapes [4] and [5] do not broadcast"),
                ("f32 [0]; f32 [2]", "shapes [0] and [2] do not broadcast"),
                ("f16 [2]; f32 [2]", "operand 0 must be f32, is f16"),
                ("f32 [2]; i32 [2]", "operand 1 must be f32, is i32"),
                ("f32 [32]; Q4_0 [32]", "operand 1 must be f32, is Q4_0"),
                ("f32 [2]; f32 [2]; f32 [2]", "takes 2 operands, was given 3"),
                AND_TWO,
                ("", "takes 2 operands, was given 0"),
                (
                    "f32 [70368744177664, 1]; f32 [2]",
                    "shape [70368744177664, 2] is too large: its sizes, 0 counted as 1, \
                     multiply to more than 2^46",
                ),
                (
                    "f32 [0, 1099511627776, 1]; f32 [1099511627776]",
                    "shape [0, 1099511627776, 1099511627776] is too large: its sizes, 0 \
                     counted as 1, multiply to more than 2^46",
                ),
            ],
        ));
    }
    for f in Unary::ALL {
        cases.push(case(
            Op::Unary(f),
            &[("f32 [2, 3]", "f32 [2, 3]"), ("f32 []", "f32 []"), ("f32 [0]", "f32 [0]")],
            &[("bf16 [2]", "operand 0 must be f32, is bf16"), ONE_NOT_TWO, NONE],
        ));
    }
    let affine = |scale: f32, bias: f32| Op::Affine { scale: scale.into(), bias: bias.into() };
    cases.extend([
        case(
            affine(-0.5, 1e30),
            &[("f32 [2, 3]", "f32 [2, 3]")],
            &[("i32 [2]", "operand 0 must be f32, is i32"), ONE_NOT_TWO, NONE],
        ),
        case(affine(f32::NAN, 0.0), &[], &[("f32 [2]", "scale NaN or bias 0 is not finite")]),
        case(affine(1.0, f32::INFINITY), &[], &[("f32 [2]", "scale 1 or bias inf is not finite")]),
    ]);
    let clamp = |min: f32, max: f32| Op::Clamp { min: min.into(), max: max.into() };
    let back = |min: f32, max: f32| Op::ClampBack { min: min.into(), max: max.into() };
    let fill = |value: f32| Op::Fill { value: value.into(), shape: shape(&[2, 3]) };
    let oai = |alpha: f32, limit: f32| {
        Op::Glu(GluKind::SwigluOai { alpha: alpha.into(), limit: limit.into() })
    };
    cases.extend([
        case(
            clamp(f32::NEG_INFINITY, 1.0),
            &[("f32 [2, 3]", "f32 [2, 3]"), ("f32 []", "f32 []")],
            &[("i32 [2]", "operand 0 must be f32, is i32"), ONE_NOT_TWO, NONE],
        ),
        case(clamp(1.0, 1.0), &[("f32 [2]", "f32 [2]")], &[]),
        case(
            clamp(1.0, 0.5),
            &[],
            &[("f32 [2]", "the bounds 1 and 0.5 are out of order or no numbers")],
        ),
        case(
            clamp(f32::NAN, 0.5),
            &[],
            &[("f32 [2]", "the bounds NaN and 0.5 are out of order or no numbers")],
        ),
        case(
            back(-1.0, f32::INFINITY),
            &[("f32 [2, 3]; f32 [2, 3]", "f32 [2, 3]")],
            &[
                ("f32 [2]; f32 [3]", "shapes [2] and [3] differ"),
                ("f32 [2]; f16 [2]", "operand 1 must be f32, is f16"),
                AND_TWO,
            ],
        ),
        case(
            back(1.0, -1.0),
            &[],
            &[("f32 [2]; f32 [2]", "the bounds 1 and -1 are out of order or no numbers")],
        ),
        case(fill(0.5), &[("", "f32 [2, 3]")], &[("f32 [2]", "takes 0 operands, was given 1")]),
        case(fill(f32::NAN), &[], &[("", "the value NaN is not finite")]),
        case(
            oai(1.0, 0.0),
            &[],
            &[("f32 [2]; f32 [2]", "alpha 1 must be finite and the limit 0 above 0")],
        ),
        case(
            oai(f32::INFINITY, 7.0),
            &[],
            &[("f32 [2]; f32 [2]", "alpha inf must be finite and the limit 7 above 0")],
        ),
        case(oai(1.0, f32::INFINITY), &[("f32 [2]; f32 [2]", "f32 [2]")], &[]),
    ]);
    for kind in GluKind::ALL {
        cases.push(case(
            Op::Glu(kind),
            &[("f32 [2, 3]; f32 [2, 3]", "f32 [2, 3]"), ("f32 [7]; f32 [7]", "f32 [7]")],
            &[
                ("f32 [2, 3]; f32 [3]", "shapes [2, 3] and [3] differ"),
                ("f32 [2]; f16 [2]", "operand 1 must be f32, is f16"),
                AND_TWO,
            ],
        ));
        for wrt in [GluOperand::Gate, GluOperand::Up] {
            cases.push(case(
                Op::GluBack { kind, wrt },
                &[("f32 [2, 3]; f32 [2, 3]; f32 [2, 3]", "f32 [2, 3]")],
                &[
                    ("f32 [2]; f32 [2]; f32 [3]", "shapes [2] and [3] differ"),
                    ("f32 [3]; f32 [2]; f32 [2]", "shapes [3] and [2] differ"),
                    ("f32 [2]; f32 [2]; f16 [2]", "operand 2 must be f32, is f16"),
                    ("f32 [2]; f32 [2]", "takes 3 operands, was given 2"),
                ],
            ));
        }
    }
    cases
}

fn layout() -> Vec<Case> {
    let to = |dims: &[usize]| Op::Reshape { shape: shape(dims) };
    let wide = |dims: &[usize]| Op::Broadcast { shape: shape(dims) };
    let perm = |perm: &[u8]| Op::Permute { perm: perm.to_vec() };
    let slice = |dim, start, len| Op::Slice { dim, start, len };
    let pad = |dim, before, after| Op::Pad { dim, before, after };
    vec![
        case(
            Op::Sum { dims: 0b101 },
            &[("f32 [2, 3, 4]", "f32 [1, 3, 1]"), ("f32 [2, 3, 0]", "f32 [1, 3, 1]")],
            &[
                ("f32 [2, 3]", "sums dimensions 0b101, has 2"),
                ("f16 [2, 3, 4]", "operand 0 must be f32, is f16"),
                NONE,
            ],
        ),
        case(Op::Sum { dims: 0 }, &[("f32 []", "f32 []"), ("f32 [2]", "f32 [2]")], &[]),
        case(
            Op::Sum { dims: 255 },
            &[],
            &[("f32 [1, 1, 1, 1, 1, 1]", "sums dimensions 0b11111111, has 6")],
        ),
        case(
            wide(&[2, 3]),
            &[
                ("f32 [2, 1]", "f32 [2, 3]"),
                ("f32 [3]", "f32 [2, 3]"),
                ("f32 []", "f32 [2, 3]"),
                ("f32 [2, 3]", "f32 [2, 3]"),
            ],
            &[
                ("f32 [2]", "shapes [2] and [2, 3] do not broadcast"),
                ("f32 [4, 2, 3]", "[4, 2, 3] does not broadcast to [2, 3]"),
                ("i32 [3]", "operand 0 must be f32, is i32"),
                NONE,
            ],
        ),
        case(wide(&[1, 3]), &[], &[("f32 [2, 3]", "[2, 3] does not broadcast to [1, 3]")]),
        case(wide(&[0]), &[("f32 [1]", "f32 [0]")], &[]),
        case(
            to(&[3, 2]),
            &[
                ("f32 [2, 3]", "f32 [3, 2]"),
                ("i32 [6]", "i32 [3, 2]"),
                ("f16 [1, 6]", "f16 [3, 2]"),
                ("bf16 [6, 1, 1]", "bf16 [3, 2]"),
            ],
            &[
                ("f32 [2, 2]", "[2, 2] and [3, 2] have different element counts"),
                ("q8-rows [2, 32]", "q8-rows cannot be reshaped"),
                ("Q4_K [1, 256]", "Q4_K cannot be reshaped"),
                NONE,
            ],
        ),
        case(
            to(&[]),
            &[("f32 [1, 1]", "f32 []")],
            &[("f32 [0]", "[0] and [] have different element counts")],
        ),
        case(
            perm(&[2, 0, 1]),
            &[("f32 [2, 3, 4]", "f32 [4, 2, 3]"), ("i32 [0, 1, 2]", "i32 [2, 0, 1]")],
            &[
                ("f32 [2, 3]", "no dimension 2"),
                ("f32 [2, 3, 4, 5]", "[2, 0, 1] is not a permutation of 4 dimensions"),
                ("Q8_0 [1, 1, 32]", "Q8_0 cannot be permuted"),
                NONE,
            ],
        ),
        case(perm(&[0, 0]), &[], &[("f32 [2, 3]", "[0, 0] is not a permutation of 2 dimensions")]),
        case(
            perm(&[0, 0, 1]),
            &[],
            &[("f32 [2, 3]", "[0, 0, 1] is not a permutation of 2 dimensions")],
        ),
        case(perm(&[255]), &[], &[("f32 [2]", "no dimension 255")]),
        case(
            perm(&[]),
            &[("f32 []", "f32 []")],
            &[("f32 [1]", "[] is not a permutation of 1 dimensions")],
        ),
        case(
            slice(1, 1, 2),
            &[("f32 [2, 3]", "f32 [2, 2]"), ("bf16 [2, 5, 1]", "bf16 [2, 2, 1]")],
            &[
                ("f32 [2, 2]", "2 entries from 1 are outside of dimension 1 of size 2"),
                ("f32 [2]", "no dimension 1"),
                ("Q8_0 [4, 32]", "Q8_0 cannot be sliced"),
                NONE,
            ],
        ),
        case(slice(0, 2, 0), &[("f32 [2]", "f32 [0]")], &[]),
        case(
            slice(0, usize::MAX, 2),
            &[],
            &[(
                "f32 [3]",
                "2 entries from 18446744073709551615 are outside of dimension 0 of size 3",
            )],
        ),
        case(slice(255, 0, 0), &[], &[("f32 [3]", "no dimension 255")]),
        case(
            pad(0, 1, 2),
            &[("f32 [2, 3]", "f32 [5, 3]"), ("f32 [0]", "f32 [3]")],
            &[("f32 []", "no dimension 0"), ("f16 [2]", "operand 0 must be f32, is f16"), NONE],
        ),
        case(pad(0, usize::MAX, 2), &[], &[("f32 [3]", "the padded size overflows")]),
        case(
            pad(0, 1 << 46, 0),
            &[],
            &[(
                "f32 [1, 0]",
                "shape [70368744177665, 0] is too large: its sizes, 0 counted as 1, multiply to \
                 more than 2^46",
            )],
        ),
        case(
            Op::Concat { dim: 1 },
            &[
                ("f32 [2, 3]; f32 [2, 4]", "f32 [2, 7]"),
                ("f32 [2, 3]; f32 [2, 0]; f32 [2, 3]", "f32 [2, 6]"),
                ("f32 [2, 3]", "f32 [2, 3]"),
            ],
            &[
                ("f32 [2, 3]; f32 [3, 3]", "shapes [2, 3] and [3, 3] differ beside dimension 1"),
                ("f32 [2, 3]; f32 [2]", "shapes [2, 3] and [2] differ in rank"),
                ("f32 [2, 3]; f16 [2, 3]", "operand 1 must be f32, is f16"),
                ("f32 [2]", "no dimension 1"),
                ("", "takes at least one operand"),
            ],
        ),
        case(
            Op::Copy,
            &[("f32 [2, 3]", "f32 [2, 3]"), ("i32 []", "i32 []"), ("f16 [0]", "f16 [0]")],
            &[
                ("q8-rows [32]", "q8-rows cannot be copied"),
                ("Q4_0 [32]", "Q4_0 cannot be copied"),
                ONE_NOT_TWO,
                NONE,
            ],
        ),
    ]
}

fn dtypes() -> Vec<Case> {
    let cast = |dtype| Op::Cast { dtype };
    let round = |dtype| Op::Round { dtype };
    vec![
        case(
            cast(DType::F16),
            &[("f32 [2, 3]", "f16 [2, 3]")],
            &[
                ("f16 [2]", "no conversion from f16 to f16"),
                ("bf16 [2]", "no conversion from bf16 to f16"),
                ("i32 [2]", "no conversion from i32 to f16"),
                NONE,
            ],
        ),
        case(
            cast(DType::BF16),
            &[("f32 [2]", "bf16 [2]")],
            &[("f16 [2]", "no conversion from f16 to bf16")],
        ),
        case(
            cast(DType::F32),
            &[("f16 [2]", "f32 [2]"), ("bf16 [2]", "f32 [2]")],
            &[
                ("f32 [2]", "no conversion from f32 to f32"),
                ("Q8_0 [32]", "no conversion from Q8_0 to f32"),
                ("i32 [2]", "no conversion from i32 to f32"),
            ],
        ),
        case(
            cast(Q8),
            &[("f32 [2, 64]", "Q8_0 [2, 64]")],
            &[("f16 [64]", "no conversion from f16 to Q8_0")],
        ),
        case(
            cast(DType::Block(TensorType::Q4_0)),
            &[],
            &[("f32 [64]", "no conversion from f32 to Q4_0")],
        ),
        case(cast(DType::I32), &[], &[("f32 [2]", "no conversion from f32 to i32")]),
        case(
            cast(DType::Int16Rows),
            &[("f32 [2, 33]", "int16-rows [2, 33]")],
            &[("bf16 [2, 33]", "no conversion from bf16 to int16-rows")],
        ),
        case(cast(DType::Q8Rows), &[], &[("f32 [32]", "no conversion from f32 to q8-rows")]),
        case(
            round(Q8),
            &[("f32 [2, 64]", "f32 [2, 64]")],
            &[
                ("f32 [2, 3]", "rows of 3 elements are not whole blocks of Q8_0"),
                ("f16 [32]", "operand 0 must be f32, is f16"),
                NONE,
            ],
        ),
        case(round(DType::F16), &[("f32 [3]", "f32 [3]")], &[]),
        case(round(DType::BF16), &[("f32 [3]", "f32 [3]")], &[]),
        case(round(DType::F32), &[("f32 [3]", "f32 [3]")], &[]),
        case(round(DType::I32), &[], &[("f32 [3]", "no rounding to i32")]),
        case(round(dtype("Q4_K")), &[], &[("f32 [256]", "no rounding to Q4_K")]),
        case(
            Op::QuantizeRows,
            &[("f32 [2, 64]", "q8-rows [2, 64]"), ("f32 [0, 32]", "q8-rows [0, 32]")],
            &[("f16 [2, 32]", "operand 0 must be f32, is f16"), NONE],
        ),
    ]
}

fn lookups() -> Vec<Case> {
    vec![
        case(
            Op::Gather,
            &[
                ("f32 [5, 3]; i32 [2]", "f32 [2, 3]"),
                ("f16 [5, 3]; i32 [0]", "f32 [0, 3]"),
                ("Q4_K [5, 256]; i32 [2]", "f32 [2, 256]"),
                ("Q4_K [5, 256]; i32 [2, 3]", "f32 [2, 3, 256]"),
                ("f32 [5, 3]; i32 [2, 4, 6]", "f32 [2, 4, 6, 3]"),
                ("f32 [2, 5, 3]; i32 [2, 4]", "f32 [2, 4, 3]"),
                ("bf16 [6, 2, 5, 3]; i32 [6, 2, 4]", "f32 [6, 2, 4, 3]"),
            ],
            &[
                ("f32 [5]; i32 [2]", "the table must be [.., V, K], is [5]"),
                ("f32 [5, 3]; i32 []", "ids must have a dimension"),
                (
                    "f32 [2, 5, 3]; i32 [3, 4]",
                    "ids [3, 4] do not fit the leading dimensions of [2, 5, 3]",
                ),
                (
                    "f32 [2, 5, 3]; i32 [2]",
                    "ids [2] do not fit the leading dimensions of [2, 5, 3]",
                ),
                ("Q8_0 [2, 5, 32]; i32 [2, 4]", "a Q8_0 table must be [V, K], is [2, 5, 32]"),
                ("f32 [5, 3]; f32 [2]", "operand 1 must be i32, is f32"),
                ("i32 [5, 3]; i32 [2]", "no rows of a table of i32"),
                ("q8-rows [5, 32]; i32 [2]", "no rows of a table of q8-rows"),
                ("f32 [5, 3]", "takes 2 operands, was given 1"),
                (
                    "f32 [1, 1099511627776]; i32 [1099511627776]",
                    "shape [1099511627776, 1099511627776] is too large: its sizes, 0 counted as \
                     1, multiply to more than 2^46",
                ),
            ],
        ),
        case(
            Op::ScatterAdd { rows: 4 },
            &[
                ("i32 [2]; f32 [2, 3]", "f32 [4, 3]"),
                ("i32 [0]; f32 [0, 3]", "f32 [4, 3]"),
                ("i32 [5, 2]; f32 [5, 2, 3]", "f32 [5, 4, 3]"),
            ],
            &[
                ("i32 [2]; f32 [3, 3]", "ids [2] and rows [3, 3] do not match"),
                ("i32 [2]; f32 [2]", "ids [2] and rows [2] do not match"),
                ("f32 [2]; f32 [2, 3]", "operand 0 must be i32, is f32"),
                ("i32 [2]; f16 [2, 3]", "operand 1 must be f32, is f16"),
                ("i32 [2]", "takes 2 operands, was given 1"),
            ],
        ),
        case(
            Op::ScatterAdd { rows: usize::MAX },
            &[],
            &[(
                "i32 [0]; f32 [0, 0]",
                "shape [18446744073709551615, 0] is too large: its sizes, 0 counted as 1, \
                 multiply to more than 2^46",
            )],
        ),
    ]
}

fn norms_and_rope() -> Vec<Case> {
    let norm = |eps: f32| Op::RmsNorm { eps: eps.into() };
    let table = |dims, factors, base: f32, freq_scale: f32| {
        Op::RopeTable(RopeAngles {
            dims,
            base: base.into(),
            freq_scale: freq_scale.into(),
            factors,
            yarn: None,
            sections: None,
        })
    };
    let mut cases = vec![
        case(
            norm(1e-5),
            &[("f32 [2, 3]; f32 [3]", "f32 [2, 3]"), ("f32 [2, 4, 3]; f32 [3]", "f32 [2, 4, 3]")],
            &[
                ("f32 [2, 3]; f32 [2]", "the weight must be [3], is [2]"),
                ("f32 [2, 3]; f32 [1, 3]", "the weight must be [3], is [1, 3]"),
                ("f32 [2, 3]; f16 [3]", "operand 1 must be f32, is f16"),
                ("f32 [2, 3]", "takes 2 operands, was given 1"),
            ],
        ),
        case(norm(0.0), &[("f32 [3]; f32 [3]", "f32 [3]")], &[]),
        case(
            norm(-1.0),
            &[],
            &[("f32 [3]; f32 [3]", "eps must be finite and not negative, is -1")],
        ),
        case(
            norm(f32::NAN),
            &[],
            &[("f32 [3]; f32 [3]", "eps must be finite and not negative, is NaN")],
        ),
        case(
            table(4, false, 1e4, 1.0),
            &[("i32 [3]", "f32 [3, 4]"), ("i32 [0]", "f32 [0, 4]")],
            &[
                ("f32 [3]", "operand 0 must be i32, is f32"),
                ("i32 [3, 1]", "positions must be [T], are [3, 1]"),
                ("i32 [3]; f32 [2]", "takes 1 operands, was given 2"),
                NONE,
            ],
        ),
        case(
            table(4, true, 1e4, 1.0),
            &[("i32 [3]; f32 [2]", "f32 [3, 4]")],
            &[
                ("i32 [3]; f32 [4]", "the factors must be [2], is [4]"),
                ("i32 [3]; i32 [2]", "operand 1 must be f32, is i32"),
                ("i32 [3]", "takes 2 operands, was given 1"),
            ],
        ),
        case(
            table(3, false, 1e4, 1.0),
            &[],
            &[("i32 [3]", "rotates 3 elements, not a positive even number")],
        ),
        case(
            table(0, false, 1e4, 1.0),
            &[],
            &[("i32 [3]", "rotates 0 elements, not a positive even number")],
        ),
        case(
            table(2, false, 0.0, 1.0),
            &[],
            &[("i32 [3]", "base 0 or frequency scale 1 is out of range")],
        ),
        case(
            table(2, false, 1e4, f32::NAN),
            &[],
            &[("i32 [3]", "base 10000 or frequency scale NaN is out of range")],
        ),
        case(
            table(usize::MAX - 1, false, 1e4, 1.0),
            &[],
            &[(
                "i32 [0]",
                "shape [0, 18446744073709551614] is too large: its sizes, 0 counted as 1, \
                 multiply to more than 2^46",
            )],
        ),
    ];
    for wrt in [NormOperand::X, NormOperand::Weight] {
        let made = if wrt == NormOperand::X { "f32 [2, 3]" } else { "f32 [3]" };
        cases.push(case(
            Op::RmsNormBack { eps: 1e-5.into(), wrt },
            &[("f32 [2, 3]; f32 [3]; f32 [2, 3]", made)],
            &[
                ("f32 [2, 3]; f32 [2]; f32 [2, 3]", "the weight must be [3], is [2]"),
                ("f32 [2, 3]; f32 [3]; f32 [3, 3]", "shapes [2, 3] and [3, 3] differ"),
                ("f32 [2, 3]; f32 [3]; i32 [2, 3]", "operand 2 must be f32, is i32"),
                ("f32 [2, 3]; f32 [3]", "takes 3 operands, was given 2"),
            ],
        ));
    }
    for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
        cases.push(case(
            Op::Rope { style, inverse: style == RopeStyle::Halves },
            &[
                ("f32 [3, 2, 4]; f32 [3, 4]", "f32 [3, 2, 4]"),
                ("f32 [3, 2, 5]; f32 [3, 2]", "f32 [3, 2, 5]"),
            ],
            &[
                ("f32 [3, 2, 4]; f32 [3, 6]", "x [3, 2, 4] and the table [3, 6] do not match"),
                ("f32 [3, 2, 4]; f32 [2, 4]", "x [3, 2, 4] and the table [2, 4] do not match"),
                ("f32 [3, 2, 4]; f32 [3, 3]", "x [3, 2, 4] and the table [3, 3] do not match"),
                ("f32 [3, 4]; f32 [3, 4]", "x [3, 4] and the table [3, 4] do not match"),
                ("f16 [3, 2, 4]; f32 [3, 4]", "operand 0 must be f32, is f16"),
                ("f32 [3, 2, 4]", "takes 2 operands, was given 1"),
            ],
        ));
    }
    cases
}

fn products() -> Vec<Case> {
    let matmul = |ta, tb| Op::MatMul { ta, tb };
    let mut cases = vec![
        case(
            matmul(false, true),
            &[
                ("f32 [2, 3]; f32 [4, 3]", "f32 [2, 4]"),
                ("f32 [5, 2, 3]; f32 [4, 3]", "f32 [5, 2, 4]"),
                ("f32 [2, 3]; f32 [5, 4, 3]", "f32 [5, 2, 4]"),
                ("f32 [6, 1, 2, 3]; f32 [5, 4, 3]", "f32 [6, 5, 2, 4]"),
                ("f32 [2, 3]; f16 [4, 3]", "f32 [2, 4]"),
                ("f32 [2, 3]; bf16 [4, 3]", "f32 [2, 4]"),
                ("q8-rows [2, 32]; Q4_0 [4, 32]", "f32 [2, 4]"),
                ("q8-rows [7, 2, 256]; Q4_K [4, 256]", "f32 [7, 2, 4]"),
                ("f32 [0, 3]; f32 [4, 3]", "f32 [0, 4]"),
                ("f32 [2, 0]; f32 [4, 0]", "f32 [2, 4]"),
            ],
            &[
                ("f32 [2, 3]; f32 [4, 5]", "inner widths 3 and 5 differ"),
                ("f32 [3]; f32 [4, 3]", "[3] and [4, 3] are not matrices"),
                ("f32 [2, 3]; f32 [3]", "[2, 3] and [3] are not matrices"),
                ("f32 [5, 2, 3]; f32 [6, 4, 3]", "shapes [5] and [6] do not broadcast"),
                ("f16 [2, 3]; f32 [4, 3]", "no product of f16 and f32"),
                ("f32 [2, 3]; i32 [4, 3]", "no product of f32 and i32"),
                ("f32 [2, 32]; q8-rows [4, 32]", "no product of f32 and q8-rows"),
                ("q8-rows [2, 32]; f32 [4, 32]", "no product of q8-rows and f32"),
                ("Q4_0 [2, 32]; f32 [4, 32]", "no product of Q4_0 and f32"),
                (
                    "f32 [2, 32]; Q4_0 [4, 32]",
                    "a Q4_0 matrix takes q8-rows on its left (QuantizeRows)",
                ),
                ("q8-rows [2, 32]; Q4_0 [5, 4, 32]", "a Q4_0 matrix must be [N, K], is [5, 4, 32]"),
                ("f32 [2, 3]", "takes 2 operands, was given 1"),
            ],
        ),
        case(
            matmul(false, false),
            &[
                ("f32 [2, 3]; f32 [3, 4]", "f32 [2, 4]"),
                ("f32 [2, 4]; Q4_0 [4, 32]", "f32 [2, 32]"),
                ("bf16 [5, 2, 4]; Q4_0 [4, 32]", "f32 [5, 2, 32]"),
            ],
            &[
                ("f32 [2, 3]; f32 [4, 3]", "inner widths 3 and 4 differ"),
                ("q8-rows [2, 32]; Q4_0 [32, 32]", "q8-rows multiply a transposed block matrix"),
                ("f16 [2, 4]; Q4_0 [4, 32]", "no product of f16 and Q4_0"),
            ],
        ),
        case(
            matmul(true, false),
            &[("f32 [3, 2]; f32 [3, 4]", "f32 [2, 4]")],
            &[
                ("f32 [2, 3]; f32 [3, 4]", "inner widths 2 and 3 differ"),
                (
                    "bf16 [4, 2]; Q4_0 [4, 32]",
                    "a Q4_0 matrix takes q8-rows on its left (QuantizeRows)",
                ),
            ],
        ),
        case(
            matmul(true, true),
            &[("f32 [3, 2]; f32 [4, 3]", "f32 [2, 4]")],
            &[("q8-rows [4, 32]; Q4_0 [4, 32]", "q8-rows multiply a transposed block matrix")],
        ),
        case(
            Op::Lora { slots: 1 },
            &[
                ("f32 [5, 8]; f32 [5, 4]; i32 [5]; f32 [2, 8]; f32 [4, 2]; f32 [1]", "f32 [5, 4]"),
                ("f32 [0, 8]; f32 [0, 4]; i32 [0]; f32 [2, 8]; f32 [4, 2]; f32 [1]", "f32 [0, 4]"),
            ],
            &[
                (
                    "f32 [5, 8]; f32 [5, 4]; i32 [5]",
                    "1 slots take 3 + 3 x slots operands, was given 3",
                ),
                (
                    "f32 [5, 8]; f32 [6, 4]; i32 [5]; f32 [2, 8]; f32 [4, 2]; f32 [1]",
                    "x [5, 8] and base [6, 4] do not match",
                ),
                (
                    "f32 [5, 8]; f32 [5, 4]; i32 [6]; f32 [2, 8]; f32 [4, 2]; f32 [1]",
                    "rows must be [5], is [6]",
                ),
                (
                    "f32 [5, 8]; f32 [5, 4]; f32 [5]; f32 [2, 8]; f32 [4, 2]; f32 [1]",
                    "operand 2 must be i32, is f32",
                ),
                (
                    "f32 [5, 8]; f32 [5, 4]; i32 [5]; f32 [2, 7]; f32 [4, 2]; f32 [1]",
                    "A of slot 0 must be [r, 8], is [2, 7]",
                ),
                (
                    "f32 [5, 8]; f32 [5, 4]; i32 [5]; f32 [0, 8]; f32 [4, 0]; f32 [1]",
                    "A of slot 0 must be [r, 8], is [0, 8]",
                ),
                (
                    "f32 [5, 8]; f32 [5, 4]; i32 [5]; f32 [2, 8]; f32 [4, 3]; f32 [1]",
                    "B of slot 0 must be [4, 2], is [4, 3]",
                ),
                (
                    "f32 [5, 8]; f32 [5, 4]; i32 [5]; f32 [2, 8]; f32 [4, 2]; f32 []",
                    "scale must be [1], is []",
                ),
                (
                    "f32 [5, 8]; f32 [5, 4]; i32 [5]; f16 [2, 8]; f32 [4, 2]; f32 [1]",
                    "operand 3 must be f32, is f16",
                ),
            ],
        ),
        case(
            Op::Lora { slots: 2 },
            &[(
                "f32 [5, 8]; f32 [5, 4]; i32 [5]; f32 [2, 8]; f32 [4, 2]; f32 [1]; f32 [3, 8]; \
                 f32 [4, 3]; f32 [1]",
                "f32 [5, 4]",
            )],
            &[(
                "f32 [5, 8]; f32 [5, 4]; i32 [5]; f32 [2, 8]; f32 [4, 2]; f32 [1]; f32 [3, 8]; \
                 f32 [4, 2]; f32 [1]",
                "B of slot 1 must be [4, 3], is [4, 2]",
            )],
        ),
        case(
            Op::Lora { slots: 0 },
            &[],
            &[(
                "f32 [5, 8]; f32 [5, 4]; i32 [5]",
                "0 slots take 3 + 3 x slots operands, was given 3",
            )],
        ),
        case(
            Op::Lora { slots: usize::MAX },
            &[],
            &[(
                "f32 [5, 8]",
                "18446744073709551615 slots take 3 + 3 x slots operands, was given 1",
            )],
        ),
    ];
    use LoraOperand::{A, B, X};
    let back = |slots, wrt, slot| Op::LoraBack { slots, wrt, slot };
    cases.extend([
        case(
            back(1, X, 0),
            &[("f32 [5, 4]; i32 [5]; f32 [2, 8]; f32 [4, 2]; f32 [1]", "f32 [5, 8]")],
            &[
                (
                    "f32 [5, 4]; i32 [5]; f32 [2, 8]; f32 [3, 2]; f32 [1]",
                    "B of slot 0 must be [4, 2], is [3, 2]",
                ),
                ("f32 [5]; i32 [5]; f32 [2, 8]; f32 [4, 2]; f32 [1]", "dy must be [T, N], is [5]"),
                (
                    "f32 [5, 4]; i32 [4]; f32 [2, 8]; f32 [4, 2]; f32 [1]",
                    "rows must be [5], is [4]",
                ),
                ("f32 [5, 4]; i32 [5]", "1 slots take 2 + 3 x slots operands, was given 2"),
            ],
        ),
        case(
            back(2, A, 1),
            &[("f32 [5, 8]; f32 [5, 2]; i32 [5]", "f32 [2, 8]")],
            &[
                ("f32 [6, 8]; f32 [5, 2]; i32 [5]", "x [6, 8] and dy [5, 2] do not match"),
                ("f32 [5, 8]; f32 [5]; i32 [5]", "x [5, 8] and dy [5] do not match"),
                ("f32 [5, 8]; f32 [5, 2]", "takes 3 operands, was given 2"),
            ],
        ),
        case(
            back(2, B, 0),
            &[("f32 [5, 2]; f32 [5, 4]; i32 [5]", "f32 [4, 2]")],
            &[("f32 [5, 2]; f32 [5, 4]; i32 [4]", "rows must be [5], is [4]")],
        ),
        case(back(2, A, 2), &[], &[("f32 [5, 8]; f32 [5, 2]; i32 [5]", "no slot 2 of 2")]),
    ]);
    cases
}

pub fn table() -> Vec<Case> {
    [
        elementwise(),
        layout(),
        dtypes(),
        lookups(),
        rows(),
        experts(),
        adapted_experts(),
        norms_and_rope(),
        products(),
        attention(),
        recurrent::cases(),
        losses(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
