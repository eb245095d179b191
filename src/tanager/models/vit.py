"""Vision transformers, called on one image.

The structure is that of timm's `vision_transformer`, so that its weights fit: learned
position embeddings, a class token in front, pre-norm blocks, queries, keys and values
from one linear layer, exact GELU, a last norm, and the head on the class token.

Every parameter meets data in one plain product or sum of its own: one linear layer
serves all tokens under `vmap`, and the class token is added to a row of zeros.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from tanager import _validate as validate
from tanager.clipping.analysis.dtypes import accumulation_dtype
from tanager.models import layers
from tanager.models.model import StagedModel, check_image


class Variant(NamedTuple):
    """Channels of a token, number of blocks, and attention heads of each block."""

    width: int
    depth: int
    heads: int


VARIANTS = {
    "tiny": Variant(192, 12, 3),
    "small": Variant(384, 12, 6),
    "base": Variant(768, 12, 12),
    "large": Variant(1024, 24, 16),
    "huge": Variant(1280, 32, 16),
}
"""Base, large and huge: Dosovitskiy et al. 2021, "An image is worth 16x16 words",
table 1. Tiny and small: Touvron et al. 2021, "Training data-efficient image
transformers", table 1; Steiner et al. 2022, "How to train your ViT?", section 3.
"""

_MLP_RATIO = 4
NORM_EPS = 1e-6
_EMBEDDING_DEVIATION = 0.02


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _normalised(token: Float[Array, " d"], eps: float) -> Float[Array, " d"]:
    """Return the token with mean 0 and variance 1."""
    return _centred(token) * _root(token, eps)


@_normalised.defjvp
def _normalised_jvp(eps: float, tokens: tuple, changes: tuple) -> tuple[Array, Array]:
    # By hand, because what autodiff derives passes over memory twice as often.
    (token,), (change,) = tokens, changes
    root = _root(token, eps)
    normal = _centred(token) * root
    along = jnp.mean(change * normal)
    return normal, root * (_centred(change) - normal * along)


def _centred(token: Float[Array, " d"]) -> Float[Array, " d"]:
    return token - jnp.mean(token)


def _root(token: Float[Array, " d"], eps: float) -> Float[Array, ""]:
    return lax.rsqrt(jnp.mean(jnp.square(_centred(token))) + eps)


class LayerNorm(eqx.Module):
    """Layer normalisation of one token: scale · (x − μ)/sqrt(σ² + eps) + bias.

    Shapes: ``[width] -> [width]``. Statistics as in `layers`: float32 or wider.
    `eps` is 1e-6 as in timm's vision transformers.

    References:
        Ba, Kiros and Hinton 2016, "Layer normalization".
    """

    scale: Float[Array, " d"]
    bias: Float[Array, " d"]
    eps: float = eqx.field(static=True)

    def __init__(self, width: int, *, eps: float = NORM_EPS):
        validate.whole(width=width, at_least=1)
        validate.positive(eps=eps)
        self.scale = jnp.ones(width, jnp.float32)
        self.bias = jnp.zeros(width, jnp.float32)
        self.eps = eps

    def __call__(self, token: Float[Array, " d"]) -> Float[Array, " d"]:
        wide = token.astype(accumulation_dtype(token.dtype))
        normal = _normalised(wide, self.eps)
        output = normal * self.scale.astype(wide.dtype) + self.bias.astype(wide.dtype)
        return output.astype(token.dtype)


class LayerScale(eqx.Module):
    """A factor for each channel of a residual branch: gain · x, at first small.

    Shapes: ``[width] -> [width]``.

    References:
        Touvron et al. 2021, "Going deeper with image transformers", arXiv:2103.17239.
    """

    gain: Float[Array, " d"]

    def __init__(self, width: int, initial: float):
        validate.whole(width=width, at_least=1)
        validate.positive(initial=initial)
        self.gain = jnp.full(width, initial, jnp.float32)

    def __call__(self, token: Float[Array, " d"]) -> Float[Array, " d"]:
        return token * self.gain.astype(token.dtype)


class Attention(eqx.Module):
    """Multi-head self-attention over the tokens of one image.

    Shapes: ``[T, width] -> [T, width]``. The softmax is taken in float32 or wider.
    `qkv` gives queries, keys and values, each with its heads in order; it has a bias
    unless `bias` is False.
    """

    qkv: layers.Linear
    projection: layers.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, bias: bool = True, key: PRNGKeyArray):
        qkv_key, projection_key = jax.random.split(key)
        self.qkv = layers.Linear(width, 3 * width, bias=bias, key=qkv_key)
        self.projection = layers.Linear(width, width, key=projection_key)
        self.heads = heads

    def __call__(
        self,
        tokens: Float[Array, "t d"],
        *,
        queries: int | None = None,
        rotate: Callable[[Array], Array] | None = None,
    ) -> Float[Array, "q d"]:
        """Let every token look at every token, or only the first `queries` of them.

        `rotate` changes the queries and the keys ``[heads, T, width/heads]`` by their
        position.
        """
        width = tokens.shape[1]
        per_head = width // self.heads
        query, key, value = jnp.split(jax.vmap(self.qkv)(tokens), 3, axis=1)
        # Heads first, once: products of XLA on a CPU are slow on other orders.
        query, key, value = (
            jnp.transpose(part.reshape(-1, self.heads, per_head), (1, 0, 2))
            for part in (query[:queries], key, value)
        )
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        wide = accumulation_dtype(tokens.dtype)
        query = query * (1 / math.sqrt(per_head))
        scores = jnp.einsum("hqd,hkd->hqk", query, key, preferred_element_type=wide)
        largest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - largest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        output = jnp.einsum(
            "hqk,hkd->hqd",
            weights.astype(tokens.dtype),
            value,
            preferred_element_type=wide,
        )
        # The softmax's division, after the product: there are fewer numbers to divide.
        output = (output * (1 / total)).astype(tokens.dtype)
        output = jnp.transpose(output, (1, 0, 2))
        return jax.vmap(self.projection)(output.reshape(-1, width))


class Block(eqx.Module):
    """Attention, then a network on each token, each on a residual branch.

    With a `scale` each branch has a factor for each channel, that at first. A gated
    network multiplies one half of what `expand` gives by the SiLU of the other, which
    comes first.
    """

    norm1: LayerNorm
    attention: Attention
    scale1: LayerScale | None
    norm2: LayerNorm
    expand: layers.Linear
    contract: layers.Linear
    scale2: LayerScale | None
    gated: bool = eqx.field(static=True)

    def __init__(
        self,
        sizes: Variant,
        hidden: int,
        *,
        eps: float = NORM_EPS,
        bias: bool = True,
        gated: bool = False,
        scale: float | None = None,
        key: PRNGKeyArray,
    ):
        width, keys = sizes.width, jax.random.split(key, 3)
        self.norm1 = LayerNorm(width, eps=eps)
        self.attention = Attention(width, sizes.heads, bias=bias, key=keys[0])
        self.norm2 = LayerNorm(width, eps=eps)
        inner = hidden * (2 if gated else 1)
        self.expand = layers.Linear(width, inner, key=keys[1])
        self.contract = layers.Linear(hidden, width, key=keys[2])
        self.scale1, self.scale2 = (
            None if scale is None else LayerScale(width, scale) for _ in range(2)
        )
        self.gated = gated

    def __call__(
        self,
        tokens: Float[Array, "t d"],
        *,
        queries: int | None = None,
        rotate: Callable[[Array], Array] | None = None,
    ) -> Float[Array, "q d"]:
        """Return the tokens, or only the first `queries`, plus both branches."""
        normal = jax.vmap(self.norm1)(tokens)
        seen = self.attention(normal, queries=queries, rotate=rotate)
        tokens = tokens[:queries] + _scaled(self.scale1, seen)
        hidden = jax.vmap(self.expand)(jax.vmap(self.norm2)(tokens))
        if self.gated:
            gate, hidden = jnp.split(hidden, 2, axis=1)
            hidden = jax.nn.silu(gate) * hidden
        else:
            hidden = layers.gelu(hidden)
        return tokens + _scaled(self.scale2, jax.vmap(self.contract)(hidden))


def _scaled(scale: LayerScale | None, branch: Array) -> Array:
    return branch if scale is None else jax.vmap(scale)(branch)


class VisionTransformer(StagedModel):
    """Vision transformer for one image `[H, W, C]`, giving logits.

    Attributes:
        patches: convolution whose kernel and stride are the patch, with a bias.
        class_token: float32 ``[width]``.
        registers: None; `DINO` may have such tokens.
        positions: float32 ``[1 + patches, width]``, the class token's first, then the
            patches' row by row.

    Args:
        variant: width, depth and heads, such as ``VARIANTS["base"]``.
        patch: side of a patch in pixels.
        image_shape: (height, width, channels), both sides multiples of `patch`; no
            other fits the position embeddings.

    References:
        Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.1.
    """

    patches: layers.Conv
    class_token: Float[Array, " d"]
    registers: Float[Array, "r d"] | None
    positions: Float[Array, "t d"]
    blocks: tuple[Block, ...]
    norm: LayerNorm
    head: layers.Linear
    image_shape: tuple[int, int, int] = eqx.field(static=True)

    def __init__(
        self,
        variant: Variant,
        patch: int,
        classes: int,
        image_shape: tuple[int, int, int],
        *,
        key: PRNGKeyArray,
    ):
        validate.whole(classes=classes, at_least=1)
        rows, columns = patch_grid(variant, patch, image_shape)
        patch_key, token_key, position_key, head_key, *block_keys = jax.random.split(
            key, 4 + variant.depth
        )
        self.patches = patch_layer(image_shape[2], variant.width, patch, key=patch_key)
        self.class_token = embedding(token_key, (variant.width,))
        self.registers = None
        self.positions = embedding(position_key, (1 + rows * columns, variant.width))
        hidden = _MLP_RATIO * variant.width
        self.blocks = tuple(Block(variant, hidden, key=each) for each in block_keys)
        self.norm = LayerNorm(variant.width)
        self.head = layers.Linear(variant.width, classes, key=head_key)
        self.image_shape = image_shape

    @property
    def last_stage(self) -> PyTree:
        return self.blocks[-1], self.norm

    def front(self, image: Array) -> Float[Array, "t d"]:
        check_image(image, self.image_shape[2], self.image_shape)
        grid = self.patches(image)
        tokens = grid.reshape(-1, grid.shape[-1])
        if self.registers is not None:  # which have no positions
            tokens = self._placed(tokens)
        rows = jnp.pad(tokens, ((self._others, 0), (0, 0)))
        parts = [rows[:1] + self.class_token.astype(image.dtype)[None, :]]
        if self.registers is not None:
            parts.append(rows[1 : self._others] + self.registers.astype(image.dtype))
        tokens = jnp.concatenate([*parts, rows[self._others :]])
        if self.registers is None:
            tokens = self._placed(tokens)
        rotate = self._rotate()
        for block in self.blocks[:-1]:
            tokens = block(tokens, rotate=rotate)
        return tokens

    def back(self, seen: Array) -> Float[Array, " d"]:
        # The head sees the class token alone: no other need leave the last block.
        return self.norm(self.blocks[-1](seen, queries=1)[0])

    @property
    def _others(self) -> int:
        return 1 + (0 if self.registers is None else len(self.registers))

    def _placed(self, tokens: Array) -> Array:
        if self.positions is None:
            return tokens
        return tokens + self.positions.astype(tokens.dtype)

    def _rotate(self) -> Callable[[Array], Array] | None:
        """Return what rotates queries and keys by position, if that is done."""


def patch_grid(
    variant: Variant, patch: int, image_shape: tuple[int, int, int]
) -> tuple[int, int]:
    """Return how many patches an image has in a column and in a row."""
    *sides, channels = image_shape
    validate.whole(depth=variant.depth, heads=variant.heads, at_least=1)
    validate.whole(patch=patch, channels=channels, at_least=1)
    if variant.width % variant.heads:
        rule = f"must divide the width of {variant.width}"
        validate.refuse("heads", variant.heads, rule)
    for name, side in zip(("image_height", "image_width"), sides, strict=True):
        if side % patch or side < patch:
            below = side // patch * patch
            near = f"{below} or {below + patch}" if below > 0 else f"{patch}"
            rule = f"must be a multiple of the patch side {patch}"
            validate.refuse(name, side, rule, f"use {near}")
    return sides[0] // patch, sides[1] // patch


def patch_layer(
    channels: int, width: int, patch: int, *, key: PRNGKeyArray
) -> layers.Conv:
    """Return the convolution that makes a token of each patch."""
    return layers.Conv(
        channels, width, patch, stride=patch, padding="VALID", bias=True, key=key
    )


def embedding(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
    """Draw tokens or positions to start from."""
    return _EMBEDDING_DEVIATION * jax.random.normal(key, shape, jnp.float32)


def fit_positions(positions: np.ndarray, model: Any) -> np.ndarray:
    """Return position embeddings for the grid of a model.

    Bicubic (Keys's kernel with a = −1/2), antialiased for a coarser grid, as in timm's
    `resample_abs_pos_embed`. The embedding of the class token is not changed.

    Args:
        positions: ``[1 + patches, width]`` of a square grid, the class token first;
            or ``[patches, width]`` for a model whose class token has none.
        model: its image and patch size give the grid. With the same number of
            patches nothing changes.

    Raises:
        ValueError: the patches are not a square grid.

    References:
        Dosovitskiy et al. 2021, section 3.2: 2D interpolation of the embeddings when
        fine-tuning at another resolution.
    """
    patch = model.patches.weight.shape[0]
    height, width = (side // patch for side in model.image_shape[:2])
    first = model.positions.shape[0] - height * width
    count = len(positions) - first
    if count == height * width:
        return positions
    side = math.isqrt(max(count, 0))
    if side * side != count or not count:
        raise ValueError(f"{count} patches are not a square grid")
    grid = np.float32(positions[first:]).reshape(side, side, -1)
    resized = jax.image.resize(grid, (height, width, grid.shape[-1]), "cubic")
    rows = np.asarray(resized).reshape(height * width, -1)
    return np.concatenate([np.float32(positions[:first]), rows])
