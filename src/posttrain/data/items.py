"""Which items of a task a job takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.core.errors import UserError


def take(items: Sequence[dict[str, Any]], families: Sequence[str], count: int, *, repeat: bool = False) -> list[dict[str, Any]]:
    """The first `count` items; with families, the first count / families of each, in the order of the families.

    repeat: a family with fewer items gives them several times, so that the shares are equal. Raises :class:`UserError` for a
    family without items, and for fewer items than families.
    """
    if not families:
        return list(items[:count])
    share, found = count // len(families), []
    if not share:
        raise UserError(f"families: {count} items have no share for each of {len(families)} families; take more items.")
    for family in families:
        part = [item for item in items if item["family"] == family]
        if not part:
            raise UserError(f"families: no item of the family '{family}' is left; name one that the task has, or filter less.")
        found += [part[i % len(part)] for i in range(share if repeat else min(share, len(part)))]
    return found
