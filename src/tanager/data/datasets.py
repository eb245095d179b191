"""Data sets by name: where the files are, what they must hold, how they are split."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tanager import _validate as validate
from tanager.data.benchmarks import (
    BENCHMARKS,
    DIGITS,
    IMAGENET_MEAN,
    IMAGENET_STD,
)
from tanager.data.find import WANTED, Found, Wanted, find_files, find_images, streams
from tanager.data.folder import TESTS, FolderSource, common_shape, list_folder
from tanager.data.source import ArraySource, Source, subset
from tanager.data.streamed import Report, StreamedImages, into_memory


Progress = Callable[[int, int], None]
_HALF = (0.5,) * 3
_HELD_OUT = ("val", "validation", "test")  # What is named test often has no labels.
# Names of the test split, mean and std.
_PICTURES = {
    "folder": (TESTS, _HALF, _HALF),
    "imagenet": (_HELD_OUT, IMAGENET_MEAN, IMAGENET_STD),
    "imagenet-32": (_HELD_OUT, IMAGENET_MEAN, IMAGENET_STD),
    "places365": (_HELD_OUT, IMAGENET_MEAN, IMAGENET_STD),
}
DATASETS = ("digits", *BENCHMARKS, *_PICTURES)
"""The names that `load` takes."""
RESIZED = tuple(_PICTURES)
"""Data sets whose images are resized as they are read."""


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
            published for CIFAR-10 (used for CIFAR-100 too), MNIST and ImageNet (used
            for Places-365 too), and 0.5 for everything else.

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
    stream: bool | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Load a data set into memory, or open it and decode images as they are used.

    ===========  ==================================================================
    digits       scikit-learn's 1797 digits of 8 × 8 pixels; needs no path. Their grey
                 values v = 0..16 become round(255 v / 16), and round(16 x / 255) gives
                 v back. Split 1437 / 360, stratified, always the same
    cifar10      files in any of the formats of `tanager.data.find`, such as the
                 ``train.parquet`` of the Hugging Face Hub
    cifar100     the same; the 100 fine labels
    mnist        the same
    folder       one folder of png or jpg images per class: see `tanager.data.folder`;
                 or files of your own in any of those formats
    imagenet     ``train/<class>/*`` and ``val/<class>/*``, or any of those formats
    imagenet-32  the same, of 32 × 32 pixels
    places365    the same
    ===========  ==================================================================

    Pictures of any mode become RGB, see `tanager.data.decoding`. The images of a
    ``folder`` that goes into memory stay grey if all are.

    Args:
        name: one of `DATASETS`.
        path: the folder with the files, or the folder above it. The format is detected.
        classes: keep the examples of these classes alone, label k being the k-th of
            them; None keeps all.
        validation_examples: hold this many examples out of the training examples, by a
            fixed public permutation, and use them as `test`; no image of the real test
            examples is then decoded, and a benchmark's files with them need not be
            there. 0 uses the real ones.
        train_examples: keep only this many of the training examples, the first of the
            same permutation; None keeps all.
        image_size: resize all images to this many pixels each way: the shorter side is
            scaled, the middle is kept. For ``folder`` and those below it alone. Needed,
            except for images that are decoded already (npy), and for class folders of
            images of one size, which are then all opened first.
        stream: True reads and decodes images as they are needed, which class folders,
            Arrow and npy files allow. False decodes all of them now. None streams if
            they would take more than 4 GiB.
        progress: called with the number of images decoded so far and their total.

    Raises:
        ValueError: an argument is wrong, files are missing, or a file does not hold
            what it should. The message names it.
    """
    validate.one_of(DATASETS, name=name)
    validate.whole(validation_examples=validation_examples, at_least=0)
    if image_size is not None:
        validate.whole(image_size=image_size, at_least=1)
        if name not in _PICTURES:
            validate.refuse(
                "image_size", image_size, f"does not apply to {name}", "leave it out"
            )
    if name == "digits":
        for argument, value in (("path", path), ("stream", stream)):
            if value:
                validate.refuse(
                    argument,
                    str(value),
                    "does not apply to digits",
                    "they come with scikit-learn: leave it out",
                )
        dataset = _digits()
    else:
        where, tested = _existing(name, path), not validation_examples
        dataset = _found(name, where, image_size, stream, tested, progress)
    dataset = _with_classes(dataset, classes)
    dataset = _with_validation(dataset, validation_examples)
    return _with_fewer(dataset, train_examples)


def _existing(name: str, path: str | Path | None) -> Path:
    inside = WANTED
    if name == "folder":
        inside = "train/<class>/*.png, test/<class>/*.png; <class>/*.png (or .jpg)"
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
    # Every fifth of the examples, sorted by class, in random order in each class.
    test = np.sort(np.lexsort((_public_words(len(labels)), labels))[::5])
    train = np.setdiff1d(np.arange(len(labels)), test)
    labels = labels.astype(np.int32)
    return _dataset(
        "digits",
        ArraySource({"image": images[train], "label": labels[train]}),
        ArraySource({"image": images[test], "label": labels[test]}),
        DIGITS,
        (0.5,),
        (0.5,),
    )


def _found(
    name: str,
    path: Path,
    image_size: int | None,
    stream: bool | None,
    tested: bool,
    progress: Progress | None,
) -> Dataset:
    if spec := BENCHMARKS.get(name):
        mean, std = spec.mean, spec.std
        wanted = Wanted(
            ("test",),
            spec.image_shape,
            stream,
            tested,
            spec.classes,
            spec.label_columns,
            exact=True,
        )
    else:
        tests, mean, std = _PICTURES[name]
        shape = None if image_size is None else (image_size, image_size, 3)
        wanted = Wanted(tests, shape, stream, tested)
    if name == "folder":
        found = find_files(path, wanted) or _folder(path, wanted)
    else:
        found = find_images(name, path, wanted)
    channels = found.train.shape[-1]
    if len(mean) != channels:
        mean = std = (0.5,) * channels
    # Held-out examples take the place of a test split that is not read.
    images = [found.train, found.test] if tested else [found.train]
    total = sum(map(len, images))
    if not streams(stream, total, found.train.shape):
        report = _counter(progress, total)
        images = [into_memory(each, report) for each in images]
    return _dataset(name, images[0], images[-1], found.classes, mean, std)


def _folder(path: Path, wanted: Wanted) -> Found:
    train, test = list_folder(path)
    halves = (train, test) if wanted.tested else (train,)
    examples, shape = sum(map(len, halves)), wanted.shape
    if wanted.stream or (shape and streams(wanted.stream, examples, shape)):
        shape = wanted.needed_shape()
    else:
        shape = common_shape(halves, None if shape is None else shape[0])
    return Found(FolderSource(train, shape), FolderSource(test, shape), train.classes)


def _counter(progress: Progress | None, total: int) -> Report:
    """Return a function that adds up images done and reports them to `progress`."""
    done = 0

    def report(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    return report


def _dataset(
    name: str,
    train: ArraySource | StreamedImages,
    test: ArraySource | StreamedImages,
    classes: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Dataset:
    for label in np.setdiff1d(np.arange(len(classes)), _labels(train)):
        validate.refuse(
            "class", classes[label], f"of {name} has no training example", "add some"
        )
    if isinstance(train, ArraySource):
        shape = train.tree["image"].shape[1:]
    else:
        shape = train.shape
    return Dataset(name, train, test, classes, shape, mean, std)


def _labels(source: ArraySource | StreamedImages) -> np.ndarray:
    return source.tree["label"] if isinstance(source, ArraySource) else source.labels


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

    def of_classes(source: Source) -> Source:
        assert isinstance(source, ArraySource | StreamedImages)
        labels = numbers[_labels(source)]
        chosen = np.flatnonzero(labels >= 0)
        if isinstance(source, StreamedImages):
            return subset(source.relabelled(labels), chosen)
        images = source.tree["image"][chosen]
        return ArraySource({"image": images, "label": labels[chosen]})

    return dataclasses.replace(
        dataset,
        train=of_classes(dataset.train),
        test=of_classes(dataset.test),
        classes=names,
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
    held, rest = np.sort(order[:examples]), np.sort(order[examples:])
    return dataclasses.replace(
        dataset, train=subset(dataset.train, rest), test=subset(dataset.train, held)
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
    chosen = np.sort(np.argsort(_public_words(available))[:examples])
    return dataclasses.replace(dataset, train=subset(dataset.train, chosen))


def _public_words(count: int) -> np.ndarray:
    """Return fixed public random words, as splits are public."""
    return np.random.Philox(key=0).random_raw(count)
