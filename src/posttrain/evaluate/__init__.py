"""Measurements of checkpoints: verified reasoning (pass@k), retention of real text, geometry of a lineage."""

from posttrain.core.methods import Method

METHODS = {
    "reasoning": Method(axes=("task", "checkpoint"), open=("checkpoint",)),
    "retention": Method(axes=("task", "checkpoint"), open=("checkpoint",)),
    "lineage": Method(axes=("lineage",), measures=True),
}
