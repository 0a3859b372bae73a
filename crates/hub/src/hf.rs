//! Models of the Hugging Face hub, or of a server that speaks as it does: `hf:OWNER/REPO[:FILE]`.
//!
//! The hub's API lists the files of a repository with their sizes and SHA-256; a file is fetched
//! over HTTPS, redirects to other hosts included, and continued with `Range` and `If-Range` (RFC
//! 9110, sections 13.1.5 and 14). Nothing that a server says is believed beyond bounds, and a
//! file appears under its name only with the size and hash that the list gave. The token goes to
//! the hub alone.

use std::fs::{self, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use ureq::Agent;
use ureq::http::{HeaderMap, Response, Uri};

use crate::error::{Context, Error};
use crate::index::{Failure, Tries, agent, failure, is_allowed, join, receive, shown, size};
use crate::pull::{Progress, Report, lock, remove, sha256};

/// Where the hub is, unless `HF_ENDPOINT` says otherwise.
const ENDPOINT: &str = "https://huggingface.co";

/// What a name begins with that is one of the hub's.
pub(crate) const PREFIX: &str = "hf:";

/// Pages of a list of files, of at most a thousand each.
const MAX_PAGES: usize = 20;
/// Such a page has a few hundred kilobytes.
const MAX_PAGE: u64 = 16 << 20;
/// The largest file that is believed: 4 TiB.
const MAX_BYTES: u64 = 1 << 42;
/// Redirects of one request.
const MAX_REDIRECTS: usize = 10;
/// The longest pause that a busy server may ask for.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Files that an error lists.
const MAX_LISTED: usize = 40;

/// A name, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Spec {
    owner: String,
    repo: String,
    /// A file's name, or a quantization's.
    file: Option<String>,
}

impl Spec {
    /// Of `hf:OWNER/REPO` or `hf:OWNER/REPO:FILE`.
    pub(crate) fn parse(name: &str) -> Result<Spec, Error> {
        let bad = |what: &str| {
            let name = name.chars().take(100).collect::<String>();
            Error::fetch(
                format!("`{}`", name.escape_debug()),
                format!("{what}; expected hf:OWNER/REPO or hf:OWNER/REPO:FILE"),
            )
        };
        let rest = name.strip_prefix(PREFIX).ok_or_else(|| bad("it does not begin with hf:"))?;
        let (repo, file) = match rest.split_once(':') {
            Some((repo, file)) => (repo, Some(file)),
            None => (rest, None),
        };
        let (owner, repo) = repo.split_once('/').ok_or_else(|| bad("it names no repository"))?;
        for part in [owner, repo] {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            let fine = part.len() <= 96 && part.chars().all(plain) && !part.starts_with(['.', '-']);
            if part.is_empty() || !fine {
                return Err(bad("it names no repository"));
            }
        }
        if file.is_some_and(|file| !is_path(file)) {
            return Err(bad("it names no file"));
        }
        let file = file.map(str::to_owned);
        Ok(Spec { owner: owner.to_owned(), repo: repo.to_owned(), file })
    }

    /// Without a file.
    fn repository(&self) -> String {
        format!("{PREFIX}{}/{}", self.owner, self.repo)
    }

    /// The folder that files of the repository are kept in.
    fn folder(&self, home: &Path) -> PathBuf {
        home.join("models").join("hf").join(&self.owner).join(&self.repo)
    }

    /// The file on this machine that the name means, if there is one and only one.
    pub(crate) fn resolve(&self, home: &Path) -> Result<PathBuf, Error> {
        let folder = self.folder(home);
        let mut found = Vec::new();
        walk(&folder, "", 0, &mut found);
        let missing = || Error::NotFetched { name: self.name() };
        let chosen = self.choose(&found).map_err(|_| missing())?;
        let first = chosen.first().ok_or_else(missing)?;
        Ok(folder.join(&first.path))
    }

    fn name(&self) -> String {
        let repository = self.repository();
        match &self.file {
            Some(file) => format!("{repository}:{file}"),
            None => repository,
        }
    }

    /// The files that the name means: one, or all parts of one in order.
    fn choose(&self, files: &[HubFile]) -> Result<Vec<HubFile>, Error> {
        let models: Vec<&HubFile> = files.iter().filter(|f| is_gguf(&f.path)).collect();
        let fail = |reason: String| Err(Error::fetch(self.name(), reason));
        if models.is_empty() {
            return fail("the repository has no GGUF file".to_owned());
        }
        let matching = |matches: &dyn Fn(&HubFile) -> bool| -> Vec<&HubFile> {
            models.iter().copied().filter(|f| matches(f)).collect()
        };
        let found = match &self.file {
            // What goes with images is no model by itself.
            None => matching(&|f| !base_name(&f.path).starts_with("mmproj")),
            Some(wanted) => {
                let by_path = matching(&|f| f.path == *wanted);
                let by_name = matching(&|f| base_name(&f.path) == wanted);
                let by_quant = matching(&|f| has_quant(&f.path, wanted));
                [by_path, by_name, by_quant].into_iter().find(|f| !f.is_empty()).unwrap_or_default()
            }
        };
        let mut stems: Vec<String> = found.iter().map(|f| without_part(&f.path)).collect();
        stems.sort();
        stems.dedup();
        let stem = match &stems[..] {
            [stem] => stem,
            [] => return fail(format!("it has no such file; there are {}", listed(&models))),
            _ if self.file.is_none() => {
                let all = listed(&found);
                return fail(format!(
                    "it has several models; name one as in {}:FILE, or by its \
                                     quantization: {all}",
                    self.repository()
                ));
            }
            _ => return fail(format!("several files are called so: {}", listed(&found))),
        };
        // All parts of a split model, whichever was named.
        let mut parts = matching(&|f| without_part(&f.path) == *stem);
        parts.sort_by(|a, b| a.path.cmp(&b.path));
        let count = parts.first().and_then(|f| part_of(&f.path)).map_or(1, |(_, count)| count);
        let whole = parts.iter().enumerate().all(|(i, f)| match part_of(&f.path) {
            Some(part) => part == (i as u64 + 1, count),
            None => count == 1,
        });
        if !whole || parts.len() as u64 != count {
            return fail(format!("of {count} parts of {stem} only {} are there", parts.len()));
        }
        Ok(parts.into_iter().cloned().collect())
    }
}

/// A file of a repository, as its list has it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HubFile {
    path: String,
    bytes: u64,
    /// 64 lower-case hexadecimal digits, where the list has it.
    sha256: Option<String>,
}

/// Whether this is a path below a folder that no system reads as anything else.
fn is_path(path: &str) -> bool {
    let segments: Vec<&str> = path.split('/').collect();
    let fine = |s: &&str| {
        !s.is_empty()
            && s.len() <= 200
            && !s.starts_with('.')
            && !s.chars().any(|c| c.is_control() || "\\:*?\"<>|".contains(c))
    };
    segments.len() <= 8 && segments.iter().all(fine)
}

fn is_gguf(path: &str) -> bool {
    path.len() > 5 && path.to_ascii_lowercase().ends_with(".gguf")
}

fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// The number of a part and how many there are: `NAME-00001-of-00003.gguf`.
fn part_of(path: &str) -> Option<(u64, u64)> {
    let stem = path.get(..path.len().checked_sub(5)?)?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (_, part) = rest.rsplit_once('-')?;
    let number = |text: &str| (text.len() == 5).then(|| text.parse().ok()).flatten();
    Some((number(part)?, number(count)?)).filter(|&(part, count)| part >= 1 && part <= count)
}

/// The path without its ending and the number of the part.
fn without_part(path: &str) -> String {
    let stem = path.get(..path.len().saturating_sub(5)).unwrap_or_default();
    match part_of(path) {
        // -00001-of-00003
        Some(_) => stem.get(..stem.len().saturating_sub(15)).unwrap_or_default().to_owned(),
        None => stem.to_owned(),
    }
}

/// Whether a file's name says that it is of this quantization.
fn has_quant(path: &str, quant: &str) -> bool {
    let stem = without_part(path).to_ascii_lowercase();
    let before = stem.strip_suffix(&quant.to_ascii_lowercase());
    before.is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '_', '/']))
}

fn listed(files: &[&HubFile]) -> String {
    let mut names: Vec<String> = files
        .iter()
        .take(MAX_LISTED)
        .map(|f| format!("{} ({:.2} GB)", f.path, f.bytes as f64 / 1e9))
        .collect();
    if files.len() > MAX_LISTED {
        names.push(format!("and {} more", files.len() - MAX_LISTED));
    }
    names.join(", ")
}

/// The files below a folder, as a list has them.
fn walk(folder: &Path, prefix: &str, depth: usize, out: &mut Vec<HubFile>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = format!("{prefix}{name}");
        match entry.metadata() {
            Ok(meta) if meta.is_file() && !name.starts_with('.') => {
                out.push(HubFile { path, bytes: meta.len(), sha256: None });
            }
            Ok(meta) if meta.is_dir() && depth < 8 => {
                walk(&entry.path(), &format!("{path}/"), depth + 1, out);
            }
            _ => {}
        }
    }
}

/// A server that speaks as the hub does.
pub(crate) struct Hub {
    /// Without a slash at its end.
    url: String,
    token: Option<String>,
    agent: Agent,
    /// Whether addresses on this machine may be asked without encryption: it is one itself.
    local: bool,
    /// The pause before the second try; it doubles with each.
    pub(crate) pause: Duration,
}

/// Scheme, host and port.
fn origin(url: &str) -> Option<(String, String, u16)> {
    let uri: Uri = url.parse().ok()?;
    let scheme = uri.scheme_str()?.to_ascii_lowercase();
    let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    Some((scheme, uri.host()?.to_ascii_lowercase(), port))
}

/// An address for messages: without what signs it.
fn plain(url: &str) -> String {
    shown(url.split(['?', '#']).next().unwrap_or_default())
}

impl Hub {
    /// As the environment says: `HF_ENDPOINT` and `HF_TOKEN`.
    pub(crate) fn from_environment() -> Result<Hub, Error> {
        let var = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        Hub::new(&var("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned()), var("HF_TOKEN"))
    }

    /// The hub at an address, which must be `https`, or `http` on this machine.
    pub(crate) fn new(url: &str, token: Option<String>) -> Result<Hub, Error> {
        let url = url.trim().trim_end_matches('/').to_owned();
        let uri = url.parse::<Uri>().ok().filter(|uri| is_allowed(uri) && uri.query().is_none());
        let Some(uri) = uri else {
            return Err(Error::fetch(plain(&url), "the hub's address must begin with https://"));
        };
        let token = token.map(|token| token.trim().to_owned());
        if token.as_ref().is_some_and(|t| !t.bytes().all(|b| b.is_ascii_graphic())) {
            return Err(Error::fetch(plain(&url), "HF_TOKEN holds what no token has"));
        }
        let local = uri.scheme_str() == Some("http");
        Ok(Hub { agent: agent(&uri, 0), url, token, local, pause: Duration::from_secs(1) })
    }

    /// Fetches what a name means, unless it is there, and returns the path of its file, of a
    /// split model that of the first part.
    pub(crate) fn pull(
        &self,
        spec: &Spec,
        home: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<PathBuf, Error> {
        let folder = spec.folder(home);
        fs::create_dir_all(&folder).during("make the folder", &folder)?;
        let _lock = lock(&folder.join(".lock"), progress)?;
        let files = spec.choose(&self.list(spec, progress)?)?;
        let total = files.iter().fold(0u64, |sum, f| sum.saturating_add(f.bytes));
        let mut before = 0u64;
        for file in &files {
            self.fetch(spec, file, &folder, &mut |event| {
                progress(match event {
                    Progress::Downloading { done, .. } => {
                        Progress::Downloading { done: before.saturating_add(done), total }
                    }
                    other => other,
                });
            })?;
            before = before.saturating_add(file.bytes);
        }
        let first = files.first().map(|f| folder.join(&f.path));
        first.ok_or_else(|| Error::fetch(spec.name(), "the repository has no GGUF file"))
    }

    /// All files of a repository.
    fn list(&self, spec: &Spec, progress: &mut dyn FnMut(Progress)) -> Result<Vec<HubFile>, Error> {
        let Spec { owner, repo, .. } = spec;
        let mut url = format!("{}/api/models/{owner}/{repo}/tree/main?recursive=true", self.url);
        let mut files = Vec::new();
        for _ in 0..MAX_PAGES {
            let mut tries = Tries::new("the list of files", self.pause);
            let next = loop {
                match self.page(&url, spec, &mut files) {
                    Ok(next) => break next,
                    Err(failure) => {
                        tries.again(failure, false, &mut |report| retry(report, progress))?
                    }
                }
            };
            match next {
                Some(next) => url = next,
                None => return Ok(files),
            }
        }
        Err(Error::fetch(spec.name(), "the repository has more files than are looked at"))
    }

    /// Adds a page of the list, and returns the address of the next.
    fn page(
        &self,
        url: &str,
        spec: &Spec,
        files: &mut Vec<HubFile>,
    ) -> Result<Option<String>, Failure> {
        let fail = |reason: String| Failure::Final(Error::fetch(plain(url), reason));
        let (_, mut response) = self.get(url, None)?;
        if response.status().as_u16() != 200 {
            return Err(refused(url, &response, spec));
        }
        let next = next_page(response.headers()).map(|link| join(url, &link));
        if next.as_ref().is_some_and(|next| origin(next) != origin(&self.url)) {
            return Err(fail("the next page of the list is elsewhere".to_owned()));
        }
        let mut bytes = Vec::new();
        let mut reader = response.body_mut().as_reader().take(MAX_PAGE + 1);
        reader.read_to_end(&mut bytes).map_err(|error| failure(url, error.into()))?;
        if bytes.len() as u64 > MAX_PAGE {
            return Err(fail(format!("a page of the list is larger than {MAX_PAGE} bytes")));
        }
        let page: Value = serde_json::from_slice(&bytes)
            .map_err(|_| fail("the answer is no list of files".to_owned()))?;
        let entries =
            page.as_array().ok_or_else(|| fail("the answer is no list of files".into()))?;
        files.extend(entries.iter().filter_map(entry));
        Ok(next)
    }

    /// Brings a file to its place.
    fn fetch(
        &self,
        spec: &Spec,
        file: &HubFile,
        folder: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), Error> {
        let name = format!("{}:{}", spec.repository(), file.path);
        let Some(expected) = &file.sha256 else {
            return Err(Error::fetch(name, "the list gives no SHA-256 to check it by"));
        };
        let target = folder.join(&file.path);
        let parent = target.parent().unwrap_or(folder);
        // Known by its hash: what another version left is not continued.
        let short = expected.get(..16).unwrap_or_default();
        let name_of = files::short(base_name(&file.path).as_ref());
        let prefix = format!(".{}.", name_of.display());
        let partial = parent.join(format!("{prefix}{short}.part"));
        remove_others(&partial, &prefix);
        let total = file.bytes;
        let check = |path: &Path, progress: &mut dyn FnMut(Progress)| {
            sha256(path, &mut |done| progress(Progress::Verifying { done, total }))
        };
        if target.is_file() && size(&target) == total && check(&target, progress)? == *expected {
            return Ok(());
        }
        fs::create_dir_all(parent).during("make the folder", parent)?;
        let begun = size(&partial) > 0;
        self.download(spec, file, &partial, progress)?;
        let mut found = check(&partial, progress)?;
        if found != *expected && begun {
            // What was there may have been the beginning of something else.
            remove(&partial)?;
            self.download(spec, file, &partial, progress)?;
            found = check(&partial, progress)?;
        }
        remove(&etag_file(&partial))?;
        if found != *expected {
            remove(&partial)?;
            return Err(Error::Hash { path: target, found, expected: expected.clone() });
        }
        let written = OpenOptions::new().append(true).open(&partial);
        written.and_then(|file| file.sync_all()).during("write", &partial)?;
        fs::rename(&partial, &target).during("rename to", &target)?;
        files::sync_folder(parent).during("write", parent)
    }

    /// Brings the file at `path` to its size, from whatever it has.
    fn download(
        &self,
        spec: &Spec,
        file: &HubFile,
        path: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), Error> {
        let mut tries = Tries::new("the model", self.pause);
        let mut most = size(path);
        loop {
            match self.request(spec, file, path, progress) {
                Ok(()) => return Ok(()),
                Err(failure) => {
                    let now = size(path);
                    tries.again(failure, now > most, &mut |report| retry(report, progress))?;
                    most = most.max(now);
                }
            }
        }
    }

    /// One request for what the file at `path` lacks.
    fn request(
        &self,
        spec: &Spec,
        file: &HubFile,
        path: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), Failure> {
        let total = file.bytes;
        let mut have = size(path);
        if have > total {
            remove(path)?;
            have = 0;
        }
        progress(Progress::Downloading { done: have, total });
        if have == total {
            return Ok(());
        }
        let Spec { owner, repo, .. } = spec;
        let encoded: Vec<String> = file.path.split('/').map(encode).collect();
        let url = format!("{}/{owner}/{repo}/resolve/main/{}", self.url, encoded.join("/"));
        let etag = (have > 0).then(|| read_etag(path)).flatten();
        let (at, mut response) = self.get(&url, (have > 0).then_some((have, etag.as_deref())))?;
        match response.status().as_u16() {
            200 | 206 | 416 => {}
            _ => return Err(refused(&at, &response, spec)),
        }
        let is_page = response.body().mime_type().is_some_and(|mime| mime == "text/html");
        if is_page {
            let reason = "the answer is a web page, not the file".to_owned();
            return Err(Failure::Final(Error::fetch(plain(&at), reason)));
        }
        keep_etag(path, response.headers())?;
        receive(&plain(&at), &mut response, have, total, path, &mut |report| match report {
            Report::Bytes(done) => progress(Progress::Downloading { done, total }),
            retry_report => retry(retry_report, progress),
        })
    }

    /// Asks an address, and where it leads; returns the last one and its answer.
    fn get(
        &self,
        url: &str,
        from: Option<(u64, Option<&str>)>,
    ) -> Result<(String, Response<ureq::Body>), Failure> {
        let mut url = url.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let mut request = self.agent.get(&url).header("accept-encoding", "identity");
            if let Some((start, etag)) = from {
                request = request.header("range", format!("bytes={start}-"));
                if let Some(etag) = etag {
                    request = request.header("if-range", etag);
                }
            }
            // Whoever is led to gets what is asked for, but not who asks.
            if let Some(token) = self.token.as_ref().filter(|_| origin(&url) == origin(&self.url)) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let response = request.call().map_err(|error| failure(&plain(&url), error))?;
            if !response.status().is_redirection() {
                return Ok((url, response));
            }
            let location = response.headers().get("location").and_then(|l| l.to_str().ok());
            let fail = |reason: &str| Failure::Final(Error::fetch(plain(&url), reason));
            let next = location.map(|location| join(&url, location));
            let next = next.ok_or_else(|| fail("it leads elsewhere without saying where"))?;
            let uri = next.parse::<Uri>().ok();
            let secure = uri.as_ref().is_some_and(|uri| {
                is_allowed(uri) && (self.local || uri.scheme_str() == Some("https"))
            });
            if !secure {
                return Err(fail("it leads to an address that is not https://"));
            }
            url = next;
        }
        Err(Failure::Final(Error::fetch(plain(&url), "it leads from one address to the next")))
    }
}

/// An entry of a list: a file with a path and a size that can be.
fn entry(entry: &Value) -> Option<HubFile> {
    let text = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
    if text(entry, "type")? != "file" {
        return None;
    }
    let path = text(entry, "path").filter(|path| is_path(path))?;
    let lfs = entry.get("lfs").filter(|lfs| lfs.is_object());
    let size = |value: &Value| value.get("size").and_then(Value::as_u64);
    let bytes = lfs.and_then(size).or_else(|| size(entry))?;
    let hash = lfs.and_then(|lfs| text(lfs, "oid")).map(|hash| hash.to_ascii_lowercase());
    let sha256 = hash.filter(|h| h.len() == 64 && h.bytes().all(|b| b.is_ascii_hexdigit()));
    (1..=MAX_BYTES).contains(&bytes).then_some(HubFile { path, bytes, sha256 })
}

/// The address of the next page in `Link` headers (RFC 8288, section 3).
fn next_page(headers: &HeaderMap) -> Option<String> {
    headers.get_all("link").iter().filter_map(|link| link.to_str().ok()).find_map(next_of)
}

fn next_of(links: &str) -> Option<String> {
    let blank = |c: char| matches!(c, ' ' | '\t');
    let mut rest = links;
    loop {
        rest = rest.trim_start_matches(|c| blank(c) || c == ',');
        let (address, after) = rest.strip_prefix('<')?.split_once('>')?;
        rest = after;
        // Of several relations the first counts.
        let mut relation = None;
        while let Some(next) = rest.trim_start_matches(blank).strip_prefix(';') {
            let (name, value, after) = parameter(next.trim_start_matches(blank));
            if name.eq_ignore_ascii_case("rel") {
                relation = relation.or(Some(value));
            }
            rest = after;
        }
        let is_next = |relation: String| {
            relation.split_ascii_whitespace().any(|word| word.eq_ignore_ascii_case("next"))
        };
        if relation.is_some_and(is_next) {
            return Some(address.to_owned());
        }
    }
}

/// A parameter's name and value, which may be quoted, and what comes behind it.
fn parameter(text: &str) -> (&str, String, &str) {
    let end = text.find(['=', ';', ',']).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    let Some(value) = rest.strip_prefix('=') else { return (name.trim_end(), String::new(), rest) };
    let value = value.trim_start();
    let Some(quoted) = value.strip_prefix('"') else {
        let (value, rest) = value.split_at(value.find([';', ',']).unwrap_or(value.len()));
        return (name.trim_end(), value.trim_end().to_owned(), rest);
    };
    let (mut value, mut chars) = (String::new(), quoted.chars());
    while let Some(c) = chars.next() {
        match c {
            '"' => break,
            '\\' => value.extend(chars.next()),
            c => value.push(c),
        }
    }
    (name.trim_end(), value, chars.as_str())
}

/// A status other than the wanted one, and what to do about it.
fn refused(url: &str, response: &Response<ureq::Body>, spec: &Spec) -> Failure {
    let name = spec.name();
    let final_ = |reason: &str| Failure::Final(Error::fetch(name.clone(), reason));
    match response.status().as_u16() {
        401 => final_(
            "there is no such repository, or it wants to know who asks (status 401): check the \
             name, or set HF_TOKEN",
        ),
        403 => final_(
            "access is not granted (status 403): accept its terms on its page, and set HF_TOKEN",
        ),
        404 => final_("there is no such repository or file (status 404): check the name"),
        429 => {
            let header = response.headers().get("retry-after").and_then(|v| v.to_str().ok());
            if let Some(seconds) = header.and_then(|text| text.trim().parse().ok()) {
                std::thread::sleep(Duration::from_secs(seconds).min(MAX_PAUSE));
            }
            Failure::Transient(format!("{}: too many requests (status 429)", plain(url)))
        }
        status => crate::index::unexpected(&plain(url), status),
    }
}

fn retry(report: Report, progress: &mut dyn FnMut(Progress)) {
    if let Report::Retry { attempt, attempts, reason } = report {
        progress(Progress::Retrying { attempt, attempts, reason });
    }
}

/// A segment of a path as it stands in an address (RFC 3986, section 2.1).
fn encode(segment: &str) -> String {
    let mut out = String::new();
    for byte in segment.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                out.push(char::from(byte));
            }
            other => out.push_str(&format!("%{other:02X}")),
        }
    }
    out
}

/// Removes what pulls of other versions of a file left beside `partial`, whose name begins so.
/// Nobody else writes there: the repository is locked.
fn remove_others(partial: &Path, prefix: &str) {
    let of_other = |name: &str| {
        let rest = name.strip_prefix(prefix)?;
        let hash = rest.strip_suffix(".part").or(rest.strip_suffix(".etag"))?;
        (hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit())).then_some(())
    };
    let folder = files::folder_of(partial);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_other = path.file_name().and_then(|n| n.to_str()).and_then(of_other).is_some();
        if is_other && path.with_extension("") != partial.with_extension("") {
            // Room is all it takes; a pull does not fail for it.
            let _ = remove(&path);
        }
    }
}

/// Where the tag of what a partial file is the beginning of is noted.
fn etag_file(partial: &Path) -> PathBuf {
    partial.with_extension("etag")
}

fn read_etag(partial: &Path) -> Option<String> {
    let path = etag_file(partial);
    if size(&path) > 256 {
        return None;
    }
    fs::read_to_string(path).ok().filter(|etag| is_etag(etag))
}

/// A strong tag: weak ones say nothing about single bytes.
fn is_etag(tag: &str) -> bool {
    let inner = tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"'));
    inner.is_some_and(|inner| inner.len() < 200 && inner.bytes().all(|b| b.is_ascii_graphic()))
}

fn keep_etag(partial: &Path, headers: &HeaderMap) -> Result<(), Error> {
    let path = etag_file(partial);
    let etag = headers.get("etag").and_then(|tag| tag.to_str().ok()).filter(|tag| is_etag(tag));
    match etag {
        Some(etag) => fs::write(&path, etag).during("write", &path),
        None => remove(&path),
    }
}
