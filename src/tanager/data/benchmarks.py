"""The public benchmarks: what their files hold, and finding them in a folder."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tanager.data import columns, formats, parquet
from tanager.data.arrow import ArrowSource
from tanager.data.conversion import open_parquet
from tanager.data.formats import Arrays, Progress
from tanager.data.python_batch import read_python_batch
from tanager.data.shards import find_shards


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What the files of a public data set must hold, and how they are named.

    Attributes:
        classes: the class names, in the order of the labels.
        image_shape: (H, W, C).
        mean: per channel on the 0..1 scale, of the public training images.
        std: likewise.
        label_columns: names that the label column of a parquet file may have.
        batch_label: the key of the labels in a "python version" batch.
        train_batches: the files of the "python version", if there is one.
        test_batches: likewise.
        idx: whether the data set also comes as IDX files.
    """

    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    label_columns: tuple[str, ...] = ("label",)
    batch_label: str = ""
    train_batches: tuple[str, ...] = ()
    test_batches: tuple[str, ...] = ()
    idx: bool = False


_CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
_CIFAR_STD = (0.2470, 0.2435, 0.2616)
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy
bridge bus butterfly camel can castle caterpillar cattle chair chimpanzee clock
cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange
orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
snail snake spider squirrel streetcar sunflower sweet_pepper table tank
telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""
DIGITS = tuple("0123456789")

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Of ImageNet's training images, per channel on the 0..1 scale: public constants.

As commonly published, first with the models of torchvision:
https://docs.pytorch.org/vision/stable/models.html
"""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation, as `IMAGENET_MEAN`."""

BENCHMARKS = {
    "cifar10": Benchmark(
        classes=tuple(_CIFAR10.split()),
        image_shape=(32, 32, 3),
        mean=_CIFAR_MEAN,
        std=_CIFAR_STD,
        batch_label="labels",
        train_batches=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test_batches=("test_batch",),
    ),
    "cifar100": Benchmark(
        classes=tuple(_CIFAR100.split()),
        image_shape=(32, 32, 3),
        mean=_CIFAR_MEAN,
        std=_CIFAR_STD,
        label_columns=("fine_label", "label"),
        batch_label="fine_labels",
        train_batches=("train",),
        test_batches=("test",),
    ),
    "mnist": Benchmark(
        classes=DIGITS,
        image_shape=(28, 28, 1),
        mean=(0.1307,),
        std=(0.3081,),
        idx=True,
    ),
}

SPLITS = ("train", "test")

_IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def read_benchmark(
    name: str,
    path: Path,
    progress: Progress | None,
    splits: Sequence[str] = SPLITS,
) -> list[Arrays]:
    """Read splits of a benchmark, in whatever format they are there.

    Args:
        name: one of `BENCHMARKS`.
        path: the folder with the files, or the folder above it.
        progress: called with the images decoded so far and their total.
        splits: which, of `SPLITS`; files of another one are not looked for.

    Raises:
        ValueError: there are no such files (the message says which were looked for), or
            one of them does not hold what it should.
    """
    spec = BENCHMARKS[name]
    for folder in _folders(name, path):
        for read in (_from_parquet, _from_batches, _from_idx):
            arrays = read(spec, folder, splits, progress)
            if arrays is not None:
                return arrays
    return formats.refuse_file(
        path,
        f"has no files of {name}, nor has a folder in it",
        f"looked for {wanted_files(name)}",
    )


def stream_benchmark(
    name: str,
    path: Path,
    progress: Progress | None,
    splits: Sequence[str] = SPLITS,
) -> list[ArrowSource]:
    """Open the parquet files of a benchmark, to be decoded on access.

    Args:
        name: one of `BENCHMARKS`.
        path: the folder with the files, or the folder above it.
        progress: called with the images converted so far and their total.
        splits: which, of `SPLITS`; files of another one are not looked for.

    Raises:
        ValueError: there are no parquet files, or one does not hold what it should.
    """
    spec = BENCHMARKS[name]
    for folder in _folders(name, path):
        files = [find_shards(folder, split, "parquet") for split in splits]
        if all(files):
            return open_parquet(
                files,
                spec.image_shape,
                spec.label_columns,
                len(spec.classes),
                True,
                progress,
            )
    return formats.refuse_file(
        path,
        f"has no parquet files of {name}, nor has a folder in it",
        "only these can be streamed: get them, or leave out stream",
    )


def wanted_files(name: str) -> str:
    """Return in words which files `read_benchmark` looks for."""
    spec = BENCHMARKS[name]
    wanted = ["train.parquet and test.parquet (or train-*-of-*.parquet and test-*)"]
    if spec.train_batches:
        wanted.append(", ".join(spec.train_batches + spec.test_batches))
    if spec.idx:
        wanted.append(", ".join(itertools.chain(*_IDX_FILES.values())) + " (or .gz)")
    return "; ".join(wanted)


def _folders(name: str, path: Path) -> list[Path]:
    """The folder and those in it, the one with the name first."""
    below = [entry for entry in path.iterdir() if entry.is_dir()]
    return [path, *sorted(below, key=lambda entry: (name not in entry.name, entry))]


def _from_parquet(
    spec: Benchmark, folder: Path, splits: Sequence[str], progress: Progress | None
) -> list[Arrays] | None:
    files = [find_shards(folder, split, "parquet") for split in splits]
    if not all(files):
        return None
    total = sum(map(parquet.parquet_rows, itertools.chain(*files)))
    report = formats.counter(progress, total)

    def read(file: Path) -> Arrays:
        return parquet.read_parquet(
            file,
            columns.IMAGE_COLUMNS,
            spec.label_columns,
            spec.image_shape,
            len(spec.classes),
            report,
        )

    return [_joined([read(file) for file in split]) for split in files]


def _from_batches(
    spec: Benchmark, folder: Path, splits: Sequence[str], progress: Progress | None
) -> list[Arrays] | None:
    del progress
    batches = {"train": spec.train_batches, "test": spec.test_batches}
    names = [name for split in splits for name in batches[split]]
    missing = [name for name in names if not (folder / name).is_file()]
    if len(missing) == len(names):
        return None
    if missing:
        formats.refuse_file(folder / missing[0], "is missing", "get the file")

    def read(name: str) -> Arrays:
        return read_python_batch(
            folder / name, spec.batch_label, spec.image_shape, len(spec.classes)
        )

    return [_joined([read(name) for name in batches[split]]) for split in splits]


def _from_idx(
    spec: Benchmark, folder: Path, splits: Sequence[str], progress: Progress | None
) -> list[Arrays] | None:
    del progress
    names = [name for split in splits for name in _IDX_FILES[split]]
    endings = ("", ".gz")
    found = {
        name: folder / f"{name}{ending}"
        for name in names
        for ending in endings
        if (folder / f"{name}{ending}").is_file()
    }
    if not spec.idx or not found:
        return None
    for name in names:
        if name not in found:
            formats.refuse_file(folder / name, "is missing", "get the file, or its .gz")
    pairs = [_IDX_FILES[split] for split in splits]
    return [
        formats.read_idx(
            found[images], found[labels], spec.image_shape, len(spec.classes)
        )
        for images, labels in pairs
    ]


def _joined(parts: list[Arrays]) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)
