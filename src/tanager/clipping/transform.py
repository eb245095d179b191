"""`clipped_grad`: from the loss of one example to a sum of clipped gradients.

    grad_fn = clipped_grad(loss, clip_norm=1.0)
    out = grad_fn(params, batch, mask)

What the returned function promises, whatever the strategy:

1. `out.sum` is Σᵢ maskᵢ · clip_C(gᵢ) with clip_C(g) = min(1, C/‖g‖₂)·g, a sum and
   never a mean, where gᵢ is the gradient of ``loss(params, example_i)`` over all
   trainable leaves together. `transform`, a pytree of norms and `style` change what is
   clipped, in which parts, and how (`rules.factors`).
2. Masking one row of a physical batch, all others staying as and where they are, moves
   `out.sum` by at most `sensitivity` in the 2-norm: (1 + 2⁻¹¹)·C, with √Σ C_k² for C
   where parts of the gradient have norms C_k of their own, and 1 for each norm under
   ``style="unit"``. That is of the sum returned, rounding included, for any example and
   any other rows. Norms are upper bounds for it (`analysis.rounding`), so that examples
   whose terms cancel are clipped a little more than their gradient asks for.
3. Rows with ``mask = False`` contribute exact zeros, even where they are NaN.
4. An example of whose gradient a part has a NaN, an infinity, or a norm that overflows
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
| not from 1e-12 to 1e12 | any | refused; zero where C is traced |
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, PyTree

from tanager import _validate as validate
from tanager.clipping import book_keeping
from tanager.clipping.analysis import batches, keyed, refusals
from tanager.clipping.analysis.alone import one_at_a_time
from tanager.clipping.analysis.dtypes import widen
from tanager.clipping.analysis.layouts import safe_to_split
from tanager.clipping.analysis.reading import read_loss
from tanager.clipping.analysis.rounding import ALLOWANCE, FloatError
from tanager.clipping.analysis.taps import Program
from tanager.clipping.analysis.trainable import split as split
from tanager.clipping.gradient import ClippedGradient
from tanager.clipping.per_example import per_example
from tanager.clipping.planning.autotune import BUDGET, Timings
from tanager.clipping.planning.choices import (
    STRATEGIES,
    Plan,
    error_of,
    norm_groups,
    plan_clipping,
)
from tanager.clipping.planning.explain import Explanation, explain
from tanager.clipping.rules.factors import (
    CLIP,
    Limit,
    Style,
    by_row,
    checked_norms,
    parts_of,
    style_of,
)
from tanager.compiling import filter_jit, require_nans


@dataclass(eq=False, repr=False)
class ClippedGrad:
    """The function `clipped_grad` makes; it carries the sensitivity it enforces.

    Its attributes are the arguments of `clipped_grad`.
    """

    loss: Callable
    clip_norm: PyTree
    strategy: str = "auto"
    memory: str = "default"
    trainable: PyTree | Callable | None = None
    has_aux: bool = False
    style: Style = CLIP
    transform: Callable[[PyTree], PyTree] | None = None

    def __post_init__(self):
        self._takes_key = keyed.takes_key(self.loss)
        self._own = keyed.given_key(self.loss) if self._takes_key else self.loss
        self._compiled: dict[tuple[bool, bool], Callable] = {}
        self._checked: dict[Any, refusals.Read] = {}
        self._tuned: set[Any] = set()

    @property
    def sensitivity(self) -> Any:
        """How far masking one row moves `sum` in the 2-norm, rounding included.

        An array where `clip_norm` is traced and the style is not ``"unit"``.
        """
        return self.sensitivity_at(self.clip_norm)

    def sensitivity_at(self, clip_norm: PyTree) -> Any:
        """Return the sensitivity of a call that is given this clipping norm."""
        norms = jax.tree.leaves(checked_norms(clip_norm))
        return Limit(norms, style=self.style).reach() * (1 + ALLOWANCE)

    def __call__(
        self,
        params: PyTree,
        batch: PyTree,
        mask: ArrayLike | None = None,
        *,
        keys: Array | None = None,
        clip_norm: PyTree | None = None,
    ) -> Any:
        """Clip every example's gradient and add them up.

        Args:
            params: pytree of arrays, or an Equinox module; its float leaves are
                trained, or those of them that `trainable` names.
            batch: pytree of arrays with one leading axis of B rows.
            mask: bool[B], True for examples, False for padding; None for all True.
            keys: threefry keys[B], one a row, for a loss that takes a key:
                `tanager.example_keys`.
            clip_norm: in place of the clipping norm that was given before, without a
                second compilation; `sensitivity_at` of it is then the sensitivity.

        Returns:
            A `ClippedGradient`; with `has_aux`, that and the auxiliary results of each
            example, zeros in masked rows.

        Raises:
            ValueError: the loss is not a scalar float function of one example, mixes
                examples, the shapes of batch and mask disagree, keys or clipping norms
                do not fit, arrays are split over a mesh with axes of type Explicit, or
                XLA takes what is not finite for a number.
        """
        rows = batches.rows_of(batch, params)
        mask = batches.mask_of(mask, rows)
        if clip_norm is None:
            clip_norm = self.clip_norm
        else:
            with jax.transfer_guard("allow"):
                clip_norm = jax.tree.map(jnp.asarray, checked_norms(clip_norm))
        batches.refuse_typed_axes(params, batch)
        if (keys is None) == self._takes_key:
            raise ValueError(
                "keys must be given if the loss takes a third argument, key, and only "
                "then: keys=tanager.example_keys(seed, step, indices)"
            )
        if keys is not None:
            batch = keyed.Keyed(batch, keyed.words_of(keys, rows))
        with batches.on_this_device():
            require_nans()
            try:
                trainable, fixed, read = self._split(params, batch)
            except Exception as error:
                if batches.has_labels(params):
                    error.add_note(batches.EXCHANGED)
                raise
        alone, leaves = read.alone, jax.tree.leaves((params, batch, mask, clip_norm))
        split, clip = batches.may_be_split(leaves), functools.partial(self._clip, alone)
        clip = safe_to_split(clip) if split else clip
        if not (read.held or batches.traced(leaves)):
            self.tune(params, batch)
            clip = self._compiled.setdefault((split, bool(alone)), filter_jit(clip))
        with batches.on_this_device():
            return clip(trainable, fixed, batch, mask, clip_norm)

    def _split(
        self, params: PyTree, batch: PyTree
    ) -> tuple[PyTree, PyTree, refusals.Read]:
        """Return what is trained and what is not, having checked both and the loss."""
        trainable, fixed = split(params, self.trainable)
        shapes = batches.shapes_of((params, batch))
        # A new trace may find another loss: it may hold a flag that was changed.
        new = batches.traced(jax.tree.leaves((params, batch)))
        if new or (read := self._checked.get(shapes)) is None:
            refusals.check_leaves(trainable, fixed)
            own = trainable, fixed, batches.example_of(batch)
            read = refusals.check_loss(self._loss, *own, self.has_aux)
            parts_of(self.clip_norm, self._clipped_like(trainable))
            if not read.held:
                self._checked[shapes] = read
        return trainable, fixed, read

    def _loss(self, trainable: PyTree, fixed: PyTree, example: PyTree) -> Any:
        return self._own(eqx.combine(trainable, fixed), example)

    def _loss_of(self, fixed: PyTree) -> Callable[[PyTree, PyTree], Any]:
        return lambda trainable, example: self._loss(trainable, fixed, example)

    def _clipped_like(self, trainable: PyTree) -> PyTree:
        """Return the shapes of what is clipped: gradients, perhaps transformed."""
        wide = jax.eval_shape(lambda tree: jax.tree.map(widen, tree), trainable)
        return (
            wide
            if self.transform is None
            else refusals.check_transform(self.transform, wide)
        )

    def _gradients_of(
        self, fixed: PyTree, alone: str
    ) -> Callable[[PyTree, PyTree], Any]:
        """Return the function from a batch to ((losses, aux), what is clipped)."""
        loss, transform = self._loss_of(fixed), self.transform
        every = jax.value_and_grad(loss, has_aux=self.has_aux)

        def one(trainable: PyTree, example: PyTree) -> Any:
            results, gradient = every(trainable, example)
            if transform is not None:
                gradient = transform(jax.tree.map(widen, gradient))
            return results if self.has_aux else (results, ()), gradient

        return one_at_a_time(one) if alone else jax.vmap(one, (None, 0))

    def _clip(
        self,
        alone: str,
        trainable: PyTree,
        fixed: PyTree,
        batch: PyTree,
        mask: Bool[Array, " b"],
        clip_norm: PyTree,
    ) -> Any:
        empty, rows = not mask.shape[0], max(mask.shape[0], 1)
        if empty:  # clip one row of padding, and return none of its rows
            batch, mask = jax.tree.map(
                lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), (batch, mask)
            )
        gradients = self._gradients_of(fixed, alone)
        program = self._program(alone, trainable, fixed, batch)
        plans, limit, _ = self._plans(program, trainable, rows, clip_norm)

        def clip(rows: int, batch: PyTree, mask: Array) -> tuple[PyTree, PyTree]:
            plan = plans[rows]
            if plan.program is None:
                found = per_example(gradients, trainable, batch, mask, limit)
                total, own, (losses, more) = found
            else:
                parts = plan.program, plan.groups, plan.methods
                found = book_keeping.clip(*parts, trainable, batch, mask, limit)
                total, own, (losses, *more) = found
                more = jax.tree.unflatten(plan.program.aux_tree, more)
            # Widened before pieces are joined, or XLA rounds the losses in between.
            return total, jax.tree.map(
                lambda leaf: jnp.where(by_row(mask, leaf), leaf, jnp.zeros_like(leaf)),
                (own, widen(losses), more),
            )

        total, each = batches.in_pieces(clip, batch, mask, self.memory)
        own, losses, more = jax.tree.map(lambda leaf: leaf[:0], each) if empty else each
        norms = jax.tree.structure(clip_norm).unflatten(own)
        out = ClippedGradient(total, norms, losses)
        out = out.marked(self.sensitivity_at(clip_norm))
        return (out, more) if self.has_aux else out

    def _program(
        self, alone: str, trainable: PyTree, fixed: PyTree, batch: PyTree
    ) -> Program | None:
        """Return the loss taken apart; None where it is clipped by its definition."""
        if alone or self.strategy == "per_example" or self.transform is not None:
            return None
        loss = self._loss_of(fixed)
        example = batches.example_of(batch)
        program = read_loss(loss, trainable, example, self.has_aux)
        return None if program.needs_definition else program

    def _plans(
        self, program: Program | None, trainable: PyTree, rows: int, clip_norm: PyTree
    ) -> tuple[dict[int, Plan], Limit, FloatError]:
        """Return a plan for each size of piece, the limit, and what rounding does."""
        like = self._clipped_like(trainable)
        limit = Limit(jax.tree.leaves(clip_norm), parts_of(clip_norm, like), self.style)
        sizes = {size for _, size in batches.pieces(rows, self.memory)}
        plans = {
            size: plan_clipping(program, size, self.strategy, limit.parts)
            for size in sorted(sizes)
        }
        error = error_of(plans, like, rows, limit)
        return plans, limit._replace(target=error.target), error

    def tune(
        self,
        params: PyTree,
        batch: PyTree,
        report: Callable[[str], None] | None = None,
        worth: float = math.inf,
        seconds: float = BUDGET,
    ) -> bool:
        """Under ``"auto"``, measure what is not known yet for shapes like these.

        What is found is remembered on disk (`planning.autotune`) for later traces: one
        inside an outer `jax.jit` cannot measure. A call outside `jax.jit` does this by
        itself. Takes and raises what a call does; `report` is called with a line for
        each measurement. What takes longest is measured first, for `seconds` at the
        most and for the time of clipping `worth` such batches.

        Returns:
            True if anything was measured; traces made before may clip otherwise.
        """
        for name, limit in (("worth", worth), ("seconds", seconds)):
            if not limit >= 0:
                validate.refuse(name, limit, "must not be negative")
        batch = self._with_keys(batch)
        shapes = batches.shapes_of((params, batch))
        if self.strategy != "auto" or shapes in self._tuned:
            return False
        trainable, fixed, read = self._split(params, batch)
        program = self._program(read.alone, trainable, fixed, batch)
        parts = parts_of(self.clip_norm, self._clipped_like(trainable))
        groups = [] if program is None else norm_groups(program, parts)
        pieces = batches.pieces(max(batches.rows_of(batch), 1), self.memory)
        sizes = sorted({rows for _, rows in pieces})
        limits = report, worth, seconds / len(sizes)
        measured = [Timings().measure(groups, rows, *limits) for rows in sizes]
        self._tuned.add(shapes)
        return any(measured)

    def explain(self, params: PyTree, batch: PyTree) -> Explanation:
        """Return a table of the taps: what is done at each, why, and what it takes.

        Under ``"auto"`` what is not known yet is measured first. Takes and raises what
        a call does.
        """
        batch = self._with_keys(batch)
        self.tune(params, batch)
        trainable, fixed, (alone, _) = self._split(params, batch)
        rows = max(batches.rows_of(batch), 1)
        program = self._program(alone, trainable, fixed, batch)
        plans, _, error = self._plans(program, trainable, rows, self.clip_norm)
        why = "transform takes whole gradients" if self.transform is not None else ""
        why = f"{alone} needs examples one at a time" if alone else why
        return explain(next(iter(plans.values())), error, why)

    def _with_keys(self, batch: PyTree) -> PyTree:
        """Return a batch with keys of zeros if the loss takes any, for its shapes."""
        rows = batches.rows_of(batch)
        if not self._takes_key or isinstance(batch, keyed.Keyed):
            return batch
        words = jnp.zeros((rows, 2), jnp.uint32)
        return keyed.Keyed(batch, words)


def clipped_grad(
    loss: Callable,
    *,
    clip_norm: PyTree,
    strategy: str = "auto",
    memory: str = "default",
    trainable: PyTree | Callable | None = None,
    has_aux: bool = False,
    style: str | Style = "clip",
    transform: Callable[[PyTree], PyTree] | None = None,
) -> ClippedGrad:
    """Transform the loss of ONE example into a sum of clipped per-example gradients.

    Args:
        loss: ``loss(params, example) -> scalar``, written for one example: no batch
            axis. Several augmented views of one example are averaged inside it, before
            clipping (Unlocking paper, equation 4). ``loss(params, example, key)`` is
            given a random key for each example, the argument `keys` of a call, also
            where `key` has a default.
        clip_norm: the clipping norm C, from 1e-12 to 1e12; or a pytree of them with the
            structure of `params` or of a part of it, each for the leaves below it. They
            may be traced, as may those that a call is given.
        strategy: how the clipping is computed, never what: one of `STRATEGIES`.
        memory: ``"default"``; ``"low"`` clips each physical batch in two halves, one
            after the other, for about half the memory.
        trainable: which float leaves are trained: a pytree of booleans like `params`,
            or a prefix of it, or a function from a leaf to a boolean; None for all.
            The others are constants: no gradient of them is formed, and none counts
            for the norms.
        has_aux: whether the loss returns (loss, aux) with a pytree of arrays, which is
            then returned for each example. It is not clipped, and is private.
        style: ``"clip"`` scales longer gradients to C, and ``"unit"`` then divides all
            by C; ``"automatic"`` scales each to just below C. Or a `Style`.
        transform: what is clipped instead of the gradient, as a function of it: from
            the gradient of one example, in float32 or wider, to a pytree of floats. It
            may use nothing that depends on other examples. Gradients are then formed
            whole, whatever the strategy, and `sum` is like what it returns.

    Returns:
        A function of ``(params, batch, mask)``, usable under `jax.jit`. Give that
        `tanager.compiler_options()`: on a GPU, XLA may compile for minutes without.

    Raises:
        ValueError: an argument is out of range, or of another kind.

    References:
        Abadi et al. 2016, arXiv:1607.00133, algorithm 1; Unlocking paper, equation (2).
    """
    validate.one_of(STRATEGIES, strategy=strategy)
    validate.one_of(batches.MEMORY, memory=memory)
    if not (transform is None or callable(transform)):
        rule = "must be a function of one example's gradient, or None"
        validate.refuse("transform", transform, rule)
    validate.instance(bool, "True where the loss returns (loss, aux)", has_aux=has_aux)
    style, norms = style_of(style), checked_norms(clip_norm)
    return ClippedGrad(
        loss, norms, strategy, memory, trainable, has_aux, style, transform
    )
