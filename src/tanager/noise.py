"""The noise that hides each example: exact Gaussian noise, on a grid.

    total = noise.zeros()
    for each physical batch:
        total = noise.grid.add(total, grad_fn(params, batch, mask))
    update = noise(total, step)

Inside `jax.jit` and `lax.scan` the step may be traced: the program then asks the host
for its noise, and the numbers are the same. The same noise with two sums would tell
their difference, so a second sum in a step is refused.

What leaves this module is a whole number of grid spacings, k + round(s·N), turned into
floats: which values are possible does not depend on the data, and their law is that of
the Gaussian mechanism (`tanager.gaussian`).

Rounding is paid for. Of two sums that differ in one example, the physical batch with
the example differs by `sensitivity`, and by g·√d more once it is rounded to the grid
(each of d numbers by g/2 on either side); no other batch differs. So the standard
deviation is σ·(sensitivity + g·√d), at most 0.025 % above σ·sensitivity.
"""

import copy
import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import io_callback
from jaxtyping import Array, ArrayLike, PyTree

from tanager import _processor
from tanager import _validate as validate
from tanager.clipping.gradient import CHANGED
from tanager.clipping.transform import split
from tanager.gaussian import LARGEST_SCALE, rounded_normals, scale_of
from tanager.grid import SAME_PYTREE, Grid, Whole, checksum, halves
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Mechanism, require_step
from tanager.seed import Seed


_BLOCK = 2**17
"""How many numbers a thread draws at a time: what fits into a core's cache."""


class _Used(dict[int, bytes]):
    """What each step's noise has hidden; a deep copy is this, or would not know."""

    def __deepcopy__(self, _: object) -> Self:
        return self


_USED: dict[str, _Used] = {}


class GaussianNoise:
    """Adds N(0, (σ·(sensitivity + g√d))²) to every coordinate of a sum, on a grid.

    Attributes:
        grid: on which sums are added up and released.
        standard_deviation: of the noise, in the units of the sum (not of a mean).
        first_step: the first step to use: 0, or the one after the last that the ledger
            charged before. Earlier steps are refused.

    Args:
        mechanism: gives σ and the horizon: noise past its last step is refused.
        sensitivity: from `ClippedGrad.sensitivity`: how far one example moves the sum
            of a physical batch.
        seed: the run's secret; every step has noise of its own.
        params: pytree or module, of arrays or shapes; its float arrays get noise. Put
            None in place of what `trainable` leaves out.
        ledger: charged with each step that is called, before its noise is drawn. None
            where steps are charged elsewhere.

    Raises:
        ValueError: the noise is too large for the grid, or an argument is out of range.

    References:
        Unlocking paper, equation (2). Mironov 2012, for what is wrong with floats.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        sensitivity: float,
        seed: Seed,
        params: PyTree,
        ledger: Ledger | None = None,
    ):
        validate.instance(Seed, seed=seed)
        validate.instance(Mechanism, mechanism=mechanism)
        validate.instance_or_none(Ledger, ledger=ledger)
        params, _ = split(params)
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
        self.mechanism = mechanism
        self._seed = seed
        self.ledger = ledger
        self.first_step = 0 if ledger is None else ledger.next_step()
        self._used = _used_by(seed)
        self._like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), params
        )
        self._stream = seed.fingerprint(b"noise")[:16]
        self._jitted = jax.jit(self.add)
        self._seen = jax.jit(lambda total: (checksum(total), self.grid.holds(total)))

    def with_seed(self, seed: Seed) -> Self:
        """Return the same with another secret."""
        other = copy.copy(self)
        other._seed, other._used = seed, _used_by(seed)
        other._stream = seed.fingerprint(b"noise")[:16]
        return other

    def zeros(self) -> Whole:
        """Return the sum of no examples, to which `grid.add` adds physical batches."""
        return self.grid.zeros(self._like)

    def require_like(self, params: PyTree) -> None:
        """Refuse a pytree of other structure or shapes than those of the sums."""
        given, like = _shapes(params), _shapes(self._like)
        for name in like | given:
            if given.get(name) != like.get(name):
                shape, wanted = (each.get(name, "left out") for each in (given, like))
                rule = f"must be {wanted}, as in the parameters of the noise"
                validate.refuse(f"params{name}", shape, rule, SAME_PYTREE)

    def _require_sum(self, total: Whole) -> None:
        if not isinstance(total, Whole):
            raise ValueError(
                "total must be a sum on the grid, not of floats, whose rounding can "
                "tell what was added: begin with noise.zeros() and add each physical "
                "batch by noise.grid.add(total, sums)"
            )
        if any(leaf.dtype != jnp.int32 for leaf in jax.tree.leaves(total)):
            raise ValueError(CHANGED)
        self.grid.require(total)
        self.require_like(total.high)  # or one number of noise would hide several
        self.require_like(total.low)

    def draw(self, step: int) -> Whole:
        """Draw the secret noise of one step, on the host.

        Returns:
            Units of the grid, NumPy arrays shaped like the sums; the same for the same
            seed and step on every machine.

        Raises:
            ValueError: `step` is outside the mechanism's steps, or a compiled program
                makes the call: its noise would be the same each time that it runs.
        """
        remedy = "call noise(total, step), which draws in every run, or draw before"
        validate.not_traced("noise.draw", remedy)
        require_step(self.mechanism, step)
        leaves, structure = jax.tree.flatten(self._like)
        ends = np.cumsum([leaf.size for leaf in leaves], dtype=np.int64)[:-1]

        def like_sums(numbers: np.ndarray) -> PyTree:
            parts = zip(leaves, np.split(numbers, ends), strict=True)
            return structure.unflatten(part.reshape(x.shape) for x, part in parts)

        high, low = map(like_sums, halves(self._numbers(step)))
        return Whole(high, low, self.grid)

    def add(self, total: Whole, drawn: Whole) -> PyTree:
        """Return a sum plus noise, in floats; pure, for use under `jax.jit`.

        Args:
            total: of a logical batch, from `grid.add`.
            drawn: what `draw(step)` returned, used once only.

        Returns:
            Pytree of float32 arrays, float64 where the parameters are.

        Raises:
            ValueError: `total` is not a sum on the grid, or of other arrays.
        """
        self._require_sum(total)
        return self.grid.floats(self.grid.plus(total, drawn), self._like)

    @jax.transfer_guard("allow")
    def __call__(self, total: Whole, step: ArrayLike) -> PyTree:
        """Return the sum of a logical batch plus the noise of its step, in floats.

        Args:
            total: of a logical batch, from `grid.add`; used in no other step.
            step: a whole number, or int32[] in a compiled program, which then asks the
                host for the noise each time that it runs.

        Returns:
            Pytree of float32 arrays, float64 where the parameters are.

        Raises:
            ValueError: `total` is not a sum on the grid, or was scaled, or clipped to a
                larger norm than the noise is for; `step` is outside the mechanism's
                steps or below `first_step`, or its noise was added to another sum. A
                compiled program raises what depends on values when it runs, as
                `jax.errors.JaxRuntimeError`.
        """
        self._require_sum(total)
        leaves = jax.tree.leaves((total, step))
        if not any(isinstance(leaf, Tracer) for leaf in leaves):
            validate.whole(step=np.asarray(step).tolist(), at_least=0)
            return self._jitted(total, self._spend(step, *self._seen(total)))
        kind = jax.typeof(step)
        if kind.shape or not jnp.issubdtype(kind.dtype, jnp.integer):
            validate.refuse("step", kind.str_short(), "must be one whole number")
        shapes = self.grid.shapes(self._like)
        seen = checksum(total), self.grid.holds(total)
        return self.add(total, io_callback(self._spend, shapes, step, *seen))

    def _spend(self, step: ArrayLike, sums: Array, held: Array) -> Whole:
        """Charge a step and draw its noise, for the sum with this checksum alone.

        The sum must be as it was, in the ranges of the grid.
        """
        if not held:
            raise ValueError(CHANGED)
        number = int(np.asarray(step))
        require_step(self.mechanism, number)
        if number < self.first_step:
            validate.refuse(
                "step",
                number,
                f"must be at least {self.first_step}, the first that the ledger did "
                "not charge before",
                "its noise may have hidden another sum: begin at noise.first_step",
            )
        content = np.asarray(sums).tobytes() + repr((self._scale, self.grid)).encode()
        given = hashlib.blake2b(content, digest_size=16).digest()
        if self._used.setdefault(number, given) != given:
            validate.refuse(
                "step",
                number,
                "was used with another sum or scale, and the same noise twice hides "
                "nothing",
                "count the steps (one that is fixed when jax.jit traces a function is "
                "the same in every call), and draw a seed for each model: "
                "Seed.from_os()",
            )
        if self.ledger is not None:
            self.ledger.charge(self.mechanism, number, self._stream)
        return self.draw(number)

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


def _used_by(seed: Seed) -> _Used:
    """Return what each step's noise has hidden in this process, by whatever object.

    Seeds that are not secret hide nothing: each object has its own then.
    """
    own = _Used()
    return _USED.setdefault(seed.fingerprint(b"used"), own) if seed.private else own


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    found = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in found}
