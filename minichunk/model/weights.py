"""Weights: where tensors come from, and how they become the fused matrices of the decoder.

A source only knows names, shapes and tensors (a safetensors folder, a GGUF file, random numbers);
`load_weights` checks them against the configuration and fuses. Fusing q, k and v into one product,
and gate and up into another, halves the number of matrix products of a layer: at the few rows of a
decode step each product costs a read of its weights and a launch, and little else.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from minichunk.model.config import ModelConfig, one_line
from minichunk.model.errors import ModelError
from minichunk.model.linear import GatedLinear, Linear

# Stored by some checkpoints although they follow from the configuration.
IGNORED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "masked_bias")


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Rows of `qkv`: q heads, k heads, v heads."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: GatedLinear
    down: Linear


@dataclass(frozen=True)
class DecoderWeights:
    """All weights. `embedding` [vocab_size, hidden_size]; a tied `lm_head` shares its memory."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear


class TensorSource(Protocol):
    """Tensors by their Hugging Face names, read one at a time."""

    description: str

    def names(self) -> set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def get(self, name: str) -> Tensor: ...


class SafetensorsFolder:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` lists."""

    def __init__(self, folder: str | Path) -> None:
        self.description = str(folder)
        self._handles: dict[str, Any] = {}
        single, index = (
            Path(folder, "model.safetensors"),
            Path(folder, "model.safetensors.index.json"),
        )
        if single.exists():
            handle = open_safetensors(single)
            self._handles = dict.fromkeys(handle.keys(), handle)
        elif index.exists():
            self._open_shards(index)
        else:
            raise ModelError(
                f"{folder} holds no model.safetensors and no model.safetensors.index.json "
                "(pickled weights such as pytorch_model.bin are never read)"
            )

    def _open_shards(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shard_names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not a usable index: {one_line(error)}") from None
        if any(Path(name).name != name for name in shard_names):
            raise ModelError(f"{index} points outside its folder")
        for shard in shard_names:
            handle = open_safetensors(index.parent / shard)
            self._handles.update(dict.fromkeys(handle.keys(), handle))

    def names(self) -> set[str]:
        return set(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def get(self, name: str) -> Tensor:
        try:
            return self._handles[name].get_tensor(name)
        except Exception as error:
            raise ModelError(
                f"tensor {name} of {self.description} cannot be read: {one_line(error)}"
            ) from None


def open_safetensors(path: Path) -> Any:
    """Open one file; a missing or damaged one is a ModelError that names it."""
    from safetensors import safe_open

    if not path.exists():
        raise ModelError(f"{path} is missing")
    try:
        return safe_open(str(path), framework="pt")
    except Exception as error:  # the library's own error types differ between versions
        raise ModelError(
            f"{path} is damaged or not a safetensors file: {one_line(error)}"
        ) from None


class RandomTensors:
    """Seeded random weights: nonsense as text, but shapes, memory and time are the real ones.

    Each tensor depends on the seed and its own name only, so the order of reading does not matter.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.description = f"random weights (seed {seed})"
        self._shapes = expected_shapes(config)
        self._deviation = config.initializer_range
        self._seed = seed

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        # A hash of both, since torch's CPU generator looks at the lower 32 bits of a seed only.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        return torch.randn(shape, generator=generator) * self._deviation


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The Hugging Face name and shape of every tensor that this model must have."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    query, kv = config.query_size, config.kv_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    projections = (
        ("self_attn.q_proj", query, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, query, config.output_bias),
        ("mlp.gate_proj", ffn, hidden, config.mlp_bias),
        ("mlp.up_proj", ffn, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, ffn, config.mlp_bias),
    )
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, has_bias in projections:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def check_source(source: TensorSource, config: ModelConfig) -> None:
    """Raise one ModelError that names all tensors which are missing, unknown or mis-shaped."""
    expected, found = expected_shapes(config), source.names()
    surplus = {name for name in found - set(expected) if not name.endswith(IGNORED)}
    if config.tie_word_embeddings:
        surplus.discard("lm_head.weight")
    wrong = []
    for name in sorted(found & set(expected)):
        shape = source.shape(name)
        if shape != expected[name]:
            wrong.append(f"{name} is {list(shape)} instead of {list(expected[name])}")
    complaints = [
        f"{kind}: {some(names)}"
        for kind, names in (
            ("missing", set(expected) - found),
            ("unexpected", surplus),
            ("mis-shaped", wrong),
        )
        if names
    ]
    if complaints:
        raise ModelError(
            f"the weights of {source.description} do not fit the configuration; "
            + "; ".join(complaints)
        )


def some(names: Iterable[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    rest = len(ordered) - limit
    return ", ".join(ordered[:limit]) + (f" and {rest} more" if rest > 0 else "")


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    packed: bool = False,
    activates: bool = False,
) -> DecoderWeights:
    """Read, check and fuse all weights, straight onto the device in `dtype`.

    Only one unfused tensor is on the host at a time. `packed` asks for the layout that the CPU's
    matrix products like best, `activates` for products that do the MLP's activation (`linear.py`).

    Raises:
        ModelError: tensors that are missing, unexpected, mis-shaped or unreadable, by name.
    """
    check_source(source, config)

    def fused(names: Sequence[str], suffix: str) -> Tensor:
        shapes = [source.shape(f"{name}.{suffix}") for name in names]
        rows = [shape[0] for shape in shapes]
        out = torch.empty((sum(rows), *shapes[0][1:]), device=device, dtype=dtype)
        for name, part in zip(names, out.split(rows), strict=True):
            part.copy_(source.get(f"{name}.{suffix}"))
        return out

    def parts(prefix: str, *names: str, bias: bool) -> tuple[Tensor, Tensor | None]:
        full = [prefix + name for name in names]
        return fused(full, "weight"), fused(full, "bias") if bias else None

    def linear(prefix: str, *names: str, bias: bool) -> Linear:
        return Linear(*parts(prefix, *names, bias=bias), packed=packed)

    def gated(prefix: str, gate: str, up: str, *, bias: bool) -> GatedLinear:
        return GatedLinear(*parts(prefix, gate, up, bias=bias), packed=packed, activates=activates)

    layers = []
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        layers.append(
            LayerWeights(
                input_norm=fused([layer + "input_layernorm"], "weight"),
                qkv=linear(attention, "q_proj", "k_proj", "v_proj", bias=config.qkv_bias),
                q_norm=fused([attention + "q_norm"], "weight") if config.qk_norm else None,
                k_norm=fused([attention + "k_norm"], "weight") if config.qk_norm else None,
                output=linear(attention, "o_proj", bias=config.output_bias),
                mlp_norm=fused([layer + "post_attention_layernorm"], "weight"),
                gate_up=gated(mlp, "gate_proj", "up_proj", bias=config.mlp_bias),
                down=linear(mlp, "down_proj", bias=config.mlp_bias),
            )
        )
    embedding = fused(["model.embed_tokens"], "weight")
    head = embedding if config.tie_word_embeddings else fused(["lm_head"], "weight")
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=fused(["model.norm"], "weight"),
        lm_head=Linear(head, packed=packed),
    )
