import pathlib
import re
import subprocess
import sys
import types
import warnings

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from sklearn.utils import Bunch

import tanager
from tanager.data import ArraySource, Source, as_source, gather, load, subset


def tree(examples=6):
    images = np.arange(examples * 12, dtype=np.uint8).reshape(examples, 2, 2, 3)
    return {"image": images, "label": np.arange(examples, dtype=np.int32)}


class Listed:
    """A source without a gather of its own."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


def examples_of(data):
    rows = range(len(data["label"]))
    return [{name: leaf[row, ...] for name, leaf in data.items()} for row in rows]


def test_array_source_gives_the_rows():
    data = tree()
    source = ArraySource(data)
    assert isinstance(source, Source)
    assert len(source) == 6
    for index in range(6):
        example = source[index]
        assert set(example) == {"image", "label"}
        assert isinstance(example["label"], np.ndarray)
        assert example["label"].shape == ()
        assert example["label"].dtype == np.int32
        assert int(example["label"]) == index
        np.testing.assert_array_equal(example["image"], data["image"][index])
    assert len(list(iter(source))) == 6


@pytest.mark.parametrize("make", [ArraySource, lambda data: Listed(examples_of(data))])
@pytest.mark.parametrize("indices", [[3], [5, 0, 0, 2], []])
def test_gather_stacks_the_examples(make, indices):
    data = tree()
    batch = gather(make(data), np.array(indices, np.int64))
    for name, leaf in data.items():
        expected = leaf[np.array(indices, np.int64)]
        np.testing.assert_array_equal(batch[name], expected)
        assert batch[name].dtype == leaf.dtype
        assert batch[name].shape == expected.shape


def test_gather_is_a_copy():
    source = ArraySource(tree())
    gather(source, np.array([0, 1]))["image"][:] = 0
    np.testing.assert_array_equal(source.tree["image"], tree()["image"])


def test_gather_uses_the_source_that_can():
    class Own(Listed):
        def gather(self, indices):
            return {"own": np.array(indices)}

    found = gather(Own(examples_of(tree())), np.array([4, 1]))
    np.testing.assert_array_equal(found["own"], [4, 1])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_source_that_gives_other_rows_is_refused(rows):
    """One row for two examples would count twice."""

    class Own(Listed):
        def gather(self, indices):
            return {"image": np.ones((len(indices), 2)), "label": np.ones(rows)}

    with pytest.raises(ValueError, match=r"'label'.* must have 2 rows, one for each"):
        gather(Own(examples_of(tree())), np.array([4, 1]))


def test_nested_trees_and_jax_arrays():
    source = as_source(({"a": jnp.zeros((4, 2), jnp.float32)}, [np.arange(4)]))
    example = source[3]
    assert isinstance(example[0]["a"], np.ndarray)
    assert int(example[1][0]) == 3
    batch = gather(source, np.array([2, 3]))
    assert batch[0]["a"].shape == (2, 2)
    np.testing.assert_array_equal(batch[1][0], [2, 3])


def test_as_source():
    listed = Listed(examples_of(tree()))
    assert as_source(listed) is listed
    array = ArraySource(tree())
    assert as_source(array) is array
    view = subset(array, [1])
    assert as_source(view) is view
    assert len(as_source(np.zeros((3, 2)))) == 3


class Column:
    """A column that says what is missing as pandas does, or else as polars."""

    def __init__(self, **methods):
        for name, found in methods.items():
            setattr(self, name, lambda found=found: found)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"image": np.zeros((3, 2)), "label": np.zeros(4)},
            "data['label'] (=(4,)) must have as many rows as data['image'], 3",
        ),
        ({"image": np.zeros((0, 2))}, "data['image'] (=(0, 2)) has no examples"),
        (
            {"a": {"b": np.array([None, "x"], object)}},
            "data['a']['b'] (='object') must be an array of numbers",
        ),
        ((np.zeros(2), np.array(["x", "y"])), "data[1] (='str"),
        ([1, 2], "data[0] (='int64[]') must have a leading axis over the examples"),
        ({}, "data (={}) has no arrays"),
        ({"a": np.ma.masked_equal([1, 2], 2)}, "data['a'] (of type MaskedArray)"),
        ({"a": np.array([0, 2**31])}, "data['a'] (='int64') has numbers beyond int32"),
        (
            {"a": np.array([0, 2**32], np.uint64)},
            "has numbers beyond uint32, which JAX",
        ),
        ({"a": np.array([0.1])}, "would lose digits in float32, which JAX computes"),
        ({"a": np.array([0.1j])}, "would lose digits in complex64, which JAX comp"),
        ({"a": np.array(["x"], np.dtypes.StringDType())}, "must be an array of numb"),
        ({"a": pa.array([1, None])}, "data['a'] (of type Int64Array) has missing"),
        ({"a": Column(isna=[True])}, "data['a'] (of type Column) has missing"),
        ({"a": Column(null_count=1)}, "has missing values: fill them, or leave out"),
        (pathlib.Path("photos"), "tanager.data.load reads files"),
        ({"a": np.zeros(2, [("x", int), ("y", float)])}, "give its fields: {name: arr"),
        (
            Bunch(data=np.zeros(2), target=np.zeros(2)),
            "data (of type Bunch) must be a source",
        ),
        (Bunch(train=[1], test=[2]), "give one split of it, data['train']"),
        (pa.table({"a": [1]}), "give a dict of its columns: {name: data[name].to_nump"),
        (
            "photos",
            "data (of type str) must be a source or a pytree of arrays: tanager.data",
        ),
        (
            types.SimpleNamespace(train=[1]),
            "of arrays: give its training examples, data.train",
        ),
        (
            7,
            "data (of type int) must be a source or a pytree of arrays: give it",
        ),
    ],
)
def test_bad_data_names_the_leaf(data, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        as_source(data)


@pytest.mark.parametrize("dtype", [">i4", ">f4", ">i8", np.float64])
def test_numbers_that_are_the_same_in_32_bits_are_read(dtype):
    values = np.array([1, 2**20, -3], dtype)
    source = as_source({"a": values})
    np.testing.assert_array_equal(gather(source, np.arange(3))["a"], values)
    assert source[0]["a"].dtype.isnative


def test_unequal_examples_name_index_and_leaf():
    examples = examples_of(tree())
    examples[4] = {"image": np.zeros((3, 2, 3), np.uint8), "label": np.int32(0)}
    message = (
        "data['image'] (='uint8[3, 2, 3]') at index 4 must be uint8[2, 2, 3], "
        "as at index 1"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        gather(Listed(examples), np.array([1, 4]))
    examples[4] = {"image": examples[0]["image"], "label": np.int64(0)}
    message = "data['label'] (='int64[]') at index 4 must be int32[], as at index 1"
    with pytest.raises(ValueError, match=re.escape(message)):
        gather(Listed(examples), np.array([1, 4]))
    del examples[4]["label"]
    message = "data['label'] (='missing') at index 4 must be int32[]"
    with pytest.raises(ValueError, match=re.escape(message)):
        gather(Listed(examples), np.array([1, 4]))


@pytest.mark.parametrize("make", [ArraySource, lambda data: Listed(examples_of(data))])
@pytest.mark.parametrize("index", [-1, 6])
def test_no_index_reads_from_the_other_end(make, index):
    source = make(tree())
    message = f"indices (={index}) must be from 0 to 5"
    with pytest.raises(ValueError, match=re.escape(message)):
        gather(source, np.array([0, index]))
    for limited in (ArraySource(tree()), subset(source, range(6))):
        with pytest.raises(IndexError, match=re.escape(f"index (={index}) must be")):
            limited[index]


@pytest.mark.parametrize("indices", [[[0, 1]], [0.5], [True]])
def test_indices_are_one_row_of_whole_numbers(indices):
    with pytest.raises(ValueError, match="must be one row of whole numbers"):
        gather(ArraySource(tree()), np.array(indices))


@pytest.mark.parametrize("make", [ArraySource, lambda data: Listed(examples_of(data))])
def test_subset_is_a_view_in_the_order_given(make):
    view = subset(subset(make(tree()), [5, 3, 1, 0]), [2, 0])
    assert len(view) == 2
    assert [int(view[index]["label"]) for index in (0, 1)] == [1, 5]
    batch = gather(view, np.array([1, 0, 1]))
    np.testing.assert_array_equal(batch["label"], [5, 1, 5])


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([1, 2, 1], "indices (=1) appears more than once: an example that is in"),
        ([], "indices (=[]) must not be empty"),
        ([6], "indices (=6) must be from 0 to 5"),
    ],
)
def test_bad_subsets_are_refused(indices, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        subset(ArraySource(tree()), indices)


def test_augmentation_is_there_once_it_is_named():
    code = "import tanager; print(tanager.data.augment.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "tanager.data.augment\n", done.stderr
    with pytest.raises(AttributeError, match="no attribute 'augmented'"):
        getattr(tanager.data, "augmented")  # noqa: B009


@pytest.mark.parametrize("classes", [None, ("1", "0")])
def test_copies_of_training_images_among_test_images_are_counted(tmp_path, classes):
    """In test files and among those held out; nothing is said of no copy."""
    images = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 1), np.uint8)
    kept = {"train_images": images[:20], "train_labels": np.arange(20) % 2}
    for copied in (0, 3):
        tests = np.concatenate([images[:copied], images[20:27]])
        parts = {"test_images": tests, "test_labels": np.arange(len(tests)) % 2}
        np.savez(tmp_path / f"{copied}.npz", **kept, **parts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load("folder", tmp_path / "0.npz", classes=classes)
        load("folder", tmp_path / "3.npz", classes=classes, stream=True)
    with pytest.warns(UserWarning, match="^3 of 10 test images are identical to train"):
        load("folder", tmp_path / "3.npz", classes=classes)
    twice = np.concatenate([images, images])
    np.savez(tmp_path / "x.npz", train_images=twice, train_labels=np.arange(60) % 2)
    with pytest.warns(UserWarning) as told:
        load("folder", tmp_path / "x.npz", classes=classes)
    assert sum("identical to training" in str(each.message) for each in told) == 1
