"""Supervised fine-tuning on stored traces whose behaviour log-probabilities are known."""

from posttrain.core.methods import Method

METHODS = {
    "traces": Method(axes=("task",)),
    "train": Method(axes=("task", "arm")),
    "overhead": Method(axes=("task",), measures=True),
}
