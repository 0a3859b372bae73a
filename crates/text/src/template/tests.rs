use super::*;
use crate::Content;

fn tokens() -> SpecialTokens {
    SpecialTokens { bos: "<s>".into(), eos: "</s>".into(), ..SpecialTokens::default() }
}

fn parse(source: &str) -> Result<ChatTemplate, Error> {
    ChatTemplate::parse("model.gguf: key `tokenizer.chat_template`", source, tokens())
}

fn messages() -> Vec<Message> {
    vec![Message::new("user", "Hi"), Message::new("assistant", "Hello"), Message::new("user", "?")]
}

/// The error of a source, parsed and run; it must be one line.
fn refused(source: &str) -> String {
    let result = parse(source).and_then(|template| template.render(&messages(), &[], true));
    let text = result.unwrap_err().to_string();
    assert!(!text.contains('\n') && text.len() < 600, "{text:?}");
    text.strip_prefix("model.gguf: key `tokenizer.chat_template`").unwrap().to_owned()
}

#[test]
fn errors_name_the_key_and_the_line() {
    assert_eq!(
        refused("{{ 1 }}\n{% if x %}\n"),
        " line 2: syntax error: unexpected end of input, expected end of block"
    );
    assert_eq!(refused("a\nb\n{{ nope.nope }}"), " line 3: undefined value");
    assert_eq!(
        refused("\n{{ raise_exception('Roles must\nalternate') }}"),
        " line 2: refuses the conversation: Roles must alternate"
    );
    assert_eq!(refused("{{ nope() }}"), " line 1: unknown function: nope is unknown");
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
    assert_eq!(refused(loops), " line 1: does not end within 1000000 steps; it may never end");
    // Work that a single step would do, and data that doubles.
    for source in [
        "{{ 'x' * 100000000000 }}",
        "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x | replace('x', 'xx') \
         %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=['x']) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}\
         {% endfor %}{{ n.x | tojson }}",
    ] {
        let why = refused(source);
        assert!(why.contains("steps") || why.contains("too "), "{source}: {why}");
    }
}

#[test]
fn work_that_is_one_step_to_the_engine_is_not_waited_for() {
    // Two lists of two lists of ..., 2^27 leaves in 27 pairs: compared leaf by leaf.
    let source = "{% set a = namespace(x=1) %}{% set b = namespace(x=1) %}{% for i in range(27) %}\
                  {% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}\
                  {{ a.x == b.x }}";
    let program = Program::parse("p".into(), source).unwrap();
    let input = Input {
        messages: Value::from(Vec::<Value>::new()),
        tools: None,
        add_generation_prompt: false,
        tokens: tokens(),
        now: None,
    };
    let error = program.run(input, Duration::from_millis(30)).unwrap_err().to_string();
    assert_eq!(error, "p: does not end within 30ms; it may never end");
}

#[test]
fn output_is_bounded() {
    // 40 MB cost 625,000 steps, which are allowed.
    let source = "{% set x = 'x' * 10000000 %}{{ x }}{{ x }}";
    assert_eq!(refused(source), ": gives more than 16 MiB");
}

#[test]
fn recursion_is_bounded() {
    assert_eq!(
        refused("{% macro f(x) %}{{ f(x) }}{% endmacro %}\n{{ f(1) }}"),
        " line 1: invalid operation: recursion limit exceeded"
    );
    assert!(refused("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}").contains("limit"));
    // Recursion as templates use it works.
    let source =
        "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}";
    assert!(parse(source).unwrap().render(&[], &[], false).unwrap().ends_with("3210"));
}

#[test]
fn sources_that_nest_deeply_are_errors_and_no_crash() {
    let n = MAX_SOURCE / 8;
    for (source, fits) in [
        (format!("{{{{ {}1{} }}}}", "(".repeat(n), ")".repeat(n)), false),
        (format!("{{{{ {}1{} }}}}", "[".repeat(n), "]".repeat(n)), false),
        (format!("{}x{}", "{% if a %}".repeat(n / 3), "{% endif %}".repeat(n / 3)), false),
        (format!("{{{{ b{} }}}}", "|list".repeat(n)), true),
        (format!("{{{{ messages{} }}}}", ".a".repeat(4 * n - 20)), false),
        (format!("{{{{ messages{} }}}}", "[0]".repeat(2 * n)), false),
        (format!("{{{{ a{} }}}}", "()".repeat(4 * n - 20)), false),
        (format!("{{{{ 1{} }}}}", "+1".repeat(2000)), true),
        (format!("{{{{ {}1 }}}}", "-".repeat(2000)), true),
        (format!("{{{{ {}1 }}}}", "not ".repeat(2000)), true),
        (format!("{{{{ 1{} }}}}", "~1".repeat(1000)), true),
        (format!("{{% if a %}}{}{{% endif %}}", "{% elif b %}".repeat(1500)), true),
        (format!("{{{{ {}1 }}}}", "1 if 1 else ".repeat(2000)), true),
    ] {
        let result = parse(&source).and_then(|template| template.render(&[], &[], false));
        let head: String = source.chars().take(40).collect();
        assert_eq!(result.is_ok(), fits, "{head} {:?}", result.map_err(|e| e.to_string()));
    }
    assert_eq!(
        refused(&format!("{{{{ 1{} }}}}", "+1".repeat(MAX_OPERATORS + 1))),
        ": has 6001 operators; expected at most 6000"
    );
    assert_eq!(refused(&"x".repeat(MAX_SOURCE + 1)), ": has 131073 bytes; expected at most 131072");
}

#[test]
fn data_that_nests_deeply_is_no_crash() {
    let nest = |start: &str, deeper: &str, then: &str| {
        format!(
            "{{% set n = namespace(x={start}) %}}{{% for i in range(90000) %}}{{% set n.x = \
             {deeper} %}}{{% endfor %}}{then}"
        )
    };
    let forty = format!("{}n.x{}", "[".repeat(40), "]".repeat(40));
    for source in [
        nest("1", "[n.x]", ""),
        nest("1", "(n.x,)", "{{ n.x }}"),
        nest("1", "{'a': n.x}", "{{ n.x }}"),
        nest("1", "[n.x]", "{{ n.x ~ '' }}"),
        nest("1", "[n.x]", "{% set a = n.x %}{{ a == [a] }}{{ a < [a] }}"),
        nest("1", "[n.x]", "{{ n.x | tojson }}"),
        nest("1", "[n.x]", "{{ n.x | string | length }}"),
        nest("1", "[n.x]", "{{ {n.x: 1} }}"),
        nest("1", &forty, "{{ n.x }}"),
        nest("1", "namespace(x=n.x)", "{{ n.x }}"),
        nest("1", "dict(x=n.x)", "{{ n.x }}"),
        nest("1", "[n.x] | list", ""),
    ] {
        // Whether it fits the allowed work does not matter here, only that the process lives.
        let result = parse(&source).unwrap().render(&[], &[], false);
        if let Err(error) = result {
            assert!(!error.to_string().contains("panicked"), "{source}: {error}");
        }
    }
}

#[test]
fn a_large_conversation_is_within_the_limits() {
    let qwen = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/text/templates/qwen2.5.jinja"
    ))
    .unwrap();
    let long = "lorem ipsum ".repeat(100);
    let many: Vec<Message> = (0..2000)
        .map(|i| Message::new(if i % 2 == 0 { "user" } else { "assistant" }, long.clone()))
        .collect();
    let text = parse(&qwen).unwrap().render(&many, &[], true).unwrap();
    assert!(text.len() > 2000 * long.len());
}

#[test]
fn generation_tags_are_taken_out() {
    let source = "a{% generation %}b{%- endgeneration -%} c\n{%generation%}d{%+ endgeneration %}\
                  {% if generation %}{% endif %}{% unfinished";
    assert_eq!(
        without_generation_tags(source),
        "a{% if true %}b{%- endif -%} c\n{%if true%}d{%+ endif %}\
         {% if generation %}{% endif %}{% unfinished"
    );
}

#[test]
fn the_clock_can_be_stopped() {
    let template = parse("{{ strftime_now('%Y-%m-%d') }}").unwrap();
    let stopped = template.clone().with_time(86_400);
    assert_eq!(stopped.render(&[], &[], false).unwrap(), "1970-01-02");
    assert!(template.render(&[], &[], false).unwrap().as_str() > "2024");
}

#[test]
fn arguments_of_calls_are_objects_where_the_template_takes_objects() {
    let call = serde_json::json!({
        "type": "function",
        "function": {"name": "f", "arguments": "{\"x\": 1}"},
    });
    let mut message = Message::new("assistant", "");
    message.content = None;
    message.other.insert("tool_calls".into(), serde_json::json!([call]));
    let render = |source: &str| parse(source).unwrap().render(&[message.clone()], &[], false);
    let arguments = "messages[0].tool_calls[0].function.arguments";
    assert_eq!(render(&format!("{{{{ {arguments} | tojson }}}}")).unwrap(), "{\"x\": 1}");
    assert_eq!(render(&format!("{{{{ '<' + {arguments} + '>' }}}}")).unwrap(), "<{\"x\": 1}>");
    // A template that refuses for another reason says that reason.
    let error = render("{{ raise_exception('no tools') }}").unwrap_err().to_string();
    assert!(error.ends_with("refuses the conversation: no tools"), "{error}");
}

#[test]
fn content_that_is_not_text_is_refused_by_message() {
    let mut message = Message::new("user", "");
    let part = serde_json::json!({"type": "input_audio"}).as_object().unwrap().clone();
    message.content = Some(Content::Parts(vec![part]));
    let template = parse("{{ messages | length }}").unwrap();
    let error = template.render(&[Message::new("user", "a"), message], &[], true).unwrap_err();
    assert!(error.to_string().starts_with("message 1: content part 0 is of type"), "{error}");
}

#[test]
fn built_in_templates_are_prefix_stable() {
    for name in BUILTIN_TEMPLATES {
        let template = ChatTemplate::builtin(name, tokens()).unwrap();
        let messages = [
            Message::new("system", "Be brief."),
            Message::new("user", "Hi"),
            Message::new("assistant", "Hello"),
            Message::new("user", "Bye"),
            Message::new("assistant", "Bye!"),
        ];
        let text = |n: usize, go_on| template.render(&messages[..n], &[], go_on).unwrap();
        for (n, message) in messages.iter().enumerate().skip(2) {
            assert!(text(n + 1, false).starts_with(&text(n, false)), "{name}");
            if message.role == "assistant" {
                assert!(text(n + 1, false).starts_with(&text(n, true)), "{name}");
            }
        }
    }
    let plain = ChatTemplate::builtin("plain", tokens()).unwrap();
    assert_eq!(
        plain.render(&messages(), &[], true).unwrap(),
        "User: Hi\nAssistant: Hello</s>\nUser: ?\nAssistant:"
    );
    assert_eq!(
        ChatTemplate::builtin("vicuna", tokens()).unwrap_err().to_string(),
        "no built-in chat template is called \"vicuna\"; there are plain, chatml, gemma, llama3"
    );
}
