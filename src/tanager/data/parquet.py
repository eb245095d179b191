"""Parquet files of encoded images, each read into arrays."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tanager._reading import AGAIN, reading, refuse_file
from tanager.data import columns, pictures
from tanager.data.formats import Arrays, Report, check_labels, decode_images


_ROWS = 4096  # decoded at a time


def parquet_rows(file: Path) -> int:
    """Return how many rows a parquet file has, from its footer alone."""
    import pyarrow.parquet as pq

    with reading(file, "is not a parquet file"):
        rows, size = pq.read_metadata(file).num_rows, file.stat().st_size
    if not rows:
        refuse_file(file, "has no rows", AGAIN)
    # An image takes many bytes: a file that repeats one is no data set.
    if not 0 <= rows <= size:
        rule = f"tells of {rows:,} rows in {size:,} bytes, so it is damaged"
        refuse_file(file, rule, AGAIN)
    return rows


def read_parquet(
    file: Path,
    image_columns: Sequence[str],
    label_columns: Sequence[str],
    shape: tuple[int, int, int],
    classes: int,
    report: Report,
) -> Arrays:
    """Read a parquet file of encoded images, as the Hugging Face Hub has them.

    Args:
        file: the parquet file.
        image_columns: names the image column may have; it holds encoded images (PNG,
            JPEG), alone or as a struct with a field ``bytes``.
        label_columns: names the label column may have; it holds integers.
        shape: (H, W, C) that every image must have; C = 1 is grey, 3 is RGB.
        classes: labels must be from 0 to `classes` − 1.
        report: as in `decode_images`.

    Raises:
        ValueError: the file is corrupt, a column is missing or of another type, an
            image cannot be decoded or has another shape, a label is out of range.
    """
    import pyarrow.parquet as pq

    with reading(file, "is not a parquet file that can be read"):
        with pq.ParquetFile(file) as table:
            names = table.schema_arrow.names
            image = columns.present(file, names, image_columns)
            label = columns.present(file, names, label_columns)
            parts, start = [], 0
            for rows in table.iter_batches(_ROWS, columns=[image, label]):
                part = _decoded(file, rows, start, image, label, shape, classes, report)
                parts.append(part)
                start += len(rows)
        images, labels = zip(*parts, strict=True)
        return np.concatenate(images), np.concatenate(labels)


def _decoded(
    file: Path,
    rows: Any,
    start: int,
    image_column: str,
    label_column: str,
    shape: tuple[int, int, int],
    classes: int,
    report: Report,
) -> Arrays:
    """Return images and labels of a few rows, the first of which is number `start`."""
    rows.validate()
    values = columns.label_values(file, label_column, rows[label_column], start)
    labels = check_labels(file, values, classes, start)
    column = columns.encoded(file, image_column, rows[image_column])
    column.validate(full=True)
    encoded = column.to_pylist()

    def decode(row: int) -> np.ndarray:
        if encoded[row] is None:
            refuse_file(file, f"row {start + row} {columns.NO_BYTES}")
        with reading(file, f"row {start + row}: cannot decode the image"):
            return pictures.decode(encoded[row], shape, exact=True)

    return decode_images(len(encoded), decode, shape, report), labels
