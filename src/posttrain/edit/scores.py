"""The scorecard of an edit: what is asked before and after, one row per edit, one row per held-out text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from posttrain.core import manifest
from posttrain.core.errors import UserError
from posttrain.edit import measure
from posttrain.edit.capability import Text
from posttrain.edit.edits import Faults, Row
from posttrain.edit.encoding import Pair, Style, pad_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.edit.crispedit import Config

FLOOR = 1e-12  # nats; smaller KL is rounding, and has no logarithm


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def encodable(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], style: Style, faults: Faults) -> list[Row]:
    """The rows whose target is text of its own after the prompt; see `Style.pair`."""
    found = []
    for row in rows:
        with faults.row():
            style.pair(tokenizer, row.edit.prompt, row.edit.target, row.where)
            found.append(row)
    if not found:
        raise UserError(f"no edit can be encoded; the first: {faults.first}")
    return found


class Questions:
    """What is asked of a model, encoded once. `ask` before and after, then `score` both."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], job: Config) -> None:
        """Raises UserError, with file and row, for an edit that cannot be encoded."""
        self.tokenizer, self.rows, self.job = tokenizer, rows, job
        self.pairs: list[Pair] = []
        self.places: list[dict[str, list[int]]] = []  # per edit: kind -> indices into pairs
        self.free: list[tuple[int, str, list[int]]] = []  # (edit, kind, prompt ids)
        self.responses: list[dict[str, Any]] = []
        for number, (edit, where) in enumerate(rows):
            self.places.append({})
            job.style.pair(tokenizer, edit.prompt, edit.target, where)
            if job.measure == "facts":
                self._facts(number, edit, where)
            else:
                asked = [
                    ("prompt", edit.prompt),
                    *(("paraphrase", p) for p in edit.paraphrases),
                    *(("benign", b) for b in edit.benign),
                ]
                self.free += [(number, kind, job.style.prompt(tokenizer, text)) for kind, text in asked]

    def _facts(self, number: int, edit, where: str) -> None:
        def add(kind: str, prompt: str, answer: str | None) -> None:
            if answer:
                self.places[number].setdefault(kind, []).append(len(self.pairs))
                self.pairs.append(self.job.style.pair(self.tokenizer, prompt, answer, where))

        compare = self.job.preferences and edit.gold
        add("efficacy", edit.prompt, edit.target)
        add("gold", edit.prompt, edit.gold)
        for paraphrase in edit.paraphrases:
            add("paraphrase", paraphrase, edit.target)
            add("paraphrase_gold", paraphrase, edit.gold if compare else None)
        for prompt, answer in edit.locality:
            add("locality", prompt, answer)
        for prompt, answer in edit.neighbours:
            add("neighbour", prompt, answer)
            add("neighbour_new", prompt, edit.target if compare else None)
        style = self.job.style._replace(context=self.job.context)
        asked = [("free", edit.prompt), *(("free_paraphrase", p) for p in edit.paraphrases[:1])]
        self.free += [(number, kind, style.prompt(self.tokenizer, text)) for kind, text in asked]

    def ask(self, model) -> tuple[list[measure.Answer], list[str]]:
        """(teacher-forced answers, free answers). EOS alone ends refusals, and answers to targets that hold a stop mark."""
        job = self.job
        answers = measure.forced(model, self.pairs, pad_of(self.tokenizer), job.score_batch) if self.pairs else []
        whole = [job.measure == "refusals" or measure.holds_stop(self.rows[n].edit.target) for n, _, _ in self.free]
        texts = [""] * len(whole)
        for to_the_end in sorted(set(whole)):
            chosen = [i for i, own in enumerate(whole) if own == to_the_end]
            found = measure.generate(
                model,
                self.tokenizer,
                [self.free[i][2] for i in chosen],
                max_new_tokens=job.max_new_tokens,
                end=[self.tokenizer.eos_token_id] if to_the_end else measure.stops(self.tokenizer),
                batch=job.score_batch,
            )
            for i, text in zip(chosen, found, strict=True):
                texts[i] = text
        return answers, texts

    def score(self, before, after) -> tuple[list[dict[str, Any]], dict[str, manifest.Metric]]:
        """(rows of edits.parquet, metrics). A score that no edit has (no paraphrases, say) is left out."""
        table = []
        for number, (edit, _) in enumerate(self.rows):
            row: dict[str, Any] = {
                "id": edit.id,
                "subject": edit.subject,
                "prompt": edit.prompt,
                "target": edit.target,
                "gold": edit.gold,
            }
            row |= (
                self._of_facts(number, before, after) if self.job.measure == "facts" else self._of_refusals(number, before, after)
            )
            table.append(row)
        names = [n for n in table[0] if n not in ("id", "subject", "prompt", "target", "gold", "free_text")]
        metrics = {}
        for name in names:
            values = [row[name] for row in table if row[name] is not None]
            if values:
                metrics[name.replace("before_", "before/")] = manifest.metric(values)
        return table, metrics

    def _of_facts(self, number: int, before, after) -> dict[str, Any]:
        (old, _), (new, texts) = before, after
        at = self.places[number]
        edit = self.rows[number].edit

        def share(kind: str, answers) -> float | None:
            return mean([answers[i].right for i in at.get(kind, [])])

        def kept(kind: str) -> float | None:
            return mean([measure.agreement(old[i], new[i]) for i in at.get(kind, [])])

        def prefers(kind: str, other: str) -> float | None:
            """Share of prompts after which the answer of `kind` is more probable, per token, than that of `other`."""
            pairs = zip(at.get(kind, []), at.get(other, []), strict=bool(at.get(other)))
            return mean([float(new[i].logprob > new[j].logprob) for i, j in pairs])

        free = {kind: text for (n, kind, _), text in zip(self.free, texts, strict=True) if n == number}
        result = {
            "efficacy": share("efficacy", new),
            "paraphrase": share("paraphrase", new),
            "locality": kept("locality"),
            "neighbour": kept("neighbour"),
            "free": float(measure.exact(free["free"], edit.target)),
            "free_start": float(measure.begins(free["free"], edit.target)),
            "free_paraphrase": float(measure.exact(free["free_paraphrase"], edit.target)) if "free_paraphrase" in free else None,
        }
        if self.job.preferences:
            result |= {
                "prefers_new": prefers("efficacy", "gold"),
                "paraphrase_prefers_new": prefers("paraphrase", "paraphrase_gold"),
                "neighbour_prefers_gold": prefers("neighbour", "neighbour_new"),
            }
        return result | {
            "before_efficacy": share("efficacy", old),
            "before_paraphrase": share("paraphrase", old),
            "before_known": share("gold", old),
            "free_text": free["free"],
        }

    def _of_refusals(self, number: int, before, after) -> dict[str, Any]:
        (_, old), (_, new) = before, after
        found: dict[str, list[float]] = {}
        for (n, kind, _), one, two in zip(self.free, old, new, strict=True):
            if n == number:
                found.setdefault(f"before_{kind}", []).append(float(measure.refuses(one)))
                found.setdefault(kind, []).append(float(measure.refuses(two)))
                self.responses.append({"id": self.rows[n].edit.id, "kind": kind, "before": one, "after": two})
        names = {"refusal": "prompt", "refusal_paraphrase": "paraphrase", "over_refusal": "benign"}
        return {f"{b}{name}": mean(found.get(f"{b}{kind}", [])) for b in ("", "before_") for name, kind in names.items()}


def drift_table(
    model, chosen, original, held: Sequence[Text], batch: int
) -> tuple[list[dict[str, Any]], dict[str, manifest.Metric]]:
    """Rows of drift.parquet and metrics: KL(base || edited) per token, and the relative change of the loss."""
    found = measure.drift(model, chosen, original, [t.ids for t in held], batch)
    table = [
        {
            "id": text.id,
            "source": text.source,
            "tokens": d.tokens,
            "kl": d.kl,
            "log_kl": math.log(max(d.kl, FLOOR)),
            "loss_before": d.before,
            "loss_after": d.after,
            "loss_change": d.after / max(d.before, FLOOR) - 1,
        }
        for text, d in zip(held, found, strict=True)
    ]
    total = sum(d.tokens for d in found)
    metrics = {
        "drift/kl": manifest.metric([row["kl"] for row in table]),
        "drift/kl_per_token": manifest.Metric(value=sum(d.kl * d.tokens for d in found) / total, n=total),
        "drift/loss_before": manifest.metric([row["loss_before"] for row in table]),
        "drift/loss_after": manifest.metric([row["loss_after"] for row in table]),
        "drift/loss_change": manifest.metric([row["loss_change"] for row in table]),
    }
    sources = sorted({t.source for t in held})
    for source in sources if len(sources) > 1 else ():
        metrics[f"drift/kl/{source}"] = manifest.metric([row["kl"] for row in table if row["source"] == source])
    return table, metrics
