"""Crops and flips against an enumeration of all legal ones by NumPy.

The statistical tests reject at a false-alarm rate of 1e-6; their keys are fixed.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from legal_views import FALSE_ALARM, keys, legal_crops, picture, uniform_p, which
from scipy import stats

from tanager.data.crops import middle, random_crop, random_flip


@pytest.mark.statistical
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize(
    "padding, shape, size",
    [
        (1, (6, 5, 3), None),
        (2, (5, 6), None),
        (4, (7, 11, 1), None),
        (0, (9, 7), (6, 5)),
        (2, (6, 8), (5, 5)),
    ],
)
def test_crops_are_the_legal_ones_equally_often(padding, shape, size, dtype):
    image = picture(*shape, dtype=dtype)
    legal = legal_crops(image, padding, size)
    crop = jax.jit(
        jax.vmap(lambda key: random_crop(key, jnp.asarray(image), padding, size))
    )
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


def test_no_padding_and_the_whole_size_is_the_image():
    image = jnp.asarray(picture())
    np.testing.assert_array_equal(random_crop(jax.random.key(0), image, 0), image)


def test_largest_padding():
    image = picture(3, 3, 1)
    legal = legal_crops(image, 2)
    produced = jax.vmap(lambda key: random_crop(key, jnp.asarray(image), 2))(keys(500))
    seen = {np.asarray(view).tobytes() for view in produced}
    assert seen == {view.tobytes() for view in legal}


@pytest.mark.parametrize(
    ("size", "rows", "columns"),
    [
        ((4, 4), slice(1, 5), slice(1, 5)),
        ((3, 4), slice(1, 4), slice(1, 5)),
        ((6, 6), slice(0, 6), slice(0, 6)),
    ],
)
def test_middle(size, rows, columns):
    image = picture()
    np.testing.assert_array_equal(
        middle(jnp.asarray(image), size), image[rows, columns]
    )


@pytest.mark.parametrize("padding", [3, 4])
def test_padding_of_the_image_size_is_refused(padding):
    image = jnp.asarray(picture(8, 3))
    message = f"padding (={padding}) must be smaller than the image, 8 × 3"
    with pytest.raises(ValueError, match=re.escape(message)):
        random_crop(jax.random.key(0), image, padding)


def test_bad_arguments_are_refused():
    image, key = jnp.asarray(picture()), jax.random.key(0)
    with pytest.raises(ValueError, match=re.escape("padding (=-1) must be at least 0")):
        random_crop(key, image, -1)
    message = "size (=(6, 7)) must be at most that of the image, 6 × 6"
    with pytest.raises(ValueError, match=re.escape(message)):
        random_crop(key, image, 2, (6, 7))
