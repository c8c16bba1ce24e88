"""The command line of every module: flags from its `Config`, one sentence for a user's error, an exit code.

`--help` and a wrong flag cost neither torch nor any other heavy import.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import typing
from collections.abc import Callable, Sequence

from posttrain.core import locking, manifest, receipts
from posttrain.core.config import JobConfig, flag_name, is_scalar, roles, validate
from posttrain.core.errors import EXIT_TEMPORARY, EXIT_USER_ERROR, TimeLimitReached, UserError, nearest


def parser(config: type[JobConfig], module: str) -> argparse.ArgumentParser:
    """An argparse parser with one flag per key; help text, choices and defaults come from the model."""
    doc = (sys.modules[config.__module__].__doc__ or "").strip().split("\n\n")[0]
    result = argparse.ArgumentParser(prog=f"python -m {module}", description=doc, allow_abbrev=False)
    for name, role in roles(config).items():
        field = config.model_fields[name]
        options = _choices(field.annotation)
        default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
        kind = "" if is_scalar(field.annotation) else ", JSON"
        text = f"{field.description or ''} [{role}, {default}{kind}]".replace("%", "%%")
        metavar = "{" + ",".join(options) + "}" if options else name.upper()
        result.add_argument(flag_name(name), dest=name, metavar=metavar, help=text, default=argparse.SUPPRESS)
    return result


def _choices(annotation: typing.Any) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(option) for option in typing.get_args(annotation)]
    return []


def parse(config: type[JobConfig], arguments: Sequence[str], module: str) -> JobConfig:
    """Parse flags into a validated config; raises :class:`UserError` on an unknown flag or a wrong value."""
    known = parser(config, module)
    values, unknown = known.parse_known_args(list(arguments))
    if unknown:
        valid = [flag_name(name) for name in config.model_fields]
        raise UserError(f"{unknown[0]} is not a flag of {module}{nearest(unknown[0], valid)}")
    given = {}
    for name, text in vars(values).items():
        annotation = config.model_fields[name].annotation
        if text == "null" and type(None) in typing.get_args(annotation):
            given[name] = None
        elif is_scalar(annotation):
            given[name] = text
        else:
            try:
                given[name] = json.loads(text)
            except json.JSONDecodeError as error:
                raise UserError(f"{flag_name(name)}: {error}; give valid JSON, for example '[1, 2]'.") from None
    return validate(config, given, module)


def run(config: type[JobConfig], main: Callable[[JobConfig], None], arguments: Sequence[str] | None = None) -> int:
    """Parse, run, and turn what a user can act on into one sentence. Returns the exit code."""
    module = _module_name(config)
    job = None
    try:
        job = parse(config, sys.argv[1:] if arguments is None else arguments, module)
        if job.output.suffix == ".json":
            manifest.check_address(job)
        try:
            job.folder.mkdir(parents=True, exist_ok=True)
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise UserError(f"{job.folder} cannot be created ({error.strerror}); change its owner or output.") from None
        if not os.access(job.folder, os.W_OK) or _read_only(job.folder):
            raise UserError(f"{job.folder} is not writable; change its owner or permissions, then run again.")
        with locking.exclusive(job) as done:
            if done:
                print(f"{job.output} was finished by the other process; nothing is left to do.", flush=True)
                return 0
            main(job)
            receipts.leave(job)
    except UserError as error:
        return _fail(str(error), EXIT_USER_ERROR)
    except TimeLimitReached as reached:
        return _fail(f"{reached} Run the same command again to continue.", EXIT_TEMPORARY)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        return _fail(_storage(error, job), EXIT_USER_ERROR)
    except Exception as error:
        if "No space left on device" not in str(error) and "os error 28" not in str(error):
            raise
        return _fail(_storage(error, job), EXIT_USER_ERROR)
    return 0


def _read_only(folder) -> bool:
    return not os.stat(folder).st_mode & 0o222


def _storage(error: Exception, job: JobConfig | None) -> str:
    where = getattr(error, "filename", None) or (job.folder if job else "the output folder")
    what = getattr(error, "strerror", None) or "No space left on device"
    return (
        f"cannot write {where}: {what}; free space or change permissions there, then run the same command again "
        "(what was finished is kept)."
    )


def _fail(sentence: str, code: int) -> int:
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    return code


def _module_name(config: type[JobConfig]) -> str:
    name = config.__module__
    if name == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        name = spec.name if spec else "__main__"
    return name
