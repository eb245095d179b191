"""The views of a step belong to (secret, step, example, view), and to nothing else."""

import jax
import jax.numpy as jnp
import numpy as np

from parts import step
from tanager.data.augment import CropFlip
from tanager.privacy.mechanism import Mechanism
from tanager.sampling import PhysicalBatch
from tanager.seed import Seed


IMAGES = np.random.default_rng(1).integers(0, 256, (40, 9, 9, 3), np.uint8)


def seen(seed, number, indices, views=4, images=IMAGES):
    """Pixels as a step sees them that was made for this call, as after a resume."""
    crop = CropFlip(crop_padding=3)
    made = step(
        loss=lambda params, example: jnp.sum(params),
        params=jnp.zeros(1),
        mechanism=Mechanism(sample_rate=0.3, noise_multiplier=0.8, steps=30),
        examples=len(IMAGES),
        seed=Seed.from_int(seed),
        augment=lambda key, example: {"image": crop(key, example["image"])},
        augmentation_multiplicity=views,
    )
    rows = np.array(indices, np.int32)
    examples = {"image": jnp.asarray(images[rows])}
    batch = PhysicalBatch(examples, None, jnp.asarray(rows))
    views_of = jax.jit(made.unit.views)
    return np.asarray(views_of(batch, made.augmentation_key(number))["image"])


def test_a_resumed_run_sees_the_same_pixels():
    whole = seen(1, 7, [3, 8, 5])
    assert whole.shape == (3, 4, 9, 9, 3)
    assert len(np.unique(whole.reshape(12, -1), axis=0)) == 12
    np.testing.assert_array_equal(seen(1, 7, [3, 8, 5]), whole)


def test_the_batch_and_the_number_of_views_do_not_matter():
    whole = seen(1, 7, [3, 8, 5])
    np.testing.assert_array_equal(seen(1, 7, [5, 0, 3])[[2, 0]], whole[[0, 2]])
    np.testing.assert_array_equal(seen(1, 7, [8])[0], whole[1])
    np.testing.assert_array_equal(seen(1, 7, [8], views=2)[0], whole[1, :2])


def test_another_step_or_secret_sees_others():
    whole = seen(1, 7, [3, 8, 5])
    for other in (seen(1, 8, [3, 8, 5]), seen(2, 7, [3, 8, 5])):
        same = np.all(other == whole, axis=(2, 3, 4))
        assert same.mean() < 0.3


def test_two_examples_of_equal_pixels_have_views_of_their_own():
    one, two = seen(1, 7, [3, 8], images=np.repeat(IMAGES[:1], 40, axis=0))
    assert not np.array_equal(one, two)
