"""Drives `gradus serve` with the stock `openai` package. Called by tests/serve.rs."""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
question = {
    "model": "model",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who wrote Emma?"}]},
    ],
    "temperature": 0,
    "max_tokens": 16,
}

# Whole, streamed, and streamed with usage: the same text.
whole = client.chat.completions.create(**question)
text = whole.choices[0].message.content
assert whole.choices[0].message.role == "assistant" and text
assert whole.choices[0].finish_reason in ("stop", "length")
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
pieces = list(client.chat.completions.create(**question, stream=True))
assert "".join(p.choices[0].delta.content or "" for p in pieces) == text
assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
assert all(p.id == pieces[0].id for p in pieces)
options = {"include_usage": True}
pieces = list(client.chat.completions.create(**question, stream=True, stream_options=options))
assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == text

# The streaming helper of the package, which checks the shape of every event.
with client.chat.completions.stream(**question) as stream:
    for _ in stream:
        pass
    assert stream.current_completion_snapshot.choices[0].message.content == text

# Every setting; those of other samplers go through extra_body.
settings = {
    "max_tokens": openai.NOT_GIVEN,
    "max_completion_tokens": 5,
    "temperature": 0.7,
    "top_p": 0.9,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": -100},
    "seed": 7,
    "stop": ["\n\n", "User:"],
    "n": 1,
    "user": "me",
    "response_format": {"type": "text"},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": "auto",
    "extra_body": {"top_k": 20, "min_p": 0.05, "repeat_penalty": 1.1},
}
first, second = (client.chat.completions.create(**{**question, **settings}) for _ in range(2))
assert first.choices[0].message.content == second.choices[0].message.content
assert first.usage.completion_tokens <= 5

# Completions.
prompt = {"model": "facts", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
whole = client.completions.create(**prompt)
pieces = list(client.completions.create(**prompt, stream=True))
assert "".join(p.choices[0].text for p in pieces) == whole.choices[0].text
raw = client.completions.with_raw_response.create(**prompt)
assert raw.headers["x-gradus-generation"] == "1"

assert [m.id for m in client.models.list()] == ["model", "facts"]

# Errors are those of the package.
for change, kind, param in [
    ({"model": "nobody"}, openai.NotFoundError, "model"),
    ({"n": 2}, openai.BadRequestError, "n"),
    ({"logprobs": True}, openai.BadRequestError, "logprobs"),
    ({"temperature": -1}, openai.BadRequestError, "temperature"),
    ({"messages": []}, openai.BadRequestError, "messages"),
    ({"extra_body": {"tempreature": 1}}, openai.BadRequestError, "tempreature"),
]:
    try:
        client.chat.completions.create(**{**question, **change})
    except kind as e:
        assert e.param == param and e.code, e
    else:
        raise AssertionError(f"{change} is not refused")

# A client that leaves.
stream = client.chat.completions.create(**{**question, "max_tokens": 200}, stream=True)
next(iter(stream))
stream.close()

print("the openai package", openai.__version__, "is served")
