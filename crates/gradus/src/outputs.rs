//! Files that a command is going to write: whether it can, and what stands in their place.

use std::fmt::Display;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Says before hours of work that a result could not be written, or would take the place of what
/// it is made from. What else it may take the place of is its own kind's business
/// ([`gguf::check_out`], [`model::Adapter::check_out`]).
///
/// # Errors
/// A file whose folder is not there or takes no new files, that is a folder or a device, that is
/// one of `inputs`, or that is written twice.
pub fn check(outputs: &[&Path], inputs: &[PathBuf]) -> Result<()> {
    for (i, out) in outputs.iter().enumerate() {
        let place = place(out)?;
        let folder = files::folder_of(&place);
        if !folder.is_dir() {
            return Err(Error::invalid(format!(
                "cannot write {}: there is no folder {}",
                out.display(),
                folder.display()
            )));
        }
        let is_place = |file: &Path| is_same(file, &place);
        if inputs.iter().any(|input| input.exists() && is_place(input)) {
            return Err(Error::invalid(format!(
                "{} is what is read, and writing would take its place; choose another file",
                out.display()
            )));
        }
        for other in outputs.iter().take(i) {
            if is_place(&self::place(other)?) {
                return Err(Error::invalid(format!(
                    "{} is to be written twice; choose two files",
                    out.display()
                )));
            }
        }
        files::Replacement::create(&place).map_err(|e| match e.kind() {
            ErrorKind::ResourceBusy => refused(out, &e),
            _ => refused(out, &format!("the folder takes no new file: {e}")),
        })?;
    }
    Ok(())
}

/// Whether files can be made in a folder, or in the nearest one above it that is there.
///
/// # Errors
/// What the system said.
pub fn check_folder(wanted: &Path) -> Result<()> {
    let there = wanted.ancestors().find(|folder| folder.exists()).filter(|p| **p != *Path::new(""));
    files::try_folder(there.unwrap_or(Path::new("."))).map_err(|e| {
        Error::invalid(format!("cannot write to the folder {}: {e}", wanted.display()))
    })
}

/// A path with something behind its name, which stays within what file systems allow.
pub fn beside(path: &Path, what: &str) -> PathBuf {
    let mut name = files::short(path.file_name().unwrap_or_default());
    name.push(what);
    path.with_file_name(name)
}

fn refused(out: &Path, why: &dyn Display) -> Error {
    Error::invalid(format!("cannot write {}: {why}; choose another file", out.display()))
}

/// Where a file is, or would be.
fn place(path: &Path) -> Result<PathBuf> {
    files::destination(path).map_err(|e| refused(path, &e))
}

fn is_same(a: &Path, b: &Path) -> bool {
    let whole = |path: &Path| {
        let new = || Some(files::folder_of(path).canonicalize().ok()?.join(path.file_name()?));
        path.canonicalize().ok().or_else(new)
    };
    a == b || whole(a).is_some_and(|a| whole(b) == Some(a))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_those_of_files_that_are_not_there_too() {
        let folder = std::env::temp_dir();
        let name = format!("gradus-outputs-{}", std::process::id());
        let (plain, around) = (folder.join(&name), folder.join(".").join(&name));
        assert!(is_same(&plain, &around));
        let error = check(&[&plain, &around], &[]).unwrap_err().message();
        assert!(error.ends_with("is to be written twice; choose two files"), "{error}");
        std::fs::write(&plain, "x").unwrap();
        let error = check(&[&around], std::slice::from_ref(&plain)).unwrap_err().message();
        assert!(error.contains("is what is read"), "{error}");
        std::fs::remove_file(&plain).unwrap();
        assert!(check(&[&plain], std::slice::from_ref(&around)).is_ok());
        let error = check(&[&folder], &[]).unwrap_err().message();
        assert!(error.contains("it is a folder, expected a file"), "{error}");
        check_folder(&folder.join("a/b/c")).unwrap();
    }

    #[test]
    fn names_beside_long_ones_fit() {
        let name = |path: &Path| path.file_name().unwrap().len();
        assert_eq!(beside(Path::new("a/out.gguf"), ".x"), Path::new("a/out.gguf.x"));
        assert!(name(&beside(Path::new(&"a".repeat(255)), ".checkpoints")) < 200);
    }

    /// Where process ids repeat, as in containers, a process that was killed had ours.
    #[test]
    fn what_a_killed_process_left_is_in_nobodys_way() {
        let folder = std::env::temp_dir().join(format!("gradus-left-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for name in [".out.gguf.tmp", ".gradus.tmp"] {
            std::fs::write(folder.join(name), "half").unwrap();
        }
        check(&[&folder.join("out.gguf")], &[]).unwrap();
        check_folder(&folder).unwrap();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "something stays");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
