import functools
import os
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tanager import models
from tanager.models import weights


@functools.cache
def _model(seed=0):
    return models.SmallCNN(5, (8, 8, 3), key=jax.random.key(seed))


def test_a_model_comes_back_bit_for_bit_with_its_static_parts(tmp_path):
    path = tmp_path / "model.safetensors"
    weights.save(_model(0), path, {"model": "small-cnn", "ε": "3"})
    loaded = weights.load(_model(1), path)
    assert eqx.tree_equal(loaded, _model(0))
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"model": "small-cnn", "ε": "3"}
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(loaded))
    template = jax.eval_shape(lambda: loaded)
    assert eqx.tree_equal(weights.load(template, path), _model(0))


def test_names_are_the_paths_and_other_tools_can_read_them(tmp_path):
    path = tmp_path / "model.safetensors"
    model = _model()
    weights.save(model, path)
    raw = safetensors.numpy.load_file(path)
    assert len(raw) == len(jax.tree.leaves(model))
    np.testing.assert_array_equal(
        raw["stages.0.conv.weight"], model.stages[0].conv.weight
    )
    np.testing.assert_array_equal(raw["head.bias"], model.head.bias)


def test_dicts_tuples_scalars_and_narrow_types(tmp_path):
    path = tmp_path / "tree.safetensors"
    tree = {
        "scalar": jnp.float32(3.5),
        "nested": (jnp.arange(3, dtype=jnp.int32), [jnp.ones((2, 0), jnp.float32)]),
        "half": jnp.asarray([[1.5, -2.0]], jnp.bfloat16),
        "flag": jnp.asarray([True, False]),
        "host": np.asarray([1.0, 2.0 + 2**-40]),
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "text": "kept",
        "number": 3,
    }
    weights.save(tree, path)
    template = jax.tree.map(
        lambda leaf: leaf * 0 if eqx.is_array(leaf) and leaf.dtype != bool else leaf,
        tree,
    )
    template["text"] = "of the template"
    loaded = weights.load(template, path)
    assert loaded.pop("text") == "of the template"
    assert tree.pop("text") == "kept"
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    for new, old in zip(jax.tree.leaves(loaded), jax.tree.leaves(tree), strict=True):
        assert type(new) is type(old)
        if eqx.is_array(old):
            assert (new.dtype, new.shape) == (old.dtype, old.shape)
        np.testing.assert_array_equal(new, old)


def test_every_misfit_is_named_in_one_message(tmp_path):
    path = tmp_path / "tree.safetensors"
    weights.save(
        {
            "same": jnp.zeros(2),
            "shape": jnp.zeros((2, 3)),
            "type": jnp.zeros(4),
            "extra": {"a": jnp.zeros(1), "b": jnp.zeros(1)},
        },
        path,
    )
    template = {
        "same": jnp.zeros(2),
        "shape": jnp.zeros((3, 2)),
        "type": jnp.zeros(4, jnp.bfloat16),
        "missing": [jnp.zeros(1), jnp.zeros(1)],
    }
    message = (
        f"{path} does not fit the template:\n"
        "  missing: missing.0\n"
        "  missing: missing.1\n"
        "  extra: extra.a\n"
        "  extra: extra.b\n"
        "  differs: shape is float32[2, 3], must be float32[3, 2]\n"
        "  differs: type is float32[4], must be bfloat16[4]\n"
        "load it into the model it was saved from"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        weights.load(template, path)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "tree.safetensors"
    weights.save({"a": jnp.zeros(2)}, path)
    old = path.read_bytes()

    def broken(*_):
        raise OSError("disk full")

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, broken)
            with pytest.raises(OSError, match="disk full"):
                weights.save({"a": jnp.ones(2)}, path)
        assert path.read_bytes() == old
        assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_what_cannot_be_saved_is_refused(tmp_path):
    path = tmp_path / "tree.safetensors"
    zero = jnp.zeros(1)
    with pytest.raises(ValueError, match=re.escape("share the name 'a.b'")):
        weights.save({"a": {"b": zero}, "a.b": zero}, path)
    with pytest.raises(ValueError, match="k is a JAX key: randomness is not a weight"):
        weights.save({"k": jax.random.key(0)}, path)
    assert not path.exists()
