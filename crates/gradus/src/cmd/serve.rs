//! `gradus serve`.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use model::Model;
use serve::http::{Http, Limits};
use serve::request::{Host, names};
use serve::{Options, Server};
use text::{ChatTemplate, SpecialTokens};

use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::options::{CacheType, ModelArgs, TemplateArgs};
use crate::output::{line, note};

/// How often signals are looked for.
const LOOK: Duration = Duration::from_millis(50);

/// Serve a model over HTTP, and train adapters on it meanwhile
///
/// Answers the requests of OpenAI's interface for chats and completions, streamed or whole. With
/// --train-dir it also takes training jobs: they run between the batches of answers, and their
/// adapters are served as soon as they are done. docs/serve.md describes the interface.
///
/// It listens before the model is loaded: /health answers at once, /ready when requests are taken.
/// Ctrl-C, SIGTERM or the end of its terminal ends it; answers on their way get the time that
/// --grace gives them. There is no access control: whoever reaches the address may use all of it.
#[derive(clap::Args, Debug, Clone)]
#[command(after_help = "\
Examples:
  gradus serve                                        the default model, on port 8080
  gradus serve my.gguf --train-dir adapters           with training
  gradus serve --adapter facts=facts.gguf             ask for the model `facts` to use it
  curl localhost:8080/v1/chat/completions -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}'")]
pub struct Args {
    /// As --model
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    positional: Option<String>,

    #[command(flatten)]
    model: ModelArgs,

    /// Address to listen at; 0.0.0.0 for all of the machine's
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,

    /// Port to listen at; 0 takes one that is free
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,

    /// What requests call the model [default: its name or its file's]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    #[command(flatten)]
    template: TemplateArgs,

    /// An adapter to serve from the start, a GGUF file or a folder of PEFT, under an alias; may be
    /// repeated
    #[arg(long = "adapter", value_name = "ALIAS=ADAPTER", value_parser = adapter)]
    adapters: Vec<(String, PathBuf)>,

    /// Folder that training writes to and adapters are loaded from, made where there is none; without
    /// it both are off
    #[arg(long, value_name = "DIR")]
    train_dir: Option<PathBuf>,

    /// Answers computed at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    slots: usize,

    /// Answers that may wait; further requests are told to come again
    #[arg(long, value_name = "N", default_value_t = 64)]
    queue: usize,

    /// Positions of the cache, which all answers share
    #[arg(short, long, alias = "context", value_name = "N", default_value_t = 8192)]
    ctx: usize,

    /// What keys and values are kept in
    #[arg(long, value_enum, value_name = "TYPE", default_value = "f16")]
    cache_type: CacheType,

    /// Rows of prompts between two tokens of the answers beside them
    #[arg(long, value_name = "ROWS", default_value_t = 128)]
    prompt_chunk: usize,

    /// Seconds that answers get to end when the server is stopped
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    grace: u64,
}

fn adapter(text: &str) -> std::result::Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((alias, file)) if !alias.is_empty() && !file.is_empty() => {
            Ok((alias.into(), file.into()))
        }
        _ => Err(format!("`{text}` is not of the form ALIAS=FILE, such as facts=facts.gguf")),
    }
}

/// What a model is called: a name of the catalogue as it is, a file without its ending.
fn name_of(model: &str) -> String {
    let path = Path::new(model);
    let is_gguf = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    let name = if is_gguf { path.file_stem() } else { path.file_name() };
    name.map_or_else(|| model.to_string(), |n| n.to_string_lossy().into_owned())
}

impl From<serve::Error> for Error {
    fn from(e: serve::Error) -> Error {
        Error::Failed { code: e.code.exit_code(), message: e.message }
    }
}

pub fn run(args: &Args) -> Result<()> {
    let mut model = args.model.clone();
    if let Some(name) = &args.positional {
        model.model.clone_from(name);
    }
    // Says what is wrong before anything listens.
    model.path()?;
    model.device.count()?;
    let train_dir = args.train_dir.as_deref().map(train_dir).transpose()?;
    // Two servers would take up each other's jobs.
    let _ours = match &train_dir {
        Some(dir) => claim(dir)?,
        None => None,
    };
    let name = args.name.clone().unwrap_or_else(|| name_of(&model.model));
    for (alias, _) in &args.adapters {
        names::check_alias("--adapter", alias, &name)?;
    }

    let address = SocketAddr::new(args.host, args.port);
    let interrupt = Interrupt::listen_for_end();
    let listener = TcpListener::bind(address)
        .map_err(|e| Error::invalid(format!("cannot listen at {address}: {e}")))?;
    let http = Http::start(listener, Limits::default())
        .map_err(|e| Error::fault(format!("cannot serve at {address}: {e}")))?;
    line(&format!("listening on http://{}", http.address()))?;

    let served = start(args, model.load()?, name, train_dir)?;
    let (server, host) = &served;
    note(&format!(
        "serving {} at http://{}; training is {}",
        host.name,
        http.address(),
        match &host.train_dir {
            Some(dir) => format!("on, in {}", dir.display()),
            None => "off".into(),
        }
    ));
    // Its place is taken before anybody can ask for another; it is read beside the answers.
    serve::take_up(server, host, |job| {
        note(&match job.outcome {
            Ok(step) => format!("the job `{}` goes on from step {step}", job.name),
            Err(e) => format!("the job `{}` does not go on: {}", job.name, e.message),
        });
    })?;
    http.serve(server.clone(), host.clone());
    while !interrupt.asked() {
        std::thread::sleep(LOOK);
    }
    note("stopping; once more to stop at once");
    let trains = server.train_status().is_active();
    http.stop(Duration::from_secs(args.grace));
    if let (true, Some(failure)) = (trains, server.train_status().error) {
        note(&format!("the job that was under way: {}", failure.message));
    }
    Ok(())
}

/// Takes a training folder for this process; none where it takes no files, and so no jobs.
fn claim(folder: &Path) -> Result<Option<files::Lock>> {
    match files::Lock::take(&folder.join(".gradus-serve.lock")) {
        Ok(Some(lock)) => Ok(Some(lock)),
        Ok(None) => Err(Error::invalid(format!(
            "another server has `--train-dir` {}; give each a folder of its own",
            folder.display()
        ))),
        Err(_) => Ok(None),
    }
}

/// The training folder, which is made where there is none: it alone, since what it is to lie in may
/// be a slip.
fn train_dir(path: &Path) -> Result<PathBuf> {
    let failed =
        |e: std::io::Error| Error::invalid(format!("`--train-dir` {}: {e}", path.display()));
    match std::fs::create_dir(path) {
        Ok(()) => note(&format!("made the folder {}", path.display())),
        Err(_) if path.exists() => {}
        Err(e) => return Err(failed(e)),
    }
    match path.canonicalize() {
        Ok(path) if path.is_dir() => Ok(path),
        Ok(_) => Err(Error::invalid(format!("`--train-dir` {} is no folder", path.display()))),
        Err(e) => Err(failed(e)),
    }
}

fn start(
    args: &Args,
    model: Arc<Model>,
    name: String,
    train_dir: Option<PathBuf>,
) -> Result<(Server, Host)> {
    let cache = args.cache_type.dtype();
    let mut host = Host::new(model.clone(), name.clone(), cache);
    host.train_dir.clone_from(&train_dir);
    if let Some(template) = &args.template.template {
        let tokens = SpecialTokens::of(model.tokenizer());
        host.template = Ok(ChatTemplate::builtin(template, tokens)?);
    }
    if let Err(why) = &host.template {
        note(&format!("there will be no chat: {why}"));
    }
    let options = Options {
        name,
        slots: args.slots,
        queue: args.queue,
        cache,
        positions: args.ctx,
        prompt_chunk: args.prompt_chunk,
        // Now, while there is nobody to wait for it.
        rates: train_dir
            .as_ref()
            .map(|_| train::Rates::measure(model.device().as_ref()))
            .transpose()?,
        train_dir,
    };
    let server = Server::start(model, options)?;
    for (alias, file) in &args.adapters {
        server.load_adapter(alias, file)?;
    }
    Ok((server, host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_called_by_its_name_or_its_files() {
        assert_eq!(name_of("smollm2-135m-instruct"), "smollm2-135m-instruct");
        assert_eq!(name_of("qwen2.5-coder"), "qwen2.5-coder");
        assert_eq!(name_of("/models/My-Model.Q4_1.gguf"), "My-Model.Q4_1");
        assert!(adapter("facts").is_err() && adapter("=x").is_err() && adapter("x=").is_err());
        assert_eq!(adapter("a=b=c").unwrap(), ("a".into(), "b=c".into()));
    }
}
