"""Settings that follow from public numbers, and flags that stand over them."""

import dataclasses
import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tanager import recipes
from tanager.cli import main
from tanager.models import packaged
from tanager.recipes import automatic, heads


FOLDER = recipes.get("folder").recipe
LAST = {"fine_tune": "last-layer", "solver": "auto", "batch_size": 0}


@pytest.fixture(params=[True, False], ids=["weights", "no weights"])
def installed(request, monkeypatch):
    monkeypatch.setattr(packaged, "is_installed", lambda name: request.param)
    return request.param


def chosen(**given):
    return automatic.resolved(dataclasses.replace(FOLDER, **given))


def test_the_model_is_the_best_one_at_hand(installed):
    found = chosen()
    assert {name: getattr(found, name) for name in LAST} == LAST
    assert automatic.resolved(found) == found
    if not installed:
        assert (found.model, found.weights) == ("dead-leaves-linear", None)
        assert (found.image_size, found.head_input) == (32, "norm")
        return
    tuned = recipes.get("cifar10-efficientnet-lite2").recipe
    names = ("model", "weights", "image_size", "head_input", "head")
    assert [getattr(found, n) for n in names] == [getattr(tuned, n) for n in names]
    settled, same = (
        heads.resolved(dataclasses.replace(each, epsilon=4.0), 960, 1280)
        for each in (found, tuned)
    )
    names = ("solver", "steps", "learning_rate", "clip_norm", "optimizer_options")
    assert [getattr(settled, n) for n in names] == [getattr(same, n) for n in names]


@pytest.mark.parametrize(
    ("sizes", "mode", "small_and_grey"),
    [
        ([(28, 28)] * 4, "L", True),
        ([(32, 24)] * 4, "L", True),
        ([(33, 28)] * 4, "L", False),
        ([(28, 28)] * 3 + [(28, 27)], "L", False),
        ([(28, 28)] * 4, "RGB", False),
    ],
)
def test_small_grey_images_are_scattered(
    tmp_path, installed, sizes, mode, small_and_grey
):
    for number, size in enumerate(sizes):
        folder = tmp_path / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        Image.new(mode, size, number).save(folder / f"{number}.png")
    found = chosen(data=str(tmp_path))
    assert (found.weights is not None) == (installed and not small_and_grey)
    assert (found.model == "dead-leaves-linear") == (
        not installed and not small_and_grey
    )
    if small_and_grey:
        assert (found.model, found.image_size) == ("scattering-linear", 32)
        settled = heads.resolved(found, 1000, 5184)
        assert "small grey" in automatic.reasons(FOLDER, settled, 1000)["model"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model": "wrn-16-4"}, {"fine_tune": "all", "head_input": "features"}),
        ({"model": "vit-tiny-16", "weights": "w"}, {"head_input": "norm"}),
        ({"image_size": 64, "fine_tune": "last-layer"}, {}),
        ({"weights": "efficientnet-lite2"}, {"model": "efficientnet-lite2"}),
        ({"model": "scattering-linear", "steps": 9}, {"image_size": 32}),
        (
            {"model": "dead-leaves-linear"},
            {"image_size": 32, "fine_tune": "last-layer", "head_input": "norm"},
        ),
    ],
)
def test_what_is_given_stands_and_the_rest_follows(installed, given, expected):
    found = chosen(**given)
    for name, value in (given | expected).items():
        assert getattr(found, name) == value
    settled = heads.resolved(found, 1000, 100)
    assert settled.clip_norm > 0
    assert settled.learning_rate > 0
    assert settled.steps == given.get("steps", settled.steps) > 0
    assert settled.batch_size == 1000


def test_weights_of_ones_own_need_a_model(installed):
    with pytest.raises(ValueError, match=r"model .*must be given for weights of your"):
        chosen(weights="mine.safetensors")


@pytest.mark.parametrize("solver", ["auto", "dp-sgd"])
@pytest.mark.parametrize(
    ("examples", "epsilon", "batch", "steps", "rate"),
    [
        (1000, 1.0, 1000, 60, 0.125),
        (1000, 4.0, 1000, 60, 0.5),
        (5000, 4.0, 1250, 150, 2.0),
        (60_000, 8.0, 4096, 150, 2.0),
    ],
)
def test_a_network_from_scratch_follows_from_n_and_epsilon(
    solver, examples, epsilon, batch, steps, rate
):
    given = {"model": "small-cnn", "solver": solver, "epsilon": epsilon}
    given = dataclasses.replace(FOLDER, **given)
    found = heads.resolved(automatic.resolved(given), examples, 100)
    assert (found.solver, found.fine_tune) == ("dp-sgd", "all")
    assert (found.batch_size, found.steps) == (batch, steps)
    assert (found.learning_rate, found.clip_norm) == (rate, 1.0)
    reasons = automatic.reasons(given, found, examples)
    wanted = {"batch_size", "steps", "learning_rate", "clip_norm", "fine_tune"}
    assert wanted <= set(reasons)
    assert "features" not in reasons["learning_rate"]
    named = {"batch_size": 7, "steps": 9, "learning_rate": 3.0, "clip_norm": 0.5}
    for name, value in named.items():
        change: dict[str, Any] = {name: value}
        one = dataclasses.replace(given, **change)
        one = heads.resolved(automatic.resolved(one), examples, 100)
        assert getattr(one, name) == value
        assert not one.leaves_open


@pytest.mark.parametrize("fine_tune", ["last-stage", "film", "all"])
@pytest.mark.parametrize(
    ("examples", "epsilon", "batch", "rate"),
    [
        (1000, 4.0, 1000, 0.16),
        (5000, 4.0, 1250, 0.8),
        (45_000, 1.0, 4096, 1.8),
        (45_000, 8.0, 4096, 5.0),
    ],
)
def test_more_than_the_last_layer_of_weights_follows_from_n_and_epsilon(
    fine_tune, examples, epsilon, batch, rate
):
    lite0: dict[str, Any] = dict.fromkeys(("model", "weights"), "efficientnet-lite0")
    given = {"fine_tune": fine_tune, "epsilon": epsilon}
    given = dataclasses.replace(FOLDER, **lite0, **given)
    found = heads.resolved(automatic.resolved(given), examples, 100)
    assert (found.solver, found.steps, found.batch_size) == ("dp-sgd", 60, batch)
    assert found.learning_rate == pytest.approx(rate)
    assert found.optimizer_options == {"momentum": 0.9}
    own = dataclasses.replace(given, optimizer_options={"momentum": 0.0})
    own = heads.resolved(automatic.resolved(own), examples, 100)
    assert own.optimizer_options == {"momentum": 0.0}
    noise = dataclasses.replace(given, epsilon=None, noise_multiplier=1.0, steps=9)
    noise = heads.resolved(automatic.resolved(noise), examples, 100)
    assert noise.learning_rate == pytest.approx(examples / 25_000)


@pytest.mark.parametrize(("side", "size"), [(40, 32), (28, None)])
def test_large_images_take_the_size_of_the_network(tmp_path, side, size):
    for number in range(4):
        folder = tmp_path / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (side, side), (number, 0, 0)).save(folder / f"{number}.png")
    given = dataclasses.replace(FOLDER, data=str(tmp_path), model="small-cnn")
    found = automatic.resolved(given)
    assert found.image_size == size
    assert automatic.resolved(found) == found
    reasons = automatic.reasons(given, heads.resolved(found, 1000, 1), 1000)
    assert ("image_size" in reasons) == (size is not None)
    own = automatic.resolved(dataclasses.replace(given, image_size=16))
    assert own.image_size == 16


def test_scattering_takes_many_small_steps_at_every_size():
    recipe = dataclasses.replace(chosen(model="scattering-linear"), epsilon=1.0)
    found = heads.resolved(recipe, 100, 15552)
    assert (found.solver, found.steps, found.clip_norm) == ("dp-sgd", 60, 0.1)


@pytest.mark.parametrize(("examples", "batch"), [(20_000, 20_000), (50_000, 8192)])
def test_scattering_takes_batches_of_many_images(examples, batch):
    given = dataclasses.replace(FOLDER, model="scattering-linear", epsilon=4.0)
    found = heads.resolved(automatic.resolved(given), examples, 15552)
    assert found.batch_size == batch
    assert (found.steps == 240) == (found.clip_norm == 0.04) == (batch < examples)
    reason = automatic.reasons(given, found, examples)["batch_size"]
    assert ("all examples" in reason) == (batch == examples)
    own = dataclasses.replace(given, batch_size=100, clip_norm=0.5)
    own = heads.resolved(automatic.resolved(own), examples, 15552)
    assert (own.batch_size, own.clip_norm) == (100, 0.5)


@pytest.mark.parametrize(("examples", "rate"), [(100, 0.0442), (50_000, 22.1)])
def test_dead_leaves_take_one_rule_at_every_size(examples, rate):
    recipe = dataclasses.replace(chosen(model="dead-leaves-linear"), epsilon=1.0)
    found = heads.resolved(recipe, examples, 3200)
    assert (found.solver, found.steps, found.clip_norm) == ("dp-sgd", 60, 0.3)
    assert found.batch_size == examples
    assert found.learning_rate == pytest.approx(rate, rel=1e-3)
    recipe = dataclasses.replace(recipe, epsilon=10.0)
    larger = heads.resolved(recipe, examples, 3200)
    assert larger.learning_rate == pytest.approx(10 * rate, rel=1e-3)
    assert (larger.steps, larger.clip_norm) == (60, 0.3)


def test_steps_are_chosen_beside_a_batch_size_and_a_learning_rate_that_are_given():
    given: dict[str, Any] = {"solver": "dp-sgd", "batch_size": 30}
    given["learning_rate"] = 2.5
    recipe = dataclasses.replace(FOLDER, model="dead-leaves-linear", **given)
    recipe = dataclasses.replace(recipe, epsilon=4.0)
    found = heads.resolved(automatic.resolved(recipe), 1000, 3200)
    assert {name: getattr(found, name) for name in given} == given
    assert (found.steps, found.clip_norm) == (60, 0.3)


def test_reasons_name_what_was_chosen_and_nothing_that_was_given(installed):
    given = dataclasses.replace(FOLDER, steps=7)
    found = heads.resolved(automatic.resolved(given), 1000, 1280)
    reasons = automatic.reasons(given, found, 1000)
    assert "steps" not in reasons
    assert reasons["model"].startswith(f"{found.model}, because ")
    assert ("pip install" in reasons["model"]) is not installed
    assert "1000" in reasons["batch_size"]
    digits = recipes.get("digits").recipe
    assert automatic.reasons(digits, digits, 1437) == {}


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, {"solver", "head_input"}),
        ({"steps": 7}, {"head_input"}),
        ({"learning_rate": 1.0}, {"head_input"}),
        ({"batch_size": 50}, {"head_input"}),
        ({"model": "small-cnn"}, set()),
    ],
)
def test_reasons_are_given_only_where_there_was_a_choice(given, chosen):
    given = dataclasses.replace(
        FOLDER, **({"model": "dead-leaves-linear", "epsilon": 4.0} | given)
    )
    found = heads.resolved(automatic.resolved(given), 1000, 1280)
    reasons = automatic.reasons(given, found, 1000)
    assert {"solver", "head_input"} & {*reasons} == chosen


def test_parquet_files_are_looked_at_as_folders_are(tmp_path):
    image = io.BytesIO()
    Image.new("L", (20, 20)).save(image, "png")
    rows = [{"image": {"bytes": image.getvalue()}, "label": n % 2} for n in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert automatic._image_shape(chosen(data=str(tmp_path))) == (20, 20, 1)
    assert chosen(data=str(tmp_path)).model == "scattering-linear"


def test_one_command_trains_and_records_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(packaged, "is_installed", lambda name: False)
    draw = np.random.default_rng(0)
    for label, shade in (("dark", 40), ("light", 200)):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(shade - 30, shade + 30, (12, 10), np.uint8)
            pixels[:: 2 + (label == "dark")] //= 2
            file = tmp_path / "data" / label / f"{number}.png"
            Image.fromarray(pixels).save(file)
    out = tmp_path / "run"
    command = ["train", "folder", "--data", str(tmp_path / "data"), "--epsilon", "8"]
    words = ["--steps", "3", "--delta", "0.005", "--out", str(out)]
    assert main([*command, *words]) == 0
    config = json.loads((out / "config.json").read_text())
    assert {"learning_rate", "clip_norm"} <= set(config["automatic"])
    assert config["recipe"]["model"] == "scattering-linear"
    assert config["automatic"]["model"].startswith("scattering-linear, because")
    assert "steps" not in config["automatic"]
    assert config["recipe"]["image_size"] == 32
    printed = capsys.readouterr()
    assert "image_size: 32, because" in printed.out
    assert "classes (2): dark, light\n" in printed.out
    assert "average of" not in printed.out
    assert "that after the last update" in (out / "report.html").read_text()
    assert "warning: delta (0.005) is above 0.1/N" in printed.err
