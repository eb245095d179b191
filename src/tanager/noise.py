"""The Gaussian noise that hides each example, one draw for every step.

Noise is float32 or wider, always: bfloat16 normals take 128 values. One float32 normal
is made from 23 random bits, so it never exceeds 5.4 standard deviations and its gaps
can betray what it was added to (Mironov 2012; Jin et al. 2022). So each coordinate's
noise is the sum of several independent draws, from keys of 64 bits each (Holohan and
Braghin 2021).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Key, PyTree

from tanager import _validate as validate
from tanager.keys import derive_keys
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed


class GaussianNoise:
    """Adds N(0, (σC)²) to every coordinate of a sum of clipped gradients.

    Attributes:
        standard_deviation: σC, the noise multiplier times the sensitivity, in the
            units of the sum (not of a mean).
        draws: independent normals added up for each coordinate.

    Args:
        mechanism: gives σ and the horizon: noise past its last step is refused.
        sensitivity: C, from `ClippedGrad.sensitivity`, so that the noise fits what was
            enforced.
        seed: the run's secret; every step has keys of its own.
        draws: at least 1; 4 by default.

    References:
        Unlocking paper, equation (2). Holohan and Braghin 2021, arXiv:2107.10138.
    """

    def __init__(
        self, mechanism: Mechanism, sensitivity: float, seed: Seed, draws: int = 4
    ):
        validate.positive(sensitivity=sensitivity)
        validate.whole(draws=draws, at_least=1)
        self.standard_deviation = mechanism.noise_multiplier * sensitivity
        self.draws = draws
        self._steps = mechanism.steps
        self._seed = seed
        self._jitted = jax.jit(self.add)

    def keys(self, step: int) -> Key[Array, " draws"]:
        """Return the secret keys of one step, one for each draw.

        Raises:
            ValueError: `step` is outside the mechanism's steps.
        """
        validate.whole(step=step, at_least=0)
        if step >= self._steps:
            validate.refuse(
                "step", step, f"must be below the mechanism's {self._steps} steps"
            )
        return derive_keys(self._seed, "noise", step, count=self.draws)

    def add(self, total: PyTree, keys: Key[Array, " draws"]) -> PyTree:
        """Return `total` plus noise; pure, for use under `jax.jit`.

        Args:
            total: pytree of float32 (or wider) arrays.
            keys: what `keys(step)` returned, used once only.

        Raises:
            ValueError: a leaf is narrower than float32.
        """
        leaves, structure = jax.tree.flatten(total)
        noisy = [self._add(leaf, keys, number) for number, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, noisy)

    def __call__(self, total: PyTree, step: int) -> PyTree:
        """Return `total` plus the noise of this step."""
        return self._jitted(total, self.keys(step))

    def _add(self, leaf: Array, keys: Key[Array, " draws"], number: int) -> Array:
        if jnp.finfo(leaf.dtype).bits < 32:
            validate.refuse(
                "total",
                str(leaf.dtype),
                "must be float32 or wider",
                "clipped_grad returns such sums; do not cast them before the noise",
            )
        if self.standard_deviation == 0:
            return leaf

        # A loop over the draws, and not their sum: XLA compiles one generator of random
        # bits for each leaf, not four, and keeps one draw in memory.
        def draw(total: Array, key: Key[Array, ""]) -> tuple[Array, None]:
            own = jax.random.fold_in(key, number)
            return total + jax.random.normal(own, leaf.shape, leaf.dtype), None

        normals, _ = lax.scan(draw, jnp.zeros_like(leaf), keys)
        scale = self.standard_deviation / np.sqrt(self.draws)
        return leaf + jnp.asarray(scale, leaf.dtype) * normals
