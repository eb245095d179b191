"""Losses of every structure against the oracle, and what their jaxprs hold."""

import functools

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from oracle import ALL, cast, check, clip, curve, distinct, draw, gradients, read

from cases import in_full
from switch import FULL
from tanager.clipping import clipped_grad
from tanager.clipping.analysis.dtypes import widen
from tanager.clipping.analysis.jaxprs import aval, every_equation
from tanager.clipping.rules.groups import Joint, Single


ROWS = 3


def kinds(loss, params, batch):
    return [type(group) for group in read(loss, params, batch)[1]]


# Shared parameters


def test_a_layer_that_is_applied_three_times():
    w, x = draw(0, (4, 4), (ROWS, 4))

    def loss(w, x):
        for _ in range(3):
            x = jnp.tanh(w @ x)
        return curve(x)

    assert kinds(loss, w, x) == [Single]
    check(loss, w, x, methods=True)


def test_an_embedding_tied_to_the_output_head():
    table, w = draw(1, (7, 4), (4, 4))
    tokens = np.random.default_rng(1).integers(0, 7, (ROWS, 5))

    def loss(params, tokens):
        hidden = jnp.tanh(params["table"][tokens] @ params["w"])
        return curve(hidden @ params["table"].T)

    params = {"table": table, "w": w}
    assert sorted(kinds(loss, params, tokens), key=str) == [Joint, Single]
    check(loss, params, tokens, methods=True)


def by_split(w, x):
    return [x @ part for part in jnp.split(w, 3, axis=1)]


def by_slices(w, x):
    return [x @ w[:, :4], x @ w[:, 4:8], x @ w[:, 8:]]


def by_moved_slices(w, x):
    heads = w.reshape(4, 3, 4).transpose(1, 0, 2)
    return [x @ heads[0], x @ heads[1], x @ heads[2]]


def by_strided_slices(w, x):
    return [x @ w[:, 0:6:2], x @ w[:, 6::2]]


@pytest.mark.parametrize(
    "parts",
    in_full([by_split, by_slices, by_moved_slices, by_strided_slices], by_slices),
)
def test_disjoint_parts_of_a_matrix_stay_apart(parts):
    w, x = draw(2, (4, 12), (ROWS, 5, 4))

    def loss(w, x):
        query, key, *value = parts(w, x)
        attention = jax.nn.softmax(query @ key.T)
        return curve(attention @ (value[0] if value else x))

    found = read(loss, w, x)[1]
    assert {type(group) for group in found} == {Single}
    assert all(group.grams() for group in found)
    check(loss, w, x, methods=True)


def overlapping(w, x):
    return x @ w[:, :5] + x @ w[:, 4:9]


def interleaved(w, x):
    return x @ w[:, 0:8:2] + x @ w[:, 1:8:2]


def sliced_differently(w, x):
    return x @ w[:, :4] + x @ w.T[:4].T


def whole_and_part(w, x):
    return jnp.sum(x @ w, axis=1, keepdims=True) + x @ w[:, 2:6]


def part_of_a_part(w, x):
    return x @ w[:, :6][:, :4] + x @ w[:, :6][:, 2:6]


MEET = [overlapping, sliced_differently, whole_and_part, interleaved, part_of_a_part]


@pytest.mark.parametrize("meet", in_full(MEET, interleaved, part_of_a_part))
def test_cross_terms_of_parts_that_may_overlap(meet):
    w, x = draw(3, (4, 12), (ROWS, 5, 4))

    def loss(w, x):
        return curve(meet(w, x))

    assert kinds(loss, w, x) == [Joint]
    check(loss, w, x, methods=True)


# Parameters that reach the loss without data


def test_regularisers_are_part_of_every_examples_gradient():
    w, b, x = draw(4, (4, 3), (3,), (ROWS, 4))

    def loss(params, x):
        data = curve(x @ params["w"] + params["b"])
        return data + 0.3 * sum(jnp.sum(p**2) for p in params.values())

    check(loss, {"w": w, "b": b}, x, strategies=ALL)


def test_a_loss_that_no_example_reaches():
    w, x = draw(5, (4, 3), (ROWS, 2))
    check(lambda w, x: curve(w), w, x, strategies=ALL)


def test_a_leaf_that_is_not_used_has_a_zero_sum_and_no_tap():
    w, v, x = draw(6, (4, 3), (5,), (ROWS, 4))

    def loss(params, x):
        return curve(x @ params["w"])

    params = {"unused": v, "w": w}
    program, _ = read(loss, params, x)
    assert [unit.leaves for unit in program.units] == [(1,)]
    check(loss, params, x, strategies=ALL)
    out = clipped_grad(loss, clip_norm=1.0)(cast(params, "float32"), cast(x, "float32"))
    assert out.sum["unused"].shape == (5,)
    assert not np.any(out.sum["unused"])


# Calls


def attacked(p, x):
    slope = jax.grad(lambda x: curve(jnp.tanh(x @ p["v"]) @ p["w"]))(x)
    return curve(jnp.tanh(lax.stop_gradient(x + jnp.sign(slope)) @ p["v"]) @ p["w"])


def without_stop(p, x):
    slope = jax.grad(lambda x: curve(jnp.tanh(x @ p["v"]) @ p["w"]))(x)
    return curve(jnp.tanh((x + jnp.sign(slope)) @ p["v"]) @ p["w"])


def rounded_target(p, x):
    target = jnp.round(x @ p["v"]) + lax.stop_gradient(x @ p["v"])
    return curve((jnp.tanh(x @ p["v"]) - target) @ p["w"])


@pytest.mark.parametrize("loss", [attacked, without_stop, rounded_target])
def test_uses_that_no_gradient_reaches_do_not_count_as_shared(loss):
    v, w, x = draw(11, (4, 5), (5, 3), (ROWS, 4))
    assert kinds(loss, {"v": v, "w": w}, x) == [Single, Single]
    check(loss, {"v": v, "w": w}, x, methods=True)


def test_a_leaf_whose_every_use_is_stopped():
    v, w, x = draw(11, (4, 5), (4, 3), (ROWS, 4))

    def loss(p, x):
        return curve(x @ p["w"]) * jnp.sum(lax.stop_gradient(x @ p["v"]))

    def stopped(p, x):
        return lax.stop_gradient(loss(p, x))

    assert kinds(loss, {"v": v, "w": w}, x) == [Single]
    check(loss, {"v": v, "w": w}, x, methods=True)
    found = clipped_grad(stopped, clip_norm=1.0)({"v": v, "w": w}, x)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((found.sum, found.norms)))


def test_calls_within_calls():
    w, v, x = draw(7, (4, 4), (4, 4), (ROWS, 4))

    @jax.jit
    def layer(w, x):
        return jax.jit(jnp.tanh)(w @ x)

    @jax.checkpoint
    def block(params, x):
        return layer(params[1], layer(params[0], x))

    def loss(params, x):
        kept = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
        return curve(jax.jit(kept)(params, x))

    assert kinds(loss, (w, v), x) == [Single, Single]
    check(loss, (w, v), x, methods=True)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, dy: (2.0 * dy,))


@jax.custom_jvp
def steep(x):
    return jnp.tanh(x)


@steep.defjvp
def _(primals, tangents):
    return jnp.tanh(primals[0]), 3.0 * tangents[0]


def test_own_derivative_rules_without_parameters_are_respected():
    w, v, x = draw(8, (4, 4), (4, 4), (ROWS, 4))

    def loss(params, x):
        hidden = straight_through(3.0 * (params[0] @ x))
        return curve(steep(params[1] @ hidden))

    assert kinds(loss, (w, v), x) == [Single, Single]
    expected = check(loss, (w, v), x)
    assert np.all(expected.norms[[0, 2]] > 0)


@jax.custom_vjp
def scaled_product(w, x):
    return w @ x


scaled_product.defvjp(
    lambda w, x: (w @ x, (w, x)),
    lambda kept, dy: (
        5.0 * jnp.outer(dy, kept[1]) + jnp.sum(dy) * kept[0],
        kept[0].T @ dy,
    ),
)


@jax.custom_jvp
def odd_product(w, x):
    return w @ x


@odd_product.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return w @ x, 7.0 * (dw @ x) + w @ dx


@pytest.mark.parametrize("apply", [scaled_product, odd_product])
def test_own_derivative_rules_with_parameters_are_respected(apply):
    w, v, x = draw(9, (4, 4), (4, 4), (ROWS, 4))

    def loss(params, x):
        return curve(jax.jit(apply)(params[0], jnp.tanh(params[1] @ x)))

    check(loss, (w, v), x, methods=True)


def test_own_derivative_rules_of_parameters_alone_are_respected():
    w, x = draw(10, (4, 4), (ROWS, 4))
    check(
        lambda w, x: curve(steep(straight_through(2.0 * w)) @ x),
        w,
        x,
        methods=True,
    )


# Loops and branches


def test_a_scan_over_parameters_alone_and_one_over_data_alone():
    w, x = draw(13, (3, 4, 4), (ROWS, 5, 4))

    def loss(w, x):
        product, _ = lax.scan(
            lambda p, one: (p @ one, None), jnp.eye(4, dtype=x.dtype), w
        )
        total, _ = lax.scan(lambda s, one: (jnp.sin(s) + one, None), x[0], x)
        return curve(product @ total)

    check(loss, w, x, methods=True)


def test_branches_with_parameters():
    w, v, x = draw(14, (4, 4), (4, 4), (ROWS, 4))

    def loss(params, x):
        w, v = params
        first = lax.cond(x[0] > 0, lambda x: w @ x, lambda x: jnp.sin(v @ x), x)
        number = jnp.where(x[1] > 0, 2, 0) + jnp.where(x[2] > 0, 1, 0)
        branches = [lambda x, k=k: (1.0 + k) * (v @ x) for k in range(4)]
        return curve(lax.switch(number, branches, first))

    check(loss, (w, v), x, strategies=("bk", "auto"))


def test_branches_on_parameters():
    w, x = draw(15, (4, 4), (ROWS, 4))

    def loss(w, x):
        return curve(lax.cond(w[0, 0] > 0, lambda: w, lambda: 2.0 * w.T) @ x)

    check(loss, w, x, methods=True)


def test_a_while_loop_with_parameters_is_refused_by_name():
    w, x = draw(17, (4, 4), (ROWS, 4))

    def loss(w, x):
        return curve(
            lax.while_loop(lambda x: jnp.sum(x**2) > 1.0, lambda x: 0.1 * (w @ x), x)
        )

    with pytest.raises(ValueError, match="while_loop with parameters inside"):
        clipped_grad(loss, clip_norm=1.0, strategy="bk")(
            cast(w, "float32"), cast(x, "float32")
        )


def test_a_while_loop_over_data_alone():
    w, x = draw(18, (4, 4), (ROWS, 4))

    def loss(w, x):
        smaller = lax.while_loop(lambda x: jnp.sum(x**2) > 1.0, lambda x: 0.5 * x, x)
        return curve(w @ smaller)

    check(loss, w, x, mask=[True] * ROWS)


def test_views_inside_one_example():
    w, b, v, x = draw(19, (3, 3, 2, 4), (4,), (4, 3), (ROWS, 2, 4, 4, 2))

    def one(params, view):
        y = lax.conv_general_dilated(
            view[None],
            params["w"],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )[0]
        hidden = jnp.mean(jnp.tanh(y + params["b"][None, None]), axis=(0, 1))
        return curve(hidden @ params["v"])

    def loss(params, views):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(params, views))

    params = {"w": w, "b": b, "v": v}
    found = read(loss, params, x)[1]
    assert [group.rule.name for group in found if group.grams()] == [
        "convolution",
        "dot",
    ]
    check(loss, params, x, strategies=("auto",), methods="few")


# What is not trained


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


# Precision


def clipped(loss, clip_norm, params, x, strategies=ALL):
    names = distinct(loss, params, x, strategies)
    made = {n: clipped_grad(loss, clip_norm=clip_norm, strategy=n) for n in names}
    every = jax.jit(lambda *given: {n: each(*given) for n, each in made.items()})
    return every(params, x)


@pytest.mark.parametrize("params_too", [False, True])
def test_bfloat16_against_the_exact_gradient_of_the_same_numbers(params_too):
    w, b, v, x = draw(22, (8, 6), (6,), (6, 4), (ROWS, 5, 8), scale=0.5)
    params, x = cast(({"w": w, "b": b, "v": v}, x), jnp.bfloat16)

    def loss(params, x):
        low = cast(params, x.dtype)
        hidden = jnp.tanh(x @ low["w"] + low["b"][None])
        return curve(widen(hidden @ low["v"]))

    with jax.enable_x64(True):
        found, losses = gradients(loss, params, x)
        expected, clip_norm = clip(found, losses, np.ones(ROWS, bool))
    if not params_too:
        params = cast(params, jnp.float32)
    strategies = ALL if FULL else ("per_example", "bk", "bk_mixopt")
    for strategy, out in clipped(loss, clip_norm, params, x, strategies).items():
        assert {leaf.dtype.name for leaf in jax.tree.leaves((*out,))} == {"float32"}
        np.testing.assert_allclose(out.norms, expected.norms, rtol=2**-6)
        for leaf, right in zip(jax.tree.leaves(out.sum), expected.sum, strict=True):
            error = np.linalg.norm(np.asarray(leaf, np.float64) - right)
            assert error < 2**-6 * np.linalg.norm(right), strategy


@pytest.mark.cpu
# 24: by gradients in the mixes.
@pytest.mark.parametrize("positions", in_full([1, 3, 24], 3))
def test_norms_of_bfloat16_products_are_taken_in_float32(positions):
    # x and dy are exact in bfloat16; their products, squares and sums are not.
    numbers = 1 + np.arange(256 * positions).reshape(1, positions, 256) % 128 / 128
    x = jnp.asarray(numbers, jnp.bfloat16)
    dy = 1.0 + 2 * (7 * np.arange(3 * positions).reshape(positions, 3) % 120)
    low = jnp.asarray(dy, jnp.bfloat16)
    w = jnp.zeros((256, 3), jnp.bfloat16)

    def loss(w, x):
        return jnp.sum((x @ w) * low)

    exact = np.linalg.norm(numbers[0].T @ dy)
    # vmap(grad) rounds the gradient itself to bfloat16.
    for strategy, out in clipped(loss, 1.0, w, x, ALL[1:]).items():
        norm = float(out.norms[0])  # rounded up
        assert exact * (1 - 1e-6) <= norm <= exact * (1 + 2e-5), strategy


def test_mixed_precision_of_parameters():
    w, v, b, x = draw(23, (4, 4), (4, 3), (3,), (ROWS, 4))

    def mixed(params, x):
        hidden = jnp.tanh(x.astype(jnp.float32) @ params["w"])
        low = hidden.astype(jnp.bfloat16) @ params["v"]
        return curve(low.astype(params["b"].dtype) + params["b"])

    with jax.enable_x64(True):
        params = {
            "w": jnp.asarray(w, jnp.float32),
            "v": jnp.asarray(v, jnp.bfloat16),
            "b": jnp.asarray(b, jnp.float64),
        }
        x = jnp.asarray(x)
        every = clipped(mixed, 1.0, params, x, ("per_example", "bk", "bk_mixopt"))
        expected = every.pop("per_example")
        assert every
        for out in every.values():
            dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, out.sum)
            assert dtypes == {"w": "float32", "v": "float32", "b": "float64"}
            assert out.norms.dtype == jnp.float64
            np.testing.assert_allclose(out.norms, expected.norms, rtol=2**-7)


def test_dropout_by_a_key_in_the_example():
    w, v, x = draw(24, (4, 6), (6, 3), (ROWS, 4))
    batch = {"x": x, "key": jax.random.split(jax.random.key(0), ROWS)}

    def loss(params, example):
        hidden = jnp.tanh(example["x"] @ params[0])
        keep = jax.random.bernoulli(example["key"], 0.5, hidden.shape)
        return curve(jnp.where(keep, 2.0 * hidden, 0.0) @ params[1])

    check(loss, (w, v), batch, strategies=("per_example", "bk", "auto"))


# Refusals


@jax.custom_batching.custom_vmap
def centred(x):
    return x


@centred.def_vmap
def _(axis_size, in_batched, x):
    return x - jnp.mean(x, axis=0, keepdims=True), True


def drawn(x):
    return x + lax.rng_uniform(jnp.float32(0), jnp.float32(1), x.shape)


def reported(x):
    io_callback(lambda _: None, None, x)
    return x


def with_scan(function):
    def apply(x):
        return lax.scan(lambda carry, _: (jax.jit(function)(carry), None), x, None, 2)[
            0
        ]

    return apply


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, with_scan, jax.checkpoint])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (centred, "custom_vmap_call"),
        (drawn, "rng_uniform"),
        (reported, "io_callback"),
        (jax.custom_jvp(centred), "custom_vmap_call"),
    ],
)
def test_what_makes_per_example_gradients_ill_defined_is_refused(function, name, wrap):
    if wrap is jax.checkpoint and function is reported:
        pytest.skip("JAX itself has no checkpoint of effects")
    if isinstance(function, jax.custom_jvp):
        function.defjvp(lambda p, t: (centred(p[0]), t[0]))

    def loss(w, x):
        return curve(w * wrap(function)(x))

    grad_fn = clipped_grad(loss, clip_norm=1.0)
    with pytest.raises(ValueError, match=f"loss uses {name}, which.*remove it from"):
        grad_fn(jnp.ones(3), jnp.ones((2, 3)))


@pytest.mark.parametrize(
    "mix", [lax.pmean, lax.psum, lax.pmax, lax.all_gather, lax.axis_index]
)
def test_collectives_over_examples_are_refused(mix):
    def loss(w, x):
        both = mix("batch") if mix is lax.axis_index else mix(x, "batch")
        return jnp.sum(w) * jnp.sum(both.astype(x.dtype))

    with pytest.raises(ValueError, match="must not mix examples"):
        clipped_grad(loss, clip_norm=1.0)(jnp.ones(3), jnp.ones((2, 3)))


# What the jaxprs hold


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
    # One forward; the image is no parameter, and norms and sums are products.
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


@pytest.mark.parametrize("length", [pytest.param(4, marks=pytest.mark.full), 5])
def test_an_associative_scan_over_a_learned_decay(length):
    def loss(params, x):
        decay = jnp.broadcast_to(params["decay"][None], x.shape)

        def both(one, other):
            return one[0] * other[0], other[0] * one[1] + other[1]

        return jnp.sum(
            lax.associative_scan(both, (decay, x * params["gain"][None]))[1] ** 2
        )

    decay, gain, x = draw(0, (3,), (3,), (4, length, 3))
    check(loss, {"decay": decay, "gain": gain}, x)


# Parameters that meet constants, and values without a gradient


def mask(w):
    numbers = np.tri(4, 5) * np.linspace(-2, 3, 20).reshape(4, 5)
    return jnp.asarray(numbers, w.dtype)


def times_mask(w, x):
    return x @ (w * mask(w))


def mask_of_a_transpose(w, x):
    return x @ (mask(w).T * w.T).T


def over_constants(w, x):
    return x @ (w / (1 + mask(w) ** 2))


def where_allowed(w, x):
    return x @ jnp.where(mask(w) > 0, w, 0.0)


def added_to_constants(w, x):
    return x @ ((1.0 - w) + mask(w))


def quantised(w, x):
    return x @ (w + lax.stop_gradient(jnp.round(4 * w) / 4 - w))


def quantised_less_itself(w, x):
    still = lax.stop_gradient(w)
    return x @ ((w - still) + jnp.round(4 * still) / 4)


@pytest.mark.parametrize(
    ("apply", "shape"),
    [
        pytest.param(apply, (4,) if one else (3, 4), marks=[pytest.mark.full] * more)
        for apply, full in [
            *((times_mask, ()), (mask_of_a_transpose, (True,))),
            *((over_constants, (False,)), (where_allowed, (True,))),
            *((added_to_constants, (True,)), (quantised, (True,))),
            (quantised_less_itself, (True, False)),
        ]
        for one in (True, False)
        for more in [one in full]
    ],
)
def test_a_parameter_that_meets_a_constant_is_not_shared(apply, shape):
    w, x = draw(21, (4, 5), (ROWS, *shape))

    def loss(w, x):
        return curve(apply(w, x))

    masked = times_mask, mask_of_a_transpose, over_constants, where_allowed
    (group,) = read(loss, w, x)[1]
    assert isinstance(group, Single) and len(group.gradients()) + len(group.grams()) > 0
    assert bool(group.grams()) == (len(shape) == 1 or apply not in masked)
    narrow = ["float32"] * (FULL or apply is times_mask)
    check(loss, w, x, methods=True, dtypes=("float64", *narrow))


def test_a_masked_convolution():
    w, x = draw(22, (3, 3, 2, 4), (ROWS, 1, 5, 5, 2))
    seen = np.ones((3, 3, 1, 1))
    seen[2] = seen[1, 2:] = 0

    def loss(w, x):
        layout = ("NHWC", "HWIO", "NHWC")
        kernel = w * seen
        y = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=layout
        )
        return curve(y)

    assert set(read(loss, w, x)[1][0].gradients()) == {"vmap", "patches", "crossed"}
    check(loss, w, x, methods=True)


# Uses together


def called_twice(p, x):
    def encode(x):
        return jnp.tanh(x @ p["v"] + p["b"][None]) @ p["w"]

    return curve(encode(x[:2]) * encode(x[2:])[:2])


def of_vectors(p, x):
    return curve(jnp.tanh(x[0] @ p["v"]) * jnp.tanh(p["v"].T @ x[1]))


def convolved_twice(p, x):
    def encode(x):
        return lax.conv(
            jnp.tanh(lax.conv(x, p["k"], (1, 1), "SAME")), p["l"], (2, 2), "SAME"
        )

    return curve(encode(x[:, None, :4, None]) * encode(x[:, None, 1:, None]))


def looked_up_twice(p, x):
    rows = jnp.int32(jnp.abs(x[0]) * 2) % 4
    return curve(p["v"][rows] * x[0, 0]) + curve(p["v"][rows[::-1]])


@pytest.mark.parametrize(
    ("loss", "singles"),
    [(called_twice, 2), (convolved_twice, 2), (looked_up_twice, 1)],
)
def test_uses_alike_are_clipped_as_one(loss, singles):
    v, w, b, x = draw(23, (5, 4), (4, 3), (4,), (ROWS, 5, 5))
    k, kernel = draw(24, (2, 1, 3, 1), (3, 2, 2, 1))
    p = {"v": v, "w": w, "b": b, "k": k, "l": kernel}
    own = [g for g in read(loss, p, x)[1] if type(g) is Single]
    assert len(own) == singles and all(len(group.uses) == 2 for group in own)
    narrow = ["float32"] * (FULL or loss is called_twice)
    check(loss, p, x, methods="few", dtypes=("float64", *narrow))


def test_uses_that_are_not_alike_share():
    v, x = draw(23, (5, 4), (ROWS, 2, 5))

    def loss(v, x):
        return of_vectors({"v": v}, x)

    check(loss, v, x, methods=True)
