"""The code digest: changes with reachable code, and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posttrain.core.codes import closure, code_digest

FILES = {
    "__init__.py": '"""Package."""\n',
    "core/__init__.py": "",
    "core/base.py": "X = 1\n",
    "core/other.py": "Y = 1\n",
    "core/deep.py": "Z = 1\n",
    "sft/__init__.py": "METHODS = {}\n",
    "sft/train.py": (
        '"""Doc."""\nimport os\nimport torch\nfrom posttrain.core import base as b\n\n'
        'def main():\n    """Doc."""\n    from posttrain.core.deep import Z\n    # a comment\n    return Z + b.X + 1\n'
    ),
    "rl/__init__.py": "",
    "rl/grpo.py": "import posttrain.sft.train\n",
}


@pytest.fixture
def root(tmp_path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "posttrain" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "posttrain"


def digest(root: Path, module: str = "posttrain.sft.train") -> str:
    return code_digest(module, root)


def edit(root: Path, name: str, old: str, new: str) -> None:
    text = (root / name).read_text()
    assert old in text
    (root / name).write_text(text.replace(old, new))


def test_closure_follows_imports_wherever_they_stand_and_parents(root):
    assert set(closure("posttrain.sft.train", root)) == {
        "posttrain", "posttrain.core", "posttrain.core.base", "posttrain.core.deep", "posttrain.sft", "posttrain.sft.train",
    }  # fmt: skip
    assert {"posttrain.rl.grpo", "posttrain.sft.train", "posttrain.core.deep"} <= set(closure("posttrain.rl.grpo", root))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("sft/train.py", "+ 1", "+ 2"),  # same length: only the time stamp tells
        ("core/base.py", "X = 1", "X = 1.0"),
        ("core/deep.py", "Z = 1", "Z = 2"),
        ("core/__init__.py", "", "import posttrain.core.other\n"),
        ("sft/__init__.py", "{}", "{1: 2}"),
        ("sft/train.py", "def main()", "def main(x=1)"),
        ("sft/train.py", "import os\n", ""),
    ],
)
def test_reachable_code_changes_the_digest(root, name, old, new):
    before = digest(root)
    edit(root, name, old, new)
    assert digest(root) != before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("sft/train.py", '"""Doc."""', '"""Another text, longer."""'),
        ("sft/train.py", "# a comment", "# another\n\n"),
        ("sft/train.py", "return Z + b.X + 1", "return (\n        Z + b.X + 1\n    )"),
        ("sft/train.py", '    """Doc."""\n', ""),
        ("core/other.py", "Y = 1", "Y = 2"),
        ("rl/grpo.py", "import", "X = 1\nimport"),
    ],
)
def test_layout_and_unreachable_code_do_not(root, name, old, new):
    before = digest(root)
    edit(root, name, old, new)
    assert digest(root) == before


def test_a_string_that_is_no_docstring_counts(root):
    (root / "core/base.py").write_text("X = 'a'\n")
    before = digest(root)
    (root / "core/base.py").write_text("X = 'b'\n")
    assert digest(root) != before


def test_edit_of_the_same_size_is_seen_by_its_time(root):
    before = digest(root)
    path = root / "core/base.py"
    stat = path.stat()
    path.write_text("X = 2\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert digest(root) != before


def test_cycles_end(root):
    (root / "core/base.py").write_text("import posttrain.sft.train\n")
    assert digest(root) == digest(root, "posttrain.sft.train")


def test_place_of_the_package_takes_no_part(root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    assert digest(root.rename(tmp_path / "elsewhere" / "posttrain")) == code_digest(
        "posttrain.sft.train", tmp_path / "elsewhere" / "posttrain"
    )
    assert len(digest(tmp_path / "elsewhere" / "posttrain")) == 16


def test_unknown_module(root):
    with pytest.raises(ModuleNotFoundError):
        digest(root, "posttrain.sft.nothing.at.all")


def test_real_methods_reach_what_they_run_and_not_their_neighbours():
    sft, evaluation = set(closure("posttrain.sft.train")), set(closure("posttrain.evaluate.retention"))
    assert {"posttrain.sft.losses", "posttrain.sft.pear", "posttrain.core.training", "posttrain.core.logprobs"} <= sft
    assert not {n for n in sft if n.startswith(("posttrain.rl", "posttrain.evaluate", "posttrain.report"))}
    assert not {n for n in evaluation if n.startswith(("posttrain.sft", "posttrain.rl", "posttrain.core.training"))}
