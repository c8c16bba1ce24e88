"""Distillation: a student learns from a teacher's whole next-token distribution."""

from posttrain.core.methods import Method

METHODS = {
    "source": Method(axes=("source",)),
    "known": Method(axes=("arm",), measures=True),
    "grid": Method(axes=("study",), measures=True),
    "teacher": Method(axes=("task",)),
    "tail_kd": Method(axes=("task", "arm"), measures=True),
    "overhead": Method(axes=("task",), measures=True),
}
