//! Files that are written beside their place and take it when they are whole.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::lock::Lock;

/// More links than this, one after the other, are taken for a ring, as Linux does.
const MOST_LINKS: usize = 40;

/// Bytes of a name that leave room for what is put before and behind it.
const LONG: usize = 200;

/// Where a file that is given by `path` lies, or would: what a link points to, though that may not
/// be there yet.
///
/// # Errors
/// What the system refuses; [`ErrorKind::InvalidInput`] where there is something that no file may
/// take the place of: a folder, a device, a pipe.
pub fn destination(path: &Path) -> io::Result<PathBuf> {
    let refused = |what: &str| Err(io::Error::new(ErrorKind::InvalidInput, what));
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => return refused("it is a folder, expected a file"),
        Ok(found) if !found.is_file() => return refused("it is not a regular file"),
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut at = path.to_path_buf();
    for _ in 0..MOST_LINKS {
        match fs::read_link(&at) {
            Ok(to) => at = folder_of(&at).join(to),
            Err(_) if at.file_name().is_none() => return refused("it names no file"),
            // No link, or nothing.
            Err(_) => return Ok(at),
        }
    }
    refused("its links lead in a ring")
}

/// A file that is being written and takes its place when it is whole: at `path` there is the old
/// file or the whole new one, never a part. What a link points to is replaced, and the link stays.
///
/// It is written beside its place, always under the same name, and locked meanwhile: what a killed
/// process left there is used again, and a second process that would write to the same place is
/// refused. (On a file system without locks it is not: there, the first fails when it commits.)
/// Dropped before [`Replacement::commit`], it leaves nothing behind.
#[derive(Debug)]
pub struct Replacement {
    place: PathBuf,
    temporary: PathBuf,
    lock: Lock,
    is_committed: bool,
}

impl Replacement {
    /// Begins a file that is empty.
    ///
    /// # Errors
    /// As [`destination`]; what the system refuses; [`ErrorKind::ResourceBusy`] while another is
    /// being written for this place.
    pub fn create(path: &Path) -> io::Result<Replacement> {
        let place = destination(path)?;
        let temporary = temporary(&place);
        let lock = begin(&temporary).map_err(|e| {
            let shown = temporary.file_name().unwrap_or_default().display();
            io::Error::new(e.kind(), format!("{shown}: {e}"))
        })?;
        Ok(Replacement { place, temporary, lock, is_committed: false })
    }

    /// Flushes it to the disk and gives it its name, which outlasts a loss of power.
    ///
    /// # Errors
    /// What the system refuses. The old file is in its place then, but for one error, which says
    /// so: that the new one has it, and a loss of power may undo that.
    pub fn commit(self) -> io::Result<()> {
        self.commit_and(sync_folder)
    }

    fn commit_and(mut self, sync_folder: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        self.lock.file().sync_all()?;
        if !is_at(self.lock.file(), &self.temporary) {
            return Err(busy());
        }
        fs::rename(&self.temporary, &self.place)?;
        self.is_committed = true;
        sync_folder(folder_of(&self.place)).map_err(|e| {
            let said = format!("it is written, but a loss of power may undo that: {e}");
            io::Error::new(e.kind(), said)
        })
    }
}

impl Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock.file().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.lock.file().flush()
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if !self.is_committed && is_at(self.lock.file(), &self.temporary) {
            // Best effort: there is nobody to tell, and the next to write here uses it again.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Makes and locks the temporary file. What is there and locked by nobody was left by a process
/// that is no more: it is removed and not truncated, since it may have other names (a copy by hard
/// links), or be another user's.
fn begin(temporary: &Path) -> io::Result<Lock> {
    loop {
        match OpenOptions::new().write(true).create_new(true).open(temporary) {
            Ok(file) => {
                // Before it is locked, another may take it for one that is left.
                let lock = Lock::of(file).ok_or_else(busy)?;
                if is_at(lock.file(), temporary) {
                    return Ok(lock);
                }
            }
            Err(e) if e.kind() == ErrorKind::AlreadyExists => remove_left(temporary)?,
            Err(e) => return Err(e),
        }
    }
}

fn remove_left(temporary: &Path) -> io::Result<()> {
    let or_gone = |e: io::Error| match e.kind() {
        ErrorKind::NotFound => Ok(()),
        _ => Err(e),
    };
    match fs::symlink_metadata(temporary) {
        Ok(found) if found.is_file() => {}
        Ok(_) => return Err(io::Error::new(ErrorKind::AlreadyExists, "it is in the way")),
        Err(e) => return or_gone(e),
    }
    // For writing: network file systems lock no other way.
    let file = match OpenOptions::new().write(true).open(temporary) {
        Ok(file) => file,
        Err(e) => return or_gone(e),
    };
    let lock = Lock::of(file).ok_or_else(busy)?;
    match is_at(lock.file(), temporary) {
        true => fs::remove_file(temporary).or_else(or_gone),
        // It has become somebody's file, and what is there now is another.
        false => Ok(()),
    }
}

fn busy() -> io::Error {
    io::Error::new(ErrorKind::ResourceBusy, "another process is writing this file")
}

/// Whether a path is that of an open file.
fn is_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let of = |found: io::Result<fs::Metadata>| found.ok().map(|m| (m.dev(), m.ino()));
        let open = of(file.metadata());
        open.is_some() && of(fs::symlink_metadata(path)) == open
    }
    // The standard library tells files apart nowhere else.
    #[cfg(not(unix))]
    {
        let _ = file;
        path.exists()
    }
}

/// Writes a file that appears whole or not at all, as [`Replacement`].
///
/// # Errors
/// As [`Replacement::create`] and [`Replacement::commit`].
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut out = Replacement::create(path)?;
    out.write_all(bytes)?;
    out.commit()
}

/// As [`write`], of what `write` gives piece by piece.
///
/// # Errors
/// As [`write`], and those of `write`, after which the old file is in its place.
pub fn write_with(
    path: &Path,
    write: impl FnOnce(&mut Replacement) -> io::Result<()>,
) -> io::Result<()> {
    let mut out = Replacement::create(path)?;
    write(&mut out)?;
    out.commit()
}

/// Whether files can be made in a folder: makes one and removes it.
///
/// # Errors
/// What the system refuses.
pub fn try_folder(folder: &Path) -> io::Result<()> {
    match Replacement::create(&folder.join("gradus")) {
        // Somebody else is trying.
        Err(e) if e.kind() == ErrorKind::ResourceBusy => Ok(()),
        other => other.map(drop),
    }
}

/// What a file is called until it has its name.
fn temporary(place: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(short(place.file_name().unwrap_or_default()));
    name.push(".tmp");
    place.with_file_name(name)
}

/// What names of files beside one are made of: its own name, and of one that is so long that nothing
/// more fits in what file systems allow (255 bytes) a hash: FNV-1a (Fowler, Noll & Vo).
pub fn short(name: &OsStr) -> OsString {
    let bytes = name.as_encoded_bytes();
    if bytes.len() <= LONG {
        return name.to_os_string();
    }
    let add = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, add)).into()
}

/// The folder that a file is in.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes renames in a folder outlast a loss of power, where the system lets a folder be opened and
/// flushed: not all of them do, nor all file systems.
///
/// # Errors
/// What went wrong on the disk.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    if !cfg!(unix) {
        return Ok(());
    }
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(e)
            if matches!(
                e.kind(),
                ErrorKind::PermissionDenied | ErrorKind::InvalidInput | ErrorKind::Unsupported
            ) =>
        {
            Ok(())
        }
        synced => synced,
    }
}

/// Makes a file, empty and named after another, in a folder that is everybody's: nothing takes the
/// place of what somebody else has there, or a process of the same id left.
///
/// # Errors
/// What the system said, with the path.
pub fn new_file(folder: &Path, named: &Path) -> io::Result<PathBuf> {
    let name = short(named.file_name().unwrap_or_default());
    let numbered = |i: u32| folder.join(format!("gradus-{i}-{}", name.display()));
    let mut i = 1;
    loop {
        let path = numbered(i);
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(_) => return Ok(path),
            Err(e) if e.kind() == ErrorKind::AlreadyExists && i < 100_000 => i += 1,
            Err(e) => {
                let message = format!("cannot write {}: {e}", path.display());
                return Err(io::Error::new(e.kind(), message));
            }
        }
    }
}

/// What could not be written to its place.
#[derive(Debug)]
pub struct Unwritten<E> {
    /// Why.
    pub why: E,
    /// Where it is instead, or why it is nowhere, in words.
    pub instead: Result<PathBuf, String>,
}

/// Writes what took long to make; where that fails, to the folder for temporary files.
///
/// # Errors
/// Why it is not in its place, and where it is.
pub fn write_or_rescue<T, E: std::fmt::Display>(
    path: &Path,
    write: &mut dyn FnMut(&Path) -> Result<T, E>,
) -> Result<T, Unwritten<E>> {
    let why = match write(path) {
        Ok(written) => return Ok(written),
        Err(why) => why,
    };
    let mut rescue = || {
        let instead = new_file(&std::env::temp_dir(), path).map_err(|e| e.to_string())?;
        match write(&instead) {
            Ok(_) => Ok(instead),
            Err(also) => {
                // It is empty still.
                let _ = fs::remove_file(&instead);
                Err(also.to_string())
            }
        }
    };
    Err(Unwritten { why, instead: rescue() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn folder(name: &str) -> PathBuf {
        let folder =
            std::env::temp_dir().join(format!("gradus-files-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn names(folder: &Path) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name();
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(name).collect();
        names.sort();
        names.into_iter().map(|name| name.into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_appears_whole_or_stays_as_it_was() {
        let folder = folder("write");
        let path = folder.join("a.txt");
        write(&path, b"one").unwrap();
        let mut out = Replacement::create(&path).unwrap();
        out.write_all(b"half of").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        drop(out);
        write(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        let failed = write_with(&path, |out| {
            out.write_all(b"three")?;
            Err(io::Error::other("the disk is full"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "the disk is full");
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(names(&folder), ["a.txt"], "something is left beside it");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_a_killed_process_left_is_used_again_and_no_copy_of_it_changes() {
        let folder = folder("left");
        let (path, copy) = (folder.join("a.txt"), folder.join("copy"));
        fs::write(temporary(&path), "half of something long").unwrap();
        fs::hard_link(temporary(&path), &copy).unwrap();
        write(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read(&copy).unwrap(), b"half of something long");
        assert_eq!(names(&folder), ["a.txt", "copy"]);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn one_writes_to_a_place_at_a_time() {
        let folder = folder("busy");
        let path = folder.join("a.txt");
        let mut first = Replacement::create(&path).unwrap();
        first.write_all(b"first").unwrap();
        let error = Replacement::create(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ResourceBusy);
        let said = ".a.txt.tmp: another process is writing this file";
        assert_eq!(error.to_string(), said);
        first.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"first");
        write(&path, b"second").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_name_may_be_as_long_as_the_file_system_has_it() {
        let folder = folder("long");
        for (first, len) in [("a", 255), ("b", 255), ("a", 201), ("a", 200)] {
            let path = folder.join(first.repeat(len));
            write(&path, b"one").unwrap();
            let held = Replacement::create(&path).unwrap();
            assert_eq!(Replacement::create(&path).unwrap_err().kind(), ErrorKind::ResourceBusy);
            // Other long names have other temporary ones.
            write(&folder.join(format!("{}b", "a".repeat(254))), b"two").unwrap();
            drop(held);
            assert_eq!(fs::read(&path).unwrap(), b"one");
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 5, "something is left");
        fs::remove_dir_all(&folder).unwrap();
    }

    /// As where there are no locks.
    #[cfg(unix)]
    #[test]
    fn who_lost_the_temporary_file_to_another_commits_nothing() {
        let folder = folder("lost");
        let path = folder.join("a.txt");
        let first = Replacement::create(&path).unwrap();
        fs::remove_file(temporary(&path)).unwrap();
        let mut second = Replacement::create(&path).unwrap();
        second.write_all(b"second").unwrap();
        assert_eq!(first.commit().unwrap_err().kind(), ErrorKind::ResourceBusy);
        second.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn many_at_once_leave_one_whole_file() {
        let folder = folder("many");
        let path = folder.join("a.txt");
        let write = |byte: u8| {
            let mut written = false;
            for _ in 0..50 {
                match write(&path, &vec![byte; 5000]) {
                    Ok(()) => written = true,
                    Err(e) => assert_eq!(e.kind(), ErrorKind::ResourceBusy, "{e}"),
                }
                if let Ok(found) = fs::read(&path) {
                    assert!(found.len() == 5000 && found.iter().all(|b| *b == found[0]));
                }
            }
            written
        };
        let any = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|byte| scope.spawn(move || write(byte))).collect();
            threads.into_iter().any(|thread| thread.join().unwrap())
        });
        assert!(any);
        assert_eq!(names(&folder), ["a.txt"]);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn what_a_link_points_to_is_replaced() {
        use std::os::unix::fs::symlink;
        let folder = folder("links");
        fs::create_dir(folder.join("far")).unwrap();
        let (near, far) = (folder.join("near"), folder.join("far/a.txt"));
        symlink("also", &near).unwrap();
        symlink("far/a.txt", folder.join("also")).unwrap();
        // Not there yet, then there.
        for text in ["one", "two"] {
            write(&near, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&far).unwrap(), text);
            assert!(fs::symlink_metadata(&near).unwrap().is_symlink());
        }
        assert_eq!(names(&folder), ["also", "far", "near"]);
        assert_eq!(names(&folder.join("far")), ["a.txt"]);
        symlink("ring", folder.join("ring")).unwrap();
        write(&folder.join("ring"), b"").unwrap_err();
        fs::remove_dir_all(&folder).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn folders_pipes_and_devices_keep_their_places() {
        let folder = folder("kept");
        let pipe = folder.join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let null = folder.join("null");
        std::os::unix::fs::symlink("/dev/null", &null).unwrap();
        for path in [&pipe, &null, &folder, Path::new("/dev/null"), Path::new("/")] {
            let error = write(path, b"x").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{}: {error}", path.display());
        }
        // Nor is it waited for where the temporary file would be.
        let path = folder.join("a");
        fs::rename(&pipe, temporary(&path)).unwrap();
        assert_eq!(write(&path, b"x").unwrap_err().to_string(), ".a.tmp: it is in the way");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn an_error_after_the_file_has_its_name_says_that_it_has() {
        let folder = folder("synced");
        let path = folder.join("a.txt");
        write(&path, b"old").unwrap();
        let mut out = Replacement::create(&path).unwrap();
        out.write_all(b"new").unwrap();
        let failed = out.commit_and(|_| Err(io::Error::other("the disk is gone")));
        let said = failed.unwrap_err().to_string();
        assert_eq!(said, "it is written, but a loss of power may undo that: the disk is gone");
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(&folder), ["a.txt"]);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_new_file_takes_the_place_of_none() {
        let folder = folder("new");
        let long = "a".repeat(255);
        for named in ["facts.gguf", &long] {
            let paths: Vec<PathBuf> =
                (0..3).map(|_| new_file(&folder, Path::new(named)).unwrap()).collect();
            assert!(paths[0] != paths[1] && paths[1] != paths[2], "{paths:?}");
        }
        #[cfg(unix)]
        {
            // Nor is it written to what a link of somebody else points to.
            let theirs = folder.join("theirs");
            std::os::unix::fs::symlink(&theirs, folder.join("gradus-1-b.gguf")).unwrap();
            let path = new_file(&folder, Path::new("b.gguf")).unwrap();
            assert!(path.ends_with("gradus-2-b.gguf") && !theirs.exists());
        }
        fs::remove_dir_all(&folder).unwrap();
        assert!(new_file(&folder, Path::new("b.gguf")).is_err());
    }

    #[test]
    fn what_cannot_be_written_to_its_place_is_kept_elsewhere() {
        let place = folder("rescue").join("rescued.txt");
        fs::create_dir(&place).unwrap();
        let mut write = |path: &Path| write(path, b"hours of work");
        let Unwritten { why, instead } = write_or_rescue(&place, &mut write).unwrap_err();
        assert_eq!(why.to_string(), "it is a folder, expected a file");
        let instead = instead.unwrap();
        assert_eq!(fs::read(&instead).unwrap(), b"hours of work");
        fs::remove_file(&instead).unwrap();
        fs::remove_dir(&place).unwrap();
        write_or_rescue(&place, &mut write).unwrap();
        assert!(place.is_file());
        // Where it cannot be written at all, nothing is left.
        let mut tried = Vec::new();
        let mut write = |path: &Path| -> io::Result<()> {
            tried.push(path.to_path_buf());
            Err(io::Error::other("the disk is full"))
        };
        let unwritten = write_or_rescue(&place, &mut write).unwrap_err();
        assert_eq!(unwritten.instead.unwrap_err(), "the disk is full");
        assert!(tried.len() == 2 && !tried[1].exists());
        fs::remove_dir_all(place.parent().unwrap()).unwrap();
    }
}
