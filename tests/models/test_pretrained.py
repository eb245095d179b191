import functools
import json
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from references.parity import random
from safetensors import numpy as safetensors

from tanager import models
from tanager.models import low_rank, weights
from tanager.models.foreign import tables
from tanager.models.foreign.layouts import SAME, Foreign
from tanager.models.published import timm_architecture
from tanager.models.tensors import read_tensors
from tanager.models.vit import Variant, VisionTransformer


FORMATS = ("tanager", "timm", "huggingface", "huggingface-backbone")


def made(seed, build):
    """Return a model whose every number depends on the seed."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf + np.float32(seed)), random(build)
    )


@functools.cache
def vit(seed=0, *, classes=5, shape=(8, 8, 3), width=12):
    variant = Variant(width=width, depth=2, heads=3)
    key = jax.random.key(0)
    return made(seed, lambda: VisionTransformer(variant, 4, classes, shape, key=key))


@functools.cache
def cnn(seed=0, classes=5):
    key = jax.random.key(0)
    return made(seed, lambda: models.SmallCNN(classes, (8, 8, 3), key=key))


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a model in a format, with changed tensors."""

    def write(model, format="timm", change=lambda tensors: tensors):
        path = tmp_path / f"{format}.safetensors"
        models.save_weights(model, path, format=format)
        tensors = change(read_tensors(path))
        path.write_bytes(safetensors.save(tensors))
        return path

    return write


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_recognised_and_comes_back_bit_for_bit(file, format):
    path = file(vit(0), format)
    loaded, origin = models.load_weights(vit(1), path)
    assert eqx.tree_equal(loaded, vit(0))
    assert origin["format"] == format
    assert origin["weights"] == path.name
    assert origin["changes"] == []
    assert len(origin["sha256"]) == 64


def test_formats_are_those_of_the_architecture():
    assert models.formats(vit()) == FORMATS
    assert models.formats(cnn()) == ("tanager",)
    with pytest.raises(ValueError, match=r"format.*must be one of tanager"):
        models.save_weights(cnn(), "never.safetensors", format="timm")


def test_an_npz_file_loads_by_the_same_tables(tmp_path, monkeypatch):
    def google(model):
        names = weights.named_tensors(model)
        return {ours: Foreign((f"resnet/{ours}",), SAME) for ours in names}

    forms = {models.SmallCNN: {"google": tables.Format(google)}}
    monkeypatch.setattr("tanager.models.pretrained.FORMATS", forms)
    named = weights.named_tensors(cnn(0))
    np.savez(tmp_path / "m.npz", **{f"resnet/{k}": v for k, v in named.items()})
    loaded, origin = models.load_weights(cnn(1), tmp_path / "m.npz")
    assert origin["format"] == "google"
    assert eqx.tree_equal(loaded, cnn(0))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float64])
def test_other_precisions_become_float32(file, dtype):
    narrow = file(
        vit(0), "timm", lambda old: {k: v.astype(dtype) for k, v in old.items()}
    )
    loaded, origin = models.load_weights(vit(1), narrow)
    for name, leaf in weights.named_tensors(loaded).items():
        assert leaf.dtype == jnp.float32
        exact = weights.named_tensors(vit(0))[name]
        np.testing.assert_array_equal(
            leaf, np.asarray(exact).astype(dtype).astype(np.float32)
        )
    count = len(jax.tree.leaves(loaded))
    assert origin["changes"] == [f"{count} tensors cast from {np.dtype(dtype)}"]


def test_a_head_of_other_classes_is_refused_with_the_remedy(file):
    path = file(vit(0, classes=7))
    message = (
        f"weights (={str(path)!r}), read as timm, do not fit this VisionTransformer:\n"
        "  differs: head.weight is [7, 12], must be [5, 12]\n"
        "  differs: head.bias is [7], must be [5]\n"
        "give head='fresh' or head='zero' for a head of your own classes, or create "
        "the model with the classes of the weights"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        models.load_weights(vit(), path)


@pytest.mark.parametrize(
    ("format", "head"), [("huggingface", "fresh"), ("timm", "zero")]
)
def test_a_head_of_your_own(file, format, head):
    path = file(vit(0, classes=7), format)
    mine = vit(1)
    loaded, origin = models.load_weights(mine, path, head=head)
    expected = eqx.tree_at(
        lambda model: model.head,
        vit(0),
        mine.head if head == "fresh" else jax.tree.map(jnp.zeros_like, mine.head),
    )
    assert eqx.tree_equal(loaded, expected)
    assert origin["changes"] == [
        "head as created" if head == "fresh" else "head set to zero"
    ]


def test_a_file_without_a_head(file):
    def drop(tensors):
        return {k: v for k, v in tensors.items() if not k.startswith("head.")}

    path = file(vit(0), "timm", drop)
    with pytest.raises(
        ValueError, match=r"missing: head\.weight\n  missing: head\.bias"
    ):
        models.load_weights(vit(1), path)
    loaded = models.load_weights(vit(1), path, head="fresh").model
    assert eqx.tree_equal(loaded.head, vit(1).head)
    assert eqx.tree_equal(loaded.blocks, vit(0).blocks)


def test_the_unused_pooler_of_transformers_is_put_on_record(file):
    def add(tensors):
        return tensors | {"pooler.dense.bias": np.ones(12, np.float32)}

    path = file(vit(0), "huggingface-backbone", add)
    loaded, origin = models.load_weights(vit(1), path)
    assert eqx.tree_equal(loaded, vit(0))
    assert origin["changes"] == ["pooler.dense.bias left out: no logit depends on it"]


@pytest.mark.parametrize(
    "prefix", ["module.", "_module.", "_orig_mod._module.", "model.", "backbone.model."]
)
def test_prefixes_of_wrappers_are_left_out(file, prefix):
    def wrap(tensors):
        return {prefix + name: tensor for name, tensor in tensors.items()}

    loaded, origin = models.load_weights(vit(1), file(vit(0), "timm", wrap))
    assert eqx.tree_equal(loaded, vit(0))
    leaves = len(jax.tree.leaves(vit()))
    changed = f"{leaves} tensors named without the prefixes of wrappers"
    assert origin["changes"] == [changed]


def test_a_prefix_of_all_but_the_head(file):
    def wrap(tensors):
        return {
            name if name.startswith("head.") else f"backbone.{name}": tensor
            for name, tensor in tensors.items()
        }

    path = file(vit(0, classes=7), "timm", wrap)
    loaded, origin = models.load_weights(vit(1), path, head="fresh")
    assert eqx.tree_equal(loaded.blocks, vit(0).blocks)
    assert origin["changes"][0].startswith(f"{len(jax.tree.leaves(vit())) - 2} tensors")


def test_names_that_are_one_without_prefixes_are_refused(file):
    def twice(tensors):
        return {
            prefix + name: tensor
            for prefix in ("model.", "module.")
            for name, tensor in tensors.items()
        }

    with pytest.raises(ValueError, match=r"are one name without prefixes: leave one o"):
        models.load_weights(vit(1), file(vit(0), "timm", twice))


def test_a_model_of_ones_own_may_have_such_a_name(file):
    own = {"model": {"a": jnp.ones(2)}, "a": jnp.zeros(2)}
    path = file(own, "tanager")
    loaded, origin = models.load_weights(jax.tree.map(jnp.ones_like, own), path)
    assert eqx.tree_equal(loaded, own)
    assert origin["changes"] == []


def test_integers_take_one_line(file):
    def quantise(tensors):
        return {k: v.astype(np.int8) for k, v in tensors.items()}

    path = file(vit(0), "timm", quantise)
    with pytest.raises(ValueError, match="read as timm, do not fit") as refused:
        models.load_weights(vit(1), path)
    more = len(jax.tree.leaves(vit())) - 1
    assert str(refused.value).splitlines()[1:] == [
        f"  other numbers: patch_embed.proj.weight and {more} more are int8, "
        "must be float32",
        "take the float32, float16 or bfloat16 weights of the same model",
    ]


def test_a_network_with_batch_norm_is_named(file):
    def normed(tensors):
        extra = {f"bn{n}.running_var": np.ones(2, np.float32) for n in range(9)}
        return tensors | extra

    with pytest.raises(ValueError, match="of a network with batch norm, which mixes"):
        models.load_weights(vit(1), file(vit(0), "timm", normed))


def test_every_misfit_is_named(file):
    def spoil(tensors):
        tensors = dict(tensors)
        del tensors["norm.weight"]
        tensors["blocks.0.mlp.fc1.weight"] = np.zeros((3, 12), np.float32)
        tensors["blocks.1.norm1.bias"] = np.zeros(12, np.int32)
        tensors["cls_token"] = np.full((1, 1, 12), np.inf, np.float32)
        return tensors | {"fc_norm.weight": np.zeros(12, np.float32)}

    path = file(vit(), "timm", spoil)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="read as timm, do not fit") as refused:
        models.load_weights(vit(), path)
    assert str(refused.value).splitlines()[1:] == [
        "  not finite: cls_token",
        "  differs: blocks.0.mlp.fc1.weight is [3, 12], must be [48, 12]",
        "  missing: norm.weight",
        "  other numbers: blocks.1.norm1.bias is int32, must be float32",
        "  extra: fc_norm.weight",
        "create the model these weights are of, by its name, size and channels",
    ]
    assert path.read_bytes() == before
    lora = low_rank.with_low_rank(vit(), 2, 2.0, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"missing: .*, which the other library does"):
        models.load_weights(lora, file(vit(), "timm"))


def test_weights_of_another_model_are_refused(file):
    with pytest.raises(ValueError, match="hold no tensor of this SmallCNN, under the"):
        models.load_weights(cnn(), file(vit(), "huggingface"))
    with pytest.raises(ValueError, match="missing: stages") as error:
        models.load_weights(cnn(), file(vit()))  # only their heads share a name
    leaves = len(jax.tree.leaves(vit()))
    assert len(re.findall(r"extra: .*\.", str(error.value))) == 4
    assert f"extra: {leaves - 2 - 4} more" in str(error.value)
    with pytest.raises(ValueError, match=r"differs: patch_embed\.proj\.w") as error:
        models.load_weights(vit(width=24), file(vit()))
    assert f"differs: {leaves - 1 - 4} more" in str(error.value)  # but head.bias
    assert len(str(error.value).splitlines()) == 7


def test_a_damaged_number_has_its_own_remedy(file):
    def spoil(tensors):
        return tensors | {"norm.bias": np.full(12, np.nan, np.float32)}

    with pytest.raises(
        ValueError, match=r"not finite: norm\.bias\nthe file is damaged"
    ):
        models.load_weights(vit(), file(vit(), "timm", spoil))


def test_positions_of_no_square_are_refused(file):
    path = file(vit(shape=(8, 16, 3)))
    with pytest.raises(
        ValueError, match="differs: pos_embed: 8 patches are not a square grid"
    ):
        models.load_weights(vit(shape=(12, 12, 3)), path)
    # As many patches in another order of rows cannot be told apart: as in timm.
    assert models.load_weights(vit(shape=(16, 8, 3)), path).origin["changes"] == []


def test_shapes_are_model_enough_but_not_for_a_head_of_its_own(file):
    path = file(vit(0))
    template = eqx.filter_eval_shape(vit)
    assert eqx.tree_equal(models.load_weights(template, path).model, vit(0))
    with pytest.raises(ValueError, match="has a head of shapes without values"):
        models.load_weights(template, path, head="fresh")
    with pytest.raises(ValueError, match=r"dict.*has no head"):
        models.load_weights({"a": jnp.zeros(1)}, path, head="zero")
    with pytest.raises(ValueError, match=re.escape("must be one of load, fresh, zero")):
        models.load_weights(vit(), path, head="new")


def test_a_folder_stands_for_its_model_file_but_a_run_does_not(tmp_path):
    models.save_weights(cnn(0), tmp_path / "model.safetensors")
    loaded, origin = models.load_weights(cnn(1), tmp_path)
    assert eqx.tree_equal(loaded, cnn(0))
    assert origin["weights"] == "model.safetensors"
    (tmp_path / "ledger.jsonl").touch()
    with pytest.raises(ValueError, match="is the folder of a run: name model"):
        models.load_weights(cnn(1), tmp_path)


def test_a_table_that_refuses_the_model_leaves_the_other_formats(file, monkeypatch):
    def refuse(model):
        raise ValueError("gain (=2) must be 1")

    own = file(cnn(0), "tanager")
    other = file(vit(), "timm")
    forms = {models.SmallCNN: {"timm": tables.Format(refuse)}}
    monkeypatch.setattr("tanager.models.pretrained.FORMATS", forms)
    assert eqx.tree_equal(models.load_weights(cnn(1), own).model, cnn(0))
    with pytest.raises(ValueError, match=re.escape("not read as timm: gain (=2) must")):
        models.load_weights(cnn(1), other)


@pytest.mark.parametrize("option", [{"mirror": True}, {"head_input": "norm"}], ids=str)
def test_other_formats_do_not_lose_what_a_head_sees(tmp_path, option):
    model = random(
        lambda: models.create(
            "vit-tiny-16",
            classes=2,
            image_shape=(16, 16, 3),
            key=jax.random.key(0),
            **option,
        )
    )
    with pytest.raises(ValueError, match="cannot hold mirror or head_input"):
        models.save_weights(model, tmp_path / "theirs", format="timm")
    models.save_weights(model, tmp_path / "ours")
    assert not (tmp_path / "theirs").exists()


def test_published_weights_are_what_timm_says_of_them():
    """references/make_published.py asked timm."""
    reference = Path(__file__).parent / "references/published.json"
    known = json.loads(reference.read_text())["weights"]
    for name, entries in models.PUBLISHED.items():
        architectures = set()
        for entry in entries:
            theirs = known[entry.weights.removeprefix("hf:")]
            assert entry.classes == theirs["num_classes"], entry
            assert theirs["input_size"] == [3, entry.image_size, entry.image_size]
            assert [list(entry.mean), list(entry.std)] == [
                theirs["mean"],
                theirs["std"],
            ]
            assert entry.licence == theirs["license"]
            architectures.add(theirs["architecture"])
        assert architectures == {timm_architecture(name)}
