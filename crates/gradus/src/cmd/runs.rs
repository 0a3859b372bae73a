//! `gradus runs`.

use std::io::BufRead;
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use runs::{Comparison, Evaluation, Listed, Run, Step, plain};
use serde_json::{Value, json};

use crate::data::write_file;
use crate::error::{Error, Result};
use crate::options::RunsArgs;
use crate::output::{bytes, count, duration, json, line, note, note_raw};

/// List training runs, and look at, compare and remove them
///
/// Every run of `gradus train` has a folder of its own, under GRADUS_HOME unless --run-dir names
/// another place (jobs of a server: `runs` in its --train-dir): its settings, what was measured (for people, for
/// scripts and for TensorBoard), a curve and a report. docs/runs.md describes them.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus runs                           the newest first
  gradus runs show facts-2
  gradus runs compare facts facts-2 --html both.html
  gradus runs rm facts-2
  tensorboard --logdir ~/.local/share/gradus/runs")]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    place: RunsArgs,

    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand, Debug)]
enum Command {
    Show(Show),
    Compare(Compare),
    Rm(Rm),
}

/// Show a run: its curve, what it came to, its settings
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus runs show              the newest run
  gradus runs show facts-2 --json")]
struct Show {
    /// Name of the run [default: the newest]
    #[arg(value_name = "NAME")]
    name: Option<String>,
}

/// Compare runs: the settings that differ, and losses in steps that all of them took
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus runs compare facts facts-2
  gradus runs compare facts facts-2 facts-3 --html three.html")]
struct Compare {
    /// Names of the runs, 2 to 8
    #[arg(value_name = "NAME", num_args = 2..=8, required = true)]
    names: Vec<String>,

    /// A page to write with the curves over each other
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Remove runs with all that is in their folders
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus runs rm facts-2
  gradus runs rm facts facts-2 --yes")]
struct Rm {
    /// Names of the runs
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,

    /// Do not ask
    #[arg(short, long)]
    yes: bool,
}

pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        None => list(args),
        Some(Command::Show(show)) => self::show(args, show),
        Some(Command::Compare(compare)) => self::compare(args, compare),
        Some(Command::Rm(rm)) => remove(args, rm),
    }
}

/// Text of a file as a terminal may be given it.
fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn loss(value: Option<f64>) -> String {
    value.map_or("-".into(), |loss| format!("{loss:.4}"))
}

/// Prints rows as columns.
fn table(rows: &[Vec<String>]) -> Result<()> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |at: usize| {
        rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..columns).map(|at| width(at).unwrap_or(0)).collect();
    for row in rows {
        let mut out = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            out += &format!("{cell:<width$}  ");
        }
        line(out.trim_end())?;
    }
    Ok(())
}

fn steps(run: &Run) -> String {
    let done = run.history.last.map_or(0, |last| last.step);
    match &run.record.planned {
        Some(planned) => format!("{done}/{}", planned.steps),
        None => done.to_string(),
    }
}

fn summary(run: &Run) -> Value {
    let (history, record) = (&run.history, &run.record);
    let of = |step: Option<Step>| step.map(|step| step.loss);
    let held = |evaluation: Option<Evaluation>| evaluation.map(|evaluation| evaluation.loss);
    json!({
        "name": run.name,
        "path": run.path.display().to_string(),
        "state": record.end.state.name(),
        "message": record.end.message,
        "model": record.info.model.name,
        "steps": history.last.map_or(0, |last| last.step),
        "steps_planned": record.planned.as_ref().map(|planned| planned.steps),
        "first_loss": of(history.first),
        "last_loss": of(history.last),
        "best_loss": of(history.best),
        "best_step": history.best.map(|best| best.step),
        "eval_loss": held(history.evaluation),
        "best_eval_loss": held(history.best_evaluation),
        "tokens": history.tokens,
        "seconds": history.seconds,
        "tokens_per_s": history.tokens_per_s(),
        "peak_bytes": record.end.peak_bytes.or(history.peak_bytes),
        "started": record.started.to_string(),
        "ended": record.ended.map(|at| at.to_string()),
    })
}

fn list(args: &Args) -> Result<()> {
    let root = args.place.root()?;
    let found = runs::list(&root)?;
    if args.json {
        let entry = |listed: &Listed| match &listed.run {
            Ok(run) => summary(run),
            Err(e) => json!({
                "name": listed.name,
                "path": listed.path.display().to_string(),
                "state": "damaged",
                "message": e.to_string(),
            }),
        };
        return json(&found.iter().map(entry).collect());
    }
    if found.is_empty() {
        note(&format!("no runs in {}", root.display()));
        return Ok(());
    }
    let titles =
        ["run", "state", "model", "steps", "first", "last", "best", "eval", "tokens/s", "started"];
    let mut rows = vec![titles.map(String::from).to_vec()];
    let mut damaged = Vec::new();
    for Listed { name, run, .. } in &found {
        let Ok(run) = run else {
            damaged.extend(run.as_ref().err().map(|e| (name, e)));
            continue;
        };
        let history = &run.history;
        rows.push(vec![
            shown(name),
            run.record.end.state.name().into(),
            shown(&run.record.info.model.name),
            steps(run),
            loss(history.first.map(|step| step.loss)),
            loss(history.last.map(|step| step.loss)),
            loss(history.best.map(|step| step.loss)),
            loss(history.evaluation.map(|evaluation| evaluation.loss)),
            format!("{:.1}", history.tokens_per_s()),
            runs::local_time(run.record.started),
        ]);
    }
    if rows.len() > 1 {
        table(&rows)?;
    }
    for (name, e) in damaged {
        line(&format!("{}  damaged: {}", shown(name), shown(&e.to_string())))?;
    }
    Ok(())
}

fn show(args: &Args, show: &Show) -> Result<()> {
    let root = args.place.root()?;
    let run = match &show.name {
        Some(name) => runs::read(&runs::find(&root, name)?)?,
        None => {
            let newest = runs::list(&root)?.into_iter().find_map(|listed| listed.run.ok());
            newest.ok_or_else(|| {
                Error::invalid(format!("there is no run in {} to show", root.display()))
            })?
        }
    };
    let (record, history) = (&run.record, &run.history);
    if args.json {
        let record = serde_json::to_value(record).map_err(|e| Error::fault(e.to_string()))?;
        return json(&json!({ "summary": summary(&run), "record": record }));
    }
    let state = record.end.state.name();
    line(&format!("{}  {state}, started {}", shown(&run.name), runs::local_time(record.started)))?;
    for text in [&record.end.message, &record.unrecorded].into_iter().flatten() {
        line(&format!("  {}", shown(text)))?;
    }
    let mut rows = Vec::new();
    let mut row = |what: &str, says: String| rows.push(vec![format!("  {what}"), says]);
    if let (Some(first), Some(last)) = (history.first, history.last) {
        let (first, last, curve) = (first.loss, last.loss, history.loss.sparkline(48));
        row("loss", format!("{first:.4} {curve} {last:.4}"));
    }
    if let Some(best) = history.best {
        row("", format!("lowest {:.4} in step {}", best.loss, best.step));
    }
    if let (Some(last), Some(best)) = (history.evaluation, history.best_evaluation) {
        let curve = history.evaluations.sparkline(48);
        row("held out", format!("{curve} {:.4} after step {}", last.loss, last.step));
        row("", format!("lowest {:.4} after step {}", best.loss, best.step));
    }
    row("steps", steps(&run));
    row("tokens", format!("{}, {:.1} a second", count(history.tokens), history.tokens_per_s()));
    let time = Duration::try_from_secs_f64(history.seconds).unwrap_or_default();
    row("time", duration(time));
    if let Some(planned) = &record.planned {
        row("memory", format!("{} planned", bytes(planned.bytes())));
    }
    if let Some(peak) = record.end.peak_bytes.or(history.peak_bytes) {
        row("", format!("{} at most", bytes(peak)));
    }
    if let Some((moved, total)) = record.end.moved {
        row("moved", format!("{moved} of {total} tensors"));
    }
    row("model", shown(&record.info.model.name));
    let machine = &record.info.machine;
    row("machine", format!("{} kernels, {} threads", shown(&machine.kernels), machine.threads));
    for data in &record.info.data {
        let facts: Vec<String> =
            data.facts.iter().map(|(k, n)| format!("{} {}", count(*n), shown(k))).collect();
        row("data", format!("{} ({}) {}", shown(&data.file), shown(&data.role), facts.join(", ")));
    }
    for file in &record.info.outputs {
        row("writes", shown(file));
    }
    row("folder", run.path.display().to_string());
    table(&rows)?;
    line("settings")?;
    let setting =
        |(key, value): (&String, &Value)| vec![format!("  {}", shown(key)), shown(&plain(value))];
    table(&record.info.settings.iter().map(setting).collect::<Vec<_>>())
}

fn compare(args: &Args, compare: &Compare) -> Result<()> {
    let root = args.place.root()?;
    let mut found = Vec::new();
    for name in &compare.names {
        found.push(runs::read(&runs::find(&root, name)?)?);
    }
    let compared = Comparison::of(&found)?;
    if let Some(path) = &compare.html {
        write_file(path, runs::comparison(path, &found, &compared)?.as_bytes())?;
    }
    if args.json {
        let losses = |table: &[(u64, Vec<f64>)]| -> Vec<Value> {
            table.iter().map(|(step, losses)| json!({ "step": step, "losses": losses })).collect()
        };
        let differences: serde_json::Map<String, Value> =
            compared.differences.iter().map(|(key, values)| (key.clone(), json!(values))).collect();
        return json(&json!({
            "runs": found.iter().map(summary).collect::<Vec<_>>(),
            "differences": differences,
            "losses": losses(&compared.losses),
            "eval_losses": losses(&compared.evaluations),
        }));
    }
    let head = |first: &str| {
        let names = found.iter().map(|run| shown(&run.name));
        std::iter::once(first.to_string()).chain(names).collect::<Vec<_>>()
    };
    let mut rows = vec![head("")];
    for (key, values) in &compared.differences {
        let value = |value: &Option<Value>| value.as_ref().map_or("-".into(), |v| shown(&plain(v)));
        rows.push(std::iter::once(shown(key)).chain(values.iter().map(value)).collect());
    }
    let mut result = |what: &str, of: &dyn Fn(&Run) -> String| {
        rows.push(std::iter::once(what.to_string()).chain(found.iter().map(of)).collect());
    };
    result("state", &|run| run.record.end.state.name().into());
    result("steps", &steps);
    result("lowest loss", &|run| loss(run.history.best.map(|step| step.loss)));
    result("lowest held-out loss", &|run| loss(run.history.best_evaluation.map(|e| e.loss)));
    result("tokens/s", &|run| format!("{:.1}", run.history.tokens_per_s()));
    table(&rows)?;
    for (what, losses) in
        [("loss in step", &compared.losses), ("held out, step", &compared.evaluations)]
    {
        if losses.is_empty() {
            continue;
        }
        line("")?;
        let mut rows = vec![head(what)];
        for (step, losses) in losses {
            let losses = losses.iter().map(|value| loss(Some(*value)));
            rows.push(std::iter::once(step.to_string()).chain(losses).collect());
        }
        table(&rows)?;
    }
    if compared.losses.is_empty() {
        note("the runs have no step in common");
    }
    Ok(())
}

fn remove(args: &Args, rm: &Rm) -> Result<()> {
    let root = args.place.root()?;
    // All of them are there before the first goes.
    let mut chosen: Vec<(&String, PathBuf)> = Vec::new();
    for name in &rm.names {
        let path = runs::find(&root, name)?;
        if chosen.iter().all(|(other, _)| *other != name) {
            chosen.push((name, path));
        }
    }
    let mut removed = Vec::new();
    for (name, path) in &chosen {
        if !rm.yes {
            let (files, size) = runs::size(path)?;
            note_raw(&format!("remove {}, {files} files, {}? [y/N] ", shown(name), bytes(size)));
            let mut answer = String::new();
            let read = std::io::stdin().lock().read_line(&mut answer);
            if !read.is_ok_and(|_| matches!(answer.trim(), "y" | "Y" | "yes")) {
                note(&format!("{} stays", shown(name)));
                continue;
            }
        }
        runs::remove(path)?;
        removed.push(name);
    }
    if args.json { json(&json!({ "removed": removed })) } else { Ok(()) }
}
