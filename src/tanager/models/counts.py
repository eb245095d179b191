"""How large a model is: parameters, and multiplications and additions of one image."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp

from tanager.clipping.analysis.jaxprs import aval


def count_parameters(model: Any) -> int:
    """Return how many numbers a model's arrays hold (shapes alone will do)."""
    return sum(leaf.size for leaf in jax.tree.leaves(model) if _is_array(leaf))


def count_flops(model: Any, image_shape: tuple[int, ...]) -> int:
    """Count the multiplications and additions of one forward pass of one image.

    Those of matrix products and convolutions, two for each term of a sum, padding
    included; norms, activations and the like are left out, as in published tables.
    Nothing is computed: the model is traced.

    Args:
        model: one of ours, or any module called on one image; shapes in the place of
            arrays (`eqx.filter_eval_shape`) will do.
        image_shape: (height, width, channels), or (features,).

    Raises:
        ValueError: the model holds a `while_loop`, whose turns cannot be counted.
    """
    arrays, rest = eqx.partition(model, _is_array)
    image = jax.ShapeDtypeStruct(image_shape, jnp.float32)
    closed = jax.make_jaxpr(lambda arrays, image: eqx.combine(arrays, rest)(image))(
        arrays, image
    )
    return _flops(closed.jaxpr)


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _flops(jaxpr: Any) -> int:
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: jex.JaxprEqn) -> int:
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left, result = aval(equation.invars[0]), aval(equation.outvars[0])
        terms = math.prod(left.shape[axis] for axis in contracted)
        return 2 * result.size * terms
    if name == "conv_general_dilated":
        kernel, result = aval(equation.invars[1]), aval(equation.outvars[0])
        outputs = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2 * result.size * (kernel.size // outputs)
    inner = [
        _flops(getattr(part, "jaxpr", part))
        for part in jex.jaxprs_in_params(equation.params)
    ]
    if name == "while" and any(inner):
        raise ValueError(
            "model holds a while_loop over products, whose turns cannot be counted: "
            "use scan, or fori_loop with a fixed number of turns"
        )
    if name == "scan":
        return equation.params["length"] * sum(inner)
    return max(inner) if name == "cond" else sum(inner)
