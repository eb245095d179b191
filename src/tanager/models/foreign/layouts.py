"""How the axes (and sometimes the scale) of a tensor differ between libraries."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Layout(NamedTuple):
    """Two functions, each the other's inverse: from their array to ours, and back."""

    to_ours: Callable[[np.ndarray], np.ndarray]
    to_theirs: Callable[[np.ndarray], np.ndarray]


class Foreign(NamedTuple):
    """The tensors of another library that make one of ours, and the layout of each.

    Several names are equally large parts along our last axis.
    """

    names: tuple[str, ...]
    layout: Layout

    def to_ours(self, theirs: Sequence[np.ndarray]) -> np.ndarray:
        """Return our array from theirs, in the order of `names`."""
        parts = [self.layout.to_ours(array) for array in theirs]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)

    def to_theirs(self, ours: np.ndarray) -> list[np.ndarray]:
        """Return their arrays from ours, in the order of `names`."""
        count = len(self.names)
        parts = [ours] if count == 1 else np.split(ours, count, axis=-1)
        return [self.layout.to_theirs(part) for part in parts]


Table = Mapping[str, Foreign]
"""From the name of our tensor to theirs; no tensor, ours or theirs, occurs twice."""


def _permuted(*axes: int) -> Layout:
    back = tuple(int(axis) for axis in np.argsort(axes))
    return Layout(lambda a: np.transpose(a, axes), lambda a: np.transpose(a, back))


def _without(*axes: int) -> Layout:
    """Axes of length 1 that only they have."""
    return Layout(lambda a: np.squeeze(a, axes), lambda a: np.expand_dims(a, axes))


SAME = Layout(lambda a: a, lambda a: a)
LINEAR = _permuted(1, 0)
"""Theirs [out, in]."""
CONV = _permuted(2, 3, 1, 0)
"""Theirs [out, in, height, width]; ours [height, width, in, out]."""
FIRST_AXIS = _without(0)
"""Theirs [1, …]."""
FIRST_TWO_AXES = _without(0, 1)
"""Theirs [1, 1, …]."""
GAIN = _without(1, 2, 3)
"""Theirs [out, 1, 1, 1]."""
POINTWISE = Layout(
    lambda a: LINEAR.to_ours(np.squeeze(a, (2, 3))),
    lambda a: np.expand_dims(LINEAR.to_theirs(a), (2, 3)),
)
"""Theirs [out, in, 1, 1], a convolution; ours [in, out]."""


def scaled(layout: Layout, factor: float) -> Layout:
    """Return a layout in which ours is also `factor` times theirs."""
    return Layout(
        lambda a: layout.to_ours(a * a.dtype.type(factor)),
        lambda a: layout.to_theirs(a * a.dtype.type(1 / factor)),
    )


_STATISTICS = ("running_mean", "running_var")


def folded(tensors: Mapping[str, np.ndarray], eps: float) -> dict[str, np.ndarray]:
    """Return tensors in which each batch norm is the scale and shift of inference.

    A norm with ``running_mean`` and ``running_var`` keeps ``weight`` and ``bias``:
    γ/sqrt(σ² + eps) and β − μ·γ/sqrt(σ² + eps). Nothing happens to a norm that lacks
    one of the four.
    """
    kept = dict(tensors)
    for name in tensors:
        norm, _, last = name.rpartition(".")
        parts = [f"{norm}.{part}" for part in ("weight", "bias", *_STATISTICS)]
        if last != "running_var" or not all(part in kept for part in parts):
            continue
        shapes = {tensors[part].shape for part in parts}
        if len(shapes) != 1:
            continue
        weight, bias, mean, variance = (np.float64(tensors[part]) for part in parts)
        scale = weight / np.sqrt(variance + eps)
        for part, array in zip(parts, (scale, bias - mean * scale), strict=False):
            kept[part] = array.astype(tensors[part].dtype)
        for part in (*parts[2:], f"{norm}.num_batches_tracked"):
            kept.pop(part, None)
    return kept


def unfolded(
    tensors: Mapping[str, np.ndarray], norms: Iterable[str], eps: float
) -> dict[str, np.ndarray]:
    """Return tensors with running statistics under which `norms` change nothing more.

    A mean of 0 and a variance of 1 − eps: the inverse of `folded`.
    """
    whole = dict(tensors)
    for norm in norms:
        weight = tensors[f"{norm}.weight"]
        whole[f"{norm}.running_mean"] = np.zeros_like(weight)
        whole[f"{norm}.running_var"] = np.full_like(weight, 1 - eps)
        whole[f"{norm}.num_batches_tracked"] = np.zeros((), np.int64)
    return whole
