//! Files that a command is going to write: whether it can, and what stands in their place.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Says before hours of work that a result could not be written, or would take the place of what
/// it is made from.
///
/// # Errors
/// A file whose folder is not there or takes no new files, that is a folder, that is one of
/// `inputs`, or that is written twice.
pub fn check(outputs: &[&Path], inputs: &[PathBuf]) -> Result<()> {
    for (i, out) in outputs.iter().enumerate() {
        if out.is_dir() {
            return Err(Error::invalid(format!("{} is a folder; expected a file", out.display())));
        }
        let folder = folder(out);
        if !folder.is_dir() {
            return Err(Error::invalid(format!(
                "cannot write {}: there is no folder {}",
                out.display(),
                folder.display()
            )));
        }
        try_write(folder).map_err(|e| {
            Error::invalid(format!(
                "cannot write {}: the folder takes no new file: {e}",
                out.display()
            ))
        })?;
        let place = place(out);
        if inputs.iter().any(|input| input.canonicalize().is_ok_and(|input| input == place)) {
            return Err(Error::invalid(format!(
                "{} is what is read, and writing would take its place; choose another file",
                out.display()
            )));
        }
        if outputs.iter().take(i).any(|other| self::place(other) == place) {
            return Err(Error::invalid(format!(
                "{} is to be written twice; choose two files",
                out.display()
            )));
        }
    }
    Ok(())
}

/// Whether files can be made in a folder, or in the nearest one above it that is there.
///
/// # Errors
/// What the system said.
pub fn check_folder(wanted: &Path) -> Result<()> {
    let there = wanted.ancestors().find(|folder| folder.exists()).filter(|p| **p != *Path::new(""));
    try_write(there.unwrap_or(Path::new("."))).map_err(|e| {
        Error::invalid(format!("cannot write to the folder {}: {e}", wanted.display()))
    })
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Where a file is, or would be.
fn place(path: &Path) -> PathBuf {
    let new = || Some(folder(path).canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(new).unwrap_or_else(|| path.to_path_buf())
}

/// Makes a file in a folder and removes it.
fn try_write(folder: &Path) -> std::io::Result<()> {
    let path = folder.join(format!(".gradus-{}.tmp", std::process::id()));
    OpenOptions::new().write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_those_of_files_that_are_not_there_too() {
        let folder = std::env::temp_dir();
        let name = format!("gradus-outputs-{}", std::process::id());
        let (plain, around) = (folder.join(&name), folder.join(".").join(&name));
        assert_eq!(place(&plain), place(&around));
        let error = check(&[&plain, &around], &[]).unwrap_err().message();
        assert!(error.ends_with("is to be written twice; choose two files"), "{error}");
        std::fs::write(&plain, "x").unwrap();
        let error = check(&[&around], std::slice::from_ref(&plain)).unwrap_err().message();
        std::fs::remove_file(&plain).unwrap();
        assert!(error.contains("is what is read"), "{error}");
        assert!(check(&[&plain], std::slice::from_ref(&around)).is_ok());
        check_folder(&folder.join("a/b/c")).unwrap();
    }
}
