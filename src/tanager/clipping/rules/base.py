"""What can be done at a tap, given (x, dy) of every example: the general rule.

A rule offers up to three kinds of method, each under one or more names:

- gram: squared norms of per-example gradients without forming them;
- gradient: the per-example gradients, for `chunk` examples at a time, with entries in
  an order of the method's own: their sum alone is brought to the anchor's;
- total: Σ_i c_i·g_i from (x, dy), for rules that know how its rounding is bounded.

`Rule` is right for every equation, linear in the parameter or not: it offers gradients
alone, by `vmap` of the equation's own `vjp`. The rules for products, convolutions and
gathers stand in files of their own.

Everything a rule returns is float32, or float64 where the loss is.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tanager.clipping.analysis import jaxprs, links
from tanager.clipping.analysis.dtypes import accumulation_dtype, widen
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.layouts import safe_to_split
from tanager.clipping.analysis.taps import Tap, Use, float_results
from tanager.clipping.rules.factors import by_row
from tanager.clipping.rules.grams import Gram


DIRECT = "batched"
"""Name of the sum that forms no gradients (`Dot.direct`, `Gather.direct`)."""


@dataclass(frozen=True, eq=False)
class TapValues:
    """What one backward pass leaves at a tap, leading axis B everywhere.

    `data` are the operands that depend on examples (x), `results` what the equation
    gave (y), `gradients` those of the loss in its float results (dy), `constants` the
    values of every variable no example reaches.

    Products with it are `exact`, in full float32 on devices that would round their
    operands, where a norm and a sum do not come from the same gradients: the rounding
    of one could be all that the other is.
    """

    data: Sequence[Array]
    results: Sequence[Array]
    gradients: Sequence[Array]
    constants: dict[jex.Var, Any]
    exact: bool = False

    @property
    def rows(self) -> int:
        """B."""
        return self.gradients[0].shape[0]

    def finite(self) -> Array:
        """Return which rows hold finite numbers only."""
        rows = [
            jnp.all(jnp.isfinite(x.reshape(x.shape[0], -1)), axis=1)
            for x in (*self.data, *self.gradients)
            if jaxprs.is_float(x)
        ]
        return functools.reduce(jnp.logical_and, rows)

    def part(self, start: int, rows: int) -> "TapValues":
        """Return some of the examples, in order."""
        part = slice(start, start + rows)
        return replace(
            self,
            data=[x[part] for x in self.data],
            results=[y[part] for y in self.results],
            gradients=[dy[part] for dy in self.gradients],
        )

    def exactly(self) -> "TapValues":
        """Return the same, for exact products."""
        return replace(self, exact=True)

    def with_gradients(self, gradients: Sequence[Array]) -> "TapValues":
        """Return the same with another dy."""
        return replace(self, gradients=gradients)

    def scaled(self, factors: Float[Array, " b"]) -> "TapValues":
        """Return x and factor·dy.

        factor·dy is float32 or wider: rounded to bfloat16, positions that cancel in dy
        would not in factor·dy, and leave more than the norm allows.
        """

        def scale(dy: Array) -> Array:
            dy = widen(dy)
            return dy * by_row(factors.astype(dy.dtype), dy)

        return replace(self, gradients=[scale(dy) for dy in self.gradients])

    def cleaned(self, counted: Bool[Array, " b"]) -> "TapValues":
        """Return x and dy with exact zeros in rows that do not count."""

        def clean(value: Array) -> Array:
            return jnp.where(by_row(counted, value), value, jnp.zeros_like(value))

        return replace(
            self,
            data=[clean(x) if jaxprs.is_float(x) else x for x in self.data],
            gradients=[clean(dy) for dy in self.gradients],
        )


class Formation(NamedTuple):
    """A way to form per-example gradients, in an order of entries that costs nothing.

    To bring each of them to the parameter's order is a pass over memory, often a
    transposition. Norms do not ask for it, and their sum is brought there once: `form`
    makes gradients `[b, *own]`, and `to_param`, which is linear, brings one to the
    anchor, with ‖to_param(g)‖ = scale·‖g‖ (NaN if no number fits). Output
    units lie along the axes `outputs` of `own`.
    """

    form: Callable[[TapValues], Array]
    to_param: Callable[[Array], Array]
    own: tuple[int, ...]
    scale: float = 1.0
    outputs: tuple[int, ...] = (-1,)

    def at_anchor(self) -> "Formation":
        """Return the same with each gradient brought to the anchor."""

        def form(seen: TapValues) -> Array:
            return jax.vmap(self.to_param)(self.form(seen))

        own = jax.ShapeDtypeStruct(self.own, jnp.float32)
        return Formation(form, links.same, jax.eval_shape(self.to_param, own).shape)


@dataclass(frozen=True)
class Work:
    """The size of the job at a tap; all counts but `rows` are of one example.

    B rows of G contractions that do not mix, with T positions, K inputs at each (the
    fan-in) and N outputs each; numbers in x and in y; positions of the input with its
    padding, and offsets of the kernel, where there is one.
    """

    rows: int
    groups: int
    positions: int
    inputs: int
    outputs: int
    data: int
    results: int
    pixels: int = 0
    offsets: int = 1

    @property
    def weights(self) -> int:
        """Numbers in the parameter, as the tap sees it."""
        return self.groups * self.inputs * self.outputs

    @property
    def gram_pays(self) -> bool:
        """Whether Gram matrices have at most as many numbers as the parameter."""
        return 2 * self.positions**2 <= self.inputs * self.outputs

    @property
    def flops(self) -> float:
        """Multiplications and additions of a plain weight gradient."""
        return 2.0 * self.rows * self.positions * self.weights


class Rule:
    """Gradients at any tap in one of its operands, see the module."""

    name = "general"

    def __init__(self, tap: Tap, use: Use):
        self.tap = tap
        self.use = use
        self.uses = [use]

    def join(self, other: "Rule") -> bool:
        """Take on the uses of another rule, if it is alike; return whether it is."""
        return False

    def gather(self, seen: Sequence[TapValues]) -> TapValues:
        """Return what was seen at all uses as one."""
        (whole,) = seen
        return whole

    @property
    def dtype(self) -> jnp.dtype:
        """Of norms and sums."""
        return accumulation_dtype(aval(self.tap.equation.outvars[0]).dtype)

    def grams(self) -> dict[str, Callable[[TapValues], Gram]]:
        """Return methods for squared norms at the operand; none in general."""
        return {}

    def gradients(self) -> dict[str, Formation]:
        """Return methods for per-example gradients."""
        own = aval(self.use.anchor).shape
        return {"vmap": Formation(self.gradients_by_vmap, links.same, own)}

    def chunk(self, method: str, rows: int) -> int:
        """Return how many examples a gradient method should be given at a time."""
        return rows

    def totals(self) -> tuple[str, ...]:
        """Return how a sum can be made from (x, dy): `DIRECT`, or gradient methods.

        Gradients are formed again only where `Bilinear.terms` bounds what two
        formations differ by.
        """
        return ()

    def gradients_by_vmap(self, seen: TapValues) -> Array:
        """By autodiff of the equation."""

        def one(data, gradients):
            return self.transpose(data, gradients, seen)

        # XLA may compute a batch of small convolutions as one large one with zeros
        # between, and 0·NaN is NaN: a row that is not finite must not meet the others.
        equation = self.tap.equation
        if equation.primitive.name == "conv_general_dilated":
            finite = seen.finite()
            clean = seen.cleaned(finite)
            gradients = jax.vmap(one)(clean.data, clean.gradients)
            return jnp.where(by_row(finite, gradients), gradients, jnp.nan)
        every = jax.vmap(one)
        if any(jex.jaxprs_in_params(equation.params)):
            every = safe_to_split(every)
        return every(seen.data, seen.gradients)

    def transpose(self, data: Any, gradients: Any, seen: TapValues) -> Array:
        """Return one example's gradient at the anchor, by autodiff of the equation."""
        equation = self.tap.equation
        place: Any = equation.invars[self.use.position]
        results = [n for n, v in enumerate(equation.outvars) if jaxprs.is_float(v)]
        atoms = [equation.invars[position] for position in self.tap.data]
        known: dict[Any, Any] = dict(seen.constants)
        known.update(zip(atoms, data, strict=True))

        def apply(parameter):
            own = known | {place: parameter}
            operands = [jaxprs.read(own, atom) for atom in equation.invars]
            found = jaxprs.evaluate_wide(equation, operands, exact=seen.exact)
            return [found[number] for number in results]

        values, pull = jax.vjp(apply, widen(jnp.asarray(known[place])))
        wide = [
            dy.astype(value.dtype) for dy, value in zip(gradients, values, strict=True)
        ]
        return links.back(self.use.links, pull(wide)[0])

    def work(self, rows: int) -> Work:
        """Return the size of the job, for the cost model."""
        results = sum(aval(v).size for v in float_results(self.tap))
        inputs = sum(aval(self.tap.equation.invars[n]).size for n in self.tap.data)
        return Work(rows, 1, results, 1, aval(self.use.anchor).size, inputs, results)

    def describe(self) -> str:
        """Return the equation in short: primitive and shapes of one example."""
        shapes = [_short(aval(atom)) for atom in self.tap.equation.invars]
        results = [_short(aval(v)) for v in self.tap.equation.outvars]
        name = self.tap.equation.primitive.name
        times = f"{len(self.uses)} × " if len(self.uses) > 1 else ""
        return f"{times}{name} {' '.join(shapes)} → {' '.join(results)}"


def _short(shaped: Any) -> str:
    return f"{shaped.dtype.name}[{','.join(map(str, shaped.shape))}]"


class Bilinear(Rule, abc.ABC):
    """A tap linear in x and in the parameter, whose gradients add up T `positions`."""

    positions: int

    alike: tuple
    """Rules for which this is equal form gradients in the same way."""

    def __init__(self, tap: Tap, use: Use):
        super().__init__(tap, use)
        self._joined: list[Any] = []

    @property
    def parts(self) -> list[Any]:
        """This rule and those that have joined it."""
        return [self, *self._joined]

    def join(self, other: Rule) -> bool:
        if not isinstance(other, Bilinear) or self.alike != other.alike:
            return False
        if self.use.anchor is not other.use.anchor:
            return False
        if not links.alike(self.use.links, other.use.links):
            return False
        self.uses += other.uses
        self._joined += other.parts
        self.positions += other.positions
        return True

    @abc.abstractmethod
    def terms(self, seen: TapValues) -> Float[Array, " b"]:
        """Return `Gram.terms`."""

    @abc.abstractmethod
    def excess(self, method: str) -> float:
        """Return η: a Gram method adds η·A² to a squared norm."""

    @property
    def forming(self) -> int:
        """Roundings that a term of an example's gradient passes through."""
        return self.positions + 2


class Products(Bilinear):
    """A tap that multiplies what it meets at each position by every output's weights.

    Fan-ins are of `offsets` times `inputs`.
    """

    inputs: int
    offsets: int = 1

    outputs_axis: int | None
    """The axis of the parameter along which all its outputs lie, where there is one."""

    @abc.abstractmethod
    def by_position(self, result: Array) -> Float[Array, "b t o"]:
        """Return results that were seen, or their gradients, by position."""

    @abc.abstractmethod
    def scaled_outputs(self, seen: TapValues, scale: Float[Array, " o"]) -> TapValues:
        """Return what was seen with dy scaled by one number per output."""

    @abc.abstractmethod
    def patch_sums(
        self, seen: TapValues
    ) -> tuple[Float[Array, "b t g"], Float[Array, "b t g f"]]:
        """Return the sum of the inputs at each position, and dy."""

    @abc.abstractmethod
    def respond(self, seen: TapValues, parameter: Array) -> Float[Array, "b t o"]:
        """Return the equation's results with another parameter, by position."""

    @property
    def exact(self) -> bool:
        """Whether the equation's own results are as precise as sums here are.

        Not where they are narrow, or the parameter once was, nor on accelerators that
        round float32 operands unless told otherwise.
        """
        equation = self.tap.equation
        steps = [step.result for step in self.use.links if step.result is not None]
        atoms = (*equation.invars, *equation.outvars, self.use.anchor, *steps)
        dtypes = {aval(atom).dtype for atom in atoms}
        if dtypes != {self.dtype}:
            return False
        highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
        return jax.default_backend() == "cpu" or (
            equation.params["precision"] == highest
        )


def product(text: str, *arrays: Array, exact: bool = True) -> Array:
    """Return an einsum in float32 or wider; integers count as float32."""
    floats = [a.dtype if jaxprs.is_float(a) else jnp.dtype("float32") for a in arrays]
    widest = max(floats, key=lambda dtype: dtype.itemsize)
    sides, result = text.split("->")
    named = zip(sides.split(","), arrays, strict=True)
    sizes = {
        name: n for side, a in named for name, n in zip(side, a.shape, strict=True)
    }
    # Without axes of length 1: XLA on a CPU would copy the result around them, for many
    # times as long as the product takes.
    short = str.maketrans("", "", "".join(n for n, size in sizes.items() if size == 1))
    sums = accumulation_dtype(widest)
    # XLA on a CPU has no product of some layouts from bfloat16 to float32.
    read = sums if jax.default_backend() == "cpu" else widest
    found = jnp.einsum(
        text.translate(short),
        *(jnp.squeeze(a).astype(read) for a in arrays),
        preferred_element_type=sums,
        precision=jax.lax.Precision.HIGHEST if exact else None,
    )
    return found.reshape([sizes[name] for name in result])
