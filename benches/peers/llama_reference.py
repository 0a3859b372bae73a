#!/usr/bin/env python3
"""What llama.cpp says: token ids, perplexity, greedy text and losses, with or without an adapter.

    llama_reference.py tokens     -m M.gguf --lines LINES.json [--add-special] [--parse-special]
    llama_reference.py perplexity -m M.gguf --text FILE [-c 512]
    llama_reference.py generate   -m M.gguf --prompts P.json [--adapter A.gguf] [-n 64]
    llama_reference.py loss       -m M.gguf --data D.json [--adapter A.gguf]
    llama_reference.py version

Each prints JSON. It needs `llama-cpp-python` (README.md says how to build it) and numpy.
As a module: `Llama` wraps the C interface, without llama-cpp-python's own defaults.
"""

import argparse
import ctypes
import json
import math
import sys

import llama_cpp as C
import numpy as np

_silent = C.llama_log_callback(lambda level, text, data: None)
CACHE_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}


def quiet():
    """Turns llama.cpp's log off."""
    C.llama_log_set(_silent, ctypes.c_void_p(0))


def build():
    """Version of llama-cpp-python and what its kernels were built for."""
    return {
        "llama_cpp_python": C.__version__,
        "system_info": C.llama_print_system_info().decode().strip(" |\n"),
    }


class Llama:
    """A model and one context of llama.cpp: its own defaults, one sequence, no GPU."""

    def __init__(
        self, path, ctx=512, threads=2, adapter=None, cache_type="f16", vocab_only=False, repack=True
    ):
        """`repack=False` keeps to llama.cpp's plain kernels: its AMX kernels are faster and round
        more (SmolLM2's perplexity: 32.836 there, 32.697 plain, 32.640 with f32 weights)."""
        C.llama_backend_init()
        params = C.llama_model_default_params()
        params.use_extra_bufts = repack
        params.n_gpu_layers = 0
        params.vocab_only = vocab_only
        self.model = C.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise SystemExit(f"{path}: llama.cpp cannot load it")
        self.vocab = C.llama_model_get_vocab(self.model)
        self.n_vocab = C.llama_vocab_n_tokens(self.vocab)
        self.ctx = None
        if vocab_only:
            return
        params = C.llama_context_default_params()
        params.n_ctx = ctx
        params.n_batch = params.n_ubatch = min(ctx, 512)
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = CACHE_TYPES[cache_type]
        self.n_batch = params.n_batch
        self.n_ctx = ctx
        self.ctx = C.llama_init_from_model(self.model, params)
        if not self.ctx:
            raise SystemExit(f"{path}: llama.cpp cannot make a context of {ctx} tokens")
        if adapter:
            lora = C.llama_adapter_lora_init(self.model, str(adapter).encode())
            if not lora:
                raise SystemExit(f"{adapter}: llama.cpp cannot load this adapter")
            adapters = (C.llama_adapter_lora_p_ctypes * 1)(lora)
            if C.llama_set_adapters_lora(self.ctx, adapters, 1, (ctypes.c_float * 1)(1.0)):
                raise SystemExit(f"{adapter}: llama.cpp cannot apply this adapter")
        self.reset()

    def reset(self):
        """Forgets all tokens."""
        C.llama_memory_clear(C.llama_get_memory(self.ctx), True)
        self.position = 0

    @property
    def adds_bos(self):
        """Whether the vocabulary asks for a beginning-of-sequence token."""
        return bool(C.llama_vocab_get_add_bos(self.vocab))

    @property
    def bos(self):
        return C.llama_vocab_bos(self.vocab)

    def is_end(self, token):
        return bool(C.llama_vocab_is_eog(self.vocab, token))

    def tokenize(self, text, add_special=False, parse_special=False):
        """Token ids of `text` (str or bytes)."""
        text = text.encode() if isinstance(text, str) else text
        room = len(text) + 8
        ids = (C.llama_token * room)()
        count = C.llama_tokenize(
            self.vocab, text, len(text), ids, room, add_special, parse_special
        )
        if count < 0:
            raise SystemExit(f"llama.cpp cannot tokenize {text[:60]!r}")
        return list(ids[:count])

    def piece(self, token, special=False):
        """The bytes of a token."""
        room = 256
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = C.llama_token_to_piece(self.vocab, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def eval(self, tokens, want=None):
        """Appends `tokens`; returns the logits [len(want), vocab] of the positions `want` within
        them (of the last one if it is None)."""
        want = [len(tokens) - 1] if want is None else list(want)
        wanted = set(want)
        rows = []
        for start in range(0, len(tokens), self.n_batch):
            chunk = tokens[start : start + self.n_batch]
            batch = C.llama_batch_init(len(chunk), 0, 1)
            batch.n_tokens = len(chunk)
            for i, token in enumerate(chunk):
                batch.token[i] = token
                batch.pos[i] = self.position + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = start + i in wanted
            status = C.llama_decode(self.ctx, batch)
            C.llama_batch_free(batch)
            if status:
                raise SystemExit(f"llama.cpp failed with status {status} at {self.position}")
            self.position += len(chunk)
            for i in range(len(chunk)):
                if start + i in wanted:
                    row = C.llama_get_logits_ith(self.ctx, i)
                    rows.append(np.ctypeslib.as_array(row, shape=(self.n_vocab,)).copy())
        return np.stack(rows) if rows else np.zeros((0, self.n_vocab), np.float32)

    def nll(self, tokens, targets):
        """-log p(target) of every (position, target): the token predicted after `position`."""
        out = []
        self.reset()
        for start in range(0, len(tokens), self.n_batch):
            here = [(p - start, t) for p, t in targets if start <= p < start + self.n_batch]
            rows = self.eval(tokens[start : start + self.n_batch], [p for p, _ in here])
            for row, (_, target) in zip(rows, here):
                row = row.astype(np.float64)
                top = row.max()
                out.append(top + math.log(np.exp(row - top).sum()) - row[target])
        return out

    def greedy(self, tokens, count):
        """The `count` most likely tokens after `tokens`, fewer if the model ends."""
        self.reset()
        out = []
        rows = self.eval(tokens)
        while len(out) < count and self.position < self.n_ctx:
            token = int(rows[0].argmax())
            if self.is_end(token):
                break
            out.append(token)
            rows = self.eval([token])
        return out


def perplexity(llama, text, ctx):
    """As llama.cpp's `perplexity` tool: windows of `ctx` tokens without overlap, the last,
    incomplete one left out; the first token of each replaced by BOS where the vocabulary adds
    one; of each window the tokens from `ctx / 2 + 1` on are scored."""
    tokens = llama.tokenize(text, add_special=True)
    total, scored = 0.0, 0
    for start in range(0, len(tokens) - ctx + 1, ctx):
        window = tokens[start : start + ctx]
        targets = [(p, window[p + 1]) for p in range(ctx // 2, ctx - 1)]
        fed = [llama.bos] + window[1:] if llama.adds_bos else window
        nll = llama.nll(fed, targets)
        total += sum(nll)
        scored += len(nll)
        print(f"window at {start}: {math.exp(total / scored):.4f}", file=sys.stderr)
    return {
        "perplexity": math.exp(total / scored),
        "nll": total / scored,
        "context": ctx,
        "tokens": len(tokens),
        "scored": scored,
    }


def loss(llama, sequences):
    """Mean -log p over all labels of `[{tokens, labels}]`: label t is the token at t, predicted
    from what stands before it, and -100 means no loss. All labels weigh the same."""
    total, count, each = 0.0, 0, []
    for sequence in sequences:
        tokens, labels = sequence["tokens"], sequence["labels"]
        targets = [(t - 1, label) for t, label in enumerate(labels) if t > 0 and label != -100]
        nll = llama.nll(tokens, targets)
        each.append(sum(nll) / max(len(nll), 1))
        total += sum(nll)
        count += len(nll)
    return {"loss": total / max(count, 1), "labels": count, "each": each}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name):
        sub = commands.add_parser(name)
        sub.add_argument("-m", "--model", required=True)
        sub.add_argument("-t", "--threads", type=int, default=2)
        return sub

    sub = command("tokens")
    sub.add_argument("--lines", required=True, help="JSON: a list of strings")
    sub.add_argument("--add-special", action="store_true")
    sub.add_argument("--parse-special", action="store_true")
    sub = command("perplexity")
    sub.add_argument("--text", required=True)
    sub.add_argument("-c", "--context", type=int, default=512)
    sub.add_argument("--cache-type", choices=CACHE_TYPES, default="f16")
    sub = command("generate")
    sub.add_argument("--prompts", required=True, help="JSON: a list of strings or of lists of ids")
    sub.add_argument("--adapter")
    sub.add_argument("-n", type=int, default=64)
    sub.add_argument("-c", "--context", type=int, default=1024)
    sub.add_argument("--cache-type", choices=CACHE_TYPES, default="f16")
    sub = command("loss")
    sub.add_argument("--data", required=True, help="JSON: a list of {tokens, labels}")
    sub.add_argument("--adapter")
    sub.add_argument("-c", "--context", type=int, default=1024)
    sub.add_argument("--cache-type", choices=CACHE_TYPES, default="f16")
    commands.add_parser("version")
    args = parser.parse_args()
    quiet()

    if args.command == "version":
        result = build()
    elif args.command == "tokens":
        llama = Llama(args.model, vocab_only=True)
        with open(args.lines, encoding="utf-8") as file:
            lines = json.load(file)
        result = [llama.tokenize(line, args.add_special, args.parse_special) for line in lines]
    elif args.command == "perplexity":
        llama = Llama(
            args.model, args.context, args.threads, cache_type=args.cache_type, repack=False
        )
        with open(args.text, "rb") as file:
            result = perplexity(llama, file.read(), args.context)
        result |= build()
    else:
        llama = Llama(
            args.model, args.context, args.threads, args.adapter, args.cache_type, repack=False
        )
        with open(args.prompts if args.command == "generate" else args.data) as file:
            items = json.load(file)
        if args.command == "loss":
            result = loss(llama, items)
        else:
            result = []
            for prompt in items:
                if isinstance(prompt, str):
                    prompt = llama.tokenize(prompt, add_special=True, parse_special=True)
                ids = llama.greedy(prompt, args.n)
                text = b"".join(map(llama.piece, ids)).decode(errors="replace")
                result.append({"ids": ids, "text": text})
    json.dump(result, sys.stdout)
    print()


if __name__ == "__main__":
    main()
