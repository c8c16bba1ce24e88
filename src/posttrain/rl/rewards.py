"""Verifiable rewards for TRL's GRPO trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from posttrain.core.tracking import read_history
from posttrain.data import verify


def text_of(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion, in TRL's plain or conversational form."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


class RewardLog:
    """Rewards of every prompt over the steps, in a file that grows, so that a resumed run has those before it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        found = self._lines()
        self.attempt = 1 + max((row["attempt"] for row in found), default=0)
        path.write_text("".join(json.dumps(row) + "\n" for row in found))  # without a line that a kill cut short

    def _lines(self) -> list[dict[str, Any]]:
        return read_history(self.path) if self.path.exists() else []

    def add(self, step: int, ids: Sequence[str], families: Sequence[str], rewards: Sequence[float]) -> None:
        """Rewards of one batch; completions of one prompt are added up."""
        groups: dict[str, list[float]] = {}
        family = dict(zip(ids, families, strict=True))
        for name, reward in zip(ids, rewards, strict=True):
            groups.setdefault(name, []).append(reward)
        row = {"attempt": self.attempt, "step": step}
        lines = [{**row, "id": n, "family": family[n], "n": len(r), "correct": sum(r)} for n, r in groups.items()]
        with open(self.path, "a") as stream:
            stream.write("".join(json.dumps(line) + "\n" for line in lines))

    def rows(self) -> list[dict[str, Any]]:
        """{step, id, family, n, correct} in step order; a step that two attempts made is the later one's."""
        lines = self._lines()
        last = {line["step"]: line["attempt"] for line in lines}  # attempts stand in order
        kept = [line for line in lines if line["attempt"] == last[line["step"]]]
        return [{k: v for k, v in line.items() if k != "attempt"} for line in sorted(kept, key=lambda line: line["step"])]


def exact_answer(
    style: verify.AnswerStyle, keep: list[dict[str, Any]] | None = None, log: RewardLog | None = None
) -> Callable[..., list[float]]:
    """A reward function: 1.0 for the verified answer, else 0.0. The dataset's `answer` column is the gold.

    `keep` receives the rows of the latest call (for a table of rollouts), `log` the reward of every completion of all
    calls, where the dataset has the columns id and family.
    """

    def reward(prompts, completions, answer, trainer_state=None, **columns) -> list[float]:
        texts = [text_of(completion) for completion in completions]
        values = [float(verify.correct(text, gold, style)) for text, gold in zip(texts, answer, strict=True)]
        if keep is not None:
            keep[:] = [
                {"prompt": text_of(p), "completion": t, "answer": a, "reward": v}
                for p, t, a, v in zip(prompts, texts, answer, values, strict=True)
            ]
        if log is not None and "id" in columns:
            log.add(trainer_state.global_step, columns["id"], columns["family"], values)
        return values

    return reward
