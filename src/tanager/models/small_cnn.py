"""A small convolutional network for small images, called on one image."""

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from tanager import _validate as validate
from tanager.models import layers
from tanager.models.wide_resnet import NORMALISATION_ORDERS


_CHANNELS = 32
_GROUPS = 4
_SMALLEST_SIDE = 8


class _Stage(eqx.Module):
    conv: layers.Conv
    norm: layers.GroupNorm
    order: str = eqx.field(static=True)

    def __call__(self, image: Float[Array, "h w i"]) -> Float[Array, "h2 w2 o"]:
        image = self.conv(image)
        if self.order == "pre-activation":
            return jax.nn.relu(self.norm(image))
        return self.norm(jax.nn.relu(image))


class SmallCNN(layers.Model):
    """3×3 convolutions with norm and ReLU, then one linear layer over all positions.

    The first convolution keeps the resolution; each further one halves it, until the
    longer side is at most 8 pixels (and at least once). An 8×8 image has two
    convolutions, 28×28 and 32×32 have three; all have 32 channels in 4 groups. The
    linear layer sees every position: averaging over positions first costs accuracy
    where digits fill the whole image.

    Attributes:
        stages, head: the parts, in this order.
        image_shape: the only shape the head fits.

    Args:
        classes: number of logits.
        image_shape: (height, width, channels), each side at least 8.
        normalisation_order: ``"pre-activation"`` for convolution, norm, ReLU;
            ``"post-activation"`` for convolution, ReLU, norm.
        weight_standardisation: whether the convolutions' weights are standardised.
        key: JAX key of the initial weights.

    Raises:
        ValueError: an impossible size, an unknown order, or, when called, the input is
            not one floating-point image of `image_shape`.
    """

    stages: tuple[_Stage, ...]
    head: layers.Linear
    image_shape: tuple[int, int, int] = eqx.field(static=True)

    def __init__(
        self,
        classes: int,
        image_shape: tuple[int, int, int],
        *,
        normalisation_order: str = "pre-activation",
        weight_standardisation: bool = True,
        key: PRNGKeyArray,
    ):
        height, width, channels = image_shape
        validate.whole(image_height=height, image_width=width, at_least=_SMALLEST_SIDE)
        validate.whole(image_channels=channels, classes=classes, at_least=1)
        validate.one_of(NORMALISATION_ORDERS, normalisation_order=normalisation_order)
        make = layers.StandardisedConv if weight_standardisation else layers.Conv
        stages = []
        while len(stages) < 2 or max(height, width) > _SMALLEST_SIDE:
            key, conv_key = jax.random.split(key)
            stride = 2 if stages else 1
            padding = ((1, 1), (1, 1))
            conv = make(
                channels, _CHANNELS, 3, stride=stride, padding=padding, key=conv_key
            )
            norm = layers.GroupNorm(_CHANNELS, _GROUPS)
            stages.append(_Stage(conv, norm, normalisation_order))
            channels = _CHANNELS
            height, width = -(-height // stride), -(-width // stride)
        self.stages = tuple(stages)
        self.head = layers.Linear(height * width * channels, classes, key=key)
        self.image_shape = image_shape

    def features(self, image: Array) -> Float[Array, " features"]:
        """Return the input of the head for one image: the last stage, flattened."""
        layers.check_image(image, self.image_shape[2], self.image_shape)
        for stage in self.stages:
            image = stage(image)
        return image.reshape(-1)
