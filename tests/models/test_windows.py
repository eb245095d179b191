import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tanager.models import windows


def _image(height, width, channels=3):
    pixels = np.random.default_rng(0).standard_normal((height, width, channels))
    return pixels.astype(np.float32)


def textbook_pool(image, window, stride, edges, reduce):
    """One window after the other; what lies outside the image is left out."""
    (top, bottom), (left, right) = edges
    height, width, _ = image.shape
    rows = range(-top, height + bottom - window + 1, stride)
    columns = range(-left, width + right - window + 1, stride)
    output = np.empty((len(rows), len(columns), image.shape[-1]))
    for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
        inside = image[max(row, 0) : row + window, max(column, 0) : column + window]
        output[i, j] = reduce(inside, axis=(0, 1))
    return output


PADDINGS = [
    ("VALID", (7, 6), ((0, 0), (0, 0))),
    ("SYMMETRIC", (7, 6), ((1, 1), (1, 1))),
    (1, (6, 7), ((1, 1), (1, 1))),
    ("SAME", (7, 6), ((1, 1), (0, 1))),  # 7 pixels make 4 of 9, 6 make 3 of 7
    ("SAME", (1, 2), ((1, 1), (0, 1))),
    (((2, 0), (1, 1)), (5, 5), ((2, 0), (1, 1))),
]


@pytest.mark.parametrize(("padding", "sides", "edges"), PADDINGS)
def test_the_maximum_of_each_window(padding, sides, edges):
    image = _image(*sides) - 5  # so that a padding of 0 would be the maximum
    expected = textbook_pool(image, 3, 2, edges, np.max)
    pool = jax.jit(lambda x: windows.max_pool(x, 3, stride=2, padding=padding))
    actual = pool(image)
    np.testing.assert_array_equal(actual, expected)


def test_the_gradient_of_pooling_goes_to_the_largest():
    image, mix = _image(6, 5), _image(3, 3)
    gradient = jax.jit(
        jax.grad(lambda x: jnp.sum(windows.max_pool(x, 3, stride=2, padding=1) * mix))
    )(image)
    expected = np.zeros_like(image)
    padded = np.pad(image, ((1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    for row, column, channel in np.ndindex(mix.shape):
        part = padded[2 * row : 2 * row + 3, 2 * column : 2 * column + 3, channel]
        i, j = np.unravel_index(part.argmax(), part.shape)
        place = 2 * row + i - 1, 2 * column + j - 1, channel
        expected[place] += mix[row, column, channel]
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sides", [(4, 6), (5, 6), (6, 5), (1, 1)])
def test_the_mean_of_each_two_by_two_pixels(sides):
    image = _image(*sides)
    edges = tuple((0, side % 2) for side in sides)
    expected = textbook_pool(image, 2, 2, edges, np.mean)
    actual = jax.jit(windows.halve)(image)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_the_dtype_is_the_images(dtype):
    with jax.enable_x64(True):
        image = jax.ShapeDtypeStruct((6, 5, 3), dtype)
        for pool in (lambda x: windows.max_pool(x, 3, stride=2), windows.halve):
            assert jax.eval_shape(pool, image).dtype == dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"padding": "SYMETRIC"}, "did you mean SYMMETRIC?"),
        ({"padding": -1}, "padding (=-1) must be at least 0"),
        ({"stride": 0}, "stride (=0) must be at least 1"),
        ({"window": 9}, "image shape (=(6, 5, 3)) must hold a window of 9 pixels"),
    ],
)
def test_impossible_windows_are_refused(change, message):
    options = {"window": 3, "stride": 2, "padding": "VALID"} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        windows.max_pool(jnp.asarray(_image(6, 5)), **options)
