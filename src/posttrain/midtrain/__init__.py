"""Mid-training: continued pretraining between pretraining and reinforcement learning."""

from posttrain.core.methods import Method

METHODS = {"merge": Method(axes=("model",))}
