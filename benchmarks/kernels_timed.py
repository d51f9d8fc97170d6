"""Each kernel timed on a GPU: against its floor, and against torch's attention beside it.

Run by `python -m benchmarks.kernels`. The floor is the larger of bytes / measured copy bandwidth
and FLOPs / measured matrix product rate. Every output is compared with torch's before it is timed.
Shapes are Llama-3-8B's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import scaled_dot_product_attention

from minichunk.kernels._triton import INTERPRETED
from minichunk.kernels.attention import AttentionMetadata, paged_attention
from minichunk.kernels.rms_norm import rms_norm
from minichunk.kernels.rope import rope_and_cache
from minichunk.kernels.sampling import greedy, gumbel_sample
from minichunk.kernels.swiglu import swiglu

NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, HIDDEN, FEED_FORWARD, VOCAB = 8, 4, 128, 4096, 14336, 128256
SCALE = HEAD_DIM**-0.5
HEADER = ("ms", "limited by", "of the floor's rate", "beside it, ms")


@dataclass(frozen=True)
class Machine:
    """Where it runs, and the two rates measured there (unknown on a CPU, in a dry run)."""

    device: torch.device
    dtype: torch.dtype
    bytes_per_second: float
    flops_per_second: float

    @classmethod
    def measure(cls, device: torch.device) -> Machine:
        if device.type == "cpu":
            return cls(device, torch.float32, float("inf"), float("inf"))
        source = torch.empty(2**30, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = 2 * source.numel() / (milliseconds(lambda: target.copy_(source)) / 1e3)
        a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
        product = 2 * 8192**3 / (milliseconds(lambda: a @ a) / 1e3)
        return cls(device, torch.bfloat16, copy, product)


@dataclass(frozen=True)
class Row:
    """One measurement, in milliseconds; `beside` holds others' times, or why there is none."""

    what: str
    ours: float
    num_bytes: float
    flops: float = 0.0
    beside: dict[str, float | str] = field(default_factory=dict)

    def cells(self, machine: Machine) -> tuple[str, ...]:
        if machine.device.type == "cpu":
            return (self.what, *["not timed"] * len(HEADER))
        memory = self.num_bytes / machine.bytes_per_second * 1e3
        compute = self.flops / machine.flops_per_second * 1e3
        limit = "bytes" if memory >= compute else "FLOPs"
        others = [
            f"{name} {value if isinstance(value, str) else f'{value:.4f}'}"
            for name, value in self.beside.items()
        ]
        share = max(memory, compute) / self.ours
        return (self.what, f"{self.ours:.4f}", limit, f"{share:.0%}", "; ".join(others) or "-")


def milliseconds(run: Callable[[], object]) -> float:
    """Median time of a launch with a cold L2 cache (dry run: one run of wall time)."""
    if INTERPRETED:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e3
    from triton.testing import do_bench

    return float(do_bench(run, warmup=25, rep=100, return_mode="median"))


@dataclass(frozen=True)
class Paged:
    """A batch in the paged cache, and each sequence's keys and values contiguous beside it."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def random(cls, machine: Machine, lengths: list[tuple[int, int]], block_size: int) -> Paged:
        """`lengths`: (query tokens, tokens computed before) of each sequence; shuffled blocks."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=machine.dtype, device=machine.device)

        seq_lens = [new + before for new, before in lengths]
        counts = [-(-length // block_size) for length in seq_lens]
        order = torch.randperm(sum(counts)).split(counts)
        cache_shape = (sum(counts), block_size, NUM_KV_HEADS, HEAD_DIM)
        k_cache, v_cache = normal(*cache_shape), normal(*cache_shape)
        starts = [0]
        for new, _ in lengths:
            starts.append(starts[-1] + new)
        tables = [table.tolist() for table in order]
        metadata = AttentionMetadata.build(starts, seq_lens, tables, block_size, machine.device)

        def contiguous(cache: Tensor) -> list[Tensor]:
            """[1, num_kv_heads, seq_len, head_dim] of each sequence."""
            return [
                cache[table.to(machine.device)].flatten(0, 1)[:length].transpose(0, 1)[None]
                for table, length in zip(order, seq_lens, strict=True)
            ]

        q = normal(starts[-1], NUM_KV_HEADS * GROUP_SIZE, HEAD_DIM)
        return cls(q, k_cache, v_cache, metadata, contiguous(k_cache), contiguous(v_cache))

    def ours(self) -> Tensor:
        arguments = (self.q, self.k_cache, self.v_cache, self.metadata, SCALE)
        return paged_attention(*arguments, backend="triton")

    @property
    def num_bytes(self) -> float:
        """Keys and values once, queries in and out."""
        kv_bytes = sum(k.numel() + v.numel() for k, v in zip(self.keys, self.values, strict=True))
        return (kv_bytes + 2 * self.q.numel()) * self.q.element_size()

    @property
    def flops(self) -> float:
        """Two products of 2 · head_dim FLOPs for each query head and visible (query, key) pair."""
        total = 0.0
        starts = self.metadata.cu_seqlens_q.tolist()
        for seq, length in enumerate(self.metadata.seq_lens.tolist()):
            new = starts[seq + 1] - starts[seq]
            total += new * (length - new) + new * (new + 1) / 2
        return 4 * self.q.shape[1] * HEAD_DIM * total


def check(what: str, ours: Tensor, theirs: Tensor) -> None:
    """Raises where two implementations disagree: a fast wrong kernel is not worth timing."""
    error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
    if not error < 1e-2:
        raise AssertionError(f"{what}: outputs differ by {error:.2%}")


def decode(machine: Machine, batches: list[int], contexts: list[int]) -> Iterator[Row]:
    """Decode steps, against SDPA on contiguous keys of equal length."""
    for batch_size in batches:
        for context in contexts:
            what = f"decode, batch {batch_size}, context {context}"
            kv_bytes = 2 * batch_size * context * NUM_KV_HEADS * HEAD_DIM * machine.dtype.itemsize
            needed = 3 * kv_bytes  # paged, contiguous, and contiguous as one batch
            if machine.device.type == "cuda" and needed > 0.8 * torch.cuda.mem_get_info()[0]:
                print(f"{what}: left out, {needed / 2**30:.0f} GiB do not fit", file=sys.stderr)
                continue
            paged = Paged.random(machine, [(1, context - 1)] * batch_size, block_size=16)
            keys, values = torch.cat(paged.keys), torch.cat(paged.values)
            sdpa = sdpa_function(paged.q[:, :, None], keys, values)
            check(what, paged.ours(), sdpa()[:, :, 0])
            times: dict[str, float | str] = {"SDPA, contiguous": milliseconds(sdpa)}
            yield Row(what, milliseconds(paged.ours), paged.num_bytes, paged.flops, times)
            del paged, keys, values, sdpa  # before the next, larger one is made


def sdpa_function(q: Tensor, k: Tensor, v: Tensor, mask: object = None) -> Callable[[], Tensor]:
    return lambda: scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,  # type: ignore[arg-type]
        scale=SCALE,
        enable_gqa=True,
    )


def chunk(
    machine: Machine, sizes: list[int], prefixes: list[int], block_sizes: list[int]
) -> Iterator[Row]:
    """One chunk at a prefix, against SDPA on contiguous keys, and FlexAttention over the blocks."""
    for size in sizes:
        for prefix in prefixes:
            for block_size in block_sizes:
                what = f"chunk {size}, prefix {prefix}, block {block_size}"
                paged = Paged.random(machine, [(size, prefix)], block_size)
                q = paged.q.transpose(0, 1)[None].contiguous()
                mask = causal_lower_right(size, size + prefix)
                sdpa = sdpa_function(q, paged.keys[0], paged.values[0], mask)
                check(what, paged.ours(), sdpa()[0].transpose(0, 1))
                times: dict[str, float | str] = {"SDPA, contiguous": milliseconds(sdpa)}
                if block_size == max(block_sizes):
                    times["FlexAttention, paged"] = flex_time(what, paged, q)
                yield Row(what, milliseconds(paged.ours), paged.num_bytes, paged.flops, times)


def flex_time(what: str, paged: Paged, q: Tensor) -> float | str:
    """Time of FlexAttention with a block mask that undoes the block table; or why it did not run.

    A mask needs blocks of 128 keys to skip any, so only block tables of such blocks are tried.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_size, num_queries = paged.metadata.block_size, q.shape[2]
    first_position = paged.metadata.max_seq_len - num_queries
    table = paged.metadata.block_tables[0].long()
    logical_block = torch.empty_like(table)
    logical_block[table] = torch.arange(len(table), device=table.device)

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        position = logical_block[slot // block_size] * block_size + slot % block_size
        return position <= query + first_position

    try:
        keys, values = (
            cache.flatten(0, 1).transpose(0, 1)[None] for cache in (paged.k_cache, paged.v_cache)
        )
        shape = (None, None, num_queries, keys.shape[2])
        mask = create_block_mask(
            is_visible, *shape, device=str(q.device), BLOCK_SIZE=(128, block_size)
        )
        attend = torch.compile(flex_attention) if q.is_cuda else flex_attention

        def run() -> Tensor:
            out = attend(q, keys, values, block_mask=mask, scale=SCALE, enable_gqa=True)
            assert isinstance(out, Tensor)
            return out

        check(f"{what} (FlexAttention)", run()[0].transpose(0, 1), paged.ours())
        return milliseconds(run)
    except (RuntimeError, ValueError, torch._dynamo.exc.TorchDynamoException) as error:
        return f"did not run ({type(error).__name__}: {str(error).splitlines()[0][:60]})"


def mixed(machine: Machine, size: int, prefix: int, decodes: list[int]) -> Iterator[Row]:
    """A chunk and decodes in one launch, against the two apart."""
    for count in decodes:
        what = f"mixed: chunk {size} at {prefix}, {count} decodes at {prefix // 2}"
        decode_lengths = [(1, prefix // 2)] * count
        together = Paged.random(machine, [(size, prefix), *decode_lengths], 16)
        alone = Paged.random(machine, [(size, prefix)], 16)
        decoding = Paged.random(machine, decode_lengths, 16)
        apart = milliseconds(alone.ours) + milliseconds(decoding.ours)
        times: dict[str, float | str] = {"two launches": apart}
        yield Row(what, milliseconds(together.ours), together.num_bytes, together.flops, times)


def small(machine: Machine, tokens: list[int]) -> Iterator[Row]:
    """The operations that only move memory, against torch's own functions."""
    for count in tokens:
        yield rms_norm_row(machine, count)
        yield swiglu_row(machine, count)
        yield rope_row(machine, count)
        yield from sampling_rows(machine, min(count, 256))


def against(
    what: str, num_bytes: float, ours: Callable[[], Tensor], torch_own: Callable[[], Tensor]
) -> Row:
    check(what, ours(), torch_own())
    return Row(what, milliseconds(ours), num_bytes, beside={"torch": milliseconds(torch_own)})


def rms_norm_row(machine: Machine, count: int) -> Row:
    x = torch.randn(count, HIDDEN, dtype=machine.dtype, device=machine.device)
    weight = torch.rand(HIDDEN, dtype=machine.dtype, device=machine.device)
    return against(
        f"RMS norm with residual, {count} tokens",
        4 * x.numel() * x.element_size(),
        lambda: rms_norm(x, weight, 1e-5, x, backend="triton")[0],
        lambda: torch_rms_norm(x + x, (HIDDEN,), weight, 1e-5),
    )


def swiglu_row(machine: Machine, count: int) -> Row:
    gate_up = torch.randn(count, 2 * FEED_FORWARD, dtype=machine.dtype, device=machine.device)
    return against(
        f"SwiGLU, {count} tokens",
        1.5 * gate_up.numel() * gate_up.element_size(),
        lambda: swiglu(gate_up, backend="triton"),
        lambda: swiglu(gate_up),
    )


def rope_row(machine: Machine, count: int) -> Row:
    heads = NUM_KV_HEADS * (GROUP_SIZE + 2)
    qkv = torch.randn(count, heads, HEAD_DIM, dtype=machine.dtype, device=machine.device)
    q, k, v = qkv.split([heads - 2 * NUM_KV_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    angles = torch.rand(count, HEAD_DIM // 2, device=machine.device)
    cos, sin = angles.cos(), angles.sin()
    cache = torch.zeros(-(-count // 16), 16, NUM_KV_HEADS, HEAD_DIM).to(machine.device, q.dtype)
    caches = (cache, cache.clone())
    slots = torch.randperm(count, device=machine.device)

    def run(backend: str) -> Tensor:
        return rope_and_cache(q, k, v, cos, sin, *caches, slots, backend=backend)

    num_bytes = 2 * qkv.numel() * qkv.element_size() + 2 * angles.numel() * 4
    what = f"RoPE and cache write, {count} tokens"
    return against(what, num_bytes, lambda: run("triton"), lambda: run("torch"))


def sampling_rows(machine: Machine, count: int) -> Iterator[Row]:
    logits = torch.randn(count, VOCAB, dtype=machine.dtype, device=machine.device)
    numbers = torch.arange(count, device=machine.device)
    random = (torch.ones(count, device=machine.device), numbers, numbers)
    num_bytes = logits.numel() * logits.element_size()
    yield against(
        f"greedy sampling, {count} rows",
        num_bytes,
        lambda: greedy(logits, backend="triton"),
        lambda: greedy(logits),
    )
    yield against(
        f"Gumbel sampling, {count} rows",
        num_bytes,
        lambda: gumbel_sample(logits, *random, backend="triton"),
        lambda: gumbel_sample(logits, *random),
    )


def sections(machine: Machine, dry_run: bool) -> dict[str, Iterator[Row]]:
    if dry_run:
        return {
            "decode": decode(machine, [1, 2], [20]),
            "chunk": chunk(machine, [5], [0, 20], [16, 128]),
            "mixed": mixed(machine, 5, 20, [2]),
            "small": small(machine, [2]),
        }
    return {
        "decode": decode(machine, [1, 4, 16, 32, 64, 128, 256], [512, 2048, 4096, 8192, 32768]),
        "chunk": chunk(machine, [512, 2048], [0, 2048, 8192, 32768], [16, 64, 128]),
        "mixed": mixed(machine, 2048, 8192, [8, 32, 128]),
        "small": small(machine, [1, 32, 256, 2048]),
    }
