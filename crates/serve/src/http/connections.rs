//! Connections: how many, and how long they may take.

use std::io::Write;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::App;

/// What a connection too many is told.
const REFUSED: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\
    connection: close\r\nretry-after: 1\r\n\r\n";

/// Counts a connection for as long as it lives.
struct Counted(Arc<App>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Takes connections until it is told to stop.
pub(super) async fn accept(
    listener: TcpListener,
    router: Router,
    app: Arc<App>,
    mut stopped: watch::Receiver<bool>,
) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.wait_for(|stop| *stop) => return,
        };
        let Ok((stream, _)) = accepted else {
            // Out of file descriptors, or the client has gone already.
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        if app.connections.load(Ordering::Relaxed) >= app.limits.connections as u64 {
            app.refused_connections.fetch_add(1, Ordering::Relaxed);
            // Never waits; a client that takes nothing gets nothing.
            let _ = stream.into_std().and_then(|mut stream| stream.write(REFUSED));
            continue;
        }
        app.connections.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(app.clone());
        tokio::spawn(serve(stream, router.clone(), counted, stopped.clone()));
    }
}

async fn serve(
    stream: TcpStream,
    router: Router,
    counted: Counted,
    mut stopped: watch::Receiver<bool>,
) {
    // A token is sent when it is there, not when a packet is full.
    let _ = stream.set_nodelay(true);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(counted.0.limits.head_time)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    tokio::select! {
        // What went wrong with it is the client's business.
        _ = connection.as_mut() => return,
        _ = stopped.wait_for(|stop| *stop) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}
