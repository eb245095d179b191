"""Models that begin with a public transform of the image."""

import abc

from jaxtyping import Array, Float

from tanager.models.layers import Model


class TransformModel(Model):
    """A model that begins with a public transform, which has no parameters.

    What the transform makes of an image never changes, so it can be computed once.
    """

    @abc.abstractmethod
    def transform(self, image: Array) -> Array:
        """Return what the layers with parameters see of one image."""

    @abc.abstractmethod
    def of_transform(self, values: Array) -> Float[Array, " features"]:
        """Return the input of the head, given the transform of one image."""

    def features(self, image: Array) -> Float[Array, " features"]:
        """Return the input of the head for one image."""
        return self.of_transform(self.transform(image))
