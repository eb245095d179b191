"""The views of a step belong to (secret, step, example, view), and to nothing else."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tanager
from parts import step
from tanager.data.augment import KINDS, CropFlip
from tanager.parallel.layout import AXIS
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


### An augmentation is given one example, and must not see another


@jax.custom_batching.custom_vmap
def total(x):
    return x


@total.def_vmap
def _(size, batched, x):
    return jnp.broadcast_to(x.sum(0), x.shape), True


def host(x, way):
    return jax.pure_callback(lambda x: x, jax.typeof(x), x, vmap_method=way)


def drawn_by_rbg(x):
    return x * jax.random.normal(jax.random.key(0, impl="rbg"), x.shape)


MIXING = {
    "custom_vmap": total,
    "uses pure_callback": lambda x: host(x, "broadcast_all"),
    "may remember earlier examples": lambda x: host(x, "sequential"),
    "unvmap_any": lambda x: jnp.where(eqxi.unvmap_any(x[0] > 9), -x, x),
    "uses psum over the axis": lambda x: jax.lax.psum(x, AXIS),
    "key of the rbg generator": drawn_by_rbg,
}


def augmenting(mix, **settings):
    return step(
        loss=lambda params, x: jnp.sum(params * x),
        params=jnp.zeros(3),
        augment=lambda key, x: mix(x),
        augmentation_multiplicity=2,
        **{"mechanism": Mechanism(0.3, 0.8, 30), "examples": 40} | settings,
    )


def check(made):
    made.check(made.params, np.zeros((1, 3), np.float32), 8)


@pytest.mark.parametrize("message", MIXING)
def test_an_augmentation_that_could_mix_examples_is_refused(message):
    with pytest.raises(ValueError, match=f"^augment .*{message}"):
        check(augmenting(MIXING[message]))


def test_an_augmentation_that_remembers_is_refused():
    memory = jax.new_ref(jnp.zeros(3))

    def remembers(x):
        memory[...] += x
        return x + memory[...]

    with pytest.raises(ValueError, match=r"^augment .*mutable reference"):
        check(augmenting(remembers))


def test_one_of_persons_too():
    data = tanager.Grouped(np.zeros((40, 3), np.float32), np.arange(40) // 4, 2)
    check(augmenting(jnp.tanh, data=data))
    with pytest.raises(ValueError, match="augment uses custom_vmap"):
        check(augmenting(total, data=data))


def test_where_nothing_is_private_it_may():
    check(augmenting(total, mechanism=Mechanism(0.3, 0.0, 30), clip_norm=None))


@pytest.mark.parametrize("kind", KINDS)
def test_augmentations_of_tanager_do_not(kind):
    own = KINDS[kind]() if kind == "none" else KINDS[kind](crop_size=24)
    made = step(
        loss=lambda w, example: w * example["image"].astype(jnp.float32).mean(),
        params=jnp.zeros(()),
        augment=lambda key, example: {"image": own(key, example["image"])},
        augmentation_multiplicity=2,
        mechanism=Mechanism(0.3, 0.8, 30),
        examples=40,
    )
    made.check(made.params, {"image": np.zeros((1, 32, 32, 3), np.uint8)}, 8)
