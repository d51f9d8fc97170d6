"""The one error that this room raises for things a user can put right.

Its message is a single line that names the file or the clashing values and what to change, so that
the command line can print it as it is, without a traceback.
"""

from __future__ import annotations


class ModelError(RuntimeError):
    """A model cannot be found, read, understood, or fitted into memory."""
