"""DINOv2 and DINOv3: vision transformers trained without labels, called on one image.

The structure is that of timm's `vit_*_dinov2` and `vit_*_dinov3`, so that its weights
fit: a vision transformer (`vit`) with a factor for each channel of every residual
branch, and in some a gated network and register tokens.

| | DINOv2 | DINOv3 |
|---|---|---|
| positions | learned, added once | rotate queries and keys in every block |
| queries, keys and values | have a bias | have none |
| input of the head | the class token | the mean of the patches |
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from tanager import _validate as validate
from tanager.clipping.analysis.dtypes import accumulation_dtype
from tanager.models import layers, vit


class Variant(NamedTuple):
    """What the transformers of the two papers differ in.

    Attributes:
        sizes: channels of a token, number of blocks and of heads.
        patch: side of a patch in pixels.
        hidden: channels inside a block's network.
        gated: whether that is SwiGLU (Shazeer 2020, arXiv:2002.05202), not GELU.
        registers: tokens beside the class token (Darcet et al. 2024, arXiv:2309.16588).
        rotary: whether positions rotate queries and keys, as in DINOv3.
    """

    sizes: vit.Variant
    patch: int
    hidden: int
    gated: bool = False
    registers: int = 0
    rotary: bool = False


def _v2(size: str, registers: int = 0) -> Variant:
    sizes = (vit.VARIANTS | {"giant": vit.Variant(1536, 40, 24)})[size]
    gated = size == "giant"
    hidden = 4096 if gated else 4 * sizes.width
    return Variant(sizes, 14, hidden, gated, registers)


def _v3(sizes: vit.Variant, gated: bool = False) -> Variant:
    return Variant(sizes, 16, 4 * sizes.width, gated, registers=4, rotary=True)


_V2_SIZES = ("small", "base", "large", "giant")

VARIANTS = {
    **{f"dinov2-{size}": _v2(size) for size in _V2_SIZES},
    **{f"dinov2-{size}-reg4": _v2(size, registers=4) for size in _V2_SIZES},
    "dinov3-small": _v3(vit.VARIANTS["small"]),
    "dinov3-small-plus": _v3(vit.VARIANTS["small"], gated=True),
    "dinov3-base": _v3(vit.VARIANTS["base"]),
    "dinov3-large": _v3(vit.VARIANTS["large"]),
    "dinov3-huge-plus": _v3(vit.Variant(1280, 32, 20), gated=True),
}
"""Oquab et al. 2024, "DINOv2", arXiv:2304.07193, appendix B; Siméoni et al. 2025,
"DINOv3", arXiv:2508.10104, section 5. All without the heads of their training.
"""

_LAYER_SCALE = 1e-5
_V3_NORM_EPS = 1e-5
_TEMPERATURE = 100.0


class DINO(vit.VisionTransformer):
    """DINOv2 or DINOv3 for one image `[H, W, C]`, giving logits.

    Attributes:
        registers: float32 ``[registers, width]``, or None.
        positions: float32 ``[patches, width]``, row by row; the class token's comes
            first where there are no registers. None in DINOv3.

    Args:
        variant: such as ``VARIANTS["dinov2-base"]``.
        image_shape: (height, width, channels), both sides multiples of the patch.
    """

    positions: Float[Array, "t d"] | None  # pyrefly: ignore[bad-override]

    def __init__(
        self,
        variant: Variant,
        classes: int,
        image_shape: tuple[int, int, int],
        *,
        key: PRNGKeyArray,
    ):
        width, depth, heads = variant.sizes
        validate.whole(classes=classes, hidden=variant.hidden, at_least=1)
        validate.whole(registers=variant.registers, at_least=0)
        rows, columns = vit.patch_grid(variant.sizes, variant.patch, image_shape)
        if variant.rotary and width // heads % 4:
            rule = "must give heads of a multiple of 4 channels, two for each axis"
            validate.refuse("width", width, rule)
        keys = iter(jax.random.split(key, 5 + depth))
        channels = image_shape[2]
        self.patches = vit.patch_layer(channels, width, variant.patch, key=next(keys))
        self.class_token = vit.embedding(next(keys), (width,))
        self.registers = positions = None
        if variant.registers:
            self.registers = vit.embedding(next(keys), (variant.registers, width))
        if not variant.rotary:
            count = rows * columns + int(not variant.registers)
            positions = vit.embedding(next(keys), (count, width))
        self.positions = positions
        self.head = layers.Linear(width, classes, key=next(keys))
        eps = _V3_NORM_EPS if variant.rotary else vit.NORM_EPS
        self.blocks = tuple(
            vit.Block(
                variant.sizes,
                variant.hidden,
                eps=eps,
                bias=not variant.rotary,
                gated=variant.gated,
                scale=_LAYER_SCALE,
                key=next(keys),
            )
            for _ in range(depth)
        )
        self.norm = vit.LayerNorm(width, eps=eps)
        self.image_shape = image_shape

    def back(self, seen: Array) -> Float[Array, " d"]:
        """Return the input of the head: one normalised token.

        That is the class token in DINOv2, and the mean of the patches in DINOv3.
        """
        if self.positions is not None:
            return super().back(seen)
        tokens = self.blocks[-1](seen, rotate=self._rotate())[self._others :]
        return jnp.mean(jax.vmap(self.norm)(tokens), axis=0)

    def _rotate(self) -> Callable[[Array], Array] | None:
        if self.positions is not None:
            return None
        patch = self.patches.weight.shape[0]
        grid = tuple(side // patch for side in self.image_shape[:2])
        heads = self.blocks[0].attention.heads
        return _rotation(grid, len(self.class_token) // heads, self._others)


def _rotation(
    grid: tuple[int, ...], channels: int, others: int
) -> Callable[[Array], Array]:
    """Return what rotates ``[heads, others + patches, channels]`` by position.

    Channel c and channel c + channels/2 are turned as a point of the plane, by 2π times
    the patch's centre, from −1 to 1, over a period of 1 to 100. The first half of these
    pairs takes the centre's height, the other its place in the row. The first `others`
    tokens stay.

    References:
        Siméoni et al. 2025, section 3.2; Su et al. 2021, arXiv:2104.09864.
    """
    periods = _TEMPERATURE ** (np.arange(channels // 4) / (channels // 4))
    centres = [2 * (np.arange(side) + 0.5) / side - 1 for side in grid]
    height, width = np.meshgrid(*centres, indexing="ij")
    angles = [2 * np.pi * place.reshape(-1, 1) / periods for place in (height, width)]
    half = np.pad(np.concatenate(angles, axis=1), ((others, 0), (0, 0)))
    cosine, sine = np.cos(half), np.sin(half)

    def rotate(tokens: Array) -> Array:
        wide = accumulation_dtype(tokens.dtype)
        x, y = jnp.split(tokens.astype(wide), 2, axis=2)
        c, s = (jnp.asarray(turn, wide)[None] for turn in (cosine, sine))
        turned = jnp.concatenate([x * c - y * s, y * c + x * s], axis=2)
        return turned.astype(tokens.dtype)

    return rotate
