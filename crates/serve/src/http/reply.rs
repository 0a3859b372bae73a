//! Answers: JSON, and errors in OpenAI's shape.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use graph::{Code, Kind};
use serde_json::{Map, Value, json};

use crate::Error;

/// A body of a type.
pub(super) fn body(status: StatusCode, kind: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// A value as JSON.
pub(super) fn json(status: StatusCode, value: &Value) -> Response {
    body(status, "application/json", value.to_string())
}

/// A value, and that all is well.
pub(super) fn ok(value: &Value) -> Response {
    json(StatusCode::OK, value)
}

/// What OpenAI's interface calls a kind of error.
fn type_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Invalid | Kind::Missing | Kind::Conflict => "invalid_request_error",
        Kind::Refusal => "refusal",
        Kind::Busy => "rate_limit_error",
        Kind::Fault => "server_error",
    }
}

/// An error in OpenAI's shape; where a graph was refused, with op, node, operand and device.
pub(super) fn error_value(e: &Error) -> Value {
    let mut error = Map::new();
    error.insert("message".into(), json!(e.message));
    error.insert("type".into(), json!(type_of(e.code.kind())));
    error.insert("param".into(), json!(e.field));
    error.insert("code".into(), json!(e.code.as_str()));
    if let Some(refusal) = &e.refusal {
        error.insert("op".into(), json!(refusal.op));
        error.insert("node".into(), json!(refusal.node));
        error.insert("operand".into(), json!(refusal.operand));
        error.insert("device".into(), json!(refusal.device));
    }
    json!({ "error": error })
}

/// A state of the server in which it cannot answer.
fn unavailable(code: &str, message: &str) -> Response {
    let error = json!({"message": message, "type": "server_error", "param": null, "code": code});
    let mut response = json(StatusCode::SERVICE_UNAVAILABLE, &json!({ "error": error }));
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// Why something is not answered.
pub(super) enum Refused {
    /// The request's own fault, or the server's.
    Error(Error),
    /// A state of the server: a code and a message.
    Unavailable(&'static str, &'static str),
}

impl From<Error> for Refused {
    fn from(e: Error) -> Refused {
        Refused::Error(e)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let e = match self {
            Refused::Unavailable(code, message) => return unavailable(code, message),
            Refused::Error(e) if e.code == Code::Stopping => {
                return unavailable(e.code.as_str(), &e.message);
            }
            Refused::Error(e) => e,
        };
        let status = StatusCode::from_u16(e.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = json(status, &error_value(&e));
        if e.code.kind() == Kind::Busy {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// A path, or a method on it, that is not there.
pub(super) fn no_route(status: StatusCode, message: String) -> Response {
    let error =
        json!({"message": message, "type": "invalid_request_error", "param": null, "code": null});
    json(status, &json!({ "error": error }))
}
