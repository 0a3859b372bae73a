//! Wheels, whole and broken.

use std::fs;
use std::path::Path;

use super::fixture::{Folder, message, zip};
use crate::wheel::extract;

fn unpack(wheel: &[u8], member: &str, bytes: u64) -> Result<Vec<u8>, crate::Error> {
    let folder = Folder::new();
    let path = folder.path().join("a.whl");
    fs::write(&path, wheel).unwrap();
    let mut out = Vec::new();
    extract(&path, member, bytes, &mut out, Path::new("out"), &mut |_| {}).map(|()| out)
}

#[test]
fn members_are_found_and_unpacked() {
    let text = b"some text, some text, some text".repeat(10_000);
    let wheel = zip(&[("a", b"first", false), ("b/c", &text, true), ("d", b"", true)]);
    assert_eq!(unpack(&wheel, "a", 5).unwrap(), b"first");
    assert_eq!(unpack(&wheel, "b/c", text.len() as u64).unwrap(), text);
    assert_eq!(unpack(&wheel, "d", 0).unwrap(), b"");
    // A comment may follow the end of the directory, and may look like it.
    let mut commented = wheel.clone();
    let at = commented.len() - 2;
    commented[at..].copy_from_slice(&8u16.to_le_bytes());
    commented.extend_from_slice(b"PK\x05\x06 hi!");
    assert_eq!(unpack(&commented, "a", 5).unwrap(), b"first");
}

#[test]
fn a_wheel_that_is_not_as_expected_is_refused() {
    let wheel = zip(&[("a", b"first", false), ("b", &[7; 1000], true)]);
    let cases: [(&[u8], &str, u64, &str); 5] = [
        (&wheel, "c", 5, "has no member c"),
        (&wheel, "b", 1001, "member b has 1000 bytes, expected 1001"),
        (&wheel[..wheel.len() - 1], "a", 5, "no end of central directory"),
        (&wheel[20..], "a", 5, "has no member a"),
        (b"", "a", 5, "no end of central directory"),
    ];
    for (wheel, member, bytes, expected) in cases {
        let error = message(unpack(wheel, member, bytes));
        assert!(error.contains(expected), "{error}\nexpected: {expected}");
    }
    let mut headless = wheel.clone();
    headless[0] = b'Q';
    assert!(message(unpack(&headless, "a", 5)).contains("a has no header"));
    let mut flipped = wheel.clone();
    let at = flipped.windows(5).position(|bytes| bytes == b"first").unwrap();
    flipped[at] = b'F';
    assert!(message(unpack(&flipped, "a", 5)).contains("CRC-32"));
}

/// A member whose directory entry lies about its size writes no more than it says.
#[test]
fn a_bomb_stops_at_its_announced_size() {
    let mut wheel = zip(&[("b", &[0; 1_000_000], true)]);
    let at = wheel.windows(4).position(|bytes| bytes == b"PK\x01\x02").unwrap() + 24;
    wheel[at..at + 4].copy_from_slice(&10_000u32.to_le_bytes());
    let error = message(unpack(&wheel, "b", 10_000));
    assert!(error.contains("unpacks to more than its 10000 bytes"), "{error}");
}

#[test]
fn no_mutation_of_a_wheel_panics_or_unpacks_to_other_bytes() {
    let text: Vec<u8> = (0..600u32).map(|n| (n * n % 251) as u8).collect();
    let wheel = zip(&[("x", b"other", false), ("m", &text, true)]);
    let folder = Folder::new();
    let path = folder.path().join("a.whl");
    let mut state = 7u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize
    };
    let mut refused = 0;
    for _ in 0..5_000 {
        let mut mutant = wheel.clone();
        for _ in 0..=random() % 3 {
            let at = random() % mutant.len();
            mutant[at] = if random() % 2 == 0 { 0xff } else { random() as u8 };
        }
        if random() % 4 == 0 {
            mutant.truncate(random() % wheel.len());
        }
        fs::write(&path, &mutant).unwrap();
        let mut out = Vec::new();
        match extract(&path, "m", 600, &mut out, Path::new("out"), &mut |_| {}) {
            Ok(()) => assert_eq!(out, text),
            Err(_) => refused += 1,
        }
        assert!(out.len() <= 600);
    }
    assert!(refused > 1_000, "{refused}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error_that_names_the_file() {
    let folder = Folder::new();
    let path = folder.path().join("a.whl");
    fs::write(&path, zip(&[("a", &[1; 5000], true)])).unwrap();
    let full = Path::new("/dev/full");
    let mut out = fs::OpenOptions::new().write(true).open(full).unwrap();
    let error = message(extract(&path, "a", 5000, &mut out, full, &mut |_| {}));
    assert!(error.starts_with("cannot write /dev/full: No space left on device"), "{error}");
}
