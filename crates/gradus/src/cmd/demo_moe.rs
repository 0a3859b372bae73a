//! `gradus demo --moe`: a mixture of experts is served, trained and refused in one process.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gguf::TensorType;
use graph::DType;
use model::Model;
use model::toy::Toy;
use serde_json::{Value, json};
use serve::request::{self, Host};
use serve::{Ask, Options, Said, Server, State, TrainStatus};
use text::{Message, SamplerConfig};

use crate::error::{Error, Result};
use crate::output::line;

/// Conversations that stream all the time.
const STREAMS: usize = 4;

/// What one conversation, asked again and again, has seen.
struct Stream {
    /// The answers, all the same.
    answer: String,
    answers: usize,
    tokens: usize,
    longest_gap: Duration,
}

fn failed(what: impl Into<String>) -> Error {
    Error::fault(what)
}

/// Asks one question until it is told to stop; every answer must be the first one.
fn stream(server: Server, ask: Ask, stop: Arc<AtomicBool>) -> Result<Stream> {
    let mut seen =
        Stream { answer: String::new(), answers: 0, tokens: 0, longest_gap: Duration::ZERO };
    while !stop.load(Ordering::Relaxed) {
        let mut turn = server.ask(ask.clone())?;
        let (mut text, mut last) = (String::new(), None::<Instant>);
        loop {
            match turn.blocking_next() {
                Some(Said::Text(piece)) => {
                    let now = Instant::now();
                    if let Some(before) = last.replace(now) {
                        seen.longest_gap = seen.longest_gap.max(now - before);
                    }
                    text.push_str(&piece);
                }
                Some(Said::Done(done)) => {
                    seen.tokens += done.completion_tokens;
                    break;
                }
                Some(Said::Failed(e)) => return Err(e.into()),
                None => return Err(failed("a conversation was dropped")),
            }
        }
        if seen.answers > 0 && text != seen.answer {
            return Err(failed("a conversation's answer changed"));
        }
        seen.answer = text;
        seen.answers += 1;
    }
    Ok(seen)
}

/// The conversations of the bundled data as a request holds them.
fn examples(lines: &str, most: usize) -> Result<Vec<Value>> {
    let rows = lines.lines().take(most).map(serde_json::from_str);
    let rows: std::result::Result<Vec<Value>, _> = rows.collect();
    rows.map_err(|e| failed(format!("the bundled data are damaged: {e}")))
}

fn wait(server: &Server) -> Result<TrainStatus> {
    loop {
        let status = server.train_status();
        match (status.state, &status.error) {
            (State::Done, _) => return Ok(status),
            (State::Starting | State::Running, _) => std::thread::sleep(Duration::from_millis(5)),
            (_, Some(e)) => return Err(failed(e.message.clone())),
            (state, None) => return Err(failed(format!("the job ended as {}", json!(state)))),
        }
    }
}

/// Runs it, with its files in a folder.
///
/// # Errors
/// When anything is not as it is shown.
pub fn run(out: &Path, data: &str, device: Arc<dyn graph::Device>) -> Result<()> {
    let start = Instant::now();
    let mut toy = Toy::new("qwen35moe", TensorType::Q4K, 7);
    (toy.layers, toy.experts_used) = (4, 8);
    let path = out.join("toy-qwen35moe.gguf");
    toy.write(&path)?;
    let model = Arc::new(Model::load(&path, device)?);
    line(&format!(
        "{}: qwen35moe, {} layers, {} experts of which {} are used, Q4_K, random",
        path.display(),
        toy.layers,
        toy.experts,
        toy.experts_used
    ))?;
    let options = Options {
        name: "toy".into(),
        slots: STREAMS + 2,
        train_dir: Some(out.to_path_buf()),
        ..Options::default()
    };
    let server = Server::start(model.clone(), options)?;
    let host = Host {
        train_dir: Some(out.to_path_buf()),
        ..Host::new(model.clone(), "toy".into(), DType::F16)
    };
    let prompt = |text: &str| -> Result<Vec<u32>> {
        let messages = [Message::new("user", text)];
        Ok(text::encode_chat(model.tokenizer(), model.template()?, &messages, &[])?)
    };
    let ask = |name: &str, text: &str| -> Result<Ask> {
        Ok(Ask {
            tokens: prompt(text)?,
            model: name.into(),
            max_tokens: 64,
            sampler: SamplerConfig::greedy(),
            seed: 0,
            stops: Vec::new(),
        })
    };

    line(&format!("\n== {STREAMS} conversations stream, and go on until the end"))?;
    let stop = Arc::new(AtomicBool::new(false));
    let streams: Vec<JoinHandle<Result<Stream>>> = (0..STREAMS)
        .map(|i| {
            let (server, stop) = (server.clone(), stop.clone());
            let ask = ask("toy", &format!("Question number {i}?"))?;
            Ok(std::thread::spawn(move || stream(server, ask, stop)))
        })
        .collect::<Result<_>>()?;
    let shown = steps(&server, &host, data, &ask);
    stop.store(true, Ordering::Relaxed);
    let mut seen = Vec::new();
    for stream in streams {
        seen.push(stream.join().map_err(|_| failed("a conversation panicked"))??);
    }
    shown?;

    line("\n== What the conversations saw")?;
    let sum = |of: fn(&Stream) -> usize| seen.iter().map(of).sum::<usize>();
    let gap = seen.iter().map(|s| s.longest_gap).max().unwrap_or_default();
    line(&format!(
        "  {} answers of {} tokens, each conversation's the same every time; longest gap {} ms",
        sum(|s| s.answers),
        sum(|s| s.tokens),
        gap.as_millis()
    ))?;
    let panics = server.metrics().into_iter().find(|m| m.name == "gradus_panics_total");
    let panics = panics.map_or(0.0, |m| m.value);
    line(&format!("  {panics} panics, {:.1} s in all", start.elapsed().as_secs_f64()))?;
    server.stop(Duration::from_secs(1));
    if seen.iter().any(|s| s.answers < 2) || panics > 0.0 {
        return Err(failed("a conversation did not go on beside training"));
    }
    line("\nGo on with:")?;
    line(&format!("  gradus serve {} --train-dir {}", path.display(), out.display()))
}

/// What is done beside the conversations.
fn steps(
    server: &Server,
    host: &Host,
    data: &str,
    ask: &dyn Fn(&str, &str) -> Result<Ask>,
) -> Result<()> {
    let body = |value: Value| value.to_string().into_bytes();
    let wanted = || true;

    line("\n== POST /train: an adapter on the attention of layers before the router")?;
    let settings = json!({
        "out": "attention.gguf", "examples": examples(data, 8)?, "epochs": 2, "lr": 1e-3,
        "targets": "attn_q,attn_v", "window": 256, "share_ppm": 500_000,
    });
    server.train(request::train(&body(settings), host, &wanted)?)?;
    let status = wait(server)?;
    for epoch in &status.epochs {
        let held_out = epoch.eval_loss.map_or(String::new(), |l| format!(", held out {l:.3}"));
        line(&format!("  epoch {}: loss {:.3}{held_out}", epoch.epoch, epoch.train_loss))?;
    }
    line(&format!(
        "  done: {} steps, served as `{}`, generation {}",
        status.steps,
        status.alias.unwrap_or_default(),
        status.generation.unwrap_or_default()
    ))?;

    line("\n== POST /train: the quantized experts themselves")?;
    let settings = json!({
        "out": "experts.gguf", "examples": examples(data, 8)?, "train_weights": "ffn_down_exps",
    });
    match server.train(request::train(&body(settings), host, &wanted)?) {
        Ok(_) => return Err(failed("a quantized stack of experts was not refused")),
        Err(e) => {
            let refusal = e.refusal.as_ref().and_then(|r| r.operand.as_ref());
            if !refusal.is_some_and(|operand| operand.contains("ffn_down_exps.weight")) {
                return Err(failed(format!("the refusal does not name the operand: {e}")));
            }
            line(&format!("  refused, {}: {e}", e.status()))?;
        }
    }

    line("\n== POST /learn, then /learn/promote")?;
    let settings = json!({
        "alias": "halden", "examples": examples(data, 4)?, "epochs": 8, "lr": 2e-3,
        "targets": "all", "window": 256, "share_ppm": 500_000,
    });
    let (job, _) =
        request::learn(&body(settings), host, &|alias| server.targets_of(alias), &wanted)?;
    let learned = server.learn(job)?;
    line(&format!(
        "  learned in {} steps: loss {:.3} before, {:.3} after; served: nothing yet",
        learned.steps, learned.loss_before, learned.loss_after
    ))?;
    if learned.loss_after >= learned.loss_before {
        return Err(failed("nothing was learned"));
    }
    let say = |name: &str| -> Result<String> {
        let (mut turn, mut text) =
            (server.ask(ask(name, "Who builds the Halden 7?")?)?, String::new());
        while let Some(said) = turn.blocking_next() {
            match said {
                Said::Text(piece) => text.push_str(&piece),
                Said::Done(_) => {}
                Said::Failed(e) => return Err(e.into()),
            }
        }
        Ok(text)
    };
    if server.ask(ask("halden", "?")?).is_ok() {
        return Err(failed("what was learned is served before it was promoted"));
    }
    let number = server.promote("halden")?;
    let (base, promoted) = (say("toy")?, say("halden")?);
    line(&format!("  promoted: `halden`, generation {number}, is served"))?;
    if base == promoted {
        return Err(failed("the promoted adapter changes nothing"));
    }
    Ok(())
}
