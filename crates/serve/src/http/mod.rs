//! The HTTP interface.
//!
//! [`Http::start`] listens and answers at once: `/health` always, everything else once
//! [`Http::serve`] has given it a server. Handlers read, check, render and tokenize on threads of
//! their own, boundedly many, and only wait otherwise; the loop that owns the device never waits
//! for them. A client that leaves drops its handler, and with it its turn.

mod completions;
mod connections;
mod reply;
mod routes;

use std::net::{SocketAddr, TcpListener};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::Request;
use axum::http::header::CONTENT_LENGTH;
use axum::response::{IntoResponse, Response};
use futures_util::{FutureExt, StreamExt};
use graph::Code;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::request::Host;
use crate::{Error, Result, Server};
use reply::Refused;

/// Bounds on what clients may take up.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Connections at once; further ones are answered with 503 and closed.
    pub connections: usize,
    /// Longest that the head of a request may take to arrive.
    pub head_time: Duration,
    /// Longest that a body may take to arrive.
    pub body_time: Duration,
    /// Bytes of bodies held at once.
    pub body_bytes: usize,
    /// Requests rendered and tokenized at once.
    pub renderers: usize,
    /// Jobs read, started or learned at once.
    pub jobs: usize,
    /// After so long without anything to say, a stream says that it is alive.
    pub keep_alive: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 1024,
            head_time: Duration::from_secs(30),
            body_time: Duration::from_secs(120),
            body_bytes: 256 << 20,
            renderers: model::thread_count().clamp(2, 4),
            jobs: 4,
            keep_alive: Duration::from_secs(10),
        }
    }
}

/// What a handler comes to: either way an answer.
type Handled = std::result::Result<Response, Refused>;

/// What is served, once there is something.
struct Served {
    server: Server,
    host: Host,
}

/// What all handlers share.
struct App {
    served: OnceLock<Served>,
    limits: Limits,
    bodies: Arc<Semaphore>,
    renderers: Arc<Semaphore>,
    /// Requests that are being rendered or wait for it.
    rendering: AtomicU64,
    jobs: Arc<Semaphore>,
    requests: AtomicU64,
    connections: AtomicU64,
    refused_connections: AtomicU64,
    /// Panics before there was a server to count them.
    panics: AtomicU64,
}

/// The unit in which bytes of bodies are counted.
const KIB: usize = 1024;

impl App {
    /// What is served.
    fn served(&self) -> std::result::Result<&Served, Refused> {
        let loading = Refused::Unavailable("loading", "the model is being loaded; try again");
        self.served.get().ok_or(loading)
    }

    /// Reads a body of at most so many bytes. What is returned beside it holds its place among
    /// the bodies.
    async fn body(&self, request: Request, most: usize) -> Result<(Vec<u8>, OwnedSemaphorePermit)> {
        let length = request.headers().get(CONTENT_LENGTH);
        let length = length.and_then(|l| l.to_str().ok()?.parse::<usize>().ok());
        if length.is_some_and(|length| length > most) {
            return Err(too_large(most));
        }
        let time = self.limits.body_time;
        tokio::time::timeout(time, self.read(request, most)).await.unwrap_or_else(|_| {
            let message = format!("the body did not arrive within {time:?}");
            Err(Error::new(Code::InvalidInput, message))
        })
    }

    async fn read(&self, request: Request, most: usize) -> Result<(Vec<u8>, OwnedSemaphorePermit)> {
        let full = |_| {
            let message = "too many large requests are arriving; try again later";
            Error::new(Code::QueueFull, message)
        };
        let mut pieces = request.into_body().into_data_stream();
        let mut bytes = Vec::new();
        let mut place = self.bodies.clone().try_acquire_owned().map_err(full)?;
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|e| {
                Error::new(Code::InvalidInput, format!("the body did not arrive: {e}"))
            })?;
            if bytes.len() + piece.len() > most {
                return Err(too_large(most));
            }
            bytes.extend_from_slice(&piece);
            // Counted as it arrives, so that who only announces much holds nothing.
            let more = (bytes.len() / KIB + 1).saturating_sub(place.num_permits());
            let more = u32::try_from(more).unwrap_or(u32::MAX);
            place.merge(self.bodies.clone().try_acquire_many_owned(more).map_err(full)?);
        }
        Ok((bytes, place))
    }

    /// Counts a panic that was caught, and says so to the client.
    fn panicked(&self) -> Error {
        match self.served.get() {
            Some(served) => served.server.count_panic(),
            None => drop(self.panics.fetch_add(1, Ordering::Relaxed)),
        }
        Error::new(Code::Internal, "the request made the server fail; this is a bug in Gradus")
    }

    /// Does work that takes long on a thread where that is allowed. It goes on when its client
    /// leaves.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        match tokio::task::spawn_blocking(work).await {
            Ok(done) => Ok(done),
            Err(e) if e.is_panic() => Err(self.panicked()),
            Err(_) => Err(Error::new(Code::Stopping, "the server is stopping")),
        }
    }
}

fn too_large(most: usize) -> Error {
    let message = format!("the body is too large; expected at most {most} bytes");
    Error::new(Code::InvalidInput, message)
}

/// A listening server. Dropping it does not end it; [`Http::stop`] does.
pub struct Http {
    app: Arc<App>,
    address: SocketAddr,
    stop: watch::Sender<bool>,
    runtime: tokio::runtime::Runtime,
}

impl Http {
    /// Listens, and answers `/health`.
    ///
    /// # Errors
    /// When the system gives no threads, or not the socket's address.
    pub fn start(listener: TcpListener, limits: Limits) -> std::io::Result<Http> {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(limits.renderers + limits.jobs + 4)
            .thread_name("http")
            .enable_io()
            .enable_time()
            .build()?;
        let app = Arc::new(App {
            served: OnceLock::new(),
            bodies: Arc::new(Semaphore::new(limits.body_bytes / KIB)),
            renderers: Arc::new(Semaphore::new(limits.renderers)),
            rendering: AtomicU64::new(0),
            jobs: Arc::new(Semaphore::new(limits.jobs)),
            requests: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            refused_connections: AtomicU64::new(0),
            panics: AtomicU64::new(0),
            limits,
        });
        let (stop, stopped) = watch::channel(false);
        let listener = {
            let _inside = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        runtime.spawn(connections::accept(
            listener,
            routes::router(app.clone()),
            app.clone(),
            stopped,
        ));
        Ok(Http { app, address, stop, runtime })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers everything from now on. Only the first call counts.
    pub fn serve(&self, server: Server, host: Host) {
        let _ = self.app.served.set(Served { server, host });
    }

    /// Stops: turns and jobs get `patience` to end, while `/ready` says 503; then connections
    /// are closed.
    pub fn stop(self, patience: Duration) {
        if let Some(served) = self.app.served.get() {
            served.server.stop(patience);
        }
        // Answers that are on their way get a moment.
        let _ = self.stop.send(true);
        let app = self.app.clone();
        self.runtime.block_on(async move {
            let gone = async {
                while app.connections.load(Ordering::Relaxed) > 0 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            let _ = tokio::time::timeout(Duration::from_secs(1), gone).await;
        });
        self.runtime.shutdown_timeout(Duration::from_millis(500));
    }
}

/// What a handler answers, or `500` where it panics.
async fn caught(app: &App, handler: impl Future<Output = Response>) -> Response {
    match AssertUnwindSafe(handler).catch_unwind().await {
        Ok(response) => response,
        Err(_) => Refused::from(app.panicked()).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a handler does when it panics, or what it does on another thread.
    #[test]
    fn a_panic_is_an_answer_and_is_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let http = Http::start(listener, Limits::default()).unwrap();
        let app = http.app.clone();
        let (handler, work) = http.runtime.block_on(async {
            let broken = async { panic!("a bug") };
            let work = app.blocking(|| -> () { panic!("another bug") });
            (caught(&app, broken).await, work.await)
        });
        assert_eq!(handler.status(), 500);
        assert_eq!(work.unwrap_err().code, Code::Internal);
        assert_eq!(app.panics.load(Ordering::Relaxed), 2);
        http.stop(Duration::ZERO);
    }

    #[test]
    fn bodies_take_what_there_is_room_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let limits = Limits { body_bytes: 64 << 10, ..Limits::default() };
        let http = Http::start(listener, limits).unwrap();
        let app = http.app.clone();
        http.runtime.block_on(async {
            let of = |bytes: usize| Request::new(vec![b' '; bytes].into());
            let (bytes, place) = app.body(of(40 << 10), 1 << 20).await.unwrap();
            assert_eq!((bytes.len(), place.num_permits()), (40 << 10, 41));
            assert_eq!(app.body(of(30 << 10), 1 << 20).await.unwrap_err().code, Code::QueueFull);
            drop(app.body(of(20 << 10), 1 << 20).await.unwrap());
            drop(place);
            drop(app.body(of(60 << 10), 1 << 20).await.unwrap());
            let large = app.body(of(60 << 10), 32 << 10).await.unwrap_err();
            assert_eq!(large.code, Code::InvalidInput);
        });
        assert_eq!(app.bodies.available_permits(), 64);
        http.stop(Duration::ZERO);
    }
}
