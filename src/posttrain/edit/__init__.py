"""Edits of what a model knows: CrispEdit (low-curvature projections), fine-tuning, LoRA and a least-squares editor."""

from posttrain.core.methods import Method

METHODS = {
    "factors": Method(axes=("task",)),
    "crispedit": Method(axes=("arm",), measures=True),
    "pretrained": Method(axes=("arm",), seeded=False, measures=True),
}
