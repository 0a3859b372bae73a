//! Reading what others left: regular files only, and no more of them than can be meant.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Opens a regular file for reading. Anything else is looked at and not opened: opening a pipe
/// would wait for somebody to write to it, and a device may have no end.
///
/// # Errors
/// What the system refuses; [`ErrorKind::InvalidInput`] for what is no regular file.
pub fn open(path: &Path) -> io::Result<File> {
    refuse_others(&fs::metadata(path)?)?;
    let file = File::open(path)?;
    // What is there now may be something else.
    refuse_others(&file.metadata()?)?;
    Ok(file)
}

fn refuse_others(found: &fs::Metadata) -> io::Result<()> {
    let what = match found.is_dir() {
        _ if found.is_file() => return Ok(()),
        true => "it is a folder, expected a file",
        false => "it is not a regular file",
    };
    Err(io::Error::new(ErrorKind::InvalidInput, what))
}

/// Reads a regular file of at most `most` bytes. One that is larger, also one that has grown since,
/// costs no memory.
///
/// # Errors
/// As [`open`]; [`ErrorKind::FileTooLarge`] beyond `most` bytes; [`ErrorKind::OutOfMemory`].
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let size = file.metadata()?.len();
    let too_large = |size: u64| {
        let said = format!("it has {size} bytes, expected at most {most}");
        io::Error::new(ErrorKind::FileTooLarge, said)
    };
    if size > most {
        return Err(too_large(size));
    }
    let mut bytes = Vec::new();
    let room = usize::try_from(size).map_err(|_| ErrorKind::OutOfMemory)?;
    bytes.try_reserve_exact(room).map_err(|_| ErrorKind::OutOfMemory)?;
    // One byte more shows whether it has grown.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 {
        size if size > most => Err(too_large(size)),
        _ => Ok(bytes),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_a_bound() {
        let folder = crate::replace::tests::folder("read");
        let path = folder.join("a");
        fs::write(&path, "four").unwrap();
        assert_eq!(read(&path, 4).unwrap(), b"four");
        let error = read(&path, 3).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
        assert_eq!(error.to_string(), "it has 4 bytes, expected at most 3");
        // Of a sparse file nothing is read or reserved.
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(read(&path, 1 << 20).unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert_eq!(read(&folder, 9).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(read(&folder.join("b"), 9).unwrap_err().kind(), ErrorKind::NotFound);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn pipes_and_devices_are_not_opened() {
        let folder = crate::replace::tests::folder("pipes");
        let pipe = folder.join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let device = folder.join("device");
        std::os::unix::fs::symlink("/dev/zero", &device).unwrap();
        for path in [pipe, device] {
            assert_eq!(open(&path).unwrap_err().kind(), ErrorKind::InvalidInput);
            assert_eq!(read(&path, 9).unwrap_err().to_string(), "it is not a regular file");
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
