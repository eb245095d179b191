"""`clipped_grad`: from the loss of one example to a sum of clipped gradients.

    grad_fn = clipped_grad(loss, clip_norm=1.0)
    out = grad_fn(params, batch, mask)

What the returned function promises, whatever the strategy:

1. `out.sum` is Σᵢ maskᵢ · clip_C(gᵢ) with clip_C(g) = min(1, C/‖g‖₂)·g, a sum and
   never a mean, where gᵢ is the gradient of ``loss(params, example_i)`` over all
   trainable leaves together.
2. Masking one row of a physical batch, all others staying as and where they are, moves
   `out.sum` by at most `sensitivity` = (1 + 2⁻¹¹)·C in the 2-norm. That is of the
   numbers returned, rounding included, for any example and any other rows. Norms are
   upper bounds for it (`analysis.rounding`), so that examples whose terms
   cancel are clipped a little more than their gradient asks for.
3. Rows with ``mask = False`` contribute exact zeros, even where they are NaN.
4. An example whose gradient has a NaN, an infinity, or a norm that overflows
   float32 contributes exact zeros. Where norms come from Gram matrices, so does one
   whose activations or their gradients at a tap are beyond 2³³, whose products float32
   could lose (`rules.grams.guarded`).
   Other rows keep their numbers.
5. Norms and sums are float32 or wider whatever the precision of the loss.

| clip_norm | gradient norm | contribution |
|---|---|---|
| C | ≤ C | the gradient itself |
| C | > C | the gradient scaled to norm C |
| C | 0 | zero |
| C | NaN, ∞ or overflow | zero |
| not from 1e-12 to 1e12 | any | refused |
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree

from tanager import _validate as validate
from tanager.clipping import book_keeping
from tanager.clipping.analysis import batches
from tanager.clipping.analysis.dtypes import accumulation_dtype, widen
from tanager.clipping.analysis.layouts import safe_to_split
from tanager.clipping.analysis.refusals import (
    check_leaves,
    check_loss,
)
from tanager.clipping.analysis.rounding import ALLOWANCE, FloatError, float_error
from tanager.clipping.analysis.statistics import held_fixed
from tanager.clipping.analysis.taps import Program, read_loss
from tanager.clipping.per_example import per_example
from tanager.clipping.planning.autotune import Timings
from tanager.clipping.planning.choices import (
    STRATEGIES,
    Plan,
    norm_groups,
    plan_clipping,
)
from tanager.clipping.planning.explain import Explanation, explain
from tanager.compiling import filter_jit


class ClippedGradient(NamedTuple):
    """What `clipped_grad` returns for one physical batch of B rows.

    Attributes:
        sum: pytree like `params` (None where a leaf is not a float array): the sum of
            clipped gradients, float32 or wider. Private until noise is added.
        norms: float32[B] (or wider), norms before clipping, rounded up;
            0 in masked rows. Private.
        losses: float32[B] (or wider); 0 in masked rows. Private.
    """

    sum: PyTree
    norms: Float[Array, " b"]
    losses: Float[Array, " b"]


class ClippedGrad:
    """The function `clipped_grad` makes; it carries the sensitivity it enforces.

    Its attributes are the arguments of `clipped_grad`.
    """

    def __init__(
        self,
        loss: Callable,
        clip_norm: float,
        strategy: str,
        memory: str,
        trainable: PyTree | Callable | None = None,
    ):
        self.loss = loss
        self.trainable = trainable
        self.clip_norm = clip_norm
        self.strategy = strategy
        self.memory = memory
        self._compiled: dict[bool, Callable] = {}
        self._checked: set[Any] = set()
        self._tuned: set[Any] = set()

    @property
    def sensitivity(self) -> float:
        """How far masking one row moves `sum` in the 2-norm, rounding included."""
        return self.clip_norm * (1 + ALLOWANCE)

    def __call__(
        self, params: PyTree, batch: PyTree, mask: ArrayLike | None = None
    ) -> ClippedGradient:
        """Clip every example's gradient and add them up.

        Args:
            params: pytree of arrays, or an Equinox module; its float leaves are
                trained, or those of them that `trainable` names.
            batch: pytree of arrays with one leading axis of B rows.
            mask: bool[B], True for examples, False for padding; None for all True.

        Raises:
            ValueError: the loss is not a scalar float function of one example, mixes
                examples, the shapes of batch and mask disagree, or arrays are split
                over a mesh with axes of type Explicit.
        """
        mask = batches.mask_of(mask, batches.rows_of(batch))
        batches.refuse_typed_axes(params, batch)
        trainable, fixed = self._split(params, batch)
        leaves = jax.tree.leaves((params, batch, mask))
        split = batches.may_be_split(leaves)
        clip = safe_to_split(self._clip) if split else self._clip
        if not batches.traced(leaves):
            self.tune(params, batch)
            clip = self._compiled.setdefault(split, filter_jit(clip))
        return clip(trainable, fixed, batch, mask)

    def _split(self, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Return what is trained and what is not, having checked both."""
        trainable, fixed = split(params, self.trainable)
        shapes = batches.shapes_of((params, batch))
        if shapes not in self._checked:
            check_leaves(trainable, fixed)
            check_loss(self._loss, trainable, fixed, batches.example_of(batch))
            self._checked.add(shapes)
        return trainable, fixed

    def _loss(self, trainable: PyTree, fixed: PyTree, example: PyTree) -> Any:
        return self.loss(eqx.combine(trainable, fixed), example)

    def _loss_of(self, fixed: PyTree) -> Callable[[PyTree, PyTree], Array]:
        return lambda trainable, example: self._loss(trainable, fixed, example)

    def _clip(
        self, trainable: PyTree, fixed: PyTree, batch: PyTree, mask: Bool[Array, " b"]
    ) -> ClippedGradient:
        rows = mask.shape[0]
        if rows == 0:
            zero = jax.tree.map(lambda leaf: widen(jnp.zeros_like(leaf)), trainable)
            return ClippedGradient(zero, jnp.zeros(0), jnp.zeros(0))
        plans = self._plans(self._program(trainable, fixed, batch), rows)
        target = self.clip_norm * self._float_error(plans, trainable, rows).target

        def clip(rows: int, batch: PyTree, mask: Array) -> tuple[PyTree, Array, Array]:
            plan = plans[rows]
            if plan.program is None:
                loss = self._loss_of(fixed)
                found = per_example(loss, trainable, batch, mask, target)
            else:
                parts = plan.program, plan.groups, plan.methods
                found = book_keeping.clip(*parts, trainable, batch, mask, target)
            total, norms, losses = found
            # Widened before pieces are joined, or XLA rounds the losses in between.
            return total, jnp.where(mask, norms, 0), jnp.where(mask, widen(losses), 0)

        return ClippedGradient(*batches.in_pieces(clip, batch, mask, self.memory))

    def _program(
        self, trainable: PyTree, fixed: PyTree, batch: PyTree
    ) -> Program | None:
        """Return the loss taken apart; None where it is clipped by its definition."""
        if self.strategy == "per_example":
            return None
        loss = self._loss_of(fixed)
        program = read_loss(loss, trainable, batches.example_of(batch))
        return None if program.needs_definition else program

    def _plans(self, program: Program | None, rows: int) -> dict[int, Plan]:
        """Return a plan for each size of piece."""
        sizes = dict.fromkeys(size for _, size in batches.pieces(rows, self.memory))
        return {size: plan_clipping(program, size, self.strategy) for size in sizes}

    def _float_error(
        self, plans: dict[int, Plan], trainable: PyTree, rows: int
    ) -> FloatError:
        leaves = jax.tree.leaves(trainable)
        dtypes = [accumulation_dtype(leaf.dtype) for leaf in leaves]
        coarsest = max(dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps))
        steps = max(plan.sum_steps for plan in plans.values())
        joined = len(batches.pieces(rows, self.memory)) - 1
        numbers = sum(leaf.size for leaf in leaves)
        return float_error(steps + joined, rows, self.clip_norm, numbers, coarsest)

    def tune(
        self,
        params: PyTree,
        batch: PyTree,
        report: Callable[[str], None] | None = None,
        worth: float = math.inf,
    ) -> bool:
        """Under ``"auto"``, measure what is not known yet for shapes like these.

        What is found is remembered on disk (`planning.autotune`) and serves later
        traces, those of an outer `jax.jit` included, which cannot measure. A call
        outside `jax.jit` does this by itself. Takes and raises what a call does;
        `report` is called with a line for each thing that is measured. No more is
        measured than takes the time of clipping `worth` such batches.

        Returns:
            Whether anything was measured: traces made before may clip otherwise.
        """
        shapes = batches.shapes_of((params, batch))
        if self.strategy != "auto" or shapes in self._tuned:
            return False
        program = self._program(*self._split(params, batch), batch)
        pieces = batches.pieces(batches.rows_of(batch), self.memory)
        measured = [
            Timings().measure(program, norm_groups(program), rows, report, worth)
            for rows in sorted({rows for _, rows in pieces})
            if program is not None
        ]
        self._tuned.add(shapes)
        return any(measured)

    def explain(self, params: PyTree, batch: PyTree) -> Explanation:
        """Return a table of the taps: what is done at each, why, and what it takes.

        Under ``"auto"`` what is not known yet is measured first. Takes and raises what
        a call does.
        """
        self.tune(params, batch)
        trainable, fixed = self._split(params, batch)
        rows = batches.rows_of(batch)
        plans = self._plans(self._program(trainable, fixed, batch), rows)
        error = self._float_error(plans, trainable, rows)
        return explain(next(iter(plans.values())), error)


def clipped_grad(
    loss: Callable,
    *,
    clip_norm: float,
    strategy: str = "auto",
    memory: str = "default",
    trainable: PyTree | Callable | None = None,
) -> ClippedGrad:
    """Transform the loss of ONE example into a sum of clipped per-example gradients.

    Args:
        loss: ``loss(params, example) -> scalar``, written for one example: no batch
            axis. Several augmented views of one example are averaged inside it, before
            clipping (Unlocking paper, equation 4).
        clip_norm: the clipping norm C, from 1e-12 to 1e12.
        strategy: how the clipping is computed, never what: one of `STRATEGIES`.
        memory: ``"default"``; ``"low"`` clips each physical batch in two halves, one
            after the other, for about half the memory.
        trainable: which float leaves are trained: a pytree of booleans like `params`,
            or a prefix of it, or a function from a leaf to a boolean; None for all.
            The others are constants: no gradient of them is formed, and none counts
            for the norms.

    Returns:
        A function of ``(params, batch, mask)``, usable under `jax.jit`, which on a CPU
        should be given `tanager.compiler_options()`.

    Raises:
        ValueError: `clip_norm`, `strategy` or `memory` is out of range.

    References:
        Abadi et al. 2016, arXiv:1607.00133, algorithm 1; Unlocking paper, equation (2).
    """
    validate.clipping_norm(clip_norm)
    validate.one_of(STRATEGIES, strategy=strategy)
    validate.one_of(batches.MEMORY, memory=memory)
    return ClippedGrad(loss, float(clip_norm), strategy, memory, trainable)


def split(
    params: PyTree, trainable: PyTree | Callable | None = None
) -> tuple[PyTree, PyTree]:
    """Return the leaves that are trained and the others, None in each other's place.

    Running statistics and other state of layers is never trained (`held_fixed`).

    Args:
        params: pytree of arrays or their shapes, or an Equinox module.
        trainable: as of `clipped_grad`.

    Raises:
        ValueError: `trainable` does not fit `params`.
    """
    trains = jax.tree.map(
        lambda leaf, held: _is_float(leaf) and not held, params, held_fixed(params)
    )
    numbers, others = eqx.partition(params, trains)
    if trainable is None:
        return numbers, others
    try:
        trained, frozen = eqx.partition(numbers, trainable)
    except ValueError as error:
        raise ValueError(
            "trainable must be a function of a leaf, or a pytree of booleans with the "
            f"structure of params or of a part of it: {error}"
        ) from error
    return trained, eqx.combine(frozen, others)


def _is_float(leaf: Any) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.issubdtype(leaf.dtype, jnp.inexact)
    return eqx.is_inexact_array(leaf)
