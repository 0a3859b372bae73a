//! Pages for people: one run, and several beside each other. A page is one file that asks for
//! nothing else, and whatever a name or a message is made of, it is shown as text.

use std::path::Path;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use minijinja::value::Serde;
use minijinja::{Environment, Value as Cell};
use minijinja_contrib::filters::filesizeformat;
use serde::Serialize;
use serde_json::Value;

use crate::chart::{Series, loss_chart};
use crate::compare::Comparison;
use crate::error::{Error, Result};
use crate::history::History;
use crate::list::Run;
use crate::record::{Record, State, local_time};

/// A table of a page; the first cell of a row says what the others are.
#[derive(Serialize)]
struct Table {
    title: &'static str,
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    fn of(title: &'static str, rows: Vec<Vec<String>>) -> Table {
        Table { title, head: Vec::new(), rows }
    }
}

#[derive(Serialize)]
struct Page {
    title: String,
    /// Seconds after which the page asks for itself again.
    refresh: Option<u64>,
    state: &'static str,
    lead: Vec<String>,
    notes: Vec<String>,
    /// SVG, which escapes what it shows itself.
    chart: Cell,
    tables: Vec<Table>,
    foot: String,
}

impl Page {
    fn html(&self, path: &Path) -> Result<String> {
        let mut environment = Environment::new();
        // Names that end in `.html` are escaped.
        environment
            .add_template("report.html", include_str!("report.html"))
            .and_then(|()| environment.get_template("report.html")?.render(Cell::from(Serde(self))))
            .map_err(|e| Error::Page { path: path.to_path_buf(), reason: e.to_string() })
    }
}

fn bytes(n: u64) -> String {
    filesizeformat(n as f64, Some(true))
}

fn duration(seconds: f64) -> String {
    let whole = Duration::try_from_secs_f64(seconds.round()).unwrap_or_default();
    format!("{:#}", SignedDuration::try_from(whole).unwrap_or_default())
}

/// A setting as it is typed: words without quotes.
pub fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(", "),
        Value::Null => "-".into(),
        other => other.to_string(),
    }
}

fn row(cells: impl IntoIterator<Item = impl Into<String>>) -> Vec<String> {
    cells.into_iter().map(Into::into).collect()
}

/// `report.html` of a run; `refresh` is how often it is written anew.
pub(crate) fn report(
    folder: &Path,
    record: &Record,
    history: &History,
    refresh: Option<Duration>,
) -> Result<String> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let chart = loss_chart(&[Series { name: &name, history }]);
    let ended = record.ended.unwrap_or_else(Timestamp::now);
    let notes = [&record.end.message, &record.unrecorded];
    let page = Page {
        title: name,
        refresh: refresh.map(|d| d.as_secs().max(1)),
        state: record.end.state.name(),
        lead: vec![
            format!("started {}", local_time(record.started)),
            match record.end.state {
                State::Running => format!("as of {}", local_time(ended)),
                _ => format!("ended {}", local_time(ended)),
            },
            format!("{} steps", history.steps),
        ],
        notes: notes.into_iter().flatten().cloned().collect(),
        chart: Cell::from_safe_string(chart),
        tables: tables(record, history),
        foot: format!("Gradus {}", record.info.gradus),
    };
    page.html(&folder.join("report.html"))
}

fn tables(record: &Record, history: &History) -> Vec<Table> {
    let info = &record.info;
    let mut tables = vec![Table::of("Result", result(record, history))];
    let mut what = vec![row(["model", info.model.name.as_str()])];
    what.push(row(["file", &info.model.file]));
    what.push(row(["size", &bytes(info.model.bytes)]));
    what.extend(info.outputs.iter().map(|file| row(["writes", file])));
    let machine = format!("{} kernels, {} threads", info.machine.kernels, info.machine.threads);
    what.push(row(["machine", &machine]));
    for resumed in &record.resumed {
        let went_on = format!("{} after step {}", local_time(resumed.at), resumed.step);
        what.push(row(["went on", &went_on]));
    }
    tables.push(Table::of("What ran", what));
    if !info.data.is_empty() {
        let mut rows = Vec::new();
        for data in &info.data {
            rows.push(row([data.role.as_str(), &format!("{}, {}", data.file, bytes(data.bytes))]));
            rows.extend(data.facts.iter().map(|(k, n)| row([k.as_str(), &n.to_string()])));
        }
        tables.push(Table::of("Data", rows));
    }
    if let Some(planned) = &record.planned {
        let mut rows: Vec<_> =
            planned.memory.iter().map(|(part, n)| row([part.as_str(), &bytes(*n)])).collect();
        rows.push(row(["planned in all", &bytes(planned.bytes())]));
        let peak = record.end.peak_bytes.or(history.peak_bytes);
        rows.extend(peak.map(|n| row(["peak that was measured", &bytes(n)])));
        tables.push(Table::of("Memory", rows));
    }
    if !info.settings.is_empty() {
        let rows = info.settings.iter().map(|(k, v)| row([k.as_str(), &plain(v)])).collect();
        tables.push(Table::of("Settings", rows));
    }
    tables
}

fn result(record: &Record, history: &History) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    let steps = record.planned.as_ref().map_or(0, |planned| planned.steps);
    let of = if steps > 0 { format!(" of {steps}") } else { String::new() };
    if let (Some(first), Some(last)) = (history.first, history.last) {
        rows.push(row(["step", &format!("{}{of}", last.step)]));
        rows.push(row(["first loss", &format!("{:.4}", first.loss)]));
        rows.push(row(["last loss", &format!("{:.4}", last.loss)]));
    }
    if let Some(best) = history.best {
        rows.push(row(["lowest loss", &format!("{:.4} in step {}", best.loss, best.step)]));
    }
    for (what, evaluation) in
        [("last evaluation", history.evaluation), ("best evaluation", history.best_evaluation)]
    {
        if let Some(e) = evaluation {
            rows.push(row([what, &format!("{:.4} after step {}", e.loss, e.step)]));
        }
    }
    if let Some((moved, total)) = record.end.moved {
        rows.push(row(["tensors that moved", &format!("{moved} of {total}")]));
    }
    if let Some(planned) = &record.planned {
        rows.push(row(["parameters", &planned.parameters.to_string()]));
    }
    if history.steps > 0 {
        let mean = history.tokens_per_s();
        let last = history.last.map_or(0.0, |last| last.tokens_per_s());
        rows.push(row(["tokens", &history.tokens.to_string()]));
        rows.push(row(["tokens/s", &format!("{mean:.1}, {last:.1} in the last step")]));
        rows.push(row(["time in steps", &duration(history.seconds)]));
    }
    rows
}

/// A page with the curves of several runs over each other.
///
/// # Errors
/// [`Error::Page`]; `path` is where it will be.
pub fn comparison(path: &Path, runs: &[Run], comparison: &Comparison) -> Result<String> {
    let series: Vec<Series<'_>> =
        runs.iter().map(|run| Series { name: &run.name, history: &run.history }).collect();
    let names = || runs.iter().map(|run| run.name.clone());
    let head = |first: &str| std::iter::once(first.to_string()).chain(names()).collect();
    let losses = |table: &[(u64, Vec<f64>)]| {
        let row = |(step, losses): &(u64, Vec<f64>)| {
            let losses = losses.iter().map(|loss| format!("{loss:.4}"));
            std::iter::once(step.to_string()).chain(losses).collect()
        };
        table.iter().map(row).collect::<Vec<_>>()
    };
    let differences = comparison.differences.iter().map(|(key, values)| {
        let value = |v: &Option<Value>| v.as_ref().map_or("-".into(), plain);
        std::iter::once(key.clone()).chain(values.iter().map(value)).collect()
    });
    let mut tables = Vec::new();
    let mut table = |title, first, rows: Vec<Vec<String>>| {
        if !rows.is_empty() {
            tables.push(Table { title, head: head(first), rows });
        }
    };
    table("What differs", "", differences.collect());
    table("Loss", "step", losses(&comparison.losses));
    table("Held-out loss", "step", losses(&comparison.evaluations));
    let page = Page {
        title: names().collect::<Vec<_>>().join(" / "),
        refresh: None,
        state: "",
        lead: Vec::new(),
        notes: Vec::new(),
        chart: Cell::from_safe_string(loss_chart(&series)),
        tables,
        foot: local_time(Timestamp::now()),
    };
    page.html(path)
}
