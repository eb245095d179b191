"""Data sets by name: where the files are, what they must hold, how they are split."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tanager import _validate as validate
from tanager.data.benchmarks import BENCHMARKS, DIGITS, read_benchmark, wanted_files
from tanager.data.folder import list_folder, read_folder
from tanager.data.formats import Arrays, Progress, counter
from tanager.data.source import ArraySource, Source, subset


DATASETS = ("digits", *BENCHMARKS, "folder")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Labelled images for training and testing.

    An example is ``{"image": uint8[H, W, C], "label": int32[]}``.

    Attributes:
        name: one of `DATASETS`, or a name of your own.
        train: the private examples; how many there are is public.
        test: examples that training does not see. The guarantee is not about them.
        classes: the class names; label k is `classes[k]`.
        image_shape: (H, W, C).
        mean: per channel, on the 0..1 scale, for `augment.standardise`.
        std: likewise. Both are public constants, never computed from the private
            images: mean and standard deviation of the public benchmark as commonly
            published for CIFAR-10 (used for CIFAR-100 too) and MNIST, and 0.5 for
            everything else.

    Raises:
        ValueError: `mean` or `std` does not fit the channels, or `std` is not positive.
    """

    name: str
    train: Source
    test: Source
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self):
        channels = self.image_shape[-1]
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) != channels:
                validate.refuse(
                    name, numbers, f"must have {channels} numbers, one per channel"
                )
        for deviation in self.std:
            validate.positive(std=deviation)


def load(
    name: str,
    path: str | Path | None = None,
    *,
    classes: Sequence[str] | None = None,
    validation_examples: int = 0,
    train_examples: int | None = None,
    image_size: int | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Load a data set into memory.

    ========  =====================================================================
    digits    scikit-learn's 1797 digits of 8 × 8 pixels; needs no path. Their grey
              values v = 0..16 become round(255 v / 16), and round(16 x / 255) gives
              v back. Split 1437 / 360, stratified, always the same.
    cifar10   parquet as on the Hugging Face Hub (``train.parquet``, or
              ``train-00000-of-00001.parquet``), or ``cifar-10-batches-py``.
    cifar100  the same, or ``cifar-100-python``; the 100 fine labels.
    mnist     parquet, or the four IDX files, plain or ``.gz``.
    folder    one folder of png or jpg images per class: see `tanager.data.folder`.
    ========  =====================================================================

    Args:
        name: one of `DATASETS`.
        path: the folder with the files, or the folder above it. Which format they have
            is found out by looking.
        classes: keep the examples of these classes alone, label k being the k-th of
            them; None keeps all.
        validation_examples: hold this many examples out of the training examples, by a
            fixed public permutation, and use them as `test`; the real test examples are
            then not part of the result. 0 uses the real ones.
        train_examples: keep only this many of the training examples, the first of the
            same permutation; None keeps all.
        image_size: for ``folder`` only: resize all images to this many pixels each way.
        progress: called with the images decoded so far and their total, if decoding is
            needed.

    Raises:
        ValueError: an argument is wrong, files are missing, or a file does not hold
            what it should. The message names it.
    """
    validate.one_of(DATASETS, name=name)
    validate.whole(validation_examples=validation_examples, at_least=0)
    if image_size is not None:
        validate.whole(image_size=image_size, at_least=1)
        if name != "folder":
            validate.refuse(
                "image_size", image_size, f"does not apply to {name}", "leave it out"
            )
    if name == "digits":
        if path is not None:
            validate.refuse(
                "path",
                str(path),
                "does not apply to digits",
                "they come with scikit-learn: leave it out",
            )
        dataset = _digits()
    elif name == "folder":
        dataset = _folder(_existing(name, path), image_size, progress)
    else:
        dataset = _benchmark(name, _existing(name, path), progress)
    dataset = _with_classes(dataset, classes)
    dataset = _with_validation(dataset, validation_examples)
    return _with_fewer(dataset, train_examples)


def _existing(name: str, path: str | Path | None) -> Path:
    inside = "train/<class>/*.png, test/<class>/*.png; <class>/*.png (or .jpg)"
    if name in BENCHMARKS:
        inside = wanted_files(name)
    if path is None:
        validate.refuse("path", None, f"is needed for {name}", f"a folder of {inside}")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        validate.refuse("path", str(path), "is not a folder", f"looked for {inside}")
    return folder


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    # Every fifth of the examples in order of class, in random order within a class.
    test = np.sort(np.lexsort((_public_words(len(labels)), labels))[::5])
    train = np.setdiff1d(np.arange(len(labels)), test)
    labels = labels.astype(np.int32)
    return _dataset(
        "digits",
        (images[train], labels[train]),
        (images[test], labels[test]),
        DIGITS,
        (0.5,),
        (0.5,),
    )


def _folder(path: Path, image_size: int | None, progress: Progress | None) -> Dataset:
    listing = list_folder(path, image_size)
    report = counter(progress, len(listing.train) + len(listing.test))
    train, test = (read_folder(listing, split, report) for split in ("train", "test"))
    half = (0.5,) * listing.shape[-1]
    return _dataset("folder", train, test, listing.classes, half, half)


def _benchmark(name: str, path: Path, progress: Progress | None) -> Dataset:
    train, test = read_benchmark(name, path, progress)
    spec = BENCHMARKS[name]
    return _dataset(name, train, test, spec.classes, spec.mean, spec.std)


def _dataset(
    name: str,
    train: Arrays,
    test: Arrays,
    classes: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Dataset:
    for label in np.setdiff1d(np.arange(len(classes)), train[1]):
        validate.refuse(
            "class", classes[label], f"of {name} has no training example", "add some"
        )
    train_source, test_source = (
        ArraySource({"image": images, "label": labels})
        for images, labels in (train, test)
    )
    shape = train[0].shape[1:]
    return Dataset(name, train_source, test_source, classes, shape, mean, std)


def _with_classes(dataset: Dataset, classes: Sequence[str] | None) -> Dataset:
    if classes is None:
        return dataset
    names = tuple(classes)
    for name in names:
        validate.one_of(dataset.classes, classes=name)
    if len(set(names)) < max(2, len(names)):
        validate.refuse(
            "classes", names, "must be two or more, each of them once", "or left out"
        )
    numbers = np.full(len(dataset.classes), -1, np.int32)
    numbers[[dataset.classes.index(name) for name in names]] = np.arange(len(names))

    def chosen(source: Source) -> Source:
        assert isinstance(source, ArraySource)
        labels = numbers[source.tree["label"]]
        kept = labels >= 0
        return ArraySource({"image": source.tree["image"][kept], "label": labels[kept]})

    return dataclasses.replace(
        dataset, train=chosen(dataset.train), test=chosen(dataset.test), classes=names
    )


def _with_validation(dataset: Dataset, examples: int) -> Dataset:
    if not examples:
        return dataset
    available = len(dataset.train)
    if examples >= available:
        validate.refuse(
            "validation_examples",
            examples,
            f"must be fewer than the {available} training examples",
        )
    order = np.argsort(_public_words(available))
    held, kept = np.sort(order[:examples]), np.sort(order[examples:])
    return dataclasses.replace(
        dataset, train=subset(dataset.train, kept), test=subset(dataset.train, held)
    )


def _with_fewer(dataset: Dataset, examples: int | None) -> Dataset:
    if examples is None:
        return dataset
    validate.whole(train_examples=examples, at_least=1)
    available = len(dataset.train)
    if examples > available:
        validate.refuse(
            "train_examples",
            examples,
            f"must be at most the {available} training examples",
        )
    kept = np.sort(np.argsort(_public_words(available))[:examples])
    return dataclasses.replace(dataset, train=subset(dataset.train, kept))


def _public_words(count: int) -> np.ndarray:
    """The same random words for everyone, for ever: splits are public."""
    return np.random.Philox(key=0).random_raw(count)
