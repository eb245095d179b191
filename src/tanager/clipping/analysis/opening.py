"""Open the calls of a loss in which parameters meet data.

`open_calls` retraces a loss so that they are gone:

    { lambda ; w x. y = jit[jaxpr={ u v. z = dot_general u v }] w x }   becomes
    { lambda ; w x. y = dot_general w x }

Calls that no parameter enters directly (an activation, say) stay closed, and so do
those whose derivative is not that of their body (`custom_jvp`, `custom_vjp`), which
are taken as one equation. A scan stays a scan: the calls in its step are opened, and
what is made of parameters alone, shared by all steps or a slice for each, is moved out
of it. It is written out step by step if a step takes slices of stacked parameters and
convolves with them, looks them up or scans over them: as layers apart these are faster.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from tanager.clipping.analysis.jaxprs import (
    OPENED,
    Evaluation,
    aval,
    body_of,
    evaluate,
    interpret,
    is_float,
    names,
    read,
    variables,
    walk,
)
from tanager.keys import is_key


LONGEST_UNROLLED_SCAN = 64
"""The longest scan over stacked parameters that is ever written out."""

_APART = {"conv_general_dilated", "gather", "dynamic_slice"}
"""What a slice of stacked parameters meets data in as a layer of its own."""


class Origin(IntEnum):
    """What a value of the loss depends on; the origin of a result is the greatest."""

    CONSTANT = 0
    PARAMETER = 1
    DATA = 2


class Parts(NamedTuple):
    """The operands of a scan, or the variables of its step, in order."""

    consts: list[Any]
    carry: list[Any]
    stacked: list[Any]


def parts_of(scan: jex.JaxprEqn, operands: Sequence[Any]) -> Parts:
    """Return the operands of a scan by what they are."""
    if "num_consts" in scan.params:
        consts, carried = scan.params["num_consts"], scan.params["num_carry"]
    else:  # JAX 0.11
        each = scan.params["ft_in"].update(operands).unpack()
        consts, carried = (len(list(part)) for part in each[:2])
    first, last = list(operands[:consts]), list(operands[consts + carried :])
    return Parts(first, list(operands[consts : consts + carried]), last)


def zero_of_data(values: Sequence[Any], like: Any) -> Array:
    """Return a zero that counts as data, whatever the data hold."""
    values = [jax.random.key_data(x) if is_key(x) else x for x in values]
    numbers = [x for x in values if jnp.issubdtype(x.dtype, np.number)]
    first = jnp.ravel((numbers or values)[0])[:1]
    return jnp.any(first < first).astype(jnp.result_type(like))


class _Marked(NamedTuple):
    """A value and what it depends on; values without a mark are constants."""

    value: Any
    origin: Origin


def _marked(values: Iterable[Any]) -> list[_Marked]:
    return [
        value if isinstance(value, _Marked) else _Marked(value, Origin.CONSTANT)
        for value in values
    ]


def _closed(equation: jex.JaxprEqn, operands: Sequence[_Marked]) -> list[_Marked]:
    """Evaluate an equation as it is."""
    results = evaluate(equation, [value for value, _ in operands])
    origin = max((origin for _, origin in operands), default=Origin.CONSTANT)
    return [_Marked(result, origin) for result in results]


def open_calls(
    closed: jex.ClosedJaxpr, origins: Sequence[Origin], *, nested: bool = False
) -> jex.ClosedJaxpr:
    """Retrace a jaxpr with the calls opened that a parameter enters.

    `origins` are those of its arguments; `nested` within the step of a scan, where
    further scans are written out.
    """

    def rule(equation: jex.JaxprEqn, operands: list[Any]) -> list[Any]:
        operands, name = _marked(operands), equation.primitive.name
        found = {origin for _, origin in operands}
        if Origin.PARAMETER in found and name in OPENED:
            return interpret(*body_of(equation), operands, rule)
        if name == "scan" and {Origin.PARAMETER, Origin.DATA} <= found:
            length = equation.params["length"]
            if length > 1 and not nested:
                results = _rolled(equation, operands)
                if results is not None:
                    return results
            if 0 < length <= LONGEST_UNROLLED_SCAN:
                return _written_out(equation, operands, rule)
        return _closed(equation, operands)

    def opened(*values):
        marked = list(map(_Marked, values, origins))
        results = interpret(closed.jaxpr, closed.consts, marked, rule)
        return [value for value, _ in _marked(results)]

    avals = [
        jax.ShapeDtypeStruct(each.shape, each.dtype, weak_type=each.weak_type)
        for each in map(aval, closed.jaxpr.invars)
    ]
    return jax.make_jaxpr(opened)(*avals)


def _written_out(
    scan: jex.JaxprEqn, operands: list[_Marked], rule: Evaluation
) -> list[_Marked]:
    """Evaluate a scan step by step; a slice of stacked parameters is a parameter."""
    consts, carry, stacked = parts_of(scan, operands)
    steps = range(scan.params["length"])
    outputs: dict[int, list] = {}
    for step in reversed(steps) if scan.params["reverse"] else steps:
        slices = [
            _Marked(lax.index_in_dim(x, step, keepdims=False), origin)
            for x, origin in stacked
        ]
        results = interpret(*body_of(scan), [*consts, *carry, *slices], rule)
        results = _marked(results)
        carry, outputs[step] = results[: len(carry)], results[len(carry) :]
    for column in zip(*(outputs[step] for step in steps), strict=True):
        values, origins = zip(*column, strict=True)
        carry.append(_Marked(jnp.stack(values), max(origins)))
    return carry


def _rolled(scan: jex.JaxprEqn, operands: list[_Marked]) -> list[_Marked] | None:
    """Evaluate a scan with its step opened, and without what is of parameters alone.

    Slices of stacked parameters, and what is made of them alone, are parameters. All
    else that changes from step to step counts as data: parameters that are carried and
    change meet data before the first step. None if the scan should be written out.
    """
    body, constants = body_of(scan)
    own, given = parts_of(scan, body.invars), parts_of(scan, operands)
    pairs = list(zip(own.carry, body.outvars[: len(own.carry)], strict=True))
    fixed = [before is after for before, after in pairs]
    origins = [origin for _, origin in given.consts]
    origins += [
        mark.origin if same else Origin.DATA
        for mark, same in zip(given.carry, fixed, strict=True)
    ]
    slices = [mark.origin == Origin.PARAMETER for mark in given.stacked]
    if any(slices) and "scan" in names(body.eqns):
        return None
    origins += [Origin.PARAMETER if own else Origin.DATA for own in slices]
    opened = open_calls(jex.ClosedJaxpr(body, constants), origins, nested=True)
    step = opened.jaxpr
    own = parts_of(scan, step.invars)

    known = dict(zip(step.constvars, _marked(opened.consts), strict=True))
    known.update(zip(own.consts, given.consts, strict=True))
    carried = list(zip(own.carry, given.carry, fixed, strict=True))
    known.update({v: mark for v, mark, same in carried if same})
    stacked = list(zip(own.stacked, given.stacked, slices, strict=True))
    known.update({v: mark for v, mark, is_slice in stacked if is_slice})
    sliced = {v for v, _, is_slice in stacked if is_slice}
    equations = _moved_out(step.eqns, known, sliced)
    met = [each for each in equations if sliced & set(variables(each))]
    if _APART & names(met):
        return None

    after = [v for v, same in zip(step.outvars, fixed, strict=False) if not same]
    outputs = step.outvars[len(fixed) :]
    needed = {v for each in equations for v in variables(each)}
    needed |= {v for v in (*after, *outputs) if isinstance(v, jex.Var)}
    handed = {v: mark.value for v, mark, is_slice in stacked if not is_slice}
    handed |= {v: known[v].value for v in known if v in sliced & needed}
    values = {v: mark.value for v, mark in known.items() if v not in sliced}
    moving = [v for v, _, same in carried if not same]
    data = [value for value, origin in operands if origin == Origin.DATA]

    def one(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        own_values = dict(zip((*moving, *handed), (*carry, *slices), strict=True))
        found = walk(equations, values | own_values, evaluate)
        met = [_Marked(read(found, v), _origin(v, known)) for v in (*after, *outputs)]
        met = [_as_data(mark, data) for mark in met]
        return met[: len(after)], met[len(after) :]

    start = [_as_data(mark, data) for _, mark, same in carried if not same]
    length, back = scan.params["length"], scan.params["reverse"]
    last, every = lax.scan(
        one, start, list(handed.values()), length=length, reverse=back
    )
    ends = iter(last)
    return [
        mark if same else _Marked(next(ends), Origin.DATA) for _, mark, same in carried
    ] + [_Marked(each, Origin.DATA) for each in every]


def _moved_out(
    step: Sequence[jex.JaxprEqn], known: dict[Any, _Marked], sliced: set[jex.Var]
) -> list[jex.JaxprEqn]:
    """Evaluate what of a step is of parameters alone, and return what is left of it.

    The results are added to `known`, and to `sliced` if they have one for each step.
    """
    left = []
    for equation in step:
        if equation.effects or any(v not in known for v in variables(equation)):
            left.append(equation)
            continue
        entering = _marked(read(known, atom) for atom in equation.invars)
        if sliced & set(variables(equation)):
            results = _for_each_step(equation, entering, sliced)
            sliced.update(equation.outvars)
        else:
            results = _closed(equation, entering)
        known.update(zip(equation.outvars, results, strict=True))
        if results[0].origin == Origin.CONSTANT:
            left.append(equation)  # cheaper made in each step than handed in
    return left


def _for_each_step(
    equation: jex.JaxprEqn, operands: Sequence[_Marked], sliced: set[jex.Var]
) -> list[_Marked]:
    """Evaluate an equation of a step for all steps, whose slices are at axis 0."""
    values = [value for value, _ in operands]
    own = [isinstance(v, jex.Var) and v in sliced for v in equation.invars]

    def one(slices: list[Any]) -> list[Any]:
        each = iter(slices)
        pairs = zip(values, own, strict=True)
        return evaluate(equation, [next(each) if is_own else x for x, is_own in pairs])

    results = jax.vmap(one)(
        [x for x, is_own in zip(values, own, strict=True) if is_own]
    )
    return [_Marked(result, Origin.PARAMETER) for result in results]


def _origin(atom: Any, known: dict[Any, _Marked]) -> Origin:
    """Return what a result of a step depends on; it is data if it is not known."""
    if isinstance(atom, jex.Literal):
        return Origin.CONSTANT
    return known[atom].origin if atom in known else Origin.DATA


def _as_data(mark: _Marked, data: Sequence[Any]) -> Any:
    if mark.origin != Origin.PARAMETER or not is_float(mark.value):
        return mark.value
    return mark.value + zero_of_data(data, mark.value)
