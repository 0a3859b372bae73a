#!/usr/bin/env python3
"""One run of llama.cpp for run.py, in a process of its own. Prints JSON."""

import argparse
import json
import time

import llama_cpp as C
import numpy as np
from llama_reference import Llama, build, quiet


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-p", type=int, required=True, help="tokens of the prompt")
    parser.add_argument("-n", type=int, required=True, help="tokens to decode")
    parser.add_argument("-t", type=int, required=True, help="threads")
    parser.add_argument("--short", type=int, default=16, help="tokens before decoding")
    args = parser.parse_args()
    quiet()

    began = time.perf_counter()
    llama = Llama(args.model, ctx=max(args.p, args.short + args.n), threads=args.t)
    # Any tokens will do; the same ones every time, spread over the vocabulary.
    prompt = [(i * 7919 + 1000) % llama.n_vocab for i in range(max(args.p, args.short))]

    def feed(tokens):
        """llama_decode for the whole of `tokens`, with the last one's logits."""
        for start in range(0, len(tokens), llama.n_batch):
            chunk = tokens[start : start + llama.n_batch]
            ids = (C.llama_token * len(chunk))(*chunk)
            if C.llama_decode(llama.ctx, C.llama_batch_get_one(ids, len(chunk))):
                raise SystemExit("llama.cpp failed")
        row = C.llama_get_logits_ith(llama.ctx, -1)
        return int(np.ctypeslib.as_array(row, shape=(llama.n_vocab,)).argmax())

    feed(prompt[: args.short])
    first_token = time.perf_counter() - began

    llama.reset()
    began = time.perf_counter()
    feed(prompt[: args.p])
    prompt_time = time.perf_counter() - began

    llama.reset()
    token = feed(prompt[: args.short])
    began = time.perf_counter()
    for _ in range(args.n):
        token = feed([token])
    decode_time = time.perf_counter() - began
    print(
        json.dumps(
            {
                "first_token_ms": first_token * 1e3,
                "prompt_tokens_per_s": args.p / prompt_time,
                "decode_tokens_per_s": args.n / decode_time,
                "build": build(),
            }
        )
    )


if __name__ == "__main__":
    main()
