"""`jax.vmap` over models, for a CPU as well.

Mapped over models, a convolution becomes one of as many groups, which XLA computes on a
CPU two to ten times slower than as many convolutions. So here a function is evaluated
equation by equation, each mapped by `jax.vmap`, but a convolution whose image and
kernel both belong to a model is written out for each. What belongs to no model (a
patch of an image that all of them see) is computed once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tanager.clipping.analysis import jaxprs


class _Each(NamedTuple):
    """A value with an axis of models in front."""

    value: Any


def over_models(
    function: Callable, in_axes: Sequence[int | None]
) -> Callable[..., Any]:
    """Return `function` mapped over models: axis 0, or None where all have the same."""
    if jax.default_backend() != "cpu":
        return jax.vmap(function, in_axes)

    def mapped(*arguments: Any) -> Any:
        values = [
            leaf if axis is None else _Each(leaf)
            for argument, axis in zip(arguments, in_axes, strict=True)
            for leaf in jax.tree.leaves(argument)
        ]
        models = next(v.value.shape[0] for v in values if isinstance(v, _Each))
        one = [
            argument if axis is None else jax.eval_shape(_first, argument)
            for argument, axis in zip(arguments, in_axes, strict=True)
        ]
        closed, results = jax.make_jaxpr(function, return_shape=True)(*one)
        rule = functools.partial(_equation, models)
        found = jaxprs.interpret(closed.jaxpr, closed.consts, values, rule)
        return jax.tree.unflatten(
            jax.tree.structure(results), [_all(value, models) for value in found]
        )

    return mapped


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _all(value: Any, models: int) -> Any:
    if isinstance(value, _Each):
        return value.value
    return jnp.broadcast_to(value, (models, *jnp.shape(value)))


def _equation(models: int, equation: Any, values: list[Any]) -> list[Any]:
    each = [isinstance(value, _Each) for value in values]
    if not any(each):
        return jaxprs.evaluate(equation, values)
    name = equation.primitive.name
    if name in jaxprs.OPENED:
        rule = functools.partial(_equation, models)
        return jaxprs.interpret(*jaxprs.body_of(equation), values, rule)
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
