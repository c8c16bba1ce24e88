"""Reinforcement learning with verifiable rewards."""

from posttrain.core.methods import Method

METHODS = {
    "grpo": Method(axes=("task", "start"), open=("start",)),
    "passes": Method(axes=("task", "checkpoint"), open=()),
}
