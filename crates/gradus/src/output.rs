//! Printing: results on standard output, the rest on standard error.
//!
//! Lines and notes are made of names and texts from files that anybody may have written, so what
//! would steer the terminal is escaped in them. Only [`print`] gives text as it is.

use std::borrow::Cow;
use std::io::{self, Write};

use crate::error::{Error, Result};
use crate::progress::aside;
use crate::reading::printable;

/// Lines that are whatever they hold.
fn lines(text: &str) -> Cow<'_, str> {
    let steers = |line: &str| printable(line) != line;
    match text.split('\n').any(steers) {
        false => text.into(),
        true => text.split('\n').map(printable).collect::<Vec<_>>().join("\n").into(),
    }
}

/// Writes text to standard output, at once.
///
/// # Errors
/// [`Error::Closed`] when nobody reads any more.
pub fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    aside(|| out.write_all(text.as_bytes()).and_then(|()| out.flush())).map_err(Error::stdout)
}

/// Writes a line to standard output, or several; what would steer the terminal is escaped.
///
/// # Errors
/// As [`print`].
pub fn line(text: &str) -> Result<()> {
    print(&format!("{}\n", lines(text)))
}

/// Writes a JSON document as one line to standard output.
///
/// # Errors
/// As [`print`].
pub fn json(value: &serde_json::Value) -> Result<()> {
    print(&format!("{}\n", json_text(value)))
}

/// JSON escapes the control characters of ASCII by itself, but not all others.
fn json_text(value: &serde_json::Value) -> String {
    let text = value.to_string();
    match text.contains(char::is_control) {
        false => text,
        true => text.chars().fold(String::new(), |mut text, c| {
            match c.is_control() {
                true => text += &format!("\\u{:04x}", u32::from(c)),
                false => text.push(c),
            }
            text
        }),
    }
}

/// Writes a line to standard error, or several, as [`line`]. Where that is closed there is nobody
/// to tell.
pub fn note(text: &str) {
    let _ = aside(|| writeln!(io::stderr(), "{}", lines(text)));
}

/// As [`note`], and stays on the line.
pub fn note_raw(text: &str) {
    let _ = aside(|| io::stderr().write_all(lines(text).as_bytes()));
}

/// A number of bytes for people: `93.8 MiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1023.95 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    format!("{value:.1} {unit}")
}

/// A whole number with separators: `1,234,567`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// A duration for people: `850 ms`, `12.3 s`, `4 min 05 s`.
pub fn duration(d: std::time::Duration) -> String {
    let seconds = d.as_secs_f64();
    if seconds < 1.0 {
        format!("{:.0} ms", seconds * 1000.0)
    } else if seconds < 60.0 {
        format!("{seconds:.1} s")
    } else {
        let whole = seconds.round() as u64;
        format!("{} min {:02} s", whole / 60, whole % 60)
    }
}

/// The middle one of some measurements, 0 of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.get((sorted.len().max(1) - 1) / 2), sorted.get(sorted.len() / 2));
    match (low, high) {
        (Some(a), Some(b)) => (a + b) / 2.0,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1024), "1.0 KiB");
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(98_362_432), "93.8 MiB");
        assert_eq!(count(7), "7");
        assert_eq!(count(123), "123");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(duration(Duration::from_millis(850)), "850 ms");
        assert_eq!(duration(Duration::from_millis(12_340)), "12.3 s");
        assert_eq!(duration(Duration::from_secs(245)), "4 min 05 s");
    }

    #[test]
    fn what_steers_a_terminal_is_escaped_and_lines_stay() {
        assert_eq!(lines("a\n  b: é 猫"), "a\n  b: é 猫");
        assert_eq!(lines("a\n\x1b[2Jb\u{9b}31m\u{7}"), "a\n\\u{1b}[2Jb\\u{9b}31m\\u{7}");
        let value = serde_json::json!({ "a\u{9b}\u{7f}": "\x1b é" });
        let text = json_text(&value);
        assert_eq!(text, r#"{"a\u009b\u007f":"\u001b é"}"#);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }

    #[test]
    fn the_median_of_an_even_number_is_between_the_middle_two() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[5.0]), 5.0);
        assert_eq!(median(&[9.0, 1.0, 5.0]), 5.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 9.0]), 3.0);
    }
}
