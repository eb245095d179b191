import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from references import parity

from switch import FULL
from tanager import models
from tanager.models import layers
from tanager.models.counted import COUNTED


FILES = ("bit", "vit", "convnext", "dino")
REFERENCES = {name: one for file in FILES for name, one in parity.read(file).items()}


def test_parameters_are_counted_from_arrays_or_shapes():
    tree = {"a": jnp.zeros((2, 3)), "b": (jnp.zeros(()), "text", 7)}
    assert models.count_parameters(tree) == 7
    assert models.count_parameters(jax.eval_shape(lambda: jnp.zeros((2, 3)))) == 6


# To trace the others takes seconds, and their blocks are those of these.
TRACED = ("bit-50x1", "vit-tiny-16", "convnext-tiny")
TRACED += ("dinov2-small-reg4", "dinov3-small")


@pytest.mark.parametrize("name", REFERENCES if FULL else TRACED)
def test_flops_are_those_that_pytorch_counts(name):
    """Of timm's models of 1000 classes at 224 pixels, by torch's FlopCounterMode."""
    entry = models.find(name)
    assert (entry.image_shape, entry.classes) == ((224, 224, 3), 1000)
    model, unseen = parity.named(name, classes=1000), 0
    if getattr(model, "positions", None) is not None:
        # timm takes all tokens through the last block, of which the head sees one.
        tokens, width = model.positions.shape
        registers = getattr(model, "registers", None)
        others = tokens - 1 if registers is None else tokens + registers.shape[0]
        block = model.blocks[-1]
        mlp = block.expand.weight.size + block.contract.weight.size
        unseen = 2 * others * (2 * (others + 1) * width + width**2 + mlp)
    flops = models.count_flops(model, (224, 224, 3))
    assert flops == REFERENCES[name]["flops"] - unseen


TABLED = ("small-cnn", "wrn-16-4", "scattering-linear", "scattering-cnn")
TABLED += ("dead-leaves-linear", "lenet", "mlp", "linear")


def test_the_table_of_counts_has_every_model():
    assert list(COUNTED) == list(models.ENTRIES)


@pytest.mark.parametrize("name", models.ENTRIES if FULL else TABLED)
def test_the_table_of_counts_is_what_tracing_finds(name):
    entry = models.ENTRIES[name]
    model = parity.named(name, entry.image_shape, entry.classes)
    found = models.count_parameters(model), models.count_flops(model, entry.image_shape)
    assert COUNTED[name] == found


# Millions, and the classes of the head that the paper counts.
_TABLE_1 = {
    "vit-tiny-16": (5.7, 1000),
    "vit-small-16": (22.1, 1000),
    "vit-base-16": (86.6, 1000),
    "vit-large-16": (304.3, 1000),
    "vit-huge-14": (630.8, 0),
    "bit-50x1": (23.7, 100),
    "bit-101x1": (42.7, 100),
    "bit-50x3": (211.8, 100),
    "bit-101x3": (382.4, 100),
    "bit-152x4": (929.2, 100),
}
_HEAD_INPUTS = {"huge-14": 1280, "50x1": 2048, "101x1": 2048, "152x4": 8192}
_HEAD_INPUTS |= {"50x3": 6144, "101x3": 6144}


@pytest.mark.parametrize("name", _TABLE_1)
def test_sizes_are_those_of_the_efficiency_papers_table_1(name):
    millions, classes = _TABLE_1[name]
    fewer = models.find(name).classes - classes
    rows = fewer * (1 + _HEAD_INPUTS[name.partition("-")[2]]) if fewer else 0
    assert round((COUNTED[name][0] - rows) / 1e6, 1) == millions


def test_a_convolution_counts_two_for_each_weight_and_position():
    conv = layers.Conv(3, 5, 3, stride=2, bias=True, key=jax.random.key(0))
    assert models.count_flops(conv, (8, 10, 3)) == 2 * (4 * 5) * (3 * 3 * 3 * 5)


def _loop(body, turns=7):
    return lambda x: lax.fori_loop(0, turns, body, x)


def grouped(x):
    kernel = jnp.ones((3, 3, 2, 8))
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x[None],
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=numbers,
        feature_group_count=2,
    )


SQUARE = jnp.ones((4, 4))
PROGRAMS = {
    "batched product": (lambda x: jnp.einsum("hij,hjk->hik", x, x), 2 * 4 * 4**3),
    "groups see their own channels": (grouped, 2 * 16 * 9 * 2 * 8),
    "calls": (jax.jit(jax.checkpoint(lambda x: SQUARE @ jnp.tanh(x[0]))), 2 * 4**3),
    "every turn of a loop": (_loop(lambda _, x: x @ SQUARE), 7 * 2 * 4 * 4**3),
    "the dearer branch": (
        lambda x: lax.cond(x[0, 0, 0] > 0, lambda: x @ SQUARE, lambda: x),
        2 * 4 * 4**3,
    ),
    "nothing else": (lambda x: jnp.tanh(x) * x + jnp.sum(x), 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_product_is_counted_as_often_as_it_runs(name):
    program, flops = PROGRAMS[name]
    assert models.count_flops(program, (4, 4, 4)) == flops


def test_a_loop_without_a_known_end_is_refused():
    def program(x):
        return lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x @ SQUARE, x)

    with pytest.raises(ValueError, match=re.escape("use scan, or fori_loop with")):
        models.count_flops(program, (4, 4))
