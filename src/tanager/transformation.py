"""Noise as the first part of an Optax optimizer.

    noise = GaussianNoise(mechanism, grad_fn.sensitivity, seed, params, ledger)
    optimizer = optax.chain(
        gaussian_noise(noise),
        optax.scale(1 / sampler.expected_batch_size),
        optax.adam(0.01),
    )

What enters is the sum of a logical batch, and what leaves is the same sum with noise.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array, Int32, PyTree

from tanager import _validate as validate
from tanager.clipping.gradient import ClippedGradient
from tanager.clipping.transform import split
from tanager.grid import Whole
from tanager.noise import GaussianNoise


class GaussianNoiseState(NamedTuple):
    """The state of `gaussian_noise`: the step whose noise comes next."""

    noise_step: Int32[Array, ""]


def gaussian_noise(noise: GaussianNoise) -> optax.GradientTransformation:
    """Return an Optax transformation that adds the noise of a step to a sum.

    Each update charges the noise's ledger and uses the next step. Put it first in
    `optax.chain`, and divide by the expected batch size after it. Usable inside
    `jax.jit` and `lax.scan`, on one device; `vmap` gives two updates of one step two
    sums, which is refused.

    JAX runs programs after their call returns. Wait for the last one with
    `jax.block_until_ready` before you read or close the ledger: a step is charged when
    it runs. One that cannot be charged gives no result.

    After a restart, set the step of a restored state, so that no noise comes twice:
    ``optax.tree.set(state, noise_step=noise.first_step)``. A new state begins there.

    Its ``update(sums, state)`` takes the sum of a logical batch on the grid, from
    ``noise.grid.add``, or what `clipped_grad` returned, if the whole logical batch is
    one physical batch.

    Raises:
        ValueError: `noise` is of another kind or has no ledger, or `params` differ from
            those of the noise. ``update`` raises what `GaussianNoise` does.
    """
    validate.instance(GaussianNoise, noise=noise)
    if noise.ledger is None:
        raise ValueError(
            "noise must have a ledger, which is charged before each update: give "
            "GaussianNoise(…, ledger=tanager.Ledger(path)), or Ledger() in memory"
        )

    def init(params: PyTree) -> GaussianNoiseState:
        noise.require_like(split(params)[0])
        return GaussianNoiseState(jax.device_put(np.int32(noise.first_step)))

    @jax.transfer_guard("allow")
    def update(
        updates: Any, state: Any, params: PyTree = None
    ) -> tuple[PyTree, GaussianNoiseState]:
        if isinstance(updates, ClippedGradient):
            updates = noise.grid.add(noise.zeros(), updates)
        if not isinstance(updates, Whole):
            raise ValueError(
                f"updates (a {type(updates).__name__}) must be a sum without noise: "
                "put gaussian_noise first in optax.chain, and give it what "
                "clipped_grad returned (not its .sum), or a sum on noise.grid. "
                "flax.nnx.Optimizer gives another tree: call the chain's own init and "
                "update on nnx.state(model, nnx.Param)"
            )
        noisy = noise(updates, state.noise_step)
        return noisy, GaussianNoiseState(state.noise_step + 1)

    return optax.GradientTransformation(init, update)
