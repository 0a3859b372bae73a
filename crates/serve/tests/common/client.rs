//! A small HTTP client that blocks.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// An answer whose body has not been read.
pub struct Head {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    reader: BufReader<TcpStream>,
}

impl Head {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.reader.read_line(&mut line).unwrap();
        (read > 0).then(|| line.trim_end().to_string())
    }

    /// The next piece of a chunked body.
    fn chunk(&mut self) -> Option<String> {
        let size = usize::from_str_radix(&self.line()?, 16).unwrap();
        let mut bytes = vec![0; size];
        self.reader.read_exact(&mut bytes).unwrap();
        self.line();
        (size > 0).then(|| String::from_utf8(bytes).unwrap())
    }

    fn body(mut self) -> Reply {
        let body = match self.header("content-length").map(|l| l.parse().unwrap()) {
            Some(length) => {
                let mut bytes = vec![0; length];
                self.reader.read_exact(&mut bytes).unwrap();
                String::from_utf8(bytes).unwrap()
            }
            None => std::iter::from_fn(|| self.chunk()).collect(),
        };
        Reply { status: self.status, headers: self.headers, body }
    }

    /// The answer as a stream of events.
    pub fn events(self) -> Events {
        assert_eq!(self.header("content-type"), Some("text/event-stream; charset=utf-8"));
        Events { head: self, text: String::new() }
    }
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.json()
    }

    /// Checks that this is an error in OpenAI's shape: its status, code, field and a part of its
    /// message.
    #[track_caller]
    pub fn is(&self, status: u16, code: &str, field: Option<&str>, part: &str) {
        assert_eq!(self.status, status, "{}", self.body);
        let error = &self.json()["error"];
        assert_eq!(error["code"], code, "{error}");
        assert_eq!(error["param"].as_str(), field, "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(part), "no {part:?} in {message}");
        assert!(error["type"].is_string() && !message.contains('\n'));
    }
}

/// An event of a stream, as it came.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Data(Value),
    Error(Value),
    Comment,
    Done,
}

/// A stream of events.
pub struct Events {
    head: Head,
    text: String,
}

impl Iterator for Events {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        let end = loop {
            match self.text.find("\n\n") {
                Some(end) => break end,
                None => self.text += &self.head.chunk()?,
            }
        };
        let event: String = self.text.drain(..end + 2).collect();
        let event = event.trim_end();
        if event.starts_with(':') {
            return Some(Event::Comment);
        }
        let (is_error, data) = match event.strip_prefix("event: error\n") {
            Some(data) => (true, data),
            None => (false, event),
        };
        let data = data.strip_prefix("data: ").unwrap_or_else(|| panic!("{event}"));
        assert!(!data.contains('\n'), "{event}");
        Some(match data {
            "[DONE]" => Event::Done,
            data if is_error => Event::Error(serde_json::from_str(data).unwrap()),
            data => Event::Data(serde_json::from_str(data).unwrap()),
        })
    }
}

impl Events {
    /// The next event with text in it, and the text. Comments and others are passed over.
    pub fn text(&mut self) -> Option<String> {
        self.find_map(|event| match event {
            Event::Data(data) => {
                let choice = &data["choices"][0];
                let text = choice["delta"]["content"].as_str().or(choice["text"].as_str())?;
                (!text.is_empty()).then(|| text.to_string())
            }
            Event::Error(e) => panic!("{e}"),
            _ => None,
        })
    }
}

/// Sends bytes as they are and reads the head of an answer; `None` where there is none.
pub fn raw(address: SocketAddr, bytes: &[u8]) -> Option<Head> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    // What is refused early is not read to its end.
    let _ = stream.write_all(bytes);
    head(stream)
}

/// Reads the head of an answer.
pub fn head(stream: TcpStream) -> Option<Head> {
    let mut head = Head { status: 0, headers: Vec::new(), reader: BufReader::new(stream) };
    let mut line = String::new();
    match head.reader.read_line(&mut line) {
        Ok(read) if read > 0 => {}
        _ => return None,
    }
    head.status = line.split(' ').nth(1).unwrap().parse().unwrap();
    while let Some(line) = head.line().filter(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':').unwrap();
        head.headers.push((name.to_lowercase(), value.trim().to_string()));
    }
    Some(head)
}

/// Sends a request and reads the head of its answer.
pub fn send(address: SocketAddr, method: &str, path: &str, body: &str) -> Head {
    let length = body.len();
    let request =
        format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}");
    raw(address, request.as_bytes()).expect("an answer")
}

pub fn get(address: SocketAddr, path: &str) -> Reply {
    send(address, "GET", path, "").body()
}

pub fn post(address: SocketAddr, path: &str, body: &Value) -> Reply {
    post_text(address, path, &body.to_string())
}

pub fn post_text(address: SocketAddr, path: &str, body: &str) -> Reply {
    send(address, "POST", path, body).body()
}

/// Sends bytes as they are and reads the whole answer.
pub fn raw_reply(address: SocketAddr, bytes: &[u8]) -> Reply {
    raw(address, bytes).expect("an answer").body()
}

/// A request whose answer is a stream.
pub fn stream(address: SocketAddr, path: &str, body: &Value) -> Events {
    let mut body = body.clone();
    body["stream"] = true.into();
    let head = send(address, "POST", path, &body.to_string());
    assert_eq!(head.status, 200);
    head.events()
}
