"""`tanager evaluate --data`: which images it measures a model on."""

import itertools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import tanager
from tanager.cli import main


PATIENTS = [f"P{number}" for number in range(20)]
FEW = (0, 1, 2, 5)
SPLITS = ("given", "by person", "by name", "by path", "by number")


def pictures(folder, seed=0, columns="file,kind,patient"):
    """Three images of each patient in one folder, and a CSV file that names them."""
    draw, rows = np.random.default_rng(seed), [columns]
    folder.mkdir()
    for number, patient in enumerate(PATIENTS * 3):
        pixels = draw.integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
        rows.append(f"{number:02}.png,{'ab'[number % 2]},{patient}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    return folder


def trained(data, out, *more):
    words = ["train", "folder", "--data", data, "--model", "linear", "--steps", "1"]
    words += ["--batch-size", "4", "--noise-multiplier", "2", "--delta", "0.01"]
    words += ["--account", "none", "--fast", "--out", out]
    assert main([*map(str, words), *more]) == 0
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluated")


@pytest.fixture(scope="module")
def data(folder):
    return pictures(folder / "data")


@pytest.fixture(scope="module")
def run(folder, data):
    words = ["--groups", "patient", "--unit", "group", "--label-column", "kind"]
    return trained(data, folder / "run", *words)


@pytest.fixture(scope="module")
def export(folder, run):
    return tanager.export(run, folder / "model")


def with_split(export, to, split):
    """The same export, of a run whose data were split otherwise."""
    shutil.copytree(export, to)
    config = json.loads((to / "config.json").read_text())
    if split is None:  # as earlier versions wrote
        del config["tanager"]["data"]
    else:
        config["tanager"]["data"] |= {"split": split, "groups": None}
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_an_export_has_the_test_images_of_its_run(
    run, export, data, printed, monkeypatch
):
    code, out, _ = printed("evaluate", run, "--json")
    own = json.loads(out)
    assert code == 0 and 0 < own["examples"] < 60
    for model in (run, export):
        code, out, err = printed("evaluate", model, "--data", data, "--json")
        assert code == 0, err
        found = json.loads(out)
        assert found["confusion_matrix"] == own["confusion_matrix"]
        assert found["examples"] == own["examples"]
        assert "held out for testing" in err
    seconds = itertools.count(0, 20)
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr("tanager.recipes.tasks.time", clock)
    code, _, err = printed("evaluate", run, "--split", "all", "--batch-size", "16")
    assert code == 0 and "held out" not in err
    assert "predicting: 16 of 60\n" in err and "of 60; about" in err
    code, out, _ = printed(
        "evaluate", export, "--data", data, "--split", "train", "--json"
    )
    assert json.loads(out)["examples"] == 60 - own["examples"]


@pytest.mark.parametrize("split", ["test", "train"])
def test_images_that_may_be_trained_on_are_not_called_test_images(
    run, export, data, tmp_path, printed, split
):
    """Other owners, other layouts of the same images, no record of the split."""
    other = tmp_path / "other"
    for number in range(60):
        place = other / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(data / f"{number:02}.png", place)
    without = tmp_path / "labels.csv"
    without.write_text((data / "labels.csv").read_text().replace("patient", "place"))
    pixels, labels = np.zeros((60, 8, 8, 1), np.uint8), np.arange(60) % 2
    np.savez(tmp_path / "x.npz", train_images=pixels, train_labels=labels)
    column = tmp_path / "split.csv"
    rows = (data / "labels.csv").read_text().splitlines()
    parts = ["split", *[*["train"] * 15, *["test"] * 5] * 3]
    column.write_text("\n".join(map(",".join, zip(rows, parts, strict=True))))
    for model in (run, export):
        code, _, err = printed(
            "evaluate", model, "--data", data, "--groups=file", "--split", split
        )
        assert code == 2 and f"split (='{split}') is not known" in err
        code, _, err = printed("evaluate", model, "--data", other, "--split", split)
        assert code == 2 and "give --split all" in err, err
        words = ["evaluate", model, "--data", data, "--split", split, "--labels"]
        code, _, err = printed(*words, without)
        assert code == 2 and "; or give --split all, which needs no persons" in err
        code, _, err = printed(*words, column)
        assert code == 2 and "has a test part of its own, and training split" in err
        for more in (["--labels", without], []):
            code, _, err = printed(
                "evaluate", model, "--data", data, "--split", "all", *more
            )
            assert code == 0, err
    for known in (None, *SPLITS):
        model = with_split(export, tmp_path / f"of {known}", known)
        words = ["evaluate", model, "--data", other, "--split", "all"]
        assert printed(*words)[0] == 0
        for place in (other, tmp_path / "x.npz"):
            code, _, err = printed("evaluate", model, "--data", place, "--split", split)
            if known == "by name" and place == other:
                assert code == 0, err
                continue
            assert code == 2, (known, place)
            assert ("not on record" in err) == (known not in SPLITS)
            assert "for images that training did not see, give --split all" in err


def test_all_of_a_few_images_are_measured_once(data, export, tmp_path, printed):
    """No name is one of the fifth that are held out; in class folders, in a table."""
    for stream, tabled in ((True, False), (False, False), (True, True), (False, True)):
        place = tmp_path / f"{stream} {tabled}"
        model = shutil.copytree(export, place / "model")
        config = json.loads((model / "config.json").read_text())
        config["tanager"]["data"]["stream"] = stream
        (model / "config.json").write_text(json.dumps(config))
        for number in FEW:
            folder = place / "data" / ("" if tabled else "ab"[number % 2])
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(data / f"{number:02}.png", folder)
        if tabled:
            rows = (data / "labels.csv").read_text().splitlines(keepends=True)
            table = place / "data" / "labels.csv"
            table.write_text("".join([rows[0], *(rows[1 + number] for number in FEW)]))
        words = ["evaluate", model, "--data", place / "data", "--split", "all"]
        code, out, err = printed(*words, "--json")
        assert code == 0 and "held out" not in err, err
        assert json.loads(out)["examples"] == len(FEW)


def test_paths_in_another_folder_do_not_say_what_was_held_out(tmp_path, printed):
    """Its parent's images have longer paths, so a hash of them is another."""
    rows = ["image,kind"]
    for number in range(60):
        place = tmp_path / "data" / f"{number:02}"
        place.mkdir(parents=True)
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(place / "view.png")
        rows.append(f"data/{number:02}/view.png,{'ab'[number % 2]}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    words = ["--labels", str(tmp_path / "labels.csv")]
    run = trained(tmp_path / "data", tmp_path / "run", *words)
    words = ["evaluate", run, *words, "--data"]
    code, out, _ = printed(*words, tmp_path / "data", "--json")
    assert code == 0 and 5 <= json.loads(out)["examples"] <= 20
    code, _, err = printed(*words, tmp_path)
    assert code == 2 and "by their paths in its folder" in err, err


def test_a_part_of_the_training_images_is_not_all_of_them(data, tmp_path, printed):
    run = trained(
        data, tmp_path / "run", "--train-examples", "30", "--label-column=kind"
    )
    for model in (run, tanager.export(run, tmp_path / "model")):
        words = ["evaluate", model, "--data", data]
        assert printed(*words)[0] == 0
        code, _, err = printed(*words, "--split", "train")
        assert code == 2 and "left out images by number (train_examples=30)" in err


def test_an_export_says_how_to_split_and_names_no_path(export, tmp_path, printed, data):
    config = json.loads((export / "config.json").read_text())
    assert config["tanager"]["data"] == {
        "split": "by person",
        "labels": False,
        "groups": "patient",
        "classes": None,
        "validation_examples": 0,
        "train_examples": None,
        "image_column": None,
        "label_column": "kind",
        "labels_from_name": False,
        "uncertain": "refuse",
    }
    broken = with_split(export, tmp_path / "broken", 3)
    code, _, err = printed("evaluate", broken, "--data", data)
    assert code == 2 and "split 3, which must be" in err


def test_data_from_elsewhere_need_no_persons_and_may_name_other_columns(
    run, export, tmp_path, printed
):
    other = pictures(tmp_path / "other", 1, "bild,befund,haus")
    for model in (run, export):
        words = ["evaluate", model, "--data", other, "--split", "all", "--json"]
        code, _, err = printed(*words)
        assert code == 2 and "(--label-column)" in err
        words += ["--label-column", "befund", "--image-column", "bild"]
        code, out, err = printed(*words)
        assert code == 0, err
        assert json.loads(out)["examples"] == 60
    code, _, err = printed("evaluate", run, "--label-column", "befund")
    assert code == 2 and "label-column (='befund') needs data" in err
    for name in "ab":
        (tmp_path / "classes" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "classes" / name / "0.png")
    words = ["evaluate", run, "--data", tmp_path / "classes", "--split", "all"]
    assert not printed(*words)[0]  # The columns of the run are of another table.
    code, _, err = printed(*words, "--label-column", "befund")
    assert code == 2 and "label-column (='befund') names a column, and the data" in err


def test_all_images_of_folders_of_persons_are_measured(tmp_path, printed):
    data = pictures(tmp_path / "flat")
    for number, patient in enumerate(PATIENTS * 3):
        place = tmp_path / "data" / "ab"[number % 2] / patient
        place.mkdir(parents=True, exist_ok=True)
        (data / f"{number:02}.png").rename(place / f"{number:02}.png")
    run = trained(tmp_path / "data", tmp_path / "run", "--groups", "folder")
    model = tanager.export(run, tmp_path / "model")
    found = []
    for more in (["--split", "all"], [], ["--split", "train"]):
        words = ["evaluate", model, "--data", tmp_path / "data", "--json", *more]
        code, out, err = printed(*words)
        assert code == 0, err
        found.append(json.loads(out)["examples"])
    assert found[0] == 60 == found[1] + found[2]


def test_a_page_that_cannot_be_written_is_refused_before_work(
    run, tmp_path, monkeypatch, printed
):
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path)
    code, out, err = printed("evaluate", run, "--to", tmp_path / "m.html")
    assert (code, out) == (2, "")
    assert "m.html') is in a folder that cannot be written: name another" in err


def test_data_that_were_split_otherwise_since_are_not_the_runs(tmp_path, printed):
    data = pictures(tmp_path / "data")
    run = trained(data, tmp_path / "run", "--label-column", "kind")
    assert printed("evaluate", run)[0] == 0
    rows = (data / "labels.csv").read_text().splitlines()
    parts = ["split", *["train", "test"] * 30]
    both = map(",".join, zip(rows, parts, strict=True))
    (data / "labels.csv").write_text("\n".join(both))
    code, _, err = printed("evaluate", run)
    assert code == 2 and "the files were changed, and are split otherwise" in err
    every = ("evaluate", run, "--split", "all")
    for more in ([], ["--data", data]):
        code, out, err = printed(*every, *more)
        assert code == 0, err
        assert f"on 60 training and test examples of {data}" in out
    other = pictures(tmp_path / "other")
    assert f"on 60 examples of {other}" in printed(*every, "--data", other)[1]


@pytest.mark.parametrize(
    "more",
    [
        ["--validation-examples", "9"],
        pytest.param(
            ["--validation-examples", "9", "--train-examples", "20"],
            marks=pytest.mark.full,
        ),
        ["--train-examples", "20"],
        [],
    ],
)
def test_other_images_held_out_by_number_since_are_not_the_runs(
    tmp_path, printed, more
):
    """One image more, and others have the numbers that were held out."""
    data = tmp_path / "data"
    for number in range(40):
        (data / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        pixels = np.full((8, 8), number, np.uint8)
        Image.fromarray(pixels).save(data / "ab"[number % 2] / f"{number:02}.png")
    run = trained(data, tmp_path / "run", *more)
    for split in ("test", "train"):
        assert printed("evaluate", run, "--split", split)[0] == 0
    shutil.copy(data / "a/00.png", data / "a/0.png")
    code, _, err = printed("evaluate", run, "--split", "train")
    assert ("is not known: the files were changed" in err) == (code == 2) == bool(more)
    code, _, err = printed("evaluate", run)
    if "--validation-examples" in more:
        assert code == 2 and "is not known: the files were changed" in err
        assert printed("evaluate", run, "--split", "all")[0] == 0
    else:  # names alone decide
        assert code == 0, err


def test_nor_are_those_of_arrays_that_grew(tmp_path, printed):
    def write(count):
        labels, images = np.arange(count) % 2, np.zeros((count, 8, 8), np.uint8)
        np.savez(tmp_path / "data.npz", train_images=images, train_labels=labels)

    write(40)
    data = tmp_path / "data.npz"
    run = trained(data, tmp_path / "run")
    for more in ([], ["--data", data]):
        write(40)
        assert printed("evaluate", run, *more)[0] == 0
        write(41)
        code, _, err = printed("evaluate", run, *more)
        assert code == 2 and "is not known: the files were changed" in err
