"""Parquet in and out, written atomically."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import UserError

if TYPE_CHECKING:
    import pyarrow


def write(rows: Sequence[dict[str, Any]] | pyarrow.Table, path: Path) -> Path:
    """Write rows (or an Arrow table) to parquet; the file appears whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if isinstance(rows, pa.Table):
        table = rows
    else:  # Table.from_pylist would silently drop the columns that the first row lacks
        names = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        pq.write_table(table, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read(path: Path, columns: Sequence[str] | None = None, filters: Any = None) -> list[dict[str, Any]]:
    """Rows of a parquet file; an empty or broken file is one sentence that names it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path, columns=list(columns) if columns else None, filters=filters).to_pylist()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; rebuild the job that writes it.") from None
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a readable parquet file ({reason}); delete it and rebuild its job.") from None
    if not rows:
        raise UserError(
            f"{path} has no rows{' for ' + str(filters) if filters else ''}; check the sizes in the data configuration."
        )
    return rows
