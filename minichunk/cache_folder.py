"""Where minichunk keeps what it has downloaded or built: models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$MINICHUNK_CACHE`, else `minichunk` in the user's cache folder. It need not exist yet."""
    chosen = os.environ.get("MINICHUNK_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(base) if base else Path.home() / ".cache") / "minichunk"
