"""A student beside its teacher on held-out rows: exact metrics per row, probability mass by rank, and a curve over training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from posttrain.core.logprobs import token_logprobs
from posttrain.distill import divergences, metrics
from posttrain.distill.examples import collate, following, logits_of
from posttrain.distill.formulas import Divergence

if TYPE_CHECKING:
    from torch import Tensor

PAIRS = 1 << 22  # float64 numbers at once in one comparison
FIXED = ("kl", "kl1", "kl2", "alpha_t", "alpha_s", "grad_norm", "tail_share", "ce")  # of the curve


def moved(batch: dict[str, Tensor], device: Any) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


def on_rows(
    teacher: Any, student: Any, rows: Sequence[dict], pad: int, head: int, vocabulary: int | None, batch: int = 8
) -> tuple[list[dict[str, float]], list[dict[str, float]], float]:
    """(table of rows, table of rank ranges, Full-ECE per position).

    Of each row: its number, tokens (targets), the means over targets of `metrics.compare`, and ce in nats. Rank ranges: low,
    high, teacher's and student's mean probability there. vocabulary: leading logit columns in use; None: all.
    """
    import torch

    table, sums, masses, positions = [], 0.0, 0.0, 0
    for start in range(0, len(rows), batch):
        part = moved(collate(rows[start : start + batch], pad), student.device)
        labels, mask = following(part["labels"])
        with torch.inference_mode():
            t, s = (logits_of(model, part)[mask][:, :vocabulary].float() for model in (teacher, student))
            wanted, found = labels[mask], []
            for at in (slice(i, i + max(1, PAIRS // t.shape[-1])) for i in range(0, len(t), max(1, PAIRS // t.shape[-1]))):
                values, mass = metrics.compare(t[at], s[at], head)
                values["ce"] = -token_logprobs(s[at], wanted[at]).double()
                once = torch.zeros_like(s[at]).scatter_(-1, wanted[at][:, None], 1.0)
                sums = sums + metrics.calibration(s[at].softmax(-1), once)
                masses, positions = masses + mass.sum(0), positions + len(mass)
                found.append(values)
        whole = {name: torch.cat([one[name] for one in found]) for name in found[0]}
        counts = mask.sum(1).tolist()
        for i, (count, *pieces) in enumerate(zip(counts, *(value.split(counts) for value in whole.values()), strict=True)):
            means = {name: float(piece.mean()) for name, piece in zip(whole, pieces, strict=True)}
            table.append({"row": start + i, "tokens": count, **means})
    shares = (masses / positions).tolist()
    ranks = metrics.buckets(t.shape[-1])
    buckets = [{"low": a, "high": b, "teacher": p, "student": q} for (a, b), (p, q) in zip(ranks, shares, strict=True)]
    return table, buckets, metrics.full_ece(sums, positions)


def fixed_batch(
    teacher: Any, student: Any, rows: Sequence[dict], pad: int, divergence: Divergence, head: int, vocabulary: int | None
) -> dict[str, float]:
    """Means over the targets of a few rows of FIXED, the same quantities for every arm: the parts of KL for a head of K = `head`,
    and norm and tail share of the arm's own gradient in the logits (weights apart; kind none has none). Leaves the student's
    mode as it was."""
    import torch

    mode = student.training
    student.eval()
    part = moved(collate(rows, pad), student.device)
    labels, mask = following(part["labels"])
    with torch.no_grad():
        t, s = logits_of(teacher, part), logits_of(student, part)
        found = divergences.loss(
            t, s, mask, Divergence(k=head, beta=1.0), labels=labels, vocabulary=vocabulary, ce_weight=0.0, stats=True
        )[1]
    student.train(mode)
    result = {name: float(found[name].mean()) for name in ("kl1", "kl2", "alpha_t", "alpha_s", "ce")}
    result["kl"] = float((found["kl1"] + found["alpha_t"] * found["kl2"]).mean())
    if divergence.kind == "none":
        return result
    norm, share = gradient_energy(t, s, mask, labels, divergence, head, vocabulary)
    return result | {"grad_norm": float(norm[mask].mean()), "tail_share": float(share[mask].mean())}


def gradient_energy(
    t: Tensor, s: Tensor, mask: Tensor, labels: Tensor, divergence: Divergence, head: int, vocabulary: int | None
) -> tuple[Tensor, Tensor]:
    """(norm, share of its square outside the teacher's `head` most likely tokens) of a divergence's gradient in the student's
    logits, per position [B, T]; 0 outside the mask. The head is the same whatever the divergence."""
    import torch

    s = s.detach().requires_grad_(True)
    with torch.enable_grad():
        divergences.loss(t, s, mask, divergence, labels=labels, vocabulary=vocabulary)[0].sum().backward()
    energy = s.grad.float().square()
    whole = energy.sum(-1)
    top = energy.gather(-1, t[..., :vocabulary].topk(head, -1).indices).sum(-1)
    return whole.sqrt(), ((whole - top).clamp(min=0) / whole.clamp(min=1e-30)).clamp(max=1)


def tail_shares(
    teacher: Any, student: Any, rows: Sequence[dict], pad: int, divergence: Divergence, head: int, vocabulary: int | None
) -> list[dict[str, float]]:
    """Per row the mean over its targets of the tail's share of gradient energy, of the arm's own divergence (tail_share) and of
    plain KL (tail_share_kl), both at this student."""
    import torch

    found = []
    for row in rows:
        part = moved(collate([row], pad), student.device)
        labels, mask = following(part["labels"])
        with torch.no_grad():
            t, s = logits_of(teacher, part), logits_of(student, part)
        kinds = {"tail_share": divergence, "tail_share_kl": Divergence(kind="kl")}
        shares = {n: gradient_energy(t, s, mask, labels, kind, head, vocabulary)[1] for n, kind in kinds.items()}
        found.append({name: float(share[mask].mean()) for name, share in shares.items()})
    return found
