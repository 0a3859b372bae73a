#!/usr/bin/env python3
"""The loss of one adapter in Gradus, in llama.cpp and in transformers + PEFT.

    parity.py -m M.gguf --adapter A.gguf --data D.jsonl [--data E.txt ...] [--template chatml]
              [--dequantized]

The rows are rendered, tokenized and masked once, by `gradus data show`. Each program then gives the
mean loss of the same trained tokens, of the base and with the adapter: Gradus by `gradus eval`;
llama.cpp with the GGUF file; transformers with the base dequantized to float32 by its own reader and
the folder that `gradus adapter convert` writes, loaded by PEFT. Prints JSON, and fails where a loss
with the adapter is further than `--within` from Gradus's.

Gradus and llama.cpp round activations to 8 bits beside quantized weights, transformers rounds
nothing: small losses then differ by more than 1 %. With `--dequantized` all three read the base as
float32, and what is compared is the adapter alone.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


def gradus(args, *command):
    """What `gradus COMMAND --json` prints."""
    run = subprocess.run(
        [args.gradus, *map(str, command)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(run.stdout) if "--json" in command else None


def dequantized(path, to):
    """A copy of a GGUF file with every tensor as float32."""
    import gguf

    reader = gguf.GGUFReader(path)
    arch = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(to, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), kind, inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, data.reshape(tensor.shape[::-1]).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rows(args, data):
    """`[{tokens, labels}]` of a file; a label is -100 where a token is not trained."""
    shown = gradus(
        args, "data", "show", data, "-m", args.model, *args.rendering, "--rows", "1..", "--json"
    )
    assert not shown["bad"]["count"], shown["bad"]
    made = []
    for row in shown["rows"]:
        assert set(row["weights"]) <= {0.0, 1.0}, "rows that weigh differently are not compared"
        labels = [t if w else -100 for t, w in zip(row["tokens"], row["weights"])]
        made.append({"tokens": row["tokens"], "labels": labels})
    assert made, f"{data} has no rows"
    return made


def texts(path, to):
    """Writes the paragraphs of a text as rows of at least 1,200 characters; what is left is not."""
    row, made = "", []
    for paragraph in Path(path).read_text().split("\n"):
        if len(paragraph.strip()) > 200:
            row += paragraph.strip() + "\n"
        if len(row) > 1200:
            made.append(row)
            row = ""
    to.write_text("".join(json.dumps({"text": row}) + "\n" for row in made))
    return str(to)


def llama_cpp(args, sequences, adapter):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(sequences, file)
        file.flush()
        command = [sys.executable, str(HERE / "llama_reference.py"), "loss", "-m", args.model]
        command += ["--data", file.name] + (["--adapter", args.adapter] if adapter else [])
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout)["loss"]


def transformers_loss(model, sequences):
    total, count = 0.0, 0
    with torch.no_grad():
        for sequence in sequences:
            ids, labels = (torch.tensor([sequence[key]]) for key in ("tokens", "labels"))
            logits = model(input_ids=ids).logits[0, :-1].double()
            of = labels[0, 1:]
            total += torch.nn.functional.cross_entropy(logits, of, reduction="sum").item()
            count += int((of != -100).sum())
    return total / count


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--adapter", required=True, help="a GGUF file")
    parser.add_argument("--data", required=True, action="append", help="rows, or a text (.txt)")
    parser.add_argument("--template")
    parser.add_argument("--gradus", default="target/release/gradus")
    parser.add_argument("--within", type=float, default=0.01)
    parser.add_argument("--dequantized", action="store_true")
    args = parser.parse_args()
    scratch = tempfile.TemporaryDirectory()
    args.model = str(Path(args.model).resolve())
    if args.dequantized:
        quantized, args.model = args.model, str(Path(scratch.name) / "float32.gguf")
        dequantized(quantized, args.model)
    args.data = [
        texts(data, Path(scratch.name) / f"{Path(data).stem}.jsonl") if data.endswith(".txt") else data
        for data in args.data
    ]
    args.rendering = ["--template", args.template] if args.template else []

    import peft
    import transformers

    # A config beside the file is looked for first: there is none.
    path = Path(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    sets = {Path(data).name: rows(args, data) for data in args.data}
    of_peft = {name: {"base": transformers_loss(model, rows)} for name, rows in sets.items()}
    folder = Path(scratch.name) / "peft"
    gradus(args, "adapter", "convert", args.adapter, folder, "-m", args.model)
    model = peft.PeftModel.from_pretrained(model, str(folder)).eval()
    for name, of in sets.items():
        of_peft[name]["adapter"] = transformers_loss(model, of)

    result, apart = {}, 0.0
    for data in args.data:
        name = Path(data).name
        command = ["eval", "-m", args.model, *args.rendering, "--data", data, "--json"]
        ours = gradus(args, *command, "--adapter", args.adapter)
        losses = {"gradus": {key: ours[key]["loss"] for key in ("base", "adapter")}}
        losses["llama.cpp"] = {
            key: llama_cpp(args, sets[name], key == "adapter") for key in ("base", "adapter")
        }
        losses["transformers + PEFT"] = of_peft[name]
        result[name] = losses
        for program, of in losses.items():
            away = {key: of[key] / losses["gradus"][key] - 1 for key in of}
            apart = max(apart, abs(away["adapter"]))
            print(
                f"{name}, {program}: base {of['base']:.5f} ({away['base']:+.2%}), "
                f"adapter {of['adapter']:.5f} ({away['adapter']:+.2%})",
                file=sys.stderr,
            )
    print(json.dumps(result))
    if not apart <= args.within:
        raise SystemExit(f"the losses are {apart:.2%} apart, more than {args.within:.0%}")


if __name__ == "__main__":
    main()
