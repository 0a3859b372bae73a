//! What a model makes of tokens that are there already.

use crate::{AdapterId, Engine, Error, Result, Rows, SeqId, WantLogits};

/// A sequence to be scored.
#[derive(Copy, Clone, Debug)]
pub struct ToScore<'a> {
    /// Its tokens.
    pub tokens: &'a [u32],
    /// Per token whether it is scored, as predicted from those before it; the first never is.
    pub wanted: &'a [bool],
    /// The adapter, if any.
    pub adapter: Option<AdapterId>,
}

/// A token that was scored.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Scored {
    /// Its log-probability, in nats, as the loss of training has it.
    pub logprob: f32,
    /// Whether it is the most likely one, the lowest id among equals: what a greedy sampler takes.
    pub top: bool,
}

/// That a score is not finite, of what it is.
pub fn not_finite(token: Scored, of: &str) -> Error {
    Error::NotFinite(format!(
        "the log-probability of {of} is {}, which is not finite: neither are some of the numbers \
         before it, for which weights or an adapter that are damaged or too large are the cause",
        token.logprob
    ))
}

/// Bytes of logits held at a time.
const LOGIT_BYTES: usize = 64 << 20;

/// A sequence being scored.
struct Running<'a> {
    index: usize,
    seq: SeqId,
    item: ToScore<'a>,
    /// Tokens that have run.
    done: usize,
}

/// Scores sequences: as many at a time as make `batch` rows and fit the cache, which does not
/// change their scores. Per sequence, its scored tokens in order.
///
/// # Errors
/// A sequence that the cache has no room for, or the engine fails.
pub fn score(engine: &mut Engine, items: &[ToScore<'_>], batch: usize) -> Result<Vec<Vec<Scored>>> {
    let mut out: Vec<Vec<Scored>> = items.iter().map(|_| Vec::new()).collect();
    let mut waiting = items.iter().copied().enumerate().peekable();
    while waiting.peek().is_some() {
        let mut group: Vec<Running<'_>> = Vec::new();
        let mut room = Vec::new();
        let mut rows = 0;
        while let Some(&(index, item)) = waiting.peek() {
            let seq = engine.cache().open();
            rows += item.tokens.len();
            room.push((seq, item.tokens.len()));
            if !group.is_empty() && (rows > batch || !engine.can_take(&room)) {
                engine.cache().close(seq);
                break;
            }
            group.push(Running { index, seq, item, done: 0 });
            waiting.next();
        }
        let result = together(engine, &mut group, &mut out);
        group.iter().for_each(|running| engine.cache().close(running.seq));
        result?;
    }
    Ok(out)
}

/// Runs a group, in rounds: of each sequence the rows up to the next that is scored, or a piece of
/// those that are.
fn together(engine: &mut Engine, group: &mut [Running<'_>], out: &mut [Vec<Scored>]) -> Result<()> {
    let vocab = engine.model().geometry().vocab;
    let most = (LOGIT_BYTES / (vocab * 4)).max(1);
    loop {
        let mut batch = Vec::new();
        let mut labels: Vec<(usize, Vec<u32>)> = Vec::new();
        let mut logits = 0;
        for running in group.iter_mut() {
            let ToScore { tokens, wanted, adapter } = running.item;
            // Row `i` predicts token `i + 1`; nothing is fed after the last that is scored.
            let is_wanted = |row: usize| wanted.get(row + 1).copied().unwrap_or(false);
            let rows = (0..tokens.len()).rev().find(|&row| is_wanted(row)).map_or(0, |row| row + 1);
            let start = running.done;
            if start >= rows {
                continue;
            }
            let scored = is_wanted(start);
            let mut end = (start..rows).find(|&row| is_wanted(row) != scored).unwrap_or(rows);
            if scored {
                end = end.min(start + most - logits);
                if end == start {
                    continue;
                }
                logits += end - start;
            }
            let (Some(fed), true) = (tokens.get(start..end), end <= tokens.len()) else {
                return Err(Error::new("a sequence to be scored is shorter than it says"));
            };
            let want = if scored { WantLogits::All } else { WantLogits::None };
            batch.push(Rows { seq: running.seq, tokens: fed, adapter, want });
            labels.push(match scored {
                true => (running.index, tokens.get(start + 1..=end).unwrap_or_default().to_vec()),
                false => (running.index, Vec::new()),
            });
            running.done = end;
        }
        if batch.is_empty() {
            return Ok(());
        }
        let all = engine.forward(&batch)?;
        for ((index, labels), logits) in labels.into_iter().zip(all) {
            let logprobs = engine.log_probs(&logits, &labels)?;
            let rows = logits.chunks_exact(vocab);
            let scored = labels.iter().zip(logprobs).zip(rows);
            let scored =
                scored.map(|((&label, logprob), row)| Scored { logprob, top: is_top(row, label) });
            if let Some(out) = out.get_mut(index) {
                out.extend(scored);
            }
        }
    }
}

fn is_top(row: &[f32], label: u32) -> bool {
    let label = label as usize;
    let Some(&mine) = row.get(label) else { return false };
    row.iter().enumerate().all(|(i, &other)| mine > other || (mine == other && label <= i))
}
