"""Views against an enumeration of all legal crops and flips by NumPy.

The statistical tests reject at a false-alarm rate of 1e-6; their keys are fixed.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tanager.data.augment import (
    Augmentation,
    random_crop,
    random_flip,
    standardise,
    views,
)


FALSE_ALARM = 1e-6


def picture(height=6, width=6, channels=3, dtype=np.uint8):
    """An image with all pixels different: so are its views while 2·padding + 1 < width.

    (Beyond that, a crop can be another crop's mirror image.)
    """
    pixels = np.arange(height * width * channels).reshape(height, width, channels)
    return pixels.astype(dtype)


def legal_views(image, padding, flip):
    """All crops of the padded image, in order, then all of them flipped."""
    height, width, _ = image.shape
    edges = ((padding, padding), (padding, padding), (0, 0))
    padded = np.pad(image, edges, mode="reflect")
    steps = range(2 * padding + 1)
    crops = [padded[i : i + height, j : j + width] for i in steps for j in steps]
    return crops + [crop[:, ::-1] for crop in crops] if flip else crops


def which(produced, legal):
    """The position of every produced view among the legal ones, all different."""
    table = {view.tobytes(): position for position, view in enumerate(legal)}
    assert len(table) == len(legal)
    return np.array([table[np.ascontiguousarray(v).tobytes()] for v in produced])


def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def uniform_p(positions, choices):
    return stats.chisquare(np.bincount(positions, minlength=choices)).pvalue


@pytest.mark.statistical
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize(
    "padding, size", [(1, (6, 5, 3)), (2, (5, 6)), (4, (7, 11, 1))]
)
def test_crops_are_the_legal_ones_equally_often(padding, size, dtype):
    image = picture(*size, dtype=dtype)
    legal = legal_views(image, padding, flip=False)
    crop = jax.jit(jax.vmap(lambda key: random_crop(key, jnp.asarray(image), padding)))
    produced = np.asarray(crop(keys(100 * len(legal), seed=padding)))
    assert produced.dtype == dtype
    positions = which(produced, legal)
    assert set(positions) == set(range(len(legal)))
    assert uniform_p(positions, len(legal)) > FALSE_ALARM


@pytest.mark.statistical
def test_flips_are_half():
    image = picture()
    produced = jax.vmap(lambda key: random_flip(key, jnp.asarray(image)))(keys(2000))
    positions = which(np.asarray(produced), [image, image[:, ::-1]])
    assert stats.binomtest(int(positions.sum()), 2000).pvalue > FALSE_ALARM


@pytest.mark.statistical
def test_augmentation_is_uniform_over_crops_and_flips():
    image = picture(5, 6)
    legal = legal_views(image, 2, flip=True)
    augmentation = Augmentation(crop_padding=2)
    produced = jax.vmap(lambda key: augmentation(key, jnp.asarray(image)))(
        keys(100 * len(legal), seed=4)
    )
    assert uniform_p(which(np.asarray(produced), legal), len(legal)) > FALSE_ALARM


@pytest.mark.statistical
def test_views_are_independent():
    """Every pair of views of one image takes all pairs of values equally often."""
    image = picture()
    legal = legal_views(image, 1, flip=True)
    choices = len(legal)
    produced = jax.vmap(
        lambda key: views(Augmentation(crop_padding=1), key, jnp.asarray(image), 3)
    )(keys(20 * choices**2, seed=5))
    assert produced.shape == (20 * choices**2, 3, *image.shape)
    positions = [which(np.asarray(produced[:, view]), legal) for view in range(3)]
    for one, two in itertools.combinations(positions, 2):
        assert uniform_p(one * choices + two, choices**2) > FALSE_ALARM
        assert uniform_p(one * choices + one, choices**2) < FALSE_ALARM


def test_images_of_a_batch_get_their_own_views():
    """vmap over examples and views equals one image at a time."""
    images = np.stack([picture(), picture()[::-1]])
    augmentation = Augmentation(crop_padding=2)

    def of_one(key, image):
        return views(augmentation, key, image, 4)

    batch = jax.jit(jax.vmap(of_one))(keys(2), jnp.asarray(images))
    assert batch.shape == (2, 4, *images.shape[1:])
    for row, (key, image) in enumerate(zip(keys(2), images, strict=True)):
        np.testing.assert_array_equal(batch[row], of_one(key, jnp.asarray(image)))


def test_same_key_same_views_other_key_others():
    image = jnp.asarray(picture(32, 32, 1))
    one, again, other = (
        np.asarray(views(Augmentation(), jax.random.key(seed), image, 8))
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)


def test_nothing_to_do_is_the_image():
    image = jnp.asarray(picture())
    key = jax.random.key(0)
    unchanged = Augmentation(crop_padding=0, flip=False)(key, image)
    np.testing.assert_array_equal(unchanged, image)
    np.testing.assert_array_equal(random_crop(key, image, 0), image)


def test_largest_padding():
    image = picture(3, 3, 1)
    legal = legal_views(image, 2, flip=False)
    produced = jax.vmap(lambda key: random_crop(key, jnp.asarray(image), 2))(keys(500))
    seen = {np.asarray(view).tobytes() for view in produced}
    assert seen == {view.tobytes() for view in legal}


def test_augmentation_is_a_value():
    assert Augmentation(4, True) == Augmentation()
    assert hash(Augmentation(4, True)) == hash(Augmentation())


def test_standardise_matches_float64():
    image = np.random.default_rng(0).integers(0, 256, (7, 5, 3), np.uint8)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    out = jax.jit(lambda pixels: standardise(pixels, mean, std))(jnp.asarray(image))
    assert out.dtype == jnp.float32
    expected = (image.astype(np.float64) / 255 - mean) / std
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("padding", [3, 4])
def test_padding_of_the_image_size_is_refused(padding):
    image = jnp.asarray(picture(8, 3))
    message = f"padding (={padding}) must be smaller than the image, 8 × 3"
    with pytest.raises(ValueError, match=re.escape(message)):
        random_crop(jax.random.key(0), image, padding)


def test_bad_arguments_are_refused():
    image, key = jnp.asarray(picture()), jax.random.key(0)
    with pytest.raises(ValueError, match=re.escape("crop_padding (=-1) must be at")):
        Augmentation(crop_padding=-1)
    with pytest.raises(ValueError, match=re.escape("padding (=-1) must be at least 0")):
        random_crop(key, image, -1)
    message = "multiplicity (=0) must be at least 1: without augmentation, use"
    with pytest.raises(ValueError, match=re.escape(message)):
        views(Augmentation(), key, image, 0)
    message = "mean (=(0.5,)) must have 3 numbers, one per channel"
    with pytest.raises(ValueError, match=re.escape(message)):
        standardise(image, (0.5,), (0.5, 0.5, 0.5))
    with pytest.raises(ValueError, match=re.escape("std (=0.0) must be positive")):
        standardise(image, (0.5, 0.5, 0.5), (0.5, 0.0, 0.5))
