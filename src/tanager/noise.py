"""The noise that hides each example: exact Gaussian noise, on a grid.

    total = noise.grid.zeros(params)
    for each physical batch:
        total = noise.grid.add(total, grad_fn(params, batch, mask).sum)
    update = noise(total, step)

What leaves this module is a whole number of grid spacings, k + round(s·N), turned into
floats: which values are possible does not depend on the data, and their law is that of
the Gaussian mechanism (`tanager.gaussian`).

Rounding is paid for. Of two sums that differ in one example, the physical batch with
the example differs by `sensitivity`, and by g·√d more once it is rounded to the grid
(each of d numbers by g/2 on either side); no other batch differs. So the standard
deviation is σ·(sensitivity + g·√d), at most 0.025 % above σ·sensitivity.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import jax
import numpy as np
from jaxtyping import PyTree

from tanager import _processor
from tanager import _validate as validate
from tanager.gaussian import LARGEST_SCALE, rounded_normals, scale_of
from tanager.grid import Grid, Whole, halves
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed


_BLOCK = 2**17
"""How many numbers a thread draws at a time: what fits into a core's cache."""


class GaussianNoise:
    """Adds N(0, (σ·(sensitivity + g√d))²) to every coordinate of a sum, on a grid.

    Attributes:
        grid: on which sums are added up and released.
        standard_deviation: of the noise, in the units of the sum (not of a mean).

    Args:
        mechanism: gives σ and the horizon: noise past its last step is refused.
        sensitivity: from `ClippedGrad.sensitivity`: how far one example moves the sum
            of a physical batch.
        seed: the run's secret; every step has noise of its own.
        params: pytree shaped like the sums, of arrays or shapes.

    Raises:
        ValueError: the noise is too large for the grid, or an argument is out of range.

    References:
        Unlocking paper, equation (2). Mironov 2012, for what is wrong with floats.
    """

    def __init__(
        self, mechanism: Mechanism, sensitivity: float, seed: Seed, params: PyTree
    ):
        self.grid = Grid.of(sensitivity, params)
        self.standard_deviation = mechanism.noise_multiplier * (
            sensitivity + self.grid.rounding
        )
        self._scale = scale_of(self.standard_deviation, self.grid.spacing)
        if self._scale > LARGEST_SCALE:
            most = LARGEST_SCALE / self._scale * mechanism.noise_multiplier
            validate.refuse(
                "noise_multiplier",
                mechanism.noise_multiplier,
                f"must be below {most:.3g} with {self.grid.coordinates:,} parameters",
                "larger noise does not fit into the 48 bits in which it is added",
            )
        self._steps = mechanism.steps
        self._seed = seed
        self._like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), params
        )
        self._jitted = jax.jit(self.add)

    def with_seed(self, seed: Seed) -> Self:
        """Return the same with another secret."""
        other = copy.copy(self)
        other._seed = seed
        return other

    def draw(self, step: int) -> Whole:
        """Draw the secret noise of one step, on the host.

        Returns:
            Units of the grid, NumPy arrays shaped like the sums; the same for the same
            seed and step on every machine.

        Raises:
            ValueError: `step` is outside the mechanism's steps.
        """
        validate.whole(step=step, at_least=0)
        if step >= self._steps:
            validate.refuse(
                "step", step, f"must be below the mechanism's {self._steps} steps"
            )
        leaves, structure = jax.tree.flatten(self._like)
        ends = np.cumsum([leaf.size for leaf in leaves], dtype=np.int64)[:-1]

        def like_sums(numbers: np.ndarray) -> PyTree:
            parts = zip(leaves, np.split(numbers, ends), strict=True)
            return structure.unflatten(part.reshape(x.shape) for x, part in parts)

        return Whole(*map(like_sums, halves(self._numbers(step))))

    def add(self, total: Whole, drawn: Whole) -> PyTree:
        """Return a sum plus noise, in floats; pure, for use under `jax.jit`.

        Args:
            total: of a logical batch, from `grid.add`.
            drawn: what `draw(step)` returned, used once only.

        Returns:
            Pytree of float32 arrays, float64 where the parameters are.

        Raises:
            ValueError: `total` is not a sum on the grid.
        """
        if not isinstance(total, Whole):
            raise ValueError(
                "total must be a sum on the grid, not of floats, whose rounding can "
                "tell what was added: begin with noise.grid.zeros(params) and add "
                "each physical batch by noise.grid.add(total, sums)"
            )
        return self.grid.floats(self.grid.plus(total, drawn), self._like)

    def __call__(self, total: Whole, step: int) -> PyTree:
        """Return the sum of a logical batch plus the noise of its step, in floats."""
        return self._jitted(total, self.draw(step))

    def _numbers(self, step: int) -> np.ndarray:
        count = self.grid.coordinates
        numbers = np.zeros(count, np.int64)
        if self._scale == 0:
            return numbers

        def draw(start: int) -> None:
            size = min(_BLOCK, count - start)
            words = self._seed.words(size, "noise", step, start=start)

            def more(place: int, taken: int) -> int:
                at = step, start + place, taken
                return int.from_bytes(self._seed.derive("noise bits", *at, size=8))

            numbers[start : start + size] = rounded_normals(words, self._scale, more)

        if count <= _BLOCK:  # threads would take longer to start
            draw(0)
            return numbers
        with ThreadPoolExecutor(_processor.cores()) as threads:
            list(threads.map(draw, range(0, count, _BLOCK)))
        return numbers
