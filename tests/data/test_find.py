"""Data sets that are decoded as they are used: found by name, in any format."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import small_sources as small
from PIL import Image
from small_sources import ENCODED, IMAGES, LABELS, everything

from tanager.data import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ArraySource,
    StreamedSource,
    find,
    load,
)
from tanager.data.shards import find_shards


HUGGING_FACE = {
    b"huggingface": json.dumps(
        {"info": {"features": {"label": {"names": ["ant", "bee", "cow"]}}}}
    ).encode()
}


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


def npy(path):
    small.make_npy(path)
    return ("0", "1", "2")


FORMATS = (class_folders, parquet, named_parquet, arrow, npy)
STREAMED = (class_folders, arrow, npy)
written, streamed = (
    pytest.mark.parametrize("write", formats, ids=lambda write: write.__name__)
    for formats in (FORMATS, STREAMED)
)


@written
@pytest.mark.parametrize("name", ["imagenet", "places365"])
def test_the_format_is_found_by_looking(tmp_path, write, name):
    classes = write(tmp_path)
    dataset = load(name, tmp_path, image_size=8)
    assert dataset.classes == classes
    assert (dataset.mean, dataset.std) == (IMAGENET_MEAN, IMAGENET_STD)
    assert dataset.image_shape == (8, 8, 3)
    for source in (dataset.train, dataset.test):
        batch = everything(source)
        np.testing.assert_array_equal(batch["image"], IMAGES)
        np.testing.assert_array_equal(batch["label"], LABELS)


@pytest.mark.parametrize("write", [parquet, arrow, npy])
def test_folder_takes_files_of_ones_own(tmp_path, write):
    write(tmp_path)
    where = tmp_path / "data" if write is parquet else tmp_path
    if write is parquet:
        (where / "test-00000-of-00001.parquet").unlink()  # Its labels are −1.
    dataset = load("folder", where, image_size=8)
    np.testing.assert_array_equal(everything(dataset.train)["image"], IMAGES)
    assert dataset.mean == (0.5,) * 3


@streamed
def test_into_memory_where_it_fits(tmp_path, write, monkeypatch):
    write(tmp_path)
    for stream in (None, False):
        dataset = load("imagenet", tmp_path, image_size=8, stream=stream)
        assert isinstance(dataset.train, ArraySource)
        np.testing.assert_array_equal(everything(dataset.test)["image"], IMAGES)
    monkeypatch.setattr(find, "LARGEST_IN_MEMORY", 2 * IMAGES.nbytes - 1)
    dataset = load("imagenet", tmp_path, image_size=8)
    assert isinstance(dataset.train, StreamedSource)
    monkeypatch.setattr(find, "LARGEST_IN_MEMORY", 2 * IMAGES.nbytes)
    dataset = load("imagenet", tmp_path, image_size=8)
    assert isinstance(dataset.train, ArraySource)


@pytest.mark.parametrize(
    ("stream", "most"), [(True, 1 << 32), (None, 2 * IMAGES.nbytes - 1), (None, 5000)]
)
def test_parquet_is_read_as_a_whole_or_refused(tmp_path, monkeypatch, stream, most):
    parquet(tmp_path)
    assert 2 * IMAGES.nbytes < 5000 < 2 * sum(map(len, ENCODED))
    monkeypatch.setattr(find, "LARGEST_IN_MEMORY", most)
    with pytest.raises(ValueError, match="20 images in parquet files, which cannot"):
        load("imagenet", tmp_path, image_size=8, stream=stream)
    dataset = load("imagenet", tmp_path, image_size=8, stream=False)
    np.testing.assert_array_equal(everything(dataset.train)["image"], IMAGES)


def test_class_folders_of_others_are_passed_by(tmp_path):
    for split in ("train", "val"):
        for name in ("n01", "n02"):
            (tmp_path / "a" / split / name).mkdir(parents=True)
            grey = Image.fromarray(IMAGES[0, ..., 0])
            grey.save(tmp_path / "a" / split / name / "1.png")
    with pytest.raises(ValueError, match="has no files of cifar10, nor has a folder"):
        load("cifar10", tmp_path / "a")
    # Pictures that are all grey have three channels here, in memory or not.
    for stream in (True, False):
        dataset = load("imagenet", tmp_path / "a", stream=stream)
        assert dataset.image_shape == (8, 8, 3)


@streamed
def test_options_are_those_of_data_in_memory(tmp_path, write):
    classes = write(tmp_path)
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
    labels = source.labels  # pyrefly: ignore[missing-attribute]
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
    monkeypatch.setattr(find, "LARGEST_IN_MEMORY", 100)
    assert len(load("folder", tmp_path, image_size=8).train) == 9


def test_a_large_folder_of_one_size_needs_no_image_size(tmp_path, monkeypatch):
    small.write_class_folders(tmp_path, ENCODED)
    monkeypatch.setattr(find, "LARGEST_IN_MEMORY", 100)
    dataset = load("folder", tmp_path)
    assert isinstance(dataset.train, StreamedSource)
    assert dataset.image_shape == (8, 8, 3)


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
        rows = small.table(ENCODED, LABELS // 2 * 2, HUGGING_FACE)
        small.write_arrow(path / f"{split}.arrow", rows)


def two_sizes(path):
    parquet(path)
    rows = small.table([small.png(IMAGES[0, :6])] * 10, LABELS)
    pq.write_table(rows, path / "data" / "validation-00000-of-00001.parquet")


def no_test_arrays(path):
    npy(path)
    (path / "test_images.npy").unlink()


@pytest.mark.parametrize(
    ("arguments", "write", "message"),
    [
        ({"name": "imagenet"}, two_sizes, "image_size (=None) is needed for images"),
        ({"name": "digits", "stream": True, "path": None}, None, "stream (=True) does"),
        ({"name": "cifar10"}, None, "has no files of cifar10, nor has a folder in it"),
        (
            {"name": "imagenet"},
            no_test_arrays,
            "no images to test on: add val_images.npy or validation_images.npy",
        ),
        (
            {"name": "imagenet"},
            None,
            "has no files of imagenet, nor has a folder in it",
        ),
        ({"name": "imagenet-32", "path": "no/such"}, None, "train_images.npy"),
        ({"name": "imagenet", "image_size": 8}, other_names, "other names of classes"),
        (
            {"name": "imagenet", "image_size": 8},
            no_validation,
            "but no arrow file to t",
        ),
        (
            {"name": "places365"},
            missing_class,
            "class (='bee') of places365 has no train",
        ),
    ],
)
def test_bad_arguments_and_folders(tmp_path, arguments, write, message):
    if write is not None:
        write(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(**{"path": tmp_path, **arguments})


def touch(path, *names):
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()


@pytest.mark.parametrize(
    ("ending", "names"),
    [
        ("parquet", ["train.parquet"]),
        ("parquet", ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]),
        ("parquet", ["train/0000.parquet", "train/0001.parquet"]),
        ("arrow", ["imagenet-1k-train-00000-of-00001.arrow"]),
        ("arrow", ["train/data-00000-of-00001.arrow"]),
    ],
)
def test_files_of_a_split(tmp_path, ending, names):
    touch(tmp_path, *names, "README.md", "test.parquet", "restrain.parquet")
    found = find_shards(tmp_path, "train", ending)
    assert [str(file.relative_to(tmp_path)) for file in found] == names
    assert find_shards(tmp_path, "validation", ending) == []


def test_the_images_beside_the_files_of_a_split_are_not_sorted(tmp_path, monkeypatch):
    touch(tmp_path, "train.parquet", "1.png", "2.png")
    monkeypatch.setattr(type(tmp_path), "__lt__", None)  # 60,000 took a minute
    assert find_shards(tmp_path, "train", "parquet") == [tmp_path / "train.parquet"]
    assert find_shards(tmp_path, "train", "arrow") == []


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_parts(tmp_path, missing):
    for part in {0, 1, 2} - {missing}:
        touch(tmp_path, f"x-train-{part:05}-of-00003.arrow")
    message = re.escape("has 2 of the 3 parts of train-*.arrow: get the missing parts")
    with pytest.raises(ValueError, match=message):
        find_shards(tmp_path, "train", "arrow")


@pytest.mark.parametrize(
    "other",
    ["train.parquet", "train-00000-of-00002.parquet", "x-train-00000-of-00001.parquet"],
)
def test_two_sets_of_files(tmp_path, other):
    touch(tmp_path, "train-00000-of-00001.parquet", other)
    with pytest.raises(ValueError, match="has more than one set of train files, such"):
        find_shards(tmp_path, "train", "parquet")
