"""Typed configuration: YAML in, one frozen pydantic model per module, command-line flags out.

Every module that a rule runs owns one `Config` (a subclass of :class:`JobConfig`). The same model validates the
YAML, generates the JSON schema for editors, parses the flags of ``python -m posttrain.<stage>.<method>`` and
projects a configuration to what may change a result. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, create_model, field_validator

from posttrain.core.errors import UserError, nearest

Role = Literal["setting", "runtime", "input", "output", "seed"]


def key(default: Any = ..., help: str = "", *, role: Role = "setting", **constraints: Any) -> Any:
    """Declare one configuration key.

    `role` says who sets it and whether it can change a result: `setting` (YAML, takes part in the digest),
    `runtime` (YAML, never takes part: logging, device, workers), `input`/`output`/`seed` (set by the DAG).
    """
    return Field(default, description=help, json_schema_extra={"role": role}, **constraints)


class Model(BaseModel):
    """Frozen, and strict about names: an unknown key is an error, not a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _truth_value_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name].annotation
        kinds = set(typing.get_args(annotation) or (annotation,))
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("input should be a number, and this is a truth value (as YAML reads yes, no, on and off)")
        return value


class JobConfig(Model):
    """What every job has. Paths of inputs and the output are manifests, set by the DAG."""

    output: Path = key(help="the manifest to write, .../seed<k>/manifest.json", role="output")
    seed: int = key(0, help="seed of the study: data order, initialisation and sampling", role="seed", ge=0)

    @property
    def folder(self) -> Path:
        """Where the artifacts lie: beside the manifest."""
        return self.output.parent


def roles(model: type[BaseModel]) -> dict[str, Role]:
    """Map each field name to its role."""
    return {name: (field.json_schema_extra or {}).get("role", "setting") for name, field in model.model_fields.items()}


# --- YAML -----------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 floats (`1e-5` is a number, not a string) and no duplicate keys."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)
_Loader.yaml_implicit_resolvers = {
    first: sorted(rules, key=lambda rule: rule[0] == "tag:yaml.org,2002:float")  # integers are tried first
    for first, rules in _Loader.yaml_implicit_resolvers.items()
}


def _unique_mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict:
    seen: set[str] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node, yaml.ScalarNode):
            continue  # `<<` is merged below; a list as a key is refused there
        name = loader.construct_object(key_node, deep=True)
        if name in seen:
            raise UserError(
                f"{node.start_mark.name}:{key_node.start_mark.line + 1}: key '{name}' stands twice; delete one of them."
            )
        seen.add(name)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:map", lambda loader, node: _unique_mapping(loader, node, deep=True))


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file. `1e-5` is a float; a duplicate key or a syntax error is one sentence with its line."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; restore it from git or name another tier.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid YAML (byte {error.start} is not UTF-8); save it as UTF-8.") from None
    loader = None
    try:
        loader = _Loader(text)
        loader.name = str(path)
        return loader.get_single_data() or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = str(getattr(error, "problem", error)).splitlines()[0]
        raise UserError(f"{where}: not valid YAML ({problem}); correct that line.") from None
    finally:
        if loader:
            loader.dispose()


# --- validation -----------------------------------------------------------------------------------------------


def explain(error: ValidationError, where: str, model: type[BaseModel]) -> UserError:
    """Turn the first pydantic error into one sentence that names the key and the nearest valid one.

    An unknown key goes first: a misspelt required key is both unknown and missing.
    """
    errors = error.errors()
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    location = ".".join(str(part) for part in first["loc"])
    full = f"{where}: {location}" if location else where
    if first["type"] == "extra_forbidden":
        fields = _fields_at(model, first["loc"][:-1])
        return UserError(f"{full} is not a known key{nearest(first['loc'][-1], fields)}")
    if first["type"] == "missing":
        return UserError(f"{full} is required; add it.")
    given = first.get("input")
    hint = ""
    if isinstance(given, str) and re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", given):
        hint = " (it is quoted text: write the number without quotes, for example 1.0e-5)"
    if first["type"] == "literal_error" and isinstance(given, str):
        options = re.findall(r"'([^']+)'", first["ctx"]["expected"])
        hint = nearest(given, options)
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    shown = "" if isinstance(given, dict | BaseModel) else f" = {given!r}"  # a contradiction between keys names them itself
    return UserError(f"{full}{shown}: {message[0].lower() + message[1:]}{hint}")


def _fields_at(model: type[BaseModel], loc: tuple) -> list[str]:
    is_key = False  # the next part of `loc` is a key of a mapping, not a field
    for part in loc:
        if is_key or isinstance(part, int):
            is_key = False
            continue
        annotation = model.model_fields[part].annotation
        inner = _inner_model(annotation)
        if inner is None:
            return []
        kinds = (annotation, *typing.get_args(annotation))
        model, is_key = inner, any(typing.get_origin(kind) is dict for kind in kinds)
    return list(model.model_fields)


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        found = _inner_model(argument)
        if found:
            return found
    return None


def validate(model: type[BaseModel], values: dict, where: str) -> Any:
    """Build the model or raise a :class:`UserError` that names `where` and the key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise explain(error, where, model) from None


def partial(model: type[BaseModel], exclude: set[Role] = frozenset({"input", "output", "seed"})) -> type[BaseModel]:
    """The same keys, all optional and without those the DAG sets: what a YAML block may hold."""
    import copy

    fields = {}
    for name, role in roles(model).items():
        if role in exclude:
            continue
        field = copy.copy(model.model_fields[name])
        field.default, field.default_factory = None, None
        fields[name] = (field.annotation | None if field.annotation is not Any else Any, field)
    return create_model(f"{model.__name__}Partial", __base__=Model, **fields)


# --- projection and flags -------------------------------------------------------------------------------------


def settings(config: JobConfig) -> dict[str, Any]:
    """What may change a result: settings and seed, as plain JSON values with sorted keys."""
    dumped = config.model_dump(mode="json")
    return {n: dumped[n] for n, role in sorted(roles(type(config)).items()) if role in ("setting", "seed")}


def canonical(value: Any) -> str:
    """One text per value: sorted keys, no spaces, `1.0` and `1` and `1e0` alike."""

    def normal(item: Any) -> Any:
        if isinstance(item, dict):
            return {str(k): normal(v) for k, v in item.items()}
        if isinstance(item, list | tuple):
            return [normal(v) for v in item]
        if isinstance(item, float) and item.is_integer() and abs(item) < 2**53:
            return int(item)
        return item

    return json.dumps(normal(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """sha256 of the canonical form."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def flags(config: JobConfig, only: set[Role] = frozenset({"setting", "input", "output", "seed"})) -> list[str]:
    """The shortest command line that gives this configuration again (defaults are left out), sorted by name."""
    dumped = config.model_dump(mode="json")
    words: list[str] = []
    for name, role in sorted(roles(type(config)).items()):
        field = type(config).model_fields[name]
        if role not in only:
            continue
        if role not in ("output", "seed") and getattr(config, name) == field.get_default(call_default_factory=True):
            continue
        value = dumped[name]
        text = value if isinstance(value, str) else canonical(value)
        words += [f"{flag_name(name)}={text}"] if text.startswith("-") else [flag_name(name), text]
    return words


def is_scalar(annotation: Any) -> bool:
    """True for what is written as a bare word on the command line (numbers, text, paths, literals, their unions)."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return all(is_scalar(arg) for arg in typing.get_args(annotation))
    if origin is Literal or annotation is type(None):
        return True
    return isinstance(annotation, type) and issubclass(annotation, bool | int | float | str | Path)
