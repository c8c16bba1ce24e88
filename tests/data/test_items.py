"""Which items a job takes: the first ones, in equal shares of families, repeated only where asked."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UserError
from posttrain.data.items import take

ITEMS = [{"id": i, "family": "aabacab"[i % 7]} for i in range(21)]  # 12 a, 6 b, 3 c


def ids(family: str) -> list[int]:
    return [item["id"] for item in ITEMS if item["family"] == family]


def test_without_families_the_first_items():
    assert take(ITEMS, (), 5) == ITEMS[:5] and take(ITEMS, (), 100) == ITEMS


@given(st.permutations(["a", "b", "c"]), st.integers(1, 3), st.integers(3, 60))
def test_shares_are_equal_and_in_the_order_of_the_families(order, width, count):
    wanted = order[:width]
    share = count // width
    found = [item["id"] for item in take(ITEMS, wanted, count)]
    assert found == [i for family in wanted for i in ids(family)[:share]]
    repeated = take(ITEMS, wanted, count, repeat=True)
    assert Counter(item["family"] for item in repeated) == dict.fromkeys(wanted, share)
    for family in wanted:  # every item once before any comes again
        part = [item["id"] for item in repeated if item["family"] == family]
        assert part == (ids(family) * share)[:share]
        counts = Counter(part)
        assert max(counts.values()) - min(counts.get(i, 0) for i in ids(family)) <= 1


def test_a_family_without_items_is_named():
    for repeat in (False, True):
        with pytest.raises(UserError, match=r"^families: no item of the family 'd' is left; name one that the task has"):
            take(ITEMS, ("a", "d"), 4, repeat=repeat)
        with pytest.raises(UserError, match=r"^families: 1 items have no share for each of 2 families; take more items\.$"):
            take(ITEMS, ("a", "b"), 1, repeat=repeat)
