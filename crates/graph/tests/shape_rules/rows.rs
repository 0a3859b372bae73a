//! The table's ops that work along rows: running sums, sorting, softmax, norms.

use gradus_graph::*;

use crate::table::{AND_TWO, Case, NONE, case};

pub fn experts() -> Vec<Case> {
    let widths = "inner widths 7 and 6 differ";
    vec![
        case(
            Op::MatMulExperts { tb: true },
            &[
                ("f32 [3, 1, 6]; f32 [4, 5, 6]; i32 [3, 2]", "f32 [3, 2, 5]"),
                ("f32 [3, 2, 6]; bf16 [4, 5, 6]; i32 [3, 2]", "f32 [3, 2, 5]"),
                ("q8-rows [3, 1, 32]; Q8_0 [4, 5, 32]; i32 [3, 2]", "f32 [3, 2, 5]"),
            ],
            &[
                ("f32 [3, 1, 7]; f32 [4, 5, 6]; i32 [3, 2]", widths),
                (
                    "f32 [3, 3, 6]; f32 [4, 5, 6]; i32 [3, 2]",
                    "x [3, 3, 6] and ids [3, 2] must be [T, 1 or U, K] and [T, U]",
                ),
                (
                    "f32 [3, 6]; f32 [4, 5, 6]; i32 [3, 2]",
                    "x [3, 6] and ids [3, 2] must be [T, 1 or U, K] and [T, U]",
                ),
                ("f32 [3, 1, 6]; f32 [5, 6]; i32 [3, 2]", "experts must be [E, N, K], are [5, 6]"),
                (
                    "f32 [3, 1, 32]; Q8_0 [4, 5, 32]; i32 [3, 2]",
                    "Q8_0 experts take q8-rows on their left (QuantizeRows)",
                ),
                (
                    "f16 [3, 1, 6]; f32 [4, 5, 6]; i32 [3, 2]",
                    "no product of f16 and experts of f32",
                ),
                ("f32 [3, 1, 6]; f32 [4, 5, 6]; f32 [3, 2]", "operand 2 must be i32, is f32"),
                ("f32 [3, 1, 6]; f32 [4, 5, 6]", "takes 3 operands, was given 2"),
            ],
        ),
        case(
            Op::MatMulExperts { tb: false },
            &[
                ("f32 [3, 1, 5]; Q8_0 [4, 5, 32]; i32 [3, 2]", "f32 [3, 2, 32]"),
                ("bf16 [3, 1, 5]; Q8_0 [4, 5, 32]; i32 [3, 2]", "f32 [3, 2, 32]"),
            ],
            &[
                ("f32 [3, 1, 7]; f32 [4, 6, 5]; i32 [3, 2]", widths),
                (
                    "q8-rows [3, 1, 32]; Q8_0 [4, 5, 32]; i32 [3, 2]",
                    "q8-rows multiply transposed block experts",
                ),
            ],
        ),
        case(
            Op::ExpertOuter { experts: 4 },
            &[("f32 [3, 1, 6]; f32 [3, 2, 5]; i32 [3, 2]", "f32 [4, 6, 5]")],
            &[
                (
                    "f32 [3, 1, 6]; f32 [2, 2, 5]; i32 [3, 2]",
                    "b [2, 2, 5] and ids [3, 2] must be [T, 1 or U, K] and [T, U]",
                ),
                ("f32 [3, 1, 6]; f16 [3, 2, 5]; i32 [3, 2]", "operand 1 must be f32, is f16"),
                ("f32 [3, 1, 6]; f32 [3, 2, 5]", "takes 3 operands, was given 2"),
            ],
        ),
    ]
}

pub fn adapted_experts() -> Vec<Case> {
    use LoraOperand::{A, B, X};
    let back = |slots, wrt, slot| Op::LoraExpertsBack { slots, wrt, slot };
    vec![
        case(
            Op::LoraExperts { slots: 1 },
            &[
                (
                    "f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f32 [3, 2, 8]; \
                     f32 [3, 4, 2]; f32 [1]",
                    "f32 [5, 2, 4]",
                ),
                (
                    "f32 [5, 2, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f32 [3, 2, 8]; \
                     f32 [3, 4, 2]; f32 [1]",
                    "f32 [5, 2, 4]",
                ),
            ],
            &[
                (
                    "f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]",
                    "1 slots take 4 + 3 x slots operands, was given 4",
                ),
                (
                    "f32 [5, 3, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f32 [3, 2, 8]; \
                     f32 [3, 4, 2]; f32 [1]",
                    "x [5, 3, 8] and ids [5, 2] must be [T, 1 or U, K] and [T, U]",
                ),
                (
                    "f32 [5, 1, 8]; f32 [5, 1, 4]; i32 [5]; i32 [5, 2]; f32 [3, 2, 8]; \
                     f32 [3, 4, 2]; f32 [1]",
                    "base [5, 1, 4] and ids [5, 2] must be [T, U, N] and [T, U]",
                ),
                (
                    "f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [6]; i32 [5, 2]; f32 [3, 2, 8]; \
                     f32 [3, 4, 2]; f32 [1]",
                    "rows must be [5], is [6]",
                ),
                (
                    "f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [5]; f32 [5, 2]; f32 [3, 2, 8]; \
                     f32 [3, 4, 2]; f32 [1]",
                    "operand 3 must be i32, is f32",
                ),
                (
                    "f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f32 [2, 8]; \
                     f32 [3, 4, 2]; f32 [1]",
                    "A of slot 0 must be [2, r, 8], is [2, 8]",
                ),
                (
                    "f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f32 [3, 2, 8]; \
                     f32 [4, 4, 2]; f32 [1]",
                    "B of slot 0 must be [3, 4, 2], is [4, 4, 2]",
                ),
                (
                    "f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f16 [3, 2, 8]; \
                     f32 [3, 4, 2]; f32 [1]",
                    "operand 4 must be f32, is f16",
                ),
            ],
        ),
        case(
            Op::LoraExperts { slots: 2 },
            &[],
            &[(
                "f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f32 [3, 2, 8]; f32 [3, 4, 2]; \
                 f32 [1]; f32 [4, 2, 8]; f32 [4, 4, 2]; f32 [1]",
                "A of slot 1 must be [3, r, 8], is [4, 2, 8]",
            )],
        ),
        case(
            back(1, X, 0),
            &[(
                "f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f32 [3, 2, 8]; f32 [3, 4, 2]; f32 [1]",
                "f32 [5, 2, 8]",
            )],
            &[
                (
                    "f32 [5, 2, 4]; i32 [5]; i32 [5, 3]; f32 [3, 2, 8]; f32 [3, 4, 2]; f32 [1]",
                    "dy [5, 2, 4] and ids [5, 3] must be [T, U, N] and [T, U]",
                ),
                (
                    "f32 [5, 2, 4]; i32 [5]; i32 [5, 2]",
                    "1 slots take 3 + 3 x slots operands, was given 3",
                ),
            ],
        ),
        case(
            back(2, A, 1),
            &[(
                "f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f32 [3, 4, 2]; f32 [1]",
                "f32 [3, 2, 8]",
            )],
            &[
                (
                    "f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f32 [3, 5, 2]; f32 [1]",
                    "B [3, 5, 2] does not give 4",
                ),
                (
                    "f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f32 [4, 2]; f32 [1]",
                    "A or B must be a stack of matrices, is [4, 2]",
                ),
                ("f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [5]", "takes 6 operands, was given 3"),
            ],
        ),
        case(
            back(2, B, 0),
            &[(
                "f32 [5, 2, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f32 [3, 2, 8]; f32 [1]",
                "f32 [3, 4, 2]",
            )],
            &[(
                "f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f32 [3, 2, 7]; f32 [1]",
                "A [3, 2, 7] does not take 8",
            )],
        ),
        case(
            back(2, A, 2),
            &[],
            &[(
                "f32 [5, 1, 8]; f32 [5, 2, 4]; i32 [5]; i32 [5, 2]; f32 [3, 4, 2]; f32 [1]",
                "no slot 2 of 2",
            )],
        ),
    ]
}

pub fn rows() -> Vec<Case> {
    let soft = |mask, max_bias: f32, sinks| SoftmaxAttrs {
        scale: 0.5.into(),
        mask,
        max_bias: max_bias.into(),
        sinks,
    };
    let norm = |kind, eps: f32| Op::Norm { kind, eps: eps.into() };
    let dropout = |p: f32| Op::Dropout(Dropout { p: p.into(), site: 1 });
    let mut cases = vec![
        case(
            dropout(0.25),
            &[
                ("f32 [5, 8]; i32 [5, 2]; i32 [2]", "f32 [5, 8]"),
                ("f32 [5, 3, 8]; i32 [5, 2]; i32 [2]", "f32 [5, 3, 8]"),
                ("f32 [0, 8]; i32 [0, 2]; i32 [2]", "f32 [0, 8]"),
            ],
            &[
                ("f32 [5, 8]; i32 [5, 2]", "takes 3 operands, was given 2"),
                ("f32 [5]; i32 [5, 2]; i32 [2]", "x must be [T, .., K], is [5]"),
                ("f16 [5, 8]; i32 [5, 2]; i32 [2]", "operand 0 must be f32, is f16"),
                ("f32 [5, 8]; f32 [5, 2]; i32 [2]", "operand 1 must be i32, is f32"),
                ("f32 [5, 8]; i32 [5, 2]; f32 [2]", "operand 2 must be i32, is f32"),
                ("f32 [5, 8]; i32 [5]; i32 [2]", "rows must be [5, 2], is [5]"),
                ("f32 [5, 8]; i32 [4, 2]; i32 [2]", "rows must be [5, 2], is [4, 2]"),
                ("f32 [5, 8]; i32 [5, 2]; i32 [3]", "key must be [2], is [3]"),
            ],
        ),
        case(
            dropout(1.0),
            &[],
            &[("f32 [5, 8]; i32 [5, 2]; i32 [2]", "p must be at least 0 and below 1, is 1")],
        ),
        case(
            dropout(-0.5),
            &[],
            &[("f32 [5, 8]; i32 [5, 2]; i32 [2]", "p must be at least 0 and below 1, is -0.5")],
        ),
        case(
            dropout(f32::NAN),
            &[],
            &[("f32 [5, 8]; i32 [5, 2]; i32 [2]", "p must be at least 0 and below 1, is NaN")],
        ),
        case(
            Op::CumSum { dim: 1, reverse: false },
            &[("f32 [2, 3]", "f32 [2, 3]"), ("f32 [2, 0]", "f32 [2, 0]")],
            &[("f32 [2]", "no dimension 1"), ("i32 [2, 3]", "operand 0 must be f32, is i32"), NONE],
        ),
        case(
            Op::TopK { k: 2, order: Order::Descending },
            &[("f32 [3, 5]", "i32 [3, 2]"), ("f32 [2]", "i32 [2]")],
            &[
                ("f32 [5, 1]", "the first 2 of 1"),
                ("f32 []", "a scalar has no order"),
                ("f32 [1, 2147483648]", "indices of 2147483648 elements are beyond i32"),
                ("f16 [5]", "operand 0 must be f32, is f16"),
                NONE,
            ],
        ),
        case(
            Op::Softmax(soft(false, 0.0, false)),
            &[("f32 [5]", "f32 [5]"), ("f32 [2, 0]", "f32 [2, 0]")],
            &[
                ("f32 []", "a scalar has no rows"),
                ("f16 [5]", "operand 0 must be f32, is f16"),
                ("f32 [5]; f32 [5]", "takes 1 operands, was given 2"),
                ("", "takes x"),
            ],
        ),
        case(
            Op::Softmax(soft(true, 8.0, true)),
            &[
                ("f32 [2, 4, 5]; f32 [5]; f32 [2]", "f32 [2, 4, 5]"),
                ("f32 [3, 2, 4, 5]; f32 [3, 1, 4, 5]; f32 [2]", "f32 [3, 2, 4, 5]"),
            ],
            &[
                (
                    "f32 [4, 5]; f32 [5]; f32 [2]",
                    "x must be [.., H, T, n] to have heads, is [4, 5]",
                ),
                ("f32 [2, 4, 5]; f32 [4]; f32 [2]", "shapes [2, 4, 5] and [4] do not broadcast"),
                ("f32 [2, 4, 5]; f32 [4, 1]; f32 [2]", "the mask [4, 1] does not fit [2, 4, 5]"),
                ("f32 [2, 4, 5]; f32 [5]; f32 [3]", "sinks must be [2], is [3]"),
                ("f32 [2, 4, 5]; f32 [5]", "takes 3 operands, was given 2"),
                ("f32 [2, 4, 5]; f16 [5]; f32 [2]", "operand 1 must be f32, is f16"),
            ],
        ),
        case(
            Op::Softmax(soft(false, 8.0, false)),
            &[],
            &[(
                "f32 [2, 4, 5]",
                "max_bias is 8: it must be finite, not negative, and multiply a mask",
            )],
        ),
        case(
            Op::SoftmaxBack { scale: 1.0.into() },
            &[("f32 [2, 3]; f32 [2, 3]", "f32 [2, 3]")],
            &[
                ("f32 [2]; f32 [3]", "shapes [2] and [3] differ"),
                ("f32 []; f32 []", "a scalar has no rows"),
                AND_TWO,
            ],
        ),
        case(
            Op::SoftmaxBack { scale: f32::NAN.into() },
            &[],
            &[("f32 [2]; f32 [2]", "scale must be finite")],
        ),
        case(
            Op::SoftmaxSinkBack(soft(true, 0.0, true)),
            &[("f32 [2, 4, 5]; f32 [5]; f32 [2]; f32 [2, 4, 5]; f32 [2, 4, 5]", "f32 [2]")],
            &[
                (
                    "f32 [2, 4, 5]; f32 [5]; f32 [2]; f32 [2, 4, 5]; f32 [2, 4, 4]",
                    "shapes [2, 4, 5] and [2, 4, 4] differ",
                ),
                (
                    "f32 [2, 4, 5]; f32 [5]; f32 [2]; f16 [2, 4, 5]; f32 [2, 4, 5]",
                    "operand 3 must be f32, is f16",
                ),
                ("f32 [2]", "takes x, y and dy"),
            ],
        ),
        case(
            Op::SoftmaxSinkBack(soft(true, 0.0, false)),
            &[],
            &[("f32 [2]; f32 [2]; f32 [2]", "there are no sinks")],
        ),
        case(
            Op::LogSoftmax,
            &[("f32 [2, 3]", "f32 [2, 3]")],
            &[("f32 []", "a scalar has no rows"), ("i32 [2]", "operand 0 must be f32, is i32")],
        ),
        case(norm(NormKind::Layer, 0.0), &[("f32 [2, 3]", "f32 [2, 3]")], &[]),
        case(
            norm(NormKind::Layer, -1.0),
            &[],
            &[("f32 [3]", "eps must be finite and not negative, is -1")],
        ),
    ];
    for kind in NormKind::ALL {
        cases.push(case(
            norm(kind, 1e-5),
            &[("f32 [2, 3]", "f32 [2, 3]"), ("f32 [2, 4, 3]", "f32 [2, 4, 3]")],
            &[("f32 []", "a scalar has no rows"), ("f16 [2]", "operand 0 must be f32, is f16")],
        ));
        cases.push(case(
            Op::NormBack { kind, eps: 1e-5.into() },
            &[("f32 [2, 3]; f32 [2, 3]", "f32 [2, 3]")],
            &[("f32 [2]; f32 [3]", "shapes [2] and [3] differ"), AND_TWO],
        ));
    }
    for kind in [NormKind::L2Clamp, NormKind::L2Add] {
        cases.push(case(
            norm(kind, 0.0),
            &[],
            &[("f32 [3]", "eps must be finite and above 0, is 0")],
        ));
    }
    cases
}
