"""Data sets by name: where the files are, what they must hold, how they are split."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from tanager import _validate as validate
from tanager.data.features import read_features
from tanager.data.find import WANTED, Wanted, find_images
from tanager.data.folder import TESTS
from tanager.data.source import ArraySource, Source, subset
from tanager.data.streamed import digest, into_memory


Progress = Callable[[int, int], None]

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
_DIGITS = tuple("0123456789")

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Of ImageNet's training images, per channel on the 0..1 scale: public constants.

As commonly published, first with the models of torchvision:
https://docs.pytorch.org/vision/stable/models.html
"""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation, as `IMAGENET_MEAN`."""

_HALF = (0.5,) * 3
_HELD_OUT = ("val", "validation", "test")  # What is named test often has no labels.
_IMAGENET = (Wanted(_HELD_OUT), IMAGENET_MEAN, IMAGENET_STD)
_FILES = {
    "cifar10": (
        Wanted(("test",), (32, 32, 3), tuple(_CIFAR10.split())),
        _CIFAR_MEAN,
        _CIFAR_STD,
    ),
    "cifar100": (
        Wanted(
            ("test",), (32, 32, 3), tuple(_CIFAR100.split()), ("fine_label", "label")
        ),
        _CIFAR_MEAN,
        _CIFAR_STD,
    ),
    "mnist": (Wanted(("test",), (28, 28, 1), _DIGITS), (0.1307,), (0.3081,)),
    "folder": (Wanted(TESTS), _HALF, _HALF),
    "imagenet": _IMAGENET,
    "imagenet-32": (Wanted(_HELD_OUT), _HALF, _HALF),  # Unlocking, appendix C.2
    "places365": _IMAGENET,
}
"""What the files of a data set must hold, and its mean and deviation."""
DATASETS = ("digits", *_FILES, "features")
"""The names that `load` takes."""
RESIZED = tuple(name for name, (wanted, *_) in _FILES.items() if not wanted.classes)
"""Data sets whose images are resized as they are read."""


def check_constants(channels: int, mean: Sequence[float], std: Sequence[float]) -> None:
    """Refuse a mean or deviation without one number, or one positive, per channel."""
    for name, numbers in (("mean", mean), ("std", std)):
        if len(numbers) != channels:
            validate.refuse(
                name, tuple(numbers), f"must have {channels} numbers, one per channel"
            )
    for deviation in std:
        validate.positive(std=deviation)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Labelled images for training and testing.

    An example is ``{"image": uint8[H, W, C], "label": int32[]}``.

    Attributes:
        name: one of `DATASETS`, or a name of your own.
        train: the private examples; how many there are is public.
        test: examples that training does not see. The guarantee is not about them.
        classes: the class names; label k is `classes[k]`.
        image_shape: (H, W, C); or (d,) of features, ``{"features": float32[d], "label":
            int32[]}``, which have no mean and no deviation.
        mean: per channel, on the 0..1 scale, for `augment.standardise`.
        std: likewise. Both are public constants, never computed from the private
            images: mean and standard deviation of the public benchmark as commonly
            published for CIFAR-10 (used for CIFAR-100 too), MNIST and ImageNet (used
            for Places-365 too), and 0.5 for everything else, ImageNet-32 among it.
        owners: [n] whose each training example is, for `tanager.Grouped`; None where
            they were not asked for.
        origin: digest of all training examples that `train` was taken from, however
            they are resized or read; None if it is not known. `load` makes it an
            attribute of `train`, too: by it an account knows the data.

    Raises:
        ValueError: `mean` or `std` does not fit the channels, or `std` is not positive.
    """

    name: str
    train: Source
    test: Source
    classes: tuple[str, ...]
    image_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    owners: np.ndarray | None = None
    origin: Callable[[], bytes] | None = None

    def __post_init__(self):
        channels = self.image_shape[-1] if len(self.image_shape) == 3 else 0
        check_constants(channels, self.mean, self.std)

    def units(self) -> tuple[np.ndarray, int]:
        """Return the number of each training example's owner, and how many there are.

        Without owners each example has its own.
        """
        if self.owners is None:
            return np.arange(len(self.train)), len(self.train)
        names, numbers = np.unique(self.owners, return_inverse=True)
        return numbers, len(names)

    def only(self, chosen: np.ndarray) -> Self:
        """Return the data set with the training examples that bool[n] chooses."""
        owners = None if self.owners is None else self.owners[chosen]
        train = subset(self.train, np.flatnonzero(chosen))
        return dataclasses.replace(self, train=train, owners=owners)


def load(
    name: str,
    path: str | Path | None = None,
    *,
    classes: Sequence[str] | None = None,
    validation_examples: int = 0,
    train_examples: int | None = None,
    image_size: int | None = None,
    stream: bool | None = None,
    groups: str | None = None,
    features_from: str | Path | None = None,
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
    features     `features_from` alone: features and labels, without images
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
        groups: where the owners of images are: "folder" for class folders with a
            folder for each person, or the name of a column. Examples are then split,
            held out and counted (`validation_examples`, `train_examples`) by person.
        features_from: a file of features that another program made, see
            `tanager.data.features`. They take the place of the images of the data set,
            in whose order they are; no image is decoded.
        progress: called with the number of images decoded so far and their total.

    Raises:
        ValueError: an argument is wrong, files are missing, or a file does not hold
            what it should. The message names it.
    """
    validate.one_of(DATASETS, name=name)
    validate.whole(validation_examples=validation_examples, at_least=0)
    if image_size is not None:
        validate.whole(image_size=image_size, at_least=1)
    unused = {"image_size": image_size if name not in RESIZED else None}
    if name == "digits":
        unused |= {"path": path, "stream": stream, "groups": groups}
    if name == "features":
        unused |= {"path": path, "stream": stream}
    for argument, value in unused.items():
        if value:
            shown = value if isinstance(value, int) else str(value)
            rule = f"does not apply to {name}"
            validate.refuse(argument, shown, rule, "leave it out")
    tested = not validation_examples
    if name == "features":
        dataset = _of_features(features_from, tested, groups)
    elif name == "digits":
        dataset = _digits()
    else:
        wanted = dataclasses.replace(
            _FILES[name][0],
            stream=stream,
            tested=tested,
            groups=groups,
        )
        if features_from is not None and wanted.shape is None:
            wanted = dataclasses.replace(wanted, shape=(1, 1, 3))  # none is decoded
        if image_size is not None:
            wanted = dataclasses.replace(wanted, shape=(image_size, image_size, 3))
        decoded = features_from is None
        dataset = _found(name, _existing(name, path), wanted, decoded, progress)
    if features_from is not None and name != "features":
        dataset = _with_features(dataset, features_from, tested)
    if classes is not None:
        dataset = _with_classes(dataset, tuple(classes))
    dataset = _parted(dataset, validation_examples, train_examples)
    # By name: the protocol of sources, which others implement too, has no origin.
    setattr(dataset.train, "origin", dataset.origin)  # noqa: B010
    return dataset


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
    first, second = (
        ArraySource({"image": images[half], "label": labels[half]})
        for half in (train, test)
    )
    whole = digest(images[train], labels[train])
    of_all = (_DIGITS, (8, 8, 1), (0.5,), (0.5,))
    return Dataset(
        "digits", first, second, *of_all, origin=functools.partial(bytes, whole)
    )


def _of_features(path: str | Path | None, tested: bool, groups: str | None) -> Dataset:
    if path is None:
        remedy = "give a file of features and labels (--features-from FILE.npz)"
        validate.refuse("features_from", None, "is needed for features", remedy)
    found = read_features(path, tested=tested, groups=groups)
    return Dataset(
        "features",
        found.train,
        found.test or found.train,
        found.classes,
        found.train.tree["features"].shape[1:],
        mean=(),
        std=(),
        owners=found.owners,
        origin=functools.partial(bytes, found.origin()),
    )


def _with_features(dataset: Dataset, path: str | Path, tested: bool) -> Dataset:
    """Put features in the place of the images that they were made of."""
    labels = {"train": _labels(dataset.train), "test": _labels(dataset.test)}
    found = read_features(path, tested=tested, data=(dataset.classes, labels))
    return dataclasses.replace(
        dataset,
        train=found.train,
        test=found.test or found.train,
        image_shape=found.train.tree["features"].shape[1:],
        mean=(),
        std=(),
    )


def _labels(source: Any) -> np.ndarray:
    in_memory = isinstance(source, ArraySource)
    return source.tree["label"] if in_memory else source.labels


def _found(
    name: str, path: Path, wanted: Wanted, decoded: bool, progress: Progress | None
) -> Dataset:
    train, test, classes = find_images(name, path, wanted)
    _, mean, std = _FILES[name]
    if len(mean) != train.shape[-1]:
        mean = std = (0.5,) * train.shape[-1]
    # Held-out examples take the place of a test split that is not read.
    images = [train, test] if wanted.tested else [train]
    total, done = sum(map(len, images)), 0

    def report(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    for label in np.setdiff1d(np.arange(len(classes)), train.labels):
        validate.refuse(
            "class", classes[label], f"of {name} has no training example", "add some"
        )
    owners, tested = train.owners, test.owners if wanted.tested else None
    if owners is not None and tested is not None and np.isin(tested, owners).any():
        validate.refuse(
            "groups",
            wanted.groups,
            "names persons with images in both train and test, but test images are not "
            "protected",
            "move all images of a person to one of the two",
        )
    shape = train.shape
    origin = copy.copy(train)._files  # a copy has no file in memory
    if decoded and not wanted.streams(total, shape):
        images = [into_memory(each, report) for each in images]
    return Dataset(
        name, images[0], images[-1], classes, shape, mean, std, owners, origin
    )


def _with_classes(dataset: Dataset, names: tuple[str, ...]) -> Dataset:
    for name in names:
        validate.one_of(dataset.classes, classes=name)
    if len(set(names)) < max(2, len(names)):
        validate.refuse(
            "classes", names, "must be two or more, each of them once", "or left out"
        )
    numbers = np.full(len(dataset.classes), -1, np.int32)
    numbers[[dataset.classes.index(name) for name in names]] = np.arange(len(names))

    def of_classes(source: Any) -> tuple[Source, np.ndarray]:
        labels = numbers[_labels(source)]
        chosen = np.flatnonzero(labels >= 0)
        if not isinstance(source, ArraySource):
            return subset(source.relabelled(labels), chosen), chosen
        return ArraySource({**source.gather(chosen), "label": labels[chosen]}), chosen

    (train, chosen), (test, _) = of_classes(dataset.train), of_classes(dataset.test)
    owners = None if dataset.owners is None else dataset.owners[chosen]
    return dataclasses.replace(
        dataset, train=train, test=test, classes=names, owners=owners
    )


def _parted(dataset: Dataset, validation: int, wanted: int | None) -> Dataset:
    numbers, units = dataset.units()
    if validation >= units:
        rule = f"must be fewer than the {units} training examples or persons"
        validate.refuse("validation_examples", validation, rule)
    if validation:
        held = np.isin(numbers, np.argsort(_public_words(units))[:validation])
        test = subset(dataset.train, np.flatnonzero(held))
        dataset = dataclasses.replace(dataset.only(~held), test=test)
    if wanted is None:
        return dataset
    validate.whole(train_examples=wanted, at_least=1)
    numbers, units = dataset.units()
    if wanted > units:
        rule = f"must be at most the {units} training examples or persons"
        validate.refuse("train_examples", wanted, rule)
    chosen = np.argsort(_public_words(units))[:wanted]
    return dataset.only(np.isin(numbers, chosen))


def _public_words(count: int) -> np.ndarray:
    """Return fixed public random words, as splits are public."""
    return np.random.Philox(key=0).random_raw(count)
