"""Makes blocks.gguf: what the `gguf` package says about random blocks of every format; and
small.gguf, the same metadata and one block of each format, to begin fuzzing from.

    pip install gguf==0.19.0 numpy
    python testdata/gguf/make_blocks.py testdata/gguf

For each format NAME: tensor `NAME`, random blocks, and `NAME.f32`, their values. For each format
that Gradus quantizes to: `to.NAME`, the package's conversion of the tensor `to.input`. The
metadata holds one key of each value type and one array of each element type. All of it is
written by the package, so that the reader is tested against another's writer too.
"""

import sys

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFValueType as V
from gguf import GGUFWriter, GGML_QUANT_SIZES, dequantize, quantize

# Where a block holds f16 numbers: byte offsets.
HALVES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
    T.IQ4_NL: [0], T.IQ4_XS: [0], T.MXFP4: [],
}
BLOCKS = 24

# Scales every format meets: +0, -0, the least and the greatest subnormal number of each sign,
# the least normal, one, the greatest of each sign.
SPECIAL = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF], np.uint16
)


def halves(rng, n):
    """Finite f16 numbers as bits: the special ones, then any."""
    bits = rng.integers(0, 1 << 16, n, dtype=np.uint16)
    bits[(bits & 0x7C00) == 0x7C00] ^= 0x4000
    special = rng.permutation(SPECIAL)[: n // 2]
    bits[: len(special)] = special
    return bits


def blocks(rng, ty):
    size = GGML_QUANT_SIZES[ty][1]
    out = rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
    for at in HALVES[ty]:
        out[:, at : at + 2] = halves(rng, BLOCKS).astype("<u2").view(np.uint8).reshape(BLOCKS, 2)
    if ty == T.MXFP4:  # a byte of exponent: subnormal, greatest, any
        out[:6, 0] = [0, 1, 2, 127, 254, 255]
    return out


def floats(rng):
    """Inputs to quantize: 16 rows of 64 elements at very different magnitudes, and ties."""
    x = rng.standard_normal((16, 64)).astype(np.float32)
    x *= np.float32(10) ** rng.integers(-6, 4, (16, 1)).astype(np.float32)
    x[0] = 0
    x[1] = np.arange(64, dtype=np.float32) - 31.5  # with 127 below: d is 1, halves are ties
    x[1, [0, 32]] = 127
    x[2, :32] = 1e7  # d overflows f16
    x[3] = -0.0
    return x


def begin(path):
    w = GGUFWriter(path, "fixture")
    w.add_uint8("value.u8", 200)
    w.add_int8("value.i8", -100)
    w.add_uint16("value.u16", 60000)
    w.add_int16("value.i16", -30000)
    w.add_uint32("value.u32", 4000000000)
    w.add_int32("value.i32", -2000000000)
    w.add_float32("value.f32", 0.1)
    w.add_bool("value.bool", True)
    w.add_string("value.string", "naïve 猫 🦀")
    w.add_uint64("value.u64", 2**63 + 1)
    w.add_int64("value.i64", -(2**62) - 1)
    w.add_float64("value.f64", 0.1)
    arrays = {
        "u8": (V.UINT8, [0, 1, 255]), "i8": (V.INT8, [-128, 127]),
        "u16": (V.UINT16, [65535, 1]), "i16": (V.INT16, [-32768]),
        "u32": (V.UINT32, [2**32 - 1, 7]), "i32": (V.INT32, [-(2**31), 5]),
        "f32": (V.FLOAT32, [1.5, -0.25]), "bool": (V.BOOL, [True, False, True]),
        "string": (V.STRING, ["", "a", "é\n"]), "u64": (V.UINT64, [2**64 - 1]),
        "i64": (V.INT64, [-(2**63)]), "f64": (V.FLOAT64, [0.1, -2.5]),
    }
    for name, (ty, values) in arrays.items():
        w.add_key_value(f"array.{name}", values, V.ARRAY, sub_type=ty)
    return w


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main(folder):
    rng = np.random.default_rng(20260201)
    w = begin(f"{folder}/blocks.gguf")
    for ty in HALVES:
        raw = blocks(rng, ty)
        w.add_tensor(ty.name, raw, raw_dtype=ty)
        with np.errstate(over="ignore"):  # MXFP4's greatest scale gives infinities
            values = dequantize(raw, ty)
        assert values.dtype == np.float32 and not np.isnan(values).any()
        w.add_tensor(f"{ty.name}.f32", values)
    raw = halves(rng, 256).astype("<u2").reshape(4, 64)
    w.add_tensor("F16", raw.view(np.float16))
    w.add_tensor("F16.f32", dequantize(raw.view(np.float16), T.F16))
    raw = rng.integers(0, 1 << 16, (4, 64), dtype=np.uint16)
    raw[(raw & 0x7F80) == 0x7F80] ^= 0x4000
    w.add_tensor("BF16", raw.view(np.uint8), raw_dtype=T.BF16)
    w.add_tensor("BF16.f32", dequantize(raw.view(np.uint8), T.BF16))

    x = floats(rng)
    w.add_tensor("to.input", x)
    with np.errstate(over="ignore"):
        for ty in (T.Q8_0, T.F16, T.BF16):
            raw = quantize(x, ty)
            w.add_tensor(f"to.{ty.name}", raw.view(np.uint8), raw_dtype=ty)
    finish(w)

    w = begin(f"{folder}/small.gguf")
    for ty in HALVES:
        w.add_tensor(ty.name, blocks(rng, ty)[:1], raw_dtype=ty)
    w.add_tensor("F16", np.ones((2, 3, 4), np.float16))
    w.add_tensor("BF16", np.ones((3, 8), np.uint8), raw_dtype=T.BF16)
    w.add_tensor("I32", np.arange(6, dtype=np.int32).reshape(1, 2, 1, 3))
    w.add_tensor("F32", np.ones(5, np.float32))
    finish(w)


main(sys.argv[1])
