"""Standardised weights, by every method, against explicit gradients in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import check, draw, read
from rule_cases import ROWS, conv, convolution, curve, only_group

from cases import in_full, tuples_in_full
from switch import ON_CPU
from tanager.clipping.analysis.rounding import CANCELLATION, row_steps
from tanager.clipping.analysis.standardise import standardise
from tanager.clipping.rules.base import TapValues
from tanager.clipping.rules.groups import Method
from tanager.clipping.rules.standardised import Standardised


STANDARDISED = {
    "plain": ("same", True),
    "strided": ("valid, strides and dilations", True),
    "groups": ("groups", True),
    "depthwise": ("depthwise", True),
    "transposed": ("transposed", True),
    "several images": ("several images", True),
    "pointwise": ("pointwise", True),
    "batch groups": ("batch groups", False),
}


FEW = [
    *(("plain", False), ("strided", True), ("groups", False), ("several images", True)),
    *(("pointwise", False), ("batch groups", True)),
]
PAIRS = [*itertools.product(STANDARDISED, (False, True))]


@pytest.mark.parametrize(
    ("name", "gained"), tuples_in_full(PAIRS, *({*PAIRS} - {*FEW}))
)
def test_standardised_convolutions(name, gained):
    layer, has_gram = STANDARDISED[name]
    apply, w, x = convolution(layer)
    params = {"w": w + 0.3}
    if gained:
        params["gain"] = draw(8, (w.shape[-1],))[0]

    def loss(params, x):
        # eps so large that the variance is far from s².
        kernel = standardise(params["w"], params.get("gain"), eps=0.05)
        return curve(2.0 * apply(kernel, x))

    group = only_group(loss, params, x)
    assert group.unit.kind == "standardised"
    assert bool(group.grams()) == (has_gram and ON_CPU)
    check(loss, params, x, methods=True if name in ("plain", "groups") else "few")


@pytest.mark.cpu
@pytest.mark.parametrize("gain", [(1.1, -0.9, 1.0), (1.1, 0.0, -0.9)])
def test_a_standardised_convolution_in_float32(gain):
    apply, w, x = convolution("same")

    def loss(params, x):
        return curve(apply(standardise(params["w"], params["gain"]), x))

    params = {"w": w, "gain": np.array(gain)}
    check(loss, params, x, methods="few", dtypes=("float32",))


@pytest.mark.parametrize("gained", in_full([False, True], False))
def test_a_standardised_kernel_times_a_number(gained):
    apply, w, x = convolution("same")
    params = {"w": w + 0.3}
    if gained:
        params["gain"] = draw(11, (w.shape[-1],))[0]

    def loss(params, x):
        kernel = standardise(params["w"], params.get("gain"), eps=0.05)
        return curve(apply(-1.7 * kernel, x))

    group = only_group(loss, params, x)
    assert group.unit.kind == "standardised"
    assert bool(group.grams()) == ON_CPU and group.totals()
    check(loss, params, x, methods="few")


def test_a_standardised_dense_layer_and_a_moved_standardised_kernel():
    w, v, x = draw(9, (4, 3), (3, 3, 2, 3), (ROWS, 4, 4, 2))

    def dense(w, x):
        return curve(x[0, :2].reshape(1, 4) @ standardise(w, eps=0.05))

    def moved(v, x):
        kernel = jnp.transpose(standardise(v, eps=0.05), (3, 2, 0, 1))
        return curve(conv(x[None], kernel, ("NHWC", "OIHW", "NHWC"), (1, 1), "SAME"))

    for loss, params in ((dense, w), (moved, v)):
        assert only_group(loss, params, x).unit.kind == "standardised"
        check(loss, params, x, methods="few")


def test_a_standardised_kernel_that_is_used_twice():
    apply, w, x = convolution("same")

    def loss(w, x):
        kernel = standardise(w, eps=0.05)
        return curve(apply(kernel, x)) + curve(apply(kernel, x * x))

    check(loss, w, x, methods="few")


def test_a_leaf_that_is_standardised_and_used_directly_too():
    apply, w, x = convolution("same")

    def loss(w, x):
        return curve(apply(standardise(w, eps=0.05), x)) + curve(apply(w, x))

    check(loss, w, x, methods=True)


def test_a_gain_that_two_layers_share():
    apply, w, x = convolution("same")
    v, gain = draw(10, w.shape, (3,))

    def loss(params, x):
        w, v, gain = params
        one = apply(standardise(w, gain, eps=0.05), x)
        return curve(one + apply(standardise(v, gain, eps=0.05), x))

    check(loss, (w, v, gain), x, methods="few")


def test_a_user_function_of_the_same_name_is_not_taken_for_ours():
    @jax.jit
    def _tanager_standardise(weight, eps):
        return weight / (jnp.max(jnp.abs(weight)) + eps)

    apply, w, x = convolution("same")

    def loss(w, x):
        return curve(apply(_tanager_standardise(w, jnp.asarray(0.1, w.dtype)), x))

    assert only_group(loss, w, x).unit.kind == "general"
    check(loss, w, x, methods="few")


def seen_by_a_dense_layer():
    w, x = (jnp.asarray(each, jnp.float32) for each in draw(9, (4, 3), (ROWS, 5, 4)))
    y = x @ standardise(w)
    program, (group,) = read(lambda w, x: curve(x @ standardise(w)), w, x)
    assert isinstance(group, Standardised)
    return group, [TapValues([x], [y], [y], program.evaluate_prologue([w]))]


@pytest.mark.cpu
@pytest.mark.parametrize("part", ["_slip", "_drift"])
def test_norms_from_outputs_allow_for_a_wrong_mean_and_projection(monkeypatch, part):
    group, seen = seen_by_a_dense_layer()
    monkeypatch.setattr(Standardised, part, lambda *_: jnp.float32(jnp.inf))
    for name in group.grams():
        assert np.isinf(group.squares(name, seen, retain=False)[0]).all()


@pytest.mark.cpu
def test_norms_allow_for_every_formation_and_sums_for_cancellation(monkeypatch):
    asked = []

    def formed_again(self, gram, times):
        asked.append(times)
        return gram.squares

    monkeypatch.setattr(Standardised, "formed_again", formed_again)
    group, seen = seen_by_a_dense_layer()
    found = [(name, False, [1]) for name in group.grams()]
    for name in group.gradients():
        found += [(name, False, [2]), (name, True, [])]
    for name, retain, expected in found:
        asked.clear()
        jax.eval_shape(lambda n=name, r=retain: group.squares(n, seen, retain=r)[0])
        assert asked == expected, name
        steps = group.sum_steps(Method(name, group.totals()[0]), 64)
        assert steps > CANCELLATION * row_steps(64)
    assert len(found) > 2
