//! Perplexity of a text, as llama.cpp's `llama-perplexity` measures it.

use crate::{AdapterId, Engine, Error, Result, ToScore, not_finite, score};

/// What a text is worth to a model.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Perplexity {
    /// `exp(nll)`.
    pub perplexity: f64,
    /// The mean negative log-likelihood of the scored tokens, in nats.
    pub nll: f64,
    /// The standard error of `nll`, in nats.
    pub error: f64,
    /// Windows evaluated.
    pub windows: usize,
    /// Tokens scored.
    pub scored: usize,
}

/// Measures `tokens` in windows of `ctx` tokens without overlap; the last, incomplete one is
/// left out. The first token of each window is replaced by `bos` where there is one, and its
/// tokens from `ctx / 2 + 1` on are scored. `on` hears after every window how many of how many
/// are done and the perplexity so far; when it returns false, the rest is left out.
///
/// # Errors
/// When `ctx` is below 4 or the text is shorter than a window, or the engine fails; a
/// log-probability that is not finite.
pub fn perplexity(
    engine: &mut Engine,
    tokens: &[u32],
    ctx: usize,
    bos: Option<u32>,
    adapter: Option<AdapterId>,
    on: &mut dyn FnMut(usize, usize, f64) -> bool,
) -> Result<Perplexity> {
    if ctx < 4 {
        return Err(Error::new(format!("the window is {ctx} tokens, expected at least 4")));
    }
    if tokens.len() < ctx {
        return Err(Error::new(format!(
            "the text has {} tokens, which does not fill one window of {ctx}; use a longer text or \
             a shorter window",
            tokens.len()
        )));
    }
    let wanted: Vec<bool> = (0..ctx).map(|i| i > ctx / 2).collect();
    let windows = tokens.chunks_exact(ctx);
    let count = windows.len();
    let (mut sum, mut squares, mut scored, mut done) = (0.0, 0.0, 0usize, 0);
    for window in windows {
        let mut fed = window.to_vec();
        if let (Some(bos), Some(first)) = (bos, fed.first_mut()) {
            *first = bos;
        }
        let item = ToScore { tokens: &fed, wanted: &wanted, adapter };
        let tokens = score(engine, &[item], ctx)?.pop().unwrap_or_default();
        for (token, at) in tokens.into_iter().zip(ctx / 2 + 1..) {
            if !token.logprob.is_finite() {
                return Err(not_finite(token, &format!("token {at} of window {}", done + 1)));
            }
            let nll = -f64::from(token.logprob);
            sum += nll;
            squares += nll * nll;
            scored += 1;
        }
        done += 1;
        if !on(done, count, (sum / scored as f64).exp()) {
            break;
        }
    }
    let nll = sum / scored as f64;
    let variance = (squares / scored as f64 - nll * nll).max(0.0);
    let error = (variance / (scored.max(2) - 1) as f64).sqrt();
    Ok(Perplexity { perplexity: nll.exp(), nll, error, windows: done, scored })
}
