"""Crops and flips against an enumeration of all legal ones by NumPy.

The statistical tests reject at a false-alarm rate of 1e-6; their keys are fixed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from legal_views import FALSE_ALARM, keys, legal_crops, picture, uniform_p, which
from scipy import stats

from tanager.data.crops import PADDING_MODES, middle, random_crop, random_flip


@pytest.mark.statistical
@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize(
    "padding, shape, size",
    [
        (1, (6, 5, 3), (6, 5)),
        (4, (7, 11, 1), (7, 11)),
        (0, (9, 7), (6, 5)),
        (2, (6, 8), (5, 5)),
    ],
)
def test_crops_are_the_legal_ones_equally_often(padding, shape, size, mode):
    image = picture(*shape)
    legal = legal_crops(image, padding, size, mode)
    crop = jax.jit(
        jax.vmap(lambda key: random_crop(key, jnp.asarray(image), padding, size, mode))
    )
    produced = np.asarray(crop(keys(100 * len(legal), seed=padding)))
    assert produced.dtype == np.uint8
    positions = which(produced, legal)
    assert set(positions) == set(range(len(legal)))
    assert uniform_p(positions, len(legal)) > FALSE_ALARM


@pytest.mark.statistical
def test_flips_are_half():
    image = picture()
    produced = jax.vmap(lambda key: random_flip(key, jnp.asarray(image)))(keys(2000))
    positions = which(np.asarray(produced), [image, image[:, ::-1]])
    assert stats.binomtest(int(positions.sum()), 2000).pvalue > FALSE_ALARM


def test_largest_padding():
    image = picture(3, 3, 1)
    legal = legal_crops(image, 2)
    crop = jax.vmap(lambda key: random_crop(key, jnp.asarray(image), 2, (3, 3)))
    produced = jax.jit(crop)(keys(500))
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
