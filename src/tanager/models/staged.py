"""Models in two parts: what may stay as it is, and the last stage.

What the front makes of an image does not change while only the last stage is trained,
so it can be computed once.
"""

import abc

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from tanager.models.layers import Model


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
        """Return the features of one image, as it is."""
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
