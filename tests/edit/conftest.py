"""Unit tests: offline, in a plain environment (see tests/offline.py); a tiny model that knows characters."""

from __future__ import annotations

import pytest

from tests.checkpoints import tiny
from tests.offline import no_network, plain_environment

__all__ = ["no_network", "plain_environment"]
LETTERS = "abcdefghijklmnopqrstuvwxyz ABC.?'"


@pytest.fixture
def small():
    """(float32 model of two layers of width 16, tokenizer of letters). Its head is long enough that a changed layer can make any
    token likely."""
    import torch

    model, tokenizer = tiny(0, alphabet=LETTERS, tied=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    return model, tokenizer
