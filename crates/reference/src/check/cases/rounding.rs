//! Cases of ops that pass values through a narrower dtype. They read leaves, so that no
//! device rounds a value that is not exactly the interpreter's.

use gguf::TensorType;
use graph::{AttentionAttrs, DType, Op};

use super::TILES;
use super::attention::plain;
use crate::check::{Cases, Expected, Fill, View};

const Q8_0: DType = DType::Block(TensorType::Q8_0);

pub fn cast(c: &mut Cases) {
    for dtype in [DType::F16, DType::BF16] {
        for dims in [&[7][..], &[3, 5], &[2, 3, 32], TILES] {
            c.add(format!("f32 to {dtype} and back {dims:?}"), move |g| {
                let x = g.float("x", dims, Fill::Signed)?;
                let x = g.graph.cast(x, dtype)?;
                g.graph.cast(x, DType::F32)
            });
            c.add(format!("{dtype} to f32 {dims:?}"), move |g| {
                let x = g.float_of("x", dims, dtype, Fill::Signed)?;
                g.graph.cast(x, DType::F32)
            });
        }
        for view in View::STRIDED {
            c.add(format!("f32 to {dtype} and back {view:?}"), move |g| {
                let x = g.viewed("x", &[4, 6], view, Fill::Signed)?;
                g.cotangent_viewed(&[4, 6], view)?;
                let x = g.graph.cast(x, dtype)?;
                g.graph.cast(x, DType::F32)
            });
        }
    }
    // A block format is a cache's page: attention reads it.
    c.add("f32 to Q8_0", |g| {
        let q = g.float("q", &[1, 2, 32], Fill::Signed)?;
        let k = g.float("k", &[1, 2, 32], Fill::Signed)?;
        let v = g.float("v", &[1, 2, 32], Fill::Signed)?;
        let seqs = g.ints("seqs", &[1, 3], &[0, 1, 3])?;
        let k_page = g.float("page of k", &[1, 4, 2, 32], Fill::Signed)?;
        let v_page = g.float("page of v", &[1, 4, 2, 32], Fill::Signed)?;
        let table = g.ints("table", &[1, 1], &[0])?;
        g.expect_all(Expected::Nothing);
        let refused = g.refused();
        g.expect(k_page, refused);
        g.expect(v_page, refused);
        let k_page = g.graph.cast(k_page, Q8_0)?;
        let v_page = g.graph.cast(v_page, Q8_0)?;
        let attrs = AttentionAttrs { prefix: true, ..plain() };
        g.graph.push(Op::Attention(attrs), &[q, k, v, seqs, k_page, v_page, table], "y")
    });
}

pub fn round(c: &mut Cases) {
    for dtype in [DType::F32, DType::F16, DType::BF16, Q8_0] {
        for dims in [&[1, 32][..], &[3, 64], &[2, 2, 96], &[60, 160]] {
            c.add(format!("{dtype} {dims:?}"), move |g| {
                let x = g.float("x", dims, Fill::Between(-3.0, 3.0))?;
                g.graph.push(Op::Round { dtype }, &[x], "y")
            });
        }
        for view in View::STRIDED {
            c.add(format!("{dtype} {view:?}"), move |g| {
                let x = g.viewed("x", &[4, 32], view, Fill::Signed)?;
                g.cotangent_viewed(&[4, 32], view)?;
                g.graph.push(Op::Round { dtype }, &[x], "y")
            });
        }
    }
    for dtype in [DType::F16, DType::BF16] {
        c.add(format!("{dtype} [3, 5]"), move |g| {
            let x = g.float("x", &[3, 5], Fill::Signed)?;
            g.graph.push(Op::Round { dtype }, &[x], "y")
        });
    }
    c.add("Q8_0, a block of zeros", |g| {
        let mut data = vec![0.0; 64];
        data[40] = 1.25;
        data[50] = -3.5;
        let x = g.given("x", &[1, 64], &data)?;
        g.graph.push(Op::Round { dtype: Q8_0 }, &[x], "y")
    });
}

pub fn quantize_rows(c: &mut Cases) {
    for (rows, cols) in [(1, 32), (3, 64), (2, 256), (60, 160)] {
        for format in [TensorType::Q8_0, TensorType::Q4_0] {
            c.add(format!("[{rows}, {cols}] times {format}"), move |g| {
                let x = g.float("x", &[rows, cols], Fill::Between(-3.0, 3.0))?;
                let w = g.weight("w", &[24, cols], DType::Block(format))?;
                g.expect(w, Expected::Nothing);
                let x = g.graph.push(Op::QuantizeRows, &[x], "x")?;
                g.graph.project(x, w)
            });
        }
    }
    for view in View::STRIDED {
        c.add(format!("{view:?}"), move |g| {
            let x = g.viewed("x", &[4, 64], view, Fill::Signed)?;
            let w = g.weight("w", &[24, 64], Q8_0)?;
            g.expect(w, Expected::Nothing);
            let x = g.graph.push(Op::QuantizeRows, &[x], "x")?;
            g.graph.project(x, w)
        });
    }
    c.add("blocks of zeros, of one size and of one spike", |g| {
        let mut data = vec![0.0; 4 * 32];
        data[32..64].fill(-0.75);
        data[70] = 1e-3;
        (96..128).for_each(|i| data[i] = (i as f32 - 111.5) * 0.25);
        let x = g.given("x", &[1, 128], &data)?;
        let w = g.weight("w", &[40, 128], Q8_0)?;
        g.expect(w, Expected::Nothing);
        let x = g.graph.push(Op::QuantizeRows, &[x], "x")?;
        g.graph.project(x, w)
    });
}
