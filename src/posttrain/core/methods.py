"""How a stage announces its methods to the workflow (see `METHODS` in each stage's `__init__`)."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.config import Model, key


@dataclass(frozen=True)
class Method:
    """One module with a `Config` and a `main`.

    seeded: whether the artifact differs between seeds of the study; if not, it lies under seed0.
    axes: names of the blocks of a YAML section besides `defaults`, in the order in which they override each other;
    the values of the axes make up the variant. open: settings may come from `defaults` alone for axis values that the
    YAML does not list. measures: its result is an end of the study: `all` builds every combination that the YAML lists.
    """

    axes: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    seeded: bool = True
    measures: bool = False


class Resources(Model):
    """What a job asks of the machine. Never part of a digest."""

    threads: int = key(1, help="CPU threads", role="runtime", gt=0)
    nodes: int = key(1, help="machines", role="runtime", gt=0)
    gpus: int = key(0, help="cards per machine", role="runtime", ge=0)
    mem_gb: float = key(4, help="memory per machine, first attempt; half as much again with each attempt", role="runtime", gt=0)
    hours: float = key(1, help="wall time, first attempt; as much again with each attempt", role="runtime", gt=0)
    max_mem_gb: float | None = key(None, help="never ask for more memory: what a machine has", role="runtime", gt=0)
    max_hours: float | None = key(None, help="never ask for more time: the partition's limit", role="runtime", gt=0)

    def minutes(self, attempt: int) -> int:
        """Wall time of an attempt (1, 2, ...)."""
        return max(1, int(60 * min(self.hours * attempt, self.max_hours or float("inf"))))

    def megabytes(self, attempt: int) -> int:
        """Memory per machine of an attempt (1, 2, ...)."""
        return int(1024 * min(self.mem_gb * 1.5 ** (attempt - 1), self.max_mem_gb or float("inf")))
