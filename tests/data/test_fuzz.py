"""Damaged files of data: read, or refused by one message that names the file."""

import gzip
import struct

import numpy as np
import pyarrow.parquet as pq
import pytest
import small_sources as small
from small_sources import ENCODED, IMAGES, LABELS, SHAPE
from test_python_batch import cifar10

import mutations
from tanager._text import clean
from tanager.data import UnreadableExample, find, pictures
from tanager.data.array_record import ArrayRecordSource
from tanager.data.arrow import ArrowSource
from tanager.data.conversion import open_parquet
from tanager.data.folder import FolderSource, common_shape, list_halves
from tanager.data.formats import read_idx
from tanager.data.mapped import find_mapped
from tanager.data.parquet import parquet_rows, read_parquet
from tanager.data.python_batch import read_python_batch


CASES = 250


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANAGER_CACHE_DIR", str(tmp_path / "cache"))


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


def fuzz(file, read, cases=CASES, good=None):
    good = file.read_bytes() if good is None else good
    fuzzed = mutations.Fuzz(file.name)
    for content in mutations.of_bytes(good, cases):
        file.write_bytes(content)
        fuzzed(read)
    fuzzed.end()
    file.write_bytes(good)
    read()


def test_python_batches(tmp_path):
    file = tmp_path / "data_batch_1"
    file.write_bytes(cifar10())
    fuzz(file, lambda: read_python_batch(file, "labels", (2, 2, 3), 10**6), 1000)


def idx(array):
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx(tmp_path, which, ending):
    files = [tmp_path / f"{name}{ending}" for name in ("images", "labels")]
    arrays = (IMAGES[..., 0], LABELS)
    for file, array in zip(files, arrays, strict=True):
        content = idx(array)
        file.write_bytes(gzip.compress(content) if ending else content)

    def read():
        images, labels = files
        return read_idx(images, labels, (8, 8, 1), 3)

    # What is wrong between the two is said of the labels.
    name = files[which].name
    fuzzed = mutations.Fuzz("labels" if which else "images")
    good = files[which].read_bytes()
    for content in mutations.of_bytes(good, CASES):
        files[which].write_bytes(content)
        try:
            fuzzed(read)
        except AssertionError:
            if "for" not in name and not which:
                mutations.Fuzz("labels")(read)
            else:
                raise
    fuzzed.end()


def test_a_header_of_idx_that_claims_more_than_memory(tmp_path):
    file = tmp_path / "images"
    file.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", *[2**32 - 1] * 3))
    with pytest.raises(ValueError, match="truncated or damaged"):
        read_idx(file, file, (8, 8, 1), 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_images(tmp_path, kind):
    small.make_folder(tmp_path, [small.png(image, kind) for image in IMAGES])
    train, _ = list_halves(tmp_path)
    file = tmp_path / "train" / "n00" / "0.JPEG"
    source = FolderSource(train, SHAPE)
    fuzz(file, lambda: examples_of(source))
    fuzz(file, lambda: common_shape([train], 8))


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
        pictures.decode(bomb(*size), SHAPE)
    except Exception as error:
        assert not isinstance(error, MemoryError)
    fuzzed.refused = 1
    fuzzed.end()


def mapped_of(folder):
    found = find_mapped(folder, ("test",))
    assert found is not None
    return found[0]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path, save):
    small.make_npz(tmp_path, save=save)
    fuzz(
        tmp_path / "train.npz",
        lambda: examples_of(mapped_of(tmp_path)),
    )


@pytest.mark.parametrize("which", ["images", "labels"])
def test_npy(tmp_path, which):
    small.make_npy(tmp_path)
    file = tmp_path / f"train_{which}.npy"
    good, other = file.read_bytes(), tmp_path / "train_labels.npy"
    fuzzed, of_labels = mutations.Fuzz(file.name), mutations.Fuzz(other.name)

    def read():
        return examples_of(mapped_of(tmp_path))

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
@pytest.mark.parametrize("packed", [False, True])
def test_headers_of_npy_that_attack(tmp_path, header, packed):
    small.make_npy(tmp_path)
    text = header.encode()
    content = b"\x93NUMPY\x02\0" + struct.pack("<I", len(text)) + text
    if packed:
        for name in tmp_path.glob("train_*"):
            name.unlink()
        small.zip_of(tmp_path / "train.npz", {"images.npy": content, "labels.npy": b""})
    else:
        (tmp_path / "train_images.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"train(_images)?\.np[yz]'\) "):
        find_mapped(tmp_path, ("test",))


@pytest.mark.parametrize("stream", [True, False])
def test_arrow(tmp_path, stream):
    file = tmp_path / "x.arrow"
    small.write_arrow(file, small.table(ENCODED, LABELS), stream)
    fuzz(file, lambda: examples_of(ArrowSource([file], SHAPE)), 600)


@pytest.mark.parametrize("converted", [True, False])
def test_parquet(tmp_path, converted):
    file = tmp_path / "x.parquet"
    pq.write_table(small.table(ENCODED, LABELS), file, row_group_size=3)

    def read():
        if converted:
            (source,) = open_parquet([[file]], SHAPE, ("label",), 3, True, None)
            return examples_of(source)
        parquet_rows(file)
        return read_parquet(file, ("image",), ("label",), SHAPE, 3, lambda more: None)

    fuzz(file, read)


def test_array_records(tmp_path):
    file = tmp_path / "x.array_record"
    small.write_array_record(file, map(small.tf_record, LABELS.tolist(), ENCODED))
    fuzz(file, lambda: examples_of(ArrayRecordSource([file], SHAPE)))


def test_examples_of_tensorflow(tmp_path):
    good = small.tf_record(1, ENCODED[0])
    records = list(mutations.of_bytes(good, 500))[1:]
    file = tmp_path / "x.array_record"
    small.write_array_record(file, [record for record in records if record])
    source = ArrayRecordSource([file], SHAPE)
    fuzzed = mutations.Fuzz(file.name)
    for index in range(len(source)):
        fuzzed(source.__getitem__, index)
    fuzzed.end()


NAMES = {"info": {"features": {"label": {"names": ["a", "b", "c"], "_type": "x"}}}}


def test_names_of_classes_in_a_schema(tmp_path):
    file = tmp_path / "x.arrow"
    fuzzed = mutations.Fuzz(file.name)
    for text in mutations.of_json(NAMES, CASES):
        rows = small.table(ENCODED, LABELS, {b"huggingface": text})
        small.write_arrow(file, rows)
        if source := fuzzed(ArrowSource, [file], SHAPE):
            assert all(clean(name) == name for name in source.class_names or ())


def test_names_of_classes_beside_array_records(tmp_path):
    for split in ("train", "val"):
        records = map(small.tf_record, LABELS.tolist(), ENCODED)
        small.write_array_record(tmp_path / f"x-{split}.array_record", records)
    file = tmp_path / "label.labels.txt"
    file.write_bytes(b"cat\ndog\nemu\n")
    wanted = find.Wanted(("val",), 8)
    fuzzed = mutations.Fuzz(file.name)
    for content in mutations.of_bytes(file.read_bytes(), CASES):
        file.write_bytes(content)
        found = fuzzed(find.find_files, tmp_path, wanted)
        for name in found.classes if found else ():
            assert clean(name) == name


@pytest.mark.parametrize("label", [2**31 - 2, 10])
@pytest.mark.parametrize("make", [small.make_npz, small.make_npy])
def test_a_label_that_would_make_two_billion_classes(
    tmp_path, label, make, monkeypatch
):
    labels = LABELS.copy()
    labels[4] = label
    monkeypatch.setattr(small, "LABELS", labels)
    make(tmp_path)
    wanted = find.Wanted(("test",), None)
    message = rf"row 4 has label {label}, and there are 10 training examples"
    with pytest.raises(ValueError, match=message) as refused:
        find.find_files(tmp_path, wanted)
    assert "train" in str(refused.value)
