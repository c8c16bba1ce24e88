"""What mid-training and RL did to a lineage of checkpoints: weights, representations, and pass rate between them.

PRISM (arXiv 2603.17074): normalised divergence and update sparsity per tensor (eq 1), cosine of two directions (eq 2), linear
CKA of pooled hidden states, and the pass rate on the plane through base, mid and RL (eq 3). Weight metrics hold one tensor
of each model at a time, representations and the plane one model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from posttrain.core import cli, determinism, manifest, models, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.core.weights import Weights, landscape, require_same
from posttrain.data import chat, verify
from posttrain.data.items import take
from posttrain.evaluate import geometry

COMPONENTS: tuple[geometry.Component, ...] = ("embedding", "attention", "mlp", "ssm", "norm", "head", "other")


class Config(JobConfig):
    pairs: tuple[tuple[str, str], ...] = key(
        (), help="(old, new) names of models to compare; empty: all pairs, names of path first, then alphabetically"
    )
    directions: tuple[tuple[str, str, str], ...] = key((), help="(base, a, b): cosine of the changes base to a and base to b")
    gaps: tuple[tuple[str, str, str, str], ...] = key((), help="(base, a, b, c): cosine of base to a and b less that of a and c")
    ratios: tuple[tuple[str, str, str, str], ...] = key((), help="(a, b, c, d): how far a to b moved the weights over c to d")
    path: tuple[str, str, str] | None = key(
        None, help="(base, mid, rl): ratios of its two steps, and with task the pass rate on the plane through them"
    )
    total: tuple[geometry.Component, ...] = key(COMPONENTS, help="components whose tensors enter the totals")
    texts: int = key(200, help="texts for CKA (n), pieces of the corpus's test documents", gt=1)
    tokens: int = key(256, help="tokens of each text", gt=0)
    text_batch: int = key(1, help="texts per forward pass; 1 as in the paper, more are the same within rounding", gt=0)
    grid: int = key(5, help="points per side of the plane's grid over [0, 1] x [0, 1]", gt=1)
    path_points: int = key(9, help="points of each leg of the path base, mid, rl", gt=1)
    items: int = key(64, help="test prompts of the task for the pass rate", gt=1)
    families: tuple[str, ...] = key((), help="take prompts of these families alone, equally many of each; empty: all")
    samples: int = key(1, help="samples per prompt", gt=0)
    temperature: float = key(0.0, help="sampling temperature; 0: greedy", ge=0)
    max_new_tokens: int = key(48, help="longest response", gt=0)
    answer_style: verify.AnswerStyle = key("hash", help="how the answer is marked in a response")
    dtype: str = key("float32", help="weights of the models that run: float32 or bfloat16", pattern="^(float32|bfloat16)$")
    batch: int = key(1024, help="sequences at once (takes part in which random numbers a sequence gets)", gt=0)
    models: dict[str, Path] = key(help="name -> manifest of each checkpoint (JSON)", role="input")
    corpus: Path | None = key(None, help="corpus manifest, for CKA", role="input")
    task: Path | None = key(None, help="task manifest, for the pass rate on the plane", role="input")

    def model_post_init(self, _context) -> None:
        if len(self.models) < 2:
            raise ValueError(f"models names {sorted(self.models)}; a comparison needs two")
        used = {*itertools.chain(*self.pairs, *self.directions, *self.ratios, *self.gaps), *(self.path or ())}
        if unknown := sorted(used - set(self.models)):
            raise ValueError(
                f"'{unknown[0]}' in pairs, directions, gaps, ratios or path is no name in models, which has {sorted(self.models)}"
            )
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"samples = {self.samples} greedy answers (temperature 0) are all the same; set samples to 1")
        if self.task and not self.path:
            raise ValueError("task is for the plane through three models; name them in path or remove task")
        for base, a, b, c in self.gaps:
            if missing := sorted({(base, a, b), (base, a, c)} - set(self.directions)):
                raise ValueError(f"gaps need {list(missing[0])} among directions; add it")
        steps = {pair for a, b, c, d in self.ratios for pair in ((a, b), (c, d))}
        if missing := sorted(steps - set(self.compared)):
            raise ValueError(f"ratios need the step {list(missing[0])} among pairs; add it")
        if self.path and not {self.path[:2], self.path[1:]} <= set(self.compared):
            raise ValueError(f"path {list(self.path)} needs its two steps among pairs; add them")

    @property
    def compared(self) -> tuple[tuple[str, str], ...]:
        """The pairs. By default in an order that does not depend on how the mapping of models was written."""
        order = dict.fromkeys([*(self.path or ()), *sorted(self.models)])
        return self.pairs or tuple(itertools.combinations(order, 2))


def compare(job: Config, weights: dict[str, Weights], metrics: dict, undefined: list[str]) -> list[dict]:
    """Rows of tensors.parquet, and the metrics l2, l2_absolute, near_zero, identical and unchanged_* of every pair."""
    rows = []
    for old, new in job.compared:
        sums: dict[str, geometry.Change] = {}
        for name in weights[old].names:
            found, part = geometry.change(weights[old].tensor(name), weights[new].tensor(name)), geometry.component(name)
            inside = part in job.total
            for where in (part, "total") if inside else (part,):
                sums[where] = sums.get(where, geometry.Change()).plus(found)
            row = {"pair": f"{old}>{new}", "tensor": name, "component": part, "in_total": inside}
            counts = {"elements": found.elements, "near_zero": found.near_zero, "identical": found.identical}
            rows.append({**row, **counts, "divergence": found.divergence, **found.unchanged()})
        if "total" not in sums:
            raise UserError(f"total = {list(job.total)} holds no tensor of {job.models[old]}, which has {sorted(sums)}; add one.")
        for where, found in sums.items():
            at = f"{old}>{new}" if where == "total" else f"{old}>{new}/{where}"
            values = {"l2": found.divergence, "unchanged_1pct": found.unchanged()["unchanged_1pct"]}
            if where == "total":
                values |= {
                    **found.unchanged(),
                    "l2_absolute": found.moved**0.5,
                    "near_zero": found.near_zero / found.elements,
                    "identical": found.identical / found.elements,
                }
            _keep({f"{name}/{at}": value for name, value in values.items()}, metrics, undefined)
    return rows


def cosines(job: Config, weights: dict[str, Weights], metrics: dict, undefined: list[str]) -> None:
    """Metrics cosine/base:a,b, in total and per component, and cosine_gap/base:a,b,c."""
    for base, a, b in job.directions:
        sums: dict[str, geometry.Angle] = {}
        for name in weights[base].names:
            part = geometry.component(name)
            found = geometry.angle(*(weights[model].tensor(name) for model in (base, a, b)))
            for where in (part, "total") if part in job.total else (part,):
                sums[where] = sums.get(where, geometry.Angle()).plus(found)
        for where, found in sums.items():
            at = f"{base}:{a},{b}" if where == "total" else f"{base}:{a},{b}/{where}"
            _keep({f"cosine/{at}": found.cosine}, metrics, undefined)
    for base, a, b, c in job.gaps:
        near, far = (metrics.get(f"cosine/{base}:{a},{other}") for other in (b, c))
        gap = near - far if near is not None and far is not None else None
        _keep({f"cosine_gap/{base}:{a},{b},{c}": gap}, metrics, undefined)


def pieces(documents: Sequence[list[int]], tokens: int, count: int) -> list[list[int]]:
    """The first `count` pieces of exactly `tokens` tokens, taking the first of each document, then the second of each, ..."""
    longest = max((len(ids) for ids in documents), default=0)
    starts = range(0, longest - tokens + 1, tokens)
    found = (ids[start : start + tokens] for start in starts for ids in documents if len(ids) >= start + tokens)
    return list(itertools.islice(found, count))


def represent(job: Config, metrics: dict) -> list[dict]:
    """Rows of cka.parquet, and the metrics cka_min, cka_mean and, as a diagnostic, cka_uncentred_min of every pair."""
    manifest.read(job.corpus)
    documents = tables.read(job.corpus.parent / "documents.parquet", ["text"], [("split", "=", "test")])
    names = list(dict.fromkeys(itertools.chain(*job.compared)))
    # one tokenizer for all, or a difference of tokens would count as one of representations
    tokenizer = models.load_tokenizer(job.models[names[0]])
    texts = pieces(tokenizer([d["text"] for d in documents], add_special_tokens=False)["input_ids"], job.tokens, job.texts)
    if len(texts) < job.texts:  # CKA of few texts is biased towards 1
        raise UserError(
            f"texts = {job.texts}: {job.corpus} has {len(texts)} test texts of {job.tokens} tokens; lower texts or tokens."
        )
    states = {}
    for name in names:
        states[name] = geometry.pooled(models.place(models.load(job.models[name], job.dtype)), texts, job.text_batch)
    rows = []
    for old, new in job.compared:
        for layer, (x, y) in enumerate(zip(states[old], states[new], strict=True)):
            both = {"centred": geometry.cka(x, y), "uncentred": geometry.cka(x, y, centred=False)}
            rows.append({"pair": f"{old}>{new}", "layer": layer, **both})
    for pair in dict.fromkeys(row["pair"] for row in rows):
        values, diagnostic = ([row[kind] for row in rows if row["pair"] == pair] for kind in ("centred", "uncentred"))
        metrics[f"cka_min/{pair}"] = manifest.Metric(value=min(values), n=len(texts))
        metrics[f"cka_mean/{pair}"] = manifest.Metric(value=sum(values) / len(values), n=len(texts))
        metrics[f"cka_uncentred_min/{pair}"] = manifest.Metric(value=min(diagnostic), n=len(texts))
    return rows


def points(grid: int, path_points: int) -> dict[tuple[float, float], bool]:
    """(a, b) -> whether it lies on the path (a from 0 to 1 at b = 0, then b from 0 to 1 at a = 1), each once, in order."""
    side, leg = ([i / (count - 1) for i in range(count)] for count in (grid, path_points))
    wanted = {*itertools.product(side, side), *((a, 0.0) for a in leg), *((1.0, b) for b in leg)}
    return {(a, b): b == 0 or a == 1 for a, b in sorted(wanted)}


def plane(job: Config, weights: dict[str, Weights], metrics: dict) -> list[dict]:
    """Rows of landscape.parquet, and the metric pass_rate of the three models. Every point draws the same random numbers."""
    import torch

    from posttrain.core.generation import sample

    manifest.read(job.task)
    rows = tables.read(job.task.parent / "items.parquet", ["prompt", "answer", "family"], [("split", "=", "test")])
    items = take(rows, job.families, job.items)
    base, mid, rl = job.path
    tokenizer = models.load_tokenizer(job.models[rl])  # a hub's base may have no chat template
    prompts = [chat.prompt_ids(tokenizer, item["prompt"]) for item in items]
    model = models.place(models.load(job.models[base], job.dtype))
    state = weights[base].require_parameters_of(model)
    corners = {(0.0, 0.0): base, (1.0, 0.0): mid, (1.0, 1.0): rl}
    rows = []
    for (a, b), on_path in points(job.grid, job.path_points).items():
        with torch.no_grad():
            for name in weights[base].names:
                state[name].copy_(landscape(a, b, *(weights[one].tensor(name) for one in job.path)))
        drawn = sample(
            model,
            tokenizer,
            prompts,
            count=job.samples,
            max_new_tokens=job.max_new_tokens,
            seed=derive(job.seed, "landscape"),
            temperature=job.temperature,
            batch=job.batch,
        )
        right = [
            sum(verify.correct(one.text, item["answer"], job.answer_style) for one in responses) / len(responses)
            for item, responses in zip(items, drawn, strict=True)
        ]
        rate = manifest.metric(right)
        rows.append({"a": a, "b": b, "pass_rate": rate.value, "n": rate.n, "path": on_path})
        if (a, b) in corners:
            metrics[f"pass_rate/{corners[a, b]}"] = rate
    return rows


def _keep(values: dict[str, float | None], metrics: dict, undefined: list[str]) -> None:
    metrics.update({name: value for name, value in values.items() if value is not None})
    undefined += [name for name, value in values.items() if value is None]


def main(job: Config) -> None:
    """Writes tensors.parquet and, with a corpus and a task, cka.parquet and landscape.parquet.

    Metrics that would be 0/0 (the cosine of a component that did not move, say) are left out and listed on the card.
    """
    determinism.setup(job.seed)
    weights = {name: Weights(path) for name, path in sorted(job.models.items())}
    first, *others = weights.values()
    for other in others:
        require_same(first, other)
    metrics: dict[str, manifest.Metric | float] = {}
    undefined: list[str] = []
    files = [tables.write(compare(job, weights, metrics, undefined), job.folder / "tensors.parquet")]
    cosines(job, weights, metrics, undefined)
    steps = [f"{old}>{new}" for old, new in itertools.pairwise(job.path or ())]
    ratios = [tuple(f"{old}>{new}" for old, new in ((a, b), (c, d))) for a, b, c, d in job.ratios]
    for pair in [tuple(steps), *ratios] if steps else ratios:
        above, below = (metrics.get(f"l2/{step}") for step in pair)
        _keep({f"l2_ratio/{','.join(pair)}": above / below if above is not None and below else None}, metrics, undefined)
    if job.corpus:
        rows = represent(job, metrics)
        files.append(tables.write(rows, job.folder / "cka.parquet"))
        if steps:
            before, after = ([row["centred"] for row in rows if row["pair"] == step] for step in steps)
            higher = [y > x for x, y in zip(before, after, strict=True)]
            least = min(y - x for x, y in zip(before, after, strict=True))
            metrics[f"cka_gap_min/{steps[1]},{steps[0]}"] = manifest.Metric(value=least, n=len(higher))
            metrics[f"cka_higher_layers/{steps[1]},{steps[0]}"] = manifest.Metric(value=sum(higher) / len(higher), n=len(higher))
    if job.task:
        files.append(tables.write(plane(job, weights, metrics), job.folder / "landscape.parquet"))
    card = {
        # relative changes below the spacing of the storage dtype (bf16: 0.4 to 0.8 %) are rounded away before they are seen
        "dtypes": {name: one.dtypes() for name, one in weights.items()},
        "total": list(job.total),
        "tied_copies_left_out": {name: one.tied for name, one in weights.items() if one.tied},
        "undefined": sorted(undefined),
    }
    manifest.publish(job, metrics, files, card=card)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
