"""Where models come from: trained here from scratch, carried by a package, or fetched from a hub at a pinned revision."""

from posttrain.core.methods import Method

METHODS = {
    "scratch": Method(axes=("model",)),
    "packaged": Method(axes=("model",), seeded=False),
    "hub": Method(axes=("model",), seeded=False),
}
