//! Formats, compressions and bounds: the same rows whatever they come in.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // tests

mod common;

use std::path::PathBuf;

use common::{Folder, gzip, rows, said, testdata, zstd};
use data::{Error, Layout, Options, Reason};
use serde_json::{Value, json};

fn given() -> Value {
    serde_json::from_slice(&std::fs::read(testdata("data/rows.json")).unwrap()).unwrap()
}

fn lines(list: &[Value]) -> String {
    list.iter().map(|row| format!("{row}\n")).collect()
}

/// A row as CSV has it: what has structure is JSON in a cell.
fn csv(list: &[Value]) -> String {
    let cell = |v: &Value| {
        let text = v.as_str().map_or_else(|| v.to_string(), str::to_string);
        format!("\"{}\"", text.replace('"', "\"\""))
    };
    let row = |r: &Value| r.as_object().unwrap().values().map(cell).collect::<Vec<_>>().join(",");
    let names: Vec<&str> = list[0].as_object().unwrap().keys().map(String::as_str).collect();
    format!("{}\r\n{}\r\n", names.join(","), list.iter().map(row).collect::<Vec<_>>().join("\r\n"))
}

fn read(file: PathBuf) -> Vec<String> {
    let (rows, _) = rows(&[file], &Options::default()).unwrap();
    rows.iter().map(|row| said(&row.content)).collect()
}

#[test]
fn every_format_and_compression_gives_the_same_rows() {
    let folder = Folder::new("formats");
    let given = given();
    for kind in ["messages", "prompt", "text"] {
        let list = given[kind].as_array().unwrap();
        let expected = read(folder.write("rows.jsonl", lines(list)));
        assert_eq!(expected.len(), list.len());
        let parquet = std::fs::read(testdata(&format!("data/{kind}.parquet"))).unwrap();
        let pretty = serde_json::to_string_pretty(&list).unwrap();
        let named = json!({"version": 1, "rows": list}).to_string();
        let one =
            format!("{}\n{}", serde_json::to_string_pretty(&list[0]).unwrap(), lines(&list[1..]));
        for (name, bytes) in [
            ("a.jsonl", format!("\u{feff}\n  \n{}", lines(list)).into_bytes()),
            ("a.ndjson", lines(list).replace('\n', "\r\n").into_bytes()),
            ("a.json", pretty.clone().into_bytes()),
            ("b.json", named.into_bytes()),
            ("c.json", lines(list).into_bytes()),
            ("d.json", one.into_bytes()),
            ("no-name", pretty.into_bytes()),
            ("also-none", lines(list).into_bytes()),
            ("a.csv", csv(list).into_bytes()),
            ("b.csv", format!("\u{feff}{}", csv(list)).into_bytes()),
            ("a.parquet", parquet.clone()),
            ("misnamed.jsonl", parquet),
        ] {
            assert_eq!(read(folder.write(name, &bytes)), expected, "{kind} {name}");
            let packed = gzip(&bytes);
            assert_eq!(read(folder.write(&format!("{name}.gz"), &packed)), expected, "{name}.gz");
            let packed = zstd(&bytes);
            assert_eq!(read(folder.write(&format!("{name}.zst"), &packed)), expected, "{name}.zst");
            // The bytes say what they are, whatever the name says.
            assert_eq!(read(folder.write(name, &packed)), expected, "{name}, packed");
        }
    }
    // Pages in a compression that is rarer.
    let expected = read(testdata("data/text.parquet"));
    assert_eq!(read(testdata("data/text.lz4.parquet")), expected);
    // Members of gzip one after the other are one file.
    let list = given["text"].as_array().unwrap();
    let two = [gzip(lines(&list[..1]).as_bytes()), gzip(lines(&list[1..]).as_bytes())].concat();
    assert_eq!(read(folder.write("two.jsonl.gz", two)), read(folder.write("t.jsonl", lines(list))));
}

#[test]
fn rows_have_their_numbers_and_columns_without_meaning_are_listed() {
    let folder = Folder::new("numbers");
    let file =
        folder.write("a.jsonl", "\n{\"text\": \"a\", \"id\": 1}\n\n{\"text\": \"b\", \"x\": 2}\n");
    let table = folder.write("b.tsv", "made\ttext\n1\tc\n2\td\n");
    let (rows, read) = rows(&[file, table], &Options::default()).unwrap();
    let places: Vec<(usize, u64)> = rows.iter().map(|r| (r.file, r.number)).collect();
    assert_eq!(places, [(0, 2), (0, 4), (1, 1), (1, 2)]);
    let about: Vec<_> = read.files.iter().map(|f| (f.layout, f.rows)).collect();
    assert_eq!(about, [(Some(Layout::Text), 2), (Some(Layout::Text), 2)]);
    let ignored: Vec<Vec<&str>> =
        read.files.iter().map(|f| f.ignored.iter().map(String::as_str).collect()).collect();
    assert_eq!(ignored, [vec!["id", "x"], vec!["made"]]);
}

/// In JSON that is a row the fields may come in any order; a list among them is no list of rows.
#[test]
fn a_row_may_begin_with_a_list() {
    let folder = Folder::new("begins-with-a-list");
    let chat = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    for (name, list) in [
        ("tools", tools),
        ("tags", json!(["x", "y"])),
        ("meta", json!([{"source": "z"}, 3])),
        ("none", json!([])),
    ] {
        let row = json!({ name: list, "messages": chat });
        let plain = rows(&[folder.write("a.jsonl", row.to_string())], &Options::default()).unwrap();
        for file in [
            folder.write("a.json", serde_json::to_string_pretty(&row).unwrap()),
            folder.write("b.json", format!("{row:#}\n{row:#}")),
        ] {
            let (rows, read) = rows(&[file], &Options::default()).unwrap();
            assert!(rows.iter().all(|row| row.content == plain.0[0].content), "{name}");
            assert_eq!(read.files[0].ignored, plain.1.files[0].ignored, "{name}");
        }
    }
    // A list of rows whose first is bad is one all the same, whether it is held back or not.
    for filler in [0, 3 << 20] {
        let list = json!([{"mesages": "x".repeat(filler)}, {"messages": chat}]);
        let file = folder.write("c.json", json!({"version": 1, "rows": list}).to_string());
        let said = refused(file, "row 1: unknown_layout");
        assert!(said.contains("is `messages` meant"), "{said}");
    }
    refused(folder.write("d.json", "{\"a\": [1], \"b\": [2]}"), "two lists, `a` and `b`");
    refused(folder.write("e.json", "{\"a\": [1], \"a\": [2]}"), "field `a` occurs twice");
    refused(folder.write("f.json", "{\"a\": [], \"b\": 1}"), "has no rows");
}

/// An empty cell is not there, and so is what JSON says is null.
#[test]
fn what_says_nothing_is_of_no_layout() {
    let folder = Folder::new("says-nothing");
    let content = |name: &str, text: &str| {
        let (mut rows, read) = rows(&[folder.write(name, text)], &Options::default()).unwrap();
        assert_eq!(read.files[0].layout, Some(Layout::Prompt), "{name}");
        rows.remove(0).content
    };
    let plain = content("a.jsonl", "{\"prompt\": \"p\", \"completion\": \"c\"}");
    for (name, text) in [
        ("b.csv", "text,prompt,completion\n,p,c\n"),
        ("c.csv", "prompt,response,completion\np,,c\n"),
        ("d.jsonl", "{\"text\": null, \"prompt\": \"p\", \"completion\": \"c\"}"),
        ("e.jsonl", "{\"response\": null, \"prompt\": \"p\", \"completion\": \"c\"}"),
    ] {
        assert_eq!(content(name, text), plain, "{name}");
    }
    // Which layout a row has that lacks something, its columns say.
    refused(folder.write("f.csv", "prompt,completion\np,\n"), "row 1: missing_field: `completion`");
    refused(folder.write("g.csv", "text,prompt,completion\nt,p,c\n"), "several layouts fit");
    // In JSON an empty text says that it is empty.
    let both = "{\"text\": \"\", \"prompt\": \"p\", \"completion\": \"c\"}";
    refused(folder.write("h.jsonl", both), "several layouts fit");
}

#[track_caller]
fn refused(file: PathBuf, part: &str) -> String {
    let name = file.display().to_string();
    let Err(e) = rows(&[file], &Options::default()) else { panic!("{part}: it is not refused") };
    let said = e.to_string();
    assert!(said.contains(part), "no {part:?} in: {said}");
    assert!(said.contains(&name) && !said.contains('\n'), "{said}");
    said
}

#[test]
fn files_are_refused_by_name() {
    let folder = Folder::new("files");
    let write = |name: &str, bytes: &[u8]| folder.write(name, bytes);
    refused(PathBuf::from("/nonexistent/a.jsonl"), "cannot be read");
    refused(std::env::temp_dir(), "is a folder");
    refused(write("a.jsonl", b""), "is empty, or neither");
    refused(write("b.jsonl", b" \n\n"), "is empty, or neither");
    refused(write("c.txt", b"Once upon a time"), "expected a name such as");
    refused(write("d.json", b"[]"), "has no rows");
    refused(write("e.json", b"{\"a\": [{\"text\": \"x\"}], \"b\": []}"), "two lists, `a` and `b`");
    refused(write("f.json", b"[{\"text\": \"x\"}, {\"text\": \"x\""), "at or after row 2: EOF");
    refused(
        write("g.json", b"{\n\"rows\": [{\"text\": \"x\"}], \"text\": \"y\"}"),
        "has both a list",
    );
    refused(write("h.csv", b"text,text\na,b\n"), "names column `text` twice");
    refused(write("i.csv", b"text\n"), "has no rows");
    refused(write("j.jsonl.gz", &gzip(b"{\"text\": \"x\"}\n")[..20]), "cannot be inflated");
    refused(write("k.jsonl.zst", &zstd(b"{\"text\": \"x\"}\n")[..9]), "cannot be inflated");
    let parquet = std::fs::read(testdata("data/text.parquet")).unwrap();
    refused(write("l.parquet", &parquet[..200]), "does not end with `PAR1`");
    let mut long = parquet.clone();
    let at = long.len() - 8;
    long[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    refused(write("m.parquet", &long), "directory has 4294967295 bytes");
    let said = refused(testdata("data/text.brotli.parquet"), "is compressed with Brotli");
    assert!(said.contains("Snappy, gzip, Zstandard and LZ4 are"), "{said}");
    refused(write("n.csv", b"text,\"other\na,b\n"), "line of names: a quote opens");
    refused(
        write("o.json", b"{\"system\": \"s\", \"rows\": [{\"text\": \"x\"}]}"),
        "both a list `rows` and a field `system`",
    );
}

#[test]
fn rows_are_refused_by_number_and_reason() {
    let folder = Folder::new("rows");
    for (name, bytes, part) in [
        (
            "a.jsonl",
            &b"{\"text\": \"a\"}\n{\"text\": \"b\n"[..],
            "row 2: malformed: it is no usable",
        ),
        (
            "b.jsonl",
            b"{\"text\": \"a\"}\n{\"text\": \"a\", \"text\": \"b\"}",
            "`text` occurs twice",
        ),
        (
            "c.jsonl",
            b"{\"text\": \"a\"}\n[1]\n",
            "row 2: malformed: it is a list of 1; expected an",
        ),
        ("d.jsonl", b"{\"text\": \"\xff\"}\n", "row 1: malformed"),
        ("e.jsonl", b"{\"text\": 1e999}\n", "out of range"),
        ("f.json", b"[{\"text\": \"a\"}, 3]", "row 2: malformed: it is 3; expected an object"),
        ("g.csv", b"prompt,completion\na,b\nc\n", "row 2: malformed: it has 1 cells; expected 2"),
        (
            "p.csv",
            b"prompt,completion\na,b\nx,\"he said\nc,d\ne,f\n",
            "row 2: malformed: in cell 2, a quote opens that is never closed",
        ),
        ("q.tsv", b"text\na\n\"b\nc\n", "row 2: malformed: in cell 1, a quote opens"),
        ("r.csv", b"prompt,completion\na,\"b\"c\nd,e\n", "row 1: malformed: in cell 2, or one"),
        ("h.csv", b"text\n\xff\xfe\n", "row 1: malformed: cell 1 is no UTF-8"),
        ("i.csv", b"messages\n\"[{\"\n", "row 1: wrong_type: `messages` is a text that is no JSON"),
        ("j.csv", b"text,other\n,x\n", "row 1: missing_field: `text` is missing"),
    ] {
        refused(folder.write(name, bytes), part);
    }
    let deep = format!("{{\"text\": {}", "[".repeat(100_000));
    refused(folder.write("k.jsonl", &deep), "nests deeper than 32");
    refused(folder.write("l.json", format!("[{deep}")), "nests deeper than 32");
    let many = format!("{{\"text\": [{}0]}}", "0,".repeat(data::MAX_VALUES));
    refused(folder.write("m.jsonl", &many), "more than 1048576 values");
    refused(folder.write("n.json", format!("[{many}]")), "more than 1048576 values");
}

/// Quotes where they may be are quotes, wherever the reader's buffer ends.
#[test]
fn a_bad_quote_is_blamed_on_its_record_alone() {
    let folder = Folder::new("quotes");
    for pad in [0, 1, 8100, 8180, 8185, 8190, 8192, 20_000] {
        let long = "x".repeat(pad);
        let text = format!(
            "prompt,completion\r\n\"a\n{long}\",\"b \"\"c\"\"\"\r\nin\"ch,5\"\n\
             \"d\"e,f\ng,\"\"\"h\n, \"\ni,j\nk,\"l\nm,n\n"
        );
        let options = Options { skip_bad: true, ..Options::default() };
        let (kept, read) = rows(&[folder.write("a.csv", &text)], &options).unwrap();
        let kept: Vec<String> = kept.iter().map(|row| said(&row.content)).collect();
        let expected = [
            format!("user: a\n{long} | assistant: b \"c\""),
            "user: in\"ch | assistant: 5\"".into(),
            "user: g | assistant: \"h\n, ".into(),
            "user: i | assistant: j".into(),
        ];
        assert_eq!(kept, expected, "{pad}");
        let bad: Vec<(u64, bool)> =
            read.skipped.listed.iter().map(|b| (b.row, b.bad.what.contains("never"))).collect();
        assert_eq!(bad, [(3, false), (6, true)], "{pad}");
    }
}

/// What is no text or no number in Parquet is not taken for what is not there.
#[test]
fn parquet_values_that_json_has_not_are_refused() {
    let options = Options { skip_bad: true, ..Options::default() };
    let (kept, read) = rows(&[testdata("data/odd.parquet")], &options).unwrap();
    assert_eq!(kept.iter().map(|r| r.number).collect::<Vec<_>>(), [1]);
    let bad: Vec<String> = read.skipped.listed.iter().map(|bad| bad.bad.to_string()).collect();
    assert!(bad[0].starts_with("`messages[0].content` is an object"), "{bad:?}");
    assert!(bad[1].starts_with("`messages[1].weight` is \"NaN\""), "{bad:?}");
}

#[test]
fn a_name_with_line_ends_is_shown_on_one_line() {
    let folder = Folder::new("name");
    let bad = rows(&[folder.write("a\n\u{1b}[31m.jsonl", "{\n")], &Options::default());
    let said = bad.unwrap_err().to_string();
    assert!(said.contains("a\\n\\u{1b}[31m.jsonl: row 1: malformed"), "{said}");
    let none = rows(&[PathBuf::from("/nonexistent/a\u{9b}b\r")], &Options::default());
    let said = none.unwrap_err().to_string();
    assert!(said.starts_with("/nonexistent/a\\u{9b}b\\r: cannot be read"), "{said}");
}

/// A line that is too long is one bad row: the next is read.
#[test]
fn the_length_of_a_row_is_bounded() {
    let folder = Folder::new("long");
    let long = "x".repeat(data::MAX_ROW as usize);
    let text = format!("{{\"text\": \"a\"}}\n{{\"text\": \"{long}\"}}\n{{\"text\": \"b\"}}\n");
    let file = folder.write("a.jsonl", &text);
    refused(file.clone(), "row 2: malformed: it is longer than 16 MiB");
    let options = Options { skip_bad: true, ..Options::default() };
    let (kept, read) = rows(&[file], &options).unwrap();
    assert_eq!(kept.iter().map(|r| r.number).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(read.skipped.counts[&Reason::Malformed], 1);
    refused(folder.write("b.json", format!("[{{\"text\": \"{long}\"}}]")), "longer than 16 MiB");
    refused(folder.write("c.csv", format!("text\n{long}{long}\n")), "longer than 16 MiB");
    let open = folder.write("d.csv", format!("text\na\n\"{long}\n{long}\n"));
    let said = refused(open, "longer than 16 MiB");
    assert!(said.ends_with("; row 2 has a quote that may never be closed"), "{said}");
}

#[test]
fn a_decompression_bomb_is_refused_by_name() {
    let folder = Folder::new("bomb");
    let line = format!("{{\"text\": \"{}\"}}\n", "x".repeat(1 << 20));
    let text = line.repeat(80);
    for (name, packed) in
        [("a.jsonl.gz", gzip(text.as_bytes())), ("a.jsonl.zst", zstd(text.as_bytes()))]
    {
        assert!(packed.len() < 1 << 20);
        refused(folder.write(name, packed), "is a decompression bomb");
    }
    // The same is no bomb where nothing is inflated.
    assert_eq!(rows(&[folder.write("a.jsonl", &text)], &Options::default()).unwrap().0.len(), 80);
}

#[test]
fn bad_rows_are_refused_together_or_left_out_and_counted() {
    let folder = Folder::new("bad");
    let mut text = String::new();
    for i in 0..2500 {
        text += match i % 4 {
            0 => "{\"text\": \"fine\"}\n",
            1 => "{\"text\": 3}\n",
            2 => "{\"txt\": \"a\"}\n",
            _ => "{\n",
        };
    }
    let file = folder.write("a.jsonl", &text);
    let said = refused(file.clone(), "row 2: wrong_type: `text` is 3; expected a string");
    assert!(said.contains("; 1000 bad rows up to row 1334, where reading stopped ("), "{said}");
    assert!(said.contains("also 3, 4, 6"), "{said}");
    assert!(said.ends_with("leave such rows out with `--skip-bad`"), "{said}");
    assert!(said.len() < 600, "{said}");
    // Others may have more of them.
    let few = folder.write("few.jsonl", "{\n{\"text\": \"a\"}\n{\n");
    let files = [few.clone(), file.clone(), file.clone()];
    let said = rows(&files, &Options::default()).unwrap_err().to_string();
    assert!(said.contains("; 2 bad rows in this file, 2 files after it not read ("), "{said}");
    refused(few, "; 2 bad rows in all (2 malformed), also 3");
    let options = Options { skip_bad: true, ..Options::default() };
    let (kept, read) = rows(&[file], &options).unwrap();
    assert_eq!((kept.len(), read.files[0].rows), (625, 2500));
    assert_eq!(read.skipped.total(), 1875);
    assert_eq!(read.skipped.reasons(), "625 malformed, 625 unknown_layout, 625 wrong_type");
    assert_eq!(read.skipped.listed.len(), data::BadRows::LISTED);
    let all = folder.write("b.jsonl", "{\n{\n");
    let Err(Error::Data(said)) = rows(&[all], &options) else { panic!() };
    assert!(said.contains("none of 2 rows can be learned from (2 malformed)"), "{said}");
}
