"""Schedules of train-units within windows: what is looked at, and the order that follows. Numbers only, no model.

A unit is one or more whole optimizer steps of one domain's rows; a window is a list of units; a schedule decides at its start. Order-only schedules permute the window's units; `skill_it` and `doremi` change the mixture:
they draw as many units by weights over domains. D3's formulas are our reconstruction, the paper's body was not readable
(paper card d3); those of the peers are the card's, after their public repositories.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from posttrain.core.config import Model, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.midtrain.influence import Edge, Influence, blend, threshold
from posttrain.midtrain.ordering import score_order

Schedule = Literal["random", "easy_first", "hard_first", "d3", "d3_reversed", "skill_it", "doremi", "grab"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
MIXTURE = ("skill_it", "doremi")
DIRECTED = ("d3", "d3_reversed")


class Rule(Model):
    """What the schedules need to know besides their name."""

    edge: Edge = key("raw_fd", help="definition of influence (d3)")
    z: float = key(1.0, help="edges need D above this many standard errors (d3)", ge=0)
    lookahead: float = key(1.0, help="virtual step in optimizer steps at the present learning rate (d3)", gt=0)
    precondition: bool = key(True, help="virtual steps use Adam's second moment, once there is one (d3)")
    refresh: int = key(1, help="measure influence anew after this many windows (d3)", gt=0)
    fall: float = key(0.05, help="or when the mean loss fell by this share (d3)", gt=0, lt=1)
    keep: float = key(
        0.7, help="weight of older influence where units have distinct domains, A <- keep A + (1 - keep) new (d3)", ge=0, lt=1
    )
    representatives: int | None = key(
        None, help="measure between this many units, one per k-means cluster of gradients; null: all (d3 in a Trainer)", gt=1
    )
    projection: int = key(256, help="dimensions to which gradients are projected for those clusters", gt=0)
    eta: float = key(0.5, help="Skill-It: step of the weights", ge=0)
    horizon: int = key(3, help="Skill-It: windows whose losses count", gt=0)
    mu: float = key(1.0, help="DoReMi: step of the weights", ge=0)
    smoothing: float = key(1e-3, help="DoReMi: share of the uniform mixture", ge=0, le=1)


class Seen(NamedTuple):
    """What a schedule may look at, for the units of one window or, for mixtures, one per domain. Absent: None."""

    losses: np.ndarray | None = None  # float64 [K], nats per token on the probe halves
    influence: Influence | None = None  # of one replicate: [K, K] each
    gradients: np.ndarray | None = None  # float64 [K, d], of the train halves


class Decision(NamedTuple):
    """One window's units in training order, with what is needed to go on from here after a restart."""

    window: int
    order: list[int]  # unit numbers
    scores: list[float] | None = None  # per unit of the window as it was listed, nats
    losses: list[float] | None = None
    influence: dict[str, list[float]] | None = None  # A, D, se, se_D as used (averaged), flattened
    refreshed: bool = False
    above: int = 0  # edges above the threshold
    fell_back: bool = False


def pair_balance(gradients: np.ndarray, order: Sequence[int]) -> list[int]:
    """GraB's next order from a present one: of each consecutive pair one goes to the front, the other to the back.

    gradients: float64 [K, d]. The sign of g_a - g_b is the one that keeps the running signed sum small; + puts a to the front.
    A last unit without a partner goes to the middle.
    """
    total, front, back = np.zeros(gradients.shape[1]), [], []
    for a, b in zip(order[::2], order[1::2], strict=False):
        difference = gradients[a] - gradients[b]
        if np.linalg.norm(total + difference) > np.linalg.norm(total - difference):
            a, b, difference = b, a, -difference
        total += difference
        front.append(a)
        back.append(b)
    return front + list(order[len(order) // 2 * 2 :]) + back[::-1]


def skill_it(history: Sequence[np.ndarray], graph: np.ndarray, eta: float, horizon: int) -> np.ndarray:
    """Skill-It's weights, float64 [k]: p proportional to exp(eta * sum over the last `horizon` losses L of G L).

    graph: G [k, k], 1 on the diagonal and 0.5 at [i, j] if training on i lowers the loss of j.
    """
    logits = eta * sum(graph @ L for L in history[-horizon:])
    weights = np.exp(logits - np.max(logits))
    return weights / weights.sum()


def doremi(weights: np.ndarray, losses: np.ndarray, reference: np.ndarray, mu: float, smoothing: float) -> np.ndarray:
    """DoReMi's next weights: w exp(mu max(0, L - L_ref)), normalised, mixed with the uniform; all float64 [k]."""
    raised = weights * np.exp(mu * np.maximum(0.0, losses - reference))
    return (1 - smoothing) * raised / raised.sum() + smoothing / len(raised)


def apportion(weights: np.ndarray, n: int, rng: np.random.Generator) -> list[int]:
    """n draws of categories by systematic sampling, shuffled: each count is n w rounded up or down, and n w on average."""
    edges = np.cumsum(weights) / np.sum(weights)
    drawn = np.minimum(np.searchsorted(edges, (np.arange(n) + rng.random()) / n, side="right"), len(weights) - 1)
    return rng.permutation(drawn).tolist()


class Scheduler:
    """Decides window by window. Numbers only: whoever owns the model measures what :meth:`needs` names.

    windows: unit numbers of each window; domains: label per unit. seed: of the random orders. graph: Skill-It's G over the
    sorted domain names; reference: DoReMi's reference losses per domain (online weights), or weights: a fixed mixture.
    """

    def __init__(
        self,
        schedule: Schedule,
        rule: Rule,
        windows: Sequence[Sequence[int]],
        domains: Sequence[str],
        seed: int,
        *,
        graph: np.ndarray | None = None,
        reference: np.ndarray | None = None,
        weights: np.ndarray | None = None,
    ) -> None:
        self.schedule, self.rule, self.seed = schedule, rule, seed
        self.windows, self.domains = [list(w) for w in windows], list(domains)
        self.names = sorted(set(self.domains))
        self.piles = {d: [u for w in self.windows for u in w if self.domains[u] == d] for d in self.names}
        self.taken = dict.fromkeys(self.names, 0)
        self.graph, self.reference, self.fixed = graph, reference, weights
        if schedule == "skill_it" and (graph is None or graph.shape != (len(self.names),) * 2):
            raise UserError(f"schedule = skill_it needs a graph over the {len(self.names)} domains; give one or choose d3.")
        if schedule == "doremi" and reference is None and weights is None:
            raise UserError("schedule = doremi needs the reference model's loss per domain; train a reference first.")
        uniform = np.full(len(self.names), 1 / len(self.names))
        self.weights, self.history = [uniform if weights is None else np.asarray(weights)], []
        self.average: Influence | None = None
        self.age, self.at_refresh = 0, np.inf

    def random(self, window: int) -> list[int]:
        """The seeded random order of a window's positions, the same for every schedule."""
        return np.random.default_rng(derive(self.seed, "order", window)).permutation(len(self.windows[window])).tolist()

    def probed(self, window: int) -> list[int]:
        """Units to look at: the window's, or for a mixture the first of each domain in the corpus from there on."""
        if self.schedule not in MIXTURE:
            return self.windows[window]
        later = [u for w in self.windows[window:] + self.windows[:window] for u in w]
        return [next(u for u in later if self.domains[u] == name) for name in self.names]

    def needs(self, window: int) -> str | None:
        """`losses`, `gradients` or None; :meth:`due` says whether `influence` is needed as well."""
        if self.schedule == "random" or (self.schedule == "doremi" and self.fixed is not None):
            return None
        return "gradients" if self.schedule == "grab" else "losses"

    def due(self, losses: np.ndarray) -> bool:
        """Whether influence is measured anew: `refresh` windows are over, or the mean loss fell by the share `fall`."""
        if self.schedule not in DIRECTED:
            return False
        return (
            self.average is None or self.age >= self.rule.refresh or np.nanmean(losses) <= (1 - self.rule.fall) * self.at_refresh
        )

    def decide(self, window: int, seen: Seen) -> Decision:
        """The order of a window from what was seen; the state moves on."""
        units, draw = self.windows[window], self.random(window)
        losses = None if seen.losses is None else [float(x) for x in seen.losses]
        decision = Decision(window, [units[k] for k in draw], losses=losses)
        if self.schedule in ("easy_first", "hard_first"):
            sign = 1.0 if self.schedule == "easy_first" else -1.0
            sure = np.where(np.isfinite(seen.losses), sign * seen.losses, np.inf)  # a unit without a loss goes last
            decision = decision._replace(
                order=[units[k] for k in sorted(draw, key=lambda k: sure[k])], scores=(-sign * seen.losses).tolist()
            )
        elif self.schedule == "grab":
            decision = decision._replace(order=[units[k] for k in pair_balance(seen.gradients, draw)])
        elif self.schedule in DIRECTED:
            decision = self._directed(decision, seen, draw)
        elif self.schedule in MIXTURE:
            decision = self._mixture(decision, seen)
        return self.replay(decision)

    def _directed(self, decision: Decision, seen: Seen, draw: list[int]) -> Decision:
        units = self.windows[decision.window]
        distinct = len({self.domains[u] for u in units}) == len(units)
        used, fresh = self.average, seen.influence is not None
        if fresh:
            used = blend(self.average if distinct else None, seen.influence, self.rule.keep)
        tau = threshold(used.se_D, self.rule.z)
        variance = np.nansum(used.se_D**2, axis=1)  # of a score, as if its terms were independent
        found = score_order(
            used.D,
            tau,
            fallback=draw,
            domains=[self.domains[u] for u in units],
            noise=self.rule.z * float(variance.mean()) ** 0.5,
        )
        order = found.units
        if self.schedule == "d3_reversed" and not found.fell_back:  # dropped units stay at the end
            order = [k for k in order[::-1] if np.isfinite(found.scores[k])] + [k for k in order if np.isnan(found.scores[k])]
        flat = {name: getattr(used, name).ravel().tolist() for name in ("A", "D", "se", "se_D")}
        return decision._replace(
            order=[units[k] for k in order],
            scores=found.scores.tolist(),
            influence=flat,
            refreshed=fresh,
            above=found.above,
            fell_back=found.fell_back,
        )

    def _mixture(self, decision: Decision, seen: Seen) -> Decision:
        weights = self.weights[-1]
        if self.schedule == "skill_it":
            weights = skill_it([*self.history, np.nan_to_num(seen.losses)], self.graph, self.rule.eta, self.rule.horizon)
        elif self.fixed is None:
            weights = doremi(weights, np.nan_to_num(seen.losses), self.reference, self.rule.mu, self.rule.smoothing)
        rng = np.random.default_rng(derive(self.seed, "mixture", decision.window))
        taken, order = dict(self.taken), []
        for d in apportion(weights, len(self.windows[decision.window]), rng):
            pile = self.piles[self.names[d]]
            order.append(pile[taken[self.names[d]] % len(pile)])  # a domain that is used up starts again
            taken[self.names[d]] += 1
        return decision._replace(order=order, scores=weights.tolist())

    def replay(self, decision: Decision) -> Decision:
        """Move the state on by a decision, made now or before a restart."""
        if self.schedule in MIXTURE:
            for u in decision.order:
                self.taken[self.domains[u]] += 1
            self.weights.append(np.asarray(decision.scores))
            if decision.losses is not None:
                self.history.append(np.nan_to_num(decision.losses))
        elif self.schedule in DIRECTED:
            K = len(self.windows[decision.window])
            matrices = {name: np.reshape(values, (K, K)) for name, values in decision.influence.items()}
            self.average = Influence(**matrices, losses=np.asarray(decision.losses))
            self.age = 1 if decision.refreshed else self.age + 1
            self.at_refresh = float(np.nanmean(decision.losses)) if decision.refreshed else self.at_refresh
        return decision
