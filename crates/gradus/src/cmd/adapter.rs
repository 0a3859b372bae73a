//! `gradus adapter`.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use model::{Adapter, AdapterInfo, PairInfo, Skeleton, describe_adapter};
use serde_json::json;

use crate::error::{Error, Result};
use crate::output::{count, json, line, note};
use crate::outputs;

/// Look at adapters, and convert them between llama.cpp's form and PEFT's
///
/// llama.cpp's form is a GGUF file, PEFT's a folder with adapter_config.json and
/// adapter_model.safetensors. Wherever an adapter is given, either will do.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus adapter show facts.gguf
  gradus adapter convert facts.gguf facts-peft")]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Show what an adapter is on: ranks, scales, and how much each target is changed
    #[command(after_help = "\
Examples:
  gradus adapter show facts.gguf
  gradus adapter show peft-folder --json")]
    Show(Show),
    /// Convert a GGUF file to a PEFT folder, or a PEFT folder to a GGUF file
    ///
    /// No number is changed, and converting back gives the same tensors. The one exception is
    /// said: a GGUF file has one alpha, so where scales differ by other factors than powers of
    /// two, B is stored with the factor in it, rounded.
    #[command(after_help = "\
Examples:
  gradus adapter convert facts.gguf facts-peft
  gradus adapter convert peft-folder facts.gguf -m base.gguf")]
    Convert(Convert),
}

#[derive(clap::Args, Debug)]
struct Show {
    /// A GGUF file, or a folder of PEFT
    #[arg(value_name = "ADAPTER")]
    adapter: PathBuf,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args, Debug)]
struct Convert {
    /// A GGUF file, or a folder of PEFT
    #[arg(value_name = "IN")]
    from: PathBuf,

    /// The folder or the GGUF file to write
    #[arg(value_name = "OUT")]
    to: PathBuf,

    /// The model it is for: a GGUF file, or a name of the catalogue (`gradus pull --list`)
    #[arg(short, long, value_name = "MODEL", default_value = hub::DEFAULT_MODEL)]
    model: String,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    match &args.what {
        What::Show(show) => self::show(show),
        What::Convert(args) => convert(args),
    }
}

fn show(args: &Show) -> Result<()> {
    let AdapterInfo { form, arch, pairs } = describe_adapter(&args.adapter)?;
    let parameters: u64 = pairs.iter().map(parameters).sum();
    if args.json {
        let targets: Vec<_> = pairs
            .iter()
            .map(|p| {
                json!({
                    "target": p.target,
                    "experts": p.experts,
                    "rank": p.rank,
                    "inputs": p.width,
                    "outputs": p.out,
                    "alpha": p.alpha,
                    "scale": p.scale,
                    "norm": p.norm,
                })
            })
            .collect();
        return json(&json!({
            "file": args.adapter.display().to_string(),
            "form": form,
            "architecture": arch,
            "parameters": parameters,
            "targets": targets,
        }));
    }
    let arch = arch.map_or(String::new(), |arch| format!(" for {}", gguf::shown(&arch)));
    line(&format!(
        "{}: {form}{arch}, {} targets, {} parameters",
        args.adapter.display(),
        pairs.len(),
        count(parameters)
    ))?;
    let targets: Vec<String> = pairs.iter().map(|p| gguf::shown(&p.target)).collect();
    let width = targets.iter().map(|target| target.chars().count()).max().unwrap_or(0).max(6);
    line(&format!(
        "{:<width$}  {:>4}  {:>8}  {:>8}  {:>13}  {:>10}",
        "target", "rank", "alpha", "scale", "shape", "|scale B A|"
    ))?;
    for (p, target) in pairs.iter().zip(&targets) {
        let norm = p.norm.map_or("-".to_string(), |norm| format!("{norm:.4}"));
        let experts = p.experts.map_or(String::new(), |n| format!("{n}x"));
        let shape = format!("{experts}{}x{}", p.out, p.width);
        line(&format!(
            "{target:<width$}  {:>4}  {:>8}  {:>8}  {shape:>13}  {norm:>10}",
            p.rank,
            short(p.alpha),
            short(p.scale)
        ))?;
    }
    Ok(())
}

fn parameters(p: &PairInfo) -> u64 {
    (p.experts.unwrap_or(1) * p.rank * (p.width + p.out)) as u64
}

/// At most four digits after the point, and no zeros at the end.
fn short(x: f32) -> String {
    let text = format!("{x:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

fn convert(args: &Convert) -> Result<()> {
    let is_gguf = |path: &Path| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    let to_gguf = args.from.is_dir();
    match (to_gguf, is_gguf(&args.to)) {
        (true, false) => {
            return Err(Error::invalid(format!(
                "OUT is {}; a folder of PEFT becomes a GGUF file, so expected a name that ends in \
                 .gguf",
                args.to.display()
            )));
        }
        (false, true) => {
            return Err(Error::invalid(format!(
                "OUT is {}; a GGUF file becomes a folder of PEFT, so expected a name that does not \
                 end in .gguf",
                args.to.display()
            )));
        }
        _ => {}
    }
    if !to_gguf && args.to.is_file() {
        let to = args.to.display();
        return Err(Error::invalid(format!("OUT is {to}, a file; expected a folder")));
    }
    if to_gguf {
        outputs::check(&[&args.to], &[])?;
    }
    let model = Skeleton::open(&hub::resolve(&args.model)?)?;
    let adapter = Adapter::read_for(&args.from, &model.base())?;
    let rounded = match to_gguf {
        true => {
            adapter.write_for(&args.to, &model.base())?;
            adapter.rounded()
        }
        false => {
            adapter.write_peft(&args.to, &model.base())?;
            Vec::new()
        }
    };
    if let [first, ..] = rounded[..] {
        note(&format!(
            "one alpha cannot say all scales: B of {} targets, such as {first}, is stored with a \
             factor in it, rounded to f32",
            rounded.len()
        ));
    }
    if args.json {
        return json(&json!({
            "file": args.to.display().to_string(),
            "form": if to_gguf { "GGUF" } else { "PEFT" },
            "targets": adapter.tensors.len(),
            "parameters": adapter.parameters(),
            "rounded": rounded,
        }));
    }
    line(&format!(
        "{}: {} targets, {} parameters",
        args.to.display(),
        adapter.tensors.len(),
        count(adapter.parameters() as u64)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!(short(12.0), "12");
        assert_eq!(short(0.5), "0.5");
        assert_eq!(short(22.627_417), "22.6274");
        assert_eq!(short(100.0), "100");
    }
}
