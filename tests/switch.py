"""How tests are run: quickly, or each as users run it (`make test-full`)."""

import functools
import os
import threading
from importlib.metadata import version
from typing import Any

import jaxtyping
from jaxtyping import install_import_hook, jaxtyped


ON_CPU = os.environ.get("JAX_PLATFORMS", "cpu").startswith("cpu")
"""Elsewhere convolutions round in ways that are not known: fewer methods are exact."""

FULL = os.environ.get("TANAGER_TESTS") == "full"
"""Whether to run every case, compile as users compile, and measure how to clip."""

# What runs once is compiled in a third of the time without optimising, which changes
# last digits only.
_QUICK = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    # Later versions do not know it, and stop.
    *["--xla_cpu_use_fusion_emitters=false"] * version("jaxlib").startswith("0.10."),
]
XLA_FLAGS = " ".join(
    [
        "--xla_force_host_platform_device_count=2",
        "--xla_gpu_deterministic_ops=true",  # a run that died goes on bit-identically
        *([] if FULL else _QUICK),
    ]
)


_SHAPED = [
    "tanager.models",
    *(f"tanager.data.{it}" for it in ("augment", "colour", "crops")),
    *(f"tanager.clipping.{it}" for it in ("book_keeping", "per_example", "transform")),
    *(f"tanager.clipping.analysis.{it}" for it in ("batches", "rounding")),
    *["tanager.clipping.analysis.standardise", "tanager.clipping.rules"],
]
"""The modules whose annotations hold shapes."""


def check_shapes() -> None:
    """Check the types and shapes in annotations of what is imported from now on."""
    jaxtyping.jaxtyped = _checked_when_called  # pyrefly: ignore[bad-assignment]
    install_import_hook(
        _SHAPED, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
    )


def _checked_when_called(*, typechecker: Any) -> Any:
    """Make the checks of a function at its first checked call.

    They take a millisecond to make. Most functions are never called with checks, and
    those within others are new in each call of these.
    """

    def decorate(function: Any) -> Any:
        if isinstance(function, type):
            return jaxtyped(function, typechecker=typechecker)
        checked = None

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal checked
            if jaxtyping.config.jaxtyping_disable:
                return function(*arguments, **named)
            if checked is None:
                checked = jaxtyped(function, typechecker=typechecker)
            return checked(*arguments, **named)

        return call

    return decorate


@functools.cache
def _context(thread: int, make: Any) -> Any:
    del thread
    return make()


def share_contexts() -> None:
    """Lower all programs of a thread in one of MLIR's contexts.

    To make one for each, as JAX does, takes a tenth of the time of a test.
    """
    from jax._src.interpreters import mlir

    make = mlir.make_ir_context
    mlir.make_ir_context = lambda: _context(threading.get_ident(), make)


def forget_contexts() -> None:
    """Let go of the contexts, with what programs left in them."""
    _context.cache_clear()


def take_own_cores() -> None:
    """Give each process of pytest-xdist, and what it starts, cores of its own.

    Threads of one then do not wait for those of another.
    """
    name = os.environ.get("PYTEST_XDIST_WORKER", "")
    if name and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        if workers <= len(cores):
            os.sched_setaffinity(0, cores[int(name.removeprefix("gw")) :: workers])
