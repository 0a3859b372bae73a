//! A server that answers as it is told, badly too, and remembers what it was asked.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// What a client asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) path: String,
    /// First byte of the range that was asked for.
    pub(super) from: Option<usize>,
    pub(super) authorization: bool,
    /// The tag that a range was made to depend on.
    pub(super) if_range: Option<String>,
}

/// An answer.
#[derive(Clone)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) body: Vec<u8>,
    /// The connection ends after so many bytes of the body.
    pub(super) cut: Option<usize>,
    /// The body's length is not announced.
    pub(super) chunked: bool,
}

impl Reply {
    pub(super) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: Vec::new(), body: body.into(), cut: None, chunked: false }
    }

    pub(super) fn json(body: String) -> Self {
        let mut reply = Self::new(200, body);
        reply.headers.push(("Content-Type", "application/vnd.pypi.simple.v1+json".to_owned()));
        reply
    }

    pub(super) fn html(body: String) -> Self {
        let mut reply = Self::new(200, body);
        reply.headers.push(("Content-Type", "text/html; charset=utf-8".to_owned()));
        reply
    }

    pub(super) fn redirect(to: &str) -> Self {
        let mut reply = Self::new(302, "");
        reply.headers.push(("Location", to.to_owned()));
        reply
    }

    /// A file, or the end of it that was asked for.
    pub(super) fn file(bytes: &[u8], request: &Request) -> Self {
        match request.from {
            Some(from) if from >= bytes.len() => Self::new(416, ""),
            Some(from) => {
                let mut reply = Self::new(206, &bytes[from..]);
                let range = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
                reply.headers.push(("Content-Range", range));
                reply
            }
            None => Self::new(200, bytes),
        }
    }

    pub(super) fn cut(mut self, after: usize) -> Self {
        self.cut = Some(after);
        self
    }
}

type Answer = Arc<dyn Fn(usize, &Request) -> Reply + Send + Sync>;

/// Runs until the test's process ends.
pub(super) struct Server {
    pub(super) url: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// `answer` is given the number of the request, from 0, and the request.
    pub(super) fn start(answer: impl Fn(usize, &Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let answer: Answer = Arc::new(answer);
        let log = Arc::clone(&requests);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answer, log) = (Arc::clone(&answer), Arc::clone(&log));
                thread::spawn(move || serve(stream, &answer, &log));
            }
        });
        Self { url, requests }
    }

    pub(super) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// First bytes of the ranges asked of paths that end in `suffix`, in order.
    pub(super) fn ranges(&self, suffix: &str) -> Vec<Option<usize>> {
        let requests = self.requests().into_iter();
        requests.filter(|r| r.path.ends_with(suffix)).map(|r| r.from).collect()
    }
}

fn serve(mut stream: TcpStream, answer: &Answer, log: &Mutex<Vec<Request>>) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut request = Request { path, from: None, authorization: false, if_range: None };
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        let lower = line.trim().to_ascii_lowercase();
        if lower.is_empty() {
            break;
        }
        if let Some(range) = lower.strip_prefix("range: bytes=") {
            request.from = range.strip_suffix('-').and_then(|from| from.parse().ok());
        }
        if let Some(tag) = line.trim().strip_prefix("if-range: ") {
            request.if_range = Some(tag.to_owned());
        }
        request.authorization |= lower.starts_with("authorization:");
    }
    let number = {
        let mut log = log.lock().unwrap();
        log.push(request.clone());
        log.len() - 1
    };
    let reply = answer(number, &request);
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if reply.chunked {
        head.push_str("Transfer-Encoding: chunked\r\n\r\n");
        head.push_str(&format!("{:x}\r\n", reply.body.len()));
    } else {
        head.push_str(&format!("Content-Length: {}\r\n\r\n", reply.body.len()));
    }
    stream.write_all(head.as_bytes()).ok()?;
    let body = &reply.body[..reply.cut.unwrap_or(reply.body.len())];
    stream.write_all(body).ok()?;
    if reply.chunked {
        stream.write_all(b"\r\n0\r\n\r\n").ok()?;
    }
    stream.flush().ok()
}
