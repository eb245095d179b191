"""The largest physical batch that fits a memory limit, strategy by strategy.

On a CPU XLA's memory analysis of a compiled program says what a call needs. On an
accelerator the batch is run: RESOURCE_EXHAUSTED means that it does not fit; an explicit
limit is compared with the analysis before. One physical batch is counted: parameters,
batch, sums of gradients and temporary memory, but neither the optimizer's state of
private training nor batches still being copied.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from tanager import _validate as validate
from tanager.bench import programs
from tanager.bench.timing import describe
from tanager.bench.workload import Workload
from tanager.compiling import is_out_of_memory


CEILING = 2**20
"""No larger physical batch is tried."""


def largest(fits: Callable[[int], bool], ceiling: int, start: int = 1) -> int:
    """Return the largest n of at most `ceiling` for which ``fits(n)``, or 0.

    Strides from `start` double until a number that fits and one that does not are
    known; then the interval is halved.
    """
    good, bad = 0, ceiling + 1
    asked, stride = min(start, ceiling), 1
    while bad - good > 1:
        if fits(asked):
            good = asked
        else:
            bad = asked
        if bad > ceiling:
            asked = min(good + stride, ceiling)
        elif good == 0:
            asked = max(bad - stride, 1)
        else:
            asked = (good + bad) // 2
        stride *= 2
    return good


def bench_memory(
    workload: Workload,
    strategies: Sequence[str],
    *,
    limit_bytes: int | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[list[dict[str, Any]], bool]:
    """Find the largest physical batch of each strategy; 0 if not one example fits.

    `limit_bytes` can be None on an accelerator, for all there is. A strategy that fails
    for another reason than memory is a row with an `error`. Return rows, and whether
    Ctrl-C came before the last.
    """
    names = programs.known(strategies)
    if limit_bytes is not None:
        validate.positive(limit_bytes=limit_bytes)
    fits = _trial(workload, limit_bytes)
    found: dict[str, int] = {}
    errors = dict.fromkeys(names, "stopped before it was found")
    stopped = False
    try:
        for name in names:

            def fits_aloud(rows: int, name: str = name) -> bool:
                report(f"{name}: trying {rows}")
                return fits(name, rows)

            report(f"{name}: looking where to begin")
            try:
                start = _predicted(workload, limit_bytes, name)
                found[name] = largest(fits_aloud, CEILING, start)
            except Exception as error:
                errors[name] = describe(error)
    except KeyboardInterrupt:
        stopped = True
    sgd = found.get(programs.SGD)
    rows = [
        {
            "strategy": name,
            "physical_batch": found.get(name),
            "ratio_to_sgd": found[name] / sgd if name in found and sgd else None,
            "at_ceiling": found.get(name) == CEILING,
            "error": None if name in found else errors[name],
        }
        for name in names
    ]
    return rows, stopped


def bytes_needed(workload: Workload, name: str, rows: int) -> int:
    """Return the bytes that one physical batch of `rows` needs, by XLA's analysis."""
    with workload.computing():
        program = programs.training(workload, name)
        count = program.bytes_needed(workload.param_shapes, workload.batch_shapes(rows))
    if count is None:
        raise RuntimeError("this device's compiler has no memory analysis")
    return count


def _predicted(workload: Workload, limit_bytes: int | None, name: str) -> int:
    """Return the batch that fits if every row takes as much as the first few.

    Compiling is what takes long here.
    """
    if limit_bytes is None:
        return 1
    few, more = 4, 12
    try:
        base, above = (bytes_needed(workload, name, rows) for rows in (few, more))
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return 1
    each = (above - base) / (more - few)
    return max(1, int(few + (limit_bytes - base) / each)) if each > 0 else 1


def _trial(workload: Workload, limit_bytes: int | None) -> Callable[[str, int], bool]:
    """Return whether a physical batch of this many rows fits, by strategy."""
    if jax.default_backend() == "cpu":
        if limit_bytes is None:
            rule = "must be given on a CPU"
            validate.refuse("--limit-gib", None, rule, "for example 8")
        return lambda name, rows: bytes_needed(workload, name, rows) <= limit_bytes

    def fits(name: str, rows: int) -> bool:
        try:
            if limit_bytes and bytes_needed(workload, name, rows) > limit_bytes:
                return False
            _run_once(workload, name, rows)
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            jax.clear_caches()
            gc.collect()
        return True

    return fits


def _run_once(workload: Workload, name: str, rows: int) -> None:
    params: PyTree = workload.params()
    with workload.computing():
        program = programs.training(workload, name)
        program.prepare(params, workload.batch(rows))
        everyone = programs.masks(rows, rows)[0][0]
        for _ in range(2):  # the second holds what the first returned, as in training
            program.run(everyone)
