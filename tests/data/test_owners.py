"""Owners of images: from folders and columns, and splits by person."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_sources as small
from PIL import Image
from small_sources import everything

from tanager.data import Layout, load


OWNERS = [f"zoe{number}" for number in (0, 0, 1, 1, 1, 2, 3, 3, 4, 5)]


def write(file, value):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(file)


def write_persons(path, persons, classes=("cat", "dog")):
    """Person p has p + 1 images in each class, all of value p."""
    for name in classes:
        for person in persons:
            for image in range(person % 5 + 1):
                write(path / name / f"zoe{person:02}" / f"{image}.png", person)


def owners_of(dataset):
    assert dataset.owners is not None
    return dataset.owners


def persons_of(dataset, split="train"):
    source = getattr(dataset, split)
    return {*np.unique(everything(source)["image"])}


def test_folders_in_class_folders_are_persons(tmp_path):
    for split, persons in (("train", range(7)), ("test", (7, 8))):
        write_persons(tmp_path / split, persons)
    dataset = load("folder", tmp_path, groups="folder")
    images = everything(dataset.train)["image"]
    owners = [f"zoe{value:02}" for value in images[:, 0, 0, 0]]
    np.testing.assert_array_equal(owners_of(dataset), owners)
    assert len(set(owners)) == 7 and len(owners) == 36
    streamed = load("folder", tmp_path, groups="folder", stream=True, image_size=8)
    np.testing.assert_array_equal(owners_of(streamed), owners)


def test_of_some_classes_the_owners_are_those_of_their_images(tmp_path):
    for split, persons in (("train", range(3)), ("test", (7,))):
        write_persons(tmp_path / split, persons, ("ant", "cat", "dog"))
    dataset = load("folder", tmp_path, groups="folder", classes=("dog", "cat"))
    images = everything(dataset.train)["image"]
    owners = [f"zoe{value:02}" for value in images[:, 0, 0, 0]]
    np.testing.assert_array_equal(owners_of(dataset), owners)


def test_splits_and_counts_are_of_persons(tmp_path):
    write_persons(tmp_path, range(30))
    dataset = load("folder", tmp_path, groups="folder")
    trained, tested = persons_of(dataset), persons_of(dataset, "test")
    assert len(tested) == 5 and not trained & tested
    held = load(
        "folder", tmp_path, groups="folder", validation_examples=5, train_examples=10
    )
    assert len(persons_of(held)) == 10 and len(persons_of(held, "test")) == 5
    assert not persons_of(held) & persons_of(held, "test")
    assert persons_of(held) | persons_of(held, "test") <= trained
    assert len(owners_of(held)) == len(held.train)
    some = load("folder", tmp_path, groups="folder", classes=("dog", "cat"))
    np.testing.assert_array_equal(some.owners, dataset.owners)


def parquet(path, owners, **more):
    rows = small.table([small.png(image) for image in small.IMAGES], [0, 1] * 5)
    rows = rows.append_column("patient", owners)
    for split in ("train", "test"):
        pq.write_table(rows, path / f"{split}.parquet")
    options: dict[str, Any] = {"image_size": 8, "groups": "patient"} | more
    return load("folder", path, **options)


def test_a_column_has_the_owners(tmp_path):
    dataset = parquet(tmp_path, pa.array(OWNERS), validation_examples=2)
    assert dataset.units()[1] == 4
    chosen = np.isin(OWNERS, owners_of(dataset))
    np.testing.assert_array_equal(np.array(OWNERS)[chosen], dataset.owners)


def test_the_origin_knows_the_owners(tmp_path):
    """Or one account would add up runs of other persons as of the same."""
    owners = pa.array(OWNERS)
    named = pa.array([f"{name}{k}" for k, name in enumerate(OWNERS)])

    def origin(column, held_out=2, **more):
        found = parquet(tmp_path, column, validation_examples=held_out, **more).origin
        assert found is not None
        return found()

    one = origin(owners)
    assert one == origin(owners, held_out=3)
    assert len({one, origin(named), origin(owners, groups=None)}) == 3


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        (pa.array([[name, "bob"] for name in OWNERS]), "one for each image"),
        (pa.array([0.5] * 10), "whole numbers or texts"),
        (pa.array([None, *OWNERS[1:]]), "row 0 has no 'patient'"),
        (pa.array(OWNERS), "persons with images in both train and test"),
    ],
)
def test_bad_columns_are_refused(tmp_path, owners, message):
    with pytest.raises(ValueError, match=message) as refused:
        parquet(tmp_path, owners)
    assert "zoe" not in str(refused.value)


def test_owners_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not apply to digits"):
        load("digits", groups="folder")
    write_persons(tmp_path / "few", [0])
    with pytest.raises(ValueError, match="too few persons"):
        load("folder", tmp_path / "few", groups="folder")
    with pytest.raises(ValueError, match=r"must be 'folder', .*\(--labels FILE\)"):
        load("folder", tmp_path / "few", groups="patient")
    write(tmp_path / "few/cat/loose.png", 1)
    with pytest.raises(ValueError, match="in no person's folder"):
        load("folder", tmp_path / "few", groups="folder")
    (tmp_path / "few/cat/loose.png").unlink()
    (tmp_path / "few/cat/zoe").mkdir()
    with pytest.raises(ValueError, match=r"zoe.* is a person's folder without images"):
        load("folder", tmp_path / "few", groups="folder")
    write(tmp_path / "few/cat/zoe/visit/deep/1.png", 1)
    write(tmp_path / "few/cat/zoe/2.png", 1)
    with pytest.raises(ValueError, match=r"deep/1.png.* too deep.*move it into .*zoe"):
        load("folder", tmp_path / "few", groups="folder")
    small.write_made("npy", tmp_path / "arrays")
    with pytest.raises(ValueError, match="must be left out for npy and npz files"):
        load("folder", tmp_path / "arrays", groups="patient")
    (tmp_path / "table").mkdir()
    with pytest.raises(ValueError, match="has no column 'hospital'"):
        parquet(tmp_path / "table", pa.array(OWNERS), groups="hospital")


def labelled(path, *folders, split=None):
    """Two images, one of each class, in each folder; the person is its last name."""
    lines = ["image,label" + ",split" * bool(split)]
    for number, folder in enumerate(folders):
        for name in ("cat", "dog"):
            file = f"{folder}/{name}_{number}.png".removeprefix("./")
            write(path / file, number)
            lines.append(f"{file},{name}" + f",{split and split[number]}" * bool(split))
    (path / "labels.csv").write_text("\n".join(lines))


def by_person(path, from_name=False):
    labels = None if from_name else path / "labels.csv"
    layout = Layout(path, labels=labels, labels_from_name=from_name)
    return load("folder", layout, groups="folder")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("from_name", [False, True])
def test_folders_of_labelled_images_hold_a_person_together(tmp_path, from_name):
    visits = [f"p{n // 3}/visit{n % 3}" for n in range(12)]
    labelled(tmp_path / "visits", *visits)
    with pytest.raises(ValueError, match=r"is too deep: .*move it up"):
        by_person(tmp_path / "visits", from_name)
    labelled(tmp_path / "uneven", "p0", "p1", "p1/visit", "p2")
    with pytest.raises(ValueError, match="is too deep"):
        by_person(tmp_path / "uneven", from_name)
    labelled(tmp_path / "outside", "p0", "p1", ".")
    with pytest.raises(ValueError, match="not in a folder of their owner"):
        by_person(tmp_path / "outside", from_name)
    labelled(tmp_path / "right", *(f"scans/p{n}" for n in range(10)))
    dataset = by_person(tmp_path / "right", from_name)
    assert dataset.units()[1] == 5
    assert not persons_of(dataset) & persons_of(dataset, "test")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_person_in_both_folders_of_a_split_is_found(tmp_path):
    folders = ["train/p0", "train/p1", "test/p0"]
    labelled(tmp_path, *folders, split=["train", "train", "test"])
    with pytest.raises(ValueError, match="persons with images in both train and test"):
        by_person(tmp_path)
    labelled(tmp_path / "s", "test/p9", *folders[:2], split=["test", "train", "train"])
    dataset = by_person(tmp_path / "s")
    assert owners_of(dataset).tolist() == ["p0", "p0", "p1", "p1"]
    assert persons_of(dataset) == {1, 2}


def test_a_column_named_folder_is_not_taken_for_folders(tmp_path):
    """Else each image here would count as a person of its own."""
    rows = ["image,label,folder"]
    for number in range(10):
        write(tmp_path / f"zoe{number // 5}" / f"{number}.png", number)
        rows.append(f"{number}.png,{'ab'[number % 2]},{number}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    message = r"^groups \(='folder'\) means a .* has a column 'folder': rename"
    with pytest.raises(ValueError, match=message):
        load("folder", tmp_path, groups="folder")
