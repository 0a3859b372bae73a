#!/usr/bin/env python3
"""One run of PyTorch + PEFT for run.py, in a process of its own. Prints JSON.

The model has the shapes of a GGUF file and random weights: what a step costs does not depend on
their values. LoRA of rank 8 on all seven linear layers, one sequence, AdamW.
"""

import argparse
import json
import resource
import statistics
import time

import gguf
import peft
import torch
import transformers

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def config(path):
    """The transformers configuration with the shapes of the GGUF file at `path`."""
    reader = gguf.GGUFReader(path)

    def field(key):
        found = reader.get_field(key)
        return None if found is None else found.contents()

    arch = field("general.architecture")
    heads = field(f"{arch}.attention.head_count")
    width = field(f"{arch}.embedding_length")
    tensors = {tensor.name: tensor.shape for tensor in reader.tensors}
    shapes = {
        "vocab_size": int(tensors["token_embd.weight"][1]),
        "hidden_size": width,
        "intermediate_size": field(f"{arch}.feed_forward_length"),
        "num_hidden_layers": field(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field(f"{arch}.attention.head_count_kv") or heads,
        "head_dim": field(f"{arch}.attention.key_length") or width // heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if arch == "llama":
        return transformers.LlamaConfig(**shapes)
    if arch == "qwen2":
        del shapes["head_dim"]
        return transformers.Qwen2Config(**shapes)
    if arch == "gemma3":
        window = field(f"{arch}.attention.sliding_window")
        return transformers.Gemma3TextConfig(**shapes, sliding_window=window)
    raise SystemExit(f"{path}: no shapes for the architecture {arch}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", type=int, required=True, help="threads")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one more")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapter")
    parser.add_argument("--checkpoint", action="store_true", help="gradient checkpointing")
    args = parser.parse_args()

    torch.set_num_threads(args.t)
    torch.manual_seed(1)
    dtype = getattr(torch, args.dtype)
    model = transformers.AutoModelForCausalLM.from_config(config(args.model), dtype=dtype)
    model.config.use_cache = False
    if args.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    lora = peft.LoraConfig(r=args.rank, lora_alpha=16, target_modules=PROJECTIONS)
    model = peft.get_peft_model(model, lora)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids = torch.randint(0, model.config.vocab_size, (1, args.tokens))

    times = []
    for _ in range(args.steps + 1):
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - began)
    step = statistics.median(times[1:])
    print(
        json.dumps(
            {
                "train_tokens_per_s": args.tokens / step,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "trained_parameters": sum(parameter.numel() for parameter in trained),
                "loss": loss.item(),
                "build": {
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "peft": peft.__version__,
                    "cpu": torch.backends.cpu.get_cpu_capability(),
                },
            }
        )
    )


if __name__ == "__main__":
    main()
