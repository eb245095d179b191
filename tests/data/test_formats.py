"""Tiny files of every format, written here and read back pixel by pixel."""

import gzip
import io
import pickle
import re
import struct
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tanager.data import gather, load
from tanager.data.formats import decode_images


def images_and_labels(count, shape, classes, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, *shape), np.uint8)
    return images, rng.permutation(np.arange(count) % classes)


def png(pixels, mode=None):
    buffer = io.BytesIO()
    image = Image.fromarray(pixels.squeeze())
    (image.convert(mode) if mode else image).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(file, images, labels, image_column="img", label_column="label"):
    encoded = [{"bytes": png(image), "path": None} for image in images]
    columns = {image_column: encoded, label_column: pa.array(labels)}
    file.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), file)


def cifar10(count=20, seed=0):
    return images_and_labels(count, (32, 32, 3), 10, seed)


def assert_holds(source, images, labels):
    batch = gather(source, np.arange(len(source)))
    np.testing.assert_array_equal(batch["image"], images)
    np.testing.assert_array_equal(batch["label"], labels)
    assert batch["image"].dtype == np.uint8
    assert batch["label"].dtype == np.int32


@pytest.mark.parametrize(
    ("name", "shape", "classes", "columns", "files"),
    [
        ("cifar10", (32, 32, 3), 10, ("img", "label"), "{}.parquet"),
        (
            "cifar10",
            (32, 32, 3),
            10,
            ("image", "label"),
            "plain_text/{}-00000-of-00001.parquet",
        ),
        (
            "cifar100",
            (32, 32, 3),
            100,
            ("img", "fine_label"),
            "cifar100/{}-00000-of-00001.parquet",
        ),
        ("mnist", (28, 28, 1), 10, ("image", "label"), "{}.parquet"),
    ],
)
def test_parquet(tmp_path, name, shape, classes, columns, files):
    train = images_and_labels(2 * classes, shape, classes)
    test = images_and_labels(7, shape, classes, seed=1)
    write_parquet(tmp_path / files.format("train"), *train, *columns)
    write_parquet(tmp_path / files.format("test"), *test, *columns)
    calls = []
    dataset = load(name, str(tmp_path), progress=lambda *call: calls.append(call))
    assert_holds(dataset.train, *train)
    assert_holds(dataset.test, *test)
    assert dataset.name == name
    assert dataset.image_shape == shape
    assert len(set(dataset.classes)) == classes
    assert calls == [(2 * classes, 2 * classes + 7), (2 * classes + 7,) * 2]


def test_parquet_of_plain_binary(tmp_path):
    images, labels = cifar10()
    encoded = [png(image) for image in images]
    for split in ("train", "test"):
        table = pa.table({"image": encoded, "label": labels.astype(np.uint8)})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    assert_holds(load("cifar10", tmp_path).train, images, labels)


def test_parquet_in_parts(tmp_path):
    images, labels = cifar10(21)
    for part in range(3):
        rows = slice(7 * part, 7 * part + 7)
        file = tmp_path / f"train-0000{part}-of-00003.parquet"
        write_parquet(file, images[rows], labels[rows])
    write_parquet(tmp_path / "test-00000-of-00001.parquet", images, labels)
    assert_holds(load("cifar10", tmp_path).train, images, labels)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_part(tmp_path, missing):
    for part in {0, 1, 2} - {missing}:
        write_parquet(tmp_path / f"train-0000{part}-of-00003.parquet", *cifar10())
    write_parquet(tmp_path / "test-00000-of-00001.parquet", *cifar10())
    with pytest.raises(ValueError, match="has 2 of the 3 parts of train"):
        load("cifar10", tmp_path)


def test_folder_above_prefers_the_name(tmp_path):
    wanted = images_and_labels(20, (28, 28, 1), 10)
    for folder, (images, labels) in {"cifar10": cifar10(), "mnist": wanted}.items():
        for split in ("train", "test"):
            write_parquet(tmp_path / folder / f"{split}.parquet", images, labels)
    assert_holds(load("mnist", tmp_path).train, *wanted)


def broken(images, labels, row, value):
    encoded = [{"bytes": png(image), "path": None} for image in images]
    encoded[row] = value
    return pa.table({"img": encoded, "label": labels})


SMALL = np.zeros((8, 8, 3), np.uint8)
GREY = np.zeros((32, 32), np.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, n: b"not parquet", "is not a parquet file"),
        (
            lambda i, n: pa.table({"img": ["x"] * len(n), "label": n}),
            "column 'img' holds string: it must hold encoded images",
        ),
        (
            lambda i, n: pa.table({"pixels": n, "label": n}),
            "has no column 'img' or 'image': its columns are ['pixels', 'label']",
        ),
        (
            lambda i, n: broken(i, [str(label) for label in n], 0, None),
            "column 'label' holds string: labels must be integers",
        ),
        (
            lambda i, n: broken(i, n.astype(np.float64), 0, None),
            "column 'label' holds double: labels must be integers",
        ),
        (
            lambda i, n: broken(i, [*n[:-1], None], 0, None),
            "row 19 has no label",
        ),
        (
            lambda i, n: broken(i, np.where(np.arange(20) == 11, 10, n), 0, None),
            "row 11 has label 10: labels must be from 0 to 9",
        ),
        (
            lambda i, n: broken(i, np.where(np.arange(20) == 11, -1, n), 0, None),
            "row 11 has label -1: labels must be from 0 to 9",
        ),
        (lambda i, n: broken(i, n, 13, None), "row 13 has no image bytes"),
        (
            lambda i, n: broken(i, n, 13, {"bytes": None, "path": "x"}),
            "row 13 has no image bytes",
        ),
        (
            lambda i, n: broken(i, n, 13, {"bytes": b"\x89PNG", "path": None}),
            "row 13: cannot decode the image",
        ),
        (
            lambda i, n: broken(i, n, 5, {"bytes": png(i[5])[:-900], "path": None}),
            "row 5: cannot decode the image",
        ),
        (
            lambda i, n: broken(i, n, 5, {"bytes": png(SMALL), "path": None}),
            "row 5: cannot decode the image (it is an RGB image of 8 × 8, and must",
        ),
        (
            lambda i, n: broken(i, n, 5, {"bytes": png(GREY), "path": None}),
            "row 5: cannot decode the image (it is an L image of 32 × 32, and must",
        ),
        (
            lambda i, n: broken(i, n, 5, {"bytes": png(i[5], "RGBA"), "path": None}),
            "row 5: cannot decode the image (it is an RGBA image of 32 × 32, and",
        ),
    ],
)
def test_bad_parquet_names_file_and_row(tmp_path, change, message):
    images, labels = cifar10()
    write_parquet(tmp_path / "train.parquet", images, labels)
    content = change(images, labels)
    file = tmp_path / "test.parquet"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        pq.write_table(content, file)
    expected = f"path (={str(file)!r}) {message}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        load("cifar10", tmp_path)


def test_class_without_examples(tmp_path):
    images, labels = cifar10()
    write_parquet(tmp_path / "train.parquet", images, np.where(labels == 4, 5, labels))
    write_parquet(tmp_path / "test.parquet", images, labels)
    with pytest.raises(
        ValueError, match=re.escape("class (='deer') of cifar10 has no")
    ):
        load("cifar10", tmp_path)


_PurePickler: Any = pickle._Pickler  # pyright: ignore[reportAttributeAccessIssue]
_RECONSTRUCT = np.empty(0).__reduce__()[0]


class OriginalPickler(_PurePickler):
    """Writes what Python 2 and NumPy 1 wrote, as the original files were."""

    def save_bytes(self, obj):
        self.write(pickle.BINSTRING + struct.pack("<i", len(obj)) + obj)
        self.memoize(obj)

    def save_reconstruct(self, obj):
        assert obj is _RECONSTRUCT
        self.write(b"cnumpy.core.multiarray\n_reconstruct\n")

    dispatch: ClassVar = {
        **_PurePickler.dispatch,
        bytes: save_bytes,
        type(_RECONSTRUCT): save_reconstruct,
    }


def write_batch(file, images, labels, key=b"labels", pickler=OriginalPickler):
    rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    file.parent.mkdir(exist_ok=True)
    with open(file, "wb") as stream:
        content = {b"data": rows, key: [int(label) for label in labels]}
        pickler(stream, protocol=2).dump(content)


def write_cifar10_batches(folder, images, labels):
    for part in range(5):
        rows = slice(part, None, 5)
        write_batch(folder / f"data_batch_{part + 1}", images[rows], labels[rows])
    write_batch(folder / "test_batch", images, labels)


@pytest.mark.parametrize("folder", ["", "cifar-10-batches-py"])
def test_cifar10_python_batches(tmp_path, folder):
    images, labels = cifar10(25)
    write_cifar10_batches(tmp_path / folder, images, labels)
    dataset = load("cifar10", tmp_path)
    order = np.concatenate([np.arange(25)[part::5] for part in range(5)])
    assert_holds(dataset.train, images[order], labels[order])
    assert_holds(dataset.test, images, labels)


def test_cifar100_python_batches(tmp_path):
    folder = tmp_path / "cifar-100-python"
    images, labels = images_and_labels(120, (32, 32, 3), 100)
    for split in ("train", "test"):
        write_batch(folder / split, images, labels, b"fine_labels")
    assert_holds(load("cifar100", tmp_path).train, images, labels)


class Code:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [print, pickle.loads, np.load, eval])
def test_pickles_that_run_code_are_refused(tmp_path, function, capsys):
    write_cifar10_batches(tmp_path, *cifar10(25))
    file = tmp_path / "data_batch_3"
    file.write_bytes(pickle.dumps({b"data": Code(function, ("ran",))}))
    message = f"path (={str(file)!r}) cannot be read as a batch of arrays (it asks for"
    with pytest.raises(ValueError, match=re.escape(message)):
        load("cifar10", tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a batch of arrays"),
        (pickle.dumps([1], 4), "cannot be read as a batch of arrays (it holds list"),
        (pickle.dumps({"data": 1}, 4), "has no 'labels': it has ['data']"),
        (pickle.dumps({"data": 1, "labels": [0]}, 4), "has images as int: they must"),
    ],
)
def test_bad_batches_name_the_file(tmp_path, content, message):
    write_cifar10_batches(tmp_path, *cifar10(25))
    file = tmp_path / "data_batch_5"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"path (={str(file)!r}) {message}")):
        load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("rows", "labels", "message"),
    [
        (np.zeros((2, 3071), np.uint8), [0, 1], "has images as uint8[2, 3071]"),
        (
            np.zeros((2, 3072), np.int32),
            [0, 1],
            "cannot be read as a batch of arrays (",
        ),
        (np.zeros((2, 3072), np.uint8), [0], "has labels [1] for 2 images"),
        (np.zeros((2, 3072), np.uint8), [0, 10], "row 1 has label 10: labels must be"),
        (
            np.zeros((2, 3072), np.uint8),
            [0, True],
            "has labels that are no list of int",
        ),
    ],
)
def test_bad_arrays_in_a_batch(tmp_path, rows, labels, message):
    write_cifar10_batches(tmp_path, *cifar10(25))
    file = tmp_path / "data_batch_5"
    with open(file, "wb") as stream:
        OriginalPickler(stream, protocol=2).dump({b"data": rows, b"labels": labels})
    with pytest.raises(ValueError, match=re.escape(f"path (={str(file)!r}) {message}")):
        load("cifar10", tmp_path)


def test_missing_batch_is_named(tmp_path):
    write_cifar10_batches(tmp_path, *cifar10(25))
    (tmp_path / "data_batch_2").unlink()
    with pytest.raises(ValueError, match=re.escape("data_batch_2') is missing")):
        load("cifar10", tmp_path)


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_mnist(folder, images, labels, ending=""):
    for split in ("train", "t10k"):
        for kind, array in (("images-idx3", images[..., 0]), ("labels-idx1", labels)):
            content = gzip.compress(idx(array)) if ending else idx(array)
            (folder / f"{split}-{kind}-ubyte{ending}").write_bytes(content)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_mnist_idx(tmp_path, ending):
    images, labels = images_and_labels(20, (28, 28, 1), 10)
    write_mnist(tmp_path, images, labels, ending)
    dataset = load("mnist", tmp_path)
    assert_holds(dataset.train, images, labels)
    assert_holds(dataset.test, images, labels)
    assert dataset.mean == (0.1307,)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "train-images-idx3-ubyte",
            lambda content: content[:-1],
            "is truncated or damaged: 15695 bytes instead of 15696",
        ),
        (
            "train-images-idx3-ubyte",
            lambda content: content + b"0",
            "is truncated or damaged: 15697 bytes instead of 15696",
        ),
        (
            "t10k-labels-idx1-ubyte",
            lambda content: content[:5],
            "is not an IDX file of bytes in 1 dimensions: it begins with 00000801",
        ),
        (
            "t10k-labels-idx1-ubyte",
            lambda content: b"",
            "is not an IDX file of bytes in 1 dimensions: it begins with nothing",
        ),
        (
            "t10k-images-idx3-ubyte",
            lambda content: b"\0\0\x0d" + content[3:],
            "is not an IDX file of bytes in 3 dimensions: it begins with 00000d03",
        ),
        (
            "train-images-idx3-ubyte",
            lambda content: idx(np.zeros((20, 14, 56))),
            "has images of 14 × 56: must be 28 × 28",
        ),
        (
            "train-labels-idx1-ubyte",
            lambda content: idx(np.zeros(19)),
            "has labels [19] for 20 images",
        ),
        (
            "train-labels-idx1-ubyte",
            lambda content: idx(np.full(20, 10)),
            "row 0 has label 10: labels must be from 0 to 9",
        ),
    ],
)
def test_bad_idx_names_the_file(tmp_path, file, change, message):
    write_mnist(tmp_path, *images_and_labels(20, (28, 28, 1), 10))
    bad = tmp_path / file
    bad.write_bytes(change(bad.read_bytes()))
    with pytest.raises(ValueError, match=re.escape(f"path (={str(bad)!r}) {message}")):
        load("mnist", tmp_path)


@pytest.mark.parametrize("cut", [10, 40])
def test_truncated_gz_names_the_file(tmp_path, cut):
    write_mnist(tmp_path, *images_and_labels(20, (28, 28, 1), 10), ending=".gz")
    bad = tmp_path / "train-labels-idx1-ubyte.gz"
    bad.write_bytes(bad.read_bytes()[:-8][:cut])
    message = f"path (={str(bad)!r}) cannot be read"
    with pytest.raises(ValueError, match=re.escape(message)):
        load("mnist", tmp_path)


def test_missing_idx_file_is_named(tmp_path):
    write_mnist(tmp_path, *images_and_labels(20, (28, 28, 1), 10))
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    message = "t10k-images-idx3-ubyte') is missing: get the file, or its .gz"
    with pytest.raises(ValueError, match=re.escape(message)):
        load("mnist", tmp_path)


def test_decoding_in_parts_keeps_the_order():
    """More images than one task of the pool takes; every one reported once."""
    done = []
    images = decode_images(
        1000, lambda i: np.full((1, 1, 2), i % 251, np.uint8), (1, 1, 2), done.append
    )
    np.testing.assert_array_equal(images[:, 0, 0, 1], np.arange(1000) % 251)
    assert sum(done) == 1000
    assert len(done) > 2


def write_parquets(folder, images, labels):
    for split in ("train", "test"):
        write_parquet(folder / f"{split}.parquet", images, labels)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "shape", "write", "tests"),
    [
        ("cifar10", (32, 32, 3), write_parquets, "test.*"),
        ("cifar10", (32, 32, 3), write_cifar10_batches, "test_batch"),
        ("mnist", (28, 28, 1), write_mnist, "t10k*"),
    ],
)
def test_held_out_examples_need_no_test_files(
    tmp_path, name, shape, write, tests, stream
):
    if stream and write is not write_parquets:
        pytest.skip("only parquet is streamed")
    write(tmp_path, *images_and_labels(40, shape, 10))
    before = load(name, tmp_path, validation_examples=10, stream=stream)
    for file in tmp_path.glob(tests):
        file.unlink()
    after = load(name, tmp_path, validation_examples=10, stream=stream)
    for split in ("train", "test"):
        one, two = (getattr(dataset, split) for dataset in (before, after))
        assert len(one) == {"train": 30, "test": 10}[split]
        batch = gather(one, np.arange(len(one)))
        assert_holds(two, batch["image"], batch["label"])
    with pytest.raises(ValueError, match=r"is missing|has no"):
        load(name, tmp_path, stream=stream)
