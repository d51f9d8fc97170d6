"""The checks of notebook 03 pass their solutions and tell plausible wrong answers apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minichunk.labs import check
from tests.labs.wrong_answers import assert_all_wrong

HERE = Path(__file__).parent


def test_online_softmax(solution) -> None:
    assert check.online_softmax(solution("03_kernels", "online-softmax")).passed

    def no_rescaling(state, scores, values):
        acc, maximum, total = state
        new_maximum = torch.maximum(maximum, scores.max())
        weights = torch.exp(scores - new_maximum)
        return acc + weights @ values, new_maximum, total + weights.sum()

    def only_the_sum_rescaled(state, scores, values):
        acc, maximum, total = state
        new_maximum = torch.maximum(maximum, scores.max())
        rescale = torch.exp(maximum - new_maximum)
        weights = torch.exp(scores - new_maximum)
        return acc + weights @ values, new_maximum, total * rescale + weights.sum()

    def no_maximum(state, scores, values):
        acc, maximum, total = state
        weights = torch.exp(scores)
        return acc + weights @ values, maximum, total + weights.sum()

    def the_tile_alone(state, scores, values):
        weights = torch.softmax(scores, dim=0)
        return weights @ values, scores.max(), weights.sum()

    def the_tiles_own_maximum(state, scores, values):
        acc, maximum, total = state
        weights = torch.exp(scores - scores.max())
        rescale = torch.exp(maximum - scores.max())
        return acc * rescale + weights @ values, maximum, total * rescale + weights.sum()

    wrong = [no_rescaling, only_the_sum_rescaled, no_maximum, the_tile_alone]
    wrong.append(the_tiles_own_maximum)
    assert_all_wrong(check.online_softmax, {f.__name__: f for f in wrong})


def sequence_of(token, cu_seqlens_q):
    return max(s for s, start in enumerate(cu_seqlens_q[:-1]) if start <= token)


def test_tile_of_program(solution) -> None:
    assert check.tile_of_program(solution("03_kernels", "tile-of-program")).passed

    def as_if_sequences_were_one(tile, cu_seqlens_q, tile_tokens):
        token = tile * tile_tokens
        if token >= cu_seqlens_q[-1]:
            return None
        seq = sequence_of(token, cu_seqlens_q)
        return seq, token - cu_seqlens_q[seq]

    def one_tile_each(tile, cu_seqlens_q, tile_tokens):
        return (tile, 0) if tile < len(cu_seqlens_q) - 1 else None

    def no_room_for_partial_tiles(tile, cu_seqlens_q, tile_tokens):
        starts = [start // tile_tokens for start in cu_seqlens_q[:-1]]
        seq = max(s for s, start in enumerate(starts) if start <= tile)
        first = (tile - starts[seq]) * tile_tokens
        return (seq, first) if first < cu_seqlens_q[seq + 1] - cu_seqlens_q[seq] else None

    def surplus_tiles_not_told(tile, cu_seqlens_q, tile_tokens):
        starts = [start // tile_tokens + s for s, start in enumerate(cu_seqlens_q[:-1])]
        seq = max(s for s, start in enumerate(starts) if start <= tile)
        return seq, (tile - starts[seq]) * tile_tokens

    wrong = [as_if_sequences_were_one, one_tile_each, no_room_for_partial_tiles]
    wrong.append(surplus_tiles_not_told)
    assert_all_wrong(check.tile_of_program, {f.__name__: f for f in wrong})


@pytest.mark.parametrize("name", ["online_softmax", "tile_of_program"])
def test_an_unwritten_answer_is_said_to_be_unwritten(name: str) -> None:
    def stub(*_):
        raise NotImplementedError

    assert getattr(check, name)(stub).status == "not written"


def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", str(HERE / "launched"), "-o", "addopts=-q"]
    finished = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=HERE.parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout
    assert "3 passed" in finished.stdout, finished.stdout


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(),
    reason="here kernels can be launched",
)
def test_without_the_interpreter_the_check_says_what_to_set() -> None:
    result = check.gather_keys(None)
    assert result.status == "wrong"
    assert "TRITON_INTERPRET=1" in result.message
