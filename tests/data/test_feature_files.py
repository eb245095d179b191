"""Files of features: read in every layout, refused by name, and written."""

import pickle
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_sources import everything

import mutations
from tanager.data import gather, load
from tanager.data.feature_files import SPLITS
from tanager.data.features import read_features, write_features


DRAW = np.random.default_rng(0)
TRAIN, TEST, WIDTH = 9, 5, 4
ARRAYS = {
    "train_features": DRAW.normal(size=(TRAIN, WIDTH)).astype(np.float32),
    "train_labels": np.arange(TRAIN) % 3,
    "test_features": DRAW.normal(size=(TEST, WIDTH)).astype(np.float32),
    "test_labels": np.arange(TEST) % 3,
    "train_person": np.array(["ann", "bob", "cy"])[np.arange(TRAIN) // 3],
    "test_person": np.array(["dee"] * TEST),
}
NAMES = np.array(["cat", "dog", "emu"])


def write_npz(folder, arrays):
    np.savez(folder / "made.npz", **arrays)
    return folder / "made.npz"


def write_npy(folder, arrays):
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder / "train_features.npy"


def write_parquet(folder, arrays, **columns):
    splits = [split for split in ("train", "test") if f"{split}_features" in arrays]
    whole = {
        "features": [row for s in splits for row in arrays[f"{s}_features"].tolist()],
        "split": [s for s in splits for _ in arrays[f"{s}_features"]],
    }
    if "train_labels" in arrays:
        whole["label"] = [x for s in splits for x in arrays[f"{s}_labels"].tolist()]
    if "train_person" in arrays:
        whole["person"] = [name for s in splits for name in arrays[f"{s}_person"]]
    pq.write_table(pa.table(whole | columns), folder / "made.parquet")
    return folder / "made.parquet"


LAYOUTS = [write_npz, write_npy, write_parquet]


def changed(**changes):
    """The arrays with some in place of others, or without them."""
    arrays = ARRAYS | changes
    return {name: array for name, array in arrays.items() if array is not None}


@pytest.mark.parametrize("write", LAYOUTS)
@pytest.mark.parametrize("named", [False, True])
def test_every_layout_holds_the_same(tmp_path, write, named):
    labels = {f"{s}_labels": NAMES[ARRAYS[f"{s}_labels"]] for s in ("train", "test")}
    file = write(tmp_path, ARRAYS | (labels if named else {}))
    found = load("features", features_from=file, groups="person")
    assert found.classes == (("cat", "dog", "emu") if named else ("0", "1", "2"))
    assert found.image_shape == (WIDTH,)
    for split, source in (("train", found.train), ("test", found.test)):
        examples = everything(source)
        np.testing.assert_allclose(
            examples["features"], ARRAYS[f"{split}_features"], rtol=1e-6
        )
        assert examples["features"].dtype == np.float32
        np.testing.assert_array_equal(examples["label"], ARRAYS[f"{split}_labels"])
    np.testing.assert_array_equal(found.owners, ARRAYS["train_person"])
    assert found.units()[1] == 3


def test_npy_files_are_mapped_and_the_folder_stands_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr("tanager.data.features._ROWS", 4)
    file = write_npy(tmp_path, ARRAYS | {"classes": NAMES})
    found = read_features(tmp_path)
    assert found.classes == tuple(NAMES)
    assert isinstance(found.train.tree["features"].base, np.memmap)
    first = found.origin()
    assert first == read_features(file).origin()
    write_npy(tmp_path, {"train_features": ARRAYS["train_features"].astype(">f8")})
    assert first == read_features(file).origin()
    last = np.arange(TRAIN) == TRAIN - 1
    write_npy(tmp_path, {"train_features": ARRAYS["train_features"] + last[:, None]})
    assert first != read_features(file).origin()


def test_the_origin_of_training_examples_holds_no_test_set(tmp_path):
    found = load("features", features_from=write_npz(tmp_path, ARRAYS))
    pickled = pickle.dumps(found.train)
    assert ARRAYS["train_features"].tobytes() in pickled
    assert ARRAYS["test_features"].tobytes() not in pickled
    assert (
        pickle.loads(pickled).origin() == read_features(tmp_path / "made.npz").origin()
    )


def test_who_each_example_is_of_is_part_of_the_origin(tmp_path):
    """Two runs with other persons must not add up what each person spends."""
    others = np.roll(ARRAYS["train_person"], 1)
    file = write_npz(
        tmp_path,
        ARRAYS | {"train_other": others, "test_other": ARRAYS["test_person"]},
    )
    origins = []
    for groups in (None, "person", "other", "person"):
        origin = load("features", features_from=file, groups=groups).origin
        assert origin is not None
        origins.append(origin())
    assert len({*origins}) == 3 and origins[1] == origins[3]


def test_examples_are_held_out_and_chosen_as_of_images(tmp_path):
    file = write_npz(tmp_path, changed(test_features=None, test_labels=None))
    found = load("features", features_from=file, validation_examples=3)
    assert (len(found.train), len(found.test)) == (6, 3)
    two = load(
        "features", features_from=file, validation_examples=2, classes=("2", "0")
    )
    assert (len(two.train), len(two.test)) == (4, 2)
    assert {int(label) for label in gather(two.train, np.arange(4))["label"]} == {0, 1}
    with pytest.raises(ValueError, match=r"'test_features'.*-examples NUMBER\)"):
        load("features", features_from=file)


def spoilt(name, row, value):
    array = np.array(ARRAYS[name], np.float64)
    array[row] = value
    return {name: array}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_features": None}, "has no array 'train_features': it has ['test_fea"),
        (
            {"train_features": None, "features": np.ones(9)},
            "has no array 'train_features': it has ['features', 'test_features', 'te",
        ),
        ({"train_labels": None}, "has no array 'train_labels'"),
        ({"train_labels": np.arange(8)}, "has train_labels [8] for 9 rows of features"),
        (
            {"train_labels": np.arange(9) % 3 - 1},
            "train_labels has in row 0 a label that is not from 0",
        ),
        (
            {"test_labels": np.arange(5)},
            "test_labels has in row 3 a label that is not from",
        ),
        ({"train_labels": np.arange(9) % 3 * 2}, "class '1' has no training example"),
        ({"train_labels": np.arange(9) * 1.0}, "has train_labels of float64: labels"),
        ({"train_labels": np.arange(9) + 9}, "has label 17 and only 9 training"),
        ({"train_labels": np.zeros(9, int)}, "has 1 classes: give two or more"),
        ({"classes": NAMES[[0, 0, 1]]}, "has 3 classes: give two or more, each once"),
        ({"classes": np.arange(3)}, "has classes as int64[3]: they must be text"),
        (
            {"train_labels": NAMES[np.arange(9) % 3]},
            "has train_labels of <U3 and test_labels of",
        ),
        (
            {"train_labels": NAMES[ARRAYS["train_labels"]]}
            | {"test_labels": np.array(["cow"] * 2 + ["cat"] * 3)},
            "test_labels has 2 rows whose label is not a class",
        ),
        ({"train_features": np.ones(9)}, "has train_features as float64[9]: they must"),
        ({"train_features": np.ones((9, 0))}, "has train_features as float64[9, 0]"),
        ({"train_features": np.full((9, 2), "x")}, "has train_features as <U1[9, 2]"),
        ({"test_features": np.ones((5, 3))}, "has 3 features in test_features and 4"),
        (
            spoilt("train_features", (2, 1), np.nan),
            "train_features has 1 rows with NaN",
        ),
        (spoilt("test_features", 4, np.inf), "test_features has 1 rows with NaN, inf"),
        (spoilt("train_features", 1, 1e30), "has 1 rows with NaN, infinity or a norm"),
        (spoilt("train_features", 1, 1e300), "has 1 rows with NaN, infinity or a norm"),
        (spoilt("train_features", [0, 7], 0), "train_features has 2 rows of norm 0: m"),
        ({"train_person": np.ones(9)}, "has train_person as float64[9]: it must be"),
        ({"train_person": np.arange(8)}, "has train_person as int64[8]: it must be"),
        ({"test_person": np.array(["ann"] * 5)}, "has persons of train_person in test"),
        ({"train_person": None}, "has no array 'train_person'"),
    ],
)
def test_bad_arrays_are_named(tmp_path, changes, message):
    file = write_npz(tmp_path, changed(**changes))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_features(file, groups="person")
    assert str(caught.value).startswith("features_from (=")


def test_a_constant_column_is_fine(tmp_path):
    features = np.ones((TRAIN, WIDTH))
    read_features(write_npz(tmp_path, changed(train_features=features)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("made.csv", "is in no layout of features: give a .npz file, a .parquet file"),
        ("gone.npz", "does not exist: give a .npz file"),
        ("objects.npz", "train_labels holds Python objects: save numbers, or text as"),
        ("ragged.parquet", "column 'features' has lists of several lengths"),
        ("gaps.parquet", "row 1 has no 'label'"),
        ("splits.parquet", "column 'split' has 'dev': it must be train or test"),
        ("text.parquet", "column 'features' holds string: it must hold lists"),
        ("few.parquet", "has no column 'split': its columns are ['features', 'label']"),
    ],
)
def test_bad_files_are_named(tmp_path, name, message):
    columns = {
        "features": [[1.0, 2.0]] * 3,
        "label": [0, 1, 0],
        "split": ["train", "train", "test"],
    }
    columns |= {
        "ragged.parquet": {"features": [[1.0], [1.0, 2.0], [1.0, 2.0, 3.0]]},
        "gaps.parquet": {"label": [0, None, 1]},
        "splits.parquet": {"split": ["train", "dev", "test"]},
        "text.parquet": {"features": ["a", "b", "c"]},
    }.get(name, {})
    if name == "few.parquet":
        del columns["split"]
    if name.endswith(".parquet"):
        pq.write_table(pa.table(columns), tmp_path / name)
    elif name == "objects.npz":
        labels = np.array(["a", 1] * 4 + ["b"], object)
        np.savez(tmp_path / name, **changed(train_labels=labels))
    elif name == "made.csv":
        (tmp_path / name).write_text("1,2\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        read_features(tmp_path / name)


@pytest.mark.parametrize("write", LAYOUTS)
def test_damaged_files_are_read_or_refused(tmp_path, write):
    file = write(tmp_path, ARRAYS)
    good, fuzzed = file.read_bytes(), mutations.Fuzz(file.name)
    for content in mutations.of_bytes(good, 60):
        file.write_bytes(content)
        fuzzed(lambda: read_features(file, groups="person"))
    fuzzed.end()


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def flat(batch):
    return batch["image"].reshape(len(batch["image"]), -1).astype(np.float32)


@pytest.fixture(scope="module")
def written(digits, tmp_path_factory):
    done = []
    folder = write_features(
        flat,
        digits,
        tmp_path_factory.mktemp("written") / "features",
        physical_batch_size=500,
        progress=lambda *numbers: done.append(numbers),
    )
    assert done == [(n, 1797) for n in (500, 1000, 1437, 1797)]
    assert folder.stat().st_mode & 0o777 == 0o700
    return folder


def test_features_of_any_function_are_written_in_the_datas_order(digits, written):
    for found in (
        load("features", features_from=written),
        load("digits", features_from=written),
    ):
        assert found.classes == digits.classes
        for index in (0, 1436):
            one = found.train[index]
            np.testing.assert_array_equal(
                one["features"], flat(gather(digits.train, np.array([index])))[0]
            )
            assert one["label"] == digits.train[index]["label"]
        assert (len(found.train), len(found.test)) == (1437, 360)
    assert found.origin is not None and digits.origin is not None
    assert found.origin() == digits.origin()  # so it is charged as the images are


def test_features_of_other_examples_or_another_order_are_refused(written, tmp_path):
    arrays = {file.stem: np.load(file) for file in written.glob("*.npy")}
    moved = {
        f"train_{kind}": arrays[f"train_{kind}"][::-1]
        for kind in ("features", "labels")
    }
    message = "train_labels differ from the data's labels in 1296 rows: write one row"
    with pytest.raises(ValueError, match=message):
        load("digits", features_from=write_npz(tmp_path, arrays | moved))
    fewer = {name: array[:100] for name, array in arrays.items()}
    with pytest.raises(ValueError, match="has 100 rows of train_features for 1437 ex"):
        load("digits", features_from=write_npz(tmp_path, fewer))


@pytest.mark.parametrize("write", LAYOUTS)
def test_features_of_data_need_no_labels(digits, written, tmp_path, write):
    arrays = {f"{s}_features": np.load(written / f"{s}_features.npy") for s in SPLITS}
    file = write(tmp_path, arrays)
    found = load("digits", features_from=file, train_examples=50).train
    assert len(found) == 50 and found[0]["label"] in range(10)
    message = "has no column 'label'" if write is write_parquet else "no array 'train_l"
    with pytest.raises(ValueError, match=message):
        load("features", features_from=file)


def few(batch):
    return flat(batch)[:3]


def torn(batch):
    return np.full((len(batch["label"]), 2), np.nan)


def empty(batch):
    return np.zeros((len(batch["label"]), 2))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (few, "must return numbers[256, 64], one row for each example"),
        (torn, "returned 256 rows with NaN"),
        (empty, "returned 256 rows of norm 0"),
        (lambda batch: np.float32(1), "must return numbers[256, None]"),
        (
            lambda batch: 1 + flat(batch)[:, : 2 + (len(batch["label"]) < 256)],
            "must ret",
        ),
    ],
)
def test_functions_that_return_no_features_are_refused(
    digits, tmp_path, function, message
):
    with pytest.raises(ValueError, match=re.escape(message)):
        write_features(function, digits, tmp_path / "features")
    assert not [*tmp_path.iterdir()]
    (tmp_path / "features").mkdir()
    with pytest.raises(ValueError, match="exists: name a new folder"):
        write_features(flat, digits, tmp_path / "features")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "features"}, "features_from (=None) is needed for features: give a"),
        (
            {"name": "features", "features_from": "f.npz", "path": "data"},
            "path (='data') does not apply to features: for data of your own, tanager",
        ),
        (
            {"name": "folder", "path": ".", "features_from": "f", "stream": False},
            "stream (=False) does not apply to features: leave it out",
        ),
        (
            {"name": "folder", "path": ".", "features_from": "f", "image_size": 8},
            "image_size (=8) does not apply to features",
        ),
    ],
)
def test_features_have_a_file_and_no_images(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(**arguments)
