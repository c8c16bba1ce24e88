"""Training on task data between pretraining and post-training: the order of its units."""

from posttrain.core.methods import Method

METHODS = {
    "testbed": Method(axes=("bed",)),
    "d3": Method(axes=("world", "schedule")),
}
