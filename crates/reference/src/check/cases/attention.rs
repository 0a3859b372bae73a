//! Cases of attention.
//!
//! The first row of a sequence without a prefix sees one key, so the gradient of its query is
//! zero but for rounding, and so are all where a window is one row wide and those of the rows
//! that begin a chunk. Such elements are few in every case, or not asked for; with a sink none
//! is zero.

use gguf::TensorType;
use graph::{
    AttentionAttrs, AttentionOperand, DType, GluKind, Invalid, NodeId, Op, RopeAngles, RopeStyle,
};

use crate::check::{CaseGraph, Cases, Expected, Fill, Made, View};

/// No window, cap or prefix; the scale of heads 8 wide.
pub fn plain() -> AttentionAttrs {
    AttentionAttrs::new(0.353_6)
}

const Q8_0: DType = DType::Block(TensorType::Q8_0);

/// The cached prefixes of a case.
#[derive(Copy, Clone)]
struct Cache {
    dtype: DType,
    /// Positions per page.
    page: usize,
    /// Whether all sequences read the same pages, as those of one prompt do.
    shared: bool,
}

/// What a case's operands look like.
#[derive(Copy, Clone)]
struct Setup {
    window: Option<u32>,
    chunk: Option<u32>,
    softcap: Option<f32>,
    alibi: Option<f32>,
    sinks: bool,
    /// Query heads and key heads.
    heads: (usize, usize),
    /// Widths of keys and of values.
    widths: (usize, usize),
    rows: usize,
    seqs: &'static [[i32; 3]],
    cache: Option<Cache>,
    /// How q, k and v lie.
    view: View,
}

/// One sequence, two query heads for each key head.
const BASE: Setup = Setup {
    window: None,
    chunk: None,
    softcap: None,
    alibi: None,
    sinks: false,
    heads: (4, 2),
    widths: (8, 8),
    rows: 14,
    seqs: &[[0, 14, 0]],
    cache: None,
    view: View::Plain,
};

/// Sequences of several lengths, two empty ones, of which one begins beyond all rows, and rows of
/// none in front, between and behind.
const PACKED: Setup = Setup {
    rows: 36,
    seqs: &[[1, 16, 0], [18, 1, 0], [19, 0, 0], [20, 14, 0], [90, 0, 0]],
    ..BASE
};

/// The sequences of [`PACKED`] with prefixes that fill no page, one, and more than one.
const CONTINUED: Setup = Setup {
    rows: 22,
    seqs: &[[13, 5, 4], [1, 7, 9], [8, 1, 1], [10, 0, 3], [9, 3, 0]],
    cache: Some(Cache { dtype: DType::F32, page: 4, shared: false }),
    ..BASE
};

struct Operands {
    attrs: AttentionAttrs,
    q: NodeId,
    k: NodeId,
    v: NodeId,
    seqs: NodeId,
    sinks: Option<NodeId>,
    /// Pages of keys and of values, and the table.
    prefix: Vec<NodeId>,
}

impl Operands {
    /// What comes after the operands that all attention has.
    fn rest(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.sinks.into_iter().chain(self.prefix.iter().copied())
    }
}

impl Setup {
    fn attrs(&self) -> AttentionAttrs {
        AttentionAttrs {
            window: self.window,
            chunk: self.chunk,
            softcap: self.softcap.map(Into::into),
            alibi: self.alibi.map(Into::into),
            sinks: self.sinks,
            prefix: self.cache.is_some(),
            ..AttentionAttrs::new(1.0 / (self.widths.0 as f32).sqrt())
        }
    }

    fn operands(&self, g: &mut CaseGraph) -> Result<Operands, Invalid> {
        let ((hq, hkv), (width, v_width)) = (self.heads, self.widths);
        let q = g.viewed("q", &[self.rows, hq, width], self.view, Fill::Signed)?;
        let k = g.viewed("k", &[self.rows, hkv, width], self.view, Fill::Signed)?;
        let v = g.viewed("v", &[self.rows, hkv, v_width], self.view, Fill::Signed)?;
        let seqs = g.ints("seqs", &[self.seqs.len(), 3], self.seqs.as_flattened())?;
        let sinks = match self.sinks {
            true => Some(g.float("sinks", &[hq], Fill::Signed)?),
            false => None,
        };
        let prefix = match self.cache {
            None => Vec::new(),
            Some(cache) => self.prefix(g, cache)?,
        };
        if self.chunk.is_some() && !self.sinks {
            g.expect(q, Expected::Nothing);
        }
        Ok(Operands { attrs: self.attrs(), q, k, v, seqs, sinks, prefix })
    }

    /// Pages in an order that is not the table's, with one that nobody uses.
    fn prefix(&self, g: &mut CaseGraph, cache: Cache) -> Result<Vec<NodeId>, Invalid> {
        let pages_of = |cached: i32| usize::try_from(cached).unwrap_or(0).div_ceil(cache.page);
        let columns = self.seqs.iter().map(|s| pages_of(s[2])).max().unwrap_or(0).max(1);
        let used = match cache.shared {
            true => columns,
            false => self.seqs.iter().map(|s| pages_of(s[2])).sum(),
        };
        let mut table = vec![0; self.seqs.len() * columns];
        let mut next = used as i32;
        for (row, seq) in table.chunks_mut(columns).zip(self.seqs) {
            if cache.shared {
                next = used as i32;
            }
            for page in row.iter_mut().take(pages_of(seq[2])) {
                *page = next;
                next -= 1;
            }
        }
        let ((_, hkv), (width, v_width)) = (self.heads, self.widths);
        let mut pages = Vec::new();
        for (name, width) in [("k pages", width), ("v pages", v_width)] {
            let dims = [used + 1, cache.page, hkv, width];
            pages.push(g.float_of(name, &dims, cache.dtype, Fill::Signed)?);
        }
        pages.push(g.ints("table", &[self.seqs.len(), columns], &table)?);
        Ok(pages)
    }

    fn attention(&self, g: &mut CaseGraph) -> Made {
        let o = self.operands(g)?;
        let mut args = vec![o.q, o.k, o.v, o.seqs];
        args.extend(o.rest());
        g.graph.push(Op::Attention(o.attrs), &args, "y")
    }
}

/// The setups that all three ops are checked on.
fn setups() -> Vec<(String, Setup)> {
    let mut all: Vec<(String, Setup)> = Vec::new();
    let mut add = |name: &str, setup: Setup| all.push((name.into(), setup));
    for heads in [(1, 1), (8, 8), (8, 2), (8, 1), (6, 3), (4, 2)] {
        let (hq, hkv) = heads;
        add(&format!("{hq} heads on {hkv}"), Setup { heads, ..BASE });
        add(&format!("{hq} heads on {hkv}, packed"), Setup { heads, ..PACKED });
        add(&format!("{hq} heads on {hkv}, prefixes"), Setup { heads, ..CONTINUED });
    }
    for widths in [(8, 12), (5, 3), (64, 64), (32, 16)] {
        let (k, v) = widths;
        add(&format!("widths {k} and {v}"), Setup { widths, ..BASE });
        add(&format!("widths {k} and {v}, prefixes"), Setup { widths, ..CONTINUED });
    }
    for window in [2, 3, 8, 1000] {
        let name = format!("a window of {window}");
        let window = Some(window);
        add(&name, Setup { window, rows: 20, seqs: &[[0, 20, 0]], ..BASE });
        if window != Some(2) {
            add(&format!("{name}, packed"), Setup { window, ..PACKED });
        }
        add(&format!("{name}, prefixes"), Setup { window, ..CONTINUED });
    }
    for softcap in [1.5, 30.0] {
        let name = format!("a cap of {softcap}");
        let softcap = Some(softcap);
        add(&name, Setup { softcap, ..BASE });
        add(&format!("{name}, packed"), Setup { softcap, ..PACKED });
        add(&format!("{name}, prefixes"), Setup { softcap, ..CONTINUED });
        let window = Some(4);
        add(&format!("{name} and a window, packed"), Setup { softcap, window, ..PACKED });
        add(&format!("{name} and a window, prefixes"), Setup { softcap, window, ..CONTINUED });
    }
    for dtype in [DType::F32, DType::F16, DType::BF16, Q8_0] {
        for page in [1, 5, 16] {
            let cache = Some(Cache { dtype, page, shared: false });
            let widths = (32, 64);
            add(&format!("{dtype} pages of {page}"), Setup { cache, widths, ..CONTINUED });
        }
        if dtype != Q8_0 {
            let cache = Some(Cache { dtype, page: 5, shared: false });
            add(&format!("odd {dtype} pages"), Setup { cache, widths: (20, 37), ..CONTINUED });
            // Full to the last row, which is the last of a tile of keys too.
            let cache = Some(Cache { dtype, page: 32, shared: false });
            let (rows, seqs, widths): (usize, &[[i32; 3]], _) = (2, &[[0, 2, 64]], (20, 37));
            add(&format!("odd full {dtype} pages"), Setup { cache, widths, rows, seqs, ..BASE });
        }
        let cache = Some(Cache { dtype, page: 8, shared: false });
        let (widths, window) = ((32, 32), Some(6));
        let (rows, seqs): (usize, &[[i32; 3]]) = (6, &[[0, 1, 30], [1, 4, 3], [5, 1, 16]]);
        add(
            &format!("{dtype} pages, one row each, and a window"),
            Setup { cache, widths, window, rows, seqs, ..BASE },
        );
        let cache = Some(Cache { dtype, page: 3, shared: true });
        let widths = (32, 32);
        add(&format!("{dtype} pages that all share"), Setup { cache, widths, ..CONTINUED });
    }
    additions(&mut add);
    all
}

/// Setups of chunks, sinks and biases, alone and together.
fn additions(add: &mut impl FnMut(&str, Setup)) {
    let long = Setup { rows: 40, seqs: &[[0, 40, 0]], ..BASE };
    for chunk in [3, 8, 33] {
        let name = format!("chunks of {chunk}");
        let chunk = Some(chunk);
        add(&name, Setup { chunk, ..long });
        add(&format!("{name}, packed"), Setup { chunk, ..PACKED });
        add(&format!("{name}, prefixes"), Setup { chunk, ..CONTINUED });
        let sinks = true;
        add(&format!("{name}, sinks"), Setup { chunk, sinks, ..long });
        add(&format!("{name}, sinks, prefixes"), Setup { chunk, sinks, ..CONTINUED });
    }
    for heads in [(1, 1), (8, 8), (8, 2), (8, 1), (20, 4)] {
        let name = format!("{} heads on {} with sinks", heads.0, heads.1);
        let sinks = true;
        add(&name, Setup { sinks, heads, ..BASE });
        add(&format!("{name}, packed"), Setup { sinks, heads, ..PACKED });
        add(&format!("{name}, prefixes"), Setup { sinks, heads, ..CONTINUED });
    }
    for (bias, heads) in [(8.0, (8, 8)), (8.0, (8, 2)), (4.0, (6, 3)), (2.5, (1, 1)), (0.0, (4, 2))]
    {
        let name = format!("biases of {bias} for {} heads on {}", heads.0, heads.1);
        let alibi = Some(bias);
        add(&name, Setup { alibi, heads, ..BASE });
        add(&format!("{name}, packed"), Setup { alibi, heads, ..PACKED });
        add(&format!("{name}, prefixes"), Setup { alibi, heads, ..CONTINUED });
    }
    let sinks = true;
    let (alibi, softcap, window, chunk) = (Some(8.0), Some(1.5), Some(6), Some(8));
    let pairs = [
        ("sinks and a cap", Setup { sinks, softcap, ..BASE }),
        ("sinks and a window of one", Setup { sinks, window: Some(1), ..BASE }),
        ("sinks and a window", Setup { sinks, window, ..BASE }),
        ("sinks and biases", Setup { sinks, alibi, ..BASE }),
        ("biases and a cap", Setup { alibi, softcap, ..BASE }),
        ("biases and a window", Setup { alibi, window, ..BASE }),
        ("biases and chunks", Setup { alibi, chunk, ..BASE }),
        ("a cap and chunks", Setup { softcap, chunk, ..BASE }),
        ("a window and chunks", Setup { window, chunk, ..BASE }),
        ("everything", Setup { alibi, softcap, window, chunk, sinks, ..BASE }),
    ];
    for (name, setup) in pairs {
        add(name, setup);
        add(&format!("{name}, packed"), Setup { rows: 36, seqs: PACKED.seqs, ..setup });
        let Setup { rows, seqs, cache, .. } = CONTINUED;
        if setup.window == Some(1) {
            continue; // no one sees a page
        }
        add(&format!("{name}, prefixes"), Setup { rows, seqs, cache, ..setup });
    }
    for (i, dtype) in [DType::F32, DType::F16, DType::BF16, Q8_0].into_iter().enumerate() {
        // Of 8 rows and 2 key heads a single key whose gradient cancels would be a share of 6 %.
        let (heads, widths) = ([(8, 8), (8, 2), (8, 1), (8, 4)][i], (32, 64));
        let everything = Setup { alibi, softcap, window, chunk, sinks, heads, widths, ..CONTINUED };
        let shared = i % 2 == 0;
        let cache = Some(Cache { dtype, page: 5, shared });
        add(&format!("everything, {dtype} pages"), Setup { cache, ..everything });
        // Pages longer than a tile of keys, of which one is full and one begun.
        let cache = Some(Cache { dtype, page: 80, shared: false });
        let seqs: &[[i32; 3]] = &[[0, 5, 77], [5, 3, 140]];
        let long = Setup { cache, seqs, rows: 8, ..everything };
        add(
            &format!("everything, long {dtype} pages"),
            Setup { chunk: Some(97), window: Some(70), ..long },
        );
        add(&format!("long {dtype} pages"), Setup { chunk: None, window: None, ..long });
    }
}

/// Setups whose sequences are not where they can be.
fn outside() -> Vec<(&'static str, Setup)> {
    let cache = Some(Cache { dtype: DType::F32, page: 4, shared: false });
    vec![
        ("rows beyond the last", Setup { seqs: &[[0, 4, 0], [10, 5, 0]], ..BASE }),
        ("rows before the first", Setup { seqs: &[[-1, 4, 0]], ..BASE }),
        ("a negative count", Setup { seqs: &[[4, -1, 0]], ..BASE }),
        ("sums that overflow", Setup { seqs: &[[i32::MAX, i32::MAX, 0]], ..BASE }),
        ("rows of two sequences", Setup { seqs: &[[0, 6, 0], [8, 3, 0], [5, 2, 0]], ..BASE }),
        ("a prefix without pages", Setup { seqs: &[[0, 14, 1]], ..BASE }),
        ("a negative prefix", Setup { seqs: &[[0, 14, -1]], cache, ..BASE }),
    ]
}

pub fn attention(c: &mut Cases) {
    for (name, setup) in setups() {
        c.add(name, move |g| setup.attention(g));
    }
    for (name, setup) in outside() {
        c.add_outside(name, move |g| setup.attention(g));
    }
    c.add_outside("a page that is not there", |g| {
        let Operands { attrs, q, k, v, seqs, prefix, .. } = CONTINUED.operands(g)?;
        let &[k_pages, v_pages, _] = prefix.as_slice() else {
            return Err(Invalid::new("a prefix has three operands"));
        };
        let pages = g.graph.node(k_pages).shape.dim(0) as i32;
        let mut table = [0; 15];
        table[4] = pages;
        let table = g.ints("another table", &[5, 3], &table)?;
        g.graph.push(Op::Attention(attrs), &[q, k, v, seqs, k_pages, v_pages, table], "y")
    });
    c.add("a window of one row", |g| {
        let setup = Setup { window: Some(1), ..PACKED };
        let y = setup.attention(g)?;
        for leaf in ["q", "k"].map(|name| g.graph.find_leaf(name)).into_iter().flatten() {
            g.expect(leaf, Expected::Nothing);
        }
        Ok(y)
    });
    for view in [View::Columns, View::Rows, View::Transposed, View::TransposedColumns] {
        c.add(format!("{view:?}"), move |g| {
            g.cotangent_viewed(&[14, 4, 8], view)?;
            Setup { view, sinks: true, ..BASE }.attention(g)
        });
    }
    c.add("one tensor is all of q, k and v", |g| {
        let x = g.float("x", &[14, 4, 8], Fill::Signed)?;
        let seqs = g.ints("seqs", &[1, 3], &[0, 14, 0])?;
        g.graph.push(Op::Attention(plain()), &[x, x, x, seqs], "y")
    });
    c.add("one fused projection", |g| {
        let qkv = g.float("qkv", &[14, 4 * 8 + 2 * 8 + 2 * 8], Fill::Signed)?;
        let q = g.graph.slice(qkv, 1, 0, 32)?;
        let q = g.graph.reshape(q, &[14, 4, 8])?;
        let k = g.graph.slice(qkv, 1, 32, 16)?;
        let k = g.graph.reshape(k, &[14, 2, 8])?;
        let v = g.graph.slice(qkv, 1, 48, 16)?;
        let v = g.graph.reshape(v, &[14, 2, 8])?;
        let seqs = g.ints("seqs", &[1, 3], &[0, 14, 0])?;
        g.graph.push(Op::Attention(plain()), &[q, k, v, seqs], "y")
    });
    c.add("a block of a transformer", block);
    c.add("keys and values rounded as a cache would", |g| {
        let q = g.float("q", &[14, 4, 32], Fill::Signed)?;
        let k = g.float("k", &[14, 2, 32], Fill::Signed)?;
        let v = g.float("v", &[14, 2, 32], Fill::Signed)?;
        let seqs = g.ints("seqs", &[1, 3], &[0, 14, 0])?;
        let k = g.graph.round(k, DType::F16)?;
        let v = g.graph.round(v, Q8_0)?;
        let attrs = AttentionAttrs { scale: 0.2.into(), ..plain() };
        g.graph.push(Op::Attention(attrs), &[q, k, v, seqs], "y")
    });
}

/// A block of a transformer: everything between two values of the residual stream.
fn block(g: &mut CaseGraph) -> Made {
    let (rows, width, heads, head) = (14, 24, 4, 8);
    let x = g.float("x", &[rows, width], Fill::Signed)?;
    let pos = g.ints("pos", &[rows], &std::array::from_fn::<i32, 14, _>(|t| t as i32))?;
    let seqs = g.ints("seqs", &[1, 3], &[0, rows as i32, 0])?;
    for leaf in [pos, seqs] {
        g.expect(leaf, Expected::Nothing);
    }
    let angles = RopeAngles {
        dims: head,
        base: 10_000.0.into(),
        freq_scale: 1.0.into(),
        factors: false,
        yarn: None,
        sections: None,
    };
    let table = g.graph.push(Op::RopeTable(angles), &[pos], "rope")?;
    let linear = |g: &mut CaseGraph, name: &str, x: NodeId, n: usize| {
        let k = g.graph.node(x).shape.cols();
        // Near 1 / sqrt(k), so that values keep their size.
        let w = g.float_of(name, &[n, k], DType::F16, Fill::Between(-0.4, 0.4))?;
        g.expect(w, Expected::Nothing);
        g.graph.project(x, w)
    };
    let weight = g.float("attention norm", &[width], Fill::POSITIVE)?;
    let y = g.graph.rms_norm(x, weight, 1e-5)?;
    let project = |g: &mut CaseGraph, name: &str, heads: usize, turned: bool| {
        let y = linear(g, name, y, heads * head)?;
        let y = g.graph.reshape(y, &[rows, heads, head])?;
        let style = RopeStyle::Halves;
        match turned {
            true => g.graph.push(Op::Rope { style, inverse: false }, &[y, table], name),
            false => Ok(y),
        }
    };
    let q = project(g, "q", heads, true)?;
    let k = project(g, "k", heads / 2, true)?;
    let v = project(g, "v", heads / 2, false)?;
    let y = g.graph.push(Op::Attention(plain()), &[q, k, v, seqs], "attention")?;
    let y = g.graph.reshape(y, &[rows, heads * head])?;
    let y = linear(g, "out", y, width)?;
    let x = g.graph.add(x, y)?;
    let weight = g.float("feed-forward norm", &[width], Fill::POSITIVE)?;
    let y = g.graph.rms_norm(x, weight, 1e-5)?;
    let gate = linear(g, "gate", y, 32)?;
    let up = linear(g, "up", y, 32)?;
    let y = g.graph.push(Op::Glu(GluKind::Swiglu), &[gate, up], "glu")?;
    let y = linear(g, "down", y, width)?;
    g.graph.add(x, y)
}

/// A gradient op by itself, on sums that are as if from elsewhere: with log-sum-exps too, that of
/// other operands than the queries.
fn gradient(g: &mut CaseGraph, setup: Setup, wrt: Option<AttentionOperand>) -> Made {
    let o = setup.operands(g)?;
    let (rows, heads) = (setup.rows, setup.heads.0);
    let mut args = vec![o.q, o.k, o.v, o.seqs];
    if wrt.is_some() {
        args.push(g.float("lse", &[rows, heads], Fill::Between(2.0, 3.0))?);
    }
    // Of one sign where all rows add up, so that the sum does not cancel.
    let sinks = wrt == Some(AttentionOperand::Sinks);
    let of_rows = if sinks { Fill::POSITIVE } else { Fill::Signed };
    args.push(g.float("delta", &[rows, heads], of_rows)?);
    args.push(g.float("dout", &[rows, heads, setup.widths.1], Fill::Signed)?);
    let refused = g.refused();
    g.expect_all(refused);
    args.extend(o.rest());
    let op = match wrt {
        Some(wrt) => Op::AttentionBack { attrs: o.attrs, wrt },
        None => Op::AttentionQueryBack(o.attrs),
    };
    g.graph.push(op, &args, "y")
}

pub fn query_back(c: &mut Cases) {
    for (name, setup) in outside() {
        c.add_outside(name, move |g| gradient(g, setup, None));
    }
    for (name, setup) in setups() {
        c.add(name, move |g| gradient(g, setup, None));
    }
}

pub fn back(c: &mut Cases) {
    use AttentionOperand::{Own, Pages, Sinks};
    for (name, setup) in outside() {
        c.add_outside(name, move |g| gradient(g, setup, Some(Own)));
    }
    for (name, setup) in setups() {
        let sinks: &[_] = if setup.sinks { &[Sinks] } else { &[] };
        let pages: &[_] = if setup.cache.is_some() { &[Pages] } else { &[] };
        for &wrt in [&[Own], sinks, pages].into_iter().flatten() {
            c.add(format!("{wrt:?}, {name}"), move |g| gradient(g, setup, Some(wrt)));
        }
    }
}
