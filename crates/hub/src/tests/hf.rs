//! Pulling from a hub: a server on this machine, good and bad.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::fixture::{Folder, message, sha256};
use super::server::{Reply, Request, Server};
use crate::Error;
use crate::hf::{Hub, Spec};
use crate::pull::Progress;

/// Files of the repository `acme/tiny`: path and contents.
type Files = Vec<(&'static str, Vec<u8>)>;

fn noise(n: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..n).map(|_| next()).collect()
}

/// The hub's list of files.
fn tree(files: &Files) -> String {
    let entries = files.iter().map(|(path, bytes)| {
        let (n, hash) = (bytes.len(), sha256(bytes));
        format!(
            r#"{{"type":"file","oid":"b1","size":{n},"path":"{path}",
                "lfs":{{"oid":"{hash}","size":{n},"pointerSize":134}},"xetHash":"x"}}"#
        )
    });
    let folder = r#"{"type":"directory","oid":"d","size":0,"path":"sub"}"#.to_owned();
    let small = r#"{"type":"file","oid":"a1","size":12,"path":"README.md"}"#.to_owned();
    let all: Vec<String> = [folder, small].into_iter().chain(entries).collect();
    format!("[{}]", all.join(","))
}

const LIST: &str = "/api/models/acme/tiny/tree/main?recursive=true";

/// A good hub, except where `change` says otherwise.
fn hub(
    files: Files,
    change: impl Fn(usize, &Request) -> Option<Reply> + Send + Sync + 'static,
) -> Server {
    Server::start(move |number, request| {
        if let Some(reply) = change(number, request) {
            return reply;
        }
        if request.path == LIST {
            return Reply::json(tree(&files));
        }
        let found = files.iter().find(|(path, _)| {
            request.path == format!("/acme/tiny/resolve/main/{}", path.replace(' ', "%20"))
        });
        match found {
            Some((_, bytes)) => file(bytes, request),
            None => Reply::new(404, "not here"),
        }
    })
}

/// A file with its tag: a range is given only to who has the beginning of the same file.
fn file(bytes: &[u8], request: &Request) -> Reply {
    let tag = format!("\"{}\"", &sha256(bytes)[..20]);
    let same = request.if_range.as_ref().is_none_or(|wanted| *wanted == tag);
    let from = request.from.filter(|_| same);
    let mut reply = Reply::file(bytes, &Request { from, ..request.clone() });
    reply.headers.push(("ETag", tag));
    reply
}

fn is_file(request: &Request) -> bool {
    request.path.contains("/resolve/")
}

fn pull(server: &Server, name: &str, home: &Folder) -> Result<PathBuf, Error> {
    pull_with(server, name, home, None, &mut |_| {})
}

fn pull_with(
    server: &Server,
    name: &str,
    home: &Folder,
    token: Option<&str>,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, Error> {
    let mut hub = Hub::new(&server.url, token.map(str::to_owned))?;
    hub.pause = Duration::from_millis(1);
    hub.pull(&Spec::parse(name)?, home.path(), progress)
}

fn one(n: usize) -> Files {
    vec![("tiny.Q8_0.gguf", noise(n, 1))]
}

/// Names of files below the repository's folder, sorted, without the lock.
fn left(home: &Folder) -> Vec<String> {
    let folder = home.path().join("models/hf/acme/tiny");
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != ".lock");
    names.sort();
    names
}

#[test]
fn the_one_model_of_a_repository_is_pulled_and_found() {
    let server = hub(one(300_000), |_, _| None);
    let home = Folder::new();
    let mut seen = Vec::new();
    let path = pull_with(&server, "hf:acme/tiny", &home, None, &mut |p| seen.push(p)).unwrap();
    assert!(path.ends_with("models/hf/acme/tiny/tiny.Q8_0.gguf"), "{path:?}");
    assert_eq!(fs::read(&path).unwrap(), noise(300_000, 1));
    assert_eq!(left(&home), ["tiny.Q8_0.gguf"]);
    assert!(seen.contains(&Progress::Downloading { done: 300_000, total: 300_000 }));
    assert_eq!(seen.last(), Some(&Progress::Verifying { done: 300_000, total: 300_000 }));

    // What is there is checked and not fetched again.
    let asked = server.requests().len();
    assert_eq!(pull(&server, "hf:acme/tiny", &home).unwrap(), path);
    assert_eq!(server.requests().len(), asked + 1, "the list alone");
    for name in ["hf:acme/tiny", "hf:acme/tiny:tiny.Q8_0.gguf", "hf:acme/tiny:q8_0"] {
        assert_eq!(Spec::parse(name).unwrap().resolve(home.path()).unwrap(), path, "{name}");
    }
    let other = Spec::parse("hf:acme/tiny:Q4_0").unwrap().resolve(home.path());
    assert!(message(other).contains("gradus pull hf:acme/tiny:Q4_0"));

    // Damaged, it is fetched again.
    let mut damaged = noise(300_000, 1);
    damaged[77] ^= 1;
    fs::write(&path, damaged).unwrap();
    pull(&server, "hf:acme/tiny", &home).unwrap();
    assert_eq!(fs::read(&path).unwrap(), noise(300_000, 1));
}

#[test]
fn what_pulls_of_other_versions_left_goes() {
    let home = Folder::new();
    let folder = home.path().join("models/hf/acme/tiny");
    fs::create_dir_all(&folder).unwrap();
    let old = ".tiny.Q8_0.gguf.0123456789abcdef";
    for name in [format!("{old}.part"), format!("{old}.etag")] {
        fs::write(folder.join(name), "half of it").unwrap();
    }
    // Of another file, and of nobody we know.
    let others = [".tiny.Q4_0.gguf.0123456789abcdef.part", ".tiny.Q8_0.gguf.mine.part"];
    others.iter().for_each(|name| fs::write(folder.join(name), "not this").unwrap());
    let server = hub(one(10_000), |_, _| None);
    pull(&server, "hf:acme/tiny", &home).unwrap();
    assert_eq!(left(&home), [others[0], others[1], "tiny.Q8_0.gguf"]);
    // Also where nothing is to be fetched.
    fs::write(folder.join(format!("{old}.part")), "half of it").unwrap();
    pull(&server, "hf:acme/tiny", &home).unwrap();
    assert_eq!(left(&home), [others[0], others[1], "tiny.Q8_0.gguf"]);
}

#[test]
fn a_file_is_chosen_by_name_or_quantization() {
    let files: Files = vec![
        ("tiny-Q4_K_M.gguf", noise(1_000, 1)),
        ("tiny-Q4_K_S.gguf", noise(1_001, 2)),
        ("tiny.IQ4_K_M.gguf", noise(1_002, 3)),
        ("sub/tiny f16.gguf", noise(1_003, 4)),
        ("mmproj-tiny.gguf", noise(1_004, 5)),
        ("tiny.bin", noise(1_005, 6)),
    ];
    let server = hub(files.clone(), |_, _| None);
    let home = Folder::new();
    for (name, index) in [
        ("Q4_K_M", 0),
        ("q4_k_s", 1),
        ("tiny.IQ4_K_M.gguf", 2),
        ("sub/tiny f16.gguf", 3),
        ("tiny f16.gguf", 3),
        ("mmproj-tiny.gguf", 4),
    ] {
        let path = pull(&server, &format!("hf:acme/tiny:{name}"), &home).unwrap();
        assert_eq!(fs::read(&path).unwrap(), files[index].1, "{name}");
        assert!(path.ends_with(files[index].0), "{path:?}");
    }
    let error = message(pull(&server, "hf:acme/tiny", &home));
    for part in ["several models", "hf:acme/tiny:FILE", "tiny-Q4_K_M.gguf (0.00 GB)", "sub/tiny"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!error.contains("mmproj") && !error.contains("tiny.bin"), "{error}");
    let error = message(pull(&server, "hf:acme/tiny:Q2_K", &home));
    assert!(error.contains("no such file; there are tiny-Q4_K_M.gguf"), "{error}");
    let server = hub(vec![("a.bin", noise(10, 1))], |_, _| None);
    assert!(message(pull(&server, "hf:acme/tiny", &home)).contains("has no GGUF file"));
}

/// Parts are opened together by the first of them, so all are fetched.
#[test]
fn a_split_model_is_pulled_whole() {
    let files: Files = vec![
        ("m-Q4_0-00002-of-00002.gguf", noise(5_000, 2)),
        ("m-Q4_0-00001-of-00002.gguf", noise(4_000, 1)),
        ("m-Q8_0-00001-of-00002.gguf", noise(4_000, 3)),
    ];
    let server = hub(files, |_, _| None);
    let home = Folder::new();
    let mut most = 0;
    let path = pull_with(&server, "hf:acme/tiny:Q4_0", &home, None, &mut |p| {
        if let Progress::Downloading { done, total } = p {
            assert!(done >= most && total == 9_000);
            most = done;
        }
    })
    .unwrap();
    assert!(path.ends_with("m-Q4_0-00001-of-00002.gguf") && most == 9_000);
    assert_eq!(left(&home), ["m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf"]);
    let error = message(pull(&server, "hf:acme/tiny:Q8_0", &home));
    assert!(error.contains("of 2 parts of m-Q8_0 only 1 are there"), "{error}");
}

#[test]
fn a_connection_that_breaks_off_is_continued() {
    let bytes = noise(400_000, 1);
    let (whole, count) = (bytes.clone(), AtomicUsize::new(0));
    let server = hub(one(400_000), move |_, request| {
        let broken = is_file(request) && count.fetch_add(1, Ordering::Relaxed) < 6;
        broken.then(|| file(&whole, request).cut(50_000))
    });
    let home = Folder::new();
    let path = pull(&server, "hf:acme/tiny", &home).unwrap();
    assert_eq!(fs::read(path).unwrap(), bytes);
    let expected: Vec<Option<usize>> =
        std::iter::once(None).chain((1..=6).map(|n| Some(n * 50_000))).collect();
    assert_eq!(server.ranges(".gguf"), expected);
    let tag = format!("\"{}\"", &sha256(&bytes)[..20]);
    let tags: Vec<_> = server.requests().into_iter().filter(is_file).map(|r| r.if_range).collect();
    assert!(tags[0].is_none() && tags[1..].iter().all(|t| t.as_ref() == Some(&tag)), "{tags:?}");
    assert_eq!(left(&home), ["tiny.Q8_0.gguf"]);
}

#[test]
fn a_pull_that_failed_goes_on_in_the_next_one() {
    let bytes = noise(100_000, 1);
    let ill = Arc::new(Mutex::new(true));
    let (still_ill, whole) = (Arc::clone(&ill), bytes.clone());
    let server = hub(one(100_000), move |_, request| {
        (is_file(request) && *still_ill.lock().unwrap()).then(|| match request.from {
            None => file(&whole, request).cut(60_000),
            Some(_) => Reply::new(503, ""),
        })
    });
    let home = Folder::new();
    let error = message(pull(&server, "hf:acme/tiny", &home));
    assert!(error.contains("status 503 (tried"), "{error}");
    *ill.lock().unwrap() = false;
    let path = pull(&server, "hf:acme/tiny", &home).unwrap();
    assert_eq!(fs::read(path).unwrap(), bytes);
    assert_eq!(server.ranges(".gguf").last(), Some(&Some(60_000)));
}

#[test]
fn a_file_that_changes_midway_is_not_pieced_together() {
    // The first half of another file, then the one that the list names: its tag is another.
    let (old, new) = (noise(90_000, 8), noise(90_000, 1));
    let count = AtomicUsize::new(0);
    let first = old.clone();
    let server = hub(one(90_000), move |_, request| {
        let begin = is_file(request) && count.fetch_add(1, Ordering::Relaxed) == 0;
        begin.then(|| file(&first, request).cut(40_000))
    });
    let home = Folder::new();
    let path = pull(&server, "hf:acme/tiny", &home).unwrap();
    assert_eq!(fs::read(path).unwrap(), new);
    // A server that does not look at the tag: the hash does, and the file is fetched anew.
    let count = AtomicUsize::new(0);
    let (first, then) = (old.clone(), new.clone());
    let server = hub(one(90_000), move |_, request| {
        is_file(request).then(|| match count.fetch_add(1, Ordering::Relaxed) {
            0 => Reply::file(&first, request).cut(40_000),
            _ => Reply::file(&then, request),
        })
    });
    let home = Folder::new();
    let error = message(pull(&server, "hf:acme/tiny", &home));
    assert!(error.contains("SHA-256 is"), "{error}");
    assert!(left(&home).is_empty(), "what is wrong is not kept");
    assert_eq!(fs::read(pull(&server, "hf:acme/tiny", &home).unwrap()).unwrap(), new);

    // And one that it never is again.
    let server = hub(one(90_000), move |_, r| is_file(r).then(|| file(&old, r)));
    let home = Folder::new();
    let error = message(pull(&server, "hf:acme/tiny", &home));
    assert!(error.contains(&sha256(&new)) && error.contains("deleted"), "{error}");
    assert!(left(&home).is_empty());
}

#[test]
fn a_server_without_ranges_sends_the_file_from_its_beginning() {
    let bytes = noise(50_000, 1);
    let (whole, count) = (bytes.clone(), AtomicUsize::new(0));
    let server = hub(one(50_000), move |_, request| {
        is_file(request).then(|| {
            let reply = Reply::new(200, whole.clone());
            match count.fetch_add(1, Ordering::Relaxed) {
                0 => reply.cut(20_000),
                _ => reply,
            }
        })
    });
    let home = Folder::new();
    let path = pull(&server, "hf:acme/tiny", &home).unwrap();
    assert_eq!(fs::read(path).unwrap(), bytes);
    assert_eq!(server.ranges(".gguf"), [None, Some(20_000)]);
}

#[test]
fn answers_that_are_of_no_use_are_errors_that_say_why() {
    let bytes = noise(10_000, 1);
    let longer: Vec<u8> = bytes.iter().copied().chain([0]).collect();
    let mut unannounced = Reply::new(200, longer.clone());
    unannounced.chunked = true;
    let mut page = Reply::html("<!DOCTYPE html><title>Sign in</title>".to_owned());
    page.chunked = true;
    let mut other_range = Reply::new(206, &bytes[1..]);
    other_range.headers.push(("Content-Range", "bytes 1-9999/10000".into()));
    let (list, file) = (false, true);
    let cases: Vec<(bool, Reply, &str)> = vec![
        (list, Reply::html("<html>busy</html>".into()), "the answer is no list of files"),
        (list, Reply::json("{\"error\":1}".into()), "the answer is no list of files"),
        (list, Reply::json("[".repeat(200_000)), "the answer is no list of files"),
        (list, Reply::json(format!("[{}]", " ".repeat(16 << 20))), "larger than"),
        (list, Reply::new(401, ""), "set HF_TOKEN"),
        (list, Reply::new(403, ""), "accept its terms"),
        (list, Reply::new(404, ""), "no such repository"),
        (list, Reply::new(429, ""), "too many requests (status 429) (tried 5 times)"),
        (list, Reply::new(500, ""), "status 500 (tried 5 times)"),
        (list, Reply::json("[]".into()), "has no GGUF file"),
        (file, page, "a web page, not the file"),
        (file, Reply::html("<html>".into()), "a web page, not the file"),
        (file, Reply::new(401, ""), "set HF_TOKEN"),
        (file, Reply::new(403, ""), "accept its terms"),
        (file, Reply::new(404, ""), "status 404"),
        (file, Reply::new(429, ""), "status 429) (tried 5 times)"),
        (file, Reply::new(200, longer), "it has 10001 bytes, expected 10000"),
        (file, Reply::new(200, &bytes[1..]), "it has 9999 bytes, expected 10000"),
        (file, unannounced, "it sends more than 10000 bytes"),
        (file, other_range, "another range"),
        (file, Reply::new(200, bytes.clone()).cut(0), "(tried 5 times)"),
        (file, Reply::new(302, ""), "without saying where"),
        (file, Reply::redirect("ftp://127.0.0.1/x"), "not https://"),
        (file, Reply::redirect("http://example.com/x"), "not https://"),
    ];
    for (of_file, reply, expected) in cases {
        let server = hub(one(10_000), move |_, r| (is_file(r) == of_file).then(|| reply.clone()));
        let home = Folder::new();
        let error = message(pull(&server, "hf:acme/tiny", &home));
        assert!(error.contains(expected), "{error}\nexpected: {expected}");
        let tries = server.requests().iter().filter(|r| is_file(r) == of_file).count();
        assert_eq!(tries, if expected.contains("tried 5") { 5 } else { 1 }, "{expected}");
        assert!(!home.path().join("models/hf/acme/tiny/tiny.Q8_0.gguf").exists(), "{expected}");
    }
    // Too many requests for a while.
    let count = AtomicUsize::new(0);
    let server = hub(one(10_000), move |_, _| {
        let mut busy = Reply::new(429, "");
        busy.headers.push(("Retry-After", "0".into()));
        count.fetch_add(1, Ordering::Relaxed).is_multiple_of(2).then_some(busy)
    });
    assert!(pull(&server, "hf:acme/tiny", &Folder::new()).is_ok());
}

#[test]
fn a_list_that_lies_is_not_believed() {
    let good = one(1_000);
    let hash = sha256(&good[0].1);
    let lie = |path: &str, size: &str, oid: &str| {
        format!(
            r#"{{"type":"file","size":{size},"path":"{path}","lfs":{{"oid":"{oid}","size":{size}}}}}"#
        )
    };
    for (path, size) in [
        ("../evil.gguf", "1000"),
        ("/evil.gguf", "1000"),
        ("a/../../evil.gguf", "1000"),
        ("a\\\\evil.gguf", "1000"),
        (".evil.gguf", "1000"),
        ("a\\nevil.gguf", "1000"),
        ("evil.gguf", "0"),
        ("evil.gguf", "-5"),
        ("evil.gguf", "1e30"),
        ("evil.gguf", "9223372036854775807"),
        ("evil.gguf", "\"1000\""),
    ] {
        let list = format!("[{},{}]", lie(path, size, &hash), lie("x.gguf", "1000", &hash));
        let server = hub(good.clone(), move |_, r| {
            let bytes = noise(1_000, 1);
            Some(if is_file(r) { file(&bytes, r) } else { Reply::json(list.clone()) })
        });
        // The other file is the only one there is.
        let home = Folder::new();
        let found = pull(&server, "hf:acme/tiny", &home).unwrap();
        assert!(found.ends_with("acme/tiny/x.gguf"), "{path} {size}: {found:?}");
    }
    // A size or a hash that the file does not have.
    for (size, oid, expected) in
        [("999", hash.as_str(), "expected 999"), ("1000", "zz", "gives no SHA-256")]
    {
        let list = format!("[{}]", lie("tiny.Q8_0.gguf", size, oid));
        let server =
            hub(good.clone(), move |_, r| (!is_file(r)).then(|| Reply::json(list.clone())));
        let error = message(pull(&server, "hf:acme/tiny", &Folder::new()));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn long_lists_come_in_pages_of_the_same_server() {
    let files = one(1_000);
    let second = tree(&files);
    let server = hub(files.clone(), move |_, request| {
        let mut first = Reply::json(r#"[{"type":"file","size":5,"path":"a.txt"}]"#.into());
        let link = "</api/models/acme/tiny/tree/main?recursive=true&cursor=2>; rel=\"next\"";
        first.headers.push(("Link", link.into()));
        match request.path.as_str() {
            LIST => Some(first),
            path if path.contains("cursor=2") => Some(Reply::json(second.clone())),
            _ => None,
        }
    });
    assert!(pull(&server, "hf:acme/tiny", &Folder::new()).is_ok());
    // As RFC 8288 has them: commas in addresses and quotes, several links, relations and headers.
    let next = "</api/models/acme/tiny/tree/main?recursive=true&expand=a,b&cursor=2>";
    let elsewhere = "</elsewhere>; title=\"a, b; rel=next\"; rel=\"prev first\"";
    for links in [
        vec![format!("{next}; rel=\"next\"")],
        vec![format!("{next};rel=next")],
        vec![format!("{next}; title=\"one, \\\"two\\\"\"; REL=\"last Next\"")],
        vec![format!("{elsewhere}, {next} ; rel = \"next\"; rel=\"prev\"")],
        vec![elsewhere.to_string(), format!("{next}; rel=\"next\"")],
    ] {
        let second = tree(&files);
        let sent = links.clone();
        let server = hub(files.clone(), move |_, request| match request.path.as_str() {
            LIST => {
                let mut first = Reply::json(r#"[{"type":"file","size":5,"path":"a.txt"}]"#.into());
                first.headers.extend(sent.iter().map(|link| ("Link", link.clone())));
                Some(first)
            }
            path if path.contains("expand=a,b&cursor=2") => Some(Reply::json(second.clone())),
            _ => None,
        });
        assert!(pull(&server, "hf:acme/tiny", &Folder::new()).is_ok(), "{links:?}");
    }
    for (link, expected) in [
        ("<https://example.com/x>; rel=\"next\"", "elsewhere"),
        ("</api/models/acme/tiny/tree/main?recursive=true>; rel=\"next\"", "more files than"),
    ] {
        let server = hub(files.clone(), move |_, request| {
            (request.path == LIST).then(|| {
                let mut reply = Reply::json("[]".into());
                reply.headers.push(("Link", link.into()));
                reply
            })
        });
        let error = message(pull(&server, "hf:acme/tiny", &Folder::new()));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn the_token_goes_to_the_hub_and_to_nobody_else() {
    let bytes = noise(5_000, 1);
    let whole = bytes.clone();
    let elsewhere = Server::start(move |_, request| file(&whole, request));
    let target = format!("{}/cdn/blob?X-Signature=s3cret", elsewhere.url);
    let server = hub(one(5_000), move |_, request| match request.path.as_str() {
        "/moved" => Some(Reply::redirect(&target)),
        _ if is_file(request) => Some(Reply::redirect("/moved")),
        _ => None,
    });
    let home = Folder::new();
    let path = pull_with(&server, "hf:acme/tiny", &home, Some("hf_abc"), &mut |_| {}).unwrap();
    assert_eq!(fs::read(path).unwrap(), bytes);
    assert!(server.requests().iter().all(|r| r.authorization), "the hub knows who asks");
    assert_eq!(server.requests().len(), 3);
    assert_eq!(elsewhere.requests().len(), 1);
    assert!(elsewhere.requests().iter().all(|r| !r.authorization), "nobody else does");
    // Without a token nobody is told one.
    let server = hub(one(5_000), |_, _| None);
    pull(&server, "hf:acme/tiny", &Folder::new()).unwrap();
    assert!(server.requests().iter().all(|r| !r.authorization));

    // Neither the token nor what signs an address is in a message.
    let broken = Server::start(|_, _| Reply::new(418, ""));
    let target = format!("{}/blob?X-Signature=s3cret", broken.url);
    let server = hub(one(5_000), move |_, r| is_file(r).then(|| Reply::redirect(&target)));
    let result = pull_with(&server, "hf:acme/tiny", &Folder::new(), Some("hf_abc"), &mut |_| {});
    let error = message(result);
    assert!(error.contains("418"), "{error}");
    assert!(!error.contains("s3cret") && !error.contains("hf_abc"), "{error}");

    // An endless redirect ends.
    let server = hub(one(5_000), |_, r| is_file(r).then(|| Reply::redirect(&r.path)));
    let error = message(pull(&server, "hf:acme/tiny", &Folder::new()));
    assert!(error.contains("from one address to the next"), "{error}");
    assert_eq!(server.requests().iter().filter(|r| is_file(r)).count(), 10);
}

#[test]
fn names_and_addresses_that_cannot_be() {
    for name in [
        "hf:",
        "hf:acme",
        "hf:/tiny",
        "hf:acme/",
        "hf:acme/tiny/more",
        "hf:../tiny",
        "hf:acme/..",
        "hf:ac me/tiny",
        "hf:acme/tiny:",
        "hf:acme/tiny:../x.gguf",
        "hf:acme/tiny:/x.gguf",
        "hf:acme/tiny:a\nb.gguf",
        "hf:acme/tiny?x",
    ] {
        let error = message(Spec::parse(name));
        assert!(error.contains("expected hf:OWNER/REPO"), "{error}");
    }
    for url in ["http://example.com", "ftp://example.com", "example.com", "", "https://a?b=c"] {
        let error = message(Hub::new(url, None).map(|_| ()));
        assert!(error.contains("https://"), "{error}");
    }
    assert!(Hub::new("https://example.com/mirror/", None).is_ok());
    let error = message(Hub::new("https://example.com", Some("a\r\nb: c".into())).map(|_| ()));
    assert!(error.contains("HF_TOKEN") && !error.contains("b: c"), "{error}");
}
