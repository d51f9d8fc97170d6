"""Orders: who goes first, and who is preempted.

An order is a small class that the mechanism asks for keys; it never touches blocks or budgets.
Here are first come first served, priorities with ageing, fair sharing by virtual token counters,
shortest predicted job first and least slack first. Any order goes with any policy.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import ClassVar, ParamSpec, TypeVar

from minichunk.core.policies import PolicyError, check_kinds, parse_spelling, spell
from minichunk.core.predictors import Predictor, resolve_predictor
from minichunk.core.request import Rank, Request

Key = tuple[float, ...]
Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


class Order:
    """First come, first served; the base of all orders.

    `key` and `group` are asked once, when a request arrives; `group_key` must never fall.
    """

    name: ClassVar[str] = "fcfs"

    def __init_subclass__(cls) -> None:
        """Without a name of its own an order goes by its class's, not by the one it builds on."""
        cls.name = vars(cls).get("name", cls.__name__)

    def __init__(self) -> None:
        """No parameters. Written out, since `inspect` takes 20 ms to read `object.__init__`."""

    def key(self, request: Request) -> Key:
        """Smallest first within a group. Ties go to the request that was added first."""
        return (request.arrival_time,)

    def group(self, request: Request) -> str:
        """Requests of one group queue together; the group with the least `group_key` is next."""
        return ""

    def group_key(self, group: str) -> float:
        return 0.0

    def may_preempt(self, asker: Request, victim: Request) -> bool:
        """May a *waiting* asker take the blocks or the slot of a running victim?"""
        return False

    def charge(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        """Tokens are being served: its prompt at first admission, each output token once."""

    def reserve_tokens(self, request: Request) -> int:
        """Output tokens for which blocks are reserved at admission, beyond what is there."""
        return 0

    def group_joins(self, group: str, next_group: str | None) -> None:
        """A group that had nobody waiting queues up. `next_group` would go first now, the one with
        the least `group_key` (None: nobody waits)."""

    def finished(self, request: Request) -> None:
        """A request ended; predictors learn from it."""

    def changed_counters(self) -> dict[str, float]:
        """Counters that changed since the last call, by group, for the trace."""
        return {}

    def __str__(self) -> str:
        """`priority(ageing_seconds=30.0)`: the parameters that differ from their defaults."""
        parameters = {}
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            value = getattr(self, name, None)
            value = getattr(value, "name", value)  # a predictor goes by its name
            if isinstance(value, (int, float, str)) and value != parameter.default:
                parameters[name] = value
        return spell(self.name, parameters)


REGISTRY: dict[str, type[Order]] = {}

OrderClass = TypeVar("OrderClass", bound=type[Order])


def order(name: str) -> Callable[[OrderClass], OrderClass]:
    """Register a class as an order: `@order("mine") class Mine(Order): ...`."""

    def register(cls: OrderClass) -> OrderClass:
        cls.name = name
        REGISTRY[name] = cls
        return cls

    return register


def resolve_order(choice: str | Order | type[Order]) -> Order:
    """A fresh order from its name, `"name(parameter=value)"`, a class, or a copy of an instance.

    Always a new object: counters of one engine must not leak into the next.
    """
    if isinstance(choice, Order):
        return copy.deepcopy(choice)
    if isinstance(choice, type) and issubclass(choice, Order):
        return choice()
    if not isinstance(choice, str):
        raise ValueError(f"order={choice!r} must be a name, an Order or an Order class")
    name, parameters = parse_spelling(choice)
    if name not in REGISTRY:
        raise ValueError(f"unknown order {name!r}; known: {', '.join(sorted(REGISTRY))}")
    check_kinds(f"order {name!r}", REGISTRY[name].__init__, parameters)
    try:
        return REGISTRY[name](**parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"order {choice!r}: {error}") from None


order("fcfs")(Order)


@order("priority")
class Priority(Order):
    """Lower value first. Waiting counts: `ageing_seconds` of it are worth one level.

    The aged key is constant (priority + arrival / ageing_seconds), because everybody ages at the
    same rate. A victim must be strictly less urgent, by its priority and with its age.
    """

    def __init__(self, ageing_seconds: float = 60.0) -> None:
        if not ageing_seconds > 0:
            raise ValueError(f"ageing_seconds={ageing_seconds} must be positive (inf: no ageing)")
        self.ageing_seconds = ageing_seconds

    def key(self, request: Request) -> Key:
        aged = request.priority + request.arrival_time / self.ageing_seconds
        return (aged, request.arrival_time)

    def may_preempt(self, asker: Request, victim: Request) -> bool:
        return asker.priority < victim.priority and self.key(asker) < self.key(victim)


@order("fair")
class Fair(Order):
    """Virtual token counters (VTC, Sheng et al., OSDI 2024): the tenant served least goes first.

    A prompt token counts 1 and an output token 2. A tenant that comes back after idling is lifted
    to the least counter of those waiting, so that nobody saves up credit.
    """

    def __init__(self, prompt_weight: float = 1.0, output_weight: float = 2.0) -> None:
        self.prompt_weight = prompt_weight
        self.output_weight = output_weight
        self.counters: dict[str, float] = {}
        self.last_served = ""
        self._changed: set[str] = set()

    def group(self, request: Request) -> str:
        return request.tenant

    def group_key(self, group: str) -> float:
        return self.counters.get(group, 0.0)

    def charge(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        tenant = request.tenant
        cost = self.prompt_weight * prompt_tokens + self.output_weight * output_tokens
        self.counters[tenant] = self.counters.get(tenant, 0.0) + cost
        self._changed.add(tenant)
        if prompt_tokens:
            self.last_served = tenant

    def group_joins(self, group: str, next_group: str | None) -> None:
        floor = self.group_key(self.last_served if next_group is None else next_group)
        if floor > self.group_key(group):
            self.counters[group] = floor
            self._changed.add(group)

    def changed_counters(self) -> dict[str, float]:
        changed, self._changed = self._changed, set()
        return {tenant: self.counters[tenant] for tenant in sorted(changed)}


@order("shortest")
class Shortest(Order):
    """Shortest predicted output first, by a pluggable length predictor.

    With `reserve=True` the prediction also reserves KV blocks at admission, so that a batch which
    is bound to outgrow the pool is not started. `ageing_seconds` of waiting are worth one token.
    """

    def __init__(
        self,
        predictor: str | Predictor = "oracle",
        reserve: bool = False,
        ageing_seconds: float = float("inf"),
    ) -> None:
        if not ageing_seconds > 0:
            raise ValueError(f"ageing_seconds={ageing_seconds} must be positive (inf: no ageing)")
        self.predictor = resolve_predictor(predictor)
        self.reserve = reserve
        self.ageing_seconds = ageing_seconds
        self._predicted: dict[str, float] = {}

    def predicted(self, request: Request) -> float:
        """Predicted once, when the request is first seen: its key must not move while it waits."""
        if request.request_id not in self._predicted:
            self._predicted[request.request_id] = self.predictor.predict(request)
        return self._predicted[request.request_id]

    def key(self, request: Request) -> Key:
        aged = self.predicted(request) + request.arrival_time / self.ageing_seconds
        return (aged, request.arrival_time)

    def reserve_tokens(self, request: Request) -> int:
        if not self.reserve:
            return 0
        return max(0, round(self.predicted(request)) - len(request.output_token_ids))

    def finished(self, request: Request) -> None:
        self._predicted.pop(request.request_id, None)
        self.predictor.learn(request)


@order("deadline")
class Deadline(Order):
    """Least slack first: the time to spare until the deadline, after the prompt's own work.

    A request's deadline is its arrival plus `timeout`, or plus `slo` where it has none. Now is the
    same for everybody, so slack sorts by (deadline − predicted prefill time), a constant.
    """

    def __init__(self, slo: float = 1.0, seconds_per_prompt_token: float = 1e-4) -> None:
        self.slo = slo
        self.seconds_per_prompt_token = seconds_per_prompt_token

    def key(self, request: Request) -> Key:
        allowed = self.slo if request.timeout is None else request.timeout
        work = request.num_prompt_tokens * self.seconds_per_prompt_token
        return (request.arrival_time + allowed - work, request.arrival_time)


def ask(
    order: Order, hook: Callable[Asked, Answer], *asked: Asked.args, **more: Asked.kwargs
) -> Answer:
    """What one of the order's methods answers. If it fails, a `PolicyError` names the order."""
    try:
        return hook(*asked, **more)
    except Exception as error:
        raise failure_of(order, hook.__name__, error) from error


def failure_of(order: Order, method: str, error: Exception) -> PolicyError:
    """An order's own error with the names of the order and of the method that raised it."""
    failure = PolicyError(f"order {order.name!r}: {method} raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def place(order: Order, request: Request) -> tuple[str, Rank]:
    """The request's group and rank. A `PolicyError` names an order that fails or cannot sort."""
    try:
        group, key = order.group(request), order.key(request)
    except Exception as error:
        raise PolicyError(
            f"order {order.name!r} cannot place request {request.request_id!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    numbers = key if isinstance(key, tuple) else (key,)
    for number in numbers:
        if not isinstance(number, (int, float)) or number != number:
            raise PolicyError(
                f"order {order.name!r}: key of request {request.request_id!r} is {key!r}; "
                "it must be a tuple of numbers, none of them NaN"
            )
    if not isinstance(group, str):
        raise PolicyError(f"order {order.name!r}: group must be a string, not {group!r}")
    return group, (numbers, request.index)
