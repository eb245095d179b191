"""The same ten pictures in every format that is streamed, and what reads them.

Imported by spawned processes too: no JAX here.
"""

import importlib
import io
import sys
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tanager.data import UnreadableExample, gather
from tanager.data.array_record import ArrayRecordSource
from tanager.data.arrow import ArrowSource
from tanager.data.conversion import open_parquet
from tanager.data.folder import FolderSource, list_halves
from tanager.data.mapped import find_mapped


COUNT, SHAPE = 10, (8, 8, 3)
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, *SHAPE), np.uint8)
LABELS = np.arange(COUNT, dtype=np.int32) // 4  # 0 0 0 0 1 1 1 1 2 2


def png(pixels, kind="PNG", mode=None):
    buffer = io.BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(buffer, kind)
    return buffer.getvalue()


ENCODED = tuple(png(image) for image in IMAGES)


def varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def tf_record(label, image, label_name=b"label", image_name=b"image"):
    """A tf.train.Example by hand, as protocol buffers are defined to be encoded."""
    features = {
        b"file_name": field(1, field(1, b"x.JPEG")),
        b"ratio": field(2, field(1, b"\0\0\0\0")),
        image_name: field(1, field(1, image)),
        label_name: field(3, field(1, varint(label))),
    }
    entries = [field(1, name) + field(2, one) for name, one in features.items()]
    return field(1, b"".join(field(1, entry) for entry in entries))


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


def write_array_record(file, records):
    module = importlib.import_module("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(file), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def write_class_folders(path, contents, labels=LABELS):
    for number, (content, label) in enumerate(zip(contents, labels, strict=True)):
        file = path / f"n{label:02}" / f"{number}.JPEG"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def make_folder(path, contents):
    for split in ("train", "val"):
        write_class_folders(path / split, contents)


def open_folder(path):
    return FolderSource(list_halves(path)[0], SHAPE)


def make_parquet(path, contents):
    for part, rows in enumerate(halves(contents, LABELS)):
        file = path / f"train-0000{part}-of-00002.parquet"
        pq.write_table(table(*rows), file, row_group_size=2)


def open_converted(path):
    files = sorted(path.glob("*.parquet"))
    (source,) = open_parquet([files], SHAPE, ("label",), None, True, None)
    return source


def make_arrow(path, contents):
    for part, rows in enumerate(halves(contents, LABELS)):
        file = path / f"x-train-0000{part}-of-00002.arrow"
        write_arrow(file, table(*rows), stream=part == 0)


def open_arrow(path):
    return ArrowSource(sorted(path.glob("*.arrow")), SHAPE)


def make_array_record(path, contents):
    for part, (images, labels) in enumerate(halves(contents, LABELS)):
        records = map(tf_record, labels.tolist(), images)
        write_array_record(path / f"x-train.array_record-0000{part}-of-00002", records)


def open_array_record(path):
    return ArrayRecordSource(sorted(path.glob("*array_record*")), SHAPE)


def make_npy(path, images=IMAGES):
    for split in ("train", "test"):
        np.save(path / f"{split}_images.npy", images)
        np.save(path / f"{split}_labels.npy", LABELS)


def make_npz(path, images=IMAGES, save=np.savez):
    for split in ("train", "test"):
        save(path / f"{split}.npz", images=images, labels=LABELS)


def open_mapped(path):
    found = find_mapped(path, ("test",))
    assert found is not None
    return found[0]


ENCODED_FORMATS = {
    "folder": (make_folder, open_folder),
    "parquet": (make_parquet, open_converted),
    "arrow": (make_arrow, open_arrow),
    "array record": (make_array_record, open_array_record),
}
MAPPED_FORMATS = {
    "npy": (make_npy, open_mapped),
    "npz": (make_npz, open_mapped),
}


def write_made(name, path, contents=None):
    """Write a format's files, of `contents` instead of the pictures if given."""
    path.mkdir(exist_ok=True, parents=True)
    if name in ENCODED_FORMATS:
        ENCODED_FORMATS[name][0](path, ENCODED if contents is None else contents)
    else:
        MAPPED_FORMATS[name][0](path, IMAGES if contents is None else contents)


def open_made(name, path):
    return (ENCODED_FORMATS | MAPPED_FORMATS)[name][1](path)


def read_elsewhere(source):
    """All examples, and whether the process that read them has imported JAX."""
    return gather(source, np.arange(len(source))), "jax" in sys.modules


def zip_of(file, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


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
