//! A hundred thousand damaged headers: each gives a model or a one-line error, never a panic,
//! and never more memory than the file's size justifies.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers are tests"
)]
#![allow(unsafe_code, reason = "an allocator that counts")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use common::{Raw, Rng};
use gguf::{Gguf, Metadata, TensorInfo, TensorType, Value, blocks, encode};

/// The system's allocator, counting live bytes, their peak and the largest request of each thread.
struct Counting;

#[derive(Clone, Copy)]
struct Counts {
    live: isize,
    peak: isize,
    largest: usize,
}

thread_local! {
    static COUNTS: Cell<Counts> = const { Cell::new(Counts { live: 0, peak: 0, largest: 0 }) };
}

fn grow(size: usize) {
    let mut counts = COUNTS.get();
    counts.live += size as isize;
    counts.peak = counts.peak.max(counts.live);
    counts.largest = counts.largest.max(size);
    COUNTS.set(counts);
}

fn shrink(size: usize) {
    let mut counts = COUNTS.get();
    counts.live -= size as isize;
    COUNTS.set(counts);
}

// SAFETY: all memory comes from `System`, called as we were called; counting touches none of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's contract is passed on unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's contract is passed on unchanged.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        shrink(layout.size());
        // SAFETY: the caller's contract is passed on unchanged.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grow(size);
        shrink(layout.size());
        // SAFETY: the caller's contract is passed on unchanged.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The parsed header may take up to this many times the file's bytes (an entry of 13 bytes
/// becomes 60, an array of empty strings 24 for each 8), and this much besides for messages and
/// what does not depend on the file.
const FACTOR: usize = 6;
const BASE: usize = 4096;

/// Every value type and several tensors, with the places of all numbers that say how much
/// follows or where.
fn small_file() -> Raw {
    let mut raw = Raw::new(5, 14)
        .key_str("general.architecture", "llama")
        .key_u32("general.alignment", 32)
        .key_u32("llama.block_count", 2);
    let scalars: [(u32, usize); 10] =
        [(0, 1), (1, 1), (2, 2), (3, 2), (5, 4), (6, 4), (7, 1), (10, 8), (11, 8), (12, 8)];
    for (ty, size) in scalars {
        raw = raw.str(&format!("s{ty}")).u32(ty).raw(&[1, 0, 0, 0, 0, 0, 0, 0][..size]);
    }
    raw = raw.str("tokens").u32(9).u32(8).u64(6);
    for token in ["<s>", "a", "", "é", "long enough to be more than a word", "b"] {
        raw = raw.str(token);
    }
    raw.tensor("token_embd.weight", &[32, 4], 8, 0)
        .tensor("blk.0.attn_q.weight", &[32, 2], 2, 160)
        .tensor("blk.0.attn_norm.weight", &[8], 0, 224)
        .tensor("blk.0.ffn_up.weight", &[256, 1], 12, 256)
        .tensor("output.weight", &[4, 2, 3, 1], 1, 416)
        .data(464)
}

/// A file of the crate's own writer, with arrays of every type.
fn written_file() -> Raw {
    let mut meta = Metadata::new();
    let arrays: [Value; 11] = [
        vec![1_u8; 5].into(),
        vec![1_i8; 5].into(),
        vec![1_u16; 5].into(),
        vec![1_i16; 5].into(),
        vec![1_u32; 5].into(),
        vec![1_i32; 5].into(),
        vec![1_f32; 5].into(),
        vec![true; 5].into(),
        vec![String::new(); 5].into(),
        vec![1_u64; 5].into(),
        vec![1_f64; 5].into(),
    ];
    for (i, array) in arrays.into_iter().enumerate() {
        meta.insert(format!("array.{i}"), array);
    }
    let tensors = TensorType::ALL.map(|ty| {
        let info = TensorInfo::new(ty.name(), ty, &[1, 256]).unwrap();
        let bytes = vec![1; info.byte_len()];
        (info, Cow::Owned(bytes))
    });
    Raw { bytes: encode(&meta, tensors).unwrap(), fields: Vec::new() }
}

/// Numbers that break careless arithmetic.
const ODD: [u64; 20] = [
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    31,
    255,
    256,
    65536,
    0x7FFF_FFFF,
    0x8000_0000,
    0xFFFF_FFFF,
    1 << 32,
    0x7FFF_FFFF_FFFF_FFFF,
    0x8000_0000_0000_0000,
    u64::MAX,
];

fn odd(rng: &mut Rng, len: usize) -> u64 {
    match rng.below(6) {
        0 => rng.next(),
        1 => rng.next() >> rng.below(64),
        2 => (len as u64).wrapping_add(rng.below(65) as u64).wrapping_sub(32),
        3 => rng.pick(&ODD).wrapping_add(rng.below(3) as u64).wrapping_sub(1),
        _ => rng.pick(&ODD),
    }
}

fn overwrite(bytes: &mut [u8], at: usize, with: &[u8]) {
    for (to, from) in bytes.iter_mut().skip(at).zip(with) {
        *to = *from;
    }
}

/// One change. The first `header` bytes matter most.
fn mutate(rng: &mut Rng, bytes: &mut Vec<u8>, fields: &[(usize, usize)], header: usize) {
    if bytes.is_empty() {
        return;
    }
    let near = header.clamp(1, bytes.len());
    match rng.below(12) {
        // A number that says how much follows or where.
        0..=4 if !fields.is_empty() => {
            let (at, size) = rng.pick(fields);
            let value = odd(rng, bytes.len()).to_le_bytes();
            overwrite(bytes, at, &value[..size]);
        }
        0..=5 => {
            let at = rng.below(near);
            bytes[at] ^= 1 << rng.below(8);
        }
        6 => {
            let at = rng.below(near);
            bytes[at] = rng.next() as u8;
        }
        7 => {
            let (at, size) = (rng.below(near), rng.pick(&[1, 2, 4, 8]));
            let value = odd(rng, bytes.len()).to_le_bytes();
            overwrite(bytes, at, &value[..size]);
        }
        8 => bytes.truncate(rng.below(bytes.len())),
        // Lines repeated, lost, or in another place.
        9 => {
            let (at, len) = (rng.below(near), rng.below(64));
            let piece: Vec<u8> = bytes.iter().skip(at).take(len).copied().collect();
            let to = rng.below(near);
            bytes.splice(to..to, piece);
        }
        10 => {
            let at = rng.below(near);
            let end = (at + rng.below(64)).min(bytes.len());
            bytes.drain(at..end);
        }
        _ => {
            let (at, len, to) = (rng.below(near), rng.below(64), rng.below(near));
            let piece: Vec<u8> = bytes.iter().skip(at).take(len).copied().collect();
            overwrite(bytes, to, &piece);
        }
    }
}

/// Opens `bytes` and says what became of it, having looked at everything there is.
fn outcome(bytes: Vec<u8>, values: &mut [f32]) -> String {
    let len = bytes.len();
    let bytes: Arc<[u8]> = bytes.into();
    let before = COUNTS.get().live;
    COUNTS.set(Counts { live: before, peak: before, largest: 0 });
    let opened = Gguf::from_bytes("fuzz.gguf", bytes);
    let Counts { peak, largest, .. } = COUNTS.get();
    let taken = (peak - before) as usize;
    assert!(taken <= FACTOR * len + BASE, "{taken} bytes for a file of {len}");
    assert!(largest <= FACTOR * len + BASE, "{largest} bytes at once for a file of {len}");

    match opened {
        Ok(gguf) => {
            for (key, value) in gguf.metadata().iter() {
                assert_eq!(gguf.metadata().get(key).map(Value::to_string), Some(value.to_string()));
            }
            for tensor in gguf.tensors() {
                let found = gguf.require(&tensor.info.name).unwrap();
                assert_eq!(found.bytes.as_ptr(), tensor.bytes.as_ptr());
                assert_eq!(tensor.bytes.len(), tensor.info.byte_len());
                let elements = tensor.info.elements();
                if let Some(values) = values.get_mut(..elements) {
                    let _ = blocks::dequantize(tensor.info.ty, tensor.bytes, values);
                }
            }
            "Ok".to_owned()
        }
        Err(error) => {
            let message = error.to_string();
            assert!(message.starts_with("fuzz.gguf: "), "{message}");
            assert!(!message.contains(char::is_control), "{message:?}");
            assert!(message.len() < 1000, "{message}");
            let debug = format!("{:?}", error.kind());
            debug.split(|c: char| !c.is_alphanumeric()).next().unwrap().to_owned()
        }
    }
}

#[test]
fn a_hundred_thousand_mutated_headers() {
    let files = [small_file(), written_file()];
    let mut values = vec![0.0; 4096];
    let mut seen = BTreeMap::<String, usize>::new();
    for file in &files {
        assert_eq!(outcome(file.bytes.clone(), &mut values), "Ok");
    }
    for seed in 0..100_000 {
        let mut rng = Rng(seed);
        let file = &files[usize::from(seed % 4 == 0)];
        // The written file has no list of fields; its header is all but the data.
        let header = file.fields.last().map_or(1600, |(at, size)| at + size);
        let mut bytes = file.bytes.clone();
        for _ in 0..1 + rng.below(3) {
            mutate(&mut rng, &mut bytes, &file.fields, header);
        }
        *seen.entry(outcome(bytes, &mut values)).or_default() += 1;
    }
    println!("{seen:?}");
    // The mutations reach into every corner of the reader, and leave some files whole.
    let kinds = [
        "Ok",
        "Magic",
        "BigEndian",
        "Version",
        "Truncated",
        "Count",
        "Utf8",
        "DuplicateKey",
        "DuplicateTensor",
        "ValueType",
        "NestedArray",
        "BadBool",
        "Dimensions",
        "Shape",
        "RowLength",
        "UnsupportedType",
        "UnknownType",
        "Alignment",
        "Misaligned",
        "OutOfFile",
        "Overlap",
    ];
    for kind in kinds {
        let times = seen.get(kind).copied().unwrap_or(0);
        assert!(times >= 5, "{kind} came up {times} times: {seen:?}");
    }
}

/// The same bound where it is tightest: files made of nothing but the smallest entries.
#[test]
fn memory_for_many_small_entries_is_bounded() {
    let n = 20_000;
    let mut keys = Raw::new(0, n);
    for i in 0..n {
        keys = keys.str(&format!("{i:x}")).u32(0).raw(&[0]);
    }
    let mut strings = Raw::new(0, 1).str("k").u32(9).u32(8).u64(n);
    for _ in 0..n {
        strings = strings.u64(0);
    }
    let mut tensors = Raw::new(n, 0);
    for i in 0..n {
        tensors = tensors.tensor(&format!("{i:x}"), &[1], 0, i * 32);
    }
    for file in [keys, strings, tensors.data(32 * n as usize)] {
        assert_eq!(outcome(file.bytes, &mut []), "Ok");
    }
}
