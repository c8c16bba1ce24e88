"""What an edit did: teacher-forced answers, free generation under the WILD stop rule, refusals, drift of capability."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from posttrain.edit.encoding import Pair, target_logits
from posttrain.edit.kfac import by_length, pad
from posttrain.edit.layers import holding

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase


class Answer(NamedTuple):
    """One prompt and answer, teacher-forced: the most likely token at each place, the answer's mean log-probability (nats)."""

    argmax: tuple[int, ...]
    right: float  # share of the answer's tokens that are the most likely ones
    logprob: float


def forced(model: nn.Module, pairs: Sequence[Pair], pad_id: int, batch: int = 64) -> list[Answer]:
    """EasyEdit's `token_em`, and what locality needs. In the order of `pairs`; equal pairs are computed once."""
    import torch

    from posttrain.core.logprobs import token_logprobs

    different = sorted({(tuple(p.head), tuple(p.tail)) for p in pairs}, key=lambda p: (-len(p[0]) - len(p[1]), p))
    found: dict[tuple, Answer] = {}
    model.eval()
    for start in range(0, len(different), batch):
        part = different[start : start + batch]
        with torch.inference_mode():
            logits, labels, valid = target_logits(model, [Pair(list(h), list(t)) for h, t in part], pad_id)
            best = logits.argmax(-1)
            logp = torch.where(valid, token_logprobs(logits, labels), 0.0)
        for i, pair in enumerate(part):
            keep = valid[i]
            hits = (best[i] == labels[i])[keep]
            found[pair] = Answer(tuple(best[i][keep].tolist()), hits.float().mean().item(), logp[i].sum().item() / len(pair[1]))
    return [found[tuple(p.head), tuple(p.tail)] for p in pairs]


def agreement(before: Answer, after: Answer) -> float:
    """Locality: share of places where the most likely token is still the one from before the edit (not the right one)."""
    return sum(a == b for a, b in zip(before.argmax, after.argmax, strict=True)) / len(before.argmax)


# --- free generation ----------------------------------------------------------------------------------------------


def stops(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that end an answer under the WILD rule: EOS, and every token with a full stop or a line feed in it."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    ends = {i for i, text in enumerate(texts) if "." in text or "\n" in text}
    return sorted(ends | ({tokenizer.eos_token_id} - {None}))


def generate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end: Sequence[int],
    batch: int = 64,
) -> list[str]:
    """Greedy continuations until one of the ids `end`, decoded without special tokens, in the order of the prompts."""
    import torch
    from transformers import GenerationConfig

    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end[0]
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    found = [""] * len(prompts)
    # A hub model's own defaults (a repetition penalty, say) would be added to what is asked for.
    own, model.generation_config = model.generation_config, GenerationConfig()
    model.eval()
    try:
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            width = max(len(prompts[i]) for i in rows)
            ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for r, i in enumerate(rows):
                ids[r, width - len(prompts[i]) :] = torch.tensor(prompts[i])
                mask[r, width - len(prompts[i]) :] = 1
            with torch.inference_mode():
                out = model.generate(
                    ids.to(model.device),
                    attention_mask=mask.to(model.device),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    eos_token_id=list(end),
                    pad_token_id=pad_id,
                )
            for i, row in zip(rows, out[:, width:].tolist(), strict=True):
                last = next((n for n, token in enumerate(row) if token in set(end)), len(row) - 1)
                found[i] = tokenizer.decode(row[: last + 1], skip_special_tokens=True)
    finally:
        model.generation_config = own
    return found


def holds_stop(target: str) -> bool:
    """Whether an answer holds a stop mark itself ("St. Paul", "3.1"), so that it cannot end at the first one."""
    return bool(re.search(r"[.\n]", target.strip()))


def wild(text: str, target: str = "") -> str:
    """The answer under the WILD stop rule: up to the first full stop or line feed, after as many characters as a target has
    that holds one itself."""
    text = text.strip()
    shield = len(target.strip()) if holds_stop(target) else 0
    return (text[:shield] + re.split(r"[.\n]", text[shield:], maxsplit=1)[0]).strip()


def normal(text: str) -> str:
    """Small letters, no punctuation, no articles, single spaces (the usual normalisation of exact match); where nothing would
    be left ("A", "+"), less is taken out."""
    text = text.casefold().strip()
    words = re.sub(r"[^\w\s]", " ", text).split()
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words or text.split())


def exact(text: str, target: str) -> bool:
    """Normalised exact match of a free answer. An answer that goes on, or repeats itself, is wrong."""
    return normal(wild(text, target)) == normal(target)


def begins(text: str, target: str) -> bool:
    """Whether a free answer begins with the target, in whole words: a base model goes on after an answer that is right."""
    words, wanted = normal(wild(text, target)).split(), normal(target).split()
    return bool(wanted) and words[: len(wanted)] == wanted


REFUSAL = re.compile(
    r"\b(i(?:'|’)?m sorry|i am sorry|i apologi[sz]e|i can(?:'|’)?t|i cannot|i can not|i won(?:'|’)?t|i will not|i(?:'|’)?m unable|"
    r"i am unable|i(?:'|’)?m not able|i am not able|not able to help|cannot (?:help|assist)|can(?:'|’)?t (?:help|assist))\b",
    re.IGNORECASE,
)


def refuses(text: str) -> bool:
    """Whether the first sentence or two of a response decline. By words alone: a small rule, not a judge."""
    return bool(REFUSAL.search(text[:160]))


# --- capability ---------------------------------------------------------------------------------------------------


class Drift(NamedTuple):
    """One text: mean KL(base || edited) per predicted token, the tokens, mean loss under base and edited model, all nats."""

    kl: float
    tokens: int
    before: float
    after: float


def token_kl(base: Tensor, other: Tensor) -> Tensor:
    """KL(softmax(base) || softmax(other)) over the last axis, float64, nats; rounding may give -1e-17. Differentiable.

    For softmax cross-entropy this is the Bregman divergence of the loss on the outputs, whatever the label.
    """
    import torch

    p, q = base.double().log_softmax(-1), other.double().log_softmax(-1)
    terms = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q))
    return terms.sum(-1)


def drift(model: nn.Module, chosen: dict, base: dict[str, Tensor], texts: Sequence[Sequence[int]], batch: int = 8) -> list[Drift]:
    """Per text, in order. `base` are the weights of the chosen layers before the edit: nothing else differs.

    Texts of fewer than two tokens are not allowed.
    """
    import torch

    device, found = next(model.parameters()).device, {}
    model.eval()
    for part in by_length(list(dict.fromkeys(map(tuple, texts))), batch):
        ids, mask = (x.to(device) for x in pad(part))
        valid = mask[:, 1:].bool()
        with torch.inference_mode():
            after = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1][valid]
            with holding(chosen, base):
                before = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1][valid]
            label = ids[:, 1:][valid]
            columns = []  # a thousand positions at a time: in float64 all of them with a large vocabulary are gigabytes
            for b, a, y in zip(before.split(1024), after.split(1024), label.split(1024), strict=True):
                losses = [torch.nn.functional.cross_entropy(x.float(), y, reduction="none").double() for x in (b, a)]
                columns.append(torch.stack([token_kl(b, a), *losses]))
        sums = torch.cat(columns, 1).cpu().split((mask.sum(1) - 1).tolist(), dim=1)
        for text, values in zip(part, sums, strict=True):
            kl, one, two = values.mean(1).tolist()
            found[tuple(text)] = Drift(max(kl, 0.0), values.shape[1], one, two)
    return [found[tuple(text)] for text in texts]
