"""Streamed text: whole characters only, stop strings across token borders, nothing lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from minichunk.model.detokenize import REPLACEMENT, TextStream, held_back
from minichunk.model.tokenizer import stand_in_tokenizer

# Every byte is a token of its own here, so that every character beyond ASCII is cut in pieces.
TOKENIZER = stand_in_tokenizer(600)
TEXTS = st.text(
    st.one_of(
        st.characters(codec="utf-8", exclude_characters=REPLACEMENT),
        st.sampled_from("你好，世界🎉🚀👩‍🚀🇨🇳é"),
    ),
    max_size=30,
)


def pieces_of(
    token_ids: list[int], stop: tuple[str, ...] = (), tokenizer: PreTrainedTokenizerBase = TOKENIZER
) -> list[str]:
    """What a reader gets for each token, and in the end."""
    stream = TextStream(tokenizer, stop)
    pieces, shown = [], 0
    for count in range(1, len(token_ids) + 1):
        stopped = stream.feed(token_ids[:count])
        pieces.append(stream.text[shown:])
        shown = len(stream.text)
        if stopped:
            break
    return [*pieces, stream.finish()[shown:]]


@given(TEXTS)
def test_pieces_are_whole_characters_and_add_up(text: str) -> None:
    pieces = pieces_of(TOKENIZER.encode(text))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("text", ["你好，世界", "🎉 done 🚀", "naïve café", "👩‍🚀"])
def test_a_character_appears_with_its_last_byte(text: str) -> None:
    token_ids = TOKENIZER.encode(text)
    assert len(token_ids) == len(text.encode())
    shown = ""
    for count, piece in enumerate(pieces_of(token_ids)[:-1], start=1):
        shown += piece
        assert shown == text.encode()[:count].decode("utf-8", errors="ignore")


def test_half_a_character_at_the_end_is_never_shown() -> None:
    token_ids = TOKENIZER.encode("ok 🎉")[:-1]
    assert "".join(pieces_of(token_ids)) == "ok "


def test_bytes_that_are_no_text_do_not_hold_up_what_follows() -> None:
    continuation = TOKENIZER.encode("é")[1]
    token_ids = [*[continuation] * 10, *TOKENIZER.encode("and on")]
    pieces = pieces_of(token_ids)
    assert "".join(pieces) == REPLACEMENT * 10 + "and on"
    assert all(piece for piece in pieces[4:10])  # they come as soon as they cannot be text any more


@given(TEXTS, TEXTS, st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(head: str, tail: str, stop: list[str]) -> None:
    text = head + stop[0] + tail
    stops = tuple(stop)
    if REPLACEMENT in text:
        return
    shown = "".join(pieces_of(TOKENIZER.encode(text), stops))
    # The stream stops at the first token that completes any of them.
    prefixes = (text[:end] for end in range(1, len(text) + 1))
    seen = next(prefix for prefix in prefixes if any(string in prefix for string in stops))
    assert shown == seen[: min(seen.find(string) for string in stops if string in seen)]


def test_a_stop_string_is_held_back_while_it_may_be_coming() -> None:
    pieces = pieces_of(TOKENIZER.encode("one STO two STOP three"), ("STOP",))
    assert "".join(pieces) == "one STO two "
    assert "S" not in "".join(pieces[:7])  # "one STO": nobody knows yet
    assert held_back("one STO", ("STOP",)) == 3
    assert held_back("one STOx", ("STOP",)) == 0


def test_feeding_all_at_once_gives_the_same_text() -> None:
    rng = random.Random(random.SystemRandom().randrange(2**32))
    token_ids = [rng.randrange(3, 600) for _ in range(200)]
    stream = TextStream(TOKENIZER)
    stream.feed(token_ids)
    assert stream.finish() == "".join(pieces_of(token_ids))


def test_special_tokens_have_no_text() -> None:
    token_ids = [*TOKENIZER.encode("a"), TOKENIZER.eos_token_id, *TOKENIZER.encode("b")]
    assert "".join(pieces_of(token_ids)) == "ab"
