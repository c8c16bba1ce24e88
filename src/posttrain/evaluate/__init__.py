"""Measurements of checkpoints: verified reasoning (pass@k), retention of real text."""

from posttrain.core.methods import Method

METHODS = {
    "reasoning": Method(axes=("task", "checkpoint"), open=("checkpoint",)),
    "retention": Method(axes=("task", "checkpoint"), open=("checkpoint",)),
}
