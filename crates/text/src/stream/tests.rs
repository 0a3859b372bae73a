use super::*;
use crate::sampler::Rng;

/// All deltas of a stream, joined, and what stopped it.
fn all(stops: &[&str], pieces: &[&[u8]]) -> (String, Option<usize>) {
    let mut stream = TextStream::new(stops).unwrap();
    let mut text = String::new();
    let mut stop = None;
    for piece in pieces {
        let delta = stream.push(piece);
        text += &delta.text;
        assert!(stop.is_none() || delta == Delta::default());
        stop = stop.or(delta.stop);
    }
    text += &stream.finish().text;
    assert_eq!(stream.finish(), Delta::default());
    (text, stop)
}

#[test]
fn f71_characters_split_over_tokens_arrive_whole() {
    let mut stream = TextStream::new::<&str>(&[]).unwrap();
    let deltas: Vec<String> = "a😀é".bytes().map(|b| stream.push(&[b]).text).collect();
    assert_eq!(deltas, ["a", "", "", "", "😀", "", "é"]);
    assert_eq!(stream.finish(), Delta::default());
}

#[test]
fn f71_what_never_becomes_a_character_is_not_lost_and_does_not_stall() {
    // An incomplete character at the end.
    assert_eq!(all(&[], &[b"a\xf0\x9f", b"\x98"]).0, "a\u{fffd}");
    // Bytes that no continuation can mend do not hold the text after them back.
    let mut stream = TextStream::new::<&str>(&[]).unwrap();
    assert_eq!(stream.push(b"a\xff").text, "a\u{fffd}");
    assert_eq!(stream.push(b"\xf0\x9f").text, "");
    assert_eq!(stream.push(b"b").text, "\u{fffd}b");
}

#[test]
fn stop_strings_match_across_token_edges() {
    assert_eq!(all(&["STOP"], &[b"one S", b"TO", b"P two"]), ("one ".into(), Some(0)));
    // A possible beginning is held back, then let out.
    let mut stream = TextStream::new(&["\n\nUser:"]).unwrap();
    assert_eq!(stream.push(b"yes\n").text, "yes");
    assert_eq!(stream.push(b"\nUs").text, "");
    assert_eq!(stream.push(b"e it").text, "\n\nUse it");
    assert_eq!(stream.push(b"\n\n\nUser").text, "\n");
    assert_eq!(stream.push(b": x"), Delta { text: String::new(), stop: Some(0) });
    assert!(stream.is_ended());
    assert_eq!(stream.push(b"more"), Delta::default());
    // What was held at the end is let out.
    assert_eq!(all(&["STOP"], &[b"the ST"]), ("the ST".into(), None));
    // The first to be complete wins; at the same byte the longest.
    assert_eq!(all(&["abcd", "bc"], &[b"xabcd"]), ("xa".into(), Some(1)));
    assert_eq!(all(&["c", "abc", "bc"], &[b"xabc"]), ("x".into(), Some(1)));
    // Self-overlap.
    assert_eq!(all(&["aab"], &[b"aaa", b"ab"]), ("aa".into(), Some(0)));
    // Characters of several bytes, split.
    assert_eq!(all(&["終"], &[b"\xe5\xa7\x8b\xe7", b"\xb5", b"\x82x"]), ("始".into(), Some(0)));
}

#[test]
fn pieces_do_not_matter() {
    let mut rng = Rng::new(1);
    let alphabet: [&[u8]; 8] =
        [b"a", b"b", b"ab", "é".as_bytes(), "😀".as_bytes(), b"\xf0\x9f", b"\xff", b"\xc3"];
    let stops = ["aba", "bab\u{e9}", "a\u{fffd}a", "😀😀"];
    let (mut stopped, mut whole) = (0, 0);
    for _ in 0..3000 {
        let mut bytes = Vec::new();
        for _ in 0..rng.next_u64() % 12 {
            bytes.extend_from_slice(alphabet[(rng.next_u64() % 8) as usize]);
        }
        // From the definition: the whole text, and the stop string that is complete first.
        let text = String::from_utf8_lossy(&bytes);
        let ends = |s: &&str| text.find(*s).map(|at| at + s.len());
        let first = stops.iter().filter_map(ends).min();
        let want = match first {
            None => (text.to_string(), None),
            Some(end) => {
                let found = |s: &&str| text[..end].ends_with(*s);
                let (index, stop) = stops
                    .iter()
                    .enumerate()
                    .filter(|(_, s)| found(s))
                    .max_by_key(|(_, s)| s.len())
                    .unwrap();
                (text[..end - stop.len()].to_owned(), Some(index))
            }
        };
        if want.1.is_some() {
            stopped += 1
        } else {
            whole += 1
        }
        for size in 1..=4 {
            let pieces: Vec<&[u8]> = bytes.chunks(size).collect();
            assert_eq!(all(&stops, &pieces), want, "{bytes:?} by {size}");
        }
    }
    assert!(stopped > 300 && whole > 300, "{stopped} {whole}");
}

#[test]
fn stop_strings_are_bounded() {
    let refused = |stops: &[String]| TextStream::new(stops).unwrap_err().to_string();
    assert_eq!(refused(&["a".into(), String::new()]), "stop string 1 is empty; expected text");
    assert_eq!(
        refused(&vec!["x".to_owned(); MAX_STOPS + 1]),
        "stop string 64 is one too many; at most 64 are allowed"
    );
    assert!(refused(&["x".repeat(2000)]).ends_with("has 2000 bytes; at most 1024 are allowed"));
}
