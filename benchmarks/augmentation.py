"""Say what augmentation takes next to the training step that it is part of.

    python benchmarks/augmentation.py [--model wrn-16-4] [--side 32] [--stored 32]

Every kind of augmentation makes K views of each example of one physical batch, of
uint8 images of `--stored` pixels each way; the step clips and accumulates the gradients
of as many views (forward, backward, clipping; without the noisy update, which comes
once for each logical batch). The programs take turns, so that a slow minute of the
machine slows all of them. Times are medians, with interquartile ranges, in
milliseconds for one view; the last column is the share of the step's time.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tanager.bench import programs
from tanager.bench.machine import machine, versions
from tanager.bench.workload import Workload
from tanager.data.augment import KINDS
from tanager.sampling import PhysicalBatch
from tanager.training.step import Step


_WARM_UP = 2


def _views(step: Step, kind: str, side: int, stored: int, batch: int) -> Callable:
    """Return a compiled call that makes all views of a physical batch."""
    random = np.random.default_rng(0)
    shape = (batch, stored, stored, 3)
    images = {"image": jnp.asarray(random.integers(0, 256, shape, np.uint8))}
    made = KINDS[kind](crop_size=side)

    unit = dataclasses.replace(
        step.unit, augment=lambda key, one: {"image": made(key, one["image"])}
    )

    def views(batch, key):
        return unit.views(batch, key)

    rows = PhysicalBatch(
        images, jnp.ones(batch, bool), jnp.arange(batch, dtype=jnp.int32)
    )
    arguments = rows, step.augmentation_key(0)
    compiled = jax.jit(views).lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))


def measure(
    workload: Workload, strategy: str, stored: int, batch: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of every round, of the step and of each augmentation."""
    side = workload.image_shape[0]
    step = workload.step(strategy)
    everyone = jnp.ones(batch, bool)
    with workload.computing():
        training = programs.training(workload, strategy)
        training.prepare(workload.params(), workload.batch(batch))
        calls = {"step": lambda: training.run(everyone)}
        for kind in KINDS:
            if kind != "none":
                calls[kind] = _views(step, kind, side, stored, batch)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(-_WARM_UP, rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if turn >= 0:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Read the command line and print the table, in Markdown."""
    parser = argparse.ArgumentParser(
        description="Say what augmentation takes next to the training step."
    )
    parser.add_argument("--model", default="wrn-16-4", help="a name of the model zoo")
    parser.add_argument("--side", type=int, default=32, help="pixels of a view")
    parser.add_argument("--stored", type=int, help="of the image; as a view's if none")
    parser.add_argument("--batch", type=int, default=4, help="examples")
    parser.add_argument("--views", type=int, default=8, help="K, views of each")
    parser.add_argument("--strategy", default="auto", help="of clipping")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds")
    options = parser.parse_args()
    side, stored = options.side, options.stored or options.side
    workload = Workload(options.model, (side, side, 3), views=options.views)
    seconds = measure(workload, options.strategy, stored, options.batch, options.rounds)
    here, software = machine(), versions()
    print(
        f"{options.model}, {options.batch} examples × {options.views} views of "
        f"{side} × {side} from {stored} × {stored}; {here['device']}, {here['cpu']}, "
        f"{here['cores']} cores; Python {software['python']}, JAX {software['jax']}\n"
    )
    print("| | ms per view ± IQR | views/s | % of the step |\n|---|---|---|---|")
    whole = statistics.median(seconds["step"])
    count = options.batch * options.views
    for name, times in seconds.items():
        median = statistics.median(times)
        lower, upper = np.percentile(times, [25, 75])
        spread = 1e3 * (upper - lower) / count
        print(
            f"| {name} | {1e3 * median / count:.4g} ± {spread:.2g} "
            f"| {count / median:.4g} | {100 * median / whole:.2f} |"
        )


if __name__ == "__main__":
    main()
