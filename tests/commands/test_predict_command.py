"""`tanager predict` and `tanager evaluate`: what they print, and their exit status."""

import csv
import io
import json
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

import tanager
from tanager import models
from tanager.cli import main
from tanager.commands import evaluate


SPLIT = ("train", "test")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    words = ["train", "digits", "--model", "linear", "--steps", "4"]
    assert main([*words, "--noise-multiplier", "2", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def photos(tmp_path):
    draw = np.random.default_rng(0)
    (tmp_path / "new/more").mkdir(parents=True)
    for name, mode in (("a.png", "L"), ("more/b.JPG", "RGB"), ("c.png", "RGBA")):
        pixels = draw.integers(0, 256, (11, 14, 3), np.uint8)
        image = Image.fromarray(pixels).convert(mode)
        image.save(tmp_path / "new" / name)
    return tmp_path / "new"


def test_a_folder_becomes_csv(run, photos, printed):
    (photos / ".hidden.png").write_bytes(b"")
    (photos / "notes.txt").write_text("")
    code, out, err = printed("predict", run, photos)
    assert code == 0
    rows = [*csv.reader(io.StringIO(out))]
    classes = [str(number) for number in range(10)]
    assert rows[0] == ["file", "class", "probability", *classes]
    assert [row[0] for row in rows[1:]] == [
        str(photos / name) for name in ("a.png", "c.png", "more/b.JPG")
    ]
    model = tanager.load(run)
    for row in rows[1:]:
        found = model.predict(row[0])
        assert row[1] == found["class"]
        assert float(row[2]) == pytest.approx(found["probability"], abs=1e-5)
        assert sum(map(float, row[3:])) == pytest.approx(1, abs=1e-4)
    assert err == "tanager: 1 file is not an image: .txt 1\n"


def test_a_bad_file_is_named_and_the_others_predicted(run, photos, printed):
    (photos / "b.png").write_bytes(b"nothing")
    words = ["--json", "--top", "2", "--batch-size", "2"]
    code, out, err = printed("predict", run, photos, *words)
    assert code == 1
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["file"][-5:] for line in lines] == ["a.png", "c.png", "b.JPG"]
    for line in lines:
        assert list(line) == ["file", "class", "probability", "probabilities"]
        first, second = line["probabilities"].items()
        assert first == (line["class"], line["probability"])
        assert second[1] <= first[1]
    first, second = err.splitlines()
    assert first.startswith("tanager: error: image (=") and "b.png" in first
    assert second == "tanager: 1 of 4 files were not predicted"


def test_the_most_probable_classes_have_columns_by_rank(run, photos, printed):
    _, out, _ = printed("predict", run, photos / "a.png", "--top", "2")
    header, row = csv.reader(io.StringIO(out))
    assert header == ["file", "class", "probability", "class_2", "probability_2"]
    assert len(row) == 5 and float(row[4]) <= float(row[2])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.png"], "file (='nothing.png') does not exist: check its name"),
        ([], "no files are given: name images, or folders of them"),
        (["."], "files (='.') hold no images (.png"),
        (["a.png", "--top", "0"], "top (=0) must be at least 1"),
        (["a.png", "--batch-size", "0"], "batch-size (=0) must be at least 1"),
        (
            ["a.png", "--weights", "ema"],
            "weights (='ema') must be one of average, last",
        ),
        (["a.png", "--code", "mine"], "code (='mine') is not MODULE:FUNCTION"),
    ],
)
def test_bad_words_are_refused_before_work(
    run, tmp_path, monkeypatch, printed, words, message
):
    monkeypatch.chdir(tmp_path)
    code, out, err = printed("predict", run, *words)
    assert (code, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1


def test_a_folder_of_runs_is_refused_with_one_of_them(run, photos, printed):
    code, _, err = printed("predict", run.parent, photos / "a.png")
    assert code == 2 and f"name one of the folders in it, such as {run}\n" in err


def test_a_model_of_features_takes_a_file_of_them(tmp_path, photos, printed):
    rows = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    labels = np.arange(40) % 2
    made, run = tmp_path / "made.npz", tmp_path / "run"
    np.savez(
        made,
        train_features=rows,
        train_labels=labels,
        test_features=rows[:6],
        test_labels=labels[:6],
    )
    words = ["train", "features", "--features-from", made, "--out", run]
    words += ["--epsilon", "8", "--steps", "2", "--account", "none"]
    assert main([*map(str, words)]) == 0
    np.savez(tmp_path / "new.npz", features=rows[:6], test_features=rows[6:])
    np.save(tmp_path / "new.npy", rows[:6].astype(np.float64))
    found = {}
    for name in ("made.npz", "new.npz", "new.npy"):
        code, out, _ = printed("predict", run, tmp_path / name)
        assert code == 0
        header, *lines = csv.reader(io.StringIO(out))
        assert header[3:] == ["0", "1"]
        assert [line[0] for line in lines] == [
            f"{tmp_path / name}:{k}" for k in range(6)
        ]
        found[name] = [line[1:] for line in lines]
    assert found["made.npz"] == found["new.npz"] == found["new.npy"]
    for words in (("evaluate", run), ("evaluate", run, "--data", made)):
        code, out, _ = printed(*words, "--json")
        result = json.loads((run / "result.json").read_text())
        measured = json.loads(out)["accuracy"]["value"]
        assert (code, measured) == (0, pytest.approx(result["test_accuracy_ema"]))
    for words, message in (
        ([photos], "must be one .npz or .npy file: this model takes features, not"),
        ([tmp_path / "run/config.json"], "must be one .npz or .npy file"),
    ):
        code, _, err = printed("predict", run, *words)
        assert code == 2 and message in err
    np.savez(tmp_path / "other.npz", wrong=rows)
    code, _, err = printed("predict", run, tmp_path / "other.npz")
    assert code == 2 and "it must have an array `features`, numbers[n, d]" in err


def test_your_own_code_is_named_on_the_command_line(
    tmp_path, photos, monkeypatch, printed
):
    (tmp_path / "my_own_network.py").write_text("""
import jax.numpy as jnp
def create():
    return {"w": jnp.zeros((16, 3))}, lambda params, x: x.ravel() @ params["w"]
def wrong():
    return 1
def bare():
    return *create(), 1
def with_preprocessing():
    from tanager.data.preprocessing import Preprocessing
    return *create(), Preprocessing(mean=(0.5,), std=(0.5,), read_shape=(4, 4, 1))
""")
    described = {
        "preprocessing": {"mean": [0.5], "std": [0.5], "read_shape": [4, 4, 1]}
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(
        json.dumps({"tanager": {"model": None, "classes": None} | described})
    )
    models.save_weights(
        {"w": np.ones((16, 3), np.float32)}, tmp_path / "model/model.safetensors"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = printed(
        "predict", "model", photos, "--code", "my_own_network:create"
    )
    assert code == 0
    assert (
        out.startswith("file,class,probability,0,1,2\n") and out.count("0.333333") > 9
    )
    for name, message in (
        ("my_own_network:wrong", "returns int, and must return (params, predict)"),
        ("my_own_network:bare", "or (params, predict, preprocessing)"),
        ("my_own_network:none", "cannot be run (AttributeError"),
        ("not_there:create", "No module named 'not_there'"),
    ):
        code, _, err = printed("predict", "model", photos, "--code", name)
        assert code == 2 and message in err
    code, _, err = printed("predict", "model", photos)
    assert code == 2 and "holds a model that is not one of tanager's: give its" in err

    (tmp_path / "model/config.json").write_text('{"tanager": {"model": null}}')
    words = "predict", "model", photos, "--code", "my_own_network:with_preprocessing"
    assert printed(*words)[:2] == (0, out)
    words = "--code", "my_own_network:create"
    for command in (("predict", "model", photos), ("evaluate", "model", "--data", ".")):
        code, _, err = printed(*command, *words)
        assert code == 2 and "return (params, predict, preprocessing)" in err


def test_a_run_is_evaluated_as_its_training_did(run, tmp_path, printed):
    code, out, _ = printed("evaluate", run, "--json")
    found = json.loads(out)
    result = json.loads((run / "result.json").read_text())
    assert code == 0 and found["examples"] == 360
    assert found["accuracy"]["value"] == pytest.approx(result["test_accuracy_ema"])
    for ours, theirs in zip(found["per_class"], result["per_class"], strict=True):
        assert ours["accuracy"]["value"] == pytest.approx(theirs["accuracy_ema"])
    code, out, _ = printed("evaluate", run, "--weights", "last", "--json")
    last = json.loads(out)["accuracy"]["value"]
    assert last == pytest.approx(result["test_accuracy"])
    page = tmp_path / "page.html"
    code, out, _ = printed("evaluate", run, "--to", page)
    assert code == 0 and out.endswith(f"page: {page}\n")
    text = page.read_text()
    assert "test images" not in text
    assert "Measured on 360 test examples of digits." in text
    assert f"Model {run.name} ·" in text and str(run) not in text
    share = found["balanced_accuracy"]
    assert f"<td>{100 * share['value']:.1f} %</td>" in text
    assert f"<td>{100 * share['low']:.1f} to {100 * share['high']:.1f} %</td>" in text
    assert "last parameters" not in text and "Which class is taken for which" in text
    code, _, err = printed("evaluate", run, "--to", tmp_path / "no" / "page")
    assert code == 2 and "must be a file in a folder that exists" in err
    for part in ("on 360 test examples of digits", "confusion matrix: a row"):
        assert part in out, part
    assert "ε does not cover these numbers" in out


@pytest.mark.parametrize("kind", ["files", "arrays"])
def test_evaluation_sees_the_pixels_that_prediction_sees(run, tmp_path, kind):
    """A grey model, and images in colour of another size."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 9, 10, 3), np.uint8)
    labels = np.arange(8) % 2
    if kind == "arrays":
        parts = {"images": pixels, "labels": labels}
        both: dict[str, Any] = {
            f"{s}_{name}": part for s in SPLIT for name, part in parts.items()
        }
        np.savez(tmp_path / "data.npz", **both)
    for number, one in enumerate(pixels if kind == "files" else ()):
        for split in SPLIT:
            folder = tmp_path / split / str(labels[number])
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(one).save(folder / f"{number}.png")
    model = tanager.load(run)
    options = evaluate.Arguments(str(run), data=str(tmp_path))
    found, _ = evaluate._logits(model, evaluate._labelled(model, options), options)
    order = np.argsort(labels, kind="stable") if kind == "files" else slice(None)
    expected = model.logits([Image.fromarray(one) for one in pixels[order]])
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_an_export_is_evaluated_on_a_folder(run, tmp_path, printed):
    draw = np.random.default_rng(0)
    for split, count in (("train", 1), ("test", 3)):
        for name in ("7", "3"):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (9, 10, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    model, data = tanager.export(run, tmp_path / "model"), tmp_path / "data"
    for words, count in ((("--split", "all"), 8), ((), 6)):
        code, out, _ = printed("evaluate", model, "--data", data, "--json", *words)
        assert code == 0
        found = json.loads(out)
        assert found["examples"] == count
        by_class = {each["class"]: each["examples"] for each in found["per_class"]}
        assert by_class["7"] == by_class["3"] == count / 2
    _, told, _ = printed("evaluate", model, "--data", data)
    assert "on 6 test examples of" in told and "; --split all measures all 8\n" in told
    predicted = json.loads(out)["confusion_matrix"]
    files = sorted(map(str, (data / "test").rglob("*.png")))
    expected = np.zeros((10, 10), int)
    for file, one in zip(files, tanager.load(model).predict(files), strict=True):
        expected[int(file.split("/")[-2]), int(one["class"])] += 1
    assert predicted == expected.tolist()
    code, _, err = printed("evaluate", model)
    assert code == 2 and "data (=None) is not known of this model: give --data" in err
    for split in ("train", "test"):
        (data / split / "7").rename(data / split / "x")
    code, _, err = printed("evaluate", model, "--data", data)
    assert code == 2 and "class (='x') is not one of the model's: 0, 1" in err


def labelled(folder, sides, classes=("a", "b"), seed=0, mode="RGB"):
    """Write two images of each class, of the given heights and widths in turn."""
    draw = np.random.default_rng(seed)
    folder.mkdir()
    rows = [(f"{k}.png", classes[k % len(classes)]) for k in range(4 * len(classes))]
    for number, (name, _) in enumerate(rows):
        size = (*sides[number % len(sides)], 3)
        pixels = draw.integers(0, 256, size, np.uint8)
        Image.fromarray(pixels).convert(mode).save(folder / name)
    table = "".join(f"{name},{label}\n" for name, label in rows)
    (folder / "of.csv").write_text("photo,kind\n" + table)
    return folder, rows


def trained_on(folder, out, *more):
    words = ["train", "folder", "--data", folder, "--labels", folder / "of.csv"]
    words += ["--model", "linear", "--steps", "1", "--batch-size", "2", "--delta"]
    words += ["0.01", "--account", "none", "--label-column", "kind", "--out", out]
    words += ["--noise-multiplier", "2"]
    assert main([*map(str, words), *more]) == 0
    return out


@pytest.fixture(scope="module")
def of_labels(tmp_path_factory):
    """A run on images of 20 × 20 pixels whose labels are in a file."""
    folder = tmp_path_factory.mktemp("labels")
    data, _ = labelled(folder / "data", [(20, 20)])
    return trained_on(data, folder / "run")


def test_data_of_an_evaluation_have_labels_of_their_own(of_labels, tmp_path, printed):
    other, rows = labelled(tmp_path / "other", [(20, 20)], ("b", "a"), 1)
    words = ("evaluate", of_labels, "--data", other, "--split", "all", "--json")
    code, out, err = printed(*words, "--labels", other / "of.csv")
    assert code == 0, err
    files = [str(other / name) for name, _ in rows]
    expected = np.zeros((2, 2), int)
    for (_, label), one in zip(
        rows, tanager.load(of_labels).predict(files), strict=True
    ):
        expected["ab".index(label), "ab".index(one["class"])] += 1
    assert json.loads(out)["confusion_matrix"] == expected.tolist()
    for name, label in rows:
        (other / label).mkdir(exist_ok=True)
        (other / name).rename(other / label / name)
    (other / "of.csv").unlink()
    code, out, err = printed(*words)
    assert code == 0, err
    assert json.loads(out)["confusion_matrix"] == expected.tolist()
    code, _, err = printed("evaluate", of_labels, "--labels", "of.csv")
    assert code == 2 and "labels (='of.csv') needs data: give the images' --data" in err


@pytest.mark.parametrize(("side", "mode"), [((20, 20), "RGB"), ((16, 24), "L")])
def test_data_of_an_evaluation_are_resized_once(
    side, mode, tmp_path, printed, monkeypatch
):
    """The network sees each file as `predict` shows it, whatever sizes there are."""
    data, _ = labelled(tmp_path / "data", [side], mode=mode)
    run = trained_on(data, tmp_path / "run")
    other, rows = labelled(tmp_path / "other", [side, (50, 40), (60, 61)])
    words = ["evaluate", run, "--data", other, "--labels", other / "of.csv"]
    words += ["--split", "all", "--json"]
    shown = []

    def logits(self, examples, batch_size):
        shown.extend(map(self.preprocessing.read, examples))
        return np.zeros((len(examples), 2), np.float32)

    preprocessing = tanager.load(run).preprocessing
    assert preprocessing is not None
    read = preprocessing.read
    expected = sorted(read(str(other / name)).tobytes() for name, _ in rows)
    for model in (run, tanager.export(run, tmp_path / "model")):
        monkeypatch.setattr(tanager.Model, "logits", logits)
        code, _, err = printed(*[words[0], model, *words[2:]])
        assert code == 0, err
        assert sorted(each.tobytes() for each in shown) == expected
        shown.clear()


@pytest.mark.parametrize(
    ("own", "names", "expected"),
    [
        (sorted(map(str, range(12))), [*map(str, range(12))], None),
        (("cat", "dog"), ("0", "1"), [0, 1]),
        (("cat", "dog"), ("dog",), [1]),
        (("a", "Hüfte"), ("Hu\u0308fte",), [1]),
        (("a", "Hu\u0308fte"), ("Hüfte", "a"), [1, 0]),
        ((), ("b", "a"), [0, 1]),
        (("cat", "dog", "owl"), ("0", "1"), "class (='0') is not one of the model's"),
        (("0", "1"), ("0", "1", "2"), "class (='2') is not one of the model's"),
        (("cat", "dog"), ("chat", "chien"), "class (='chat') is not one of the model"),
    ],
)
def test_classes_are_matched_by_name_first(own, names, expected):
    model = tanager.Model((None, lambda *_: None), own, None, {})
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            evaluate._numbers(model, names)
        return
    found = evaluate._numbers(model, names)
    assert [*found] == (expected or [own.index(name) for name in names])
