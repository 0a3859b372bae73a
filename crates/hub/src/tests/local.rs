//! What needs no package at all: the catalogue, the folder, finding files, write errors.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::fixture::{Folder, Model, message};
use crate::pip::Pip;
use crate::pull::{Source, pull_entry};
use crate::{DEFAULT_MODEL, Error, catalogue, find, home_from, resolve_in};

#[test]
fn the_catalogue_agrees_with_itself() {
    let is_hash = |hash: &str| {
        hash.len() == 64 && hash.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    assert_eq!(catalogue()[0].name, DEFAULT_MODEL);
    let mut names = HashSet::new();
    for entry in catalogue() {
        assert!(names.insert(entry.name) && names.insert(entry.file), "{}", entry.name);
        assert!(find(entry.name).is_some());
        assert!(is_hash(entry.sha256), "{}", entry.name);
        assert!(entry.file.ends_with(".gguf") && !entry.file.contains(['/', '\\']));
        let bytes: u64 = entry.sources.iter().map(|part| part.bytes).sum();
        assert_eq!(bytes, entry.bytes, "{}", entry.name);
        for part in entry.sources {
            assert!(is_hash(part.wheel_sha256), "{}", part.wheel);
            let stem = format!("{}-{}-", part.package.replace('-', "_"), part.version);
            assert!(part.wheel.starts_with(&stem) && part.wheel.ends_with(".whl"), "{stem}");
        }
    }
}

#[test]
fn home_follows_the_environment() {
    let with = |vars: &'static [(&str, &str)], user: Option<&str>| {
        let var = |name: &str| {
            vars.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        };
        home_from(&var, user.map(PathBuf::from))
    };
    let own = with(&[("GRADUS_HOME", "/g"), ("XDG_DATA_HOME", "/x")], Some("/u")).unwrap();
    assert_eq!(own, Path::new("/g"));
    assert!(matches!(with(&[("GRADUS_HOME", "")], None), Err(Error::NoHome)));
    if cfg!(all(unix, not(target_os = "macos"))) {
        let cases: [(&'static [(&str, &str)], &str); 3] = [
            (&[("XDG_DATA_HOME", "/x")], "/x/gradus"),
            (&[("XDG_DATA_HOME", "relative")], "/u/.local/share/gradus"),
            (&[], "/u/.local/share/gradus"),
        ];
        for (vars, expected) in cases {
            assert_eq!(with(vars, Some("/u")).unwrap(), Path::new(expected));
        }
    }
}

#[test]
fn resolve_finds_files_and_says_what_to_do_about_others() {
    let home = Folder::new();
    let resolve = |name: &str| resolve_in(name, &|| Ok(home.path().to_path_buf()));
    let error = message(resolve(DEFAULT_MODEL));
    assert!(error.contains("`gradus pull smollm2-135m-instruct`"), "{error}");
    let error = message(resolve("smollm"));
    assert!(error.contains("no model is called `smollm`") && error.contains("gemma-3-270m"));
    assert!(message(resolve("nowhere.gguf")).starts_with("nowhere.gguf: there is no such file"));
    let folder = home.path().to_str().unwrap();
    assert!(message(resolve(folder)).contains("it is a folder"));

    let file = home.path().join("a file.gguf");
    fs::write(&file, "x").unwrap();
    assert_eq!(resolve(file.to_str().unwrap()).unwrap(), file);

    // A file of the catalogue counts only when it is complete.
    let entry = find(DEFAULT_MODEL).unwrap();
    let models = home.path().join("models");
    fs::create_dir_all(&models).unwrap();
    let file = fs::File::create(models.join(entry.file)).unwrap();
    file.set_len(entry.bytes - 1).unwrap();
    assert!(matches!(resolve(DEFAULT_MODEL), Err(Error::NotPulled { .. })));
    file.set_len(entry.bytes).unwrap();
    assert_eq!(resolve(DEFAULT_MODEL).unwrap(), models.join(entry.file));
}

#[test]
fn a_home_that_cannot_be_written_is_named() {
    let folder = Folder::new();
    let home = folder.path().join("file");
    fs::write(&home, "").unwrap();
    let source = Source::Pip(Pip { commands: Vec::new() });
    let error = message(pull_entry(Model::new(&[1]).entry, &home, &source, &mut |_| {}));
    assert!(error.starts_with("cannot make the folder"), "{error}");
    assert!(error.contains(home.to_str().unwrap()), "{error}");
}

#[test]
fn a_model_that_is_not_in_the_catalogue_cannot_be_pulled() {
    let error = message(crate::pull("gpt-5", &mut |_| {}));
    assert!(error.contains("no model is called `gpt-5`"), "{error}");
}
