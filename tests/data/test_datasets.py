import re

import numpy as np
import pytest
from small_sources import everything

from tanager.data import DATASETS, ArraySource, Dataset, load


def rows_of(images, labels):
    flat = images.reshape(len(images), -1)
    return sorted((*row, label) for row, label in zip(flat, labels, strict=True))


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_digits_are_scikit_learns(digits):
    """Every example of the bundled set is in one split, its grey values intact."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.image_shape == (8, 8, 1)
    assert digits.classes == tuple("0123456789")
    found = []
    for source in (digits.train, digits.test):
        batch = everything(source)
        assert batch["image"].dtype == np.uint8
        assert batch["image"].shape[1:] == (8, 8, 1)
        assert batch["label"].dtype == np.int32
        assert batch["image"].max() == 255
        values = np.rint(batch["image"].reshape(-1, 64) * (16 / 255))
        found += rows_of(values, batch["label"])
    assert sorted(found) == rows_of(pixels, labels)


def test_digits_split_is_stratified_and_fixed(digits):
    counts = [np.bincount(everything(s)["label"]) for s in (digits.train, digits.test)]
    fractions = counts[1] / (counts[0] + counts[1])
    assert np.all(np.abs(fractions - 0.2) < 0.01)
    again = load("digits")
    for split in ("train", "test"):
        one, two = (everything(getattr(d, split)) for d in (digits, again))
        np.testing.assert_array_equal(one["image"], two["image"])


def test_classes_alone_are_kept_and_numbered_as_they_are_named(digits):
    some = load("digits", classes=("7", "2"))
    assert some.classes == ("7", "2")
    for split in ("train", "test"):
        whole, part = (everything(getattr(data, split)) for data in (digits, some))
        for number, label in enumerate((7, 2)):
            expected = whole["image"][whole["label"] == label]
            found = part["image"][part["label"] == number]
            np.testing.assert_array_equal(found, expected)
        assert set(part["label"]) == {0, 1}
        assert part["label"].dtype == np.int32
    held = load("digits", classes=("7", "2"), validation_examples=50)
    assert len(held.train) == len(some.train) - 50


def test_validation_examples_leave_the_test_set_alone(digits):
    held = load("digits", validation_examples=200)
    assert (len(held.train), len(held.test)) == (1237, 200)
    train, test = everything(held.train), everything(held.test)
    one, two = (rows_of(part["image"], part["label"]) for part in (train, test))
    whole = everything(digits.train)
    assert sorted(one + two) == rows_of(whole["image"], whole["label"])
    again = load("digits", validation_examples=200)
    np.testing.assert_array_equal(everything(again.test)["image"], test["image"])
    assert len(np.unique(test["label"])) == 10
    # Of all, in an order of no meaning.
    assert not np.array_equal(test["image"], whole["image"][:200])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "cifar"}, "name (='cifar') is unknown: did you mean cifar10"),
        ({"name": "mnits"}, "did you mean mnist?"),
        (
            {"name": "mnist"},
            "path (=None) is needed for mnist: a folder of train/<",
        ),
        ({"name": "mnist", "path": "no/such"}, "path (='no/such') does not exist"),
        ({"name": "folder", "path": "no/such"}, "train/<class>/*.png"),
        ({"name": "digits", "classes": ("7", "x")}, "classes (='x') must be one of 0,"),
        ({"name": "digits", "classes": ("7",)}, "must be two or more, each of them"),
        ({"name": "digits", "classes": ("7", "2", "7")}, "each of them once"),
        ({"name": "digits", "path": "."}, "tanager train folder --data PATH"),
        ({"name": "digits", "stream": False}, "stream (=False) does not apply to digi"),
        ({"name": "digits", "groups": ""}, "groups (='') does not apply to digits"),
        ({"name": "mnist", "image_size": 8}, "image_size (=8) does not apply to mnist"),
        ({"name": "folder", "image_size": 0}, "image_size (=0) must be at least 1"),
        ({"name": "folder", "image_size": (8, 0, 3)}, "(=0) must be at least 1"),
        ({"name": "folder", "image_size": (8, 8)}, "or (height, width, channels): 1"),
        ({"name": "folder", "image_size": (8, 8, 2)}, "(height, width, channels): 1"),
        (
            {"name": "digits", "validation_examples": -1},
            "validation_examples (=-1) must be at least 0",
        ),
        (
            {"name": "digits", "validation_examples": 1437},
            "validation_examples (=1437) must be fewer than the 1437 training examples",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(**arguments)


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((0.5,), (0.5,) * 3, "mean (=(0.5,)) must have 3 numbers, one per channel"),
        ((0.5,) * 3, (0.5,), "std (=(0.5,)) must have 3 numbers, one per channel"),
        ((0.5,) * 3, (0.5, 0.5, 0.0), "std (=0.0) must be positive"),
    ],
)
def test_dataset_constants_fit_the_channels(mean, std, message):
    source = ArraySource({"image": np.zeros((1, 4, 4, 3), np.uint8)})
    with pytest.raises(ValueError, match=re.escape(message)):
        Dataset("own", source, source, ("a",), (4, 4, 3), mean, std)


def test_names_of_data_sets():
    assert (
        *("digits", "cifar10", "cifar100", "mnist"),
        *("folder", "imagenet", "imagenet-32", "places365", "features"),
    ) == DATASETS
