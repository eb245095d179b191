"""Parquet and Arrow files of encoded images: of the Hugging Face Hub, polars, pandas.

Images are encoded, as binary or as a struct with a field ``bytes``; labels are whole
numbers, text, true or false, or categories. Arrow files are memory-mapped, in the file
format or in the stream format of the cache of `datasets`; compressed buffers, which
neither has by default, are taken into memory. Parquet files are taken into memory,
still encoded, because reading one of their images costs a whole row group.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tanager._reading import AGAIN, parse_json, reading, refuse_file
from tanager.data.layout import near_column
from tanager.data.streamed import EncodedImages, of_files


IMAGE_COLUMNS = ("image", "img", "images", "picture", "photo")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target", "category")
"""Names that columns usually have, the first that is there being taken."""
_FILE_FORMAT = b"ARROW1"
_ROWS = 256  # of a parquet file, read at a time
_LARGEST_RATIO = 100  # Encoded images hardly get smaller; a file may repeat some.
_LONGEST_LABEL = 200
_POINTER = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names that the columns of a table may have.

    Where there are several names and no such column, the only one that holds encoded
    images, or the only other one that holds labels, is taken. `owner` names the column
    of owners.
    """

    images: Sequence[str] = IMAGE_COLUMNS
    labels: Sequence[str] = LABEL_COLUMNS
    owner: str | None = None


class TableSource(EncodedImages):
    """The rows of parquet or Arrow files, in the files' order, decoded to one shape.

    `values` are the labels as they are in the files; `class_names` are those in a file,
    if one has them; `owners` those in the column of owners. A file that is damaged,
    lacks a column or has one of another type is refused, and so is a missing label.
    """

    def __init__(
        self,
        files: Sequence[Path],
        shape: tuple[int, int, int],
        columns: Columns | None = None,
        exact: bool = False,
    ):
        super().__init__(shape, np.empty(0, np.int32), exact)
        self._parts = tuple(files)
        self._columns = columns or Columns()
        if self._columns.owner is not None:
            owners = [_owners(file, self._columns.owner) for file in self._parts]
            self.owners = np.concatenate(owners)
        self.class_names: tuple[str, ...] | None = None
        values = [self._labels_of(part) for part in range(len(files))]
        kinds = {each.dtype.kind.replace("u", "i") for each in values}
        if len(kinds) > 1:
            refuse_file(self._parts[-1], "has labels of another kind than files before")
        self._ends = np.cumsum([len(part) for part in values])
        self.values = np.concatenate(values)
        self.labels = np.zeros(len(self.values), np.int32)

    def _files(self) -> bytes:
        return of_files(self._parts)

    def _labels_of(self, part: int) -> np.ndarray:
        file = self._parts[part]
        kind = "a parquet" if _is_parquet(file) else "an Arrow"
        with reading(file, f"is not {kind} file that can be read"):
            table = _table(file, self._columns)
            images = _encoded(file, table)
            # Arrow itself believes the lengths and offsets in a file.
            images.validate(full=True)
            if not len(images):
                refuse_file(file, "has no rows", AGAIN)
            if _is_parquet(file):
                self._opened[part] = images
            if self.class_names is None:
                self.class_names = class_names(table)
            return _label_values(file, table)

    def content(self, index: int) -> bytes:
        """Return the bytes of an image."""
        part, row = self._locate(index)
        if part not in self._opened:
            file = self._parts[part]
            self._opened[part] = _encoded(file, _table(file, self._columns))
        content = self._opened[part][row].as_py()
        if content is None:
            raise ValueError("it has no image bytes: it may only hold a path")
        return content

    def place(self, index: int) -> tuple[Path, str]:
        """Return the file and the row of an image."""
        part, row = self._locate(index)
        return self._parts[part], f"row {row} "

    def _locate(self, index: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._ends, index, "right"))
        return part, index - int(self._ends[part - 1] if part else 0)


def parquet_rows(file: Path) -> int:
    """Return the number of rows of a parquet file, from its footer alone."""
    import pyarrow.parquet as pq

    with reading(file, "is not a parquet file that can be read"):
        _refuse_pointer(file)
        rows, size = pq.read_metadata(file).num_rows, file.stat().st_size
    # An image takes many bytes, so there are fewer rows than bytes.
    if not 0 <= rows <= size:
        rule = f"claims {rows:,} rows in {size:,} bytes, so it is damaged"
        refuse_file(file, rule, AGAIN)
    return rows


def _refuse_pointer(file: Path) -> None:
    with open(file, "rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            refuse_file(file, "is a pointer of Git LFS", "get the file: git lfs pull")


def _is_parquet(file: Path) -> bool:
    return file.suffix == ".parquet"


def _table(file: Path, columns: Columns) -> Any:
    """Return two columns, images and labels."""
    return read_columns(file, lambda schema: _chosen(file, schema, columns))


def read_columns(file: Path, columns: Callable[[Any], list[str]]) -> Any:
    """Return some of the columns, of at most 100 times the file's size.

    `columns` returns their names, given the schema.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    _refuse_pointer(file)

    if _is_parquet(file):
        parquet = pq.ParquetFile(file)
        schema = parquet.schema_arrow
        wanted = columns(schema)
        found = parquet.iter_batches(_ROWS, columns=wanted)
    else:
        source = pa.memory_map(str(file))
        with_footer = source.read(len(_FILE_FORMAT)) == _FILE_FORMAT
        source.seek(0)
        reader = pa.ipc.open_file(source) if with_footer else pa.ipc.open_stream(source)
        schema, found = reader.schema, reader
        wanted = columns(schema)
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


def _chosen(file: Path, schema: Any, columns: Columns) -> list[str]:
    """Return the names of the image and of the label column."""
    import pyarrow as pa

    images = _column(file, schema, "image", columns.images, _is_encoded)
    used = (images, columns.owner)
    others = pa.schema([field for field in schema if field.name not in used])
    return [images, _column(file, others, "label", columns.labels, _is_label)]


def _column(
    file: Path,
    schema: Any,
    what: str,
    usual: Sequence[str],
    fits: Callable[[Any], bool],
) -> str:
    for name in usual:
        if name in schema.names:
            return name
    fitting = [field.name for field in schema if fits(field.type)]
    if len(usual) > 1 and len(fitting) == 1:
        return fitting[0]
    rule = f"has no column {' or '.join(map(repr, usual))}"
    remedy = f"name that of {what}s with {what}_column (--{what}-column)"
    return refuse_file(file, rule, f"{_columns_of(schema, *usual)}; {remedy}")


def _columns_of(schema: Any, *given: str) -> str:
    """Return the names of columns in words; first the one that `given` may mean."""
    near = near_column(given[0], schema.names) if len(given) == 1 else None
    first = f"did you mean {near!r}? " if near else ""
    return f"{first}its columns are {schema.names!r:.300}"


def _is_encoded(kind: Any) -> bool:
    if is_one_of(kind, "struct"):
        return "bytes" in kind.names and _is_encoded(kind.field("bytes").type)
    return is_one_of(kind, "binary", "large_binary", "binary_view")


def _is_owner(kind: Any) -> bool:
    return is_one_of(kind, "string", "large_string", "string_view", "integer")


def _is_label(kind: Any) -> bool:
    if is_one_of(kind, "dictionary"):
        kind = kind.value_type
    return _is_owner(kind) or is_one_of(kind, "boolean")


def is_one_of(kind: Any, *names: str) -> bool:
    """Return whether a type of Arrow is of one of these kinds."""
    from pyarrow import types

    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _encoded(file: Path, table: Any) -> Any:
    """Return the column of the images' bytes; a row without an image is null."""
    column = table.column(0)
    if not _is_encoded(column.type):
        remedy = "it must hold encoded images, as {bytes, path} or as binary"
        _refuse_type(file, table, 0, remedy)
    if is_one_of(column.type, "struct"):
        column = column.flatten()[column.type.get_field_index("bytes")]
    return column


def _refuse_type(file: Path, table: Any, number: int, remedy: str) -> NoReturn:
    name, kind = table.column_names[number], table.column(number).type
    refuse_file(file, f"column {name!r} holds {kind!s:.100}", remedy)


def _label_values(file: Path, table: Any) -> np.ndarray:
    name, column = table.column_names[1], table.column(1)
    if not _is_label(column.type):
        remedy = "labels must be whole numbers, text, true or false, or categories"
        _refuse_type(file, table, 1, remedy)
    column.validate(full=True)
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        refuse_file(file, f"row {row} has no label")
    values = column.to_pylist()
    if any(isinstance(each, str) and len(each) > _LONGEST_LABEL for each in values):
        rule = f"column {name!r} has labels of more than {_LONGEST_LABEL} letters"
        refuse_file(file, rule, "name another column: label_column (--label-column)")
    return np.array(values)


def _owners(file: Path, column: str) -> np.ndarray:
    """Return a column of whole numbers or texts, one for each row."""

    def only(schema: Any) -> list[str]:
        if column not in schema.names:
            remedy = _columns_of(schema, column)
            refuse_file(file, f"has no column {column!r}", remedy, argument="groups")
        return [column]

    with reading(file, "is not a file of a table that can be read"):
        table = read_columns(file, only)
        owners = table.column(0)
        if not _is_owner(owners.type):
            remedy = "owners must be whole numbers or texts, one for each image"
            _refuse_type(file, table, 0, remedy)
        if owners.null_count:
            rule = f"row {owners.is_null().to_pylist().index(True)} has no {column!r}"
            refuse_file(file, rule, "name an owner of its own")
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
