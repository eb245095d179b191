"""`jax.vmap` over models, for a CPU as well.

Mapped over models, a convolution becomes one of as many groups, which XLA computes on a
CPU two to ten times slower than as many convolutions. So here a function is evaluated
equation by equation, each mapped by `jax.vmap`, but a convolution whose image and
kernel both belong to a model is written out for each. What belongs to no model (a
patch of an image that all of them see) is computed once.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from tanager.clipping.analysis import jaxprs


class _Each(NamedTuple):
    """A value with an axis of models in front."""

    value: Any


def over_models(
    function: Callable, in_axes: Sequence[int | None]
) -> Callable[..., Any]:
    """Return `function` mapped over the leading axis of its mapped arguments.

    Args:
        function: of pytrees of arrays.
        in_axes: for each argument 0, or None where it is the same for all models.
    """
    if jax.default_backend() != "cpu":
        return jax.vmap(function, in_axes)

    def mapped(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        axes = jax.tree.leaves(
            [
                jax.tree.map(lambda _, axis=axis: axis == 0, argument)
                for argument, axis in zip(arguments, in_axes, strict=True)
            ]
        )
        models = next(
            leaf.shape[0] for leaf, each in zip(leaves, axes, strict=True) if each
        )
        one = [
            jax.ShapeDtypeStruct(leaf.shape[1:] if each else leaf.shape, leaf.dtype)
            for leaf, each in zip(leaves, axes, strict=True)
        ]
        closed, results = jax.make_jaxpr(
            lambda *leaves: function(*jax.tree.unflatten(structure, leaves)),
            return_shape=True,
        )(*one)
        values = [
            _Each(leaf) if each else leaf
            for leaf, each in zip(leaves, axes, strict=True)
        ]
        found = _evaluate(closed.jaxpr, closed.consts, values, models)
        return jax.tree.unflatten(
            jax.tree.structure(results), [_all(value, models) for value in found]
        )

    return mapped


def _all(value: Any, models: int) -> Any:
    if isinstance(value, _Each):
        return value.value
    return jnp.broadcast_to(value, (models, *jnp.shape(value)))


def _evaluate(
    jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any], models: int
) -> list[Any]:
    values = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True)
    )

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    for equation in jaxpr.eqns:
        found = _equation(equation, [read(atom) for atom in equation.invars], models)
        values.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(equation: Any, values: list[Any], models: int) -> list[Any]:
    each = [isinstance(value, _Each) for value in values]
    if not any(each):
        return jaxprs.evaluate(equation, values)
    name = equation.primitive.name
    if name in jaxprs.OPENED:
        inner = equation.params["jaxpr"]
        constants = getattr(inner, "consts", ())
        return _evaluate(getattr(inner, "jaxpr", inner), constants, values, models)
    if name == "conv_general_dilated" and all(each):
        written = [
            jaxprs.evaluate(equation, [value.value[model] for value in values])
            for model in range(models)
        ]
        return [_Each(jnp.stack(results)) for results in zip(*written, strict=True)]
    found = jax.vmap(
        lambda *values: jaxprs.evaluate(equation, values),
        in_axes=[0 if mapped else None for mapped in each],
    )(*(value.value if isinstance(value, _Each) else value for value in values))
    return [_Each(result) for result in found]
