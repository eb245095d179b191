import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_sources import everything

from tanager.data import Layout, load
from tanager.data import folder as image_folder


def write(file, pixels, mode=None):
    file.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(file)


def colour(value, height=6, width=5):
    return np.full((height, width, 3), value, np.uint8)


def write_classes(path, per_class=10, classes=("cat", "dog")):
    for label, name in enumerate(classes):
        for number in range(per_class):
            write(path / name / f"{number:03}.png", colour((10 * number + label) % 256))


NOISE = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)


def test_train_and_test_folders(tmp_path):
    write_classes(tmp_path / "train", 3, ("dog", "cat", "ant"))
    write_classes(tmp_path / "test", 2, ("dog", "cat", "ant"))
    calls = []
    dataset = load("folder", tmp_path, progress=lambda *call: calls.append(call))
    assert dataset.classes == ("ant", "cat", "dog")
    assert dataset.image_shape == (6, 5, 3)
    assert dataset.mean == dataset.std == (0.5, 0.5, 0.5)
    train = everything(dataset.train)
    assert train["image"].dtype == np.uint8
    assert train["label"].dtype == np.int32
    found = list(zip(train["image"][:, 0, 0, 0], train["label"], strict=True))
    assert found == [(10 * n + 2 - k, k) for k in range(3) for n in range(3)]
    assert len(dataset.test) == 6
    assert calls == [(15, 15), (9, 15), (15, 15)]  # opened, then decoded


@pytest.mark.parametrize("what", ["folder", "class", "file", "hard link"])
def test_a_test_image_is_not_a_training_image_by_a_link(tmp_path, what):
    train, test, count = tmp_path / "train", tmp_path / "test", 1
    write_classes(train, 3)
    if what == "folder":
        test.symlink_to("train")
        count = 6
    elif what == "class":
        write_classes(test, 2, ("cat",))
        (test / "dog").symlink_to("../train/dog")
        count = 3
    else:
        write_classes(test, 2)
        make = os.symlink if what == "file" else os.link
        make(train / "cat/001.png", test / "cat/9.png")
    with pytest.raises(
        ValueError, match=rf"same file as .*for training \({count} such"
    ):
        load("folder", tmp_path)


@pytest.mark.parametrize("split", [False, True])
def test_nor_among_files_named_by_their_class(tmp_path, split):
    for number in range(40):
        file = (
            tmp_path
            / ("train" if split else "")
            / f"{'ab'[number % 2]}_{number:02}.png"
        )
        write(file, colour(number))
    if split:
        (tmp_path / "test").symlink_to("train")
    else:
        for number in range(20):
            os.link(tmp_path / "a_00.png", tmp_path / f"a_00_{number}.png")
    with pytest.raises(ValueError, match="by a link the same file as"):
        load("folder", Layout(tmp_path, labels_from_name=True))


def test_nor_in_arrays(tmp_path):
    """An npz file holds both, and is not two files."""
    arrays: dict[str, Any] = {"train_images": np.zeros((8, 4, 4), np.uint8)}
    arrays["train_labels"] = [0, 1] * 4
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        os.symlink(f"{name}.npy", tmp_path / f"{name.replace('train', 'test')}.npy")
    with pytest.raises(ValueError, match="by a link the same file as"):
        load("folder", tmp_path)
    tests = {name.replace("train", "test"): array for name, array in arrays.items()}
    np.savez(tmp_path / "both.npz", **arrays, **tests)
    assert len(load("folder", tmp_path / "both.npz").test) == 8


@pytest.mark.parametrize("halves", [("",), ("train", "test")])
@pytest.mark.parametrize("name", [b"caf\xe9", b"caf\n# cat", b"caf\x1b[31m"])
def test_a_class_whose_name_is_not_text_is_refused(tmp_path, halves, name):
    name = os.fsdecode(name)
    for half in halves:
        write_classes(tmp_path / half, 2, ("cat", name))
    with pytest.raises(
        ValueError, match="is not UTF-8, or has control characters: rename"
    ) as told:
        load("folder", tmp_path)
    assert "caf" in str(told.value)
    str(told.value).encode()


@pytest.mark.parametrize("stream", [False, True])
def test_held_out_examples_leave_the_test_images_unopened(tmp_path, stream):
    for split in ("train", "test"):
        write_classes(tmp_path / split, 4)
    for file in (tmp_path / "test").glob("*/*"):
        file.write_bytes(b"not an image")
    calls = []
    dataset = load(
        "folder",
        tmp_path,
        validation_examples=3,
        image_size=4,
        stream=stream,
        progress=lambda *call: calls.append(call),
    )
    assert len(everything(dataset.train)["label"]) == 5
    assert len(everything(dataset.test)["label"]) == 3
    assert calls == ([] if stream else [(8, 8)] * 2)
    with pytest.raises(ValueError, match="cannot"):
        everything(load("folder", tmp_path, image_size=4, stream=stream).test)


def split_of(path):
    """Return the names of the test images, and of the training images."""
    train, test = image_folder.list_folder(path)
    return [
        {Path(listing.file(n)).relative_to(path) for n in range(len(listing.labels))}
        for listing in (test, train)
    ]


@pytest.mark.parametrize(("grouped", "what"), [(False, "examples"), (True, "persons")])
def test_that_images_are_held_out_is_said(tmp_path, grouped, what):
    for number in range(40):
        person = f"p{number}" if grouped else "."
        folder = tmp_path / ["cat", "dog"][number % 2] / person
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / f"{number}.png", colour(number))
    with pytest.warns(UserWarning, match=f"about a fifth of the {what} are held out"):
        load("folder", tmp_path, groups="folder" if grouped else None)


def test_a_name_alone_decides_what_is_held_out(tmp_path):
    """The same wherever the folder lies, whatever else is in it: about a fifth."""
    splits = []
    for place in ("here", "elsewhere"):
        write_classes(tmp_path / place, 100)
        (tmp_path / place / ".hidden").mkdir()
        (tmp_path / place / "cat" / "notes.txt").write_text("not an image")
        with pytest.warns(UserWarning, match="1 file is not an image.*: .txt 1"):
            dataset = load("folder", tmp_path / place)
        test, train = split_of(tmp_path / place)
        assert [len(test), len(train)] == [len(dataset.test), len(dataset.train)]
        assert not test & train and len(test | train) == 200
        assert 20 <= len(test) <= 60
        splits.append(test)
    assert splits[0] == splits[1]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_images_of_one_name_in_many_folders_are_held_out_by_their_paths(tmp_path):
    """As in CheXpert, where all images have one of two names."""
    paths = [f"{patient:03}/view.png" for patient in range(100)]
    for number, path in enumerate(paths):
        write(tmp_path / path, colour(number))
    rows = [f"{path},{'ab'[number % 2]}" for number, path in enumerate(paths)]
    splits = []
    for kept in (rows, rows[:7] + rows[8:]):
        (tmp_path / "labels.csv").write_text("\n".join(["image,label", *kept]))
        if kept is not rows:
            (tmp_path / paths[7]).unlink()
        dataset = load("folder", tmp_path)
        assert dataset.record and dataset.record["split"] == "by path"
        splits.append({*everything(dataset.test)["image"][:, 0, 0, 0].tolist()})
    assert 10 <= len(splits[0]) <= 30
    assert splits[0] - {7} == splits[1]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("change", ["removed", "added", "of another class"])
def test_a_change_of_one_image_moves_no_other(tmp_path, change):
    write_classes(tmp_path, 40)
    before = split_of(tmp_path)
    other = tmp_path / "cat/007.png"
    if change == "removed":
        other.unlink()
    elif change == "added":
        write(tmp_path / "cat/new.png", colour(3))
    else:
        other.rename(tmp_path / "dog/another 007.png")
    for then, now in zip(before, split_of(tmp_path), strict=True):
        own = {path for path in then ^ now if "007" in path.name or path.stem == "new"}
        assert then ^ now == own
    # An image that changes its class stays on its side.
    assert (Path("cat/001.png") in before[0]) == (Path("dog/001.png") in before[0])


def test_planted_split_by_rank_moves_others(tmp_path, monkeypatch):
    """As every fifth of the sorted hashes would."""
    write_classes(tmp_path, 40)

    def by_rank(path, classes, grouped):
        train, test = {}, {}
        for name, files in classes.items():
            ordered = sorted(
                files, key=lambda file: hashlib.sha1(file.encode()).digest()
            )
            test[name] = sorted(ordered[::5])
            train[name] = sorted({*files} - {*test[name]})
        return train, test

    monkeypatch.setattr(image_folder, "_split", by_rank)
    before = split_of(tmp_path)
    (tmp_path / "cat/007.png").unlink()
    moved = {
        path for path in before[0] ^ split_of(tmp_path)[0] if "007" not in path.name
    }
    assert len(moved) > 3


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["cat/2.png", "dog/1.png"], "cat') is a class of too few images: their names"),
        (["a/2.png", "b/1.png", "c/2.png"], "too few images, one of 2 such classes: "),
        (["cat/0.png", "dog/1.png"], "has too few images: their names send none of"),
    ],
)
def test_too_few_images_to_split_are_refused(tmp_path, names, message):
    for name in names:
        write(tmp_path / name, colour(1))
    with pytest.raises(ValueError, match=re.escape(message)):
        load("folder", tmp_path)


def test_grey_stays_grey(tmp_path):
    for name in ("a", "b"):
        for number in range(3):
            write(tmp_path / name / f"{number}.png", colour(40 * number)[..., 0])
    dataset = load("folder", tmp_path)
    assert dataset.image_shape == (6, 5, 1)
    assert dataset.mean == dataset.std == (0.5,)


def test_mixed_modes_become_rgb(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / split / "a" / "1.png", colour(7)[..., 0])
        palette = Image.fromarray(colour(200)).quantize(4)
        palette.save(tmp_path / split / "a" / "2.PNG")
        write(tmp_path / split / "a" / "3.jpeg", colour(90))
        write(tmp_path / split / "a" / "4.png", colour(50), "RGBA")
        write(tmp_path / split / "b" / "5.png", colour(0))
    images = everything(load("folder", tmp_path).train)["image"]
    np.testing.assert_array_equal(images[0], colour(7))
    np.testing.assert_array_equal(images[1], colour(200))
    np.testing.assert_allclose(images[2].astype(int), 90, atol=2)
    np.testing.assert_array_equal(images[3], colour(50))


def test_images_of_different_size(tmp_path):
    write_classes(tmp_path, 5)
    wide = np.concatenate([colour(0, 12, 4), colour(99, 12, 12), colour(0, 12, 4)], 1)
    write(tmp_path / "dog" / "999.png", wide)
    with pytest.warns(UserWarning, match="each is resized to 9 × 9 pixels"):
        dataset = load("folder", Layout(tmp_path, default_side=9))
    assert dataset.image_shape == (9, 9, 3)
    assert dataset.record is not None and dataset.record["size"] == "default"
    dataset = load("folder", tmp_path, image_size=4)
    assert dataset.image_shape == (4, 4, 3)
    images = np.concatenate(
        [everything(s)["image"] for s in (dataset.train, dataset.test)]
    )
    # The middle of the wide image is kept, its dark sides are cut off.
    near = np.abs(images.astype(int) - 99) < 10
    assert np.sum(np.all(near, axis=(1, 2, 3))) == 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: (p / "cat/000.png").write_bytes(b"x"), "cannot be read as an image"),
        (
            lambda p: [(p / f"cat/00{n}.png").write_bytes(b"x") for n in range(3)],
            ": replace it. Nor can 2 more: ",
        ),
        (
            lambda p: (
                write(p / "cat/000.png", NOISE),
                os.truncate(p / "cat/000.png", 90),
            ),
            "cat/000.png') cannot be read as an image (image file is truncated",
        ),
        (
            lambda p: [
                (
                    write(p / f"cat/00{n}.png", NOISE),
                    os.truncate(p / f"cat/00{n}.png", 90),
                )
                for n in range(4)  # of the training and of the test images
            ],
            ": replace it. Nor can 3 more: ",
        ),
        (
            lambda p: [shutil.rmtree(entry) for entry in p.iterdir()],
            "has no layout that is read: found no folders and no files: train/",
        ),
        (
            lambda p: write(p / "eel/zoe/1.png", colour(1)),
            "eel') is a class whose images are in folders, such as zoe/1.png: if each",
        ),
        (
            lambda p: write(p / "train/cat/1.png", colour(1)),
            "has class folders in train, but none in test or testing or val or valid "
            "or validation: it needs both, each of class folders, or class folders "
            "alone: found 3 folders (cat, dog, train) and files .png 25",
        ),
    ],
)
def test_bad_folders(tmp_path, spoil, message):
    write_classes(tmp_path, 12)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        load("folder", tmp_path)
