use serde_json::json;

use super::*;
use crate::SpecialTokens;
use crate::tokenizer::tests::{byte_bpe, small_spm};

fn messages(list: &[(&str, &str)]) -> Vec<Message> {
    list.iter().map(|(role, content)| Message::new(*role, *content)).collect()
}

fn chat() -> Vec<Message> {
    messages(&[("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "d e")])
}

fn whole(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
    tools: &[Value],
) -> Result<Conversation, Error> {
    conversation(tokenizer, template, messages, tools, &Effort::default())
}

/// The trained tokens in brackets.
fn marked(tokenizer: &Tokenizer, conversation: &Conversation) -> String {
    assert_eq!(conversation.ids.len(), conversation.weights.len());
    let mut out = String::new();
    let mut before = false;
    for (&id, &weight) in conversation.ids.iter().zip(&conversation.weights) {
        let trained = weight != 0.0;
        if trained != before {
            out.push(if trained { '[' } else { ']' });
        }
        before = trained;
        out += &String::from_utf8_lossy(tokenizer.token_bytes(id, true).unwrap());
    }
    if before {
        out.push(']');
    }
    out
}

fn template(tokenizer: &Tokenizer, source: &str) -> ChatTemplate {
    ChatTemplate::parse("test", source, SpecialTokens::of(tokenizer)).unwrap()
}

#[test]
fn f40_what_the_assistant_says_and_the_end_of_its_turn_are_trained() {
    let tokenizer = byte_bpe();
    let chatml = ChatTemplate::builtin("chatml", SpecialTokens::of(&tokenizer)).unwrap();
    let all = whole(&tokenizer, &chatml, &chat(), &[]).unwrap();
    assert_eq!(
        marked(&tokenizer, &all),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[bb<|im_end|>\n]\
         <|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d e<|im_end|>\n]"
    );
    // A message with "train": false is context.
    let mut some = chat();
    some[1].train = false;
    let some = whole(&tokenizer, &chatml, &some, &[]).unwrap();
    assert_eq!(some.ids, all.ids);
    assert!(marked(&tokenizer, &some).contains("assistant\nbb<|im_end|>\n<|im_start|>user"));
    assert_eq!(some.weights.iter().filter(|w| **w != 0.0).count(), 5);
    // A weight is that of its message's tokens, and 0 is no training.
    let mut weighted = chat();
    (weighted[1].weight, weighted[3].weight) = (0.0, 2.5);
    let weighted = whole(&tokenizer, &chatml, &weighted, &[]).unwrap();
    let expected: Vec<f32> = some.weights.iter().map(|w| w * 2.5).collect();
    assert_eq!((&weighted.ids, &weighted.weights), (&all.ids, &expected));
    assert_eq!(weighted.turns, some.turns);
    assert_eq!(all.turns.iter().map(|t| t.message).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(all.turns[1], some.turns[0]);
}

#[test]
fn plain_text_of_a_base_model_trains_the_end_too() {
    let tokenizer = small_spm();
    let plain = ChatTemplate::builtin("plain", SpecialTokens::of(&tokenizer)).unwrap();
    let got = whole(&tokenizer, &plain, &chat()[..2], &[]).unwrap();
    assert_eq!(marked(&tokenizer, &got), "<s> User: a\nAssistant:[ bb</s> \n]");
}

#[test]
fn f45_one_conversation_has_the_same_tokens_wherever_it_is_used() {
    for tokenizer in [byte_bpe(), small_spm()] {
        for name in crate::BUILTIN_TEMPLATES {
            let tokens = SpecialTokens::of(&tokenizer);
            let template = ChatTemplate::builtin(name, tokens).unwrap();
            for turns in [2usize, 4] {
                let messages = &chat()[..turns];
                let trained = whole(&tokenizer, &template, messages, &[]).unwrap().ids;
                let text = template.render(messages, &[], false).unwrap();
                assert_eq!(encode_prompt(&tokenizer, &text).unwrap(), trained, "{name}");
                // A prompt of the chat is where its answer begins in training.
                let asked =
                    encode_chat(&tokenizer, &template, &messages[..turns - 1], &[]).unwrap();
                let rendered = template.render(&messages[..turns - 1], &[], true).unwrap();
                assert_eq!(encode_prompt(&tokenizer, &rendered).unwrap(), asked, "{name}");
                if *name != "plain" {
                    assert!(trained.starts_with(&asked), "{name}");
                }
                // BOS once, whether the template writes it or not.
                let bos = tokenizer.bos().unwrap();
                for ids in [&trained, &asked] {
                    let count = ids.iter().filter(|id| **id == bos).count();
                    assert_eq!(count, usize::from(tokenizer.adds_bos()), "{name}");
                }
            }
        }
    }
}

#[test]
fn f39_a_conversation_without_anything_to_train_on_is_refused() {
    let tokenizer = byte_bpe();
    let chatml = ChatTemplate::builtin("chatml", SpecialTokens::of(&tokenizer)).unwrap();
    let refused =
        |messages: &[Message]| whole(&tokenizer, &chatml, messages, &[]).unwrap_err().to_string();
    let nobody = "the conversation cannot be trained on: it has no message of role \"assistant\" \
                  with \"train\" left on";
    assert_eq!(refused(&[]), nobody);
    assert_eq!(refused(&chat()[..1]), nobody);
    let mut off = chat();
    off[1].train = false;
    off[3].train = false;
    assert_eq!(refused(&off), nobody);
}

#[test]
fn a_template_that_is_not_prefix_stable_is_refused_by_message() {
    let tokenizer = byte_bpe();
    let refused = |source: &str| {
        let template = template(&tokenizer, source);
        whole(&tokenizer, &template, &chat(), &[]).unwrap_err().to_string()
    };
    // Writes the last turn differently.
    let error = refused(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ '.' if loop.last else ';' }}\
         {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    );
    assert!(error.starts_with("message 1: the chat template changes this turn"), "{error}");
    // Says everything twice.
    let error = refused(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.content }};{% endfor %}\
         {% if add_generation_prompt %}<think>{% endif %}",
    );
    assert!(error.starts_with("message 1: the chat template writes this turn"), "{error}");
    // Says something else.
    let error = refused(
        "{% for m in messages %}{{ m.role }}:{{ m.content | upper }};{% endfor %}\
         {% if add_generation_prompt %}<think>{% endif %}",
    );
    assert!(error.starts_with("message 1: the chat template writes this turn"), "{error}");
    // Says last what comes first.
    let error = refused(
        "{% for m in messages | reverse %}{{ m.role }}:{{ m.content }};{% endfor %}\
         {% if add_generation_prompt %}<think>{% endif %}",
    );
    assert!(error.starts_with("message 3: the chat template writes this turn before"), "{error}");
    // Leaves the answer out.
    let error = refused(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }};{% endif %}{% endfor %}",
    );
    assert!(error.starts_with("message 1: the chat template leaves this turn out"), "{error}");
    assert!(!error.contains('\n'));
}

/// What a template writes of earlier turns may differ from what it wrote when they were the last:
/// what is trained on is found in the whole.
#[test]
fn f40_turns_are_found_where_a_template_rewrites_earlier_ones() {
    let tokenizer = byte_bpe();
    // As Qwen3 does it: reasoning is left out of all turns but the last.
    let qwen3 = template(
        &tokenizer,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content %}\
         {% if m.role == 'assistant' and not loop.last %}\
         {% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ c }}<|im_end|>\n\
         {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let list = [
        ("user", "a"),
        ("assistant", "<think>hm</think>\nbb"),
        ("user", "c"),
        ("assistant", "<think>ha</think>\nd"),
    ];
    let got = whole(&tokenizer, &qwen3, &messages(&list), &[]).unwrap();
    assert_eq!(
        marked(&tokenizer, &got),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[bb<|im_end|>\n]\
         <|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n\
         [<think>ha</think>\nd<|im_end|>\n]"
    );
    // As DeepSeek-R1 does it: asks for reasoning that a closed conversation does not show.
    let r1 = template(
        &tokenizer,
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}\
         {% if add_generation_prompt %}assistant:<think>{% endif %}",
    );
    let got = whole(&tokenizer, &r1, &chat(), &[]).unwrap();
    assert_eq!(marked(&tokenizer, &got), "user:a;assistant:[bb;]user:c;assistant:[d e;]");
    // A template that takes no conversation that ends with the assistant, but this one.
    let picky = template(
        &tokenizer,
        "{% if messages | length == 2 %}{{ raise_exception('too short') }}{% endif %}\
         {% for m in messages %}{{ m.content }};{% endfor %}",
    );
    let error = whole(&tokenizer, &picky, &chat(), &[]).unwrap_err().to_string();
    assert!(error.contains("refuses the conversation: too short"), "{error}");
}

#[test]
fn a_span_within_a_token_is_no_token() {
    // "ab" is one token here, and the answer "b" begins inside it.
    let tokenizer = byte_bpe();
    let template = template(&tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}");
    // That another answer is trained makes up for nothing.
    for list in [
        &[("user", "a"), ("assistant", "b")][..],
        &[("user", "d"), ("assistant", "c"), ("user", "a"), ("assistant", "b")],
    ] {
        let error = whole(&tokenizer, &template, &messages(list), &[]).unwrap_err();
        let expected = format!(
            "message {}: no token begins inside what the assistant says, as the chat template has \
             nothing between that and what is before; use another template",
            list.len() - 1
        );
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn spans_that_touch_are_both_trained() {
    let tokenizer = byte_bpe();
    let template = template(&tokenizer, "{% for m in messages %}{{ m.content }};{% endfor %}");
    let list = [("user", "a"), ("assistant", "b"), ("assistant", "c"), ("user", "d")];
    let got = whole(&tokenizer, &template, &messages(&list), &[]).unwrap();
    assert_eq!(marked(&tokenizer, &got), "a;[b;c;]d;");
}

#[test]
fn tools_reach_the_template() {
    let tokenizer = byte_bpe();
    let template = template(
        &tokenizer,
        "{% if tools %}{{ tools[0].name }};{% endif %}{% for m in messages %}{{ m.content }};\
         {% endfor %}",
    );
    let tools = [json!({"name": "f"})];
    let got = whole(&tokenizer, &template, &chat()[..2], &tools).unwrap();
    assert_eq!(marked(&tokenizer, &got), "f;a;[bb;]");
}

fn calling(content: &str, names: &[&str]) -> Message {
    let call = |name: &&str| json!({"function": {"name": name, "arguments": "{\"x\": 1}"}});
    let calls: Vec<Value> = names.iter().map(call).collect();
    let mut message = Message::new("assistant", content);
    message.other.insert("tool_calls".into(), calls.into());
    message
}

/// Writes the content, and so many of the calls.
const CALLS: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {% for c in (m.tool_calls or [])[:N] %}{{ c.function.name }}{{ c.function.arguments.x }}\
    {% endfor %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

#[test]
fn an_answer_that_the_template_leaves_out_is_refused() {
    let tokenizer = byte_bpe();
    let outcome = |source: &str, answer: Message| {
        let list = [Message::new("user", "a"), answer];
        let template = template(&tokenizer, source);
        match whole(&tokenizer, &template, &list, &[]) {
            Err(Error::Unsaid { index: 1, all, what }) => {
                let full = template.render(&list, &[], false).unwrap();
                let effort = Effort::default();
                assert!(check_said(&template, &list, &[], &full, &effort).is_err());
                Some((all, what))
            }
            other => {
                other.unwrap();
                None
            }
        }
    };
    let refused = |source: &str, answer| outcome(source, answer).unwrap();
    let with = |calls: &str| CALLS.replace('N', calls);
    let (all, what) = refused(&with("0"), calling("", &["f"]));
    assert!(all && what.contains("does not render tool calls"), "{what}");
    let (all, what) = refused(&with("0"), calling("So.", &["f"]));
    assert!(!all && what.contains("without its tool calls"), "{what}");
    let (all, what) = refused(&with("1"), calling("", &["f", "g"]));
    assert!(!all && what.contains("the last of its 2 tool calls"), "{what}");
    for (calls, answer) in [("1", calling("", &["f"])), ("2", calling("So.", &["f", "g"]))] {
        assert_eq!(outcome(&with(calls), answer), None);
    }
    // Reasoning alone, which the template takes away.
    let thinks = with("0").replace("m.content", "m.content.split('</think>')[-1]");
    let (all, what) = refused(&thinks, Message::new("assistant", "<think>x</think>"));
    assert!(all && what.contains("renders nothing of what it says"), "{what}");
    assert_eq!(outcome(&thinks, Message::new("assistant", "<think>x</think>y")), None);
}

#[test]
fn what_a_template_leaves_out_is_named() {
    let tokenizer = byte_bpe();
    let mut list =
        vec![Message::new("system", "s"), Message::new("user", "a"), calling("", &["f"])];
    list.extend([Message::new("tool", "result"), Message::new("assistant", "done")]);
    for key in ["reasoning_content", "tool_call_id"] {
        list[3].other.insert(key.into(), "because".into());
    }
    list[3].other.insert("name".into(), "".into());
    list[2].train = false;
    let tools = [json!({"name": "f"})];
    let named = |source: &str, list: &[Message]| {
        let template = template(&tokenizer, source);
        let full = template.render(list, &tools, false).unwrap();
        left_out(&template, list, &tools, &full, &Effort::default())
            .unwrap()
            .into_iter()
            .collect::<Vec<_>>()
            .join(", ")
    };
    let chatml = CALLS.replace('N', "0");
    let expected = "`tools`, the messages' \"reasoning_content\", the messages' \"tool_calls\"";
    assert_eq!(named(&chatml, &list), expected);
    let whole = CALLS.replace('N', "9").replace("{{ m.role }}", "{{ m.reasoning_content }}")
        + "{{ tools }}";
    assert_eq!(named(&whole, &list), "");
    let few = whole.replace("in messages %}", "in messages if m.role in ['user', 'assistant'] %}");
    let expected = "the messages' \"reasoning_content\", what role \"system\" says, \
                    what role \"tool\" says";
    assert_eq!(named(&few, &list), expected);
    list[2] = calling("Let me see.", &["f"]);
    let calls = whole.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}");
    assert_eq!(named(&calls, &list), "what is said beside tool calls");
}

/// Every answer is found by rendering what is before it, so that the work grows with the square of
/// the messages: it has a bound, and stops when nobody waits.
#[test]
fn the_work_for_a_conversation_has_a_bound() {
    let tokenizer = byte_bpe();
    let chatml = ChatTemplate::builtin("chatml", SpecialTokens::of(&tokenizer)).unwrap();
    let long = |n: usize| -> Vec<Message> {
        let role = |i: usize| if i.is_multiple_of(2) { "user" } else { "assistant" };
        (0..n).map(|i| Message::new(role(i), ["yes", "no"][i / 2 % 2])).collect()
    };
    let some = long(200);
    let effort = Effort::default();
    let all = conversation(&tokenizer, &chatml, &some, &[], &effort).unwrap();
    assert_eq!(all.turns.len(), 100);
    // As the documentation says: 4,000 of them may be.
    let steps = effort.steps.get() as f64;
    let whole = steps * (4000.0f64 / 200.0).powi(2);
    assert!((0.7..1.0).contains(&(whole / effort.most as f64)), "{steps} steps for 200 messages");
    let asked = std::cell::Cell::new(0);
    let stopped = |most: u64, after: usize| {
        asked.set(0);
        let wanted = || {
            asked.set(asked.get() + 1);
            asked.get() < after
        };
        let effort = Effort { most, ..Effort::new(&wanted) };
        conversation(&tokenizer, &chatml, &some, &[], &effort).unwrap_err().to_string()
    };
    let gone = stopped(u64::MAX, 20);
    assert!(gone.contains("nobody waits") && asked.get() == 20, "{gone}");
    let endless = stopped(100_000, usize::MAX);
    assert!(endless.contains("takes more than 100000 steps; split"), "{endless}");
    assert!(asked.get() > 10, "{}", asked.get());
}

/// Words that are said often are told from words of the template without a rendering for each.
#[test]
fn what_is_said_in_a_word_is_seen_in_one_rendering() {
    let tokenizer = byte_bpe();
    let source = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
        {% if m.role != 'system' and (m.role != 'user' or loop.index > 3) %}{{ m.content }}\
        {% endif %}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let template = template(&tokenizer, source);
    // Each is a part of what the template writes of its own.
    let list = messages(&[
        ("system", "start"),
        ("user", "us"),
        ("assistant", "end"),
        ("user", "er"),
        ("assistant", "ass"),
    ]);
    let full = template.render(&list, &[], false).unwrap();
    let left = left_out(&template, &list, &[], &full, &Effort::default()).unwrap();
    let expected = ["what role \"system\" says", "what role \"user\" says"];
    assert_eq!(left.into_iter().collect::<Vec<_>>(), expected);
    check_said(&template, &list, &[], &full, &Effort::default()).unwrap();
    let silent = self::template(&tokenizer, &source.replace("'system'", "'assistant'"));
    let full = silent.render(&list, &[], false).unwrap();
    let error = check_said(&silent, &list, &[], &full, &Effort::default()).unwrap_err();
    assert!(matches!(error, Error::Unsaid { index: 2, all: true, .. }), "{error}");
}
