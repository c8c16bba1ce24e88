"""JSON schemas of every configuration file, for editors: `python -m posttrain.schema` writes configs/schema/*.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pydantic import RootModel

from posttrain.report.ledger import Claim
from posttrain.study import STAGES, Settings, stage_model

FOLDER = Path("configs/schema")


def schemas() -> dict[str, dict[str, Any]]:
    """file name -> schema, generated from the models that validate the files."""
    found = {"config.schema.json": Settings.model_json_schema()}
    for stage in STAGES:
        found[f"{stage}.schema.json"] = stage_model(stage).model_json_schema()
    found["claims.schema.json"] = RootModel[dict[str, dict[str, Claim]]].model_json_schema()
    return found


def text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m posttrain.schema", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    check = parser.parse_args().check
    stale = [
        name for name, schema in schemas().items() if not (FOLDER / name).is_file() or (FOLDER / name).read_text() != text(schema)
    ]
    if check:
        print(f"stale: {', '.join(stale)}; run `make schema`" if stale else "schemas are up to date")
        return int(bool(stale))
    FOLDER.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (FOLDER / name).write_text(text(schema))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
