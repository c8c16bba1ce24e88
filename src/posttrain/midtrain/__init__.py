"""Between base and SFT: continued pretraining on a mix with reasoning data, merging, the order in which data is fed."""

from posttrain.core.methods import Method

METHODS = {
    "prism": Method(axes=("model",)),
    "merge": Method(axes=("model",)),
}
