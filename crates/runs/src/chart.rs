//! Curves as SVG, for light and dark screens, without a script.
//!
//! A plotting crate would not do: what is drawn takes its colours from the reader's preference, by
//! style classes, which those with an SVG backend do not write.

use std::fmt::Write;

use minijinja::HtmlEscape;

use crate::curve::Point;
use crate::history::History;

/// A run's curves under its name.
pub(crate) struct Series<'a> {
    pub(crate) name: &'a str,
    pub(crate) history: &'a History,
}

const WIDTH: f64 = 820.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = WIDTH - 14.0;
/// Heights of a line of the legend, of the loss, of the gap below it, of the learning rate and of
/// the steps' numbers.
const LEGEND: f64 = 20.0;
const LOSS: f64 = 300.0;
const GAP: f64 = 26.0;
const RATE: f64 = 70.0;
const STEPS: f64 = 40.0;
/// Colours that are told apart on white and on black.
const COLOURS: [&str; MOST_SERIES] =
    ["#3b82c4", "#e0801a", "#2f9e6e", "#d1495b", "#8e6bbf", "#a9744f", "#d26aa8", "#7f8c8d"];
/// Series that one chart can tell apart.
pub(crate) const MOST_SERIES: usize = 8;

/// A linear map from values to places.
struct Scale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Scale {
    /// Of values in `low..=high`, which is widened where it is empty.
    fn new(low: f64, high: f64, from: f64, to: f64) -> Scale {
        let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
        let pad = if high > low { 0.0 } else { (high.abs() * 0.1).max(1e-9) };
        Scale { low: low - pad, high: high + pad, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        self.from + (value - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    /// Round numbers within, about `count` of them.
    fn ticks(&self, count: f64) -> Vec<f64> {
        let rough = (self.high - self.low) / count;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|s| *s >= rough);
        let Some(step) = step.filter(|step| step.is_normal()) else { return Vec::new() };
        let first = (self.low / step).ceil();
        let tick = |i: u32| (first + f64::from(i)) * step;
        (0..20).map(tick).take_while(|tick| *tick <= self.high + step * 1e-6).collect()
    }
}

/// A number in few characters.
fn short(value: f64) -> String {
    let value = if value.abs() < 1e-12 { 0.0 } else { value };
    if value != 0.0 && !(1e-3..1e6).contains(&value.abs()) {
        return format!("{value:.1e}").replace(".0e", "e");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// The value below which this part of the sorted values lies.
fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    sorted.get(((sorted.len().max(1) - 1) as f64 * part) as usize).copied()
}

/// What is to be seen: where the runs began and ended, all that was held out, and the steps but for
/// single outliers, which would press everything else flat.
fn loss_range(series: &[Series<'_>]) -> (f64, f64) {
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    let mut see = |value: f64| {
        low = low.min(value);
        high = high.max(value);
    };
    for Series { history, .. } in series {
        let points = history.loss.points();
        [points.first(), points.last()].into_iter().flatten().for_each(|p| see(p.mean()));
        let mut all: Vec<f64> = points.iter().flat_map(|p| [p.min, p.max]).collect();
        all.sort_by(f64::total_cmp);
        [0.01, 0.99].into_iter().filter_map(|part| quantile(&all, part)).for_each(&mut see);
        history
            .evaluations
            .points()
            .iter()
            .for_each(|p| [p.min, p.max].into_iter().for_each(&mut see));
    }
    let room = (high - low) * 0.04;
    (low - room, high + room)
}

fn path(class: &str, points: impl Iterator<Item = (f64, f64)>) -> String {
    let mut out = format!("<path class=\"{class}\" d=\"");
    for (i, (x, y)) in points.enumerate() {
        // Far outside the chart numbers have no use and some readers no room.
        let _ = write!(out, "{}{x:.1} {:.1}", if i == 0 { 'M' } else { 'L' }, y.clamp(-1e4, 1e4));
    }
    out + "\"/>\n"
}

fn text(class: &str, x: f64, y: f64, text: &str) -> String {
    format!("<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>\n", HtmlEscape(text))
}

/// The line of a grid at `y`, and its number.
fn grid(y: f64, number: &str) -> String {
    format!("<path class=\"g-grid\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/>\n")
        + &text("g-end", LEFT - 6.0, y + 4.0, number)
}

fn style() -> String {
    let mut out = String::from(
        "<style>\n\
         .g-back{fill:#fff}.g-grid{stroke:#d8dee4;fill:none}\n\
         .g-chart text{font:12px system-ui,sans-serif;fill:#57606a}\n\
         .g-end{text-anchor:end}.g-mid{text-anchor:middle}\n\
         .g-raw,.g-smooth,.g-held{fill:none;stroke-linejoin:round}\n\
         .g-raw{stroke-opacity:.35}.g-smooth{stroke-width:2}.g-held{stroke-dasharray:4 3}\n\
         @media(prefers-color-scheme:dark){\
         .g-back{fill:#0d1117}.g-grid{stroke:#30363d}.g-chart text{fill:#9198a1}}\n",
    );
    for (i, colour) in COLOURS.iter().enumerate() {
        let _ = writeln!(out, ".g-c{i}{{stroke:{colour}}}.g-f{i}{{fill:{colour}}}");
    }
    out + "</style>\n"
}

/// The loss of some runs over their steps, thin as it was and thick when smoothed, dots where held-out
/// data were evaluated, and the learning rate below. Of one run the legend says what is what, of
/// several which is whose.
pub(crate) fn loss_chart(series: &[Series<'_>]) -> String {
    let single = series.len() == 1;
    let legend = if single { 1 } else { series.len() };
    let top = legend as f64 * LEGEND + 14.0;
    let (middle, bottom) = (top + LOSS, top + LOSS + GAP + RATE);
    let height = bottom + STEPS;

    let each = || series.iter().map(|s| s.history);
    let points = |h: &'_ History| [h.loss.points().to_vec(), h.evaluations.points().to_vec()];
    let steps: Vec<Point> = each().flat_map(points).flatten().collect();
    let first = steps.iter().map(|p| p.first).min().unwrap_or(0) as f64;
    let last = steps.iter().map(|p| p.last).max().unwrap_or(1) as f64;
    let x = Scale::new(first, last, LEFT, RIGHT);
    let (low, high) = loss_range(series);
    let y = Scale::new(low, high, middle, top + 6.0);
    let rates = each().flat_map(|h| h.lr.points()).map(|p| p.max);
    let rate = Scale::new(0.0, rates.fold(0.0, f64::max), bottom, middle + GAP);

    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"g-chart\" role=\"img\" \
         viewBox=\"0 0 {WIDTH} {height}\">\n<title>"
    );
    let names: Vec<String> = series.iter().map(|s| HtmlEscape(s.name).to_string()).collect();
    let _ = writeln!(out, "Loss of {}</title>", names.join(", "));
    out += &style();
    let _ = writeln!(out, "<rect class=\"g-back\" width=\"{WIDTH}\" height=\"{height}\"/>");
    let _ = writeln!(
        out,
        "<clipPath id=\"g-clip\"><rect x=\"{LEFT}\" y=\"{top}\" width=\"{}\" height=\"{LOSS}\"/>\
         </clipPath>",
        RIGHT - LEFT
    );

    y.ticks(6.0).iter().for_each(|tick| out += &grid(y.at(*tick), &short(*tick)));
    rate.ticks(2.0).iter().for_each(|tick| out += &grid(rate.at(*tick), &short(*tick)));
    for tick in x.ticks(8.0).into_iter().filter(|tick| tick.fract() == 0.0) {
        out += &text("g-mid", x.at(tick), bottom + 16.0, &short(tick));
    }
    out += &text("g-mid", (LEFT + RIGHT) / 2.0, bottom + 33.0, "step");
    out += &text("", LEFT, middle + GAP - 6.0, "learning rate");

    for (i, Series { name, history }) in series.iter().enumerate() {
        let colour = i % COLOURS.len();
        let class = |what: &str| format!("g-{what} g-c{colour}");
        let place = |(step, value): (f64, f64)| (x.at(step), y.at(value));
        // Both ends of what one point stands for, so that no outlier is hidden.
        let raw = history.loss.points().iter().flat_map(|p| {
            let ends = if p.first == p.last { &[p.min][..] } else { &[p.max, p.min] };
            ends.iter().map(|value| place((p.step(), *value))).collect::<Vec<_>>()
        });
        let held = |p: &Point| place((p.step(), p.mean()));
        out += "<g clip-path=\"url(#g-clip)\">\n";
        out += &path(&class("raw"), raw);
        out += &path(&class("smooth"), history.loss.smoothed().into_iter().map(place));
        let evaluations = history.evaluations.points();
        let dots = if single { 1 } else { colour };
        out += &path(&format!("g-held g-c{dots}"), evaluations.iter().map(held));
        out += "</g>\n";
        // A run of one step is a dot; so is an evaluation.
        let alone = history.loss.points().iter().filter(|_| history.loss.points().len() == 1);
        let circles = evaluations.iter().map(|p| (held(p), dots));
        for ((cx, cy), fill) in circles.chain(alone.map(|p| (held(p), colour))) {
            let _ = writeln!(
                out,
                "<circle class=\"g-f{fill}\" cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"3\"/>"
            );
        }
        let lr = history.lr.points().iter().map(|p| (x.at(p.step()), rate.at(p.mean())));
        out += &path(&class("smooth"), lr);
        if !single {
            let line = LEGEND * (i as f64 + 0.9);
            out += &path(&class("smooth"), [(LEFT, line), (LEFT + 26.0, line)].into_iter());
            out += &text("", LEFT + 34.0, line + 4.0, name);
        }
    }
    if single {
        let marks = [
            ("g-raw g-c0", "loss of each step"),
            ("g-smooth g-c0", "smoothed"),
            ("g-held g-c1", "held-out data"),
        ];
        let evaluated = each().any(|h| !h.evaluations.points().is_empty());
        for (i, (class, says)) in marks.iter().take(if evaluated { 3 } else { 2 }).enumerate() {
            let from = LEFT + 170.0 * i as f64;
            out += &path(class, [(from, 18.0), (from + 26.0, 18.0)].into_iter());
            out += &text("", from + 34.0, 22.0, says);
        }
    }
    if steps.is_empty() {
        out += &text("g-mid", (LEFT + RIGHT) / 2.0, top + LOSS / 2.0, "no steps yet");
    }
    out + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Evaluation, Line, Step};

    fn history(losses: impl IntoIterator<Item = f64>) -> History {
        let mut history = History::default();
        for (step, loss) in (1..).zip(losses) {
            history.add(Line::Step(Step {
                step,
                epoch: 1,
                loss,
                grad_norm: 1.0,
                lr: 1e-3,
                tokens: 10,
                seconds: 1.0,
                memory_bytes: None,
            }));
        }
        history
    }

    fn chart(history: &History) -> String {
        loss_chart(&[Series { name: "a", history }])
    }

    #[test]
    fn round_ticks_within_the_range() {
        let ticks = |low, high| Scale::new(low, high, 0.0, 1.0).ticks(5.0);
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(1.3, 3.1), [1.5, 2.0, 2.5, 3.0]);
        assert_eq!(ticks(-0.11, 0.1).len(), 5);
        assert!(!ticks(2.0, 2.0).is_empty() && !ticks(f64::INFINITY, 0.0).is_empty());
        let words = [0.0, 1e-4, 2.5e-5, 0.25, 12.0, 1e6].map(short);
        assert_eq!(words, ["0", "1e-4", "2.5e-5", "0.25", "12", "1e6"]);
    }

    #[test]
    fn an_outlier_does_not_press_the_rest_flat_and_is_clipped() {
        let loss = |i| {
            if i == 0 {
                9.0
            } else if i == 50 {
                1e6
            } else {
                2.0 + f64::from(i % 7)
            }
        };
        let spiked = history((0..200).map(loss));
        let range = loss_range(&[Series { name: "", history: &spiked }]);
        assert!((1.7..2.0).contains(&range.0) && (9.0..9.3).contains(&range.1), "{range:?}");
        assert!(chart(&spiked).contains("clip-path"));
    }

    #[test]
    fn a_chart_of_anything_has_finite_numbers() {
        for losses in [vec![], vec![1.0], vec![2.0; 3], vec![f64::NAN; 2], vec![1e300, -1e300, 0.0]]
        {
            let svg = chart(&history(losses.iter().copied()));
            assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg}");
            assert!(
                !svg.contains("NaN") && !svg.contains("inf\"") && !svg.contains("inf "),
                "{losses:?}: {svg}"
            );
            assert_eq!(svg.contains("no steps yet"), losses.iter().all(|l| !l.is_finite()));
        }
    }

    #[test]
    fn a_long_run_draws_as_little_as_a_screen_shows() {
        let svg = chart(&history((0..200_000).map(|i| 5.0 / (1.0 + f64::from(i)))));
        assert!(svg.len() < 150_000, "{}", svg.len());
    }

    #[test]
    fn evaluations_are_dots_and_names_are_escaped() {
        let mut held = history([3.0, 2.0, 1.0]);
        assert!(!chart(&held).contains("<circle"));
        held.add(Line::Evaluation(Evaluation { step: 2, loss: 2.5 }));
        assert_eq!(chart(&held).matches("<circle").count(), 1);
        let name = "</text><script>alert(1)</script>";
        let both = [Series { name, history: &held }, Series { name: "b", history: &held }];
        let svg = loss_chart(&both);
        assert!(!svg.contains("<script") && svg.contains("&lt;script&gt;"), "{svg}");
        assert!(svg.contains("g-smooth g-c1"));
    }
}
