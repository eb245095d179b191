"""The options with which XLA compiles tanager's programs.

On a CPU, XLA of JAX 0.10 and 0.11 hands products, reductions and convolutions to
YNNPACK. Its reductions are several times as fast as XLA's own, its convolutions up to
half as fast (docs/performance.md has both), so convolutions and products are taken from
it and reductions left. `keep_memory` saves what the system takes for memory.

On a GPU, XLA turns a reduction and what is computed from it into one kernel, and then
tries how every operation nearby could be part of it. With the many small operations of
a standardised layer's norm that took longer than nine minutes; without, one.
"""

import dataclasses
import functools
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.stages import Compiled, Lowered
from jaxtyping import Array, PyTree

from tanager import _validate as validate
from tanager._heap import keep_freed_memory, run_in_place


_OPTIONS = {
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"},
    "gpu": {"xla_disable_hlo_passes": "triton-softmax-rewriter"},
}
"""Those of each kind of device, by name."""


def compiler_options() -> dict[str, str]:
    """Return options that make XLA's programs fast on this device, for `jax.jit`.

        step = jax.jit(step, compiler_options=tanager.compiler_options())

    tanager compiles its own programs with them; use them for your own step that calls
    `clipped_grad`. They change the speed and the last digits of a result.

    Returns:
        Options by name; none on a TPU, none that ``XLA_FLAGS`` sets, and none that this
        XLA does not know.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    options = _OPTIONS.get(jax.default_backend(), {})
    return {
        name: value
        for name, value in options.items()
        if name not in flags and _known(name, value)
    }


def keep_memory() -> bool:
    """Make this process keep the memory that XLA frees on a CPU, for the next step.

        import tanager

        tanager.keep_memory()  # before anything asks JAX for arrays or devices

    The `tanager` command does so by itself; importing tanager does not. Without it,
    each step maps and clears its large temporary arrays again. glibc gives no memory
    back then, so the process stays at its peak, and JAX runs a CPU's programs on the
    thread that calls them. With several devices of one CPU, JAX is left as it was.

    Returns:
        True if memory is kept; False if the C library is not glibc.

    Raises:
        RuntimeError: JAX has made its devices already, or this is not the main thread.
    """
    from jax._src.xla_bridge import backends_are_initialized

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "keep_memory() was called on a thread of its own, and glibc keeps large "
            "blocks for the main thread: call it there, and train there"
        )
    if backends_are_initialized():
        raise RuntimeError(
            "keep_memory() was called after JAX made its devices, which fixes how they "
            "run programs: call it right after `import tanager`"
        )
    kept = keep_freed_memory()
    run_in_place()
    return kept


class jit:
    """`jax.jit` with `compiler_options`, except inside a trace, which has its own."""

    def __init__(self, function: Callable, **more: Any):
        self._jitted = jax.jit(function, compiler_options=compiler_options(), **more)
        self._within = jax.jit(function, **more)

    def __call__(self, *arguments: Any) -> Any:
        """Compile for shapes like these at the first call, and run."""
        leaves = jax.tree.leaves(arguments)
        traced = any(isinstance(leaf, Tracer) for leaf in leaves)
        return (self._within if traced else self._jitted)(*arguments)

    def eval_shape(self, *arguments: Any) -> Any:
        """Return `jax.eval_shape` of them; the trace serves calls of these shapes."""
        return self._jitted.eval_shape(*arguments)

    def lower(self, *arguments: Any) -> Lowered:
        """Return `jax.jit(...).lower(...)`."""
        return self._jitted.lower(*arguments)


@functools.cache
def require_nans() -> None:
    """Refuse to clip where XLA computes as if all numbers were finite.

    Then an example whose gradient is not finite is neither clipped nor left out.

    Raises:
        ValueError: XLA's options say so.
    """

    def finite(rows: Array) -> Array:  # of what is computed: arguments are seen to be
        return jnp.isfinite(jnp.sum(jnp.square(rows), axis=1))

    given = np.array([[np.nan, 1.0], [np.inf, 1.0]], np.float32)
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        found = np.asarray(jit(finite)(given))
    if found.any():
        validate.refuse(
            "XLA_FLAGS",
            os.environ.get("XLA_FLAGS"),
            "makes XLA take what is not finite for a number, so that no clipping holds",
            "leave out its options of fast arithmetic",
        )


def bytes_needed(program: Compiled) -> int | None:
    """Return the bytes that a call needs, by XLA's analysis; None where it has none.

    Arguments, outputs and temporary memory; donated memory counts once.
    """
    stats = program.memory_analysis()
    if stats is None:
        return None
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )


def is_out_of_memory(error: Exception) -> bool:
    """Return whether this is how XLA (or Python) says that memory ran out."""
    text = str(error)
    signs = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
    return isinstance(error, MemoryError) or any(sign in text for sign in signs)


def filter_jit(function: Callable) -> Callable:
    """Return `jit` of a function whose arguments and results may hold other things.

    Leaves that are not arrays are constants of the program. `equinox.filter_jit` keeps
    each function and its programs until the process ends; this one frees both.
    """

    @functools.partial(jax.jit, compiler_options=compiler_options())
    def of_arrays(arrays: PyTree, others: _Static) -> tuple[PyTree, _Static]:
        return _split(function(*eqx.combine(arrays, others.tree())))

    def of_all(*arguments: Any) -> Any:
        arrays, others = of_arrays(*_split(arguments))
        return eqx.combine(arrays, others.tree())

    return of_all


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """The leaves of a pytree that are no arrays, as part of its structure."""

    leaves: tuple[Any, ...]
    kinds: tuple[type, ...]  # 1 and 1.0 are equal, and other constants
    structure: Any

    def tree(self) -> PyTree:
        return jax.tree.unflatten(self.structure, self.leaves)


def _split(tree: PyTree) -> tuple[PyTree, _Static]:
    arrays, others = eqx.partition(tree, eqx.is_array)
    leaves, structure = jax.tree.flatten(others)
    return arrays, _Static(tuple(leaves), tuple(map(type, leaves)), structure)


@functools.cache
def _known(name: str, value: str) -> bool:
    probe = jax.jit(lambda: 0, compiler_options={name: value})
    try:
        probe.lower().compile()
    except Exception as error:
        warnings.warn(f"XLA takes no {name}: {error}", stacklevel=4)
        return False
    return True
