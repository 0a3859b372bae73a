//! Golden arrays made by other software, in safetensors.

use std::path::{Path, PathBuf};

/// A file of `testdata/oracle`, e.g. `fixture("llama", "model.gguf")`.
pub fn fixture(arch: &str, file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/oracle").join(arch).join(file)
}

/// A safetensors file in memory.
pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    /// Reads the golden file of an architecture.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(path: &Path) -> std::io::Result<Golden> {
        Ok(Golden { bytes: std::fs::read(path)? })
    }

    /// Every array's name.
    pub fn names(&self) -> Vec<String> {
        match safetensors::SafeTensors::deserialize(&self.bytes) {
            Ok(file) => file.names().iter().map(ToString::to_string).collect(),
            Err(_) => Vec::new(),
        }
    }

    /// An array as f64, whatever its element type; `None` when there is none of that name.
    pub fn get(&self, name: &str) -> Option<Vec<f64>> {
        let file = safetensors::SafeTensors::deserialize(&self.bytes).ok()?;
        let view = file.tensor(name).ok()?;
        let data = view.data();
        fn each<const N: usize>(data: &[u8], f: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            data.as_chunks::<N>().0.iter().map(|c| f(*c)).collect()
        }
        Some(match view.dtype() {
            safetensors::Dtype::F64 => each::<8>(data, f64::from_le_bytes),
            safetensors::Dtype::F32 => each::<4>(data, |b| f64::from(f32::from_le_bytes(b))),
            safetensors::Dtype::I64 => each::<8>(data, |b| i64::from_le_bytes(b) as f64),
            safetensors::Dtype::I32 => each::<4>(data, |b| f64::from(i32::from_le_bytes(b))),
            _ => return None,
        })
    }
}

/// `|a - b| / |b|` in the Euclidean norm; infinite when the lengths differ, nothing is compared
/// or a number is not finite.
pub fn relative_l2(a: &[f32], b: &[f64]) -> f64 {
    if a.len() != b.len() || a.is_empty() || a.iter().any(|x| !x.is_finite()) {
        return f64::INFINITY;
    }
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&x, &y) in a.iter().zip(b) {
        difference += (f64::from(x) - y).powi(2);
        norm += y * y;
    }
    if norm == 0.0 { f64::INFINITY } else { (difference / norm).sqrt() }
}
