"""Parquet files converted, once, to Arrow files that single rows can be read from.

A parquet file is read by the row group, a hundred images or more for one. Its copy as
an Arrow file is memory-mapped. Copies lie in tanager's cache, in a folder for each set
of files, which is named by their names, sizes, beginnings and ends, and which only its
owner can read: it is a copy of private data. It can be deleted at any time.
"""

import fcntl
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from tanager import _cache
from tanager import _files as written
from tanager._reading import AGAIN, reading, refuse_file
from tanager.data import columns
from tanager.data.arrow import ArrowSource
from tanager.data.formats import Progress, Report, counter
from tanager.data.parquet import parquet_rows
from tanager.data.streamed import digest, of_files


_ROWS = 256  # of a record batch
_FORMAT = b"1"


def open_parquet(
    files: Sequence[Sequence[Path]],
    shape: tuple[int, int, int],
    label_columns: Sequence[str],
    classes: int | None,
    exact: bool,
    progress: Progress | None,
) -> list[ArrowSource]:
    """Open each split's parquet files, converting them where that was not done yet.

    Args:
        files: of each split.
        shape: as `ArrowSource`, like the others.
        label_columns: names the label column may have.
        classes: how many classes there are.
        exact: refuse images of another shape.
        progress: called with the images converted so far and their total.

    Raises:
        ValueError: as `converted` and `ArrowSource`.
    """
    total = sum(map(parquet_rows, itertools.chain(*files)))
    report = counter(progress, total)
    sources = []
    for split in files:
        copies = converted(split, columns.IMAGE_COLUMNS, label_columns, report)
        sources.append(
            ArrowSource(copies, shape, classes=classes, exact=exact, origins=split)
        )
    return sources


def converted(
    files: Sequence[Path],
    image_columns: Sequence[str],
    label_columns: Sequence[str],
    report: Report,
) -> list[Path]:
    """Return Arrow files with the rows of parquet files, made where there are none.

    A row group is held in memory at a time. Every file appears whole or not at all, so
    that a conversion that was cut off goes on with the first that is not there. Where
    several processes want the same, one converts and the others wait.

    Args:
        files: the parquet files of one split.
        image_columns: names the image column may have.
        label_columns: names the label column may have.
        report: called with the number of rows done since the last call.

    Returns:
        One file for each, its columns ``image``, encoded, and ``label``.

    Raises:
        ValueError: a file is corrupt, a column is missing or of another type, or there
            is no room. The message names the file.
    """
    with reading(files[0], "cannot be read, or copied to the cache"):
        wanted = [*image_columns, "/", *label_columns]
        key = digest(_FORMAT, of_files(files), wanted).hex()[:32]
        folder = _cache.private_folder("converted", key)
    made = [folder / f"{file.stem}.arrow" for file in files]
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for file, copy in zip(files, made, strict=True):
            if copy.exists():
                report(parquet_rows(file))
                continue
            room = "make room there, or set TANAGER_CACHE_DIR to another folder"
            with reading(file, f"cannot be converted in {folder}", room):
                _convert(file, copy, image_columns, label_columns, report)
    return made


def _convert(
    file: Path,
    copy: Path,
    image_columns: Sequence[str],
    label_columns: Sequence[str],
    report: Report,
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    part = copy.with_suffix(".part")
    with reading(file, "is not a parquet file that can be read"):
        opened = pq.ParquetFile(file)
    with (
        opened as parquet,
        open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as to,
    ):
        names = parquet.schema_arrow.names
        image = columns.present(file, names, image_columns)
        label = columns.present(file, names, label_columns)
        classes = columns.class_names(parquet.schema_arrow, label)
        writer = None
        for group in range(parquet.num_row_groups):
            with reading(file, f"row group {group} cannot be read"):
                table = parquet.read_row_group(group, columns=[image, label])
                table.validate()
            images = columns.encoded(file, image, table[image])
            rows = pa.table({"image": images, "label": table[label]})
            if writer is None:
                metadata = columns.named("label", classes) if classes else {}
                schema = rows.schema.with_metadata(metadata)
                writer = pa.ipc.new_file(to, schema)
            for batch in rows.to_batches(_ROWS):
                writer.write_batch(batch)
            report(len(rows))
        if writer is None:
            refuse_file(file, "has no rows", AGAIN)
        writer.close()
        to.flush()
        os.fsync(to.fileno())
    os.replace(part, copy)
    written.sync_folder(copy.parent)
