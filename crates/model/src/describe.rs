//! What is in an adapter's file, without the model it is for.

use std::path::Path;

use crate::adapter::{alpha, check_rank, effective_alpha, refuse_other_files, scale, transposed};
use crate::{Error, LoraTensor, Result, peft};

/// An adapter's file or folder.
#[derive(Clone, PartialEq, Debug)]
pub struct AdapterInfo {
    /// `GGUF` or `PEFT`.
    pub form: &'static str,
    /// The architecture of the model it is for, where the file says it.
    pub arch: Option<String>,
    /// Its pairs, in order of name.
    pub pairs: Vec<PairInfo>,
}

/// A pair of matrices, or a pair for each expert of a stack.
#[derive(Clone, PartialEq, Debug)]
pub struct PairInfo {
    /// What it is on, as the file calls it: a tensor of GGUF, a module of transformers.
    pub target: String,
    /// How many pairs, where rows choose among experts.
    pub experts: Option<usize>,
    /// Rank.
    pub rank: usize,
    /// Inputs.
    pub width: usize,
    /// Outputs.
    pub out: usize,
    /// The alpha that, divided by the rank, is the scale.
    pub alpha: f32,
    /// What `B A x` is multiplied by.
    pub scale: f32,
    /// The Frobenius norm of `scale * B A`, over all experts; `None` of ranks above 1024, which
    /// take too long.
    pub norm: Option<f64>,
}

impl PairInfo {
    pub(crate) fn of(
        target: String,
        pair: &LoraTensor,
        experts: Option<usize>,
        width: usize,
        out: usize,
    ) -> PairInfo {
        PairInfo {
            target,
            experts,
            rank: pair.rank,
            width,
            out,
            alpha: effective_alpha(pair.scale, pair.rank),
            scale: pair.scale,
            norm: (pair.rank <= MOST_NORM_RANK)
                .then(|| f64::from(pair.scale).abs() * product_norm(pair, width, out)),
        }
    }
}

/// The work of a norm grows with the rank's square.
const MOST_NORM_RANK: usize = 1024;

/// The Frobenius norm of `B A` of all experts, without the products: the trace of
/// `(B^T B) (A A^T)`, both of which are symmetric.
fn product_norm(pair: &LoraTensor, width: usize, out: usize) -> f64 {
    let rank = pair.rank.max(1);
    let experts = pair.a.chunks((rank * width).max(1)).zip(pair.b.chunks((out * rank).max(1)));
    let mut total = 0.0;
    for (a, b) in experts {
        let b = transposed(b, rank);
        let rows: Vec<_> = a.chunks(width.max(1)).zip(b.chunks(out.max(1))).collect();
        for (i, (a, b)) in rows.iter().enumerate() {
            total += dot(a, a) * dot(b, b);
            let others =
                rows.iter().take(i).map(|(other_a, other_b)| dot(a, other_a) * dot(b, other_b));
            total += 2.0 * others.sum::<f64>();
        }
    }
    total.max(0.0).sqrt()
}

/// In several sums, which need not wait for each other.
fn dot(x: &[f32], y: &[f32]) -> f64 {
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<16>(), y.as_chunks::<16>());
    let mut sums = [0.0f64; 16];
    for (x, y) in x.iter().zip(y) {
        for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
            *sum += f64::from(*x) * f64::from(*y);
        }
    }
    let rest = x_rest.iter().zip(y_rest).map(|(x, y)| f64::from(*x) * f64::from(*y));
    sums.iter().sum::<f64>() + rest.sum::<f64>()
}

/// Looks at a GGUF file or a folder of PEFT.
///
/// # Errors
/// When it is no adapter, or a pair of it is not one.
pub fn describe_adapter(path: &Path) -> Result<AdapterInfo> {
    if path.is_dir() {
        return Ok(AdapterInfo { form: "PEFT", arch: None, pairs: peft::describe(path)? });
    }
    refuse_other_files(path)?;
    let file = gguf::Gguf::open(path)?;
    let (name, metadata) = (path.display(), file.metadata());
    if metadata.opt_str("general.type")? != Some("adapter") {
        return Err(Error::new(format!(
            "{name}: key `general.type` is not `adapter`: this is no adapter; `gradus inspect` \
             shows models"
        )));
    }
    let alpha = alpha(metadata)?;
    let mut pairs = Vec::new();
    for tensor in file.tensors() {
        let Some(target) = tensor.info.name.strip_suffix(".lora_a") else { continue };
        let b = file.require(&format!("{target}.lora_b"))?;
        let is_table = target == "token_embd.weight";
        let (experts, rank, width) = match tensor.info.shape[..] {
            [vocab, rank] if is_table => (None, rank, vocab),
            [rank, width] => (None, rank, width),
            [experts, rank, width] => (Some(experts), rank, width),
            _ => (None, 0, 0),
        };
        let out = b.info.shape.iter().rev().nth(1).copied().unwrap_or(0);
        let wanted: Vec<usize> = experts.into_iter().chain([out, rank]).collect();
        if rank == 0 || b.info.shape != wanted {
            return Err(Error::new(format!(
                "{name}: tensors `{}.lora_a` and `.lora_b` have shapes {:?} and {:?}, which \
                 are no pair",
                gguf::shown(target),
                tensor.info.shape,
                b.info.shape
            )));
        }
        check_rank(target, rank).map_err(|e| Error::new(format!("{name}: {e}")))?;
        let a = tensor.to_f32()?;
        let a = if is_table { transposed(&a, rank) } else { a };
        let pair = LoraTensor { rank, a, b: b.to_f32()?, scale: scale(alpha, rank) };
        pairs.push(PairInfo::of(target.to_string(), &pair, experts, width, out));
    }
    pairs.sort_by(|a, b| a.target.cmp(&b.target));
    let arch = metadata.opt_str("general.architecture")?.map(str::to_string);
    Ok(AdapterInfo { form: "GGUF", arch, pairs })
}
