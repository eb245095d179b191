"""Read and evaluate jaxprs, equation by equation (`interpret`).

Equations are evaluated by `jax.core.eval_jaxpr` on a jaxpr of one equation: binding
primitives with calls inside is different in JAX 0.10 and 0.11. Only primitives without
are bound directly, where they must be evaluated at another dtype (`evaluate_wide`).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from tanager.clipping.analysis.dtypes import accumulation_dtype, widen


OPENED = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat"}
"""Calls whose derivative is that of their body."""

Evaluation = Callable[[jex.JaxprEqn, list[Any]], Sequence[Any]]
"""From an equation and the values of its operands to the values of its results."""


def aval(atom: Any) -> Any:
    """Return the shape and dtype of a variable or literal."""
    return atom.aval


def is_float(value: Any) -> bool:
    """Whether an array, a variable or a shape is of floats or complex numbers.

    Parameters are real, but may pass through a complex transform.
    """
    return jnp.issubdtype(_dtype(value), jnp.inexact)


def is_reference(variable: jex.Var) -> bool:
    """Whether a variable is a mutable reference."""
    return "Ref" in type(aval(variable)).__name__


def _dtype(value: Any) -> Any:
    return getattr(value, "aval", value).dtype


def has_references(jaxpr: Any) -> bool:
    """Whether a jaxpr makes mutable references, at any depth."""
    every = every_equation(jaxpr.eqns)
    return any(is_reference(v) for each in every for v in each.outvars)


def every_equation(equations: Iterable[jex.JaxprEqn]) -> Iterator[jex.JaxprEqn]:
    """Yield these equations, and those of the jaxprs in them, at any depth."""
    for equation in equations:
        yield equation
        for inner in jaxprs_in(equation):
            yield from every_equation(inner.eqns)


def jaxprs_in(equation: jex.JaxprEqn) -> list[Any]:
    """Return the jaxprs in an equation, without their constants."""
    inner = jex.jaxprs_in_params(equation.params)
    return [getattr(each, "jaxpr", each) for each in inner]


def names(equations: Iterable[jex.JaxprEqn]) -> set[str]:
    """Return the names of the primitives of equations and of those within them."""
    return {each.primitive.name for each in every_equation(equations)}


def body_of(call: jex.JaxprEqn) -> tuple[Any, Sequence[Any]]:
    """Return the jaxpr of a call or a scan, and its constants."""
    jaxpr = call.params.get("jaxpr", call.params.get("call_jaxpr"))
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def interpret(
    jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], rule: Evaluation
) -> list[Any]:
    """Return the results of a jaxpr whose equations a rule evaluates one by one.

    Values may be of any kind; those of literals are the literals' own.
    """
    variables = (*jaxpr.constvars, *jaxpr.invars)
    values = dict(zip(variables, (*consts, *arguments), strict=True))
    values = walk(jaxpr.eqns, values, rule)
    return [read(values, atom) for atom in jaxpr.outvars]


def walk(
    equations: Iterable[jex.JaxprEqn], values: dict[jex.Var, Any], rule: Evaluation
) -> dict[jex.Var, Any]:
    """Evaluate equations one by one; return the values of all variables."""
    values = dict(values)
    for equation in equations:
        results = rule(equation, [read(values, atom) for atom in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return values


def variables(equation: jex.JaxprEqn) -> list[jex.Var]:
    """Return the operands of an equation that are not literals."""
    return [atom for atom in equation.invars if isinstance(atom, jex.Var)]


def read(values: dict[jex.Var, Any], atom: Any) -> Any:
    """Return the value of a variable or a literal."""
    return atom.val if isinstance(atom, jex.Literal) else values[atom]


def evaluate(equation: jex.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Evaluate one equation on the values of its operands, literals included."""
    pairs = zip(equation.invars, values, strict=True)
    own = {atom: value for atom, value in pairs if isinstance(atom, jex.Var)}
    names = ("",) * len(own), ("",) * len(equation.outvars)
    jaxpr = jex.Jaxpr(
        (),
        list(own),
        equation.outvars,
        [equation],
        effects=equation.effects,
        debug_info=jex.DebugInfo("tanager", "one equation", *names),
    )
    return list(jax.core.eval_jaxpr(jaxpr, (), *own.values()))


def evaluate_wide(
    equation: jex.JaxprEqn, values: Sequence[Any], *, exact: bool = False
) -> list[Any]:
    """Evaluate an equation with every narrow float operand and result as float32.

    A derivative taken through it is then float32 too, whatever the precision in which
    the model computes. Calls whose derivative is not that of their body keep their own
    precision within. With `exact`, products are in full float32 on every device.
    """
    casts = equation.primitive.name == "convert_element_type" and is_float(values[0])
    if casts and jnp.issubdtype(equation.params["new_dtype"], jnp.floating):
        wide = accumulation_dtype(equation.params["new_dtype"])
        return [jnp.asarray(values[0]).astype(wide)]
    if equation.primitive.name in OPENED:
        within = functools.partial(evaluate_wide, exact=exact)
        return [_wide(x) for x in interpret(*body_of(equation), values, within)]
    if any(jex.jaxprs_in_params(equation.params)):
        cast = [
            jnp.asarray(value, _dtype(atom)) if is_float(atom) else value
            for atom, value in zip(equation.invars, values, strict=True)
        ]
        return [_wide(result) for result in evaluate(equation, cast)]
    wide = [_wide(value) for value in values]
    params = dict(equation.params)
    if params.get("preferred_element_type") is not None and any(map(is_float, wide)):
        params["preferred_element_type"] = jnp.result_type(*wide)
    if exact and "precision" in params:
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    bound = equation.primitive.bind(*wide, **params)
    results = bound if equation.primitive.multiple_results else [bound]
    return [_wide(result) for result in results]


def _wide(value: Any) -> Any:
    return widen(jnp.asarray(value)) if is_float(jnp.asarray(value)) else value
