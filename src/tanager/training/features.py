"""Features of a frozen model, computed once: what the layers after it are trained on.

Without augmentation every step would push the same images through the same frozen
layers. Here they go through once, into a file that later runs read instead.
"""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Array, PyTree
from numpy.typing import DTypeLike

from tanager import _npy
from tanager import _validate as validate
from tanager._files import locking, make_folder, write_json
from tanager._reading import reading, refuse_file
from tanager._record import read_record
from tanager._text import in_bytes
from tanager.clipping.analysis.refusals import check_alone
from tanager.compiling import jit
from tanager.data import ArraySource, Source, as_source, gather
from tanager.sampling import pack
from tanager.training import fingerprint


_SAVE_SECONDS = 5.0
_LOOK_SECONDS = 1.0


def cache_features(
    features: Callable[[PyTree, Any], Array],
    model: PyTree,
    data: Any,
    folder: str | Path,
    *,
    physical_batch_size: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ArraySource:
    """Compute the features of every example, or read those that are there.

    The folder also holds fingerprints of the weights, the function and the data. A pass
    that was interrupted resumes where it stopped. Of several processes, one computes
    and the others wait. Features of private examples are as private as the examples:
    only its owner can read the folder.

    Args:
        features: ``features(model, example) -> float[...]`` for ONE example, whatever
            other examples there are.
        model: pytree of arrays, or an Equinox module.
        data: examples ``{"label": ..., ...}``: a source or arrays in memory.
        folder: where to keep them; made if it is not there.
        physical_batch_size: examples computed on at once; None for 8 on a CPU, whose
            caches hold what a network makes of them, and 256 elsewhere.
        progress: called with (examples done, all examples).

    Returns:
        Examples ``{"features": float32[...], "label": int32[...]}``, in the order of
        `data`, labels in the shape they have there; features are read from disk when
        they are needed.

    Raises:
        ValueError: `features` could mix examples, as a loss that `clipped_grad` refuses
            could; the folder holds features of other weights, data or of another
            function; or the disk is too full.
    """
    if physical_batch_size is None:
        physical_batch_size = 8 if jax.default_backend() == "cpu" else 256
    validate.whole(physical_batch_size=physical_batch_size, at_least=1)
    source, place = as_source(data), Path(folder)
    examples = len(source)
    one = jax.tree.map(lambda leaf: leaf[0], gather(source, np.zeros(1, np.int64)))
    arrays, static = eqx.partition(model, eqx.is_array)

    def of_example(arrays: PyTree, example: Any) -> Array:
        return features(eqx.combine(arrays, static), example).astype(jnp.float32)

    found = check_alone(of_example, "features", arrays, one)
    shape = (examples, *found.shape)
    made_of = {
        "function": fingerprint.computation(of_example, arrays, one).hex(),
        "weights": fingerprint.contents(arrays).hex(),
        "data": fingerprint.sample(source).hex(),
        "shape": list(shape),
    }
    of_labels = (examples, *np.shape(one["label"]))
    compute = jit(jax.vmap(of_example, (None, 0)))
    make_folder(place, "features", 0o700)
    with _alone(place, lambda done: progress(done, examples)):
        done = _begin(place, made_of, of_labels)
        values = _opened(place / "features.npy", shape, np.float32, "r+")
        labels = _opened(place / "labels.npy", of_labels, np.int32, "r+")
        saved = time.monotonic()
        progress(done, examples)
        size = min(physical_batch_size, examples)
        batches = pack(np.arange(done, examples), size)
        for rows, labelled, found in _ahead(compute, arrays, source, batches):
            values[rows] = found
            labels[rows] = labelled
            done += len(rows)
            progress(done, examples)
            if time.monotonic() - saved > _SAVE_SECONDS or done == examples:
                values.flush()
                labels.flush()
                write_json(place / "features.json", {**made_of, "done": done})
                saved = time.monotonic()
    return ArraySource(
        {
            "features": _opened(place / "features.npy", shape, np.float32, "r"),
            "label": np.array(labels),
        }
    )


def _ahead(
    compute: Callable[[PyTree, Any], Array],
    arrays: PyTree,
    source: Source,
    batches: Iterator[tuple[Any, np.ndarray, np.ndarray]],
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Give rows, their labels and features, while the next examples are being read."""
    read = ((mask, indices, gather(source, indices)) for _, mask, indices in batches)
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, read, None)
        while (found := coming.result()) is not None:
            coming = reader.submit(next, read, None)
            mask, indices, batch = found
            made = np.asarray(compute(arrays, batch))
            yield indices[mask], np.asarray(batch["label"])[mask], made[mask]


@contextlib.contextmanager
def _alone(place: Path, progress: Callable[[int], None]) -> Iterator[None]:
    """Wait until no other process computes there; show how far that one is."""
    lock = FileLock(place / "features.lock", fallback_to_soft=False)
    while not lock.is_locked:
        with contextlib.suppress(Timeout), locking(place):
            lock.acquire(timeout=_LOOK_SECONDS)
        if not lock.is_locked and (record := place / "features.json").exists():
            progress(read_record(record, {"done": int}, "delete the folder")["done"])
    try:
        yield
    finally:
        lock.release()


def _begin(place: Path, made_of: dict[str, Any], of_labels: tuple[int, ...]) -> int:
    """Make the files, or check whose they are; return how many examples are done."""
    record = place / "features.json"
    if record.exists():
        found = read_record(record, {"done": int}, "delete the folder")
        differ = [name for name in made_of if found.get(name) != made_of[name]]
        if differ:
            rule = f"holds features of another {', '.join(differ)}"
            remedy = "delete the folder, or give another --features or --out"
            validate.refuse("features", str(place), rule, remedy)
        if found["done"] > made_of["shape"][0]:
            refuse_file(record, "records too many examples", "delete the folder")
        return found["done"]
    shape = tuple(made_of["shape"])
    os.chmod(place, 0o700)
    needed = 4 * (math.prod(shape) + math.prod(of_labels))
    free = shutil.disk_usage(place).free
    if needed > free:
        rule = f"needs {in_bytes(needed)}, and {in_bytes(free)} are free"
        remedy = "name a folder on another disk (--features)"
        validate.refuse("features", str(place), rule, remedy)
    new = np.lib.format.open_memmap
    new(place / "features.npy", "w+", np.float32, shape).flush()
    new(place / "labels.npy", "w+", np.int32, of_labels).flush()
    write_json(record, {**made_of, "done": 0})
    return 0


def _opened(
    file: Path, shape: tuple[int, ...], dtype: DTypeLike, mode: Literal["r", "r+"]
) -> np.memmap:
    """Map an array of ours, which must have this shape and dtype."""
    with reading(file, remedy="delete the folder"), open(file, "rb") as stream:
        header = _npy.read_header(stream)
        if header != (shape, False, np.dtype(dtype)):
            raise ValueError(f"it holds {header.dtype}{list(header.shape)}")
        return np.memmap(file, dtype, mode, stream.tell(), shape)
