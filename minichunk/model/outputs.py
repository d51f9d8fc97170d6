"""What goes into and comes out of `LLM`: prompts in any form, finished requests, stream events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from minichunk.core.metrics import RequestMetrics
from minichunk.core.request import SamplingParams

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. `text` ends before a stop string; `token_ids` has all tokens drawn.

    `metrics` has ttft, tpot, itl and max_itl in seconds; `note` names the limit that ended the
    request, if one did.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    metrics: RequestMetrics
    note: str = ""


@dataclass(frozen=True)
class StreamEvent:
    """One step of a stream: the text that became certain, and the token that made it so.

    The text can be empty (half a character, or a possible beginning of a stop string). The last
    event has a `finish_reason`; its `token_id` is None if the end came from outside.
    """

    text: str
    token_id: int | None
    finish_reason: str | None = None


class LogitGap(NamedTuple):
    """How close two candidates for a token are: `gap` = logit of a − logit of b."""

    a: int
    b: int
    logit_a: float
    logit_b: float

    @property
    def gap(self) -> float:
        return self.logit_a - self.logit_b


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text or a sequence of numbers is one prompt; everything else a sequence of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    given = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # NumPy's, torch's
    if not isinstance(given, Iterable):
        raise ValueError(f"the prompts must be text, token ids or a list of them, not {prompts!r}")
    each = list(given)
    for prompt in each:
        if prompt is None or isinstance(prompt, float):
            raise ValueError(f"{prompt!r} is neither a prompt nor a token id")
    one = len(each) > 0 and hasattr(each[0], "__index__") and not hasattr(each[0], "__len__")
    return [cast(Prompt, each)] if one else cast("list[Prompt]", each)


def params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """One SamplingParams for each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise TypeError(
            f"params={params!r}: give SamplingParams, e.g. SamplingParams(max_tokens=16), for all "
            "prompts, or a list with one for each"
        )
    if len(params) != len(prompts):
        raise ValueError(
            f"{len(prompts)} prompts but {len(params)} sampling parameters: give one for all, or "
            "one for each prompt"
        )
    return list(params)
