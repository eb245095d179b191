"""JAX random keys grown from a run's secret seed.

`jax.random.key(number)` uses 32 bits of its argument, which can be searched; these
keys take all 64 bits that Threefry has, and differ by purpose and position.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from tanager.seed import Seed


_KEY_BYTES = 8


def derive_keys(
    seed: Seed, purpose: str, *position: int, count: int = 1
) -> Key[Array, " count"]:
    """Return `count` independent keys for this purpose and position."""
    words = [
        np.frombuffer(seed.derive(purpose, *position, n, size=_KEY_BYTES), np.uint32)
        for n in range(count)
    ]
    return jax.random.wrap_key_data(jnp.asarray(np.stack(words)), impl="threefry2x32")
