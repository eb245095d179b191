"""Replays: a few real training steps, compared with the definition of DP-SGD.

Runs of `tanager.train` with known secrets show what their optimizer received. A replay
finds at once what an attack needs thousands of canaries for, but only the bugs it looks
for.

A check of random numbers fails without cause at most once in 10⁶ replays; the others
never do.
"""

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree
from scipy import stats

from tanager import _validate as validate
from tanager.adaptive import AdaptiveClip
from tanager.audit.bounds import require_noise
from tanager.audit.definition import Definition, by_definition, released_counts
from tanager.clipping.transform import clipped_grad, split
from tanager.seed import Seed
from tanager.training.loop import train
from tanager.training.problem import DPSGD, Problem, Runtime
from tanager.training.result import TrainResult


FALSE_ALARM = 1e-6
"""Of each check of random things."""
_SECRET, _OTHER = 1, 2
_CLOSE = 2e-4


class Recorded(NamedTuple):
    """What a run shows.

    Attributes:
        gradients: what the optimizer was given in each step, float64[steps, d].
        sizes: of the leaves that it is made of.
        clip_norms: C of every step, and of the one after them; all the same unless
            clipping is adaptive.
        result: of `tanager.train`.
    """

    gradients: np.ndarray
    sizes: list[int]
    clip_norms: np.ndarray
    result: TrainResult


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

    What it finds is computed without noise, for whoever may see the data. So no account
    is charged; do not publish it. Class counts are not released, so class weights from
    them are 1.

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
    validate.whole(steps=steps, at_least=4)
    found = Replay(problem, algorithm, runtime, steps)
    return (*found.sampling(), *found.sums(), *found.noise(), *found.after())


class Replay:
    """The checks of a replay, and its runs, each made when a check first needs it."""

    def __init__(
        self, problem: Problem, algorithm: DPSGD, runtime: Runtime | None, steps: int
    ):
        require_noise(algorithm.mechanism)
        # Unfinished: what is handed over may have another form than what is trained.
        alone: dict[str, Any] = {"labels": None, "finish": lambda params: params}
        problem = dataclasses.replace(problem, account=None, **alone)
        self._problem, self._clip_norm = problem, algorithm.require_clip_norm()
        runtime = runtime or Runtime(physical_batch_size=4)
        self._runtime = dataclasses.replace(runtime, progress=False)
        self._mechanism = dataclasses.replace(algorithm.mechanism, steps=steps)
        self._examples = problem.size()
        self._moving = dataclasses.replace(
            algorithm,
            mechanism=self._mechanism,
            class_counts=None,
            declared_examples=self._examples,
            delta=0.5 / self._examples,
        )
        self._still = dataclasses.replace(self._moving, optimizer=optax.set_to_zero())
        quiet = dataclasses.replace(self._mechanism, noise_multiplier=0.0)
        self._exact = dataclasses.replace(self._still, mechanism=quiet)
        self._batch_size = self._mechanism.sample_rate * self._examples

    def sampling(self) -> Iterator[Finding]:
        """Give every example its own coordinate, and read there who was sampled."""
        run, count = self._mechanism, max(self._examples, 64)
        rate, clip_norm = run.sample_rate, self._clip_norm
        steps = max(run.steps, 2 * math.ceil(100 / (rate * count)), 16)
        steps += steps % 2
        units = dataclasses.replace(
            self._exact,
            mechanism=dataclasses.replace(self._exact.mechanism, steps=steps),
            style="clip",
            adaptive=None,
            augmentation_multiplicity=0,
            declared_examples=count,
            delta=0.5 / count,
        )

        def loss(w: Array, example: Any) -> Array:
            return 10 * clip_norm * jnp.dot(w, example[0])

        each = Problem(loss, jnp.zeros(count), (np.eye(count, dtype=np.float32),))
        read = rate * count * _record(each, units, self._runtime).gradients
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
            _binomial(sampled, rate),
            f"{sampled.mean():.4g}; claimed is {rate:.4g}",
        )
        if rate == 1:
            return
        apart = float(((sampled.sum(1) - rate * count) ** 2).sum())
        chi = apart / (rate * (1 - rate) * count)
        yield _likely(
            "batch sizes",
            _chi_squared(chi, steps),
            f"{chi / steps:.3g} times the variance of Poisson sampling",
        )
        both = sampled[0::2] & sampled[1::2]
        yield _likely(
            "steps are independent",
            _binomial(both, rate**2),
            f"{both.mean():.4g} of the examples are in two consecutive batches; "
            f"{rate**2:.4g} is expected",
        )

    def sums(self) -> Iterator[Finding]:
        """Check that each update is the sum of its examples' clipped gradients."""
        run, adaptive = self._noiseless, self._exact.adaptive
        right = self._by_definition(run)
        apart = np.linalg.norm(self._batch_size * run.gradients - right.sums, axis=1)
        largest = max(1.0, np.linalg.norm(right.sums, axis=1).max())
        yield Finding(
            "sums of clipped gradients",
            bool(apart.max() <= _CLOSE * largest),
            f"differs from the definition by at most {apart.max():.2g}·C, of "
            f"{largest:.3g}·C",
        )
        if adaptive is not None:
            counts, doubt = right.counts(run.clip_norms)
            found = released_counts(adaptive, run.clip_norms, self._batch_size)
            off = np.maximum(np.abs(found - counts) - doubt, 0).max()
            yield Finding(
                "the clipping norm follows the count",
                bool(off <= max(_CLOSE * self._batch_size, 0.01)),
                f"as if the count were off by at most {off:.2g}",
            )

    def noise(self) -> Iterator[Finding]:
        """Check that noise is Gaussian, as large as claimed, and always new."""
        problem, sigma = self._problem, self._mechanism.noise_multiplier
        run = _record(problem, self._still, self._runtime)
        silent = dataclasses.replace(
            problem, loss=lambda params, example: 0 * problem.loss(params, example)
        )
        other = _record(silent, self._still, self._runtime, _OTHER)
        clip, scale, counted = self._clip, self._batch_size / sigma, []
        if clip is None:
            without = self._noiseless.gradients
        else:
            right = self._by_definition(run)
            without = right.sums / self._batch_size
            scale /= clip.sensitivity
            found = released_counts(clip.settings, run.clip_norms, self._batch_size)
            found -= right.counts(run.clip_norms)[0]
            counted = [found[:, None] * clip.weight / (sigma * clip.sensitivity)]
        drawn = scale * (run.gradients - without)
        leaves = [*np.split(drawn, np.cumsum(run.sizes)[:-1], axis=1), *counted]
        totals = [float((leaf**2).sum()) for leaf in leaves]
        sizes = [leaf.size for leaf in leaves]
        chances = [*map(_chi_squared, totals, sizes)]
        deviations = [math.sqrt(a / b) for a, b in zip(totals, sizes, strict=True)]
        yield _likely(
            "noise of every leaf",
            min(1.0, min(chances) * len(chances)),
            f"{min(deviations):.4g} to {max(deviations):.4g} times the claimed "
            "deviation",
        )
        together = np.concatenate(leaves, axis=1)
        against_normal: Any = stats.kstest(together.ravel(), "norm")
        yield _likely(
            "noise is Gaussian",
            float(against_normal.pvalue),
            f"{together.size:,} values",
        )
        # All steps together show a small common part, each pair a step that repeats.
        pairs = [
            (together[:-1], together[1:]),
            *itertools.combinations(together, 2),
        ]
        yield _uncorrelated("noise is new in every step", pairs)
        pairs = [(drawn, scale * other.gradients)]
        yield _uncorrelated("noise is of the run's secret", pairs)
        pairs = []
        for one, two in itertools.combinations(leaves, 2):
            width = min(one.shape[1], two.shape[1])
            pairs.append((one[:, :width], two[:, :width]))
        if pairs:
            yield _uncorrelated("noise of no leaf is another's", pairs)

    def after(self) -> Iterator[Finding]:
        """Check that parameters and average follow from the noisy updates alone."""
        problem, algorithm = self._problem, self._moving
        run = _record(problem, algorithm, self._runtime)
        trained, _ = problem.split()
        average, state = trained, algorithm.optimizer.init(trained)
        _, unflatten = ravel_pytree(trained)
        for step, flat in enumerate(run.gradients):
            gradient = unflatten(flat.astype(np.float32))
            updates, state = algorithm.optimizer.update(gradient, state, trained)
            trained = optax.apply_updates(trained, updates)
            kept = min(algorithm.ema_decay, (1 + step) / (10 + step))
            average = jax.tree.map(
                lambda old, new, kept=kept: kept * old + (1 - kept) * new,
                average,
                trained,
            )
        for name, expected, whole in (
            ("parameters", trained, run.result.params),
            ("average of parameters", average, run.result.average),
        ):
            found, _ = split(whole, problem.trainable)
            pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
            apart = max(
                float(np.abs(np.asarray(one, np.float64) - np.asarray(other)).max())
                for one, other in pairs
            )
            yield Finding(
                f"{name} are made of noisy updates alone",
                apart <= _CLOSE,
                f"differ from what those give by at most {apart:.2g}",
            )

    @functools.cached_property
    def _noiseless(self) -> Recorded:
        return _record(self._problem, self._exact, self._runtime)

    @property
    def _clip(self) -> AdaptiveClip | None:
        """How C moves in the noisy runs; None where it does not."""
        adaptive, loss = self._still.adaptive, self._problem.loss
        if adaptive is None:
            return None
        grad_fn = clipped_grad(loss, clip_norm=self._clip_norm, style="unit")
        return adaptive.of(grad_fn, self._mechanism, self._batch_size)

    def _by_definition(self, run: Recorded) -> Definition:
        secret = Seed.from_int(_SECRET)
        return by_definition(self._problem, self._exact, secret, run.clip_norms)


def _record(
    problem: Problem, algorithm: DPSGD, runtime: Runtime, seed: int = _SECRET
) -> Recorded:
    """Train, and return what the optimizer was given in every step."""
    gradients: dict[int, list[np.ndarray]] = {}
    lines: list[Mapping[str, Any]] = []

    def keep(step: np.ndarray, gradient: PyTree) -> None:
        gradients[int(step)] = [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]

    def init(params: Any) -> Array:
        return jnp.zeros((), jnp.int32)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        jax.debug.callback(keep, state, updates)
        return updates, state + 1

    keeping = optax.GradientTransformation(init, update)
    optimizer = optax.chain(keeping, algorithm.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no noise protects nobody
        result = train(
            problem,
            dataclasses.replace(algorithm, optimizer=optimizer),
            runtime,
            seed=seed,
            evaluate_every=None if algorithm.adaptive is None else 1,
            on_metrics=lines.append,
        )
    jax.block_until_ready(result.params)
    jax.effects_barrier()
    steps = algorithm.mechanism.steps
    flat = [[np.ravel(leaf) for leaf in gradients[step]] for step in range(steps)]
    clip_norms = np.full(steps + 1, algorithm.require_clip_norm())
    if algorithm.adaptive is not None:
        clip_norms[1:] = [line["clip_norm"] for line in lines]
    return Recorded(
        np.array([np.concatenate(leaves) for leaves in flat], np.float64),
        [leaf.size for leaf in gradients[0]],
        clip_norms,
        result,
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
