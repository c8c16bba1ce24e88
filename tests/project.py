"""A copy of the project with a tier of its own that runs in under a minute, for tests that change files and rerun."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

TIER = {
    "data": """
tasks:
  task:
    two_style: {kind: two_style, train: 256, validation: 16, test: 16}
tokenizer:
  tokenizer:
    style: {kind: characters, alphabet: "0123456789=ab#"}
mix:
  mix:
    two_style:
      tokens: 8000
      held_out_tokens: 500
      parts: {two_style: {share: 1.0, field: demonstration}}
      tokenizer: data/tokenizer/style
      sources: {two_style: data/tasks/two_style}
""",
    "base": """
scratch:
  defaults: {steps: 20, batch_size: 4, length: 64, learning_rate: 0.003, shape: {hidden: 16, layers: 1, heads: 2, intermediate: 32}}
  model:
    two_style: {mix: data/mix/two_style, tokenizer: data/tokenizer/style}
""",
    "midtrain": "",
    "sft": """
traces:
  task:
    two_style: {source: policy, train: 200, validation: 16, tokenizer: base/scratch/two_style, task: data/tasks/two_style}
train:
  defaults: {steps: 12, batch_size: 16, clip_delta: [-1.0, 0.5], checkpoint_every: 4}
  task:
    two_style: {start: base/scratch/two_style, traces: sft/traces/two_style}
  arm:
    sft: {weighting: sft}
    pear_token: {weighting: pear_token}
overhead:
  defaults: {batch_size: 8, repeats: 4, warmup_batches: 1}
  task:
    two_style: {start: base/scratch/two_style, traces: sft/traces/two_style}
""",
    "rl": """
grpo:
  defaults: {steps: 4, batch_size: 16, generations: 4, max_new_tokens: 10, learning_rate: 0.001, kl_prompts: 4, checkpoint_every: 2}
  task:
    two_style: {task: data/tasks/two_style}
""",
    "distill": "",
    "edit": "",
    "evaluate": """
reasoning:
  task:
    two_style: {task: data/tasks/two_style, items: 16, samples: 8, max_new_tokens: 10}
""",
    "report": "",
}


class Project:
    """A folder with the project's files and the tier `test`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\n")
        for name in filter(None, listed):
            source = ROOT / name
            if source.is_symlink() or source.is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, folder / name, follow_symlinks=False)
        (folder / "configs" / "test").mkdir()
        for stage, text in TIER.items():
            (folder / "configs" / "test" / f"{stage}.yaml").write_text(text)
        config = folder / "configs" / "config.yaml"
        config.write_text(config.read_text().replace("tier: tiny", "tier: test"))
        self.results = folder / "results" / "test"

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("POSTTRAIN_", "WANDB_"))}
        return {**kept, "PATH": path, "PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "1"}

    def call(self, *words: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            env={**self.environment, **environment},
        )

    def snakemake(self, *words: str, **environment: str) -> subprocess.CompletedProcess:
        return self.call("-m", "snakemake", "--cores", "2", *words, **environment)

    def run(self, *words: str) -> str:
        """Run through `posttrain.run` (warm server); fails the test if the workflow fails."""
        done = self.call("-m", "posttrain.run", *words)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def planned(self, *words: str) -> set[str]:
        """Messages of the jobs that a dry run would start."""
        done = self.snakemake("-n", *words)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        text = done.stdout + done.stderr
        found = set(re.findall(r"^(?:Job|Localjob|localjob) \d+: (.*)$", text, re.M))
        return {
            m
            for m in found
            if not m.startswith(("The study is complete", "Every checkpoint", "PEAR's comparison", "All SFT arms"))
        }

    @contextlib.contextmanager
    def edited(self, name: str, old: str, new: str) -> Iterator[None]:
        """Replace text in a file for a while; content and time stamp come back."""
        path = self.folder / name
        text, stat = path.read_text(), path.stat()
        assert old in text, f"{old!r} is not in {name}"
        path.write_text(text.replace(old, new, 1))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
