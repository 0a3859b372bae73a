//! One error type; its text is one line.

use std::fmt;

/// What went wrong with a GGUF file, its metadata, a tensor or a block.
///
/// Displayed as one line: the file (where there is one), the key or tensor, what was expected
/// and found, and what to do. Names that come from the file are shown with control characters
/// escaped and cut at 96 characters; the path is shown whole.
#[derive(Debug)]
pub struct Error {
    file: Option<Box<str>>,
    kind: Box<ErrorKind>,
}

impl Error {
    pub(crate) fn new(file: &str, kind: ErrorKind) -> Self {
        Self { file: Some(escaped(file, usize::MAX).into()), kind: Box::new(kind) }
    }

    /// The file, as it is displayed; `None` for errors about bytes that belong to no file.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// Whether it is the system's, in writing: nothing that was given is wrong.
    pub fn is_write_failure(&self) -> bool {
        matches!(*self.kind, ErrorKind::Write { .. })
    }

    /// The same error, said about `file`.
    pub(crate) fn in_file(self, file: &str) -> Self {
        Self { file: Some(escaped(file, usize::MAX).into()), kind: self.kind }
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self { file: None, kind: Box::new(kind) }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{file}: ")?;
        }
        self.kind.fmt(f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&*self.kind)
    }
}

/// The kinds of [`Error`]. Strings are as displayed (see there).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The operating system refused something to be read.
    #[error("cannot {action}: {source}; {}", files::advice(source.kind()))]
    Io {
        /// What was being done: `open`, `map`, ...
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The operating system refused something to be written.
    #[error("cannot {action}: {source}; {}", files::advice(source.kind()))]
    Write {
        /// What was being done: `write`, ...
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file of another kind where one is to be written.
    #[error("is there already and no GGUF file; choose another file, or remove it first")]
    Occupied,
    /// A directory, a pipe or a device.
    #[error("is not a regular file; give the path of a .gguf file")]
    NotAFile,
    /// The first four bytes are not `GGUF`.
    #[error("is not a GGUF file: it begins with {found}, expected \"GGUF\"; {advice}")]
    Magic {
        /// The first bytes, quoted.
        found: String,
        /// What the file seems to be and what to do.
        advice: &'static str,
    },
    /// A big-endian file.
    #[error(
        "is a big-endian GGUF file (version {version}); expected little-endian; convert it with \
         llama.cpp's gguf_convert_endian.py"
    )]
    BigEndian {
        /// Its version, read as big-endian.
        version: u32,
    },
    /// A version other than 2 and 3.
    #[error("has GGUF version {found}; expected 2 or 3; {advice}")]
    Version {
        /// The version found.
        found: u32,
        /// What to do.
        advice: &'static str,
    },
    /// The file ends inside something.
    #[error(
        "ends too early: {what} needs {needed} bytes at offset {at}, {left} are left; the file is \
         cut or damaged, download or convert it again"
    )]
    Truncated {
        /// What was being read.
        what: String,
        /// Offset in the file.
        at: u64,
        /// Bytes needed.
        needed: u64,
        /// Bytes left.
        left: u64,
    },
    /// A count that the rest of the file cannot hold.
    #[error(
        "declares {count} {what}, at least {needed} bytes, {left} are left; the file is cut or \
         damaged, download or convert it again"
    )]
    Count {
        /// What is counted.
        what: String,
        /// The count.
        count: u64,
        /// The least number of bytes that many would take.
        needed: u128,
        /// Bytes left.
        left: u64,
    },
    /// A string that is not UTF-8.
    #[error("{what} is not UTF-8 (byte {at} of it); expected text; convert the model again")]
    Utf8 {
        /// Which string.
        what: String,
        /// Index of the first offending byte in the string.
        at: usize,
    },
    /// A key that occurs twice.
    #[error("has key `{key}` twice; expected unique keys; convert the model again")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// A tensor name that occurs twice.
    #[error("has tensor `{tensor}` twice; expected unique names; convert the model again")]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
    },
    /// A value type that GGUF does not define.
    #[error("key `{key}` has value type {found}; expected 0 to 12; the file is damaged or newer")]
    ValueType {
        /// The key.
        key: String,
        /// The type's number.
        found: u32,
    },
    /// An array of arrays.
    #[error("key `{key}` is an array of arrays; expected scalars or strings; remove the key")]
    NestedArray {
        /// The key.
        key: String,
    },
    /// A bool that is neither 0 nor 1.
    #[error("key `{key}` holds a bool with byte {found}; expected 0 or 1; the file is damaged")]
    BadBool {
        /// The key.
        key: String,
        /// The byte.
        found: u8,
    },
    /// A key that was asked for and is not there.
    #[error("key `{key}` is missing; expected {expected}; convert the model again")]
    MissingKey {
        /// The key.
        key: String,
        /// The type asked for.
        expected: &'static str,
    },
    /// A key whose value is not of the type asked for.
    #[error("key `{key}` is {found}; expected {expected}; convert the model again")]
    WrongType {
        /// The key.
        key: String,
        /// The type asked for.
        expected: &'static str,
        /// Type and value found.
        found: String,
    },
    /// A tensor that was asked for and is not there.
    #[error(
        "tensor `{tensor}` is missing; expected by this model; the file is incomplete, convert it \
         again"
    )]
    MissingTensor {
        /// The tensor.
        tensor: String,
    },
    /// A number of dimensions outside 1 to 4.
    #[error("tensor `{tensor}` has {found} dimensions; expected 1 to 4; the file is damaged")]
    Dimensions {
        /// The tensor.
        tensor: String,
        /// The number.
        found: u64,
    },
    /// A dimension of zero, or a size that no file can have.
    #[error(
        "tensor `{tensor}` has shape {shape}; expected positive dimensions and a size below 2^63; \
         the file is damaged"
    )]
    Shape {
        /// The tensor.
        tensor: String,
        /// The shape, outermost first.
        shape: String,
    },
    /// A row that does not consist of whole blocks.
    #[error(
        "tensor `{tensor}` of type {ty} has rows of {row} elements; expected a multiple of \
         {block}; quantize it again"
    )]
    RowLength {
        /// The tensor.
        tensor: String,
        /// Its type's name.
        ty: &'static str,
        /// Elements per row.
        row: u64,
        /// Elements per block.
        block: usize,
    },
    /// A tensor type that ggml has and Gradus does not read.
    #[error(
        "tensor `{tensor}` has type {ty}, which Gradus does not read; supported: {}; quantize the \
         model to one of them",
        crate::tensor::SUPPORTED
    )]
    UnsupportedType {
        /// The tensor.
        tensor: String,
        /// The type's name.
        ty: &'static str,
    },
    /// A tensor type number that ggml does not define.
    #[error(
        "tensor `{tensor}` has unknown type number {found}; supported: {}; the file is damaged or \
         newer",
        crate::tensor::SUPPORTED
    )]
    UnknownType {
        /// The tensor.
        tensor: String,
        /// The number.
        found: u32,
    },
    /// A `general.alignment` that is not a power of two from 8 to 2^20.
    #[error(
        "key `general.alignment` is {found}; expected a power of two from 8 to 1048576; the file \
         is damaged"
    )]
    Alignment {
        /// The alignment.
        found: u32,
    },
    /// A tensor that does not begin on the file's alignment.
    #[error(
        "tensor `{tensor}` begins at offset {offset} of the data; expected a multiple of \
         {alignment}; the file is damaged"
    )]
    Misaligned {
        /// The tensor.
        tensor: String,
        /// Its offset in the data section.
        offset: u64,
        /// The file's alignment.
        alignment: usize,
    },
    /// A tensor that reaches beyond the end of the file.
    #[error(
        "tensor `{tensor}` needs bytes {start} to {end}; expected them within the file's {len}; \
         the file is cut, download it again"
    )]
    OutOfFile {
        /// The tensor.
        tensor: String,
        /// First byte, from the beginning of the file.
        start: u128,
        /// One past the last byte.
        end: u128,
        /// The file's length.
        len: u64,
    },
    /// Two tensors that share bytes.
    #[error("tensors `{first}` and `{second}` overlap; expected separate bytes; convert again")]
    Overlap {
        /// The one that begins first.
        first: String,
        /// The one that begins inside it.
        second: String,
    },
    /// A part of a split file other than the first was opened.
    #[error("is part {part} of {count} of a split model; expected part 1; open {first}")]
    NotFirstPart {
        /// This part, from 1.
        part: u64,
        /// How many there are.
        count: u64,
        /// The first part's name, or a description of it.
        first: String,
    },
    /// A split file whose name does not say which part it is.
    #[error(
        "is part 1 of {count} of a split model; expected a name that ends in {suffix}; give the \
         parts their original names"
    )]
    SplitName {
        /// How many parts there are.
        count: u64,
        /// The ending that names of first parts have.
        suffix: String,
    },
    /// A part of a split file without a path, so that the others cannot be found.
    #[error("is one of {count} parts of a split model; expected a whole one; open it by its path")]
    SplitInMemory {
        /// How many parts there are.
        count: u64,
    },
    /// A part of a split file that is not there or cannot be opened.
    #[error("part {part} of {count} cannot be opened: {source}; put all parts into one folder")]
    MissingPart {
        /// The part, from 1.
        part: u64,
        /// How many there are.
        count: u64,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A part that says it belongs elsewhere.
    #[error("key `{key}` is {found}; expected {expected}; this part belongs to another model")]
    WrongPart {
        /// `split.no` or `split.count`.
        key: &'static str,
        /// The value.
        found: u64,
        /// What the place of the part demands.
        expected: u64,
    },
    /// The parts do not hold as many tensors as the first part says.
    #[error(
        "key `split.tensors.count` is {expected}; found {found} tensors in {count} parts; \
         download all parts again"
    )]
    SplitTensors {
        /// The number in the first part's metadata.
        expected: u64,
        /// The number found.
        found: u64,
        /// How many parts there are.
        count: u64,
    },
    /// A tensor name that llama.cpp would not load.
    #[error("tensor `{tensor}` has a name of {len} bytes; expected 1 to 63; shorten the name")]
    NameLength {
        /// The tensor.
        tensor: String,
        /// Its length in bytes.
        len: usize,
    },
    /// Data whose length is not that of the tensor.
    #[error("tensor `{tensor}` was given {found} bytes; expected {expected}; pass whole tensors")]
    DataLength {
        /// The tensor.
        tensor: String,
        /// Bytes given.
        found: usize,
        /// Bytes the tensor has.
        expected: usize,
    },
    /// A writer that was given too few or too many tensors.
    #[error("was given {found} tensors; expected {expected}; write each declared tensor once")]
    TensorCount {
        /// Tensors written.
        found: usize,
        /// Tensors declared.
        expected: usize,
    },
    /// Buffers that do not fit a block format.
    #[error(
        "{bytes} bytes of {ty} and {elements} elements do not match; expected {block_bytes} bytes \
         for each {block_len} elements; pass whole blocks"
    )]
    BlockLength {
        /// The format's name.
        ty: &'static str,
        /// Bytes given.
        bytes: usize,
        /// Elements given.
        elements: usize,
        /// Bytes per block.
        block_bytes: usize,
        /// Elements per block.
        block_len: usize,
    },
    /// A tensor whose numbers the system has no memory for.
    #[error(
        "tensor `{tensor}` has {elements} elements, for which there is no memory as f32; close \
         other programs, or use a machine with more memory"
    )]
    Memory {
        /// The tensor.
        tensor: String,
        /// How many there are.
        elements: usize,
    },
    /// A type that has no such conversion.
    #[error("type {ty} cannot be {what}; expected {expected}; choose another type")]
    Conversion {
        /// The type's name.
        ty: &'static str,
        /// What was asked for.
        what: &'static str,
        /// Which types can.
        expected: &'static str,
    },
}

/// A name from a file as it may be printed: what steers a terminal or the direction of text
/// escaped, cut at 96 characters.
pub fn shown(name: &str) -> String {
    escaped(name, 96)
}

/// As [`shown`], cut at `limit` characters.
pub fn escaped(name: &str, limit: usize) -> String {
    let mut out = String::new();
    for (i, c) in name.chars().enumerate() {
        if i == limit {
            out.push('…');
            break;
        }
        // Line separators are not control characters, but they do end a line; nor are those that
        // turn the direction of text.
        let turns = matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if c.is_control() || turns {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// The same for a `Display` that may not be needed: nothing is allocated before it is.
pub(crate) struct Shown<'a>(pub(crate) &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(self.0))
    }
}
