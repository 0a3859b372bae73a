#!/usr/bin/env python3
"""Writes the Parquet files of this folder, with the rows of rows.json, as pyarrow writes them.

    pip install pyarrow==26.0.1
    python make_parquet.py
"""
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
ROWS = json.loads((HERE / "rows.json").read_text())

message = pa.struct([("role", pa.string()), ("content", pa.string()), ("train", pa.bool_()),
                     ("weight", pa.float32())])
schemas = {
    "messages": pa.schema([("id", pa.int64()), ("messages", pa.list_(message))]),
    "prompt": pa.schema([("prompt", pa.string()), ("completion", pa.string()),
                         ("made", pa.timestamp("ms")), ("score", pa.float64())]),
    "text": pa.schema([("text", pa.large_string()), ("tags", pa.list_(pa.string()))]),
}
for name, compression in [("messages", "snappy"), ("prompt", "zstd"), ("text", "gzip")]:
    table = pa.Table.from_pylist(ROWS[name], schema=schemas[name])
    pq.write_table(table, HERE / f"{name}.parquet", compression=compression, row_group_size=2)

# Compressions that are rarer, and what no row may be learned from.
table = pa.Table.from_pylist(ROWS["text"], schema=schemas["text"])
for compression in ["lz4", "brotli"]:
    pq.write_table(table, HERE / f"text.{compression}.parquet", compression=compression,
                   row_group_size=2)
odd = pa.struct([("role", pa.string()), ("content", pa.binary()), ("weight", pa.float32())])
rows = [
    [("user", b"a", None), ("assistant", b"b", 1.0)],
    [("user", b"\xff\xfe", None), ("assistant", b"b", 1.0)],
    [("user", b"a", None), ("assistant", b"b", float("nan"))],
]
rows = [{"messages": [dict(zip(("role", "content", "weight"), m)) for m in row]} for row in rows]
table = pa.Table.from_pylist(rows, schema=pa.schema([("messages", pa.list_(odd))]))
pq.write_table(table, HERE / "odd.parquet")
