"""Say how fast frozen networks make features here, and in PyTorch, in turns.

    python benchmarks/peers/extraction.py [--work efficientnet-lite0:128 …]
        [--turns 9] [--images 256] [--one-core] [--python .venv-opacus/bin/python]

This side is `tanager.training.features.cache_features` as recipes call it: from uint8
images of 32 × 32, resized, at its own physical batch size, written to disk. PyTorch's
side is the network of timm alone, channels last, on images that are ready in memory, at
the best of several batch sizes, as it is or traced and frozen (which folds batch norm).
Both use all cores, in float32, and take turns, so that a slow minute of the machine
slows both. The first turn, in which this side compiles and PyTorch's way is chosen, is
not counted. Weights are random: they do not change the time.

Two threads that wait for each other lose most on a machine with other work. There,
--one-core gives both one core, and counts processor seconds.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import jax
import numpy as np
from turns import Other, add_python

from tanager import models
from tanager._heap import keep_freed_memory
from tanager.data.preprocessing import Preprocessing
from tanager.training.features import cache_features


WORK = (
    "efficientnet-lite0:128",
    "efficientnet-lite2:160",
    "vit-tiny-16:224",
    "vit-small-16:224",
    "bit-50x1:224",
)
TIMM = {
    "efficientnet-lite0": "tf_efficientnet_lite0",
    "efficientnet-lite2": "tf_efficientnet_lite2",
    "vit-tiny-16": "vit_tiny_patch16_224",
    "vit-small-16": "vit_small_patch16_224",
    "bit-50x1": "resnetv2_50x1_bit",
}
WAYS = tuple((rows, frozen) for rows in (8, 32, 128) for frozen in (False, True))
"""PyTorch's batch sizes, and whether the network is frozen."""


def measure(work: str, options: argparse.Namespace) -> str:
    """Return a line of the table for MODEL:SIDE."""
    name, _, text = work.partition(":")
    side, count = int(text), options.images
    model = models.create(
        name, classes=10, image_shape=(side, side, 3), key=jax.random.key(0)
    )
    pixels = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=(side, side))
    every = count * (options.turns + 1)
    images = np.random.default_rng(0).integers(0, 256, (every, 32, 32, 3), np.uint8)
    torch = Other(options.python, "features", model=TIMM[name], side=side)
    clock = time.process_time if options.one_core else time.perf_counter
    which = "processor_seconds" if options.one_core else "seconds"

    def rate(way: tuple[int, bool]) -> float:
        rows, frozen = way
        return count / torch.turn(images=count, rows=rows, frozen=frozen)[which]

    ours: list[float] = []
    theirs: list[float] = []
    best, done_before, began = WAYS[0], 0, clock()

    def take_turns(done: int, examples: int) -> None:
        nonlocal best, done_before, began
        del examples
        if done - done_before < count:
            return
        own = (done - done_before) / (clock() - began)
        if not done_before:
            best = max(WAYS, key=rate)
        else:
            ours.append(own)
            theirs.append(rate(best))
        done_before, began = done, clock()

    with tempfile.TemporaryDirectory() as folder:
        cache_features(
            lambda model, example: model.features(pixels(example["image"])),
            model,
            {"image": images, "label": np.zeros(every, np.int32)},
            Path(folder) / "features",
            progress=take_turns,
        )
    torch.end()
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    how = f"{'frozen, ' * best[1]}batch {best[0]}"
    return (
        f"| `{name}`, {side} pixels | {median(ours):.1f} | {median(theirs):.1f} "
        f"({how}) | {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", nargs="+", default=list(WORK), metavar="MODEL:SIDE")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--images", type=int, default=256, help="of a turn")
    parser.add_argument("--one-core", action="store_true")
    add_python(parser)
    options = parser.parse_args()
    if options.one_core:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    keep_freed_memory()
    print("| images/s | tanager | PyTorch | ratio |\n|---|---|---|---|", flush=True)
    for work in options.work:
        print(measure(work, options), flush=True)


if __name__ == "__main__":
    main()
