"""The unit of privacy, as a row of a physical batch: an example, or a person's.

Its gradient is clipped once. Views of an example, and the examples of a person, are
averaged before, inside its loss (equation 4 of the Unlocking paper).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from tanager.clipping.analysis.refusals import check_alone
from tanager.data import augment as augmentation
from tanager.sampling import PhysicalBatch
from tanager.training.problem import Problem


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """State what one row of a physical batch is.

    Attributes:
        example_loss: ``loss(model, example)`` of one example and view.
        augment: of one view; None without augmentation.
        multiplicity: K views of each example; 0 without augmentation.
        examples_per_group: k examples a row; None where a row is one example.
    """

    example_loss: Callable[[Any, Any], Array]
    augment: Callable[[jax.Array, Any], Any] | None
    multiplicity: int
    examples_per_group: int | None

    @classmethod
    def of(cls, problem: Problem, multiplicity: int) -> "Unit":
        """Return the unit of a problem, with this many views of each example."""
        groups = problem.groups
        return cls(
            problem.loss,
            problem.augment,
            multiplicity,
            None if groups is None else groups.examples_per_group,
        )

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the axes of a physical batch before those of an example."""
        each = self.examples_per_group
        return (rows,) if each is None else (rows, each)

    def padding(self, example: PyTree, rows: int) -> PhysicalBatch:
        """Return a physical batch of masked zeros; `example` has a leading axis."""
        axes = self.shape(rows)
        zeros = jax.tree.map(
            lambda leaf: np.zeros((*axes, *leaf.shape[1:]), leaf.dtype), example
        )
        return PhysicalBatch(zeros, np.zeros(axes, bool), np.zeros(axes, np.int32))

    def mask(self, batch: PhysicalBatch) -> Array:
        """Return which rows of a physical batch are no padding, bool[P]."""
        return batch.mask if self.examples_per_group is None else batch.mask.any(1)

    def check(self, batch: PhysicalBatch, key: Key[Array, ""]) -> None:
        """Refuse an augmentation that could mix the rows that `views` gives it."""
        if self.augment is not None:
            axes = len(self.shape(0))
            example = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype),
                batch.examples,
            )
            check_alone(self.augment, "augment", key, example)

    def views(self, batch: PhysicalBatch, key: Key[Array, ""]) -> PyTree:
        """Return what `loss` takes of each row: views, whatever batch it travels in.

        The randomness belongs to the pair (step, example), so that the size of
        physical batches cannot change the result.
        """

        def of_example(index: Array, example: Any) -> Any:
            if self.augment is None:
                return example
            own = jax.random.fold_in(key, index)
            return augmentation.views(self.augment, own, example, self.multiplicity)

        of_row = jax.vmap(of_example)
        if self.examples_per_group is None:
            return of_row(batch.indices, batch.examples)
        return jax.vmap(of_row)(batch.indices, batch.examples), batch.mask

    def loss(self, model: Any, views: Any) -> Array:
        """Return the loss of one row of `views`, a scalar."""
        if self.examples_per_group is None:
            return self._of_views(model, views)
        examples, mask = views
        # What the mask leaves out becomes another example of the same person. So not
        # even a value that is not finite can come from someone else.
        used = jnp.where(mask, jnp.arange(len(mask)), jnp.argmax(mask))
        own = jax.tree.map(lambda leaf: leaf[used], examples)
        losses = jax.vmap(lambda example: self._of_views(model, example))(own)
        return jnp.mean(losses, where=mask)

    def _of_views(self, model: Any, views: Any) -> Array:
        if self.multiplicity == 0:
            return self.example_loss(model, views)
        losses = jax.vmap(lambda view: self.example_loss(model, view))(views)
        return jnp.mean(losses)
