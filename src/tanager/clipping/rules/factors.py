"""From squared norms to what each example counts for in the sum.

A gradient is clipped whole, or in parts that each have a clipping norm of their own
(`Limit`). What a part with clipping norm C and gradient norm n is multiplied by, and
the most that is left of it, is a matter of `Style`:

| style | factor | norm at most | |
|---|---|---|---|
| clip | min(1, C/n) | C | Abadi et al. 2016, arXiv:1607.00133 |
| unit | min(1, C/n)/C | 1 | De et al. 2022, arXiv:2204.13650, equation (3) |
| automatic | C/(n + γ) | C | Bu et al. 2023, arXiv:2206.07136 (AUTO-S) |
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, PyTree

from tanager import _validate as validate
from tanager.clipping.analysis.rounding import gamma, root
from tanager.clipping.analysis.trainable import misfit


STYLES = {
    "clip": "gradients longer than C are scaled to norm C",
    "unit": "the same divided by C, so that the sensitivity is 1 whatever C is",
    "automatic": "every gradient is scaled to a norm just below C",
}
"""The styles of clipping, see `Style`."""

SMALLEST, LARGEST = 1e-12, 1e12
"""Clipping norms and γ: their squares hold in float32."""


@dataclass(frozen=True)
class Style:
    """Choose how the gradient of an example is scaled.

    Attributes:
        name: one of `STYLES`.
        gamma: γ of ``"automatic"``, from 1e-12 to 1e12: gradients shorter than it count
            less. The paper uses 0.01.

    Raises:
        ValueError: `name` or `gamma` is out of range.
    """

    name: str = "clip"
    gamma: float = 0.01

    def __post_init__(self):
        validate.one_of(STYLES, style=self.name)
        validate.positive(gamma=self.gamma)
        if not SMALLEST <= self.gamma <= LARGEST:
            rule = "must be from 1e-12 to 1e12, for squares of norms to hold in float32"
            validate.refuse("gamma", self.gamma, rule, "the paper uses 0.01")


CLIP = Style()
"""The ordinary one."""


def style_of(style: str | Style) -> Style:
    """Return a style that is given as itself or by its name.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(style, str):
        return Style(style)
    validate.instance(Style, style=style)
    return style


class ClipFactors(NamedTuple):
    """What each example counts for in the sum.

    The values are those of a `Style`, with ‖g_i‖ bounded from above. Examples are
    counted that are no padding and have a finite norm.
    """

    values: Float[Array, " b"]
    counted: Bool[Array, " b"]


def clip_factors(
    norms: Float[Array, " b"],
    mask: Bool[Array, " b"],
    clip_norm: float | Array,
    style: Style = CLIP,
    target: float = 1.0,
) -> ClipFactors:
    """Return what examples with these gradient norms count for.

    Norms are brought to `target`·C where the style says C. A traced C out of range
    counts no example.
    """
    # A C of a wider dtype would widen the factors of float32 gradients.
    most = jnp.asarray(clip_norm, norms.dtype)
    reached = jnp.asarray(clip_norm * target, norms.dtype)
    if style.name == "automatic":
        values = reached / (norms + style.gamma)
    else:
        # A zero norm gives the factor 1; `where` and not a product: 0·NaN is NaN.
        values = jnp.minimum(1.0, reached / jnp.where(norms > 0, norms, reached))
        values = values / most if style.name == "unit" else values
    counted = mask & jnp.isfinite(norms)
    if isinstance(clip_norm, Array):
        counted &= (most >= SMALLEST) & (most <= LARGEST)
    return ClipFactors(values, counted)


class Limit(NamedTuple):
    """How far each part of a gradient may reach.

    Attributes:
        norms: a clipping norm for each part, numbers or arrays without axes.
        parts: the part of each leaf; empty where there is one part.
        style: how parts are brought to their norms.
        target: the part of each norm that gradients are brought to
            (`rounding.FloatError`).
    """

    norms: Sequence[float | Array]
    parts: Sequence[int] = ()
    style: Style = CLIP
    target: float = 1.0

    def part(self, leaf: int) -> int:
        """Return the part that a leaf belongs to."""
        return self.parts[leaf] if self.parts else 0

    def norms_of(
        self, squares: Sequence[tuple[int, Float[Array, " b"]]], rows: int
    ) -> list[Float[Array, " b"]]:
        """Return the norms of each part, rounded up, from squared norms of leaves.

        Each is of the widest dtype in its part.
        """
        norms = []
        for part in range(len(self.norms)):
            own = [square for leaf, square in squares if self.part(leaf) == part]
            dtypes = [square.dtype for square in own] or [jnp.dtype(jnp.float32)]
            widest = max(dtypes, key=lambda dtype: dtype.itemsize)
            zero = jnp.zeros(rows, widest)
            total = sum((square.astype(widest) for square in own), zero)
            norms.append(root(total) * (1 + gamma(len(own) / 2 + 2, widest)))
        return norms

    def factors(
        self, norms: Sequence[Float[Array, " b"]], mask: Bool[Array, " b"]
    ) -> list[ClipFactors]:
        """Return factors by part; an example counts only if all its parts do."""
        each = [
            clip_factors(own, mask, most, self.style, self.target)
            for own, most in zip(norms, self.norms, strict=True)
        ]
        counted = functools.reduce(jnp.logical_and, (own.counted for own in each))
        return [own._replace(counted=counted) for own in each]

    def reach(self) -> Any:
        """Return the most that is left of an example, all parts together."""
        if self.style.name == "unit":
            return math.sqrt(len(self.norms))
        if len(self.norms) == 1:
            return self.norms[0]
        known = [each for each in self.norms if isinstance(each, float)]
        if len(known) == len(self.norms):  # not below what it is if they are traced
            return math.hypot(*known) * (1 + 2.0**-19)
        own = jnp.linalg.norm(jnp.stack([jnp.asarray(x) for x in self.norms]))
        return own * (1 + 8 * float(jnp.finfo(own.dtype).eps))


def checked_norms(clip_norm: PyTree) -> PyTree:
    """Return clipping norms as floats, those that are traced as they are."""
    if not jax.tree.leaves(clip_norm):
        validate.clipping_norm(clip_norm)

    def one(norm: Any) -> Any:
        arrays = jax.Array, np.ndarray, np.generic
        if isinstance(norm, arrays) and norm.shape != ():
            rule = "must be a number, or a pytree of numbers like params"
            validate.refuse("clip_norm", f"array of shape {norm.shape}", rule)
        if callable(norm):
            rule = "must be a number, or a pytree of numbers like params"
            remedy = "jax.tree_util.tree_map_with_path(function, params) makes one"
            validate.refuse(
                "clip_norm", getattr(norm, "__name__", str(norm)), rule, remedy
            )
        if isinstance(norm, Tracer):
            return norm
        norm = norm.item() if isinstance(norm, arrays) else norm
        validate.clipping_norm(norm)
        return float(norm)

    return jax.tree.map(one, clip_norm)


def parts_of(clip_norm: PyTree, gradient: PyTree) -> tuple[int, ...]:
    """Return the part of each leaf of a gradient: which clipping norm is above it.

    Raises:
        ValueError: `clip_norm` has another structure than the gradient.
    """
    tree = jax.tree.structure(clip_norm)
    numbers = tree.unflatten(range(tree.num_leaves))

    def below(number: int, leaves: PyTree) -> PyTree:
        return jax.tree.map(lambda _: number, leaves)

    try:
        return tuple(jax.tree.leaves(jax.tree.map(below, numbers, gradient)))
    except ValueError as error:
        raise ValueError(
            "clip_norm must be a number, or a pytree of numbers with the structure of "
            f"what is clipped or of a part of it: {misfit(clip_norm, gradient)}"
        ) from error


def by_row(values: Array, like: Array) -> Array:
    """Return one value for each row, shaped to be broadcast over `like`."""
    return values.reshape((-1,) + (1,) * (like.ndim - 1))
