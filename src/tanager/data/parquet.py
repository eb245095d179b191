"""Parquet files of encoded images, each read into arrays."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tanager.data import columns, pictures
from tanager.data.formats import (
    AGAIN,
    Arrays,
    Report,
    check_labels,
    decode_images,
    refuse_file,
)


def parquet_rows(file: Path) -> int:
    """Return how many rows a parquet file has, from its footer alone."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_metadata(file).num_rows
    except (pa.ArrowException, OSError) as error:
        refuse_file(file, f"is not a parquet file ({error})", AGAIN)


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
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(file).names
        image_column = columns.present(file, names, image_columns)
        label_column = columns.present(file, names, label_columns)
        table = pq.read_table(file, columns=[image_column, label_column])
    except (pa.ArrowException, OSError) as error:
        refuse_file(file, f"is not a parquet file that can be read ({error})", AGAIN)
    values = columns.label_values(file, label_column, table[label_column])
    labels = check_labels(file, values, classes)
    encoded = columns.encoded(file, image_column, table[image_column]).to_pylist()

    def decode(row: int) -> np.ndarray:
        if encoded[row] is None:
            refuse_file(file, f"row {row} {columns.NO_BYTES}")
        try:
            return pictures.decode(encoded[row], shape, exact=True)
        except Exception as error:  # Pillow's decoders raise nearly anything
            refuse_file(file, f"row {row}: cannot decode the image ({error})", AGAIN)

    return decode_images(len(encoded), decode, shape, report), labels
