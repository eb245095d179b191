"""Privacy bugs, each planted into the real code by a patch.

`BUGS` tells of each what finds it.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tanager import adaptive, noise, sampling
from tanager.clipping import transform
from tanager.data import loader
from tanager.grid import Whole
from tanager.seed import Seed
from tanager.training import step


### Noise


def _drawing(patch, change):
    draw = noise.GaussianNoise.draw
    patch.setattr(
        noise.GaussianNoise, "draw", lambda self, step: change(draw, self, step)
    )


def no_noise(patch):
    _drawing(patch, lambda draw, *words: jax.tree.map(np.zeros_like, draw(*words)))


def times_the_noise(patch, factor):
    made = noise.GaussianNoise.__init__

    def init(self, mechanism, *arguments):
        sigma = factor * mechanism.noise_multiplier
        mechanism = dataclasses.replace(mechanism, noise_multiplier=sigma)
        made(self, mechanism, *arguments)

    patch.setattr(noise.GaussianNoise, "__init__", init)


def half_the_noise(patch):
    times_the_noise(patch, 0.5)


def one_leaf_without_noise(patch):
    """The last one: in a white-box audit, that of the canaries."""

    def limb(tree):
        *first, last = jax.tree.leaves(tree)
        return jax.tree.structure(tree).unflatten([*first, np.zeros_like(last)])

    _drawing(patch, lambda draw, *words: Whole(*map(limb, draw(*words)[:2])))


def noise_of_physical_batches_wrongly_scaled(patch):
    """To each of m physical batches a fourth of the noise, as if they were four."""
    accumulate = step.Step._accumulate_here

    def noisy(self, params, frozen, before, batch, key, clip_norm):
        after = accumulate(self, params, frozen, before, batch, key, clip_norm)
        own = jax.random.fold_in(key, batch.indices[0])
        leaves, structure = jax.tree.flatten(after.sum.high)
        each = [
            self.noise.standard_deviation
            / 4
            * jax.random.normal(jax.random.fold_in(own, number), leaf.shape)
            for number, leaf in enumerate(leaves)
        ]
        grid = self.noise.grid
        own = grid.round(jax.tree.unflatten(structure, each))
        return after._replace(sum=grid.plus(after.sum, own))

    patch.setattr(step.Step, "_accumulate_here", noisy)
    no_noise(patch)


def the_same_noise_in_every_step(patch):
    _drawing(patch, lambda draw, self, _: draw(self, 0))


def half_of_the_noise_in_every_step(patch):
    """Which no two steps alone would show in so few parameters."""

    def limb(new, first):
        def mixed(one, other):
            return np.where(np.arange(one.size).reshape(one.shape) % 2, one, other)

        return jax.tree.map(mixed, new, first)

    def change(draw, self, step):
        return Whole(*map(limb, draw(self, step)[:2], draw(self, 0)[:2]))

    _drawing(patch, change)


def the_noise_of_a_step_again(patch):
    """As after a checkpoint whose counter was written too early."""
    _drawing(patch, lambda draw, self, step: draw(self, step - 3 * (step == 5)))


def noise_of_the_step_counter_only(patch):
    _drawing(
        patch, lambda draw, self, step: draw(self.with_seed(Seed.from_int(0)), step)
    )


def the_same_noise_in_every_leaf(patch):
    def limb(tree):
        largest = max(jax.tree.leaves(tree), key=lambda leaf: leaf.size).ravel()
        return jax.tree.map(lambda leaf: np.resize(largest, leaf.shape), tree)

    _drawing(patch, lambda draw, *words: Whole(*map(limb, draw(*words)[:2])))


### Clipping


class Naive:
    """`clipped_grad` from the gradients of all examples, and a rule what to add up."""

    def __init__(self, rule, loss, **options):
        self._rule, self._loss = rule, loss
        self._right = transform.clipped_grad(loss, **options)

    def __getattr__(self, name):
        return getattr(self._right, name)

    def __call__(self, params, batch, mask):
        right = self._right(params, batch, mask)

        def gradients(batch):
            return jax.vmap(jax.grad(self._loss), (None, 0))(params, batch)

        return right._replace(
            sum=self._rule(self._right.clip_norm, right.norms, gradients, batch, mask)
        )


def _clipped_by(patch, rule):
    patch.setattr(
        step, "clipped_grad", lambda loss, **options: Naive(rule, loss, **options)
    )


def _scaled_sum(gradients, factors):
    def total(leaf):
        return jnp.tensordot(factors.astype(leaf.dtype), leaf, 1)

    return jax.tree.map(total, gradients)


def _norms(gradients):
    squares = [
        jnp.sum(leaf.reshape(leaf.shape[0], -1) ** 2, 1)
        for leaf in jax.tree.leaves(gradients)
    ]
    return jnp.sqrt(sum(squares))


def clipped_after_averaging(patch):
    def rule(clip_norm, norms, gradients, batch, mask):
        count = jnp.maximum(mask.sum(), 1).astype(norms.dtype)
        mean = _scaled_sum(gradients(batch), jnp.where(mask, 1 / count, 0))
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(mean)))
        return jax.tree.map(
            lambda leaf: leaf * count * clip_norm / jnp.maximum(norm, clip_norm), mean
        )

    _clipped_by(patch, rule)


def clipped_per_view(patch):
    """Each of the K views is clipped, and all of them are added up."""

    def rule(clip_norm, norms, gradients, batch, mask):
        if len(jax.tree.leaves(batch)) == 1:  # canaries, of which there are no views
            factors = jnp.where(mask, clip_norm / jnp.maximum(norms, clip_norm), 0)
            return _scaled_sum(gradients(batch), factors)
        views = jax.tree.leaves(batch)[0].shape[1]
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, 1, *leaf.shape[2:]), batch)
        each = gradients(flat)
        factors = jnp.minimum(1, clip_norm / _norms(each))
        return _scaled_sum(each, jnp.where(jnp.repeat(mask, views), factors, 0))

    _clipped_by(patch, rule)


def one_leaf_not_clipped(patch):
    def rule(clip_norm, norms, gradients, batch, mask):
        each = gradients(batch)
        factors = jnp.where(mask, clip_norm / jnp.maximum(norms, clip_norm), 0)
        right = _scaled_sum(each, factors)
        *others, _ = jax.tree.leaves(right)
        last = jax.tree.leaves(_scaled_sum(each, mask))[-1]
        return jax.tree.unflatten(jax.tree.structure(right), [*others, last])

    _clipped_by(patch, rule)


def norms_in_bfloat16(patch):
    def rule(clip_norm, norms, gradients, batch, mask):
        narrow = norms.astype(jnp.bfloat16).astype(norms.dtype)
        factors = jnp.where(mask, clip_norm / jnp.maximum(narrow, clip_norm), 0)
        return _scaled_sum(gradients(batch), factors)

    _clipped_by(patch, rule)


def clipped_to_twice_the_norm(patch):
    call = transform.ClippedGrad.__call__

    def twice(self, params, batch, mask=None):
        out = call(self, params, batch, mask)
        return out._replace(sum=jax.tree.map(lambda leaf: 2 * leaf, out.sum))

    patch.setattr(transform.ClippedGrad, "__call__", twice)


### Batches


def divided_by_the_sampled_batch_size(patch):
    update = step.Step._update

    def divided(self, state, accumulator, keys, number):
        drawn = jnp.maximum(accumulator.counts.examples.sum(), 1)
        ratio = self.sampler.expected_batch_size / drawn.astype(jnp.float32)
        right = self.optimizer

        def scaled(updates, state, params=None):
            updates = jax.tree.map(lambda leaf: leaf * ratio, updates)
            return right.update(updates, state, params)

        self.optimizer = optax.GradientTransformation(right.init, scaled)
        try:
            return update(self, state, accumulator, keys, number)
        finally:
            self.optimizer = right

    patch.setattr(step.Step, "_update", divided)


def padding_counted(patch):
    right = sampling.pad

    def all_true(indices, size):
        part = right(indices, size)
        return part._replace(mask=np.ones_like(part.mask))

    for module in (sampling, loader):
        patch.setattr(module, "pad", all_true)


def sampled_at_twice_the_rate(patch):
    """The same as a sample rate that is accounted for at its half."""
    made = sampling.PoissonSampler.__init__

    def init(self, mechanism, *arguments):
        made(self, mechanism, *arguments)
        rate = 2 * mechanism.sample_rate
        self.mechanism = dataclasses.replace(mechanism, sample_rate=rate)

    patch.setattr(sampling.PoissonSampler, "__init__", init)


def every_example_twice(patch):
    batches = sampling.PoissonSampler.batches

    def doubled(self, step, physical_batch_size):
        for part in batches(self, step, physical_batch_size):
            yield part
            yield part

    patch.setattr(sampling.PoissonSampler, "batches", doubled)


def the_same_index_twice_in_a_batch(patch):
    """Drawn with replacement."""
    right = sampling.PoissonSampler.indices

    def replaced(self, step):
        drawn = self._seed.generator("with replacement", step)
        count = len(right(self, step))
        return np.sort(drawn.integers(0, self.examples, count))

    patch.setattr(sampling.PoissonSampler, "indices", replaced)


def shuffled(patch):
    """Batches cut from shuffled epochs, accounted for as Poisson samples."""

    def cut(self, step):
        size = max(1, round(self.expected_batch_size))
        each = max(1, self.examples // size)
        epoch = self._seed.generator("epoch", step // each).permutation(self.examples)
        return np.sort(epoch[size * (step % each) :][:size]).astype(np.int64)

    patch.setattr(sampling.PoissonSampler, "indices", cut)


### The count of adaptive clipping


def _counting(patch, change):
    count = adaptive.AdaptiveClip._count

    def wrong(self, norms, mask, most):
        norms, mask = change(norms, mask, most)
        return count(self, norms, mask, most)

    patch.setattr(adaptive.AdaptiveClip, "_count", wrong)


def norms_counted_after_clipping(patch):
    _counting(
        patch,
        lambda norms, mask, most: (jnp.minimum(norms, most), mask),
    )


def padding_counted_as_short(patch):
    """Of a physical batch, one row."""
    _counting(patch, lambda norms, mask, most: (norms, mask.at[-1].set(True)))


def clipped_to_the_first_norm(patch):
    """C is released and moves, but gradients are clipped to what it was at first."""
    made = adaptive.AdaptiveClipping.of

    def of(self, grad_fn, *rest):
        call = type(grad_fn).__call__

        class First(type(grad_fn)):  # pyrefly: ignore[invalid-inheritance]
            def __call__(self, *arguments, clip_norm, keys):
                del clip_norm, keys
                return call(self, *arguments)

        grad_fn.__class__ = First
        return made(self, grad_fn, *rest)

    patch.setattr(adaptive.AdaptiveClipping, "of", of)


### Beside the noisy update


def _leaking(patch, change):
    apply = step.Step._apply

    def leaky(self, state, total, keys, number):
        after = apply(self, state, total, keys, number)
        floats = self.noise.grid.floats(total, state.params)
        return change(after, jax.tree.map(lambda leaf: leaf / 100, floats))

    patch.setattr(step.Step, "_apply", leaky)


def the_average_leaks(patch):
    """Of the parameters, as it would be without noise."""

    def change(after, total):
        average = jax.tree.map(lambda one, more: one - more, after.average, total)
        return after._replace(average=average)

    _leaking(patch, change)


def statistics_leak(patch):
    """Something of the batch itself gets into the parameters, as batch norm's do."""

    def change(after, total):
        params = jax.tree.map(lambda one, more: one + more, after.params, total)
        return after._replace(params=params)

    _leaking(patch, change)


class Bug(NamedTuple):
    """A bug, what finds it by parts of `Replay`, and whether the audit does."""

    plant: Callable
    found_by: dict[str, set[str]]
    by_audit: bool = False


SUMS = {"sums": {"sums of clipped gradients"}}
ONCE = {"sampling": {"sampled once or not at all"}}
NOISE = {"noise": {"noise of every leaf"}}
GAUSSIAN = {"noise": {"noise of every leaf", "noise is Gaussian"}}
MADE = "are made of noisy updates alone"

COUNT = {"sums": {"the clipping norm follows the count"}}
ADAPTIVE = [
    Bug(one_leaf_without_noise, NOISE),  # the last: the count
    Bug(norms_counted_after_clipping, COUNT),
    Bug(padding_counted_as_short, COUNT),
    Bug(clipped_to_the_first_norm, SUMS),
]
"""Of adaptive clipping."""

BUGS = [
    Bug(no_noise, GAUSSIAN, by_audit=True),
    Bug(half_the_noise, GAUSSIAN, by_audit=True),
    Bug(one_leaf_without_noise, NOISE, by_audit=True),
    Bug(noise_of_physical_batches_wrongly_scaled, NOISE, by_audit=True),
    Bug(the_same_noise_in_every_step, {"noise": {"noise is new in every step"}}),
    Bug(half_of_the_noise_in_every_step, {"noise": {"noise is new in every step"}}),
    Bug(the_noise_of_a_step_again, {"noise": {"noise is new in every step"}}),
    Bug(noise_of_the_step_counter_only, {"noise": {"noise is of the run's secret"}}),
    Bug(the_same_noise_in_every_leaf, {"noise": {"noise of no leaf is another's"}}),
    Bug(clipped_after_averaging, SUMS, by_audit=True),
    Bug(clipped_per_view, SUMS),
    Bug(one_leaf_not_clipped, SUMS, by_audit=True),
    Bug(norms_in_bfloat16, SUMS),
    Bug(clipped_to_twice_the_norm, SUMS | ONCE, by_audit=True),
    Bug(divided_by_the_sampled_batch_size, ONCE | SUMS),
    Bug(padding_counted, SUMS),
    Bug(
        sampled_at_twice_the_rate,
        {"sampling": {"sample rate", "batch sizes"}},
        by_audit=True,
    ),
    Bug(every_example_twice, ONCE | SUMS, by_audit=True),
    Bug(the_same_index_twice_in_a_batch, ONCE),
    Bug(shuffled, {"sampling": {"batch sizes", "steps are independent"}}),
    Bug(the_average_leaks, {"after": {f"average of parameters {MADE}"}}),
    Bug(statistics_leak, {"after": {f"parameters {MADE}"}}),
]
