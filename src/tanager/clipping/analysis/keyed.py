"""Losses that take a random key for each example: for dropout and other noise.

A third argument that is called `key` says so, with a default or without:

    def loss(params, example, key=None): ...

`functools.partial(loss, key=...)` gives a key to all examples, and takes none.
The key travels with the example, so that nothing else need know of it.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree

from tanager import _validate as validate


_OPEN = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class Keyed(NamedTuple):
    """An example, or a batch of them, and the words of its keys, uint32[..., 2]."""

    example: PyTree
    words: Array


def takes_key(loss: Callable) -> bool:
    """Return whether a loss takes a key for each example.

    Raises:
        ValueError: `loss` is not a function of (params, example) or of (params,
            example, key).
    """
    if not callable(loss):
        rule = "must be a function of (params, example)"
        validate.refuse_type("loss", loss, rule, "it returns a scalar")
    try:
        parameters = _parameters(loss)
    except (TypeError, ValueError):
        return False
    any_number = any(it.kind is it.VAR_POSITIONAL for it in parameters)
    parameters = [it for it in parameters if it.kind not in _OPEN]
    places = [it.name for it in parameters if it.kind is not it.KEYWORD_ONLY]
    names = [it.name for it in parameters]
    keyed = places[2:3] == ["key"]
    unset = [it.name for it in parameters if it.default is it.empty]
    others = set(unset) - set(places[:2]) - {"key"}
    elsewhere = "key" in names and not ("key" in places[:3] or _bound(loss))
    if elsewhere:
        raise ValueError(
            "loss takes key in another place, and must take it third, by position: "
            "(params, example, key, …); functools.partial(loss, key=None) takes none"
        )
    if others or not (any_number or len(places) >= 2):
        needed = [name for name in names if name in unset or name == "key"]
        raise ValueError(
            f"loss takes ({', '.join(needed)}), and must take (params, example) or "
            "(params, example, key) by position: call a random key `key`, and put all "
            "that belongs to an example into one tuple or dict"
        )
    return keyed


def _parameters(loss: Any) -> list[inspect.Parameter]:
    """Return the parameters of a loss, or of what it wraps if it takes any."""
    while hasattr(loss, "__wrapped__"):
        own: list[inspect.Parameter] = []
        with contextlib.suppress(TypeError, ValueError):
            found = inspect.signature(loss, follow_wrapped=False)
            own = list(found.parameters.values())
        if own and not any(it.kind in _OPEN for it in own):
            return own
        loss = loss.__wrapped__
    return list(inspect.signature(loss).parameters.values())


def _bound(loss: Callable) -> bool:
    """Whether a `functools.partial`, perhaps compiled, has bound the key."""
    loss = inspect.unwrap(loss)
    return isinstance(loss, functools.partial) and "key" in loss.keywords


def given_key(loss: Callable) -> Callable[[Any, Any], Any]:
    """Return a loss of parameters and a `Keyed` example.

    An example without a key, as for a score, is given one that is always the same.
    """

    def of_example(params: Any, example: Any) -> Any:
        if not isinstance(example, Keyed):
            example = Keyed(example, jax.numpy.zeros(2, jax.numpy.uint32))
        key = jax.random.wrap_key_data(example.words, impl="threefry2x32")
        return loss(params, example.example, key)

    return of_example


def keyed_views(augment: Callable[[Array, Any], Any] | None) -> Callable:
    """Return an augmentation whose views are `Keyed`, each with a key of its own."""

    def view(key: Array, example: Any) -> Keyed:
        first, second = jax.random.split(key)
        seen = example if augment is None else augment(first, example)
        return Keyed(seen, jax.random.key_data(second))

    return view


def words_of(keys: Any, rows: int) -> Array:
    """Return the words of one key a row; refuse other keys than Threefry's."""
    each = f"one threefry key for each of the {rows} rows"
    remedy = (
        f"tanager.example_keys(seed, step, indices), or jax.random.split(key, {rows})"
    )
    if not isinstance(keys, jax.Array | np.ndarray):
        validate.refuse_type("keys", keys, f"must be {each}", remedy)
    if jax.numpy.issubdtype(keys.dtype, jax.dtypes.prng_key):
        keys = jax.random.key_data(keys)
    words = jax.numpy.asarray(keys)
    if words.shape == (2,):
        raise ValueError(f"keys (=one key) must be {each}: {remedy}")
    if words.shape != (rows, 2) or words.dtype != jax.numpy.uint32:
        validate.refuse("keys", words, f"must be {each}", remedy)
    return words
