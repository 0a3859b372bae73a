//! Templates of our own, for models that come without one.

/// The names that [`ChatTemplate::builtin`](super::ChatTemplate::builtin) takes:
///
/// - `plain`: `User: ...` and `Assistant: ...` line by line, an answer ending with EOS; for any
///   base model;
/// - `chatml`: `<|im_start|>role ... <|im_end|>`, for models whose vocabulary has these tokens;
/// - `gemma`: `<start_of_turn>user ... <end_of_turn>`, likewise;
/// - `llama3`: `<|start_header_id|>role<|end_header_id|> ... <|eot_id|>`, likewise.
///
/// All are prefix stable: a conversation begins with the text of its beginning. None writes BOS,
/// which a prompt gets from the tokenizer where its model wants one.
pub static BUILTIN_TEMPLATES: &[&str] = &["plain", "chatml", "gemma", "llama3"];

pub(super) fn names() -> String {
    BUILTIN_TEMPLATES.join(", ")
}

pub(super) fn source(name: &str) -> Option<&'static str> {
    Some(match name {
        "plain" => include_str!("plain.jinja"),
        "chatml" => include_str!("chatml.jinja"),
        "gemma" => include_str!("gemma.jinja"),
        "llama3" => include_str!("llama3.jinja"),
        _ => return None,
    })
}
