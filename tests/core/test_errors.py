"""Hints in error sentences."""

from __future__ import annotations

import pytest

from posttrain.core.errors import EXIT_TEMPORARY, EXIT_USER_ERROR, nearest


@pytest.mark.parametrize(
    ("name", "valid", "hint"),
    [
        ("lerning_rate", ["learning_rate", "warmup"], "; did you mean 'learning_rate'?"),
        ("stpes", ["steps", "step_size"], "; did you mean 'steps'?"),
        ("zzz", ["warmup", "steps"], "; valid are: steps, warmup"),
        ("zzz", [], ""),
        (3, [30, 1], "; did you mean '30'?"),
        ("a", iter(["b", "a"]), "; did you mean 'a'?"),
    ],
)
def test_nearest(name, valid, hint):
    assert nearest(name, valid) == hint


def test_exit_codes_are_those_that_the_profiles_read():
    assert (EXIT_USER_ERROR, EXIT_TEMPORARY) == (2, 75)
