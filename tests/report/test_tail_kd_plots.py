"""TAD's plots: from tables alone, one file each, and a sentence where nothing was run."""

from __future__ import annotations

import json
import re
from pathlib import Path

from posttrain.core import manifest, tables
from posttrain.core.config import JobConfig
from posttrain.report import tail_kd


def publish(root: Path, reference: str, files: dict[str, list[dict]], history: list[dict] | None = None) -> None:
    output = root / reference / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True)
    written = [tables.write(rows, output.parent / f"{name}.parquet") for name, rows in files.items()]
    if history:
        path = output.parent / "history.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in history))
        written.append(path)
    manifest.publish(JobConfig(output=output), {}, written)


def draw(root: Path) -> dict[str, str]:
    folder = root / "report"
    folder.mkdir(exist_ok=True)
    tail_kd.main(tail_kd.Config(output=folder / "tail_kd_arms.svg", root=root, seeds=(0,), arms=("sft",), tasks=("t",)))
    return {path.stem: path.read_text() for path in folder.glob("*.svg")}


def test_each_plot_shows_what_is_in_the_tables(tmp_path):
    for i, arm in enumerate(("clm", "kd", "tad")):
        rows = [
            {"arm": arm, "replicate": r, "rate": rate, "kl": 0.4 - 0.1 * i, "kl1": 0.1, "alpha_s": 0.2, "alpha_t": 0.15}
            for r in range(2)
            for rate in ("own", "common")
        ]
        masses = [
            {"arm": arm, "replicate": 0, "rate": "own", "low": a, "high": b, "teacher": 0.5, "student": 0.4 + 0.05 * i}
            for a, b in ((0, 1), (1, 9))
        ]
        publish(tmp_path, f"distill/known/{arm}", {"replicates": rows, "buckets": masses})
        held = [{"row": r, "kl": 0.3 - 0.1 * i + 0.01 * r, "kl1": 0.1, "kl2": 0.5, "ce": 2.0 - 0.1 * r} for r in range(4)]
        publish(tmp_path, f"distill/tail_kd/prose-{arm}", {"rows": held}, [{"step": s, "fixed/kl": 1 / s} for s in (1, 2)])
    cells = [{"kind": "tad", "k": k, "beta": b, "kl": 0.123 * k * b, "kl2": 0.7} for k in (1, 10) for b in (1.0, 2.0)]
    publish(tmp_path, "distill/grid/known", {"grid": [*cells, {"kind": "kl", "k": 0, "beta": 0.0, "kl": 0.456, "kl2": 0.9}]})
    found = draw(tmp_path)
    assert set(found) == {plot.__name__ for plot in tail_kd.PLOTS}
    assert re.search(r">TAD<|<!-- TAD -->", found["tail_kd_arms"]) and "reverse KL" not in found["tail_kd_arms"]
    assert "Plain KL: 0.456" in found["tail_kd_grid"] and ">2.460<" in found["tail_kd_grid"]
    assert "no teacher" in found["tail_kd_ranks"] and "cross-entropy" in found["tail_kd_text"]
    assert draw(tmp_path) == found


def test_without_results_there_is_a_sentence(tmp_path):
    assert all("</svg>" in text for text in draw(tmp_path).values())
    assert "No arm was trained on known sources." in draw(tmp_path)["tail_kd_arms"]
