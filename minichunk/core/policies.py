"""Policies: how a step's token budget is shared between decodes and prefills.

A policy is a generator, called anew for each step. It yields offers (a request and a number of
tokens) and is told what the mechanism could grant. All the field's disagreements about continuous
batching, chunked prefill and SplitFuse fit into these few loops.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from minichunk.core.plan import Offer
from minichunk.core.request import Request
from minichunk.core.view import StepView

Offers = Generator[Offer | tuple[Request, int], Any, None]  # is sent the tokens granted


class PolicyError(RuntimeError):
    """A policy or an order broke a rule of the mechanism; the message names it and the rule."""


@dataclass(frozen=True)
class Policy:
    """A named offer generator with its parameters bound.

    Called with a view it yields offers, so policies can be built from others with `yield from`;
    called with keywords alone it returns a copy with those parameters.
    """

    name: str
    function: Callable[..., Offers]
    parameters: dict[str, Any] = field(default_factory=dict)

    def __call__(self, view: StepView | None = None, /, **parameters: Any) -> Any:
        known = list(inspect.signature(self.function).parameters)[1:]
        unknown = sorted(set(parameters) - set(known))
        if unknown:
            raise ValueError(
                f"policy {self.name!r} has no parameter {', '.join(unknown)}; "
                f"it has {', '.join(known) or 'none'}"
            )
        check_kinds(f"policy {self.name!r}", self.function, parameters)
        bound = {**self.parameters, **parameters}
        if view is not None:
            return self.function(view, **bound)
        return Policy(self.name, self.function, bound)

    def __str__(self) -> str:
        return spell(self.name, self.parameters)

    def __reduce__(self) -> tuple[Any, ...]:
        """A registered policy is pickled by name: in its module, its function's name is itself."""
        known = REGISTRY.get(self.name)
        if known is not None and known.function is self.function:
            return _registered, (self.name, self.parameters)
        return Policy, (self.name, self.function, self.parameters)


REGISTRY: dict[str, Policy] = {}


def policy(name: str) -> Callable[[Callable[..., Offers]], Policy]:
    """Register a generator function as a policy: `@policy("mine") def mine(view): ...`."""

    def register(function: Callable[..., Offers]) -> Policy:
        REGISTRY[name] = Policy(name, function)
        return REGISTRY[name]

    return register


def resolve_policy(choice: str | Policy | Callable[..., Offers]) -> Policy:
    """A policy from its name, `"name(parameter=value)"`, a Policy or a generator function."""
    if isinstance(choice, Policy):
        return choice
    if isinstance(choice, str):
        name, parameters = parse_spelling(choice)
        if name not in REGISTRY:
            raise ValueError(f"unknown policy {name!r}; known: {', '.join(sorted(REGISTRY))}")
        return REGISTRY[name](**parameters)
    if callable(choice):
        return Policy(getattr(choice, "__name__", "policy"), choice)
    raise ValueError(f"policy={choice!r} must be a name, a Policy or a generator function")


def _registered(name: str, parameters: dict[str, Any]) -> Policy:
    return Policy(name, resolve_policy(name).function, parameters)


def check_kinds(owner: str, function: Callable[..., Any], parameters: dict[str, Any]) -> None:
    """Refuse, before a step meets it, a value that is no number where the default is one."""
    for name, parameter in inspect.signature(function).parameters.items():
        value, default = parameters.get(name, parameter.default), parameter.default
        if isinstance(default, (int, float)) and not isinstance(value, Real):
            raise ValueError(f"{owner}: {name}={value!r} must be a number")


def spell(name: str, parameters: dict[str, Any]) -> str:
    """`balanced(share=0.3)`: the spelling that `parse_spelling` reads back."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
    return f"{name}({arguments})" if arguments else name


def parse_spelling(text: str) -> tuple[str, dict[str, Any]]:
    """Split `"name(key=value, ...)"`; values are Python literals or `inf`."""
    name, bracket, rest = text.strip().partition("(")
    if not bracket:
        return name, {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("only keyword arguments are allowed")
        return name.strip(), {str(key.arg): _literal(key.value) for key in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{text!r} is not of the form name(key=value, ...): {error}") from None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id == "inf":
        return float("inf")
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)} is not a value") from None


@policy("static")
def static(view: StepView) -> Offers:
    """Fill a batch over as many steps as its prompts need; then nobody joins until all have ended.

    What every framework did before Orca (Yu et al., OSDI 2022).
    """
    if not view.running:
        view.state["batch_open"] = True
    prompts = view.prefilling if view.state.get("batch_open") else view.unfinished
    prefilled = 0
    for request in prompts:
        prefilled += yield request, request.num_uncomputed_tokens
    if view.budget > 0:  # budget is left, so nobody else could join
        view.state["batch_open"] = False
    if not prefilled:
        for request in view.decoding:
            yield request, 1


@policy("continuous")
def continuous(view: StepView) -> Offers:
    """Iteration-level batching with whole prompts; prefill and decode never share a step.

    The baseline that stalls: while a prompt of 8,000 tokens runs, nobody decodes (Orca's idea as
    TGI and early vLLM served it).
    """
    prefilled = 0
    for request in view.prefilling:
        prefilled += yield Offer(request, request.num_uncomputed_tokens, whole=True)
    if not prefilled:
        for request in view.decoding:
            yield request, 1


@policy("decode-first")
def decode_first(view: StepView) -> Offers:
    """Every decode gets its token; prompts get chunks of what is left.

    Stall-free batching (Sarathi-Serve, Agrawal et al., OSDI 2024) and vLLM's default.
    """
    for request in view.decoding:
        yield request, 1
    for request in view.prefilling:
        yield request, request.num_uncomputed_tokens


@policy("prefill-first")
def prefill_first(view: StepView) -> Offers:
    """Prompts get the budget, decodes what is left: the earliest first tokens, the worst gaps."""
    for request in view.prefilling:
        yield request, request.num_uncomputed_tokens
    yield from _decode_in_turns(view)


@policy("balanced")
def balanced(view: StepView, share: float = 0.5) -> Offers:
    """While both kinds have work, prefill gets at most `share` of the budget and decodes the rest.

    A side without work leaves its share to the other.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"balanced(share={share}): share must be between 0 and 1")
    left = view.budget
    if view.decoding:
        left = max(1, min(left - 1, int(share * view.max_num_batched_tokens)))
    for request in view.prefilling:
        if left < 1:
            break
        left -= yield request, min(request.num_uncomputed_tokens, left)
    yield from _decode_in_turns(view)


@policy("alternating")
def alternating(view: StepView) -> Offers:
    """A step of prompt chunks, then a step of decodes: chunks without mixing.

    The "chunked-prefills-only" row of Sarathi-Serve's ablation (Table 4).
    """
    kinds = ["decode", "prefill"] if view.state.get("last") == "prefill" else ["prefill", "decode"]
    for kind in kinds:
        granted = 0
        if kind == "decode":
            for request in view.decoding:
                granted += yield request, 1
        else:
            for request in view.prefilling:
                granted += yield request, request.num_uncomputed_tokens
        if granted:
            view.state["last"] = kind
            return


@policy("split-fuse")
def split_fuse(
    view: StepView, target: int | None = None, context_per_token: float | None = None
) -> Offers:
    """Dynamic SplitFuse: each step does the same *work*, so prompts get less as decodes do more.

    A decode weighs 1 + context / `context_per_token`; prompts are cut so that the weights meet
    `target` (the budget unless given) exactly. Infinity is FastGen's own rule, tokens alone
    (DeepSpeed-FastGen, Holmes et al., 2024); the default is the context length whose KV reads cost
    as much as one token's share of the matrix products, by the cost model of the executor.
    """
    per_token = view.context_per_token if context_per_token is None else context_per_token
    if not per_token > 0 or (target is not None and target < 1):
        raise ValueError(
            f"split-fuse(target={target}, context_per_token={per_token}): both must be positive"
        )
    weight_left = float(view.max_num_batched_tokens if target is None else target)
    for request in view.decoding:
        granted = yield request, 1
        weight_left -= granted * (1.0 + request.num_computed_tokens / per_token)
    for request in view.prefilling:
        if weight_left < 1.0 and view.num_scheduled_tokens:
            break
        n = max(1, min(request.num_uncomputed_tokens, int(weight_left)))
        weight_left -= yield request, n


def _decode_in_turns(view: StepView) -> Offers:
    """One token for each decode, the longest unserved first: a budget that is short goes round."""
    before = view.state.get("latest_token", {})
    latest = {r.request_id: before.get(r.request_id, view.step) for r in view.decoding}
    for request in sorted(view.decoding, key=lambda r: latest[r.request_id]):
        if (yield request, 1):
            latest[request.request_id] = view.step + 1
    view.state["latest_token"] = latest
