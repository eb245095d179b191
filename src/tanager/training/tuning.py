"""How each device clips its rows of a physical batch: measured before a run."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from tanager.clipping import Explanation
from tanager.clipping.planning.autotune import Timings
from tanager.parallel import hosts
from tanager.sampling import PhysicalBatch
from tanager.training.step import Step


def explain(
    step: Step,
    params: PyTree,
    example: PyTree,
    physical_batch_size: int,
    report: Callable[[str], None] = lambda _: None,
    worth: float = math.inf,
) -> Explanation:
    """Return how a device clips its rows of a physical batch, measured if needed.

    `example` has a leading axis. `report` is called with what is being measured,
    `worth` is that of `ClippedGrad.tune`.
    """
    rows = step.unit.shape(step.layout.rows_each(physical_batch_size))

    def views(example: PyTree) -> PyTree:
        examples = jax.tree.map(
            lambda leaf: jnp.zeros((*rows, *leaf.shape[1:]), leaf.dtype), example
        )
        indices = jnp.zeros(rows, jnp.int32)
        batch = PhysicalBatch(examples, indices == 0, indices)
        return step.unit.views(batch, step.augmentation_key(0))

    shapes = jax.eval_shape(views, example)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    model = eqx.combine(params, step.fixed)
    if step.grad_fn.tune(model, zeros, report, worth, math.inf):
        step.forget_traces()
    return step.grad_fn.explain(model, zeros)


def sync_clipping(
    step: Step,
    example: PyTree,
    physical_batch_size: int,
    report: Callable[[str], None],
    worth: float = math.inf,
) -> Explanation:
    """Return how every device clips its rows, as measured on the chief.

    Other timings would choose other methods, whose sums round differently, and on
    several hosts the devices must run one program. Arguments as of `explain`.
    """
    arguments = step, step.params, example, physical_batch_size, report, worth
    clipping = explain(*arguments) if hosts.is_chief() else None
    timings = hosts.from_chief(lambda: Timings().as_json())
    if clipping is None:
        Timings().adopt(timings)
        step.forget_traces()
        clipping = explain(*arguments)
    hosts.require_same("clipping", clipping.fingerprint)
    return clipping
