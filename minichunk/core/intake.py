"""What the engine refuses at its door, and in which words.

A request that could never be served must not enter: it would wait forever, or fail in the middle of
a step that it shares with others. Each refusal is a `ValueError` with the numbers that clash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from operator import index
from typing import Any

from minichunk.core.config import EngineConfig
from minichunk.core.kv_cache import BlockPool
from minichunk.core.request import Prompt, PromptShape, Request, plain_number

_LARGEST_TOKEN_ID = 2**31 - 1  # where no vocabulary is known


def read_prompt(prompt: Iterable[Any] | PromptShape, vocab_size: int | None) -> Prompt:
    """The prompt as a tuple of plain ints; lists, NumPy arrays and tensors are all welcome."""
    if isinstance(prompt, PromptShape):
        return prompt
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"the prompt must be token ids or a PromptShape, not {prompt!r}")
    token_ids = tuple(_token_id(token, position) for position, token in enumerate(given))
    limit = _LARGEST_TOKEN_ID + 1 if vocab_size is None else vocab_size
    if token_ids and max(token_ids) >= limit:
        position = next(i for i, token in enumerate(token_ids) if token >= limit)
        raise ValueError(
            f"prompt token {token_ids[position]} at position {position} is outside the vocabulary "
            f"of {limit}: was it encoded for another model?"
        )
    return token_ids


def _token_id(token: Any, position: int) -> int:
    try:
        number = index(token)
    except TypeError:
        number = -1
    if number < 0 or token is True or token is False:
        raise ValueError(f"prompt token {token!r} at position {position} is not a token id")
    return number


def check_numbers(request: Request) -> None:
    """Refuse times and priorities that cannot be compared, and names that are not text."""
    for name in ("queue_timeout", "timeout"):
        limit = getattr(request, name)
        if limit is None:
            continue
        limit = plain_number(name, limit)
        if not limit >= 0:
            raise ValueError(f"{name}={limit} must be 0 or more seconds")
        setattr(request, name, limit)
    for name in ("arrival_time", "priority"):
        value = getattr(request, name)
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{name}={value!r} must be a finite number")
        setattr(request, name, plain_number(name, value))  # the trace is written as JSON
    for name in ("request_id", "tenant"):
        value = getattr(request, name)
        if not isinstance(value, str):
            raise ValueError(f"{name}={value!r} must be a string")


def refuse_impossible(request: Request, config: EngineConfig, pool: BlockPool) -> None:
    """Refuse prompts that are empty or longer than the model or the block pool can ever hold."""
    length = request.num_prompt_tokens
    if length < 1:
        raise ValueError("the prompt is empty: give at least one token")
    if config.max_model_len is not None and length >= config.max_model_len:
        raise ValueError(
            f"the prompt has {length} tokens, but max_model_len={config.max_model_len} leaves "
            "no room for an output: shorten it or raise max_model_len"
        )
    if pool.blocks_for(length) > pool.num_blocks:
        raise ValueError(
            f"the prompt has {length} tokens and needs {pool.blocks_for(length)} blocks of "
            f"block_size={pool.block_size}, but the pool has num_blocks={pool.num_blocks}: "
            "shorten it or raise num_blocks"
        )
