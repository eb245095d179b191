"""Features that any program made: the last layer is trained on a file of them.

These arrays are read. Row i of those of a split belongs to its example i:

=======================  =============================================================
``train_features``       numbers[N, d]: what the last layer sees of each example
``train_labels``         whole numbers[N] from 0, or text[N]
``test_features``        numbers[M, d]; may be missing if training examples are held out
``test_labels``          as ``train_labels``
``classes``              text[K], optional: names of the classes, label k being the k-th
``train_NAME``           whole numbers[N] or text[N]: owners, read for ``groups=NAME``
=======================  =============================================================

They come in three layouts:

=======================  =============================================================
``FILE.npz``             all arrays, as ``numpy.savez(FILE, train_features=…)`` writes
``train_features.npy``   one npy file for each array, in one folder. Features in float32
                         are memory-mapped, so they may be larger than memory
``FILE.parquet``         one row for each example: ``features``, a list of numbers;
                         ``label``; ``split``, which is train or test; and NAME
=======================  =============================================================

Files are read without trusting them: no pickle is run. `write_features` writes the
second layout, with any function from a batch of images to an array.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tanager import _validate as validate
from tanager._cache import expanded
from tanager._files import new_folder
from tanager._reading import reading
from tanager._text import clean
from tanager.data.feature_files import ARGUMENT, SPLITS, names_in, read_arrays, refuse
from tanager.data.source import ArraySource, gather
from tanager.data.streamed import digest


_ROWS = 4096  # checked and digested at once
_SHORTEST = 1e-12  # A last layer scales no shorter features to norm 1.

Labels = Mapping[str, np.ndarray]


class FeatureFile(NamedTuple):
    """What a file of features holds, checked.

    Attributes:
        train: examples ``{"features": float32[d], "label": int32[]}``.
        test: likewise; None if none were wanted.
        classes: the class names.
        owners: [N] of the training examples; None if they were not asked for.
    """

    train: ArraySource
    test: ArraySource | None
    classes: tuple[str, ...]
    owners: np.ndarray | None

    def origin(self) -> bytes:
        """Return a digest of the training examples."""
        features, labels = self.train.tree["features"], self.train.tree["label"]
        starts = range(0, len(features), _ROWS)
        return digest(*(features[start : start + _ROWS] for start in starts), labels)


def read_features(
    path: str | os.PathLike[str],
    *,
    tested: bool = True,
    groups: str | None = None,
    data: tuple[tuple[str, ...], Labels] | None = None,
) -> FeatureFile:
    """Read a file of features, and check every row of it.

    Args:
        path: a file in one of the layouts above, or the folder of npy files.
        tested: False where no test features are needed.
        groups: NAME of the owners.
        data: class names, and labels by split, of the data that the features were made
            of, in the same order. The file may then leave out its labels; those that it
            has must be the same.

    Raises:
        UnreadableFile: a file is damaged, or an array is missing, of another count than
            the others, out of range, or has rows with NaN, infinity or norm 0.
    """
    file = expanded(path)
    wanted = ["train_features", "train_labels", "classes"]
    wanted += ["test_features", "test_labels"] if tested else []
    wanted += [f"{split}_{groups}" for split in SPLITS[: 1 + tested] if groups]
    with reading(file, "has no features that can be read", argument=ARGUMENT):
        arrays = read_arrays(file, wanted, groups, labelled=data is None)
        optional = {"classes", f"test_{groups}"}
        if data is not None:
            optional |= {"train_labels", "test_labels"}
        for name in wanted:
            if name not in arrays and name not in optional:
                table = file.suffix == ".parquet"
                remedy = f"it has {sorted(arrays) if table else names_in(file)!r:.300}"
                if name.startswith("test"):
                    remedy += "; add it, or hold out some training examples "
                    remedy += "(--validation-examples NUMBER)"
                refuse(file, f"has no array {name!r}", remedy)
        splits = SPLITS[: 1 + tested]
        features = {split: _features(file, arrays, split) for split in splits}
        if data is None:
            classes, labels = _numbered(file, arrays, splits)
        else:
            classes, labels = data
            _require_order(file, arrays, features, *data)
        sources = [
            ArraySource({"features": features[split], "label": labels[split]})
            for split in splits
        ]
        owners = _owners(file, arrays, groups, len(sources[0]))
    test = sources[1] if tested else None
    return FeatureFile(sources[0], test, classes, owners)


def write_features(
    features: Callable[[Any], Any],
    dataset: Any,
    folder: str | os.PathLike[str],
    *,
    physical_batch_size: int = 256,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Compute features of a data set with any Python function, and write them.

    The function must treat each example by itself, without dropout and batch
    statistics: the guarantee is for features that depend on one example each. Features
    of private examples are as private as the examples: only its owner can read the
    folder.

    Args:
        features: ``features(batch) -> array[b, d]``, of NumPy or of any library that
            NumPy can read, for a batch ``{"image": uint8[b, H, W, C], "label":
            int32[b]}``; the last one may be smaller.
        dataset: a `Dataset`, such as `load` returns.
        folder: to create; it appears whole or not at all.
        physical_batch_size: b, the number of examples of a batch.
        progress: called with (examples done, all examples).

    Returns:
        The folder, for ``features_from`` (``--features-from``).

    Raises:
        ValueError: the folder exists or cannot be written, or the function returned
            another shape, NaN, infinity or a row of norm 0.
    """
    validate.whole(physical_batch_size=physical_batch_size, at_least=1)
    to = expanded(folder)
    if to.exists():
        validate.refuse("folder", str(to), "exists", "name a new folder")
    with new_folder(to, "folder") as parts:
        total, before, width = len(dataset.train) + len(dataset.test), 0, None
        for split, source in zip(SPLITS, (dataset.train, dataset.test), strict=True):
            labels, out = np.empty(len(source), np.int32), None
            for start in range(0, len(source), physical_batch_size):
                stop = min(start + physical_batch_size, len(source))
                rows, batch = slice(start, stop), gather(source, np.arange(start, stop))
                found = _computed(features(batch), stop - start, width)
                width = found.shape[1]
                if out is None:
                    name, shape = parts / f"{split}_features.npy", (len(source), width)
                    out = np.lib.format.open_memmap(name, "w+", np.float32, shape)
                out[rows], labels[rows] = found, batch["label"]
                progress(before + stop, total)
            np.save(parts / f"{split}_labels.npy", labels)
            before += len(source)
            if out is not None:
                out.flush()
        np.save(parts / "classes.npy", np.array(dataset.classes, str))
        if dataset.owners is not None:
            np.save(parts / "train_owners.npy", dataset.owners)
    return to


def _computed(found: Any, rows: int, width: int | None) -> np.ndarray:
    """Return features as float32[rows, width]; refuse all others."""
    values = np.asarray(found)
    shape = (rows, values.shape[-1] if width is None and values.ndim else width)
    if values.shape != shape or not values.size or values.dtype.kind not in "fiu":
        given, wanted = f"{values.dtype}{list(values.shape)}", f"[{rows}, {shape[1]}]"
        rule = f"must return numbers{wanted}, one row for each example"
        validate.refuse("features", given, rule)
    with np.errstate(over="ignore"):
        values = values.astype(np.float32, copy=False)
    if fault := _fault(values):
        validate.refuse("features", "a function", f"returned {fault}")
    return values


def _features(file: Path, arrays: Labels, split: str) -> np.ndarray:
    name = f"{split}_features"
    found, width = arrays[name], arrays["train_features"].shape[-1:]
    if found.ndim != 2 or not found.size or found.dtype.kind not in "fiu":
        rule = f"has {name} as {found.dtype}{list(found.shape)}"
        refuse(file, rule, "they must be numbers[examples, features]")
    if found.shape[1:] != width:
        rule = f"has {found.shape[1]} features in {name} and {width[0]} in "
        refuse(file, f"{rule}train_features", "make both with the same program")
    with np.errstate(over="ignore"):
        found = found.astype(np.float32, copy=False)
    if fault := _fault(found):
        remedy = "mend the program that made them, or leave those examples out"
        refuse(file, f"{name} has {fault}", remedy)
    return found


def _fault(features: np.ndarray) -> str:
    """Return in words how many rows no last layer can be trained on, if any."""
    wrong = short = 0
    for start in range(0, len(features), _ROWS):
        part = features[start : start + _ROWS]
        with np.errstate(all="ignore"):
            norms = np.sqrt(np.einsum("ij,ij->i", part, part))
        wrong += np.count_nonzero(~np.isfinite(norms))
        short += np.count_nonzero(norms < _SHORTEST)
    found = []
    if wrong:
        found.append(f"{wrong} rows with NaN, infinity or a norm above 1e19")
    if short:
        found.append(f"{short} rows of norm 0")
    return " and ".join(found)


def _label_array(file: Path, arrays: Labels, split: str, count: int) -> np.ndarray:
    found = arrays[f"{split}_labels"]
    if found.shape != (count,):
        rule = f"has {split}_labels {list(found.shape)} for {count} rows of features"
        refuse(file, rule, "give one label for each row")
    if found.dtype.kind not in "iuU":
        rule = f"has {split}_labels of {found.dtype}"
        refuse(file, rule, "labels must be whole numbers or text")
    return found


def _numbered(
    file: Path, arrays: Labels, splits: Sequence[str]
) -> tuple[tuple[str, ...], Labels]:
    """Return the class names and the labels as numbers of them."""
    found = {
        split: _label_array(file, arrays, split, len(arrays[f"{split}_features"]))
        for split in splits
    }
    train = found["train"]
    for split, each in found.items():
        if (each.dtype.kind == "U") != (train.dtype.kind == "U"):
            rule = f"has train_labels of {train.dtype} and {split}_labels of "
            refuse(file, f"{rule}{each.dtype}", "give all as text, or all as numbers")
    names = arrays.get("classes")
    if names is None and train.dtype.kind == "U":
        names = np.unique(train)
    elif names is None:
        most = int(train.max())
        if most >= len(train):
            rule = f"has label {most} and only {len(train)} training examples"
            refuse(file, rule, "number the classes from 0, without gaps")
        names = np.arange(most + 1).astype(str)
    if names.ndim != 1 or names.dtype.kind != "U":
        rule = f"has classes as {names.dtype}{list(names.shape)}"
        refuse(file, rule, "they must be text, one name for each class")
    classes = tuple(clean(name) for name in names.tolist())
    if len({*classes}) < max(2, len(classes)):
        refuse(file, f"has {len(classes)} classes", "give two or more, each once")
    labels = {
        split: _numbers(file, split, each, names) for split, each in found.items()
    }
    for absent in np.setdiff1d(np.arange(len(classes)), labels["train"]):
        rule = f"class {classes[absent]!r} has no training example"
        refuse(file, rule, "add some, or leave the class out")
    return classes, labels


def _numbers(file: Path, split: str, labels: np.ndarray, names: np.ndarray) -> Any:
    if labels.dtype.kind != "U":
        wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
        if wrong.size:
            rule = (
                f"{split}_labels has in row {wrong[0]} a label that is not from 0 to "
            )
            refuse(file, f"{rule}{len(names) - 1}", "number the classes from 0")
        return labels.astype(np.int32)
    order = np.argsort(names)
    places = np.searchsorted(names, labels, sorter=order)
    numbers = order[np.minimum(places, len(names) - 1)].astype(np.int32)
    if wrong := np.count_nonzero(names[numbers] != labels):
        rule = f"{split}_labels has {wrong} rows whose label is not a class"
        refuse(file, rule, "name every class in classes, or in train_labels")
    return numbers


def _require_order(
    file: Path,
    arrays: Labels,
    features: Labels,
    classes: tuple[str, ...],
    labels: Labels,
) -> None:
    """Refuse features of another count or order than the data's labels."""
    remedy = "write one row for each example of the data, in the data's order"
    for split, found in features.items():
        wanted = labels[split]
        if len(found) != len(wanted):
            rule = f"has {len(found)} rows of {split}_features for {len(wanted)} "
            refuse(file, f"{rule}examples of the data", remedy)
        if f"{split}_labels" not in arrays:
            continue
        own = _label_array(file, arrays, split, len(wanted))
        known = np.array(classes)[wanted] if own.dtype.kind == "U" else wanted
        if differ := np.count_nonzero(own != known):
            rule = f"{split}_labels differ from the data's labels in {differ} rows"
            refuse(file, rule, remedy)


def _owners(
    file: Path, arrays: Labels, groups: str | None, count: int
) -> np.ndarray | None:
    if groups is None:
        return None
    owners = arrays[f"train_{groups}"]
    if owners.shape != (count,) or owners.dtype.kind not in "iuU":
        rule = f"has train_{groups} as {owners.dtype}{list(owners.shape)}"
        refuse(file, rule, f"it must be whole numbers or text[{count}]")
    tested = arrays.get(f"test_{groups}")
    if tested is not None and np.isin(tested, owners).any():
        rule = f"has persons of train_{groups} in test_{groups}, too, but test "
        remedy = "move all examples of a person to one of the two"
        refuse(file, f"{rule}examples are not protected", remedy)
    return owners
