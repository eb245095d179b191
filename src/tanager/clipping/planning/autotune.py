"""Measured times of methods on this device, remembered between runs.

One JSON file per device, JAX and tanager version lies in ``$TANAGER_CACHE_DIR`` (by
default ``~/.cache/tanager``). It only ever decides how something is computed, never
what: a file that is missing, damaged or of another device is ignored and overwritten.
A timing that other programs disturbed counts until the next process measures it again.

Measuring a method takes a compilation, so few are measured: the methods for norms that
`planning.cost` expects to be nearly as fast as the fastest, each with one sum, of the
groups that take longest. All others count as it expects them, next to those.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tanager import _files as files
from tanager import _heap, _processor
from tanager._cache import cache_folder
from tanager._reading import MALFORMED
from tanager._version import __version__
from tanager.clipping.analysis.jaxprs import aval, is_float
from tanager.clipping.analysis.taps import float_results
from tanager.clipping.planning import cost
from tanager.clipping.rules.base import TapValues
from tanager.clipping.rules.factors import clip_factors
from tanager.clipping.rules.groups import RETAINED, Held, Method, NormGroup
from tanager.compiling import compiler_options, jit


WORTH_MEASURING = 2e-4
"""Groups expected to take fewer seconds than this are not measured."""

BUDGET = 20.0
"""Seconds that measuring may take where nobody says how long the run is."""

_HOPELESS = 3.0
_LEFT_OUT = 1.01  # times the fastest that was measured, at the least
_LEAST_SECONDS, _ENOUGH_SECONDS = 0.1, 0.5
_LEAST_RUNS, _FEWEST_RUNS = 5, 2
_LONG_SECONDS = 0.001
_FEW_ROWS = 16
_PART_SECONDS = 1.0  # to compile and time one part, until it is known
_DISTURBED = 0.25  # see `_processor.share_waited`
_FORMAT = 8


def _identity() -> dict[str, Any]:
    """What timings hold for."""
    device = jax.devices()[0]
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        "format": _FORMAT,
        "platform": device.platform,
        "device": device.device_kind,
        "cores": _processor.cores(),
        "memory kept": _heap.keeps_freed(),
        "processor": [_processor.name(), *_processor.instructions()],
        "compiler": compiler_options(),
        "flags": sorted(f for f in flags if not f.startswith("--xla_dump")),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "tanager": __version__,
    }


def measured_rows(group: NormGroup, rows: int) -> int:
    """Return how many examples a group is measured with: fewer where all would be long.

    The time of long work grows with the examples, whatever the method: 16 of them tell
    which is fastest for 64, in a quarter of the time, and compile sooner.
    """
    while rows > _FEW_ROWS and _least(group, rows) > _LONG_SECONDS:
        rows = -(-rows // 2)
    return rows


def _least(
    group: NormGroup,
    rows: int,
    estimate: Callable[[NormGroup, Method, int], cost.Cost] = cost.estimate,
) -> float:
    """Return the seconds that the fastest method takes, as estimated."""
    methods = cost.candidates(group)
    return min(estimate(group, method, rows).seconds for method in methods)


def _signature(group: NormGroup, rows: int) -> str:
    """Text that two groups share exactly when they cost the same."""
    parts: list[Any] = [type(group).__name__, group.unit.kind, rows]
    config: Any = jax.config
    parts.append(config.jax_default_matmul_precision)
    for use in group.uses:
        equation = group.program.taps[use.tap].equation
        parts += [equation.primitive.name, use.position, len(use.links)]
        parts += [(aval(atom).shape, str(aval(atom).dtype)) for atom in equation.invars]
        parts += sorted((key, str(value)) for key, value in equation.params.items())
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


class Timings:
    """Seconds by group and part of a method, read from and written to one file.

    Parts are ``norm:NAME`` (norms, gradients dropped), ``retained:NAME`` (norms and the
    sum from retained gradients) and ``total:NAME``.
    """

    def __init__(self):
        self._identity = _identity()
        name = hashlib.blake2b(
            json.dumps(self._identity, sort_keys=True).encode(), digest_size=8
        ).hexdigest()
        self.path = cache_folder() / f"clipping-{name}.json"
        self._seconds, self._disturbed = self._read()

    def as_json(self) -> dict[str, Any]:
        """Return all that is remembered, and what it holds for."""
        return {
            "identity": self._identity,
            "seconds": self._seconds,
            "disturbed": sorted(self._disturbed),
        }

    def adopt(self, others: dict[str, Any]) -> None:
        """Remember what another host measured, in place of one's own."""
        self._take(*self._fitting(others))
        self._save()

    def _take(self, seconds: dict[str, float], disturbed: set[str]) -> None:
        self._seconds |= seconds
        self._disturbed = (self._disturbed - {*seconds}) | disturbed

    def _fitting(self, held: Any) -> tuple[dict[str, float], set[str]]:
        if held["identity"] != self._identity:
            return {}, set()
        seconds = {
            str(key): float(value)
            for key, value in held["seconds"].items()
            if isinstance(value, float) and math.isfinite(value) and value > 0
        }
        return seconds, {*seconds} & {*held["disturbed"]}

    def _read(self) -> tuple[dict[str, float], set[str]]:
        try:
            return self._fitting(json.loads(self.path.read_text()))
        except (OSError, *MALFORMED):
            return {}, set()

    def _write(self) -> None:
        # What another process wrote first stands, so that choices do not waver.
        seconds, disturbed = self._read()
        worse = disturbed & {*self._seconds}
        kept = {key: seconds[key] for key in {*seconds} - worse}
        self._take(kept, disturbed - worse)
        self._save()

    def _save(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomically(self.path, files.json_text(self.as_json()).encode())
        except OSError:
            return  # Nothing but time is lost.

    def estimate(self, group: NormGroup, method: Method, rows: int) -> cost.Cost:
        """Return the measured cost; where nothing of the group is known, the expected.

        Methods that were left out when the group was measured are slower than the
        fastest of the others, by as much as is expected.
        """
        expected = cost.estimate(group, method, rows)
        measured = self._measured(group, rows)
        if method in measured:
            return expected._replace(seconds=measured[method])
        if not measured:
            return expected
        fastest = min(measured, key=lambda other: measured[other])
        times = expected.seconds / cost.estimate(group, fastest, rows).seconds
        seconds = measured[fastest] * max(times, _LEFT_OUT)
        return expected._replace(seconds=seconds)

    def known(self, group: NormGroup, method: Method, rows: int) -> float | None:
        """Return measured seconds, or None."""
        return self._measured(group, rows).get(method)

    def _measured(self, group: NormGroup, rows: int) -> dict[Method, float]:
        """Return the measured seconds of a group, by method."""
        few = measured_rows(group, rows)
        signature, known = _signature(group, few), {}
        for method in cost.candidates(group):
            parts = [self._seconds.get(f"{signature}:{p}") for p in _parts(method)]
            seconds = [each for each in parts if each is not None]
            if len(seconds) == len(parts):
                more = cost.clearing(group, method, rows) - (
                    cost.clearing(group, method, few) * rows / few
                )
                known[method] = sum(seconds) * rows / few + max(more, 0.0)
        return known

    def measure(
        self,
        groups: Sequence[NormGroup],
        rows: int,
        report: Callable[[str], None] | None = None,
        worth: float = math.inf,
        seconds: float = math.inf,
    ) -> bool:
        """Measure the groups that are not known yet; return whether there was any.

        Those that take longest come first. Measuring stops before its estimate exceeds
        `seconds`, or the time that clipping `worth` physical batches takes, and after a
        part that exceeds it. No part is measured a second time.
        """
        alike: dict[str, list[NormGroup]] = {}
        for group in groups:
            signature = _signature(group, measured_rows(group, rows))
            alike.setdefault(signature, []).append(group)
        waiting = [
            (signature, some[0], parts)
            for signature, some in sorted(
                alike.items(),
                key=lambda item: -len(item[1]) * _least(item[1][0], rows),
            )
            if (parts := self._unknown(signature, some[0], rows))
        ]
        started, done = time.perf_counter(), 0
        left = sum(len(parts) for _, _, parts in waiting)
        for signature, group, parts in waiting:
            taken = time.perf_counter() - started
            each = taken / done if done else _PART_SECONDS
            batch = sum(_least(group, rows, self.estimate) for group in groups)
            limit = min(seconds, worth * batch)
            if taken + each * len(parts) > limit:
                break
            bench = _Bench(group, measured_rows(group, rows))
            for part in parts:
                taken = time.perf_counter() - started
                if taken > limit:  # compilers of accelerators can take a minute for one
                    break
                if report is not None:
                    each = taken / done if done else _PART_SECONDS
                    report(
                        f"{left} timings, at most {each * left:.0f} s left "
                        f"({group.rule.describe()}: {part})"
                    )
                timed, disturbed = bench.seconds(part)
                own = {f"{signature}:{part}": timed}
                self._take(own, {*own} if disturbed else set())
                done, left = done + 1, left - 1
            self._write()
        return done > 0

    def _unknown(self, signature: str, group: NormGroup, rows: int) -> list[str]:
        """Return the parts that are worth measuring and were not, or were disturbed."""
        known = {*self._seconds} - self._disturbed
        parts = _worth_trying(group, measured_rows(group, rows))
        return [part for part in parts if f"{signature}:{part}" not in known]


def _parts(method: Method) -> tuple[str, ...]:
    if method.total == RETAINED:
        return (f"retained:{method.norm}",)
    return f"norm:{method.norm}", f"total:{method.total}"


def _worth_trying(group: NormGroup, rows: int) -> list[str]:
    """Return the parts of the methods that could be fastest, each once.

    None where one of them is expected to be.
    """
    expected = {
        method: cost.estimate(group, method, rows).seconds
        for method in cost.precise(group)
    }
    least = min(expected.values())
    if least < WORTH_MEASURING:
        return []
    fastest: dict[str, Method] = {}
    for method in sorted(expected, key=lambda method: expected[method]):
        fastest.setdefault(method.norm, method)
    tried = [m for m in fastest.values() if expected[m] <= _HOPELESS * least]
    if len(tried) == 1:
        return []
    return list(dict.fromkeys(part for method in tried for part in _parts(method)))


class _Bench:
    """One group with random x, dy and parameters, to be timed."""

    def __init__(self, group: NormGroup, rows: int):
        draw = np.random.default_rng(0)
        self._group, self._rows = group, rows
        # No gain is so near 0 that its gradient is found otherwise than usual.
        leaves = [1 + _random(draw, aval(v)) / 8 for v in group.program.parameters]
        self._constants = group.program.evaluate_prologue(leaves)
        self._seen = [self._random_seen(draw, use.tap) for use in group.uses]

    def _random_seen(self, draw: np.random.Generator, number: int) -> tuple:
        tap = self._group.program.taps[number]
        data = [tap.equation.invars[n] for n in tap.data]
        return tuple(
            [_random(draw, aval(v), self._rows) for v in each]
            for each in (data, tap.equation.outvars, float_results(tap))
        )

    def seconds(self, part: str) -> tuple[float, bool]:
        """Return the median seconds of one part of a method, and if it was disturbed.

        By other programs that used the same cores.
        """
        kind, name = part.split(":", 1)
        group, constants = self._group, self._constants

        def work(seen):
            at = [TapValues(data, y, dy, constants) for data, y, dy in seen]
            full = jnp.ones(self._rows, bool)
            if kind == "total":
                factors = clip_factors(jnp.ones(self._rows), full, 1.0)
                return group.total(name, at, Held(), factors)
            squares, held = group.squares(name, at, retain=kind == "retained")
            if held.gradients is None:
                return squares, held.gain and held.gain.chunks
            factors = clip_factors(jnp.sqrt(squares), full, 1.0)
            return squares, group.total(RETAINED, at, held, factors)

        # Compiled ahead of time and run on arrays that exist, this leaves an outer
        # trace alone.
        compiled = jit(work).lower(self._seen).compile()
        taken: list[float] = []
        before = _processor.times()
        while len(taken) <= _LEAST_RUNS or sum(taken) < _LEAST_SECONDS:
            if len(taken) > _FEWEST_RUNS and sum(taken) > _ENOUGH_SECONDS:
                break
            started = time.perf_counter()
            jax.block_until_ready(compiled(self._seen))
            taken.append(time.perf_counter() - started)
        disturbed = _processor.share_waited(before) > _DISTURBED
        return statistics.median(taken[1:]), disturbed


def _random(draw: np.random.Generator, like: Any, *leading: int) -> Array:
    shape = (*leading, *like.shape)
    if is_float(like):
        return jnp.asarray(draw.standard_normal(shape, np.float32), like.dtype)
    return jnp.zeros(shape, like.dtype)
