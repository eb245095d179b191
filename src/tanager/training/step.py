"""One private update: accumulate over physical batches, then apply.

The two functions are compiled once each for a whole run, whatever sizes Poisson
sampling draws: physical batches have one fixed shape and a mask.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key, PyTree

from tanager.clipping import ClippedGrad, Explanation, clipped_grad
from tanager.clipping.precision import accumulation_dtype
from tanager.data import augment as augmentation
from tanager.keys import derive_keys
from tanager.noise import GaussianNoise
from tanager.privacy.mechanism import Mechanism
from tanager.sampling import PoissonSampler
from tanager.seed import Seed
from tanager.training import ema
from tanager.training.plain import PlainGrad


class State(NamedTuple):
    """What training changes: all of it may be released, none of it is random state.

    Attributes:
        params: the trained leaves (None where a leaf is not a float array).
        average: their exponential moving average, float32 or wider.
        optimizer_state: of the optax transformation.
    """

    params: PyTree
    average: PyTree
    optimizer_state: PyTree


class Accumulator(NamedTuple):
    """Sums over the physical batches of one logical batch. Private.

    Attributes:
        sum: Σ clip_C(gᵢ), pytree like `State.params`.
        losses: Σ lossᵢ over examples with a finite loss.
        examples: how many examples the logical batch holds.
        clipped: how many of them had a gradient norm above C.
        dropped: how many contributed nothing because loss or gradient was not finite.
    """

    sum: PyTree
    losses: Float[Array, ""]
    examples: Int[Array, ""]
    clipped: Int[Array, ""]
    dropped: Int[Array, ""]


class Step:
    """The compiled pieces of one update of equation (3) of the Unlocking paper.

        w ← w − η_t · { Σᵢ clip_C(gᵢ)/C + σ·N(0, I) } / (q·N)

    The sum is divided by the public expected batch size q·N, never by the size drawn.
    One mechanism feeds the sampler (`sampler`) and the noise (`noise`).

    Args:
        loss: ``loss(model, example) -> scalar``, for one example and one view.
        fixed: the leaves of the model that are not trained, None in place of those that
            are. Arrays among them are arguments of the compiled functions: a constant
            would be kept twice, and folded for minutes.
        optimizer: optax transformation, given the gradient in braces above over q·N.
        mechanism: q, σ and the number of steps.
        examples: N.
        seed: the run's secret.
        clip_norm: C; None for gradients as they are, which is not private and takes a
            mechanism without noise.
        strategy: clipping strategy.
        memory: of the clipping, see `clipped_grad`.
        augment: ``augment(key, example) -> example``, or None for the example itself.
        multiplicity: K views of each example, averaged before clipping (equation 4);
            0 exactly when `augment` is None.
        ema_decay: of the parameter average.
    """

    def __init__(
        self,
        loss: Callable,
        fixed: PyTree,
        optimizer: optax.GradientTransformation,
        mechanism: Mechanism,
        examples: int,
        seed: Seed,
        *,
        clip_norm: float | None,
        strategy: str,
        memory: str = "default",
        augment: Callable | None,
        multiplicity: int,
        ema_decay: float,
    ):
        def mean_over_views(model: PyTree, views: Any) -> Array:
            return jnp.mean(jax.vmap(lambda view: loss(model, view))(views))

        self._loss = loss
        self._frozen, self._static = eqx.partition(fixed, eqx.is_array)
        whole = loss if multiplicity == 0 else mean_over_views
        trainable = jax.tree.map(
            lambda leaf: leaf is None, fixed, is_leaf=lambda leaf: leaf is None
        )
        self.grad_fn: ClippedGrad | PlainGrad
        if clip_norm is None:
            self.grad_fn = PlainGrad(whole, trainable)
        else:
            self.grad_fn = clipped_grad(
                whole,
                clip_norm=clip_norm,
                strategy=strategy,
                memory=memory,
                trainable=trainable,
            )
        self.sampler = PoissonSampler(mechanism, examples, seed)
        # Without clipping there is no sensitivity, and no noise to fit to it.
        self._unit = 1.0 if clip_norm is None else self.grad_fn.sensitivity
        self.noise = GaussianNoise(mechanism, self._unit, seed)
        self.optimizer = optimizer
        self.augment = augment
        self.multiplicity = multiplicity
        self.ema_decay = ema_decay
        self._seed = seed
        self._accumulate_jitted = jax.jit(self._accumulate, donate_argnums=2)
        self.apply = jax.jit(self._apply, donate_argnums=0)

    def check(self, params: PyTree, batch: PyTree) -> None:
        """Trace a physical batch, so that a loss that cannot be used is refused now.

        Raises:
            ValueError: see `ClippedGrad.__call__`.
        """
        jax.eval_shape(
            self._accumulate,
            params,
            self._frozen,
            self.zero(params),
            batch,
            jnp.ones(1, bool),
            jnp.zeros(1, jnp.int32),
            self.augmentation_key(0),
        )

    def explain(
        self,
        params: PyTree,
        batch: PyTree,
        physical_batch_size: int,
        report: Callable[[str], None] = lambda _: None,
    ) -> Explanation:
        """Return how physical batches of this size are clipped, measured where due.

        Args:
            params: the trained leaves.
            batch: at least one example, for its shapes.
            physical_batch_size: rows of the batches to come.
            report: told what is being measured.
        """

        def views(batch: PyTree) -> PyTree:
            indices = jnp.zeros(physical_batch_size, jnp.int32)
            rows = jax.tree.map(
                lambda leaf: jnp.zeros(
                    (physical_batch_size, *leaf.shape[1:]), leaf.dtype
                ),
                batch,
            )
            return self.views(rows, indices, self.augmentation_key(0))

        shapes = jax.eval_shape(views, batch)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        model = self.model(params)
        self.grad_fn.tune(model, zeros, report)
        return self.grad_fn.explain(model, zeros)

    def model(self, params: PyTree) -> PyTree:
        """Return the whole model: the trained leaves among those that are not."""
        return eqx.combine(params, self._frozen, self._static)

    def example_loss(self, params: PyTree, frozen: PyTree, example: Any) -> Array:
        """Return the loss of one example and view, for fingerprints."""
        return self._loss(eqx.combine(params, frozen, self._static), example)

    @property
    def frozen(self) -> PyTree:
        """The arrays that are not trained."""
        return self._frozen

    def start(self, params: PyTree) -> State:
        """Return the state before the first update."""
        # Copies: the state is donated to the compiled update, the caller's arrays not.
        params = jax.tree.map(jnp.array, params)
        average = jax.tree.map(
            lambda leaf: jnp.array(leaf, accumulation_dtype(leaf.dtype)), params
        )
        return State(params, average, self.optimizer.init(params))

    def zero(self, params: PyTree) -> Accumulator:
        """Return the accumulator of an empty logical batch."""
        total = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, accumulation_dtype(leaf.dtype)), params
        )
        return Accumulator(
            total, jnp.float32(0), jnp.int32(0), jnp.int32(0), jnp.int32(0)
        )

    def augmentation_key(self, step: int) -> Key[Array, ""]:
        """Return the key all views of this step are drawn from."""
        return derive_keys(self._seed, "augmentation", step)[0]

    def views(self, batch: PyTree, indices: Int[Array, " b"], key: Key[Array, ""]):
        """Return K augmented views of each example, whatever batch it travels in.

        The randomness belongs to the pair (step, example), so that the size of
        physical batches cannot change the result.
        """
        augment = self.augment
        if augment is None:
            return batch

        def example_views(index: Array, example: Any) -> Any:
            own = jax.random.fold_in(key, index)
            return augmentation.views(augment, own, example, self.multiplicity)

        return jax.vmap(example_views)(indices, batch)

    def accumulate(
        self,
        params: PyTree,
        accumulator: Accumulator,
        batch: PyTree,
        mask: Bool[ArrayLike, " b"],
        indices: Int[ArrayLike, " b"],
        key: Key[Array, ""],
    ) -> Accumulator:
        """Add the clipped gradients of one physical batch; compiled once.

        Args:
            params: the trained leaves.
            accumulator: what was added up so far; its memory is used again.
            batch: B rows of examples.
            mask: which rows are examples.
            indices: of the examples among the N.
            key: of the step's augmentation.
        """
        return self._accumulate_jitted(
            params, self._frozen, accumulator, batch, mask, indices, key
        )

    def _accumulate(
        self,
        params: PyTree,
        frozen: PyTree,
        accumulator: Accumulator,
        batch: PyTree,
        mask: Bool[Array, " b"],
        indices: Int[Array, " b"],
        key: Key[Array, ""],
    ) -> Accumulator:
        model = eqx.combine(params, frozen, self._static)
        out = self.grad_fn(model, self.views(batch, indices, key), mask)
        finite = jnp.isfinite(out.norms)
        usable = mask & finite & jnp.isfinite(out.losses)
        losses = jnp.where(usable, out.losses, 0).astype(jnp.float32)
        above = out.norms > self.grad_fn.clip_norm
        return Accumulator(
            jax.tree.map(jnp.add, accumulator.sum, out.sum),
            accumulator.losses + jnp.sum(losses),
            accumulator.examples + _count(mask),
            accumulator.clipped + _count(mask & finite & above),
            accumulator.dropped + _count(mask & ~finite),
        )

    def _apply(
        self,
        state: State,
        total: PyTree,
        keys: Key[Array, " draws"],
        step: Int[Array, ""],
    ) -> State:
        scale = 1 / (self._unit * self.sampler.expected_batch_size)
        gradient = jax.tree.map(
            lambda leaf, param: (leaf * scale).astype(param.dtype),
            self.noise.add(total, keys),
            state.params,
        )
        updates, optimizer_state = self.optimizer.update(
            gradient, state.optimizer_state, state.params
        )
        params = optax.apply_updates(state.params, updates)
        average = ema.update(state.average, params, step, self.ema_decay)
        return State(params, average, optimizer_state)


def _count(rows: Bool[Array, " b"]) -> Int[Array, ""]:
    return jnp.sum(rows, dtype=jnp.int32)
