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
    kind: Literal["difference", "at_most", "reversal", "overhead", "scalar", "rows", "not_testable"] = key(
        help="the comparison that tests it"
    )
    task: str | None = key(None, help="task of the comparison")
    arm: str | tuple[str, ...] | None = key(
        None, help="checkpoint (several: their mean), weighting (overhead) or column (rows) that the claim is about"
    )
    baseline: str | tuple[str, ...] | None = key(None, help="what it is compared with; rows: may be left out")
    family: str | None = key(None, help="difference, at_most: items of this family alone")
    reference: str | None = key(None, help="scalar, rows: <stage>/<method>/<variant> of the job that measured it")
    file: str | None = key(None, help="rows: table beside its manifest, one row per independent unit")
    against: str | None = key(None, help="rows: the job whose rows are subtracted, paired by pair_by")
    pair_by: tuple[str, ...] = key(("replicate",), help="rows: columns that say which rows of two jobs belong together")
    unit: str = key("rows", help="rows: what a row is, in the plural")
    seeded: bool = key(True, help="rows: whether each seed of the study has its own; an exact computation has none")
    where: dict[str, str | int | float] = key({}, help="rows: keep rows with these values")
    score: Literal["likelihood", "accuracy"] | None = key(None, help="reversal: SFT-stage score")
    arms: tuple[str, ...] = key((), help="reversal: SFT arms among which a reversed pair is looked for")
    metric: str = key("pass@1", help="what is compared")
    control: bool = key(False, help="a question of ours about the comparison, not a claim of the paper")
    smallest_effect: float = key(0.0, help="smallest effect that counts", ge=0)
    bound: float | None = key(None, help="overhead: largest ratio that counts as little; at_most, scalar, rows: the limit")
    side: Literal["at_most", "at_least"] = key("at_least", help="scalar, rows: on which side of the bound it should be")
    scope: str = key(help="what the measured comparison can and cannot show")

    def model_post_init(self, _context) -> None:
        needed = {
            "difference": ("task", "arm", "baseline"),
            "at_most": ("task", "arm", "baseline", "bound"),
            "scalar": ("reference", "bound"),
            "rows": ("reference", "file", "arm", "bound"),
            "reversal": ("task", "score", "arms"),
            "overhead": ("task", "arm", "baseline", "bound"),
            "not_testable": (),
        }
        for name in needed[self.kind]:
            if getattr(self, name) in (None, ()):
                raise ValueError(f"kind: {self.kind} needs {name}; add it")
        if self.kind == "overhead" and self.bound <= 1:
            raise ValueError(f"bound = {self.bound:g}: an overhead is a ratio above 1")

    @property
    def arms_compared(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Checkpoints of both sides."""
        return tuple((side,) if isinstance(side, str) else tuple(side or ()) for side in (self.arm, self.baseline))


class Verdict(NamedTuple):
    verdict: str
    reason: str


def read_claims(path) -> dict[str, dict[str, Claim]]:
    """method -> claim -> Claim from configs/claims.yaml."""
    found = {}
    for method, claims in configs.read_yaml(path).items():
        found[method] = {name: configs.validate(Claim, values, f"{path}: {method}.{name}") for name, values in claims.items()}
    return found


def judge(interval: Interval, smallest: float, seeds: int, *, baseline: float | None = None) -> Verdict:
    """Verdict on "the effect is positive and at least `smallest`".

    replicated: the interval is above zero and the estimate reaches the smallest effect that counts. contradicted: the
    interval holds no positive effect that counts, and is not positive either. Otherwise inconclusive; an effect that is
    surely positive but too small to count is said to be just that. baseline: mean of the share (0 to 1) that is to be
    improved; where too little room is left above it for an effect that counts, nothing can be concluded here.
    """
    estimate, low, high = interval
    over = "items of one seed; other seeds may differ" if seeds == 1 else f"items and {seeds} seeds"
    if baseline is not None and 1 - baseline < smallest:
        return Verdict("not testable here", f"the baseline reaches {baseline:.3f}, which leaves no room for {smallest:g}")
    if low > 0 and estimate >= smallest:
        return Verdict("replicated", f"interval above 0 over {over}")
    if low > 0:
        size = (
            f"but smaller than the {smallest:g} that counts"
            if high < smallest
            else f"but perhaps less than the {smallest:g} that counts"
        )
        return Verdict("inconclusive", f"positive, {size}, over {over}")
    if high < 0:
        return Verdict("contradicted", f"the effect has the opposite sign over {over}")
    if high < smallest:
        return Verdict("contradicted", f"an effect of {smallest:g} or more is excluded over {over}")
    return Verdict("inconclusive", f"the interval holds both 0 and effects that count, over {over}")


def judge_reversal(interval: Interval, smallest: float, seeds: int, pair: str, *, ordered: bool) -> Verdict:
    """Verdict on "some arm with the better SFT score is the worse start for RL".

    interval: RL gain of the pair's other arm, corrected for the number of pairs; ordered: whether the SFT scores of the
    pair differ beyond noise. What was not seen among these arms may happen among others, so it is never contradicted.
    """
    over = "items of one seed; other seeds may differ" if seeds == 1 else f"items and {seeds} seeds"
    if ordered and interval.low > 0 and interval.estimate >= smallest:
        return Verdict("replicated", f"{pair}: both differences beyond noise over {over}")
    if interval.estimate <= 0:
        return Verdict(
            "inconclusive", f"no pair of these arms is reversed: each arm with the better SFT score starts no worse, over {over}"
        )
    lacking = "after RL" if ordered else "in SFT score"
    return Verdict(
        "inconclusive",
        f"no pair is reversed beyond noise; in the nearest, {pair}, the difference {lacking} is within it, over {over}",
    )


def judge_bound(
    interval: Interval, bound: float, seeds: int, *, unit: str = "batches", side: Literal["at_most", "at_least"] = "at_most"
) -> Verdict:
    """Verdict on "the value is at most (at least) `bound`"."""
    over = f"{unit} of one run" if seeds == 1 else f"{unit} and {seeds} runs"
    inside, outside = interval.high <= bound, interval.low > bound
    if side == "at_least":
        inside, outside = interval.low >= bound, interval.high < bound
    words = ("at most", "above") if side == "at_most" else ("at least", "below")
    if inside:
        return Verdict("replicated", f"{words[0]} {bound:g} over {over}")
    if outside:
        return Verdict("contradicted", f"{words[1]} {bound:g} over {over}")
    return Verdict("inconclusive", f"the interval holds {bound:g}, over {over}")
