"""The claims of the papers: their schema, and what turns an interval into a verdict."""

from __future__ import annotations

from typing import Literal, NamedTuple

from posttrain.core import config as configs
from posttrain.core.config import Model, key
from posttrain.core.stats import Interval

VERDICTS = ("replicated", "contradicted", "inconclusive", "not testable here")
COLUMNS = ("method", "claim", "statement", "paper_value", "estimate", "ci_low", "ci_high", "n", "seeds", "verdict", "reason")


class Moot(Model):
    """When a comparison says nothing: a metric of some job (minus that of another one), mean over seeds, on the wrong side of a
    bound."""

    reference: str = key(help="<stage>/<method>/<variant>")
    metric: str = key(help="name in its manifest")
    against: str | None = key(None, help="job whose value is subtracted")
    at_least: float | None = key(None, help="moot from this value on")
    at_most: float | None = key(None, help="moot up to this value")
    because: str = key(help="what then cannot be concluded, for the reason column")

    def model_post_init(self, _context) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("moot_if needs either at_least or at_most; give one of them")

    def holds(self, value: float) -> bool:
        return value >= self.at_least if self.at_least is not None else value <= self.at_most


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
    file: str | None = key(None, help="rows: table beside its manifest")
    against: str | None = key(None, help="rows: the job whose rows are subtracted, paired by pair_by")
    pair_by: tuple[str, ...] = key(("replicate",), help="rows: columns that say which rows of two jobs belong together")
    independent_by: tuple[str, ...] = key(
        (), help="rows: columns that name an independent unit, whose rows are averaged; empty: each row is one"
    )
    moot_if: tuple[Moot, ...] = key((), help="when the comparison says nothing, whatever its interval: any of these")
    pooled: bool = key(False, help="rows: units of all seeds are independent, so that seeds are no level of their own")
    unit: str = key("rows", help="rows: what an independent unit is, in the plural")
    seeded: bool = key(True, help="rows: whether each seed of the study has its own; an exact computation has none")
    where: dict[str, str | int | float] = key({}, help="rows: keep rows with these values")
    score: Literal["likelihood", "accuracy"] | None = key(None, help="reversal: SFT-stage score")
    arms: tuple[str, ...] = key((), help="reversal: SFT arms among which a reversed pair is looked for")
    metric: str = key("pass@1", help="what is compared")
    control: bool = key(False, help="a question of ours about the comparison, not a claim of the paper")
    smallest_effect: float = key(0.0, help="smallest effect that counts", ge=0)
    bound: float | None = key(None, help="overhead: largest ratio that counts as little; at_most, scalar, rows: the limit")
    side: Literal["at_most", "at_least"] = key("at_least", help="scalar, rows: on which side of the bound it should be")
    two_sided: bool = key(False, help="at_most, scalar, rows: it should lie between -bound and bound")
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
        if self.kind in ("overhead", "rows"):
            for name in ("arm", "baseline"):
                if isinstance(getattr(self, name), tuple):
                    raise ValueError(f"{name}: kind: {self.kind} takes one name; several are for checkpoints")
        if self.two_sided and (self.bound is None or self.kind not in ("at_most", "scalar", "rows")):
            raise ValueError("two_sided is for the bound of kind: at_most, scalar or rows; remove it")
        if self.two_sided and self.kind != "at_most" and self.side != "at_most":
            raise ValueError("two_sided needs side: at_most")
        if self.two_sided and self.bound <= 0:
            raise ValueError(f"bound = {self.bound:g}: nothing lies between -bound and bound; give the largest size that is none")
        if self.family and self.metric in ("loss", "fact_recall"):
            raise ValueError(f"family: {self.metric} is not measured per family; remove it")

    @property
    def arms_compared(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Checkpoints of both sides."""
        return tuple((side,) if isinstance(side, str) else tuple(side or ()) for side in (self.arm, self.baseline))


class Verdict(NamedTuple):
    verdict: str
    reason: str


def over(unit: str, seeds: int) -> str:
    """What an interval is over. seeds = 0: the result is exact and knows none."""
    if seeds == 0:
        return f"{unit}; no seed takes part"
    return f"{unit} of one seed; other seeds may differ" if seeds == 1 else f"{unit} and {seeds} seeds"


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
    where = over("items", seeds)
    if baseline is not None and 1 - baseline < smallest:
        return Verdict("not testable here", f"the baseline reaches {baseline:.3f}, which leaves no room for {smallest:g}")
    if low > 0 and estimate >= smallest:
        return Verdict("replicated", f"interval above 0 over {where}")
    if low > 0:
        size = (
            f"but smaller than the {smallest:g} that counts"
            if high < smallest
            else f"but perhaps less than the {smallest:g} that counts"
        )
        return Verdict("inconclusive", f"positive, {size}, over {where}")
    if high < 0:
        return Verdict("contradicted", f"the effect has the opposite sign over {where}")
    if high < smallest:
        return Verdict("contradicted", f"an effect of {smallest:g} or more is excluded over {where}")
    return Verdict("inconclusive", f"the interval holds both 0 and effects that count, over {where}")


def judge_reversal(interval: Interval, smallest: float, seeds: int, pair: str, *, ordered: bool) -> Verdict:
    """Verdict on "some arm with the better SFT score is the worse start for RL".

    interval: RL gain of the pair's other arm, corrected for the number of pairs; ordered: whether the SFT scores of the
    pair differ beyond noise. What was not seen among these arms may happen among others, so it is never contradicted.
    """
    where = over("items", seeds)
    if ordered and interval.low > 0 and interval.estimate >= smallest:
        return Verdict("replicated", f"{pair}: both differences beyond noise over {where}")
    if interval.estimate <= 0:
        return Verdict(
            "inconclusive", f"no pair of these arms is reversed: each arm with the better SFT score starts no worse, over {where}"
        )
    lacking = "after RL" if ordered else "in SFT score"
    return Verdict(
        "inconclusive",
        f"no pair is reversed beyond noise; in the nearest, {pair}, the difference {lacking} is within it, over {where}",
    )


def judge_bound(
    interval: Interval,
    bound: float,
    where: str,
    *,
    side: Literal["at_most", "at_least"] = "at_most",
    two_sided: bool = False,
    strict: bool = False,
) -> Verdict:
    """Verdict on "the value is at most (at least) `bound`", or with two_sided "it lies between -bound and bound".

    where: what the interval is over (:func:`over`). strict: the bound itself does not count as reached, for a difference
    that should be on one side of it: where both are always equal, neither is better.
    """
    _, low, high = interval
    words = ("at most", "above") if side == "at_most" else ("at least", "below")
    limit = f"{bound:g}"
    if two_sided:
        inside, outside = -bound <= low and high <= bound, low > bound or high < -bound
        words, limit = ("within", "beyond"), f"±{bound:g}"
    elif side == "at_most":
        inside, outside = high <= bound, low > bound
    else:
        inside, outside = low >= bound, high < bound
    if strict:
        if low == high == bound:
            return Verdict("inconclusive", f"always {bound:g}, over {where}")
        inside = inside and bound not in (low, high)
        words = ({"at most": "below", "at least": "above"}.get(words[0], words[0]), words[1])
    if inside:
        return Verdict("replicated", f"{words[0]} {limit} over {where}")
    if outside:
        return Verdict("contradicted", f"{words[1]} {limit} over {where}")
    return Verdict("inconclusive", f"the interval holds {bound if not two_sided or high > bound else -bound:g}, over {where}")
