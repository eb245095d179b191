"""Many private models, trained side by side in one program.

The program is the step of `tanager.train`, mapped over models. Each model has its own
secret, so its own batches and noise. All start from the same parameters and share the
examples, except those that are left out for a model, which changes nothing else.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PyTree

from tanager.audit.batching import over_models
from tanager.compiling import filter_jit, jit
from tanager.data import gather
from tanager.grid import Whole
from tanager.keys import from_words, key_words
from tanager.privacy.mechanism import Mechanism
from tanager.sampling import PhysicalBatch, PoissonSampler, pad
from tanager.seed import Seed
from tanager.training import tuning
from tanager.training.problem import DPSGD, Problem, Runtime
from tanager.training.state import State
from tanager.training.step import Step
from tanager.training.unit import Unit


_FEW, _MANY = 16, 128  # images in the gradient that `guess_update` times
_QUICK = 0.1  # seconds that this of few takes, where many are timed


def with_rates(
    optimizer: Callable[..., optax.GradientTransformation],
) -> optax.GradientTransformation:
    """Return an optimizer for which every model can have its own learning rate."""
    return optax.inject_hyperparams(
        lambda learning_rate: optimizer(learning_rate=learning_rate)
    )(learning_rate=1.0)


def _rows(size: int, rate: float, grouped: bool) -> int:
    """Return rows enough for a batch, except once in 10⁹ steps; or all examples.

    Those are not gathered, and are the same for all models.
    """
    likely = size * rate + 6 * math.sqrt(size * rate * (1 - rate)) + 1
    return min(size, math.ceil(likely)) if grouped or 2 * likely < size else size


def guess_update(problem: Problem, rate: float, multiplicity: int) -> float:
    """Return a guess of the seconds of an update of one model, before any is made.

    It is the time of drawing a batch, and twice that of a plain gradient of as many
    zeros, whose program is compiled much sooner than that of many models: LeNet's
    update takes 2.0 times as long as its plain gradient on two cores. Of a large batch,
    the gradient of a part is timed, of a small part where that takes long enough.
    """
    groups, size = problem.groups, problem.size()
    unit = Unit.of(problem, multiplicity)
    whole = _rows(size, rate, groups is not None)
    images = max(1, multiplicity) * math.prod(unit.shape(1))
    one = jax.tree.map(np.asarray, problem.source()[0])

    def loss(trained: PyTree, fixed: PyTree, batch: PhysicalBatch) -> Array:
        views = unit.views(batch, jax.random.key(0))
        model = eqx.combine(trained, fixed)
        return jnp.mean(jax.vmap(unit.loss, (None, 0))(model, views))

    gradient, given = filter_jit(jax.grad(loss)), problem.split()

    def plain(part: int) -> float:
        shape = unit.shape(part)
        zeros = jax.tree.map(lambda x: np.zeros((*shape, *x.shape), x.dtype), one)
        rows = PhysicalBatch(zeros, np.ones(shape, bool), np.zeros(shape, np.int32))
        jax.block_until_ready(gradient(*given, rows))  # compiles
        return _least(lambda: jax.block_until_ready(gradient(*given, rows)))

    few, many = (min(whole, max(1, most // images)) for most in (_FEW, _MANY))
    part, seconds = few, plain(few)
    if seconds < _QUICK and many > few:
        part, seconds = many, plain(many)
    mechanism = Mechanism(rate, 1.0, 1)
    sampler = PoissonSampler(mechanism, size, Seed.from_os(), size, groups)
    return 2 * seconds * whole / part + _least(lambda: sampler.indices(0))


def _least(work: Callable[[], Any]) -> float:
    """Return the least seconds that it takes, of three times."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


class ManyModels:
    """Trains models of one mechanism, many at a time.

    Args:
        problem: of every model, from the same first parameters. Its data are the
            N + Z examples that a model's data may hold, in memory.
        algorithm: of every model; `optimizer` from `with_rates`, and
            `declared_examples` the N that the public expected batch size q·N is of.
        strategy: see `tanager.clipped_grad`.
        report: called with what is being measured, before anything is compiled.

    Raises:
        ValueError: an argument is out of range, or the loss cannot be made private.
    """

    def __init__(
        self,
        problem: Problem,
        algorithm: DPSGD,
        strategy: str = "auto",
        report: Callable[[str], None] = lambda what: None,
    ):
        source = problem.source()
        rows = np.arange(len(source))
        grouped = problem.groups is not None
        self.mechanism = algorithm.mechanism
        self._data = jax.tree.map(jnp.asarray, gather(source, rows))
        self.size = problem.size()
        self.step = Step(
            problem,
            algorithm,
            Runtime(strategy=strategy),
            Seed.from_os(),  # every model has its own instead
            examples=algorithm.public_size(len(source)),
        )
        self.params = self.step.params
        one = jax.tree.map(lambda leaf: leaf[:1], self._data)
        self.step.check(self.params, one, 1)
        self._rows = _rows(self.size, self.mechanism.sample_rate, grouped)
        self._all_rows = not grouped and self._rows == self.size
        tuning.explain(self.step, self.params, one, self._rows, report)
        self._update = jit(self._mapped, donate_argnums=2)
        of_one = jax.vmap(self.step.example_loss, (None, None, 0))
        self._losses = jit(over_models(of_one, (0, None, None)))

    def train(
        self,
        secrets: Sequence[Seed],
        learning_rates: Float[np.ndarray, " m"],
        left_out: Bool[np.ndarray, "m examples"],
        on_update: Callable[[int], None] = lambda done: None,
    ) -> PyTree:
        """Return a trained model for each secret, as leaves with a leading axis of M.

        `left_out` says which examples a model's data lack. `on_update` is called after
        each update but the last with how many are done.
        """
        own = self.step.sampler
        of_everyone = PoissonSampler(
            self.mechanism, self.size, secrets[0], own.declared, own.groups
        )
        samplers = [of_everyone.with_seed(secret) for secret in secrets]
        whole = self.step.noise
        assert whole is not None
        noises = [whole.with_seed(secret) for secret in secrets]
        state = self._start(learning_rates)
        for step in range(self.mechanism.steps):
            sampled = [each.indices(step) for each in samplers]
            drawn = [
                indices[~out[indices]]
                for out, indices in zip(left_out, sampled, strict=True)
            ]
            noise = [own.draw(step) for own in noises]
            views = [key_words(secret, "augmentation", step)[0] for secret in secrets]
            if step:
                jax.block_until_ready(state)
                on_update(step)
            state = self._update(
                self._data,
                np.int32(step),
                state,
                *self._batches(step, samplers, drawn),
                np.stack(views),
                jax.tree.map(lambda *each: np.stack(each), *noise),
            )
        return state.params

    def losses(self, params: PyTree, examples: Any) -> Float[np.ndarray, "m e"]:
        """Return the loss of every model of `train` at every example."""
        found = self._losses(params, self.step.frozen, examples)
        return np.asarray(found, np.float64)

    def last(self, count: int) -> PyTree:
        """Return the last examples."""
        return jax.tree.map(lambda leaf: leaf[-count:], self._data)

    def _start(self, learning_rates: np.ndarray) -> State:
        count = len(learning_rates)
        state = self.step.start(self.params)
        each: Any = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (count, *jnp.shape(leaf))), state
        )

        def rates(state: State) -> Array:
            return state.optimizer_state.hyperparams["learning_rate"]

        # Placed as an update returns them, or the second would be another program.
        own = np.asarray(learning_rates, np.float32)
        placed = jax.device_put(own, rates(each).sharding)
        return eqx.tree_at(rates, each, placed)

    def _batches(
        self,
        step: int,
        samplers: Sequence[PoissonSampler],
        drawn: Sequence[np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return mask [m, rows] and indices, [m, rows] or [rows] for all of them."""
        if self._all_rows:
            mask = np.zeros((len(drawn), self.size), bool)
            for own, indices in zip(mask, drawn, strict=True):
                own[indices] = True
            return mask, np.arange(self.size, dtype=np.int32)
        self._rows = max(self._rows, *map(len, drawn))
        padded = [
            own.chosen(step, pad(indices, self._rows))
            for own, indices in zip(samplers, drawn, strict=True)
        ]
        return np.stack([p.mask for p in padded]), np.stack([p.indices for p in padded])

    def _mapped(self, data: PyTree, step: Array, *of_each: Any) -> State:
        def update(state: State, mask: Array, rows: Array, view: Array, noise: Whole):
            examples = data
            if not self._all_rows:
                examples = jax.tree.map(lambda leaf: leaf[rows], data)
            batch = PhysicalBatch(examples, mask, rows)
            return self.step.update(state, batch, from_words(view), noise, step)

        axes = (0, 0, None if self._all_rows else 0, 0, 0)
        return over_models(update, axes)(*of_each)
