//! What is written is what is read.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers are tests"
)]

mod common;

use std::borrow::Cow;

use common::{Folder, Rng};
use gguf::{Array, Gguf, Metadata, TensorInfo, TensorType, Value, Writer, encode, write};

fn text(rng: &mut Rng) -> String {
    let n = rng.below(12);
    (0..n).map(|_| rng.pick(&['a', 'Z', '.', ' ', '\n', '\0', 'é', '猫', '🦀', '▁'])).collect()
}

fn many<T>(rng: &mut Rng, mut item: impl FnMut(&mut Rng) -> T) -> Vec<T> {
    let n = rng.below(9);
    (0..n).map(|_| item(rng)).collect()
}

/// Any value. Floats are finite, so that they can be compared.
fn value(rng: &mut Rng) -> Value {
    fn f32(rng: &mut Rng) -> f32 {
        rng.next() as i32 as f32 / 1024.0
    }
    fn f64(rng: &mut Rng) -> f64 {
        rng.next() as i64 as f64 / 1024.0
    }
    match rng.below(24) {
        0 => Value::U8(rng.next() as u8),
        1 => Value::I8(rng.next() as i8),
        2 => Value::U16(rng.next() as u16),
        3 => Value::I16(rng.next() as i16),
        4 => Value::U32(rng.next() as u32),
        5 => Value::I32(rng.next() as i32),
        6 => Value::F32(f32(rng)),
        7 => Value::Bool(rng.below(2) == 1),
        8 => Value::String(text(rng)),
        9 => Value::U64(rng.next()),
        10 => Value::I64(rng.next() as i64),
        11 => Value::F64(f64(rng)),
        12 => Value::Array(Array::U8(many(rng, |r| r.next() as u8))),
        13 => Value::Array(Array::I8(many(rng, |r| r.next() as i8))),
        14 => Value::Array(Array::U16(many(rng, |r| r.next() as u16))),
        15 => Value::Array(Array::I16(many(rng, |r| r.next() as i16))),
        16 => Value::Array(Array::U32(many(rng, |r| r.next() as u32))),
        17 => Value::Array(Array::I32(many(rng, |r| r.next() as i32))),
        18 => Value::Array(Array::F32(many(rng, f32))),
        19 => Value::Array(Array::Bool(many(rng, |r| r.below(2) == 1))),
        20 => Value::Array(Array::String(many(rng, text))),
        21 => Value::Array(Array::U64(many(rng, Rng::next))),
        22 => Value::Array(Array::I64(many(rng, |r| r.next() as i64))),
        _ => Value::Array(Array::F64(many(rng, f64))),
    }
}

type Model = (Metadata, Vec<(TensorInfo, Cow<'static, [u8]>)>);

fn model(rng: &mut Rng) -> Model {
    let mut meta = Metadata::new();
    for i in 0..rng.below(12) {
        meta.insert(format!("{}{i}", text(rng)), value(rng));
    }
    if rng.below(3) == 0 {
        meta.insert("general.alignment", rng.pick(&[8_u32, 16, 64, 4096]));
    }
    let tensors = (0..rng.below(8))
        .map(|i| {
            let ty = rng.pick(&TensorType::ALL);
            let mut shape: Vec<usize> = (0..rng.below(4)).map(|_| 1 + rng.below(3)).collect();
            shape.push(ty.block_len() * (1 + rng.below(3)));
            let info = TensorInfo::new(format!("blk.{i}.w"), ty, &shape).unwrap();
            let bytes = rng.bytes(info.byte_len());
            (info, Cow::Owned(bytes))
        })
        .collect();
    (meta, tensors)
}

fn assert_same(gguf: &Gguf, (meta, tensors): &Model) {
    assert_eq!(gguf.metadata(), meta);
    assert_eq!(gguf.tensors().len(), tensors.len());
    for (found, (info, bytes)) in gguf.tensors().zip(tensors) {
        assert_eq!((&found.info.name, found.info.ty), (&info.name, info.ty));
        assert_eq!(found.info.shape, info.shape);
        assert!(found.bytes == bytes.as_ref());
    }
}

#[test]
fn what_is_written_is_read_back() {
    let folder = Folder::new("round-trip");
    let path = folder.join("m.gguf");
    for seed in 0..500 {
        let model = model(&mut Rng(seed));
        let bytes = encode(&model.0, model.1.clone()).unwrap();
        let read = Gguf::from_bytes("m.gguf", bytes.clone()).unwrap_or_else(|e| panic!("{e}"));
        assert_same(&read, &model);
        if seed % 10 == 0 {
            write(&path, &model.0, model.1.clone()).unwrap();
            assert!(std::fs::read(&path).unwrap() == bytes, "file and memory differ");
            assert_same(&Gguf::open(&path).unwrap(), &model);
        }
        // Reading and writing again gives the same bytes.
        let again = read.tensors().map(|t| (t.info.clone(), Cow::Borrowed(t.bytes)));
        assert!(encode(read.metadata(), again).unwrap() == bytes);
    }
    assert_eq!(folder.names(), ["m.gguf"], "no temporary file stays");
}

/// A real file of another writer survives in every byte.
#[test]
fn a_file_of_llama_cpps_converter_is_written_as_it_was() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/oracle/llama/model.gguf");
    let gguf = Gguf::open(path).unwrap();
    let tensors = gguf.tensors().map(|t| (t.info.clone(), Cow::Borrowed(t.bytes)));
    assert!(encode(gguf.metadata(), tensors).unwrap() == std::fs::read(path).unwrap());
}

#[test]
fn version_2_is_read() {
    let model = model(&mut Rng(7));
    let mut bytes = encode(&model.0, model.1.clone()).unwrap();
    bytes[4] = 2;
    assert_same(&Gguf::from_bytes("m.gguf", bytes).unwrap(), &model);
}

#[test]
fn data_is_aligned() {
    for alignment in [8_u32, 32, 1024] {
        let mut meta = Metadata::new();
        meta.insert("general.alignment", alignment);
        let info = |name| TensorInfo::new(name, TensorType::F16, &[3]).unwrap();
        let tensors = ["a", "b"].map(|name| (info(name), Cow::Owned(vec![7; 6])));
        let bytes = encode(&meta, tensors).unwrap();
        assert!(bytes.len().is_multiple_of(alignment as usize));
        let gguf = Gguf::from_bytes("m.gguf", bytes).unwrap();
        let at: Vec<usize> = gguf.tensors().map(|t| t.bytes.as_ptr() as usize).collect();
        assert_eq!(at[1] - at[0], alignment as usize);
    }
}

#[test]
fn an_old_file_stays_until_the_new_one_is_whole() {
    let folder = Folder::new("atomic");
    let path = folder.join("a.gguf");
    std::fs::write(&path, "GGUF, old").unwrap();
    let info = TensorInfo::new("x", TensorType::F32, &[2]).unwrap();
    let mut writer = Writer::create(&path, &Metadata::new(), vec![info.clone()]).unwrap();
    assert_eq!(folder.names().len(), 2);
    writer.tensor(&[0; 7]).unwrap_err();
    drop(writer);
    assert_eq!(std::fs::read(&path).unwrap(), b"GGUF, old");
    assert_eq!(folder.names(), ["a.gguf"]);

    let mut writer = Writer::create(&path, &Metadata::new(), vec![info]).unwrap();
    writer.tensor(&[5; 8]).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"GGUF, old");
    writer.finish().unwrap();
    assert_eq!(Gguf::open(&path).unwrap().require("x").unwrap().bytes, [5; 8]);
    assert_eq!(folder.names(), ["a.gguf"]);
}

#[test]
fn a_model_takes_the_place_of_a_gguf_file_or_of_nothing() {
    let folder = Folder::new("place");
    let write = |name: &str| {
        let info = TensorInfo::new("x", TensorType::F32, &[2]).unwrap();
        write(folder.join(name), &Metadata::new(), [(info, Cow::Owned(vec![5; 8]))])
    };
    for (name, there, may) in [
        ("nothing.gguf", None, true),
        ("empty.gguf", Some(""), true),
        ("model.gguf", Some("GGUF and more"), true),
        ("data.jsonl", Some("{}"), false),
        ("short", Some("GGU"), false),
    ] {
        let path = folder.join(name);
        there.iter().for_each(|text| std::fs::write(&path, text).unwrap());
        assert_eq!(gguf::check_out(&path).is_ok(), may, "{name}");
        let written = write(name);
        assert_eq!(written.is_ok(), may, "{name}: {written:?}");
        if let Err(e) = written {
            let said = "is there already and no GGUF file; choose another file, or remove it first";
            assert_eq!(e.to_string(), format!("{}: {said}", path.display()));
            assert!(!e.is_write_failure());
            assert_eq!(std::fs::read_to_string(&path).ok().as_deref(), there);
        }
    }
    let error = write("").unwrap_err().to_string();
    assert!(error.contains("is not a regular file"), "{error}");
}

#[cfg(unix)]
#[test]
fn a_link_stays_and_a_device_too() {
    use std::os::unix::fs::symlink;
    let folder = Folder::new("links");
    let write = |name: &str| {
        let info = TensorInfo::new("x", TensorType::F32, &[2]).unwrap();
        write(folder.join(name), &Metadata::new(), [(info, Cow::Owned(vec![5; 8]))])
    };
    symlink("far.gguf", folder.join("near.gguf")).unwrap();
    write("near.gguf").unwrap();
    assert!(std::fs::symlink_metadata(folder.join("near.gguf")).unwrap().is_symlink());
    Gguf::open(folder.join("far.gguf")).unwrap();
    symlink("/dev/null", folder.join("null.gguf")).unwrap();
    let error = write("null.gguf").unwrap_err();
    assert!(error.to_string().contains("is not a regular file"), "{error}");
    assert_eq!(folder.names(), ["far.gguf", "near.gguf", "null.gguf"]);
}

#[test]
fn what_the_system_refuses_to_be_written_is_no_fault_of_the_input() {
    let folder = Folder::new("failures");
    let info = TensorInfo::new("x", TensorType::F32, &[2]).unwrap();
    let error = write(folder.join("no/a.gguf"), &Metadata::new(), [(info, vec![5; 8].into())]);
    assert!(error.unwrap_err().is_write_failure());
    assert!(!Gguf::open(folder.join("no/a.gguf")).unwrap_err().is_write_failure());
}

/// The parts as llama.cpp's `gguf-split` writes them: the first may hold metadata alone.
#[test]
fn split_models_are_opened_whole() {
    let folder = Folder::new("split");
    for (tensors_of, total) in [([2, 1, 3], 6), ([0, 4, 1], 5)] {
        let mut expected = Vec::new();
        for (no, n) in tensors_of.into_iter().enumerate() {
            let mut meta = Metadata::new();
            if no == 0 {
                meta.insert("general.architecture", "llama");
            }
            meta.insert("split.no", no as u16);
            meta.insert("split.tensors.count", total);
            meta.insert("split.count", 3_u16);
            let tensors: Vec<_> = (0..n)
                .map(|i| {
                    let name = format!("part{no}.{i}");
                    let info = TensorInfo::new(name, TensorType::F32, &[2, 2]).unwrap();
                    (info, Cow::Owned(vec![(no * 16 + i) as u8; 16]))
                })
                .collect();
            let path = folder.join(&format!("m-{:05}-of-00003.gguf", no + 1));
            write(path, &meta, tensors.clone()).unwrap();
            expected.extend(tensors);
        }
        let gguf = Gguf::open(folder.join("m-00001-of-00003.gguf")).unwrap();
        assert_eq!((gguf.parts(), gguf.tensors().len()), (3, total as usize));
        assert_eq!(gguf.metadata().str("general.architecture").unwrap(), "llama");
        for (info, bytes) in &expected {
            assert!(gguf.require(&info.name).unwrap().bytes == bytes.as_ref());
        }
    }
}

#[test]
fn metadata_is_ordered_and_replaced_in_place() {
    let mut meta = Metadata::new();
    assert_eq!(meta.insert("z", 1_u32), None);
    assert_eq!(meta.insert("a", 2_u32), None);
    assert_eq!(meta.insert("m", "x"), None);
    assert_eq!(meta.insert("a", 3.5_f64), Some(Value::U32(2)));
    let keys: Vec<_> = meta.iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["z", "a", "m"]);
    assert_eq!(meta.f32("a").unwrap(), 3.5);
    assert!(meta.contains("m") && !meta.contains("n"));
}
