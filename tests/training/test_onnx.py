"""A run as ONNX: the logits of JAX, with the preprocessing described beside it."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_export import finished_run

import tanager
from tanager import models
from tanager.cli import main
from tanager.training import onnx


INSTALLED = all(map(importlib.util.find_spec, ("jax2onnx", "onnxruntime")))
needs_onnx = pytest.mark.skipif(not INSTALLED, reason="needs tanager-dp[onnx]")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("onnx") / "run"
    words = ["train", "digits", "--model", "linear", "--steps", "2", "--out"]
    assert main([*words, str(folder)]) == 0
    return folder


@pytest.mark.skipif(INSTALLED, reason="needs an environment without ONNX")
def test_without_the_extra_one_sentence_says_what_to_install(tmp_path, capsys):
    model = models.create("linear", classes=2, image_shape=(2,), key=jax.random.key(0))
    config = {
        "model": "linear",
        "classes": ["cat", "dog"],
        "architecture": {"name": "linear", "image_shape": [2], "options": {}},
        "preprocessing": {"mean": [0.5], "std": [0.5]},
    }
    run = finished_run(tmp_path / "run", model, config)
    words = ["export", str(run), "--to", str(tmp_path / "model"), "--format", "onnx"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "needs a package that is not installed (jax2onnx): pip install" in error
    assert not (tmp_path / "model").exists()


@needs_onnx
@pytest.mark.filterwarnings("ignore")
def test_a_run_is_exported_as_onnx(run, tmp_path):
    _, onnxruntime = onnx.packages()
    to = tanager.export(run, tmp_path / "model", format="onnx")
    names = sorted(path.name for path in to.iterdir())
    assert names == ["README.md", "config.json", "model.onnx"]
    described = json.loads((to / "config.json").read_text())["tanager"]
    assert described["input"]["shape"] == ["n", 8, 8, 1]
    assert described["preprocessing"]["read_shape"] == [8, 8, 1]
    assert 'InferenceSession("FOLDER/model.onnx")' in (to / "README.md").read_text()
    model, images = tanager.load(run), np.zeros((5, 8, 8, 1), np.uint8)
    assert model.preprocessing is not None
    seen = np.stack([model.preprocessing(jnp.asarray(image)) for image in images])
    session = onnxruntime.InferenceSession(to / "model.onnx")
    (logits,) = session.run(["logits"], {"examples": seen})
    np.testing.assert_allclose(logits, model.logits(images), atol=1e-4)
    with pytest.raises(ValueError, match="holds ONNX: load it with onnxruntime"):
        tanager.load(to)


@needs_onnx
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("small-cnn", 32),
        ("wrn-16-4", 32),
        ("vit-tiny-16", 32),
        ("efficientnet-lite0", 64),
        ("dead-leaves-linear", 32),
    ],
)
def test_networks_are_converted(tmp_path, name, side):
    shape = (side, side, 3)
    model = models.create(name, classes=3, image_shape=shape, key=jax.random.key(0))
    assert onnx.write(model, shape, tmp_path / "m.onnx", name) < onnx.TOLERANCE


@needs_onnx
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_converted_is_refused_in_one_sentence(tmp_path):
    shape, name = (8, 8, 1), "scattering-linear"
    model = models.create(name, classes=3, image_shape=shape, key=jax.random.key(0))
    with pytest.raises(ValueError, match="cannot be written for scattering-linear"):
        onnx.write(model, shape, tmp_path / "m.onnx", name)
    assert not (tmp_path / "m.onnx").exists()


@needs_onnx
@pytest.mark.filterwarnings("ignore")
def test_other_logits_are_refused(tmp_path, monkeypatch):
    model = models.create("linear", classes=3, image_shape=(8,), key=jax.random.key(0))
    monkeypatch.setattr(onnx, "TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="gives logits of linear that differ by"):
        onnx.write(model, (8,), tmp_path / "m.onnx", "linear")
