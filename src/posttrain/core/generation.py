"""Sampling from a causal model, batched, with a KV cache; seeded per call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Sample(NamedTuple):
    """One response. ids end in EOS if `finished`; text is decoded without special tokens."""

    ids: list[int]
    text: str
    finished: bool


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    count: int,
    max_new_tokens: int,
    seed: int,
    temperature: float = 1.0,
    batch: int = 1024,
) -> list[list[Sample]]:
    """`count` samples for each prompt (token ids), in prompt order.

    Pure temperature sampling: no top-k, no top-p, so that log-probabilities of the model are those of the sampler.
    temperature 0 is greedy. `batch` is sequences at once. Prompts are sorted by length to save padding; padding is on
    the left. Results depend on (seed, batch) but not on the order of the prompts' lengths beyond that.
    """
    import torch

    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    per_call = max(1, batch // count)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    options = (
        {"do_sample": False} if temperature == 0 else {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    )
    results: list[list[Sample]] = [[] for _ in prompts]
    torch.manual_seed(seed)
    model.eval()
    for start in range(0, len(order), per_call):
        rows = order[start : start + per_call]
        width = max(len(prompts[i]) for i in rows)
        ids = torch.full((len(rows), width), pad)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for r, i in enumerate(rows):
            ids[r, width - len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[r, width - len(prompts[i]) :] = 1
        with torch.inference_mode(), _own_defaults_off(model):
            out = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=max_new_tokens,
                num_return_sequences=count,
                eos_token_id=eos,
                pad_token_id=pad,
                **options,
            )
        responses = [_cut(row, eos) for row in out[:, width:].tolist()]
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        for r, i in enumerate(rows):
            for s in range(r * count, (r + 1) * count):
                results[i].append(Sample(responses[s], texts[s], responses[s][-1:] == [eos]))
    return results


@contextlib.contextmanager
def _own_defaults_off(model: PreTrainedModel) -> Iterator[None]:
    """A hub model brings a repetition penalty, min-p and the like along, which generate() adds to what it is asked for."""
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _cut(ids: list[int], eos: int) -> list[int]:
    return ids[: ids.index(eos) + 1] if eos in ids else ids
