"""Replays: a few real training steps, compared with the definition of DP-SGD.

Runs of `tanager.train` with known secrets show what their optimizer received: who was
sampled, what was clipped, what noise was added, and that nothing else changed the
parameters. A replay finds at once what an attack needs thousands of canaries for, but
only the bugs it looks for.

A check of random numbers fails without cause at most once in 10⁶ replays; the others
never do.
"""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree
from scipy import stats

from tanager import _validate as validate
from tanager.audit.bounds import require_noise
from tanager.clipping.transform import split
from tanager.data import augment as augmentation
from tanager.data import gather
from tanager.keys import derive_keys
from tanager.sampling import PoissonSampler
from tanager.seed import Seed
from tanager.training.loop import train
from tanager.training.problem import DPSGD, Problem, Runtime
from tanager.training.result import TrainResult


FALSE_ALARM = 1e-6
"""Of each check of random things."""
_SECRET, _OTHER = 1, 2
_CLOSE = 2e-4


class Finding(NamedTuple):
    """What a check found.

    Attributes:
        check: its name.
        passed: whether the run agrees with the definition.
        detail: what was measured.
    """

    check: str
    passed: bool
    detail: str


def replay(
    problem: Problem,
    algorithm: DPSGD,
    runtime: Runtime | None = None,
    *,
    steps: int = 8,
) -> tuple[Finding, ...]:
    """Train a few steps several times, and check every part of them.

    Args:
        problem: see `tanager.train`; float32 parameters and few examples, because
            each is computed alone.
        algorithm: see `tanager.train`; the mechanism's steps are ignored.
        runtime: see `tanager.train`; by default physical batches of 4, so that a
            logical batch has several.
        steps: of each run.

    Returns:
        What each check found.

    Raises:
        ValueError: an argument is out of range.
    """
    source = problem.source()
    validate.whole(steps=steps, at_least=4)
    require_noise(algorithm.mechanism)
    algorithm.require_clip_norm()
    runtime = runtime or Runtime(physical_batch_size=4)
    runtime = dataclasses.replace(runtime, progress=False)
    still = dataclasses.replace(
        algorithm,
        mechanism=dataclasses.replace(algorithm.mechanism, steps=steps),
        optimizer=optax.set_to_zero(),
        declared_examples=len(source),
        delta=0.5 / len(source),
    )
    run = still.mechanism
    exact = _without_noise(still)
    moving = dataclasses.replace(still, optimizer=algorithm.optimizer)

    def recorded(algorithm: DPSGD, seed: int) -> "_Recorded":
        return _record(problem, algorithm, runtime, seed)

    summed, noised = recorded(exact, _SECRET), recorded(still, _SECRET)
    moved = recorded(moving, _SECRET)
    other, other_summed = recorded(still, _OTHER), recorded(exact, _OTHER)
    expected = run.sample_rate * len(source)
    seen = [flat * expected for flat in summed.flat()]
    noise, others = (
        [
            [expected * (a - b) for a, b in zip(*pair, strict=True)]
            for pair in zip(one.leaves(), without.leaves(), strict=True)
        ]
        for one, without in ((noised, summed), (other, other_summed))
    )
    return (
        *_check_sampling(exact, len(source), runtime),
        _check_sums(seen, _sums_by_definition(problem, exact)),
        *_check_noise(noise, others, run.noise_multiplier),
        *_check_after(moved, problem, moving),
    )


def _without_noise(algorithm: DPSGD) -> DPSGD:
    quiet = dataclasses.replace(algorithm.mechanism, noise_multiplier=0.0)
    return dataclasses.replace(algorithm, mechanism=quiet)


### Recording


class _Recorded(NamedTuple):
    gradients: list[PyTree]
    result: TrainResult

    def leaves(self) -> list[list[np.ndarray]]:
        """Return every step's noisy mean, leaf by leaf, float64."""
        return [
            [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(gradient)]
            for gradient in self.gradients
        ]

    def flat(self) -> list[np.ndarray]:
        """Return every step's noisy mean as one vector."""
        return [np.concatenate([x.ravel() for x in step]) for step in self.leaves()]


def _record(
    problem: Problem, algorithm: DPSGD, runtime: Runtime, seed: int
) -> _Recorded:
    """Train, and keep what the optimizer was given."""
    gradients: dict[int, PyTree] = {}
    inner = algorithm.optimizer

    def keep(step: np.ndarray, gradient: PyTree) -> None:
        gradients[int(step)] = jax.tree.map(np.asarray, gradient)

    def init(params: Any) -> PyTree:
        return jnp.zeros((), jnp.int32), inner.init(params)

    def update(gradient: Any, state: Any, params: Any = None) -> Any:
        step, own = state
        jax.debug.callback(keep, step, gradient)
        updates, own = inner.update(gradient, own, params)
        return updates, (step + 1, own)

    keeping = optax.GradientTransformation(
        init,
        update,  # pyright: ignore[reportArgumentType]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no noise protects nobody
        result = train(
            problem,
            dataclasses.replace(algorithm, optimizer=keeping),
            runtime,
            seed=seed,
        )
    jax.block_until_ready(result.params)
    jax.effects_barrier()
    return _Recorded([gradients[step] for step in sorted(gradients)], result)


### The checks


def _check_sampling(
    algorithm: DPSGD, examples: int, runtime: Runtime
) -> Iterator[Finding]:
    """Give every example its own coordinate, and read there who was sampled."""
    run, count = algorithm.mechanism, max(examples, 64)
    steps = max(run.steps, 2 * math.ceil(100 / (run.sample_rate * count)), 16)
    run = dataclasses.replace(run, steps=steps + steps % 2)
    units = dataclasses.replace(
        algorithm,
        mechanism=run,
        augmentation_multiplicity=0,
        declared_examples=count,
        delta=0.5 / count,
    )
    clip_norm = algorithm.require_clip_norm()

    def loss(w: Array, example: Any) -> Array:
        return 10 * clip_norm * jnp.dot(w, example[0])

    each = Problem(loss, jnp.zeros(count), (np.eye(count, dtype=np.float32),))
    recorded = _record(each, units, runtime, _SECRET)
    read = run.sample_rate * count * np.stack(recorded.flat())
    whole = np.abs(read - np.round(read)).max() < _CLOSE
    once = whole and np.isin(np.round(read), (0, 1)).all()
    yield Finding(
        "sampled once or not at all",
        bool(once),
        f"an example counts {read.min():.4g} to {read.max():.4g} times C",
    )
    sampled = read > 0.5
    yield _likely(
        "sample rate",
        _binomial(sampled, run.sample_rate),
        f"{sampled.mean():.4g}; claimed is {run.sample_rate:.4g}",
    )
    if run.sample_rate == 1:
        return
    spread = run.sample_rate * (1 - run.sample_rate) * count
    chi = float(((sampled.sum(1) - run.sample_rate * count) ** 2).sum() / spread)
    yield _likely(
        "batch sizes",
        _chi_squared(chi, run.steps),
        f"{chi / run.steps:.3g} times the variance of Poisson sampling",
    )
    both = sampled[0::2] & sampled[1::2]
    yield _likely(
        "steps are independent",
        _binomial(both, run.sample_rate**2),
        f"{both.mean():.4g} of the examples are in two consecutive batches; "
        f"{run.sample_rate**2:.4g} is expected",
    )


def _check_sums(seen: Sequence[np.ndarray], sums: Sequence[np.ndarray]) -> Finding:
    """Check that each update is the sum of its examples' clipped gradients."""
    apart = max(
        float(np.linalg.norm(one - other))
        for one, other in zip(seen, sums, strict=True)
    )
    largest = max(1.0, *(float(np.linalg.norm(each)) for each in sums))
    return Finding(
        "sums of clipped gradients",
        apart <= _CLOSE * largest,
        f"differs from the definition by at most {apart:.2g}·C, of {largest:.3g}·C",
    )


def _check_noise(
    noise: list[list[np.ndarray]],
    others: list[list[np.ndarray]],
    noise_multiplier: float,
) -> Iterator[Finding]:
    """Check that noise is Gaussian, as large as claimed, and always new."""
    leaves = [
        np.concatenate([step[number].ravel() for step in noise]) / noise_multiplier
        for number in range(len(noise[0]))
    ]
    chances, deviations = [], []
    for leaf in leaves:
        total = float((leaf**2).sum())
        chances.append(_chi_squared(total, leaf.size))
        deviations.append(math.sqrt(total / leaf.size))
    yield _likely(
        "noise of every leaf",
        min(1.0, min(chances) * len(chances)),
        f"{min(deviations):.4g} to {max(deviations):.4g} times the claimed deviation",
    )
    together = np.concatenate(leaves)
    against_normal: Any = stats.kstest(together, "norm")
    yield _likely(
        "noise is Gaussian",
        float(against_normal.pvalue),
        f"{together.size:,} values",
    )
    flat, other = (
        np.stack(
            [np.concatenate([leaf.ravel() for leaf in step]) for step in all_steps]
        )
        for all_steps in (noise, others)
    )
    yield _uncorrelated("noise is new in every step", [(flat[:-1], flat[1:])])
    yield _uncorrelated("noise is of the run's secret", [(flat, other)])
    pairs = []
    for one, two in itertools.combinations(leaves, 2):
        one, two = (each.reshape(len(noise), -1) for each in (one, two))
        width = min(one.shape[1], two.shape[1])
        pairs.append((one[:, :width], two[:, :width]))
    if pairs:
        yield _uncorrelated("noise of no leaf is another's", pairs)


def _check_after(
    recorded: _Recorded, problem: Problem, algorithm: DPSGD
) -> Iterator[Finding]:
    """Check that parameters and average follow from the noisy updates alone."""
    optimizer, decay = algorithm.optimizer, algorithm.ema_decay
    trained, _ = problem.split()
    average, state = trained, optimizer.init(trained)
    for step, gradient in enumerate(recorded.gradients):
        gradient = jax.tree.unflatten(
            jax.tree.structure(trained), jax.tree.leaves(gradient)
        )
        updates, state = optimizer.update(gradient, state, trained)
        trained = optax.apply_updates(trained, updates)
        kept = min(decay, (1 + step) / (10 + step))
        average = jax.tree.map(
            lambda old, new, kept=kept: kept * old + (1 - kept) * new, average, trained
        )
    for name, expected, whole in (
        ("parameters", trained, recorded.result.params),
        ("average of parameters", average, recorded.result.average),
    ):
        found, _ = split(whole, problem.trainable)
        apart = max(
            float(np.abs(np.asarray(one, np.float64) - np.asarray(other)).max())
            for one, other in zip(
                jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
            )
        )
        yield Finding(
            f"{name} are made of noisy updates alone",
            apart <= _CLOSE,
            f"differ from what those give by at most {apart:.2g}",
        )


def _likely(check: str, chance: float, detail: str) -> Finding:
    return Finding(check, bool(chance >= FALSE_ALARM), f"{detail} (p = {chance:.2g})")


def _binomial(happened: np.ndarray, rate: float) -> float:
    count: Any = stats.binomtest(int(happened.sum()), happened.size, rate)
    return float(count.pvalue)


def _chi_squared(total: float, count: int) -> float:
    """Return the two-sided p-value of a sum of squared standard normals."""
    low, high = stats.chi2.cdf(total, count), stats.chi2.sf(total, count)
    return min(1.0, 2 * float(min(low, high)))


def _uncorrelated(
    check: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Finding:
    """Check that the normal arrays of each pair are independent.

    By Chernoff's bound: ln E exp(s·X·Y) = −ln(1 − s²)/2 for standard normal X and Y.
    """
    chances, worst = [], 0.0
    for one, other in pairs:
        scale = math.sqrt(float((one**2).mean() * (other**2).mean())) or 1.0
        mean = min(abs(float((one * other).mean())) / scale, 1.0)
        worst = max(worst, mean)
        best = (math.sqrt(1 + 4 * mean**2) - 1) / (2 * mean) if mean > 1e-9 else 0.0
        exponent = -math.log1p(-(best**2)) / 2 - best * mean
        chances.append(2 * math.exp(one.size * exponent))
    chance = min(1.0, min(chances) * len(chances))
    return _likely(check, chance, f"correlations of at most {worst:.3g}")


### The definition, slowly


def _sums_by_definition(problem: Problem, algorithm: DPSGD) -> list[np.ndarray]:
    """Return Σᵢ clip_C(gᵢ)/C of each step over the examples that must be sampled."""
    source, run = problem.source(), algorithm.mechanism
    clip_norm = algorithm.require_clip_norm()
    secret = Seed.from_int(_SECRET)
    sampler = PoissonSampler(run, len(source), secret, len(source))
    trained, fixed = problem.split()
    loss, augment = problem.loss, problem.augment

    def mean_loss(trained: PyTree, example: Any, key: jax.Array) -> Array:
        model = eqx.combine(trained, fixed)
        if augment is None:
            return loss(model, example)
        multiplicity = algorithm.augmentation_multiplicity
        views = augmentation.views(augment, key, example, multiplicity)
        return jnp.mean(jax.vmap(lambda view: loss(model, view))(views))

    gradient = jax.jit(jax.grad(mean_loss))
    found = []
    for step in range(run.steps):
        key = derive_keys(secret, "augmentation", step)[0]
        total = np.zeros(sum(leaf.size for leaf in jax.tree.leaves(trained)))
        for index in sampler.indices(step):
            one = jax.tree.map(
                lambda leaf: jnp.asarray(leaf[0]), gather(source, np.array([index]))
            )
            own = gradient(trained, one, jax.random.fold_in(key, int(index)))
            flat = np.concatenate(
                [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(own)]
            )
            total += flat / max(clip_norm, float(np.linalg.norm(flat)))
        found.append(total)
    return found
