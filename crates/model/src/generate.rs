//! From a prompt to text: the loop around [`Engine::forward`].

use std::time::{Duration, Instant};

use crate::{AdapterId, Engine, Error, Model, Result, Rows, SeqId, WantLogits};

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
    let mut answer = Answer::new(engine, seq, prompt, config)?;
    while answer.goes_on(engine) {
        let logits = engine.forward(&[answer.rows()])?.pop().unwrap_or_default();
        answer.take(engine.model(), &logits, on_text)?;
    }
    Ok(answer.end(on_text))
}

/// A prompt to be answered in a sequence of its own.
#[derive(Clone, PartialEq, Debug)]
pub struct Prompt {
    /// Its tokens, at least one.
    pub tokens: Vec<u32>,
    /// How to answer it.
    pub config: GenerateConfig,
}

/// Answers prompts: `at_once` of them at a time, fewer where the cache has no room for so many,
/// which does not change the answers. Each answer goes to `on_answer` with the place of its prompt
/// as soon as it is whole. `go_on` is asked before every round of tokens; when it returns false,
/// the answers under way are given up.
///
/// # Errors
/// A prompt that is empty or longer than the context or the cache, or the engine fails.
pub fn generate_all(
    engine: &mut Engine,
    prompts: &[Prompt],
    at_once: usize,
    go_on: &mut dyn FnMut() -> bool,
    on_answer: &mut dyn FnMut(usize, Generated),
) -> Result<()> {
    let mut running = Vec::new();
    let result = in_rounds(engine, prompts, at_once, &mut running, go_on, on_answer);
    running.iter().for_each(|(_, answer)| engine.cache().close(answer.seq));
    result
}

fn in_rounds<'a>(
    engine: &mut Engine,
    prompts: &'a [Prompt],
    at_once: usize,
    running: &mut Vec<(usize, Answer<'a>)>,
    go_on: &mut dyn FnMut() -> bool,
    on_answer: &mut dyn FnMut(usize, Generated),
) -> Result<()> {
    let mut waiting = prompts.iter().enumerate().peekable();
    loop {
        let whole = running.extract_if(.., |(_, answer)| !answer.goes_on(engine));
        for (index, answer) in whole.collect::<Vec<_>>() {
            engine.cache().close(answer.seq);
            on_answer(index, answer.end(&mut |_| true));
        }
        while let Some(&(index, prompt)) = waiting.peek()
            && (running.is_empty() || running.len() < at_once)
        {
            let seq = engine.cache().open();
            let answer = match Answer::new(engine, seq, &prompt.tokens, &prompt.config) {
                Ok(answer) => answer,
                Err(e) => {
                    engine.cache().close(seq);
                    return Err(e);
                }
            };
            let mut room: Vec<(SeqId, usize)> = running.iter().map(|(_, a)| a.room()).collect();
            room.push(answer.room());
            // One alone runs as far as there is room.
            if !running.is_empty() && !engine.can_take(&room) {
                engine.cache().close(answer.seq);
                break;
            }
            running.push((index, answer));
            waiting.next();
        }
        if running.is_empty() || !go_on() {
            return Ok(());
        }
        let mut going: Vec<&mut Answer<'_>> =
            running.iter_mut().map(|(_, answer)| answer).filter(|a| a.goes_on(engine)).collect();
        let rows: Vec<Rows<'_>> = going.iter().map(|answer| answer.rows()).collect();
        let logits = engine.forward(&rows)?;
        for (answer, logits) in going.iter_mut().zip(logits) {
            answer.take(engine.model(), &logits, &mut |_| true)?;
        }
    }
}

/// An answer under way.
struct Answer<'a> {
    seq: SeqId,
    config: &'a GenerateConfig,
    sampler: text::Sampler,
    stream: text::TextStream,
    /// The prompt and what was sampled.
    history: Vec<u32>,
    /// Of these, how many are in the cache.
    fed: usize,
    ended: bool,
    start: Instant,
    first: Option<Instant>,
    out: Generated,
}

impl<'a> Answer<'a> {
    fn new(
        engine: &mut Engine,
        seq: SeqId,
        prompt: &[u32],
        config: &'a GenerateConfig,
    ) -> Result<Answer<'a>> {
        if prompt.is_empty() {
            return Err(Error::new("the prompt is empty; expected at least one token"));
        }
        let context = engine.model().geometry().context;
        let tokens = engine.cache().len(seq) + prompt.len();
        if tokens > context {
            return Err(Error::new(format!(
                "the prompt makes {tokens} tokens, the model's context is {context}"
            )));
        }
        Ok(Answer {
            seq,
            config,
            sampler: text::Sampler::new(config.sampler.clone(), config.seed)?,
            stream: text::TextStream::new(&config.stops)?,
            history: prompt.to_vec(),
            fed: 0,
            ended: false,
            start: Instant::now(),
            first: None,
            out: Generated {
                text: String::new(),
                tokens: Vec::new(),
                logprobs: Vec::new(),
                finish: Finish::Length,
                first_token: Duration::ZERO,
                rest: Duration::ZERO,
            },
        })
    }

    /// Tokens that the cache lacks.
    fn pending(&self) -> &[u32] {
        self.history.get(self.fed..).unwrap_or(&[])
    }

    /// What is fed next.
    fn rows(&self) -> Rows<'_> {
        let Answer { seq, config, .. } = self;
        Rows { seq: *seq, tokens: self.pending(), adapter: config.adapter, want: WantLogits::Last }
    }

    /// Rows that are fed at most until the end; the last token never is.
    fn room(&self) -> (SeqId, usize) {
        let rest = self.config.max_tokens.saturating_sub(self.out.tokens.len());
        (self.seq, self.pending().len().saturating_add(rest.saturating_sub(1)))
    }

    fn goes_on(&self, engine: &mut Engine) -> bool {
        let context = engine.model().geometry().context;
        let fits = engine.cache().len(self.seq) + self.pending().len() <= context;
        !self.ended && self.out.tokens.len() < self.config.max_tokens && fits
    }

    /// Goes on from the logits after the rows that were fed.
    fn take(
        &mut self,
        model: &Model,
        logits: &[f32],
        on_text: &mut dyn FnMut(&str) -> bool,
    ) -> Result<()> {
        let sampled = self.sampler.sample(logits, &self.history)?;
        self.first.get_or_insert_with(Instant::now);
        self.out.tokens.push(sampled.id);
        self.out.logprobs.push(sampled.logprob);
        self.fed = self.history.len();
        self.history.push(sampled.id);
        self.ended = model.tokenizer().is_eog(sampled.id);
        if self.ended {
            self.out.finish = Finish::Stop;
            return Ok(());
        }
        let delta = self.stream.push(model.tokenizer().token_bytes(sampled.id, false)?);
        let stopped = delta.stop.is_some();
        if !self.say(&delta.text, on_text) {
            self.out.finish = Finish::Cancelled;
            self.ended = true;
        }
        if stopped {
            self.out.finish = Finish::Stop;
            self.ended = true;
        }
        Ok(())
    }

    fn say(&mut self, text: &str, on_text: &mut dyn FnMut(&str) -> bool) -> bool {
        self.out.text.push_str(text);
        text.is_empty() || on_text(text)
    }

    fn end(mut self, on_text: &mut dyn FnMut(&str) -> bool) -> Generated {
        let rest = self.stream.finish().text;
        self.say(&rest, on_text);
        let first = self.first.unwrap_or(self.start);
        self.out.first_token = first - self.start;
        self.out.rest = first.elapsed();
        self.out
    }
}
