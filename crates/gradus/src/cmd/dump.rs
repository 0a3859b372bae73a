//! `gradus dump`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Subcommand;
use graph::Recompute;
use model::{Model, Rows, WantLogits};
use train::{Example, Gradients, GraphConfig, Parameters, Window};

use crate::data::{Array, Sequence, read_sequences, write_arrays};
use crate::error::{Error, Result};
use crate::options::{AdapterArgs, CacheType, ModelArgs, engine};
use crate::output::line;

/// Write logits or gradients to a safetensors file, to compare them with other software
///
/// Tokens come from a safetensors file with arrays `tokens.I` (I from 0) and `labels.I`, or from
/// JSON: a list of lists of ids, or a list of objects {"tokens": [...], "labels": [...]}.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Logits of every token: `logits.I`, [tokens, vocab]
    #[command(after_help = "\
Examples:
  gradus dump logits -m model.gguf --tokens tokens.json --out logits.safetensors
  gradus dump logits -m model.gguf --adapter a.gguf --tokens golden.safetensors --out o.safetensors")]
    Logits(Common),

    /// The loss and its gradient by adapter matrices or by tensors of the model
    ///
    /// The loss is the mean negative log-likelihood, in nats, of all labelled tokens of all
    /// sequences: `labels.I[t]` is the token at t, predicted from those before it; -100 stands
    /// for no loss. Written as `loss`; `lora.grad.TENSOR.a` and `.b` for every pair of the
    /// adapter; `grad.TENSOR` for every tensor of `--wrt`, which must be float.
    #[command(after_help = "\
Examples:
  gradus dump grads -m model.gguf --adapter a.gguf --tokens golden.safetensors --out g.safetensors
  gradus dump grads -m model.gguf --wrt output_norm.weight,token_embd.weight \\
      --tokens golden.safetensors --out g.safetensors")]
    Grads {
        #[command(flatten)]
        common: Common,

        /// Tensors of the model to differentiate by
        #[arg(long, value_name = "TENSOR,...", value_delimiter = ',')]
        wrt: Vec<String>,

        /// Run each layer again in the backward pass instead of keeping its values
        #[arg(long)]
        recompute: bool,
    },
}

#[derive(clap::Args, Debug)]
struct Common {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    adapter: AdapterArgs,

    /// Token sequences: safetensors or JSON
    #[arg(long, value_name = "FILE")]
    tokens: PathBuf,

    /// The safetensors file to write
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,

    /// What keys and values pass through
    #[arg(long, value_enum, value_name = "TYPE", default_value = "f32")]
    cache_type: CacheType,
}

pub fn run(args: &Args) -> Result<()> {
    let (common, arrays) = match &args.what {
        What::Logits(common) => (common, logits(common)?),
        What::Grads { common, wrt, recompute } => (common, grads(common, wrt, *recompute)?),
    };
    write_arrays(&common.out, &arrays)?;
    line(&format!("{} arrays in {}", arrays.len(), common.out.display()))
}

fn logits(args: &Common) -> Result<BTreeMap<String, Array>> {
    let sequences = read_sequences(&args.tokens)?;
    let model = args.model.load()?;
    let longest = sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
    let adapter = args.adapter.read(&model)?;
    let (mut engine, adapter) = engine(&model, args.cache_type, longest, adapter)?;
    let vocab = model.geometry().vocab;
    let mut arrays = BTreeMap::new();
    for (i, Sequence { tokens, .. }) in sequences.iter().enumerate() {
        let seq = engine.cache().open();
        let rows = Rows { seq, tokens, adapter, want: WantLogits::All };
        let logits = engine.forward(&[rows])?.pop().unwrap_or_default();
        engine.cache().close(seq);
        arrays.insert(format!("logits.{i}"), Array::f32(&[tokens.len(), vocab], &logits));
    }
    Ok(arrays)
}

fn grads(args: &Common, wrt: &[String], recompute: bool) -> Result<BTreeMap<String, Array>> {
    if wrt.is_empty() && args.adapter.adapter.is_none() {
        return Err(Error::invalid(
            "nothing to differentiate by; give an `--adapter`, or tensors with `--wrt`",
        ));
    }
    let sequences = read_sequences(&args.tokens)?;
    let examples = sequences.iter().enumerate().map(|(i, s)| example(i, s));
    let examples = examples.collect::<Result<Vec<Example>>>()?;
    let total: f64 = examples.iter().map(Example::weight).sum();
    if total == 0.0 {
        let file = args.tokens.display();
        return Err(Error::invalid(format!("{file}: no label says what to predict")));
    }
    let model = args.model.load()?;
    let parameters = Parameters {
        adapter: args.adapter.read(&model)?,
        weights: wrt.iter().map(|name| values(&model, name)).collect::<Result<_>>()?,
    };
    let rows = examples.iter().map(|e| e.tokens.len().saturating_sub(1)).max().unwrap_or(0);
    let recompute = if recompute { Recompute::PerLayer } else { Recompute::None };
    let config =
        GraphConfig { rows, cache: args.cache_type.dtype(), recompute, ..GraphConfig::default() };
    let mut gradients = Gradients::new(model.clone(), config)?;
    let mut loss = 0.0;
    let mut sums: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for example in examples {
        if example.weight() == 0.0 {
            continue;
        }
        let window = Window::from(vec![example]);
        let part = gradients.of(&window, total, &parameters, &())?;
        loss += part.loss;
        for (name, grad) in part.grads {
            match sums.get_mut(&name) {
                Some(sum) => sum.iter_mut().zip(grad).for_each(|(a, b)| *a += b),
                None => {
                    sums.insert(name, grad);
                }
            }
        }
    }
    let mut arrays = BTreeMap::from([("loss".to_string(), Array::scalar(loss))]);
    for (leaf, grad) in sums {
        let (name, shape) = named(&model, &parameters, &leaf)?;
        arrays.insert(name, Array::f32(&shape, &grad));
    }
    Ok(arrays)
}

/// A tensor of the model by name, with its values if it has any that can be moved. A quantized
/// one has none, and is refused where it would be differentiated.
fn values(model: &Model, name: &str) -> Result<(String, Vec<f32>)> {
    let Some(weight) = model.weights().get(name) else {
        let file = model.path().display();
        return Err(Error::invalid(format!("{file}: there is no tensor `{name}`")));
    };
    let values = if weight.dtype.is_float() { model.read_f32(name)? } else { Vec::new() };
    Ok((name.to_string(), values))
}

fn example(i: usize, sequence: &Sequence) -> Result<Example> {
    let Some(labels) = &sequence.labels else {
        return Err(Error::invalid(format!(
            "sequence {i} has no labels; a loss needs `labels.{i}`"
        )));
    };
    let mut weights = vec![0.0; sequence.tokens.len()];
    let each = sequence.tokens.iter().zip(labels).zip(&mut weights).enumerate().skip(1);
    for (t, ((token, label), weight)) in each {
        match label {
            None => {}
            Some(label) if label == token => *weight = 1.0,
            Some(label) => {
                return Err(Error::invalid(format!(
                    "sequence {i}: the label of token {t} is {label}, expected -100 or the token \
                     itself, {token}"
                )));
            }
        }
    }
    Ok(Example { tokens: sequence.tokens.clone(), weights })
}

/// What a gradient is called in the file, and its shape.
fn named(model: &Model, parameters: &Parameters, leaf: &str) -> Result<(String, Vec<usize>)> {
    let odd = || Error::fault(format!("a gradient came back under the unknown name `{leaf}`"));
    let Some(rest) = leaf.strip_prefix("0:") else {
        let weight = model.weights().get(leaf).ok_or_else(odd)?;
        return Ok((format!("grad.{leaf}"), weight.shape.dims().to_vec()));
    };
    let (target, part) = rest.rsplit_once('.').ok_or_else(odd)?;
    let pair = parameters.adapter.as_ref().and_then(|a| a.tensors.get(target)).ok_or_else(odd)?;
    let of = model.projections().get(target).ok_or_else(odd)?;
    match part {
        "lora_a" => Ok((format!("lora.grad.{target}.a"), of.a_shape(pair.rank))),
        "lora_b" => Ok((format!("lora.grad.{target}.b"), of.b_shape(pair.rank))),
        _ => Err(odd()),
    }
}
