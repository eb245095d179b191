"""Parquet and Arrow files of encoded images, as the Hugging Face Hub has them.

Images are PNG or JPEG, as binary or as a struct with a field ``bytes``; labels are
integers. Arrow files are memory-mapped, in the file format or in the stream format of
the cache of `datasets`; compressed buffers, which neither has by default, are taken
into memory. Parquet files are taken into memory, still encoded, because reading one of
their images costs a whole row group.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tanager._reading import AGAIN, parse_json, reading, refuse_file
from tanager.data.decoding import decode_image
from tanager.data.streamed import StreamedImages, check_labels, of_files


IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label",)
_FILE_FORMAT = b"ARROW1"
_ROWS = 256  # of a parquet file, read at a time
_LARGEST_RATIO = 100  # Encoded images hardly get smaller; a file may repeat some.


class TableSource(StreamedImages):
    """The rows of parquet or Arrow files, in the files' order, decoded to one shape.

    The number of `classes` is taken from the files if it is not given; `class_names`
    are those in a file, if one has them; `owners` those in the `owner_column`. A file
    that is damaged, lacks a column or has one of another type is refused, and so is a
    label that is missing or out of range.
    """

    def __init__(
        self,
        files: Sequence[Path],
        shape: tuple[int, int, int],
        *,
        label_columns: Sequence[str] = LABEL_COLUMNS,
        classes: int | None = None,
        exact: bool = False,
        owner_column: str | None = None,
    ):
        super().__init__(shape, np.empty(0, np.int32), exact)
        self._parts = tuple(files)
        if owner_column is not None:
            owners = [_owners(file, owner_column) for file in self._parts]
            self.owners = np.concatenate(owners)
        self._label_columns = tuple(label_columns)
        self.class_names: tuple[str, ...] | None = None
        labels = [self._labels_of(part) for part in range(len(files))]
        self._ends = np.cumsum([len(part) for part in labels])
        classes = classes or len(self.class_names or ()) or None
        checked = [
            check_labels(file, part, classes)
            for file, part in zip(files, labels, strict=True)
        ]
        self.labels = np.concatenate(checked)

    def _files(self) -> bytes:
        return of_files(self._parts)

    def _labels_of(self, part: int) -> np.ndarray:
        file = self._parts[part]
        kind = "a parquet" if _is_parquet(file) else "an Arrow"
        with reading(file, f"is not {kind} file that can be read"):
            table = _table(file, self._label_columns)
            images = _encoded(file, table)
            # Arrow itself believes the lengths and offsets in a file.
            images.validate(full=True)
            if _is_parquet(file):
                self._opened[part] = images
            if self.class_names is None:
                self.class_names = class_names(table)
            return _label_values(file, table)

    def _read(self, index: int) -> np.ndarray:
        part, row = self._locate(index)
        if part not in self._opened:
            file = self._parts[part]
            self._opened[part] = _encoded(file, _table(file, self._label_columns))
        content = self._opened[part][row].as_py()
        if content is None:
            raise ValueError("it has no image bytes: it may only hold a path")
        return decode_image(content, self.shape, self._exact)

    def _place(self, index: int) -> tuple[Path, str]:
        part, row = self._locate(index)
        return self._parts[part], f"row {row} "

    def _locate(self, index: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._ends, index, "right"))
        return part, index - int(self._ends[part - 1] if part else 0)


def parquet_rows(file: Path) -> int:
    """Return the number of rows of a parquet file, from its footer alone."""
    import pyarrow.parquet as pq

    with reading(file, "is not a parquet file that can be read"):
        rows, size = pq.read_metadata(file).num_rows, file.stat().st_size
    # An image takes many bytes, so there are fewer rows than bytes.
    if not 0 <= rows <= size:
        rule = f"claims {rows:,} rows in {size:,} bytes, so it is damaged"
        refuse_file(file, rule, AGAIN)
    return rows


def _is_parquet(file: Path) -> bool:
    return file.suffix == ".parquet"


def _table(file: Path, label_columns: Sequence[str]) -> Any:
    """Return two columns, images and labels."""
    return read_columns(file, lambda names: _columns(file, names, label_columns))


def read_columns(file: Path, columns: Callable[[Sequence[str]], list[str]]) -> Any:
    """Return some of the columns, of at most 100 times the file's size."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if _is_parquet(file):
        parquet = pq.ParquetFile(file)
        schema = parquet.schema_arrow
        wanted = columns(schema.names)
        found = parquet.iter_batches(_ROWS, columns=wanted)
    else:
        source = pa.memory_map(str(file))
        with_footer = source.read(len(_FILE_FORMAT)) == _FILE_FORMAT
        source.seek(0)
        reader = pa.ipc.open_file(source) if with_footer else pa.ipc.open_stream(source)
        schema, found = reader.schema, reader
        wanted = columns(schema.names)
        if with_footer:
            found = map(reader.get_batch, range(reader.num_record_batches))
    batches, room = [], _LARGEST_RATIO * file.stat().st_size
    for batch in found:
        batch = batch.select(wanted)
        # Arrow itself believes the lengths and offsets in a file.
        batch.validate()
        room -= batch.nbytes
        if room < 0:
            refuse_file(file, "unpacks to over 100 times its size", AGAIN)
        batches.append(batch)
    fields = [schema.field(name) for name in wanted]
    return pa.Table.from_batches(batches, pa.schema(fields, schema.metadata))


def _columns(
    file: Path, names: Sequence[str], label_columns: Sequence[str]
) -> list[str]:
    """Return the names of the image and of the label column."""
    found = []
    for wanted in (IMAGE_COLUMNS, label_columns):
        name = next((name for name in wanted if name in names), None)
        if name is None:
            choices = " or ".join(map(repr, wanted))
            rule = f"its columns are {list(names)!r:.300}"
            refuse_file(file, f"has no column {choices}", rule)
        found.append(name)
    return found


def _encoded(file: Path, table: Any) -> Any:
    """Return the column of the images' bytes; a row without an image is null."""
    import pyarrow as pa

    name, column = table.column_names[0], table.column(0)
    if pa.types.is_struct(column.type) and "bytes" in column.type.names:
        column = column.flatten()[column.type.get_field_index("bytes")]
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        refuse_file(
            file,
            f"column {name!r} holds {column.type!s:.100}",
            "it must hold encoded images, as {bytes, path} or as binary",
        )
    return column


def _label_values(file: Path, table: Any) -> np.ndarray:
    import pyarrow as pa

    name, column = table.column_names[1], table.column(1)
    if not pa.types.is_integer(column.type):
        found = f"column {name!r} holds {column.type!s:.100}"
        refuse_file(file, found, "labels must be integers")
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        refuse_file(file, f"row {row} has no label")
    return np.asarray(column)


def _owners(file: Path, column: str) -> np.ndarray:
    """Return a column of whole numbers or texts, one for each row."""
    import pyarrow as pa

    def only(names: Sequence[str]) -> list[str]:
        if column not in names:
            rule = f"its columns are {list(names)!r:.300}"
            refuse_file(file, f"has no column {column!r}", rule, argument="groups")
        return [column]

    with reading(file, "is not a file of a table that can be read"):
        owners = read_columns(file, only).column(0)
        kind = owners.type
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if not (text or pa.types.is_integer(kind)):
            refuse_file(
                file,
                f"column {column!r} holds {kind!s:.100}",
                "owners must be whole numbers or texts, one for each image",
            )
        if owners.null_count:
            row = owners.is_null().to_pylist().index(True)
            refuse_file(
                file, f"row {row} has no {column!r}", "name an owner of its own"
            )
        return np.array(owners.to_pylist())


def class_names(table: Any) -> tuple[str, ...] | None:
    """Return the names of the labels that `datasets` writes into a schema, if any.

    The labels are the second column.
    """
    try:
        content = parse_json((table.schema.metadata or {})[b"huggingface"])
        features = content["info"]["features"]
        names = tuple(features[table.column_names[1]]["names"])
        unique = len(set(names)) == len(names) > 0
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return names if unique and all(isinstance(name, str) for name in names) else None
