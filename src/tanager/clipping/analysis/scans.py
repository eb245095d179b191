"""Scans whose steps take parameters: a tap in the step becomes one tap of all steps.

    y_t = f(x_t, w),  t = 1 … T     becomes, for gradients in w,     Y = F(X, w)

with X and Y stacked over the steps, and F one equation of the same kind: a product of
T rows for T products of one. If each step takes its slice w_t of stacked parameters W,
Y = F(X, W) is a batch of T products. The scan itself stays: it takes the perturbations
of y_t beside what it scanned, gives x_t beside its results, and its one backward pass
gives all dy_t.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array

from tanager.clipping.analysis import jaxprs
from tanager.clipping.analysis.jaxprs import aval


class Stacking(NamedTuple):
    """How the values of all steps, at axis 0, lie in one operand of F or its result.

    Attributes:
        axis: where the steps go.
        merged: whether they are one axis with that which follows them.
    """

    axis: int = 0
    merged: bool = False

    def stack(self, values: Array) -> Array:
        """Return the values of all steps as F has them."""
        moved = jnp.moveaxis(values, 0, self.axis)
        if not self.merged:
            return moved
        shape = list(moved.shape)
        shape[self.axis : self.axis + 2] = [shape[self.axis] * shape[self.axis + 1]]
        return moved.reshape(shape)

    def unstack(self, stacked: Array, steps: int) -> Array:
        """Return them with the steps at axis 0."""
        if self.merged:
            shape = list(stacked.shape)
            shape[self.axis : self.axis + 1] = [steps, shape[self.axis] // steps]
            stacked = stacked.reshape(shape)
        return jnp.moveaxis(stacked, self.axis, 0)


class Stacked(NamedTuple):
    """F, for one equation of a step.

    Attributes:
        scan: the scan.
        step: f, the equation of its step.
        links: equations that bring parameters to the form in which F takes them.
        equation: F, whose parameters are variables outside of the scan.
        data: its operands that are stacked, in order.
        moving: the variables of the step for them.
        xs: how each of these is stacked.
        ys: how results are.
    """

    scan: jex.JaxprEqn
    step: jex.JaxprEqn
    links: list[jex.JaxprEqn]
    equation: jex.JaxprEqn
    data: list[jex.Var]
    moving: list[jex.Var]
    xs: Stacking
    ys: Stacking


def stacked(
    scan: jex.JaxprEqn,
    equation: jex.JaxprEqn,
    outside: dict[jex.Var, Any],
    sliced: Container[jex.Var],
) -> Stacked:
    """Return F for an equation f of the step of a scan, which has one at least.

    `outside` has, for each variable that all steps share, or that is a slice of stacked
    parameters (then it is in `sliced`), that outside of the scan.
    """
    steps = scan.params["length"]
    operands = dict.fromkeys(jaxprs.variables(equation))
    moving = [v for v in operands if v not in outside]
    shared = [v for v in operands if v in outside]
    slices = [v in sliced for v in shared]

    def one(own: Sequence[Any], *xs: Any) -> list[Any]:
        values = dict(zip(shared, own, strict=True)) | dict(
            zip(moving, xs, strict=True)
        )
        read = [jaxprs.read(values, atom) for atom in equation.invars]
        return jaxprs.evaluate(equation, read)

    def traced(function: Callable, xs: Stacking, ys: Stacking) -> Stacked | None:
        shapes = [jax.eval_shape(xs.stack, _shaped(v, steps)) for v in moving]
        pairs = zip(shared, slices, strict=True)
        own = [_shaped(v, steps) if is_slice else _shaped(v) for v, is_slice in pairs]
        jaxpr = jax.make_jaxpr(function)(own, *shapes).jaxpr
        names = dict(zip(jaxpr.invars, [outside[v] for v in shared], strict=False))
        within = dict(zip(jaxpr.invars[len(shared) :], moving, strict=True))
        links, others = [], []
        for each in jaxpr.eqns:
            known = all(v in names for v in jaxprs.variables(each))
            invars = [
                atom if isinstance(atom, jex.Literal) else names.get(atom, atom)
                for atom in each.invars
            ]
            (links if known else others).append(each.replace(invars=invars))
            names |= {v: v for v in each.outvars} if known else {}
        if len(others) != 1 or others[0].outvars != jaxpr.outvars or jaxpr.constvars:
            return None
        order = sorted(within, key=others[0].invars.index)
        own = [within[v] for v in order]
        return Stacked(scan, equation, links, others[0], order, own, xs, ys)

    if _is_convolution_of(equation, moving) and not any(slices):
        numbers = equation.params["dimension_numbers"]
        xs, ys = (
            Stacking(spec[0], True) for spec in (numbers.lhs_spec, numbers.out_spec)
        )
        if (found := traced(one, xs, ys)) is not None:
            return found
    over = ([0 if is_slice else None for is_slice in slices], *(0 for _ in moving))
    last = len(aval(equation.outvars[0]).shape) if len(equation.outvars) == 1 else 0
    for axis in range(last + 1):
        every = jax.vmap(one, over, axis)
        if (found := traced(every, Stacking(), Stacking(axis))) is not None:
            return found
    whole = traced(jax.jit(jax.vmap(one, over)), Stacking(), Stacking())
    assert whole is not None
    return whole


def _is_convolution_of(equation: jex.JaxprEqn, moving: Sequence[jex.Var]) -> bool:
    """Whether images alone move, whose batch the steps can be part of."""
    return (
        equation.primitive.name == "conv_general_dilated"
        and moving == [equation.invars[0]]
        and equation.params["batch_group_count"] == 1
    )


def _shaped(variable: jex.Var, *stacked: int) -> jax.ShapeDtypeStruct:
    own = aval(variable)
    return jax.ShapeDtypeStruct((*stacked, *own.shape), own.dtype)
