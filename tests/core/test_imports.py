"""Who may import whom, and what a command line may cost."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.core.codes import ROOT, closure
from posttrain.study import STAGES

MODULES = {
    ".".join(("posttrain", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
HEAVY = (
    "torch",
    "transformers",
    "trl",
    "pandas",
    "datasets",
    "pyarrow",
    "scipy",
    "matplotlib",
    "wandb",
    "peft",
    "accelerate",
    "reasoning_gym",
    "tokenizers",
    "snakemake",
    "huggingface_hub",
)
DYNAMIC = {"posttrain.study", "posttrain.core.warm"}  # the workflow's door, and the server that runs any module
HUB = {"posttrain.base.hub", "posttrain.data.stream_sources", "posttrain.pin", "posttrain.sft.traces"}


def package(module: str) -> str:
    """The first part below posttrain; empty for modules at the top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / parts[1]).is_dir() else ""


def imported(module: str) -> set[str]:
    """Modules of this package that `module` names in an import, wherever it stands."""
    found: set[str] = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name in MODULES} or {node.module}
            found |= {node.module} - {"posttrain"}
    return {name for name in found if name.split(".")[0] == "posttrain"}


def calls(module: str) -> Iterator[tuple[str, ast.Call]]:
    """(last name of what is called, node); `plain` calls of a bare name start with a colon."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield f":{node.func.id}", node
            elif isinstance(node.func, ast.Attribute):
                yield node.func.attr, node


def test_every_stage_has_a_package():
    assert {*STAGES, "core"} <= {package(name) for name in MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_layers(module):
    own = package(module)
    if not own:
        return
    allowed = {"core": {"core"}, "report": {"core", "report"}}.get(own, {"core", "data", own})
    for name in imported(module):
        assert package(name) in allowed, (
            f"{module} imports {name}; a stage may import core, data and itself, core and report less"
        )


def test_layers_would_notice():
    """The check itself: what sft.train imports is seen, also inside functions."""
    assert {"posttrain.sft.losses", "posttrain.core.logprobs", "posttrain.core.training"} <= imported("posttrain.sft.train")


@pytest.mark.parametrize("module", MODULES)
def test_imports_are_such_that_the_code_digest_sees_them(module):
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            assert all(alias.name != "*" for alias in node.names), f"{module}:{node.lineno}: import *"
    for name, node in calls(module):
        if name.lstrip(":") in ("import_module", "__import__", "run_module", "run_path"):
            assert module in DYNAMIC, f"{module}:{node.lineno}: {name} is not seen by core.codes"
    assert imported(module) - {"posttrain"} <= set(closure(module))


@pytest.mark.parametrize("module", MODULES)
def test_nothing_evaluates_text_or_runs_foreign_code(module):
    for name, node in calls(module):
        assert name not in (":eval", ":exec", ":compile", "system", "popen"), f"{module}:{node.lineno}: {name}"
        assert not (
            name in ("load", "loads") and ast.unparse(node.func).split(".")[0] in ("torch", "pickle", "yaml", "marshal", "dill")
        )
        for keyword in node.keywords:
            if keyword.arg in ("trust_remote_code", "shell"):
                assert isinstance(keyword.value, ast.Constant) and keyword.value.value is False, (
                    f"{module}:{node.lineno}: {keyword.arg}"
                )
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "trust_remote_code":
                    assert isinstance(value, ast.Constant) and value.value is False


@pytest.mark.parametrize("module", MODULES)
def test_hub_access_is_where_it_is_expected_and_pinned(module):
    for name, node in calls(module):
        if name.lstrip(":") in ("load_dataset", "load_dataset_builder", "snapshot_download", "hf_hub_download", "HfApi"):
            assert module in HUB, f"{module}:{node.lineno}: {name}"
            assert name == ":HfApi" or "revision" in {keyword.arg for keyword in node.keywords}, (
                f"{module}:{node.lineno}: no revision"
            )
        if name == "from_pretrained" and package(module) != "base":
            assert any(k.arg == "local_files_only" and k.value.value is True for k in node.keywords), f"{module}:{node.lineno}"


def test_importing_and_asking_for_help_costs_no_heavy_import():
    code = """
import contextlib, importlib, io, json, sys
from posttrain.core import cli
from posttrain.core.config import JobConfig
helped = 0
for name in json.loads(sys.argv[1]):
    config = getattr(importlib.import_module(name), "Config", None)
    if isinstance(config, type) and issubclass(config, JobConfig):
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
            cli.run(config, lambda job: None, ["--help"])
        helped += "--output" in shown.getvalue()
print(json.dumps([helped, sorted({m.split(".")[0] for m in sys.modules})]))
"""
    done = subprocess.run([sys.executable, "-c", code, json.dumps(list(MODULES))], capture_output=True, text=True, check=True)
    helped, loaded = json.loads(done.stdout)
    assert helped > 8 and "posttrain" in loaded and not set(HEAVY) & set(loaded)


def test_help_of_a_module_as_a_user_asks_for_it():
    done = subprocess.run([sys.executable, "-m", "posttrain.sft.train", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m posttrain.sft.train") and "PEAR discount" in done.stdout and not done.stderr


def test_packages_are_importable_from_a_wheel():
    """setuptools finds packages by __init__.py; a folder without one would be left out."""
    assert all((folder / "__init__.py").is_file() for folder in {Path(path).parent for path in MODULES.values()})
