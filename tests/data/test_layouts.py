"""Folders as people have them: read, with what is not read counted and named."""

import json
import unicodedata
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import small_sources as small
from numbered import SIDE, image, rows, write
from small_sources import everything

from tanager.data import Layout, gather, load
from tanager.data.layout import ending


COUNT = 12
"""Six images of each of two classes."""


def halves(path, train, test):
    write(path, *(f"{train}/{'ab'[n % 2]}/{n}.png" for n in range(8)))
    write(path, *(f"{test}/{'ab'[n % 2]}/{n}.png" for n in range(8, COUNT)))


def alone(path):
    write(path, *(f"{'ab'[n % 2]}/{n}.png" for n in range(COUNT)))


def training_testing(path):
    halves(path, "Training", "Testing")


def three_folders(path):
    halves(path, "Train", "Test")
    write(path, "Valid/a/3.png", "Valid/b/4.png")


def one_too_high(path):
    halves(path / "archive" / "photos", "train", "val")
    write(path, "__MACOSX/archive/._1.png", ".hidden/1.png", "@eaDir/1.png/thumb_1.png")


def train_alone(path):
    alone(path / "train")


def cloned_from_the_hub(path):
    for name in ("README.md", ".gitattributes"):
        (path / name).write_text("x")
    first, second = "train-00000-of-00002-0a1b2c3d", "train-00001-of-00002-4d5e6f70"
    rows(path, f"data/{first}.parquet", range(4))
    rows(path, f"data/{second}.parquet", range(4, 8))
    rows(path, "data/test-00000-of-00001-99aabbcc.parquet", range(8, COUNT))


def converted_by_the_hub(path):
    rows(path, "default/train/0000.parquet", range(8))
    rows(path, "default/test/0000.parquet", range(8, COUNT))


def saved_to_disk(path):
    for split, numbers in {"train": range(8), "test": range(8, COUNT)}.items():
        rows(path, f"{split}/data-00000-of-00001.arrow", numbers)
        rows(path, f"{split}/cache-1b2c3d.arrow", range(3))  # what `map` left there
        files = [{"filename": "data-00000-of-00001.arrow"}]
        (path / split / "state.json").write_text(json.dumps({"_data_files": files}))
    (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    saved_to_disk(tmp_path)
    state = tmp_path / "train/state.json"
    (file,) = json.loads(state.read_text())["_data_files"]
    state.write_text(json.dumps({"_data_files": [file, file]}))
    with pytest.raises(ValueError, match="names a file twice: each of its images wo"):
        load("folder", tmp_path)


def one_table(path):
    rows(path, "everything.parquet", range(COUNT))


def polars_ipc(path):
    """Views and categories, as polars writes them."""
    for split, numbers in {"train": range(8), "test": range(8, COUNT)}.items():
        encoded = pa.array([small.png(image(n)) for n in numbers], pa.binary_view())
        labels = pa.array(["ab"[n % 2] for n in numbers]).dictionary_encode()
        rows(path, f"{split}.ipc", numbers, picture_bytes=encoded, kind=labels)


def pandas_feather(path):
    for split, numbers in {"train": range(8), "test": range(8, COUNT)}.items():
        encoded = [{"bytes": small.png(image(n)), "path": None} for n in numbers]
        rows(
            path,
            f"{split}.feather",
            numbers,
            images=encoded,
            labels=[n % 2 == 1 for n in numbers],
            index=list(numbers),
        )


def from_one(path):
    rows(path, "train.parquet", range(8), [n % 2 + 1 for n in range(8)])
    rows(path, "test.parquet", range(8, COUNT), [n % 2 + 1 for n in range(8, COUNT)])


def medmnist(path):
    parts = {"train": range(8), "val": range(2), "test": range(8, COUNT)}
    arrays: dict[str, Any] = {}
    for split, numbers in parts.items():
        arrays[f"{split}_images"] = np.stack([image(n) for n in numbers])
        arrays[f"{split}_labels"] = np.array([[n % 2] for n in numbers], np.uint8)
    np.savez_compressed(path / "pathmnist.npz", **arrays)


def grey_medmnist(path):
    medmnist(path)
    file = path / "pathmnist.npz"
    with np.load(file) as arrays:
        found = {k: v[..., 0] if "images" in k else v for k, v in arrays.items()}
    np.savez(file, **found)


def names(path):
    write(path, *(f"{['cat', 'big dog'][n % 2]}_{n}.png" for n in range(COUNT)))
    return Layout(path, labels_from_name=True)


def csv_beside(path):
    write(path, *(f"images/{n}.png" for n in range(COUNT)))
    lines = [f"{n}.png;{'ab'[n % 2]};{n}" for n in range(COUNT)]
    (path / "labels.csv").write_text("\n".join(["file;label;age", *lines]), "utf-8-sig")


def csv_beside_folders_of_people(path):
    write(path, *(f"images/{n // 3}/{n}.png" for n in range(COUNT)))
    lines = [f"{n}.png,{'ab'[n % 2]}" for n in range(COUNT)]
    (path / "labels.csv").write_text("\n".join(["file,label", *lines]))


def csv_among_others(path):
    """As HAM10000: another has pixels, and names no image."""
    csv_beside_parts(path)
    (path / "pixels.csv").write_text("pixel0,pixel1,label\n" + "200,201,1\n" * COUNT)
    (path / "empty.csv").write_text("")


def csv_that_names_folders_of_people(path):
    """The column of persons says what the folders say, and the other has the labels."""
    write(path, *(f"p{n // 3}/{n}.png" for n in range(COUNT)))
    lines = [f"{n}.png,p{n // 3},{'ab'[n % 2]}" for n in range(COUNT)]
    (path / "labels.csv").write_text("\n".join(["file,person,label", *lines]))


def csv_with_a_split(path):
    write(path, *(f"images/{n}.png" for n in range(COUNT)))
    lines = [f"{n}.png,{'ab'[n % 2]},{'Train' if n < 8 else 'test'}" for n in range(12)]
    write(path, "images/15.png")
    lines.append("15.png,a,val")
    (path / "labels.csv").write_text("\n".join(["file,label,split", *lines]))


def names_in_halves(path):
    write(path, *(f"data/Train/{'ab'[n % 2]}_{n}.png" for n in range(8)))
    write(path, *(f"data/val/{'ab'[n % 2]}_{n}.png" for n in range(8, COUNT)))
    return Layout(path, labels_from_name=True)


def csv_beside_halves(path):
    names_in_halves(path)
    files = [*(path / "data").glob("*/*.png")]
    lines = [f"{file.name},{file.name[0]}" for file in files]
    (path / "labels.csv").write_text("\n".join(["file,label", *lines]))


def csv_of_something_else(path):
    alone(path / "images")
    (path / "prices.csv").write_text("name,price\nx,1\ny,2\n")


def csv_beside_parts(path):
    write(path, *(f"part {n // 6}/{n}.png" for n in range(COUNT)))
    lines = [f"{n},{'ab'[n % 2]},{n + 50}" for n in range(COUNT)]
    (path / "train.csv").write_text("\n".join(["id,class,age", *lines]))


def csv_beside_parts_of_two_columns(path):
    csv_beside_parts(path)
    lines = [f"{n}.png,{'ab'[n % 2]}" for n in range(COUNT)]
    (path / "train.csv").write_text("\n".join(["id,dx", *lines]))


def csv_beside_plain_halves(path):
    write(path, *(f"{'train' if n < 8 else 'test'}/{n}.png" for n in range(COUNT)))
    lines = [f"{n}.png,{'ab'[n % 2]},{n + 50}" for n in range(COUNT)]
    (path / "data.csv").write_text("\n".join(["id,diagnosis,age", *lines]))


def csv_that_says_what_folders_say(path):
    alone(path)
    lines = [f"{n}.png,{n + 50},{n % 2}" for n in range(COUNT)]
    (path / "all.csv").write_text("\n".join(["id,target,is_b", *lines]))


def csv_elsewhere(path):
    write(path / "x", *(f"scans/{n // 4}/{n}.png" for n in range(COUNT)))
    lines = [f"{n},x/scans/{n // 4}/{n},{'yes' if n % 2 else 'no'}" for n in range(12)]
    (path / "table.csv").write_text("\n".join(["age,scan,ill", *lines]))
    return Layout(path / "x", labels=path / "table.csv", label_column="ill")


def csv_of_pandas_on_windows(path):
    """The first column, without a name, has the numbers of the rows."""
    write(path, *(f"scans/{n}.png" for n in range(COUNT)))
    lines = [f"{n},scans\\{n}.png,{'ab'[n % 2]}" for n in range(COUNT)]
    (path / "labels.csv").write_text("\n".join([",scan,dx", *lines]))


def tables_in_halves(path):
    """As `imagefolder` of Hugging Face."""
    for half, numbers in {"train": range(8), "test": range(8, COUNT)}.items():
        write(path, *(f"{half}/x/{n}.png" for n in numbers))
        lines = [f"x/{n}.png,{'ab'[n % 2]},{n}" for n in numbers]
        table = "\n".join(["file_name,label,age", *lines])
        (path / half / "metadata.csv").write_text(table)


def tables_of_halves(path):
    """As CheXpert: the paths begin with the folder's own name."""
    names = {"Train": range(8), "RFM_Validation": range(8, COUNT)}
    for name, numbers in names.items():
        write(path / "set", *(f"{n % 3}/{n}.png" for n in numbers))
        lines = [f"set/{n % 3}/{n}.png,{'ab'[n % 2]},{n + 50}" for n in numbers]
        table = "\n".join(["scan,class,age", *lines])
        (path / f"set/{name}_labels.csv").write_text(table)
    return Layout(path / "set", label_column="class")


def column_for_each_class(path):
    """As ISIC 2019; 0 and 1 are images, too."""
    write(path, *(f"images/{n}.png" for n in range(COUNT)))
    lines = [f"{n},{1 - n % 2},{n % 2}" for n in range(COUNT)]
    (path / "truth.csv").write_text("\n".join(["image,a,b", *lines]))


READ = {
    alone: ("ab", 10),
    training_testing: ("ab", 8),
    three_folders: ("ab", 8),
    one_too_high: ("ab", 8),
    train_alone: ("ab", 10),
    cloned_from_the_hub: ("01", 8),
    converted_by_the_hub: ("01", 8),
    saved_to_disk: ("01", 8),
    one_table: ("01", 8),
    polars_ipc: ("ab", 8),
    pandas_feather: (("False", "True"), 8),
    from_one: ("12", 8),
    medmnist: ("01", 8),
    grey_medmnist: ("01", 8),
    names: (("big dog", "cat"), 9),
    csv_beside: ("ab", 10),
    csv_beside_folders_of_people: ("ab", 10),
    csv_among_others: ("ab", 10),
    csv_that_names_folders_of_people: ("ab", 10),
    names_in_halves: ("ab", 8),
    csv_beside_halves: ("ab", 8),
    csv_of_something_else: ("ab", 10),
    csv_with_a_split: ("ab", 8),
    csv_beside_parts: ("ab", 10),
    csv_beside_parts_of_two_columns: ("ab", 10),
    csv_beside_plain_halves: ("ab", 8),
    csv_that_says_what_folders_say: ("ab", 10),
    csv_elsewhere: (("no", "yes"), 10),
    csv_of_pandas_on_windows: ("ab", 10),
    tables_in_halves: ("ab", 8),
    tables_of_halves: ("ab", 8),
    column_for_each_class: ("ab", 10),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", READ, ids=lambda make: make.__name__)
def test_layouts_that_people_have(tmp_path, make):
    classes, trained = READ[make]
    dataset = load("folder", make(tmp_path) or tmp_path)
    assert dataset.classes == tuple(classes)
    grey = make is grey_medmnist
    assert dataset.image_shape == (SIDE, SIDE, 1 if grey else 3)
    assert (len(dataset.train), len(dataset.test)) == (trained, COUNT - trained)
    seen = []
    for source in (dataset.train, dataset.test):
        batch = everything(source)
        assert batch["image"].shape[1:] == dataset.image_shape != (1, 1, 3)
        numbers = batch["image"][:, 0, 0, 0] // 6
        # Image n is of class n % 2; "big dog", n odd, comes before "cat".
        odd = batch["label"] != (make is names)
        np.testing.assert_array_equal(numbers % 2 == 1, odd)
        seen += [*numbers]
    assert sorted(seen) == [*range(COUNT)]
    if "halves" in make.__name__:
        assert sorted(seen[:trained]) == [*range(trained)]
    json.dumps(dataset.record)


def test_what_is_not_read_is_counted_and_named(tmp_path):
    three_folders(tmp_path)
    for number in range(3):
        (tmp_path / f"Train/a/{number}.txt").write_text("x")
    write(tmp_path, "Train/a/more/5.png")
    (tmp_path / "Train/empty").mkdir()
    (tmp_path / "notes.docx").write_text("x")
    (tmp_path / "Train/b/1.2.840.10008.1").write_text("x")
    with pytest.warns(UserWarning) as caught:
        dataset = load("folder", tmp_path)
    told = [str(each.message) for each in caught]
    assert told == [
        "5 files are not images, and not read: .txt 3, .docx 1, no ending 1",
        "the folder Valid is not read: the training images are those in Train, the "
        "test images those in Test",
        "not read: 1 image in folders of the class folder a; move them up into it",
        "the folder empty has no images: no class",
    ]
    assert dataset.record == {
        "layout": "class folders",
        "conversion": "upright-8-bit",
        "size": "as they are",
        "split": "given",
        "not_read": {".txt": 3, ".docx": 1, "no ending": 1},
    }
    assert caught[0].filename == __file__


def test_files_of_images_beside_those_of_a_split_are_named(tmp_path):
    medmnist(tmp_path)
    with pytest.warns(UserWarning, match="^not read: val_images$"):
        load("folder", tmp_path / "pathmnist.npz")
    converted_by_the_hub(tmp_path / "hub")
    rows(tmp_path, "hub/default/validation/0000.parquet", range(2))
    write(tmp_path, "hub/default/a/0.png")
    with pytest.warns(UserWarning, match=r"^not read: 2 files of images, such as a/0"):
        load("folder", tmp_path / "hub")
    converted_by_the_hub(tmp_path / "cloned")
    write(tmp_path, "cloned/assets/0.png", "cloned/images/1.png")
    with pytest.warns(UserWarning, match="^not read: 2 files of images, such as asset"):
        assert len(load("folder", tmp_path / "cloned").test) == COUNT - 8
    saved_to_disk(tmp_path / "saved")
    load("folder", tmp_path / "saved")  # warns of none that `map` left there


def test_files_beside_and_above_the_class_folders_are_counted(tmp_path):
    halves(tmp_path / "photos", "train", "test")
    write(tmp_path / "photos", "train/15.png", "train/16.png", "test/17.png")
    for name in ("terms.pdf", "photos/train/index.json"):
        (tmp_path / name).write_text("x")
    with pytest.warns(UserWarning) as caught:
        load("folder", tmp_path)
    assert [str(each.message) for each in caught] == [
        "2 files are not images, and not read: .json 1, .pdf 1",
        "not read: 2 images beside the folders in train, in none of them",
        "not read: 1 image beside the folders in test, in none of them",
    ]


@pytest.mark.parametrize("named", [False, True])
def test_a_link_that_leads_back_is_refused(tmp_path, named):
    names = (f"{'ab'[n % 2]}{n}.png" for n in range(COUNT))
    write(tmp_path / "all", *(f"{name[0]}/{name}" for name in names))
    (tmp_path / "all/a/more").symlink_to("..")
    (tmp_path / "one").mkdir()
    (tmp_path / "one/same").symlink_to(".")
    for folder in ("all", "one"):
        with pytest.raises(ValueError, match="links that lead in a circle, back to"):
            load("folder", Layout(tmp_path / folder, labels_from_name=named))


def test_classes_of_one_split_alone(tmp_path):
    halves(tmp_path, "train", "test")
    write(tmp_path, "train/c/1.png", "test/d/2.png")
    with pytest.warns(UserWarning, match="class d has no training example"):
        dataset = load("folder", tmp_path)
    assert dataset.classes == ("a", "b", "c", "d")
    assert {*gather(dataset.test, np.arange(5))["label"]} == {0, 1, 3}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_csv_file_splits_by_person(tmp_path):
    write(tmp_path, *(f"images/{n}.png" for n in range(40)))
    lines = [f"{n}.png,{n % 2},person {n // 4}" for n in range(40)]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["image,label,patient", *lines]))
    (tmp_path / "notes.txt").write_text("x")
    options = {"groups": "patient", "validation_examples": 2}
    dataset = load("folder", tmp_path, **options)
    assert dataset.record is not None and dataset.record["not_read"] == {".txt": 1}
    assert dataset.units()[1] == 6  # of 10: 2 for testing, 2 for validation
    trained, held = (
        {*(everything(each)["image"][:, 0, 0, 0] // 6 // 4)}
        for each in (dataset.train, dataset.test)
    )
    assert not trained & held
    with pytest.raises(
        ValueError, match=r"must be 'folder' or a column of labels\.csv"
    ):
        load("folder", tmp_path, groups="ward")
    moved = tmp_path / "people"
    for n in range(40):
        write(moved, f"scans/{n // 4}/{n}.png")
    folders = Layout(moved, labels=table)
    assert load("folder", folders, groups="folder").units()[1] == 6


def test_images_in_no_folder_of_a_split_are_refused(tmp_path):
    layout = names_in_halves(tmp_path)
    write(tmp_path, "data/a_15.png")
    with pytest.raises(ValueError, match=r"a_15\.png.* in no train or test folder"):
        load("folder", layout)


@pytest.mark.filterwarnings("ignore:not read. val_images")
def test_decoded_images_are_resized(tmp_path):
    medmnist(tmp_path)
    dataset = load("folder", tmp_path / "pathmnist.npz", image_size=12)
    assert dataset.image_shape == (12, 12, 3)
    assert gather(dataset.train, np.arange(8))["image"].shape == (8, 12, 12, 3)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("stream", [True, False])
def test_classes_of_images_that_were_held_out(tmp_path, stream):
    csv_beside(tmp_path)
    both = load("folder", tmp_path, stream=stream)
    dataset = load("folder", tmp_path, stream=stream, classes=("b", "a"))
    for split in ("train", "test"):
        one, two = (getattr(each, split) for each in (both, dataset))
        one, two = (everything(each) for each in (one, two))
        np.testing.assert_array_equal(one["image"], two["image"])
        np.testing.assert_array_equal(one["label"], 1 - two["label"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.TXT", ".txt"), ("a.tar.gz", ".gz"), ("1.2.840.10008", ""), ("README", "")],
)
def test_endings(name, expected):
    assert ending(name) == expected


@pytest.mark.parametrize("missing", ["nan", "N/A"])
def test_a_missing_label_is_no_class(tmp_path, missing):
    """Nor a person; without a row it is refused in other layouts too."""
    write(tmp_path / "csv", *(f"{n}.png" for n in range(4)))
    lines = [f"{n}.png,{'ab'[n % 2]},{missing if n == 3 else n}" for n in range(4)]
    table = tmp_path / "csv/labels.csv"
    table.write_text("\n".join(["file,label,person", *lines]))
    with pytest.raises(ValueError, match=f"row 5 has {missing} in column 3"):
        load("folder", tmp_path / "csv", groups="person")
    labels = np.array(["a", "b", missing] * 3)
    pixels = np.zeros((9, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "x.npz", train_images=pixels, train_labels=labels)
    with pytest.raises(
        ValueError, match="a label that is not the name of a class, but"
    ):
        load("folder", tmp_path / "x.npz")
    cells = ["x", "y", "x|y", missing, "", "x"]
    write(tmp_path / "several", *(f"{n}.png" for n in range(6)))
    lines = [f"{n}.png,{cell}" for n, cell in enumerate(cells)]
    (tmp_path / "several/labels.csv").write_text("\n".join(["file,label", *lines]))
    with pytest.warns(UserWarning):
        found = load("folder", Layout(tmp_path / "several", multi_label=True))
    assert found.classes == ("x", "y")


@pytest.mark.parametrize(("form", "other"), [("NFC", "NFD"), ("NFD", "NFC")])
@pytest.mark.parametrize("beside", [False, True])
def test_accents_may_be_encoded_in_two_ways(tmp_path, form: Any, other: Any, beside):
    """A name that is there in both ways is exact."""
    names = [unicodedata.normalize(form, f"Röntgen {n}.png") for n in range(COUNT)]
    write(tmp_path, *names)
    if beside:
        (tmp_path / unicodedata.normalize(other, names[0])).write_bytes(
            (tmp_path / names[0]).read_bytes()
        )
    lines = [
        f"{unicodedata.normalize(other, name)},{'ab'[n % 2]}"
        for n, name in enumerate(names)
    ]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *lines]))
    with pytest.warns(UserWarning) as caught:
        found = load("folder", tmp_path)
    assert len(found.train) + len(found.test) == COUNT
    left = [each for each in caught if "1 image without a row" in str(each.message)]
    assert len(left) == beside


def test_names_that_may_be_one_are_told(tmp_path):
    write(tmp_path, *(f"{n}.png" for n in range(8)))
    kinds, persons = ("gesund", "GESUND", "krank"), ("P1", "p1", "Q")
    lines = [f"{n}.png,{kinds[n % 3]},{persons[n % 3]}" for n in range(8)]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label,who", *lines]))
    with pytest.warns(UserWarning) as caught:
        load("folder", tmp_path, groups="who")
    told = [str(each.message) for each in caught]
    alike = [each for each in told if "differ only in upper and lower case" in each]
    assert len(alike) == 2
    assert "gesund, GESUND; write them the same way" in alike[0].replace(
        "GESUND, gesund", "gesund, GESUND"
    )
    assert alike[1].startswith("2 persons in who") and "p1" not in alike[1]
