"""Links: the structural steps between a parameter and the place it meets data.

A parameter is cast, transposed, reshaped, sliced, broadcast, scaled by a number or
multiplied by a mask before it is used. Each such step is linear and its transpose is
written here, so that a gradient found where the parameter is used can be carried back
to the parameter in float32, whatever the dtype of the model, and without asking
autodiff for it.

A chain of links that only moves and scales entries keeps norms up to its scale; then
norms can be taken where the parameter is used.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from tanager.clipping.analysis.jaxprs import aval, variables


class Link(NamedTuple):
    """One step, seen from its result.

    Attributes:
        back: transpose of the step: gradient of the result to gradient of the operand.
        scale: ‖back(g)‖ = scale · ‖g‖; NaN if no number fits.
        box: entries of the operand that the result holds, as slices; None for all.
        entrywise: every entry of the result is the same entry of the operand, times
            `scale` or -`scale`.
        masks: every entry is that of the operand times a number of its own, which is
            why none fits as `scale`.
        result: the variable the step makes.
    """

    back: Callable[[Array], Array]
    scale: float = 1.0
    box: tuple[slice, ...] | None = None
    entrywise: bool = False
    masks: bool = False
    result: jex.Var | None = None


def same(gradient: Array) -> Array:
    """Return the gradient unchanged."""
    return gradient


def _reshape(equation: jex.JaxprEqn, _: int) -> Link | None:
    if equation.primitive.name == "reshape" and equation.params["dimensions"]:
        return None
    shape = _shape(equation)
    return Link(lambda gradient: gradient.reshape(shape))


def _transpose(equation: jex.JaxprEqn, _: int) -> Link:
    inverse = tuple(int(axis) for axis in np.argsort(equation.params["permutation"]))
    return Link(lambda gradient: jnp.transpose(gradient, inverse))


def _convert(equation: jex.JaxprEqn, _: int) -> Link | None:
    ends = aval(equation.invars[0]), aval(equation.outvars[0])
    real = all(jnp.issubdtype(end.dtype, jnp.floating) for end in ends)
    return Link(same, entrywise=True) if real else None


def _broadcast(equation: jex.JaxprEqn, _: int) -> Link:
    shape = _shape(equation)
    result = aval(equation.outvars[0]).shape
    place = dict(zip(equation.params["broadcast_dimensions"], shape, strict=True))
    grown = tuple(a for a, n in enumerate(result) if place.get(a, 1) != n)

    def back(gradient: Array) -> Array:
        return jnp.sum(gradient, axis=grown).reshape(shape)

    return Link(back, scale=math.nan if grown else 1.0)


def _times_number(equation: jex.JaxprEqn, _: int) -> Link | None:
    divide = equation.primitive.name == "div"
    one, other = equation.invars
    number = other if isinstance(other, jex.Literal) else one
    if not isinstance(number, jex.Literal) or np.iscomplexobj(number.val):
        return None
    if divide and (number is one or number.val == 0):
        return None
    factor = 1 / float(number.val) if divide else float(number.val)
    if not math.isfinite(factor):
        return None
    return Link(lambda gradient: gradient * factor, abs(factor), entrywise=True)


def _slice(equation: jex.JaxprEqn, _: int) -> Link:
    params = equation.params
    strides = params["strides"] or (1,) * len(params["start_indices"])
    box = map(slice, params["start_indices"], params["limit_indices"], strides)
    return _box_link(equation, tuple(box))


def _split(equation: jex.JaxprEqn, number: int) -> Link:
    axis, sizes = equation.params["axis"], equation.params["sizes"]
    start = int(sum(sizes[:number]))
    box = [slice(0, n, 1) for n in _shape(equation)]
    box[axis] = slice(start, start + int(sizes[number]), 1)
    return _box_link(equation, tuple(box))


def _box_link(equation: jex.JaxprEqn, box: tuple[slice, ...]) -> Link:
    shape = _shape(equation)

    def back(gradient: Array) -> Array:
        edges = [
            (s.start, n - s.start - max((m - 1) * s.step + 1, 0), s.step - 1)
            for s, n, m in zip(box, shape, gradient.shape, strict=True)
        ]
        return lax.pad(gradient, jnp.zeros((), gradient.dtype), edges)

    return Link(back, box=box)


def _shape(equation: jex.JaxprEqn) -> tuple[int, ...]:
    """Shape of the operand that is not a literal."""
    return aval(variables(equation)[0]).shape


Fixed = Mapping[jex.Var, Callable[[], Any]]
"""How to compute each value that no example reaches and that has no gradient."""

_LINKS: dict[str, Callable[[jex.JaxprEqn, int], Link | None]] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
    "convert_element_type": _convert,
    "copy": _convert,
    "copy_p": _convert,
    "neg": lambda equation, _: Link(jnp.negative, entrywise=True),
    "rev": lambda equation, _: Link(
        lambda gradient: lax.rev(gradient, equation.params["dimensions"])
    ),
    "broadcast_in_dim": _broadcast,
    "mul": _times_number,
    "div": _times_number,
    "slice": _slice,
    "split": _split,
}


def link(
    equation: jex.JaxprEqn,
    result: int,
    operand: jex.Var,
    fixed: Fixed,
    live: Container[jex.Var],
) -> Link | None:
    """Return the link from an operand to a result of an equation, or None.

    No other operand may be `live`, that is, have a gradient: it is a constant, or made
    of parameters by `stop_gradient`. Masks and straight-through estimators do that.
    """
    name, others = equation.primitive.name, [*variables(equation)]
    others.remove(operand)
    adds = name in ("add", "sub", "add_any")
    if any(v in live for v in others):
        return None
    if others or adds:
        step = _meets_fixed(equation, operand, fixed)
    else:
        make = _LINKS.get(name)
        step = make(equation, result) if make else None
    return step and step._replace(result=equation.outvars[result])


def _meets_fixed(equation: jex.JaxprEqn, operand: jex.Var, fixed: Fixed) -> Link | None:
    """Return the link of a sum, product or choice of an operand and other arrays."""
    name, atoms = equation.primitive.name, equation.invars
    place = atoms.index(operand)

    def of(number: int) -> Array:
        atom = atoms[number]
        value = atom.val if isinstance(atom, jex.Literal) else fixed[atom]()
        return jnp.asarray(value)

    if aval(operand).shape != aval(equation.outvars[0]).shape:
        return None
    if name in ("add", "add_any", "sub"):
        return Link(jnp.negative if name == "sub" and place else same)
    if name == "mul":
        other = 1 - place
        return Link(lambda g: g * of(other).astype(g.dtype), math.nan, masks=True)
    if name == "div" and place == 0:
        return Link(lambda g: g / of(1).astype(g.dtype), math.nan, masks=True)
    if name == "select_n" and place > 0:

        def back(gradient: Array) -> Array:
            mine = of(0).astype(jnp.int32) == place - 1
            return jnp.where(mine, gradient, jnp.zeros_like(gradient))

        return Link(back, math.nan, masks=True)
    return None


def back(links: Sequence[Link], gradient: Array) -> Array:
    """Carry a gradient from the end of a chain to its beginning."""
    for step in reversed(links):
        gradient = step.back(gradient)
    return gradient


def scale(links: Sequence[Link]) -> float:
    """Return s with ‖back(g)‖ = s·‖g‖ for every g, NaN if there is none."""
    return math.prod((step.scale for step in links), start=1.0)


def masks(links: Sequence[Link]) -> bool:
    """Whether a chain moves entries and multiplies each by a number of its own."""
    return any(step.masks for step in links) and all(
        step.masks or not math.isnan(step.scale) for step in links
    )


def alike(one: Sequence[Link], other: Sequence[Link]) -> bool:
    """Whether two chains are the same steps."""
    return [id(step.result) for step in one] == [id(step.result) for step in other]


def disjoint(one: Sequence[Link], other: Sequence[Link]) -> bool:
    """Whether two chains are known to end in different entries of one parameter.

    Known for chains that begin with the same steps and then slice differently. Not
    after a broadcast: its entries are the same entries of the parameter.
    """
    for mine, theirs in zip(one, other, strict=False):
        if mine.result is theirs.result:
            if math.isnan(mine.scale) and not mine.masks:
                return False
            continue
        if mine.box is None or theirs.box is None:
            return False
        if mine.box != theirs.box:
            sides = zip(mine.box, theirs.box, strict=True)
            return any(a.stop <= b.start or b.stop <= a.start for a, b in sides)
    return False


def entrywise(links: Sequence[Link]) -> bool:
    """Whether a chain does no more than cast, copy and scale."""
    return all(step.entrywise for step in links)
