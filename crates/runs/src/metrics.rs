//! `metrics.jsonl`: one JSON object a line, one line a step or evaluation.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{Context, Error, Result};

/// Bytes a line may have; what this crate writes has some 200.
const LINE: u64 = 1 << 16;

/// One optimizer step.
#[derive(Copy, Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Counted from 1.
    pub step: u64,
    /// The pass over the data it is of, from 1.
    #[serde(default)]
    pub epoch: u64,
    /// Mean loss per weight of the step's tokens before it moved, in nats.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Norm of the gradient before clipping.
    #[serde(default, deserialize_with = "number")]
    pub grad_norm: f64,
    /// Learning rate.
    #[serde(default)]
    pub lr: f32,
    /// Tokens the step read.
    #[serde(default)]
    pub tokens: u64,
    /// Seconds the step took.
    #[serde(default, deserialize_with = "number")]
    pub seconds: f64,
    /// Bytes of memory the process had after it, where the system tells.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
}

impl Step {
    /// Tokens per second; 0 of a step that took no time.
    pub fn tokens_per_s(&self) -> f64 {
        rate(self.tokens, self.seconds)
    }
}

/// `tokens / seconds`, 0 where no time has passed.
pub(crate) fn rate(tokens: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}

/// One evaluation on data that was held out.
#[derive(Copy, Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// The step it comes after; 0 is before the first.
    pub step: u64,
    /// Mean loss per weight, in nats.
    #[serde(rename = "eval_loss", deserialize_with = "number")]
    pub loss: f64,
}

/// JSON has no number that is not finite; those are written as `null`.
fn number<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

/// A line of the file.
#[derive(Copy, Clone, Debug, PartialEq)]
pub(crate) enum Line {
    Step(Step),
    Evaluation(Evaluation),
}

#[derive(Serialize)]
struct StepLine<'a> {
    #[serde(flatten)]
    step: &'a Step,
    tokens_per_s: f64,
}

impl Line {
    fn step(&self) -> u64 {
        match self {
            Line::Step(step) => step.step,
            Line::Evaluation(evaluation) => evaluation.step,
        }
    }

    /// The bytes of the line, its end included.
    pub(crate) fn bytes(&self) -> serde_json::Result<Vec<u8>> {
        let mut bytes = match self {
            Line::Step(step) => {
                let tokens_per_s = step.tokens_per_s();
                serde_json::to_vec(&StepLine { step, tokens_per_s })?
            }
            Line::Evaluation(evaluation) => serde_json::to_vec(evaluation)?,
        };
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// `None` for a kind of line that is not known here, such as a later version may write.
    fn parse(bytes: &[u8]) -> serde_json::Result<Option<Line>> {
        let value: serde_json::Value = serde_json::from_slice(bytes)?;
        Ok(if value.get("eval_loss").is_some() {
            Some(Line::Evaluation(serde_json::from_value(value)?))
        } else if value.get("loss").is_some() {
            Some(Line::Step(serde_json::from_value(value)?))
        } else {
            None
        })
    }
}

/// Calls `each` for every line with the place of its first byte, until it says false. A line counts
/// once its end is there: what a killed process left of the last one is passed over. Returns
/// the place where the read lines end.
fn scan(path: &Path, each: &mut dyn FnMut(u64, Line) -> bool) -> Result<u64> {
    let mut file = BufReader::new(File::open(path).during("open", path)?);
    let (mut at, mut bytes) = (0u64, Vec::new());
    for number in 1u64.. {
        bytes.clear();
        let read = file.by_ref().take(LINE).read_until(b'\n', &mut bytes).during("read", path)?;
        if bytes.last() != Some(&b'\n') {
            if read as u64 == LINE {
                let reason = format!("line {number} is longer than {LINE} bytes");
                return Err(Error::damaged(path, reason));
            }
            break;
        }
        match Line::parse(&bytes) {
            Ok(Some(line)) if !each(at, line) => break,
            Ok(_) => at += read as u64,
            Err(e) => {
                let reason = format!("line {number} is no step and no evaluation: {e}");
                return Err(Error::damaged(path, reason));
            }
        }
    }
    Ok(at)
}

/// Reads every whole line.
pub(crate) fn read(path: &Path, each: &mut dyn FnMut(Line)) -> Result<()> {
    scan(path, &mut |_, line| {
        each(line);
        true
    })?;
    Ok(())
}

/// Cuts the file before the first line of a step after `step`, and what is torn; reads what stays.
pub(crate) fn cut(path: &Path, step: u64, each: &mut dyn FnMut(Line)) -> Result<()> {
    let end = scan(path, &mut |_, line| {
        let stays = line.step() <= step;
        if stays {
            each(line);
        }
        stays
    })?;
    let file = OpenOptions::new().write(true).open(path).during("open", path)?;
    file.set_len(end).and_then(|()| file.sync_all()).during("cut", path)
}

/// Opens the file to append to.
pub(crate) fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}
