"""Makes the folders beside it: the adapters of `testdata/oracle/`, put into PEFT and saved by it.

    pip install peft==0.21.2 transformers==5.24.0 torch==2.15.0 gguf==0.19.0
    python testdata/peft/make_peft.py --oracle make_oracle.py --llama-cpp llama.cpp
    python testdata/peft/make_peft.py ... --check FOLDER    # load FOLDER/ARCH instead, of each ARCH there

`make_oracle.py` is what made the oracle: which element of transformers' weights each element of a
GGUF file is, it traces through llama.cpp's converter, so nothing here knows of orders of heads.
Every adapter is checked: the logits through PEFT are the oracle's. They differ in how the scale of 3 is said:
llama by rank-stabilized LoRA of alpha 6, gemma3 by patterns, the others by alpha 12 and rank 4.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import peft
import peft.utils.transformers_weight_conversion as conversion
import torch
from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parent
ORACLE = HERE.parent / "oracle"
WRITTEN = ["llama", "gemma3", "mixtral", "qwen3_5_moe"]


def base(o, name, convert):
    """The oracle's model in transformers, and where its GGUF tensors come from."""
    spec = o.arch_table("out")[name]
    layout = o.Layout(o.make_model(spec, torch.float32))
    with tempfile.TemporaryDirectory() as d:
        d = Path(d)
        serial = o.make_model(spec, torch.float32)
        layout.fill_serials(serial)
        o.make_tokenizer(d / "b", spec["cfg"]["vocab_size"], spec["pre"])
        o.save_hf(serial, spec, d / "b")
        convert(d / "b", d / "serial.gguf", spec["pre"], spec["cls"])
        layout.decode(o.read_gguf(d / "serial.gguf")[0])
    tensors, _ = o.read_gguf(ORACLE / name / "model.gguf")
    flat = torch.zeros(layout.n)
    for n, index in layout.index.items():
        v = torch.from_numpy(np.array(tensors[n])).float()
        kind = layout.kind[n]
        v = v - 1 if kind == "plus_one" else torch.log(-v) if kind == "neg_exp" else v
        flat[index.reshape(-1)] = v.reshape(-1)
    model = o.make_model(spec, torch.float32)
    with torch.no_grad():
        d = dict(model.named_parameters())
        d.update(dict(model.named_buffers()))
        for k, v in layout.split(flat).items():
            d[k].copy_(v)
    return spec, layout, model


def worst(model, golden):
    out = 0.0
    for i in range(2):
        with torch.no_grad():
            got = model(input_ids=torch.from_numpy(golden[f"tokens.{i}"]).long()[None]).logits[0]
        want = torch.from_numpy(golden[f"lora.logits.{i}"])
        out = max(out, float((got - want).norm() / want.norm()))
    return out


def adapted(o, name, layout, model, lora):
    """A PEFT model with the adapter's pairs in transformers' order of rows and columns."""
    modules, parameters, pairs = set(), set(), {}
    kinds = dict(model.named_modules())
    fused = {}
    for n, (a, b) in lora.items():
        own, = layout.owner(n)
        path, leaf = own.rsplit(".", 1)
        start, _, shape = layout.off[own]
        index = layout.index[n] - start
        if len(shape) == 3:
            fused.setdefault(own, []).append((n, index, shape, a, b))
            continue
        row, col = index[:, 0] // shape[1], index[0] % shape[1]
        A, B = torch.zeros_like(a), torch.zeros_like(b)
        A[:, col], B[row] = a, b
        if isinstance(kinds[path], torch.nn.Linear):
            modules.add(path.split(".")[-1])
            pairs[path] = (A, B)
        else:
            parameters.add(".".join(own.split(".")[-3:]))
            pairs[path] = (A, B)
    for own, parts in fused.items():
        # Gate and up of one parameter: A above A, B on the diagonal.
        parts.sort(key=lambda p: int(p[1].min()))
        n, index, (experts, out, width), *_ = parts[0]
        rank = sum(p[3].shape[1] for p in parts)
        A, B, at = torch.zeros(experts, rank, width), torch.zeros(experts, out, rank), 0
        for _, index, _, a, b in parts:
            row = (index[0, :, 0] % (out * width)) // width
            A[:, at : at + a.shape[1]] = a
            B[:, row, at : at + a.shape[1]] = b
            at += a.shape[1]
        parameters.add(".".join(own.split(".")[-3:]))
        path = own.rsplit(".", 1)[0] + (".base_layer" if own.endswith("gate_up_proj") else "")
        pairs[path] = (A.reshape(experts * rank, width), B.permute(1, 2, 0).reshape(out, rank * experts))
    settings = dict(r=4, lora_alpha=12)
    if name == "llama":
        settings = dict(r=4, lora_alpha=6, use_rslora=True)
    if name == "gemma3":
        settings = dict(
            r=8, lora_alpha=24,
            rank_pattern={"self_attn.o_proj": 4, "layers.[0-9]+.mlp.*": 4, "[qkv]_proj": 4},
            alpha_pattern={"layers.1.*": 12, "(self_attn|mlp)..*": 12},
        )
    if fused:
        settings |= dict(rank_pattern={"gate_up_proj": 8}, alpha_pattern={"gate_up_proj": 24})
    config = peft.LoraConfig(
        **settings, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
        target_modules=sorted(modules), target_parameters=sorted(parameters) or None,
    )
    model = peft.get_peft_model(model, config).eval()
    found = dict(model.named_modules())
    with torch.no_grad():
        for path, (A, B) in pairs.items():
            module = found["base_model.model." + path]
            module.lora_A["default"].weight.copy_(A)
            module.lora_B["default"].weight.copy_(B)
    return model


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--oracle", type=Path, required=True)
    args.add_argument("--llama-cpp", type=Path, required=True)
    args.add_argument("--check", type=Path)
    args = args.parse_args()
    spec = importlib.util.spec_from_file_location("make_oracle", args.oracle)
    o = importlib.util.module_from_spec(spec)
    # The oracle takes no part of PEFT's conversion of older names; here it is wanted.
    converting = conversion.convert_peft_config_for_transformers
    spec.loader.exec_module(o)
    conversion.convert_peft_config_for_transformers = converting
    convert = o.converter(args.llama_cpp.resolve())
    names = WRITTEN if not args.check else sorted(d.name for d in args.check.iterdir() if d.is_dir())
    for name in names:
        spec, layout, model = base(o, name, convert)
        golden = load_file(ORACLE / name / "golden.safetensors")
        if args.check:
            model = peft.PeftModel.from_pretrained(model, args.check / name).eval()
            print(name, f"{worst(model, golden):.2e}", flush=True)
            continue
        raw, _ = o.read_gguf(ORACLE / name / "adapter.gguf")
        lora = {}
        for n in layout.index:
            if n + ".lora_a" in raw:
                lora[n] = tuple(torch.from_numpy(np.array(raw[f"{n}.lora_{x}"])) for x in "ab")
        model = adapted(o, name, layout, model, lora)
        print(name, f"{worst(model, golden):.2e}", flush=True)
        model.base_model.model.config._name_or_path = f"oracle/{name}"
        model.peft_config["default"].base_model_name_or_path = f"oracle/{name}"
        model.save_pretrained(HERE / name)
        (HERE / name / "README.md").unlink(missing_ok=True)
        # Loaded again, it is the same.
        _, _, again = base(o, name, convert)
        again = peft.PeftModel.from_pretrained(again, HERE / name).eval()
        print(name, "loaded again", f"{worst(again, golden):.2e}", flush=True)


sys.exit(main())
