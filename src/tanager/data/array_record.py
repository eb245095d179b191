"""ArrayRecord files, as TFDS writes them: each record is a ``tf.train.Example``."""

import importlib
import io
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tanager import _cache, _npy
from tanager import _files as written
from tanager._reading import AGAIN, UnreadableFile, reading, refuse_file
from tanager.data import pictures, tf_example
from tanager.data.streamed import StreamedImages, digest, locate, of_files


_RANDOM_ACCESS = "readahead_buffer_size:0,max_parallelism:0"
_BUFFER = 1 << 15


class ArrayRecordSource(StreamedImages):
    """The records of one or more ArrayRecord files, in their order.

    Args:
        files: the ArrayRecord files.
        shape: (H, W, C) to decode to.
        classes: how many classes there are; None to take labels as they are.

    Raises:
        ValueError: a file cannot be read, or has no records.
    """

    tells_labels = False

    def __init__(
        self,
        files: Sequence[Path],
        shape: tuple[int, int, int],
        *,
        classes: int | None = None,
    ):
        super().__init__(shape)
        self._files = tuple(files)
        counts = [_records(file) for file in files]
        self._ends = np.cumsum(counts)
        self._classes = classes

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def labels(self) -> np.ndarray:
        """All labels, int32[N]; not to be written to.

        Nothing but the records themselves tells them: all are read, once, and what was
        found is kept in tanager's cache, in a folder that only its owner can read.

        Raises:
            UnreadableExample: a record cannot be read.
        """
        if "labels" not in self._opened:
            self._opened["labels"] = self._remembered()
        return self._opened["labels"]

    def identity(self) -> bytes:
        """Return a digest of the files' names, sizes, ends and numbers of records."""
        return digest(b"array record", of_files(self._files), self._ends, self.shape)

    def _remembered(self) -> np.ndarray:
        key = digest(b"labels", of_files(self._files), self._ends).hex()[:32]
        file = _cache.private_folder("labels") / f"{key}.npy"
        try:
            with reading(file), open(file, "rb") as stream:
                labels = _npy.read_array(stream, file.stat().st_size)
            if labels.dtype == np.int32 and labels.shape == (len(self),):
                return labels
        except UnreadableFile:
            pass  # Never written, or damaged: read again.
        labels = np.fromiter(map(self._label, range(len(self))), np.int32, len(self))
        content = io.BytesIO()
        np.save(content, labels)
        written.write_atomically(file, content.getvalue(), 0o600)
        return labels

    def _label(self, index: int) -> int:
        try:
            return self._parsed(index)[1]
        except Exception as error:
            self._unreadable(index, error)

    def _read(self, index: int) -> tuple[np.ndarray, int]:
        content, label = self._parsed(index)
        return pictures.decode(content, self.shape), label

    def _parsed(self, index: int) -> tuple[bytes, int]:
        shard, row = locate(index, self._ends)
        if shard not in self._opened:
            self._opened[shard] = _Reader(self._files[shard])
        content, label = tf_example.parse(self._opened[shard][row])
        most = np.iinfo(np.int32).max if self._classes is None else self._classes - 1
        if not 0 <= label <= most:
            raise ValueError(f"its label is {label}, and must be from 0 to {most}")
        return content, label

    def _place(self, index: int) -> tuple[Path, str]:
        shard, row = locate(index, self._ends)
        return self._files[shard], f"record {row} "


class _Reader:
    def __init__(self, file: Path):
        # A compiled module, of which type checkers know nothing.
        module = importlib.import_module("array_record.python.array_record_module")
        file.stat()  # The library itself finds no records where there is no file.
        self._reader = module.ArrayRecordReader(
            str(file), _RANDOM_ACCESS, file_reader_buffer_size=_BUFFER
        )
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._reader.num_records()

    def __getitem__(self, row: int) -> bytes:
        with self._lock:
            return self._reader.read([row])[0]


def _records(file: Path) -> int:
    with reading(file):
        count, size = len(_Reader(file)), file.stat().st_size
    if not count:
        refuse_file(file, "has no records, or is truncated", AGAIN)
    if count > size:
        rule = f"tells of {count:,} records in {size:,} bytes, so it is damaged"
        refuse_file(file, rule, AGAIN)
    return count
