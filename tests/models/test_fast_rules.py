"""Every parameter meets data where clipping has a fast rule."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from tiny_models import KEY, TINY, shapes

import tanager
from cases import in_full
from tanager.models import tuning


def taps(model, shape, trainable=None):
    """The taps of a model by `explain`, under a trace: nothing is allocated."""
    tables = []

    def loss(model, image):
        return jax.nn.logsumexp(model(image))

    def trace(model, images):
        grad_fn = tanager.clipped_grad(
            loss, clip_norm=1.0, strategy="bk", trainable=trainable
        )
        tables.append(grad_fn.explain(model, images))

    images = jax.ShapeDtypeStruct((2, *shape), jnp.float32)
    eqx.filter_eval_shape(trace, model, images)
    return tables[0].taps


def check(rows, leaves):
    """Require a fast rule for every leaf."""
    used = {number for row in rows for number in row.leaves}
    assert used == set(range(len(leaves)))
    slow = {"no fast rule", "shared parameters: gradients added before the norm"}
    for row in rows:
        assert row.why not in slow, row
        product = row.equation.startswith(("conv_general_dilated", "dot_general"))
        assert product != row.why.startswith("elementwise"), row


# The layers of three are those of nfnet, of vit and dinov3, and of bit.
@pytest.mark.parametrize("name", in_full(TINY, "nf-resnet", "dinov2", "wrn"))
def test_no_tap_is_left_to_a_slow_rule(name):
    model = shapes(name)
    # At fewer pixels than weights of a kernel, EfficientNet's sums have no fast rule.
    sides = {"lenet": (28, 28, 1), "efficientnet": (224, 224, 3)}
    shape = sides.get(name, (32, 32, 3))
    rows, leaves = taps(model, shape), jax.tree.leaves(model)
    check(rows, leaves)
    if name in ("lenet", "bit"):
        assert sorted(row.leaves for row in rows) == [(n,) for n in range(len(leaves))]
        for row in rows:
            if leaves[row.leaves[0]].ndim > 1:
                assert row.norm.endswith("gram") and row.total != "retained", row
            else:
                assert row.why == "elementwise: the gradient is small", row


AS_THESE = ("nf-resnet", "wrn", "dinov3", "convnext")


@pytest.mark.parametrize(
    "name",
    # Convolutions are as in nfnet, and linear layers as in vit.
    in_full(("nfnet", "vit", *AS_THESE), *AS_THESE),
)
def test_no_tap_of_lora_is_left_to_a_slow_rule(name):
    found = []

    def tuned(model):
        tuned, marks = tuning.fine_tune(model, "lora", key=KEY, rank=2)
        found.append(marks)
        return tuned

    model = eqx.filter_eval_shape(tuned, shapes(name))
    trained = jax.tree.leaves(eqx.filter(model, found[0]))
    rows = taps(model, (32, 32, 3), found[0])
    check(rows, trained)
    for row in rows:
        if trained[row.leaves[0]].ndim > 1:
            assert row.norm.endswith("gram") and row.total != "retained", row
