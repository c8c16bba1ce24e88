"""The claims of the papers: their schema, and what turns an interval into a verdict."""

from __future__ import annotations

from typing import Literal, NamedTuple

from posttrain.core import config as configs
from posttrain.core.config import Model, key
from posttrain.core.stats import Interval

VERDICTS = ("replicated", "contradicted", "inconclusive", "not testable here")
COLUMNS = ("method", "claim", "statement", "paper_value", "estimate", "ci_low", "ci_high", "n", "seeds", "verdict", "reason")


class Claim(Model):
    """One claim, written down before it is measured."""

    statement: str = key(help="the claim in our own words")
    paper_value: str = key(help="the paper's figure, with its unit")
    source: str = key(help="where the figure stands")
    kind: Literal["difference", "rank", "overhead", "not_testable"] = key(help="the comparison that tests it")
    task: str | None = key(None, help="task of the comparison")
    arm: str | None = key(None, help="checkpoint (difference) or weighting (overhead) that the claim favours")
    baseline: str | None = key(None, help="what it is compared with")
    score: Literal["likelihood", "accuracy"] | None = key(None, help="rank: SFT-stage score")
    metric: str = key("pass@1", help="what is compared")
    smallest_effect: float = key(0.0, help="smallest effect that counts", ge=0)
    bound: float | None = key(None, help="overhead: largest ratio that counts as little", gt=1)
    scope: str = key(help="what the measured comparison can and cannot show")

    def model_post_init(self, _context) -> None:
        needed = {
            "difference": ("task", "arm", "baseline"),
            "rank": ("task", "score"),
            "overhead": ("task", "arm", "baseline", "bound"),
            "not_testable": (),
        }
        for name in needed[self.kind]:
            if getattr(self, name) is None:
                raise ValueError(f"kind: {self.kind} needs {name}; add it")


class Verdict(NamedTuple):
    verdict: str
    reason: str


def read_claims(path) -> dict[str, dict[str, Claim]]:
    """method -> claim -> Claim from configs/claims.yaml."""
    found = {}
    for method, claims in configs.read_yaml(path).items():
        found[method] = {name: configs.validate(Claim, values, f"{path}: {method}.{name}") for name, values in claims.items()}
    return found


def judge(interval: Interval, smallest: float, seeds: int) -> Verdict:
    """Verdict on "the effect is positive and at least `smallest`".

    replicated: the interval is above zero and the estimate reaches the smallest effect that counts. contradicted: the
    interval excludes an effect of that size. Otherwise inconclusive.
    """
    estimate, low, high = interval
    over = "items of one seed; other seeds may differ" if seeds == 1 else f"items and {seeds} seeds"
    if low > 0 and estimate >= smallest:
        return Verdict("replicated", f"interval above 0 over {over}")
    if high < 0:
        return Verdict("contradicted", f"the effect has the opposite sign over {over}")
    if high < smallest:
        return Verdict("contradicted", f"an effect of {smallest:g} or more is excluded over {over}")
    return Verdict("inconclusive", f"the interval holds both 0 (or less than {smallest:g}) and effects that count, over {over}")


def judge_bound(interval: Interval, bound: float, seeds: int) -> Verdict:
    """Verdict on "the ratio is at most `bound`"."""
    over = "batches of one run" if seeds == 1 else f"batches and {seeds} runs"
    if interval.high <= bound:
        return Verdict("replicated", f"at most {bound:g} over {over}")
    if interval.low > bound:
        return Verdict("contradicted", f"above {bound:g} over {over}")
    return Verdict("inconclusive", f"the interval holds {bound:g}, over {over}")
