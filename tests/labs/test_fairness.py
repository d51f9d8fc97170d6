"""The checks of notebook 11 pass the folded solutions and catch plausible mistakes."""

from __future__ import annotations

import pytest

import minichunk as mc
from minichunk.labs import check

NOTEBOOK = "11_fairness"


def test_solutions_pass(solution) -> None:
    for name in ("jain-index", "token-counters", "weighted-fair"):
        result = getattr(check, name.replace("-", "_"))(solution(NOTEBOOK, name))
        assert result.passed, str(result)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda shares: sum(shares) ** 2 / sum(share**2 for share in shares),
        lambda shares: min(shares) / max(shares),
        lambda shares: sum(share**2 for share in shares) / sum(shares) ** 2 / len(shares),
    ],
)
def test_jain_index_shows_the_shares(wrong) -> None:
    result = check.jain_index(wrong)
    assert result.status == "wrong"
    assert "it is" in result.message


class NeverLifts(mc.orders.Fair):
    """Idling saves up credit."""

    def group_joins(self, group, next_group):
        pass


class CountsRequests(mc.orders.Fair):
    def charge(self, request, prompt_tokens, output_tokens):
        super().charge(request, 1 if prompt_tokens else 0, 0)


class CountsPromptsOnly(mc.orders.Fair):
    def charge(self, request, prompt_tokens, output_tokens):
        super().charge(request, prompt_tokens, 0)


@pytest.mark.parametrize("wrong", [NeverLifts, CountsRequests, CountsPromptsOnly])
def test_token_counters_shows_the_first_step_that_differs(wrong) -> None:
    result = check.token_counters(wrong)
    assert result.status == "wrong"
    assert "first differ in step" in result.message
    assert result.picture is not None


class Unwritten(mc.orders.Order):
    def group(self, request):
        raise NotImplementedError


def test_an_order_that_is_not_written_yet_is_not_called_wrong() -> None:
    """The engine names the order in an error of its own; the check looks behind it."""
    assert check.token_counters(Unwritten).status == "not written"


class Weighted(mc.orders.Fair):
    def __init__(self, shares):
        super().__init__()
        self.shares = shares


class IgnoresShares(Weighted):
    pass


class MultipliesInsteadOfDividing(Weighted):
    def charge(self, request, prompt_tokens, output_tokens):
        share = self.shares[request.tenant]
        super().charge(request, prompt_tokens * share, output_tokens * share)


class LargestShareAlwaysFirst(Weighted):
    def group_key(self, group):
        return -self.shares.get(group, 0.0)


@pytest.mark.parametrize(
    "wrong", [IgnoresShares, MultipliesInsteadOfDividing, LargestShareAlwaysFirst]
)
def test_weighted_fair_shows_the_service_of_both(wrong) -> None:
    result = check.weighted_fair(wrong)
    assert result.status == "wrong"
    assert "to 1" in result.message
    assert result.picture is not None
