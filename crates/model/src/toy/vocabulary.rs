//! The vocabulary of toys: every byte, some merges of English and code, and the control tokens of
//! ChatML.

use gguf::{Array, Metadata, Value};

const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// In order of rank, in the letters of [`letters`].
const MERGES: [&str; 61] = [
    "Ġ t", "v e", "Ġ f", "Ġ i", "Ġ s", "i n", "Ġt h", "Ġ w", "o w", "Ġ a", "Ġ m", "Ġ n", "Ġt o",
    "Ġf o", "Ġi t", "Ġth e", "( )", "] ;", "a s", "a t", "a in", "e n", "r e", "u m", "Ġ =", "Ġ d",
    "Ġ h", "Ġ l", "Ġ o", "Ġ x", "Ġ {", "Ġ }", "Ġs h", "in t", "ow n", "! (", "! [", "\" ,", "\" {",
    "' d", "' l", "' m", "' s", "' ve", ") ;", "+ )", "+ =", "+ +)", ". l", "0 1", "0 2", "1 9",
    "2 02", "3 4", "6 7", "G r", "[ i", "a f", "a i", "a r", "a z",
];

/// How many tokens there are.
pub(super) const SIZE: usize = CONTROL.len() + 256 + MERGES.len();

const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + \
                        message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\
                        {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// The letters that GPT-2's tokenizer writes bytes as: printable ones as themselves, the others
/// from U+0100 on.
fn letters() -> impl Iterator<Item = char> {
    let printable = |b: &u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=255u8).filter(move |b| !printable(b)).count() as u32;
    (0..=255u8)
        .filter(printable)
        .map(char::from)
        .chain((0..others).filter_map(|i| char::from_u32(256 + i)))
}

/// Adds the tokenizer and the chat template.
pub(super) fn add(metadata: &mut Metadata) {
    let merged = MERGES.iter().map(|merge| merge.replace(' ', ""));
    let control = CONTROL.iter().map(ToString::to_string);
    let tokens: Vec<String> = control.chain(letters().map(String::from)).chain(merged).collect();
    // 1: normal, 3: control.
    let kinds = (0..tokens.len()).map(|i| if i < CONTROL.len() { 3 } else { 1 }).collect();
    let merges = MERGES.iter().map(ToString::to_string).collect();
    metadata.insert("tokenizer.ggml.model", "gpt2");
    metadata.insert("tokenizer.ggml.pre", "qwen2");
    metadata.insert("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)));
    metadata.insert("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
    metadata.insert("tokenizer.ggml.merges", Value::Array(Array::String(merges)));
    metadata.insert("tokenizer.ggml.bos_token_id", Value::U32(0));
    metadata.insert("tokenizer.ggml.eos_token_id", Value::U32(2));
    metadata.insert("tokenizer.ggml.padding_token_id", Value::U32(0));
    metadata.insert("tokenizer.ggml.add_bos_token", Value::Bool(false));
    metadata.insert("tokenizer.chat_template", TEMPLATE);
}
