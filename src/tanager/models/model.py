"""What every named model is: features of one image, and a linear head.

A staged model comes in two parts: what may stay as it is, and the last stage. What the
front makes of an image does not change while only the last stage is trained, so it can
be computed once.
"""

import abc
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from tanager import _validate as validate
from tanager.models.layers import Linear


class Model(eqx.Module):
    """What every named model is: features of one image, and a linear head.

    Built from its sizes, the number of `classes`, the channels or the shape of its
    images, and `key`, the JAX key of the initial weights. The parts are attributes, in
    the order of the forward pass.

    Attributes:
        mirror: whether the head sees the mean of the features of an image and of its
            mirror image, see `mirrored`.

    Raises:
        ValueError: an impossible size or an unknown option; or, when called, the input
            is not one floating-point image of the model's channels or shape.
    """

    head: eqx.AbstractVar[Linear]
    mirror: bool = eqx.field(static=True, init=False)

    def __new__(cls, *_: Any, **__: Any):
        """Let `mirror` be False, whatever the constructor of a subclass sets."""
        self = super().__new__(cls)
        object.__setattr__(self, "mirror", False)
        return self

    @abc.abstractmethod
    def features(self, image: Array) -> Float[Array, " features"]:
        """Return the features of one image, as it is."""

    def head_input(self, image: Array) -> Float[Array, " features"]:
        """Return the input of the head for one image."""
        found = self.features(image)
        return (found + self.features(image[:, ::-1])) / 2 if self.mirror else found

    def __call__(self, image: Array) -> Float[Array, " classes"]:
        """Return the logits of one image, in the image's dtype."""
        return self.head(self.head_input(image))


class StagedModel(Model):
    """A model whose last stage can be trained alone."""

    @property
    @abc.abstractmethod
    def last_stage(self) -> PyTree:
        """The modules of `back`."""

    @abc.abstractmethod
    def front(self, image: Array) -> Array:
        """Return what the last stage sees of one image."""

    @abc.abstractmethod
    def back(self, seen: Array) -> Float[Array, " features"]:
        """Return the input of the head, given the front of one image."""

    def features(self, image: Array) -> Float[Array, " features"]:
        return self.back(self.front(image))

    def fronts(self, image: Array) -> Array:
        """Return what the last stage sees of one image; of both images for `mirror`."""
        if not self.mirror:
            return self.front(image)
        return jnp.stack([self.front(image), self.front(image[:, ::-1])])

    def head_input_of(self, fronts: Array) -> Float[Array, " features"]:
        """Return the input of the head, given what `fronts` returned."""
        if not self.mirror:
            return self.back(fronts)
        return jnp.mean(jax.vmap(self.back)(fronts), axis=0)


class FixedFront(StagedModel):
    """A model that is one linear layer on features that are fixed."""

    @property
    def last_stage(self) -> PyTree:
        """Nothing: the head sees the features."""
        return ()

    def fronts(self, image: Array) -> Array:
        """Return the features that the head sees: for `mirror` the mean of both's."""
        found = self.front(image)
        return (found + self.front(image[:, ::-1])) / 2 if self.mirror else found

    def head_input_of(self, fronts: Array) -> Float[Array, " features"]:
        return self.back(fronts)

    def back(self, seen: Array) -> Float[Array, " features"]:
        return seen.reshape(-1)


AnyModel = TypeVar("AnyModel", bound=Model)


def mirrored(model: AnyModel) -> AnyModel:
    """Return the model whose logits do not tell an image from its mirror image.

    Its head sees the mean of both's features, at twice the cost.
    """
    copy = jax.tree.map(lambda leaf: leaf, model)
    object.__setattr__(copy, "mirror", True)  # a static field is no leaf of the tree
    return copy


def check_sides(
    image_shape: tuple[int, int, int], at_least: int, why: str
) -> tuple[int, int, int]:
    """Return the shape of images; refuse sides of fewer pixels, and no channel."""
    height, width, channels = image_shape
    remedy = f"enlarge the images: {why}"
    validate.whole(
        image_height=height, image_width=width, at_least=at_least, remedy=remedy
    )
    validate.whole(image_channels=channels, at_least=1)
    return image_shape


def check_image(
    image: Array, channels: int, image_shape: tuple[int, int, int] | None = None
) -> None:
    """Require one floating-point image ``[H, W, channels]``, or of one shape."""
    if image.ndim != 3 or image.shape[-1] != channels:
        validate.channels_last(image.shape)
        rule = f"must be (H, W, {channels})"
        remedy = "a model takes ONE image; use jax.vmap(model) on a batch"
        validate.refuse("image shape", tuple(image.shape), rule, remedy)
    if image_shape not in (None, image.shape):
        remedy = "the model fits that one size; create the model for this one"
        validate.refuse("image shape", image.shape, f"must be {image_shape}", remedy)
    if not jnp.issubdtype(image.dtype, jnp.floating):
        rule = "must be floating point"
        remedy = "standardise the pixels first"
        validate.refuse("image dtype", str(image.dtype), rule, remedy)
