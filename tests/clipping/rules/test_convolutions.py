"""Convolutions, by every method, against explicit gradients in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import cast, check, draw, read
from rule_cases import (
    CONVOLUTIONS,
    PLANE,
    ROWS,
    conv,
    convolution,
    curve,
    only_group,
)

from cases import in_full
from tanager.clipping import clipped_grad
from tanager.clipping.analysis.layouts import convolution_by_products
from tanager.clipping.analysis.standardise import standardise
from tanager.clipping.rules.base import TapValues
from tanager.clipping.rules.convolutions import Convolution
from trees import distance


# Those that are in `make test-full` only are parts of others here, or are tested below.
MORE = [
    *("1-D, stride 2", "transposed, negative padding, groups", "odd layouts"),
    *("pointwise, strided", "patches, channels first", "patch embedding"),
    *("same", "groups", "several images", "transposed", "negative padding"),
    *("channels first", "strides that skip the last pixels"),
]


@pytest.mark.parametrize("name", in_full(CONVOLUTIONS, *MORE))
def test_convolutions(name):
    apply, w, x = convolution(name)
    group = only_group(lambda w, x: curve(apply(w, x)), w, x)
    batch_groups = name == "batch groups"
    assert group.rule.name == ("general" if batch_groups else "convolution")
    assert bool(group.grams()) != batch_groups
    check(lambda w, x: curve(apply(w, x)), w, x, methods=True)


def test_convolutions_in_float32():
    apply, w, x = convolution("groups")
    check(lambda w, x: curve(apply(w, x)), w, x, methods=True, dtypes=("float32",))


def test_which_convolutions_have_which_methods():
    offered = {}
    for name in CONVOLUTIONS:
        apply, w, x = convolution(name)
        group = only_group(lambda w, x, apply=apply: curve(apply(w, x)), w, x)
        for method in (*group.grams(), *group.gradients(), *group.totals()):
            offered.setdefault(method, []).append(name)
    assert set(offered) == {
        *("gram", "shifted gram", "patch gram"),
        *("vmap", "patches", "crossed", "gathered"),
    }
    assert all(len(names) >= 2 for names in offered.values())
    # Crossed products want a first axis of stride one.
    assert {"same", "groups", "several images"} <= set(offered["crossed"])
    others = {"pointwise", "patch embedding", "batch groups"}
    assert not others & set(offered["crossed"])


def test_convolutions_as_products_of_patches():
    """What XLA may split over devices holds these in their place (`layouts`)."""

    @jax.jit
    def both():
        found = {}
        for name in CONVOLUTIONS:
            apply, *arrays = convolution(name)
            w, x = cast(arrays, np.float32)
            (equation,) = jax.make_jaxpr(apply)(w, x[0]).eqns
            products = convolution_by_products(x[0], w, equation.params)
            found[name] = products, apply(w, x[0])
        return found

    for name, (products, expected) in both().items():
        np.testing.assert_allclose(products, expected, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "name", in_full(["same", "groups", "several images"], "groups", "several images")
)
def test_gradients_that_are_formed_a_few_examples_at_a_time(name, monkeypatch):
    monkeypatch.setattr(Convolution, "chunk", lambda self, method, rows: 2)
    apply, w, x = convolution(name, rows=5)
    check(lambda w, x: curve(apply(w, x)), w, x, methods=True)


@pytest.mark.parametrize(
    "name", in_full(["same", "groups", "asymmetric padding"], "groups")
)
def test_norms_whose_gradients_are_dropped_group_by_group(name, monkeypatch):
    monkeypatch.setattr(Convolution, "chunk", lambda self, method, rows: 2)
    apply, w, x = convolution(name, rows=5)
    with jax.enable_x64(True):
        w, x = jnp.asarray(w), jnp.asarray(x)
        shape = jax.eval_shape(jax.vmap(apply, (None, 0)), w, x).shape
        dy = jnp.asarray(draw(2, shape)[0])
        program, (group,) = read(lambda w, x: curve(apply(w, x)), w, x)
        one = jax.grad(lambda w, x, dy: jnp.sum(apply(w, x) * dy))
        assert {"patches", "crossed"} <= set(group.gradients())

        def squared(method, w, x, dy):
            seen = [TapValues([x], [dy], [dy], program.evaluate_prologue([w]))]
            squares, held = group.squares(method, seen, retain=False)
            assert held.gradients is None
            return squares

        @jax.jit
        def every(*given):
            wanted = jax.vmap(one, (None, 0, 0))(*given)
            return wanted, [squared(method, *given) for method in group.gradients()]

        wanted, found = every(w, x, dy)
        expected = np.sum(np.square(wanted).reshape(5, -1), axis=1)
        for squares in found:
            np.testing.assert_allclose(squares, expected, rtol=1e-10)


@pytest.mark.cpu
def test_groups_keep_copies_in_the_cache_and_programs_short():
    w, x = draw(1, (3, 3, 64, 64), (ROWS, 32, 32, 64))

    def loss(w, x):
        return curve(conv(x[None], w, PLANE, (1, 1), "SAME"))

    rule = only_group(loss, w, x).rule
    assert isinstance(rule, Convolution)
    copied = {name: rule.copied(name) for name in rule.gradients()}
    assert copied == {"vmap": 0, "patches": 9 * 2**16, "crossed": 6 * 2**16}
    assert rule.chunk("vmap", 16) == 16
    assert rule.chunk("patches", 16) * 4 * copied["patches"] <= 4e6
    assert rule.chunk("crossed", 16) == 1
    for name in ("patches", "crossed"):
        for rows in (1, 63, 64, 65, 1000):
            assert -(-rows // rule.chunk(name, rows)) <= 64


def test_large_patches_side_by_side_are_formed_without_a_slice_for_each_pixel():
    w, x = draw(1, (12, 12, 2, 3), (ROWS, 25, 24, 2))

    def patches(stride):
        def loss(w, x):
            return curve(conv(x[None], w, PLANE, (stride, stride), "VALID"))

        return loss

    assert "patches" not in only_group(patches(11), w, x).gradients()
    rule = only_group(patches(12), w, x).rule
    assert isinstance(rule, Convolution)
    assert "patches" in rule.gradients()
    assert "slice" not in str(jax.make_jaxpr(rule.patches)(x[:, None, :24, :, None]))
    check(patches(12), w, x, methods=True)


def test_a_kernel_that_is_made_of_moved_and_scaled_entries():
    w, x = draw(2, (2, 3, 9), (ROWS, 4, 4, 2))

    def loss(w, x):
        kernel = 0.5 * jnp.transpose(w.reshape(2, 3, 3, 3), (3, 2, 0, 1))
        return curve(conv(x[None], kernel[::-1], PLANE, (1, 1), "SAME"))

    assert only_group(loss, w, x).grams()
    check(loss, w, x, methods=True)


def test_an_image_that_is_a_parameter():
    # The parameter is convolved with the example: the general rule.
    w, x = draw(3, (1, 5, 5, 2), (ROWS, 3, 3, 2, 2))
    check(lambda w, x: curve(conv(w, x, PLANE, (1, 1), "SAME")), w, x, methods=True)


@pytest.mark.parametrize(
    ("backend", "precision", "dtype", "exact"),
    [
        ("cpu", None, "float32", True),
        ("cpu", None, "bfloat16", False),
        ("gpu", None, "float32", False),
        ("gpu", "highest", "float32", True),
        ("gpu", "highest", "bfloat16", False),
    ],
)
def test_whether_outputs_are_exact(monkeypatch, backend, precision, dtype, exact):
    apply, w, x = convolution("same")
    w, x = cast((w, x), np.float32)

    def loss(w, x):
        return curve(apply(standardise(w).astype(dtype), x.astype(dtype)))

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with jax.default_matmul_precision(precision):
        rule = only_group(loss, w, x).rule
    assert isinstance(rule, Convolution)
    assert rule.exact == exact


@pytest.mark.parametrize("name", in_full(("transposed", "same"), "same"))
def test_bfloat16_in_a_program_of_the_users(name):
    """XLA on a CPU multiplies few layouts of bfloat16, unless its options are set."""
    apply, w, x = convolution(name)

    def loss(w, x):
        low = (leaf.astype(jnp.bfloat16) for leaf in (w, x))
        return jnp.mean(apply(*low).astype(jnp.float32) ** 2)

    w, x = (jnp.asarray(leaf, jnp.float32) for leaf in (w, x))
    found = [
        jax.jit(clipped_grad(loss, clip_norm=0.1, strategy=strategy))(w, x)
        for strategy in ("ghost", "per_example")
    ]
    ghost, expected = (np.asarray(each.sum) for each in found)
    assert distance(ghost, expected) < 2**-5 * np.linalg.norm(expected)
