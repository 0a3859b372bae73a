//! Recurrences.

use gradus_graph::*;

use super::{Case, case};

const CONV: &str = "f32 [7, 5]; f32 [5, 4]; f32 [2, 3, 5]; i32 [2, 3]";
const CONV_STATE: &str = "f32 [7, 5]; f32 [2, 3, 5]; i32 [2, 3]";
const SCAN: &str = "f32 [7, 4, 3]; f32 [7, 4]; f32 [4, 1]; f32 [7, 2, 6]; f32 [7, 2, 6]; \
                    f32 [2, 4, 3, 6]; i32 [2, 3]";
const DELTA: &str = "f32 [7, 2, 6]; f32 [7, 2, 6]; f32 [7, 4, 5]; f32 [7, 4]; f32 [7, 4]; \
                     f32 [2, 4, 6, 5]; i32 [2, 3]";

fn convolutions() -> Vec<Case> {
    use SsmConvOperand::{State, Weight, X};
    let mut cases = vec![
        case(
            Op::SsmConv,
            &[
                (CONV, "f32 [7, 5]"),
                ("f32 [0, 5]; f32 [5, 4]; f32 [2, 3, 5]; i32 [2, 3]", "f32 [0, 5]"),
                ("f32 [7, 5]; f32 [5, 1]; f32 [2, 0, 5]; i32 [2, 3]", "f32 [7, 5]"),
            ],
            &[
                ("f32 [7, 5]; f32 [5, 4]; f32 [2, 3, 5]", "takes 4 operands, was given 3"),
                ("f32 [7]; f32 [5, 4]; f32 [2, 3, 5]; i32 [2, 3]", "x must be [T, C], is [7]"),
                ("f32 [7, 5]; f32 [4]; f32 [2, 3, 5]; i32 [2, 3]", "w must be [C, W], is [4]"),
                (
                    "f32 [7, 5]; f32 [4, 5]; f32 [2, 3, 5]; i32 [2, 3]",
                    "x [7, 5] and w [4, 5] do not match",
                ),
                (
                    "f32 [7, 5]; f32 [5, 0]; f32 [2, 0, 5]; i32 [2, 3]",
                    "x [7, 5] and w [5, 0] do not match",
                ),
                (
                    "f32 [7, 5]; f32 [5, 4]; f32 [2, 4, 5]; i32 [2, 3]",
                    "the state must be [2, 3, 5], is [2, 4, 5]",
                ),
                (
                    "f32 [7, 5]; f32 [5, 4]; f32 [3, 3, 5]; i32 [2, 3]",
                    "the state must be [2, 3, 5], is [3, 3, 5]",
                ),
                (
                    "f32 [7, 5]; f32 [5, 4]; f32 [2, 3, 5]; i32 [2, 2]",
                    "seqs must be i32 [S, 3], is i32 [2, 2]",
                ),
                (
                    "f32 [7, 5]; f16 [5, 4]; f32 [2, 3, 5]; i32 [2, 3]",
                    "operand 1 must be f32, is f16",
                ),
                (
                    "f32 [7, 5]; f32 [5, 4]; f32 [2, 3, 5]; f32 [2, 3]",
                    "operand 3 must be i32, is f32",
                ),
            ],
        ),
        case(
            Op::SsmConvState,
            &[(CONV_STATE, "f32 [2, 3, 5]")],
            &[
                (
                    "f32 [7, 5]; f32 [2, 15]; i32 [2, 3]",
                    "the state must be [S, W-1, C], is [2, 15]",
                ),
                (
                    "f32 [7, 5]; f32 [2, 3, 4]; i32 [2, 3]",
                    "the state must be [2, 3, 5], is [2, 3, 4]",
                ),
                ("f32 [7, 5]; f32 [2, 3, 5]", "takes 3 operands, was given 2"),
            ],
        ),
    ];
    for (wrt, made) in [(X, "f32 [7, 5]"), (Weight, "f32 [5, 4]"), (State, "f32 [2, 3, 5]")] {
        cases.push(case(
            Op::SsmConvBack { wrt },
            &[("f32 [7, 5]; f32 [5, 4]; f32 [2, 3, 5]; i32 [2, 3]; f32 [7, 5]", made)],
            &[
                (CONV, "takes 5 operands, was given 4"),
                (
                    "f32 [7, 5]; f32 [5, 4]; f32 [2, 3, 5]; i32 [2, 3]; f32 [5, 7]",
                    "dy must be [7, 5], is [5, 7]",
                ),
            ],
        ));
    }
    for (wrt, made) in
        [(SsmConvStateOperand::X, "f32 [7, 5]"), (SsmConvStateOperand::State, "f32 [2, 3, 5]")]
    {
        cases.push(case(
            Op::SsmConvStateBack { wrt },
            &[("f32 [7, 5]; f32 [2, 3, 5]; i32 [2, 3]; f32 [2, 3, 5]", made)],
            &[
                (CONV_STATE, "takes 4 operands, was given 3"),
                (
                    "f32 [7, 5]; f32 [2, 3, 5]; i32 [2, 3]; f32 [7, 5]",
                    "dy must be [2, 3, 5], is [7, 5]",
                ),
            ],
        ));
    }
    cases
}

fn scans() -> Vec<Case> {
    vec![
        case(
            Op::SsmScan,
            &[
                // 7*4*3 outputs and 2*4*3*6 states.
                (SCAN, "f32 [228]"),
                (
                    "f32 [7, 8, 1]; f32 [7, 8]; f32 [8, 6]; f32 [7, 1, 6]; f32 [7, 1, 6]; \
                     f32 [2, 8, 1, 6]; i32 [2, 3]",
                    "f32 [152]",
                ),
            ],
            &[
                ("f32 [7, 4, 3]; f32 [7, 4]", "takes 7 operands, was given 2"),
                (
                    "f32 [7, 12]; f32 [7, 4]; f32 [4, 1]; f32 [7, 2, 6]; f32 [7, 2, 6]; \
                     f32 [2, 4, 3, 6]; i32 [2, 3]",
                    "x must be [T, H, D], is [7, 12]",
                ),
                (
                    "f32 [7, 4, 3]; f32 [7, 3]; f32 [4, 1]; f32 [7, 2, 6]; f32 [7, 2, 6]; \
                     f32 [2, 4, 3, 6]; i32 [2, 3]",
                    "dt must be [7, 4], is [7, 3]",
                ),
                (
                    "f32 [7, 4, 3]; f32 [7, 4]; f32 [4, 2]; f32 [7, 2, 6]; f32 [7, 2, 6]; \
                     f32 [2, 4, 3, 6]; i32 [2, 3]",
                    "a must be [4, 6] or [4, 1], is [4, 2]",
                ),
                (
                    "f32 [7, 4, 3]; f32 [7, 4]; f32 [4, 1]; f32 [7, 3, 6]; f32 [7, 3, 6]; \
                     f32 [2, 4, 3, 6]; i32 [2, 3]",
                    "4 heads are not a multiple of 3 groups",
                ),
                (
                    "f32 [7, 4, 3]; f32 [7, 4]; f32 [4, 1]; f32 [8, 2, 6]; f32 [8, 2, 6]; \
                     f32 [2, 4, 3, 6]; i32 [2, 3]",
                    "x [7, 4, 3] and b [8, 2, 6] do not match",
                ),
                (
                    "f32 [7, 4, 3]; f32 [7, 4]; f32 [4, 1]; f32 [7, 2, 6]; f32 [7, 1, 6]; \
                     f32 [2, 4, 3, 6]; i32 [2, 3]",
                    "c must be [7, 2, 6], is [7, 1, 6]",
                ),
                (
                    "f32 [7, 4, 3]; f32 [7, 4]; f32 [4, 1]; f32 [7, 2, 6]; f32 [7, 2, 6]; \
                     f32 [2, 4, 6, 3]; i32 [2, 3]",
                    "the state must be [2, 4, 3, 6], is [2, 4, 6, 3]",
                ),
            ],
        ),
        case(
            Op::SsmScanBack { parts: 2 },
            // 84 of x, 28 of dt, 2*4 of a, 2*84 of b and of c, 144 of the states.
            &[(
                "f32 [7, 4, 3]; f32 [7, 4]; f32 [4, 1]; f32 [7, 2, 6]; f32 [7, 2, 6]; \
                 f32 [2, 4, 3, 6]; i32 [2, 3]; f32 [7, 4, 3]; f32 [2, 4, 3, 6]",
                "f32 [600]",
            )],
            &[
                (SCAN, "takes 9 operands, was given 7"),
                (
                    "f32 [7, 4, 3]; f32 [7, 4]; f32 [4, 1]; f32 [7, 2, 6]; f32 [7, 2, 6]; \
                     f32 [2, 4, 3, 6]; i32 [2, 3]; f32 [7, 3, 4]; f32 [2, 4, 3, 6]",
                    "dy must be [7, 4, 3], is [7, 3, 4]",
                ),
                (
                    "f32 [7, 4, 3]; f32 [7, 4]; f32 [4, 1]; f32 [7, 2, 6]; f32 [7, 2, 6]; \
                     f32 [2, 4, 3, 6]; i32 [2, 3]; f32 [7, 4, 3]; f32 [144]",
                    "dexit must be [2, 4, 3, 6], is [144]",
                ),
            ],
        ),
        case(
            Op::SsmScanBack { parts: 3 },
            &[],
            &[(
                "f32 [7, 4, 3]; f32 [7, 4]; f32 [4, 1]; f32 [7, 2, 6]; f32 [7, 2, 6]; \
                 f32 [2, 4, 3, 6]; i32 [2, 3]; f32 [7, 4, 3]; f32 [2, 4, 3, 6]",
                "3 parts of 2 heads",
            )],
        ),
        case(
            Op::SsmScanBack { parts: 0 },
            &[],
            &[(
                "f32 [7, 4, 3]; f32 [7, 4]; f32 [4, 1]; f32 [7, 2, 6]; f32 [7, 2, 6]; \
                 f32 [2, 4, 3, 6]; i32 [2, 3]; f32 [7, 4, 3]; f32 [2, 4, 3, 6]",
                "0 parts of 2 heads",
            )],
        ),
    ]
}

fn deltas() -> Vec<Case> {
    let attrs = GatedDeltaAttrs { scale: 0.5.into(), key_heads: KeyHeads::Cycle };
    let infinite = GatedDeltaAttrs { scale: f32::INFINITY.into(), ..attrs };
    vec![
        case(
            Op::GatedDeltaRule(attrs),
            &[
                // 7*4*5 outputs and 2*4*6*5 states.
                (DELTA, "f32 [380]"),
                (
                    "f32 [7, 2, 6]; f32 [7, 2, 6]; f32 [7, 4, 5]; f32 [7, 4, 6]; f32 [7, 4]; \
                     f32 [2, 4, 6, 5]; i32 [2, 3]",
                    "f32 [380]",
                ),
            ],
            &[
                ("f32 [7, 2, 6]", "takes 7 operands, was given 1"),
                (
                    "f32 [7, 2, 6]; f32 [7, 4, 6]; f32 [7, 4, 5]; f32 [7, 4]; f32 [7, 4]; \
                     f32 [2, 4, 6, 5]; i32 [2, 3]",
                    "k must be [7, 2, 6], is [7, 4, 6]",
                ),
                (
                    "f32 [8, 2, 6]; f32 [8, 2, 6]; f32 [7, 4, 5]; f32 [7, 4]; f32 [7, 4]; \
                     f32 [2, 4, 6, 5]; i32 [2, 3]",
                    "q [8, 2, 6] and v [7, 4, 5] do not match",
                ),
                (
                    "f32 [7, 3, 6]; f32 [7, 3, 6]; f32 [7, 4, 5]; f32 [7, 4]; f32 [7, 4]; \
                     f32 [2, 4, 6, 5]; i32 [2, 3]",
                    "4 value heads are not a multiple of 3 key heads",
                ),
                (
                    "f32 [7, 2, 6]; f32 [7, 2, 6]; f32 [7, 4, 5]; f32 [7, 4, 5]; f32 [7, 4]; \
                     f32 [2, 4, 6, 5]; i32 [2, 3]",
                    "g must be [7, 4] or [7, 4, 6], is [7, 4, 5]",
                ),
                (
                    "f32 [7, 2, 6]; f32 [7, 2, 6]; f32 [7, 4, 5]; f32 [7, 4]; f32 [7, 2]; \
                     f32 [2, 4, 6, 5]; i32 [2, 3]",
                    "beta must be [7, 4], is [7, 2]",
                ),
                (
                    "f32 [7, 2, 6]; f32 [7, 2, 6]; f32 [7, 4, 5]; f32 [7, 4]; f32 [7, 4]; \
                     f32 [2, 4, 5, 6]; i32 [2, 3]",
                    "the state must be [2, 4, 6, 5], is [2, 4, 5, 6]",
                ),
                (
                    "f32 [7, 2, 6]; f32 [7, 2, 6]; f32 [7, 4, 5]; f32 [7, 4]; f32 [7, 4]; \
                     f32 [2, 4, 6, 5]; i32 [6]",
                    "seqs must be i32 [S, 3], is i32 [6]",
                ),
            ],
        ),
        case(Op::GatedDeltaRule(infinite), &[], &[(DELTA, "scale must be finite")]),
        case(
            Op::GatedDeltaRuleBack(attrs),
            // 168 of q and of k, 140 of v, 28 of g and of beta, 240 of the states.
            &[(
                "f32 [7, 2, 6]; f32 [7, 2, 6]; f32 [7, 4, 5]; f32 [7, 4]; f32 [7, 4]; \
                 f32 [2, 4, 6, 5]; i32 [2, 3]; f32 [7, 4, 5]; f32 [2, 4, 6, 5]",
                "f32 [772]",
            )],
            &[
                (DELTA, "takes 9 operands, was given 7"),
                (
                    "f32 [7, 2, 6]; f32 [7, 2, 6]; f32 [7, 4, 5]; f32 [7, 4]; f32 [7, 4]; \
                     f32 [2, 4, 6, 5]; i32 [2, 3]; f32 [380]; f32 [2, 4, 6, 5]",
                    "dy must be [7, 4, 5], is [380]",
                ),
                (
                    "f32 [7, 2, 6]; f32 [7, 2, 6]; f32 [7, 4, 5]; f32 [7, 4]; f32 [7, 4]; \
                     f32 [2, 4, 6, 5]; i32 [2, 3]; f32 [7, 4, 5]; f32 [2, 4, 5, 6]",
                    "dexit must be [2, 4, 6, 5], is [2, 4, 5, 6]",
                ),
            ],
        ),
    ]
}

pub fn cases() -> Vec<Case> {
    [convolutions(), scans(), deltas()].into_iter().flatten().collect()
}
