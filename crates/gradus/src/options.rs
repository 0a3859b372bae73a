//! Options that several commands share, each defined once.

use std::borrow::Cow;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use graph::{DType, Device};
use model::{Adapter, AdapterId, Engine, EngineConfig, Model};
use text::{ChatTemplate, SpecialTokens};

use crate::error::{Error, Result};
pub use crate::reading::{DataArgs, ReadingArgs, RowRange};

/// Which model, and what runs it.
#[derive(Args, Debug, Clone)]
pub struct ModelArgs {
    /// A GGUF file, or a name of the catalogue (`gradus pull --list`)
    #[arg(short, long, value_name = "MODEL", default_value = hub::DEFAULT_MODEL)]
    pub model: String,

    #[command(flatten)]
    pub device: DeviceArgs,
}

/// What runs a model.
#[derive(Args, Debug, Clone, Default)]
pub struct DeviceArgs {
    /// Threads to compute with [default: all cores]
    ///
    /// Any number gives the same results, bit for bit. GRADUS_CPU forces a family of kernels.
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
}

/// An adapter on the model.
#[derive(Args, Debug, Clone, Default)]
pub struct AdapterArgs {
    /// A LoRA adapter: a GGUF file, as `gradus train` and llama.cpp write it, or a folder of PEFT
    #[arg(long, value_name = "ADAPTER")]
    pub adapter: Option<PathBuf>,
}

/// Where training runs are recorded.
#[derive(Args, Debug, Clone, Default)]
pub struct RunsArgs {
    /// Folder of the runs [default: `runs` under GRADUS_HOME]
    #[arg(long, value_name = "DIR", global = true)]
    pub run_dir: Option<PathBuf>,
}

impl RunsArgs {
    /// The folder; it need not be there.
    ///
    /// # Errors
    /// When the environment names no place for it.
    pub fn root(&self) -> Result<PathBuf> {
        match &self.run_dir {
            Some(folder) => Ok(folder.clone()),
            None => Ok(hub::home()?.join("runs")),
        }
    }
}

/// Which chat template.
#[derive(Args, Debug, Clone, Default)]
pub struct TemplateArgs {
    /// A built-in chat template instead of the model's, such as `plain` for a base model
    #[arg(long, value_name = "NAME")]
    pub template: Option<String>,
}

/// What keys and values are kept in.
#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub enum CacheType {
    /// 32-bit floats
    F32,
    /// 16-bit floats
    F16,
    /// 8-bit blocks of 32
    #[value(name = "q8_0")]
    Q8_0,
}

impl CacheType {
    /// The type in a graph.
    pub fn dtype(self) -> DType {
        match self {
            CacheType::F32 => DType::F32,
            CacheType::F16 => DType::F16,
            CacheType::Q8_0 => DType::Block(gguf::TensorType::Q8_0),
        }
    }

    /// As it is typed.
    pub fn name(self) -> &'static str {
        match self {
            CacheType::F32 => "f32",
            CacheType::F16 => "f16",
            CacheType::Q8_0 => "q8_0",
        }
    }
}

/// How the next token is chosen.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Sampling")]
pub struct SamplerArgs {
    /// Most tokens to generate
    #[arg(short = 'n', long = "max-tokens", value_name = "N", default_value_t = 256)]
    pub max_tokens: usize,

    /// Temperature; 0 always takes the most likely token
    #[arg(
        long = "temp",
        value_name = "T",
        default_value_t = defaults().temperature,
        allow_negative_numbers = true
    )]
    pub temperature: f32,

    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = defaults().top_k)]
    pub top_k: u32,

    /// Keep the most likely tokens up to this total probability
    #[arg(long, value_name = "P", default_value_t = defaults().top_p)]
    pub top_p: f32,

    /// Keep tokens at least this likely relative to the most likely one
    #[arg(long, value_name = "P", default_value_t = defaults().min_p)]
    pub min_p: f32,

    /// Locally typical sampling: keep up to this total probability; 1 keeps all
    #[arg(long, value_name = "P", default_value_t = defaults().typical_p)]
    pub typical_p: f32,

    /// Divide the logits of recent tokens by this; 1 leaves them
    #[arg(long, value_name = "X", default_value_t = defaults().repeat_penalty)]
    pub repeat_penalty: f32,

    /// Subtract this from the logits of recent tokens
    #[arg(
        long,
        value_name = "X",
        default_value_t = defaults().presence_penalty,
        allow_negative_numbers = true
    )]
    pub presence_penalty: f32,

    /// Subtract this from the logits of recent tokens for each time they occur
    #[arg(
        long,
        value_name = "X",
        default_value_t = defaults().frequency_penalty,
        allow_negative_numbers = true
    )]
    pub frequency_penalty: f32,

    /// How many tokens count as recent
    #[arg(long, value_name = "N", default_value_t = defaults().repeat_last_n)]
    pub repeat_last_n: u32,

    /// Add X to the logit of token ID, `-inf` bans it; may be repeated
    #[arg(long, value_name = "ID=X", value_parser = bias)]
    pub logit_bias: Vec<(u32, f32)>,

    /// Seed of the random choices; the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Text that ends the answer; may be repeated
    #[arg(long = "stop", value_name = "TEXT")]
    pub stops: Vec<String>,
}

fn defaults() -> text::SamplerConfig {
    text::SamplerConfig::default()
}

fn bias(text: &str) -> std::result::Result<(u32, f32), String> {
    let wrong = || format!("`{text}` is not of the form ID=X, such as 13=-1.5 or 13=-inf");
    let (id, bias) = text.split_once('=').ok_or_else(wrong)?;
    let id = id.trim().parse().map_err(|_| wrong())?;
    let bias = bias.trim().parse().map_err(|_| wrong())?;
    Ok((id, bias))
}

impl SamplerArgs {
    /// How to generate, with an adapter.
    pub fn config(&self, adapter: Option<AdapterId>) -> model::GenerateConfig {
        let sampler = text::SamplerConfig {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: self.typical_p,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repeat_last_n: self.repeat_last_n,
            logit_bias: self.logit_bias.iter().copied().collect(),
        };
        model::GenerateConfig {
            max_tokens: self.max_tokens,
            sampler,
            seed: self.seed,
            stops: self.stops.clone(),
            adapter,
        }
    }
}

impl DeviceArgs {
    /// How many threads, checked.
    pub fn count(&self) -> Result<usize> {
        match self.threads {
            None => Ok(model::thread_count()),
            Some(n @ 1..=256) => Ok(n),
            Some(n) => Err(Error::invalid(format!("`--threads` is {n}; expected 1 to 256"))),
        }
    }

    /// The processor as a device.
    pub fn open(&self) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(cpu::Cpu::new(self.count()?, None)?))
    }
}

impl ModelArgs {
    /// The model's file.
    pub fn path(&self) -> Result<PathBuf> {
        Ok(hub::resolve(&self.model)?)
    }

    /// Loads the model.
    pub fn load(&self) -> Result<Arc<Model>> {
        let path = self.path()?;
        Ok(Arc::new(Model::load(&path, self.device.open()?)?))
    }
}

impl TemplateArgs {
    /// The template to use with a model.
    ///
    /// # Errors
    /// When there is no built-in one of the name, or, without a name, the model has none.
    pub fn of<'m>(&self, model: &'m Model) -> Result<Cow<'m, ChatTemplate>> {
        if let Some(name) = &self.template {
            return Ok(Cow::Owned(ChatTemplate::builtin(
                name,
                SpecialTokens::of(model.tokenizer()),
            )?));
        }
        model.template().map(Cow::Borrowed).map_err(|e| {
            Error::invalid(format!(
                "{e}; name a built-in template, as in `--template plain`, or continue a text with \
                 `run --raw`"
            ))
        })
    }
}

impl TemplateArgs {
    /// The same for what may do without: why there is none, where the model has none and no other
    /// was named.
    ///
    /// # Errors
    /// When there is no built-in one of the name.
    pub fn if_any<'m>(
        &self,
        model: &'m Model,
    ) -> Result<std::result::Result<Cow<'m, ChatTemplate>, String>> {
        match self.of(model) {
            Err(e) if self.template.is_some() => Err(e),
            template => Ok(template.map_err(|e| e.message())),
        }
    }
}

impl AdapterArgs {
    /// The adapter, if one is given.
    pub fn read(&self, model: &Model) -> Result<Option<Adapter>> {
        Ok(self.adapter.as_ref().map(|path| Adapter::read(path, model)).transpose()?)
    }
}

/// Bytes, of so many MiB as `option` gives.
///
/// # Errors
/// There are no such numbers of bytes.
pub fn mib(option: &str, mib: u64) -> Result<u64> {
    mib.checked_mul(1 << 20).ok_or_else(|| {
        let most = u64::MAX >> 20;
        Error::invalid(format!("`{option}` is {mib} MiB; expected at most {most}"))
    })
}

/// Rows of a prompt that go through one graph.
pub const BATCH: usize = 512;

/// Positions of a cache where nothing else is said and nothing else follows from the work.
pub const CONTEXT: usize = 4096;

/// Checks a context length against a model.
///
/// # Errors
/// When it is 0 or more than the model was trained for.
pub fn check_context(ctx: usize, model: &Model) -> Result<usize> {
    let most = model.geometry().context;
    if ctx == 0 || ctx > most {
        return Err(Error::invalid(format!(
            "`--ctx` is {ctx}; expected 1 to {most}, the context the model was trained for"
        )));
    }
    Ok(ctx)
}

/// The most tokens to generate after a prompt, so that the cache does not run full. The last
/// token is never fed, so it needs no position.
///
/// # Errors
/// When the prompt alone does not fit.
pub fn room(wanted: usize, positions: usize, prompt: usize) -> Result<usize> {
    match positions.checked_sub(prompt) {
        Some(rest) => Ok(wanted.min(rest + 1)),
        None => Err(Error::invalid(format!(
            "the prompt has {prompt} tokens, the cache {positions} positions; use a larger `--ctx`"
        ))),
    }
}

/// How an engine for one sequence of so many positions is set up.
pub fn engine_config(cache: CacheType, positions: usize) -> EngineConfig {
    // The sequence's own state, the one after its prompt, and one on the way.
    EngineConfig { cache: cache.dtype(), positions, batch: BATCH, states: 3 }
}

/// An engine for one sequence of so many positions, with an adapter.
///
/// # Errors
/// When the cache type does not fit the model, or memory is out.
pub fn engine(
    model: &Arc<Model>,
    cache: CacheType,
    positions: usize,
    adapter: Option<Adapter>,
) -> Result<(Engine, Option<AdapterId>)> {
    let mut engine = Engine::new(model.clone(), engine_config(cache, positions))?;
    let id = adapter.map(|adapter| engine.attach(Arc::new(adapter)));
    Ok((engine, id))
}

/// The longest text a command reads, in bytes.
const LONGEST_TEXT: u64 = 64 << 20;

/// Reads a text file whole.
///
/// # Errors
/// When it cannot be read, is longer than 64 MiB or is not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    let file = std::fs::File::open(path).map_err(|e| Error::reading(path, e))?;
    text_of(file).map_err(|e| Error::reading(path, e))
}

/// Reads standard input whole.
///
/// # Errors
/// As [`read_text`].
pub fn read_stdin() -> Result<String> {
    text_of(std::io::stdin().lock())
        .map_err(|e| Error::invalid(format!("cannot read standard input: {e}")))
}

fn text_of(from: impl std::io::Read) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    from.take(LONGEST_TEXT + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LONGEST_TEXT {
        let why = format!("it is longer than {LONGEST_TEXT} bytes");
        return Err(std::io::Error::other(why));
    }
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        std::io::Error::other(format!("it is not UTF-8 text (byte {at})"))
    })
}
