"""Data sets by name: where the files are, what they must hold, how they are split."""

import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from tanager import _validate as validate
from tanager._cache import expanded
from tanager.data.features import FeatureFile, read_features
from tanager.data.find import OWN, WANTED, Wanted, find_images
from tanager.data.folder import HELD_OUT, held_out_by_name
from tanager.data.known import DATASETS, DIGITS, FILES, RESIZED
from tanager.data.layout import Layout, refuse_one_class
from tanager.data.source import ArraySource, Source, subset, unfolded, warn_of_copies
from tanager.data.streamed import Progress, digest, into_memory


def check_constants(channels: int, mean: Sequence[float], std: Sequence[float]) -> None:
    """Refuse a mean or deviation without one number, or one positive, per channel."""
    rule = f"must have {channels} numbers, one per channel"
    for name, numbers in (("mean", mean), ("std", std)):
        if len(numbers) != channels:
            validate.refuse(name, tuple(numbers), rule)
    for deviation in std:
        validate.positive(std=deviation)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Labelled images for training and testing.

    An example is ``{"image": uint8[H, W, C], "label": int32[]}``; with any number of
    labels an example, ``"label"`` is int32[K] of 0 and 1.

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
            they are resized or read, and of `owners`; None if it is not known. `load`
            makes it an attribute of `train`, too: by it an account knows the data.
        record: how the files were read, see `tanager.data.layout.Record.to_json`.
        chosen_from: number of examples or persons that `train_examples` were chosen of.

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
    owners: np.ndarray | None = dataclasses.field(default=None, repr=False)
    origin: Callable[[], bytes] | None = dataclasses.field(default=None, repr=False)
    record: dict[str, Any] | None = None
    chosen_from: int | None = None

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
    path: str | Path | Layout | None = None,
    *,
    classes: Sequence[str] | None = None,
    validation_examples: int = 0,
    train_examples: int | None = None,
    image_size: int | tuple[int, int, int] | None = None,
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
    folder       files of your own: one folder of images per class, images and labels in
                 a CSV file, or another of the layouts of `tanager.data.find`
    imagenet     ``train/<class>/*`` and ``val/<class>/*``, or any of those formats
    imagenet-32  the same, of 32 × 32 pixels
    places365    the same
    features     `features_from` alone: features and labels, without images
    ===========  ==================================================================

    Pictures of any mode become RGB, see `tanager.data.decoding`. The images of a
    ``folder`` that goes into memory stay grey if all are. If it has no test images,
    about a fifth of the images are held out for testing. A warning says which files
    were not read.

    Args:
        name: one of `DATASETS`.
        path: the folder with the files, or the folder above it. The format is detected.
            A `Layout` says where labels are that the folder does not show.
        classes: keep the examples of these classes alone, label k being the k-th of
            them; None keeps all. Where an example has any number of labels, all are
            kept, with these labels alone.
        validation_examples: hold this many examples out of the training examples, by a
            fixed public permutation, and use them as `test`; no image of the real test
            examples is then decoded, and a benchmark's files with them need not be
            there. 0 uses the real ones.
        train_examples: keep only this many of the training examples, the first of the
            same permutation; None keeps all.
        image_size: resize all images to this many pixels each way: the shorter side is
            scaled, the middle is kept. Or (height, width, channels), 1 channel for
            grey. For ``folder`` and those below it alone. None
            opens all images first: those of one size stay as they are, those of a
            ``folder`` that differ become `Layout.default_side`, and others are refused.
        stream: True reads and decodes images as they are needed, which class folders,
            Arrow and npy files allow. False decodes all of them now. None streams if
            they would take more than 4 GiB.
        groups: where the owners of images are: "folder" for class folders with a
            folder for each person, or the name of a column. Examples are then split,
            held out and counted (`validation_examples`, `train_examples`) by person.
        features_from: a file of features that another program made, see
            `tanager.data.features`. They take the place of the images of the data set,
            in whose order they are; no image is decoded.
        progress: called with the number of images so far and their total: while they
            are opened to see their sizes, then while they are decoded.

    Raises:
        ValueError: an argument is wrong, files are missing, or a file does not hold
            what it should. The message names it.
    """
    validate.one_of(DATASETS, name=name)
    validate.whole(validation_examples=validation_examples, at_least=0)
    shape = None if image_size is None else _shape_of(image_size)
    unused: dict[str, Any] = {} if name in RESIZED else {"image_size": image_size}
    if name in ("digits", "features"):
        unused |= {"path": path, "stream": stream}
    elif features_from is not None:
        unused |= {"image_size": image_size, "stream": stream}
    if name == "digits":
        unused["groups"] = groups
    for argument, value in unused.items():
        if value is not None:
            shown = value if isinstance(value, int) else str(value)
            remedy = "leave it out"
            if argument == "path":
                remedy = "for data of your own, tanager train folder --data PATH"
            of = name if features_from is None else "features"
            validate.refuse(argument, shown, f"does not apply to {of}", remedy)
    tested = not validation_examples
    if name == "features":
        dataset = _of_features(features_from, tested, groups)
    elif name == "digits":
        dataset = _digits()
    else:
        layout = path if isinstance(path, Layout) else Layout(path or "")
        wanted = FILES[name][0].over(
            layout=layout,
            stream=stream,
            tested=tested,
            groups=groups,
            progress=progress,
        )
        if features_from is not None and wanted.shape is None:
            shape = 1, 1, 3
        if shape is not None:
            wanted = dataclasses.replace(wanted, shape=shape)
        dataset = _found(name, wanted, features_from is None)
        wanted.record.warn()
    if dataset.origin is not None and dataset.owners is not None:
        origin, owners = dataset.origin, dataset.owners.tolist()
        origin = functools.partial(digest, origin(), owners)
        dataset = dataclasses.replace(dataset, origin=origin)
    if features_from is not None and name != "features":
        dataset = _with_features(dataset, features_from, tested)
    if classes is not None:
        dataset = _with_classes(dataset, tuple(classes))
    dataset = _parted(dataset, validation_examples, train_examples)
    if name == "folder" and not (features_from or validation_examples):
        warn_of_copies(dataset.train, dataset.test)
    # By name: the protocol of sources, which others implement too, has no origin.
    setattr(dataset.train, "origin", dataset.origin)  # noqa: B010
    return dataset


def _shape_of(image_size: int | tuple[int, int, int]) -> tuple[int, int, int]:
    if not isinstance(image_size, tuple):
        validate.whole(image_size=image_size, at_least=1)
        return image_size, image_size, 3
    if len(image_size) != 3 or image_size[2] not in (1, 3):
        rule = "must be a number of pixels, or (height, width, channels)"
        validate.refuse("image_size", image_size, rule, "1 channel, or 3")
    for side in image_size:
        validate.whole(image_size=side, at_least=1)
    return image_size


def image_shape(
    layout: Layout, groups: str | None = None
) -> tuple[int, int, int] | None:
    """Return the (H, W, C) of all images of a person's own folder; None if they differ.

    Opens each image and decodes none. C is 1 if all are grey, else 3.

    Raises:
        ValueError: as `load`.
    """
    wanted = FILES["folder"][0].over(layout=layout, stream=False, groups=groups)
    train, _, _ = find_images("folder", _existing("folder", layout), wanted)
    return None if wanted.record.size == "default" else train.shape


def _existing(name: str, layout: Layout) -> Path:
    inside, path = OWN if name == "folder" else WANTED, os.fspath(layout.path)
    if not path:
        validate.refuse("path", None, f"is needed for {name}", f"a folder of {inside}")
    for argument in ("labels", "labels_from_name", "multi_label"):
        if (value := getattr(layout, argument)) and name != "folder":
            rule = f"does not apply to {name}"
            validate.refuse(argument, str(value), rule, "leave it out")
    folder = expanded(path)
    alone = name == "folder" and folder.suffix == ".npz" and folder.is_file()
    if not (folder.is_dir() or alone):
        rule = "is not a folder" if folder.exists() else "does not exist"
        validate.refuse("path", path, rule, f"looked for {inside}")
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
    of_all = (DIGITS, (8, 8, 1), (0.5,), (0.5,))
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
        **_of_examples(found),
        classes=found.classes,
        owners=found.owners,
        origin=functools.partial(bytes, found.origin()),
    )


def _with_features(dataset: Dataset, path: str | Path, tested: bool) -> Dataset:
    """Put features in the place of the images that they were made of."""
    labels = {"train": labels_of(dataset.train), "test": labels_of(dataset.test)}
    found = read_features(path, tested=tested, data=(dataset.classes, labels))
    return dataclasses.replace(dataset, **_of_examples(found))


def _of_examples(found: FeatureFile) -> dict[str, Any]:
    train, test = found.train, found.test or found.train
    shape = train.tree["features"].shape[1:]
    return {"train": train, "test": test, "image_shape": shape, "mean": (), "std": ()}


def labels_of(source: Any) -> np.ndarray:
    """Return the labels of a data set's source, int32[N], without reading images."""
    base, rows = unfolded(source)
    labels = base.tree["label"] if isinstance(base, ArraySource) else base.labels
    return labels[rows]


def _found(name: str, wanted: Wanted, decoded: bool) -> Dataset:
    train, test, classes = find_images(name, _existing(name, wanted.layout), wanted)
    _, mean, std = FILES[name]
    if len(mean) != train.shape[-1]:
        mean = std = (0.5,) * train.shape[-1]
    # Held-out examples take the place of a test split that is not read.
    images = [train, test] if wanted.tested and test is not None else [train]
    if wanted.own and len(classes) < 2:
        refuse_one_class(wanted.layout)
    there = train.labels
    if there.ndim == 2:
        there = np.flatnonzero(there.any(axis=0))
    for label in np.setdiff1d(np.arange(len(classes)), there):
        rule = f"of {name} has no training example"
        if not wanted.own:
            validate.refuse("class", classes[label], rule, "add some")
        wanted.record.notes.append(f"class {classes[label]} has no training example")
    persons = [each.owners for each in images if each.owners is not None]
    if len(persons) == 2 and np.isin(persons[1], persons[0]).any():
        rule = "names persons with images in both train and test, but test images are "
        remedy = "move all images of a person to one of the two"
        validate.refuse("groups", wanted.groups, f"{rule}not protected", remedy)
    owners = train.owners
    origin = copy.copy(train)._files  # a copy has no file in memory
    if decoded and not wanted.streams(sum(map(len, images)), train.shape):
        images = into_memory(images, wanted.progress)
    dataset = Dataset(
        *(name, images[0], images[-1], classes, train.shape, mean, std, owners, origin),
        wanted.record.to_json(),
    )
    what = "examples" if owners is None else "persons"
    if wanted.layout.hold_out and (test is None or wanted.record.split != "given"):
        wanted.record.notes.append(
            f"there are no test images: about a fifth of the {what} are held out for "
            "testing, by a fixed public choice"
        )
    if test is not None or not wanted.layout.hold_out:
        return dataset
    split, held = held_out_by_name(train, owners)
    if held is None:  # one more at the end moves no other
        held = _public_words(len(train)) < 2**64 // HELD_OUT
    if held.all() or not held.any():
        rule = "must be more, to hold out a fifth of them"
        validate.refuse(what, dataset.units()[1], rule, "add some, or test images")
    wanted.record.split = split
    return _with_test(dataset, held, record=wanted.record.to_json())


def _with_classes(dataset: Dataset, names: tuple[str, ...]) -> Dataset:
    for name in names:
        validate.one_of(dataset.classes, classes=name)
    if len(set(names)) < max(2, len(names)):
        rule = "must be two or more, each of them once"
        validate.refuse("classes", names, rule, "or left out")
    columns = [dataset.classes.index(name) for name in names]
    numbers = np.full(len(dataset.classes), -1, np.int32)
    numbers[columns] = np.arange(len(names))
    several = labels_of(dataset.train).ndim == 2

    def renumbered(labels: np.ndarray) -> np.ndarray:
        return labels[:, columns] if several else numbers[labels]

    def of_classes(source: Any) -> tuple[Source, np.ndarray]:
        base, rows = unfolded(source)
        chosen = np.arange(len(source))
        if not several:
            chosen = np.flatnonzero(numbers[labels_of(source)] >= 0)
        if isinstance(base, ArraySource):
            found = source.gather(chosen)
            found["label"] = renumbered(found["label"])
            return ArraySource(found), chosen
        relabelled = base.relabelled(renumbered(base.labels))
        return subset(relabelled, rows[chosen]), chosen

    train, chosen = test, _ = of_classes(dataset.train)
    if dataset.test is not dataset.train:
        test, _ = of_classes(dataset.test)
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
        dataset = _with_test(dataset, held)
    if wanted is None:
        return dataset
    validate.whole(train_examples=wanted, at_least=1)
    numbers, units = dataset.units()
    if wanted > units:
        rule = f"must be at most the {units} training examples or persons"
        validate.refuse("train_examples", wanted, rule)
    chosen = np.argsort(_public_words(units))[:wanted]
    only = dataset.only(np.isin(numbers, chosen))
    return dataclasses.replace(only, chosen_from=units)


def _with_test(dataset: Dataset, held: np.ndarray, **changes: Any) -> Dataset:
    test = subset(dataset.train, np.flatnonzero(held))
    return dataclasses.replace(dataset.only(~held), test=test, **changes)


def _public_words(count: int) -> np.ndarray:
    """Return fixed public random words, as splits are public."""
    return np.random.Philox(key=0).random_raw(count)
