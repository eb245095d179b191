"""Boxes against the references' loops, pixels against Pillow and plain formulas.

The loops below are written from torchvision's and TensorFlow's definitions, one draw at
a time. The statistical tests compare two samples by chi-square at a false-alarm rate of
1e-6; their keys and seeds are fixed.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy import stats

from tanager.data import crops
from tanager.data.crops import Box, distorted_box, random_box, resize, resized_crop


FALSE_ALARM = 1e-6
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)
DISTORTED_AREA, DISTORTED_ASPECT = (0.05, 1.0), (0.75, 1.33)


def torchvision_box(random, height, width, area=AREA, aspect=ASPECT):
    for _ in range(10):
        pixels = height * width * random.uniform(*area)
        ratio = math.exp(random.uniform(math.log(aspect[0]), math.log(aspect[1])))
        columns = round(math.sqrt(pixels * ratio))
        rows = round(math.sqrt(pixels / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            top = random.integers(0, height - rows + 1)
            left = random.integers(0, width - columns + 1)
            return top, left, rows, columns
    rows, columns = height, width
    if width / height < aspect[0]:
        rows = round(width / aspect[0])
    elif width / height > aspect[1]:
        columns = round(height * aspect[1])
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def tensorflow_box(random, height, width, area=DISTORTED_AREA, aspect=DISTORTED_ASPECT):
    least, most = area[0] * height * width, area[1] * height * width
    for _ in range(100):
        ratio = random.uniform(*aspect)
        rows = round(math.sqrt(least / ratio))
        highest = round(math.sqrt(most / ratio))
        if round(highest * ratio) > width:
            highest = int((width + 0.5 - 1e-7) / ratio)
            if round(highest * ratio) > width:
                highest -= 1
        highest = min(highest, height)
        rows = min(rows, highest)
        if rows < highest:
            rows += random.integers(highest - rows + 1)
        columns = round(rows * ratio)
        if rows * columns < least:
            rows += 1
            columns = round(rows * ratio)
        if rows * columns > most:
            rows -= 1
            columns = round(rows * ratio)
        inside = 0 < rows <= height and 0 < columns <= width
        if inside and least <= rows * columns <= most:
            top = random.integers(height - rows) if rows < height else 0
            left = random.integers(width - columns) if columns < width else 0
            return top, left, rows, columns
    return 0, 0, height, width


def drawn(draw, count, shape, area, aspect, seed=0):
    keys = jax.random.split(jax.random.key(seed), count)
    boxes = jax.jit(jax.vmap(lambda key: draw(key, *shape, area, aspect)))(keys)
    return np.stack(boxes, axis=1)


def same_law(one, two):
    """The p-value of a chi-square test; rare values are taken together."""
    values, which = np.unique(np.concatenate([one, two]), return_inverse=True)
    first = np.bincount(which[: len(one)], minlength=len(values))
    second = np.bincount(which[len(one) :], minlength=len(values))
    common = first + second >= 40
    table = np.array([first[common], second[common]])
    rest = np.array([[first[~common].sum()], [second[~common].sum()]])
    if rest.sum():
        table = np.hstack([table, rest])
    if table.shape[1] < 2:
        return 1.0
    test = stats.chi2_contingency(table)
    return test.pvalue


def features(boxes, height, width):
    """What the laws are compared by: sides, places, and how they go together."""
    top, left, rows, columns = boxes.T.astype(np.int64)
    yield "height", rows
    yield "width", columns
    yield "box", rows * 1000 + columns
    yield (
        "area, aspect",
        (8 * rows * columns // (height * width + 1) * 100 + 4 * columns // rows),
    )
    yield "top", top
    yield "left", left
    yield (
        "place",
        (top == 0) * 8
        + (left == 0) * 4
        + (top + rows == height) * 2
        + (left + columns == width),
    )
    yield "top in room", 8 * top // (height - rows + 1) * 100 + 8 * rows // height


SAMPLES = 20_000
SHAPES = [(32, 32), (20, 90), pytest.param((64, 30), marks=pytest.mark.full), (7, 5)]


@pytest.mark.statistical
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("draw", "reference", "area", "aspect"),
    [
        (random_box, torchvision_box, AREA, ASPECT),
        (distorted_box, tensorflow_box, DISTORTED_AREA, DISTORTED_ASPECT),
    ],
)
def test_boxes_have_the_law_of_the_reference(draw, reference, area, aspect, shape):
    mine = drawn(draw, SAMPLES, shape, area, aspect)
    random = np.random.default_rng(1)
    theirs = np.array([reference(random, *shape) for _ in range(SAMPLES)])
    for name, one in features(mine, *shape):
        two = dict(features(theirs, *shape))[name]
        assert same_law(one, two) > FALSE_ALARM, name
    top, left, rows, columns = mine.T
    assert min(rows.min(), columns.min()) > 0
    assert top.min() == left.min() == 0
    assert (top + rows).max() <= shape[0]
    assert (left + columns).max() <= shape[1]


@pytest.mark.statistical
def test_the_comparison_tells_the_two_laws_apart():
    mine = drawn(random_box, SAMPLES, (32, 32), DISTORTED_AREA, DISTORTED_ASPECT)
    random = np.random.default_rng(1)
    theirs = np.array([tensorflow_box(random, 32, 32) for _ in range(SAMPLES)])
    ours, others = (dict(features(boxes, 32, 32)) for boxes in (mine, theirs))
    for name in ("height", "box", "area, aspect", "place"):
        assert same_law(ours[name], others[name]) < FALSE_ALARM, name


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((10, 100), (0, 43, 10, 13)),
        ((100, 10), (43, 0, 13, 10)),
        ((10, 10), (0, 0, 10, 10)),
    ],
)
def test_a_box_that_never_fits_becomes_the_middle(shape, expected):
    """Larger than the image, so that none of the ten fits."""
    box = drawn(random_box, 1, shape, (2.0, 2.0), ASPECT)[0]
    assert tuple(box) == expected


def test_a_distorted_box_that_never_fits_becomes_the_image():
    box = drawn(distorted_box, 1, (10, 40), (1.0, 1.0), ASPECT)[0]
    assert tuple(box) == (0, 0, 10, 40)


### Pixels


def picture(height=24, width=31, channels=3, dtype: type = np.uint8):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (height, width, channels), np.uint8)
    return pixels if dtype == np.uint8 else (pixels / 255).astype(dtype)


def box_of(*numbers):
    return Box(*(jnp.int32(number) for number in numbers))


def traced(image, box, size, antialias):
    """With the box traced, as in a training step."""
    crop = jax.jit(lambda *box: resized_crop(image, Box(*box), size, antialias))
    return np.asarray(crop(*box_of(*box)))


def linear(pixels, count, antialias):
    """Resize the first axis in float64, straight from the definition."""
    length = len(pixels)
    scale = length / count
    reach = max(scale, 1.0) if antialias else 1.0
    rows = []
    for place in range(count):
        centre = (place + 0.5) * scale - 0.5
        weights = [max(0, 1 - abs(row - centre) / reach) for row in range(length)]
        rows.append(np.tensordot(weights, pixels, 1) / sum(weights))
    return np.array(rows)


def cut_and_resized(image, box, size, antialias):
    top, left, rows, columns = box
    part = image[top : top + rows, left : left + columns].astype(np.float64)
    part = linear(part, size[0], antialias)
    return linear(part.swapaxes(0, 1), size[1], antialias).swapaxes(0, 1)


BOXES = [
    ((0, 0, 24, 31), (24, 31)),  # all, as it is
    ((3, 5, 12, 16), (12, 16)),  # a part, as it is
    ((2, 9, 7, 6), (24, 24)),  # enlarged
    ((1, 2, 22, 28), (10, 9)),  # made smaller
    ((0, 0, 24, 31), (5, 40)),  # one each way
    ((23, 30, 1, 1), (4, 4)),  # one pixel
]


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize(("box", "size"), BOXES)
def test_a_resized_crop_is_the_crop_resized(box, size, antialias):
    image = picture(dtype=np.float32)
    expected = cut_and_resized(image, box, size, antialias)
    produced = traced(jnp.asarray(image), box, size, antialias)
    assert produced.dtype == np.float32
    np.testing.assert_allclose(produced, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("box", "size"), BOXES)
def test_antialiased_it_is_pillows(box, size):
    """Pillow rounds after each axis, so levels may differ by one."""
    image = picture()
    top, left, rows, columns = box
    part = Image.fromarray(image).crop((left, top, left + columns, top + rows))
    expected = np.asarray(part.resize(size[::-1], Image.Resampling.BILINEAR))
    produced = traced(jnp.asarray(image), box, size, True)
    assert produced.dtype == np.uint8
    assert np.max(np.abs(produced.astype(int) - expected)) <= 1


@pytest.mark.parametrize(
    ("antialias", "dtype"), [(True, np.uint8), (True, jnp.bfloat16), (False, np.uint8)]
)
@pytest.mark.parametrize(("box", "size"), BOXES[:2])
def test_a_crop_that_keeps_its_size_is_exact(box, size, antialias, dtype):
    image = jnp.asarray(picture()).astype(dtype)
    top, left, rows, columns = box
    expected = np.asarray(image)[top : top + rows, left : left + columns]
    np.testing.assert_array_equal(traced(image, box, size, antialias), expected)


def test_what_is_outside_the_box_does_not_count():
    image = picture()
    other = 255 - image
    other[3:15, 5:21] = image[3:15, 5:21]
    for size in ((30, 30), (6, 6)):
        one, two = (
            traced(jnp.asarray(pixels), (3, 5, 12, 16), size, True)
            for pixels in (image, other)
        )
        np.testing.assert_array_equal(one, two)


def test_uint8_is_rounded_to_nearest():
    image = jnp.asarray([[[0], [255]]], jnp.uint8)
    produced = traced(image, (0, 0, 1, 2), (1, 4), True)
    assert produced[0, :, 0].tolist() == [0, 64, 191, 255]  # 63.75, 191.25


def test_resize_is_of_the_whole_image():
    image = picture()
    expected = traced(jnp.asarray(image), (0, 0, 24, 31), (16, 20), True)
    produced = jax.jit(lambda image: resize(image, (16, 20)))(jnp.asarray(image))
    np.testing.assert_array_equal(produced, expected)


def test_float64_stays_float64():
    assert crops.working_dtype(jnp.dtype(jnp.float64)) == jnp.float64
    assert crops.working_dtype(jnp.dtype(jnp.bfloat16)) == jnp.float32


def test_pixels_of_another_kind_are_refused():
    image = jnp.zeros((8, 8, 3), jnp.int32)
    message = "image (='int32') must have pixels of uint8 or float"
    with pytest.raises(ValueError, match=re.escape(message)):
        resize(image, (4, 4))


def test_halves_are_rounded_up_however_the_program_is_compiled():
    halves = jnp.array([[0, 1], [1, 2], [2, 3], [254, 255]], jnp.uint8)
    small = jax.jit(jax.vmap(lambda row: resize(row[None, :, None], (1, 1))))(halves)
    assert small.ravel().tolist() == [1, 2, 3, 255]
    halves = np.array([0.5, 7.5, 254.5], np.float32)
    below = halves - np.array([[2**-11], [2**-9]], np.float32)
    found = crops.rounded_to(jnp.asarray(below[..., None]), jnp.dtype(jnp.uint8))
    assert found[..., 0].tolist() == [[1, 8, 255], [0, 7, 254]]

    random = np.random.default_rng(0)
    images = jnp.array(random.integers(0, 256, (2, 50, 50, 3), np.uint8))
    mapped = jax.jit(jax.vmap(lambda image: resize(image, (40, 40))))(images)
    each = [resize(image, (40, 40)) for image in images]
    np.testing.assert_array_equal(mapped, np.stack(each))
