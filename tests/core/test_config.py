"""YAML to models to flags and back."""

from __future__ import annotations

import importlib
import itertools
import math
import pkgutil
import re
import shlex
import types
import typing
from pathlib import Path
from typing import Any, Literal

import annotated_types
import pytest
import yaml
from hypothesis import given, reject
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

import posttrain
from posttrain.core import cli, config
from posttrain.core.config import JobConfig, Model, canonical, digest, flags, key, partial, read_yaml, roles, settings, validate
from posttrain.core.errors import UserError
from posttrain.data import mix, tasks, tokenizer
from posttrain.distill import tail_kd
from posttrain.sft import train
from posttrain.study import STAGES, Study, config_class, methods, stage_model

ROOT = Path(__file__).parents[2]
OUTPUT = "results/tiny/sft/train/x/seed0/manifest.json"


def job(**values: Any) -> train.Config:
    return train.Config(**{"output": OUTPUT, "start": "a/manifest.json", "traces": "b/manifest.json", **values})


def problem(model: type[BaseModel], values: Any) -> str:
    """The sentence for these values."""
    with pytest.raises(UserError) as caught:
        validate(model, values, "here.yaml")
    sentence = str(caught.value)
    assert sentence.startswith("here.yaml") and "\n" not in sentence
    return sentence


# --- YAML -----------------------------------------------------------------------------------------------------


def load(tmp_path: Path, text: str | bytes) -> Any:
    path = tmp_path / "file.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_yaml(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("1E5", 1e5), ("-2e+3", -2000.0), ("5.e-4", 5e-4), (".5", 0.5), ("1.", 1.0), ("0.0005", 5e-4),
        (".inf", math.inf), ("-.inf", -math.inf), ("100", 100), ("-3", -3), ("0", 0), ("'1e-5'", "1e-5"), ("e5", "e5"),
        ("1e", "1e"), ("1-5", "1-5"), ("null", None), ("true", True), ("1.0.0", "1.0.0"), ("0.1.2", "0.1.2"),
    ],
)  # fmt: skip
def test_yaml_scalars(tmp_path, text, value):
    found = load(tmp_path, f"a: {text}")["a"]
    assert found == value and type(found) is type(value)


@given(st.floats(allow_nan=False))
def test_every_float_survives_yaml(value):
    loader = config._Loader(repr(value) if math.isfinite(value) else f"{'-' if value < 0 else ''}.inf")
    found = loader.get_single_data()
    assert type(found) is float and found == value


@given(st.integers(-(10**9), 10**9))
def test_integers_stay_integers(value):
    found = config._Loader(str(value)).get_single_data()
    assert type(found) is int and found == value


def test_pyyaml_itself_reads_1e_5_as_text():
    assert yaml.safe_load("1e-5") == "1e-5"  # why the loader exists; if this fails it can go


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb: 2\na: 3\n", ":3: key 'a' stands twice; delete one of them."),
        ("a:\n  b: 1\n  c: 1\n  b: 1\n", ":4: key 'b' stands twice; delete one of them."),
        ("- {a: 1, a: 1}\n", ":1: key 'a' stands twice; delete one of them."),
        ("a: [1, 2\nb: 3\n", ":2: not valid YAML ("),
        ("a: 'open\n", "not valid YAML ("),
        ("\ta: 1\n", ":1: not valid YAML ("),
        ("? [a, b]\n: 1\n", ":1: not valid YAML ("),
        ("a: !!python/object/apply:os.system ['true']\n", ":1: not valid YAML ("),
        ("a: *nowhere\n", ":1: not valid YAML ("),
        (b"a: \x00\n", "not valid YAML ("),
        (b"a: \xff\n", "not UTF-8"),
    ],
)
def test_broken_yaml_is_one_sentence_with_its_line(tmp_path, text, sentence):
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    assert sentence in str(caught.value) and str(tmp_path / "file.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_named():
    with pytest.raises(UserError, match=r"nowhere/x\.yaml does not exist"):
        read_yaml("nowhere/x.yaml")


def test_empty_file_is_an_empty_mapping(tmp_path):
    assert load(tmp_path, "# nothing\n") == {}


def test_anchors_and_merge_keys_work(tmp_path):
    found = load(tmp_path, "a: &shared {x: 1, y: 2}\nb:\n  <<: *shared\n  y: 3\n")
    assert found["b"] == {"x": 1, "y": 3}


# --- validation -----------------------------------------------------------------------------------------------


def test_unknown_key_names_the_nearest():
    assert (
        problem(train.Config, {"lerning_rate": 1}) == "here.yaml: lerning_rate is not a known key; did you mean 'learning_rate'?"
    )


def test_unknown_key_that_is_near_nothing_lists_all():
    assert "; valid are: batch, " in problem(config_class("evaluate", "retention"), {"qqqqqqq": 1})


def test_wrong_type_says_what_was_given():
    assert problem(train.Config, {**job().model_dump(), "steps": "many"}).startswith(
        "here.yaml: steps = 'many': input should be a valid integer"
    )
    assert problem(train.Config, {**job().model_dump(), "steps": 1.5}).startswith("here.yaml: steps = 1.5: ")
    assert problem(train.Config, {**job().model_dump(), "learning_rate": None}).startswith("here.yaml: learning_rate = None: ")
    assert "clip_delta.1 is required" in problem(train.Config, {**job().model_dump(), "clip_delta": [1]})


def test_quoted_float_is_accepted_for_a_float_and_explained_for_an_integer():
    assert validate(train.Config, {**job().model_dump(), "learning_rate": "1e-5"}, "x").learning_rate == 1e-5
    assert "write the number without quotes" in problem(train.Config, {**job().model_dump(), "steps": "1e5"})


@pytest.mark.parametrize("name", ["steps", "seed", "learning_rate", "max_minutes"])
def test_truth_value_is_no_number(name):
    """`steps: yes` is True in YAML, and True would become 1."""
    assert f"{name} = True: input should be a number" in problem(train.Config, {**job().model_dump(), name: True})
    assert "truth value" in problem(partial(train.Config), {"steps": True}) and partial(train.Config)(steps=3).steps == 3
    assert job(gradient_checkpointing=True).gradient_checkpointing is True


def test_out_of_range():
    assert (
        problem(train.Config, {**job().model_dump(), "seed": -1})
        == "here.yaml: seed = -1: input should be greater than or equal to 0"
    )
    assert "greater than 0" in problem(train.Config, {**job().model_dump(), "learning_rate": 0})
    assert "learning_rate" in problem(train.Config, {**job().model_dump(), "learning_rate": math.nan})


def test_wrong_choice_names_the_nearest():
    assert problem(train.Config, {**job().model_dump(), "weighting": "pear_tokn"}).endswith("; did you mean 'pear_token'?")


@pytest.mark.parametrize(
    ("model", "values", "words"),
    [
        (train.Config, {"batch_size": 6, "accumulation": 4}, "batch_size 6 is not a multiple of accumulation 4"),
        (train.Config, {"clip_delta": (1.0, -1.0)}, "lower bound must be below"),
        (train.Config, {"loss": "kl", "negative_strength": 1.0}, "negative_strength needs loss: nll"),
        (
            config_class("rl", "grpo"),
            {"start": "a", "task": "b", "batch_size": 6, "generations": 4},
            "not a multiple of generations 4",
        ),
        (mix.Config, {"parts": {"a": {"share": 0.5, "field": "text"}}, "tokenizer": "t", "sources": {}}, "sum to 0.5, not 1"),
        (tasks.Config, {"kind": "addition", "families": {"gcd": {}}}, "families is only read with kind: reasoning"),
        (tokenizer.Config, {"kind": "characters"}, "characters needs an alphabet"),
        (config_class("evaluate", "reasoning"), {"model": "a", "task": "b", "k": (1, 32)}, "needs at least 32 samples"),
    ],
)
def test_contradictory_keys_are_one_short_sentence(model, values, words):
    base = {"output": OUTPUT} | ({"start": "a", "traces": "b"} if model is train.Config else {})
    sentence = problem(model, base | values)
    assert words in sentence and "{" not in sentence and "output" not in sentence


@pytest.mark.parametrize("values", [[1], "text", {1: 2}, {True: 1}, 3])
def test_a_file_that_is_no_mapping_of_names_is_explained(values):
    assert problem(stage_model("sft"), values)


@pytest.mark.parametrize(
    ("stage", "values", "words"),
    [
        ("sft", {"trian": {}}, "trian is not a known key; did you mean 'train'?"),
        ("sft", {"train": {"arms": {}}}, "train.arms is not a known key; did you mean 'arm'?"),
        ("sft", {"train": {"defaults": {"stesp": 1}}}, "train.defaults.stesp is not a known key; did you mean 'steps'?"),
        ("sft", {"train": {"arm": {"pear": {"gama": 1}}}}, "train.arm.pear.gama is not a known key; did you mean 'gamma'?"),
        ("sft", {"train": {"arm": {"block": {"gama": 1}}}}, "train.arm.block.gama is not a known key; did you mean 'gamma'?"),
        ("sft", {"train": {"resources": {"gpu": 1}}}, "train.resources.gpu is not a known key; did you mean 'gpus'?"),
        (
            "base",
            {"scratch": {"model": {"m": {"shape": {"hiden": 1}}}}},
            "m.shape.hiden is not a known key; did you mean 'hidden'?",
        ),
        (
            "data",
            {"mix": {"mix": {"m": {"parts": {"p": {"sahre": 1}}}}}},
            "m.parts.p.sahre is not a known key; did you mean 'share'?",
        ),
        ("sft", {"train": {"defaults": {"output": "x"}}}, "train.defaults.output is not a known key"),
        ("sft", {"train": {"defaults": {"seed": 1}}}, "train.defaults.seed is not a known key"),
        ("sft", {"train": {"defaults": {"steps": 0}}}, "train.defaults.steps = 0: input should be greater than 0"),
    ],
)
def test_errors_deep_in_a_stage_file(stage, values, words):
    assert words in problem(stage_model(stage), values)


def test_shape_that_does_not_divide():
    sentence = problem(stage_model("base"), {"scratch": {"model": {"m": {"shape": {"hidden": 65}}}}})
    assert "scratch.model.m.shape: hidden 65 is not a multiple of heads 4" in sentence


def test_partial_has_no_defaults_and_no_keys_of_the_dag():
    block = partial(train.Config)
    assert set(block.model_fields) == {n for n, r in roles(train.Config).items() if r in ("setting", "runtime")}
    assert block().model_dump(exclude_unset=True) == {} and block(steps=3).model_dump(exclude_unset=True) == {"steps": 3}
    with pytest.raises(ValidationError):
        block(steps=0)


def test_models_are_frozen():
    with pytest.raises(ValidationError):
        job().steps = 3


# --- projection -----------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def scrambled(value: Any) -> Any:
    """The same value written otherwise: keys reversed, whole numbers as floats, tuples for lists."""
    if isinstance(value, dict):
        return {k: scrambled(v) for k, v in reversed(value.items())}
    if isinstance(value, list):
        return tuple(scrambled(v) for v in value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    return value


@given(json_values)
def test_canonical_does_not_depend_on_writing(value):
    assert canonical(scrambled(value)) == canonical(value)
    assert digest(scrambled(value)) == digest(value)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, "1"),
        (1, True),
        (0, False),
        (None, "null"),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"b": 1}),
        (1, 1.5),
        ([], {}),
        (2**53, 2**53 + 1),
    ],
)
def test_canonical_keeps_different_values_apart(a, b):
    assert canonical(a) != canonical(b)


def test_canonical_is_compact_and_keeps_letters():
    assert canonical({"b": [1.0, 1e0, -0.0], "a": "ö"}) == '{"a":"ö","b":[1,1,0]}'
    assert canonical([1e22, 1e-5, float(2**53)]) == "[1e+22,1e-05,9007199254740992.0]"


def test_settings_leave_out_what_cannot_change_a_result():
    one, other = job(), job(log_every=7, checkpoint_every=5, max_minutes=3, workers=2, start="elsewhere/manifest.json")
    assert settings(one) == settings(other) and list(settings(one)) == sorted(settings(one))
    assert {"learning_rate", "seed", "clip_delta"} <= set(settings(one)) and not {"output", "start", "log_every"} & set(
        settings(one)
    )
    for change in ({"learning_rate": 1e-3}, {"seed": 1}, {"clip_delta": (-0.1, 0.3)}):
        assert digest(settings(job(**change))) != digest(settings(one))


# --- flags ----------------------------------------------------------------------------------------------------


def config_classes() -> dict[str, type[JobConfig]]:
    found = {}
    for info in pkgutil.walk_packages(posttrain.__path__, "posttrain."):
        owner = getattr(importlib.import_module(info.name), "Config", None)
        if isinstance(owner, type) and issubclass(owner, JobConfig):
            found[info.name] = owner
    return found


CLASSES = config_classes()
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12).filter(lambda t: t != "--")


def number(kind: type, metadata: list[Any]) -> st.SearchStrategy:
    """Numbers within a field's bounds."""
    low, high = (0, 1000) if kind is int else (-1e6, 1e6)
    options: dict[str, Any] = {}
    for rule in metadata:
        if isinstance(rule, annotated_types.Gt | annotated_types.Ge):
            low = getattr(rule, "gt", getattr(rule, "ge", None))
            options["exclude_min"] = isinstance(rule, annotated_types.Gt)
            high = max(high, low + 1000)
        elif isinstance(rule, annotated_types.Lt | annotated_types.Le):
            high = getattr(rule, "lt", getattr(rule, "le", None))
            options["exclude_max"] = isinstance(rule, annotated_types.Lt)
    if kind is int:
        return st.integers(int(low) + options.get("exclude_min", False), int(high))
    return st.floats(low, high, allow_nan=False, **options)


def values_for(annotation: Any, metadata: list[Any]) -> st.SearchStrategy:
    """Values that a key of this type may have."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        options = [st.none() if a is type(None) else values_for(a, metadata) for a in arguments]
        return st.one_of(options).filter(lambda v: v != "null")  # the one text that an optional key cannot hold
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_for(arguments[0], []), min_size=1, max_size=3, unique=True).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_for(a, []) for a in arguments))
    if origin is dict:
        names = values_for(arguments[0], []) if typing.get_origin(arguments[0]) is Literal else WORDS
        return st.dictionaries(names, values_for(arguments[1], []), min_size=1, max_size=3)
    if annotation is Any:
        return st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | WORDS
    if issubclass(annotation, BaseModel):
        fields = {n: values_for(f.annotation, f.metadata) for n, f in annotation.model_fields.items()}
        return st.fixed_dictionaries(fields)
    if annotation is bool:
        return st.booleans()
    if annotation in (int, float):
        return number(annotation, metadata)
    pattern = next((m.pattern for m in metadata if getattr(m, "pattern", None)), None)
    words = st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True).filter(lambda t: "\n" not in t) if pattern else WORDS
    return words.map(Path) if annotation is Path else words


@st.composite
def jobs(draw, owner: type[JobConfig]) -> JobConfig:
    """A valid configuration: required keys, then each optional key whose drawn value does not contradict the rest."""
    fields = owner.model_fields
    values = {n: draw(values_for(f.annotation, f.metadata)) for n, f in fields.items() if f.is_required()}
    if owner is mix.Config:
        values["parts"] = {"a": {"share": 0.25, "field": "text"}, "-b": {"share": 0.75, "field": "expression"}}
    if owner is tail_kd.Config:  # its defaults alone contradict each other: no rows, no student
        values |= {"mix": Path("m/manifest.json"), "shape": {"hidden": 8, "layers": 1, "heads": 1, "intermediate": 8}}
    if owner is tokenizer.Config:
        values["alphabet"] = draw(WORDS.filter(bool))
    for name, field in fields.items():
        if not field.is_required() and name not in values and draw(st.booleans()):
            candidate = {**values, name: draw(values_for(field.annotation, field.metadata))}
            try:
                owner(**candidate)
            except ValidationError:
                continue
            values = candidate
    try:
        return owner(**values)
    except ValidationError:  # required keys that contradict each other
        reject()


def test_every_method_has_a_config():
    names = {f"posttrain.{stage}.{method}" for stage in STAGES for method in methods(stage)}
    assert names <= set(CLASSES) and len(names) > 8


@pytest.mark.parametrize("module", CLASSES)
def test_flags_give_the_same_configuration_again(module):
    owner = CLASSES[module]
    assert all(field.annotation for field in owner.model_fields.values())

    @given(jobs(owner))
    def check(one):
        words = flags(one) + flags(one, {"runtime"})
        again = cli.parse(owner, shlex.split(shlex.join(words)), module)
        assert again == one
        assert flags(again) == flags(one) and digest(settings(again)) == digest(settings(one))

    check()


def test_flags_are_sorted_and_leave_defaults_out():
    assert flags(job()) == ["--output", OUTPUT, "--seed", "0", "--start", "a/manifest.json", "--traces", "b/manifest.json"]
    words = flags(job(weighting="dft", learning_rate=1e-5, clip_delta=(-1, 0.5), log_every=9, gradient_checkpointing=True))
    assert words[:4] == ["--clip-delta", "[-1,0.5]", "--gradient-checkpointing", "true"] and "--log-every" not in words
    assert words[4:6] == ["--learning-rate", "1e-05"] and words[-2:] == ["--weighting", "dft"]
    assert flags(job(log_every=9), {"runtime"}) == ["--log-every", "9"]


@pytest.mark.parametrize(
    "text",
    ["-", "-5", "-1e-05", "--seed", "-abc", "null", "true", "1", "[1]", "", " ", "a b", "%s %(prog)s", "$HOME `x` \\n", "é\n'\""],
)
def test_text_that_looks_like_something_else_survives(text):
    one = tokenizer.Config(output=OUTPUT, kind="bpe", alphabet=text)
    assert cli.parse(tokenizer.Config, shlex.split(shlex.join(flags(one))), "m") == one


def test_none_survives_where_the_default_is_something():
    class Config(JobConfig):
        depth: int | None = key(3, help="x")

    one = Config(output=OUTPUT, depth=None)
    assert flags(one)[:2] == ["--depth", "null"] and cli.parse(Config, flags(one), "m").depth is None


# --- shipped files --------------------------------------------------------------------------------------------


def tiers() -> list[str]:
    folders = [p for p in (ROOT / "configs").iterdir() if p.is_dir()]
    return sorted(p.name for p in folders if all((p / f"{stage}.yaml").is_file() for stage in STAGES))


def test_the_default_tier_is_whole():
    assert "tiny" in tiers() and read_yaml(ROOT / "configs" / "config.yaml")["tier"] in tiers()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: str(p.relative_to(ROOT)))
def test_shipped_yaml_has_no_duplicate_key(path):
    assert isinstance(read_yaml(path), dict)


@pytest.mark.parametrize("tier", tiers())
def test_shipped_tier_parses_and_every_job_survives_its_flags(tier, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = Study({**read_yaml("configs/config.yaml"), "tier": tier})
    count = 0
    for stage in STAGES:
        for method in study.sections[stage]:
            for values in itertools.product(*(study.names(stage, method, axis) for axis in methods(stage)[method].axes)):
                found = study.config(stage, method, values, seed=0, inputs={}, output=OUTPUT, placeholder=True)
                assert cli.parse(type(found), flags(found) + flags(found, {"runtime"}), method) == found
                count += 1
    assert count > 5


def test_typos_in_a_tier_name_the_file(tmp_path):
    (tmp_path / "tiny").mkdir()
    for stage in STAGES:
        (tmp_path / "tiny" / f"{stage}.yaml").write_text("")
    assert Study({"tier": "tiny"}, tmp_path).seeds == [0]
    (tmp_path / "tiny" / "rl.yaml").write_text("grpo:\n  defaults: {stepz: 3}\n")
    with pytest.raises(UserError, match=r"tiny/rl\.yaml: grpo\.defaults\.stepz is not a known key; did you mean 'steps'\?"):
        Study({"tier": "tiny"}, tmp_path)
    for values, words in (
        ({"tier": "tny"}, "did you mean 'tiny'"),
        ({"tier": "tiny", "seeds": [-1]}, "seeds.0 = -1"),
        ({"tier": "tiny", "seeds": []}, "seeds"),
        ({"tier": "tiny", "wandb": {"mode": "onlin"}}, "did you mean 'online'"),
        ({"tier": "tiny", "sedes": [0]}, "did you mean 'seeds'"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            Study(values, tmp_path)


def test_is_scalar():
    yes = (int, float, str, bool, Path, Literal["a"], int | None, typing.Optional[Path], float | str)  # noqa: UP045
    no = (dict[str, int], tuple[int, ...], list[str], dict | None, Any, Model)
    assert all(config.is_scalar(a) for a in yes) and not any(config.is_scalar(a) for a in no)
