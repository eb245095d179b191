"""How XLA is asked to compile what tanager runs.

On a CPU, XLA of JAX 0.10 and 0.11 hands products, reductions and convolutions to
YNNPACK. Its reductions are several times as fast as XLA's own, its convolutions up to
half as fast (docs/performance.md has both), so convolutions and products are taken from
it and reductions left.
"""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax


_HANDED_OVER = "xla_cpu_experimental_ynn_fusion_type"


@functools.cache
def compiler_options() -> dict[str, str]:
    """Return options that make XLA's programs fast on this device, for `jax.jit`.

        step = jax.jit(step, compiler_options=tanager.compiler_options())

    All that tanager compiles itself has them; a step of one's own that calls
    `clipped_grad` wants them too. They change how something is computed, and with it
    the last digits, never what. On accelerators there are none, nor where ``XLA_FLAGS``
    says something of the same, or the XLA at hand does not know them.

    Returns:
        Options by name; empty where there is nothing to ask for.
    """
    if jax.default_backend() != "cpu" or _HANDED_OVER in os.environ.get(
        "XLA_FLAGS", ""
    ):
        return {}
    options = {_HANDED_OVER: "LIBRARY_FUSION_TYPE_REDUCE"}
    return options if _known(options) else {}


def jit(function: Callable, **more: Any) -> Any:
    """Return `jax.jit` of a function, with `compiler_options`."""
    return jax.jit(function, compiler_options=compiler_options(), **more)


def filter_jit(function: Callable) -> Callable:
    """Return `equinox.filter_jit` of a function, with `compiler_options`."""
    untyped: Any = eqx.filter_jit
    return untyped(function, compiler_options=compiler_options())


def _known(options: dict[str, str]) -> bool:
    probe = jax.jit(lambda: 0, compiler_options=options)
    try:
        probe.lower().compile()
    except Exception as error:
        warnings.warn(f"XLA takes no {_HANDED_OVER}: {error}", stacklevel=3)
        return False
    return True
