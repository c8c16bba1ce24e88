"""Errors that a user can act on, and the exit codes that a scheduler can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_USER_ERROR = 2
"""The input or configuration is wrong: running again will not help until it is changed."""
EXIT_TEMPORARY = 75
"""Stopped on purpose with a checkpoint (time limit): running again continues (sysexits EX_TEMPFAIL)."""


class UserError(Exception):
    """One sentence that names the key, file or row and says what to do. Shown without a traceback."""


class TimeLimitReached(Exception):
    """The training loop saved a checkpoint and stopped because `max_minutes` was over."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the closest valid name, or the list of names if none is close."""
    valid = sorted(map(str, valid))
    close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; valid are: {', '.join(valid)}" if valid else ""
