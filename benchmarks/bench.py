"""`make bench`: measure what the project promises about its own cost; writes benchmarks/results.json.

Each figure is a ratio taken within one run, so that it holds on another machine. Needs the finished tiny tier
(`make run`) for a model and traces.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from posttrain.core import manifest

RESULTS = Path("results/tiny")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "POSTTRAIN_THREADS": "1"}


def seconds(words: list[str], repeats: int) -> float:
    """Median wall time of a command."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(words, check=True, capture_output=True, env=ENVIRONMENT)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def help_time() -> dict:
    """(a) --help of the SFT module over an empty interpreter."""
    bare = seconds([sys.executable, "-c", "pass"], 15)
    ours = seconds([sys.executable, "-m", "posttrain.sft.train", "--help"], 15)
    pydantic = seconds([sys.executable, "-c", "import pydantic; pydantic.BaseModel"], 15)
    measured = f"{ours / bare:.1f}x ({ours * 1000:.0f} ms; importing pydantic alone {pydantic / bare:.1f}x)"
    return {
        "what": "`python -m posttrain.sft.train --help` over `python -c pass`",
        "ratio": ours / bare,
        "measured": measured,
        "goal": "<= 5x",
    }


def trainer_time() -> dict:
    """(b) a step of the SFT trainer over a bare PyTorch loop on the same model and batches."""
    import torch

    from posttrain.core import determinism, models, tables
    from posttrain.sft import train

    determinism.setup(0)
    start = RESULTS / "base/scratch/student/seed0/manifest.json"
    stored = RESULTS / "sft/traces/addition/seed0/manifest.json"
    tokenizer = models.load_tokenizer(start)
    rows = [train.example(r, 512) for r in tables.read(stored.parent / "traces.parquet", None, [("split", "=", "train")])]
    job = train.Config(
        output=Path("/nonexistent/sft/train/b/seed0/manifest.json"), start=start, traces=stored, steps=40, batch_size=64
    )
    ratios = []
    for _ in range(3):
        model = models.load(start)
        began = time.perf_counter()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        for step in range(40):
            batch = train.collate([rows[i] for i in order[step * 64 : (step + 1) * 64]], tokenizer.pad_token_id)
            out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
            labels = batch["labels"][:, 1:]
            mask = labels != -100
            torch.nn.functional.cross_entropy(out.logits[:, :-1][mask].float(), labels[mask]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        bare = time.perf_counter() - began
        model = models.load(start)
        trainer = train.make_trainer(model, job, rows, tokenizer.pad_token_id, [])
        began = time.perf_counter()
        trainer.train()
        ratios.append((time.perf_counter() - began) / bare)
    ratio = statistics.median(ratios)
    return {
        "what": "40 SFT steps through the trainer over a bare PyTorch loop",
        "ratio": ratio,
        "measured": f"{ratio:.2f}x",
        "goal": "<= 1.3x",
    }


def outside_share() -> dict:
    """(c) share of the two cores' time that a study spends outside model work, from the last `make run`."""
    state = json.loads(Path("benchmarks/jobs/last_run.json").read_text())
    inside = sum(
        json.loads(p.read_text())["wall_seconds"]
        for p in RESULTS.rglob("provenance.json")
        if p.stat().st_mtime >= state["started"]
    )
    share = 1 - inside / (state["seconds"] * state["cores"])
    measured = f"{share:.0%} of {state['cores']} x {state['seconds']:.0f} s ({state['jobs']} jobs, {'warm' if state['warm'] else 'cold'})"
    return {
        "what": "share of `make run` outside jobs' own work, idle cores included",
        "ratio": share,
        "measured": measured,
        "goal": "<= 15 %",
    }


def dry_run_time() -> list[dict]:
    """(d) planning the whole DAG."""
    found = []
    for tier in ("tiny", "paper"):
        took = seconds(
            [sys.executable, "-m", "snakemake", "-n", "all", "--cores", "2", "--forceall", "--config", f"tier={tier}"], 3
        )
        found.append(
            {"what": f"dry run of the {tier} tier, every job", "ratio": took, "measured": f"{took:.1f} s", "goal": "<= 5 s"}
        )
    return found


def pear_time() -> dict:
    """(e) a PEAR step over a plain SFT step (of the overhead job)."""
    found = manifest.read(RESULTS / "sft/overhead/addition/seed0/manifest.json").metrics
    worst = max(value.value for value in found.values())
    measured = ", ".join(f"{name.removeprefix('ratio/pear_')} {value.value:.3f}x" for name, value in sorted(found.items()))
    return {"what": "step time of PEAR over SFT, same batches", "ratio": worst, "measured": measured, "goal": "<= 1.05x"}


def stream_time(tokens: int = 1_000_000) -> dict:
    """(f) tokens/s of a packed two-source stream through a DataLoader with 2 workers (one of which reads) over 0 workers."""
    import random
    import tempfile

    import torch

    from posttrain.core import tables
    from posttrain.data import stream_training, streams, tokenizer

    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 9))) for _ in range(2000)]
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name, longest in (("short", 60), ("long", 2000)):
            (Path(folder) / name).mkdir()
            for shard in range(4):
                rows = [{"text": " ".join(rng.choices(words, k=rng.randint(5, longest)))} for _ in range(120_000 // longest)]
                tables.write(rows, Path(folder) / name / f"{shard}.parquet")
            found[name] = {"share": 0.5, "path": Path(folder) / name, "text": "text"}
        built = tokenizer.wrap(tokenizer.byte_pairs([row["text"] for row in rows], 2048))
        config = streams.StreamConfig(sources=found, tokens=tokens, length=1024, window=64)
        speeds: dict[int, list[float]] = {0: [], 2: []}
        for _, workers in [(i, w) for i in range(3) for w in speeds]:
            feed = stream_training.Feed(streams.TokenStream(config, built, 0), 8)
            batches = iter(torch.utils.data.DataLoader(stream_training.dataset(feed), batch_size=8, num_workers=workers))
            next(batches)  # workers have started, shards are open
            began = time.perf_counter()
            count = sum(batch["input_ids"].numel() for batch in batches)
            speeds[workers].append(count / (time.perf_counter() - began))
    plain, ahead = (statistics.median(speeds[workers]) for workers in (0, 2))
    return {
        "what": "tokens/s of a streamed mix with 2 data-loader workers over 0, with nothing else to do",
        "ratio": ahead / plain,
        "measured": f"{ahead / plain:.2f}x ({plain / 1000:.0f}k tokens/s in the training process)",
        "goal": ">= 0.8x",
    }


DISTILL = """
import resource, sys, time
import torch
from posttrain.core import determinism, models
from posttrain.distill import divergences
from posttrain.distill.formulas import Divergence

determinism.setup(0)
vocabulary, rows, length, repeats = 49_152, 4, 128, int(sys.argv[1])
tokenizer = type("T", (), {"__len__": lambda self: vocabulary, "eos_token_id": 1, "pad_token_id": 0})()
teacher, student = (models.scratch(models.Shape(hidden=h, layers=4, heads=4, intermediate=3 * h), tokenizer) for h in (256, 128))
ids = torch.randint(vocabulary, (rows, length))
labels, mask = torch.randint(vocabulary, (rows, length)), torch.ones(rows, length, dtype=torch.bool)
arms = {"kl": Divergence(kind="kl"), "tad": Divergence(k=10, beta=2.0)}

def step(name):
    with torch.no_grad():
        target = teacher(ids, use_cache=False).logits
    logits = student(ids, use_cache=False).logits
    if name == "torch":  # as it is usually written
        lt, ls = target.log_softmax(-1), logits.log_softmax(-1)
        loss = torch.nn.functional.kl_div(ls, lt, log_target=True, reduction="sum")
        loss = (loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")) / mask.sum()
    else:
        loss = divergences.loss(target, logits, mask, arms[name], labels=labels, ce_weight=1.0)[0].sum() / mask.sum()
    loss.backward()
    student.zero_grad()

names = sys.argv[2].split(",")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
times = {name: [] for name in names}
for repeat in range(repeats):
    for name in names:
        began = time.process_time()
        step(name)
        times[name].append(time.process_time() - began)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(peak, *(sorted(times[name][repeats > 1:])[len(times[name][repeats > 1:]) // 2] for name in names))
"""


def distill_cost() -> list[dict]:
    """(g) a training step of TAD over one of plain KL at a vocabulary of 49,152: core time in one process, peak memory in two."""

    def run(repeats: int, names: str) -> list[float]:
        words = [sys.executable, "-c", DISTILL, str(repeats), names]
        return [
            float(x) for x in subprocess.run(words, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout.split()
        ]

    _, kl, tad, usual = run(9, "kl,tad,torch")
    (kl_peak, _), (tad_peak, _), (usual_peak, _) = (run(1, name) for name in ("kl", "tad", "torch"))
    return [
        {
            "what": "a distillation step of TAD over plain KL at V = 49,152",
            "ratio": tad / kl,
            "measured": f"{tad / kl:.2f}x ({tad / usual:.2f}x of KL as torch's own functions compute it)",
            "goal": "<= 1.1x",
        },
        {
            "what": "peak memory of that step over plain KL, beyond the models",
            "ratio": tad_peak / kl_peak,
            "measured": f"{tad_peak / kl_peak:.2f}x ({tad_peak / usual_peak:.2f}x of KL by torch's own functions)",
            "goal": "<= 1.1x",
        },
    ]


def projector_cost(sizes: tuple[int, ...] = (16, 24, 32, 48, 64), gamma: float = 0.9) -> list[dict]:
    """(h) CrispEdit's projection of a d x d gradient without and with the dense projector: time and bytes held, by size, and
    against the eigendecompositions that it rests on."""
    import torch

    from posttrain.edit.kfac import Factors
    from posttrain.edit.projector import projectors, spectrum

    def timed(work, repeats: int) -> float:
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    generator, rows = torch.Generator().manual_seed(0), []
    for d in (*sizes, 512, 1024):
        a, s = (x.T @ x / d for x in torch.randn(2, d, d, generator=generator, dtype=torch.float64))
        q = torch.randn(d, d, generator=generator)
        factors = Factors({"l": a}, {"l": s}, 1)
        project = projectors(factors, gamma)[0]["l"]
        free = timed(lambda project=project, q=q: project(q), 21)
        eigen = timed(lambda a=a, s=s: (spectrum(a), spectrum(s)), 1 if d > 500 else 5)
        kept = (project.rows, project.columns, *(pairs for _, _, pairs in project.steps))
        held = sum(t.numel() * t.element_size() for t in kept)
        row = {"d": d, "free": free, "eigen": eigen, "held": held}
        if d in sizes:  # the dense one is d^2 x d^2
            dense = torch.stack([project(e.view(d, d)).flatten() for e in torch.eye(d * d)])
            row |= {
                "dense": timed(lambda dense=dense, q=q: dense @ q.flatten(), 21),
                "dense_held": dense.numel() * dense.element_size(),
            }
        rows.append(row)
    last = next(row for row in rows if row["d"] == sizes[-1])
    by_size = ", ".join(f"d={r['d']} {r['dense'] / r['free']:.1f}x" for r in rows if "dense" in r)
    large = rows[-1]
    return [
        {
            "what": f"time of the dense projection of a {last['d']} x {last['d']} gradient over the matrix-free one",
            "ratio": last["dense"] / last["free"],
            "measured": f"{by_size}; memory {last['dense_held'] / last['held']:.0f}x at d={last['d']}",
            "goal": ">= 1x",
        },
        {
            "what": f"matrix-free projections of a {large['d']} x {large['d']} gradient that cost as much as the eigendecompositions",
            "ratio": large["eigen"] / large["free"],
            "measured": f"{large['eigen'] / large['free']:.0f} (projection {1000 * large['free']:.0f} ms, eigendecompositions "
            f"{large['eigen']:.2f} s, {large['held'] / 2**20:.0f} MiB held)",
            "goal": "for information",
        },
    ]


def edit_step_time(steps: int = 12, texts: int = 6) -> dict:
    """(i) a step of CrispEdit's edit phase over one of plain fine-tuning, SmolLM2, the same batches in turn."""
    from posttrain.core import determinism, models
    from posttrain.edit import editors, kfac, layers
    from posttrain.edit.edits import Edit, Row

    determinism.setup(0)
    start = RESULTS / "base/packaged/smollm2/seed0/manifest.json"
    model, tokenizer = models.load(start), models.load_tokenizer(start)
    words = ("Peru", "Chad", "Oman", "Iran", "Fiji", "Cuba", "Mali", "Laos", "Togo", "Niue", "Guam", "Iraq")
    rows = [Row(Edit(id=w, subject=w, prompt=f"The capital of {w} is", target="Oslo"), w) for w in words]
    names = ("model.layers.1[345].mlp.down_proj",)
    chosen = layers.choose(model, names)
    factors = kfac.accumulate(model, chosen, [tokenizer("A sentence about nothing at all. " * 6)["input_ids"]] * texts)
    original, seconds = layers.copies(chosen), {}
    for _ in range(2):  # the first round warms up
        for projection in ("none", "grad"):
            common = {"layers": names, "gamma": 0.9, "refresh": None, "skip_below": 0.0, "stop_below": 0.0}
            settings = editors.Settings(projection=projection, epochs=steps // 2, **common)
            stats = editors.edit(model, tokenizer, rows, settings, factors=factors, texts=[[1, 2]])
            seconds[projection] = statistics.median(stats.step_seconds)
            for name, layer in chosen.items():
                layer.weight.data.copy_(original[name])
    ratio = seconds["grad"] / seconds["none"]
    return {
        "what": "step of CrispEdit's edit phase over plain fine-tuning (SmolLM2, three layers, 12 edits)",
        "ratio": ratio,
        "measured": f"{ratio:.2f}x ({seconds['none']:.2f} s a step without projection)",
        "goal": "<= 1.2x",
    }


def main() -> None:
    entries = [help_time(), trainer_time(), outside_share(), *dry_run_time(), pear_time(), stream_time(), *distill_cost()]
    entries += [*projector_cost(), edit_step_time()]
    found = {"command": "make bench", "packages": manifest.packages(), "cores": len(os.sched_getaffinity(0)), "entries": entries}
    Path("benchmarks/results.json").write_text(json.dumps(found, indent=1) + "\n")
    for entry in entries:
        print(f"{entry['what']}: {entry['measured']} (goal {entry['goal']})")


if __name__ == "__main__":
    main()
