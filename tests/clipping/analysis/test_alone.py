"""Losses whose examples are taken one at a time, and so cannot mix."""

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import sequential_vmap

from cases import tuples_in_full
from tanager.clipping import clipped_grad, transform


ROWS, C = 4, 0.5


def answer(w, x):
    return jnp.sum(jnp.tanh(w)) * jnp.where(eqxi.unvmap_any(x[0] > 0.3), 1.0, -2.0)


def branch(w, x):
    """As Tsit5 of diffrax chooses whether a stage is computed again."""
    first = eqxi.unvmap_any(x[0] > 0.3)
    return jnp.sum(lax.cond(first, lambda: jnp.sin(w @ x), lambda: w[0] * x))


def until_all_have_ended(w, x):
    """Rows that have ended go on, as long as any has not."""
    end = lax.while_loop(
        lambda y: eqxi.unvmap_any(jnp.max(jnp.abs(y)) > 0.3), lambda y: 0.5 * y, x
    )
    return jnp.sum(jnp.tanh(w @ lax.stop_gradient(end)))


def where_any_asks(w, x):
    """The other branch does nothing, but this one does something to all rows."""
    y = lax.cond(eqxi.unvmap_any(x[0] > 0.3), lambda y: 2 * y, lambda y: y, x)
    return jnp.sum(jnp.tanh(w @ y))


def error(w, x):
    x = eqx.error_if(x, jnp.any(x > 100), "too large", on_error="nan")
    return jnp.sum(jnp.tanh(w @ x))


def ragged(w, x):
    sizes = jnp.where(x[0] > 0.3, jnp.array([2, 4]), jnp.array([5, 1]))
    rows = jnp.outer(jnp.arange(6.0), x)
    return jnp.sum(jnp.tanh(lax.ragged_dot(rows, jnp.stack([w, 2 * w]), sizes)))


@sequential_vmap
def scaled(x):
    return x / jnp.linalg.norm(x)


@jax.custom_vjp
def product(w, x):
    return w @ x  # only its derivative is a loop


product.defvjp(
    lambda w, x: (product(w, x), (w, x)),
    lambda held, dy: sequential_vmap(lambda w, x, dy: (jnp.outer(dy, x), dy @ w))(
        *held, dy
    ),
)


def data_alone(w, x):
    return jnp.sum(jnp.tanh(w @ scaled(x)))


def own_rule(w, x):
    return jnp.sum(jnp.tanh(product(w, x)))


LOSSES = [
    answer,
    branch,
    until_all_have_ended,
    where_any_asks,
    error,
    ragged,
    data_alone,
    own_rule,
]
W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, 3)), jnp.float32)
X = X.at[0, 0].set(1.0).at[1, 0].set(-1.0)


def row_by_row(loss, w, x):
    gradient = jax.jit(jax.grad(loss))
    each = [np.asarray(gradient(w, row)) for row in x]
    return sum(g * min(1, C / np.linalg.norm(g)) for g in each)


# Rows are taken apart before a strategy is chosen.
CASES = [(loss, "auto") for loss in LOSSES] + [(own_rule, "per_example")]
MORE = [(loss, "per_example") for loss in LOSSES[:-1]]


@pytest.mark.parametrize(("loss", "strategy"), tuples_in_full(CASES + MORE, *MORE))
def test_sums_are_those_of_one_example_after_the_other(loss, strategy):
    grad_fn = clipped_grad(loss, clip_norm=C, strategy=strategy)
    np.testing.assert_allclose(grad_fn(W, X).sum, row_by_row(loss, W, X), atol=1e-5)
    assert "needs examples one at a time" in grad_fn.explain(W, X).why


@pytest.mark.parametrize("loss", [answer, ragged, own_rule])
def test_examples_of_several_models_stay_apart(loss):
    weights, data = jnp.stack([W, -W]), jnp.stack([X, X[::-1] - 1])
    held = jnp.array([1, 2])  # whole numbers, traced outside of the loss

    def times(n):
        return lambda w, x: jnp.float32(n) * loss(w, x)

    def clipped(w, x, n):
        return clipped_grad(times(n), clip_norm=C)(w, x).sum

    every = jax.jit(jax.vmap(clipped))(weights, data, held)
    for found, w, x, n in zip(every, weights, data, held, strict=True):
        np.testing.assert_allclose(found, row_by_row(times(n), w, x), atol=1e-5)


@pytest.mark.parametrize("loss", [answer, branch])
def test_derivatives_are_those_of_one_example_after_the_other(loss):
    def definition(loss, w):
        each = [jax.grad(loss)(w, row) for row in X[:2]]
        return sum(g * jnp.minimum(1, C / jnp.linalg.norm(g)) for g in each)

    def slopes(clip):
        def curve(w, held):
            total = clip(lambda w, x: loss(w, x) + held * jnp.sum(w**2), w)
            return jnp.sum(jnp.cos(3 * total))

        at = W, jnp.float32(0.3)
        along = jax.jit(lambda at: jax.jvp(curve, at, (W[::-1], at[1]))[1])
        return [*jax.jit(jax.grad(curve, (0, 1)))(*at), along(at)]

    found = slopes(lambda loss, w: clipped_grad(loss, clip_norm=C)(w, X[:2]).sum)
    for got, expected in zip(found, slopes(definition), strict=True):
        size = np.max(np.abs(expected))
        np.testing.assert_allclose(got, expected, atol=1e-3 * size)


@pytest.mark.parametrize("loss", [answer, branch])
def test_planted_one_answer_for_all_rows_is_seen(loss, monkeypatch):
    monkeypatch.setattr(
        transform, "one_at_a_time", lambda function: jax.vmap(function, (None, 0))
    )
    found = clipped_grad(loss, clip_norm=C)(W, X).sum
    assert np.max(np.abs(found - row_by_row(loss, W, X))) > 0.1


def test_an_example_with_an_error_counts_for_nothing_and_the_others_stay():
    found = clipped_grad(error, clip_norm=C)(W, X.at[2].set(1000.0))
    rows = jnp.array([0, 1, 3])
    np.testing.assert_allclose(found.sum, row_by_row(error, W, X[rows]), atol=1e-5)
    assert np.isnan(found.norms[2])


def looped(kind):
    def loss(w, x):
        end = eqxi.while_loop(
            lambda carry: carry[0] < 5,
            lambda carry: (carry[0] + 1, jnp.tanh(w @ carry[1])),
            (0, x),
            max_steps=8,
            kind=kind,
        )
        return jnp.sum(end[1])

    return loss


def test_a_loop_of_equinox_whose_rows_end_together_is_clipped_together():
    loss = looped("bounded")
    grad_fn = clipped_grad(loss, clip_norm=C, strategy="bk")
    assert not grad_fn.explain(W, X).why
    np.testing.assert_allclose(grad_fn(W, X).sum, row_by_row(loss, W, X), atol=1e-5)


def test_what_has_no_gradient_and_transforms_that_ask_all_rows_are_refused():
    with pytest.raises(ValueError, match=r"no gradient in reverse mode.*custom_vjp"):
        clipped_grad(lambda w, x: scaled(w @ x)[0], clip_norm=C)(W, X)
    grad_fn = clipped_grad(
        lambda w, x: jnp.sum(w @ x),
        clip_norm=C,
        transform=lambda g: jnp.where(eqxi.unvmap_any(g > 1), g, 0),
    )
    with pytest.raises(ValueError, match="transform uses unvmap_any, and may mix"):
        grad_fn(W, X)


def test_loops_of_equinox_run_where_devices_have_divided_the_rows():
    loss, spec = looped("checkpointed"), jax.sharding.PartitionSpec()
    divided = jax.shard_map(
        lambda w, x: clipped_grad(loss, clip_norm=C)(w, x).sum,
        mesh=jax.make_mesh((1,), ("devices",)),
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    np.testing.assert_allclose(
        jax.jit(divided)(W, X), row_by_row(loss, W, X), atol=1e-5
    )
