"""Any number of labels an image, as CSV files of public data sets have them."""

import itertools
import re
import shutil

import numpy as np
import pytest
from PIL import Image
from small_sources import everything

from tanager.data import Layout, labelled, load


COUNT = 24
NAMES = ("Edema", "Mass", "Node")
SETS = [*itertools.product((0, 1), repeat=3)] * 3
"""Image i has the labels SETS[i]."""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """All pixels of image i are 6·i."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(COUNT):
        pixels = np.full((8, 8, 3), 6 * number, np.uint8)
        Image.fromarray(pixels).save(folder / f"scan{number}.png")
    return folder


def table(path, header, row, numbers=None):
    """A file of labels whose rows are in another order than the files."""
    order = np.random.default_rng(0).permutation(COUNT if numbers is None else numbers)
    lines = [",".join(row(int(n))) for n in order]
    file = path / "labels.csv"
    file.write_text("\n".join([header, *lines]))
    return file


def of_names(n):
    """As NIH ChestX-ray14; a blank cell is no label, either."""
    found = "|".join(name for name, has in zip(NAMES, SETS[n], strict=True) if has)
    return f"scan{n}.png", found or ("No Finding" if n % 2 else ""), str(50 + n)


def of_flags(n, no="0"):
    """As CheXpert: a column for each label, and others."""
    cells = ["1" if has else no for has in SETS[n]]
    return f"scan{n}.png", "Male", str(50 + n), *cells


FLAGS = f"Path,Sex,Age,{','.join(NAMES)}"
FORMS = {
    "names": ("Image Index,Finding Labels,Patient Age", of_names),
    "flags": (FLAGS, of_flags),
    "floats": (FLAGS, lambda n: [c.replace("1", "1.0") for c in of_flags(n)]),
    "blank": (FLAGS, lambda n: of_flags(n, "")),
    "minus one": (FLAGS, lambda n: of_flags(n, "-1")),
    "true": (FLAGS, lambda n: [*of_flags(n)[:3], *map(str, map(bool, SETS[n]))]),
}


def read(images, file, **options):
    layout = Layout(images, labels=file, multi_label=True, **options)
    with pytest.warns(UserWarning) as caught:
        dataset = load("folder", layout)
    return dataset, " ".join(str(each.message) for each in caught)


def all_own(dataset):
    """Whether every image is there once, with its own labels."""
    seen = []
    for source in (dataset.train, dataset.test):
        batch = everything(source)
        assert batch["label"].dtype == np.int32
        numbers = batch["image"][:, 0, 0, 0] // 6
        seen += zip(numbers.tolist(), map(tuple, batch["label"].tolist()), strict=True)
    return sorted(seen) == [*enumerate(SETS)]


@pytest.mark.parametrize("form", FORMS)
def test_every_image_has_its_own_labels(images, tmp_path, form):
    header, row = FORMS[form]
    if form == "floats":
        # Only cells of labels, not the image's name.
        header, row = FLAGS, lambda n: [*of_flags(n)[:3], *(f"{h}.0" for h in SETS[n])]
    dataset, told = read(images, table(tmp_path, header, row))
    assert dataset.classes == NAMES
    assert all_own(dataset)
    assert ("not labels, because" in told) == (form != "names")
    assert ("Sex, Age" in told) == (form != "names")
    assert ("blank cells in columns of labels are read as 0" in told) == (
        form == "blank"
    )


@pytest.mark.parametrize("other", [False, True])
def test_training_and_test_images_may_have_tables_of_their_own(images, tmp_path, other):
    """As CheXpert; both have the same columns of labels."""
    copied = shutil.copytree(images, tmp_path / "scans")
    for name, part in (("train", range(16)), ("valid", range(16, COUNT))):
        rows = [",".join(of_flags(n)) for n in part]
        if other and name == "valid":
            rows[0] = rows[0].rpartition(",")[0] + ",high"
        (copied / f"{name}.csv").write_text("\n".join([FLAGS, *rows]))
    if other:
        with pytest.raises(
            ValueError, match=r"valid\.csv.* has other columns of label"
        ):
            load("folder", Layout(copied, multi_label=True))
        return
    dataset, told = read(copied, None)
    assert "labels are read from train.csv and valid.csv" in told
    assert dataset.record and dataset.record["split"] == "given"
    assert len(dataset.train) == 16
    assert all_own(dataset)


def test_labels_of_other_images_are_seen(images, tmp_path, monkeypatch):
    """Planted: labels in the order of the file, and images in that of their names."""
    right = labelled.read_labels

    def shuffled(file, names, rows, *others):
        names, values = right(file, names, rows, *others)
        return names, np.roll(values, 1, axis=0)

    monkeypatch.setattr(labelled, "read_labels", shuffled)
    dataset, _ = read(images, table(tmp_path, *FORMS["flags"]))
    assert not all_own(dataset)


@pytest.mark.parametrize("no", ["", "0"])
@pytest.mark.parametrize("uncertain", ["absent", "present"])
def test_uncertain_labels_count_as_one_says(images, tmp_path, no, uncertain):
    """Image 0 is uncertain about everything."""

    def row(n):
        return (*of_flags(n)[:3], *["-1"] * 3) if n == 0 else of_flags(n, no)

    file = table(tmp_path, FLAGS, row)
    with pytest.raises(ValueError, match="uncertain beside 0 and blank cells"):
        load("folder", Layout(images, labels=file, multi_label=True))
    dataset, told = read(images, file, uncertain=uncertain)
    assert f"labels of -1, uncertain, are read as {uncertain}" in told
    for source in (dataset.train, dataset.test):
        batch = everything(source)
        for n, labels in zip(batch["image"][:, 0, 0, 0], batch["label"], strict=True):
            uncertain_one = (int(uncertain == "present"),) * 3
            assert tuple(labels) == (SETS[n // 6] if n else uncertain_one)


@pytest.mark.parametrize("stream", [False, True])
def test_some_of_the_labels_of_all_images(images, tmp_path, stream):
    layout = Layout(images, labels=table(tmp_path, *FORMS["names"]), multi_label=True)
    with pytest.warns(UserWarning, match="no test images"):
        dataset = load("folder", layout, classes=("Node", "Edema"), stream=stream)
    assert dataset.classes == ("Node", "Edema")
    assert len(dataset.train) + len(dataset.test) == COUNT
    batch = everything(dataset.train)
    for n, labels in zip(batch["image"][:, 0, 0, 0] // 6, batch["label"], strict=True):
        assert tuple(labels) == (SETS[n][2], SETS[n][0])


def test_tables_without_labels_are_refused(images, tmp_path):
    numbers = "name,age,ward", lambda n: (f"scan{n}.png", str(n), "x")
    alone = "name,text", lambda n: (f"scan{n}.png", f"word {n}")
    for (header, row), message in (
        (numbers, "has no column of labels separated by |, and none of 1 and 0: name"),
        (alone, "has fewer than two images a label, if each name is one: name another"),
    ):
        file = table(tmp_path, header, row)
        with pytest.raises(ValueError, match=re.escape(message)) as refused:
            load("folder", Layout(images, labels=file, multi_label=True))
        assert "word" not in str(refused.value)
    with pytest.raises(ValueError, match=r"no one CSV file of labels.* --labels FILE"):
        load("folder", Layout(images, multi_label=True))
    with pytest.raises(ValueError, match=r"multi_label .* does not apply to cifar10"):
        load("cifar10", Layout(images, multi_label=True))
    with pytest.raises(ValueError, match="must be left out with labels_from_name"):
        Layout(images, labels_from_name=True, multi_label=True)
    with pytest.raises(ValueError, match="is for any number of labels: add multi_lab"):
        Layout(images, uncertain="absent")
