//! The shape and dtype of every op's result; what the builder refuses.

use crate::*;

mod adapters;
mod recurrent;

type Operand = (DType, Shape);
type Rule = std::result::Result<(DType, Shape), String>;

fn fit(shape: &[usize]) -> std::result::Result<Shape, String> {
    Shape::new(shape).map_err(|e| e.message)
}

fn want(ok: bool, why: impl FnOnce() -> String) -> std::result::Result<(), String> {
    if ok { Ok(()) } else { Err(why()) }
}

/// Exactly `N` operands.
fn operands<const N: usize>(args: &[Operand]) -> std::result::Result<[Operand; N], String> {
    args.try_into().map_err(|_| format!("takes {N} operands, was given {}", args.len()))
}

fn f32s(args: &[Operand], which: &[usize]) -> std::result::Result<(), String> {
    for &i in which {
        if let Some((dtype, _)) = args.get(i) {
            want(*dtype == DType::F32, || format!("operand {i} must be f32, is {dtype}"))?;
        }
    }
    Ok(())
}

fn i32s(args: &[Operand], which: &[usize]) -> std::result::Result<(), String> {
    for &i in which {
        if let Some((dtype, _)) = args.get(i) {
            want(*dtype == DType::I32, || format!("operand {i} must be i32, is {dtype}"))?;
        }
    }
    Ok(())
}

fn epsilon(eps: Real) -> std::result::Result<(), String> {
    let eps = eps.get();
    want(eps >= 0.0 && eps.is_finite(), || format!("eps must be finite and not negative, is {eps}"))
}

/// Rows `[T, 1 or U, ..]` and the choices `[T, U]` they go with: `U`.
fn choices(x: Shape, ids: Shape, what: &str) -> std::result::Result<usize, String> {
    let fits = ids.rank() == 2
        && x.rank() == 3
        && x.dim(0) == ids.dim(0)
        && (x.dim(1) == 1 || x.dim(1) == ids.dim(1));
    want(fits, || format!("{what} {x} and ids {ids} must be [T, 1 or U, K] and [T, U]"))?;
    Ok(ids.dim(1))
}

fn norm(kind: NormKind, eps: Real, x: Shape) -> std::result::Result<(), String> {
    want(x.rank() > 0, || "a scalar has no rows".into())?;
    match kind {
        NormKind::Layer => epsilon(eps),
        NormKind::L2Clamp | NormKind::L2Add => {
            want(eps.get() > 0.0 && eps.get().is_finite(), || {
                format!("eps must be finite and above 0, is {}", eps.get())
            })
        }
    }
}

/// The operands of a softmax: `x`, then what the attributes name.
fn softmax(x: Operand, rest: &[Operand], attrs: &SoftmaxAttrs) -> std::result::Result<(), String> {
    let expected = usize::from(attrs.mask) + usize::from(attrs.sinks);
    want(rest.len() == expected, || {
        format!("takes {} operands, was given {}", expected + 1, rest.len() + 1)
    })?;
    let all: Vec<Operand> = std::iter::once(x).chain(rest.iter().copied()).collect();
    f32s(&all, &[0, 1, 2])?;
    let (x, max_bias) = (x.1, attrs.max_bias.get());
    want(x.rank() > 0, || "a scalar has no rows".into())?;
    want(attrs.scale.get().is_finite(), || "scale must be finite".into())?;
    want(max_bias >= 0.0 && max_bias.is_finite() && (max_bias == 0.0 || attrs.mask), || {
        format!("max_bias is {max_bias}: it must be finite, not negative, and multiply a mask")
    })?;
    want(x.rank() >= 3 || (max_bias == 0.0 && !attrs.sinks), || {
        format!("x must be [.., H, T, n] to have heads, is {x}")
    })?;
    let mut rest = rest.iter();
    if let (true, Some((_, mask))) = (attrs.mask, rest.next()) {
        let fits = broadcast_shapes(x, *mask)? == x && mask.rank() > 0 && mask.cols() == x.cols();
        want(fits, || format!("the mask {mask} does not fit {x}"))?;
    }
    if let (true, Some((_, sinks))) = (attrs.sinks, rest.next()) {
        is(*sinks, &[x.dim(x.rank() - 3)], "sinks")?;
    }
    Ok(())
}

fn bounds(min: Real, max: Real) -> std::result::Result<(), String> {
    let (min, max) = (min.get(), max.get());
    want(min <= max, || format!("the bounds {min} and {max} are out of order or no numbers"))
}

fn glu(kind: GluKind) -> std::result::Result<(), String> {
    let GluKind::SwigluOai { alpha, limit } = kind else { return Ok(()) };
    let (alpha, limit) = (alpha.get(), limit.get());
    want(alpha.is_finite() && limit > 0.0, || {
        format!("alpha {alpha} must be finite and the limit {limit} above 0")
    })
}

fn same(a: Shape, b: Shape) -> std::result::Result<(), String> {
    want(a == b, || format!("shapes {a} and {b} differ"))
}

fn is(shape: Shape, dims: &[usize], what: &str) -> std::result::Result<(), String> {
    want(shape.dims() == dims, || format!("{what} must be {dims:?}, is {shape}"))
}

/// The numpy broadcast of two shapes.
pub(crate) fn broadcast_shapes(a: Shape, b: Shape) -> std::result::Result<Shape, String> {
    let rank = a.rank().max(b.rank());
    let mut dims = vec![1; rank];
    for (i, d) in dims.iter_mut().enumerate() {
        let at = |s: Shape| if i + s.rank() < rank { 1 } else { s.dim(i + s.rank() - rank) };
        *d = match (at(a), at(b)) {
            (x, y) if x == y => x,
            (1, y) => y,
            (x, 1) => x,
            _ => return Err(format!("shapes {a} and {b} do not broadcast")),
        };
    }
    fit(&dims)
}

/// Two tensors one after the other.
fn flat(a: Shape, b: Shape) -> std::result::Result<Shape, String> {
    let elements = a.elements().checked_add(b.elements()).ok_or("the result is too large")?;
    fit(&[elements])
}

/// The attention operands' common checks. `rest`: the sinks and the prefix.
fn attention(
    q: Operand,
    k: Operand,
    v: Operand,
    seqs: Operand,
    rest: &[Operand],
    attrs: &AttentionAttrs,
) -> std::result::Result<(), String> {
    let (q, k, v) = (q.1, k.1, v.1);
    want(q.rank() == 3 && k.rank() == 3, || "q and k must be [rows, heads, width]".into())?;
    let (hq, d, hkv) = (q.dim(1), q.dim(2), k.dim(1));
    want(k.dim(0) == q.dim(0) && k.dim(2) == d, || format!("q {q} and k {k} do not match"))?;
    want(hkv > 0 && hq % hkv == 0, || {
        format!("{hq} query heads are not a multiple of {hkv} key heads")
    })?;
    want(d > 0, || "head width 0".into())?;
    want(v.rank() == 3 && v.dim(0) == q.dim(0) && v.dim(1) == hkv && v.dim(2) > 0, || {
        format!("k {k} and v {v} do not match")
    })?;
    want(seqs.0 == DType::I32 && seqs.1.rank() == 2 && seqs.1.dim(1) == 3, || {
        format!("seqs must be i32 [S, 3], is {} {}", seqs.0, seqs.1)
    })?;
    want(attrs.window != Some(0), || "a window of 0 sees nothing".into())?;
    want(attrs.chunk != Some(0), || "a chunk of 0 sees nothing".into())?;
    want(attrs.alibi.is_none_or(|b| b.get() >= 0.0 && b.get().is_finite()), || {
        "the largest bias of ALiBi must be finite and not negative".into()
    })?;
    want(attrs.softcap.is_none_or(|c| c.get() > 0.0 && c.get().is_finite()), || {
        "softcap must be positive and finite".into()
    })?;
    want(attrs.scale.get().is_finite(), || "scale must be finite".into())?;
    let prefix = match (attrs.sinks, rest) {
        (false, prefix) => prefix,
        (true, [(dtype, shape), prefix @ ..]) => {
            want(*dtype == DType::F32 && shape.dims() == [hq], || {
                format!("sinks must be f32 [{hq}], are {dtype} {shape}")
            })?;
            prefix
        }
        (true, []) => return Err("an operand of sinks is missing".into()),
    };
    if !attrs.prefix {
        return want(prefix.is_empty(), || "operands of a cached prefix without `prefix`".into());
    }
    want(prefix.len() == 3, || {
        format!("a cached prefix takes 3 operands, was given {}", prefix.len())
    })?;
    let mut page = None;
    for (i, &(dtype, shape)) in prefix.iter().enumerate() {
        if i + 1 == prefix.len() {
            want(
                dtype == DType::I32 && shape.rank() == 2 && shape.dim(0) == seqs.1.dim(0),
                || format!("table must be i32 [{}, M], is {dtype} {shape}", seqs.1.dim(0)),
            )?;
            continue;
        }
        let width = if i == 0 { d } else { v.dim(2) };
        let q8 = DType::Block(gguf::TensorType::Q8_0);
        want(dtype.is_float() || dtype == q8, || format!("pages of {dtype}"))?;
        want(
            shape.rank() == 4 && shape.dim(2) == hkv && shape.dim(3) == width && shape.dim(1) > 0,
            || format!("pages must be [P, page, {hkv}, {width}], are {shape}"),
        )?;
        want(*page.get_or_insert(shape.dim(1)) == shape.dim(1), || {
            "key and value pages differ in length".into()
        })?;
    }
    Ok(())
}

/// The dtype and shape of a node's value, or one phrase saying what does not fit.
pub(crate) fn infer(op: &Op, args: &[Operand]) -> Rule {
    let f = DType::F32;
    match op {
        Op::Leaf => Err("leaves are made with `leaf`".into()),
        Op::Binary(_) => {
            f32s(args, &[0, 1])?;
            let [a, b] = operands(args)?;
            Ok((f, broadcast_shapes(a.1, b.1)?))
        }
        Op::Unary(_) => {
            f32s(args, &[0])?;
            let [x] = operands(args)?;
            Ok((f, x.1))
        }
        Op::Affine { scale, bias } => {
            f32s(args, &[0])?;
            let [x] = operands(args)?;
            want(scale.get().is_finite() && bias.get().is_finite(), || {
                format!("scale {} or bias {} is not finite", scale.get(), bias.get())
            })?;
            Ok((f, x.1))
        }
        Op::Clamp { min, max } => {
            f32s(args, &[0])?;
            let [x] = operands(args)?;
            bounds(*min, *max)?;
            Ok((f, x.1))
        }
        Op::ClampBack { min, max } => {
            f32s(args, &[0, 1])?;
            let [x, dy] = operands(args)?;
            bounds(*min, *max)?;
            same(x.1, dy.1)?;
            Ok((f, x.1))
        }
        Op::Fill { value, shape } => {
            let [] = operands(args)?;
            want(value.get().is_finite(), || format!("the value {} is not finite", value.get()))?;
            Ok((f, *shape))
        }
        Op::Glu(kind) => {
            f32s(args, &[0, 1])?;
            let [gate, up] = operands(args)?;
            glu(*kind)?;
            same(gate.1, up.1)?;
            Ok((f, up.1))
        }
        Op::GluBack { kind, .. } => {
            f32s(args, &[0, 1, 2])?;
            let [gate, up, dy] = operands(args)?;
            glu(*kind)?;
            same(gate.1, up.1)?;
            same(up.1, dy.1)?;
            Ok((f, up.1))
        }
        Op::Sum { dims } => {
            f32s(args, &[0])?;
            let [x] = operands(args)?;
            let x = x.1;
            want(usize::from(*dims) < 1 << x.rank(), || {
                format!("sums dimensions {dims:#b}, has {}", x.rank())
            })?;
            let out: Vec<usize> =
                (0..x.rank()).map(|i| if dims >> i & 1 == 1 { 1 } else { x.dim(i) }).collect();
            Ok((f, fit(&out)?))
        }
        Op::CumSum { dim, .. } => {
            f32s(args, &[0])?;
            let [x] = operands(args)?;
            want(usize::from(*dim) < x.1.rank(), || format!("no dimension {dim}"))?;
            Ok((f, x.1))
        }
        Op::TopK { k, .. } => {
            f32s(args, &[0])?;
            let [x] = operands(args)?;
            let last = x.1.rank().checked_sub(1).ok_or("a scalar has no order")?;
            want(*k <= x.1.dim(last), || format!("the first {k} of {}", x.1.dim(last)))?;
            want(i32::try_from(x.1.dim(last)).is_ok(), || {
                format!("indices of {} elements are beyond i32", x.1.dim(last))
            })?;
            Ok((DType::I32, x.1.with_dim(last, *k).map_err(|e| e.message)?))
        }
        Op::Broadcast { shape } => {
            f32s(args, &[0])?;
            let [x] = operands(args)?;
            let wide = broadcast_shapes(x.1, *shape)?;
            want(wide == *shape, || format!("{} does not broadcast to {shape}", x.1))?;
            Ok((f, *shape))
        }
        Op::Reshape { shape } => {
            let [x] = operands(args)?;
            want(x.0.element_bytes().is_some(), || format!("{} cannot be reshaped", x.0))?;
            want(x.1.elements() == shape.elements(), || {
                format!("{} and {shape} have different element counts", x.1)
            })?;
            Ok((x.0, *shape))
        }
        Op::Permute { perm } => {
            let [x] = operands(args)?;
            want(x.0.element_bytes().is_some(), || format!("{} cannot be permuted", x.0))?;
            let mut seen = 0u32;
            let mut out = Vec::with_capacity(perm.len());
            for &p in perm {
                want(usize::from(p) < x.1.rank(), || format!("no dimension {p}"))?;
                seen |= 1 << p;
                out.push(x.1.dim(usize::from(p)));
            }
            want(perm.len() == x.1.rank() && seen.count_ones() as usize == x.1.rank(), || {
                format!("{perm:?} is not a permutation of {} dimensions", x.1.rank())
            })?;
            Ok((x.0, fit(&out)?))
        }
        Op::Slice { dim, start, len } => {
            let [x] = operands(args)?;
            let dim = usize::from(*dim);
            want(x.0.element_bytes().is_some(), || format!("{} cannot be sliced", x.0))?;
            want(dim < x.1.rank(), || format!("no dimension {dim}"))?;
            let end = start.checked_add(*len);
            want(end.is_some_and(|end| end <= x.1.dim(dim)), || {
                format!(
                    "{len} entries from {start} are outside of dimension {dim} of size {}",
                    x.1.dim(dim)
                )
            })?;
            Ok((x.0, x.1.with_dim(dim, *len).map_err(|e| e.message)?))
        }
        Op::Pad { dim, before, after } => {
            f32s(args, &[0])?;
            let [x] = operands(args)?;
            let dim = usize::from(*dim);
            want(dim < x.1.rank(), || format!("no dimension {dim}"))?;
            let size = x.1.dim(dim).checked_add(*before).and_then(|n| n.checked_add(*after));
            let size = size.ok_or("the padded size overflows")?;
            Ok((f, x.1.with_dim(dim, size).map_err(|e| e.message)?))
        }
        Op::Concat { dim } => {
            let dim = usize::from(*dim);
            let first = args.first().ok_or("takes at least one operand")?;
            want(dim < first.1.rank(), || format!("no dimension {dim}"))?;
            let mut size = 0usize;
            for (i, (dtype, shape)) in args.iter().enumerate() {
                want(*dtype == f, || format!("operand {i} must be f32, is {dtype}"))?;
                want(shape.rank() == first.1.rank(), || {
                    format!("shapes {} and {shape} differ in rank", first.1)
                })?;
                for d in (0..shape.rank()).filter(|&d| d != dim) {
                    want(shape.dim(d) == first.1.dim(d), || {
                        format!("shapes {} and {shape} differ beside dimension {dim}", first.1)
                    })?;
                }
                size = size.checked_add(shape.dim(dim)).ok_or("the joined size overflows")?;
            }
            Ok((f, first.1.with_dim(dim, size).map_err(|e| e.message)?))
        }
        Op::Copy => {
            let [x] = operands(args)?;
            want(x.0.element_bytes().is_some(), || format!("{} cannot be copied", x.0))?;
            Ok(x)
        }
        Op::Cast { dtype } => {
            let [x] = operands(args)?;
            let narrow = matches!(dtype, DType::F16 | DType::BF16 | DType::Int16Rows)
                || *dtype == DType::Block(gguf::TensorType::Q8_0);
            let ok = (x.0 == f && narrow) || (x.0.is_float() && x.0 != f && *dtype == f);
            want(ok, || format!("no conversion from {} to {dtype}", x.0))?;
            Ok((*dtype, x.1))
        }
        Op::Round { dtype } => {
            f32s(args, &[0])?;
            let [x] = operands(args)?;
            let q8 = DType::Block(gguf::TensorType::Q8_0);
            want(dtype.is_float() || *dtype == q8, || format!("no rounding to {dtype}"))?;
            want(dtype.row_bytes(x.1.cols()).is_some(), || {
                format!("rows of {} elements are not whole blocks of {dtype}", x.1.cols())
            })?;
            Ok((f, x.1))
        }
        Op::QuantizeRows => {
            f32s(args, &[0])?;
            let [x] = operands(args)?;
            Ok((DType::Q8Rows, x.1))
        }
        Op::Gather => {
            i32s(args, &[1])?;
            let [table, ids] = operands(args)?;
            want(table.1.rank() >= 2, || format!("the table must be [.., V, K], is {}", table.1))?;
            want(table.0.is_float() || matches!(table.0, DType::Block(_)), || {
                format!("no rows of a table of {}", table.0)
            })?;
            want(ids.1.rank() >= 1, || "ids must have a dimension".into())?;
            if table.1.rank() > 2 {
                let lead = table.1.rank() - 2;
                let own = ids.1.rank() == lead + 1;
                want(own && ids.1.dims()[..lead] == table.1.dims()[..lead], || {
                    format!("ids {} do not fit the leading dimensions of {}", ids.1, table.1)
                })?;
                let block = matches!(table.0, DType::Block(_));
                want(!block, || format!("a {} table must be [V, K], is {}", table.0, table.1))?;
            }
            let mut dims = ids.1.dims().to_vec();
            dims.push(table.1.cols());
            Ok((f, fit(&dims)?))
        }
        Op::ScatterAdd { rows } => {
            i32s(args, &[0])?;
            f32s(args, &[1])?;
            let [ids, x] = operands(args)?;
            let rank = ids.1.rank();
            let fits = rank >= 1 && x.1.rank() == rank + 1 && x.1.dims()[..rank] == *ids.1.dims();
            want(fits, || format!("ids {} and rows {} do not match", ids.1, x.1))?;
            Ok((f, x.1.with_dim(rank - 1, *rows).map_err(|e| e.message)?))
        }
        Op::Softmax(attrs) => {
            let [x, rest @ ..] = args else { return Err("takes x".into()) };
            softmax(*x, rest, attrs)?;
            Ok((f, x.1))
        }
        Op::SoftmaxBack { scale } => {
            f32s(args, &[0, 1])?;
            let [y, dy] = operands(args)?;
            want(scale.get().is_finite(), || "scale must be finite".into())?;
            want(y.1.rank() > 0, || "a scalar has no rows".into())?;
            same(y.1, dy.1)?;
            Ok((f, y.1))
        }
        Op::SoftmaxSinkBack(attrs) => {
            want(attrs.sinks, || "there are no sinks".into())?;
            let [x, rest @ .., y, dy] = args else { return Err("takes x, y and dy".into()) };
            softmax(*x, rest, attrs)?;
            for (i, operand) in [(args.len() - 2, y), (args.len() - 1, dy)] {
                want(operand.0 == f, || format!("operand {i} must be f32, is {}", operand.0))?;
                same(x.1, operand.1)?;
            }
            Ok((f, fit(&[x.1.dim(x.1.rank() - 3)])?))
        }
        Op::LogSoftmax => {
            f32s(args, &[0])?;
            let [x] = operands(args)?;
            want(x.1.rank() > 0, || "a scalar has no rows".into())?;
            Ok((f, x.1))
        }
        Op::Norm { kind, eps } => {
            f32s(args, &[0])?;
            let [x] = operands(args)?;
            norm(*kind, *eps, x.1)?;
            Ok((f, x.1))
        }
        Op::NormBack { kind, eps } => {
            f32s(args, &[0, 1])?;
            let [x, dy] = operands(args)?;
            norm(*kind, *eps, x.1)?;
            same(x.1, dy.1)?;
            Ok((f, x.1))
        }
        Op::RmsNorm { eps } => {
            f32s(args, &[0, 1])?;
            let [x, w] = operands(args)?;
            epsilon(*eps)?;
            is(w.1, &[x.1.cols()], "the weight")?;
            Ok((f, x.1))
        }
        Op::RmsNormBack { eps, wrt } => {
            f32s(args, &[0, 1, 2])?;
            let [x, w, dy] = operands(args)?;
            epsilon(*eps)?;
            is(w.1, &[x.1.cols()], "the weight")?;
            same(x.1, dy.1)?;
            Ok(match wrt {
                NormOperand::X => (f, x.1),
                NormOperand::Weight => (f, w.1),
            })
        }
        Op::RopeTable(angles) => {
            i32s(args, &[0])?;
            let pos = if angles.factors {
                f32s(args, &[1])?;
                let [pos, factors] = operands(args)?;
                is(factors.1, &[angles.dims / 2], "the factors")?;
                pos
            } else {
                let [pos] = operands(args)?;
                pos
            };
            match angles.sections {
                None => {
                    want(pos.1.rank() == 1, || format!("positions must be [T], are {}", pos.1))?;
                }
                Some(sections) => {
                    want(pos.1.rank() == 2 && pos.1.dim(1) == 4, || {
                        format!("positions of sections must be [T, 4], are {}", pos.1)
                    })?;
                    want(sections.sizes.iter().any(|&n| n > 0), || "sections of 0 pairs".into())?;
                    want(sections.sizes.iter().all(|&n| n <= 1 << 20), || {
                        format!("sections of {:?} pairs", sections.sizes)
                    })?;
                }
            }
            if let Some(yarn) = angles.yarn {
                let above = [yarn.ext_factor, yarn.beta_fast, yarn.beta_slow];
                let ok = above.iter().all(|x| x.get() > 0.0 && x.get().is_finite());
                want(ok && yarn.attn_factor.get().is_finite() && yarn.context > 0, || {
                    let [ext, fast, slow] = above.map(|x| x.get());
                    let (attn, context) = (yarn.attn_factor.get(), yarn.context);
                    format!(
                        "YaRN takes an extrapolation factor, fast and slow betas and a context \
                         above 0 and a finite attention factor, not {ext}, {fast}, {slow}, \
                         {context} and {attn}"
                    )
                })?;
                let (base, scale) = (angles.base.get(), angles.freq_scale.get());
                want(base > 1.0 && scale > 0.0, || {
                    format!("YaRN takes a base above 1 and a scale above 0, not {base} and {scale}")
                })?;
            }
            want(angles.dims > 0 && angles.dims % 2 == 0, || {
                format!("rotates {} elements, not a positive even number", angles.dims)
            })?;
            let (base, scale) = (angles.base.get(), angles.freq_scale.get());
            want(base > 0.0 && base.is_finite() && scale.is_finite(), || {
                format!("base {base} or frequency scale {scale} is out of range")
            })?;
            Ok((f, fit(&[pos.1.dim(0), angles.dims])?))
        }
        Op::Rope { .. } => {
            f32s(args, &[0, 1])?;
            let [x, table] = operands(args)?;
            want(
                x.1.rank() == 3
                    && table.1.rank() == 2
                    && table.1.dim(0) == x.1.dim(0)
                    && table.1.dim(1) <= x.1.dim(2)
                    && table.1.dim(1) % 2 == 0,
                || format!("x {} and the table {} do not match", x.1, table.1),
            )?;
            Ok((f, x.1))
        }
        Op::MatMul { ta, tb } => {
            let [a, b] = operands(args)?;
            let (ar, br) = (a.1.rank(), b.1.rank());
            want(ar >= 2 && br >= 2, || format!("{} and {} are not matrices", a.1, b.1))?;
            match (a.0, b.0) {
                (DType::F32, DType::F32 | DType::F16 | DType::BF16) => {}
                (DType::F32 | DType::BF16 | DType::Int16Rows, DType::Block(_)) => {
                    want(!ta && !tb, || {
                        format!("a {} matrix takes q8-rows on its left (QuantizeRows)", b.0)
                    })?;
                }
                (DType::Q8Rows, DType::Block(_)) => {
                    want(!ta && *tb, || "q8-rows multiply a transposed block matrix".into())?;
                }
                (a, b) => return Err(format!("no product of {a} and {b}")),
            }
            if let DType::Block(_) = b.0 {
                want(br == 2, || format!("a {} matrix must be [N, K], is {}", b.0, b.1))?;
            }
            let pick = |s: Shape, t: bool| {
                let (r, c) = (s.dim(s.rank() - 2), s.cols());
                if t { (c, r) } else { (r, c) }
            };
            let ((m, k), (k2, n)) = (pick(a.1, *ta), pick(b.1, *tb));
            want(k == k2, || format!("inner widths {k} and {k2} differ"))?;
            let outer = |s: Shape| Shape::new(s.dims().split_at(s.rank() - 2).0);
            let outer_a = outer(a.1).map_err(|e| e.message)?;
            let outer_b = outer(b.1).map_err(|e| e.message)?;
            let mut dims = broadcast_shapes(outer_a, outer_b)?.dims().to_vec();
            dims.extend([m, n]);
            Ok((f, fit(&dims)?))
        }
        Op::MatMulExperts { tb } => {
            i32s(args, &[2])?;
            let [x, w, ids] = operands(args)?;
            match (x.0, w.0) {
                (DType::F32, DType::F32 | DType::F16 | DType::BF16) => {}
                (DType::F32 | DType::BF16 | DType::Int16Rows, DType::Block(_)) => {
                    want(!tb, || {
                        format!("{} experts take q8-rows on their left (QuantizeRows)", w.0)
                    })?
                }
                (DType::Q8Rows, DType::Block(_)) => {
                    want(*tb, || "q8-rows multiply transposed block experts".into())?;
                }
                (x, w) => return Err(format!("no product of {x} and experts of {w}")),
            }
            want(w.1.rank() == 3, || format!("experts must be [E, N, K], are {}", w.1))?;
            let used = choices(x.1, ids.1, "x")?;
            let (k, n) = if *tb { (w.1.dim(2), w.1.dim(1)) } else { (w.1.dim(1), w.1.dim(2)) };
            want(x.1.dim(2) == k, || format!("inner widths {} and {k} differ", x.1.dim(2)))?;
            Ok((f, fit(&[x.1.dim(0), used, n])?))
        }
        Op::ExpertOuter { experts } => {
            f32s(args, &[0, 1])?;
            i32s(args, &[2])?;
            let [a, b, ids] = operands(args)?;
            choices(a.1, ids.1, "a")?;
            choices(b.1, ids.1, "b")?;
            Ok((f, fit(&[*experts, a.1.dim(2), b.1.dim(2)])?))
        }
        Op::Dropout(dropout) => adapters::dropout(args, *dropout),
        Op::Lora { slots } => adapters::lora(args, *slots),
        Op::LoraBack { slots, wrt, slot } => adapters::lora_back(args, *slots, *wrt, *slot),
        Op::LoraExperts { slots } => adapters::lora_experts(args, *slots),
        Op::LoraExpertsBack { slots, wrt, slot } => {
            adapters::lora_experts_back(args, *slots, *wrt, *slot)
        }
        Op::Attention(attrs) => {
            f32s(args, &[0, 1, 2])?;
            let [q, k, v, seqs, prefix @ ..] = args else {
                return Err("takes q, k, v and seqs".into());
            };
            attention(*q, *k, *v, *seqs, prefix, attrs)?;
            Ok((f, fit(&[q.1.dim(0), q.1.dim(1), v.1.dim(2)])?))
        }
        Op::AttentionQueryBack(attrs) => {
            f32s(args, &[0, 1, 2, 4, 5])?;
            let [q, k, v, seqs, delta, dout, prefix @ ..] = args else {
                return Err("takes q, k, v, seqs, delta and dout".into());
            };
            attention(*q, *k, *v, *seqs, prefix, attrs)?;
            let (t, h) = (q.1.dim(0), q.1.dim(1));
            is(delta.1, &[t, h], "delta")?;
            is(dout.1, &[t, h, v.1.dim(2)], "dout")?;
            Ok((f, flat(q.1, delta.1)?))
        }
        Op::AttentionBack { attrs, wrt } => {
            f32s(args, &[0, 1, 2, 4, 5, 6])?;
            let [q, k, v, seqs, lse, delta, dout, prefix @ ..] = args else {
                return Err("takes q, k, v, seqs, lse, delta and dout".into());
            };
            attention(*q, *k, *v, *seqs, prefix, attrs)?;
            let (t, h) = (q.1.dim(0), q.1.dim(1));
            is(lse.1, &[t, h], "lse")?;
            is(delta.1, &[t, h], "delta")?;
            is(dout.1, &[t, h, v.1.dim(2)], "dout")?;
            Ok(match wrt {
                AttentionOperand::Own => (f, flat(k.1, v.1)?),
                AttentionOperand::Sinks => {
                    want(attrs.sinks, || "the gradient of sinks without sinks".into())?;
                    (f, fit(&[h])?)
                }
                AttentionOperand::Pages => {
                    want(attrs.prefix, || "the gradient of pages without pages".into())?;
                    let [k, v, ..] = prefix.get(usize::from(attrs.sinks)..).unwrap_or(&[]) else {
                        return Err("a cached prefix is missing".into());
                    };
                    (f, flat(k.1, v.1)?)
                }
            })
        }
        Op::SsmConv
        | Op::SsmConvBack { .. }
        | Op::SsmConvState
        | Op::SsmConvStateBack { .. }
        | Op::SsmScan
        | Op::SsmScanBack { .. }
        | Op::GatedDeltaRule(_)
        | Op::GatedDeltaRuleBack(_) => recurrent::infer(op, args),
        Op::CrossEntropy(attrs) => {
            f32s(args, &[0, 2])?;
            i32s(args, &[1])?;
            let (logits, labels) = if attrs.weighted {
                let [logits, labels, weights] = operands(args)?;
                is(weights.1, &[logits.1.dim(0)], "weights")?;
                (logits, labels)
            } else {
                let [logits, labels] = operands(args)?;
                (logits, labels)
            };
            cross_entropy(logits, labels, attrs)?;
            Ok((f, labels.1))
        }
        Op::CrossEntropyBack(attrs) => {
            f32s(args, &[0, 2, 3])?;
            i32s(args, &[1])?;
            let (logits, labels, dy) = if attrs.weighted {
                let [logits, labels, dy, weights] = operands(args)?;
                is(weights.1, &[logits.1.dim(0)], "weights")?;
                (logits, labels, dy)
            } else {
                let [logits, labels, dy] = operands(args)?;
                (logits, labels, dy)
            };
            cross_entropy(logits, labels, attrs)?;
            is(dy.1, &[logits.1.dim(0)], "dy")?;
            Ok((f, logits.1))
        }
    }
}

/// The checks of a loss' operands that both directions share.
fn cross_entropy(
    logits: Operand,
    labels: Operand,
    attrs: &CrossEntropyAttrs,
) -> std::result::Result<(), String> {
    want(logits.1.rank() == 2 && logits.1.dim(1) > 0, || {
        format!("logits must be [T, V], are {}", logits.1)
    })?;
    want(attrs.scale.get().is_finite(), || "scale must be finite".into())?;
    want(attrs.softcap.is_none_or(|c| c.get() > 0.0 && c.get().is_finite()), || {
        "softcap must be positive and finite".into()
    })?;
    is(labels.1, &[logits.1.dim(0)], "labels")
}
