//! The header of one file: metadata and tensor table, checked against the file's length.

use crate::DEFAULT_ALIGNMENT;
use crate::cursor::Cursor;
use crate::error::{Error, ErrorKind, Shown, shown};
use crate::metadata::Metadata;
use crate::tensor::{self, TensorInfo, TensorType};
use crate::value::{ARRAY, Array, Value};

/// What the header of one file says.
pub(crate) struct Parsed {
    pub(crate) metadata: Metadata,
    /// In file order; `part` is that of the call.
    pub(crate) tensors: Vec<TensorInfo>,
}

/// The fewest bytes an entry of the metadata takes: key length, type, a one-byte value.
const MIN_ENTRY: u64 = 8 + 4 + 1;
/// The fewest bytes a tensor takes in the table: name length, number of dimensions, one
/// dimension, type, offset.
const MIN_TENSOR: u64 = 8 + 4 + 8 + 4 + 8;

/// Reads the header of `bytes`, a whole file, and checks that its tensors lie in it.
pub(crate) fn parse(file: &str, bytes: &[u8], part: usize) -> Result<Parsed, Error> {
    let in_file = |kind| Error::new(file, kind);
    let mut cursor = Cursor::new(bytes);
    preamble(&mut cursor, bytes).map_err(in_file)?;
    let (n_tensors, entries) = entries(&mut cursor).map_err(in_file)?;
    let metadata = Metadata::from_entries(file, entries)?;
    let alignment = alignment(&metadata)?;
    let mut tensors = table(&mut cursor, n_tensors, part).map_err(in_file)?;
    place(&mut tensors, cursor.position(), alignment, bytes.len()).map_err(in_file)?;
    Ok(Parsed { metadata, tensors })
}

/// Magic and version.
fn preamble(cursor: &mut Cursor<'_>, bytes: &[u8]) -> Result<(), ErrorKind> {
    let magic = cursor.take(4, format_args!("the magic"))?;
    if magic != b"GGUF" {
        let advice = if bytes.starts_with(b"version https://git-lfs") {
            "it is a Git LFS pointer, fetch the file itself with `git lfs pull`"
        } else if bytes.starts_with(b"<") || bytes.starts_with(b"\n<") {
            "it looks like a web page, download the file itself"
        } else if [b"lmgg", b"fmgg", b"tjgg", b"algg"].iter().any(|old| bytes.starts_with(*old)) {
            "it is of llama.cpp's format before GGUF, convert the model again"
        } else if bytes.starts_with(b"PK") {
            "it is a zip archive or a PyTorch file, convert the model to GGUF"
        } else {
            "give the path of a .gguf file"
        };
        return Err(ErrorKind::Magic { found: format!("\"{}\"", magic.escape_ascii()), advice });
    }
    let found = cursor.u32(format_args!("the version"))?;
    // A version that is small when read the other way round was written the other way round.
    if found.trailing_zeros() >= 16 && found != 0 {
        return Err(ErrorKind::BigEndian { version: found.swap_bytes() });
    }
    match found {
        2 | 3 => Ok(()),
        0 => Err(ErrorKind::Version { found, advice: "the file is damaged, download it again" }),
        1 => Err(ErrorKind::Version {
            found,
            advice: "convert the model again with a current llama.cpp",
        }),
        _ => Err(ErrorKind::Version { found, advice: "update Gradus or convert the model again" }),
    }
}

/// The two counts and the metadata's entries.
fn entries(cursor: &mut Cursor<'_>) -> Result<(u64, Vec<(String, Value)>), ErrorKind> {
    let n_tensors = cursor.u64(format_args!("the tensor count"))?;
    let n_entries = cursor.u64(format_args!("the key count"))?;
    cursor.bounded(n_tensors, MIN_TENSOR, format_args!("tensors"))?;
    let n_entries = cursor.bounded(n_entries, MIN_ENTRY, format_args!("keys"))?;
    let mut entries = Vec::with_capacity(n_entries);
    for i in 0..n_entries {
        let key = cursor.string(format_args!("key {i}"))?;
        let ty = cursor.u32(format_args!("the type of key `{}`", Shown(key)))?;
        entries.push((key.to_owned(), value(cursor, key, ty)?));
    }
    Ok((n_tensors, entries))
}

/// A fixed-size scalar.
macro_rules! scalar {
    ($cursor:expr, $key:expr, $ty:ty) => {{
        let what = format_args!("the value of key `{}`", Shown($key));
        let bytes = $cursor.take(size_of::<$ty>() as u64, what)?;
        let mut le = [0; size_of::<$ty>()];
        le.copy_from_slice(bytes);
        <$ty>::from_le_bytes(le)
    }};
}

/// An array of fixed-size scalars, read at once.
macro_rules! scalars {
    ($cursor:expr, $key:expr, $count:expr, $ty:ty) => {{
        let size = size_of::<$ty>() as u64;
        let what = format_args!("elements of key `{}`", Shown($key));
        let count = $cursor.bounded($count, size, what)?;
        let bytes = $cursor.take(count as u64 * size, what)?;
        let (elements, _) = bytes.as_chunks::<{ size_of::<$ty>() }>();
        elements.iter().map(|&le| <$ty>::from_le_bytes(le)).collect()
    }};
}

fn boolean(key: &str, byte: u8) -> Result<bool, ErrorKind> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        found => Err(ErrorKind::BadBool { key: shown(key), found }),
    }
}

fn value(cursor: &mut Cursor<'_>, key: &str, ty: u32) -> Result<Value, ErrorKind> {
    Ok(match ty {
        0 => Value::U8(scalar!(cursor, key, u8)),
        1 => Value::I8(scalar!(cursor, key, i8)),
        2 => Value::U16(scalar!(cursor, key, u16)),
        3 => Value::I16(scalar!(cursor, key, i16)),
        4 => Value::U32(scalar!(cursor, key, u32)),
        5 => Value::I32(scalar!(cursor, key, i32)),
        6 => Value::F32(scalar!(cursor, key, f32)),
        7 => {
            let byte = cursor.u8(format_args!("the value of key `{}`", Shown(key)))?;
            Value::Bool(boolean(key, byte)?)
        }
        8 => {
            let text = cursor.string(format_args!("the value of key `{}`", Shown(key)))?;
            Value::String(text.to_owned())
        }
        ARRAY => Value::Array(array(cursor, key)?),
        10 => Value::U64(scalar!(cursor, key, u64)),
        11 => Value::I64(scalar!(cursor, key, i64)),
        12 => Value::F64(scalar!(cursor, key, f64)),
        found => return Err(ErrorKind::ValueType { key: shown(key), found }),
    })
}

fn array(cursor: &mut Cursor<'_>, key: &str) -> Result<Array, ErrorKind> {
    let ty = cursor.u32(format_args!("the element type of key `{}`", Shown(key)))?;
    let count = cursor.u64(format_args!("the length of key `{}`", Shown(key)))?;
    Ok(match ty {
        0 => Array::U8(scalars!(cursor, key, count, u8)),
        1 => Array::I8(scalars!(cursor, key, count, i8)),
        2 => Array::U16(scalars!(cursor, key, count, u16)),
        3 => Array::I16(scalars!(cursor, key, count, i16)),
        4 => Array::U32(scalars!(cursor, key, count, u32)),
        5 => Array::I32(scalars!(cursor, key, count, i32)),
        6 => Array::F32(scalars!(cursor, key, count, f32)),
        7 => {
            let bytes = cursor.take(count, format_args!("elements of key `{}`", Shown(key)))?;
            Array::Bool(bytes.iter().map(|&byte| boolean(key, byte)).collect::<Result<_, _>>()?)
        }
        8 => {
            let what = format_args!("elements of key `{}`", Shown(key));
            let count = cursor.bounded(count, 8, what)?;
            let mut strings = Vec::with_capacity(count);
            for i in 0..count {
                let what = format_args!("element {i} of key `{}`", Shown(key));
                strings.push(cursor.string(what)?.to_owned());
            }
            Array::String(strings)
        }
        ARRAY => return Err(ErrorKind::NestedArray { key: shown(key) }),
        10 => Array::U64(scalars!(cursor, key, count, u64)),
        11 => Array::I64(scalars!(cursor, key, count, i64)),
        12 => Array::F64(scalars!(cursor, key, count, f64)),
        found => return Err(ErrorKind::ValueType { key: shown(key), found }),
    })
}

/// The alignment that a file's metadata asks for, in bytes.
pub(crate) fn alignment(metadata: &Metadata) -> Result<usize, Error> {
    match metadata.opt_u32("general.alignment")? {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(found) if found.is_power_of_two() && (8..=1 << 20).contains(&found) => {
            Ok(found as usize)
        }
        Some(found) => Err(Error::new(metadata.file(), ErrorKind::Alignment { found })),
    }
}

/// The tensor table; `start` of each is its offset in the data section.
fn table(cursor: &mut Cursor<'_>, count: u64, part: usize) -> Result<Vec<TensorInfo>, ErrorKind> {
    let count = cursor.bounded(count, MIN_TENSOR, format_args!("tensors"))?;
    let mut tensors = Vec::with_capacity(count);
    for i in 0..count {
        let name = cursor.string(format_args!("the name of tensor {i}"))?;
        let n_dims = cursor.u32(format_args!("the dimensions of tensor `{}`", Shown(name)))?;
        if !(1..=4).contains(&n_dims) {
            return Err(ErrorKind::Dimensions { tensor: shown(name), found: n_dims.into() });
        }
        let mut dims = [0; 4];
        let dims = dims.get_mut(..n_dims as usize).unwrap_or_default();
        // In the file the contiguous dimension comes first.
        for dim in dims.iter_mut().rev() {
            *dim = cursor.u64(format_args!("the dimensions of tensor `{}`", Shown(name)))?;
        }
        let id = cursor.u32(format_args!("the type of tensor `{}`", Shown(name)))?;
        let offset = cursor.u64(format_args!("the offset of tensor `{}`", Shown(name)))?;
        let ty = TensorType::from_id(id).ok_or_else(|| match tensor::foreign_name(id) {
            Some(ty) => ErrorKind::UnsupportedType { tensor: shown(name), ty },
            None => ErrorKind::UnknownType { tensor: shown(name), found: id },
        })?;
        let too_large = || ErrorKind::Shape { tensor: shown(name), shape: format!("{:?}", &*dims) };
        let shape = dims
            .iter()
            .map(|&dim| usize::try_from(dim).ok())
            .collect::<Option<Vec<_>>>()
            .ok_or_else(too_large)?;
        let len = tensor::byte_len(name, ty, &shape)?;
        let start = usize::try_from(offset).map_err(|_| too_large())?;
        tensors.push(TensorInfo { name: name.to_owned(), ty, shape, part, start, len });
    }
    Ok(tensors)
}

/// Turns offsets in the data section into offsets in the file, and checks that every tensor is
/// aligned, lies within the file and shares no byte with another.
fn place(
    tensors: &mut [TensorInfo],
    header_end: usize,
    alignment: usize,
    file_len: usize,
) -> Result<(), ErrorKind> {
    // No overflow: both are at most isize::MAX and 2^20.
    let data = header_end.next_multiple_of(alignment);
    for tensor in tensors.iter_mut() {
        if !tensor.start.is_multiple_of(alignment) {
            return Err(ErrorKind::Misaligned {
                tensor: shown(&tensor.name),
                offset: tensor.start as u64,
                alignment,
            });
        }
        let start = data as u128 + tensor.start as u128;
        let end = start + tensor.len as u128;
        match usize::try_from(end) {
            Ok(end) if end <= file_len => tensor.start = end - tensor.len,
            _ => {
                let (tensor, len) = (shown(&tensor.name), file_len as u64);
                return Err(ErrorKind::OutOfFile { tensor, start, end, len });
            }
        }
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_unstable_by_key(|tensor| tensor.start);
    for (first, second) in order.iter().zip(order.iter().skip(1)) {
        if first.start + first.len > second.start {
            return Err(ErrorKind::Overlap {
                first: shown(&first.name),
                second: shown(&second.name),
            });
        }
    }
    Ok(())
}

/// Positions of `items`, sorted by name; the name as an error if it occurs twice.
pub(crate) fn sorted_unique<T>(items: &[T], name: impl Fn(&T) -> &str) -> Result<Vec<u32>, String> {
    let name_at = |i: u32| items.get(i as usize).map_or("", &name);
    // A file with more than 2^32 entries would be larger than 50 GB of header alone; were there
    // one, the positions beyond would be left out and not be found.
    let mut sorted: Vec<u32> = (0..u32::try_from(items.len()).unwrap_or(u32::MAX)).collect();
    sorted.sort_unstable_by(|&a, &b| name_at(a).cmp(name_at(b)));
    for (&a, &b) in sorted.iter().zip(sorted.iter().skip(1)) {
        if name_at(a) == name_at(b) {
            return Err(name_at(a).to_owned());
        }
    }
    Ok(sorted)
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
