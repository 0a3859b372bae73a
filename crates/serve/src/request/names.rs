//! Names that clients give: of files inside the training folder, and of adapters.

use std::path::{Path, PathBuf};

use graph::Code;
use serde_json::Value;

use super::json::shown;
use crate::{Error, Result};

/// What adapter files end with.
const ENDING: &str = ".gguf";

fn bad(field: &str, name: &str, why: &str) -> Error {
    let name = shown(&Value::String(name.into()));
    Error::new(Code::BadPath, format!("`{field}` is {name}, which {why}")).with_field(field)
}

/// Checks the name of a file in the training folder: 6 to 200 bytes that end in `.gguf`, without
/// a separator, a control character or `..`.
///
/// # Errors
/// Says what is wrong with it.
pub fn check_file_name(field: &str, name: &str) -> Result<()> {
    let why = if name.len() < 6 || name.len() > 200 {
        "has not 6 to 200 bytes"
    } else if !name.ends_with(ENDING) {
        "does not end in .gguf"
    } else if name.contains(['/', '\\', ':']) {
        "contains one of / \\ :"
    } else if name.bytes().any(|b| b < 0x20) {
        "contains a control character"
    } else if name.contains("..") {
        "contains `..`"
    } else {
        return Ok(());
    };
    Err(bad(field, name, &format!("{why}; expected a file name such as `notes.gguf`")))
}

/// The alias a file's adapter goes by: its name without `.gguf`.
pub fn alias_of(file: &str) -> &str {
    file.strip_suffix(ENDING).unwrap_or(file)
}

/// Checks an alias: letters, digits, `-`, `_` and `.`, such that with `.gguf` after it, it may be
/// a file's name; and not the name of the base model.
///
/// # Errors
/// Says what is wrong with it.
pub fn check_alias(field: &str, alias: &str, base: &str) -> Result<()> {
    if alias == base {
        return Err(bad(field, alias, "is the name of the base model; expected another"));
    }
    let fine = |c: char| c.is_alphanumeric() || "-_.".contains(c);
    let file = check_file_name(field, &format!("{alias}{ENDING}"));
    if file.is_err() || !alias.chars().all(fine) {
        let why = "is no alias; expected 1 to 195 bytes of letters, digits, `-`, `_`, `.`";
        return Err(bad(field, alias, why));
    }
    Ok(())
}

/// The place in the training folder of a file that a job will write. What is there already is
/// replaced, provided that it is a file of that folder.
///
/// # Errors
/// The name is not allowed, the folder is not there, or the name is taken by a folder or by a
/// link that leads elsewhere.
pub fn file_to_write(field: &str, folder: &Path, name: &str) -> Result<PathBuf> {
    check_file_name(field, name)?;
    let folder = resolve_folder(folder)?;
    let path = folder.join(name);
    match std::fs::symlink_metadata(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(path),
        Err(e) => Err(bad(field, name, &format!("cannot be looked at: {e}"))),
        Ok(_) => resolve_file(field, &folder, name).map(|_| path),
    }
}

/// A file of the training folder that is to be read.
///
/// # Errors
/// The name is not allowed, or there is no such file inside the folder.
pub fn file_to_read(field: &str, folder: &Path, name: &str) -> Result<PathBuf> {
    check_file_name(field, name)?;
    resolve_file(field, &resolve_folder(folder)?, name)
}

/// An adapter of the training folder that is to be read: a file, or a folder of PEFT, whose name
/// does not end in `.gguf`.
///
/// # Errors
/// The name is not allowed, or there is no such file or folder inside the training folder.
pub fn adapter_to_read(field: &str, folder: &Path, name: &str) -> Result<PathBuf> {
    if name.ends_with(ENDING) {
        return file_to_read(field, folder, name);
    }
    check_file_name(field, &format!("{name}{ENDING}"))?;
    let folder = resolve_folder(folder)?;
    match folder.join(name).canonicalize() {
        Ok(path) if path.parent() != Some(&folder) => {
            Err(bad(field, name, "is a link that leads out of the training folder"))
        }
        Ok(path) if path.is_dir() => {
            for file in ["adapter_config.json", "adapter_model.safetensors"] {
                let inside = path.join(file).canonicalize();
                if inside.is_ok_and(|file| file.parent() != Some(&path)) {
                    return Err(bad(field, name, "holds a link that leads out of it"));
                }
            }
            Ok(path)
        }
        _ => Err(bad(
            field,
            name,
            "is no file that ends in .gguf and no folder of the training folder",
        )),
    }
}

fn resolve_folder(folder: &Path) -> Result<PathBuf> {
    folder
        .canonicalize()
        .map_err(|e| Error::new(Code::BadPath, format!("the training folder cannot be used: {e}")))
}

/// Follows links, and refuses to leave the folder by one.
fn resolve_file(field: &str, folder: &Path, name: &str) -> Result<PathBuf> {
    let path = match folder.join(name).canonicalize() {
        Ok(path) => path,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(bad(field, name, "is not in the training folder"));
        }
        Err(e) => return Err(bad(field, name, &format!("cannot be looked at: {e}"))),
    };
    if path.parent() != Some(folder) {
        return Err(bad(field, name, "is a link that leads out of the training folder"));
    }
    if !path.is_file() {
        return Err(bad(field, name, "is no regular file"));
    }
    Ok(path)
}
