"""Between base and SFT: continued pretraining on a mix with reasoning data, merging, the order in which data is fed."""

from posttrain.core.methods import Method

METHODS = {
    "prism": Method(axes=("model",)),
    "merge": Method(axes=("model",)),
    "testbed": Method(axes=("bed",), seeded=False, measures=True),
    "d3": Method(axes=("arm",), measures=True),
}
