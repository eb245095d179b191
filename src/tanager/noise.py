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
from jaxtyping import Array, ArrayLike, Key, PyTree

from tanager import _validate as validate
from tanager.keys import derive_keys
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed


_TOGETHER = 2**19
"""How many numbers at most are drawn at once for several leaves; 2 MiB."""


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
        apart: draw for every leaf by itself, as is right where leaves lie in shares on
            several devices: each draws for its own. The noise is the same.

    References:
        Unlocking paper, equation (2). Holohan and Braghin 2021, arXiv:2107.10138.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        sensitivity: float,
        seed: Seed,
        draws: int = 4,
        *,
        apart: bool = False,
    ):
        validate.positive(sensitivity=sensitivity)
        validate.whole(draws=draws, at_least=1)
        self.standard_deviation = mechanism.noise_multiplier * sensitivity
        self.draws = draws
        self._steps = mechanism.steps
        self._together = 0 if apart else _TOGETHER
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
        for leaf in leaves:
            _require_wide(leaf)
        if self.standard_deviation == 0:
            return total
        noisy = dict(enumerate(leaves))
        for numbers in _groups(leaves, self._together):
            group = [leaves[number] for number in numbers]
            noisy |= zip(numbers, self._add(group, keys, numbers), strict=True)
        return jax.tree.unflatten(structure, noisy.values())

    def __call__(self, total: PyTree, step: int) -> PyTree:
        """Return `total` plus the noise of this step."""
        return self._jitted(total, self.keys(step))

    def _add(
        self, leaves: list[Array], keys: Key[Array, " draws"], numbers: list[int]
    ) -> list[Array]:
        """Return leaves with noise. A leaf's is of its number, whatever its company."""
        dtype, alone = leaves[0].dtype, len(leaves) == 1
        width = max(leaf.size for leaf in leaves)
        # Alone it is drawn in its own shape, which may lie in shares.
        shape, own = ((), leaves[0].shape) if alone else ((len(leaves),), (width,))

        # A loop over the draws, and not their sum: XLA compiles one generator of random
        # bits, not four, and keeps one draw in memory.
        def draw(total: Array, key: Key[Array, ""]) -> tuple[Array, None]:
            def normal(number: ArrayLike) -> Array:
                return jax.random.normal(jax.random.fold_in(key, number), own, dtype)

            each = normal(numbers[0]) if alone else jax.vmap(normal)(np.array(numbers))
            return total + each, None

        normals, _ = lax.scan(draw, jnp.zeros((*shape, *own), dtype), keys)
        scale = self.standard_deviation / np.sqrt(self.draws)
        noise = jnp.asarray(scale, dtype) * normals
        if alone:
            return [leaves[0] + noise]
        return [
            leaf + row[: leaf.size].reshape(leaf.shape)
            for leaf, row in zip(leaves, noise, strict=True)
        ]


def _groups(leaves: list[Array], together: int) -> list[list[int]]:
    """Group the numbers of leaves so alike in size that one generator serves them.

    As many rows as leaves, each as wide as the largest, hold `together` numbers at the
    most; a leaf that holds more is alone. XLA takes 0.15 s to compile a generator, and
    models have hundreds of leaves.
    """
    groups: list[list[int]] = []
    for number in sorted(
        range(len(leaves)), key=lambda n: (leaves[n].dtype.name, leaves[n].size)
    ):
        leaf, last = leaves[number], groups[-1] if groups else []
        fits = (len(last) + 1) * leaf.size <= together
        if last and fits and leaf.dtype == leaves[last[0]].dtype:
            last.append(number)
        else:
            groups.append([number])
    return groups


def _require_wide(leaf: Array) -> None:
    if jnp.finfo(leaf.dtype).bits < 32:
        validate.refuse(
            "total",
            str(leaf.dtype),
            "must be float32 or wider",
            "clipped_grad returns such sums; do not cast them before the noise",
        )
