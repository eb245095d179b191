"""A trained model gives what its training measured, of whatever holds an image."""

import dataclasses
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from PIL import Image

import tanager
from tanager import models
from tanager.data import gather
from tanager.data.preprocessing import Preprocessing
from tanager.models import weights
from tanager.recipes import runner, tasks
from tanager.recipes.recipe import Recipe
from tanager.seed import Seed
from tanager.use.model import _called


def opened(file):
    content = Path(file).read_bytes()
    image = Image.open(io.BytesIO(content))
    image.load()
    return content, image


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    return tanager.export(run, tmp_path_factory.mktemp("exported") / "model")


@pytest.fixture(scope="module")
def model(run):
    return tanager.load(run)


@pytest.fixture(scope="module")
def files(photos):
    return sorted(map(str, (photos / "test").rglob("*.png")))


@pytest.fixture(scope="module")
def measured(run, tmp_path_factory):
    """The logits that the training's own evaluation computes of the test files."""
    recorded = json.loads((run / "config.json").read_text())["recipe"]
    recipe = Recipe.from_json({k: v for k, v in recorded.items() if k != "name"})
    dataset = runner.load(recipe)
    out = tmp_path_factory.mktemp("task")
    task = tasks.make(recipe, dataset, Seed.from_int(0), out, False)
    trained = weights.load(task.problem.params, run / "model-ema.safetensors")
    examples = gather(dataset.test, np.arange(len(dataset.test)))
    assert examples["image"].shape[1:] == (12, 12, 3)
    return np.asarray(
        eqx.filter_vmap(task.predict, in_axes=(None, 0))(trained, examples)
    )


def test_run_export_and_training_give_the_same_logits_of_a_file(
    model, exported, files, measured
):
    assert len(files) == len(measured) == 8
    for loaded in (model, tanager.load(exported)):
        assert loaded.classes == ("cat", "dog")
        np.testing.assert_allclose(loaded.logits(files, 3), measured, atol=1e-6)
    one = models.load_pretrained(exported)
    # Each size is a program of its own; these are of three modes.
    for file, expected in zip(files[:3], measured[:3], strict=True):
        image = np.asarray(opened(file)[1].convert("RGB"))
        np.testing.assert_allclose(one(image), expected, atol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"read_shape": None},
        {"view": None},
        {"view_by": "crop"},
        {"crop": 0.5},
        {"interpolation": "bilinear", "size": (7, 7)},
        {"mean": (0.4,) * 3},
    ],
    ids=str,
)
def test_every_field_of_the_preprocessing_is_followed(model, files, fields):
    """Each, planted wrong, changes what the network sees of a photo."""
    right = model.preprocessing
    wrong = dataclasses.replace(right, **fields)
    seen = [each(jnp.asarray(each.read(files[0]))) for each in (right, wrong)]
    assert seen[0].shape != seen[1].shape or not np.allclose(*seen, atol=1e-3)


def test_a_view_in_a_jitted_program_must_have_a_size_that_training_read(exported):
    one = models.load_pretrained(exported)
    assert eqx.filter_jit(one)(np.zeros((12, 12, 3), np.uint8)).shape == (2,)
    with pytest.raises(ValueError, match=r"must be \(12, 12, 3\), as training read it"):
        eqx.filter_jit(one)(np.zeros((20, 20, 3), np.uint8))


def test_an_image_is_the_same_whatever_holds_it(model, files):
    content, image = opened(files[0])
    assert image.mode == "RGB"
    expected = model.predict(files[0])
    pixels = np.asarray(image)
    held = [Path(files[0]), content, image, pixels, jnp.asarray(pixels)]
    assert [model.predict(each) for each in held] == [expected] * 5
    many = model.predict(held)
    assert many == model.predict(tuple(held)) and len(many) == 5
    batch = model.predict(np.stack([pixels, pixels[::-1]]))
    assert len(batch) == 2
    for one in (many[4], batch[0]):  # batches of other sizes round otherwise
        assert one["probability"] == pytest.approx(expected["probability"], abs=1e-6)
    grey = image.convert("L")
    assert model.predict(np.asarray(grey)) == model.predict(grey)


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "1", "LA", "RGBA", "P"])
def test_pillow_s_images_of_every_mode_are_converted_as_files_are(model, files, mode):
    image = opened(files[0])[1].convert("RGB").convert(mode)
    buffer = io.BytesIO()
    if mode not in ("CMYK", "YCbCr"):
        image.save(buffer, "PNG")
        assert model.predict(image) == model.predict(buffer.getvalue())
    assert model.predict(image)["probability"] <= 1


def test_images_have_the_precision_of_training(exported, model, files, tmp_path):
    shutil.copytree(exported, tmp_path / "half")
    path = tmp_path / "half/config.json"
    config = json.loads(path.read_text())
    config["tanager"]["precision"] = "bfloat16"
    path.write_text(json.dumps(config))
    exact, found = (one.logits(files) for one in (model, tanager.load(path.parent)))
    assert 1e-5 < np.max(np.abs(found - exact)) < 0.1


def test_a_prediction_is_a_plain_dictionary(model, files):
    found = model.predict(files[0])
    assert json.loads(json.dumps(found)) == found
    assert list(found) == ["class", "probability", "probabilities"]
    assert list(found["probabilities"]) == ["cat", "dog"]
    assert sum(found["probabilities"].values()) == pytest.approx(1, abs=1e-12)
    assert found["probability"] == found["probabilities"][found["class"]] > 0.5
    (logits,) = model.logits(files[:1])
    expected = float(jax.nn.softmax(logits).max())
    assert found["probability"] == pytest.approx(expected, abs=1e-6)
    shown = model.predict(files[0], top=1)["probabilities"]
    assert shown == {found["class"]: found["probability"]}
    assert model.predict([]) == []


def test_the_network_is_traced_once_for_batches_of_one_size(run, files):
    traced = []

    def predict(params, image):
        traced.append(image.shape)
        return jnp.ravel(image)[:2] * params["w"]

    loaded = weights.named_tensors(tanager.load(run)._params)
    assert set(loaded) == {"head.weight", "head.bias"}
    params = {"w": jnp.ones(2)}
    preprocessing = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=(6, 6))
    model = tanager.Model((params, predict), None, preprocessing, {})
    assert model.logits(files, batch_size=3).shape == (8, 2)
    assert [*model.predict(files[0])["probabilities"]] == ["0", "1"]
    assert traced == [(6, 6, 3)] * 2  # batches of 3, and of 1


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("nothing.png", "image (='nothing.png') cannot be read as an image (No such"),
        (b"words", "image (='in memory') cannot be read as an image"),
        (np.zeros((3, 12, 12), np.uint8), "it looks like [channels, height, width]"),
        (np.zeros((9, 9, 3), np.float32), "give np.round(255 * x).astype(np.uint8)"),
        (
            np.zeros((9, 9), np.int64),
            "image (=int64[9, 9]) must be an image of uint8",
        ),
        (np.ma.zeros((9, 9, 3)), "must not be masked: fill it"),
        (Image.new("F", (9, 9)), "has mode F, whose values have no public range"),
        (7, "image (of type int) must be an image of uint8"),
    ],
)
def test_what_holds_no_image_is_refused_in_one_sentence(model, image, message):
    for given in (image, [image]):
        with pytest.raises(ValueError, match=re.escape(message)) as refused:
            model.predict(given)
        assert "\n" not in str(refused.value)


def test_what_is_not_a_model_is_refused(run, tmp_path):
    tmp_path = tmp_path / "my run"
    tmp_path.mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json of a run"):
        tanager.load(tmp_path)
    for names, message in (
        (("config.json",), "is not finished: repeat .* with --out '.*/my run'$"),
        ((), "is not a config.json of a run or of `tanager export`"),
    ):
        (tmp_path / "config.json").write_text("{}")
        for name in names:
            (tmp_path / name).write_bytes((run / name).read_bytes())
        with pytest.raises(ValueError, match=message):
            tanager.load(tmp_path)
    with pytest.raises(ValueError, match="must be one of average"):
        tanager.load(run, weights="ema")
    with pytest.raises(ValueError, match=r"classes .* is recorded with a model of tan"):
        tanager.load(run, classes=("a", "b"))


def test_the_last_weights_are_there_too(run, files, tmp_path):
    last, average = (tanager.load(run, weights=name) for name in ("last", "average"))
    assert not np.array_equal(last.logits(files[:1]), average.logits(files[:1]))
    tanager.export(run, tmp_path / "average")
    with pytest.raises(ValueError, match=r"weights .='last'. is not in this export"):
        tanager.load(tmp_path / "average", weights="last")


CODE = {"w": jnp.zeros((16, 3)), "b": jnp.zeros(3)}


def logits_of(params, image):
    return jnp.ravel(image) @ params["w"] + params["b"]


def test_a_model_of_your_own_code_is_loaded_again(tmp_path):
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (30, 4, 4, 1), np.uint8)
    preprocessing = Preprocessing(mean=(0.5,), std=(0.5,), read_shape=(4, 4, 1))

    def loss(params, example):
        logits = logits_of(params, preprocessing(example["image"]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])

    data = {"image": images, "label": np.arange(30, dtype=np.int32) % 3}
    mechanism = tanager.Mechanism(0.5, 2.0, 2)
    result = tanager.train(
        tanager.Problem(loss, CODE, data),
        tanager.DPSGD(mechanism, optax.sgd(1.0), delta=1e-3),
        tanager.Runtime(progress=False),
        out=tmp_path / "run",
        description={"classes": list("abc"), "preprocessing": preprocessing.to_json()},
    )
    exported = tanager.export(tmp_path / "run", tmp_path / "model")
    expected = logits_of(result.average, preprocessing(images[0]))
    for source in (tmp_path / "run", exported):
        with pytest.raises(
            ValueError, match=r"give its code: tanager.load\(source, co"
        ):
            tanager.load(source)
        loaded = tanager.load(source, code=(CODE, logits_of))
        assert loaded.classes == tuple("abc")
        (found,) = loaded.logits(images[:1])
        np.testing.assert_allclose(found, expected, atol=1e-6)
        with pytest.raises(ValueError, match=r"missing: c"):
            tanager.load(source, code=(CODE | {"c": jnp.ones(1)}, logits_of))
    with pytest.raises(
        ValueError, match=r"code \(of type function\) must be \(params, pred"
    ):
        tanager.load(exported, code=logits_of)  # pyrefly: ignore[bad-argument-type]
    loaded = tanager.load(exported, code=(CODE, logits_of))
    with pytest.raises(ValueError, match=r"examples .* predict\(params, array\)"):
        loaded.logits({"image": images[:1]})  # pyrefly: ignore[bad-argument-type]
    named = tanager.load(exported, code=(CODE, logits_of), classes=("x", "y"))
    with pytest.raises(ValueError, match="one logit for each of 2 classes"):
        named.predict(images[0])


class Own(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.body, self.head = nnx.Linear(16, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.eval()

    def __call__(self, image):
        return self.head(self.drop(self.norm(self.body(jnp.ravel(image)))))


def own_modules() -> dict[str, tuple[Any, Any]]:
    in_linen, key = linen.Sequential([jnp.ravel, linen.Dense(3)]), jax.random.key(0)
    layers = [eqx.nn.Lambda(jnp.ravel), eqx.nn.Linear(16, 3, key=key)]
    own = eqx.nn.inference_mode(eqx.nn.Sequential([*layers, eqx.nn.Dropout(0.5)]))
    return {
        "Equinox": (own, lambda module, image: module(image)),
        "NNX": (Own(), lambda module, image: module(image)),
        "linen": (in_linen.init(key, jnp.zeros((4, 4, 1))), in_linen.apply),
    }


@pytest.mark.parametrize("library", ["Equinox", "NNX", "linen"])
def test_modules_of_other_libraries_are_exported_and_loaded(library, tmp_path):
    start, predict = own_modules()[library]
    images = np.random.default_rng(0).normal(size=(30, 4, 4, 1)).astype(np.float32)

    def loss(module, example):
        logits = predict(module, example["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])

    result = tanager.train(
        tanager.Problem(loss, start, {"image": images, "label": np.arange(30) % 3}),
        tanager.DPSGD(tanager.Mechanism(0.5, 2.0, 2), optax.sgd(1.0), delta=1e-3),
        tanager.Runtime(progress=False),
        out=tmp_path / "run",
    )
    exported = tanager.export(tmp_path / "run", tmp_path / "model", weights="last")
    loaded = tanager.load(exported, code=own_modules()[library])
    expected = predict(result.params, jnp.asarray(images[0]))
    np.testing.assert_allclose(loaded.logits(images[:1])[0], expected, atol=1e-6)


def test_arrays_go_to_your_own_code_as_they_are():
    model = tanager.Model((CODE, logits_of), None, None, {})
    rows = np.ones((5, 16))
    assert len(model.predict(rows)) == 5
    assert model.predict(rows[0]) == model.predict(rows)[0]
    with pytest.raises(ValueError, match="must be numbers: this model takes features"):
        model.predict(["photo.jpg"])


def test_a_batch_of_numbers_keeps_all_of_their_digits(tmp_path):
    """Whole numbers first, or rows of several dtypes, once cut the others short."""
    model = tanager.Model(({}, lambda params, row: 10.0 * row), None, None, {})
    expected = [[10, 20], [2, 9]]
    for rows in ([[1, 2], [0.2, 0.9]], [np.array([1, 2]), np.array([0.2, 0.9])]):
        np.testing.assert_allclose(model.logits(rows), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"the shape of the first, \[2\]"):
        model.logits([[1.0, 2.0], [3.0]])


def test_a_network_of_features_sees_floating_numbers():
    seen = []
    _called(lambda row: seen.append(row.dtype), jnp.arange(3))
    assert seen == [jnp.float32]
