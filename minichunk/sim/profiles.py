"""Reads published profiles of single layers as measurements that a cost model can be fitted to.

A profile times the parts of one layer on one GPU over many shapes, which is what a fit needs: the
time of whole steps would leave open which part is to blame.
"""

from __future__ import annotations

import csv
import os

from minichunk.sim.calibrate import Measurement
from minichunk.sim.counter import StepLoad
from minichunk.sim.hardware import GPU, get_gpu
from minichunk.sim.shapes import ModelShape


def read_linear_layers(path: str | os.PathLike[str]) -> list[Measurement]:
    """Rows of a linear-layer profile: columns device, tp, num_tokens, n_embd, ffn, n_head,
    n_kv_head, linear_ms_per_layer and all_nonattn_ms_per_layer (milliseconds)."""
    rows = []
    for row in _rows(path):
        hidden, heads = int(row["n_embd"]), int(row["n_head"])
        shape = one_layer(hidden, heads, int(row["n_kv_head"]), hidden // heads, int(row["ffn"]))
        gpu = get_gpu(
            {"a100": "a100-80g-pcie", "h100": "h100-sxm"}.get(row["device"], row["device"])
        )
        load = StepLoad(int(row["num_tokens"]), 0)
        linear, total = float(row["linear_ms_per_layer"]), float(row["all_nonattn_ms_per_layer"])
        split = int(row["tp"])
        rows.append(Measurement("linear", shape, gpu, load, linear / 1e3, split))
        rows.append(Measurement("elementwise", shape, gpu, load, (total - linear) / 1e3, split))
    return rows


def read_attention(path: str | os.PathLike[str], gpu: str | GPU) -> list[Measurement]:
    """Rows of an attention profile: columns phase, batch_size, chunk_tokens, kv_prefix_tokens,
    median_ms_per_layer (milliseconds), q_heads, kv_heads, head_dim."""
    rows = []
    for row in _rows(path):
        heads, head_dim = int(row["q_heads"]), int(row["head_dim"])
        shape = one_layer(
            heads * head_dim, heads, int(row["kv_heads"]), head_dim, 4 * heads * head_dim
        )
        batch, chunk = int(row["batch_size"]), int(row["chunk_tokens"])
        load = attention_load(row["phase"], batch, chunk, int(row["kv_prefix_tokens"]))
        seconds = float(row["median_ms_per_layer"]) / 1e3
        rows.append(Measurement(f"{row['phase']}_attention", shape, get_gpu(gpu), load, seconds))
    return rows


def attention_load(phase: str, batch: int, chunk: int, prefix: int) -> StepLoad:
    """`batch` equal sequences with `prefix` tokens in the cache and `chunk` new ones each."""
    if phase == "decode":
        return StepLoad(batch, batch, num_decodes=batch, decode_context=batch * (prefix + 1))
    rows = batch * chunk
    return StepLoad(rows, 0, rows, rows * (prefix + (chunk + 1) / 2), batch * (prefix + chunk))


def one_layer(hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int) -> ModelShape:
    """A shape for profiles of a single layer."""
    return ModelShape("layer", "one layer", 1, hidden, heads, kv_heads, head_dim, ffn, hidden)


def _rows(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))
