"""One private update: accumulate over physical batches, then apply.

The two functions are compiled once each for a whole run, whatever sizes Poisson
sampling draws: physical batches have one fixed shape and a mask. Each device adds up
its own rows; they meet in the update, once a logical batch, where noise is added, once.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.stages import Compiled, Lowered
from jaxtyping import Array, ArrayLike, Float, Int, Key, PyTree, UInt32

from tanager import _validate as validate
from tanager.adaptive import AdaptiveClip
from tanager.clipping import ClippedGrad, clipped_grad
from tanager.clipping.analysis.dtypes import accumulation_dtype
from tanager.compiling import jit
from tanager.grid import Grid, Whole, checksum
from tanager.keys import derive_keys, is_key
from tanager.noise import GaussianNoise
from tanager.parallel.layout import AXIS, Layout
from tanager.sampling import PhysicalBatch, PoissonSampler
from tanager.seed import Seed
from tanager.training.plain import PlainGrad, PlainSums
from tanager.training.problem import DPSGD, Problem, Runtime
from tanager.training.state import (
    Accumulator,
    Counts,
    State,
    count,
    empty,
    specs,
    update_average,
)
from tanager.training.unit import Unit


class Step:
    """The compiled pieces of one update of equation (3) of the Unlocking paper.

        w ← w − η_t · { Σᵢ clip_C(gᵢ)/C + σ·N(0, I) } / (q·N)

    The sum is divided by the public expected batch size q·N, never by the size drawn.
    One mechanism feeds the sampler (`sampler`) and the noise (`noise`).

    Sums are added up and released on a grid (`tanager.grid`), except in training
    without privacy.

    Args:
        problem: what is learned; `params` may be shapes, `data` is not used. Arrays
            that are not trained are arguments of the compiled functions: a constant
            would be kept twice, and folded for minutes.
        algorithm: how; clip_norm None takes gradients as they are.
        runtime: how to clip.
        seed: the run's secret.
        examples: how many there are.
        layout: which device holds what; None for one device.
        in_memory: the batches given to `accumulate` are all the examples there are,
            on every device, and the rows of a physical batch are taken from them there.

    Attributes:
        params: the leaves that are trained.
        fixed: the others.
        frozen: the arrays that are not trained, other than JAX keys.
    """

    def __init__(
        self,
        problem: Problem,
        algorithm: DPSGD,
        runtime: Runtime,
        seed: Seed,
        examples: int,
        layout: Layout | None = None,
        in_memory: bool = False,
    ):
        self.layout = layout or Layout(devices=1)
        if self.layout.shard_parameters and runtime.strategy == "per_example":
            rule = "must not form whole gradients where parameters are cut into shares"
            validate.refuse("strategy", "per_example", rule, "give auto, or any other")
        self.in_memory = in_memory
        self.unit = Unit.of(problem, algorithm.augmentation_multiplicity)
        self._examples = examples
        self.params, self.fixed = problem.split()
        self.frozen, self._static = eqx.partition(
            self.fixed, lambda leaf: eqx.is_array(leaf) and not is_key(leaf)
        )
        trainable = jax.tree.map(
            lambda leaf: leaf is None, self.fixed, is_leaf=lambda leaf: leaf is None
        )
        self.optimizer = algorithm.optimizer
        self.ema_decay = algorithm.ema_decay
        self._seed = seed
        mechanism, clip_norm = algorithm.mechanism, algorithm.clip_norm
        groups = problem.groups
        units = examples if groups is None else len(groups)
        declared = algorithm.public_size(units)
        self.sampler = PoissonSampler(mechanism, units, seed, declared, groups)
        self.grad_fn: ClippedGrad | PlainGrad = PlainGrad(self.unit.loss, trainable)
        self.noise: GaussianNoise | None = None
        self._sums: Grid | PlainSums = PlainSums()
        self.adaptive: AdaptiveClip | None = None
        if clip_norm is not None:
            self.grad_fn = clipped_grad(
                self.unit.loss,
                clip_norm=clip_norm,
                style="unit" if algorithm.adaptive else algorithm.clipping_style,
                strategy=runtime.strategy,
                memory=runtime.memory,
                trainable=trainable,
            )
            sensitivity, released = self.grad_fn.sensitivity, self.params
            if algorithm.adaptive is not None:
                batch_size = self.sampler.expected_batch_size
                own = algorithm.adaptive.of(self.grad_fn, mechanism, batch_size)
                self.adaptive, sensitivity = own, own.sensitivity
                released = own.released(self.params)
            self.noise = GaussianNoise(mechanism, sensitivity, seed, released)
            self._sums = self.noise.grid
            self._sums.require_room(self.sampler.expected_batch_size, sensitivity)
        self.forget_traces()
        self._update_jitted = jit(self._update, donate_argnums=0)

    def _added_up(self, params: PyTree) -> PyTree:
        """Return the shapes of what is added up, and released with noise."""
        released = params if self.adaptive is None else self.adaptive.released(params)
        return self._sums.shapes(released)

    def with_seed(self, seed: Seed) -> Self:
        """Return this step with another secret; what was traced is not traced again.

        The compiled functions are given keys, and know of no secret.
        """
        other = copy.copy(self)
        other._seed = seed
        other.sampler = self.sampler.with_seed(seed)
        other.noise = self.noise and self.noise.with_seed(seed)
        return other

    def with_class_weights(self, weights: Sequence[float]) -> Self:
        """Return this step with other weights; what was traced is not traced again.

        The model is `tanager.training.class_weights.Weighted`.
        """
        other = copy.copy(self)
        other.__dict__.pop("_placed", None)
        other.frozen = eqx.tree_at(
            lambda model: model.class_weights,
            self.frozen,
            jnp.asarray(weights, jnp.float32),
        )
        return other

    def forget_traces(self) -> None:
        """Trace `accumulate` again: measurements may now favour other methods."""
        self._accumulate_jitted = jit(self._accumulate, donate_argnums=2)

    def check(self, params: PyTree, example: PyTree, physical_batch_size: int) -> None:
        """Trace `accumulate`, to refuse a loss or an augmentation that cannot be used.

        `example` has a leading axis; the size is that of all devices together.
        """
        *arrays, norm = self._shapes(params, example, physical_batch_size)
        self._accumulate_jitted.eval_shape(*arrays, self.augmentation_key(0), norm)

    def _shapes(self, params: PyTree, example: PyTree, size: int) -> tuple[Any, ...]:
        """Return shapes and placement of what `_accumulate` takes, without the key."""
        rows = self.unit.shape(size)
        held = (self._examples,) if self.in_memory else rows
        sums = self._added_up(params)
        batch = PhysicalBatch(
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((*held, *leaf.shape[1:]), leaf.dtype),
                example,
            ),
            jax.ShapeDtypeStruct(rows, jnp.bool_),
            jax.ShapeDtypeStruct(rows, jnp.int32),
        )
        total = jax.eval_shape(lambda: empty(sums, self.layout))
        norm = None if self.adaptive is None else jax.ShapeDtypeStruct((), jnp.float32)
        (shares, accumulator, each, _, whole) = self._specs(params, self.frozen)
        placed = self.layout.shapes(
            ((params, self.frozen), total, batch, norm),
            (shares, accumulator, each, whole),
        )
        return *placed[0], *placed[1:]

    def models(self, state: State) -> tuple[PyTree, PyTree]:
        """Return the model and its average, whole on every device."""
        params, average, frozen = self.layout.gathered_everywhere(
            (state.params, state.average, self._placed)
        )
        return (
            eqx.combine(params, frozen, self._static),
            eqx.combine(average, frozen, self._static),
        )

    @functools.cached_property
    def _placed(self) -> PyTree:
        return self.layout.parameters(self.frozen)

    def example_loss(self, params: PyTree, frozen: PyTree, example: Any) -> Array:
        """Return the loss of one example and view, for fingerprints."""
        model = eqx.combine(params, frozen, self._static)
        return self.unit.example_loss(model, example)

    def start(self, params: PyTree) -> State:
        """Return the state before the first update: copies, placed on the devices."""
        params = self.layout.parameters(params)
        return State(params, *jax.jit(self._first)(params))

    def _first(self, params: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        """Return the fields of the first state that follow the parameters."""
        average = jax.tree.map(
            lambda leaf: leaf.astype(accumulation_dtype(leaf.dtype)), params
        )
        norm = None if self.adaptive is None else jnp.float32(self.adaptive.first)
        return self.layout.constrain((average, self.optimizer.init(params), norm))

    @functools.cached_property
    def zero(self) -> Callable[[], Accumulator]:
        """What makes the accumulator of an empty logical batch."""
        sums = self._added_up(self.params)
        return jax.jit(
            functools.partial(empty, sums, self.layout),
            out_shardings=self.layout.on_mesh(specs(sums, self.layout)),
        )

    def on_rows(self) -> Self:
        """Return this step for batches that hold their rows, whatever `in_memory`."""
        other = copy.copy(self)
        other.in_memory = False
        other.forget_traces()
        return other

    def compiled(
        self, batch: PhysicalBatch
    ) -> tuple[Compiled, Callable[[], Accumulator]]:
        """Return `accumulate` compiled for such a batch, and what runs it once."""
        key = self.augmentation_key(0)
        params = self.layout.parameters(self.params)
        given = (params, self._placed, self.zero(), batch, key, None)
        program = self._accumulate_jitted.lower(*given).compile()
        return program, lambda: program(*given[:2], self.zero(), *given[3:])

    def augmentation_key(self, step: int) -> Key[Array, ""]:
        """Return the key all views of this step are drawn from."""
        return derive_keys(self._seed, "augmentation", step)[0]

    def accumulate(
        self,
        params: PyTree,
        accumulator: Accumulator,
        batch: PhysicalBatch,
        key: Key[Array, ""],
        clip_norm: Float[Array, ""] | None = None,
    ) -> Accumulator:
        """Add the clipped gradients of one physical batch; compiled once.

        The accumulator's memory is used again. With `in_memory`, the batch's examples
        are all N. `key` is the step's `augmentation_key`, `clip_norm` the state's: None
        for that of the algorithm.
        """
        given = params, self._placed, accumulator, batch, key, clip_norm
        return self._accumulate_jitted(*given)

    def _accumulate(
        self,
        params: PyTree,
        frozen: PyTree,
        accumulator: Accumulator,
        batch: PhysicalBatch,
        key: Key[Array, ""],
        clip_norm: Float[Array, ""] | None = None,
    ) -> Accumulator:
        layout, given = self.layout, self._specs(params, frozen)

        def on_one_device(shares: PyTree, *rest: Any) -> Accumulator:
            whole = layout.gathered(shares, (params, frozen))
            return self._accumulate_here(*whole, *rest)

        return jax.shard_map(
            on_one_device,
            mesh=layout.mesh,
            in_specs=given,
            out_specs=given[1],
            check_vma=False,
        )((params, frozen), accumulator, batch, key, clip_norm)

    def _specs(self, params: PyTree, frozen: PyTree) -> tuple[Any, ...]:
        """Return how parameters, accumulator, batch, key and norm are placed."""
        layout, each = self.layout, PartitionSpec(AXIS)
        return (
            layout.specs((params, frozen)),
            specs(self._added_up(params), layout),
            PhysicalBatch(PartitionSpec() if self.in_memory else each, each, each),
            PartitionSpec(),
            PartitionSpec(),
        )

    def _accumulate_here(
        self,
        params: PyTree,
        frozen: PyTree,
        accumulator: Accumulator,
        batch: PhysicalBatch,
        key: Key[Array, ""],
        clip_norm: Float[Array, ""] | None,
    ) -> Accumulator:
        if self.in_memory:
            rows = jax.tree.map(lambda leaf: leaf[batch.indices], batch.examples)
            batch = batch._replace(examples=rows)
        model = eqx.combine(params, frozen, self._static)
        mask = self.unit.mask(batch)
        if self.noise is not None:  # only then no example may see another
            self.unit.check(batch, key)
        given = model, self.unit.views(batch, key), mask
        if self.adaptive is None:
            out, most = self.grad_fn(*given), self.grad_fn.clip_norm
            sums = out.sum
        else:
            most = self.adaptive.first if clip_norm is None else clip_norm
            out, pair = self.adaptive(*given, most)
            sums = pair.sum
        counts = count(out.norms, out.losses, mask, most)
        rounded = self.layout.scatter(self._sums.round(sums))
        return Accumulator(
            self._sums.plus(accumulator.sum, rounded),
            jax.tree.map(lambda x, new: x + new[None], accumulator.counts, counts),
        )

    def draw(self, step: int) -> Whole | None:
        """Draw the noise of a step, placed like the sums; None without privacy."""
        return self.layout.parameters(self.noise.draw(step)) if self.noise else None

    def apply(
        self,
        state: State,
        accumulator: Accumulator,
        drawn: Whole | None,
        step: Int[ArrayLike, ""],
    ) -> tuple[State, Counts, UInt32[Array, "4"]]:
        """Make the update of a logical batch; compiled once.

        It returns the state after, the counts of all devices together, and a checksum
        of the sum before noise. The memory of the state before is used again.
        """
        return self._update_jitted(state, accumulator, drawn, step)

    def update(
        self,
        state: State,
        batch: PhysicalBatch,
        key: Key[Array, ""],
        drawn: Whole,
        step: Int[Array, ""],
    ) -> State:
        """Return the state after an update from one physical batch, on one device.

        Pure, for `jax.vmap` over runs; arguments as of `accumulate` and `apply`.
        """
        params, norm = state.params, state.clip_norm
        none = empty(self._added_up(params), self.layout)
        sums = self._accumulate_here(params, self.frozen, none, batch, key, norm)
        total = jax.tree.map(lambda leaf: leaf[0], sums.sum)
        return self._apply(state, total, drawn, step)

    def lowered(self, example: PyTree, size: int) -> tuple[Lowered, Lowered]:
        """Return the programs of `accumulate` and `apply`, for inspection.

        Arguments as of `check`. Nothing is placed, so that the devices can be
        descriptions of some that are elsewhere.
        """
        layout = self.layout
        params, frozen, total, batch, norm = self._shapes(self.params, example, size)
        key, number = layout.shapes((self.augmentation_key(0), jnp.int32(0)))
        accumulate = self._accumulate_jitted.lower(
            params, frozen, total, batch, key, norm
        )
        drawn = self.noise and self._added_up(self.params)
        first = State(params, *jax.eval_shape(self._first, params))
        first, drawn = layout.shapes((first, drawn), layout.specs((first, drawn)))
        return accumulate, self._update_jitted.lower(first, total, drawn, number)

    def _update(
        self,
        state: State,
        accumulator: Accumulator,
        drawn: Whole | None,
        step: Int[Array, ""],
    ) -> tuple[State, Counts, UInt32[Array, "4"]]:
        summed = self.layout.reduce(accumulator.sum, self._added_up(state.params))
        total = self._sums.carried(summed)
        made = checksum(total) if isinstance(total, Whole) else jnp.zeros(4, jnp.uint32)
        state = self.layout.constrain(self._apply(state, total, drawn, step))
        counts = jax.tree.map(functools.partial(jnp.sum, axis=0), accumulator.counts)
        return state, counts, made

    def _apply(
        self,
        state: State,
        total: PyTree,
        drawn: Whole | None,
        step: Int[Array, ""],
    ) -> State:
        unit, noisy, norm = 1.0, total, state.clip_norm  # of what is not clipped
        if self.noise is not None:
            assert drawn is not None
            unit, noisy = self.grad_fn.clip_norm, self.noise.add(total, drawn)
        if self.adaptive is not None and norm is not None:
            unit, (noisy, counted) = 1.0, noisy
            norm = self.adaptive.next(norm, counted)
        scale = 1 / (unit * self.sampler.expected_batch_size)
        gradient = jax.tree.map(
            lambda leaf, param: (leaf * scale).astype(param.dtype), noisy, state.params
        )
        updates, optimizer_state = self.optimizer.update(
            gradient, state.optimizer_state, state.params
        )
        params = optax.apply_updates(state.params, updates)
        average = update_average(state.average, params, step, self.ema_decay)
        return State(params, average, optimizer_state, norm)
