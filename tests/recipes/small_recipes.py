"""Recipes on a few small images of noise."""

import dataclasses

import numpy as np

from tanager.data import ArraySource, Dataset


CLASSES = 5


def shrunk(recipe, examples=12):
    """The recipe for a few small images: everything else stays as it is."""
    side = {"digits": 8, "mnist": 28}.get(recipe.dataset, 32)
    channels = 1 if recipe.dataset in ("digits", "mnist") else 3
    crop_size = None
    if recipe.crop_size is not None:
        crop_size, side = side, side + 8
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (examples, side, side, channels), np.uint8)
    labels = (np.arange(examples) % CLASSES).astype(np.int32)
    source = ArraySource({"image": images, "label": labels})
    plain = (0.5,) * channels
    classes = tuple("abcde")
    shape = (side, side, channels)
    dataset = Dataset(recipe.dataset, source, source, classes, shape, plain, plain)
    small = dataclasses.replace(
        recipe, weights=None, image_size=None, crop_size=crop_size
    )
    return small, dataset
