"""How fast a folder of images is streamed, against the speed of decoding alone.

    python benchmarks/streaming.py --folder /tmp/images --images 20000 --workers 2

Makes a folder of JPEGs of 500 × 375 pixels where there is none, then measures in turns:

- decoding alone: as many processes as workers, each decoding its part of the images
  that follow, from this source, and nothing else;
- the loader of training: physical batches drawn as in training, sent to this process.

Then it trains a small model on the images, for the share of time that the device waits
for data and the memory of all processes, and lists ImageNet's number of empty files.
Prints one JSON object.
"""

import argparse
import datetime
import itertools
import json
import multiprocessing
import os
import pathlib
import resource
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import numpy as np


SIDE, CLASSES = 256, 10
IMAGENET = 1_281_167


def make_folder(folder: pathlib.Path, count: int) -> None:
    """Write JPEGs of smooth noise, a tenth of them to test on."""
    from PIL import Image

    draw = np.random.default_rng(0)
    written = 0
    for number in range(count + count // 10):
        half = "train" if number < count else "test"
        place = folder / half / f"class-{number % CLASSES}"
        file = place / f"{number:06}.jpg"
        if file.exists():
            continue
        place.mkdir(parents=True, exist_ok=True)
        small = draw.integers(0, 256, (24, 32, 3), np.uint8)
        picture = Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC)
        noise = draw.integers(-12, 13, (375, 500, 3))
        pixels = np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(file, quality=90)
        written += 1
    print(f"{written} images written to {folder}", file=sys.stderr)


def decode(source: Any, indices: np.ndarray, begin: Any, done: Any) -> None:
    """Decode images in batches, as a worker does, in a process of its own."""
    parts = np.array_split(indices, -(-len(indices) // 128))
    source.gather(parts[0])
    begin.wait()
    for part in parts:
        source.gather(part)
    done.wait()


def decoding_alone(source: Any, workers: int, images: int, seed: int) -> float:
    """Return images per second of `workers` processes that do nothing else."""
    context = multiprocessing.get_context("spawn")
    begin, done = context.Barrier(workers + 1), context.Barrier(workers + 1)
    order = np.random.default_rng(seed).permutation(len(source))[:images]
    parts = np.array_split(np.sort(order), workers)
    processes = [
        context.Process(target=decode, args=(source, part, begin, done))
        for part in parts
    ]
    for process in processes:
        process.start()
    begin.wait()
    started = time.perf_counter()
    done.wait()
    seconds = time.perf_counter() - started
    for process in processes:
        process.join()
    return images / seconds


def loading(source: Any, workers: int, images: int, seed: int, rows: int) -> float:
    """Return images per second that the loader hands to this process."""
    from tanager.data.loader import ChunkPlan, an_example, portions
    from tanager.privacy.mechanism import Mechanism
    from tanager.sampling import PoissonSampler
    from tanager.seed import Seed

    mechanism = Mechanism(min(1.0, 4 * rows / len(source)), 1.0, 1000)
    sampler = PoissonSampler(mechanism, len(source), Seed.from_int(seed))
    plan = ChunkPlan(source, an_example(source), sampler, rows, np.arange(rows), 0)
    stream = portions(plan, workers)
    # What was read while the workers started must be gone before time is taken.
    for _ in range(8 * workers):
        next(stream)
    started, found = time.perf_counter(), 0
    while found < images:
        found += int(next(stream).batch.mask.sum())
    seconds = time.perf_counter() - started
    stream.close()
    return found / seconds


def training(
    folder: pathlib.Path, workers: int, rows: int, model: str, steps: int
) -> dict[str, Any]:
    """Train a network for a few steps; return its wait fraction and memory."""
    from tanager import recipes
    from tanager.recipes import runner
    from tanager.recipes.recipe import Recipe

    with tempfile.TemporaryDirectory() as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = Recipe(
            **recipes.get("folder").recipe.to_json()
            | {
                "data": str(folder),
                "image_size": SIDE,
                "crop_size": 32,
                "model": model,
                "stream": True,
                "workers": workers,
                "batch_size": 4 * rows,
                "physical_batch_size": rows,
                "noise_multiplier": 1.0,
                "epsilon": None,
                "steps": steps,
                "evaluate_every": steps,
                "out": out,
            }
        )
        result = runner.run(runner.prepare("folder", recipe), progress=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {
        "model": model,
        "wait_fraction": result.summary["wait_fraction"],
        "examples_per_second": result.summary["examples_per_second"],
        "peak_mib": peak / 1024,
        "peak_mib_of_a_worker": children / 1024,
    }


def listing() -> dict[str, Any]:
    """List as many (empty) files as ImageNet has training images."""
    from tanager.data.folder import FolderSource, list_folder

    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        each = -(-IMAGENET // 1000)
        for number in range(1000):
            for half, count in (("train", each), ("test", 1)):
                place = root / half / f"n{number:08}"
                place.mkdir(parents=True)
                for image in range(count):
                    os.close(os.open(place / f"n{number:08}_{image}.JPEG", os.O_CREAT))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        train, _ = list_folder(root)
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "files": len(FolderSource(train, (SIDE, SIDE, 3))),
            "seconds": seconds,
            "held_mib": (len(train.names) + train.ends.nbytes + train.labels.nbytes)
            / 2**20,
            "peak_mib_more": (peak - before) / 1024,
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--physical-batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timed-images", type=int, default=6000)
    options = parser.parse_args()
    make_folder(options.folder, options.images)

    from tanager import data
    from tanager.bench import machine

    dataset = data.load("folder", options.folder, image_size=SIDE, stream=True)
    alone, loaded = [], []
    for seed in range(options.repeats):
        count, workers = options.timed_images, options.workers
        alone.append(decoding_alone(dataset.train, workers, count, seed))
        loaded.append(
            loading(dataset.train, workers, count, seed, options.physical_batch)
        )
        print(f"{alone[-1]:.0f} decoded, {loaded[-1]:.0f} loaded/s", file=sys.stderr)
    ratios = [two / one for one, two in zip(alone, loaded, strict=True)]
    record = {
        "listing": listing(),
        "decoded_per_second": alone,
        "loaded_per_second": loaded,
        "loaded_over_decoded": statistics.median(ratios),
        # One that computes faster than images can be decoded, and one that does not.
        "training": [
            training(options.folder, options.workers, rows, *model)
            for rows, model in (
                (options.physical_batch, ("small-cnn", 16)),
                (options.physical_batch // 4, ("wrn-16-4", 8)),
            )
        ],
        "images": len(dataset.train),
        "workers": options.workers,
        "physical_batch": options.physical_batch,
        "machine": machine.machine(),
        "versions": machine.versions(),
        "command": " ".join(itertools.chain(["python"], sys.argv)),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
