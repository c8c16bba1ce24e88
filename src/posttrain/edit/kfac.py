"""K-FAC factors of linear layers over a corpus (arXiv 2602.15823, section 4; Martens and Grosse 2015).

For a layer s = W a, A = E[a aᵀ] and S = E[g gᵀ] with g = d log p(y|x) / d s, uncentred, averaged over predicted token
positions; the layer's Gauss-Newton matrix of the language-modelling loss is then about kron(S, A) for row-major vec(W),
and layers are taken as independent of each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from posttrain.core.config import digest
from posttrain.core.errors import UserError
from posttrain.edit.layers import model_digest, tensor_digest

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Labels = Literal["data", "sampled"]


@dataclass
class Factors:
    """A: [di, di] and S: [do, do] per layer, both float64 means on the CPU or the model's device; tokens behind the means, and a
    digest of the token ids ("" after merging)."""

    a: dict[str, Tensor]
    s: dict[str, Tensor]
    tokens: int
    labels: str = "data"
    text: str = ""


def pad(rows: Sequence[Sequence[int]], value: int = 0) -> tuple[Tensor, Tensor]:
    """(ids, mask), both int64 [B, T], padded on the right. The value under the padding never matters: the mask rules."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=value)
    mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True)
    return ids, mask


def by_length(rows: Sequence[Sequence[int]], batch: int) -> list[list[Sequence[int]]]:
    """Batches of rows of similar length, longest first (so that memory runs out at once, if it does)."""
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i))
    return [[rows[i] for i in order[start : start + batch]] for start in range(0, len(order), batch)]


def token_gradients(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    ids: Tensor,
    mask: Tensor,
    labels: Labels | Tensor,
    generator: torch.Generator | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """{layer: (a [n, di], g [n, do])} at the n predicted positions of a batch, in the model's dtype.

    ids, mask: int64 [B, T], padding on the right. Position t belongs to the prediction of token t + 1, so each row's last
    token and all padding are dropped. The loss is the *sum* of -log p over positions: a mean would scale g by the batch.
    labels: `data` (the corpus' next token: the empirical Fisher, as the authors' code does), `sampled` (drawn from the
    model's own softmax: a Gauss-Newton factor in expectation), or int64 [B, T-1] of given ones.
    """
    import torch

    seen: dict[str, Tensor] = {}
    out: dict[str, Tensor] = {}

    def hook(name: str):
        def keep(_module, inputs, output):
            seen[name] = inputs[0].detach()
            if not output.requires_grad:  # the first layer of the graph; its weights need no gradient here
                output = output.detach().requires_grad_(True)
            out[name] = output
            return output

        return keep

    trainable = [p for p in model.parameters() if p.requires_grad]
    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        for p in trainable:
            p.requires_grad_(False)
        with torch.enable_grad():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            valid = mask[:, 1:].bool()
            logp = logits[valid].float().log_softmax(-1) if logits.dtype != torch.float64 else logits[valid].log_softmax(-1)
            if isinstance(labels, torch.Tensor):
                target = labels[valid]
            elif labels == "sampled":
                target = torch.multinomial(logp.detach().exp(), 1, generator=generator)[:, 0]
            else:
                target = ids[:, 1:][valid]
            loss = -logp.gather(-1, target[:, None]).sum()
            grads = torch.autograd.grad(loss, list(out.values()))
    finally:
        for handle in handles:
            handle.remove()
        for p in trainable:
            p.requires_grad_(True)
    return {name: (seen[name][:, :-1][valid], g[:, :-1][valid]) for name, g in zip(out, grads, strict=True)}


def accumulate(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    rows: Iterable[Sequence[int]],
    *,
    labels: Labels = "data",
    batch: int = 8,
    seed: int = 0,
) -> Factors:
    """Factors over token sequences, one pass, sums in float64. Sequences of fewer than two tokens predict nothing.

    Raises UserError if nothing is left or a factor is not finite.
    """
    import torch

    rows = [row for row in rows if len(row) > 1]
    if not rows:
        raise UserError("the capability text has no sequence of two tokens or more; give more text or raise tokens.")
    device = next(iter(layers.values())).weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    was_training = model.training
    model.eval()
    sums_a: dict[str, Tensor] = {}
    sums_s: dict[str, Tensor] = {}
    tokens = 0
    for part in by_length(rows, batch):
        ids, mask = pad(part)
        found = token_gradients(model, layers, ids.to(device), mask.to(device), labels, generator)
        for name, (a, g) in found.items():
            a, g = a.double(), g.double()
            sums_a[name] = sums_a[name].addmm_(a.T, a) if name in sums_a else a.T @ a
            sums_s[name] = sums_s[name].addmm_(g.T, g) if name in sums_s else g.T @ g
        tokens += len(a)
    model.train(was_training)
    for name in layers:
        for kind, total in (("A", sums_a[name]), ("S", sums_s[name])):
            total.div_(tokens)
            if not bool(torch.isfinite(total).all()):
                raise UserError(f"factor {kind} of layer {name} is not finite; look for broken weights, or use dtype float32.")
    return Factors(sums_a, sums_s, tokens, labels, text_digest(rows))


def text_digest(rows: Iterable[Sequence[int]]) -> str:
    """Of the token ids of all sequences that predict something, in order."""
    return digest([list(map(int, row)) for row in rows if len(row) > 1])[:16]


def merge(first: Factors, second: Factors) -> Factors:
    """Means over both data sets: (n A + n' A') / (n + n'), the same for S (section on CrispEdit-Seq)."""
    if first.a.keys() != second.a.keys():
        raise UserError("factors of different layers cannot be merged; compute both for the same layers.")
    total = first.tokens + second.tokens
    one, two = first.tokens / total, second.tokens / total
    a = {name: one * value + two * second.a[name].to(value.device) for name, value in first.a.items()}
    s = {name: one * value + two * second.s[name].to(value.device) for name, value in first.s.items()}
    labels = first.labels if first.labels == second.labels else "mixed"
    return Factors(a, s, total, labels)


# --- files ------------------------------------------------------------------------------------------------------


def save(factors: Factors, model: nn.Module, layers: dict[str, nn.Linear], path: Path) -> Path:
    """safetensors with `<layer>/A` and `<layer>/S` in float64, and whose they are. The same factors give the same bytes."""
    from safetensors.torch import save_file

    tensors = {f"{name}/A": value.cpu().contiguous() for name, value in factors.a.items()}
    tensors |= {f"{name}/S": value.cpu().contiguous() for name, value in factors.s.items()}
    about = {
        "model": model_digest(model),
        "layers": {name: tensor_digest(layers[name].weight) for name in factors.a},
        "tokens": factors.tokens,
        "labels": factors.labels,
        "text": factors.text,
    }
    save_file(tensors, path, metadata={"factors": json.dumps(about, sort_keys=True)})  # one key: several have no fixed order
    return path


def load(path: Path, model: nn.Module, layers: dict[str, nn.Linear], rows: Iterable[Sequence[int]], labels: Labels) -> Factors:
    """Factors of exactly these layers of exactly this model over exactly this text, or one sentence that says what they are of
    instead: whoever edits checks the text that he names, and it would be another one that is protected."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stream:
            about = json.loads((stream.metadata() or {})["factors"])
            missing = [name for name in layers if name not in about["layers"]]
            if missing:
                raise UserError(
                    f"{path} has no factors of layer {missing[0]}; it has {', '.join(about['layers'])}: compute factors for the "
                    "layers that are edited."
                )
            for name, layer in layers.items():
                if about["layers"][name] != tensor_digest(layer.weight):
                    raise UserError(
                        f"{path} was computed for other weights of {name} (another model, or another dtype); compute factors "
                        "for this model."
                    )
            if about["model"] != model_digest(model):
                raise UserError(
                    f"{path} was computed for another model (its other layers differ); compute factors for this model."
                )
            if about["labels"] != labels:
                raise UserError(f"{path} has factors of labels '{about['labels']}', this job '{labels}'; set both alike.")
            if about["text"] != text_digest(rows):
                raise UserError(
                    f"{path} was computed over other text; give its job and this one the same capability, texts and tokens."
                )
            device = next(iter(layers.values())).weight.device
            a = {name: stream.get_tensor(f"{name}/A").to(device) for name in layers}
            s = {name: stream.get_tensor(f"{name}/S").to(device) for name in layers}
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; rebuild the job that computes factors.") from None
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{path} is not a file of factors ({error}); delete it and rebuild its job.") from None
    return Factors(a, s, about["tokens"], about["labels"], about["text"])
