//! An open model: one file, or all parts of a split one.

use std::fmt;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, ErrorKind, shown};
use crate::metadata::Metadata;
use crate::parse::{Parsed, parse, sorted_unique};
use crate::tensor::{Tensor, TensorInfo};

/// The bytes of one file.
enum Bytes {
    Map(memmap2::Mmap),
    Owned(Arc<[u8]>),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Map(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}

/// An open GGUF model: its metadata, its tensors and their bytes.
///
/// The bytes are those of a memory map (see [`Gguf::open`]). Dropping it drops the map.
pub struct Gguf {
    path: PathBuf,
    parts: Vec<Bytes>,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    /// Positions in `tensors`, sorted by name.
    sorted: Vec<u32>,
}

impl Gguf {
    /// Opens a file, version 2 or 3, little-endian. The first part of a split model
    /// (`NAME-00001-of-0000N.gguf`) opens all of them, from the same folder.
    ///
    /// Files are mapped, not read. A mapped file must not be shortened while it is open: reading
    /// bytes that are gone ends the process (`SIGBUS`), so whoever serves from this data copies
    /// it first.
    ///
    /// # Errors
    /// The file cannot be opened or mapped, or is not a well-formed GGUF file; see
    /// [`ErrorKind`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let bytes = map(path).map_err(|kind| Error::new(&name, kind))?;
        let first = parse(&name, &bytes, 0)?;
        let count = first.metadata.opt_u64("split.count")?.unwrap_or(1);
        if count <= 1 {
            return Self::new(path.to_owned(), vec![bytes], first.metadata, first.tensors);
        }
        Self::open_parts(path, &name, bytes, first, count)
    }

    fn open_parts(
        path: &Path,
        name: &str,
        bytes: Bytes,
        first: Parsed,
        count: u64,
    ) -> Result<Self, Error> {
        let in_file = |kind| Error::new(name, kind);
        let file_name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let no = first.metadata.u64("split.no")?;
        if no != 0 {
            let part = no.saturating_add(1);
            let first = match file_name.strip_suffix(&suffix(part, count)) {
                Some(stem) => format!("`{}`", shown(&format!("{stem}{}", suffix(1, count)))),
                None => format!("the file ending in {}", suffix(1, count)),
            };
            return Err(in_file(ErrorKind::NotFirstPart { part, count, first }));
        }
        let stem = file_name
            .strip_suffix(&suffix(1, count))
            .ok_or_else(|| in_file(ErrorKind::SplitName { count, suffix: suffix(1, count) }))?;
        let expected = first.metadata.u64("split.tensors.count")?;

        let (mut parts, mut tensors) = (vec![bytes], first.tensors);
        for part in 1..count {
            let path = path.with_file_name(format!("{stem}{}", suffix(part + 1, count)));
            let name = path.display().to_string();
            let bytes = map(&path).map_err(|kind| {
                Error::new(
                    &name,
                    match kind {
                        ErrorKind::Io { source, .. } => {
                            ErrorKind::MissingPart { part: part + 1, count, source }
                        }
                        kind => kind,
                    },
                )
            })?;
            let parsed = parse(&name, &bytes, parts.len())?;
            for (key, expected) in [("split.no", part), ("split.count", count)] {
                let found = parsed.metadata.u64(key)?;
                if found != expected {
                    return Err(Error::new(&name, ErrorKind::WrongPart { key, found, expected }));
                }
            }
            parts.push(bytes);
            tensors.extend(parsed.tensors);
        }
        let found = tensors.len() as u64;
        if found != expected {
            return Err(in_file(ErrorKind::SplitTensors { expected, found, count }));
        }
        Self::new(path.to_owned(), parts, first.metadata, tensors)
    }

    /// Reads a whole file that is already in memory; `name` stands for its path. A part of a
    /// split model is refused.
    ///
    /// # Errors
    /// The bytes are not a well-formed GGUF file; see [`ErrorKind`].
    pub fn from_bytes(name: impl AsRef<Path>, bytes: impl Into<Arc<[u8]>>) -> Result<Self, Error> {
        let (path, bytes) = (name.as_ref(), bytes.into());
        let name = path.display().to_string();
        let parsed = parse(&name, &bytes, 0)?;
        let count = parsed.metadata.opt_u64("split.count")?.unwrap_or(1);
        if count > 1 {
            return Err(Error::new(&name, ErrorKind::SplitInMemory { count }));
        }
        Self::new(path.to_owned(), vec![Bytes::Owned(bytes)], parsed.metadata, parsed.tensors)
    }

    fn new(
        path: PathBuf,
        parts: Vec<Bytes>,
        metadata: Metadata,
        tensors: Vec<TensorInfo>,
    ) -> Result<Self, Error> {
        let sorted = sorted_unique(&tensors, |tensor| &tensor.name).map_err(|name| {
            let kind = ErrorKind::DuplicateTensor { tensor: shown(&name) };
            Error::new(metadata.file(), kind)
        })?;
        Ok(Self { path, parts, metadata, tensors, sorted })
    }

    /// The path it was opened from: the first part's for a split model.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The metadata: the first part's for a split model.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Closes the file and keeps the metadata.
    pub fn into_metadata(self) -> Metadata {
        self.metadata
    }

    /// Number of files: 1, or that of the parts.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Size of all files together, in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }

    /// All tensors, in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.tensors.iter().map(|info| self.at(info))
    }

    /// The tensor of a name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let info = |i: u32| self.tensors.get(i as usize);
        let found =
            self.sorted.binary_search_by(|&i| info(i).map_or("", |t| t.name.as_str()).cmp(name));
        info(*self.sorted.get(found.ok()?)?).map(|info| self.at(info))
    }

    /// The tensor of a name.
    ///
    /// # Errors
    /// There is none; the error names the file and the tensor.
    pub fn require(&self, name: &str) -> Result<Tensor<'_>, Error> {
        self.tensor(name).ok_or_else(|| {
            let kind = ErrorKind::MissingTensor { tensor: shown(name) };
            Error::new(self.metadata.file(), kind)
        })
    }

    /// Says that the bytes of a tensor have been copied and will hardly be read again, so that
    /// the system may take back the memory its part of the map takes. Nothing else changes; does
    /// nothing for a name that is not there or a file that is not mapped.
    pub fn release(&self, name: &str) {
        let Some(Tensor { info, .. }) = self.tensor(name) else { return };
        if let Some(Bytes::Map(map)) = self.parts.get(info.part) {
            crate::map::release(map, info.start, info.len);
        }
    }

    fn at<'a>(&'a self, info: &'a TensorInfo) -> Tensor<'a> {
        // `place` has checked that the range lies in the part.
        let part: &[u8] = self.parts.get(info.part).map_or(&[], |part| part);
        let bytes = part.get(info.start..info.start + info.len).unwrap_or_default();
        Tensor { info, bytes }
    }
}

/// In brief: the bytes and the vocabulary would drown everything else.
impl fmt::Debug for Gguf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gguf")
            .field("path", &self.path)
            .field("parts", &self.parts.len())
            .field("keys", &self.metadata.len())
            .field("tensors", &self.tensors.len())
            .finish()
    }
}

/// The files of the model whose first is `path`, as its name says: all parts of a split one, else
/// itself. They need not be there.
pub fn files(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let count = name.len().checked_sub(suffix(1, 1).len()).and_then(|at| {
        let (stem, end) = name.split_at_checked(at)?;
        let count = end.strip_prefix("-00001-of-")?.strip_suffix(".gguf")?.parse().ok()?;
        (end == suffix(1, count)).then_some((stem, count))
    });
    match count {
        Some((stem, count)) => (1..=count)
            .map(|n| path.with_file_name(format!("{stem}{}", suffix(n, count))))
            .collect(),
        None => vec![path.to_owned()],
    }
}

/// Whether a file written to `out` takes the place of one of the model whose first file is
/// `model`. A name that is not there takes no place.
pub fn overwrites(out: &Path, model: &Path) -> bool {
    let Ok(out) = out.canonicalize() else { return false };
    files(model).iter().any(|file| file.canonicalize().is_ok_and(|file| file == out))
}

/// The end of the name of part `part` (from 1) of `count`.
fn suffix(part: u64, count: u64) -> String {
    format!("-{part:05}-of-{count:05}.gguf")
}

/// Maps a regular file; an empty one is no bytes.
fn map(path: &Path) -> Result<Bytes, ErrorKind> {
    let io = |action| move |source| ErrorKind::Io { action, source };
    let file = files::open(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::InvalidInput => ErrorKind::NotAFile,
        _ => ErrorKind::Io { action: "open", source },
    })?;
    if file.metadata().map_err(io("read"))?.len() == 0 {
        return Ok(Bytes::Owned(Arc::new([])));
    }
    crate::map::map(&file).map(Bytes::Map).map_err(io("map"))
}
