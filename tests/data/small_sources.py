"""The same ten pictures in every format that is streamed, and what reads them.

Imported by spawned processes too: no JAX here.
"""

import io
import sys

import numpy as np
import pyarrow as pa
from PIL import Image

from tanager.data import UnreadableExample, gather
from tanager.data.folder import FolderSource, list_folder
from tanager.data.labels import number_labels
from tanager.data.mapped import Array, MappedSource
from tanager.data.tables import TableSource


COUNT, SHAPE = 10, (8, 8, 3)
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, *SHAPE), np.uint8)
LABELS = np.arange(COUNT, dtype=np.int32) // 4  # 0 0 0 0 1 1 1 1 2 2


def png(pixels, kind="PNG", mode=None):
    buffer = io.BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(buffer, kind)
    return buffer.getvalue()


ENCODED = tuple(png(image) for image in IMAGES)


def halves(contents, labels):
    """Two files: rows 0 … 5 and 6 … 9."""
    return [(contents[rows], labels[rows]) for rows in (slice(6), slice(6, None))]


def table(contents, labels, metadata=None):
    images = [{"bytes": content, "path": None} for content in contents]
    made = pa.table({"image": images, "label": pa.array(np.asarray(labels))})
    return made.replace_schema_metadata(metadata)


def write_arrow(file, rows, stream=True, batch=2):
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(file), "wb") as sink, new(sink, rows.schema) as writer:
        writer.write_table(rows, batch)


def write_class_folders(path, contents, labels=LABELS):
    for number, (content, label) in enumerate(zip(contents, labels, strict=True)):
        file = path / f"n{label:02}" / f"{number}.JPEG"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def make_folder(path, contents):
    for split in ("train", "val"):
        write_class_folders(path / split, contents)


def open_folder(path):
    return FolderSource(list_folder(path)[0], SHAPE)


def make_arrow(path, contents):
    for part, rows in enumerate(halves(contents, LABELS)):
        file = path / f"x-train-0000{part}-of-00002.arrow"
        write_arrow(file, table(*rows), stream=part == 0)


def open_arrow(path):
    source = TableSource(sorted(path.glob("*.arrow")), SHAPE)
    number_labels([source])
    return source


def make_npy(path, images=IMAGES):
    for split in ("train", "test"):
        np.save(path / f"{split}_images.npy", images)
        np.save(path / f"{split}_labels.npy", LABELS)


def open_npy(path):
    source = MappedSource(
        *(Array(path / f"train_{kind}.npy") for kind in ("images", "labels"))
    )
    number_labels([source])
    return source


ENCODED_FORMATS = {
    "folder": (make_folder, open_folder),
    "arrow": (make_arrow, open_arrow),
}
ALL_FORMATS = {**ENCODED_FORMATS, "npy": (make_npy, open_npy)}


def write_made(name, path, contents=None):
    """Write a format's files, of `contents` instead of the pictures if given."""
    path.mkdir(exist_ok=True, parents=True)
    if contents is None:
        contents = ENCODED if name in ENCODED_FORMATS else IMAGES
    ALL_FORMATS[name][0](path, contents)


def open_made(name, path):
    return ALL_FORMATS[name][1](path)


def everything(source):
    """All examples, stacked."""
    return gather(source, np.arange(len(source)))


def read_elsewhere(source):
    """All examples, and whether the process that read them has imported JAX."""
    return everything(source), "jax" in sys.modules


class Flaky:
    """A source some of whose examples cannot be read."""

    def __init__(self, source, bad):
        self.source, self.bad = source, bad

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        if index in self.bad:
            raise UnreadableExample(f"example {index} of the test is torn", int(index))
        return self.source[index]
