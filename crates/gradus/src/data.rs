//! Token sequences and arrays in files: safetensors and JSON.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::error::{Error, Result};

/// One sequence of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    /// Its tokens, at least one.
    pub tokens: Vec<u32>,
    /// Per token, the token that is predicted for it from those before; `None` where there is
    /// no loss. Absent where the file has no labels.
    pub labels: Option<Vec<Option<u32>>>,
}

/// The label that means "no loss" in files.
const NO_LOSS: i64 = -100;

/// The largest file of tokens that is read, in bytes.
const MOST: u64 = 1 << 30;

/// Reads token sequences: a safetensors file with arrays `tokens.I` and, if there are labels,
/// `labels.I` (I from 0, i32 or i64), or JSON: a list of lists of ids, or a list of objects
/// `{"tokens": [...], "labels": [...]}`. The label -100 means "no loss".
///
/// # Errors
/// Names the file, the array and what is wrong with it.
pub fn read_sequences(path: &Path) -> Result<Vec<Sequence>> {
    let size = std::fs::metadata(path).map_err(|e| Error::reading(path, e))?.len();
    if size > MOST {
        return Err(Error::reading(path, format!("it has {size} bytes; at most {MOST} are read")));
    }
    let bytes = std::fs::read(path).map_err(|e| Error::reading(path, e))?;
    let sequences = match bytes.iter().find(|b| !b.is_ascii_whitespace()) {
        Some(b'[') => from_json(&bytes),
        _ => from_safetensors(&bytes),
    };
    sequences.map_err(|why| Error::invalid(format!("{}: {why}", path.display())))
}

type Parsed<T> = std::result::Result<T, String>;

fn from_safetensors(bytes: &[u8]) -> Parsed<Vec<Sequence>> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| {
        format!("is neither a safetensors file ({e}) nor a JSON list; expected token sequences")
    })?;
    let mut sequences = Vec::new();
    for i in 0.. {
        let name = format!("tokens.{i}");
        let Ok(tokens) = file.tensor(&name) else { break };
        let tokens = ids(&name, &integers(&name, &tokens)?)?;
        let name = format!("labels.{i}");
        let labels = match file.tensor(&name) {
            Ok(view) => Some(labels(&name, &integers(&name, &view)?, tokens.len())?),
            Err(_) => None,
        };
        sequences.push(Sequence { tokens, labels });
    }
    if sequences.is_empty() {
        return Err("there is no array `tokens.0`; expected `tokens.I`, I from 0".into());
    }
    Ok(sequences)
}

fn from_json(bytes: &[u8]) -> Parsed<Vec<Sequence>> {
    let value: Value = serde_json::from_slice(bytes).map_err(|e| format!("is no JSON: {e}"))?;
    let list = value.as_array().filter(|l| !l.is_empty());
    let list = list.ok_or("expected a list of token sequences that is not empty")?;
    let sequence = |(i, item): (usize, &Value)| -> Parsed<Sequence> {
        let (tokens, labelled) = match item {
            Value::Object(fields) => {
                if let Some(odd) = fields.keys().find(|k| *k != "tokens" && *k != "labels") {
                    return Err(format!("entry {i}: unknown field `{odd}`"));
                }
                let tokens = fields.get("tokens");
                (
                    tokens.ok_or(format!("entry {i}: the field `tokens` is missing"))?,
                    fields.get("labels"),
                )
            }
            other => (other, None),
        };
        let name = format!("entry {i}, tokens");
        let tokens = ids(&name, &numbers(&name, tokens)?)?;
        let name = format!("entry {i}, labels");
        let labels = match labelled {
            Some(value) => Some(labels(&name, &numbers(&name, value)?, tokens.len())?),
            None => None,
        };
        Ok(Sequence { tokens, labels })
    };
    list.iter().enumerate().map(sequence).collect()
}

fn numbers(name: &str, value: &Value) -> Parsed<Vec<i64>> {
    let list = value.as_array().ok_or(format!("{name}: expected a list of whole numbers"))?;
    let number = |v: &Value| v.as_i64().ok_or(format!("{name}: `{v}` is no whole number"));
    list.iter().map(number).collect()
}

fn integers(name: &str, view: &TensorView<'_>) -> Parsed<Vec<i64>> {
    if view.shape().len() != 1 {
        return Err(format!("array `{name}` has shape {:?}, expected one dimension", view.shape()));
    }
    let data = view.data();
    match view.dtype() {
        Dtype::I32 => {
            Ok(data.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect())
        }
        Dtype::I64 => Ok(data.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect()),
        other => Err(format!("array `{name}` is {other:?}, expected I32 or I64")),
    }
}

fn ids(name: &str, numbers: &[i64]) -> Parsed<Vec<u32>> {
    if numbers.is_empty() {
        return Err(format!("{name}: the sequence is empty"));
    }
    let id = |&n: &i64| u32::try_from(n).map_err(|_| format!("{name}: {n} is no token id"));
    numbers.iter().map(id).collect()
}

fn labels(name: &str, numbers: &[i64], tokens: usize) -> Parsed<Vec<Option<u32>>> {
    if numbers.len() != tokens {
        return Err(format!("{name}: {} labels for {tokens} tokens", numbers.len()));
    }
    let label = |&n: &i64| match n {
        NO_LOSS => Ok(None),
        n => {
            u32::try_from(n).map(Some).map_err(|_| format!("{name}: {n} is neither an id nor -100"))
        }
    };
    numbers.iter().map(label).collect()
}

/// An array to be written.
pub struct Array {
    shape: Vec<usize>,
    dtype: Dtype,
    bytes: Vec<u8>,
}

impl Array {
    /// 32-bit floats, row-major.
    pub fn f32(shape: &[usize], values: &[f32]) -> Array {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Array { shape: shape.to_vec(), dtype: Dtype::F32, bytes }
    }

    /// One 64-bit float, of shape `[1]`.
    pub fn scalar(value: f64) -> Array {
        Array { shape: vec![1], dtype: Dtype::F64, bytes: value.to_le_bytes().to_vec() }
    }
}

/// Writes arrays as a safetensors file, which appears whole or not at all.
///
/// # Errors
/// Names the file and what the system said.
pub fn write_arrays(path: &Path, arrays: &BTreeMap<String, Array>) -> Result<()> {
    let views = arrays
        .iter()
        .map(|(name, a)| Ok((name, TensorView::new(a.dtype, a.shape.clone(), &a.bytes)?)))
        .collect::<std::result::Result<Vec<_>, safetensors::SafeTensorError>>();
    let bytes = views.and_then(|v| safetensors::serialize(v, None));
    write_file(path, &bytes.map_err(|e| Error::writing(path, e))?)
}

/// Writes a file that appears whole or not at all.
///
/// # Errors
/// Names the file and what the system said.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    files::write(path, bytes).map_err(|e| {
        let why = format!("{e}; {}", files::advice(e.kind()));
        match e.kind() {
            // There is something that is no file.
            ErrorKind::InvalidInput => {
                Error::invalid(format!("cannot write {}: {why}", path.display()))
            }
            _ => Error::writing(path, why),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_sequences_in_both_forms() {
        let plain = |tokens: &[u32]| Sequence { tokens: tokens.to_vec(), labels: None };
        assert_eq!(from_json(b"[[1, 2], [3]]"), Ok(vec![plain(&[1, 2]), plain(&[3])]));
        let with = Sequence { tokens: vec![1, 2], labels: Some(vec![None, Some(2)]) };
        assert_eq!(from_json(br#"[{"tokens": [1, 2], "labels": [-100, 2]}]"#), Ok(vec![with]));
    }

    #[test]
    fn wrong_sequences_are_named() {
        let cases: [(&[u8], &str); 9] = [
            (b"[1", "is no JSON"),
            (b"[]", "not empty"),
            (b"[1]", "entry 0, tokens: expected a list"),
            (b"[[]]", "entry 0, tokens: the sequence is empty"),
            (b"[[1], [-1]]", "entry 1, tokens: -1 is no token id"),
            (b"[[1.5]]", "`1.5` is no whole number"),
            (br#"[{"labels": [1]}]"#, "`tokens` is missing"),
            (br#"[{"tokens": [1], "label": [1]}]"#, "unknown field `label`"),
            (br#"[{"tokens": [1, 2], "labels": [-1, 2]}]"#, "-1 is neither an id nor -100"),
        ];
        for (bytes, expected) in cases {
            let said = from_json(bytes).unwrap_err();
            assert!(said.contains(expected), "{said}");
        }
        let said = from_json(br#"[{"tokens": [1, 2], "labels": [2]}]"#).unwrap_err();
        assert!(said.contains("1 labels for 2 tokens"), "{said}");
        let said = from_safetensors(b"GGUF").unwrap_err();
        assert!(said.contains("neither a safetensors file"), "{said}");
    }

    #[test]
    fn arrays_are_read_as_they_were_written() {
        let path = std::env::temp_dir().join(format!("gradus-arrays-{}", std::process::id()));
        let arrays = BTreeMap::from([
            ("a".to_string(), Array::f32(&[2, 1], &[1.5, -2.0])),
            ("loss".to_string(), Array::scalar(0.1)),
        ]);
        write_arrays(&path, &arrays).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.len(), 2);
        let a = file.tensor("a").unwrap();
        assert_eq!((a.dtype(), a.shape()), (Dtype::F32, [2, 1].as_slice()));
        assert_eq!(a.data(), [1.5f32.to_le_bytes(), (-2.0f32).to_le_bytes()].concat());
        assert_eq!(file.tensor("loss").unwrap().data(), 0.1f64.to_le_bytes());
        assert!(write_file(Path::new("/"), b"").is_err());
    }
}
