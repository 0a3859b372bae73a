//! `gradus make-toy`.

use std::path::PathBuf;

use gguf::TensorType;
use model::toy::Toy;
use serde_json::json;

use crate::error::{Error, Result};
use crate::output::{bytes, json, line};
use crate::outputs;

/// Write a small random model of an architecture, for tests, bug reports and demos
///
/// It has a vocabulary of 320 tokens and a ChatML template, and says nothing of sense. The same
/// options give the same file, byte for byte.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus make-toy qwen3moe
  gradus make-toy llama --experts 8 --format q5_0 --out mixtral.gguf
  gradus make-toy qwen3 --layers 4 --width 512 --ffn 1024 --seed 7")]
pub struct Args {
    /// An architecture, as in `general.architecture` of a GGUF file
    #[arg(value_name = "ARCH")]
    arch: String,

    /// The file to write [default: toy-ARCH-FORMAT.gguf]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Format of the matrices: f32, f16, bf16 or a block format such as q4_k
    #[arg(long, value_name = "FORMAT", default_value = "q4_k")]
    format: String,

    /// Seeds the weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Layers [default: 2]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,

    /// Width of the residual stream; a multiple of 256 for the K formats [default: 256]
    #[arg(long, value_name = "N")]
    width: Option<usize>,

    /// Inner width of the feed-forward half of a layer, or of each expert [default: 512, or 256
    /// with experts]
    #[arg(long, value_name = "N")]
    ffn: Option<usize>,

    /// Query heads [default: 4]
    #[arg(long, value_name = "N")]
    heads: Option<usize>,

    /// Key and value heads [default: 2]
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,

    /// Experts of each layer, where the architecture may have some [default: 8 where it has]
    #[arg(long, value_name = "N")]
    experts: Option<usize>,

    /// Experts that each row uses [default: 2]
    #[arg(long, value_name = "N")]
    experts_used: Option<usize>,

    /// Positions [default: 1024]
    #[arg(long, value_name = "N")]
    ctx: Option<usize>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let format = format(&args.format)?;
    let mut toy = Toy::new(&args.arch, format, args.seed);
    for (option, field) in [
        (args.layers, &mut toy.layers),
        (args.width, &mut toy.width),
        (args.ffn, &mut toy.ffn),
        (args.heads, &mut toy.heads),
        (args.kv_heads, &mut toy.kv_heads),
        (args.experts, &mut toy.experts),
        (args.experts_used, &mut toy.experts_used),
        (args.ctx, &mut toy.context),
    ] {
        *field = option.unwrap_or(*field);
    }
    let name = format!("toy-{}-{}.gguf", args.arch, format.name().to_lowercase());
    let path = args.out.clone().unwrap_or_else(|| name.into());
    outputs::check(&[&path], &[])?;
    toy.write(&path)?;
    let size = std::fs::metadata(&path).map_err(|e| Error::reading(&path, e))?.len();
    if args.json {
        return json(&json!({ "file": path.display().to_string(), "bytes": size }));
    }
    line(&format!("{}: {}", path.display(), bytes(size)))
}

fn format(name: &str) -> Result<TensorType> {
    let floats = [TensorType::F32, TensorType::F16, TensorType::BF16];
    let blocks = TensorType::ALL.into_iter().filter(|ty| ty.is_quantized());
    let all: Vec<TensorType> = floats.into_iter().chain(blocks).collect();
    all.iter().copied().find(|ty| ty.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
        let names: Vec<String> = all.iter().map(|ty| ty.name().to_lowercase()).collect();
        Error::invalid(format!("`--format` is `{name}`; expected one of {}", names.join(", ")))
    })
}
