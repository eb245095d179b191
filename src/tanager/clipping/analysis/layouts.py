"""Clipping of arrays that XLA splits over several devices by itself.

Inside `jax.shard_map` each device computes on its own rows, and nothing here applies.
Elsewhere (an outer `jax.jit`, arrays placed with `jax.device_put`) XLA's partitioner
splits the program. It computes wrong values for a convolution whose groups are the
examples of a split batch: the kernel gradients of `jax.vmap(jax.grad(loss))`
(jax-ml/jax issue 32157). So such convolutions are computed there by a batched product
of patches, which XLA splits correctly. Where no split is possible they stay.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from tanager.clipping.analysis.jaxprs import aval, every_equation


def safe_to_split(function: Callable) -> Callable:
    """Return a function that XLA splits correctly over devices; not differentiable."""

    def safe(*arguments: PyTree) -> PyTree:
        closed, shapes, others = eqx.filter_make_jaxpr(function)(*arguments)
        leaves = jax.tree.leaves(eqx.filter(arguments, eqx.is_array))
        found = jax.core.eval_jaxpr(_safe(closed.jaxpr), closed.consts, *leaves)
        arrays = jax.tree.unflatten(jax.tree.structure(shapes), found)
        return eqx.combine(arrays, others)

    return safe


def _safe(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """Return a jaxpr without convolutions that XLA splits wrongly, at any depth."""
    return jaxpr.replace(eqns=[_equation(equation) for equation in jaxpr.eqns])


def _equation(equation: jex.JaxprEqn) -> jex.JaxprEqn:
    if _unsafe(equation):
        return _by_products(equation)
    if not any(map(_unsafe, every_equation([equation]))):
        return equation
    params = {key: _param(value) for key, value in equation.params.items()}
    return equation.replace(params=params)


def _unsafe(equation: jex.JaxprEqn) -> bool:
    """Whether a convolution has groups, or those of an outer `vmap` would harm it.

    XLA is wrong where a kernel has one input feature: one image, in a kernel gradient.
    """
    if equation.primitive.name != "conv_general_dilated":
        return False
    params, kernel = equation.params, aval(equation.invars[1])
    groups = params["feature_group_count"] * params["batch_group_count"]
    return groups > 1 or kernel.shape[params["dimension_numbers"].rhs_spec[1]] == 1


def _param(value: Any) -> Any:
    if isinstance(value, jex.Jaxpr):
        return _safe(value)
    if isinstance(value, jex.ClosedJaxpr):
        return value.replace(jaxpr=_safe(value.jaxpr))
    if any(jex.jaxprs_in_params({"": value})):
        parts = [_param(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _by_products(equation: jex.JaxprEqn) -> jex.JaxprEqn:
    """Return one call in place of a convolution."""
    operands = [
        jax.ShapeDtypeStruct(aval(atom).shape, aval(atom).dtype)
        for atom in equation.invars
    ]

    def convolve(x: Array, kernel: Array) -> Array:
        return convolution_by_products(x, kernel, equation.params)

    (call,) = jax.make_jaxpr(jax.jit(convolve))(*operands).eqns
    return call.replace(invars=equation.invars, outvars=equation.outvars)


def convolution_by_products(x: Array, kernel: Array, asked: Mapping[str, Any]) -> Array:
    """Compute `lax.conv_general_dilated` with one gather per axis and one product."""
    numbers: lax.ConvDimensionNumbers = asked["dimension_numbers"]
    strides, dilation = asked["window_strides"], asked["rhs_dilation"]
    groups, batch_groups = asked["feature_group_count"], asked["batch_group_count"]
    x, kernel = (
        jnp.transpose(x, numbers.lhs_spec),
        jnp.transpose(kernel, numbers.rhs_spec),
    )
    zero = jnp.zeros((), x.dtype)
    spatial = [
        (*ends, n - 1)
        for ends, n in zip(asked["padding"], asked["lhs_dilation"], strict=True)
    ]
    x = lax.pad(x, zero, [(0, 0, 0), (0, 0, 0), *spatial])
    # Axes of x become (images, features, *(position, offset) of each spatial axis).
    count = len(strides)
    extents = []
    for axis in reversed(range(count)):
        size, width = x.shape[2 + axis], kernel.shape[2 + axis]
        stride, spread = strides[axis], dilation[axis]
        extent = (size - (width - 1) * spread - 1) // stride + 1
        extents.insert(0, extent)
        starts, offsets = jnp.arange(extent) * stride, jnp.arange(width) * spread
        places = starts[:, None] + offsets[None, :]
        x = jnp.take(x, places, axis=2 + axis, mode="clip")
    groups = max(groups, batch_groups)
    images, features = x.shape[:2]
    if batch_groups > 1:
        images //= groups
        x = x.reshape(groups, images, features, *x.shape[2:])
    else:
        x = x.reshape(images, groups, features // groups, *x.shape[2:])
        x = jnp.moveaxis(x, 1, 0)
    kernel = kernel.reshape(groups, -1, *kernel.shape[1:])
    found = lax.dot_general(
        x,
        kernel,
        (
            ((2, *range(4, 4 + 2 * count, 2)), (2, *range(3, 3 + count))),
            ((0,), (0,)),
        ),
        precision=asked["precision"],
        preferred_element_type=asked["preferred_element_type"],
    )
    # [groups, images, *positions, outputs of a group]
    found = jnp.moveaxis(found, (0, -1), (1, 2))
    found = found.reshape(images, -1, *extents)
    inverse = sorted(range(2 + count), key=numbers.out_spec.__getitem__)
    return jnp.transpose(found, inverse)
