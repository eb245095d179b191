"""The public benchmarks by name: written here, tiny, and read back pixel by pixel."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_sources as small
from small_sources import everything

from tanager.data import ArraySource, StreamedSource, load
from tanager.data.known import FILES


def images_and_labels(count, shape, classes, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, *shape), np.uint8)
    return images, rng.permutation(np.arange(count) % classes)


def table(images, labels, image_column="img", label_column="label"):
    encoded = [{"bytes": small.png(image.squeeze()), "path": None} for image in images]
    return pa.table({image_column: encoded, label_column: pa.array(labels)})


def write_parquet(file, *rows):
    file.parent.mkdir(exist_ok=True)
    pq.write_table(table(*rows), file)


def write_arrow(file, *rows):
    small.write_arrow(file, table(*rows))


def write_npy(file, images, labels):
    np.save(file.with_name(f"{file.stem}_images.npy"), images)
    np.save(file.with_name(f"{file.stem}_labels.npy"), labels)


def cifar10(count=20, seed=0):
    return images_and_labels(count, (32, 32, 3), 10, seed)


def assert_holds(source, images, labels):
    batch = everything(source)
    np.testing.assert_array_equal(batch["image"], images)
    np.testing.assert_array_equal(batch["label"], labels)
    assert batch["image"].dtype == np.uint8
    assert batch["label"].dtype == np.int32


_CIFAR = [(0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)]
CONSTANTS = {"cifar10": _CIFAR, "cifar100": _CIFAR, "mnist": [(0.1307,), (0.3081,)]}
"""As they are published; `test_real_data` computes them from the real files."""


def assert_is(dataset, name):
    wanted, *constants = FILES[name]
    assert (dataset.name, dataset.image_shape) == (name, wanted.shape)
    assert [dataset.mean, dataset.std] == constants == CONSTANTS[name]
    assert dataset.classes == wanted.classes
    assert len(set(wanted.classes)) == (100 if name == "cifar100" else 10)


@pytest.mark.parametrize(
    ("name", "columns", "files"),
    [
        ("cifar10", ("img", "label"), "{}.parquet"),
        ("cifar10", ("image", "label"), "plain_text/{}-00000-of-00001.parquet"),
        ("cifar100", ("img", "fine_label"), "cifar100/{}-00000-of-00001.parquet"),
        ("mnist", ("image", "label"), "{}.parquet"),
    ],
)
def test_parquet_of_the_hub(tmp_path, name, columns, files):
    wanted, *_ = FILES[name]
    count = len(wanted.classes)
    train = images_and_labels(2 * count, wanted.shape, count)
    test = images_and_labels(7, wanted.shape, count, seed=1)
    write_parquet(tmp_path / files.format("train"), *train, *columns)
    write_parquet(tmp_path / files.format("test"), *test, *columns)
    calls = []
    dataset = load(name, str(tmp_path), progress=lambda *call: calls.append(call))
    assert_holds(dataset.train, *train)
    assert_holds(dataset.test, *test)
    assert_is(dataset, name)
    assert calls == [(2 * count, 2 * count + 7), (2 * count + 7,) * 2]


@pytest.mark.parametrize("write", [write_arrow, write_npy])
@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_benchmarks_are_streamed(tmp_path, name, write):
    images, labels = images_and_labels(20, FILES[name][0].shape, 10)
    for split in ("train", "test"):
        write(tmp_path / f"{split}.arrow", images, labels)
    for stream, kind in ((None, ArraySource), (True, StreamedSource)):
        dataset = load(name, tmp_path, stream=stream)
        assert isinstance(dataset.train, kind)
        assert_is(dataset, name)
        assert_holds(dataset.train, images, labels)
        assert_holds(dataset.test, images, labels)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist"])
def test_class_folders(tmp_path, name):
    """In the order of their names, which is that of the labels."""
    wanted, *_ = FILES[name]
    count = len(wanted.classes)
    images, _ = images_and_labels(count, wanted.shape, count)
    for image, each in zip(images, wanted.classes, strict=True):
        for split in ("train", "test"):
            (tmp_path / split / each).mkdir(parents=True)
            (tmp_path / split / each / "1.png").write_bytes(small.png(image.squeeze()))
    dataset = load(name, tmp_path)
    assert_is(dataset, name)
    assert_holds(dataset.train, images, np.arange(count))
    each = wanted.classes[-1]
    file = tmp_path / "test" / each / "1.png"
    file.write_bytes(small.png(SMALL))
    with pytest.raises(ValueError, match=r"1\.png'\) cannot be read .*image of 8 × 8"):
        load(name, tmp_path)
    for split in ("train", "test"):
        (tmp_path / split / each).rename(tmp_path / split / "zebra")
    with pytest.raises(ValueError, match=r"has class '\w+' too many or too few"):
        load(name, tmp_path)


def test_parts(tmp_path):
    images, labels = cifar10(21)
    for part in range(3):
        rows = slice(7 * part, 7 * part + 7)
        file = tmp_path / f"train-0000{part}-of-00003.parquet"
        write_parquet(file, images[rows], labels[rows])
    write_parquet(tmp_path / "test-00000-of-00001.parquet", images, labels)
    assert_holds(load("cifar10", tmp_path).train, images, labels)


def test_folder_above_prefers_the_name(tmp_path):
    wanted = images_and_labels(20, (28, 28, 1), 10)
    for folder, (images, labels) in {"cifar10": cifar10(), "mnist": wanted}.items():
        for split in ("train", "test"):
            write_parquet(tmp_path / folder / f"{split}.parquet", images, labels)
    assert_holds(load("mnist", tmp_path).train, *wanted)


def test_class_without_examples(tmp_path):
    images, labels = cifar10()
    write_parquet(tmp_path / "train.parquet", images, np.where(labels == 4, 5, labels))
    write_parquet(tmp_path / "test.parquet", images, labels)
    with pytest.raises(
        ValueError, match=re.escape("class (='deer') of cifar10 has no")
    ):
        load("cifar10", tmp_path)


SMALL = np.zeros((8, 8, 3), np.uint8)
GREY = np.zeros((32, 32, 1), np.uint8)


@pytest.mark.parametrize(
    ("image", "label", "message"),
    [
        (SMALL, 1, "row 3 cannot be read as an image (it is an RGB image of 8 × 8"),
        (GREY, 1, "row 3 cannot be read as an image (it is an L image of 32 × 32"),
        (np.zeros((32, 32, 4), np.uint8), 1, "row 3 cannot be read as an image (it is"),
        (
            np.zeros((32, 32, 3), np.uint8),
            10,
            "row 3 has a label that is not from 0 to 9",
        ),
    ],
)
def test_images_and_labels_must_be_the_benchmarks(tmp_path, image, label, message):
    images, labels = cifar10()
    write_parquet(tmp_path / "train.parquet", images, labels)
    images, labels = [*images], labels.copy()
    images[3], labels[3] = image, label
    file = tmp_path / "test.parquet"
    write_parquet(file, images, labels)
    with pytest.raises(ValueError, match=re.escape(f"path (={str(file)!r}) {message}")):
        load("cifar10", tmp_path)


def test_arrays_of_another_shape(tmp_path):
    for split in ("train", "test"):
        write_npy(tmp_path / split, *images_and_labels(20, (28, 28, 1), 10))
    message = "has train_images of (28, 28, 1), and not of (32, 32, 3)"
    with pytest.raises(ValueError, match=re.escape(message)):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("write", [write_parquet, write_arrow, write_npy])
def test_held_out_examples_need_no_test_files(tmp_path, write):
    kind = write.__name__.removeprefix("write_")
    for split in ("train", "test"):
        write(tmp_path / f"{split}.{kind}", *cifar10(40))
    before = load("cifar10", tmp_path, validation_examples=10)
    for file in tmp_path.glob("test*"):
        file.unlink()
    after = load("cifar10", tmp_path, validation_examples=10)
    for split in ("train", "test"):
        one, two = (getattr(dataset, split) for dataset in (before, after))
        assert len(one) == {"train": 30, "test": 10}[split]
        batch = everything(one)
        assert_holds(two, batch["image"], batch["label"])
    with pytest.raises(ValueError, match=r"to test on"):
        load("cifar10", tmp_path)
