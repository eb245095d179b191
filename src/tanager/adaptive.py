"""Adaptive clipping: a clipping norm that follows the gradients while they are learned.

    clip = AdaptiveClipping(quantile=0.5).of(grad_fn, mechanism, batch_size)
    noise = GaussianNoise(mechanism, clip.sensitivity, seed, clip.released(params))
    norm = clip.first
    for each step:
        total = noise.zeros()
        for each physical batch:
            out, sums = clip(params, batch, mask, norm)
            total = noise.grid.add(total, sums)
        gradient, count = noise(total, step)
        norm = clip.next(norm, count)

An example adds two things to a sum: its gradient, clipped to C and divided by C, of
norm at most S = 1 + 2⁻¹¹; and w·(b − ½), where b says whether its norm was at most C.
Together they move the sum by at most S' = √(S² + w²/4), and one Gaussian mechanism with
that sensitivity releases both. So the count is charged: the guarantee is that of the
mechanism, and the noise on the gradients is S'/S times what it would be without. C is
computed from what was released, and may be published.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PyTree

from tanager import _validate as validate
from tanager.clipping.analysis import batches
from tanager.clipping.gradient import ClippedGradient
from tanager.clipping.transform import ClippedGrad, split
from tanager.privacy.mechanism import Mechanism


_LOWEST, _HIGHEST = 2e-12, 5e11
"""The least and largest C: within what a traced clipping norm may be."""


@dataclass(frozen=True)
class AdaptiveClipping:
    """Let the clipping norm follow a quantile of the gradients' norms.

    Attributes:
        quantile: the share of gradients that are to have a norm of at most C.
        learning_rate: η: after a step C is multiplied by exp(−η·(share − quantile)),
            where the share is as released, with noise.
        count_noise: standard deviation of the noise on the count of gradients with a
            norm of at most C; None for a twentieth of the expected batch size, or for
            five times the noise multiplier if that is more. As its weight is a power of
            two, it may be up to twice as large.

    Raises:
        ValueError: a number is out of range.

    References:
        Andrew et al. 2021, arXiv:1905.03871, algorithm 1 and theorem 1.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self):
        validate.probability(quantile=self.quantile)
        remedy = "Andrew et al. use 0.2"
        validate.positive(learning_rate=self.learning_rate, remedy=remedy)
        if self.learning_rate > 1:
            rule = "must be at most 1"
            validate.refuse("learning_rate", self.learning_rate, rule, remedy)
        if self.count_noise is not None:
            validate.positive(count_noise=self.count_noise)

    def of(
        self, grad_fn: ClippedGrad, mechanism: Mechanism, batch_size: float
    ) -> "AdaptiveClip":
        """Return this for gradients, a mechanism and a public expected batch size.

        Raises:
            ValueError: `grad_fn` is not of the style "unit", or has several clipping
                norms; or the noise on the count is below the noise multiplier.
        """
        validate.instance(ClippedGrad, grad_fn=grad_fn)
        validate.instance(Mechanism, mechanism=mechanism)
        if grad_fn.style.name != "unit":
            rule = "must be unit, whose sensitivity is the same whatever C is"
            validate.refuse("style", grad_fn.style.name, rule)
        if not isinstance(grad_fn.clip_norm, float):
            rule = "must be one number, C of the first step"
            validate.refuse("clip_norm", grad_fn.clip_norm, rule)
        validate.positive(batch_size=batch_size)
        sigma, asked = mechanism.noise_multiplier, self.count_noise
        if asked is None:
            asked = max(batch_size / 20, 5 * sigma)
        if asked < sigma:
            rule = f"must be at least the noise multiplier, {sigma:g}"
            remedy = "a count costs more noise on the gradients than it is worth"
            validate.refuse("count_noise", asked, rule, remedy)
        ratio = asked / sigma if sigma else 5.0
        weight = grad_fn.sensitivity / math.sqrt(ratio**2 - 0.25)
        weight = 2.0 ** math.floor(math.log2(weight))
        return AdaptiveClip(self, grad_fn, weight, batch_size)


@dataclass(frozen=True)
class AdaptiveClip:
    """The clipping norm of a run, and what is released to move it.

    Made by `AdaptiveClipping.of`.

    Attributes:
        settings: what it was made of.
        grad_fn: what clips.
        weight: w of the count, a power of two: its products are exact.
        batch_size: the public expected one.
    """

    settings: AdaptiveClipping
    grad_fn: ClippedGrad
    weight: float
    batch_size: float

    @property
    def first(self) -> float:
        """C of the first step."""
        return self.grad_fn.clip_norm

    @property
    def sensitivity(self) -> float:
        """How far one example moves what is to be released, in the 2-norm."""
        return math.hypot(self.grad_fn.sensitivity, self.weight / 2)

    def released(self, params: PyTree) -> tuple[PyTree, Any]:
        """Return shapes of what is released, for `GaussianNoise`: params and count."""
        return split(params)[0], jax.ShapeDtypeStruct((), jnp.float32)

    def __call__(
        self,
        params: PyTree,
        batch: PyTree,
        mask: ArrayLike | None,
        clip_norm: ArrayLike,
        *,
        keys: Array | None = None,
    ) -> tuple[Any, ClippedGradient]:
        """Clip the gradients of a physical batch, and count those that are short.

        `clip_norm` is C of the step; all else is as a `ClippedGrad` takes it.

        Returns:
            What `grad_fn` returns, and what is added up: the same with a pair in place
            of `sum`, the sum and w·Σ(b − ½). Padding, and examples without a finite
            norm, count nothing. Both private.
        """
        mask = batches.mask_of(mask, batches.rows_of(batch))
        out = self.grad_fn(params, batch, mask, keys=keys, clip_norm=clip_norm)
        own = out[0] if self.grad_fn.has_aux else out
        pair = own.sum, self._count(own.norms, mask, clip_norm)
        return out, own._replace(sum=pair).marked(self.sensitivity)

    @jax.transfer_guard("allow")
    def _count(self, norms: Array, mask: Array, clip_norm: ArrayLike) -> Array:
        signs = jnp.where(norms <= clip_norm, 1, -1)
        counted = mask & jnp.isfinite(norms)
        count = jnp.sum(jnp.where(counted, signs, 0), dtype=jnp.int32)
        return count.astype(jnp.float32) * (self.weight / 2)  # exact below 2²⁴ rows

    @jax.transfer_guard("allow")
    def next(self, clip_norm: ArrayLike, count: ArrayLike) -> Array:
        """Return C after a step, float32[], from the count that was released."""
        share = jnp.asarray(count) / (self.weight * self.batch_size) + 0.5
        settings = self.settings
        factor = jnp.exp(-settings.learning_rate * (share - settings.quantile))
        moved = jnp.asarray(clip_norm, jnp.float32) * factor.astype(jnp.float32)
        return jnp.clip(moved, _LOWEST, _HIGHEST)
