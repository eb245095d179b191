"""Data sets that are decoded as they are used: found by name, in any format."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import small_sources as small
from small_sources import ENCODED, IMAGES, LABELS

from tanager.data import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ArraySource,
    StreamedSource,
    datasets,
    gather,
    load,
)


HUGGING_FACE = {
    b"huggingface": json.dumps(
        {"info": {"features": {"label": {"names": ["ant", "bee", "cow"]}}}}
    ).encode()
}


def everything(source):
    return gather(source, np.arange(len(source)))


def class_folders(path):
    for split in ("train", "val"):
        small.write_class_folders(path / split, ENCODED)
    (path / "test").mkdir()  # ImageNet's has no classes.
    (path / "test" / "1.JPEG").write_bytes(ENCODED[0])
    return ("n00", "n01", "n02")


def parquet(path, metadata=None):
    (path / "data").mkdir()
    rows = small.table(ENCODED, LABELS, metadata)
    pq.write_table(rows, path / "data" / "train-00000-of-00001.parquet")
    pq.write_table(rows, path / "data" / "validation-00000-of-00001.parquet")
    rows = small.table(ENCODED, np.full(10, -1), metadata)
    pq.write_table(rows, path / "data" / "test-00000-of-00001.parquet")
    return ("0", "1", "2")


def named_parquet(path):
    parquet(path, HUGGING_FACE)
    return ("ant", "bee", "cow")


def arrow(path):
    rows = small.table(ENCODED, LABELS, HUGGING_FACE)
    small.write_arrow(path / "imagenet-1k-train-00000-of-00001.arrow", rows)
    small.write_arrow(path / "imagenet-1k-validation.arrow", rows)
    return ("ant", "bee", "cow")


def array_record(path):
    records = list(map(small.tf_record, LABELS.tolist(), ENCODED))
    for split in ("train", "validation"):
        file = f"imagenet2012-{split}.array_record-00000-of-00001"
        small.write_array_record(path / file, records)
    return tuple(map(str, range(1000)))


def named_array_record(path):
    array_record(path)
    (path / "label.labels.txt").write_text("n1\nn2\nn3\n")
    return ("n1", "n2", "n3")


def npz(path):
    small.make_npz(path)
    return ("0", "1", "2")


FORMATS = (
    class_folders,
    parquet,
    named_parquet,
    arrow,
    array_record,
    named_array_record,
    npz,
)
written = pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)


@written
@pytest.mark.parametrize("name", ["imagenet", "places365"])
def test_the_format_is_found_by_looking(tmp_path, write, name):
    classes = write(tmp_path)
    if name == "places365" and len(classes) == 1000:
        classes = classes[:365]
    dataset = load(name, tmp_path, image_size=8, stream=True)
    assert dataset.classes == classes
    assert (dataset.mean, dataset.std) == (IMAGENET_MEAN, IMAGENET_STD)
    assert dataset.image_shape == (8, 8, 3)
    for source in (dataset.train, dataset.test):
        assert isinstance(source, StreamedSource)
        batch = everything(source)
        np.testing.assert_array_equal(batch["image"], IMAGES)
        np.testing.assert_array_equal(batch["label"], LABELS)


@pytest.mark.parametrize("write", [parquet, named_array_record, npz])
def test_folder_takes_files_of_ones_own(tmp_path, write):
    write(tmp_path)
    where = tmp_path / "data" if write is parquet else tmp_path
    for file in where.glob("test-*"):
        file.unlink()  # Its labels are −1.
    dataset = load("folder", where, image_size=8, stream=True)
    np.testing.assert_array_equal(everything(dataset.train)["image"], IMAGES)
    assert dataset.mean == (0.5,) * 3


@written
def test_into_memory_where_it_fits(tmp_path, write, monkeypatch):
    write(tmp_path)
    if write is array_record:
        (tmp_path / "label.labels.txt").write_text("a b c")
    for stream in (None, False):
        dataset = load("imagenet", tmp_path, image_size=8, stream=stream)
        assert isinstance(dataset.train, ArraySource)
        np.testing.assert_array_equal(everything(dataset.test)["image"], IMAGES)
    monkeypatch.setattr(datasets, "LARGEST_IN_MEMORY", 2 * IMAGES.nbytes - 1)
    streamed = load("imagenet", tmp_path, image_size=8)
    assert isinstance(streamed.train, StreamedSource)
    monkeypatch.setattr(datasets, "LARGEST_IN_MEMORY", 2 * IMAGES.nbytes)
    dataset = load("imagenet", tmp_path, image_size=8)
    assert isinstance(dataset.train, ArraySource)


@written
def test_options_are_those_of_data_in_memory(tmp_path, write):
    classes = write(tmp_path)
    if write is array_record:
        (tmp_path / "label.labels.txt").write_text("0 1 2")
    options = {
        "classes": (classes[2], classes[0]),
        "validation_examples": 2,
        "train_examples": 3,
        "image_size": 8,
    }
    one, two = (
        load("imagenet", tmp_path, stream=stream, **options) for stream in (True, False)
    )
    assert one.classes == two.classes == options["classes"]
    for split, count in (("train", 3), ("test", 2)):
        batches = [everything(getattr(dataset, split)) for dataset in (one, two)]
        assert len(batches[0]["label"]) == count
        for leaf in ("image", "label"):
            np.testing.assert_array_equal(*(batch[leaf] for batch in batches))
    source = one.train
    assert isinstance(source, StreamedSource)
    labels = source.labels  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_array_equal(labels, everything(source)["label"])
    assert len(source.identity()) == 32


@pytest.mark.parametrize("split", [True, False])
def test_a_folder_streams_what_it_would_hold_in_memory(tmp_path, split):
    """Resized alike, and split alike."""
    rng = np.random.default_rng(1)
    for half in ("train", "test") if split else (".",):
        contents = [
            small.png(rng.integers(0, 256, (9 + n, 20 - n, 3), np.uint8), kind="JPEG")
            for n in range(10)
        ]
        small.write_class_folders(tmp_path / half, contents, LABELS)
    memory, streamed = (
        load("folder", tmp_path, image_size=7, stream=stream) for stream in (None, True)
    )
    assert isinstance(memory.train, ArraySource)
    assert isinstance(streamed.train, StreamedSource)
    for half in ("train", "test"):
        one, two = (everything(getattr(each, half)) for each in (memory, streamed))
        np.testing.assert_array_equal(one["image"], two["image"])
        np.testing.assert_array_equal(one["label"], two["label"])


def test_a_large_folder_is_not_opened_file_by_file(tmp_path, monkeypatch):
    small.write_class_folders(tmp_path, [b"not an image"] * 10)
    monkeypatch.setattr(datasets, "LARGEST_IN_MEMORY", 100)
    assert len(load("folder", tmp_path, image_size=8).train) == 7


def test_a_large_folder_of_one_size_needs_no_image_size(tmp_path, monkeypatch):
    small.write_class_folders(tmp_path, ENCODED)
    monkeypatch.setattr(datasets, "LARGEST_IN_MEMORY", 100)
    dataset = load("folder", tmp_path)
    assert isinstance(dataset.train, StreamedSource)
    assert dataset.image_shape == (8, 8, 3)


def write_benchmark(path, images):
    labels = np.arange(len(images)) % 10
    for split in ("train", "test"):
        rows = small.table([small.png(image) for image in images], labels)
        pq.write_table(rows, path / f"{split}.parquet")


@pytest.mark.parametrize(
    ("name", "shape"), [("cifar10", (32, 32, 3)), ("mnist", (28, 28))]
)
def test_benchmarks_stream_their_parquet(tmp_path, name, shape):
    images = np.random.default_rng(0).integers(0, 256, (20, *shape), np.uint8)
    write_benchmark(tmp_path, images)
    memory, streamed = (load(name, tmp_path, stream=stream) for stream in (None, True))
    assert isinstance(streamed.train, StreamedSource)
    assert (memory.mean, memory.image_shape) == (streamed.mean, streamed.image_shape)
    for half in ("train", "test"):
        one, two = (everything(getattr(each, half)) for each in (memory, streamed))
        np.testing.assert_array_equal(one["image"], two["image"])
        np.testing.assert_array_equal(one["label"], two["label"])


def other_names(path):
    named_parquet(path)
    metadata = {b"huggingface": HUGGING_FACE[b"huggingface"].replace(b"bee", b"bat")}
    rows = small.table(ENCODED, LABELS, metadata)
    pq.write_table(rows, path / "data" / "validation-00000-of-00001.parquet")


def no_validation(path):
    arrow(path)
    Path(path / "imagenet-1k-validation.arrow").unlink()


def missing_class(path):
    for split in ("train", "val"):
        np.savez(path / f"{split}.npz", images=IMAGES, labels=LABELS * 2)


@pytest.mark.parametrize(
    ("arguments", "write", "message"),
    [
        (
            {"name": "imagenet"},
            class_folders,
            "image_size (=None) is needed for images",
        ),
        ({"name": "imagenet"}, parquet, "image_size (=None) is needed for images"),
        (
            {"name": "folder", "stream": True},
            class_folders,
            "image_size (=None) is nee",
        ),
        (
            {"name": "imagenet", "image_size": 7},
            npz,
            "whose images are 8 × 8: leave it out",
        ),
        (
            {"name": "digits", "stream": True, "path": None},
            None,
            "stream (='True') does",
        ),
        ({"name": "cifar10", "stream": True}, None, "has no parquet files of cifar10"),
        (
            {"name": "imagenet"},
            None,
            "has no files of imagenet, nor has a folder in it",
        ),
        ({"name": "imagenet-32", "path": "no/such"}, None, "train_data_batch_1.npz"),
        ({"name": "imagenet", "image_size": 8}, other_names, "other names of classes"),
        (
            {"name": "imagenet", "image_size": 8},
            no_validation,
            "but no arrow file to t",
        ),
        (
            {"name": "places365"},
            missing_class,
            "class (='1') of places365 has no train",
        ),
    ],
)
def test_bad_arguments_and_folders(tmp_path, arguments, write, message):
    if write is not None:
        write(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(**{"path": tmp_path, **arguments})


def test_imagenet_32_by_name(tmp_path):
    rows = np.zeros((100, 3072), np.uint8)
    for batch in range(10):
        labels = 1 + 100 * batch + np.arange(100)
        np.savez(
            tmp_path / f"train_data_batch_{batch + 1}.npz", data=rows, labels=labels
        )
    np.savez(tmp_path / "val_data.npz", data=rows[:2], labels=np.array([1, 1000]))
    dataset = load("imagenet-32", tmp_path, stream=True)
    assert dataset.classes[0] == "1"
    assert dataset.classes[-1] == "1000"
    assert dataset.image_shape == (32, 32, 3)
    assert dataset.test[1]["label"] == 999
