"""Compare the automatic settings of `tanager train folder` with hand-tuned ones.

    python benchmarks/automatic.py --mnist DIR --cifar10 DIR [--only NAME ...]

The data sets are digits, MNIST, CIFAR-10, and the first 1,000 and 5,000 training images
of the latter two in a random order. Each row is a way to train; each cell the mean ±
standard deviation of the accuracies on all test images, of runs with secret seeds.
`--held` leaves the test images out: 5,000 other training images take their place.
Prints each command before it is run, and in the end a table as Markdown. Killed at any
moment, the same command goes on. Features are computed once.
"""

import argparse
import re
import shlex
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from trained import heading, trained

from tanager import data


EPSILONS = (1, 4, 8)
SIZES: Mapping[str, tuple[int | None, ...]] = {
    "digits": (None,),
    "mnist": (1000, 5000, None),
    "cifar10": (1000, 5000, None),
}
HELD_OUT = {"digits": 300, "mnist": 5000, "cifar10": 5000}


class Way(NamedTuple):
    """One way to train a data set.

    Attributes:
        words: of `tanager train`, without data and ε.
        features: what is cached, by name; ways of one name share them.
        tuned: more words by ε, chosen by hand with `--held`.
    """

    words: str
    features: str = ""
    tuned: Mapping[int, str] = {}


LEAVES = "folder --model dead-leaves-linear"
MIRRORED = Way(f"{LEAVES} --mirror", "mirrored-leaves")
DP_SGD = "--solver dp-sgd --optimizer-options momentum 0.9"
SCATTERED_BY_HAND = (
    f"folder --model scattering-linear --image-size 32 --clip-norm 0.1 {DP_SGD}"
)
LITE2_BY_HAND = (
    "folder --model efficientnet-lite2 --weights efficientnet-lite2 --clip-norm 1 "
    f"{DP_SGD}"
)
AUTOMATIC = Way("folder", "automatic")
WAYS: Mapping[str, Mapping[str, Way]] = {
    "digits": {"automatic": AUTOMATIC, "by hand": Way("digits")},
    "mnist-1000": {
        "automatic": AUTOMATIC,
        "by hand": Way(
            SCATTERED_BY_HAND,
            "automatic",
            {
                1: "--steps 60 --learning-rate 1.39",
                4: "--steps 30 --learning-rate 11.1",
                8: "--steps 60 --learning-rate 5.56",
            },
        ),
    },
    "mnist-5000": {
        "automatic": AUTOMATIC,
        "by hand": Way(
            f"{SCATTERED_BY_HAND} --steps 60",
            "automatic",
            {
                1: "--learning-rate 3.47",
                4: "--learning-rate 27.8",
                8: "--learning-rate 27.8",
            },
        ),
    },
    "mnist": {"automatic": AUTOMATIC, "by hand": Way("mnist-scattering", "by-hand")},
    "cifar10-1000": {
        "automatic": AUTOMATIC,
        "by hand": Way(
            LITE2_BY_HAND,
            "automatic",
            {
                1: "--steps 30 --learning-rate 0.7",
                4: "--steps 30 --learning-rate 1.4",
                8: "--steps 30 --learning-rate 2.8",
            },
        ),
        "automatic, no public weights": Way(LEAVES, "leaves"),
        "by hand, no public weights": MIRRORED,
    },
    "cifar10-5000": {
        "automatic": AUTOMATIC,
        "by hand": Way(
            LITE2_BY_HAND,
            "automatic",
            {
                1: "--steps 30 --learning-rate 3.331",
                4: "--steps 60 --learning-rate 6.663",
                8: "--steps 150 --learning-rate 6.663",
            },
        ),
        "automatic, no public weights": Way(LEAVES, "leaves"),
        "by hand, no public weights": MIRRORED,
    },
    "cifar10": {
        "automatic": AUTOMATIC,
        "by hand": Way("cifar10-efficientnet-lite2", "by-hand"),
        "automatic, no public weights": Way(LEAVES, "leaves"),
        "by hand, no public weights": Way("cifar10-dead-leaves", "by-hand-leaves"),
    },
}


def cuts(name: str, path: Path | None, out: Path, held: bool) -> Iterator[str]:
    """Write a data set and its cuts as folders of arrays; yield their names."""
    whole = data.load(name, path)
    images, labels, *tests = (
        values for source in (whole.train, whole.test) for values in _arrays(source)
    )
    order = np.random.default_rng(0).permutation(len(labels))
    if held:
        order, rest = np.split(order, [-HELD_OUT[name]])
        tests = images[rest], labels[rest]
    for size in SIZES[name]:
        cut = name if size is None else f"{name}-{size}"
        folder = out / cut
        if not folder.exists():
            folder.mkdir(parents=True)
            kept = order[:size]
            np.savez(
                folder / "data.npz",
                train_images=images[kept],
                train_labels=labels[kept],
                test_images=tests[0],
                test_labels=tests[1],
            )
        yield cut


def _arrays(source: data.Source) -> tuple[np.ndarray, np.ndarray]:
    found = data.gather(source, np.arange(len(source)))
    return found["image"], found["label"].astype(np.int64)


def accuracies(
    cut: str, title: str, way: Way, path: Path | None, out: Path, seeds: int
) -> Iterator[str]:
    """Yield mean and standard deviation at each ε, in percent, of runs made here."""
    for epsilon in EPSILONS:
        found = []
        for seed in range(1, seeds + 1):
            name = f"{way.words} {way.tuned.get(epsilon, '')}".strip()
            run = (
                out / f"{cut}-{'-'.join(re.findall('[a-z]+', title))}-{epsilon}-{seed}"
            )
            words = [*shlex.split(name), "--epsilon", str(epsilon)]
            words += ["--account", "none", "--yes", "--quiet"]
            words += [] if path is None else ["--data", str(path)]
            if way.features:
                words += ["--features", str(out / f"features-{cut}-{way.features}")]
            result = trained(words, run)
            ema = result["test_accuracy_ema"] if "digits" in words else None
            found.append(100 * (ema or result["test_accuracy"]))
        spread = f" ± {statistics.stdev(found):.1f}" if seeds > 1 else ""
        yield f"{statistics.mean(found):.1f}{spread} %"


def main() -> None:
    """Train everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", type=Path, required=True)
    parser.add_argument("--cifar10", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/automatic"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args()
    places = {"digits": None, "mnist": options.mnist, "cifar10": options.cifar10}
    lines = heading(("images", "settings"), EPSILONS)
    for name, path in places.items():
        for cut in cuts(name, path, options.out / "data", options.held):
            for title, way in WAYS[cut].items() if cut in options.only else ():
                place = options.out / "data" / cut
                if not way.words.startswith("folder"):
                    place = path
                cells = accuracies(cut, title, way, place, options.out, options.seeds)
                lines.append(f"| {cut} | {title} | {' | '.join(cells)} |")
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
