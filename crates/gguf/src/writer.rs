//! Writing GGUF, version 3.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use files::Replacement;

use crate::error::{Error, ErrorKind, shown};
use crate::metadata::Metadata;
use crate::parse::alignment;
use crate::tensor::TensorInfo;
use crate::value::{Array, Value};

/// Writes a whole file: metadata and tensors, each with its bytes.
///
/// The data is aligned to `general.alignment`, or 32 bytes where there is none. At `path` there is
/// the old file or the whole new one, never a part, as [`files::Replacement`] has it. For tensors
/// that do not fit in memory together, see [`Writer`].
///
/// # Errors
/// As [`check_out`]; the system refuses, tensor names are not unique or too long, data is not as
/// long as its tensor, or `general.alignment` is not one.
pub fn write<'a>(
    path: impl AsRef<Path>,
    metadata: &Metadata,
    tensors: impl IntoIterator<Item = (TensorInfo, Cow<'a, [u8]>)>,
) -> Result<(), Error> {
    let (infos, data): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
    let mut writer = Writer::create(path, metadata, infos)?;
    for bytes in &data {
        writer.tensor(bytes)?;
    }
    writer.finish()
}

/// As [`write()`], into memory.
///
/// # Errors
/// As [`write()`], but for the system's.
pub fn encode<'a>(
    metadata: &Metadata,
    tensors: impl IntoIterator<Item = (TensorInfo, Cow<'a, [u8]>)>,
) -> Result<Vec<u8>, Error> {
    let (infos, data): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
    let alignment = alignment(metadata)?;
    let mut out = header(metadata, &infos, alignment)?;
    for (info, bytes) in infos.iter().zip(&data) {
        check_len(info, bytes)?;
        out.extend_from_slice(bytes);
        out.resize(out.len().next_multiple_of(alignment), 0);
    }
    Ok(out)
}

/// Whether a GGUF file may be written to `path`: what is there, or what a link there points to, is
/// a GGUF file, empty, or nothing. Whatever else it is, it was not made to be replaced by a model.
///
/// # Errors
/// What is there is none of them, or cannot be looked at.
pub fn check_out(path: impl AsRef<Path>) -> Result<(), Error> {
    let path = path.as_ref();
    let error = |kind| Error::new(&path.display().to_string(), kind);
    let io = |source: io::Error| match source.kind() {
        io::ErrorKind::InvalidInput => error(ErrorKind::NotAFile),
        _ => error(ErrorKind::Io { action: "look at what is there", source }),
    };
    let mut magic = Vec::new();
    match files::destination(path).and_then(|place| files::open(&place)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(io(e)),
        Ok(file) => file.take(MAGIC.len() as u64).read_to_end(&mut magic).map_err(io)?,
    };
    match magic.is_empty() || magic == MAGIC {
        true => Ok(()),
        false => Err(error(ErrorKind::Occupied)),
    }
}

/// Writes a file tensor by tensor. Dropped before [`Writer::finish`], it leaves nothing behind.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    out: BufWriter<Replacement>,
    infos: Vec<TensorInfo>,
    next: usize,
    alignment: usize,
}

impl Writer {
    /// Creates the temporary file and writes the header. `tensors` are those that will be
    /// written, in order.
    ///
    /// # Errors
    /// As [`write()`].
    pub fn create(
        path: impl AsRef<Path>,
        metadata: &Metadata,
        tensors: Vec<TensorInfo>,
    ) -> Result<Self, Error> {
        let (path, infos) = (path.as_ref().to_owned(), tensors);
        let file = path.display().to_string();
        let alignment = alignment(metadata).map_err(|e| e.in_file(&file))?;
        let header = header(metadata, &infos, alignment).map_err(|kind| Error::new(&file, kind))?;
        check_out(&path)?;
        let out = Replacement::create(&path).map_err(|source| {
            Error::new(&file, ErrorKind::Write { action: "create a file beside it", source })
        })?;
        let out = BufWriter::with_capacity(1 << 20, out);
        let mut writer = Self { path, out, infos, next: 0, alignment };
        writer.put(&header)?;
        Ok(writer)
    }

    /// Writes the data of the next tensor.
    ///
    /// # Errors
    /// The data is not as long as the tensor, all tensors are written, or the system refuses.
    pub fn tensor(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let expected = self.infos.len();
        let Some(info) = self.infos.get(self.next) else {
            return Err(self.error(ErrorKind::TensorCount { found: expected + 1, expected }));
        };
        check_len(info, bytes).map_err(|kind| self.error(kind))?;
        self.put(bytes)?;
        let padding = bytes.len().next_multiple_of(self.alignment) - bytes.len();
        self.put(&vec![0; padding])?;
        self.next += 1;
        Ok(())
    }

    /// Flushes everything to the disk and gives the file its name.
    ///
    /// # Errors
    /// Tensors are missing, or the system refuses, after which there is the old file but for what
    /// [`Replacement::commit`] says.
    pub fn finish(self) -> Result<(), Error> {
        let (found, expected) = (self.next, self.infos.len());
        if found != expected {
            return Err(self.error(ErrorKind::TensorCount { found, expected }));
        }
        let written = self.out.into_inner().map_err(io::IntoInnerError::into_error);
        written.and_then(Replacement::commit).map_err(|source| {
            let kind = ErrorKind::Write { action: "write", source };
            Error::new(&self.path.display().to_string(), kind)
        })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let written = self.out.write_all(bytes);
        written.map_err(|source| self.error(ErrorKind::Write { action: "write", source }))
    }

    fn error(&self, kind: ErrorKind) -> Error {
        Error::new(&self.path.display().to_string(), kind)
    }
}

fn check_len(info: &TensorInfo, bytes: &[u8]) -> Result<(), ErrorKind> {
    if bytes.len() == info.len {
        return Ok(());
    }
    let (found, expected) = (bytes.len(), info.len);
    Err(ErrorKind::DataLength { tensor: shown(&info.name), found, expected })
}

/// What every file begins with.
const MAGIC: [u8; 4] = *b"GGUF";

/// llama.cpp keeps names in 64 bytes, the last of them zero (`GGML_MAX_NAME`).
const MAX_NAME: usize = 63;

/// Everything before the data, padded to the alignment.
fn header(
    metadata: &Metadata,
    infos: &[TensorInfo],
    alignment: usize,
) -> Result<Vec<u8>, ErrorKind> {
    let mut names = HashSet::new();
    let mut out = MAGIC.to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((infos.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata.iter() {
        string(&mut out, key);
        out.extend(value.wire_type().to_le_bytes());
        put_value(&mut out, value);
    }
    let mut offset = 0_usize;
    for info in infos.iter() {
        let len = info.name.len();
        if !(1..=MAX_NAME).contains(&len) {
            return Err(ErrorKind::NameLength { tensor: shown(&info.name), len });
        }
        if !names.insert(info.name.as_str()) {
            return Err(ErrorKind::DuplicateTensor { tensor: shown(&info.name) });
        }
        string(&mut out, &info.name);
        out.extend((info.shape.len() as u32).to_le_bytes());
        for &dim in info.shape.iter().rev() {
            out.extend((dim as u64).to_le_bytes());
        }
        out.extend(info.ty.id().to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset = info
            .len
            .checked_next_multiple_of(alignment)
            .and_then(|len| offset.checked_add(len))
            .ok_or_else(|| ErrorKind::Shape {
                tensor: shown(&info.name),
                shape: format!("{:?}", info.shape),
            })?;
    }
    out.resize(out.len().next_multiple_of(alignment), 0);
    Ok(out)
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(v) => string(out, v),
        Value::Array(v) => put_array(out, v),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    out.extend(array.wire().0.to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(v) => out.extend_from_slice(v),
        Array::I8(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::U16(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::I16(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::U32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::I32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::F32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::Bool(v) => out.extend(v.iter().map(|&v| u8::from(v))),
        Array::String(v) => v.iter().for_each(|v| string(out, v)),
        Array::U64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::I64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::F64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
    }
}
