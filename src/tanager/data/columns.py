"""The image and label columns of tables, as the Hugging Face Hub has them.

Images are encoded (PNG, JPEG), as binary or as a struct with a field ``bytes``; labels
are integers. Tables are of pyarrow.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tanager._reading import parse_json, refuse_file


IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label",)
NO_BYTES = "has no image bytes: it may only hold a path"


def present(file: Path, names: Sequence[str], wanted: Sequence[str]) -> str:
    """Return the first of `wanted` that is among a file's columns.

    Raises:
        ValueError: none of them is.
    """
    for name in wanted:
        if name in names:
            return name
    choices = " or ".join(map(repr, wanted))
    found = f"its columns are {list(names)!r:.300}"
    return refuse_file(file, f"has no column {choices}", found)


def encoded(file: Path, name: str, column: Any) -> Any:
    """Return the binary column of the images' bytes, null where there are none.

    Args:
        file: for the message.
        name: of the column.
        column: an array or chunked array that was validated.

    Raises:
        ValueError: it does not hold encoded images.
    """
    import pyarrow as pa

    if pa.types.is_struct(column.type) and "bytes" in column.type.names:
        column = column.flatten()[column.type.get_field_index("bytes")]
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        refuse_file(
            file,
            f"column {name!r} holds {column.type!s:.100}",
            "it must hold encoded images, as {bytes, path} or as binary",
        )
    return column


def label_values(file: Path, name: str, column: Any, start: int = 0) -> np.ndarray:
    """Return a column of labels, of whatever integer dtype it has.

    Args:
        file: for the message.
        name: of the column.
        column: an array or chunked array that was validated.
        start: number of its first row.

    Raises:
        ValueError: it does not hold integers, or a row has none.
    """
    import pyarrow as pa

    if not pa.types.is_integer(column.type):
        found = f"column {name!r} holds {column.type!s:.100}"
        refuse_file(file, found, "labels must be integers")
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        refuse_file(file, f"row {start + row} has no label")
    return np.asarray(column)


def class_names(schema: Any, label_column: str) -> tuple[str, ...] | None:
    """Return the names of the labels that `datasets` keeps with a schema.

    None where it keeps none, or one of them twice.
    """
    try:
        content = parse_json((schema.metadata or {})[b"huggingface"])
        names = tuple(content["info"]["features"][label_column]["names"])
        unique = len(set(names)) == len(names) > 0
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return names if unique and all(isinstance(name, str) for name in names) else None


def named(label_column: str, names: Sequence[str]) -> dict[bytes, bytes]:
    """Return metadata of a schema in which `class_names` finds these."""
    features = {label_column: {"names": list(names), "_type": "ClassLabel"}}
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
