//! From a prompt to text: the loop around [`Engine::forward`].

use std::time::{Duration, Instant};

use crate::{AdapterId, Engine, Error, Result, Rows, SeqId, WantLogits};

/// How to generate.
#[derive(Clone, PartialEq, Debug)]
pub struct GenerateConfig {
    /// Most new tokens.
    pub max_tokens: usize,
    /// The sampler chain.
    pub sampler: text::SamplerConfig,
    /// Seeds the sampler.
    pub seed: u64,
    /// Text that ends the answer.
    pub stops: Vec<String>,
    /// The adapter, if any.
    pub adapter: Option<AdapterId>,
}

/// Why a generation ended.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Finish {
    /// The model ended its turn, or a stop string came.
    Stop,
    /// The token limit, or the end of the context.
    Length,
    /// The caller asked for it.
    Cancelled,
}

impl Finish {
    /// The word APIs use: `stop`, `length`, `cancelled`.
    pub fn as_str(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Cancelled => "cancelled",
        }
    }
}

/// What came out.
#[derive(Clone, PartialEq, Debug)]
pub struct Generated {
    /// The text, stop strings left out.
    pub text: String,
    /// The tokens sampled, the one that ended it included.
    pub tokens: Vec<u32>,
    /// Per token, its log-probability under the sampler's distribution, in nats.
    pub logprobs: Vec<f32>,
    /// Why it ended.
    pub finish: Finish,
    /// From the start to the first token.
    pub first_token: Duration,
    /// From the first token to the end.
    pub rest: Duration,
}

/// Generates after `prompt`, which is appended to what `seq` holds. Every piece of text goes to
/// `on_text` as soon as it is certain; when that returns false the generation ends.
///
/// # Errors
/// When the prompt is empty or longer than the context, or the engine fails.
pub fn generate(
    engine: &mut Engine,
    seq: SeqId,
    prompt: &[u32],
    config: &GenerateConfig,
    on_text: &mut dyn FnMut(&str) -> bool,
) -> Result<Generated> {
    let model = engine.model().clone();
    let context = model.geometry().context;
    let mut sampler = text::Sampler::new(config.sampler.clone(), config.seed)?;
    let mut stream = text::TextStream::new(&config.stops)?;
    if prompt.is_empty() {
        return Err(Error::new("the prompt is empty; expected at least one token"));
    }
    let held = engine.cache().len(seq);
    if held + prompt.len() > context {
        return Err(Error::new(format!(
            "the prompt makes {} tokens, the model's context is {context}",
            held + prompt.len()
        )));
    }
    let start = Instant::now();
    let mut history = prompt.to_vec();
    let mut next = prompt.to_vec();
    let mut out = Generated {
        text: String::new(),
        tokens: Vec::new(),
        logprobs: Vec::new(),
        finish: Finish::Length,
        first_token: Duration::ZERO,
        rest: Duration::ZERO,
    };
    let mut first = None;
    let mut emit = |delta: text::Delta, text: &mut String| {
        text.push_str(&delta.text);
        (delta.stop.is_some(), delta.text.is_empty() || on_text(&delta.text))
    };
    while out.tokens.len() < config.max_tokens {
        if engine.cache().len(seq) + next.len() > context {
            break;
        }
        let rows = Rows { seq, tokens: &next, adapter: config.adapter, want: WantLogits::Last };
        let logits = engine.forward(&[rows])?.pop().unwrap_or_default();
        let sampled = sampler.sample(&logits, &history)?;
        first.get_or_insert_with(Instant::now);
        out.tokens.push(sampled.id);
        out.logprobs.push(sampled.logprob);
        history.push(sampled.id);
        next = vec![sampled.id];
        if model.tokenizer().is_eog(sampled.id) {
            out.finish = Finish::Stop;
            break;
        }
        let delta = stream.push(model.tokenizer().token_bytes(sampled.id, false)?);
        let (stopped, go_on) = emit(delta, &mut out.text);
        if stopped || !go_on {
            out.finish = if stopped { Finish::Stop } else { Finish::Cancelled };
            break;
        }
    }
    emit(stream.finish(), &mut out.text);
    let first = first.unwrap_or(start);
    out.first_token = first - start;
    out.rest = first.elapsed();
    Ok(out)
}
