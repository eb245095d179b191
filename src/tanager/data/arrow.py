"""Arrow files of encoded images, memory-mapped.

Both of Arrow's formats are read: the file format, and the stream format in which
`datasets` keeps its cache. Buffers must not be compressed, as in both they are not by
default: a compressed one is taken into memory whole.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tanager._reading import AGAIN, reading, refuse_file
from tanager.data import columns, pictures
from tanager.data.formats import check_labels
from tanager.data.streamed import StreamedImages, digest, locate, of_files


_FILE_FORMAT = b"ARROW1"


class ArrowSource(StreamedImages):
    """The rows of one or more Arrow files, in their order.

    Args:
        files: the Arrow files.
        shape: (H, W, C) to decode to.
        image_columns: names the image column may have.
        label_columns: names the label column may have.
        classes: how many classes there are; None where the files tell, or else to take
            labels as they are.
        exact: refuse images that do not have this shape already, instead of resizing.
        origins: the files that they were converted from, row by row: these are named
            in messages and identify the source.

    Attributes:
        class_names: names of the classes, where a file tells them; else None.

    Raises:
        ValueError: a file is damaged, lacks a column or has one of another type, or a
            label is missing or out of range.
    """

    def __init__(
        self,
        files: Sequence[Path],
        shape: tuple[int, int, int],
        *,
        image_columns: Sequence[str] = columns.IMAGE_COLUMNS,
        label_columns: Sequence[str] = columns.LABEL_COLUMNS,
        classes: int | None = None,
        exact: bool = False,
        origins: Sequence[Path] | None = None,
    ):
        super().__init__(shape)
        self._files = tuple(files)
        self._origins = tuple(origins or files)
        self._columns = tuple(image_columns)
        self._exact = exact
        self.class_names: tuple[str, ...] | None = None
        labels = [self._labels_of(shard, label_columns) for shard in range(len(files))]
        self._ends = np.cumsum([len(part) for part in labels])
        if classes is None:
            classes = len(self.class_names or ()) or np.iinfo(np.int32).max
        self._labels = np.concatenate(
            [
                check_labels(file, part, classes)
                for file, part in zip(self._origins, labels, strict=True)
            ]
        )

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def labels(self) -> np.ndarray:
        """See `StreamedImages.labels`."""
        return self._labels

    def identity(self) -> bytes:
        """Return a digest of the files' names, sizes, ends, and of the labels."""
        return digest(b"arrow", of_files(self._origins), self._labels, self.shape)

    def _labels_of(self, shard: int, label_columns: Sequence[str]) -> np.ndarray:
        file = self._origins[shard]
        with reading(file, "is not an Arrow file that can be read"):
            table = _mapped(self._files[shard])
            image = columns.present(file, table.column_names, self._columns)
            label = columns.present(file, table.column_names, label_columns)
            # Arrow itself believes the lengths and offsets that a file tells.
            for name in (image, label):
                table[name].validate()
            columns.encoded(file, image, table[image]).validate(full=True)
            if self.class_names is None:
                self.class_names = columns.class_names(table.schema, label)
            values = columns.label_values(file, label, table[label])
        if not len(values):
            refuse_file(file, "has no rows", AGAIN)
        return values

    def _read(self, index: int) -> tuple[np.ndarray, int]:
        shard, row = locate(index, self._ends)
        if shard not in self._opened:
            self._opened[shard] = _Images(self._files[shard], self._columns)
        content = self._opened[shard][row]
        if content is None:
            raise ValueError(f"it {columns.NO_BYTES}")
        image = pictures.decode(content, self.shape, self._exact)
        return image, int(self._labels[index])

    def _place(self, index: int) -> tuple[Path, str]:
        shard, row = locate(index, self._ends)
        return self._origins[shard], f"row {row} "


class _Images:
    """The encoded images of one file, each copied out of the mapping when asked for."""

    def __init__(self, file: Path, image_columns: Sequence[str]):
        table = _mapped(file)
        name = columns.present(file, table.column_names, image_columns)
        self._chunks = columns.encoded(file, name, table[name]).chunks
        self._ends = np.cumsum([len(chunk) for chunk in self._chunks])

    def __getitem__(self, row: int) -> bytes | None:
        chunk, position = locate(row, self._ends)
        return self._chunks[chunk][position].as_py()


def _mapped(file: Path) -> Any:
    import pyarrow as pa

    source = pa.memory_map(str(file))
    with_footer = source.read(len(_FILE_FORMAT)) == _FILE_FORMAT
    source.seek(0)
    open_ = pa.ipc.open_file if with_footer else pa.ipc.open_stream
    return open_(source).read_all()
