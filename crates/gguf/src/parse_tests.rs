//! Truncation at every byte of a real file; needs the parser's two halves apart, since parsing
//! the same header half a million times shows nothing.

use super::*;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/oracle/llama/model.gguf");

#[test]
fn every_truncation_of_a_real_file_is_an_error() {
    let bytes = std::fs::read(MODEL).unwrap();
    let whole = parse("m.gguf", &bytes, 0).unwrap_or_else(|e| panic!("{e}"));
    let first = whole.tensors.iter().map(|t| t.start).min().unwrap();

    // Every length that cuts the header, and then some.
    for len in 0..first + 100 {
        let error = parse("m.gguf", &bytes[..len], 0).map(|_| ()).unwrap_err().to_string();
        assert!(error.starts_with("m.gguf: ") && !error.contains('\n'), "{len}: {error}");
        assert!(error.contains("cut"), "{len}: {error}");
    }
    // Every length that cuts the data: the header is the same, where tensors end is not.
    let mut table = whole.tensors.clone();
    for len in first..bytes.len() {
        for (tensor, placed) in table.iter_mut().zip(&whole.tensors) {
            tensor.start = placed.start - first;
        }
        let at_len = place(&mut table, first, DEFAULT_ALIGNMENT, len);
        assert!(matches!(at_len, Err(ErrorKind::OutOfFile { .. })), "{len}");
    }
    // That the two agree, here and there.
    for len in (first..bytes.len()).step_by(4999) {
        let error = parse("m.gguf", &bytes[..len], 0).map(|_| ()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::OutOfFile { .. }), "{error}");
    }
}
