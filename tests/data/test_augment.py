"""Views of one image: by name, of one size, their own, and the same again.

The statistical tests reject at a false-alarm rate of 1e-6; their keys are fixed.
"""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from legal_views import FALSE_ALARM, keys, legal_crops, picture, uniform_p, which
from scipy import stats

from tanager.data import colour, crops
from tanager.data.augment import (
    KINDS,
    CropFlip,
    InceptionCrop,
    RandomResizedCrop,
    SimCLR,
    Tan,
    Unchanged,
    standardise,
    views,
)


RANDOM = sorted(KINDS.keys() - {"none"})


def photograph(height=40, width=44, dtype: type = np.uint8):
    """Random pixels, uint8 or on the 0..1 scale."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return jnp.asarray(pixels if dtype == np.uint8 else pixels / 255, dtype)


def legal_views(image, padding):
    """All crops of the padded image, in order, then all of them flipped."""
    legal = legal_crops(image, padding)
    return legal + [crop[:, ::-1] for crop in legal]


@pytest.mark.statistical
def test_crop_flip_is_uniform_over_crops_and_flips():
    image = picture(5, 6)
    legal = legal_views(image, 2)
    augment = CropFlip(crop_padding=2)
    run = jax.jit(jax.vmap(lambda key: augment(key, jnp.asarray(image))))
    produced = run(keys(100 * len(legal), seed=4))
    assert uniform_p(which(np.asarray(produced), legal), len(legal)) > FALSE_ALARM


@pytest.mark.statistical
def test_views_are_independent():
    """Every pair of views of one image takes all pairs of values equally often."""
    image = picture()
    legal = legal_views(image, 1)
    choices = len(legal)
    run = jax.jit(
        jax.vmap(
            lambda key: views(CropFlip(crop_padding=1), key, jnp.asarray(image), 3)
        )
    )
    produced = run(keys(20 * choices**2, seed=5))
    assert produced.shape == (20 * choices**2, 3, *image.shape)
    positions = [which(np.asarray(produced[:, view]), legal) for view in range(3)]
    for one, two in itertools.combinations(positions, 2):
        assert uniform_p(one * choices + two, choices**2) > FALSE_ALARM
        assert uniform_p(one * choices + one, choices**2) < FALSE_ALARM


### All kinds


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_views_have_the_dtype_of_the_image_and_one_size(kind, dtype):
    augment = KINDS[kind](crop_size=32)
    image = photograph(dtype=dtype)
    assert augment.size(image.shape) == (32, 32)
    view = jax.eval_shape(augment.eval_view, image)
    produced = jax.eval_shape(augment, jax.random.key(0), image)
    assert (view.shape, view.dtype) == ((32, 32, 3), dtype)
    assert (produced.shape, produced.dtype) == ((32, 32, 3), dtype)


@pytest.mark.parametrize("kind", RANDOM)
def test_views_differ_and_depend_on_nothing_but_their_key_and_image(kind):
    augment = KINDS[kind](crop_size=21)
    images = jnp.stack([photograph(24, 22), 255 - photograph(24, 22)])
    run = jax.jit(jax.vmap(lambda key, image: views(augment, key, image, 8)))
    batch = np.asarray(run(keys(2), images))
    assert len(np.unique(batch.reshape(16, -1), axis=0)) == 16
    np.testing.assert_array_equal(run(keys(2), images), batch)
    swapped = run(keys(2)[::-1], images[::-1])
    np.testing.assert_array_equal(swapped, batch[::-1])
    other = run(keys(2), images.at[0].set(7))
    np.testing.assert_array_equal(other[1], batch[1])
    assert not np.array_equal(run(keys(2, seed=1), images), batch)


@pytest.mark.parametrize("kind", ["rrc", "tan"])
def test_views_of_float_images_are_those_of_uint8_images_not_rounded(kind):
    augment = KINDS[kind](crop_size=21)
    run = jax.jit(lambda key, image: views(augment, key, image, 8))
    whole = run(jax.random.key(0), photograph(24, 22))
    fine = 255 * np.asarray(run(jax.random.key(0), photograph(24, 22, np.float32)))
    assert -1e-3 < fine.min() <= fine.max() < 255.001
    assert 0.3 < np.max(np.abs(whole.astype(jnp.float32) - fine)) < 0.501


def test_a_view_is_the_same_whatever_the_batch_and_their_number():
    images = jnp.stack([photograph(24, 24), 255 - photograph(24, 24)])

    def of(keys, images, count):
        run = jax.vmap(lambda key, image: views(CropFlip(), key, image, count))
        return jax.jit(run)(keys, images)

    batch = of(keys(2), images, 4)
    np.testing.assert_array_equal(of(keys(2)[1:], images[1:], 4), batch[1:])
    np.testing.assert_array_equal(of(keys(2), images, 2), batch[:, :2])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_evaluated_is_of_the_image_or_a_view_as_it_is(kind):
    image = photograph()
    eval_view = jax.jit(KINDS[kind](crop_size=32).eval_view)
    if kind == "crop-flip":
        resized = jax.jit(lambda image: crops.resize(image, (32, 32)))(image)
        np.testing.assert_array_equal(eval_view(image), resized)
    else:
        np.testing.assert_array_equal(eval_view(image), image[4:36, 6:38])
    np.testing.assert_array_equal(eval_view(eval_view(image)), eval_view(image))
    whole = KINDS[kind]()
    np.testing.assert_array_equal(whole.eval_view(image), image)
    assert whole.size(image.shape) == (40, 44)


### One by one


def test_nothing_to_do_is_the_image():
    image = jnp.asarray(picture())
    key = jax.random.key(0)
    unchanged = CropFlip(crop_padding=0, flip=False)(key, image)
    np.testing.assert_array_equal(unchanged, image)
    np.testing.assert_array_equal(Unchanged()(key, image), image)


@pytest.mark.parametrize("kind", ["rrc", "tan"])
def test_without_a_flip_it_is_the_same_view_or_its_mirror_image(kind):
    image = photograph(24, 24)

    def run(flip):
        augment = dataclasses.replace(KINDS[kind](), flip=flip)  # pyrefly: ignore[unexpected-keyword]
        key = jax.random.key(0)
        return np.asarray(jax.jit(lambda key: views(augment, key, image, 20))(key))

    mirrored = 0
    for one, two in zip(run(True), run(False), strict=True):
        if not np.array_equal(one, two):
            np.testing.assert_array_equal(one, two[:, ::-1])
            mirrored += 1
    assert 3 <= mirrored <= 17


def one_view(augment, image):
    return np.asarray(jax.jit(augment)(jax.random.key(0), image))


def test_the_whole_area_is_the_image_resized():
    image = photograph(40, 40)
    whole = {"area": (1.0, 1.0), "aspect": (1.0, 1.0), "flip": False}
    resized = jax.jit(lambda image: crops.resize(image, (28, 28)))(image)
    view = one_view(RandomResizedCrop(crop_size=28, **whole), image)
    np.testing.assert_array_equal(view, resized)
    np.testing.assert_array_equal(one_view(InceptionCrop(**whole), image), image)


def test_inception_interpolates_between_two_pixels_and_rrc_antialiases():
    """Lines two pixels wide, made four times smaller."""
    lines = jnp.asarray(np.tile([0, 0, 255, 255], (32, 8))[:, :, None], jnp.uint8)
    shifted = jnp.roll(lines, 1, axis=1)
    whole = {"area": (1.0, 1.0), "aspect": (1.0, 1.0), "crop_size": 8}
    sharp, soft = InceptionCrop(**whole), RandomResizedCrop(**whole)
    assert set(np.unique(one_view(sharp, lines))) == {128}
    assert set(np.unique(one_view(sharp, shifted))) == {0}
    assert one_view(soft, shifted).min() > 90


def test_tan_is_a_crop_of_the_middle_with_jitter():
    """The mirrors stand at the edges of the middle, whatever lies beyond them."""
    image = np.array(photograph(36, 36))
    still = colour.ColourJitter(0.0, 0.0, 0.0, 0.0)
    augment = Tan(crop_size=24, crop_padding=3, jitter=still)
    run = jax.jit(lambda key: views(augment, key, jnp.asarray(image), 50))
    legal = legal_views(image[6:30, 6:30], 3)
    assert len(set(which(np.asarray(run(jax.random.key(0))), legal))) > 20


@pytest.mark.statistical
def test_the_colours_of_tan_change_as_often_as_the_paper_says():
    grey = jnp.full((8, 8, 3), 100, jnp.uint8)
    run = jax.jit(jax.vmap(lambda key: Tan(crop_padding=0)(key, grey)))
    changed = int(np.sum(np.any(np.asarray(run(keys(2000))) != 100, axis=(1, 2, 3))))
    # Of a change of brightness by up to 0.8, 1 in 160 is too small to be seen.
    assert stats.binomtest(changed, 2000, 0.3 * (1 - 1 / 160)).pvalue > FALSE_ALARM


@pytest.mark.statistical
def test_simclr_loses_colours_and_blurs_as_often_as_the_code_says():
    still = dataclasses.replace(SimCLR().jitter, probability=0.0)
    augment = SimCLR(jitter=still, area=(1.0, 1.0), aspect=(1.0, 1.0))
    image = photograph(16, 16)
    run = jax.jit(jax.vmap(lambda key: augment(key, image)))
    produced = np.asarray(run(keys(2000)), int)
    grey = np.all(np.ptp(produced, axis=3) == 0, axis=(1, 2))
    assert stats.binomtest(int(grey.sum()), 2000, 0.2).pvalue > FALSE_ALARM
    blurred = np.std(produced, axis=(1, 2, 3)) < 40
    assert stats.binomtest(int(blurred.sum()), 2000, 0.2).pvalue > FALSE_ALARM
    both = int(np.sum(grey & blurred))
    assert stats.binomtest(both, 2000, 0.04).pvalue > FALSE_ALARM


def test_standardise_matches_float64():
    image = np.random.default_rng(0).integers(0, 256, (7, 5, 3), np.uint8)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    out = jax.jit(lambda pixels: standardise(pixels, mean, std))(jnp.asarray(image))
    assert out.dtype == jnp.float32
    expected = (image.astype(np.float64) / 255 - mean) / std
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)


### Refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tan(crop_padding=-1), "crop_padding (=-1) must be at least 0"),
        (lambda: Unchanged(crop_size=0), "crop_size (=0) must be at least 1"),
        (
            lambda: RandomResizedCrop(area=(0.5, 1.5)),
            "area (=(0.5, 1.5)) must be at most 1, the whole image",
        ),
        (
            lambda: InceptionCrop(aspect=(2.0, 1.0)),
            "aspect (=(2.0, 1.0)) must be (least, largest)",
        ),
        (lambda: SimCLR(area=(0.0, 1.0)), "area (=0.0) must be positive"),
        (lambda: SimCLR(blur_size=4), "blur_size (=4) must be odd"),
        (lambda: SimCLR(grey_probability=2.0), "grey_probability (=2.0) must be at"),
    ],
)
def test_bad_fields_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("augment", "shape", "message"),
    [
        (
            CropFlip(crop_padding=3),
            (8, 3, 1),
            "crop_padding (=3) must be smaller than the image, 8 × 3",
        ),
        (
            Tan(crop_size=16),
            (32, 32, 3),
            "crop_padding (=20) must be smaller than the image, 16 × 16",
        ),
        (
            RandomResizedCrop(crop_size=33),
            (40, 32, 3),
            "crop_size (=33) must be at most the image's 40 × 32: a view cannot",
        ),
        (
            Tan(),
            (32, 32, 1),
            "augmentation (='tan') needs images of 3 channels; these have 1",
        ),
        (SimCLR(), (32, 32, 4), "augmentation (='simclr') needs images of 3 channels"),
        (
            SimCLR(blur_size=17),
            (8, 32, 3),
            "blur_size (=17) must be less than twice the image's size",
        ),
    ],
)
def test_images_that_do_not_suit_are_refused(augment, shape, message):
    for refused in (
        lambda: augment.check(shape),
        lambda: augment(jax.random.key(0), jnp.zeros(shape, jnp.uint8)),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            refused()


def test_bad_arguments_are_refused():
    image, key = jnp.asarray(picture()), jax.random.key(0)
    message = "multiplicity (=0) must be at least 1: without augmentation, use"
    with pytest.raises(ValueError, match=re.escape(message)):
        views(CropFlip(), key, image, 0)
    with pytest.raises(ValueError, match=re.escape("std (=0.0) must be positive")):
        standardise(image, (0.5, 0.5, 0.5), (0.5, 0.0, 0.5))
