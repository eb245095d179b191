"""How large a model is: parameters, and multiplications and additions of one image."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp

from tanager.clipping.analysis.jaxprs import aval, jaxprs_in
from tanager.models import weights


def count_parameters(model: Any) -> int:
    """Return how many numbers the arrays (or shapes) of a model hold."""
    return sum(leaf.size for leaf in jax.tree.leaves(model) if weights.is_tensor(leaf))


def count_flops(model: Any, image_shape: tuple[int, ...]) -> int:
    """Count the multiplications and additions of one forward pass of one image.

    Matrix products and convolutions count, with two operations for each term of a sum
    and with padding; norms and activations do not, as in published tables. The model is
    traced, not run.

    Args:
        model: any module called on one image, with arrays or shapes
            (`eqx.filter_eval_shape`).
        image_shape: (height, width, channels), or (features,).

    Raises:
        ValueError: the model has a `while_loop`, whose number of turns is unknown.
    """
    image = jax.ShapeDtypeStruct(image_shape, jnp.float32)
    called = eqx.filter_make_jaxpr(lambda model, image: model(image))
    closed, *_ = called(model, image)
    return _flops(closed.jaxpr)


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
    inner = [_flops(part) for part in jaxprs_in(equation)]
    if name == "while" and any(inner):
        raise ValueError(
            "model has a while_loop over products, whose number of turns is unknown: "
            "use scan, or fori_loop with a fixed number of turns"
        )
    if name == "scan":
        return equation.params["length"] * sum(inner)
    return max(inner) if name == "cond" else sum(inner)
