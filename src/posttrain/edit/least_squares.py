"""Our own small closed-form editor: a rank-n update of one down-projection, in the family of MEMIT and AlphaEdit.

Not an implementation of either. Keys k_i [di] are what the layer reads at one position of each prompt; values are what it
would have to write there, v_i = W k_i + d_i, with d_i found by gradient descent on the target's cross-entropy. With
K [di, n], R = [d_1 ... d_n] [do, n] and C = E[k kᵀ] over the capability text (the K-FAC factor A), the update is

    covariance:  D = R Kᵀ (K Kᵀ + c C)⁻¹     (least squares with a quadratic penalty on what the text's keys give)
    null_space:  D = R Kᵀ P (K Kᵀ P + r I)⁻¹  (P projects onto the directions of small variance of C)

One layer alone, the last that is chosen; MEMIT spreads the residual over several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrain.core.errors import UserError
from posttrain.edit.encoding import Pair, left_padded
from posttrain.edit.projector import spectrum, threshold

if TYPE_CHECKING:
    from torch import Tensor, nn


def covariance_update(keys: Tensor, residuals: Tensor, covariance: Tensor, weight: float) -> Tensor:
    """D [do, di] = R Kᵀ (K Kᵀ + weight C)⁻¹ for keys [di, n], residuals [do, n], covariance [di, di]; float64.

    By Woodbury's identity only if C were easy to invert; here the [di, di] system is solved, with 1e-8 of its mean diagonal
    added because C may lack full rank.
    """
    import torch

    k, r = keys.double(), residuals.double()
    system = k @ k.T + weight * covariance.double()
    system.diagonal().add_(1e-8 * system.diagonal().mean())
    return torch.linalg.solve(system, k @ r.T).T


def null_space_update(keys: Tensor, residuals: Tensor, covariance: Tensor, gamma: float, ridge: float) -> Tensor:
    """D [do, di] = R Kᵀ P (K Kᵀ P + ridge I)⁻¹, P onto the directions of C below its gamma threshold; float64.

    Solved in the n x n form R (Kᵀ P K + ridge I)⁻¹ Kᵀ P, which is the same.
    """
    import torch

    k, r = keys.double(), residuals.double()
    values, vectors = spectrum(covariance, "C")
    blocked = vectors[:, values >= threshold(values, gamma)]
    pk = k - blocked @ (blocked.T @ k)
    gram = pk.T @ pk + ridge * torch.eye(k.shape[1], dtype=torch.float64, device=k.device)
    return r @ torch.linalg.solve(gram, pk.T)


def key_positions(pairs: Sequence[Pair], ends: Sequence[int] | None) -> list[int]:
    """Index, from the end of prompt + target, of the position that is edited: the given one, or the prompt's last token."""
    return [-len(p.tail) - (1 if ends is None else len(p.head) - e) for p, e in zip(pairs, ends or [0] * len(pairs), strict=True)]


def keys_and_residuals(
    model: nn.Module,
    layer: nn.Linear,
    pairs: Sequence[Pair],
    pad: int,
    ends: Sequence[int] | None,
    *,
    steps: int,
    rate: float,
    reach: float,
    batch: int = 64,
) -> tuple[Tensor, Tensor, list[float]]:
    """(K [di, n], R [do, n], mean loss of each step): residuals by `steps` of Adam on the cross-entropy of the targets.

    Each d_i is kept within `reach` times the norm of what the layer writes there, and depends on no other edit; `batch` of
    them are computed at once.
    """
    import torch

    frozen = [p for p in model.parameters() if p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)
    keys, values, losses = [], [], [0.0] * steps
    try:
        for start in range(0, len(pairs), batch):
            part = pairs[start : start + batch]
            some = None if ends is None else ends[start : start + batch]
            key, value, found = _residuals(model, layer, part, pad, some, steps=steps, rate=rate, reach=reach)
            keys.append(key)
            values.append(value)
            losses = [total + loss * len(part) / len(pairs) for total, loss in zip(losses, found, strict=True)]
    finally:
        for p in frozen:
            p.requires_grad_(True)
    residuals = torch.cat(values)
    if not bool(torch.isfinite(residuals).all()):
        raise UserError("the least-squares editor's values are not finite; lower solve_rate.")
    return torch.cat(keys).T.contiguous(), residuals.T.contiguous(), losses


def _residuals(model, layer, pairs, pad, ends, *, steps: int, rate: float, reach: float) -> tuple[Tensor, Tensor, list[float]]:
    """(keys [n, di], residuals [n, do], mean loss of each step) of one batch."""
    import torch

    from posttrain.core.logprobs import token_logprobs

    device = layer.weight.device
    ids, mask, target, width = left_padded(pairs, pad)
    ids, mask, target = ids.to(device), mask.to(device), target.to(device)
    positions, valid = (mask.cumsum(1) - 1).clamp(min=0), target[:, -width:]
    rows = torch.arange(len(pairs), device=device)
    at = torch.tensor([ids.shape[1] + p for p in key_positions(pairs, ends)], device=device)
    delta = torch.zeros(len(pairs), layer.out_features, device=device, requires_grad=True)
    seen: dict[str, Tensor] = {}

    def hook(_module, inputs, output):
        seen["key"], seen["value"] = inputs[0][rows, at].detach(), output[rows, at].detach()
        return output.index_put((rows, at), delta.to(output.dtype), accumulate=True)

    handle = layer.register_forward_hook(hook)
    optimizer, losses = torch.optim.Adam([delta], lr=rate), []
    try:
        for _ in range(steps):
            out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=width + 1)
            logp = token_logprobs(out.logits[:, :-1][valid], ids[:, -width:][valid])
            losses.append(-logp.mean().item())
            # Each edit has its own d_i; the sum, so that a step does not depend on how many edits there are.
            (grad,) = torch.autograd.grad(-logp.sum(), delta)
            delta.grad = grad
            optimizer.step()
            with torch.no_grad():
                limit = reach * seen["value"].float().norm(dim=1, keepdim=True)
                delta.mul_((limit / delta.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1))
    finally:
        handle.remove()
    return seen["key"], delta.detach(), losses
