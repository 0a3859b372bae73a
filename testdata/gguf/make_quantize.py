"""Makes quantize.gguf: rows of floats, and how well ggml stores them in each format.

    pip install gguf==0.19.0 numpy llama-cpp-python==0.3.36
    python testdata/gguf/make_quantize.py testdata/gguf MODEL.gguf

Tensors, 16 rows of 512 numbers each, stored as F16 and F16 numbers by value: `gauss`, `laplace`,
`outlier` (Gaussian, of which one in 64 is ten times as large), `offset` (Gaussian about a mean of
one deviation), `real` (rows of the model's Q8_0 tensors) and `merged` (rows of its Q4_K and Q5_0
tensors plus one of low rank, as `gradus merge` quantizes again). Key `ggml.NAME`, one f32 for
each of key `formats`: the root mean square error of `ggml_quantize_chunk` without an importance
matrix, over that of the rows themselves.
"""

import ctypes
import glob
import os
import sys

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader, GGUFWriter, GGML_QUANT_SIZES, dequantize
import llama_cpp

FORMATS = [T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K]
ROWS, COLS = 16, 512

base = glob.glob(os.path.join(os.path.dirname(llama_cpp.__file__), "lib", "libggml-base.so"))[0]
ggml = ctypes.CDLL(base)
ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int] + [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3 + [ctypes.c_void_p]


def by_ggml(ty, x):
    block, size = GGML_QUANT_SIZES[ty]
    out = np.zeros((x.shape[0], x.shape[1] // block * size), np.uint8)
    n = ggml.ggml_quantize_chunk(ty, x.ctypes.data, out.ctypes.data, 0, *x.shape, None)
    assert n == out.nbytes
    return dequantize(out.view(np.float16) if ty == T.F16 else out, ty).reshape(x.shape)


def rows(reader, kinds, rng):
    """Rows of the model's tensors of some types."""
    found = [t for t in reader.tensors if t.tensor_type in kinds and t.name.startswith("blk.")]
    assert found, kinds
    out = []
    for i in range(ROWS):
        t = found[int(rng.integers(len(found)))]
        flat = dequantize(t.data, t.tensor_type).reshape(-1)
        at = int(rng.integers(len(flat) // COLS)) * COLS
        out.append(flat[at : at + COLS])
    return np.stack(out)


def main(folder, model):
    rng = np.random.default_rng(20260301)
    reader = GGUFReader(model)
    shape = (ROWS, COLS)
    gauss = rng.standard_normal(shape)
    outlier = rng.standard_normal(shape) * np.where(rng.random(shape) < 1 / 64, 10, 1)
    low_rank = rng.standard_normal((ROWS, 4)) @ rng.standard_normal((4, COLS))
    merged = rows(reader, (T.Q4_K, T.Q5_0), rng)
    merged = merged + low_rank * (0.05 * merged.std() / low_rank.std())
    kinds = {
        "gauss": gauss * 0.02,
        "laplace": rng.laplace(size=shape) * 0.02,
        "outlier": outlier * 0.02,
        "offset": (rng.standard_normal(shape) + 1) * 0.02,
        "real": rows(reader, (T.Q8_0,), rng),
        "merged": merged,
    }
    w = GGUFWriter(f"{folder}/quantize.gguf", "fixture")
    w.add_array("formats", [ty.name for ty in FORMATS])
    for name, x in kinds.items():
        half = x.astype(np.float16)
        x = np.ascontiguousarray(half.astype(np.float32))
        rms = lambda e: float(np.sqrt(np.mean(e.astype(np.float64) ** 2)))
        errors = [rms(by_ggml(ty, x) - x) / rms(x) for ty in FORMATS]
        print(name, *(f"{ty.name}:{e:.3e}" for ty, e in zip(FORMATS, errors)))
        w.add_array(f"ggml.{name}", errors)
        w.add_tensor(name, half)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


main(*sys.argv[1:])
