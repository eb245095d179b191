"""Damaged files of data: read, or refused by one message that names the file."""

import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_sources as small
from small_sources import ENCODED, IMAGES, LABELS, SHAPE

import mutations
from switch import FULL
from tanager._text import clean
from tanager.data import UnreadableExample, decoding, find
from tanager.data.folder import FolderSource, list_folder
from tanager.data.labels import number_labels
from tanager.data.streamed import common_shape, into_memory
from tanager.data.tables import TableSource


CASES = 250 if FULL else 125


def examples_of(source):
    """Read every example that can be read; of others the message names the file."""
    for index in range(min(len(source), 20)):
        try:
            example = source[index]
        except UnreadableExample as error:
            assert error.index == index
            raise
        assert example["image"].shape == source.shape
    return source


def fuzz(file, read, cases=CASES, good=None, most=400):
    good = file.read_bytes() if good is None else good
    fuzzed = mutations.Fuzz(file.name)
    for content in mutations.of_bytes(good, cases):
        file.write_bytes(content)
        fuzzed(read)
    fuzzed.end(most)
    file.write_bytes(good)
    read()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP"])
def test_images(tmp_path, kind):
    small.make_folder(tmp_path, [small.png(image, kind) for image in IMAGES])
    train, _ = list_folder(tmp_path)
    file = tmp_path / "train" / "n00" / "0.JPEG"
    source = FolderSource(train, SHAPE)
    # A TIFF of many pixels is unpacked before they are found missing: 4 bytes for each
    # of `LARGEST`, twice.
    fuzz(file, lambda: examples_of(source), most=800)
    fuzz(file, lambda: common_shape([source]))


def bomb(width, height):
    """A PNG that claims a size, with checksums as they must be."""
    import zlib

    def chunk(kind, content):
        whole = kind + content
        return (
            struct.pack(">I", len(content))
            + whole
            + struct.pack(">I", zlib.crc32(whole))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(bytes(10_000_000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(9000, 9000), (2**31 - 1, 2**31 - 1), (10**6, 2)])
def test_images_that_claim_many_pixels(size):
    fuzzed = mutations.Fuzz("")
    try:
        decoding.decode_image(bomb(*size), SHAPE)
    except Exception as error:
        assert not isinstance(error, MemoryError)
    fuzzed.refused = 1
    fuzzed.end()


@pytest.mark.parametrize("which", ["images", "labels"])
def test_npy(tmp_path, which):
    small.make_npy(tmp_path)
    file = tmp_path / f"train_{which}.npy"
    good, other = file.read_bytes(), tmp_path / "train_labels.npy"
    fuzzed, of_labels = mutations.Fuzz(file.name), mutations.Fuzz(other.name)

    def read():
        return examples_of(small.open_npy(tmp_path))

    for content in mutations.of_bytes(good, CASES):
        file.write_bytes(content)
        try:
            fuzzed(read)
        except AssertionError:
            # Fewer images: then there are too many labels.
            of_labels(read)
    fuzzed.end()


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1152921504606846976, 8), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 8, 8, 3), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (10, 8, 8, 3), }",
        "{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (10,), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (",
        "(" * 9000,
        "[" * 60_000,
        "{'descr': '|a0', 'fortran_order': False, 'shape': (10,), }",
        "__import__('os').system('true')",
    ],
)
def test_headers_of_npy_that_attack(tmp_path, header):
    small.make_npy(tmp_path)
    text = header.encode()
    content = b"\x93NUMPY\x02\0" + struct.pack("<I", len(text)) + text
    (tmp_path / "train_images.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"train_images\.npy'\) "):
        small.open_npy(tmp_path)


@pytest.mark.parametrize("stream", [True, False])
def test_arrow(tmp_path, stream):
    file = tmp_path / "x.arrow"
    small.write_arrow(file, small.table(ENCODED, LABELS), stream)
    fuzz(file, lambda: examples_of(TableSource([file], SHAPE)), 600)


def test_parquet(tmp_path):
    file = tmp_path / "x.parquet"
    pq.write_table(small.table(ENCODED, LABELS), file, row_group_size=3)

    def read():
        source = TableSource([file], SHAPE)
        number_labels([source], ("a", "b", "c"))
        return into_memory([source])[0]

    fuzz(file, read, 500)


@pytest.mark.parametrize("kind", ["parquet", "arrow file", "arrow stream"])
def test_a_table_that_unpacks_to_many_bytes(tmp_path, kind):
    file = tmp_path / f"x.{kind.partition(' ')[0]}"
    content = np.random.default_rng(0).bytes(20_000)
    rows = small.table([content] * 1000, [0] * 1000)
    if kind == "parquet":
        pq.write_table(rows, file)
    else:
        new = pa.ipc.new_stream if "stream" in kind else pa.ipc.new_file
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with new(str(file), rows.schema, options=options) as writer:
            writer.write_table(rows)
    assert 1000 < file.stat().st_size < 100_000
    with pytest.raises(ValueError, match="unpacks to over 100 times its size"):
        TableSource([file], SHAPE)


NAMES = {"info": {"features": {"label": {"names": ["a", "b", "c"], "_type": "x"}}}}


def test_names_of_classes_in_a_schema(tmp_path):
    file = tmp_path / "x.arrow"
    fuzzed = mutations.Fuzz(file.name)
    for text in mutations.of_json(NAMES, CASES):
        rows = small.table(ENCODED, LABELS, {b"huggingface": text})
        small.write_arrow(file, rows)
        if source := fuzzed(TableSource, [file], SHAPE):
            assert all(clean(name) == name for name in source.class_names or ())


@pytest.mark.parametrize("label", [2**31 - 2, 10])
def test_a_label_that_would_make_two_billion_classes(tmp_path, label):
    small.make_npy(tmp_path)
    labels = LABELS.copy()
    labels[4] = label
    np.save(tmp_path / "train_labels.npy", labels)
    wanted = find.Wanted(("test",), own=True)
    found = find.find_images("folder", tmp_path, wanted)
    assert found.classes == ("0", "1", "2", str(label))
