"""JAX random keys grown from a run's secret seed.

`jax.random.key(number)` uses 32 bits of its argument, which can be searched; these
keys take all 64 bits that Threefry has, and differ by purpose and position.
"""

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Int, Key, UInt32

from tanager import _validate as validate
from tanager.seed import Seed


_KEY_BYTES = 8


def derive_keys(
    seed: Seed, purpose: str, *position: int, count: int = 1
) -> Key[Array, " count"]:
    """Return `count` independent keys for this purpose and position."""
    return from_words(key_words(seed, purpose, *position, count=count))


def key_words(
    seed: Seed, purpose: str, *position: int, count: int = 1
) -> UInt32[np.ndarray, "count 2"]:
    """Return what those keys are made of: for many runs, without as many arrays."""
    keys = [seed.derive(purpose, *position, n, size=_KEY_BYTES) for n in range(count)]
    return np.frombuffer(b"".join(keys), np.uint32).reshape(count, 2)


def from_words(words: UInt32[ArrayLike, "*shape 2"]) -> Key[Array, "*shape"]:
    """Return the keys made of these words."""
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


@jax.transfer_guard("allow")
def example_keys(
    seed: Seed, step: int, indices: Int[ArrayLike, " b"], view: int = 0
) -> Key[Array, " b"]:
    """Return a key for each example, for a loss that takes one.

    It depends on the seed, the step, the number of the example in the data, the view
    and JAX's `jax_threefry_partitionable`, and neither on the physical batch nor on a
    resume. In a run of `tanager.train`, the loss is given the same keys.

    Args:
        seed: the run's secret.
        step: from 0.
        indices: numbers of examples, from `PhysicalBatch.indices`.
        view: which of the example's views, from 0.

    Raises:
        ValueError: `seed` is of another kind, or a number is out of range.
    """
    remedy = "tanager.Seed.from_os(), or that of the run; a JAX key is not a seed"
    validate.instance(Seed, remedy, seed=seed)
    validate.whole(step=np.asarray(step).tolist(), view=view, at_least=0)
    numbers = indices if isinstance(indices, jax.Array) else np.asarray(indices)
    if not jnp.issubdtype(numbers.dtype, jnp.integer):
        remedy = "1.0 and 1.5 would be given one key"
        validate.refuse("indices", indices, "must be whole numbers", remedy)
    if numbers.ndim != 1:
        rule = "must have one axis, a number for each example"
        validate.refuse("indices", indices, rule)
    known = not isinstance(numbers, Tracer)
    if known and not all(0 <= number < 2**31 for number in numbers.tolist()):
        remedy = "1 and 2³² + 1 would be given one key"
        validate.refuse("indices", indices, "must be at least 0 and below 2³¹", remedy)
    (key,) = derive_keys(seed, "augmentation", step)

    def one(index: Array) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(key, index), view)
        return jax.random.split(own)[1]  # the first is that of the augmentation

    return jax.vmap(one)(jnp.asarray(numbers))


def is_key(leaf: Any) -> TypeGuard[Array]:
    """Return whether a leaf of a pytree is a JAX key with a type (`jax.random.key`)."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
