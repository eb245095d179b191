"""Batch norm of every framework: refused in training, held fixed in inference.

In training mode a batch norm mixes examples. Called on one example, it would take the
statistics of that example without a word, so its calls are watched while the loss is
traced (`watching`). In inference mode it is a fixed map of one example. Its running
statistics are not trained, nor is other state of a layer (`held_fixed`).
"""

import contextlib
import functools
import inspect
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from jax.core import Tracer
from jaxtyping import PyTree


_MOVING_AVERAGE = {"average", "counter", "hidden"}
"""The state of Haiku's `ExponentialMovingAverage`."""

_FRAMEWORKS = ("contextlib", "equinox", "flax", "functools", "haiku", "jax", "keras")

_FRESH = jax.make_user_context(None)
"""Part of the key of JAX's caches: what was traced before is traced again."""

_LOCK = threading.RLock()

Leaves = list[Any]
Check = Callable[[Any, Mapping[str, Any], Leaves, Leaves], tuple[str, str] | None]
"""From a layer, the arguments of its call, and the leaves that are trained and fixed.

It returns what is wrong with the call, and what mends it.
"""


class RefusedLayer(ValueError):
    """A layer is called as it must not be in a loss of one example."""

    _keras_call_info_injected = True  # or Keras puts its own words around the message


_COLLECTIONS = ("batch_stats", "_overwrite_with_gradient")
"""Of linen: running statistics, and scales of 8 bits, whose "gradient" is what they
should be next.
"""


def held_fixed(params: PyTree) -> PyTree:
    """Return a pytree of booleans like `params`: True where a leaf is never trained.

    That is what an NNX module holds other than `nnx.Param`; linen's `_COLLECTIONS`;
    Haiku's moving averages; and Equinox's `State`.
    """

    def of_node(path: tuple[Any, ...], node: Any) -> PyTree:
        collection = any(getattr(key, "key", None) in _COLLECTIONS for key in path)
        held = collection or _is_state(node)
        return jax.tree.map(lambda _: held, node)

    return jax.tree_util.tree_map_with_path(of_node, params, is_leaf=_is_state)


def refuse_shared(params: PyTree) -> None:
    """Refuse an NNX module with one variable in two places: a pytree has two of it.

    Raises:
        ValueError: that is so.
    """
    if "flax.nnx" not in sys.modules:
        return
    first: dict[int, Any] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable):
        if _is_variable(node) and first.setdefault(id(node), path) is not path:
            one, other = map(jax.tree_util.keystr, (first[id(node)], path))
            raise ValueError(
                f"params{one} and params{other} are one variable, which would be "
                "trained as two: write graph, state = nnx.split(module), give state as "
                "params, and begin the loss with nnx.merge(graph, state, copy=True)"
            )


def _is_variable(node: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)


def _is_state(node: Any) -> bool:
    if _is_variable(node):
        return not isinstance(node, sys.modules["flax.nnx"].Param)
    if isinstance(node, Mapping):
        return set(node) == _MOVING_AVERAGE
    return isinstance(node, eqx.nn.State | eqx.nn.StateIndex)


@contextlib.contextmanager
def watching(trained: PyTree, fixed: PyTree) -> Iterator[None]:
    """Refuse, in this thread, calls of layers that a loss must not make.

    Raises:
        RefusedLayer: a batch norm is called in training mode, or with statistics that
            are trained; a spectral norm is called in training mode; or a dropout of
            NNX draws the same numbers in every step.
    """
    leaves = jax.tree.leaves(trained), jax.tree.leaves(fixed)
    with _LOCK, contextlib.ExitStack() as stack:
        for (module, name), check in _CHECKS.items():
            layer = getattr(sys.modules.get(module), name, None)
            if layer is not None:
                method = "call" if module == "keras.layers" else "__call__"
                call = getattr(layer, method)
                stack.callback(setattr, layer, method, call)
                watched = _checked(f"{module}.{name}", call, check, leaves)
                setattr(layer, method, watched)
        with _FRESH(object()):
            yield


def _checked(
    name: str, call: Callable, check: Check, leaves: tuple[Leaves, Leaves]
) -> Callable:
    """Return the method that calls a layer, with a check before it."""
    watched = threading.get_ident()
    signature = inspect.signature(call)

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == watched:
            given = signature.bind(self, *args, **kwargs).arguments
            if wrong := check(self, given, *leaves):
                what, mend = wrong
                raise RefusedLayer(f"loss calls {name} {what} ({_place()}): {mend}")
        return call(self, *args, **kwargs)

    return checked


def _place() -> str:
    """Return the line of the loss, or of its model, that calls the layer."""
    frame = sys._getframe(2)
    while frame.f_back and _library(frame) in _FRAMEWORKS:
        frame = frame.f_back
    code = frame.f_code
    line = traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name).line
    return f"{Path(code.co_filename).name}, line {frame.f_lineno}: {line}".rstrip(": ")


def _library(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "").split(".")[0]


def _mode(flag: str, mend: str, statistics: Callable = lambda layer: ()) -> Check:
    """Return the check of a layer that is in inference mode where `flag` says so.

    `flag` is an argument of the call, or else an attribute of the layer.
    """

    def check(
        layer: Any, given: Mapping[str, Any], trained: Leaves, fixed: Leaves
    ) -> tuple[str, str] | None:
        told = given.get(flag)
        inference = getattr(layer, flag, None) if told is None else told
        if flag == "is_training":
            inference = not (told or given.get("test_local_stats"))
        elif flag == "training":
            inference = not (told and layer.trainable)
        if inference is not None and not inference:
            what = "in training mode, which mixes the examples of a batch"
            return what, f"{mend}, or use group or layer normalisation"
        if any(_among(leaf, trained) for leaf in jax.tree.leaves(statistics(layer))):
            return (
                "with running statistics that would be trained as parameters",
                'leave them out of params, name them "batch_stats" there, or give '
                "trainable=… with False in their place",
            )
        return None

    return check


def _spectral_norm(
    layer: Any, given: Mapping[str, Any], trained: Leaves, fixed: Leaves
) -> tuple[str, str] | None:
    """Check a spectral norm of Equinox: in training mode it changes its state."""
    told = given.get("inference")
    if layer.inference if told is None else told:
        return None
    return (
        "in training mode, which updates its power iterations: a loss cannot return "
        "the new ones",
        "call equinox.nn.inference_mode(model) first",
    )


def _dropout(
    layer: Any, given: Mapping[str, Any], trained: Leaves, fixed: Leaves
) -> tuple[str, str] | None:
    """Check a dropout of NNX: a key that no example gave is a constant."""
    told = given.get("deterministic")
    deterministic = layer.deterministic if told is None else told
    if deterministic or layer.rate == 0 or not layer.rngs or given.get("rngs"):
        return None
    key = layer.rngs.key.get_value()
    if isinstance(key, Tracer) and not _among(key, fixed):
        return None
    return (
        "with a key that never changes: all examples get the same mask in every step",
        "call model.eval() first, or begin the loss with model = nnx.clone(model); "
        f"nnx.reseed(model, {layer.rngs.tag}=key), where key is of the example",
    )


def _keras_noise(
    layer: Any, given: Mapping[str, Any], trained: Leaves, fixed: Leaves
) -> tuple[str, str] | None:
    """Check a dropout or noise of Keras: a seed that no example gave is a constant."""
    generator = getattr(layer, "seed_generator", None)  # none where nothing is drawn
    if generator is None or not given.get("training"):
        return None
    seed = generator.state.value
    if isinstance(seed, Tracer) and not _among(seed, fixed):
        return None
    return (
        "with a seed that never changes: all examples get the same draw in every step",
        "call the model with training=False, or give stateless_call a seed state that "
        "is made of a key of the example",
    )


def _among(value: Any, leaves: Leaves) -> bool:
    return any(value is leaf for leaf in leaves)


_CHECKS: Mapping[tuple[str, str], Check] = {
    ("equinox.nn", "BatchNorm"): _mode(
        "inference", "call equinox.nn.inference_mode(model) first"
    ),
    ("equinox.nn", "SpectralNorm"): _spectral_norm,
    ("flax.nnx", "BatchNorm"): _mode(
        "use_running_average",
        "call model.eval() first",
        lambda layer: (layer.mean, layer.var),
    ),
    ("flax.linen", "BatchNorm"): _mode(
        "use_running_average",
        "give it use_running_average=True",
        lambda layer: layer.variables.get("batch_stats", {}),
    ),
    ("haiku", "BatchNorm"): _mode("is_training", "call it with is_training=False"),
    ("keras.layers", "BatchNormalization"): _mode(
        "training",
        "call the model with training=False",
        lambda layer: (layer.moving_mean.value, layer.moving_variance.value),
    ),
    ("flax.nnx", "Dropout"): _dropout,
    **{
        ("keras.layers", name): _keras_noise
        for name in (
            "AlphaDropout",
            "Dropout",
            "GaussianDropout",
            "GaussianNoise",
            "SpatialDropout1D",
            "SpatialDropout2D",
            "SpatialDropout3D",
        )
    },
}
