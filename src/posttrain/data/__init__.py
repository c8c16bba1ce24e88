"""Real text and verifiable tasks: fetched, split, checked for overlap, tokenised, packed."""

from posttrain.core.methods import Method

METHODS = {
    "corpus": Method(axes=("corpus",), seeded=False),
    "tasks": Method(axes=("task",)),
    "facts": Method(axes=("facts",), seeded=False),
    "domains": Method(axes=("task",)),
    "tokenizer": Method(axes=("tokenizer",), seeded=False),
    "mix": Method(axes=("mix",)),
    "edits": Method(axes=("edits",)),
}
