"""The model hub, for those who can reach it: a model folder by its id, or a quick and clear no."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from minichunk.model.config import one_line

PATIENCE = 3.0  # seconds until an unreachable hub is given up
FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


class HubError(Exception):
    """The hub cannot be reached, or does not have (or give) the model."""


def folder_from_hub(hub_id: str, say: Callable[[str], None]) -> Path:
    """The local folder of a model, downloaded on first use into the hub library's own cache.

    Only configuration, tokenizer and safetensors files are fetched, never code or pickles. Raises
    HubError.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=FILES))
        if (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
            return folder
    except Exception:  # not there: the usual case on first use
        pass
    check_reachable(hub_id)
    say(f"downloading {hub_id} from the hub")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=FILES))
    except Exception as error:
        raise HubError(one_line(error)) from None


def check_reachable(hub_id: str) -> None:
    """Ask the hub for the model, but not for longer than PATIENCE.

    A thread, because resolving a host name can hang for longer than any timeout of the client.
    """
    answer: list[BaseException | None] = []

    def ask() -> None:
        try:
            from huggingface_hub import HfApi

            HfApi().model_info(hub_id, timeout=PATIENCE)
            answer.append(None)
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if not answer:
        raise HubError(f"no answer within {PATIENCE:.0f} s")
    if answer[0] is not None:
        raise HubError(one_line(answer[0], limit=120))
