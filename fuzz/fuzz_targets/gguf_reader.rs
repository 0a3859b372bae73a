//! The GGUF reader on any bytes: a model or a one-line error, never a panic, and what was read
//! is written and read again as the same.
//!
//! ```sh
//! cargo install cargo-fuzz
//! mkdir -p fuzz/corpus/gguf_reader && cp testdata/gguf/small.gguf fuzz/corpus/gguf_reader/
//! cargo +nightly fuzz run gguf_reader -- -max_len=8192 -rss_limit_mb=512
//! ```

#![no_main]

use std::borrow::Cow;

use gguf::{ErrorKind, Gguf, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let gguf = match Gguf::from_bytes("fuzz.gguf", bytes) {
        Ok(gguf) => gguf,
        Err(error) => {
            let message = error.to_string();
            assert!(message.starts_with("fuzz.gguf: "), "{message}");
            assert!(!message.contains(char::is_control), "{message:?}");
            return;
        }
    };
    for (key, value) in gguf.metadata().iter() {
        assert!(!value.to_string().contains(char::is_control));
        assert!(gguf.metadata().contains(key));
    }
    for tensor in gguf.tensors() {
        assert_eq!(tensor.bytes.len(), tensor.info.byte_len());
        // I32 alone has no f32 values.
        let _ = tensor.to_f32();
    }
    let tensors = || gguf.tensors().map(|t| (t.info.clone(), Cow::Borrowed(t.bytes)));
    match encode(gguf.metadata(), tensors()) {
        Ok(written) => {
            let again = Gguf::from_bytes("again.gguf", written.clone()).expect("our own file");
            let tensors = again.tensors().map(|t| (t.info.clone(), Cow::Borrowed(t.bytes)));
            // Compared as bytes: NaNs are equal to themselves there.
            assert_eq!(encode(again.metadata(), tensors).ok(), Some(written));
        }
        // Readable, but not by llama.cpp.
        Err(error) => assert!(matches!(error.kind(), ErrorKind::NameLength { .. }), "{error}"),
    }
});
