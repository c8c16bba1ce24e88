"""`make diff`: what differs between two manifests, or between two folders of them.

A manifest holds only what follows from configuration, inputs, code and packages, so equal manifests are equal results.
Times, hosts and commits lie in `provenance.json` and are not compared; artifacts are compared by their digests.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.core import config as configs
from posttrain.core import manifest
from posttrain.core.errors import UserError
from posttrain.core.manifest import NAME, Manifest, Metric

SECTIONS = ("job", "config", "data", "packages", "artifact", "metric")  # causes first, numbers last
HEAD = ("what", "key", "A", "B", "B - A", "in s.e.")
WIDTH = 44  # of a value in the table; --json has all of it


@dataclass(frozen=True)
class Row:
    """One key that differs. A side that lacks the key is None; `difference` and `in_se` are of metrics alone."""

    manifest: str
    section: str
    key: str
    a: Any
    b: Any
    difference: float | None = None
    in_se: float | None = None


@dataclass(frozen=True)
class Comparison:
    rows: list[Row]
    compared: int
    only_in_a: list[str]
    only_in_b: list[str]

    @property
    def equal(self) -> bool:
        return not (self.rows or self.only_in_a or self.only_in_b)


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """{dotted name: leaf} of nested mappings; a list is a leaf, an empty mapping too."""
    if not isinstance(value, Mapping) or (not value and name):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{name}.{key}" if name else str(key))
    return found


def changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value in a, value in b) of what differs; numbers written otherwise are equal."""
    left, right = flat(a), flat(b)
    for name in sorted(left.keys() | right.keys()):
        one, other = left.get(name), right.get(name)
        if (name in left) != (name in right) or configs.canonical(one) != configs.canonical(other):
            yield name, one, other


def metric_rows(where: str, name: str, a: Metric | None, b: Metric | None) -> Iterator[Row]:
    """The value with its difference, in standard errors of a difference of independent means where either has one.

    Runs that share their items are paired, so their true standard error is mostly smaller: the number is cautious.
    """
    if a is None or b is None or a.value != b.value:
        difference = None if a is None or b is None else b.value - a.value
        error = math.hypot(*(m.se or 0.0 for m in (a, b) if m))
        in_se = difference / error if difference is not None and error else None
        yield Row(where, "metric", name, a and a.value, b and b.value, difference, in_se)
    for part in ("n", "se"):
        if a and b and getattr(a, part) != getattr(b, part) and (part == "n" or a.value == b.value):
            yield Row(where, "metric", f"{name} ({part})", getattr(a, part), getattr(b, part))


def compare(a: Manifest, b: Manifest, where: str = "") -> list[Row]:
    """Everything that differs, in the order of SECTIONS."""

    def parts(of: Callable[[Manifest], dict[str, Any]], section: str) -> list[Row]:
        return [Row(where, section, *found) for found in changes(of(a), of(b))]

    rows = parts(lambda m: {n: getattr(m, n) for n in ("stage", "method", "variant", "seed", "device")}, "job")
    rows = [row for row in rows if row.key != "seed" or a.config.get("seed") == b.config.get("seed")]  # config says it
    rows += parts(lambda m: m.config, "config")
    rows += parts(lambda m: {"inputs": m.inputs, "card": m.card, "not_deterministic": m.not_deterministic}, "data")
    rows += parts(lambda m: m.packages, "packages")
    # a name of a file holds dots of its own, so files are not flattened
    for name in sorted(a.artifacts.keys() | b.artifacts.keys()):
        one, other = a.artifacts.get(name), b.artifacts.get(name)
        if one != other:
            rows.append(Row(where, "artifact", name, one and one.sha256, other and other.sha256))
    for name in sorted(a.metrics.keys() | b.metrics.keys()):
        rows += metric_rows(where, name, a.metrics.get(name), b.metrics.get(name))
    return rows


# --- files and folders ----------------------------------------------------------------------------------------


def manifests(given: str, side: str) -> dict[str, Path]:
    """{relative folder: manifest}; one manifest, or the folder of a single job, has the name ''."""
    path = Path(given)
    if not given:
        raise UserError(f"{side} is not given; name two manifests or two folders: make diff A=<path> B=<path>.")
    if not path.exists():
        raise UserError(f"{side}: {path} does not exist; give a {NAME} or a folder of results.")
    if path.is_dir() and (path / NAME).is_file():
        path = path / NAME
    if path.is_file():
        return {"": path}
    found = {str(file.parent.relative_to(path)): file for file in sorted(path.rglob(NAME))}
    if not found:
        raise UserError(f"{side}: the folder {path} holds no {NAME}; give a folder of results, for example results/tiny.")
    return found


def compare_paths(a: str, b: str) -> Comparison:
    """Two manifests whatever their jobs, or two folders whose manifests are matched by relative path."""
    left, right = manifests(a, "A"), manifests(b, "B")
    if ("" in left) != ("" in right):
        one, folder = (a, b) if "" in left else (b, a)
        raise UserError(f"{one} is one manifest and {folder} a folder of several; give two manifests or two folders.")
    common = sorted(left.keys() & right.keys())
    rows = []
    for name in common:
        rows += compare(manifest.read(left[name], verify=False), manifest.read(right[name], verify=False), name)
    rows.sort(key=lambda row: (SECTIONS.index(row.section), row.manifest))  # stable: keys stay in their order
    return Comparison(rows, len(common), sorted(left.keys() - right.keys()), sorted(right.keys() - left.keys()))


# --- the table ------------------------------------------------------------------------------------------------


def text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else configs.canonical(value)


def pair(row: Row) -> tuple[str, str]:
    """Both values, short enough for a table: digests by their start, long text from where it differs."""
    one, other = text(row.a), text(row.b)
    if row.section == "artifact" or row.key.startswith("inputs."):
        return one[:12], other[:12]
    if one == other:  # numbers that differ after the sixth digit
        one, other = configs.canonical(row.a), configs.canonical(row.b)
    if max(len(one), len(other)) > WIDTH:
        same = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), 0)
        skip = max(0, same - 8)
        one, other = (f"…{value[skip + 1 :]}" if skip else value for value in (one, other))
    return tuple(value if len(value) <= WIDTH else value[: WIDTH - 1] + "…" for value in (one, other))


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def render(found: Comparison, a: str, b: str) -> str:
    """What `make diff` prints."""
    if found.equal:
        return f"no differences in {plural(found.compared, 'manifest')}"
    lines = [f"A = {a}", f"B = {b}", ""]
    for side, names in (("A", found.only_in_a), ("B", found.only_in_b)):
        lines += [f"only in {side}: {name}" for name in names]
    lines += [""] if found.only_in_a or found.only_in_b else []
    several = any(row.manifest for row in found.rows)
    head = [HEAD[0], *(["job"] if several else []), *HEAD[1:]]
    body = []
    for row in found.rows:
        signed = ["" if row.difference is None else f"{row.difference:+.4g}", "" if row.in_se is None else f"{row.in_se:+.1f}"]
        body.append([row.section, *([row.manifest] if several else []), row.key, *pair(row), *signed])
    if body:
        lines += table(head, body, left=len(head) - 2)
        lines += [""]
    touched = len({row.manifest for row in found.rows})
    counts = f"{plural(len(found.rows), 'difference')} in {touched}" if touched else "no difference in any"
    summary = f"{counts} of {plural(found.compared, 'manifest')}"
    if found.only_in_a or found.only_in_b:
        summary += f"; {len(found.only_in_a)} only in A, {len(found.only_in_b)} only in B"
    return "\n".join([*lines, summary])


def table(head: Sequence[str], body: Iterable[Sequence[str]], left: int) -> list[str]:
    """Lines of a table whose first `left` columns are text and whose others are numbers."""
    rows = [head, *body]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    rows.insert(1, ["-" * width for width in widths])
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if equal, 1 if not, 2 with one sentence."""
    parser = argparse.ArgumentParser(prog="python -m posttrain.diff", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("a", help="a manifest, or a folder of results")
    parser.add_argument("b", help="what to compare it with")
    parser.add_argument("--json", action="store_true", help="for machines: whole digests and values")
    given = parser.parse_args(arguments)
    try:
        found = compare_paths(given.a, given.b)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(found), indent=1, ensure_ascii=False) if given.json else render(found, given.a, given.b))
    return 0 if found.equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
