"""Measures models, each in a process of its own.

`auto` and `by hand` are times of a step relative to SGD, medians of turns taken one
after the other in one process, each the second of two calls; `by hand` is `vmap(grad)`
with clipping. `compile` are seconds to compile the step; `tuning` are those that `auto`
measures, with nothing remembered; `fast` is the share of taps with a rule of their own.
`error` is the largest difference from a sum of gradients taken one example at a time,
relative to the largest entry of each parameter's, or a thousandth of that of all.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from strangers_of.drawn import Stranger

import tanager
from tanager import _processor
from tanager.clipping.analysis.batches import example_of
from tanager.clipping.analysis.reading import read_loss
from tanager.clipping.planning.choices import norm_groups
from tanager.clipping.rules.groups import Joint


LIMIT = 900
"""Seconds after which a model is given up."""

Makers = Mapping[str, Callable[[], Stranger]]


def norm_of(gradient: Any) -> jax.Array:
    """Return the 2-norm of a pytree."""
    return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))


def by_hand(loss: Callable) -> Callable:
    """Return the sum of clipped gradients by `vmap(grad)`."""

    def clipped(params: Any, batch: Any) -> Any:
        found = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        factors = jnp.minimum(1, 1 / jax.vmap(norm_of)(found))
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), found)

    return clipped


def one_by_one(loss: Callable, params: Any, batch: Any) -> list[np.ndarray]:
    """Return the leaves of the sum of clipped gradients, by one example at a time."""
    gradient = jax.jit(jax.grad(loss))
    total: list[np.ndarray] = []
    for row in range(len(jax.tree.leaves(batch)[0])):
        found = gradient(params, jax.tree.map(lambda leaf, row=row: leaf[row], batch))
        leaves = [np.asarray(g, np.float64) for g in jax.tree.leaves(found)]
        norm = np.sqrt(sum(np.sum(g**2) for g in leaves))
        scaled = [g * min(1, 1 / norm) if norm else g for g in leaves]
        total = scaled if not row else [a + b for a, b in zip(total, scaled)]  # noqa: B905
    return total


def largest_error(found: Any, right: list[np.ndarray]) -> float:
    """Return the largest difference, relative to the largest entry of each leaf.

    Some gradients are zero but for rounding, as of the biases of attention's keys.
    """
    least = max(1e-3 * max(np.max(np.abs(b)) for b in right), 1e-12)
    pairs = zip(jax.tree.leaves(found), right, strict=True)
    return max(
        float(np.max(np.abs(np.asarray(a) - b)) / max(np.max(np.abs(b)), least))
        for a, b in pairs
    )


def measure(loss: Callable, params: Any, batch: Any, seconds: float) -> dict[str, Any]:
    """Measure one stranger in this process; return its row."""
    clipped = tanager.clipped_grad(loss, clip_norm=1.0)
    started = time.perf_counter()
    clipped.tune(params, batch)
    row: dict[str, Any] = {"tuning": time.perf_counter() - started}

    def mean(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jax.vmap(loss, (None, 0))(params, batch))

    sums = {
        "sgd": jax.grad(mean),
        "auto": lambda params, batch: clipped(params, batch).sum,
        "by hand": by_hand(loss),
    }
    ready, taken = {}, {name: [] for name in sums}
    options = tanager.compiler_options()
    for name, gradient in sums.items():

        def step(params: Any, batch: Any, gradient: Callable = gradient) -> Any:
            return jax.tree.map(
                lambda p, g: p - 0.01 * g, params, gradient(params, batch)
            )

        started = time.perf_counter()
        lowered = jax.jit(step, compiler_options=options).lower(params, batch)
        ready[name] = lowered.compile()
        row[f"compile {name}"] = time.perf_counter() - started
        jax.block_until_ready(ready[name](params, batch))
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(taken["auto"]) < 5:
        for name, function in ready.items():
            # What ran before has taken the caches, and given back its memory.
            jax.block_until_ready(function(params, batch))
            started = time.perf_counter()
            jax.block_until_ready(function(params, batch))
            taken[name].append(time.perf_counter() - started)
    median = {name: statistics.median(times) for name, times in taken.items()}
    groups = norm_groups(read_loss(loss, params, example_of(batch)))
    fast = [not isinstance(g, Joint) and g.rule.name != "general" for g in groups]
    total = jax.jit(sums["auto"], compiler_options=options)(params, batch)
    return row | {
        "sgd ms": 1e3 * median["sgd"],
        "auto": median["auto"] / median["sgd"],
        "by hand": median["by hand"] / median["sgd"],
        "fast": statistics.mean(fast) if fast else 0.0,
        "error": largest_error(total, one_by_one(loss, params, batch)),
        "explain": str(clipped.explain(params, batch)),
    }


def line(row: Mapping[str, Any]) -> str:
    """Return a line of the table."""
    if "failed" in row:
        return f"{row['model']:18} {row['failed']}"
    return (
        f"{row['model']:18} {row['sgd ms']:8.2f} {row['auto']:6.2f} "
        f"{row['by hand']:8.2f} {row['compile auto']:8.1f} "
        f"{row['compile by hand']:8.1f} {row['tuning']:7.1f} {row['fast']:6.0%} "
        f"{row['error']:8.0e}"
    )


TITLE = (
    f"{'model':18}   sgd ms   auto  by hand  compile  by hand  tuning   fast    error"
)


def in_a_process(script: str, name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Measure one stranger in a process of its own; return its row."""
    command = [sys.executable, script, name, "--seconds", str(asked.seconds), "--here"]
    command += ["--keep-memory"] * asked.keep_memory
    row = {"model": name, "keep_memory": asked.keep_memory}
    with tempfile.TemporaryDirectory() as folder:
        surroundings = os.environ | {"TANAGER_CACHE_DIR": folder}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=surroundings, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            return row | {"failed": f"took more than {LIMIT} s"}
    if done.returncode:
        said = [text for text in done.stderr.splitlines() if text.strip()]
        errors = [text for text in said if "Error: " in text]
        why = (errors or said or [f"exit status {done.returncode}"])[-1]
        return row | {"failed": why[:200]}
    return row | json.loads(done.stdout.splitlines()[-1])


def known(models: Makers, libraries: Mapping[str, str]) -> list[str]:
    """Return the names of all models; print which libraries are not installed."""
    names = list(models)
    for library in dict.fromkeys(libraries.values()):
        try:
            names += importlib.import_module(f"strangers_of.{library}").MODELS
        except ModuleNotFoundError as error:
            print(f"skipped: {library} ({error.name} is not installed)")
    return names


def surroundings(keep_memory: bool) -> str:
    """Return what the figures depend on."""
    libraries = ("jax", "equinox", "flax", "dm-haiku", "keras", "penzai", "diffrax")
    versions = []
    for library in libraries:
        try:
            versions.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    kept = "kept (tanager.keep_memory)" if keep_memory else "as Python leaves it"
    return (
        f"{_processor.name()}, {_processor.cores()} cores, load "
        f"{os.getloadavg()[0]:.1f}; Python {platform.python_version()}, "
        f"{', '.join(versions)}; memory {kept}"
    )


def main(
    script: str, about: str | None, models: Makers, libraries: Mapping[str, str]
) -> None:
    """Print the table, or measure one model here.

    Args:
        script: to run for a process of one model.
        about: help.
        models: makers by name.
        libraries: modules with more ``MODELS``, by the first word of a model's name.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; default all")
    parser.add_argument("--seconds", type=float, default=2.0, help="%(default)s a row")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="resumed if it exists"
    )
    parser.add_argument(
        "--keep-memory", action="store_true", help="call tanager.keep_memory() first"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        if asked.keep_memory:
            tanager.keep_memory()
        (name,) = asked.names
        library = libraries.get(name.split("_")[0])
        if name not in models and library:
            models = importlib.import_module(f"strangers_of.{library}").MODELS
        print(json.dumps(measure(*models[name](), asked.seconds)))
        return
    names = known(models, libraries)
    unknown = sorted({*asked.names} - {*names})
    if unknown:
        parser.error(f"no model {', '.join(unknown)}: choose from {', '.join(names)}")
    rows = []
    if asked.json and asked.json.exists():
        rows = [json.loads(text) for text in asked.json.read_text().splitlines()]
    rows = [row for row in rows if row["keep_memory"] == asked.keep_memory]
    done = {row["model"]: row for row in rows}
    print(surroundings(asked.keep_memory), TITLE, sep="\n", flush=True)
    ratios = []
    for name in asked.names or names:
        row = done.get(name) or in_a_process(script, name, asked)
        if asked.json and name not in done:
            with asked.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(line(row), flush=True)
        ratios += [row["auto"]] if "auto" in row else []
    if ratios:
        print(
            f"{len(ratios)} models; × SGD: median {statistics.median(ratios):.2f}, "
            f"worst {max(ratios):.2f}, {sum(r <= 2 for r in ratios)} within 2"
        )
