//! No bytes whatever make a reader panic, hang or take memory that they do not pay for.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // tests

mod common;

use common::{Folder, Random, gzip, rows, testdata, zstd};
use data::Options;

/// The reader of Parquet may panic on a thread of its own, which is an error to everybody else;
/// what it says there is noise.
fn silence() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().name() != Some("parquet") {
            usual(info);
        }
    }));
}

fn files() -> Vec<(&'static str, Vec<u8>)> {
    let parquet = |kind: &str| std::fs::read(testdata(&format!("data/{kind}.parquet"))).unwrap();
    let lines =
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n{\"text\": \"b\"}\n".to_vec();
    let list = b"{\"rows\": [{\"prompt\": \"a\", \"completion\": \"b\"}, {\"text\": \"\\u00e9\"}]}"
        .to_vec();
    let table = b"prompt,completion,tools\n\"a, \"\"b\"\"\",c,\"[{}]\"\nd,\"e\nf\",\n".to_vec();
    vec![
        ("a.jsonl", lines.clone()),
        ("a.json", list.clone()),
        ("a.csv", table.clone()),
        ("a.parquet", parquet("messages")),
        ("b.parquet", parquet("prompt")),
        ("c.parquet", parquet("text")),
        ("e.parquet", parquet("text.lz4")),
        ("b.jsonl", gzip(&lines)),
        ("b.json", zstd(&list)),
        ("b.csv", gzip(&table)),
        ("d.parquet", zstd(&parquet("text"))),
    ]
}

#[test]
fn damaged_files_are_errors_or_rows() {
    silence();
    let folder = Folder::new("damaged");
    let mut random = Random(11);
    let (mut read, mut failed) = (0, 0);
    let mut check = |name: &str, bytes: &[u8]| {
        let options = Options { skip_bad: random.below(2) == 1, ..Options::default() };
        match rows(&[folder.write(name, bytes)], &options) {
            Ok(_) => read += 1,
            Err(e) => {
                let said = e.to_string();
                assert!(!said.is_empty() && !said.contains('\n'), "{said}");
                failed += 1;
            }
        }
    };
    let mut random = Random(7);
    for (name, bytes) in files() {
        let step = (bytes.len() / 60).max(1);
        for end in (0..bytes.len()).step_by(step) {
            check(name, &bytes[..end]);
        }
        for _ in 0..80 {
            let mut bad = bytes.clone();
            for _ in 0..1 + random.below(4) {
                let at = random.below(bad.len());
                bad[at] = match random.below(3) {
                    0 => random.below(256) as u8,
                    1 => bad[at] ^ (1 << random.below(8)),
                    _ => [0, 0xff, 0x7f, 0x80][random.below(4)],
                };
            }
            check(name, &bad);
        }
        for _ in 0..20 {
            let noise: Vec<u8> = (0..random.below(300)).map(|_| random.below(256) as u8).collect();
            check(name, &noise);
            check(name, &[&bytes[..bytes.len().min(8)], &noise].concat());
        }
    }
    assert!(read > 50 && failed > 600, "{read} read, {failed} failed");
}

/// A schema may nest as deep as the directory has bytes for it.
#[test]
fn a_parquet_schema_of_many_levels_is_refused() {
    silence();
    let folder = Folder::new("schema");
    let file = |levels: usize| {
        // Thrift's compact protocol: version 1, a list of schema elements, no rows, no groups.
        let mut footer = vec![0x15, 0x02, 0x19, 0xfc];
        let mut count = levels + 1;
        while count >= 0x80 {
            footer.push((count & 0x7f) as u8 | 0x80);
            count >>= 7;
        }
        footer.push(count as u8);
        for level in 0..=levels {
            match level == levels {
                // Repetition required, a name, one child each; the last is an INT32.
                false => footer.extend([0x35, 0x00, 0x18, 0x01, b'a', 0x15, 0x02, 0x00]),
                true => footer.extend([0x15, 0x02, 0x25, 0x00, 0x18, 0x01, b'a', 0x00]),
            }
        }
        footer.extend([0x16, 0x00, 0x19, 0x0c, 0x00]);
        let len = (footer.len() as u32).to_le_bytes();
        [&b"PAR1"[..], &footer, &len, b"PAR1"].concat()
    };
    for levels in [1, 10, 100, 10_000, 500_000] {
        let result = rows(&[folder.write("a.parquet", file(levels))], &Options::default());
        let said = result.unwrap_err().to_string();
        let expected = if levels <= 10 { "has no rows" } else { "levels; at most 64 are read" };
        assert!(said.contains(expected), "{levels}: {said}");
    }
}
