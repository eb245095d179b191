"""Losses whose examples are taken one at a time, because `vmap` would not do.

| in the loss | under `vmap` |
|---|---|
| `unvmap_any` and its like of Equinox, where they change a value | one answer for all |
| `jax.lax.ragged_dot` | refused by JAX where rows have one parameter |
| `jax.custom_batching.sequential_vmap` | a loop, of what JAX may not map |
| `pallas_call` with scratch memory | one kernel: a row finds what others left in it |

The gradient of such a loss is that of one example, in a loop over the rows
(`one_at_a_time`): nothing in it has an axis of rows, so it cannot mix them.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax.custom_batching import sequential_vmap
from jaxtyping import PyTree

from tanager.clipping.analysis.jaxprs import every_equation, jaxprs_in, names


_SEQUENTIAL = getattr(sequential_vmap(lambda x: x).vmap_rule, "__code__", None)

_OF_THE_BATCH = ("unvmap_any", "unvmap_all", "unvmap_max")
"""Equinox's: under `vmap`, one answer for all rows."""

_CHOOSING = ("and", "or", "not", "convert_element_type", "copy")
"""What may stand between such an answer and the end of a loop."""

_LOOP = "equinox.internal.while_loop"
"""In the message of what Equinox's loops do with such an answer."""

ERROR_IF = "branched_error_if_impl"
"""The call in which Equinox raises an error, by a callback."""

_WITHOUT_VMAP = {
    "custom_vmap_call": "sequential_vmap",
    "ragged_dot": "ragged_dot",
    "ragged_dot_general": "ragged_dot",
}


def one_at_a_time(
    function: Callable[[PyTree, PyTree], PyTree],
) -> Callable[[PyTree, PyTree], PyTree]:
    """Return what `jax.vmap(function, (None, 0))` does, one row after the other.

    An outer `vmap`, over models say, is done one by one too. Where that one is
    differentiated, it takes all models together, as the loss itself would.
    """

    def rows(params: PyTree, batch: PyTree) -> PyTree:
        return jax.lax.map(lambda row: function(params, row), batch)

    def each(params: PyTree, batch: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(rows, return_shape=True)(params, batch)

        # With all that the loss holds, which may be traced outside.
        def run(held: list, leaves: list) -> list:
            return jax.core.eval_jaxpr(closed.jaxpr, held, *leaves)

        # JAX differentiates no `sequential_vmap`.
        called = jax.custom_jvp(sequential_vmap(run))
        called.defjvp(lambda given, along: jax.jvp(run, given, along))
        found = called(closed.consts, jax.tree.leaves((params, batch)))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return each


def is_sequential(equation: Any) -> bool:
    """Whether a `custom_vmap_call` has the rule of JAX's `sequential_vmap`."""
    rule = inspect.unwrap(equation.params["rule"])
    return getattr(rule, "__code__", None) is _SEQUENTIAL is not None


def needed_by(jaxpr: Any) -> str:
    """Return what of a loss needs its examples one at a time, or an empty text."""
    for equation in every_equation(jaxpr.eqns):
        name = equation.primitive.name
        kernel = equation.params.get("grid_mapping")
        if name in _WITHOUT_VMAP or getattr(kernel, "num_scratch_operands", 0):
            return _WITHOUT_VMAP.get(name, name)
    return _answer_of_the_batch(jaxpr)


def _answer_of_the_batch(jaxpr: Any, allowed: bool = False) -> str:
    """Return which of Equinox's `unvmap_any` and the like changes a value, or nothing.

    They change none in Equinox's own loops, which run until all rows have ended and
    leave the rows that have ended as they are, nor where `equinox.error_if` raises.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        asks = name in _OF_THE_BATCH and not allowed
        if asks and not _only_ends_loops(jaxpr, equation.outvars[0]):
            return name
        for inner in jaxprs_in(equation):
            raises = equation.params.get("name") == ERROR_IF
            raises = raises and "pure_callback" in names(inner.eqns)
            if found := _answer_of_the_batch(inner, allowed or raises):
                return found
    return ""


def _only_ends_loops(jaxpr: Any, answer: Any) -> bool:
    """Whether an answer only decides how long loops of Equinox run.

    A loop or a branch that it chooses elsewhere may change rows that need no change.
    """
    for equation in jaxpr.eqns:
        if not any(atom is answer for atom in equation.invars):
            continue
        name = equation.primitive.name
        if name == "nonbatchable" and _LOOP in str(equation.params.get("msg")):
            continue
        if name not in _CHOOSING or not _only_ends_loops(jaxpr, equation.outvars[0]):
            return False
    return not any(atom is answer for atom in jaxpr.outvars)
