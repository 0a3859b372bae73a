//! The table's attention and losses.

use gradus_graph::*;

use crate::table::{Case, case};

pub fn attention() -> Vec<Case> {
    let plain = AttentionAttrs::new(0.125);
    let cached = AttentionAttrs { prefix: true, window: Some(8), ..plain };
    let q = "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]";
    let mut cases = vec![
        case(
            Op::Attention(plain),
            &[
                ("f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]", "f32 [5, 4, 6]"),
                ("f32 [5, 4, 8]; f32 [5, 1, 8]; f32 [5, 1, 8]; i32 [1, 3]", "f32 [5, 4, 8]"),
                ("f32 [0, 4, 8]; f32 [0, 4, 8]; f32 [0, 4, 8]; i32 [0, 3]", "f32 [0, 4, 8]"),
            ],
            &[
                (
                    "f32 [5, 4]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]",
                    "q and k must be [rows, heads, width]",
                ),
                (
                    "f32 [5, 4, 8]; f32 [6, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]",
                    "q [5, 4, 8] and k [6, 2, 8] do not match",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 7]; f32 [5, 2, 6]; i32 [3, 3]",
                    "q [5, 4, 8] and k [5, 2, 7] do not match",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 3, 8]; f32 [5, 3, 6]; i32 [3, 3]",
                    "4 query heads are not a multiple of 3 key heads",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 0, 8]; f32 [5, 0, 6]; i32 [3, 3]",
                    "4 query heads are not a multiple of 0 key heads",
                ),
                ("f32 [5, 4, 0]; f32 [5, 2, 0]; f32 [5, 2, 6]; i32 [3, 3]", "head width 0"),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 4, 6]; i32 [3, 3]",
                    "k [5, 2, 8] and v [5, 4, 6] do not match",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 0]; i32 [3, 3]",
                    "k [5, 2, 8] and v [5, 2, 0] do not match",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 2]",
                    "seqs must be i32 [S, 3], is i32 [3, 2]",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; f32 [3, 3]",
                    "seqs must be i32 [S, 3], is f32 [3, 3]",
                ),
                (
                    "f32 [5, 4, 8]; f16 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]",
                    "operand 1 must be f32, is f16",
                ),
                ("f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]", "takes q, k, v and seqs"),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f16 [2, 4, 2, 8]",
                    "operands of a cached prefix without `prefix`",
                ),
            ],
        ),
        case(
            Op::Attention(cached),
            &[
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f16 [9, 4, 2, 8]; \
                     bf16 [9, 4, 2, 6]; i32 [3, 2]",
                    "f32 [5, 4, 6]",
                ),
                (
                    "f32 [5, 4, 32]; f32 [5, 2, 32]; f32 [5, 2, 32]; i32 [1, 3]; \
                     Q8_0 [0, 4, 2, 32]; f32 [0, 4, 2, 32]; i32 [1, 0]",
                    "f32 [5, 4, 32]",
                ),
            ],
            &[
                (q, "a cached prefix takes 3 operands, was given 0"),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f16 [9, 4, 2, 8]; \
                     f16 [9, 4, 2, 6]; i32 [2, 2]",
                    "table must be i32 [3, M], is i32 [2, 2]",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f16 [9, 4, 2, 7]; \
                     f16 [9, 4, 2, 6]; i32 [3, 2]",
                    "pages must be [P, page, 2, 8], are [9, 4, 2, 7]",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f16 [9, 4, 2, 8]; \
                     f16 [9, 4, 2, 8]; i32 [3, 2]",
                    "pages must be [P, page, 2, 6], are [9, 4, 2, 8]",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f16 [9, 4, 2, 8]; \
                     f16 [9, 5, 2, 6]; i32 [3, 2]",
                    "key and value pages differ in length",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f16 [9, 0, 2, 8]; \
                     f16 [9, 0, 2, 6]; i32 [3, 2]",
                    "pages must be [P, page, 2, 8], are [9, 0, 2, 8]",
                ),
                (
                    "f32 [5, 4, 32]; f32 [5, 2, 32]; f32 [5, 2, 32]; i32 [3, 3]; \
                     Q4_0 [9, 4, 2, 32]; f16 [9, 4, 2, 32]; i32 [3, 2]",
                    "pages of Q4_0",
                ),
            ],
        ),
        case(
            Op::Attention(AttentionAttrs { window: Some(0), ..plain }),
            &[],
            &[(q, "a window of 0 sees nothing")],
        ),
        case(
            Op::Attention(AttentionAttrs { chunk: Some(0), ..plain }),
            &[],
            &[(q, "a chunk of 0 sees nothing")],
        ),
        case(
            Op::Attention(AttentionAttrs {
                chunk: Some(1),
                alibi: Some(0.0.into()),
                sinks: true,
                ..cached
            }),
            &[(
                "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [4]; \
                 f16 [9, 4, 2, 8]; bf16 [9, 4, 2, 6]; i32 [3, 2]",
                "f32 [5, 4, 6]",
            )],
            &[
                (q, "an operand of sinks is missing"),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [4]",
                    "a cached prefix takes 3 operands, was given 0",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [2]; \
                     f16 [9, 4, 2, 8]; bf16 [9, 4, 2, 6]; i32 [3, 2]",
                    "sinks must be f32 [4], are f32 [2]",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f16 [4]; \
                     f16 [9, 4, 2, 8]; bf16 [9, 4, 2, 6]; i32 [3, 2]",
                    "sinks must be f32 [4], are f16 [4]",
                ),
            ],
        ),
        case(
            Op::AttentionQueryBack(AttentionAttrs { sinks: true, ..plain }),
            &[(
                "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 4]; \
                 f32 [5, 4, 6]; f32 [4]",
                "f32 [180]",
            )],
            &[(
                "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 4]; \
                 f32 [5, 4, 6]",
                "an operand of sinks is missing",
            )],
        ),
        case(
            Op::Attention(AttentionAttrs { scale: f32::INFINITY.into(), ..plain }),
            &[],
            &[(q, "scale must be finite")],
        ),
        case(
            Op::AttentionQueryBack(plain),
            &[(
                "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 4]; \
                 f32 [5, 4, 6]",
                "f32 [180]",
            )],
            &[
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 7]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 4]; \
                     f32 [5, 4, 6]",
                    "q [5, 4, 8] and k [5, 2, 7] do not match",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [4, 4]; \
                     f32 [5, 4, 6]",
                    "delta must be [5, 4], is [4, 4]",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 4]; \
                     f32 [5, 4, 8]",
                    "dout must be [5, 4, 6], is [5, 4, 8]",
                ),
                (q, "takes q, k, v, seqs, delta and dout"),
            ],
        ),
        case(
            Op::AttentionQueryBack(cached),
            &[(
                "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 4]; \
                 f32 [5, 4, 6]; f16 [9, 4, 2, 8]; bf16 [9, 4, 2, 6]; i32 [3, 2]",
                "f32 [180]",
            )],
            &[
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 4]; \
                     f32 [5, 4, 6]; f16 [9, 4, 2, 8]",
                    "a cached prefix takes 3 operands, was given 1",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 4]; \
                     f32 [5, 4, 6]; f16 [9, 4, 2, 7]; bf16 [9, 4, 2, 6]; i32 [3, 2]",
                    "pages must be [P, page, 2, 8], are [9, 4, 2, 7]",
                ),
            ],
        ),
    ];
    for cap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        cases.push(case(
            Op::Attention(AttentionAttrs { softcap: Some(cap.into()), ..plain }),
            &[],
            &[(q, "softcap must be positive and finite")],
        ));
    }
    for bias in [-1.0, f32::NAN, f32::INFINITY] {
        cases.push(case(
            Op::Attention(AttentionAttrs { alibi: Some(bias.into()), ..plain }),
            &[],
            &[(q, "the largest bias of ALiBi must be finite and not negative")],
        ));
    }
    use AttentionOperand::{Own, Pages, Sinks};
    let given = "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 4]; \
                 f32 [5, 4]; f32 [5, 4, 6]";
    for (wrt, why) in [
        (Sinks, "the gradient of sinks without sinks"),
        (Pages, "the gradient of pages without pages"),
    ] {
        cases.push(case(Op::AttentionBack { attrs: plain, wrt }, &[], &[(given, why)]));
    }
    let all = AttentionAttrs { sinks: true, ..cached };
    for (wrt, made) in [(Sinks, "f32 [4]"), (Pages, "f32 [1008]"), (Own, "f32 [140]")] {
        cases.push(case(
            Op::AttentionBack { attrs: all, wrt },
            &[(
                "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 4]; \
                 f32 [5, 4]; f32 [5, 4, 6]; f32 [4]; f16 [9, 4, 2, 8]; bf16 [9, 4, 2, 6]; \
                 i32 [3, 2]",
                made,
            )],
            &[(given, "an operand of sinks is missing")],
        ));
    }
    {
        cases.push(case(
            Op::AttentionBack { attrs: plain, wrt: Own },
            &[(
                "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 4]; f32 [5, 4]; \
                 f32 [5, 4, 6]",
                "f32 [140]",
            )],
            &[
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 2]; \
                     f32 [5, 4]; f32 [5, 4, 6]",
                    "lse must be [5, 4], is [5, 2]",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 4]; \
                     f32 [4, 4]; f32 [5, 4, 6]",
                    "delta must be [5, 4], is [4, 4]",
                ),
                (
                    "f32 [5, 4, 8]; f32 [5, 2, 8]; f32 [5, 2, 6]; i32 [3, 3]; f32 [5, 4]; \
                     f32 [5, 4]; f32 [5, 4, 8]",
                    "dout must be [5, 4, 6], is [5, 4, 8]",
                ),
                (q, "takes q, k, v, seqs, lse, delta and dout"),
            ],
        ));
    }
    cases
}

pub fn losses() -> Vec<Case> {
    let plain = CrossEntropyAttrs::PLAIN;
    let weighted = CrossEntropyAttrs { weighted: true, ..plain };
    vec![
        case(
            Op::CrossEntropy(CrossEntropyAttrs::PLAIN),
            &[("f32 [3, 7]; i32 [3]", "f32 [3]"), ("f32 [0, 7]; i32 [0]", "f32 [0]")],
            &[
                ("f32 [3, 7]; i32 [4]", "labels must be [3], is [4]"),
                ("f32 [7]; i32 [7]", "logits must be [T, V], are [7]"),
                ("f32 [3, 0]; i32 [3]", "logits must be [T, V], are [3, 0]"),
                ("f32 [3, 7]; f32 [3]", "operand 1 must be i32, is f32"),
                ("f16 [3, 7]; i32 [3]", "operand 0 must be f32, is f16"),
                ("f32 [3, 7]", "takes 2 operands, was given 1"),
            ],
        ),
        case(
            Op::CrossEntropyBack(CrossEntropyAttrs::PLAIN),
            &[("f32 [3, 7]; i32 [3]; f32 [3]", "f32 [3, 7]")],
            &[
                ("f32 [3, 7]; i32 [3]; f32 [4]", "dy must be [3], is [4]"),
                ("f32 [3, 7]; i32 [4]; f32 [3]", "labels must be [3], is [4]"),
                ("f32 [3, 0]; i32 [3]; f32 [3]", "logits must be [T, V], are [3, 0]"),
                ("f32 [3, 7]; i32 [3]; i32 [3]", "operand 2 must be f32, is i32"),
                ("f32 [3, 7]; i32 [3]", "takes 3 operands, was given 2"),
            ],
        ),
        case(
            Op::CrossEntropy(weighted),
            &[("f32 [3, 7]; i32 [3]; f32 [3]", "f32 [3]")],
            &[
                ("f32 [3, 7]; i32 [3]", "takes 3 operands, was given 2"),
                ("f32 [3, 7]; i32 [3]; f32 [2]", "weights must be [3], is [2]"),
                ("f32 [3, 7]; i32 [3]; i32 [3]", "operand 2 must be f32, is i32"),
            ],
        ),
        case(
            Op::CrossEntropyBack(weighted),
            &[("f32 [3, 7]; i32 [3]; f32 [3]; f32 [3]", "f32 [3, 7]")],
            &[
                ("f32 [3, 7]; i32 [3]; f32 [3]", "takes 4 operands, was given 3"),
                ("f32 [3, 7]; i32 [3]; f32 [3]; f32 [1]", "weights must be [3], is [1]"),
                ("f32 [3, 7]; i32 [3]; f32 [3]; f16 [3]", "operand 3 must be f32, is f16"),
            ],
        ),
        case(
            Op::CrossEntropy(CrossEntropyAttrs { softcap: Some(0.0.into()), ..plain }),
            &[],
            &[("f32 [3, 7]; i32 [3]", "softcap must be positive and finite")],
        ),
        case(
            Op::CrossEntropyBack(CrossEntropyAttrs { scale: f32::NAN.into(), ..plain }),
            &[],
            &[("f32 [3, 7]; i32 [3]; f32 [3]", "scale must be finite")],
        ),
        case(Op::Leaf, &[], &[("", "leaves are made with `leaf`")]),
    ]
}
