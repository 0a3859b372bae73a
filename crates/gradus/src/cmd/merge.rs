//! `gradus merge`.

use std::path::PathBuf;

use gguf::TensorType;
use gguf::blocks::QUANTIZABLE;
use model::{Adapter, MergeConfig, MergedTensor, Skeleton};
use serde_json::json;

use crate::error::{Error, Result};
use crate::options::ModelArgs;
use crate::output::{bytes, json, line};
use crate::outputs;
use crate::progress::{Progress, Unit};

/// Write a copy of a model with an adapter merged into its weights
///
/// Each changed tensor is stored in its own type, or in that of --type; everything else is copied.
/// A quantized type has steps, and what is less than half of one is rounded away: of each tensor
/// it is said how large the change is, how large the error of storing it is beside that, and how
/// many of its entries change by less than half a step. Where those are most, the merged model
/// would be the base model again, and the merge is refused. An adapter loses nothing: keep it
/// where what runs the model can load it.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus merge --adapter facts.gguf --type q8_0 -o merged.gguf
  gradus merge -m base-f16.gguf --adapter peft-folder -o merged.gguf
  gradus merge -m base.gguf --adapter facts.gguf -o merged.gguf --json")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// The adapter: a GGUF file, or a folder of PEFT
    #[arg(long, value_name = "ADAPTER")]
    adapter: PathBuf,

    /// The file to write
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,

    /// What changed tensors are stored as: `keep` for their own type, or f32, f16, bf16, q4_0, q4_1,
    /// q5_0, q5_1, q8_0, q4_k, q5_k, q6_k
    #[arg(long = "type", value_name = "TYPE", default_value = "keep")]
    ty: String,

    /// Merge although most of the change is lost
    #[arg(long)]
    force: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn parse(name: &str) -> Result<Option<TensorType>> {
    if name.eq_ignore_ascii_case("keep") {
        return Ok(None);
    }
    let found = TensorType::from_name(name).filter(|ty| QUANTIZABLE.contains(ty));
    found.map(Some).ok_or_else(|| {
        let names = QUANTIZABLE.map(|ty| ty.name().to_lowercase()).join(", ");
        Error::invalid(format!("`--type` is `{name}`; expected keep, {names}"))
    })
}

pub fn run(args: &Args) -> Result<()> {
    let ty = parse(&args.ty)?;
    outputs::check(&[&args.out], std::slice::from_ref(&args.adapter))?;
    let threads = args.model.device.count()?;
    let model = Skeleton::open(&args.model.path()?)?;
    let adapter = Adapter::read_for(&args.adapter, &model.base())?;
    let name = args.adapter.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let config = MergeConfig { ty, force: args.force, name, threads };
    let mut bar: Option<Progress> = None;
    let report = model::merge(&model, &adapter, &args.out, &config, &mut |done, total| {
        let bar = bar.get_or_insert_with(|| Progress::new("merging", Unit::Bytes, total));
        bar.set(done, "");
    });
    drop(bar);
    let report = report?;
    let size = std::fs::metadata(&args.out).map_err(|e| Error::reading(&args.out, e))?.len();
    if args.json {
        let tensors: Vec<_> = report
            .iter()
            .map(|t| {
                json!({
                    "tensor": t.name,
                    "from": t.from.name(),
                    "to": t.to.name(),
                    "change": t.change,
                    "error": t.error,
                    "lost": t.lost,
                })
            })
            .collect();
        return json(
            &json!({ "file": args.out.display().to_string(), "bytes": size, "tensors": tensors }),
        );
    }
    show(&report)?;
    line(&format!("{}: {}", args.out.display(), bytes(size)))
}

fn show(report: &[MergedTensor]) -> Result<()> {
    let width = report.iter().map(|t| t.name.len()).max().unwrap_or(0).max(6);
    line(&format!(
        "{:<width$}  {:<13}  {:>8}  {:>8}  {:>15}",
        "tensor", "type", "change", "error", "below half step"
    ))?;
    for t in report {
        let ty = match t.from == t.to {
            true => t.to.to_string(),
            false => format!("{} > {}", t.from, t.to),
        };
        line(&format!(
            "{:<width$}  {ty:<13}  {:>7.2}%  {:>7.1}%  {:>14.1}%",
            t.name,
            100.0 * t.change,
            100.0 * t.error,
            100.0 * t.lost
        ))?;
    }
    line("(change: of the weights' root mean square; error: of the change's)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_by_name() {
        assert_eq!(parse("keep").unwrap(), None);
        assert_eq!(parse("Q4_K").unwrap(), Some(TensorType::Q4K));
        for name in QUANTIZABLE.map(|ty| ty.name().to_lowercase()) {
            assert!(parse(&name).unwrap().is_some(), "{name}");
        }
        assert!(parse("q3_k").is_err() && parse("").is_err());
    }
}
