"""Any number of labels an image, from `train` to `predict`, on a tiny made-up set."""

import csv
import dataclasses
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

import tanager
from tanager import measures, recipes
from tanager.cli import main
from tanager.data import gather
from tanager.recipes import heads, runner, tasks
from tanager.recipes.recipe import Recipe
from tanager.seed import Seed
from tanager.training.evaluate import Classification
from tanager.training.targets import TARGETS


NAMES = ("blue", "green", "red")
SETS = np.array([[n >> k & 1 for k in range(3)] for n in range(8)] * 6)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A label is a bright channel; every set of labels is there six times."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "images").mkdir()
    draw, rows = np.random.default_rng(0), ["image,findings"]
    for number in draw.permutation(len(SETS)):
        pixels = draw.integers(0, 60, (8, 8, 3)) + 180 * SETS[number][::-1]
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"images/s{number}.png")
        found = [name for name, has in zip(NAMES, SETS[number], strict=True) if has]
        rows.append(f"s{number}.png,{'|'.join(found) or 'No Finding'}")
    (folder / "labels.csv").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """The last layer on features that are computed once: without noise, to be exact."""
    out = tmp_path_factory.mktemp("runs") / "1"
    words = ["train", "folder", "--data", data, "--multi-label", "--model"]
    words += ["scattering-linear", "--image-size", "8", "--non-private"]
    words += ["--solver", "dp-sgd", "--steps", "200", "--learning-rate", "20"]
    words += ["--optimizer-options", "momentum", "0.9", "--evaluate-every", "100"]
    words += ["--strategy", "bk", "--batch-size", "0", "--out", out]
    assert main([*map(str, words)]) == 0
    return out


def printed(capsys, *words):
    capsys.readouterr()
    code = main([*map(str, words)])
    found = capsys.readouterr()
    assert code == 0, found.err
    return found.out


def test_the_labels_of_every_image_are_found(data, run, capsys):
    """None at once, one, or all: a softmax, or another threshold, would not find them.

    Labels that were those of other images would not be learned.
    """
    result = json.loads((run / "result.json").read_text())
    for name in ("test_auroc", "test_average_precision_ema"):
        assert result[name] == 1
    assert result["test_accuracy"] is None
    rows = [*csv.reader(io.StringIO(printed(capsys, "predict", run, data / "images")))]
    assert rows[0] == ["file", "class", "probability", *NAMES]
    for file, named, most, *each in rows[1:]:
        number = int(file.rpartition("/s")[2].removesuffix(".png"))
        expected = [n for n, has in zip(NAMES, SETS[number], strict=True) if has]
        assert named == "|".join(expected), file
        assert [float(p) >= 0.5 for p in each] == [*SETS[number].astype(bool)]
        assert most == max(each, key=float)
    assert len(rows) == 1 + len(SETS)
    found = json.loads(printed(capsys, "predict", run, rows[1][0], "--json"))
    assert found["class"] == (rows[1][1].split("|") if rows[1][1] else [])


def all_found(model, data):
    """Whether a model names the labels of every image, no more and no fewer."""
    files = [data / f"images/s{number}.png" for number in range(len(SETS))]
    named = [found["class"] for found in model.predict(files)]
    return named == [
        [n for n, has in zip(NAMES, row, strict=True) if has] for row in SETS
    ]


@pytest.mark.parametrize(
    "planted",
    [
        {},
        {"probabilities": measures.probabilities},  # a softmax
        {"answer": lambda values, names: [names[k] for k in np.flatnonzero(values)]},
        {"answer": lambda values, names: [names[int(np.argmax(values))]]},
    ],
    ids=["right", "softmax", "threshold", "one class"],
)
def test_what_is_planted_wrong_is_seen(data, run, planted, monkeypatch):
    monkeypatch.setitem(TARGETS, True, TARGETS[True]._replace(**planted))
    assert all_found(tanager.load(run), data) == (not planted)


def test_a_run_its_export_and_its_evaluation_agree(data, run, tmp_path, capsys):
    model, file = tanager.load(run), data / "images/s5.png"
    assert model.multi_label
    exported = tanager.export(run, tmp_path / "model")
    assert tanager.load(exported).predict(file) == model.predict(file)
    (logits,) = model.logits([file])
    expected = 1 / (1 + np.exp(-logits.astype(float)))
    assert [*model.predict(file)["probabilities"].values()] == pytest.approx(
        [*expected]
    )
    card = (exported / "README.md").read_text()
    for part in (
        "over labels of AUROC is **100.0 %** and of average precision is **100.0 %**",
        "| label | images with it | AUROC | average precision |",
        '# found["class"] lists the labels with a probability of 0.5 or more.',
        '{"type": "auroc", "value": 1',
    ):
        assert part in card, part
    words = ["evaluate", exported, "--data", data, "--split", "all"]
    found = json.loads(printed(capsys, *words, "--json"))
    assert found["examples"] == len(SETS) and found["auroc"]["value"] == 1
    assert [each["class"] for each in found["per_class"]] == [*NAMES]
    for each in found["per_class"]:
        assert each["sensitivity"]["value"] == each["specificity"]["value"] == 1
    shown = printed(capsys, *words)
    for part in ("AUROC, mean over labels", "average precision", "specificity"):
        assert part in shown


def test_uncertain_labels_count_as_they_are_said_to(data, run, tmp_path, capsys):
    """Of an export, which has no recipe, and of a run; −1 is in place of each red."""
    exported = tanager.export(run, tmp_path / "model")
    rows = [f"s{n}.png,{s[0]},{s[1]},{-s[2]}" for n, s in enumerate(SETS)]
    (tmp_path / "flags.csv").write_text("\n".join(["image,blue,green,red", *rows]))
    for model in (exported, run):
        words = ["evaluate", model, "--data", data, "--split", "all", "--json"]
        words = [*map(str, words), "--labels", str(tmp_path / "flags.csv")]
        assert main(words) == 2
        assert "--uncertain absent or present" in capsys.readouterr().err
        for value, count, auroc in (("present", 24, 1), ("absent", 0, None)):
            found = json.loads(printed(capsys, *words, "--uncertain", value))
            red = found["per_class"][2]
            assert (red["examples"], red["auroc"]["value"]) == (count, auroc)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_labels_is_written_as_onnx(data, run, tmp_path):
    pytest.importorskip("jax2onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    with pytest.raises(ValueError, match=r"format .*cannot be written for scattering"):
        tanager.export(run, tmp_path / "model", format="onnx")
    words = ["train", "folder", "--data", data, "--multi-label", "--model", "linear"]
    words += ["--image-size", "8", "--steps", "2", "--noise-multiplier", "2"]
    words += ["--out", tmp_path / "run"]
    assert main([*map(str, words)]) == 0
    to = tanager.export(tmp_path / "run", tmp_path / "model", format="onnx")
    described = json.loads((to / "config.json").read_text())["tanager"]
    assert described["multi_label"] is True
    text = (to / "README.md").read_text()
    assert "The probability of each label is the sigmoid of its logit." in text
    model = tanager.load(tmp_path / "run")
    images = np.arange(2 * 8 * 8 * 3, dtype=np.uint8).reshape(2, 8, 8, 3)
    assert model.preprocessing is not None
    seen = np.stack([model.preprocessing(jnp.asarray(image)) for image in images])
    session = onnxruntime.InferenceSession(to / "model.onnx")
    (logits,) = session.run(["logits"], {"examples": seen})
    np.testing.assert_allclose(logits, model.logits(images), atol=1e-4)


@pytest.mark.usefixtures("no_audit_pictures")
def test_gradients_of_labels_are_audited(data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["audit", "folder", "--data", data, "--multi-label", "--json", "--seed"]
    words += ["1", "--model", "linear", "--fine-tune", "all", "--head-input"]
    words += ["features", "--epsilon", "4", "--canaries", "40", "--account", "none"]
    words += ["--image-size", "8", "--strategy", "bk", "--audited-steps", "2"]
    found = json.loads(printed(capsys, *words, "--method", "white-box"))
    assert 0 <= found["epsilon_lower_bound"] <= found["claimed_epsilon"]


def test_data_may_lack_a_label_and_have_another_order(data, run, tmp_path, capsys):
    rows = [(f"s{n}.png", SETS[n][2], SETS[n][0]) for n in range(len(SETS))]
    (tmp_path / "flags.csv").write_text(
        "\n".join(["image,red,blue", *(",".join(map(str, row)) for row in rows)])
    )
    words = ["evaluate", run, "--data", data, "--split", "all", "--json", "--labels"]
    capsys.readouterr()
    found = json.loads(printed(capsys, *words, tmp_path / "flags.csv"))
    values = {each["class"]: each["auroc"]["value"] for each in found["per_class"]}
    assert values == {"blue": 1, "green": None, "red": 1}


def test_the_report_shows_each_label(run, capsys):
    assert re.search(r"—\s+—\s+100\.00%", printed(capsys, "runs", run.parent))
    text = (run / "report.html").read_text()
    for part in ("AUROC: mean over labels", "<th scope=row>green</th>", "test AUROC"):
        assert part in text, part
    for part in ("always “", "Which class is taken for which"):
        assert part not in text, part
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["test_auroc"] == 1 and "test_accuracy" not in last


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_loss_is_a_sum_of_sigmoids(data, tmp_path):
    recipe = dataclasses.replace(
        recipes.get("folder").recipe, data=str(data), multi_label=True, model="linear"
    )
    recipe = dataclasses.replace(recipe, fine_tune="all", head_input="features")
    dataset = runner.load(recipe)
    task = tasks.make(recipe, dataset, Seed.from_int(0), tmp_path, False)
    batch = gather(dataset.train, np.arange(10))
    losses = jax.vmap(task.problem.loss, (None, 0))(task.problem.params, batch)
    logits = jax.vmap(task.predict, (None, 0))(task.problem.params, batch)
    p = measures.chances(np.asarray(logits))
    expected = -np.log(np.where(batch["label"], p, 1 - p)).sum(axis=1)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    softmax = TARGETS[False].probabilities(np.asarray(logits))
    assert np.abs(softmax - p).max() > 0.05  # a softmax in place of it is seen


def test_an_evaluation_of_labels_checks_them():
    data = {"x": np.zeros((4, 2), np.float32), "label": np.eye(4, 2, dtype=np.int32)}

    def predict(params, example):
        return example["x"] + params

    made = Classification(predict, data, ("a", "b"), multi_label=True)
    found = made(jnp.array([-1.0, 1.0]))
    assert found.accuracy == 0.5  # of eight decisions
    assert found.scores == {"auroc": 0.5, "average_precision": 0.25}
    assert [each.examples for each in found.per_class] == [1, 1]
    assert [each.accuracy for each in found.per_class] == [0, 1]
    expected = optax.sigmoid_binary_cross_entropy(
        jnp.tile(jnp.array([-1.0, 1.0]), (4, 1)), data["label"]
    )
    assert found.loss == pytest.approx(float(expected.sum() / 4), rel=1e-6)
    assert set((made(jnp.array([np.nan, 1.0])).scores or {}).values()) == {None}
    for labels, message in (
        (data["label"][:, 0], r"int32\[4\]'\) must be 0 or 1 for each example and"),
        (2 * data["label"], r"\(=2\) must be 0 or 1 for each example and label"),
    ):
        with pytest.raises(ValueError, match=message):
            Classification(
                predict, data | {"label": labels}, ("a", "b"), multi_label=True
            )
    with pytest.raises(ValueError, match="must be 0 with multi_label"):
        Classification(
            predict,
            data,
            ("a", "b"),
            multi_label=True,
            augment=lambda key, example: example,
            views=1,
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"class_weights": {"a": 2.0}}, "class_weights .* is for one class an image"),
        ({"solver": "class-means"}, "solver .* must be left out with multi_label"),
        ({"features_from": "a.npz", "model": "linear"}, "features_from"),
        ({"data": None}, r"multi_label \(=True\) needs data"),
        ({"multi_label": False, "uncertain": "absent"}, "is for --multi-label"),
    ],
)
def test_what_takes_one_class_is_refused(fields, message):
    recipe = recipes.get("folder").recipe
    given: dict = {"data": "images", "multi_label": True} | fields
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(recipe, **given)


def test_labels_choose_dp_sgd_and_are_not_searched():
    recipe = recipes.get("cifar10-efficientnet-lite2").recipe
    for several, solver in ((False, "class-means"), (True, "dp-sgd")):
        own = dataclasses.replace(recipe, data="images", multi_label=several)
        assert heads.resolved(own, 100, 1280).solver == solver
    own = Recipe.from_json(own.to_json())
    with pytest.raises(ValueError, match="left out of a search, which compares acc"):
        own.require_batches()


@pytest.mark.parametrize("method", ["membership", "one-run"])
def test_audits_of_one_class_are_refused(method, capsys):
    words = ["audit", "folder", "--data", "x", "--multi-label"]
    assert main([*words, "--method", method]) == 2
    assert "whose canaries have one class" in capsys.readouterr().err


def test_the_most_probable_labels_have_no_ranks(data, run, capsys):
    words = ["predict", str(run), str(data / "images/s1.png"), "--top", "1"]
    assert main(words) == 2
    assert "is for a model of one class an image" in capsys.readouterr().err
    found = json.loads(printed(capsys, *words, "--json"))
    assert [*found["probabilities"]] == ["blue"]
