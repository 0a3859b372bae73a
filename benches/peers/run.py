#!/usr/bin/env python3
"""Gradus beside its peers: speed beside llama.cpp, training beside PyTorch + PEFT.

    run.py -m M.gguf [-m N.gguf ...] [--gradus target/release/gradus] [--out peers.json]
    run.py -m M.gguf --only train --variant float32 --variant bfloat16-checkpoint

Same file, same number of threads, one process a run, the two sides in turn (A B A B ...), medians.
Prints a table and, with --out, writes every single measurement as JSON.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
VARIANTS = ["float32", "float32-checkpoint", "bfloat16", "bfloat16-checkpoint"]
# (field, what it is, whether more is better)
SPEED = [
    ("first_token_ms", "start to first token, ms", False),
    ("prompt_tokens_per_s", "prompt, tokens/s", True),
    ("decode_tokens_per_s", "decoding, tokens/s", True),
    ("peak_rss_bytes", "peak resident memory, MB", False),
]
TRAIN = [
    ("train_tokens_per_s", "training, tokens/s", True),
    ("peak_rss_bytes", "peak resident memory, MB", False),
]


def measure(command):
    """Runs `command`; its JSON, with the peak memory the system saw where it gives none."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # Its standard error is short or nothing: reading one pipe after the other cannot block.
    out, errors = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        last = errors.strip().splitlines()[-1:] or ["it said nothing"]
        raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}: {last[0]}")
    result = json.loads(out.strip().splitlines()[-1])
    result.setdefault("peak_rss_bytes", usage.ru_maxrss * 1024)
    result["seconds"] = time.perf_counter() - began
    return result


def interleave(sides, runs):
    """Runs every side once, `runs` times over: `{side: [result]}`."""
    results = {side: [] for side in sides}
    for run in range(runs):
        for side, command in sides.items():
            result = measure(command)
            results[side].append(result)
            took = f"{result['seconds']:.1f} s"
            print(f"  run {run + 1} of {runs}: {side}, {took}", file=sys.stderr, flush=True)
    return results


def table(title, fields, results, ours="gradus"):
    """Prints medians and ratios, and returns them. A ratio above 1 is good for us."""
    peers = [side for side in results if side != ours]
    print(f"\n{title}")
    header = f"  {'':28}{ours:>12}" + "".join(f"{peer:>22}{'ratio':>8}" for peer in peers)
    print(header)
    summary = {}
    for field, what, more in fields:
        values = {
            side: [run[field] for run in runs if run.get(field) is not None]
            for side, runs in results.items()
        }
        medians = {side: statistics.median(list_) for side, list_ in values.items() if list_}
        scale = 1e-6 if field == "peak_rss_bytes" else 1
        line = f"  {what:28}" + (f"{medians[ours] * scale:12.1f}" if ours in medians else f"{'-':>12}")
        summary[field] = {"median": medians, "ratio": {}}
        for peer in peers:
            if peer not in medians:
                line += f"{'-':>22}{'':>8}"
                continue
            line += f"{medians[peer] * scale:22.1f}"
            if ours not in medians:
                line += f"{'-':>8}"
                continue
            ratio = medians[ours] / medians[peer]
            ratio = ratio if more else 1 / ratio
            summary[field]["ratio"][peer] = ratio
            line += f"{ratio:8.2f}"
        print(line, flush=True)
    return summary


def cpu():
    """The processor's name."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", action="append", required=True)
    parser.add_argument("--gradus", default="target/release/gradus")
    parser.add_argument("--only", choices=["speed", "train"])
    parser.add_argument("--side", choices=["both", "gradus", "peers"], default="both")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="of PyTorch; all")
    parser.add_argument("-p", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("-n", type=int, default=128, help="tokens to decode")
    parser.add_argument("-t", type=int, default=2, help="threads")
    parser.add_argument("-r", "--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the training window")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapter")
    parser.add_argument("--grad-precision", default="auto", help="of Gradus: f32, bf16, int16")
    parser.add_argument("--recompute", action="store_true", help="Gradus recomputes each layer")
    parser.add_argument("--out", help="where to write everything as JSON")
    args = parser.parse_args()

    threads = str(args.t)
    report = {"cpu": cpu(), "cores": os.cpu_count(), "settings": vars(args), "models": {}}
    for model in args.model:
        name = Path(model).name
        entry = report["models"][name] = {}
        if args.only != "train":
            print(f"{name}: speed", file=sys.stderr)
            work = ["-m", model, "-p", str(args.p), "-n", str(args.n), "-t", threads]
            sides = {
                "gradus": [args.gradus, "bench", *work, "--json", "-r", "1"],
                "llama.cpp": [sys.executable, str(HERE / "llama_child.py"), *work],
            }
            results = interleave(wanted(sides, args.side), args.runs)
            title = f"{name}: prompt of {args.p}, {args.n} decoded, {threads} threads"
            entry["speed"] = {"runs": results, "summary": table(title, SPEED, results)}
            show_build(results)
        if args.only != "speed":
            print(f"{name}: training", file=sys.stderr)
            window = str(args.tokens)
            sides = {
                "gradus": [
                    *[args.gradus, "bench", "-m", model, "--train", "-p", window],
                    *["-t", threads, "--json", "-r", "3", "--rank", str(args.rank)],
                    *["--grad-precision", args.grad_precision],
                    *(["--recompute", "per-layer"] if args.recompute else []),
                ]
            }
            for variant in args.variant or VARIANTS:
                dtype, _, checkpoint = variant.partition("-")
                sides[variant] = [
                    *[sys.executable, str(HERE / "peft_child.py"), "-m", model, "-t", threads],
                    *["--tokens", window, "--dtype", dtype, "--rank", str(args.rank)],
                    *(["--checkpoint"] if checkpoint else []),
                ]
            results = interleave(wanted(sides, args.side), args.runs)
            recompute = ", layers recomputed" if args.recompute else ""
            title = f"{name}: LoRA r {args.rank} on all linear layers, 1x{window}"
            title += f"{recompute}, {threads} threads"
            summary = table(title, TRAIN, results)
            best(summary)
            entry["train"] = {"runs": results, "summary": summary}
            show_build(results)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(report, file, indent=2)
            file.write("\n")


def best(summary):
    """Prints how the fastest peer compares, and in memory the smallest."""
    ratios = {field: values["ratio"] for field, values in summary.items() if values["ratio"]}
    for field, ratio in ratios.items():
        peer = min(ratio, key=ratio.get)
        what = "speed" if field == "train_tokens_per_s" else "memory"
        print(f"  beside the best in {what}, {peer}: {ratio[peer]:.2f}")


def wanted(sides, side):
    return {
        name: command
        for name, command in sides.items()
        if side == "both" or (name == "gradus") == (side == "gradus")
    }


def show_build(results):
    """The peer's build, once."""
    for runs in results.values():
        if "build" in runs[0]:
            fields = ", ".join(f"{key} {value}" for key, value in runs[0]["build"].items())
            print(f"  peer: {fields}")
            return


if __name__ == "__main__":
    main()
