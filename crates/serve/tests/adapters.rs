//! Adapters that are loaded while it serves: what is on the disk, and no more than there is room for.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests may panic

mod common;
#[path = "common/odd.rs"]
mod odd;

use std::fs::{self, File, FileTimes};
use std::path::Path;
use std::time::{Duration, SystemTime};

use common::{Fixture, answer, ask};
use graph::Code;
use model::Adapter;
use odd::Odd;
use serve::{Ask, MOST_ALIASES, Options, Server};

/// What is said under an alias, and how much of the prompt was in the cache.
fn said(server: &Server, alias: &str) -> (String, usize) {
    let answer = answer(server.ask(Ask { model: alias.into(), ..ask(4, 70) }).unwrap());
    (answer.text, answer.done.cached_tokens)
}

fn set_time(path: &Path, time: SystemTime) {
    File::open(path).unwrap().set_times(FileTimes::new().set_modified(time)).unwrap();
}

#[test]
fn what_is_loaded_is_what_is_on_the_disk() {
    let toy = Fixture::llama();
    let server = toy.server(Options::default());
    let [a, b] = ["a", "b"].map(|alias| toy.adapter_file(alias));
    toy.adapters(&server);
    let [of_a, of_b] = ["a", "b"].map(|alias| said(&server, alias).0);
    assert_ne!(of_a, of_b);
    // One file after the other under the same name, each older than the one before it and than what
    // is served.
    let file = toy.dir().join("f.gguf");
    let mut time = SystemTime::now();
    for (number, (from, expected)) in [(&a, &of_a), (&b, &of_b), (&a, &of_a)].iter().enumerate() {
        fs::copy(from, &file).unwrap();
        time -= Duration::from_secs(3600);
        set_time(&file, time);
        assert_eq!(server.load_adapter("f", &file).unwrap(), 1 + number as u64);
        assert_eq!(said(&server, "f").0, **expected);
    }
    // The same once more, as after a lost answer, whatever its time: nothing new.
    set_time(&file, SystemTime::now() + Duration::from_secs(3600));
    assert_eq!(server.load_adapter("f", &file).unwrap(), 3);

    // A folder of PEFT whose files are written over has the time that it had.
    let (folder, model) = (toy.dir().join("peft"), toy.model());
    let base = model.base();
    let _ = fs::remove_dir_all(&folder);
    Adapter::read(&a, &model).unwrap().write_peft(&folder, &base).unwrap();
    assert_eq!(server.load_adapter("p", &folder).unwrap(), 1);
    assert_eq!(said(&server, "p").0, of_a);
    let other = toy.dir().join("other");
    Adapter::read(&b, &model).unwrap().write_peft(&other, &base).unwrap();
    let before = fs::metadata(&folder).unwrap().modified().unwrap();
    for entry in fs::read_dir(&other).unwrap() {
        let entry = entry.unwrap();
        fs::write(folder.join(entry.file_name()), fs::read(entry.path()).unwrap()).unwrap();
    }
    assert_eq!(fs::metadata(&folder).unwrap().modified().unwrap(), before);
    assert_eq!(server.load_adapter("p", &folder).unwrap(), 2);
    assert_eq!(said(&server, "p").0, of_b);
    server.stop(Duration::ZERO);
}

/// One file under many aliases is one adapter in memory, and its prefixes are those of all.
#[test]
fn equal_adapters_are_one_and_their_number_is_bounded() {
    let toy = Fixture::llama();
    let server = toy.server(Options::default());
    let (a, b) = (toy.adapter_file("a"), toy.adapter_file("b"));
    for i in 0..MOST_ALIASES {
        assert_eq!(server.load_adapter(&format!("a{i}"), &a).unwrap(), 1);
    }
    let first = said(&server, "a0");
    let last = said(&server, &format!("a{}", MOST_ALIASES - 1));
    assert_eq!((first.0, first.1, last.1), (last.0.clone(), 0, 64));
    let refused = server.load_adapter("b", &b).unwrap_err();
    assert_eq!((refused.code, refused.status()), (Code::OverBudget, 422));
    assert_eq!(refused.field.as_deref(), Some("alias"));
    assert!(refused.message.contains("256 adapters"), "{refused}");
    assert!(refused.message.contains("`b`; unload another"), "{refused}");
    let job = server.train(toy.job("c", serve::Pacing::Never)).unwrap_err();
    assert_eq!(job.code, Code::OverBudget, "{job}");
    // What is there can still be replaced.
    assert_eq!(server.load_adapter("a0", &b).unwrap(), 2);
    assert_ne!(said(&server, "a0").0, last.0);
    // One goes, another takes its place, and no number is used twice.
    server.unload_adapter("a0").unwrap();
    assert_eq!(server.load_adapter("b", &b).unwrap(), 3);
    assert!(server.load_adapter("a0", &a).is_err());
    // Aliases that are gone leave nothing that their number would count.
    for i in 0..2 * MOST_ALIASES {
        server.unload_adapter("b").unwrap();
        server.load_adapter("b", &b).unwrap();
        assert_eq!(server.names().len(), 1 + MOST_ALIASES, "{i}");
    }
    // Generations of one content share its weights until the last is gone.
    for i in 1..MOST_ALIASES - 1 {
        server.unload_adapter(&format!("a{i}")).unwrap();
    }
    assert_eq!(said(&server, &format!("a{}", MOST_ALIASES - 1)).0, last.0);
    server.stop(Duration::ZERO);
}

#[test]
fn an_adapter_without_room_in_memory_is_refused_with_the_numbers() {
    let (toy, device) = (Fixture::llama(), Odd::new());
    let server = toy.server_on(toy.model_on(device.clone()), Options::default());
    let file = toy.adapter_file("a");
    *device.free.lock().unwrap() = Some(64 << 20);
    let refused = server.load_adapter("a", &file).unwrap_err();
    assert_eq!((refused.code, refused.field.as_deref()), (Code::OverBudget, Some("name")));
    for part in ["64.0 MiB are free", "64 MiB are kept for serving", "unload"] {
        assert!(refused.message.contains(part), "{refused}");
    }
    let folder = toy.dir().join("peft");
    let model = toy.model();
    Adapter::read(&file, &model).unwrap().write_peft(&folder, &model.base()).unwrap();
    assert_eq!(server.load_adapter("p", &folder).unwrap_err().code, Code::OverBudget);
    assert_eq!(server.names().len(), 1);
    *device.free.lock().unwrap() = Some(80 << 20);
    assert_eq!(server.load_adapter("a", &file).unwrap(), 1);
    server.stop(Duration::ZERO);
}

/// The one rule for aliases, also where they do not come in a request.
#[test]
fn an_alias_is_one_that_a_file_can_have() {
    let toy = Fixture::llama();
    let server = toy.server(Options::default());
    for alias in ["a:b", "", "../a", "base"] {
        let refused = server.load_adapter(alias, &toy.adapter_file("a")).unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("alias"), "{alias}: {refused}");
    }
    server.stop(Duration::ZERO);
}
