"""Text from tokens while they come: whole characters only, and nothing from a stop string on.

A token of a byte-level tokenizer may end in the middle of a character (most Chinese characters and
all emoji are several bytes, often several tokens). Text is therefore held back until it is certain:
while its end may be half a character, or the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minichunk.core.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character
MAX_HELD = 3  # a character has at most 4 bytes, so at most 3 can be waiting for the rest


class TextStream:
    """The text of one request. `text` is final: it only ever grows.

    Decoding looks at the newest few tokens only, together with some before them, since a token's
    text can depend on its neighbours (a leading space, for instance).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._pending = ""  # whole characters that may still turn out to begin a stop string
        self._num_fed = 0
        self._context: list[int] = []  # tokens whose text is out already
        self._window: list[int] = []  # tokens whose text is not, or only in part
        self._num_shown = 0  # characters of the window's text that are out

    def feed(self, output_token_ids: Sequence[int]) -> bool:
        """Take note of all output tokens so far; True once a stop string has appeared."""
        new, self._num_fed = output_token_ids[self._num_fed :], len(output_token_ids)
        if self.stopped or not new:
            return self.stopped
        self._window.extend(new)
        text = self._window_text()
        certain = without_tail(text)
        self._accept(certain[self._num_shown :])
        self._num_shown = max(self._num_shown, len(certain))
        if len(certain) == len(text):  # no half character: the next token starts a new window
            self._context, self._window, self._num_shown = self._window, [], 0
        return self.stopped

    def finish(self) -> str:
        """No more tokens will come: release what was held, except half a character."""
        if not self.stopped:
            self.text += self._pending
            self._pending = ""
        return self.text

    def _window_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._window)[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _accept(self, new: str) -> None:
        """Add certain characters, unless they begin or complete a stop string."""
        if not self._stop:
            self.text += new
            return
        self._pending += new
        found = [at for stop in self._stop if (at := self._pending.find(stop)) >= 0]
        if found:
            self.text += self._pending[: min(found)]
            self._pending, self.stopped = "", True
            return
        held = held_back(self._pending, self._stop)
        certain = len(self._pending) - held
        self.text += self._pending[:certain]
        self._pending = self._pending[certain:]


def without_tail(text: str) -> str:
    """The text without up to MAX_HELD replacement characters at its end."""
    end = len(text)
    while end > max(0, len(text) - MAX_HELD) and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]


def held_back(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a stop string."""
    longest = max((len(string) - 1 for string in stop), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in stop):
            return length
    return 0


class StopStrings:
    """The engine's stop check: watches the text of the requests that have stop strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._watched: dict[str, tuple[Request, TextStream]] = {}

    def __call__(self, request: Request) -> bool:
        """Whether the newest token completed one of the request's stop strings."""
        if not request.params.stop or self._tokenizer is None:
            return False
        known = self._watched.get(request.request_id)
        if known is None:
            self._watched = {
                name: pair for name, pair in self._watched.items() if not pair[0].is_finished
            }
            known = (request, TextStream(self._tokenizer, request.params.stop))
            self._watched[request.request_id] = known
        return known[1].feed(request.output_token_ids)
