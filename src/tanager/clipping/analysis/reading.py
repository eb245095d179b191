"""Read a loss: which of its equations come before the data, and where the taps are.

A use of w is followed back through its links (`links`) to its anchor:
a leaf of the parameters, or the first value that is not a leaf moved, cast and scaled.
Leaves that share an anchor, and the anchors they share, form a unit. The squared norm
of an example's gradient is the sum over units; within one there may be cross terms.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from jaxtyping import PyTree

from tanager.clipping.analysis import jaxprs, scans
from tanager.clipping.analysis.jaxprs import is_float
from tanager.clipping.analysis.links import Fixed, Link, link
from tanager.clipping.analysis.opening import Origin, open_calls, parts_of, zero_of_data
from tanager.clipping.analysis.recognise import recognise
from tanager.clipping.analysis.refusals import refuse_ill_defined
from tanager.clipping.analysis.taps import Program, Tap, Unit, Use, needed_for


def read_loss(
    loss: Callable, params: PyTree, example: PyTree, has_aux: bool = False
) -> Program:
    """Trace the loss of one example, perhaps (loss, aux), and find its taps."""
    leaves, params_tree = jax.tree.flatten(params)
    inputs, example_tree = jax.tree.flatten(example)

    def flat(*values):
        return loss(
            jax.tree.unflatten(params_tree, values[: len(leaves)]),
            jax.tree.unflatten(example_tree, values[len(leaves) :]),
        )

    def flat_with_data(*values):
        result, *aux = flat(*values) if has_aux else (flat(*values),)
        return result + zero_of_data(values[len(leaves) :], result), *aux

    origins = [Origin.PARAMETER] * len(leaves) + [Origin.DATA] * len(inputs)
    for function in (flat, flat_with_data):
        traced = jax.make_jaxpr(function, return_shape=True)
        closed, shapes = traced(*leaves, *inputs)
        if jaxprs.has_references(closed.jaxpr):  # `Program.needs_definition`
            return Program(closed, len(leaves), [], [], [], [], [])
        opened = open_calls(closed, origins)
        refuse_ill_defined(opened.jaxpr)
        program = _sort(opened, leaves)
        program.aux_tree = jax.tree.structure(shapes[1] if has_aux else ())
        if any(opened.jaxpr.outvars[0] in each.outvars for each in program.body):
            break
    return program


class _Live(NamedTuple):
    """A value of parameters alone: the equation that made it, the leaves it is of."""

    equation: jex.JaxprEqn | None
    leaves: set[jex.Var]


def _sort(closed: jex.ClosedJaxpr, values: Sequence[Any]) -> Program:
    jaxpr, leaves = closed.jaxpr, len(values)
    origins: dict[Any, Origin] = dict.fromkeys(jaxpr.constvars, Origin.CONSTANT)
    origins.update(dict.fromkeys(jaxpr.invars[:leaves], Origin.PARAMETER))
    origins.update(dict.fromkeys(jaxpr.invars[leaves:], Origin.DATA))
    live = {leaf: _Live(None, {leaf}) for leaf in jaxpr.invars[:leaves]}
    given = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    given.update(zip(jaxpr.invars, values, strict=False))
    prologue, body, taps = [], [], []
    fixed: dict[jex.Var, Callable[[], Any]] = {}

    def hold(variables: Sequence[jex.Var]) -> None:
        for own in variables:
            fixed[own] = functools.partial(_value, given, prologue, own)

    def sort(equation: jex.JaxprEqn) -> None:
        atoms = jaxprs.variables(equation)
        origin = max((origins[atom] for atom in atoms), default=Origin.CONSTANT)
        origins.update(dict.fromkeys(equation.outvars, origin))
        if origin == Origin.DATA:
            body.append(equation)
            return
        prologue.append(equation)
        if equation.primitive.name != "stop_gradient" and live.keys() & set(atoms):
            roots = set().union(*(live[a].leaves for a in atoms if a in live))
            own = _Live(equation, roots)
            live.update(dict.fromkeys(filter(is_float, equation.outvars), own))
        hold([own for own in equation.outvars if own not in live])

    hold(jaxpr.constvars)
    of_loss = needed_for(jaxpr.eqns, jaxpr.outvars[:1], effects=True)
    for equation in of_loss:
        sort(equation)
    reached = _reached(body, jaxpr.outvars[:1])
    for equation in body:
        meet = live.keys() & set(jaxprs.variables(equation))
        if not meet or not reached & set(equation.outvars):
            continue
        for each in _stacked(equation, origins, live, reached):
            if each is not None:
                for made in each.links:
                    sort(made)
                origins.update(dict.fromkeys(each.data, Origin.DATA))
            one = equation if each is None else each.equation
            if one.primitive.name not in _FLAT:
                taps.append(_tap(len(taps), one, origins, live, fixed, each))
    units = _units([use for tap in taps for use in tap.uses], jaxpr.invars, live)
    constants = {v: fixed[v] for v in fixed if origins[v] == Origin.CONSTANT}
    units = [_recognised(unit, prologue, jaxpr.invars, constants) for unit in units]
    others = needed_for(jaxpr.eqns, jaxpr.outvars)
    aux = [each for each in others if not any(each is one for one in of_loss)]
    return Program(closed, leaves, prologue, body, taps, units, aux)


def _stacked(
    equation: jex.JaxprEqn,
    origins: dict,
    live: dict[jex.Var, _Live],
    reached: set[Any],
) -> list[scans.Stacked | None]:
    """Return the equations of a scan's step in which parameters meet data.

    Those alone that a gradient reaches from what the loss uses of the scan: NNX returns
    the parameters of each step as well. [None] stands for the equation itself, if it is
    no scan, or one in which parameters are carried, returned, or made of others.
    """
    if equation.primitive.name != "scan" or not equation.params["length"]:
        return [None]
    step, _ = jaxprs.body_of(equation)
    own, given = (parts_of(equation, v) for v in (step.invars, equation.invars))
    carried = [v for v in given.carry if isinstance(v, jex.Var)]
    if any(v in live for v in carried) or step.constvars:
        return [None]
    pairs = zip(own.stacked, given.stacked, strict=True)
    outside: dict[jex.Var, Any] = {
        v: a for v, a in pairs if isinstance(a, jex.Var) and a in live
    }
    sliced, entering = {*outside}, {*outside}
    for inner, atom in zip(own.consts, given.consts, strict=True):
        if isinstance(atom, jex.Literal) or origins[atom] != Origin.DATA:
            outside[inner] = atom
            if isinstance(atom, jex.Var) and atom in live:
                entering.add(inner)
    found: list[scans.Stacked | None] = []
    if any(isinstance(v, jex.Var) and v in entering for v in step.outvars):
        return [None]
    after, outputs = step.outvars[: len(own.carry)], step.outvars[len(own.carry) :]
    results = zip(outputs, equation.outvars[len(own.carry) :], strict=True)
    inside = _reached(step.eqns, [*after, *(v for v, out in results if out in reached)])
    for each in step.eqns:
        atoms = jaxprs.variables(each)
        if not (entering & set(atoms) and inside & set(each.outvars)):
            continue
        if all(v in outside for v in atoms):
            return [None]
        found.append(scans.stacked(equation, each, outside, sliced))
    return found


_FLAT = {"ceil", "floor", "round", "sign", "stop_gradient", "while"}
"""No gradient passes these; of a while loop, `check_loss` had refused it."""


def _reached(equations: Sequence[jex.JaxprEqn], results: Sequence[Any]) -> set[Any]:
    """Return the variables that a gradient of the results may reach."""
    reached = {v for v in results if isinstance(v, jex.Var) and is_float(v)}
    for equation in reversed(equations):
        own = [v for v in equation.outvars if v in reached]
        if not own or equation.primitive.name in _FLAT:
            continue
        entered = equation.invars
        if equation.primitive.name in jaxprs.OPENED:
            within, _ = jaxprs.body_of(equation)
            pairs = zip(equation.outvars, within.outvars, strict=True)
            inner = _reached(within.eqns, [v for out, v in pairs if out in own])
            pairs = zip(equation.invars, within.invars, strict=True)
            entered = [atom for atom, v in pairs if v in inner]
        reached.update(a for a in entered if isinstance(a, jex.Var) and is_float(a))
    return reached


def _value(
    given: dict[jex.Var, Any], prologue: Sequence[jex.JaxprEqn], variable: jex.Var
) -> Any:
    """Return the value of a variable that no example reaches."""
    needed = needed_for(prologue, [variable])
    return jaxprs.walk(needed, given, jaxprs.evaluate)[variable]


def _tap(
    number: int,
    equation: jex.JaxprEqn,
    origins: dict,
    live: dict[jex.Var, _Live],
    fixed: Fixed,
    all_steps: scans.Stacked | None,
) -> Tap:
    data, uses = [], []
    for position, atom in enumerate(equation.invars):
        if isinstance(atom, jex.Literal) or atom in equation.invars[:position]:
            continue
        if origins[atom] == Origin.DATA:
            data.append(position)
        elif atom in live:
            uses.append(Use(number, position, *_chain(atom, live, fixed)))
    return Tap(number, equation, tuple(data), tuple(uses), all_steps)


def _chain(
    variable: jex.Var, live: dict[jex.Var, _Live], fixed: Fixed
) -> tuple[jex.Var, tuple[Link, ...]]:
    """Follow links back from a variable to its anchor."""
    links: list[Link] = []
    while (equation := live[variable].equation) is not None:
        operand = next(v for v in jaxprs.variables(equation) if v in live)
        result = equation.outvars.index(variable)
        step = link(equation, result, operand, fixed, live)
        if step is None:
            break
        links.append(step)
        variable = operand
    return variable, tuple(reversed(links))


def _units(
    uses: list[Use], leaves: Sequence[jex.Var], live: dict[jex.Var, _Live]
) -> list[Unit]:
    order: dict[jex.Var, None] = dict.fromkeys(use.anchor for use in uses)
    parts: list[tuple[set[jex.Var], set[jex.Var]]] = []  # anchors and their leaves
    for anchor in order:
        own = live[anchor].leaves
        shared = [part for part in parts if part[1] & own]
        parts = [part for part in parts if part not in shared]
        anchors = {anchor}.union(*(part[0] for part in shared))
        parts.append((anchors, own.union(*(part[1] for part in shared))))
    units = []
    for anchors, origin in parts:
        ordered = tuple(anchor for anchor in order if anchor in anchors)
        numbers = tuple(n for n, leaf in enumerate(leaves) if leaf in origin)
        own = tuple(use for use in uses if use.anchor in anchors)
        leaf = len(ordered) == 1 and live[ordered[0]].equation is None
        units.append(Unit(numbers, ordered, own, "leaf" if leaf else "general"))
    return sorted(units, key=lambda unit: list(order).index(unit.anchors[0]))


def _recognised(
    unit: Unit,
    prologue: Sequence[jex.JaxprEqn],
    leaves: Sequence[jex.Var],
    constants: Fixed,
) -> Unit:
    if unit.kind == "leaf" or len(unit.anchors) != 1:
        return unit
    (anchor,) = unit.anchors
    equations, own = needed_for(prologue, [anchor]), [leaves[n] for n in unit.leaves]
    form = recognise(equations, anchor, own, constants)
    return replace(unit, kind="standardised", form=form) if form else unit
