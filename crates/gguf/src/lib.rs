//! GGUF files: reading, writing, and the ggml block formats.
//!
//! *Knows*: the container (versions 2 and 3, split files), its metadata and tensor table, and
//! what the bytes of a quantized block mean. *Must not know*: what a tensor is for. There is no
//! compute here: no graph, no kernels, no threads.
//!
//! A file is untrusted. Every count, length and offset is checked against the bytes that are
//! there before anything is allocated for it, so that a damaged file costs no more memory than
//! a small multiple of its own size, and every failure is an [`Error`] of one line that names
//! the file, the key or tensor, what was expected, what was found and what to do.
//!
//! Formats are described in ggml's `docs/gguf.md` and `ggml-common.h`.

#![deny(clippy::indexing_slicing)]

pub mod blocks;
mod cursor;
mod error;
mod file;
mod map;
mod metadata;
mod parse;
mod tensor;
mod value;
mod writer;

pub use error::{Error, ErrorKind, escaped, shown};
pub use file::{Gguf, files, overwrites};
pub use metadata::Metadata;
pub use tensor::{Tensor, TensorInfo, TensorType};
pub use value::{Array, Value};
pub use writer::{Writer, check_out, encode, write};

/// Alignment of tensor data where a file has no `general.alignment`, in bytes.
pub const DEFAULT_ALIGNMENT: usize = 32;
