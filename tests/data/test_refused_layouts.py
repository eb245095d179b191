"""Folders that are not understood: refused with what they hold, and what to do."""

import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import small_sources as small
from numbered import image, rows, write

from tanager.data import Layout, label_files, load


def loose(path):
    write(path, "1.png", "2.png")


def two_tables(path):
    loose(path)
    for name in ("a.csv", "b.csv"):
        (path / name).write_text("x")


def not_images(path):
    (path / "scans").mkdir()
    (path / "scans" / "1.nii").write_text("x")


def channels_first(path):
    np.savez(
        path / "x.npz", train_images=np.zeros((4, 3, 8, 8), np.uint8), train_labels=[0]
    )


def csv(*lines):
    def make(path):
        write(path, "1.png", "2.png", "3.png", "4.png", "more/4.png")
        (path / "labels.csv").write_text("\n".join(lines))

    return make


def unclear(path):
    write(path, "p/1.png", "p/2.png", "q/3.png")
    (path / "all.csv").write_text("id,dx,age\n1,zoe,50\n2,ann,60\n3,zoe,70")


def of_folders(path):
    """The folders may be the classes; or persons, and then dx is the class."""
    write(path, "p/1.png", "p/2.png", "q/3.png", "q/4.png")
    (path / "all.csv").write_text("id,who,dx\n1,p,zoe\n2,p,ann\n3,q,zoe\n4,q,ann")


def masks(path):
    """A mask beside each image is not an image of another class."""
    write(path, *(f"{name}/{n}.png" for name in ("images", "masks") for n in range(4)))
    rows = [f"{n}.png,{['zoe', 'ann'][n % 2]}" for n in range(4)]
    (path / "labels.csv").write_text("\n".join(["image,label", *rows]))


def parts_beside(text, encoding="utf-8"):
    """Folders that are not classes, and a table that cannot be read."""

    def make(path):
        write(path, *(f"part {n % 2}/{n}.png" for n in range(4)))
        (path / "labels.csv").write_bytes(text.encode(encoding))

    return make


def pointer(path):
    (path / "train.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")


def parts(first, second, others=()):
    """Folders of training and test images, not of classes."""

    def make(path):
        write(path, *(f"{name}/{n}.png" for name in (first, second) for n in (1, 2)))
        for name, text in others:
            (path / name).write_text(text)

    return make


LABELLED = "image,label\ntrain/1.png,zoe\ntrain/2.png,ann"
TABLES = [("train.csv", LABELLED), ("test.csv", "image\ntest/1.png\ntest/2.png")]
TWICE = [("train.csv", LABELLED), ("test.csv", f"{LABELLED}\ntest/2.png,ann")]
TWO = [
    (name, "image,who\ntrain/1,zoe\ntrain/2,ann\ntest/1,zoe\ntest/2,ann")
    for name in ("all.csv", "more.csv")
]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("field", "given", "near"),
    [
        ("label_column", "Befun", "befund"),
        ("image_column", "bidl", "bild"),
        ("groups", "hous", "house"),
    ],
)
def test_a_column_that_a_table_lacks_names_a_near_one_first(
    tmp_path, ending, field, given, near
):
    columns = {"bild": [small.png(image(1))] * 2, "befund": [0, 1], "house": [0, 1]}
    rows(tmp_path, f"train.{ending}", range(2), **columns)
    named = {} if field == "groups" else {field: given}
    message = f"has no column '{given}': did you mean '{near}'? its columns are "
    with pytest.raises(ValueError, match=re.escape(message)):
        groups = given if field == "groups" else None
        load("folder", Layout(tmp_path, **named), groups=groups)


def two_columns(path):
    rows(path, "train.parquet", range(4), image=[small.png(image(1))] * 4, x=[0, 1] * 2)
    table = pq.read_table(path / "train.parquet")
    pq.write_table(table.append_column("y", table["x"]), path / "train.parquet")


def ids(path):
    rows(path, "train.parquet", range(4), [f"zoe {n}" for n in range(4)])


def one_class(path):
    write(path, "a/1.png", "a/2.png")
    (path / "b").mkdir()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"label_column": "Befund"}, "has no column 'Befund': did you mean 'befund'?"),
        ({"image_column": "bildd"}, "has no column 'bildd': did you mean 'bild'?"),
        ({"label_column": "x"}, "has no column 'x': give one of the 3 names in its fi"),
        ({"groups": "Patient"}, "a column of t.csv: did you mean 'patient'?"),
        ({"groups": "xy"}, "a column of t.csv: give one of the 3 names in its first"),
        ({"label_column": "befund"}, "t.csv') has one class only: two classes or more"),
        (
            {"label_column": "patient", "groups": "patient"},
            "column 'patient' cannot be that of the labels too",
        ),
    ],
)
def test_a_column_that_is_not_there_names_only_a_near_one(tmp_path, given, message):
    write(tmp_path, "1.png", "2.png")
    table = tmp_path / "t.csv"
    table.write_text("bild,befund,patient\n1.png,zoe,p\n2.png,zoe,q")
    columns = {name: given[name] for name in given if name != "groups"}
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        load("folder", Layout(tmp_path, table, **columns), groups=given.get("groups"))
    others = {"bild", "befund", "patient"} - {*re.findall(r"\w+", message)}
    assert not others & {*re.findall(r"\w+", str(refused.value))}


UNKNOWN = [
    (cell, f"row 4 has {cell} in column 2: fill it in, or leave out the row; if it is")
    for cell in ("NaN", "NA", "n/a", "#N/A", "null")
]


WRITTEN = ("image,label", "1.png,zoe", "2.png,ann")
SPLIT = ("image,label,split", "1.png,zoe,train")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (loose, "has images, but no class folders: found no folders and files .png 2:"),
        (loose, "--labels FILE (a CSV file) or --labels-from-name"),
        (two_tables, "files .png 2, .csv 2"),
        (
            not_images,
            "no layout that is read: found 1 folder (scans) and files .nii 1",
        ),
        (
            channels_first,
            "has images as uint8[4, 3, 8, 8], channels first (NCHW): save",
        ),
        (csv(*WRITTEN, "7.png,zoe"), "row 4 names no image"),
        (csv(*WRITTEN, "4.png,zoe"), "path (="),
        (csv(*WRITTEN, "4,zoe"), "row 4 names several images"),
        (csv(*WRITTEN, "2.png,zoe"), "row 4 names the image of row 3: leave only one"),
        (csv(*WRITTEN, "3.png,"), "row 4 has nothing in column 2: fill it in, or"),
        *((csv(*WRITTEN, f"3.png,{cell}"), told) for cell, told in UNKNOWN),
        (csv(*WRITTEN, "", "3.png,"), "row 5 has nothing in column 2"),
        (csv(*WRITTEN, "", "3.png"), "row 5 has 1 columns, and the first line has 2"),
        (csv(*WRITTEN, "3.png"), "row 4 has 1 columns, and the first line has 2"),
        (csv(*WRITTEN[1:], "3.png,zoe"), "has no names of columns: its first line"),
        (csv(*SPLIT), "must say train or test in each row"),
        (csv(*SPLIT, "2.png,ann,test", "3.png,ann,1"), "must say train or test in e"),
        (csv("image,a,b", "1.png,zoe,1"), "has no column 'label' or 'labels' or"),
        (csv("image,a,b", "1.png,zoe,1"), "its columns are ['image', 'a', 'b']: name"),
        (csv("9.png,zoe,7", "1.png,ann,1"), "it has 3 columns, none of a usual name"),
        (csv("9.png,zoe", "1.png,"), "row 2 has nothing in column 2"),
        (unclear, "names images in 2 folders, and may hold their labels: it has 3"),
        (of_folders, "names images in 2 folders, and may hold their labels: it has 3"),
        (masks, "labels.csv') names images by names that are in several folders: give"),
        (parts_beside("0.png,zoe\n1.png,ann\n2.png,zoe"), "has no names of columns"),
        (parts_beside("id,dx\n0,größe\n1,zoe", "latin-1"), "is not UTF-8: save it as"),
        (
            parts_beside("id,dx\n0,zoe\n1"),
            "row 3 has 1 columns, and the first line has",
        ),
        (pointer, "is a pointer of Git LFS: get the file: git lfs pull"),
        (two_columns, "its columns are ['x', 'y']; name that of labels with"),
        (ids, "has fewer than two images a class, if every label is a class"),
        (
            csv("image,label", "1.png,0.5", "2.png,1.5", "3.png,2.5"),
            "labels.csv') has fewer than two images a class, if every label is a class",
        ),
        (one_class, "has one class only: two classes or more are needed"),
        (
            parts("train", "test1"),
            "has training and test images (test1, train), but no",
        ),
        (parts("trainA", "TEST"), "or --labels-from-name; if they are classes, rename"),
        (parts("Images_Training", "val", TABLES), "(Images_Training, val), but no cla"),
        (parts("train", "test", TWICE), "test.csv') names an image that is in train.c"),
        (
            parts("train", "test", TWO),
            "files that may have the labels (all.csv, more.",
        ),
        (csv("image,a,b", "1.png,1,0", "2.png,1,1"), "has no column 'label' or"),
        (csv("image,a,b", "1.png,1,0", "2.png,,"), "has no column 'label' or"),
    ],
)
def test_what_is_not_understood_is_described(tmp_path, make, message):
    make(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        load("folder", tmp_path)
    told = str(refused.value)
    assert "remove" not in told
    assert not re.search(r"\bzoe|\bann\b", told)


def test_a_first_row_of_a_table_that_was_named_is_not_lost(tmp_path):
    write(tmp_path, *(f"part {n % 2}/{n}.png" for n in range(4)))
    file = tmp_path / "labels.csv"
    file.write_text("\n".join(f"{n}.png,{'ab'[n % 2]}" for n in range(4)))
    with pytest.raises(ValueError, match="has no names of columns"):
        load("folder", Layout(tmp_path, labels=file))


def test_a_class_may_be_called_train(tmp_path):
    write(tmp_path, *(f"{name}/{n}.png" for name in ("train", "bus") for n in range(9)))
    with pytest.warns(UserWarning, match="are held out"):
        assert load("folder", tmp_path).classes == ("bus", "train")


def test_a_name_that_could_be_of_two_images_is_of_none(tmp_path):
    names = ["a\u0323\u0307.png", "a\u0307\u0323.png"]  # one letter, two marks
    known = label_files.names_of(tmp_path, tmp_path / "labels.csv", names)
    assert label_files.image_of(known, names[0]) == names[0]
    assert label_files.image_of(known, "\u1ea1\u0307.png") == ""


def test_a_path_is_absolute_or_from_the_folder_its_parent_or_the_table(tmp_path):
    """As in CheXpert, where all images have one of two names."""
    folder, names = tmp_path / "photos", ["a/view.png", "csv/photos/a/view.png"]
    known = label_files.names_of(folder, folder / "csv/labels.csv", names)
    for path in (names[0], "../a/view.png", f"{folder}/a/view.png"):
        assert known[path] == names[0]
    assert known["photos/csv/photos/a/view.png"] == names[1]
    assert known["photos/a/view.png"] == ""  # one from the parent, another from there
    assert known["view.png"] == names[1]  # beside the table
    assert label_files.names_of(folder, folder / "labels.csv", names)["view.png"] == ""


def test_a_first_row_is_not_shown_as_names_of_columns(tmp_path):
    csv("9.png,zoe", "1.png,ann")(tmp_path)
    with pytest.raises(
        ValueError, match=r"labels\.csv: give one of the 2 names"
    ) as refused:
        load("folder", tmp_path, groups="ward")
    assert "zoe" not in str(refused.value)


def test_images_named_after_one_class_are_refused(tmp_path):
    write(tmp_path, *(f"cat_{number}.png" for number in range(4)))
    with pytest.raises(ValueError, match=r"one class only: .* as in cat_01\.png"):
        load("folder", Layout(tmp_path, labels_from_name=True))


def test_layouts_of_ones_own_only(tmp_path):
    with pytest.raises(ValueError, match=r"labels_from_name.* does not apply to cifar"):
        load("cifar10", Layout(tmp_path, labels_from_name=True))
    with pytest.raises(ValueError, match=r"labels .*must be left out with labels_from"):
        Layout(tmp_path, labels="x.csv", labels_from_name=True)
    write(tmp_path, "007.png", "cat_1.png")
    with pytest.raises(ValueError, match="begins with no class: names must begin"):
        load("folder", Layout(tmp_path, labels_from_name=True))
