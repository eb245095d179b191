"""What the jaxprs of clipped losses hold."""

import functools

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import ALL, cast, curve, draw, read

from tanager.clipping import clipped_grad
from tanager.clipping.analysis.jaxprs import aval, every_equation


ROWS = 3


def equations(jaxpr):
    return every_equation(jaxpr.eqns)


def primitives(jaxpr):
    return [equation.primitive.name for equation in equations(jaxpr)]


@jax.custom_vjp
def marked(x):
    return jnp.tanh(x)


# No other operation of the loss, and none of tanager's, is an atan2.
marked.defvjp(
    lambda x: (jnp.tanh(x), x), lambda x, dy: (dy * jnp.arctan2(jnp.sin(x), 2.0),)
)


def network(params, x):
    y = lax.conv_general_dilated(
        x[None],
        params["kernel"],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )[0]
    y = marked(y + params["bias"][None, None])
    hidden = y.reshape(-1, 13) @ params["w"]
    heads = jnp.einsum("td,dhe->the", hidden, params["heads"])
    return curve(heads)


BATCH = 67  # Above the largest batch that is unrolled.


def network_problem():
    kernel, bias, w, heads, x = draw(
        25, (3, 3, 2, 13), (13,), (13, 17), (17, 2, 11), (BATCH, 5, 4, 2)
    )
    params = {"kernel": kernel, "bias": bias, "w": w, "heads": heads}
    return cast(params, "float32"), jnp.asarray(x, jnp.float32)


@functools.cache
def traced(strategy):
    params, x = network_problem()
    grad_fn = jax.jit(clipped_grad(network, clip_norm=1.0, strategy=strategy))
    return jax.make_jaxpr(grad_fn)(params, x).jaxpr


def sizes(jaxpr):
    return {aval(v).size for equation in equations(jaxpr) for v in equation.outvars}


def per_example_weights():
    return {
        BATCH * leaf.size
        for name, leaf in network_problem()[0].items()
        if name != "bias"
    }


def test_no_per_example_weight_gradient_exists_under_gram_strategies():
    assert not per_example_weights() & sizes(traced("bk"))


def test_per_example_weight_gradients_would_be_found():
    assert per_example_weights() <= sizes(traced("per_example"))


@pytest.mark.parametrize("strategy", ALL[1:])
def test_there_is_one_backward_pass(strategy):
    # The activation's own backward rule is the one place that has an atan2.
    assert primitives(traced(strategy)).count("atan2") == 1


def live(jaxpr):
    """Names of the primitives whose results are used; XLA drops the others."""
    wanted, names = {v for v in jaxpr.outvars if isinstance(v, jex.Var)}, []
    for equation in reversed(jaxpr.eqns):
        if not wanted & set(equation.outvars):
            continue
        wanted |= {v for v in equation.invars if isinstance(v, jex.Var)}
        inner = [getattr(j, "jaxpr", j) for j in jex.jaxprs_in_params(equation.params)]
        names += [name for one in inner for name in live(one)]
        names.append(equation.primitive.name)
    return names


def test_book_keeping_has_the_convolutions_of_a_plain_gradient():
    # One forward; images have no gradient, and norms and sums are products.
    params, x = network_problem()

    def plain(params, x):
        return jax.grad(
            lambda params: jnp.sum(jax.vmap(network, (None, 0))(params, x))
        )(params)

    count = [
        live(jaxpr).count("conv_general_dilated")
        for jaxpr in (jax.make_jaxpr(plain)(params, x).jaxpr, traced("bk"))
    ]
    assert count == [2, 1]


@pytest.mark.cpu  # elsewhere tests set a precision that the loss takes over
@pytest.mark.parametrize(
    ("strategy", "rounded"),
    [("bk", False), ("bk_mixopt", True)],
)
def test_norms_and_sums_of_different_products_are_exact_on_every_device(
    strategy, rounded
):
    # GPUs and TPUs round the operands of float32 products unless told otherwise. A
    # gradient that is kept may be rounded: its norm is of what is added.
    w, x = cast(draw(7, (3, 4), (2, 64, 3)), "float32")

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    jaxpr = jax.make_jaxpr(clipped_grad(loss, clip_norm=1.0, strategy=strategy))(w, x)
    highest = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    products = [
        equation
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    forward = [e for e in products if e.params["precision"] is None]
    assert len(forward) == (2 if rounded else 1)
    assert all(
        e.params["precision"] == highest
        for e in products
        if not any(e is one for one in forward)
    )
    if not rounded:
        # Forward, two Gram matrices, gradients for the sum.
        assert len(products) == 4


def test_of_full_batches_no_copy_with_zeros_in_is_made():
    w, x = cast(draw(7, (3, 4), (2, 3)), "float32")

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    jaxpr = jax.make_jaxpr(clipped_grad(loss, clip_norm=1.0, strategy="bk"))(w, x)
    (cond,) = (e for e in equations(jaxpr.jaxpr) if e.primitive.name == "cond")
    others, full = (primitives(one.jaxpr) for one in cond.params["branches"])
    assert others.count("select_n") == 2  # x and dy
    assert "select_n" not in full


class TwoLayers(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    count: jax.Array

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x))) * self.count.astype(x.dtype)


def test_frozen_leaves_have_no_tap_and_add_no_equations():
    one, two = jax.random.split(jax.random.key(0))
    model = TwoLayers(
        eqx.nn.Linear(4, 5, key=one), eqx.nn.Linear(5, 3, key=two), jnp.int32(2)
    )
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: m.second.weight, spec, replace=True)
    trained, frozen = eqx.partition(model, spec)
    x = jnp.asarray(draw(21, (ROWS, 4))[0], jnp.float32)

    def closed_over(trained, x):
        return curve(eqx.combine(trained, frozen)(x))

    def stopped(model, x):
        def own(leaf, train):
            stop = eqx.is_inexact_array(leaf) and not train
            return lax.stop_gradient(leaf) if stop else leaf

        return curve(jax.tree.map(own, model, spec)(x))

    program, _ = read(closed_over, trained, x)
    assert [tap.equation.primitive.name for tap in program.taps] == ["dot_general"]
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    program, _ = read(lambda a, x: stopped(eqx.combine(a, static), x), arrays, x)
    assert [tap.equation.primitive.name for tap in program.taps] == ["dot_general"]
    outs, counts = [], []
    for loss, params in ((closed_over, trained), (stopped, model)):
        grad_fn = clipped_grad(loss, clip_norm=1.0, strategy="bk")
        names = primitives(jax.make_jaxpr(grad_fn)(params, x).jaxpr)
        counts.append([names.count(n) for n in ("dot_general", "tanh", "add", "mul")])
        outs.append(grad_fn(params, x))
    assert counts[0] == counts[1]
    # One product each way forward, one for the sum of full batches and one for others:
    # none for the frozen layer but its forward; its activation is not differentiated.
    assert counts[0][:2] == [4, 1]
    assert outs[0].sum.first.weight is None
    assert outs[0].sum.count is None
    assert not np.any(outs[1].sum.first.weight)
    np.testing.assert_array_equal(outs[0].sum.second.weight, outs[1].sum.second.weight)
