"""Small networks: convolutional, the LeNet of private MNIST, fully connected."""

import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from tanager import _validate as validate
from tanager.models import layers, windows
from tanager.models.model import Model, check_image, check_sides
from tanager.models.wide_resnet import NORMALISATION_ORDERS, group_norm, normalise


_CNN_CHANNELS, _CNN_GROUPS = 32, 4
_CNN_SIDE = 8
_LENET_CHANNELS = (16, 32)
_LENET_HIDDEN = 32


class _Stage(eqx.Module):
    conv: layers.Conv
    norm: layers.GroupNorm | None
    order: str = eqx.field(static=True)

    def __call__(self, image: Float[Array, "h w i"]) -> Float[Array, "h2 w2 o"]:
        return normalise(self.norm, self.conv(image), self.order)


class SmallCNN(Model):
    """3×3 convolutions with norm and ReLU, then one linear layer over all positions.

    The first convolution keeps the resolution; each further one halves it, until the
    longer side is at most 8 pixels (and at least once). An 8×8 image has two
    convolutions, 28×28 and 32×32 have three; all have 32 channels in 4 groups. The
    linear layer sees every position: averaging over positions first costs accuracy
    where digits fill the whole image.

    Args:
        image_shape: (height, width, channels), each side at least 8.
        normalisation_order: ``"pre-activation"`` for convolution, norm, ReLU;
            ``"post-activation"`` for convolution, ReLU, norm; ``"none"`` for no norm.
        weight_standardisation: whether the convolutions' weights are standardised.
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
        height, width, channels = check_sides(image_shape, _CNN_SIDE, "it halves them")
        validate.whole(classes=classes, at_least=1)
        validate.one_of(NORMALISATION_ORDERS, normalisation_order=normalisation_order)
        make = layers.StandardisedConv if weight_standardisation else layers.Conv
        stages = []
        while len(stages) < 2 or max(height, width) > _CNN_SIDE:
            key, own_key = jax.random.split(key)
            stride = 2 if stages else 1
            conv = make(
                channels, _CNN_CHANNELS, 3, stride=stride, padding=1, key=own_key
            )
            norm = group_norm(normalisation_order, _CNN_CHANNELS, _CNN_GROUPS)
            stages.append(_Stage(conv, norm, normalisation_order))
            channels = _CNN_CHANNELS
            height, width = -(-height // stride), -(-width // stride)
        self.stages = tuple(stages)
        self.head = layers.Linear(height * width * channels, classes, key=key)
        self.image_shape = image_shape

    def features(self, image: Array) -> Float[Array, " features"]:
        check_image(image, self.image_shape[2], self.image_shape)
        for stage in self.stages:
            image = stage(image)
        return image.reshape(-1)


class LeNet(Model):
    """Two convolutions and two linear layers with tanh, 26 010 parameters on MNIST.

    An 8×8 convolution to 16 channels at stride 2 with 3 pixels of padding, a 4×4 one to
    32 channels at stride 2 without; after each tanh, then a 2×2 maximum at stride 1;
    a linear layer to 32 units over all positions, tanh, and the head. A 28×28 image has
    14, 13, 5 and 4 pixels a side on its way.

    It is the network of the MNIST tutorials of TensorFlow Privacy, which reports 96.6 %
    at ε = 2.92 (δ = 1e-5), and of Opacus, but with tanh for ReLU: Papernot et al. reach
    98.1 % at ε below 3 with bounded activations.

    Args:
        image_shape: (height, width, channels), each side at least 16.
        as_jax_privacy: build the network that jax_privacy, the Unlocking paper's code,
            audits on MNIST: ReLU, and maxima at stride 2; 10 650 parameters.

    References:
        Papernot et al. 2021, "Tempered sigmoid activations for deep learning with
        differential privacy", arXiv:2007.14191; Tramèr and Boneh 2021, "Differentially
        private learning needs better features (or much more data)".
    """

    convs: tuple[layers.Conv, layers.Conv]
    hidden: layers.Linear
    head: layers.Linear
    image_shape: tuple[int, int, int] = eqx.field(static=True)
    as_jax_privacy: bool = eqx.field(static=True)

    def __init__(
        self,
        classes: int,
        image_shape: tuple[int, int, int],
        *,
        as_jax_privacy: bool = False,
        key: PRNGKeyArray,
    ):
        why = "lenet shrinks them four times"
        height, width, channels = check_sides(image_shape, 16, why)
        validate.whole(classes=classes, at_least=1)
        one, two, three, four = jax.random.split(key, 4)
        first, second = _LENET_CHANNELS
        self.convs = (
            layers.Conv(channels, first, 8, stride=2, padding=3, bias=True, key=one),
            layers.Conv(first, second, 4, stride=2, padding=0, bias=True, key=two),
        )
        for taken in (2, 4):  # what a window exceeds the padding by, at stride 2
            height, width = (height - taken) // 2 + 1, (width - taken) // 2 + 1
            if as_jax_privacy:
                height, width = -(-height // 2), -(-width // 2)
            else:
                height, width = height - 1, width - 1
        self.as_jax_privacy = as_jax_privacy
        self.hidden = layers.Linear(height * width * second, _LENET_HIDDEN, key=three)
        self.head = layers.Linear(_LENET_HIDDEN, classes, key=four)
        self.image_shape = image_shape

    def features(self, image: Array) -> Float[Array, " features"]:
        check_image(image, self.image_shape[2], self.image_shape)
        bend, stride, padding = jnp.tanh, 1, "VALID"
        if self.as_jax_privacy:
            bend, stride, padding = jax.nn.relu, 2, "SAME"
        for conv in self.convs:
            active = bend(conv(image))
            image = windows.max_pool(active, 2, stride=stride, padding=padding)
        return bend(self.hidden(image.reshape(-1)))


class MLP(Model):
    """Hidden layers with ReLU, then one linear layer; without hidden layers, linear.

    Args:
        image_shape: of one example: (height, width, channels), or (features,).
        hidden: units of each hidden layer.
    """

    hidden: tuple[layers.Linear, ...]
    head: layers.Linear
    image_shape: tuple[int, ...] = eqx.field(static=True)

    def __init__(
        self,
        classes: int,
        image_shape: tuple[int, ...],
        *,
        hidden: Sequence[int] = (1024, 1024),
        key: PRNGKeyArray,
    ):
        for size in image_shape:
            validate.whole(image_size=size, at_least=1)
        features = math.prod(image_shape)
        linears = []
        for units in (*hidden, classes):
            key, own_key = jax.random.split(key)
            linears.append(layers.Linear(features, units, key=own_key))
            features = units
        self.hidden = tuple(linears[:-1])
        self.head = linears[-1]
        self.image_shape = tuple(image_shape)

    def features(self, image: Array) -> Float[Array, " features"]:
        if len(self.image_shape) == 3:
            check_image(image, self.image_shape[2], self.image_shape)
        elif image.shape != self.image_shape or not eqx.is_inexact_array(image):
            rule = f"must be floating point of shape {self.image_shape}"
            remedy = "a model takes ONE example; use jax.vmap(model) on a batch"
            validate.refuse("input", f"{image.dtype}{list(image.shape)}", rule, remedy)
        values = image.reshape(-1)
        for linear in self.hidden:
            values = jax.nn.relu(linear(values))
        return values
