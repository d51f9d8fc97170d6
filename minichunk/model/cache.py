"""How a downloaded model is put into the cache folder: whole or not at all."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minichunk.model.config import one_line
from minichunk.model.errors import ModelError


@contextmanager
def new_folder(target: Path, num_bytes: int) -> Iterator[Path]:
    """A staging folder that becomes `target` when the block ends well, and vanishes otherwise.

    `num_bytes` is what will be written at most. Raises ModelError if the disk is (or becomes) too
    full or the place is not writable. Where two processes do the same, the first one wins.
    """
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < num_bytes:
            raise OSError(errno.ENOSPC, f"{free / 1e6:.0f} MB are free")
        with tempfile.TemporaryDirectory(
            prefix=".partial-", dir=parent, ignore_cleanup_errors=True
        ) as staging:
            yield Path(staging)
            try:
                Path(staging).rename(target)
            except OSError:
                if not target.exists():
                    raise
    except OSError as error:
        raise cache_error(parent, num_bytes, error) from None


def cache_error(folder: Path, num_bytes: int, error: BaseException) -> ModelError:
    """One line for whatever keeps us from writing into the cache."""
    return ModelError(
        f"cannot write the model into {folder} (up to {num_bytes / 1e6:.0f} MB while converting): "
        f"{one_line(error)}; make room there or set MINICHUNK_CACHE to another folder"
    )
