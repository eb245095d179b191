"""Sources: random access to examples, one at a time or many at once.

An example is a pytree of NumPy arrays, such as ``{"image": uint8[H, W, C], "label":
int32[]}``. A source has a length, and an example for each index; training needs nothing
more. One index is one example and one unit of privacy: a person with images under two
indices is protected less. `tanager.data.grouped` protects persons.
"""

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tanager import _validate as validate
from tanager._reading import UnreadableFile


# Object, bytes, text (of two kinds), dates, durations: what no device can hold.
_REFUSED_KINDS = "OSUTMm"
_NARROW = {"i": "i4", "u": "u4", "f": "f4", "c": "c8"}
"""What JAX makes of wider numbers, by their kind."""


@runtime_checkable
class Source(Protocol):
    """Examples by index: a length, and a pytree of NumPy arrays for each index.

    All examples must have the same structure, shapes and dtypes. A source may also have
    ``gather(indices: int64[n])``, returning the examples stacked on a leading axis of
    n, where that is faster than one by one.
    """

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return one example; `IndexError` outside 0 … length − 1."""
        ...


@runtime_checkable
class StreamedSource(Source, Protocol):
    """A source that reads and decodes its examples when they are asked for.

    It can be pickled into another process, which opens the files itself. An example
    that cannot be read raises `UnreadableExample`.
    """

    def identity(self) -> bytes:
        """Return a digest of the listed files and labels, 32 bytes.

        It does not depend on the folder. It changes when files come, go, are renamed or
        change in size, and when labels change. Nothing is decoded, so other changes in
        a file may go unnoticed.
        """
        ...


class UnreadableExample(UnreadableFile):
    """One example that cannot be read or decoded; the others may be good.

    Attributes:
        index: of the example, in the source that was asked.
    """

    def __init__(self, message: str, index: int):
        super().__init__(message)
        self.index = index

    def __reduce__(self):
        return type(self), (str(self), self.index)


class ArraySource:
    """A source over a pytree of arrays in memory; example i is every array's row i.

    Attributes:
        tree: the pytree, its leaves NumPy arrays with one leading axis in common.

    Raises:
        ValueError: the leaves are not arrays of numbers, differ in length, are empty,
            are masked, or JAX would change their values. The message names the leaf.
    """

    def __init__(self, tree: Any):
        for name, leaf in _named_leaves(tree):
            if isinstance(leaf, np.ma.MaskedArray):
                remedy = "fill it with a value of your choice: array.filled(0)"
                validate.refuse_type(name, leaf, "must have no mask", remedy)
            if _has_nulls(leaf):
                remedy = "fill them, or leave out their rows"
                validate.refuse_type(name, leaf, "has missing values", remedy)
        self.tree = map_leaves(_native, tree)
        self._length = _common_length(self.tree)
        for name, leaf in _named_leaves(self.tree):
            _refuse_narrowed(name, leaf)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        check_index(index, len(self))
        return map_leaves(lambda leaf: leaf[index, ...], self.tree)

    def gather(self, indices: np.ndarray) -> Any:
        """Return the examples at `indices`, stacked: every leaf is a fresh copy."""
        chosen = whole_indices(indices, len(self))
        return map_leaves(lambda leaf: leaf[chosen], self.tree)


class _Subset:
    def __init__(self, source: Source, indices: np.ndarray):
        self._source = source
        self._indices = indices
        self.origin = getattr(source, "origin", None)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        check_index(index, len(self))
        try:
            return self._source[int(self._indices[index])]
        except UnreadableExample as error:
            raise UnreadableExample(str(error), index) from error

    def gather(self, indices: np.ndarray) -> Any:
        chosen = whole_indices(indices, len(self))
        try:
            return gather(self._source, self._indices[chosen])
        except UnreadableExample as error:
            (index,) = np.flatnonzero(self._indices == error.index)
            raise UnreadableExample(str(error), int(index)) from error


class _StreamedSubset(_Subset):
    _source: Any

    @property
    def labels(self) -> np.ndarray:
        return self._source.labels[self._indices]

    def identity(self) -> bytes:
        parts = self._source.identity() + self._indices.tobytes()
        return hashlib.blake2b(parts, digest_size=32).digest()


def as_source(data: Any) -> Source:
    """Return a `Source` unchanged, and a pytree of arrays as an `ArraySource`."""
    from jax import tree_util

    is_array = hasattr(data, "dtype") and hasattr(data, "shape")
    if tree_util.all_leaves([data]) and not is_array:
        remedy = _remedy(data)
        if remedy is None and isinstance(data, Source):
            return data
        rule = "must be a source or a pytree of arrays"
        remedy = remedy or "give it __len__ and __getitem__, or pass a dict of arrays"
        validate.refuse_type("data", data, rule, remedy)
    return ArraySource(data)


def _remedy(data: Any) -> str | None:
    """Return how to give what has a length and items, but not one for each example."""
    if isinstance(data, str | bytes | os.PathLike):
        return "tanager.data.load reads files"
    if isinstance(data, Mapping):
        if "train" in data:
            return "give one split of it, data['train']"
        return 'give a dict of its arrays: {"image": data[…], "label": data[…]}'
    if hasattr(data, "train"):  # what `tanager.data.load` returns
        return "give its training examples, data.train"
    if type(data).__module__.partition(".")[0] in ("pandas", "polars", "pyarrow"):
        return "give a dict of its columns: {name: data[name].to_numpy() for name in …}"
    return None


def _native(leaf: Any) -> np.ndarray:
    """Return an array in the byte order of this machine."""
    array = np.asarray(leaf)
    if array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _has_nulls(column: Any) -> bool:
    """Return whether values of a pandas, polars or Arrow column are missing.

    NumPy would make them NaN.
    """
    if hasattr(column, "isna"):
        return bool(np.any(column.isna()))
    count: Any = getattr(column, "null_count", 0)
    if not isinstance(count, int):
        count = count()
    return bool(np.any(count))


def _refuse_narrowed(name: str, leaf: np.ndarray) -> None:
    """Refuse numbers of 64 bits that JAX would cut to 32 with other values."""
    narrow = np.dtype(_NARROW.get(leaf.dtype.kind, leaf.dtype))
    if leaf.dtype.itemsize <= narrow.itemsize or _wide():
        return
    with np.errstate(over="ignore"):
        same = leaf == leaf.astype(narrow)
    if leaf.dtype.kind in "fc":
        same |= np.isnan(leaf)
    if not same.all():
        if leaf.dtype.kind in "fc":
            rule = f"would lose digits in {narrow.name}, which JAX computes with"
            remedy = f"round it yourself: array.astype(numpy.{narrow.name})"
        else:
            rule = f"has numbers beyond {narrow.name}, which JAX computes with"
            remedy = "leave it out, or number its values from 0"
        validate.refuse(name, leaf.dtype.name, rule, remedy)


def _wide() -> bool:
    import jax

    return jax.config.jax_enable_x64  # pyrefly: ignore[missing-attribute]


def unfolded(source: Source) -> tuple[Any, np.ndarray]:
    """Return what a source is a `subset` of, and the indices in it; else all of it."""
    if not isinstance(source, _Subset):
        return source, np.arange(len(source))
    base, indices = unfolded(source._source)
    return base, indices[source._indices]


def gather(source: Source, indices: np.ndarray) -> Any:
    """Return the examples at `indices`, int[n], stacked on a leading axis of n.

    Uses ``source.gather`` where the source has one, and else reads one by one.

    Raises:
        ValueError: an index is not from 0 to the source's length − 1, two examples
            differ in structure, shape or dtype, or ``source.gather`` gives more or
            fewer rows. The message names the leaf, and the index.
    """
    chosen = whole_indices(indices, len(source))
    own = getattr(source, "gather", None)
    if own is not None:
        found = own(chosen)
        for name, leaf in _named_leaves(found):
            if np.shape(leaf)[:1] != (len(chosen),):
                rule = f"must have {len(chosen)} rows, one for each index"
                remedy = "a row fewer would stand for several examples: mend `gather`"
                validate.refuse(name, np.shape(leaf), rule, remedy)
        return found
    if not len(chosen):
        return map_leaves(lambda leaf: np.asarray(leaf)[None][:0], source[0])
    examples = [map_leaves(np.asarray, source[int(index)]) for index in chosen]
    first = _signature(examples[0])
    for index, other in zip(chosen, map(_signature, examples), strict=True):
        for name in first | other:
            wanted, found = first.get(name, "missing"), other.get(name, "missing")
            if found != wanted:
                rule = f"at index {index} must be {wanted}, as at index {chosen[0]}"
                remedy = "all examples of a source have one structure, shape and dtype"
                validate.refuse(name, found, rule, remedy)
    return map_leaves(lambda *leaves: np.stack(leaves), *examples)


def subset(source: Source, indices: np.ndarray | Sequence[int]) -> Source:
    """Return a view of `source` with only the examples at `indices`, in that order.

    Raises:
        ValueError: there are no indices, or one is out of range or appears twice.
    """
    chosen = whole_indices(indices, len(source))
    if not len(chosen):
        validate.refuse("indices", [], "must not be empty")
    values, counts = np.unique(chosen, return_counts=True)
    if counts.max() > 1:
        rule = "appears more than once"
        remedy = "an example that is in the data twice is protected less: list it once"
        validate.refuse("indices", int(values[counts.argmax()]), rule, remedy)
    kind = _StreamedSubset if isinstance(source, StreamedSource) else _Subset
    return kind(source, chosen)


def warn_of_copies(train: Source, test: Source) -> None:
    """Warn of test images that are training images, too, if all are in memory.

    No image is named, and no file of a run holds their number, which no ε covers.
    """
    digests = []
    for source in (train, test):
        base, rows = unfolded(source)
        if train is test or not isinstance(base, ArraySource):
            return
        images = base.tree["image"]
        digests.append(
            [hashlib.blake2b(images[row].tobytes()).digest() for row in rows]
        )
    trained = {*digests[0]}
    if copies := sum(each in trained for each in digests[1]):
        warnings.warn(
            f"{copies} of {len(test)} test images are identical to training images, so "
            "what is measured on them is too good: take them out",
            stacklevel=3,
        )


def check_index(index: int, length: int) -> None:
    """Raise `IndexError` outside 0 … length − 1; negative indices are refused too."""
    # IndexError, not ValueError: it is how Python's iteration finds the end.
    if not 0 <= index < length:
        raise IndexError(f"index (={index}) must be from 0 to {length - 1}")


def whole_indices(indices: Any, length: int) -> np.ndarray:
    """Return `indices` as int64[n]; refuse numbers outside 0 … `length` − 1."""
    chosen = np.asarray(indices)
    if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
        validate.refuse("indices", _shaped(chosen), "must be one row of whole numbers")
    outside = chosen[(chosen < 0) | (chosen >= length)]
    if outside.size:
        validate.refuse("indices", int(outside[0]), f"must be from 0 to {length - 1}")
    return chosen.astype(np.int64, copy=False)


def _is_plain(tree: Any) -> bool:
    # A dict of arrays needs no JAX, whose import takes a reading process a second.
    return type(tree) is dict and all(
        type(name) is str and isinstance(leaf, np.ndarray | np.generic)
        for name, leaf in tree.items()
    )


def map_leaves(function: Any, *trees: Any) -> Any:
    """Return `jax.tree.map`, without importing JAX for a dict of arrays."""
    if all(map(_is_plain, trees)):
        return {name: function(*(tree[name] for tree in trees)) for name in trees[0]}
    from jax import tree_util

    return tree_util.tree_map(function, *trees)


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    if _is_plain(tree):
        return [(f"data[{name!r}]", tree[name]) for name in sorted(tree)]
    from jax import tree_util

    leaves = tree_util.tree_leaves_with_path(tree)
    return [(f"data{tree_util.keystr(path)}", leaf) for path, leaf in leaves]


def _common_length(tree: Any) -> int:
    leaves = _named_leaves(tree)
    if not leaves:
        validate.refuse("data", tree, "has no arrays")
    for name, leaf in leaves:
        if leaf.dtype.names is not None:
            remedy = "give its fields: {name: array[name] for name in "
            remedy += "array.dtype.names}"
            validate.refuse(name, "structured array", "must have one dtype", remedy)
        if leaf.dtype.kind in _REFUSED_KINDS:
            remedy = "give rows of one shape and one numeric dtype; number texts with "
            remedy += "numpy.unique(texts, return_inverse=True)[1]"
            rule = "must be an array of numbers"
            validate.refuse(name, leaf.dtype.name, rule, remedy)
        if leaf.ndim == 0:
            remedy = "pass arrays that hold all examples, not a list of examples"
            rule = "must have a leading axis over the examples"
            validate.refuse(name, _shaped(leaf), rule, remedy)
    first, length = leaves[0][0], len(leaves[0][1])
    for name, leaf in leaves:
        if len(leaf) == 0:
            validate.refuse(name, leaf.shape, "has no examples")
        if len(leaf) != length:
            rule = f"must have as many rows as {first}, {length}"
            validate.refuse(name, leaf.shape, rule)
    return length


def _signature(example: Any) -> dict[str, str]:
    return {name: _shaped(leaf) for name, leaf in _named_leaves(example)}


def _shaped(leaf: np.ndarray) -> str:
    return f"{leaf.dtype.name}{list(leaf.shape)}"
