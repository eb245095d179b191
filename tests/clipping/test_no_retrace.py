"""One compiled program for a whole training run, whatever sizes Poisson draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tanager.clipping import clipped_grad


ROWS = 8


def counted():
    traces = []

    def loss(params, example):
        traces.append(1)
        hidden = jnp.tanh(params["w"] @ example["x"] + params["b"])
        return jnp.sum(hidden**2)

    return loss, traces


def problem(step):
    draw = np.random.default_rng(step).standard_normal
    params = {
        "w": jnp.asarray(draw((4, 3)), jnp.float32),
        "b": jnp.asarray(draw(4), jnp.float32),
    }
    return params, {"x": jnp.asarray(draw((ROWS, 3)), jnp.float32)}


def masks():
    order = np.random.default_rng(0)
    for size in range(ROWS + 1):
        yield np.arange(ROWS) < size
        yield order.permutation(ROWS) < size


@pytest.mark.parametrize("outer_jit", [True, False])
@pytest.mark.parametrize("strategy", ["per_example", "bk"])
def test_the_loss_is_traced_for_the_first_batch_only(strategy, outer_jit):
    loss, traces = counted()
    grad_fn = clipped_grad(loss, clip_norm=1.0, strategy=strategy)
    call = jax.jit(grad_fn) if outer_jit else grad_fn
    sizes, sums = [], []
    for step, mask in enumerate(masks()):
        out = call(*problem(step), jnp.asarray(mask))
        sizes.append(len(traces))
        sums.append(np.abs(out.sum["b"]).sum())
    assert sizes[0] > 0
    assert set(sizes) == {sizes[0]}
    assert sums[0] == 0
    assert min(sums[2:]) > 0


def test_other_shapes_are_other_programs():
    loss, traces = counted()
    grad_fn = jax.jit(clipped_grad(loss, clip_norm=1.0, strategy="bk"))
    params, batch = problem(0)
    grad_fn(params, batch, jnp.ones(ROWS, bool))
    before = len(traces)
    grad_fn(params, {"x": batch["x"][:5]}, jnp.ones(5, bool))
    assert len(traces) > before
