//! What chat templates expect of Python and of Hugging Face's `apply_chat_template`.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Deepest nesting that [`to_json`] writes.
const MAX_DEPTH: usize = 128;

fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// The test `iterable`. Jinja2's undefined value is, Python's `None` is not; the engine's own test
/// has it the other way round for `None`.
pub(super) fn is_iterable(value: &Value) -> bool {
    value.is_undefined() || (!value.is_none() && value.try_iter().is_ok())
}

/// The filter `tojson`: `json.dumps` with `ensure_ascii=False`, as Hugging Face defines it.
pub(super) fn to_json(
    state: &State<'_, '_>,
    value: &Value,
    ensure_ascii: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let some = |value: Option<Value>| value.filter(|v| !v.is_none() && !v.is_undefined());
    let indent = match some(options.get("indent")?) {
        None => None,
        Some(indent) => match (indent.as_usize(), indent.as_str()) {
            (Some(spaces), _) if spaces <= 64 => Some(" ".repeat(spaces)),
            (None, Some(text)) if text.len() <= 64 => Some(text.to_owned()),
            _ => return Err(invalid("tojson: indent is not a number up to 64 or a short string")),
        },
    };
    let separators = match some(options.get("separators")?) {
        None => None,
        Some(pair) => {
            let part = |i| pair.get_item_by_index(i).ok().and_then(|part| part.to_str());
            match (part(0), part(1)) {
                (Some(item), Some(key)) => Some((item.to_string(), key.to_string())),
                _ => return Err(invalid("tojson: separators is not a pair of strings")),
            }
        }
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let ensure_ascii =
        options.get::<Option<bool>>("ensure_ascii")?.or(ensure_ascii).unwrap_or(false);
    options.assert_all_used()?;
    let item = if indent.is_some() { "," } else { ", " };
    let (item, key) = separators.unwrap_or_else(|| (item.into(), ": ".into()));
    let mut json = Json { out: String::new(), indent, item, key, sort_keys, ensure_ascii };
    json.write(state, value, 0)?;
    Ok(json.out)
}

struct Json {
    out: String,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
    ensure_ascii: bool,
}

impl Json {
    fn write(&mut self, state: &State<'_, '_>, value: &Value, depth: usize) -> Result<(), Error> {
        let before = self.out.len();
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                self.container(['[', ']'], depth, &items, |json, item| {
                    json.write(state, item, depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in value.try_iter()?.checked() {
                    let key = key?;
                    let name = match key.kind() {
                        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                        ValueKind::None => "null".to_owned(),
                        ValueKind::Bool => key.to_string().to_lowercase(),
                        ValueKind::Number => number(&key),
                        kind => return Err(invalid(format!("tojson: a key is a {kind}"))),
                    };
                    pairs.push((name, value.get_item(&key)?));
                }
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.container(['{', '}'], depth, &pairs, |json, (name, value)| {
                    json.string(name);
                    json.out.push_str(&json.key);
                    json.write(state, value, depth + 1)
                })?;
            }
            kind => return Err(invalid(format!("tojson: {kind} is not JSON serializable"))),
        }
        // What the engine's own filters pay for their results, this one pays too.
        state.consume_fuel(1 + (self.out.len() - before) as u64 / 64)
    }

    fn container<T>(
        &mut self,
        [open, close]: [char; 2],
        depth: usize,
        items: &[T],
        mut write: impl FnMut(&mut Self, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if depth >= MAX_DEPTH {
            return Err(invalid(format!("tojson: nested deeper than {MAX_DEPTH}")));
        }
        self.out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                self.out.push_str(&self.item);
            }
            self.new_line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            (0..depth).for_each(|_| self.out.push_str(indent));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// A number as Python writes it: the shortest digits that read back, with an exponent below
/// 1e-4 and from 1e16 on.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(x) = f64::try_from(value.clone()) else { return value.to_string() };
    if x.is_nan() {
        return "NaN".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity".into() } else { "-Infinity".into() };
    }
    let text = format!("{x:?}");
    match text.split_once('e').map(|(digits, exponent)| (digits, exponent.parse::<i32>())) {
        Some((digits, Ok(exponent))) => {
            let digits = digits.strip_suffix(".0").unwrap_or(digits);
            format!("{digits}e{exponent:+03}")
        }
        _ => text,
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// From the day of 1970-01-01 on.
const DAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// The function `strftime_now`: a moment, in seconds since 1970 (UTC), in the format of C's
/// `strftime`, with English names.
pub(super) fn strftime(seconds: i64, format: &str) -> Result<String, Error> {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let month_name = MONTHS.get(month as usize - 1).copied().unwrap_or_default();
    let day_name = DAYS.get(days.rem_euclid(7) as usize).copied().unwrap_or_default();
    let twelve = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // `%-d`: without padding.
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let padded = |n: i64, width: usize| {
            if bare { n.to_string() } else { format!("{n:0width$}") }
        };
        out.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => padded(year.rem_euclid(100), 2),
            Some('m') => padded(month, 2),
            Some('d') => padded(day, 2),
            Some('e') if bare => day.to_string(),
            Some('e') => format!("{day:2}"),
            Some('H') => padded(hour, 2),
            Some('I') => padded(twelve, 2),
            Some('M') => padded(minute, 2),
            Some('S') => padded(second, 2),
            Some('j') => padded(days - days_to(year) + 1, 3),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('B') => month_name.into(),
            Some('b' | 'h') => month_name.chars().take(3).collect(),
            Some('A') => day_name.into(),
            Some('a') => day_name.chars().take(3).collect(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".into(),
            Some('z') => "+0000".into(),
            Some('%') => "%".into(),
            other => {
                let other = other.map(String::from).unwrap_or_default();
                return Err(invalid(format!("strftime_now: %{other} is not supported")));
            }
        });
    }
    Ok(out)
}

/// Year, month from 1 and day from 1 of a day since 1970-01-01 in the Gregorian calendar, after
/// Hinnant, "chrono-Compatible Low-Level Date Algorithms" (`civil_from_days`).
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day = z.rem_euclid(146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let m = (5 * day_of_year + 2) / 153;
    let month = if m < 10 { m + 3 } else { m - 9 };
    (year + era * 400 + i64::from(month <= 2), month, day_of_year - (153 * m + 2) / 5 + 1)
}

/// The days from 1970-01-01 to the first of a year.
fn days_to(year: i64) -> i64 {
    let y = year - 1;
    365 * (year - 1970) + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400) - 477
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let all = "%F %T %a %A %b %B %j %y %I %p %-d %-m %e %Y%m%d %H%M%S %%";
        // As Python's datetime gives them.
        for (seconds, expected) in [
            (
                0,
                "1970-01-01 00:00:00 Thu Thursday Jan January 001 70 12 AM 1 1  1 19700101 000000 %",
            ),
            (
                951_826_394,
                "2000-02-29 12:13:14 Tue Tuesday Feb February 060 00 12 PM 29 2 29 20000229 121314 %",
            ),
            (
                1_735_689_599,
                "2024-12-31 23:59:59 Tue Tuesday Dec December 366 24 11 PM 31 12 31 20241231 235959 %",
            ),
            (
                4_107_542_400,
                "2100-03-01 00:00:00 Mon Monday Mar March 060 00 12 AM 1 3  1 21000301 000000 %",
            ),
        ] {
            assert_eq!(strftime(seconds, all).unwrap(), expected);
        }
        assert!(strftime(0, "%Q").unwrap_err().to_string().contains("%Q is not supported"));
        assert!(strftime(0, "%").is_err());
        for extreme in [i64::MIN, i64::MAX] {
            strftime(extreme, all).unwrap();
        }
    }

    #[test]
    fn numbers_are_written_as_python_does() {
        let python = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (1.5e-7, "1.5e-07"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (-2.5e100, "-2.5e+100"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
            (-0.0, "-0.0"),
        ];
        for (x, expected) in python {
            assert_eq!(number(&Value::from(x)), expected);
        }
        assert_eq!(number(&Value::from(u64::MAX)), "18446744073709551615");
    }
}
