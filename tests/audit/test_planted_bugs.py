"""Privacy bugs, each switched on for one audit, which must find it out.

The bugs below are those that change what a whole run gives away. The audit claims a
violation without cause in at most 5 of 100 runs (its confidence); with a bug it does so
at every seed tried here.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tanager import noise, sampling
from tanager.clipping import transform


SEEDS = (1, 2, 3)


def no_noise(patch):
    patch.setattr(noise.GaussianNoise, "add", lambda self, total, keys: total)


def half_the_noise(patch):
    made = noise.GaussianNoise.__init__

    def init(self, *arguments, **options):
        made(self, *arguments, **options)
        self.standard_deviation /= 2

    patch.setattr(noise.GaussianNoise, "__init__", init)


def one_leaf_without_noise(patch):
    add = noise.GaussianNoise._add

    def last_as_it_is(self, leaf, keys, number):
        return leaf if number == 2 else add(self, leaf, keys, number)

    patch.setattr(noise.GaussianNoise, "_add", last_as_it_is)


def sampled_at_twice_the_rate(patch):
    made = sampling.PoissonSampler.__init__

    def init(self, mechanism, examples, seed):
        made(self, mechanism, examples, seed)
        rate = 2 * mechanism.sample_rate
        self.mechanism = dataclasses.replace(mechanism, sample_rate=rate)

    patch.setattr(sampling.PoissonSampler, "__init__", init)


def clipped_to_twice_the_norm(patch):
    call = transform.ClippedGrad.__call__

    def twice(self, params, batch, mask=None):
        out = call(self, params, batch, mask)
        return out._replace(sum=jax.tree.map(lambda leaf: 2 * leaf, out.sum))

    patch.setattr(transform.ClippedGrad, "__call__", twice)


def every_example_twice(patch):
    batches = sampling.PoissonSampler.batches

    def doubled(self, step, physical_batch_size):
        for part in batches(self, step, physical_batch_size):
            yield part
            yield part

    patch.setattr(sampling.PoissonSampler, "batches", doubled)


BUGS = [
    no_noise,
    half_the_noise,
    one_leaf_without_noise,
    sampled_at_twice_the_rate,
    clipped_to_twice_the_norm,
    every_example_twice,
]


@pytest.mark.parametrize("bug", BUGS)
def test_the_audit_finds_the_bug_out(white_box, monkeypatch, bug):
    for seed in SEEDS:
        with monkeypatch.context() as patch:
            bug(patch)
            found = white_box(seed=seed)
        assert found.violated, (bug.__name__, found.audit)


def test_without_a_bug_nothing_is_found(white_box):
    for seed in SEEDS:
        found = white_box(seed=seed)
        assert not found.violated
        assert jnp.isfinite(found.epsilon_lower_bound)


def test_more_noise_than_claimed_is_no_violation(white_box, monkeypatch):
    made = noise.GaussianNoise.__init__

    def init(self, *arguments, **options):
        made(self, *arguments, **options)
        self.standard_deviation *= 4

    with monkeypatch.context() as patch:
        patch.setattr(noise.GaussianNoise, "__init__", init)
        found = white_box()
    assert not found.violated
    assert found.epsilon_lower_bound < found.claimed_epsilon / 4
