"""The rule for convolutions of any rank, stride, dilation, padding and grouping.

A patch p_t is what the kernel covers at output position t. One example's gradient is
Σ_t p_t·dy_tᵀ, and the Gram matrix of patches is a sum over kernel offsets of shifted
Gram matrices of pixels: <p_t, p_s> = Σ_o <x_{t+o}, x_{s+o}>. No patch is formed, for
a kernel of k offsets it costs a k-th of the multiplications.

A transposed convolution spreads x out, so its patches are mostly zeros. There x stays
unchanged, and dy is gathered where each kernel offset meets a pixel.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from tanager.clipping.analysis import jaxprs, links
from tanager.clipping.analysis.dtypes import widen
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.taps import Tap, Use
from tanager.clipping.rules.base import (
    Formation,
    Products,
    Rule,
    TapValues,
    Work,
    product,
)
from tanager.clipping.rules.grams import Gram, gram_excess, gram_of, terms_of


_MOST_OFFSETS = 128

_CACHE_BYTES = 4e6
"""What a group of examples may copy: about the second-level cache of a few cores."""

_MOST_GROUPS = 64
"""Compiling takes longer with each group."""


class Convolution(Products):
    """`conv_general_dilated` with the parameter as kernel."""

    name = "convolution"

    def __init__(self, tap: Tap, use: Use):
        super().__init__(tap, use)
        params = tap.equation.params
        numbers = params["dimension_numbers"]
        image, kernel = (aval(atom).shape for atom in tap.equation.invars)
        result = aval(tap.equation.outvars[0]).shape
        self._image_order, self._result_order = (
            (spec[0], *spec[2:], spec[1])
            for spec in (numbers.lhs_spec, numbers.out_spec)
        )
        # Kernel axes as (offsets..., inputs of a group, outputs).
        self._kernel_order = (*numbers.rhs_spec[2:], *numbers.rhs_spec[1::-1])
        self.groups = params["feature_group_count"]
        self.kernel = tuple(kernel[axis] for axis in numbers.rhs_spec[2:])
        self.inputs = kernel[numbers.rhs_spec[1]]
        self.outputs = kernel[numbers.rhs_spec[0]]
        self.extent = tuple(result[axis] for axis in numbers.out_spec[2:])
        self.images = image[numbers.lhs_spec[0]]
        self.positions = self.images * math.prod(self.extent)
        self._strides = params["window_strides"]
        self._dilation = params["rhs_dilation"]
        sides = zip(params["padding"], params["lhs_dilation"], strict=True)
        self._padding = [(low, high, spread - 1) for (low, high), spread in sides]
        self.offsets = math.prod(self.kernel)
        dtypes = [
            aval(atom).dtype for atom in (*tap.equation.invars, *tap.equation.outvars)
        ]
        alone = [n for axis, n in enumerate(image) if axis != numbers.lhs_spec[0]]
        params = sorted((key, str(value)) for key, value in params.items())
        self.alike = self.name, *alone, *kernel, *params, *map(str, dtypes)
        self.outputs_axis = numbers.rhs_spec[0]

    def join(self, other: Rule) -> bool:
        joined = super().join(other)
        if joined:
            assert isinstance(other, Convolution)
            self.images += other.images
        return joined

    def gather(self, seen: Sequence[TapValues]) -> TapValues:
        """See `Rule.gather`: the images of all uses are those of one."""
        if len(seen) == 1:
            return seen[0]
        data, results, gradients = (
            [jnp.concatenate([one for (one,) in each], order[0] + 1)]
            for order, each in (
                (self._image_order, [at.data for at in seen]),
                (self._result_order, [at.results for at in seen]),
                (self._result_order, [at.gradients for at in seen]),
            )
        )
        return replace(seen[0], data=data, results=results, gradients=gradients)

    def operands(self, seen: TapValues) -> tuple[Array, Array]:
        """Return padded x `[B, N, *pixels, G, C]` and dy `[B, T, G, F]`."""
        x, dy = self._image(seen, self._padding), seen.gradients[0]
        shape = (dy.shape[0], self.positions, self.groups, -1)
        return x, self.by_position(dy).reshape(shape)

    def _image(self, seen: TapValues, padding: Sequence[tuple[int, int, int]]) -> Array:
        """Return x `[B, N, *pixels, G, C]`, padded along the spatial axes."""
        x = seen.data[0]
        x = jnp.transpose(x, (0, *(axis + 1 for axis in self._image_order)))
        zero = jnp.zeros((), x.dtype)
        x = lax.pad(x, zero, [(0, 0, 0), (0, 0, 0), *padding, (0, 0, 0)])
        return x.reshape(*x.shape[:-1], self.groups, self.inputs)

    def by_position(self, result: Array) -> Float[Array, "b t o"]:
        order = (0, *(axis + 1 for axis in self._result_order))
        result = jnp.transpose(result, order)
        return result.reshape(result.shape[0], self.positions, self.outputs)

    def scaled_outputs(self, seen: TapValues, scale: Float[Array, " o"]) -> TapValues:
        (dy,) = seen.gradients
        shape = [1] * dy.ndim
        shape[self._result_order[-1] + 1] = self.outputs
        return seen.with_gradients([widen(dy) * scale.reshape(shape)])

    def patch_sums(
        self, seen: TapValues
    ) -> tuple[Float[Array, "b t g"], Float[Array, "b t g f"]]:
        x, dy = self.operands(seen)
        return self._over_patches(jnp.sum(widen(x), axis=-1)), widen(dy)

    def _over_patches(self, pixels: Array) -> Float[Array, "b t g"]:
        """Add up one number for each pixel and group over each patch."""
        whole = (slice(None), slice(None))
        parts = [pixels[(*whole, *window)] for window in self._windows()]
        total = sum(parts[1:], parts[0])
        return total.reshape(pixels.shape[0], self.positions, self.groups)

    def respond(self, seen: TapValues, parameter: Array) -> Float[Array, "b t o"]:
        wide = functools.partial(jaxprs.evaluate_wide, exact=seen.exact)
        every = jax.vmap(lambda x: wide(self.tap.equation, [x, parameter])[0])
        return self.by_position(every(seen.data[0]))

    def _windows(self, first: int = 0) -> Iterator[tuple[slice, ...]]:
        """Yield, for each kernel offset, the pixels it meets at all positions.

        Of the spatial axes from `first` on.
        """
        steps = (self._dilation, self.extent, self._strides)
        for offset in itertools.product(*map(range, self.kernel[first:])):
            axes = zip(offset, *(step[first:] for step in steps), strict=True)
            yield tuple(
                slice(o * dilation, o * dilation + (n - 1) * stride + 1, stride)
                for o, dilation, n, stride in axes
            )

    def patches(self, x: Array) -> Float[Array, "b t g k c"]:
        """Return all patches of a padded image, positions in the order of dy."""
        whole = (slice(None), slice(None))
        if self._tiles():
            patches = self._tiled(x)
        else:
            parts = [x[(*whole, *window)] for window in self._windows()]
            patches = jnp.stack(parts, axis=-2)
        return patches.reshape(
            x.shape[0], self.positions, self.groups, self.offsets, self.inputs
        )

    def _tiles(self) -> bool:
        """Whether patches lie side by side, as those of a vision transformer do."""
        sides = zip(self._dilation, self.kernel, strict=True)
        dense = all(dilation == 1 or size == 1 for dilation, size in sides)
        return dense and tuple(self._strides) == self.kernel

    def _tiled(self, x: Array) -> Array:
        """Return patches that lie side by side: the same numbers in another order."""
        ends = [n * size for n, size in zip(self.extent, self.kernel, strict=True)]
        x = x[(slice(None), slice(None), *map(slice, ends))]
        sides = [*zip(self.extent, self.kernel, strict=True)]
        shape = (*x.shape[:2], *itertools.chain(*sides), self.groups, self.inputs)
        spatial = 2 * len(sides)
        order = (0, 1, *range(2, 2 + spatial, 2), 2 + spatial)
        order += (*range(3, 2 + spatial, 2), 3 + spatial)
        return jnp.transpose(x.reshape(shape), order)

    def _pixels(self) -> int:
        size, shape = self.images, aval(self.tap.equation.invars[0]).shape
        axes = zip(self._image_order[1:-1], self._padding, strict=True)
        for axis, (low, high, spread) in axes:
            size *= shape[axis] + (shape[axis] - 1) * spread + low + high
        return size

    def grams(self) -> dict[str, Callable[[TapValues], Gram]]:
        if self.offsets == 1:
            return {"gram": self.gram_by_patches}
        methods: dict[str, Callable[[TapValues], Gram]] = {}
        if self._pixels() ** 2 <= 4 * self.offsets * self.positions**2:
            methods["shifted gram"] = self.gram_by_shifts
        if self._few_slices() or not methods:
            methods["patch gram"] = self.gram_by_patches
        return methods

    def gram_by_patches(self, seen: TapValues) -> Gram:
        """Gram matrices of patches, formed one beside the other."""
        x, dy = self.operands(seen)
        patches = self.patches(x)
        left = product("btgkc,bsgkc->bgts", patches, patches)
        right = product("btgf,bsgf->bgts", dy, dy)
        return gram_of(left, right, self._summands, self.excess("patch gram"))

    def gram_by_shifts(self, seen: TapValues) -> Gram:
        """Shifted Gram matrices of pixels, added up over the kernel's offsets."""
        x, dy = self.operands(seen)
        rows, images, *pixels = x.shape[:-2]
        flat = x.reshape(rows, -1, *x.shape[-2:])
        grams = product("bpgc,bqgc->bgpq", flat, flat)
        grams = grams.reshape(rows, self.groups, *2 * (images, *pixels))
        whole = slice(None)
        parts = [
            grams[(whole, whole, whole, *window, whole, *window)]
            for window in self._windows()
        ]
        left = sum(parts[1:], parts[0])
        left = left.reshape(rows, self.groups, self.positions, self.positions)
        right = product("btgf,bsgf->bgts", dy, dy)
        return gram_of(left, right, self._summands, self.excess("shifted gram"))

    @property
    def _summands(self) -> tuple[int, int]:
        """K and N: what an entry of either Gram matrix is a sum of."""
        return self.inputs * self.offsets, self.outputs // self.groups

    def excess(self, method: str) -> float:
        inputs, outputs = self._summands
        if method == "shifted gram":  # over channels first, then over offsets
            inputs = self.inputs + self.offsets
        return gram_excess((self.groups, self.positions), (inputs, outputs), self.dtype)

    def gradients(self) -> dict[str, Formation]:
        methods = super().gradients()
        if not self._few_slices():
            return methods
        scale = links.scale(self.use.links)
        inputs, groups = self.inputs, self.groups
        outputs = self.outputs // groups
        own = (groups, self.offsets, inputs, outputs)
        methods["patches"] = Formation(
            self.gradients_by_patches, self._from(1, 2, 0, 3), own, scale, (0, -1)
        )
        if 1 < self.offsets <= _MOST_OFFSETS and self._dense():
            first = self.kernel[0]
            own = (groups, self.offsets // first, inputs, first, outputs)
            methods["crossed"] = Formation(
                self.gradients_crossed, self._from(3, 1, 2, 0, 4), own, scale, (0, -1)
            )
        if self._spread_out():
            own = (groups, inputs, self.offsets, outputs)
            methods["gathered"] = Formation(
                self.gradients_gathered, self._from(2, 1, 0, 3), own, scale, (0, -1)
            )
        return methods

    def _few_slices(self) -> bool:
        """Whether patches are formed by few enough slices to compile."""
        return self.offsets <= _MOST_OFFSETS or self._tiles()

    def _dense(self) -> bool:
        """Whether along the first axis every row of the image is a position."""
        return self._strides[0] == 1 and self._padding[0][2] == 0

    def _spread_out(self) -> bool:
        """Whether zeros lie between the pixels, and every one of them is a position."""
        spread = any(each for _, _, each in self._padding)
        return spread and all(stride == 1 for stride in self._strides)

    def share(self, method: str) -> float:
        """Return how many of the plain weight gradient's products a method takes."""
        return self._alone / self.positions if method == "gathered" else 1.0

    @property
    def _alone(self) -> int:
        """The number of pixels without padding and without zeros between them."""
        shape = aval(self.tap.equation.invars[0]).shape
        return self.images * math.prod(shape[n] for n in self._image_order[1:-1])

    def chunk(self, method: str, rows: int) -> int:
        """See `Rule.chunk`: what is copied should stay in a CPU's cache."""
        copied = self.copied(method)
        if copied == 0 or jax.default_backend() != "cpu":
            return rows
        least = -(-rows // _MOST_GROUPS)
        # One alone is a plain product, whose operands XLA need not transpose.
        fitting = 1 if method == "crossed" else int(_CACHE_BYTES / (4 * copied))
        return min(rows, max(least, fitting))

    def copied(self, method: str) -> int:
        """Return how many numbers of one example a gradient method copies."""
        inputs = self.groups * self.inputs * self.positions
        if method == "patches" and self.offsets > 1:
            return self.offsets * inputs
        if method == "crossed":
            own = self.kernel[0] * self.outputs * self.positions
            return self.offsets // self.kernel[0] * inputs + own
        if method == "gathered":
            return self.offsets * self.outputs * self._alone
        return 0

    def gradients_by_patches(self, seen: TapValues) -> Float[Array, "b g k c f"]:
        """One batched product of patches."""
        x, dy = self.operands(seen)
        patches = self.patches(x)
        return product("btgkc,btgf->bgkcf", patches, dy, exact=seen.exact)

    def gradients_crossed(self, seen: TapValues) -> Float[Array, "b g o c k f"]:
        """One product of x, shifted along all axes but the first, and dy, along that.

        For a kernel of k×k these are k copies of x and k of dy, where patches take k²
        of x, and a product less narrow. The first axis has stride 1.
        """
        x, dy = self._image(seen, [(0, 0, 0), *self._padding[1:]]), seen.gradients[0]
        rows, height = x.shape[0], x.shape[2]
        whole = (slice(None),) * 3
        parts = [x[(*whole, *window)] for window in self._windows(1)]
        left = jnp.stack(parts, axis=-2)
        left = left.reshape(rows, -1, *left.shape[-3:])

        dy = self.by_position(dy).reshape(rows, self.images, self.extent[0], -1)
        zero = jnp.zeros((), dy.dtype)
        still = (0, 0, 0)
        parts = []
        for offset in range(self.kernel[0]):
            low = offset * self._dilation[0] - self._padding[0][0]
            fill = (low, height - self.extent[0] - low, 0)
            late = lax.pad(dy, zero, [still, still, fill, still])
            parts.append(late.reshape(rows, left.shape[1], self.groups, -1))
        right = jnp.stack(parts, axis=-2)
        return product("btgoc,btgkf->bgockf", left, right, exact=seen.exact)

    def gradients_gathered(self, seen: TapValues) -> Float[Array, "b g c k f"]:
        """One product of x unchanged, and dy where each offset meets each pixel.

        Pixel q meets offset o at position low + q·spread - o·dilation.
        """
        spatial = len(self.kernel)
        x = self._image(seen, [(0, 0, 0)] * spatial)
        left = x.reshape(x.shape[0], -1, *x.shape[-2:])
        dy = self.by_position(seen.gradients[0])
        dy = dy.reshape(*x.shape[:2], *self.extent, self.groups, -1)
        zero, still = jnp.zeros((), dy.dtype), (0, 0, 0)
        sides = [*zip(self._padding, self._dilation, x.shape[2:-2], strict=True)]
        steps = (1, 1, *(spread + 1 for _, _, spread in self._padding), 1, 1)
        parts = []
        for offset in itertools.product(*map(range, self.kernel)):
            fill = []
            for o, size, ((low, _, spread), dilation, pixels) in zip(
                offset, self.extent, sides, strict=True
            ):
                first = low - o * dilation
                last = first + (pixels - 1) * (spread + 1)
                fill.append((-first, last + 1 - size, 0))
            met = lax.pad(dy, zero, [still, still, *fill, still, still])
            parts.append(lax.slice(met, [0] * met.ndim, met.shape, steps))
        right = jnp.stack(parts, axis=-2)
        right = right.reshape(*left.shape[:2], *right.shape[-3:])
        return product("bqgc,bqgkf->bgckf", left, right, exact=seen.exact)

    def _from(self, *order: int) -> Callable[[Array], Array]:
        """Return `to_param` of gradients with axes in another order."""
        return lambda gradient: self._at_anchor(jnp.transpose(gradient, order))

    def _at_anchor(self, gradient: Array) -> Array:
        """Return the anchor's gradient from `[offsets..., C, G, F]`."""
        gradient = gradient.reshape(*self.kernel, self.inputs, self.outputs)
        order = tuple(int(axis) for axis in np.argsort(self._kernel_order))
        gradient = jnp.transpose(gradient, order)
        return links.back(self.use.links, gradient)

    def terms(self, seen: TapValues) -> Float[Array, " b"]:
        x, dy = self.operands(seen)
        left = self._over_patches(jnp.sum(jnp.square(widen(x)), axis=-1))
        right = jnp.sum(jnp.square(widen(dy)), axis=-1)
        left, right = jnp.swapaxes(left, 1, 2), jnp.swapaxes(right, 1, 2)
        return terms_of(left, right, self._summands)

    def totals(self) -> tuple[str, ...]:
        formed = tuple(name for name in self.gradients() if name != "vmap")
        # Of a convolution on an accelerator it is not known how it is computed.
        return formed or (("vmap",) if jax.default_backend() == "cpu" else ())

    def work(self, rows: int) -> Work:
        return Work(
            rows,
            self.groups,
            self.positions,
            self.offsets * self.inputs,
            self.outputs // self.groups,
            self._pixels() * self.groups * self.inputs,
            self.positions * self.outputs,
            self._pixels(),
            self.offsets,
        )
