"""A trained model in use: `load` it, and `predict`.

model = tanager.load("runs/1")
model.predict("photo.jpg")
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, PyTree

from tanager import _validate as validate
from tanager.compiling import filter_jit
from tanager.data.preprocessing import Preprocessing
from tanager.keys import is_key
from tanager.models import weights as files
from tanager.models.exported import (
    describe,
    load_pretrained,
    preprocessing_in,
    weights_of,
)
from tanager.training.precision import computing, image_dtype
from tanager.training.targets import TARGETS


Code = tuple[PyTree, Callable[[Any, Any], Any]]
"""Parameters like those that were trained, and ``predict(params, array)``."""

Examples = Sequence[Any] | np.ndarray
BATCH_SIZE = 64


class Model:
    """A trained model that predicts classes; `load` returns one.

    A prediction is a plain dictionary:

    =================  ===============================================================
    ``class``          name of the most probable class; with any number of labels: a
                       list of those with a probability of 0.5 or more
    ``probability``    its probability, from 0 to 1; of labels, the largest
    ``probabilities``  probability by class name; the sum is 1, except of labels. With
                       ``top``, only the most probable classes, in that order
    =================  ===============================================================

    Attributes:
        classes: their names, in the order of the logits. Without names they are
            numbers from 0, known after the first prediction.
        preprocessing: from an image to what the network takes; None where examples are
            features, or arrays that code of your own takes as they are.
        config: all of config.json of the run or the export.
        multi_label: whether an example has any number of the classes, called labels.
    """

    def __init__(
        self,
        code: Code,
        classes: Sequence[str] | None,
        preprocessing: Preprocessing | None,
        config: Mapping[str, Any],
        precision: str = "float32",
        multi_label: bool = False,
    ):
        self.classes = tuple(classes or ())
        self.preprocessing = preprocessing
        self.config = config
        self.multi_label = multi_label
        self._params, predict = code
        self._precision = precision

        def logits(params: PyTree, examples: Any) -> jax.Array:
            def one(example: Any) -> jax.Array:
                if preprocessing is not None:
                    example = preprocessing(example).astype(image_dtype(precision))
                return predict(params, example).astype(jnp.float32)

            return jax.vmap(one)(examples)

        self._logits = filter_jit(logits)

    def predict(
        self, examples: Any, *, top: int | None = None, batch_size: int = BATCH_SIZE
    ) -> Any:
        """Predict the class of one image, or of many.

        Args:
            examples: an image: its path, its bytes, a Pillow image, or an array (see
                `tanager.data.given`). Or many: a list of these, or an array
                `[n, H, W, C]`. For a model of features: `[d]` or `[n, d]`.
            top: how many classes are in ``probabilities``; None for all of them.
            batch_size: examples computed at once.

        Returns:
            A dictionary (see `Model`) for one image, a list of them for many.

        Raises:
            ValueError: an image cannot be read; the message names it.
        """
        if self._is_one(examples):
            return self.described(self.logits([examples])[0], top)
        rows = self.logits(examples, batch_size)
        return [self.described(row, top) for row in rows]

    def logits(
        self, examples: Examples, batch_size: int = BATCH_SIZE
    ) -> Float32[np.ndarray, "n classes"]:
        """Return the logits of many examples; `predict` says what these may be.

        Raises:
            ValueError: an image cannot be read; the message names it.
        """
        rows = []
        for each in self.each(examples, batch_size):
            if isinstance(each, ValueError):
                raise each
            rows.append(each)
        return np.array(rows).reshape(len(rows), len(self.classes))

    def each(
        self, examples: Examples, batch_size: int = BATCH_SIZE
    ) -> Iterator[Float32[np.ndarray, " classes"] | ValueError]:
        """Yield the logits of each example in turn; an error where it cannot be read.

        Files are decoded in threads while the devices compute. Batches have one shape.
        """
        validate.whole(batch_size=batch_size, at_least=1)
        if isinstance(examples, Mapping) or not hasattr(examples, "__len__"):
            rule = "must be many images or arrays, in a list or array"
            remedy = "code of your own is given arrays: predict(params, array)"
            validate.refuse_type("examples", examples, rule, remedy)
        count = len(examples)
        size = min(batch_size, 1 << max(0, count - 1).bit_length())
        parts = [examples[start : start + size] for start in range(0, count, size)]
        with ThreadPoolExecutor() as pool:
            ahead = pool.map(self._read, parts[0]) if parts else ()
            for number in range(len(parts)):
                read = list(ahead)
                if number + 1 < count / size:
                    ahead = pool.map(self._read, parts[number + 1])
                good = [one for one in read if not isinstance(one, ValueError)]
                rows = iter(self._computed(good, size))
                for one in read:
                    yield one if isinstance(one, ValueError) else next(rows)

    def described(self, logits: np.ndarray, top: int | None = None) -> dict[str, Any]:
        """Return the prediction, a dictionary, that logits stand for."""
        if top is not None:
            validate.whole(top=top, at_least=1)
        target = TARGETS[self.multi_label]
        values = target.probabilities(logits)
        order = np.argsort(-values, kind="stable")
        shown = range(len(values)) if top is None else order[:top]
        return {
            "class": target.answer(values, self.classes),
            "probability": float(values[order[0]]),
            "probabilities": {self.classes[k]: float(values[k]) for k in shown},
        }

    def _is_one(self, examples: Any) -> bool:
        axes = len(getattr(examples, "shape", ()))
        if isinstance(examples, list | tuple):
            return False
        return axes == 1 if self.preprocessing is None else axes != 4

    def _read(self, example: Any) -> np.ndarray | ValueError:
        try:
            if self.preprocessing is not None:
                return self.preprocessing.read(example)
            return _as_array(example)
        except ValueError as error:
            return error

    def _computed(self, rows: Sequence[np.ndarray], size: int) -> np.ndarray:
        """Return the logits of up to `size` examples, computed as a batch of `size`."""
        if not rows:
            return np.zeros((0, 0), np.float32)
        dtype = np.result_type(*{row.dtype for row in rows})
        batch = np.zeros((size, *rows[0].shape), dtype)
        for number, row in enumerate(rows):
            if row.shape != rows[0].shape:
                rule = f"must have the shape of the first, {list(rows[0].shape)}"
                validate.refuse("example", list(row.shape), rule)
            batch[number] = row
        with computing(self._precision):
            found = np.asarray(self._logits(self._params, batch))[: len(rows)]
        if not self.classes and found.ndim == 2:
            self.classes = tuple(map(str, range(found.shape[1])))
        if found.shape[1:] != (len(self.classes),):
            rule = f"must return one logit for each of {len(self.classes)} classes"
            validate.refuse("predict", f"logits {list(found.shape[1:])}", rule)
        return found


def load(
    source: str | os.PathLike[str],
    *,
    weights: str = "average",
    code: Code | None = None,
    classes: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
) -> Model:
    """Load a trained model to predict with: a run's folder, or an exported model.

    Args:
        source: the folder of a finished run or of an export, or ``hf:OWNER/NAME``.
        weights: of a run: the ``"average"`` of the parameters, or the ``"last"`` ones.
        code: for a model that is not one of tanager's: ``(params, predict)``, with
            parameters like those that were trained and ``predict(params, array) ->
            logits`` for the array of one example, which need not be the function that
            evaluated in training. It is never taken from a file: a model runs no code
            that you did not give.
        classes: names for `code`; by default those that config.json records.
        preprocessing: of images for `code`; by default what config.json records. None,
            and none recorded: `predict` is given arrays as they are.

    Raises:
        ValueError: there is no such model, a run is not finished, a file is damaged, or
            `code` is not a pair, or has other weights.
        OSError: a file on the Hub cannot be downloaded.
    """
    path, config, ours = describe(source)
    precision = ours.get("precision") or "float32"
    several = bool(ours.get("multi_label"))
    if code is None:
        for name, value in (("classes", classes), ("preprocessing", preprocessing)):
            if value is not None:
                rule = "is recorded with a model of tanager's"
                validate.refuse(name, value, rule, "leave it out")
        found = load_pretrained(source, weights=weights)
        own = found.model, _called
        seen = found.preprocessing
        return Model(own, found.classes, seen, config, precision, several)
    if not (isinstance(code, tuple) and len(code) == 2 and callable(code[1])):
        rule = "must be (params, predict)"
        validate.refuse_type("code", code, rule, "a pytree and a function")
    params, predict = code
    if preprocessing is None and ours.get("preprocessing"):
        preprocessing = preprocessing_in(path, ours["preprocessing"], None)
    # Keys, such as those of dropout, are no weights.
    tensors = eqx.filter(params, is_key, inverse=True)
    loaded = files.load(tensors, weights_of(source, config, weights))
    params = eqx.combine(loaded, params)
    names = classes or ours.get("classes")
    both = (params, predict)
    return Model(both, names, preprocessing, config, multi_label=several)


def _called(model: Any, example: jax.Array) -> jax.Array:
    floating = jnp.issubdtype(example.dtype, jnp.floating)
    return model(example if floating else example.astype(jnp.float32))


def _as_array(example: Any) -> np.ndarray:
    array = np.asarray(example)
    if array.dtype.kind not in "fiub":
        rule = "must be numbers: this model takes features, not images"
        validate.refuse_type("example", example, rule)
    return array.astype(np.float32) if array.dtype.kind == "f" else array
