//! Every kind of error: what brings it about, and its one line, word for word.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers are tests"
)]

mod common;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::Path;

use common::{Folder, Raw};
use gguf::{Error, Gguf, Metadata, TensorInfo, TensorType, Writer, blocks, encode};

const SUPPORTED: &str = "F32 F16 BF16 I32 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K \
                         IQ4_NL IQ4_XS MXFP4";
const AGAIN: &str = "the file is cut or damaged, download or convert it again";

/// The kind's name, from its `Debug`.
fn kind(error: &Error) -> String {
    let debug = format!("{:?}", error.kind());
    debug.split(|c: char| !c.is_alphanumeric()).next().unwrap().to_owned()
}

fn refused(raw: Raw) -> Error {
    Gguf::from_bytes("m.gguf", raw.bytes).expect_err("a malformed file was accepted")
}

/// One tensor of 64 F32 at offset 0, and room for it.
fn one_tensor(ne: &[u64], ty: u32, offset: u64) -> Raw {
    Raw::new(1, 0).tensor("x", ne, ty, offset).data(256)
}

#[test]
fn messages_of_the_reader() {
    let cases: Vec<(Raw, &str, String)> = vec![
        // The preamble.
        (
            Raw::default(),
            "Truncated",
            format!("ends too early: the magic needs 4 bytes at offset 0, 0 are left; {AGAIN}"),
        ),
        (
            Raw::default().raw(b"\x80PNG\x0d\x0a1234567890123456"),
            "Magic",
            "is not a GGUF file: it begins with \"\\x80PNG\", expected \"GGUF\"; give the path of \
             a .gguf file"
                .into(),
        ),
        (
            Raw::default().raw(b"version https://git-lfs.github.com/spec/v1\n"),
            "Magic",
            "is not a GGUF file: it begins with \"vers\", expected \"GGUF\"; it is a Git LFS \
             pointer, fetch the file itself with `git lfs pull`"
                .into(),
        ),
        (
            Raw::default().raw(b"<!DOCTYPE html><html>"),
            "Magic",
            "is not a GGUF file: it begins with \"<!DO\", expected \"GGUF\"; it looks like a web \
             page, download the file itself"
                .into(),
        ),
        (
            Raw::default().raw(b"tjgg\x03\0\0\0"),
            "Magic",
            "is not a GGUF file: it begins with \"tjgg\", expected \"GGUF\"; it is of llama.cpp's \
             format before GGUF, convert the model again"
                .into(),
        ),
        (
            Raw::default().raw(b"PK\x03\x04"),
            "Magic",
            "is not a GGUF file: it begins with \"PK\\x03\\x04\", expected \"GGUF\"; it is a zip \
             archive or a PyTorch file, convert the model to GGUF"
                .into(),
        ),
        (
            Raw::version(3_u32.swap_bytes(), 0, 0),
            "BigEndian",
            "is a big-endian GGUF file (version 3); expected little-endian; convert it with \
             llama.cpp's gguf_convert_endian.py"
                .into(),
        ),
        (
            Raw::version(0, 0, 0),
            "Version",
            "has GGUF version 0; expected 2 or 3; the file is damaged, download it again".into(),
        ),
        (
            Raw::version(1, 0, 0),
            "Version",
            "has GGUF version 1; expected 2 or 3; convert the model again with a current \
             llama.cpp"
                .into(),
        ),
        (
            Raw::version(4, 0, 0),
            "Version",
            "has GGUF version 4; expected 2 or 3; update Gradus or convert the model again".into(),
        ),
        // Counts and lengths.
        (
            Raw::new(u64::MAX, 0),
            "Count",
            format!(
                "declares 18446744073709551615 tensors, at least 590295810358705651680 bytes, 0 \
                 are left; {AGAIN}"
            ),
        ),
        (
            Raw::new(0, 3).raw(&[0; 38]),
            "Count",
            format!("declares 3 keys, at least 39 bytes, 38 are left; {AGAIN}"),
        ),
        (
            Raw::new(0, 1).u64(1 << 40).raw(b"key with no end"),
            "Truncated",
            format!(
                "ends too early: key 0 needs 1099511627776 bytes at offset 32, 15 are left; \
                 {AGAIN}"
            ),
        ),
        (
            Raw::new(0, 1).str("long").u32(8).u64(u64::MAX).raw(b"abc"),
            "Truncated",
            format!(
                "ends too early: the value of key `long` needs 18446744073709551615 bytes at \
                 offset 48, 3 are left; {AGAIN}"
            ),
        ),
        (
            Raw::new(0, 1).str("ids").u32(9).u32(4).u64(1 << 62).raw(&[0; 16]),
            "Count",
            format!(
                "declares 4611686018427387904 elements of key `ids`, at least \
                 18446744073709551616 bytes, 16 are left; {AGAIN}"
            ),
        ),
        (
            Raw::new(0, 1).str("words").u32(9).u32(8).u64(3).raw(&[0; 16]),
            "Count",
            format!("declares 3 elements of key `words`, at least 24 bytes, 16 are left; {AGAIN}"),
        ),
        (
            Raw::new(0, 1).str("flags").u32(9).u32(7).u64(9).raw(&[0; 8]),
            "Truncated",
            format!(
                "ends too early: elements of key `flags` needs 9 bytes at offset 53, 8 are left; \
                 {AGAIN}"
            ),
        ),
        // Keys and values.
        (
            Raw::new(0, 1).u64(3).raw(b"k\xFFy").u32(0).raw(&[0]),
            "Utf8",
            "key 0 is not UTF-8 (byte 1 of it); expected text; convert the model again".into(),
        ),
        (
            Raw::new(0, 1).str("words").u32(9).u32(8).u64(2).str("ok").u64(2).raw(b"\xC3\x28"),
            "Utf8",
            "element 1 of key `words` is not UTF-8 (byte 0 of it); expected text; convert the \
             model again"
                .into(),
        ),
        (
            Raw::new(0, 3).key_u32("b", 1).key_u32("a", 1).key_u32("b", 2),
            "DuplicateKey",
            "has key `b` twice; expected unique keys; convert the model again".into(),
        ),
        (
            Raw::new(0, 1).key_u32("k", 0).raw(&[0; 8]).patch_u32(33, 13),
            "ValueType",
            "key `k` has value type 13; expected 0 to 12; the file is damaged or newer".into(),
        ),
        (
            Raw::new(0, 1).str("k").u32(9).u32(77).u64(0),
            "ValueType",
            "key `k` has value type 77; expected 0 to 12; the file is damaged or newer".into(),
        ),
        (
            Raw::new(0, 1).str("k").u32(9).u32(9).u64(1).u32(4).u64(0),
            "NestedArray",
            "key `k` is an array of arrays; expected scalars or strings; remove the key".into(),
        ),
        (
            Raw::new(0, 1).str("k").u32(7).raw(&[2]),
            "BadBool",
            "key `k` holds a bool with byte 2; expected 0 or 1; the file is damaged".into(),
        ),
        (
            Raw::new(0, 1).str("k\n\u{2028}\0").u32(7).raw(&[9]),
            "BadBool",
            "key `k\\n\\u{2028}\\u{0}` holds a bool with byte 9; expected 0 or 1; the file is \
             damaged"
                .into(),
        ),
        (
            Raw::new(0, 1).str(&"é".repeat(97)).u32(7).raw(&[9]),
            "BadBool",
            format!(
                "key `{}…` holds a bool with byte 9; expected 0 or 1; the file is damaged",
                "é".repeat(96)
            ),
        ),
        (
            Raw::new(0, 1).key_u32("general.alignment", 48),
            "Alignment",
            "key `general.alignment` is 48; expected a power of two from 8 to 1048576; the file \
             is damaged"
                .into(),
        ),
        (
            Raw::new(0, 1).key_u32("general.alignment", 0),
            "Alignment",
            "key `general.alignment` is 0; expected a power of two from 8 to 1048576; the file is \
             damaged"
                .into(),
        ),
        (
            Raw::new(0, 1).key_u32("general.alignment", 1 << 31),
            "Alignment",
            "key `general.alignment` is 2147483648; expected a power of two from 8 to 1048576; \
             the file is damaged"
                .into(),
        ),
        (
            Raw::new(0, 1).key_str("general.alignment", "32"),
            "WrongType",
            "key `general.alignment` is string \"32\"; expected an unsigned 32-bit integer; \
             convert the model again"
                .into(),
        ),
        // Tensors.
        (
            Raw::new(2, 0).tensor("x", &[64], 0, 0).tensor("x", &[64], 0, 256).data(512),
            "DuplicateTensor",
            "has tensor `x` twice; expected unique names; convert the model again".into(),
        ),
        (
            one_tensor(&[], 0, 0),
            "Dimensions",
            "tensor `x` has 0 dimensions; expected 1 to 4; the file is damaged".into(),
        ),
        (
            one_tensor(&[1, 2, 3, 4, 5], 0, 0),
            "Dimensions",
            "tensor `x` has 5 dimensions; expected 1 to 4; the file is damaged".into(),
        ),
        (
            one_tensor(&[8, 0], 0, 0),
            "Shape",
            "tensor `x` has shape [0, 8]; expected positive dimensions and a size below 2^63; the \
             file is damaged"
                .into(),
        ),
        (
            one_tensor(&[1 << 32, 1 << 32], 0, 0),
            "Shape",
            "tensor `x` has shape [4294967296, 4294967296]; expected positive dimensions and a \
             size below 2^63; the file is damaged"
                .into(),
        ),
        (
            one_tensor(&[1 << 61], 0, 0),
            "Shape",
            "tensor `x` has shape [2305843009213693952]; expected positive dimensions and a size \
             below 2^63; the file is damaged"
                .into(),
        ),
        (
            // Fewer bytes than elements, and still too many elements.
            one_tensor(&[256, 1 << 56], 10, 0),
            "Shape",
            "tensor `x` has shape [72057594037927936, 256]; expected positive dimensions and a \
             size below 2^63; the file is damaged"
                .into(),
        ),
        (
            one_tensor(&[96, 2], 12, 0),
            "RowLength",
            "tensor `x` of type Q4_K has rows of 96 elements; expected a multiple of 256; \
             quantize it again"
                .into(),
        ),
        (
            one_tensor(&[256], 16, 0),
            "UnsupportedType",
            format!(
                "tensor `x` has type IQ2_XXS, which Gradus does not read; supported: {SUPPORTED}; \
                 quantize the model to one of them"
            ),
        ),
        (
            one_tensor(&[256], 9000, 0),
            "UnknownType",
            format!(
                "tensor `x` has unknown type number 9000; supported: {SUPPORTED}; the file is \
                 damaged or newer"
            ),
        ),
        (
            one_tensor(&[32], 0, 16),
            "Misaligned",
            "tensor `x` begins at offset 16 of the data; expected a multiple of 32; the file is \
             damaged"
                .into(),
        ),
        (
            one_tensor(&[65], 0, 0),
            "OutOfFile",
            "tensor `x` needs bytes 64 to 324; expected them within the file's 320; the file is \
             cut, download it again"
                .into(),
        ),
        (
            one_tensor(&[64], 0, u64::MAX - 31),
            "OutOfFile",
            "tensor `x` needs bytes 18446744073709551648 to 18446744073709551904; expected them \
             within the file's 320; the file is cut, download it again"
                .into(),
        ),
        (
            Raw::new(3, 0)
                .tensor("b", &[17], 0, 64)
                .tensor("c", &[4], 0, 128)
                .tensor("a", &[4], 0, 0)
                .data(256),
            "Overlap",
            "tensors `b` and `c` overlap; expected separate bytes; convert again".into(),
        ),
        (
            Raw::new(0, 2).key_u32("split.count", 3).key_u32("split.no", 0),
            "SplitInMemory",
            "is one of 3 parts of a split model; expected a whole one; open it by its path".into(),
        ),
    ];
    for (raw, name, message) in cases {
        let error = refused(raw);
        assert_eq!(error.to_string(), format!("m.gguf: {message}"));
        assert_eq!(kind(&error), name);
        assert_eq!(error.file(), Some("m.gguf"));
    }
}

impl Raw {
    fn patch_u32(mut self, at: usize, value: u32) -> Self {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self
    }
}

#[test]
fn messages_of_typed_access() {
    let raw = Raw::new(1, 3)
        .key_u32("n", 7)
        .str("ids")
        .u32(9)
        .u32(5)
        .u64(2)
        .raw(&[0xFF; 8])
        .str("big")
        .u32(10)
        .u64(1 << 32)
        .tensor("x", &[64], 26, 0)
        .data(256);
    let gguf = Gguf::from_bytes("dir/m.gguf", raw.bytes).unwrap();
    let meta = gguf.metadata();
    let wrong = |key: &str, found: &str, expected: &str| {
        format!("dir/m.gguf: key `{key}` is {found}; expected {expected}; convert the model again")
    };
    let cases = [
        (
            meta.str("llama.none").unwrap_err(),
            "dir/m.gguf: key `llama.none` is missing; expected a string; convert the model again"
                .to_owned(),
        ),
        (meta.str("n").unwrap_err(), wrong("n", "u32 7", "a string")),
        (meta.opt_bool("n").unwrap_err(), wrong("n", "u32 7", "a bool")),
        (meta.f32("n").unwrap_err(), wrong("n", "u32 7", "a floating-point number")),
        (
            meta.u32("big").unwrap_err(),
            wrong("big", "u64 4294967296", "an unsigned 32-bit integer"),
        ),
        (
            meta.u64("ids").unwrap_err(),
            wrong("ids", "array of 2 i32", "an unsigned 64-bit integer"),
        ),
        (meta.i64("ids").unwrap_err(), wrong("ids", "array of 2 i32", "a signed 64-bit integer")),
        (meta.strings("ids").unwrap_err(), wrong("ids", "array of 2 i32", "an array of strings")),
        (meta.f32s("ids").unwrap_err(), wrong("ids", "array of 2 i32", "an array of f32")),
        (meta.bools("ids").unwrap_err(), wrong("ids", "array of 2 i32", "an array of bools")),
        (meta.i32s("n").unwrap_err(), wrong("n", "u32 7", "an array of 32-bit integers")),
        (
            meta.u32s("ids").unwrap_err(),
            wrong("ids", "array of 2 i32", "an array of unsigned 32-bit integers"),
        ),
        (
            gguf.require("blk.0.attn_q.weight").unwrap_err(),
            "dir/m.gguf: tensor `blk.0.attn_q.weight` is missing; expected by this model; the \
             file is incomplete, convert it again"
                .to_owned(),
        ),
        (
            gguf.require("x").unwrap().to_f32().unwrap_err(),
            "type I32 cannot be read as f32; expected a floating-point or quantized type; choose \
             another type"
                .to_owned(),
        ),
    ];
    for (error, message) in cases {
        assert_eq!(error.to_string(), message);
    }
    assert_eq!(meta.i32s("ids").unwrap().as_ref(), [-1, -1]);
    assert_eq!(meta.u64("n").unwrap(), 7);
    assert_eq!(meta.opt_str("llama.none").unwrap(), None);
}

#[test]
fn messages_of_blocks() {
    let cases = [
        (
            blocks::dequantize(TensorType::Q4_0, &[0; 17], &mut [0.0; 32]),
            "17 bytes of Q4_0 and 32 elements do not match; expected 18 bytes for each 32 \
             elements; pass whole blocks",
        ),
        (
            blocks::quantize_q8_0(&[0.0; 31], &mut [0; 34]),
            "34 bytes of Q8_0 and 31 elements do not match; expected 34 bytes for each 32 \
             elements; pass whole blocks",
        ),
        (
            blocks::decode(TensorType::Q6K, &[0; 420], &mut blocks::Decoded::default()),
            "420 bytes of Q6_K and 256 elements do not match; expected 210 bytes for each 256 \
             elements; pass whole blocks",
        ),
        (
            blocks::decode(TensorType::BF16, &[0; 2], &mut blocks::Decoded::default()),
            "type BF16 cannot be taken apart into blocks; expected a quantized type; choose \
             another type",
        ),
        (
            blocks::quantize(TensorType::Q3K, &[0.0; 256], &mut [0; 110]),
            "type Q3_K cannot be made from f32; expected F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, \
             Q8_0, Q4_K, Q5_K or Q6_K; choose another type",
        ),
        (
            blocks::quantize(TensorType::F32, &[0.0; 2], &mut [0; 9]),
            "9 bytes of F32 and 2 elements do not match; expected 4 bytes for each 1 elements; \
             pass whole blocks",
        ),
    ];
    for (result, message) in cases {
        let error = result.unwrap_err();
        assert_eq!(error.to_string(), message);
        assert_eq!(error.file(), None);
    }
}

/// A sparse file may hold a tensor that is larger than any memory.
#[test]
fn a_tensor_beyond_memory_is_an_error() {
    let info = TensorInfo::new("a", TensorType::F32, &[1 << 60]).unwrap();
    let error = gguf::Tensor { info: &info, bytes: &[] }.to_f32().unwrap_err();
    assert_eq!(
        error.to_string(),
        "tensor `a` has 1152921504606846976 elements, for which there is no memory as f32; close \
         other programs, or use a machine with more memory"
    );
}

#[test]
fn messages_of_the_writer() {
    let info = |name: &str| TensorInfo::new(name, TensorType::F32, &[2]).unwrap();
    let written = |name: &str| (info(name), Cow::Owned(vec![0; 8]));
    let meta = Metadata::new();
    let mut odd = Metadata::new();
    odd.insert("general.alignment", 24_u32);
    let folder = Folder::new("writer-messages");
    let (path, other) = (folder.join("out.gguf"), folder.join("other.gguf"));
    let mut two = Writer::create(&path, &meta, vec![info("a")]).unwrap();
    two.tensor(&[0; 8]).unwrap();
    let cases = [
        (
            encode(&meta, [written("a"), written("a")]).map(|_| ()),
            "has tensor `a` twice; expected unique names; convert the model again".to_owned(),
        ),
        (
            encode(&meta, [written(&"n".repeat(64))]).map(|_| ()),
            format!(
                "tensor `{}` has a name of 64 bytes; expected 1 to 63; shorten the name",
                "n".repeat(64)
            ),
        ),
        (
            encode(&meta, [(info("a"), Cow::Owned(vec![0; 7]))]).map(|_| ()),
            "tensor `a` was given 7 bytes; expected 8; pass whole tensors".to_owned(),
        ),
        (
            encode(&odd, [written("a")]).map(|_| ()),
            "new metadata: key `general.alignment` is 24; expected a power of two from 8 to \
             1048576; the file is damaged"
                .to_owned(),
        ),
        (
            TensorInfo::new("a", TensorType::F32, &[]).map(|_| ()),
            "tensor `a` has 0 dimensions; expected 1 to 4; the file is damaged".to_owned(),
        ),
        (
            TensorInfo::new("a", TensorType::Q8_0, &[4, 33]).map(|_| ()),
            "tensor `a` of type Q8_0 has rows of 33 elements; expected a multiple of 32; quantize \
             it again"
                .to_owned(),
        ),
        (
            two.tensor(&[0; 8]),
            format!(
                "{}: was given 2 tensors; expected 1; write each declared tensor once",
                path.display()
            ),
        ),
        (
            Writer::create(&other, &meta, vec![info("a")]).unwrap().finish(),
            format!(
                "{}: was given 0 tensors; expected 1; write each declared tensor once",
                other.display()
            ),
        ),
        (
            // While `two` is there.
            Writer::create(&path, &meta, vec![info("a")]).map(|_| ()),
            format!(
                "{}: cannot create a file beside it: .out.gguf.tmp: another process is writing \
                 this file; wait for its end, or choose another file",
                path.display()
            ),
        ),
    ];
    for (result, message) in cases {
        assert_eq!(result.unwrap_err().to_string(), message);
    }
    drop(two);
    assert!(folder.names().is_empty(), "a writer that did not finish leaves nothing behind");

    let nowhere = folder.join("no/such/folder/out.gguf");
    let error = gguf::write(&nowhere, &meta, [written("a")]).unwrap_err().to_string();
    let start = format!("{}: cannot create a file beside it: ", nowhere.display());
    assert!(error.starts_with(&start) && error.ends_with("; check the path"), "{error}");
}

/// A part of a split model with one tensor of its own.
fn part(no: u32, count: u32, total: u32, tensor: &str) -> Raw {
    Raw::new(1, 3)
        .key_u32("split.no", no)
        .key_u32("split.count", count)
        .key_u32("split.tensors.count", total)
        .tensor(tensor, &[8], 0, 0)
        .data(32)
}

fn save(folder: &Folder, name: &str, raw: Raw) {
    std::fs::write(folder.join(name), raw.bytes).unwrap();
}

#[test]
fn messages_of_files_and_split_models() {
    let folder = Folder::new("files");
    let open = |name: &str| Gguf::open(folder.join(name)).map(|_| ()).unwrap_err();
    let message = |name: &str, rest: &str| format!("{}: {rest}", folder.join(name).display());

    let error = open("absent.gguf").to_string();
    assert!(error.starts_with(&message("absent.gguf", "cannot open: ")), "{error}");
    assert!(error.ends_with("; check the path"), "{error}");
    assert_eq!(
        open("").to_string(),
        message("", "is not a regular file; give the path of a .gguf file")
    );
    save(&folder, "empty.gguf", Raw::default());
    assert_eq!(kind(&open("empty.gguf")), "Truncated");

    save(&folder, "m-00001-of-00002.gguf", part(0, 2, 2, "a"));
    let error = open("m-00001-of-00002.gguf").to_string();
    let start = message("m-00002-of-00002.gguf", "part 2 of 2 cannot be opened: ");
    assert!(error.starts_with(&start), "{error}");
    assert!(error.ends_with("; put all parts into one folder"), "{error}");

    save(&folder, "m-00002-of-00002.gguf", part(1, 2, 2, "b"));
    Gguf::open(folder.join("m-00001-of-00002.gguf")).unwrap();
    save(&folder, "renamed.gguf", part(0, 2, 2, "a"));
    save(&folder, "renamed2.gguf", part(1, 2, 2, "b"));
    let cases = [
        (
            "m-00002-of-00002.gguf",
            "is part 2 of 2 of a split model; expected part 1; open `m-00001-of-00002.gguf`",
        ),
        (
            "renamed2.gguf",
            "is part 2 of 2 of a split model; expected part 1; open the file ending in \
             -00001-of-00002.gguf",
        ),
        (
            "renamed.gguf",
            "is part 1 of 2 of a split model; expected a name that ends in -00001-of-00002.gguf; \
             give the parts their original names",
        ),
    ];
    for (name, rest) in cases {
        assert_eq!(open(name).to_string(), message(name, rest));
    }

    // Second parts that do not belong to the first.
    let cases = [
        (
            part(0, 2, 2, "b"),
            "m-00002-of-00002.gguf",
            "key `split.no` is 0; expected 1; this part belongs to another model",
        ),
        (
            part(1, 3, 2, "b"),
            "m-00002-of-00002.gguf",
            "key `split.count` is 3; expected 2; this part belongs to another model",
        ),
        (
            Raw::new(1, 0).tensor("b", &[8], 0, 0).data(32),
            "m-00002-of-00002.gguf",
            "key `split.no` is missing; expected an unsigned 64-bit integer; convert the model \
             again",
        ),
        (
            part(1, 2, 2, "a"),
            "m-00001-of-00002.gguf",
            "has tensor `a` twice; expected unique names; convert the model again",
        ),
        (
            Raw::new(0, 2).key_u32("split.no", 1).key_u32("split.count", 2),
            "m-00001-of-00002.gguf",
            "key `split.tensors.count` is 2; found 1 tensors in 2 parts; download all parts again",
        ),
    ];
    for (second, named, rest) in cases {
        save(&folder, "m-00002-of-00002.gguf", second);
        assert_eq!(open("m-00001-of-00002.gguf").to_string(), message(named, rest));
    }
}

/// The table above is complete: every variant in the source occurs in these tests.
#[test]
fn every_kind_is_tested() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/error.rs");
    let source = std::fs::read_to_string(source).unwrap();
    let kinds = source.split("pub enum ErrorKind {").nth(1).unwrap().split("\n}\n").next().unwrap();
    let declared: BTreeSet<&str> = kinds
        .lines()
        .filter_map(|line| line.strip_prefix("    ")?.split([' ', ',']).next())
        .filter(|word| word.starts_with(|c: char| c.is_ascii_uppercase()))
        .collect();
    // What each message must be recognised by; a new kind has to be added here and above.
    let tested = BTreeSet::from([
        "Io",
        "Write",
        "Occupied",
        "NotAFile",
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
        "MissingKey",
        "WrongType",
        "MissingTensor",
        "Dimensions",
        "Shape",
        "RowLength",
        "UnsupportedType",
        "UnknownType",
        "Alignment",
        "Misaligned",
        "OutOfFile",
        "Overlap",
        "NotFirstPart",
        "SplitName",
        "SplitInMemory",
        "MissingPart",
        "WrongPart",
        "SplitTensors",
        "NameLength",
        "DataLength",
        "TensorCount",
        "BlockLength",
        "Memory",
        "Conversion",
    ]);
    assert_eq!(declared, tested);
}
