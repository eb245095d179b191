"""The compiled programs that are measured, each counting how often it is traced."""

import math
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Bool, PyTree

from tanager import _validate as validate
from tanager.bench.workload import SGD, Workload
from tanager.clipping import STRATEGIES
from tanager.compiling import bytes_needed, jit
from tanager.sampling import PhysicalBatch


AUTO_LOW = "auto:low"
"""The strategy ``"auto"`` with ``memory="low"``."""


class Program:
    """A function that is called again and again with what it returned before.

    The carried value is donated to each call, as an accumulator or a model is. `start`
    makes it, and the inputs that stay the same, of parameters and batch; no array may
    occur twice in what it returns. `traces` counts how often JAX traced it.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
        function: Callable[[PyTree, PyTree, Bool[Array, " b"]], PyTree],
    ):
        def counted(carried: PyTree, inputs: PyTree, mask: Bool[Array, " b"]) -> PyTree:
            self.traces += 1
            return function(carried, inputs, mask)

        counted.__name__ = f"bench_{name}"
        self.traces = 0
        self._start = start
        self._jitted = jit(counted, donate_argnums=0)

    def prepare(self, params: PyTree, batch: PyTree) -> None:
        """Place the arrays that `compile` and `run` work on."""
        self._carried, self._inputs = self._start(params, batch)

    def compile(self, mask: Bool[Array, " b"]) -> tuple[float, int | None]:
        """Lower and compile; return the seconds, and XLA's temporary memory in bytes.

        The memory is None if the device's compiler does not report it.
        """
        started = time.perf_counter()
        compiled = self._jitted.lower(self._carried, self._inputs, mask).compile()
        seconds = time.perf_counter() - started
        stats = compiled.memory_analysis()
        return seconds, None if stats is None else stats.temp_size_in_bytes

    def run(self, mask: Bool[Array, " b"]) -> None:
        """Call the program once and wait for it."""
        self._carried = self._jitted(self._carried, self._inputs, mask)
        jax.block_until_ready(self._carried)

    def bytes_needed(self, params: PyTree, batch: PyTree) -> int | None:
        """Compile for these shapes and return the bytes a call needs, by XLA.

        Arguments, outputs and temporary memory; donated memory counts once.
        """
        rows = jax.tree.leaves(batch)[0].shape[0]
        carried, inputs = jax.eval_shape(self._start, params, batch)
        mask = jax.ShapeDtypeStruct((rows,), jnp.bool_)
        return bytes_needed(self._jitted.lower(carried, inputs, mask).compile())


NAMES = SGD, *STRATEGIES, AUTO_LOW
"""What `training` knows."""


def training(workload: Workload, name: str) -> Program:
    """Return plain SGD (``"sgd"``), or the accumulation of a clipping strategy."""
    return sgd(workload) if name == SGD else clipped(workload, name)


def known(strategies: Sequence[str]) -> list[str]:
    """Return each strategy once; refuse an unknown one, and none at all."""
    if not strategies:
        validate.refuse("strategies", (), "must name at least one strategy")
    for strategy in strategies:
        validate.one_of(NAMES, strategies=strategy)
    return list(dict.fromkeys(strategies))


def sgd(workload: Workload) -> Program:
    """One step of plain SGD: gradient of the mean loss, and the update."""

    def start(params, batch):
        copied = jax.tree.map(jnp.array, params)
        return (copied, workload.optimizer.init(params)), batch

    def function(carried, batch, mask):
        params, optimizer_state = carried
        gradient = jax.grad(_mean_loss)(params, workload, batch, mask)
        updates, optimizer_state = workload.optimizer.update(
            gradient, optimizer_state, params
        )
        return optax.apply_updates(params, updates), optimizer_state

    return Program(SGD, start, function)


def clipped(workload: Workload, strategy: str) -> Program:
    """One physical batch of private training: clipped gradients, added up."""
    step = workload.step(strategy)

    def start(params, batch):
        first = jax.tree.leaves(batch)[0]
        rows = first.shape[0]
        if not isinstance(first, Tracer):
            step.grad_fn.tune(params, batch, seconds=math.inf)
        indices = jnp.arange(rows, dtype=jnp.int32)
        return step.zero(), (params, batch, indices, step.augmentation_key(0))

    def function(accumulator, inputs, mask):
        params, batch, indices, key = inputs
        rows = PhysicalBatch(batch, mask, indices)
        return step.accumulate(params, accumulator, rows, key)

    return Program(strategy, start, function)


def update(workload: Workload) -> Program:
    """The end of a private step: noise, optimizer and parameter average."""
    step = workload.step(next(iter(STRATEGIES)))

    def start(params, batch):
        return step.start(params), (step.zero(), step.draw(0))

    def function(state, inputs, mask):
        accumulator, drawn = inputs
        return step.apply(state, accumulator, drawn, jnp.int32(0))[0]

    return Program("update", start, function)


def forward(workload: Workload) -> Program:
    """The losses of a physical batch, and no gradient."""

    def start(params, batch):
        return jnp.float32(0), (params, batch)

    def function(carried, inputs, mask):
        params, batch = inputs
        return carried + _mean_loss(params, workload, batch, mask)

    return Program("forward", start, function)


def gradient(workload: Workload) -> Program:
    """The gradient of the mean loss: forward and backward pass."""

    def start(params, batch):
        return jax.tree.map(jnp.zeros_like, params), (params, batch)

    def function(carried, inputs, mask):
        params, batch = inputs
        return jax.grad(_mean_loss)(params, workload, batch, mask)

    return Program("gradient", start, function)


def _mean_loss(
    params: PyTree, workload: Workload, batch: PyTree, mask: Bool[Array, " b"]
) -> Array:
    losses = jax.vmap(workload.loss, (None, 0))(params, batch)
    count = jnp.maximum(jnp.sum(mask, dtype=losses.dtype), 1)
    return jnp.sum(jnp.where(mask, losses, 0)) / count


def masks(rows: int, examples: int) -> tuple[list[Array], list[Array]]:
    """Return masks of all sizes to warm up with, and masks of `examples` to time.

    The latter have their examples in other rows from one to the next.
    """
    row = np.arange(rows)
    warm_up = [row >= 0, row < 0, row % 2 == 0]
    timed = [(row + shift) % rows < examples for shift in range(min(rows, 3))]
    return [*map(jnp.asarray, warm_up)], [*map(jnp.asarray, timed)]
