"""Digest of the code that a job really runs: its module and every module of this package that it imports.

Snakemake sees a shell command, not what that command imports. This digest is a rule parameter, so that editing one
method reruns that method alone. Comments, docstrings and layout take no part.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "posttrain"


def _path(module: str, root: Path) -> Path | None:
    relative = Path(*module.split(".")[1:])
    for candidate in (root / relative.with_suffix(".py") if relative.parts else None, root / relative / "__init__.py"):
        if candidate and candidate.is_file():
            return candidate
    return None


def _strip_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                node.body = body[1:] or [ast.Pass()]


@functools.cache
def _read(path: Path, stamp: tuple[int, int]) -> tuple[str, frozenset[str]]:
    """(sha256 of the syntax tree, names of modules of this package that it imports). `stamp` keys the cache."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    _strip_docstrings(tree)
    text = ast.dump(tree, annotate_fields=False)
    return hashlib.sha256(text.encode()).hexdigest(), frozenset(n for n in found if n.split(".")[0] == PACKAGE)


def closure(module: str, root: Path = ROOT) -> dict[str, str]:
    """{module name: digest} of `module` and all that it imports from this package, wherever the import stands."""
    seen: dict[str, str] = {}
    queue = [module]
    while queue:
        name = queue.pop()
        path = _path(name, root)
        if path is None or name in seen:
            continue
        stat = path.stat()
        seen[name], imports = _read(path, (stat.st_mtime_ns, stat.st_size))
        queue.extend(imports - seen.keys())
        parent = name.rpartition(".")[0]
        if parent and parent not in seen:
            queue.append(parent)
    if not seen:
        raise ModuleNotFoundError(module)
    return seen


def code_digest(module: str, root: Path = ROOT) -> str:
    """16 hex digits that change when, and only when, code that `module` can reach changes."""
    lines = "\n".join(f"{name} {value}" for name, value in sorted(closure(module, root).items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]
