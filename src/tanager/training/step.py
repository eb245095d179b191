"""One private update: accumulate over physical batches, then apply.

The two functions are compiled once each for a whole run, whatever sizes Poisson
sampling draws: physical batches have one fixed shape and a mask. Each device adds up
its own rows; they meet in the update, once a logical batch, where noise is added, once.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.stages import Lowered
from jaxtyping import Array, ArrayLike, Bool, Int, Key, PyTree

from tanager import _validate as validate
from tanager.clipping import ClippedGrad, Explanation, clipped_grad
from tanager.clipping.precision import accumulation_dtype
from tanager.compiling import jit
from tanager.data import augment as augmentation
from tanager.keys import derive_keys
from tanager.noise import GaussianNoise
from tanager.parallel.layout import AXIS, Layout
from tanager.privacy.mechanism import Mechanism
from tanager.sampling import PoissonSampler
from tanager.seed import Seed
from tanager.training import ema
from tanager.training.plain import PlainGrad
from tanager.training.state import Accumulator, Counts, State, count, empty, specs


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
        layout: which device holds what; None for one device.
        in_memory: the batches given to `accumulate` are all the examples there are,
            on every device, and the rows of a physical batch are taken from them there.

    Attributes:
        frozen: the arrays that are not trained.
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
        layout: Layout | None = None,
        in_memory: bool = False,
    ):
        def mean_over_views(model: PyTree, views: Any) -> Array:
            return jnp.mean(jax.vmap(lambda view: loss(model, view))(views))

        self.layout = layout or Layout(devices=1)
        if self.layout.shard_parameters and strategy == "per_example":
            validate.refuse(
                "strategy",
                strategy,
                "must not form whole gradients where parameters are cut into shares",
                "give auto, or any other",
            )
        self.in_memory = in_memory
        self._loss = loss
        self.frozen, self._static = eqx.partition(fixed, eqx.is_array)
        self._frozen_placed: PyTree = None
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
        # Without clipping there is no sensitivity, and no noise to fit to it.
        self._sensitivity = 1.0 if clip_norm is None else self.grad_fn.sensitivity
        self._unit = 1.0 if clip_norm is None else clip_norm
        self.optimizer = optimizer
        self.augment = augment
        self.multiplicity = multiplicity
        self.ema_decay = ema_decay
        self._drawn_from(mechanism, examples, seed)
        self.trace_anew()
        self._update_jitted = jit(self._update, donate_argnums=0)
        self._zero_jitted: Callable[[], Accumulator] | None = None

    def _drawn_from(self, mechanism: Mechanism, examples: int, seed: Seed) -> None:
        self._seed = seed
        self.sampler = PoissonSampler(mechanism, examples, seed)
        shares = self.layout.shard_parameters
        self.noise = GaussianNoise(mechanism, self._sensitivity, seed, apart=shares)

    def with_seed(self, seed: Seed) -> Self:
        """Return this step with another secret; what was traced is not traced again.

        The compiled functions are given keys, and know of no secret.
        """
        other = copy.copy(self)
        other._drawn_from(self.sampler.mechanism, self.sampler.examples, seed)
        return other

    def trace_anew(self) -> None:
        """Forget what was traced: other methods may now be known to be faster."""
        self._accumulate_jitted = jit(self._accumulate, donate_argnums=2)

    def check(self, params: PyTree, batch: PyTree, physical_batch_size: int) -> None:
        """Trace `accumulate`, so that a loss that cannot be used is refused now.

        The first step does not trace it again, unless `explain` measures first.

        Args:
            params: the trained leaves.
            batch: at least one example, for its shapes.
            physical_batch_size: rows of the batches to come, on all devices together.

        Raises:
            ValueError: see `ClippedGrad.__call__`.
        """
        held = self.sampler.examples if self.in_memory else physical_batch_size
        rows = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((held, *leaf.shape[1:]), leaf.dtype),
            batch,
        )
        arrays = (
            params,
            self.frozen,
            jax.eval_shape(lambda: empty(params, self.layout)),
            rows,
            jax.ShapeDtypeStruct((physical_batch_size,), jnp.bool_),
            jax.ShapeDtypeStruct((physical_batch_size,), jnp.int32),
        )
        self._accumulate_jitted.eval_shape(
            *self.layout.shapes(arrays), self.augmentation_key(0)
        )

    def explain(
        self,
        params: PyTree,
        batch: PyTree,
        physical_batch_size: int,
        report: Callable[[str], None] = lambda _: None,
    ) -> Explanation:
        """Return how a device clips its rows of a physical batch, measured where due.

        Args:
            params: the trained leaves.
            batch: at least one example, for its shapes.
            physical_batch_size: rows of the batches to come, on all devices together.
            report: told what is being measured.
        """
        size = self.layout.rows_each(physical_batch_size)

        def views(batch: PyTree) -> PyTree:
            indices = jnp.zeros(size, jnp.int32)
            rows = jax.tree.map(
                lambda leaf: jnp.zeros((size, *leaf.shape[1:]), leaf.dtype), batch
            )
            return self.views(rows, indices, self.augmentation_key(0))

        shapes = jax.eval_shape(views, batch)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        model = self.model(params)
        if self.grad_fn.tune(model, zeros, report):
            self.trace_anew()
        return self.grad_fn.explain(model, zeros)

    def model(self, params: PyTree) -> PyTree:
        """Return the whole model: the trained leaves among those that are not."""
        return eqx.combine(params, self.frozen, self._static)

    def models(self, state: State) -> tuple[PyTree, PyTree]:
        """Return the model and its average, whole on every device."""
        params, average, frozen = self.layout.gathered_everywhere(
            (state.params, state.average, self._placed())
        )
        return (
            eqx.combine(params, frozen, self._static),
            eqx.combine(average, frozen, self._static),
        )

    def _placed(self) -> PyTree:
        if self._frozen_placed is None:
            self._frozen_placed = self.layout.parameters(self.frozen)
        return self._frozen_placed

    def example_loss(self, params: PyTree, frozen: PyTree, example: Any) -> Array:
        """Return the loss of one example and view, for fingerprints."""
        return self._loss(eqx.combine(params, frozen, self._static), example)

    def start(self, params: PyTree) -> State:
        """Return the state before the first update: copies, laid out on the devices."""
        params = self.layout.parameters(params)

        @jax.jit
        def state(params: PyTree) -> tuple[PyTree, PyTree]:
            average = jax.tree.map(
                lambda leaf: leaf.astype(accumulation_dtype(leaf.dtype)), params
            )
            return self.layout.laid((average, self.optimizer.init(params)))

        return State(params, *state(params))

    def zero(self, params: PyTree) -> Accumulator:
        """Return the accumulator of an empty logical batch."""
        if self._zero_jitted is None:
            shapes = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params
            )
            self._zero_jitted = jax.jit(
                functools.partial(empty, shapes, self.layout),
                out_shardings=self.layout.on_mesh(specs(shapes, self.layout)),
            )
        return self._zero_jitted()

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
            batch: B rows of examples; or all N examples, with `in_memory`.
            mask: which rows are examples.
            indices: of the examples among the N.
            key: of the step's augmentation.
        """
        return self._accumulate_jitted(
            params, self._placed(), accumulator, batch, mask, indices, key
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
        layout, each = self.layout, PartitionSpec(AXIS)
        sums = specs(params, layout)

        def on_one_device(shares: PyTree, *rest: Any) -> Accumulator:
            whole = layout.gathered(shares, (params, frozen))
            return self._accumulate_here(*whole, *rest)

        return jax.shard_map(
            on_one_device,
            mesh=layout.mesh,
            in_specs=(
                layout.specs((params, frozen)),
                sums,
                PartitionSpec() if self.in_memory else each,
                each,
                each,
                PartitionSpec(),
            ),
            out_specs=sums,
            check_vma=False,
        )((params, frozen), accumulator, batch, mask, indices, key)

    def _accumulate_here(
        self,
        params: PyTree,
        frozen: PyTree,
        accumulator: Accumulator,
        batch: PyTree,
        mask: Bool[Array, " b"],
        indices: Int[Array, " b"],
        key: Key[Array, ""],
    ) -> Accumulator:
        if self.in_memory:
            batch = jax.tree.map(lambda leaf: leaf[indices], batch)
        model = eqx.combine(params, frozen, self._static)
        out = self.grad_fn(model, self.views(batch, indices, key), mask)
        counts = count(out.norms, out.losses, mask, self.grad_fn.clip_norm)
        return jax.tree.map(
            jnp.add,
            accumulator,
            Accumulator(
                self.layout.handed_over(out.sum),
                Counts(*(count[None] for count in counts)),
            ),
        )

    def apply(
        self,
        state: State,
        accumulator: Accumulator,
        keys: Key[Array, " draws"],
        step: Int[ArrayLike, ""],
    ) -> tuple[State, Counts]:
        """Make the update of a logical batch; compiled once.

        Args:
            state: before; its memory is used again.
            accumulator: of all the physical batches.
            keys: of the step's noise.
            step: its number, from 0.

        Returns:
            The state after, and the counts of all devices together.
        """
        return self._update_jitted(state, accumulator, keys, step)

    def update(
        self,
        state: State,
        batch: PyTree,
        mask: Bool[Array, " b"],
        indices: Int[Array, " b"],
        key: Key[Array, ""],
        keys: Key[Array, " draws"],
        step: Int[Array, ""],
    ) -> State:
        """Return the state after an update from one physical batch, on one device.

        Pure, for `jax.vmap` over runs; arguments as of `accumulate` and `apply`.
        """
        params, rows = state.params, (batch, mask, indices, key)
        sums = self._accumulate_here(
            params, self.frozen, empty(params, self.layout), *rows
        )
        total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), sums.sum)
        return self._apply(state, total, keys, step)

    def lowered(
        self,
        state: State,
        batch: PyTree,
        mask: Bool[ArrayLike, " b"],
        indices: Int[ArrayLike, " b"],
    ) -> tuple[Lowered, Lowered]:
        """Return the programs of `accumulate` and `apply`, to ask them what they do.

        Once compiled, they are not compiled again when the two are called.
        """
        total = self.zero(state.params)
        key, keys = self.augmentation_key(0), self.noise.keys(0)
        accumulate = self._accumulate_jitted.lower(
            state.params, self._placed(), total, batch, mask, indices, key
        )
        return accumulate, self._update_jitted.lower(state, total, keys, np.int32(0))

    def _update(
        self,
        state: State,
        accumulator: Accumulator,
        keys: Key[Array, " draws"],
        step: Int[Array, ""],
    ) -> tuple[State, Counts]:
        total = self.layout.met(accumulator.sum, state.params)
        state = self.layout.laid(self._apply(state, total, keys, step))
        counts = jax.tree.map(functools.partial(jnp.sum, axis=0), accumulator.counts)
        return state, counts

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
